"""Atomics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl

from ._case import LAUNCHES, PROGRAMS, case, local, put_in, same


@triton.jit
def atomics_kernel(x, old, value, bar, n, world, OP: tl.constexpr, SEM: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    pid = tl.program_id(0)
    for d in tl.static_range(1, world.size + 1):
        to = (world.rank + d) % world.size
        if OP == "add":
            found = pl.atomic_add(x + offs, value, to, world, mask=mask, sem=SEM)
        elif OP == "and":
            found = pl.atomic_and(x + offs, value, to, world, mask=mask, sem=SEM)
        elif OP == "or":
            found = pl.atomic_or(x + offs, value, to, world, mask=mask, sem=SEM)
        elif OP == "xor":
            found = pl.atomic_xor(x + offs, value, to, world, mask=mask, sem=SEM)
        elif OP == "min":
            found = pl.atomic_min(x + offs, value, to, world, mask=mask, sem=SEM)
        elif OP == "max":
            found = pl.atomic_max(x + offs, value, to, world, mask=mask, sem=SEM)
        else:
            found = pl.atomic_xchg(x + offs, value, to, world, mask=mask, sem=SEM)
        tl.store(old + (pid * world.size + (d - 1)) * BLOCK + offs, found, mask=mask)
    pl.barrier(bar + pid, world)


@triton.jit
def read_written_kernel(x, out, bar, world, BLOCK: tl.constexpr):
    """Each rank stores its rank at its own place on every rank: the even places by a scalar, or half a block each."""
    rank = tl.cast(world.rank, tl.int32)
    offs = tl.arange(0, BLOCK)
    for r in tl.static_range(world.size):
        pl.store_release(x + rank, rank + 1, r, world)
        pl.store_relaxed(x + world.size + rank, -1 - rank, r, world)
        pl.store_release(x + 2 * world.size + rank * BLOCK + offs, rank * BLOCK + offs, r, world)
    pl.barrier(bar, world)
    for r in tl.static_range(world.size):
        to = (rank + r) % world.size
        tl.store(out + r, pl.load_acquire(x + r, to, world))
        tl.store(out + world.size + r, pl.load_relaxed(x + world.size + r, to, world))
        at = 2 * world.size + r * BLOCK + offs
        tl.store(out + at, pl.load_acquire(x + at, to, world))


@case("store_release", "store_relaxed", "load_acquire", "load_relaxed", dtype=torch.int32)
@case("store_release", "store_relaxed", "load_acquire", "load_relaxed", dtype=torch.int64)
@case("store_release", "store_relaxed", "load_acquire", "load_relaxed", dtype=torch.float32)
def read_written(world: Any, dtype: torch.dtype, block: int = 4) -> None:
    n = world.size
    x, bar = pkt.zeros(2 * n + n * block, dtype=dtype), pkt.signals(1)
    out = local(world, len(x), dtype=dtype)
    read_written_kernel[(1,)](x, out, bar, world.device, block)
    same(world, out, [*range(1, n + 1), *range(-1, -n - 1, -1), *range(n * block)])


ATOMICS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "min": min,
    "max": max,
}


@case("atomic_add", op="add", dtype=torch.float32, sem="relaxed")
@case("atomic_add", op="add", dtype=torch.int64, sem="release")
@case("atomic_add", op="add", dtype=torch.int32, sem="acq_rel")
@case("atomic_and", op="and", dtype=torch.int32, sem="acq_rel")
@case("atomic_or", op="or", dtype=torch.int64, sem="acquire")
@case("atomic_xor", op="xor", dtype=torch.int32, sem="relaxed")
@case("atomic_min", op="min", dtype=torch.int32, sem="acq_rel")
@case("atomic_max", op="max", dtype=torch.int64, sem="release")
def atomics(world: Any, op: str, dtype: torch.dtype, sem: str, n: int = 13, block: int = 16) -> None:
    start, values = 0b101100, [0b111001 >> r for r in range(world.size)]
    x, bar = pkt.empty(block, dtype=dtype), pkt.signals(PROGRAMS)
    old = local(world, PROGRAMS, world.size, block, dtype=dtype)
    wanted = start
    for value in values:
        for _ in range(PROGRAMS):
            wanted = ATOMICS[op](wanted, value)
    for _ in range(LAUNCHES):
        put_in(x, torch.full((block,), start), world)
        value = float(values[world.rank]) if dtype.is_floating_point else values[world.rank]
        atomics_kernel[(PROGRAMS,)](x, old, value, bar, n, world.device, op, sem, block)
        world.barrier()
        same(world, x, [wanted] * n + [start] * (block - n))
        if op == "add":  # each update finds a different sum
            firsts = [r[:, :, 0].flatten().tolist() for r in gather(world, old)]
            mine = [
                firsts[r][p * world.size + (world.rank - r - 1) % world.size]
                for r in range(world.size)
                for p in range(PROGRAMS)
            ]
            assert len(set(mine)) == len(mine), mine
            assert min(mine) == start


@case("atomic_xchg")
def exchange_values(world: Any, block: int = 16) -> None:
    """Each exchanged value is returned exactly once, or is still there."""
    x, bar = pkt.empty(block, dtype=torch.int32), pkt.signals(PROGRAMS)
    old = local(world, PROGRAMS, world.size, block)
    put_in(x, torch.full((block,), 99), world)
    atomics_kernel[(PROGRAMS,)](x, old, world.rank + 1, bar, block, world.device, "xchg", "acq_rel", block)
    world.barrier()
    found = gather(world, old)
    here = [
        found[r][p, (world.rank - r - 1) % world.size, 0].item() for r in range(world.size) for p in range(PROGRAMS)
    ]
    assert sorted([*here, x[0].item()]) == sorted([99, *(r + 1 for r in range(world.size) for _ in range(PROGRAMS))])
    world.barrier()


def gather(world: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's `x`, on the host."""
    world.synchronize()
    return [torch.tensor(values) for values in world.all_gather_object(x.cpu().tolist())]


