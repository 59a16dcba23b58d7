"""Barriers, fences, epochs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl

from ._case import LAUNCHES, PROGRAMS, case, local, same


@triton.jit
def barrier_kernel(x, out, bar, first, rounds, world, KIND: tl.constexpr):
    """In each round every program writes a cell that another program reads after the barrier. The reader is

    - "barrier": the program of the same index on the next rank,
    - "grid_barrier": the next program of this rank,
    - "world_barrier": the next program of the next rank.
    """
    pid = tl.program_id(0)
    n = tl.num_programs(0)
    rank = tl.cast(world.rank, tl.int32)
    wrong = 0
    for i in range(first, first + rounds):
        value = i * 100 + rank * 10 + pid
        if KIND == "barrier":
            pl.store(x + pid, value, (world.rank + 1) % world.size, world)
            pl.barrier(bar + pid, world)
            seen = tl.load(x + pid)
            wrong += (seen != i * 100 + (rank + world.size - 1) % world.size * 10 + pid).to(tl.int32)
            pl.barrier(bar + pid, world)
        elif KIND == "grid_barrier":
            tl.store(x + (pid + 1) % n, value)
            pl.grid_barrier(bar, world)
            seen = tl.load(x + pid)
            wrong += (seen != i * 100 + rank * 10 + (pid + n - 1) % n).to(tl.int32)
            pl.grid_barrier(bar, world)
        else:
            pl.store(x + (pid + 1) % n, value, (world.rank + 1) % world.size, world)
            pl.world_barrier(bar, world)
            seen = tl.load(x + pid)
            wrong += (seen != i * 100 + (rank + world.size - 1) % world.size * 10 + (pid + n - 1) % n).to(tl.int32)
            pl.world_barrier(bar, world)
    tl.store(out + pid, wrong)


@case("barrier", kind="barrier")
@case("grid_barrier", kind="grid_barrier")
@case("world_barrier", kind="world_barrier")
def barriers(world: Any, kind: str, rounds: int = 3) -> None:
    x, bar, out = pkt.empty(PROGRAMS, dtype=torch.int32), pkt.signals(PROGRAMS), local(world, PROGRAMS)
    if kind == "world_barrier":
        bar = pkt.signals(2)
    world.barrier()
    for launch in range(LAUNCHES):
        barrier_kernel[(PROGRAMS,)](
            x, out, bar, launch * rounds, rounds, world.device, kind, launch_cooperative_grid=True
        )
        same(world, out, [0] * PROGRAMS)


@triton.jit
def uneven_kernel(x, out, bar, world):
    """Grids of different sizes meet: rank r has r + 1 programs."""
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    for r in tl.static_range(world.size):
        pl.store(x + rank * world.size + pid, rank * 10 + pid, r, world)
    pl.world_barrier(bar, world)
    for r in tl.static_range(world.size):
        for p in tl.static_range(r + 1):
            tl.store(out + (pid * world.size + r) * world.size + p, tl.load(x + r * world.size + p))
    pl.world_barrier(bar, world)


@case("world_barrier")
def uneven_grids(world: Any) -> None:
    n = world.size
    x, bar = pkt.full((n, n), -1, dtype=torch.int32), pkt.signals(2)
    out = local(world, world.rank + 1, n, n)
    for _ in range(LAUNCHES):
        uneven_kernel[(world.rank + 1,)](x, out, bar, world.device, launch_cooperative_grid=True)
        wanted = [[r * 10 + p if p <= r else -1 for p in range(n)] for r in range(n)]
        same(world, out, [wanted] * (world.rank + 1))


@triton.jit
def by_hand_kernel(x, flags, out, bar, epoch, world, HOW: tl.constexpr, BLOCK: tl.constexpr):
    """A protocol of relaxed atomics and fences."""
    offs = tl.arange(0, BLOCK)
    to = (world.rank + 1) % world.size
    rank = tl.cast(world.rank, tl.int32)
    if HOW == "quiet":
        rows = tl.make_tensor_descriptor(pl.peer(x, to, world), [1, BLOCK], [BLOCK, 1], [1, BLOCK])
        rows.store([0, 0], tl.reshape(offs + rank * 100 + epoch, [1, BLOCK]))
        pl.quiet()
    else:
        pl.store(x + offs, offs + rank * 100 + epoch, to, world)
        pl.fence()  # each thread orders its own accesses, then all threads meet
        tl.debug_barrier()
    pl.atomic_add(flags, 1, to, world, sem="relaxed")
    pl.wait(flags, epoch, world)
    tl.store(out + offs, tl.load(x + offs))
    pl.barrier(bar, world)


@case("fence", how="fence")
@case("quiet", how="quiet")
def by_hand(world: Any, how: str, block: int = 32) -> None:
    x, flags, bar = pkt.zeros(block, dtype=torch.int32), pkt.signals(1), pkt.signals(1)
    out = local(world, block)
    for epoch in range(1, LAUNCHES + 2):
        by_hand_kernel[(1,)](x, flags, out, bar, epoch, world.device, how, block)
        same(world, out, torch.arange(block) + (world.rank - 1) % world.size * 100 + epoch)


@triton.jit
def flagged_kernel(flags, slots, x, out, n, world, TOGETHER: tl.constexpr, BLOCK: tl.constexpr):
    """Gather every rank's x, of shape (n, 3), one block at a time. The epoch's parity picks the half of the slots."""
    launch = pl.epoch(flags, world)
    half = slots + (launch & 1) * world.size * n * 4
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < n
    at = x + 3 * offs
    values = (tl.load(at, mask=inside), tl.load(at + 1, mask=inside), tl.load(at + 2, mask=inside))
    for i in tl.static_range(1, world.size + 1):
        peer = (world.rank + i) % world.size
        pl.put_flagged(half + (world.rank * n + offs) * 4, values, launch, peer, world, mask=inside)
    if TOGETHER:
        parts = pl.take_flagged_all(half + 4 * offs, 4 * n, launch, world, mask=inside)
    for r in tl.static_range(world.size):
        if TOGETHER:
            a, b, c = parts[r]
        else:
            a, b, c = pl.take_flagged(half + (r * n + offs) * 4, launch, world, mask=inside)
        at = out + (r * n + offs) * 3
        tl.store(at, a, mask=inside)
        tl.store(at + 1, b, mask=inside)
        tl.store(at + 2, c, mask=inside)


@case("put_flagged", "take_flagged", "epoch", together=False)
@case("put_flagged", "take_flagged_all", "epoch", together=True)
def flagged(world: Any, together: bool, n: int = 41, block: int = 16) -> None:
    slots, flags = pkt.zeros(2, world.size, n, 4, dtype=torch.int32), pkt.signals(1)
    x, out = local(world, n, 3), local(world, world.size, n, 3)
    counted = torch.arange(3 * n).view(n, 3)
    for launch in range(LAUNCHES + 2):
        x.copy_(counted - 100 * world.rank + 1000 * launch)
        grid = (triton.cdiv(n, block),)
        flagged_kernel[grid](flags, slots, x, out, n, world.device, together, block, launch_cooperative_grid=True)
        same(world, out, torch.stack([counted - 100 * r + 1000 * launch for r in range(world.size)]))


@triton.jit
def epoch_kernel(flags, x, out, seed, world):
    """Each launch stores a value on every rank. The epoch's parity picks the half of the buffer."""
    pid = tl.program_id(0)
    n = tl.num_programs(0)
    rank = tl.cast(world.rank, tl.int32)
    epoch = pl.epoch(flags, world)
    half = x + (epoch & 1) * world.size * n  # & instead of %, because a wrapped epoch is negative
    for r in tl.static_range(world.size):
        pl.store(half + rank * n + pid, seed * 10 + rank + pid, r, world)
    pl.signal_all(flags + pid, world)
    pl.wait(flags + pid, epoch * world.size, world)
    total = 0
    for r in tl.static_range(world.size):
        total += tl.load(half + r * n + pid)
    tl.store(out + pid, total)
    tl.store(out + n + pid, epoch)


@case("epoch", "signal_all", "wait", start=0)
@case("epoch", "signal_all", "wait", start=2**31 - 3)
def epochs(world: Any, start: int) -> None:
    """Use counters that no host resets, also across their wrap. They begin in the state after `start` launches."""
    flags, x = pkt.signals(PROGRAMS), pkt.empty(2, world.size, PROGRAMS, dtype=torch.int32)
    out = local(world, 2, PROGRAMS)
    if start:
        header = world.backend.view(world.rank, flags._allocation.block.offset, 8).view(torch.int64)
        header.fill_(start << 32)
        flags.fill_((start * world.size + 2**31) % 2**32 - 2**31)
    world.barrier()
    for launch in range(4):
        epoch_kernel[(PROGRAMS,)](flags, x, out, launch + 1, world.device)
        total = sum((launch + 1) * 10 + r for r in range(world.size))
        epoch = (start + launch + 1 + 2**31) % 2**32 - 2**31
        same(world, out, [[total + world.size * p for p in range(PROGRAMS)], [epoch] * PROGRAMS])
