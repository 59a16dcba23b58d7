"""All-gather along any dimension: every rank ends with the shards of all, in rank order, in the layout of the whole.

push: each rank reads its shard once and stores it into every rank's `out`.
pull: each rank loads every rank's `x` into its own `out`.
copy: push by the copy engines, a copy a peer (see _copies): for shards of many megabytes.
low_latency: push in words of 12 bytes of data and 4 of flag, see _low_latency: no barrier, and `out` need not be
    symmetric. For shards that are small, of elements of 16 or 32 bits.

In all of them (W - 1) * n * itemsize bytes leave and enter each rank, a third more in low_latency, and each run of the
shard goes straight to its place (see _runs): no transposed copy. Two barriers of the programs of one index on all ranks
but in low_latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.errors import ShapeError
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from .shared import common as _common
from .shared import copies as _copies
from .shared import flagged as _low_latency
from .shared import runs as _runs

CALL = "all_gather"
Moved = Literal["push", "pull", "copy"]
MOVED = ("push", "pull", "copy")
Mode = Literal["push", "pull", "copy", "low_latency"]
MODES = (*MOVED, "low_latency")

COPIED_BYTES = 256 << 20
"""Least `out` for which mode None takes copy. On 4 x H200 it takes 4.15 ms for 2 GiB, push 4.59; for 128 MiB
0.299 and 0.297."""

DTYPES = (
    *_common.FLOATS, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
FLAGGED = (*_common.FLOATS, torch.int16, torch.int32)
ANYWHERE = ("pull", "low_latency")  # `out` need not be symmetric


def reference(shards: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """What every rank gets from the ranks' `x`."""
    return torch.cat(tuple(shards), dim)


@triton.jit
def push_kernel(
    x_ptr,  # (rows, run) this rank's shard; only this rank reads it
    out_ptr,  # (rows, size, run) on every rank; rank r stores [:, r] of all of them
    bar_ptr,  # int32 (programs,) on every rank
    shard,  # Runs
    world,
):
    pid = tl.program_id(0)
    pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank is done with what it had in `out`
    for t in range(pid, shard.tiles, tl.num_programs(0)):
        row, col, inside = _runs.tile(t, shard)
        x = tl.load(x_ptr + _runs.whole(row, col, shard), mask=inside)
        place = out_ptr + _runs.beside(row, col, shard, world.rank, world.size)
        for i in tl.static_range(1, world.size + 1):
            pl.store(place, x, (world.rank + i) % world.size, world, mask=inside)
    pl.barrier(bar_ptr + pid, world)  # publish: this program's tiles are there on every rank


@triton.jit
def pull_kernel(
    x_ptr,  # (rows, run) on every rank; all ranks read it
    out_ptr,  # (rows, size, run) this rank's
    bar_ptr,  # int32 (programs,) on every rank
    shard,  # Runs
    world,
):
    pid = tl.program_id(0)
    pl.barrier(bar_ptr + pid, world)  # publish: every rank's shard is complete
    for t in range(pid, shard.tiles, tl.num_programs(0)):
        row, col, inside = _runs.tile(t, shard)
        for i in tl.static_range(1, world.size + 1):
            peer = (world.rank + i) % world.size
            x = pl.load(x_ptr + _runs.whole(row, col, shard), peer, world, mask=inside)
            tl.store(out_ptr + _runs.beside(row, col, shard, peer, world.size), x, mask=inside)
    pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read my shard


