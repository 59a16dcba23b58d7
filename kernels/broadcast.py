"""Broadcast: every rank's `x` becomes root's, n elements.

pass_on: tile t belongs to one rank other than root, which loads it from root and stores it into all ranks but root. So
    root sends each element once, n * itemsize bytes, and no other rank more than (W - 2) / (W - 1) of that: for large
    messages no schedule sends less from root. Two barriers of the programs of one index on all ranks.
low_latency: root puts x into a slot on every rank, as words of 12 bytes of data and 4 of flag, see _low_latency: no
    barrier, 4 / 3 * (W - 1) * n * itemsize bytes out of root, and `x` need not be symmetric. For small ones, of
    elements of 16 or 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World, check_rank

from .all_gather import DTYPES, FLAGGED
from .shared import common as _common
from .shared import flagged as _low_latency
from .shared import runs as _runs

CALL = "broadcast"
Mode = Literal["pass_on", "low_latency"]
MODES = ("pass_on", "low_latency")


def reference(inputs: Sequence[torch.Tensor], root: int = 0) -> torch.Tensor:
    """What every rank gets from the ranks' `x`."""
    return inputs[root]


@triton.jit(do_not_specialize=["root"])
def pass_on_kernel(
    x_ptr,  # (n,) on every rank; root's is read, the others' are stored into, by the tiles' owners
    bar_ptr,  # int32 (programs,) on every rank
    x_runs,  # Runs of all of x
    root,
    world,
):
    pid = tl.program_id(0)
    others: tl.constexpr = world.size - 1
    turn = (tl.cast(world.rank, tl.int32) - root + others) % world.size  # of root's successor 0, of root the last
    pl.barrier(bar_ptr + pid, world)  # publish: root's x is complete, and the others' free
    if turn < others:
        for t in range(turn + others * pid, x_runs.tiles, others * tl.num_programs(0)):
            row, col, inside = _runs.tile(t, x_runs)
            place = x_ptr + _runs.whole(row, col, x_runs)
            x = pl.load(place, root, world, mask=inside)
            for i in tl.static_range(others):
                pl.store(place, x, (root + 1 + (turn + i) % others) % world.size, world, mask=inside)
    pl.barrier(bar_ptr + pid, world)  # publish: this program's tiles are there on every rank


def broadcast(
    x: torch.Tensor,
    root: int = 0,
    *,
    mode: Mode | None = None,
    block: int | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """Root's `x` into every rank's `x`, in place. Collective.

    x: contiguous, the same shape and dtype on every rank; symmetric unless mode is "low_latency". root: the rank whose
    x it is. mode: see the module; None takes low_latency as far as `_low_latency.few` goes, else pass_on. block:
    elements a program moves at a time, a power of two. Of symmetric memory low_latency keeps 8 / 3 * (size - 1) times
    x's bytes, rounded up to a power of two, each power once and with all_gather; pass_on nothing. Returns `x`,
    complete; it may be overwritten at once. Raises NotSymmetric, RankError, ShapeError, DtypeError, CollectiveMismatch.
    """
    world = _common.world_of(CALL, world, x)
    return _common.planned(CALL, _plan, world, (x,), (root, mode, block), x)


def _plan(world: World, x: torch.Tensor, root: int, mode: str | None, block: int | None) -> _common.Launch:
    root = check_rank(root, world, CALL)
    _common.check_block(CALL, block, world)
    _common.check_tensor(CALL, "x", x, world)
    mode = mode or _chosen(x, world)
    _common.check_choice(CALL, "mode", mode, MODES, world)
    flagged = mode == "low_latency"
    _common.check_tensor(CALL, "x", x, world, dtypes=FLAGGED if flagged else DTYPES, peers=not flagged)
    _common.check_agreed(CALL, world, x=_common.anywhere(x) if flagged else x, root=root, mode=mode, block=block)
    if x.numel() == 0 or world.size == 1:
        return lambda x: x
    if flagged:
        return _low_latency.broadcast_launch(world, x, root, block)
    x_runs = _runs.runs(1, x.numel(), x.dtype, block)
    grid = (_common.num_programs(world, triton.cdiv(x_runs.tiles, world.size - 1)),)
    bar = _common.barrier_counters(world)

    start = cooperative_launch(world, pass_on_kernel, grid, **_common.COPY_OPTIONS)

    def launch(x: torch.Tensor) -> torch.Tensor:
        start(x, bar, x_runs, root, world.device)
        return x

    return launch


def _chosen(x: torch.Tensor, world: World) -> Mode:
    """What mode None takes. x has to be symmetric, as it must where there is more of it."""
    few = x.dtype in FLAGGED and _low_latency.few(x.nbytes * max(world.size - 1, 1), world.size)
    return "low_latency" if few and isinstance(x, SymmetricTensor) else "pass_on"
