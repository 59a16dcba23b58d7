"""OpenSHMEM names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl

from ._case import LAUNCHES, case, local, put_in, same


@triton.jit
def shmem_kernel(x, y, out, sig, counters, seed, world, HOW: tl.constexpr, N: tl.constexpr):
    """Copy my x into the next PE's y, or the next PE's x into my y, in several blocks."""
    pe = pl.shmem.my_pe(world)
    to = (pe + 1) % pl.shmem.n_pes(world)
    if HOW == "putmem":
        pl.shmem.putmem(y, x, N * 4, to, world, BLOCK=16)
        pl.shmem.barrier_all(counters, world)
    elif HOW == "putmem_nbi":
        pl.shmem.putmem_nbi(y, x, N * 4, to, world, BLOCK=16)
        pl.shmem.quiet()
        pl.shmem.signal_op(sig, seed, pl.shmem.SIGNAL_SET, to, world)
        tl.store(out + N, pl.shmem.signal_wait_until(sig, pl.shmem.CMP_EQ, seed, world))
    elif HOW == "getmem":
        pl.shmem.getmem(y, x, N * 4, to, world, BLOCK=16)
    elif HOW == "getmem_nbi":
        pl.shmem.getmem_nbi(y, x, N * 4, to, world, BLOCK=16)
        pl.shmem.quiet()
        tl.debug_barrier()
    elif HOW == "putmem_signal":
        pl.shmem.putmem_signal(y, x, N * 4, sig, 2, pl.shmem.SIGNAL_ADD, to, world, BLOCK=16)
        tl.store(out + N, pl.shmem.signal_wait_until(sig, pl.shmem.CMP_GE, 2 * seed, world))
    elif HOW == "putmem_signal_nbi":
        pl.shmem.putmem_signal_nbi(y, x, N * 4, sig, seed, pl.shmem.SIGNAL_SET, to, world, BLOCK=16)
        tl.store(out + N, pl.shmem.signal_wait_until(sig, pl.shmem.CMP_NE, seed - 1, world))
    elif HOW == "int_p":
        for i in range(N):
            pl.shmem.int_p(y + i, pe * 100 + seed + i, to, world)
        pl.shmem.fence()
        pl.shmem.sync_all(counters, world)
    elif HOW == "remote_ptr":
        offs = tl.arange(0, N)
        tl.store(pl.shmem.remote_ptr(y, to, world) + offs, tl.load(x + offs))
        pl.shmem.sync_all(counters, world)
    else:
        pl.shmem.broadcast(y, x, N * 4, pl.shmem.n_pes(world) - 1, counters, world, BLOCK=16)
    tl.store(out + tl.arange(0, N), tl.load(y + tl.arange(0, N)))
    pl.shmem.sync_all(counters + 1, world)  # before overwrite


SHMEM = {
    "putmem": (-1, ("putmem", "barrier_all")),
    "putmem_nbi": (-1, ("putmem_nbi", "quiet", "signal_op", "signal_wait_until")),
    "getmem": (1, ("getmem",)),
    "getmem_nbi": (1, ("getmem_nbi", "quiet")),
    "putmem_signal": (-1, ("putmem_signal", "signal_wait_until")),
    "putmem_signal_nbi": (-1, ("putmem_signal_nbi", "signal_wait_until")),
    "int_p": (-1, ("int_p", "fence", "sync_all")),
    "remote_ptr": (-1, ("remote_ptr", "sync_all")),
    "broadcast": (None, ("broadcast",)),
}


def each_shmem(fn: Callable[..., None]) -> Callable[..., None]:
    for how, (_, names) in SHMEM.items():
        case(*(f"shmem.{name}" for name in (*names, "my_pe", "n_pes")), how=how)(fn)
    return fn


@each_shmem
def shmem(world: Any, how: str, n: int = 32) -> None:
    x, y = pkt.empty(n, dtype=torch.int32), pkt.empty(n, dtype=torch.int32)
    sig, counters, out = pkt.signals(1), pkt.signals(3), local(world, n + 1)
    distance = SHMEM[how][0]
    for seed in range(1, LAUNCHES + 2):
        put_in(x, torch.arange(n) + world.rank * 100 + seed, world)
        shmem_kernel[(1,)](x, y, out, sig, counters, seed, world.device, how, n)
        source = world.size - 1 if distance is None else (world.rank + distance) % world.size
        same(world, out[:n], torch.arange(n) + source * 100 + seed)
