"""The kernel in which all ranks meet before a time is taken."""

import triton

import pkt.language as pl


@triton.jit
def gate_kernel(counters, world):  # type: ignore[no-untyped-def]
    pl.world_barrier(counters, world)
