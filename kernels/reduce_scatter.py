"""Reduce-scatter along the first dimension: rank r ends with the sum over ranks of part r.

Each rank loads its part from every rank and adds in fp32, in the order rank, rank + 1, ...: one pass,
deterministic, (W - 1) * n / W * itemsize bytes into and out of each rank. Two barriers of the programs of one
index on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.errors import ShapeError
from pkt.runtime.launch import cooperative
from pkt.runtime.world import World

from . import _common


def reference(inputs: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """What `rank` gets from the ranks' `x`, in fp64."""
    return torch.stack([x.double() for x in inputs]).sum(0).chunk(len(inputs))[rank]


@triton.jit
def sum_over_ranks(ptrs, mask, world, FIRST):
    """The elements at `ptrs` on all ranks, added in fp32 in the order FIRST, FIRST + 1, ... (mod size)."""
    acc = pl.load(ptrs, FIRST, world, mask=mask, other=0).to(tl.float32)
    for i in tl.static_range(1, world.size):
        acc += pl.load(ptrs, (FIRST + i) % world.size, world, mask=mask, other=0).to(tl.float32)
    return acc


@triton.jit
def reduce_scatter_kernel(
    x_ptr,  # (size, n) on every rank; rank r reads row r of all of them
    out_ptr,  # (n,) this rank's
    bar_ptr,  # int32 (programs,) on every rank
    n,
    world,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    pl.barrier(bar_ptr + pid, world)  # publish: every rank's x is complete
    part = x_ptr + tl.cast(world.rank, tl.int64) * n
    for block in range(pid, tl.cdiv(n, BLOCK), tl.num_programs(0)):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = sum_over_ranks(part + offs, offs < n, world, world.rank)
        tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=offs < n)
    pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read its part of my x


def reduce_scatter(
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    block: int | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """Part `rank` of the sum of the ranks' `x`, the parts being equal slices of the first dimension.
    Collective.

    x: symmetric, (size * m, ...), contiguous, bf16, fp16 or fp32. out: (m, ...) of x's dtype; a new tensor
    where None. block: elements a program moves at a time, a power of two. Sums in fp32 and rounds once; the
    same bits every time. Returns `out`; `x` may be overwritten at once. Raises NotSymmetric, ShapeError,
    DtypeError, CollectiveMismatch.
    """
    call = "reduce_scatter"
    world = _common.world_of(call, world, x)
    _common.check_tensor(call, "x", x, world, dtypes=_common.FLOATS, peers=True)
    if x.ndim == 0 or x.shape[0] % world.size:
        wanted = f"a first dimension divisible by {world.size} ranks"
        raise ShapeError.argument(call, "x", tuple(x.shape), wanted, world.rank)
    shape = (x.shape[0] // world.size, *x.shape[1:])
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=world.torch_device)
    _common.check_tensor(call, "out", out, world, shape=shape, dtype=x.dtype)
    _common.check_agreed(call, world, x=x, block=block)
    if out.numel() == 0:
        return out
    BLOCK = _common.copy_block(out, block)
    grid = (_common.num_programs(world, triton.cdiv(out.numel(), BLOCK)),)
    bar, n = _common.barrier_counters(world), out.numel()
    cooperative(world, reduce_scatter_kernel, grid, x, out, bar, n, world.device, BLOCK, **_common.COPY_OPTIONS)
    return out
