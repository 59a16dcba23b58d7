"""Signals and waits."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl

from ._case import PROGRAMS, case, local, put_in, same


@triton.jit
def signals_kernel(flags, out, first, step, world, ALL: tl.constexpr):
    """Each rank sets a counter of the next rank to `first`, then adds `step`, and waits for both."""
    to = (world.rank + 1) % world.size
    if ALL:
        pl.signal_all(flags, world, first)
        tl.store(out, pl.wait(flags, first * world.size, world))
        pl.signal_all(flags, world, step)
        tl.store(out + 1, pl.wait(flags, (first + step) * world.size, world))
    else:
        pl.signal(flags, to, world, first, "set")
        tl.store(out, pl.wait(flags, first, world, "eq"))
        pl.signal(flags + 1, (world.rank + world.size - 1) % world.size, world)  # the previous rank may add now
        pl.wait(flags + 1, 1, world)
        pl.signal(flags, to, world, step)
        tl.store(out + 1, pl.wait(flags, first + step, world))


@case("signal", "wait", first=5, step=3)
@case("signal", "wait", first=2**31 - 2, step=4)
def signals(world: Any, first: int, step: int) -> None:
    """In the second case the counter wraps: 2^31 + 2 is at least 2^31 - 2."""
    flags, out = pkt.signals(2), local(world, 2)
    signals_kernel[(1,)](flags, out, first, step, world.device, False)
    same(world, out, [first, (first + step + 2**31) % 2**32 - 2**31])


@case("signal_all", "wait", first=3, step=4)
def signals_to_all(world: Any, first: int, step: int) -> None:
    flags, out = pkt.signals(2), local(world, 2)
    signals_kernel[(1,)](flags, out, first, step, world.device, True)
    world.synchronize()
    found = out.tolist()
    assert first * world.size <= found[0] <= (first + step) * world.size
    assert found[1] == (first + step) * world.size
    world.barrier()


@triton.jit
def put_signal_kernel(x, y, out, flags, n, launch, world, BLOCK: tl.constexpr):
    """Copy my x into the next rank's y, and add `launch` to its counter; the second one says that y may be written."""
    size = world.size
    pl.put_signal(flags, (world.rank + 1) % size, world, launch, dst=y, src=x, nbytes=n * 4, BLOCK=BLOCK)
    pl.wait(flags, launch * (launch + 1) // 2, world)
    offs = tl.arange(0, BLOCK)
    tl.store(out + offs, tl.load(y + offs))
    pl.signal(flags + 1, (world.rank + size - 1) % size, world)
    pl.wait(flags + 1, launch, world)


@case("put_signal", "wait", "signal")
def put_with_signal(world: Any, n: int = 41, block: int = 64) -> None:
    x, y = pkt.empty(block, dtype=torch.int32), pkt.full((block,), -1, dtype=torch.int32)
    flags, out = pkt.signals(2), local(world, block)
    for launch in range(1, PROGRAMS):
        put_in(x, torch.arange(block) + 100 * world.rank + launch, world)
        put_signal_kernel[(1,)](x, y, out, flags, n, launch, world.device, block)
        row = torch.arange(block) + 100 * ((world.rank - 1) % world.size) + launch
        row[n:] = -1
        same(world, out, row)


@triton.jit
def set_all_kernel(flags, out, value, world):
    if tl.cast(world.rank, tl.int32) == 0:
        pl.signal_all(flags, world, value, "set")
    tl.store(out, pl.wait(flags, value, world, "eq"))


@case("signal_all", "wait")
def set_on_all(world: Any) -> None:
    flags, out = pkt.signals(1), local(world, 1)
    for value in (9, -4):
        set_all_kernel[(1,)](flags, out, value, world.device)
        same(world, out, [value])


@triton.jit
def comparisons_kernel(flags, out, start, world):
    """Wait by every comparison, each on a counter that begins at `start` and that the previous rank changes."""
    to = (world.rank + 1) % world.size
    pl.signal(flags, to, world, 2)
    tl.store(out, pl.wait(flags, start + 2, world, "ge"))
    pl.signal(flags + 1, to, world, 1)
    tl.store(out + 1, pl.wait(flags + 1, start, world, "gt"))
    pl.signal(flags + 2, to, world, -3)
    tl.store(out + 2, pl.wait(flags + 2, start - 3, world, "le"))
    pl.signal(flags + 3, to, world, -1)
    tl.store(out + 3, pl.wait(flags + 3, start, world, "lt"))
    pl.signal(flags + 4, to, world, 17)
    tl.store(out + 4, pl.wait(flags + 4, start + 17, world, "eq"))
    pl.signal(flags + 5, to, world, 4)
    tl.store(out + 5, pl.wait(flags + 5, start, world, "ne"))
    tl.store(out + 6, pl.test(flags, start + 2, world).to(tl.int32))
    tl.store(out + 7, pl.test(flags, start + 3, world).to(tl.int32))
    tl.store(out + 8, pl.test(flags + 1, start + 1, world, "gt").to(tl.int32))
    tl.store(out + 9, pl.test(flags + 2, start - 3, world, "le").to(tl.int32))
    tl.store(out + 10, pl.test(flags + 3, start - 1, world, "lt").to(tl.int32))
    tl.store(out + 11, pl.test(flags + 4, start + 17, world, "eq").to(tl.int32))
    tl.store(out + 12, pl.test(flags + 5, start + 4, world, "ne").to(tl.int32))


@case("wait", "test", "signal", start=0)
@case("wait", "test", "signal", start=2**31 - 1)
@case("wait", "test", "signal", start=-(2**31))
def comparisons(world: Any, start: int) -> None:
    flags, out = pkt.signals(6), local(world, 13)
    put_in(flags, torch.full((6,), start, dtype=torch.int32), world)
    comparisons_kernel[(1,)](flags, out, start, world.device)
    wanted = [(start + d + 2**31) % 2**32 - 2**31 for d in (2, 1, -3, -1, 17, 4)]
    same(world, out, [*wanted, 1, 0, 0, 1, 0, 1, 0])


@triton.jit
def many_waiters_kernel(flags, x, out, world):
    """Program 0 publishes to every program of every rank at once; the others only test and wait."""
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    if pid == 0:
        for r in tl.static_range(world.size):
            pl.store(x + rank, rank + 50, r, world)
        pl.signal_all(flags, world)
    pl.wait(flags, world.size, world)
    for r in tl.static_range(world.size):
        tl.store(out + pid * world.size + r, tl.load(x + r))


@case("signal_all", "wait", "store")
def many_waiters(world: Any) -> None:
    flags, x = pkt.signals(1), pkt.zeros(world.size, dtype=torch.int32)
    out = local(world, PROGRAMS, world.size)
    many_waiters_kernel[(PROGRAMS,)](flags, x, out, world.device)
    same(world, out, torch.arange(50, 50 + world.size).expand(PROGRAMS, world.size))
