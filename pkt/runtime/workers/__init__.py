"""The processes of pkt.launch on GPUs: `workers` starts them, `start` and `worker` are their program, `pipe` carries
messages, `carry` turns functions and kernels into bytes, `interrupts` handles Ctrl-C during work that can be cut
short."""
