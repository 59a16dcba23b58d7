"""The processes of pkt.launch on GPUs: `workers` starts them, `worker` is their program, `carry` turns functions and
kernels into bytes, `interrupts` handles Ctrl-C during work that can be cut short."""
