"""The processes of pkt.launch on GPUs.

| module | holds |
|---|---|
| `workers` | warm processes, one per rank: started, given jobs, ended |
| `worker` | the program that such a process runs |
| `carry` | functions and kernels as bytes |
| `interrupts` | Ctrl-C during work that can be cut short |
"""
