"""nodes: one launch, over several nodes.
    1. Every program counts the tokens of its piece by expert and by rank. A rank's counts go to each other node once,
       along the rail, and from there to the ranks of that node.
    2. Every rank so knows all counts. Programs number their tokens as in `push`: rows and slots are the same.
    3. Every program puts its tokens to each node that has an expert of them, each token once, whatever number of its
       experts and ranks is there. See shared.rails.
    4. The ranks of a node load their tokens from the rank that received them, and from each other, into their rows.

A token's line has the rank, the row and the weight of each of its pairs, its scales, and its elements.

One box is enough: all counts of a launch are there only if every rank has ended the launch before, with all that it
read. And every put is answered in its launch or by the counts of the next one, so nobody waits until puts are complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import address

from ..shared import nodes, rails
from . import choices, low_latency, numbering, push, scales, totals


class Buffers(NamedTuple):
    """A launch's memory, on every rank. Names are those of `arguments.Buffers`, where they mean the same."""

    table: Any
    lines: Any  # int32 (nodes, programs, tokens of a piece, line): [k]: of the rail's rank on node k; [node]: mine
    counted: Any  # int32 (nodes,): the launch whose counts have come from a node
    told: Any  # int32 (1,): ranks of this node that have told the counts of their rail
    grid: Any
    hist: Any
    sent: Any
    base: Any
    line: Any  # int32 of a line
    head: Any  # of it, before a token's elements
    order: Any = None
    sorting: Any = None


