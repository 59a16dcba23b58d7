"""All-gather along the first dimension: every rank ends with the shards of all, in rank order.

push: each rank reads its shard once and stores it into every rank's `out`.
pull: each rank loads every rank's `x` into its own `out`.

Either way (W - 1) * n * itemsize bytes leave and enter each rank. Two barriers of the programs of one index on
all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.launch import cooperative
from pkt.runtime.tensor import SymmetricTensor
from pkt.runtime.world import World

from . import _common

DTYPES = (
    *_common.FLOATS, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


def reference(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """What every rank gets from the ranks' `x`."""
    return torch.cat(tuple(shards))


@triton.jit
def push_kernel(
    x_ptr,  # (n,) this rank's shard; only this rank reads it
    out_ptr,  # (size, n) on every rank; rank r stores row r of all of them
    bar_ptr,  # int32 (programs,) on every rank
    n,
    world,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank is done with what it had in `out`
    row = out_ptr + tl.cast(world.rank, tl.int64) * n
    for block in range(pid, tl.cdiv(n, BLOCK), tl.num_programs(0)):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs, mask=offs < n)
        for i in tl.static_range(1, world.size + 1):
            pl.store(row + offs, x, (world.rank + i) % world.size, world, mask=offs < n)
    pl.barrier(bar_ptr + pid, world)  # publish: this program's blocks are there on every rank


@triton.jit
def pull_kernel(
    x_ptr,  # (n,) on every rank; all ranks read it
    out_ptr,  # (size, n) this rank's
    bar_ptr,  # int32 (programs,) on every rank
    n,
    world,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    pl.barrier(bar_ptr + pid, world)  # publish: every rank's shard is complete
    for block in range(pid, tl.cdiv(n, BLOCK), tl.num_programs(0)):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        for i in tl.static_range(1, world.size + 1):
            peer = (world.rank + i) % world.size
            x = pl.load(x_ptr + offs, peer, world, mask=offs < n)
            tl.store(out_ptr + tl.cast(peer, tl.int64) * n + offs, x, mask=offs < n)
    pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read my shard


def all_gather(
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    mode: Literal["push", "pull"] | None = None,
    block: int | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """The ranks' `x` one after the other along the first dimension, on every rank. Collective.

    x: (m, ...) contiguous, the same shape and dtype on every rank. out: (size * m, ...) of x's dtype; a new
    tensor where None. mode "push" needs a symmetric `out`, "pull" a symmetric `x`; None takes push where `out`
    is symmetric. block: elements a program moves at a time, a power of two. Returns `out`, complete; `x` may be
    overwritten at once. Raises NotSymmetric, ShapeError, DtypeError, CollectiveMismatch.
    """
    call = "all_gather"
    world = _common.world_of(call, world, x, out)
    mode = mode or ("push" if isinstance(out, SymmetricTensor) else "pull")
    _common.check_choice(call, "mode", mode, ("push", "pull"), world)
    _common.check_tensor(call, "x", x, world, dtypes=DTYPES, peers=mode == "pull")
    shape = (world.size * x.shape[0], *x.shape[1:]) if x.ndim else (world.size,)
    if out is None and mode == "pull":
        out = torch.empty(shape, dtype=x.dtype, device=world.torch_device)
    out = _common.check_tensor(call, "out", out, world, shape=shape, dtype=x.dtype, peers=mode == "push")
    _common.check_agreed(call, world, x=x, out=out, mode=mode, block=block)
    if x.numel() == 0:
        return out
    BLOCK = _common.copy_block(x, block)
    grid = (_common.num_programs(world, triton.cdiv(x.numel(), BLOCK)),)
    kernel = push_kernel if mode == "push" else pull_kernel
    bar = _common.barrier_counters(world)
    cooperative(world, kernel, grid, x, out, bar, x.numel(), world.device, BLOCK, **_common.COPY_OPTIONS)
    return out
