"""nodes of `dispatch_again`: one launch, over several nodes. Tokens go the way of dispatch's form nodes, see
shared.rails. Nothing is counted, because `places` has their slots.

The box has two halves, which launches use in turn. A rank ends a launch when it has heard of every rank's pieces of it.
So when launch l + 2 begins on one rank, launch l has ended on all of them, and with it all reading of its half.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import address

from ..shared import rails
from . import again, choices


class Buffers(NamedTuple):
    """A launch's memory, on every rank."""

    lines: Any  # (2, nodes, programs, tokens of a piece, H): [:, k]: of the rail's rank on node k; [:, node]: mine
    grid: Any  # int32 (1,): of the grid barrier
    named: Any  # as in again.Buffers


@triton.jit
def nodes_kernel(
    x_ptr,  # (T, H) this rank's
    tokens_ptr,  # int32 (S, K) this rank's: the rows of the token in each slot, -1 for none
    places_ptr,  # int32 (T, size) this rank's: the slot of each token on each rank, -1 for none
    weights_ptr,  # fp32 (R,) this rank's
    y_ptr,  # (R, H) this rank's, or None
    rows_ptr,  # (R, H) this rank's
    dots_ptr,  # fp32 (R,) this rank's
    m,  # Buffers
    r,  # rails.Pieces
    p,  # again.Size
    world,
):
    launch = pl.epoch(r.arrived, world)
    half = launch & 1
    again.name_rows(tokens_ptr, m, p)
    pl.grid_barrier(m.grid, world)  # publish: the rows of all programs
    first, last = choices.share(p.T, tl.num_programs(0))
    rails.write(places_ptr, first, last, half, world, r)
    _pack(x_ptr, first, last, half, m, r, p, world)
    ITEM: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
    rails.send(m.lines, p.H, p.H * ITEM, half, world, r)
    for i in range(world.size // r.NEAR):
        origin = rails.receive(i, launch, world, r)
        for j in range(r.NEAR):
            peer = rails.reach(i, j, launch, world, r)
            _place(origin, peer, half, tokens_ptr, weights_ptr, y_ptr, rows_ptr, dots_ptr, m, r, p, world)
    again.fill(tokens_ptr, rows_ptr, dots_ptr, tl.program_id(0), tl.num_programs(0), m, p)
    pl.quiet(world)  # before the next launch's signals


@triton.jit
def _pack(x_ptr, first, last, half, m, r, p, world):
    """Copy my tokens [first, last) to where they leave from."""
    node, _ = rails.place(world, r)
    lines = rails.line(m.lines, node, half, p.H, world, r)
    for start in range(first, last, p.ROWS):
        t = start + tl.arange(0, p.ROWS)[:, None]
        for col in range(0, p.H, p.COLS):
            cols = col + tl.arange(0, p.COLS)[None, :]
            both = (t < last) & (cols < p.H)
            values = tl.load(x_ptr + tl.cast(t, tl.int64) * p.H + cols, mask=both)
            tl.store(lines + tl.cast(t - first, tl.int64) * p.H + cols, values, mask=both)
    tl.debug_barrier()  # one thread sends what the others have stored


@triton.jit
def _place(
    origin, peer, half, tokens_ptr, weights_ptr, y_ptr, rows_ptr, dots_ptr, m, r, p, world
):  # fmt: skip
    """Load from rank `peer` of my node what it has of this program's piece of node `origin`, into my rows."""
    local = tl.cast(world.rank, tl.int32) % r.NEAR
    k = tl.arange(0, p.K2)[None, :]
    note = address.of_rank(rails.note(r.notes, origin, half, world, r), peer, world)
    lines = address.of_rank(rails.line(m.lines, origin, half, p.H, world, r), peer, world)
    count = tl.load(note)
    for start in range(0, count, p.ROWS):
        i = start + tl.arange(0, p.ROWS)[:, None]
        slot = tl.load(note + 2 + i * r.NEAR + local, mask=i < count, other=-1)
        there = (slot >= 0) & (slot < p.S) & (k < p.K)
        rows = tl.load(tokens_ptr + tl.cast(slot, tl.int64) * p.K + k, mask=there, other=-1)
        if tl.max(tl.max(rows, 1), 0) >= 0:
            source = lines + tl.cast(i, tl.int64) * p.H
            again.into_rows(source, rows, weights_ptr, y_ptr, rows_ptr, dots_ptr, p)
