"""The Backend on GPUs.

| module | holds |
|---|---|
| `driver`, `nvml` | the calls of the CUDA driver and of NVML |
| `topology` | which GPUs can work together, found before anything is made |
| `votes` | steps that succeed on all ranks or on none |
| `handles` | memory's file descriptors or fabric handles, sent to other ranks |
| `multicast` | the multicast window |
| `cuda` | CudaBackend, made of all these |
| `watch` | deadlines of waits on the GPU, and lost peers |
"""
