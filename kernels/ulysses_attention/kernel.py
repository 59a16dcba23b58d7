"""The kernel: heads go to their ranks group by group, whole sequences are attended to, and results go home by tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import pkt.language as pl

from ..shared import tile_attention


class Exchange(NamedTuple):
    """What the kernel works on. A rank has R of the S = size * R positions. HEADS are a rank's heads of queries, COPIES
    its heads of keys, each of which HEADS // COPIES heads of queries share. GROUP heads of queries form a group. A
    group travels in pieces of up to PIECE rows; keys travel with the first group that needs them."""

    q_ptr: Any  # (B, R, size * HEADS, D) this rank's
    k_ptr: Any  # (B, R, KV, D) this rank's
    v_ptr: Any  # as k
    spans_ptr: Any  # int32 (2, S) this rank's, or None: the document of each position, see sequence.spans
    out_ptr: Any  # (B, R, size * HEADS, D) this rank's; on every rank if DIRECT: the ranks of the heads store
    q_inbox_ptr: Any  # (B, HEADS, S, D) on every rank: my heads; each rank stores its positions
    k_inbox_ptr: Any  # (B, COPIES, S, D) on every rank: my heads; each rank stores its positions
    v_inbox_ptr: Any  # as k_inbox
    out_inbox_ptr: Any  # as out, on every rank; None if DIRECT
    ready_ptr: Any  # int32 (B, groups) on every rank: pieces of my heads that all ranks have ever stored
    done_ptr: Any  # int32 (size, groups) on every rank: tiles of my positions that each rank has ever finished
    queue_ptr: Any  # int32, this rank's
    bar_ptr: Any  # int32 (num_comm_sms) on every rank
    tasks: Any  # tiles of all my heads
    tiles: Any  # of BLOCK_M queries, in a rank's positions
    pieces: Any  # of a group, in a rank's positions
    B: Any
    R: Any
    S: Any
    left: Any  # a query at position p sees keys from p - left
    right: Any  # to p + right
    length: Any  # S
    scale: Any  # of a score, times log2(e); fp32
    num_comm_sms: Any
    HEADS: tl.constexpr
    COPIES: tl.constexpr
    ALL_KV: tl.constexpr  # heads of keys in all
    KV: tl.constexpr  # 1: in the inboxes a head's keys lie together
    D: tl.constexpr
    GROUP: tl.constexpr
    DIRECT: tl.constexpr
    WHOLE: tl.constexpr  # D is BLOCK_D
    PIECE: tl.constexpr  # rows
    BLOCK_R: tl.constexpr  # rows that a program moves at a time
    BLOCK_M: tl.constexpr  # queries of a task
    BLOCK_N: tl.constexpr  # keys of a step
    BLOCK_D: tl.constexpr


@triton.jit
def _first(g, p):
    """The first group of those that share keys with group g."""
    sharing: tl.constexpr = max(p.HEADS // p.COPIES // p.GROUP, 1)
    return g // sharing * sharing


@triton.jit
def _move(dst_ptr, src_ptr, dst_pitch, src_pitch, rows, p):
    """Copy `rows` rows of one head; pitch: elements from one row to the next."""
    d = tl.arange(0, p.BLOCK_D)[None, :]
    for start in range(0, rows, p.BLOCK_R):
        r = tl.cast(start + tl.arange(0, p.BLOCK_R)[:, None], tl.int64)
        inside = (r < rows) & (d < p.D)
        tl.store(dst_ptr + r * dst_pitch + d, tl.load(src_ptr + r * src_pitch + d, mask=inside), mask=inside)


@triton.jit
def _push(task, p, world, epoch):
    """One piece of a group to the rank of its heads, for every rank: the queries, and keys that no group before has."""
    row = task % p.pieces * p.PIECE
    b = tl.cast(task // p.pieces % p.B, tl.int64)
    g = task // p.pieces // p.B
    rank = tl.cast(world.rank, tl.int32)
    rows = tl.minimum(p.R - row, p.PIECE)
    position = rank * p.R + row
    sharing: tl.constexpr = p.HEADS // p.COPIES
    keys: tl.constexpr = max(p.GROUP // sharing, 1)
    heads: tl.constexpr = world.size * p.HEADS
    repeats: tl.constexpr = world.size * p.COPIES // p.ALL_KV
    for i in range(1, world.size + 1):
        peer = (rank + i) % world.size
        q_inbox_ptr = pl.peer(p.q_inbox_ptr, peer, world)
        for j in range(p.GROUP):
            head = g * p.GROUP + j
            target = ((b * p.HEADS + head) * p.S + position) * p.D
            source = ((b * p.R + row) * heads + peer * p.HEADS + head) * p.D
            _move(q_inbox_ptr + target, p.q_ptr + source, p.D, heads * p.D, rows, p)
        if g == _first(g, p):
            k_inbox_ptr = pl.peer(p.k_inbox_ptr, peer, world)
            v_inbox_ptr = pl.peer(p.v_inbox_ptr, peer, world)
            for j in range(keys):
                head = g * p.GROUP // sharing + j
                target = ((b * p.COPIES + head) * p.S + position) * p.D
                source = ((b * p.R + row) * p.ALL_KV + (peer * p.COPIES + head) // repeats) * p.D
                _move(k_inbox_ptr + target, p.k_ptr + source, p.D, p.ALL_KV * p.D, rows, p)
                _move(v_inbox_ptr + target, p.v_ptr + source, p.D, p.ALL_KV * p.D, rows, p)
    pl.signal_all(p.ready_ptr + b * (p.HEADS // p.GROUP) + g, world)  # publish


@triton.jit
def _compute(task, p, world, epoch):
    """Task `task`: BLOCK_M queries of a head that are of one rank, those with the most keys under a causal mask first.
    The result goes to that rank."""
    tiles = p.tiles * world.size
    tile = tiles - 1 - task % tiles
    owner = tile // p.tiles
    row = tile % p.tiles * p.BLOCK_M
    b = tl.cast(task // tiles // p.GROUP % p.B, tl.int64)
    g = task // tiles // p.GROUP // p.B
    head = g * p.GROUP + task // tiles % p.GROUP
    rank = tl.cast(world.rank, tl.int32)
    groups: tl.constexpr = p.HEADS // p.GROUP
    first = _first(g, p)
    for at in range(first, g + 1, tl.maximum(g - first, 1)):  # keys, and queries if they came later
        pl.wait(p.ready_ptr + b * groups + at, epoch * (world.size * p.pieces), world)
    rows = tl.minimum(p.R - row, p.BLOCK_M)
    position = owner * p.R + row
    low, high, least, most, all_from, all_to = tile_attention.sight(
        position, p.S, rows, position, p.left, p.right, p, p.BLOCK_M
    )
    m = tl.arange(0, p.BLOCK_M)
    d = tl.arange(0, p.BLOCK_D)
    inside = (m < rows)[:, None] & (d < p.D)[None, :]
    place = ((b * p.HEADS + head) * p.S + position) * p.D
    q = tl.load(p.q_inbox_ptr + place + m[:, None] * p.D + d[None, :], mask=inside, other=0.0)
    heads: tl.constexpr = world.size * p.HEADS
    home = p.out_ptr if p.DIRECT else p.out_inbox_ptr
    home += (b * p.R * heads + rank * p.HEADS + head) * p.D
    home = pl.peer(home, owner, world)
    top, total, acc = tile_attention.nothing(p)
    begin, end, full, unmasked, masked = tile_attention.blocks(0, p.S, least, most, all_from, all_to, p.BLOCK_N)
    keys = (b * p.COPIES + head // (p.HEADS // p.COPIES)) * p.S * p.D
    top, total, acc = tile_attention.attend(
        top, total, acc, q, p.k_inbox_ptr + keys, p.v_inbox_ptr + keys, begin, full, unmasked, masked, end, 0, low,
        high, p,
    )  # fmt: skip
    out, _ = tile_attention.finished(top, total, acc)
    out = out.to(home.dtype.element_ty)
    r = tl.cast(row + m, tl.int64)[:, None]
    tl.store(home + r * (heads * p.D) + d[None, :], out, mask=inside)
    pl.signal(p.done_ptr + rank * groups + g, owner, world)  # publish


@triton.jit
def _collect(p, world, epoch):
    """Wait for the tiles of my positions. Without DIRECT also take them out of the inbox, group by group."""
    groups: tl.constexpr = p.HEADS // p.GROUP
    pieces = 1 if p.DIRECT else p.B * p.pieces
    for task in range(tl.program_id(0), groups * world.size * pieces, tl.num_programs(0)):
        g = task // pieces // world.size
        source = task // pieces % world.size
        pl.wait(p.done_ptr + source * groups + g, epoch * (p.B * p.GROUP * p.tiles), world)
        if not p.DIRECT:
            heads: tl.constexpr = world.size * p.HEADS
            row = task % p.pieces * p.PIECE
            b = tl.cast(task % pieces // p.pieces, tl.int64)
            for j in range(p.GROUP):
                place = ((b * p.R + row) * heads + source * p.HEADS + g * p.GROUP + j) * p.D
                rows = tl.minimum(p.R - row, p.PIECE)
                _move(p.out_ptr + place, p.out_inbox_ptr + place, heads * p.D, heads * p.D, rows, p)


@triton.jit
def exchange_kernel(p, world):
    pushes = p.B * (p.HEADS // p.GROUP) * p.pieces
    epoch = pl.epoch(p.ready_ptr, world)
    if tl.program_id(0) < p.num_comm_sms:
        # before overwrite: every rank's launch before has ended, and with it what reads its inboxes
        pl.barrier(p.bar_ptr + tl.program_id(0), world)
    pl.lcsc(_compute, _push, (p, world, epoch), p.tasks, pushes, p.queue_ptr, epoch, p.num_comm_sms)
    _collect(p, world, epoch)
