"""The kernels of the backward pass: gradients of this rank's queries, from keys and values of all ranks, and of its
keys and values, from queries of all ranks.

    weights = exp(scale * q @ k.T - lse)    slopes = weights * (dout @ v.T - delta)    delta = rowsum(dout * out) - dlse
    dq = scale * slopes @ k                 dk = scale * slopes.T @ q                  dv = weights.T @ dout
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import pkt.language as pl

from ..shared.tile_attention import LN2, blocks, interval, sight
from .kernel import arrived, counter, num_pieces, piece, push_chunk, visit


class Backward(NamedTuple):
    """What the kernels work on, where it differs from `Attention`. All look at BLOCK_M queries and BLOCK_N keys at a
    time; `queries_kernel` may have others than the kernels behind it."""

    q_ptr: Any  # (B, S, H, D) this rank's
    k_ptr: Any  # (B, S, KV, D) this rank's
    v_ptr: Any  # as k
    dout_ptr: Any  # as q
    spans_ptr: Any  # int32 (2, size * S) this rank's, or None: the document of each position, see sequence.spans
    rows_ptr: Any  # fp32 (2, B, H, num_places) this rank's: [0] lse in base 2, 0 of a row that sees no key; [1] delta.
    # Each part of the rows has whole pieces of PIECE places, with zeros behind the last row
    dq_ptr: Any  # as q
    dk_ptr: Any  # as k
    dv_ptr: Any  # as k
    k_inbox_ptr: Any  # (size - 1, B, S, KV, D) on every rank; rank - d stores [d - 1]
    v_inbox_ptr: Any  # as k_inbox
    q_inbox_ptr: Any  # (size - 1, B, S, H, D), as k_inbox
    dout_inbox_ptr: Any  # as q_inbox
    rows_inbox_ptr: Any  # fp32 (size - 1, 2, B, H, num_places), as k_inbox
    ready_ptr: Any  # int32 (2, size - 1, B, chunks) on every rank: [0] of keys and values, as of Attention; [1] of
    # queries, dout and their numbers
    needs_ptr: Any  # int32 (2, size - 1, chunks) this rank's, as ready_ptr
    number_ptr: Any  # int32, this rank's: the number of this launch
    bar_ptr: Any  # as of Attention
    queue_ptr: Any
    num_comm_sms: Any
    B: Any
    S: Any
    left: Any
    right: Any
    length: Any
    scale: Any
    joined: Any
    H: tl.constexpr
    KV: tl.constexpr
    D: tl.constexpr
    ZIGZAG: tl.constexpr
    WHOLE: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_D: tl.constexpr
    CHUNK: tl.constexpr
    BLOCK: tl.constexpr
    STAGES: tl.constexpr  # of loops that need no mask
    PIECE: tl.constexpr  # see rows_ptr


@triton.jit
def num_places(p):
    """Of the numbers of a head, see `Backward.rows_ptr`."""
    return num_pieces(p, p.PIECE) * p.PIECE


@triton.jit
def place_of(row, p):
    """Where the numbers of a row are among those of its head."""
    if p.ZIGZAG:
        first = (p.S + 1) // 2
        row = tl.where(row < first, row, row - first + tl.cdiv(first, p.PIECE) * p.PIECE)
    return row


@triton.jit
def rows_kernel(
    out_ptr,  # (B, S, H, D)
    dout_ptr,  # as out
    lse_ptr,  # fp32 (B, H, S)
    dlse_ptr,  # fp32 (B, H, S) or None
    rows_ptr,  # fp32 (2, B, H, places), see Backward
    n,  # B * places * H
    S,
    places,  # of a head's rows, in one part or two
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    ZIGZAG: tl.constexpr,
    PIECE: tl.constexpr,  # a part has whole pieces of so many places
):
    """What the tasks need of each row of queries."""
    i = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    h = i % H
    b = i // H // places
    place = i // H % places
    row = place
    end = S
    if ZIGZAG:
        first = (S + 1) // 2
        second = tl.cdiv(first, PIECE) * PIECE
        row = tl.where(place < second, place, place - second + first)
        end = tl.where(place < second, first, S)
    there = (i < n) & (row < end)
    inside = there[:, None] & (d < D)[None, :]
    offs = (((b * S + row) * H + h) * D)[:, None] + d[None, :]
    out = tl.load(out_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    at = (b * H + h) * S + row
    lse = tl.load(lse_ptr + at, mask=there, other=0.0)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at, mask=there, other=0.0)
    blind = lse == -float("inf")  # sees no key: its weights are 0, whatever is written here, but for a NaN
    at = (b * H + h) * places + place
    tl.store(rows_ptr + at, tl.where(blind, 0.0, lse / LN2), mask=i < n)
    tl.store(rows_ptr + n + at, tl.where(blind, 0.0, delta), mask=i < n)


@triton.jit
def _tile(ptr, rows, p, ROWS: tl.constexpr, LD: tl.constexpr, MASKED: tl.constexpr):
    """(ROWS, BLOCK_D) from ptr on, rows LD elements apart; zeros behind the first `rows` rows if MASKED."""
    d = tl.arange(0, p.BLOCK_D)
    n = tl.arange(0, ROWS)
    offs = n[:, None] * LD + d[None, :]  # 32 bits inside a tile
    if MASKED and p.WHOLE:
        return tl.load(ptr + offs, mask=(n < rows)[:, None], other=0.0)
    elif MASKED:
        return tl.load(ptr + offs, mask=(n < rows)[:, None] & (d < p.D)[None, :], other=0.0)
    elif p.WHOLE:
        return tl.load(ptr + offs)
    else:
        return tl.load(ptr + offs, mask=(d < p.D)[None, :], other=0.0)


@triton.jit
def _row(begin, step, before, skipped, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """The first row of a step, as of `_attend`."""
    row = begin + step * ROWS
    if MASKED:
        row += tl.where(step >= before, skipped, 0)
    return row


@triton.jit
def _of_queries(
    dq, q, dout, lse, delta, k_ptr, v_ptr, begin, steps, before, skipped, rows, position, low, high, p,
    MASKED: tl.constexpr,
):  # fmt: skip
    """dq / scale, with `steps` more blocks of keys; see `_attend`. No wait is in here, so the loop is pipelined."""
    n = tl.arange(0, p.BLOCK_N)
    ld: tl.constexpr = p.KV * p.D
    for step in tl.range(steps, num_stages=1 if MASKED else p.STAGES):
        row = _row(begin, step, before, skipped, p.BLOCK_N, MASKED)
        base = tl.cast(row, tl.int64) * ld
        k = _tile(k_ptr + base, rows - row, p, p.BLOCK_N, ld, MASKED)
        weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * p.scale - lse[:, None])
        if MASKED:
            at = position + row + n
            seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None]) & ((row + n) < rows)[None, :]
            weights = tl.where(seen, weights, 0.0)
        v = _tile(v_ptr + base, rows - row, p, p.BLOCK_N, ld, MASKED)
        slopes = weights * (tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None])
        if MASKED:  # padding may be NaN
            slopes = tl.where(seen, slopes, 0.0)
        dq = tl.dot(slopes.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def _of_keys(
    dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, begin, steps, before, skipped, rows, position, keys, p, world,
    MASKED: tl.constexpr,
):  # fmt: skip
    """dk / scale and dv, with `steps` more blocks of queries. keys: the position of the first key."""
    delta_ptr = lse_ptr + tl.cast(p.B * p.H, tl.int64) * num_places(p)
    m = tl.arange(0, p.BLOCK_M)
    at_keys = keys + tl.arange(0, p.BLOCK_N)
    ld: tl.constexpr = p.H * p.D
    for step in tl.range(steps, num_stages=1 if MASKED else p.STAGES):
        row = _row(begin, step, before, skipped, p.BLOCK_M, MASKED)
        base = tl.cast(row, tl.int64) * ld
        q = _tile(q_ptr + base, rows - row, p, p.BLOCK_M, ld, MASKED)
        if MASKED:
            lse = tl.load(lse_ptr + row + m, mask=row + m < rows, other=0.0)
            delta = tl.load(delta_ptr + row + m, mask=row + m < rows, other=0.0)
        else:
            lse = tl.load(lse_ptr + row + m)
            delta = tl.load(delta_ptr + row + m)
        weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * p.scale - lse[:, None])
        if MASKED:
            at = position + row + m
            low, high = interval(at, at, world.size * p.S, row + m < rows, p.left, p.right, p)
            high = tl.where(row + m < rows, high, 0)
            seen = (at_keys[None, :] >= low[:, None]) & (at_keys[None, :] < high[:, None])
            weights = tl.where(seen, weights, 0.0)
        dout = _tile(dout_ptr + base, rows - row, p, p.BLOCK_M, ld, MASKED)
        dv = tl.dot(tl.trans(weights.to(dout.dtype)), dout, dv, input_precision="ieee")
        slopes = weights * (tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None])
        if MASKED:  # padding may be NaN
            slopes = tl.where(seen, slopes, 0.0)
        dk = tl.dot(tl.trans(slopes.to(q.dtype)), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _queries(task, p, world, epoch):
    """Task `task` of queries: dq of BLOCK_M queries of a head, over the keys of all ranks in the order of `visit`."""
    tiles = num_pieces(p, p.BLOCK_M)
    i = tiles - 1 - task % tiles  # causal: those with the most keys first
    h = task // tiles % p.H
    b = tl.cast(task // tiles // p.H, tl.int64)
    rank = tl.cast(world.rank, tl.int32)
    row, rows, position = piece(i, rank, p, world, p.BLOCK_M)
    low, high, least, most, all_from, all_to = sight(
        position, world.size * p.S, rows, position, p.left, p.right, p, p.BLOCK_M
    )  # fmt: skip
    m = tl.arange(0, p.BLOCK_M)
    d = tl.arange(0, p.BLOCK_D)
    base = ((b * p.S + row) * p.H + h) * p.D
    q = _tile(p.q_ptr + base, rows, p, p.BLOCK_M, p.H * p.D, True)
    dout = _tile(p.dout_ptr + base, rows, p, p.BLOCK_M, p.H * p.D, True)
    of_rows = p.rows_ptr + (b * p.H + h) * num_places(p) + place_of(row, p) + m
    lse = tl.load(of_rows, mask=m < rows, other=0.0)
    delta = tl.load(of_rows + tl.cast(p.B * p.H, tl.int64) * num_places(p), mask=m < rows, other=0.0)
    dq = tl.zeros((p.BLOCK_M, p.BLOCK_D), tl.float32)
    for step in range(num_pieces(p, p.CHUNK) * world.size):
        c, distance, first, count, start = visit(step, rank, p, world)
        begin, end, full, unmasked, masked = blocks(start, count, least, most, all_from, all_to, p.BLOCK_N)
        if begin < end:
            place = ((b * p.S + first) * p.KV + h // (p.H // p.KV)) * p.D
            k_ptr, v_ptr = arrived(c, distance, b, place, p, world, epoch)
            dq = _of_queries(
                dq, q, dout, lse, delta, k_ptr, v_ptr, begin + full * p.BLOCK_N, unmasked, 0, 0, end, start, low,
                high, p, False,
            )  # fmt: skip
            dq = _of_queries(
                dq, q, dout, lse, delta, k_ptr, v_ptr, begin, masked, full, unmasked * p.BLOCK_N, end, start, low,
                high, p, True,
            )  # fmt: skip
    offs = m[:, None] * (p.H * p.D) + d[None, :]
    inside = (m < rows)[:, None] & (d < p.D)[None, :]
    dq *= p.scale * LN2
    tl.store(p.dq_ptr + base + offs, dq.to(p.dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _queries_of(c, distance, b, h, first, p, world):
    """Queries, dout and numbers of head h of batch b from row `first` on, of the rank at a distance, when chunk c of
    it is here."""
    place = ((b * p.S + first) * p.H + h) * p.D
    at = (b * p.H + h) * num_places(p) + place_of(first, p)
    q_ptr = p.q_ptr + place
    dout_ptr = p.dout_ptr + place
    lse_ptr = p.rows_ptr + at
    if world.size > 1:  # or no wait would be compiled, which pkt takes for a wait that was lost
        if distance > 0:
            ready = p.ready_ptr + counter(world.size - 1 + distance, b, c, p)
            pl.wait(ready, tl.load(p.number_ptr), world)
            before = (distance - 1) * tl.cast(p.B * p.H, tl.int64)
            q_ptr = p.q_inbox_ptr + before * p.S * p.D + place
            dout_ptr = p.dout_inbox_ptr + before * p.S * p.D + place
            lse_ptr = p.rows_inbox_ptr + before * 2 * num_places(p) + at
    return q_ptr, dout_ptr, lse_ptr


@triton.jit
def keys_kernel(p, world):
    """dk and dv of BLOCK_N keys of a head, a program for each, over the queries of all ranks in the order of `visit`,
    of all heads that share the keys.

    A program waits for queries only, which the peers' `queries_kernel` pushes. That waits for nothing of this kernel,
    so it does not matter how many of these programs the GPU holds at once."""
    tiles = num_pieces(p, p.BLOCK_N)
    task = tl.program_id(0)
    i = task % tiles
    g = task // tiles % p.KV
    b = tl.cast(task // tiles // p.KV, tl.int64)
    rank = tl.cast(world.rank, tl.int32)
    row, rows, position = piece(i, rank, p, world, p.BLOCK_N)
    _low, _high, least, most, all_from, all_to = sight(
        position, world.size * p.S, rows, position, p.right, p.left, p, p.BLOCK_N
    )  # fmt: skip
    place = ((b * p.S + row) * p.KV + g) * p.D
    k = _tile(p.k_ptr + place, rows, p, p.BLOCK_N, p.KV * p.D, True)
    v = _tile(p.v_ptr + place, rows, p, p.BLOCK_N, p.KV * p.D, True)
    dk = tl.zeros((p.BLOCK_N, p.BLOCK_D), tl.float32)
    dv = tl.zeros((p.BLOCK_N, p.BLOCK_D), tl.float32)
    group: tl.constexpr = p.H // p.KV
    for step in range(num_pieces(p, p.CHUNK) * world.size * group):
        c, distance, first, count, start = visit(step // group, rank, p, world)
        begin, end, full, unmasked, masked = blocks(start, count, least, most, all_from, all_to, p.BLOCK_M)
        if begin < end:
            q_ptr, dout_ptr, lse_ptr = _queries_of(c, distance, b, g * group + step % group, first, p, world)
            dk, dv = _of_keys(
                dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, begin + full * p.BLOCK_M, unmasked, 0, 0, end, start,
                position, p, world, False,
            )  # fmt: skip
            dk, dv = _of_keys(
                dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, begin, masked, full, unmasked * p.BLOCK_M, end,
                start, position, p, world, True,
            )  # fmt: skip
    d = tl.arange(0, p.BLOCK_D)
    n = tl.arange(0, p.BLOCK_N)
    offs = n[:, None] * (p.KV * p.D) + d[None, :]
    inside = (n < rows)[:, None] & (d < p.D)[None, :]
    dk *= p.scale * LN2
    tl.store(p.dk_ptr + place + offs, dk.to(p.dk_ptr.dtype.element_ty), mask=inside)
    tl.store(p.dv_ptr + place + offs, dv.to(p.dv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _push(task, p, world, number):
    """Task `task` of those that push: all chunks of keys and values come first."""
    chunks = num_pieces(p, p.CHUNK)
    others = (world.size - 1) * chunks
    if task < p.B * chunks:
        push_chunk(
            task, (p.k_ptr, p.v_ptr), (p.k_inbox_ptr, p.v_inbox_ptr), p.KV * p.D, p.needs_ptr, p.ready_ptr, p, world,
            number,
        )  # fmt: skip
    else:
        task -= p.B * chunks
        _push_numbers(task, p, world)
        push_chunk(
            task, (p.q_ptr, p.dout_ptr), (p.q_inbox_ptr, p.dout_inbox_ptr), p.H * p.D, p.needs_ptr + others,
            p.ready_ptr + others * p.B, p, world, number,
        )  # fmt: skip


@triton.jit
def _push_numbers(task, p, world):
    """The numbers of chunk `task` of queries to every peer that needs it, whom a signal behind them will tell."""
    chunks = num_pieces(p, p.CHUNK)
    c = task % chunks
    b = tl.cast(task // chunks, tl.int64)
    rank = tl.cast(world.rank, tl.int32)
    first, count, _ = piece(c, rank, p, world, p.CHUNK)
    whole = tl.cast(p.B * p.H, tl.int64) * num_places(p)
    n = 2 * p.H * count
    for start in range(0, n, p.BLOCK):
        i = start + tl.arange(0, p.BLOCK)
        head = i // count
        place = head // p.H * whole + (b * p.H + head % p.H) * num_places(p) + place_of(first, p) + i % count
        x = tl.load(p.rows_ptr + place, mask=i < n)
        for d in tl.static_range(1, world.size):
            if tl.load(p.needs_ptr + (world.size - 2 + d) * chunks + c) != 0:
                slot = p.rows_inbox_ptr + (d - 1) * 2 * whole + place
                pl.store(slot, x, (rank + d) % world.size, world, mask=i < n)


@triton.jit
def alone_kernel(p, world):
    """dq in a world of one rank, where nothing travels."""
    for task in range(tl.program_id(0), p.B * p.H * num_pieces(p, p.BLOCK_M), tl.num_programs(0)):
        _queries(task, p, world, 0)


@triton.jit
def queries_kernel(p, world):
    """dq, while keys and values, and then queries, go to the other ranks."""
    chunks = 2 * p.B * num_pieces(p, p.CHUNK)
    epoch = pl.epoch(p.ready_ptr, world)
    if tl.program_id(0) == 0:
        tl.store(p.number_ptr, epoch)  # for the kernel behind this one
    if tl.program_id(0) < p.num_comm_sms:
        # before overwrite: every rank's launch before has ended, and with it what reads its inboxes
        pl.barrier(p.bar_ptr + tl.program_id(0), world)
    tasks = p.B * p.H * num_pieces(p, p.BLOCK_M)
    pl.lcsc(_queries, _push, (p, world, epoch), tasks, chunks, p.queue_ptr, epoch, p.num_comm_sms)
