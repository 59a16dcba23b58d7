"""The processes of `pkt.launch`: `workers` starts them, each runs `worker`, `carry` moves functions and results between
them, and `interrupts` is Ctrl-C in what can be cut short."""
