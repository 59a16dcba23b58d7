"""nodes: one launch, over several nodes.
    1. Every program tells each node, along the rail, in which slots of its ranks the tokens of its piece are: a note,
       see shared.rails. Meanwhile each rank adds the rows of every slot's token, as in `pull`.
    2. The rank that has a note of another node adds the sums of its node's ranks, in fp32 in the order of the ranks,
       and puts one sum for each token back along the rail.
    3. A token's rank adds the nodes' sums, in fp32 in the order of the nodes. Of its own node it loads the ranks' sums.

A note answers the sums of the launch before, and the sums answer the note: nobody waits until puts are complete.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import address

from ..dispatch import choices
from ..shared import nodes, rails
from . import pull


class Buffers(NamedTuple):
    """A launch's memory, on every rank."""

    sums: Any  # (S, H): of each slot; the ranks of this node load them
    leaving: Any  # (nodes, programs, tokens of a piece, H): [k]: sums for node k, as they leave
    home: Any  # the same: [k]: sums of node k for my tokens
    ready: Any  # int32 (1,): programs of this node that have added all their slots
    came: Any  # int32 (nodes, programs): sums that have come from a node, `each` a launch
    read: Any  # int32 (programs,): ranks of this node that have read my sums


@triton.jit
def nodes_kernel(
    y_ptr,  # (R, H) this rank's
    tokens_ptr,  # int32 (S, K) this rank's: the rows of the token in each slot, -1 for none
    places_ptr,  # int32 (T, size) this rank's: the slot of each token on each rank, -1 for none
    weights_ptr,  # fp32 (R,) this rank's, or None
    out_ptr,  # (T, H) this rank's
    m,  # Buffers
    r,  # rails.Pieces
    p,  # pull.Size
    world,
):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    launch = pl.epoch(r.arrived, world)
    NODES: tl.constexpr = world.size // r.NEAR
    node, local = rails.place(world, r)
    first, last = choices.share(p.T, tl.num_programs(0))
    rails.write(places_ptr, first, last, 0, world, r)
    for i in range(1, NODES):
        to = (node + i) % NODES
        note, target = rails.note(r.leaving, to, 0, world, r), rails.note(r.notes, node, 0, world, r)
        nbytes, asked = rails.note_bytes(note, r), r.arrived + node * programs + pid
        pl.put_signal(asked, to * r.NEAR + local, world, dst=target, src=note, nbytes=nbytes)
    for piece in range(pid, tl.cdiv(p.S, p.PIECE), programs):
        pull.add_piece(y_ptr, tokens_ptr, weights_ptr, m.sums, piece, p)
    nodes.signal_node(m.ready, world, r.NEAR)  # publish my sums
    pl.signal(m.ready, world.rank, world)
    pl.wait(m.ready, launch * programs * r.NEAR, world)
    for i in range(1, NODES):
        origin = (node + NODES - i) % NODES
        pl.wait(r.arrived + origin * programs + pid, launch, world)
        _send(origin, m, r, p, world)
    for i in range(1, NODES):
        pl.wait(m.came + (node + NODES - i) % NODES * programs + pid, launch * r.each, world)
    _collect(places_ptr, out_ptr, first, last, m, r, p, world)
    nodes.signal_node(m.read + pid, world, r.NEAR)  # before overwrite: I have read the sums of my node's ranks
    if r.NEAR > 1:
        pl.wait(m.read + pid, launch * (r.NEAR - 1), world)


@triton.jit
def _of_node(total, slots, cols, m, r, p, world):
    """total (ROWS, COLS) and the sums of my node's ranks in `slots` (ROWS, NEAR2), in the order of the ranks."""
    node, _ = rails.place(world, r)
    ranks = tl.arange(0, r.NEAR2)[None, :]
    for j in tl.static_range(r.NEAR):
        slot = tl.max(tl.where(ranks == j, slots, -1), 1)[:, None]
        at = address.of_rank(m.sums, node * r.NEAR + j, world) + tl.cast(slot, tl.int64) * p.H + cols
        total += tl.load(at, mask=(slot >= 0) & (cols < p.H), other=0).to(tl.float32)
    return total


@triton.jit
def _send(origin, m, r, p, world):
    """Put to node `origin` the sums of my node for its piece that has arrived here."""
    node, local = rails.place(world, r)
    note = rails.note(r.notes, origin, 0, world, r)
    source = rails.line(m.leaving, origin, 0, p.H, world, r)
    for start in range(0, tl.load(note), p.ROWS):
        i = start + tl.arange(0, p.ROWS)[:, None]
        slots = rails.slots(note, i, r)
        somewhere = tl.max(slots, 1)[:, None] >= 0
        for col in range(0, p.H, p.COLS):
            cols = col + tl.arange(0, p.COLS)[None, :]
            total = _of_node(tl.zeros((p.ROWS, p.COLS), tl.float32), slots, cols, m, r, p, world)
            at = source + tl.cast(i, tl.int64) * p.H + cols
            tl.store(at, total.to(source.dtype.element_ty), mask=somewhere & (cols < p.H))
    tl.debug_barrier()  # one thread sends what the others have stored
    peer, target = origin * r.NEAR + local, rails.line(m.home, node, 0, p.H, world, r)
    ITEM: tl.constexpr = source.dtype.element_ty.primitive_bitwidth // 8
    came = m.came + node * tl.num_programs(0) + tl.program_id(0)
    rails.put_lines(came, note, target, source, p.H, p.H * ITEM, peer, world, r)


@triton.jit
def _collect(places_ptr, out_ptr, first, last, m, r, p, world):
    """Add the nodes' sums of my tokens [first, last)."""
    node, _ = rails.place(world, r)
    ranks = tl.arange(0, r.NEAR2)[None, :]
    for start in range(first, last, p.ROWS):
        t = start + tl.arange(0, p.ROWS)[:, None]
        places = places_ptr + tl.cast(t, tl.int64) * world.size + ranks
        inside = (t < last) & (ranks < r.NEAR)
        for col in range(0, p.H, p.COLS):
            cols = col + tl.arange(0, p.COLS)[None, :]
            total = tl.zeros((p.ROWS, p.COLS), tl.float32)
            for k in range(world.size // r.NEAR):
                slots = tl.load(places + k * r.NEAR, mask=inside, other=-1)
                if k == node:
                    total = _of_node(total, slots, cols, m, r, p, world)
                else:
                    at = rails.line(m.home, k, 0, p.H, world, r) + tl.cast(t - first, tl.int64) * p.H + cols
                    somewhere = tl.max(slots, 1)[:, None] >= 0
                    total += tl.load(at, mask=somewhere & (cols < p.H), other=0).to(tl.float32)
            at = out_ptr + tl.cast(t, tl.int64) * p.H + cols
            tl.store(at, total.to(out_ptr.dtype.element_ty), mask=(t < last) & (cols < p.H))
