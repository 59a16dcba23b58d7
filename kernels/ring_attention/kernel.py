"""The kernel: attention of this rank's queries to the keys of all ranks, in the order in which they arrive."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import pkt.language as pl

from ..shared import tile_attention


class Attention(NamedTuple):
    """What the kernel works on. S is the rows of a rank; a chunk is up to CHUNK of them, of all heads. WAYS: who moves
    keys and values: "fused", this kernel; "copied", copy engines beside it; "gathered", a call before it."""

    q_ptr: Any  # (B, S, H, D) this rank's
    k_ptr: Any  # (B, S, KV, D) this rank's; (size, B, S, KV, D) if gathered, this rank's too
    v_ptr: Any  # as k
    spans_ptr: Any  # int32 (2, size * S) this rank's, or None: the document of each position, see sequence.spans
    out_ptr: Any  # (B, S, H, D) this rank's
    lse_ptr: Any  # fp32 (B, H, S) this rank's
    k_inbox_ptr: Any  # (size - 1, B, S, KV, D) on every rank; rank - d stores [d - 1]; None if gathered
    v_inbox_ptr: Any  # as k_inbox
    ready_ptr: Any  # int32 (size - 1, B, chunks) on every rank; [d - 1, b, c] is the number of the last launch whose
    # chunk c of rank - d is here; if copied the number of this launch follows
    needs_ptr: Any  # int32 (size - 1, chunks) this rank's; [d - 1, c]: rank + d needs my chunk c
    queue_ptr: Any  # int32, this rank's
    bar_ptr: Any  # int32 (num_comm_sms) on every rank, of the kernel below
    B: Any
    S: Any
    left: Any  # a query at position p sees keys from p - left
    right: Any  # to p + right
    length: Any  # of the sequence; what lies behind is padding
    scale: Any  # of a score, times log2(e); fp32
    num_comm_sms: Any
    joined: Any  # batches whose chunks come together: the first one's counter is that of all
    H: tl.constexpr  # these three belong to a model, and as constants they save registers for addresses
    KV: tl.constexpr
    D: tl.constexpr
    WAY: tl.constexpr
    ZIGZAG: tl.constexpr
    WHOLE: tl.constexpr  # D is BLOCK_D
    BLOCK_M: tl.constexpr  # queries of a task
    BLOCK_N: tl.constexpr  # keys of a step
    BLOCK_D: tl.constexpr
    CHUNK: tl.constexpr  # rows, a multiple of BLOCK_N
    BLOCK: tl.constexpr  # elements that a program pushes at a time


@triton.jit
def num_pieces(p, ROWS: tl.constexpr):
    """Pieces of ROWS rows that a rank's rows are cut into."""
    if p.ZIGZAG:
        return 2 * tl.cdiv((p.S + 1) // 2, ROWS)
    else:
        return tl.cdiv(p.S, ROWS)


@triton.jit
def part(upper, source, p, world):
    """The first part of rank `source`, or the second if `upper`: its first row, its rows, and the position of its first
    row, as sequence.parts."""
    if p.ZIGZAG:
        first = (p.S + 1) // 2
        second = p.S - first
        start = tl.where(upper, world.size * first + (world.size - 1 - source) * second, source * first)
        return tl.where(upper, first, 0), tl.where(upper, second, first), start
    else:
        return 0, p.S, source * p.S


@triton.jit
def piece(i, source, p, world, ROWS: tl.constexpr):
    """Piece i of rank `source`: its first row, its rows, and the position of its first row, as sequence.pieces."""
    at = i * ROWS
    upper = False
    if p.ZIGZAG:
        each = tl.cdiv((p.S + 1) // 2, ROWS)
        at = (i % each) * ROWS
        upper = i >= each
    row, rows, start = part(upper, source, p, world)
    return row + at, tl.minimum(tl.maximum(rows - at, 0), ROWS), start + at


@triton.jit
def visit(step, rank, p, world):
    """Which chunk a task looks at in a step, and whose: own ones first, then chunk by chunk those of the ranks at
    distances 1, 2, ...; and its first row, its rows and the position of the first."""
    chunks = num_pieces(p, p.CHUNK)
    others: tl.constexpr = max(world.size - 1, 1)
    own = step < chunks
    c = tl.where(own, step, (step - chunks) // others)
    distance = tl.where(own, 0, 1 + (step - chunks) % others)
    first, count, start = piece(c, (rank - distance + world.size) % world.size, p, world, p.CHUNK)
    return c, distance, first, count, start


@triton.jit
def counter(distance, b, c, p):
    """Where in `ready_ptr` is the counter of chunk c of batch b of the rank at a distance."""
    return ((distance - 1) * p.B + b // p.joined * p.joined) * num_pieces(p, p.CHUNK) + c


@triton.jit
def arrived(c, distance, b, place, p, world, epoch):
    """Keys and values from element `place` of batch b on, of the rank at a distance, when chunk c of it is here."""
    k_ptr = p.k_ptr + place
    v_ptr = p.v_ptr + place
    if world.size > 1:  # or no wait would be compiled, which pkt takes for a wait that was lost
        if distance > 0:
            shard = tl.cast(p.B * p.S, tl.int64) * p.KV * p.D
            pl.wait(p.ready_ptr + counter(distance, b, c, p), epoch, world)
            k_ptr = p.k_inbox_ptr + (distance - 1) * shard + place
            v_ptr = p.v_inbox_ptr + (distance - 1) * shard + place
    return k_ptr, v_ptr


@triton.jit
def _compute(task, p, world, epoch):
    """Task `task`: BLOCK_M queries of a head. Its own keys first, then chunk by chunk those of the others, in the order
    rank - 1, rank - 2, ..., of which a causal mask needs only the first."""
    tiles = num_pieces(p, p.BLOCK_M)
    i = tiles - 1 - task % tiles  # causal: those with the most keys first
    h = task // tiles % p.H
    b = tl.cast(task // tiles // p.H, tl.int64)
    rank = tl.cast(world.rank, tl.int32)
    row, rows, position = piece(i, rank, p, world, p.BLOCK_M)
    low, high, least, most, all_from, all_to = tile_attention.sight(
        position, world.size * p.S, rows, position, p.left, p.right, p, p.BLOCK_M
    )  # fmt: skip
    m = tl.arange(0, p.BLOCK_M)
    d = tl.arange(0, p.BLOCK_D)
    inside = (m < rows)[:, None] & (d < p.D)[None, :]
    base = ((b * p.S + row) * p.H + h) * p.D
    places = m[:, None] * (p.H * p.D) + d[None, :]
    q = tl.load(p.q_ptr + base + places, mask=inside, other=0.0)
    top, total, acc = tile_attention.nothing(p)
    chunks = num_pieces(p, p.CHUNK)
    for step in range(chunks * world.size):
        c, distance, first, count, start = visit(step, rank, p, world)
        begin, end, full, unmasked, masked = tile_attention.blocks(
            start, count, least, most, all_from, all_to, p.BLOCK_N
        )
        if begin < end:
            place = ((b * p.S + first) * p.KV + h // (p.H // p.KV)) * p.D
            if p.WAY == "gathered":
                place += (rank - distance + world.size) % world.size * (tl.cast(p.B * p.S, tl.int64) * p.KV * p.D)
                k_ptr = p.k_ptr + place
                v_ptr = p.v_ptr + place
            else:
                k_ptr, v_ptr = arrived(c, distance, b, place, p, world, epoch)
            top, total, acc = tile_attention.attend(
                top, total, acc, q, k_ptr, v_ptr, begin, full, unmasked, masked, end, start, low, high, p
            )
    out, lse = tile_attention.finished(top, total, acc)
    tl.store(p.out_ptr + base + places, out.to(p.out_ptr.dtype.element_ty), mask=inside)
    tl.store(p.lse_ptr + (b * p.H + h) * p.S + row + m, lse, mask=m < rows)


@triton.jit
def push(task, p, world, epoch):
    """Chunk `task` of my keys and values to every peer that needs it."""
    push_chunk(
        task, (p.k_ptr, p.v_ptr), (p.k_inbox_ptr, p.v_inbox_ptr), p.KV * p.D, p.needs_ptr, p.ready_ptr, p, world, epoch
    )  # fmt: skip


@triton.jit
def push_chunk(task, own, inboxes, WIDTH: tl.constexpr, needs_ptr, ready_ptr, p, world, epoch):
    """Chunk `task` of two tensors of this rank with rows of WIDTH elements, into their inboxes on every peer that needs
    it: one load, then a store to each, and a signal."""
    chunks = num_pieces(p, p.CHUNK)
    c = task % chunks
    b = tl.cast(task // chunks, tl.int64)
    rank = tl.cast(world.rank, tl.int32)
    first, count, _ = piece(c, rank, p, world, p.CHUNK)
    shard = tl.cast(p.B * p.S, tl.int64) * WIDTH
    place = (b * p.S + first) * WIDTH
    n = count * WIDTH
    for start in range(0, n, p.BLOCK):
        offs = start + tl.arange(0, p.BLOCK)
        x = tl.load(own[0] + place + offs, mask=offs < n)
        y = tl.load(own[1] + place + offs, mask=offs < n)
        for d in tl.static_range(1, world.size):
            if tl.load(needs_ptr + (d - 1) * chunks + c) != 0:
                slot = (d - 1) * shard + place + offs
                pl.store(inboxes[0] + slot, x, (rank + d) % world.size, world, mask=offs < n)
                pl.store(inboxes[1] + slot, y, (rank + d) % world.size, world, mask=offs < n)
    for d in tl.static_range(1, world.size):
        if tl.load(needs_ptr + (d - 1) * chunks + c) != 0:
            pl.signal(ready_ptr + counter(d, b, c, p), (rank + d) % world.size, world, epoch, "set")  # publish


@triton.jit
def attention_kernel(p, world):
    tasks = p.B * p.H * num_pieces(p, p.BLOCK_M)
    chunks = p.B * num_pieces(p, p.CHUNK)
    if p.WAY == "fused":
        epoch = pl.epoch(p.ready_ptr, world)
        if tl.program_id(0) < p.num_comm_sms:
            # before overwrite: every rank's launch before has ended, and with it what reads its inbox
            pl.barrier(p.bar_ptr + tl.program_id(0), world)
        pl.lcsc(_compute, push, (p, world, epoch), tasks, chunks, p.queue_ptr, epoch, p.num_comm_sms)
    else:
        epoch = 0
        if p.WAY == "copied":
            epoch = tl.load(p.ready_ptr + (world.size - 1) * chunks)
        for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
            _compute(task, p, world, epoch)
