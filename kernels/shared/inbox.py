"""Tiles through inboxes: stores to peers whose tensors need not be symmetric, and no barrier.

Each rank has an inbox for what the others send. A program stores some tiles into its peers' inboxes and signals, waits
until as many have come from every rank, and takes them out of its own inbox. Programs of one index on all ranks work
together. An inbox has two halves, which take turns: before a rank signals, it has taken out what came before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..declaration import Launch
from . import runs
from .grid import COPY_BYTES, num_programs, resident_launch

LEAST_PUSHED, MOST_PUSHED, PUSHED_SIGNALS, PUSHED_TILES = 1 << 10, 64 << 10, 64, 4
"""Bytes that a program sends for each signal, and as many as that of a part where they allow it: a signal waits until
all before it has arrived, so there are few, but for enough programs. On 4 x H200 a reduce-scatter of 128 MiB takes
0.298 ms in four tiles for a signal; in two of 32 KiB 0.300, and in one of 64, where all programs send, and add, at the
same time, 0.304. With 32 KiB for a signal it takes 0.325, with 128 0.305, in runs of their own. On 2, where one peer
has all that a program sends, it takes 0.201 ms with 128 KiB, and 0.223 with 64: collectives_steps.json and
collectives_steps_2.json in benchmarks/results."""


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


class Parcels(NamedTuple):
    """How a part of a tensor goes through inboxes."""

    part: runs.Runs
    together: int  # tiles for each signal
    inbox: Inboxes


def parcels(rows: int, run: int, dtype: torch.dtype, block: int | None, world: World) -> Parcels:
    """Of a part of `rows` runs of `run` elements. block: elements of a tile. Collective."""
    # Bytes that move together: fewer take more addresses, each in a register. But to the inbox a thread has whole 16.
    access = max(math.gcd(run * dtype.itemsize, 16), 4)
    room = pushed_room(rows * run, dtype.itemsize, world.size)
    pushed = max(room * dtype.itemsize // PUSHED_TILES, COPY_BYTES)
    most = min(room * dtype.itemsize, pushed * access // 16)
    part = runs.runs(rows, run, dtype, block or most // dtype.itemsize)
    tile = part.ROWS.value * part.COLS.value
    together = max(room // tile, 1)
    return Parcels(part, together, inboxes(num_programs(world, part.tiles), together * tile, dtype, world))


def tiles(
    n: int, like: torch.Tensor, block: int | None, parts: int, world: World, fraction: int = 1
) -> tuple[int, int, int, Inboxes]:
    """How n elements like `like` go through inboxes in `parts` parts that take turns tile by tile: the number of turns,
    elements of a block, blocks of a tile, which is sent for a signal, and the inboxes. block: elements of a block, else
    COPY_BYTES / fraction. Collective."""
    room = pushed_room(triton.cdiv(n, parts), like.element_size(), world.size)
    block = block or min(room, COPY_BYTES // fraction // like.element_size())
    together = triton.cdiv(room, block)
    turns = triton.cdiv(n, block * together * parts)
    return turns, block, together, inboxes(num_programs(world, turns), together * block, like.dtype, world)


@triton.jit
def in_inbox(inbox_ptr, sent, distance, world, ROOM: tl.constexpr):
    """Where what rank + `distance` sends is, of this program's signal after `sent`. Tiles are stored and loaded whole
    and with no mask, so that accesses are 16 bytes wide however long a run of x is."""
    slot = tl.cast(sent & 1, tl.int64) * (world.size - 1) + (distance - 1)
    return inbox_ptr + (slot * tl.num_programs(0) + tl.program_id(0)) * ROOM


@triton.jit
def await_sent(counts, sent, world):
    """Until what belongs to the signal after `sent` has come from every rank. Before a rank sent it, it had taken out
    what came before, so the half of its inbox where that was is free for my next."""
    for i in tl.static_range(0, world.size):
        # Of mine there is only the count, from which the next launch goes on.
        pl.wait(counts + (tl.cast(world.rank, tl.int32) + i) % world.size, sent + 1, world)


@triton.jit
def send_tiles(
    x_ptr, inbox_ptr, counts, sent, first, begin, end, part, together, world,
    PARTS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Store tiles `begin` to `end` of this program into the inboxes of the others, and signal. first: of the tiles that
    belong to the signal. x is (rows / together, PARTS, together, run); [:, r] is for rank r, of one part for all."""
    TILE: tl.constexpr = part.ROWS * part.COLS
    rank = tl.cast(world.rank, tl.int32)
    element = tl.arange(0, part.ROWS)[:, None] * part.COLS + tl.arange(0, part.COLS)[None, :]
    for t in range(begin, end):
        row, col, inside = runs.tile(tl.program_id(0) + t * tl.num_programs(0), part)
        for i in tl.static_range(1, world.size):
            peer = (rank + i) % world.size
            place = x_ptr + runs.stacked(row, col, part, peer % PARTS, PARTS, together)
            x = tl.load(place, mask=inside, other=0)
            at = in_inbox(inbox_ptr, sent, world.size - i, world, TOGETHER * TILE) + (t - first) * TILE
            pl.store(at + element, x, peer, world)
    pl.signal_all(counts + rank, world)  # publish; and I am done with what came in the other half


@triton.jit
def exchange_kernel(
    x_ptr,  # (rows / together_x, PARTS, together_x, run) this rank's; [:, r] is for rank r, of one part for all
    out_ptr,  # (rows / together_out, size, together_out, run) this rank's; [:, r] is from rank r
    inbox_ptr,  # (2, size - 1, programs, TOGETHER tiles) on every rank, see Inboxes
    sent_ptr,  # int32 (programs, size) on every rank
    part,  # Runs
    together_x,
    together_out,
    world,
    PARTS: tl.constexpr,  # of x: size, or 1
    TOGETHER: tl.constexpr,  # tiles for each signal; fewer for the first one, so that programs are out of step
):
    """Each rank's part of x, or all of x, to each rank."""
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
        send_tiles(x_ptr, inbox_ptr, counts, sent, first, begin, end, part, together_x, world, PARTS, TOGETHER)
        for t in range(begin, end):
            row, col, inside = runs.tile(pid + t * programs, part)
            x = tl.load(x_ptr + runs.stacked(row, col, part, rank % PARTS, PARTS, together_x), mask=inside)
            tl.store(out_ptr + runs.stacked(row, col, part, rank, world.size, together_out), x, mask=inside)
        await_sent(counts, sent, world)
        for t in range(begin, end):
            row, col, inside = runs.tile(pid + t * programs, part)
            for i in tl.static_range(1, world.size):
                x = tl.load(in_inbox(inbox_ptr, sent, i, world, ROOM) + (t - first) * TILE + element)
                place = runs.stacked(row, col, part, (rank + i) % world.size, world.size, together_out)
                tl.store(out_ptr + place, x, mask=inside)
        sent += 1


def exchange_launch(
    world: World, rows: int, run: int, together: Sequence[int], parts: int, dtype: torch.dtype, block: int | None
) -> Launch:
    """launch(x, out): `exchange_kernel` of parts of `rows` runs of `run` elements. together: how many runs of a part
    are in a row in x and in out. Collective."""
    part, tiles, inbox = parcels(rows, run, dtype, block, world)
    arguments: tuple[Any, ...] = (*inbox, part, *together)
    return resident_launch(world, exchange_kernel, part.tiles, arguments, (parts, tiles))
