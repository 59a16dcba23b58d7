"""reduce_scatter and all_reduce by the copy engines: SMs only add.

The owner of a part has an inbox, into which the ranks copy their x of it, in chunks: every peer's first chunk before
anybody's next. A kernel for each chunk is queued behind this rank's copies of it and begins with a barrier of the
programs of one index on all ranks, after which everybody's are there. Then it adds in fp32, in the order rank, rank +
1, ..., this rank's own part straight from x, while the next chunks are on their way. A kernel that waits so needs
nothing that is queued behind it on any rank: it may take all SMs, and a replayed graph its branches in any order. All
ranks meet before the first copy: the inbox has no halves, because the host does not know the parity of a replay.

all_reduce: a chunk's sum is copied to every peer's `out` behind the copies of the next chunk's x, which keep the links
busy while it is added. One more meeting ends it.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..declaration import Launch
from . import copies, runs
from .grid import COPY_OPTIONS, barrier_counters, num_programs
from .reduction import Op, combine

CHUNKED: dict[str, Any] = {"settings": {"block": None, "chunks": None}, "small": {"block": 16, "chunks": 3}}
"""Of forms by the copy engines."""

SCATTER_CHUNKS = 2
"""Chunks of a small part. On 4 x H200 one of 32 MiB took 0.332 ms in 2 chunks, 0.436 in 4 and 0.490 in 8
(benchmarks/results/collectives_tried.json)."""

SCATTER_CHUNK_BYTES = 32 << 20
"""A part of c * c times this many bytes is cut into c chunks: what the last one's sum takes then grows like what the
copies cost to start. On 4 x H200 a part of 512 MiB takes 4.48 ms in 2 chunks, 4.41 in 4, 4.60 in 8, 4.98 in 16
(the same file)."""

REDUCE_CHUNKS = 2
"""On 4 x H200 256 MiB take 1.128 ms so. Before a chunk began with the peer of the last one they took 1.161 in 2 chunks
and a captured graph, 1.139 in 3, 1.233 in 4: these figures are of benchmarks/results/collectives_tried.json, where two
streams at once are, too, and slower everywhere."""


@triton.jit(do_not_specialize=["begin", "end"])
def sum_kernel(
    x_ptr,  # this rank's; row i of its part begins at (x_before + i * x_apart) * part.UNIT
    out_ptr,  # this rank's; its part, (rows, run), begins at out_before * part.UNIT
    inbox_ptr,  # (size - 1, slot * part.UNIT) on every rank; [i] has the part (rows, run) of rank + 1 + i
    bar_ptr,  # int32 (programs,) on every rank
    part,  # Runs
    x_before,
    x_apart,
    out_before,
    slot,
    begin,  # the tiles of this chunk
    end,
    world,
    OP: tl.constexpr,
):
    pid = tl.program_id(0)
    pl.barrier(bar_ptr + pid, world)  # publish: the copies of this chunk, queued before, have come from every rank
    for t in range(begin + pid, end, tl.num_programs(0)):
        row, col, inside = runs.tile(t, part)
        total = tl.load(x_ptr + (x_before + row * x_apart) * part.UNIT + col, mask=inside).to(tl.float32)
        place = runs.whole(row, col, part)
        for i in tl.static_range(0, world.size - 1):
            more = inbox_ptr + tl.cast(slot, tl.int64) * (i * part.UNIT) + place
            total = combine(total, tl.load(more, mask=inside).to(tl.float32), OP)
        mine = out_ptr + tl.cast(out_before, tl.int64) * part.UNIT + place
        tl.store(mine, total.to(out_ptr.dtype.element_ty), mask=inside)


def _inbox(slot: int, dtype: torch.dtype, world: World) -> SymmetricTensor:
    """(size - 1, slot). Launches that share it need not agree on anything: they meet before they write."""
    return world.keep(
        ("pkt.kernels", "copied", slot, dtype),
        lambda: empty(world.size - 1, slot, dtype=dtype, name="kernels.copied", world=world),
    )


def _slot(distance: int, world: World) -> int:
    """Where in the inbox of rank + distance this rank's copies go."""
    return world.size - 1 - distance


