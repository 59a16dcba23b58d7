"""Reduce-scatter along any dimension: rank r ends with part r of the sum, minimum or maximum over ranks.

pull: each rank loads its part from every rank, run by run where it lies (see _runs). Two barriers of the programs of
    one index on all ranks.
push: each rank stores each tile into its owner's inbox, which adds what came: `x` need not be symmetric, and there is
    no barrier, but a signal to each rank for a tile. Stores reach more of the links than loads.
copy: push by the copy engines, see _copy_reduce: for parts of many megabytes.
low_latency: push in words of 12 bytes of data and 4 of flag, see _low_latency: no signal. For small x.

In all of them each reduces in fp32, in the order rank, rank + 1, ...: deterministic, the same bits in all, and
(W - 1) / W * n * itemsize bytes into and out of each rank, a third more in low_latency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.errors import ShapeError
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from .shared import (
    common as _common,
)
from .shared import (
    copies as _copies,
)
from .shared import (
    copy_reduce as _copy_reduce,
)
from .shared import (
    flagged as _low_latency,
)
from .shared import (
    runs as _runs,
)
from .shared.reduction import OPS, Op, combine, over_ranks, reduced

CALL = "reduce_scatter"

Mode = Literal["pull", "push", "copy", "low_latency"]
MODES = ("pull", "push", "copy", "low_latency")

COPIED_BYTES = 512 << 20
"""Least x for which mode None takes copy on more than two ranks, and four times as much on two. On 4 x H200 it takes
4.38 ms for 2 GiB, push 4.52, pull 4.85; for 128 MiB 0.335, 0.300 and 0.317; on 2 it takes 2.94, 2.96 and 3.21 for
2 GiB, 0.819, 0.754 and 0.816 for 512 MiB: benchmarks/results/collectives.json, collectives_sizes_2.json."""
PULLED_BYTES = 8192
"""Bytes of a tile of pull. On 4 x H200 it takes 4.85 ms for 2 GiB, in tiles of 16 KiB 4.94."""
LEAST_PUSHED, MOST_PUSHED, PUSHED_SIGNALS, PUSHED_TILES = 1 << 10, 64 << 10, 64, 4
"""Bytes that push sends for each signal, and as many as that of a part where they allow it: a signal waits until all
before it has arrived, so there are few, but for enough programs. On 4 x H200 128 MiB take 0.298 ms in four tiles for a
signal; in two of 32 KiB 0.300, and in one of 64, where all programs send, and add, at the same time, 0.304. With 32 KiB
for a signal they take 0.325, with 128 0.305, in runs of their own. On 2, where one peer has all that a program sends,
they take 0.201 ms with 128 KiB, and 0.223 with 64: benchmarks/results/collectives_steps.json, collectives_steps_2.json.
"""


def reference(inputs: Sequence[torch.Tensor], rank: int, dim: int = 0, op: Op = "sum") -> torch.Tensor:
    """What `rank` gets from the ranks' `x`, in fp64."""
    return reduced(inputs, op).chunk(len(inputs), dim)[rank]