@triton.jit
def compare_and_swap_kernel(x, out, bar, world):
    rank = tl.cast(world.rank, tl.int32)
    for r in tl.static_range(world.size):
        tl.store(out + r, pl.atomic_cas(x, 0, rank + 1, r, world))
    pl.barrier(bar, world)
    # no cell holds 77, so nothing is swapped
    tl.store(out + world.size, pl.atomic_cas(x, 77, 5, world.rank, world, sem="relaxed"))
    pl.barrier(bar, world)


@case("atomic_cas")
def compare_and_swap(world: Any) -> None:
    """One rank wins each cell; the others find the winner's value."""
    x, bar, out = pkt.zeros(1, dtype=torch.int32), pkt.signals(1), local(world, world.size + 1)
    compare_and_swap_kernel[(1,)](x, out, bar, world.device)
    found = gather(world, out)
    for r in range(world.size):
        saw = [int(found[q][r]) for q in range(world.size)]
        (winner,) = (q for q in range(world.size) if saw[q] == 0)
        assert all(saw[q] == winner + 1 for q in range(world.size) if q != winner), saw
        assert int(found[r][world.size]) == winner + 1
    same(world, x, [int(found[world.rank][world.size])])


@triton.jit
def lock_kernel(lock, cell, n, world):
    for _ in range(n):
        taken = 1
        while taken != 0:
            taken = pl.atomic_cas(lock, 0, 1, 0, world)
        pl.store(cell, pl.load(cell, 0, world) + 1, 0, world)
        pl.atomic_xchg(lock, 0, 0, world, sem="release")


@case("atomic_cas", "atomic_xchg")
def lock(world: Any, n: int = 3) -> None:
    """A lock on rank 0 guards a plain counter there. The counter loses increments unless the lock has system scope."""
    guard, cell = pkt.zeros(1, dtype=torch.int32), pkt.zeros(1, dtype=torch.int64)
    lock_kernel[(PROGRAMS,)](guard, cell, n, world.device)
    world.synchronize()
    world.barrier()
    same(world, cell, [n * PROGRAMS * world.size if world.rank == 0 else 0])