def scatter_launch(
    world: World, rows: int, run: int, dtype: torch.dtype, op: Op, block: int | None, chunks: int | None
) -> Launch:
    """launch(x, out) for x of (rows, size, run). Collective."""
    rank, size, itemsize = world.rank, world.size, dtype.itemsize
    part = runs.runs(rows, run, dtype, block)
    chunks = chunks or max(SCATTER_CHUNKS, math.isqrt(rows * run * itemsize // SCATTER_CHUNK_BYTES))
    # A chunk is some rows of tiles, or some tiles of the only row.
    rowwise = part.tiles > part.across
    across, line = (part.across, part.ROWS.value) if rowwise else (1, part.COLS.value)
    lines = part.tiles // across
    together = triton.cdiv(lines, min(chunks, lines))
    tiles, step = together * across, together * line
    sent, inboxes = copies.layout(rows, size, run), copies.layout(max(size - 1, 1), rows, run)

    def parcel(g: int) -> list[copies.Box]:
        found, here = [], slice(g * step, (g + 1) * step)
        for d in copies.turn(size, g):
            peer = (rank + d) % size
            of, to = sent[:, peer], inboxes[_slot(d, world)]
            of, to = (of[here], to[here]) if rowwise else (of[:, here], to[:, here])
            found += copies.boxes(peer, to, of, itemsize)
        return found

    moved = [copies.sent_to(world, parcel(g)) for g in range(triton.cdiv(lines, together))]
    inbox, bar = _inbox(rows * run, dtype, world), barrier_counters(world)
    meet, side = copies.meeting(world), copies.Side(world)
    grid = (num_programs(world, tiles),)
    # One for each chunk: a launch is repeated with the same numbers only.
    starts = [cooperative_launch(world, sum_kernel, grid, **COPY_OPTIONS) for _ in moved]
    places = (rank * part.units, size * part.units, 0, rows * part.units)

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        meet()  # before overwrite: every rank has added what is in its inbox
        sent = []
        with side.behind() as stream:
            for send in moved:
                send(x, inbox, stream)
                sent.append(side.mark())
        for g, (mark, start) in enumerate(zip(sent, starts)):
            side.reach(mark)
            end = min((g + 1) * tiles, part.tiles)
            start(x, out, inbox, bar, part, *places, g * tiles, end, world.device, op)
        return out

    return launch


def reduce_launch(world: World, n: int, dtype: torch.dtype, op: Op, block: int | None, chunks: int | None) -> Launch:
    """launch(x, out) for x of n elements. Rank r owns those from r * slot on, a slot or what is left. Collective."""
    rank, size, itemsize = world.rank, world.size, dtype.itemsize
    slot = triton.cdiv(triton.cdiv(n, size), runs.LINE) * runs.LINE  # so that parts are aligned
    whole = runs.runs(1, slot, dtype, block)
    together = triton.cdiv(whole.tiles, min(chunks or REDUCE_CHUNKS, whole.tiles))
    step = together * whole.COLS.value
    layout, inboxes = copies.layout(n), copies.layout(max(size - 1, 1), slot)

    def chunk(g: int, owner: int) -> slice:
        begin, end = owner * slot + g * step, owner * slot + min((g + 1) * step, slot)
        return slice(min(begin, n), min(end, n))

    # What is copied comes in the order scattered(0), scattered(1), gathered(0), scattered(2), ..., gathered(count - 1).
    def scattered(g: int) -> list[copies.Box]:
        found = []
        for d in copies.turn(size, max(2 * g - 1, 0)):
            peer = (rank + d) % size
            of = layout[chunk(g, peer)]
            found += copies.boxes(peer, inboxes[_slot(d, world)][g * step :][: of.numel()], of, itemsize)
        return found

    def gathered(g: int) -> list[copies.Box]:
        mine, turn = layout[chunk(g, rank)], copies.turn(size, min(2 * g + 2, 2 * count - 1))
        return [box for d in turn for box in copies.boxes((rank + d) % size, mine, mine, itemsize)]

    count = triton.cdiv(whole.tiles, together)
    (first, *later), into = ([copies.sent_to(world, of(g)) for g in range(count)] for of in (scattered, gathered))
    own = max(0, min(n - rank * slot, slot))
    unit = whole.UNIT.value if own % whole.UNIT.value == 0 else 1
    tiles = triton.cdiv(own, whole.COLS.value)
    part = whole._replace(units=own // unit, across=max(tiles, 1), tiles=tiles, UNIT=tl.constexpr(unit))
    places = (rank * slot // unit, 0, rank * slot // unit, slot // unit)
    inbox, bar = _inbox(slot, dtype, world), barrier_counters(world)
    meet, side = copies.meeting(world), copies.Side(world)
    grid = (num_programs(world, together),)
    starts = [cooperative_launch(world, sum_kernel, grid, **COPY_OPTIONS) for _ in range(count)]

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        meet()  # before overwrite: every rank has added what is in its inbox, and is done with what it had in `out`
        with side.behind() as stream:
            first(x, inbox, stream)
            sent = side.mark()
        for g, (send, share, start) in enumerate(itertools.zip_longest(later, into, starts)):
            here = sent
            if send is not None:
                with side.behind() as stream:
                    send(x, inbox, stream)
                    sent = side.mark()
            side.reach(here)
            end = min((g + 1) * together, tiles)
            start(x, out, inbox, bar, part, *places, min(g * together, end), end, world.device, op)
            with side.behind() as stream:
                share(out, out, stream)
        side.reach(side.mark())
        meet()  # publish: every rank's sums are there
        return out

    return launch