@triton.jit
def pull_kernel(
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


class Inboxes(NamedTuple):
    """Where the tiles of other ranks arrive, those of a signal together."""

    inbox: SymmetricTensor  # (2, size - 1, programs, room) on every rank; rank + d stores [:, d - 1], halves in turn
    counters: SymmetricTensor  # (programs, size); [p, r]: how often program p of rank r has ever sent


def inboxes(programs: int, room: int, dtype: torch.dtype, world: World) -> Inboxes:
    """Made once for each grid and room: launches that share an inbox must agree on what lies where."""

    def make() -> Inboxes:
        shape = 2, max(world.size - 1, 1), programs, room
        inbox = empty(*shape, dtype=dtype, name="kernels.inbox", world=world)
        return Inboxes(inbox, signals(programs * world.size, name="kernels.sent", world=world))

    return world.keep(("pkt.kernels", "inboxes", programs, room, dtype), make)


def pushed_room(part: int, itemsize: int, size: int) -> int:
    """Elements for each signal of a part of so many."""
    most = 2 * MOST_PUSHED if size == 2 else MOST_PUSHED  # of all that a program sends, one peer has as much as two
    nbytes = max(LEAST_PUSHED, min(part * itemsize // PUSHED_SIGNALS, most))
    return (1 << nbytes.bit_length() - 1) // itemsize


@triton.jit
def in_inbox(inbox_ptr, sent, distance, world, ROOM: tl.constexpr):
    """Where what rank + `distance` sends is, of this program's signal after `sent`. Tiles are stored and loaded whole
    and with no mask, so that accesses are 16 bytes wide however long a run of x is."""
    slot = tl.cast(sent & 1, tl.int64) * (world.size - 1) + (distance - 1)
    return inbox_ptr + (slot * tl.num_programs(0) + tl.program_id(0)) * ROOM


@triton.jit
def await_sent(counts, sent, world):
    """Until what belongs to the signal after `sent` has come from every rank. Before a rank sent it, it had added up
    what came before, so the half of its inbox where that was is free for my next."""
    for i in tl.static_range(0, world.size):
        # Of mine there is only the count, from which the next launch goes on.
        pl.wait(counts + (tl.cast(world.rank, tl.int32) + i) % world.size, sent + 1, world)


@triton.jit
def push_kernel(
    x_ptr,  # (rows, size, run) this rank's
    out_ptr,  # (rows, run) this rank's
    inbox_ptr,  # (2, size - 1, programs, TOGETHER tiles) on every rank, see Inboxes
    sent_ptr,  # int32 (programs, size) on every rank
    part,  # Runs
    world,
    OP: tl.constexpr,
    TOGETHER: tl.constexpr,  # tiles for each signal; fewer for the first one, so that programs are out of step: while
    # some add, others send
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    TILE: tl.constexpr = part.ROWS * part.COLS
    ROOM: tl.constexpr = TOGETHER * TILE
    rank = tl.cast(world.rank, tl.int32)
    counts = sent_ptr + pid * world.size
    sent = pl.atomic_add(counts + rank, 0, rank, world, sem="relaxed")
    element = tl.arange(0, part.ROWS)[:, None] * part.COLS + tl.arange(0, part.COLS)[None, :]
    mine = tl.cdiv(part.tiles - pid, programs)
    for first in range(-(pid % TOGETHER), mine, TOGETHER):
        begin, end = tl.maximum(first, 0), tl.minimum(first + TOGETHER, mine)
        for t in range(begin, end):
            row, col, inside = _runs.tile(pid + t * programs, part)
            for i in tl.static_range(1, world.size):
                peer = (rank + i) % world.size
                x = tl.load(x_ptr + _runs.beside(row, col, part, peer, world.size), mask=inside, other=0)
                at = in_inbox(inbox_ptr, sent, world.size - i, world, ROOM) + (t - first) * TILE
                pl.store(at + element, x, peer, world)
        pl.signal_all(counts + rank, world)  # publish; and I am done with what came in the other half
        await_sent(counts, sent, world)
        for t in range(begin, end):
            row, col, inside = _runs.tile(pid + t * programs, part)
            total = tl.load(x_ptr + _runs.beside(row, col, part, rank, world.size), mask=inside).to(tl.float32)
            for i in tl.static_range(1, world.size):
                at = in_inbox(inbox_ptr, sent, i, world, ROOM) + (t - first) * TILE
                total = combine(total, tl.load(at + element).to(tl.float32), OP)
            tl.store(out_ptr + _runs.whole(row, col, part), total.to(out_ptr.dtype.element_ty), mask=inside)
        sent += 1


def reduce_scatter(
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    dim: int = 0,
    op: Op = "sum",
    mode: Mode | None = None,
    block: int | None = None,
    chunks: int | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """Part `rank` of the ranks' `x`, reduced; the parts are equal slices of dimension `dim`. Collective.

    x: its dimension `dim` a multiple of size, contiguous, bf16, fp16 or fp32; symmetric to pull. out: x's shape with
    that dimension divided by size, contiguous, of x's dtype; a new tensor where None. It may be this rank's own part of
    `x` where that is contiguous, and no other memory of x. op: "sum", in fp32 and rounded once; "min", "max": a NaN of
    any rank is a NaN. mode: see the module; None takes low_latency as far as `_low_latency.few_of_parts` goes, copy
    from COPIED_BYTES of x on, on two ranks from four times as many, else push. Of symmetric memory pull keeps none,
    low_latency at most 8 / 3 times x's bytes, rounded up to a power of two, each power once and with all_gather; push
    2 * (size - 1) times a program's bytes for a signal, or a tile, for each number of them and grid; copy x's bytes
    less a part for each size of part. block: elements of a tile, a power of two. chunks: with "copy" only, so many
    copies to each rank at most; None: by size. The same bits every time. Returns `out`; `x` may be overwritten at once.
    Raises NotSymmetric, ShapeError, DtypeError, Unsupported, CollectiveMismatch.
    """
    world = _common.world_of(CALL, world, x)
    return _common.planned(CALL, _plan, world, (x, out), (dim, op, mode, block, chunks), out)


def _plan(
    world: World, x: torch.Tensor, out: torch.Tensor | None, dim: int, op: Op, mode: str | None, block: int | None,
    chunks: int | None,
) -> _common.Launch:  # fmt: skip
    _common.check_choice(CALL, "op", op, OPS, world)
    _common.check_block(CALL, block, world)
    check_chunks(CALL, mode, chunks, world)
    _common.check_tensor(CALL, "x", x, world, dtypes=_common.FLOATS)
    dim = _runs.axis(CALL, "dim", dim, x.shape, world)
    shape = _runs.share(CALL, "x", dim, x.shape, world)
    rows, run = _runs.around(shape, dim)
    mode = mode or _chosen(x, run, world)
    _common.check_choice(CALL, "mode", mode, MODES, world)
    _common.check_tensor(CALL, "x", x, world, peers=mode == "pull")
    fresh = _common.fresh(shape, x.dtype, world)
    if out is None:
        out = fresh()
    _common.check_tensor(CALL, "out", out, world, shape=shape, dtype=x.dtype)
    _common.check_apart(CALL, x, out, world, own=world.rank if rows == 1 else None)
    pulled = x if mode == "pull" else _common.anywhere(x)
    _common.check_agreed(CALL, world, x=pulled, dim=dim, op=op, mode=mode, block=block, chunks=chunks)
    if out.numel() == 0:
        return lambda x, out: fresh() if out is None else out
    if mode == "copy":
        copied = _copy_reduce.scatter_launch(world, rows, run, x.dtype, op, block, chunks)
        return lambda x, out: copied(x, fresh() if out is None else out)
    if mode == "low_latency":
        flagged = _low_latency.scatter_launch(world, x, run, op, block)
        return lambda x, out: flagged(x, fresh() if out is None else out)
    itemsize = x.element_size()
    # Bytes that move together: fewer take more addresses, each in a register. But to the inbox a thread has whole 16.
    access = max(math.gcd(run * itemsize, 16), 4)
    room = pushed_room(rows * run, itemsize, world.size)
    pushed = max(room * itemsize // PUSHED_TILES, _common.COPY_BYTES)
    most = PULLED_BYTES if mode == "pull" else min(room * itemsize, pushed * access // 16)
    part = _runs.runs(rows, run, x.dtype, block or most // itemsize)
    grid = (_common.num_programs(world, part.tiles),)
    counters: tuple[torch.Tensor, ...]
    if mode == "pull":
        kernel, counters, constants = pull_kernel, (_common.barrier_counters(world),), (op,)
    else:
        tile = part.ROWS.value * part.COLS.value
        together = max(room // tile, 1)
        kernel, counters, constants = push_kernel, inboxes(grid[0], together * tile, x.dtype, world), (op, together)

    start = cooperative_launch(world, kernel, grid, **_common.COPY_OPTIONS)

    def launch(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        out = fresh() if out is None else out
        start(x, out, *counters, part, world.device, *constants)
        return out

    return launch


def _chosen(x: torch.Tensor, run: int, world: World) -> Mode:
    """What mode None takes."""
    if _low_latency.few_of_parts(x.nbytes, world.size):
        return "low_latency"
    copied = 4 * COPIED_BYTES if world.size == 2 else COPIED_BYTES
    return "copy" if x.nbytes >= _copies.least(copied, run, x.element_size()) else "push"


def check_chunks(call: str, mode: str | None, chunks: int | None, world: World) -> None:
    """Raise ShapeError or DtypeError unless `chunks` is None, or a number of copies where these are made."""
    _common.check_integers(call, world, chunks=chunks)
    if chunks is not None and (mode != "copy" or chunks < 1):
        wanted = "at least 1" if mode == "copy" else 'none without mode "copy"'
        raise ShapeError.argument(call, "chunks", chunks, wanted, world.rank)