@triton.jit
def nodes_kernel(
    x_ptr,  # (T, H) this rank's
    idx_ptr,  # int32 or int64 (T, K) this rank's
    w_ptr,  # fp32 (T, K) this rank's
    s_ptr,  # int32 (T, G) this rank's: the bits of the tokens' scales; None without
    to,  # Result
    routes_ptr,  # int32 (T, K) this rank's: the row of each pair of token and expert on the expert's rank
    m,  # Buffers
    r,  # rails.Pieces
    p,  # Size
    world,
):
    launch = pl.epoch(r.arrived, world)
    half = m.table + (launch & 1) * (world.size * (p.EXPERTS + world.size))
    totals.count(idx_ptr, m, p, world)
    pl.grid_barrier(m.grid, world)  # publish: every program's counts
    if tl.program_id(0) == 0:
        _tell(half, launch, m, r, p, world)
    pl.wait(m.told, launch * r.NEAR, world)  # before overwrite: every rank has ended its last launch
    room = numbering.begin(half, to, m, p, world)
    numbering.number(idx_ptr, half, room, to, routes_ptr, m, p, world)
    tl.debug_barrier()  # other threads have stored places and rows
    first, last = choices.share(p.T, p.COUNTERS)
    rails.write(to.places, first, last, 0, world, r)
    _pack(x_ptr, idx_ptr, w_ptr, s_ptr, routes_ptr, first, last, m, r, p, world)
    rails.send(m.lines, m.line, m.line * 4, 0, world, r)
    for i in range(world.size // r.NEAR):
        origin = rails.receive(i, launch, world, r)
        for j in range(r.NEAR):
            _place(origin, rails.reach(i, j, launch, world, r), to, m, r, p, world)
    _fill(half, to, p, world)


@triton.jit
def _tell(half, launch, m, r, p, world):
    """Tell the ranks of my rail how many of my tokens go to each expert, and to each rank; and the ranks of my node
    what the ranks of my rail have told me."""
    NODES: tl.constexpr = world.size // r.NEAR
    node, local = rails.place(world, r)
    width = p.EXPERTS + world.size
    e = tl.arange(0, triton.next_power_of_2(p.EXPERTS))
    ranks = tl.arange(0, triton.next_power_of_2(world.size))
    mine = half + world.rank * width
    pairs = totals.before(m.hist, p.EXPERTS, p.COUNTERS)
    tokens = totals.before(m.sent, world.size, p.COUNTERS)
    tl.store(mine + e, pairs, mask=e < p.EXPERTS)
    tl.store(mine + p.EXPERTS + ranks, tokens, mask=ranks < world.size)
    for i in range(1, NODES):
        to = (node + i) % NODES * r.NEAR + local
        pl.put_signal(m.counted + node, to, world, dst=mine, src=mine, nbytes=width * 4)
    tl.debug_barrier()  # other threads have stored what is loaded here
    for i in range(NODES):
        origin = (node + NODES - i) % NODES
        if i > 0:
            pl.wait(m.counted + origin, launch, world)
        row = half + (origin * r.NEAR + local) * width
        pairs = tl.load(row + e, mask=e < p.EXPERTS)
        tokens = tl.load(row + p.EXPERTS + ranks, mask=ranks < world.size)
        for j in tl.static_range(1, r.NEAR):
            there = address.of_rank(row, node * r.NEAR + (local + j) % r.NEAR, world)
            tl.store(there + e, pairs, mask=e < p.EXPERTS)
            tl.store(there + p.EXPERTS + ranks, tokens, mask=ranks < world.size)
    nodes.signal_node(m.told, world, r.NEAR)  # publish
    pl.signal(m.told, world.rank, world)


@triton.jit
def _pack(x_ptr, idx_ptr, w_ptr, s_ptr, routes_ptr, first, last, m, r, p, world):
    """Write the lines of my tokens [first, last) that go anywhere."""
    node, _ = rails.place(world, r)
    lines = rails.line(m.lines, node, 0, m.line, world, r)
    k = tl.arange(0, p.K2)[None, :]
    PER: tl.constexpr = 32 // x_ptr.dtype.element_ty.primitive_bitwidth  # elements in an int32
    for start in range(first, last, p.ROWS):
        t = start + tl.arange(0, p.ROWS)[:, None]
        inside = (t < last) & (k < p.K)
        at = tl.cast(t, tl.int64) * p.K + k
        owner = choices.owner(choices.experts(idx_ptr, t, k, t < last, p), p)
        rows = tl.load(routes_ptr + at, mask=inside, other=-1)
        number = tl.cast(t - first, tl.int64) * m.line
        goes = tl.max(rows, 1)[:, None] >= 0
        there = goes & (k < p.K)
        tl.store(lines + number + k, owner, mask=there)
        tl.store(lines + number + p.K + k, rows, mask=there)
        bits = tl.load(w_ptr + at, mask=inside, other=0).to(tl.int32, bitcast=True)
        tl.store(lines + number + 2 * p.K + k, bits, mask=there)
        if p.SCALED:
            scales.send(s_ptr, t, goes, lines + number + 3 * p.K, p)
        elements = lines.to(tl.pointer_type(x_ptr.dtype.element_ty)) + (number + m.head) * PER
        for col in range(0, p.H, p.COLS):
            cols = col + tl.arange(0, p.COLS)[None, :]
            both = goes & (cols < p.H)
            tl.store(elements + cols, tl.load(x_ptr + tl.cast(t, tl.int64) * p.H + cols, mask=both), mask=both)
    tl.debug_barrier()  # one thread sends what the others have stored


@triton.jit
def _place(origin, peer, to, m, r, p, world):
    """Load from rank `peer` of my node what it has of this program's piece of node `origin`, into my rows."""
    rank = tl.cast(world.rank, tl.int32)
    k = tl.arange(0, p.K2)[None, :]
    note = address.of_rank(rails.note(r.notes, origin, 0, world, r), peer, world)
    lines = address.of_rank(rails.line(m.lines, origin, 0, m.line, world, r), peer, world)
    count = tl.load(note)
    PER: tl.constexpr = 32 // to.rows.dtype.element_ty.primitive_bitwidth
    for start in range(0, count, p.ROWS):
        i = start + tl.arange(0, p.ROWS)[:, None]
        slot = tl.load(note + 2 + i * r.NEAR + rank % r.NEAR, mask=i < count, other=-1)
        if tl.max(tl.max(slot, 1), 0) >= 0:
            there = (slot >= 0) & (k < p.K)
            number = tl.cast(i, tl.int64) * m.line
            mine = tl.load(lines + number + k, mask=there, other=-1) == rank
            rows = tl.where(mine, tl.load(lines + number + p.K + k, mask=there, other=-1), -1)
            bits = tl.load(lines + number + 2 * p.K + k, mask=there, other=0)
            t = tl.load(note + 1) + i
            tl.store(to.tokens + tl.cast(slot, tl.int64) * p.K + k, rows, mask=there)
            elements = lines.to(tl.pointer_type(to.rows.dtype.element_ty)) + (number + m.head) * PER
            push.describe(rows, bits, origin * r.NEAR + peer % r.NEAR, t, to)
            push.into_rows(elements, rows, slot >= 0, to, p)
            if p.SCALED:
                scales.place(None, t, lines + number + 3 * p.K, False, slot >= 0, rows, to, p)


@triton.jit
def _fill(half, to, p, world):
    """What no token fills."""
    rank = tl.cast(world.rank, tl.int32)
    width = p.EXPERTS + world.size
    e = tl.arange(0, triton.next_power_of_2(p.OWN))
    ranks = tl.arange(0, triton.next_power_of_2(world.size))
    there = (ranks < world.size)[:, None] & (e < p.OWN)[None, :]
    pairs = tl.load(half + ranks[:, None] * width + rank * p.OWN + e[None, :], mask=there, other=0)
    sent = tl.load(half + ranks * width + p.EXPERTS + rank, mask=ranks < world.size, other=0)
    total = tl.sum(pairs, 0)
    padded = tl.cdiv(total, p.ALIGNMENT) * p.ALIGNMENT
    fits = tl.sum(padded, 0) <= p.R
    starts = tl.where(fits, tl.cumsum(padded) - padded, 0)
    low_latency.fill(total, starts, tl.where(fits, sent, 0), tl.program_id(0), tl.num_programs(0), to, p, world)


# ---------------------------------------------------------------------------------------------------------------- host
def line_of(pairs: int, scales: int, nbytes: int) -> tuple[int, int]:
    """int32 of a line, and those before its elements. Both are multiples of 16 bytes."""
    head = triton.cdiv(3 * pairs + scales, 4) * 4
    return head + triton.cdiv(nbytes, 16) * 4, head


def buffers(
    size: int, experts: int, programs: int, near: int, tokens: int, line: int, head: int, int32: Callable[..., Any],
    counters: Callable[[str, int], Any],
) -> tuple[Buffers, rails.Pieces]:  # fmt: skip
    """The memory for at most so many tokens of a rank. int32(name, *shape), counters(name, n): in the heap."""
    count = size // near
    r = rails.pieces("dispatch", tokens, 1, programs, near, count, int32, counters)
    return Buffers(
        int32("dispatch.counts", 2, size, experts + size), int32("dispatch.lines", count, programs, r.each, line),
        counters("dispatch.counted", count), counters("dispatch.told", 1), counters("dispatch.grid", 1),
        int32("dispatch.hist", programs, experts), int32("dispatch.sent", programs, size),
        int32("dispatch.base", programs, experts), line, head,
    ), r  # fmt: skip
