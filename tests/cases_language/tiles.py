"""Tiles."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl

from ._case import LAUNCHES, PROGRAMS, case, local, put_in, same
from .multimem import REDUCTIONS


def layout(x: torch.Tensor, tma: bool = True) -> pl.Layout:
    """The Layout of a symmetric tensor (b, d, r, c)."""
    b, d, r, c = x.shape
    return pl.Layout(x, b, d, r, c, tl.constexpr(tma))


@triton.jit
def tile_kernel(x, y, bar, flags, epoch, world, HOW: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Store my tile (b, d, pid, 1) of x into y of the next rank or of all, or add it; publish with tile.signal."""
    pid = tl.program_id(0)
    to = (world.rank + 1) % world.size
    rows = pid * R + tl.arange(0, R)
    ptrs = x.ptr + (1 * x.d + 1) * x.r * x.c + rows[:, None] * x.c + C + tl.arange(0, C)[None, :]
    tile = tl.load(ptrs, mask=(rows < x.r)[:, None] & (C + tl.arange(0, C) < x.c)[None, :], other=0)
    coord = (1, 1, pid, 1)
    pl.tile.barrier(flags, (0, 0, 2, pid), world)  # before overwrite
    if HOW == "store":
        pl.tile.store_async(y, tile, coord, world, to)
        pl.tile.signal(flags, (0, 0, 0, pid), to, world)
        pl.tile.wait(flags, (0, 0, 0, pid), epoch, world)
    elif HOW == "add":
        pl.tile.store_add_async(y, tile, coord, world, to)
        pl.tile.signal(flags, (0, 0, 0, pid), to, world, 2)
        pl.tile.wait(flags, (0, 0, 0, pid), 2 * epoch, world)
    elif HOW == "store_all":
        if tl.cast(world.rank, tl.int32) == world.size - 1:
            pl.tile.store_async(y, tile, coord, world)
            pl.tile.signal_all(flags, (0, 0, 1, pid), world)
        pl.tile.wait(flags, (0, 0, 1, pid), epoch, world)
    else:
        pl.tile.store_add_async(y, tile, coord, world)
        pl.tile.signal_all(flags, (0, 0, 1, pid), world, 3)
        pl.tile.wait(flags, (0, 0, 1, pid), 3 * world.size * epoch, world)
    pl.tile.barrier(flags, (0, 0, 2, pid), world)


TILE_SYNC = ("tile.signal", "tile.signal_all", "tile.wait", "tile.barrier")


@case("tile.store_async", *TILE_SYNC, how="store", dtype=torch.float32, tma=True)
@case("tile.store_async", *TILE_SYNC, how="store", dtype=torch.bfloat16, tma=False)
@case("tile.store_async", *TILE_SYNC, how="store_all", dtype=torch.bfloat16, tma=True)
@case("tile.store_async", *TILE_SYNC, how="store_all", dtype=torch.float32, tma=False)
@case("tile.store_add_async", *TILE_SYNC, how="add", dtype=torch.bfloat16, tma=True)
@case("tile.store_add_async", *TILE_SYNC, how="add", dtype=torch.float32, tma=False)
@case("tile.store_add_async", *TILE_SYNC, how="add_all", dtype=torch.float32, tma=True)
def tiles(world: Any, how: str, dtype: torch.dtype, tma: bool, rows: int = 16, cols: int = 32) -> None:
    """The last tile row and column are cut; without TMA rows may begin at any byte."""
    shape = (2, 2, PROGRAMS * rows - 3, 2 * cols - (8 if tma else 3))
    x, y, flags = pkt.empty(shape, dtype=dtype), pkt.empty(shape, dtype=dtype), pkt.signals(3 * 4)
    bar = layout(flags.view(1, 1, 3, 4), tma=False)
    size, count = torch.Size(shape), torch.Size(shape).numel()
    for launch in range(LAUNCHES):
        inputs = [((torch.arange(count) * 3 + 5 * r + launch) % 9).reshape(size) for r in range(world.size)]
        y.fill_(1)
        put_in(x, inputs[world.rank], world)
        tile_kernel[(PROGRAMS,)](layout(x, tma), layout(y, tma), bar, bar, launch + 1, world.device, how, rows, cols)
        before = inputs[(world.rank - 1) % world.size]
        result = {"store": before, "add": before + 1, "store_all": inputs[-1], "add_all": sum(inputs) + 1}[how]
        wanted = torch.ones(shape)
        wanted[1, 1, :, cols:] = result[1, 1, :, cols:]
        same(world, y, wanted)


@triton.jit
def tile_reduce_kernel(x, y, bar, world, ALL: tl.constexpr, OP: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    pid = tl.program_id(0)
    pl.tile.barrier(bar, (0, 0, 0, pid), world)
    if ALL:
        if pid % world.size == tl.cast(world.rank, tl.int32):
            pl.tile.all_reduce(x, (0, 1, pid, 1), world, R, C, OP)
    else:
        pl.tile.reduce(y, (0, 0, pid, 0), x, (0, 1, pid, 1), world, R, C, OP)
    pl.tile.barrier(bar, (0, 0, 0, pid), world)


@case("tile.reduce", every=False, op="add", dtype=torch.bfloat16, tma=True)
@case("tile.reduce", every=False, op="max", dtype=torch.float32, tma=False)
@case("tile.all_reduce", every=True, op="add", dtype=torch.float32, tma=True)
@case("tile.all_reduce", every=True, op="min", dtype=torch.bfloat16, tma=True)
@case("tile.all_reduce", every=True, op="add", dtype=torch.float16, tma=False)
def tile_reductions(
    world: Any, every: bool, op: str, dtype: torch.dtype, tma: bool, rows: int = 16, cols: int = 32
) -> None:
    programs = world.size
    shape = (1, 2, programs * rows - 2, 2 * cols - (0 if tma else 1))
    x, y = pkt.empty(shape, dtype=dtype), local(world, 1, 1, shape[2], shape[3] - cols, dtype=dtype)
    flags = pkt.signals(programs)
    count = torch.Size(shape).numel()
    for launch in range(LAUNCHES):
        values = [(torch.arange(count) * 3 + 5 * r + launch) % 9 for r in range(world.size)]
        inputs = torch.stack(values).reshape(world.size, *shape).double()
        put_in(x, inputs[world.rank], world)
        bar = layout(flags.view(1, 1, 1, programs), tma=False)
        tile_reduce_kernel[(programs,)](layout(x, tma), layout(y, tma), bar, world.device, every, op, rows, cols)
        result = REDUCTIONS[op](inputs)[0, 1, :, cols:]
        if every:
            wanted = inputs[world.rank].clone()
            wanted[0, 1, :, cols:] = result
            same(world, x, wanted)
        else:
            same(world, y, result[None, None])