def all_gather(
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    dim: int = 0,
    mode: Mode | None = None,
    block: int | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """The ranks' `x` one after the other along dimension `dim`, on every rank. Collective.

    x: contiguous, the same shape and dtype on every rank. out: x's shape with size times its dimension `dim`, of x's
    dtype; a new tensor where None. Unless pulled, `x` may be this rank's own place in `out` where that is contiguous.
    mode "push" and "copy" need a symmetric `out`, "pull" a symmetric `x`, "low_latency" elements of 16 or 32 bits; None
    takes that as far as `_low_latency.few` goes, where one of the two is symmetric, else push where `out` is, and
    copy from COPIED_BYTES of it on unless a block is given. block: elements a program moves at a time, a power of two;
    none with "copy". Of symmetric memory low_latency keeps 8 / 3 * (size - 1) times x's bytes, rounded up to a power of
    two, each power once and with all_reduce; the others nothing for data. Returns `out`, complete; `x` may be
    overwritten at once. Raises NotSymmetric, ShapeError, DtypeError, CollectiveMismatch.
    """
    world = _common.world_of(CALL, world, x, out)
    return _common.planned(CALL, _plan, world, (x, out), (dim, mode, block), out)


def _plan(
    world: World, x: torch.Tensor, out: torch.Tensor | None, dim: int, mode: str | None, block: int | None
) -> _common.Launch:
    _common.check_block(CALL, block, world)
    _common.check_tensor(CALL, "x", x, world)
    dim = _runs.axis(CALL, "dim", dim, x.shape, world)
    rows, run = _runs.around(x.shape, dim)
    mode = mode or _chosen(x, out, run, block, world)
    _common.check_choice(CALL, "mode", mode, MODES, world)
    check_copied(CALL, mode, block, world)
    dtypes = FLAGGED if mode == "low_latency" else DTYPES
    _common.check_tensor(CALL, "x", x, world, dtypes=dtypes, peers=mode == "pull")
    shape = (*x.shape[:dim], world.size * x.shape[dim], *x.shape[dim + 1 :]) if x.ndim else (world.size,)
    fresh = _common.fresh(shape, x.dtype, world)
    if out is None and mode in ANYWHERE:
        out = fresh()
    spread = mode not in ANYWHERE
    out = _common.check_tensor(CALL, "out", out, world, shape=shape, dtype=x.dtype, peers=spread)
    _common.check_apart(CALL, x, out, world, own=world.rank if rows == 1 and mode != "pull" else None)
    # Peers find what is pushed or pulled by arithmetic; where the other tensor is, is each rank's own business.
    pulled, pushed = x if mode == "pull" else _common.anywhere(x), out if spread else None
    _common.check_agreed(CALL, world, x=pulled, out=pushed, dim=dim, mode=mode, block=block)
    if x.numel() == 0:
        return lambda x, out: fresh() if out is None else out
    if mode == "copy":
        return _copied(world, rows, run, x, out)
    if mode == "low_latency":
        flagged = _low_latency.gather_launch(world, x, run, block)
        return lambda x, out: flagged(x, fresh() if out is None else out)
    shard = _runs.runs(rows, run, x.dtype, block)
    grid = (_common.num_programs(world, shard.tiles),)
    kernel = push_kernel if mode == "push" else pull_kernel
    bar = _common.barrier_counters(world)

    start = cooperative_launch(world, kernel, grid, **_common.COPY_OPTIONS)

    def launch(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        out = fresh() if out is None else out
        start(x, out, bar, shard, world.device)
        return out

    return launch


def _chosen(x: torch.Tensor, out: torch.Tensor | None, run: int, block: int | None, world: World) -> Mode:
    """What mode None takes. One of the two has to be symmetric, as it must where there is more to gather."""
    if isinstance(x, SymmetricTensor) or isinstance(out, SymmetricTensor):
        if x.dtype in FLAGGED and _low_latency.few(x.nbytes * max(world.size - 1, 1), world.size):
            return "low_latency"
    return chosen(out, block, _copies.least(COPIED_BYTES, run, x.element_size()))


def chosen(out: torch.Tensor | None, block: int | None, copied: int) -> Moved:
    """What is taken of MOVED; copied: bytes of `out` from which it is copy."""
    if not isinstance(out, SymmetricTensor):
        return "pull"
    return "copy" if block is None and out.nbytes >= copied else "push"


def check_copied(call: str, mode: str, block: int | None, world: World) -> None:
    """Raise ShapeError where a copy engine is told how much a program moves."""
    if mode == "copy" and block is not None:
        raise ShapeError.argument(call, "block", block, 'none with mode "copy"', world.rank)


def _copied(world: World, rows: int, run: int, x: torch.Tensor, out: torch.Tensor) -> _common.Launch:
    shard, place = _copies.layout(rows, run), _copies.layout(rows, world.size, run)[:, world.rank]
    there = out.data_ptr() <= x.data_ptr() < out.data_ptr() + out.nbytes  # x is in its place already
    peers = [(world.rank + d) % world.size for d in range(1, world.size + (not there))]
    moved = [box for p in peers for box in _copies.boxes(p, place, shard, x.dtype.itemsize)]
    exchange = _copies.exchange_launch(world, moved)

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        exchange(x, out)
        return out

    return launch
