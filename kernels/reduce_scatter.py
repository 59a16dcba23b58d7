"""Reduce-scatter along any dimension: rank r ends with part r of the sum, minimum or maximum over ranks.

Each rank loads its part from every rank, run by run where it lies (see _runs), and reduces in fp32, in the order rank,
rank + 1, ...: one pass, deterministic, (W - 1) * n / W * itemsize bytes into and out of each rank. Two barriers of the
programs of one index on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.launch import cooperative
from pkt.runtime.world import World

from . import _common, _runs

CALL = "reduce_scatter"

Op = Literal["sum", "min", "max"]
OPS = ("sum", "min", "max")


def reduced(inputs: Sequence[torch.Tensor], op: Op = "sum") -> torch.Tensor:
    """The ranks' `x` reduced, in fp64; a NaN of any rank is a NaN."""
    stacked = torch.stack([x.double() for x in inputs])
    return {"sum": stacked.sum, "min": stacked.amin, "max": stacked.amax}[op](0)


def reference(inputs: Sequence[torch.Tensor], rank: int, dim: int = 0, op: Op = "sum") -> torch.Tensor:
    """What `rank` gets from the ranks' `x`, in fp64."""
    return reduced(inputs, op).chunk(len(inputs), dim)[rank]


@triton.jit
def combine(acc, x, OP: tl.constexpr):
    """One more rank's elements. Minimum and maximum keep a NaN, as torch's do."""
    if OP == "sum":
        return acc + x
    elif OP == "min":
        return tl.minimum(acc, x, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(OP == "max", 'op is "sum", "min" or "max"')
        return tl.maximum(acc, x, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def over_ranks(ptrs, mask, world, FIRST, OP: tl.constexpr):
    """The elements at `ptrs` on all ranks, reduced in fp32 in the order FIRST, FIRST + 1, ... (mod size)."""
    acc = pl.load(ptrs, FIRST, world, mask=mask, other=0).to(tl.float32)
    for i in tl.static_range(1, world.size):
        x = pl.load(ptrs, (FIRST + i) % world.size, world, mask=mask, other=0).to(tl.float32)
        acc = combine(acc, x, OP)
    return acc


@triton.jit
def reduce_scatter_kernel(
    x_ptr,  # (rows, size, run) on every rank; rank r reads [:, r] of all of them
    out_ptr,  # (rows, run) this rank's
    bar_ptr,  # int32 (programs,) on every rank
    part,  # Runs
    world,
    OP: tl.constexpr,
):
    pid = tl.program_id(0)
    pl.barrier(bar_ptr + pid, world)  # publish: every rank's x is complete
    for t in range(pid, part.tiles, tl.num_programs(0)):
        row, col, inside = _runs.tile(t, part)
        mine = x_ptr + _runs.beside(row, col, part, world.rank, world.size)
        total = over_ranks(mine, inside, world, world.rank, OP)
        tl.store(out_ptr + _runs.whole(row, col, part), total.to(out_ptr.dtype.element_ty), mask=inside)
    pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read its part of my x


def reduce_scatter(
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    dim: int = 0,
    op: Op = "sum",
    block: int | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """Part `rank` of the ranks' `x`, reduced; the parts are equal slices of dimension `dim`. Collective.

    x: symmetric, its dimension `dim` a multiple of size, contiguous, bf16, fp16 or fp32. out: x's shape with that
    dimension divided by size, contiguous, of x's dtype; a new tensor where None. It may be this rank's own part of `x`
    where that is contiguous, and no other memory of x. op: "sum", in fp32 and rounded once; "min", "max": a NaN of any
    rank is a NaN. block: elements a program moves at a time, a power of two. The same bits every time. Returns `out`;
    `x` may be overwritten at once. Raises NotSymmetric, ShapeError, DtypeError, Unsupported, CollectiveMismatch.
    """
    world = _common.world_of(CALL, world, x)
    return _common.planned(CALL, _plan, world, (x, out), (dim, op, block))


def _plan(
    world: World, x: torch.Tensor, out: torch.Tensor | None, dim: int, op: Op, block: int | None
) -> _common.Launch:
    _common.check_choice(CALL, "op", op, OPS, world)
    _common.check_block(CALL, block, world)
    _common.check_tensor(CALL, "x", x, world, dtypes=_common.FLOATS, peers=True)
    dim = _runs.axis(CALL, "dim", dim, x.shape, world)
    shape = _runs.share(CALL, "x", dim, x.shape, world)
    fresh = _common.fresh(shape, x.dtype, world)
    if out is None:
        out = fresh()
    _common.check_tensor(CALL, "out", out, world, shape=shape, dtype=x.dtype)
    rows, run = _runs.around(shape, dim)
    _common.check_apart(CALL, x, out, world, own=world.rank if rows == 1 else None)
    _common.check_agreed(CALL, world, x=x, dim=dim, op=op, block=block)
    if out.numel() == 0:
        return lambda x, out: fresh() if out is None else out
    part = _runs.runs(rows, run, x.dtype, block)
    grid = (_common.num_programs(world, part.tiles),)
    bar = _common.barrier_counters(world)

    def launch(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        out = fresh() if out is None else out
        cooperative(world, reduce_scatter_kernel, grid, x, out, bar, part, world.device, op, **_common.COPY_OPTIONS)
        return out

    return launch
