"""The kernels of the backward pass: gradients of this rank's queries, and its parts of those of everybody's keys and
values, which go to their owners and are added there.

    weights = exp(scale * q @ k.T - lse)    slopes = weights * (dout @ v.T - delta)    delta = rowsum(dout * out) - dlse
    dq = scale * slopes @ k                 dk = scale * slopes.T @ q                  dv = weights.T @ dout
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import pkt.language as pl

from ..shared.tile_attention import LN2, blocks, interval, sight
from .kernel import arrived, num_pieces, part, piece, push, visit


class Backward(NamedTuple):
    """What the kernels work on, where it differs from `Attention`. All look at BLOCK_M queries and BLOCK_N keys at a
    time; `queries_kernel` may have others than the kernels behind it."""

    q_ptr: Any  # (B, S, H, D) this rank's
    k_ptr: Any  # (B, S, KV, D) this rank's
    v_ptr: Any  # as k
    dout_ptr: Any  # as q
    spans_ptr: Any  # int32 (2, size * S) this rank's, or None: the document of each position, see sequence.spans
    rows_ptr: Any  # fp32 (2, B, H, S) this rank's: [0] lse in base 2, 0 of a row that sees no key; [1] delta. For the
    # Gluon kernels each part of the rows is as long as its pieces of BLOCK_N rows, with zeros behind the last row
    dq_ptr: Any  # as q
    dk_ptr: Any  # as k
    dv_ptr: Any  # as k
    k_inbox_ptr: Any  # (size - 1, B, S, KV, D) on every rank; rank - d stores [d - 1]
    v_inbox_ptr: Any  # as k_inbox
    parts_ptr: Any  # fp32 (size, 2, B, S, KV, D) on every rank; rank + d stores [d], its parts of my dk and dv
    ready_ptr: Any  # int32 (size - 1, B, chunks) on every rank, as of Attention
    parted_ptr: (
        Any  # int32 (size - 1, B, KV, pieces of BLOCK_N rows) on every rank; the number of the last launch whose
    )
    # part of rank + d is here
    needs_ptr: Any  # int32 (size - 1, chunks) this rank's
    number_ptr: Any  # int32, this rank's: the number of this launch
    queue_ptr: Any
    num_comm_sms: Any
    B: Any
    S: Any
    left: Any
    right: Any
    length: Any
    scale: Any
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
def _places(rows, p):
    """Where the `rows` rows of a head of keys are, (BLOCK_N, BLOCK_D), and which of these elements are there."""
    d = tl.arange(0, p.BLOCK_D)
    n = tl.arange(0, p.BLOCK_N)
    return n[:, None] * (p.KV * p.D) + d[None, :], (n < rows)[:, None] & (d < p.D)[None, :]


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
    dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, begin, steps, before, skipped, rows, position, keys, p, world,
    MASKED: tl.constexpr,
):  # fmt: skip
    """dk / scale and dv, with `steps` more blocks of queries. keys: the position of the first key."""
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
    of_rows = p.rows_ptr + (b * p.H + h) * p.S + row + m
    lse = tl.load(of_rows, mask=m < rows, other=0.0)
    delta = tl.load(of_rows + tl.cast(p.B * p.H, tl.int64) * p.S, mask=m < rows, other=0.0)
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
def is_seen(least, most, source, p, world):
    """Whether a query of rank `source` is among the positions [least, most)."""
    seen = False
    for upper in tl.static_range(2 if p.ZIGZAG else 1):
        _, rows, start = part(upper == 1, source, p, world)
        seen = seen | (tl.maximum(least, start) < tl.minimum(most, start + rows))
    return seen


@triton.jit
def keys_kernel(p, world):
    """What this rank's queries make of dk and dv of BLOCK_N keys of a head, of all heads of queries that share it: a
    program for each of these parts. It goes to the owner of the keys. Own keys come last, so that the parts of the
    other ranks arrive meanwhile.

    It waits for nothing. A key is seen by the query at its own position, so the queries that see one of BLOCK_N keys
    have consecutive positions. If one of them is here, then `queries_kernel` has waited for the chunk of these keys."""
    tiles = num_pieces(p, p.BLOCK_N)
    task = tl.program_id(0)
    i = task % tiles
    g = task // tiles % p.KV
    b = tl.cast(task // tiles // p.KV % p.B, tl.int64)
    distance = (task // tiles // p.KV // p.B + 1) % world.size
    rank = tl.cast(world.rank, tl.int32)
    source = (rank - distance + world.size) % world.size
    row, rows, position = piece(i, source, p, world, p.BLOCK_N)
    _low, _high, least, most, all_from, all_to = sight(
        position, world.size * p.S, rows, position, p.right, p.left, p, p.BLOCK_N
    )  # fmt: skip
    if (distance == 0) | is_seen(least, most, rank, p, world):
        place = ((b * p.S + row) * p.KV + g) * p.D
        whole = tl.cast(p.B * p.S, tl.int64) * p.KV * p.D
        k_ptr = p.k_ptr + place
        v_ptr = p.v_ptr + place
        if world.size > 1:
            if distance > 0:
                k_ptr = p.k_inbox_ptr + (distance - 1) * whole + place
                v_ptr = p.v_inbox_ptr + (distance - 1) * whole + place
        k = _tile(k_ptr, rows, p, p.BLOCK_N, p.KV * p.D, True)
        v = _tile(v_ptr, rows, p, p.BLOCK_N, p.KV * p.D, True)
        dk = tl.zeros((p.BLOCK_N, p.BLOCK_D), tl.float32)
        dv = tl.zeros((p.BLOCK_N, p.BLOCK_D), tl.float32)
        group: tl.constexpr = p.H // p.KV
        parts: tl.constexpr = 2 if p.ZIGZAG else 1
        for step in range(parts * group):
            first, count, start = part(step >= group, rank, p, world)
            begin, end, full, unmasked, masked = blocks(start, count, least, most, all_from, all_to, p.BLOCK_M)
            if begin < end:
                h = g * group + step % group
                q_ptr = p.q_ptr + ((b * p.S + first) * p.H + h) * p.D
                dout_ptr = p.dout_ptr + ((b * p.S + first) * p.H + h) * p.D
                lse_ptr = p.rows_ptr + (b * p.H + h) * p.S + first
                delta_ptr = lse_ptr + tl.cast(p.B * p.H, tl.int64) * p.S
                dk, dv = _of_keys(
                    dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, begin + full * p.BLOCK_M, unmasked, 0, 0, end,
                    start, position, p, world, False,
                )  # fmt: skip
                dk, dv = _of_keys(
                    dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, begin, masked, full, unmasked * p.BLOCK_M, end,
                    start, position, p, world, True,
                )  # fmt: skip
        dk *= p.scale * LN2
        offs, inside = _places(rows, p)
        if world.size == 1:
            tl.store(p.dk_ptr + place + offs, dk.to(p.dk_ptr.dtype.element_ty), mask=inside)
            tl.store(p.dv_ptr + place + offs, dv.to(p.dv_ptr.dtype.element_ty), mask=inside)
        else:
            slot = p.parts_ptr + distance * 2 * whole + place
            pl.store(slot + offs, dk, source, world, mask=inside)
            pl.store(slot + whole + offs, dv, source, world, mask=inside)
            if distance > 0:
                at = (((distance - 1) * p.B + b) * p.KV + g) * tiles + i
                pl.signal(p.parted_ptr + at, source, world, tl.load(p.number_ptr), "set")  # publish


@triton.jit
def sum_kernel(p, world):
    """dk and dv of this rank's keys: the sums of the parts of rank, rank + 1, rank + 2, ..., in this order."""
    tiles = num_pieces(p, p.BLOCK_N)
    rank = tl.cast(world.rank, tl.int32)
    whole = tl.cast(p.B * p.S, tl.int64) * p.KV * p.D
    number = tl.load(p.number_ptr)
    for task in range(tl.program_id(0), p.B * p.KV * tiles, tl.num_programs(0)):
        i = task % tiles
        g = task // tiles % p.KV
        b = tl.cast(task // tiles // p.KV, tl.int64)
        row, rows, position = piece(i, rank, p, world, p.BLOCK_N)
        # As the senders find it: a part that is not sent is zero.
        _low, _high, least, most, _from, _to = sight(
            position, world.size * p.S, rows, position, p.right, p.left, p, p.BLOCK_N
        )  # fmt: skip
        place = ((b * p.S + row) * p.KV + g) * p.D
        dk = _tile(p.parts_ptr + place, rows, p, p.BLOCK_N, p.KV * p.D, True)
        dv = _tile(p.parts_ptr + whole + place, rows, p, p.BLOCK_N, p.KV * p.D, True)
        for distance in range(1, world.size):
            if is_seen(least, most, (rank + distance) % world.size, p, world):
                pl.wait(p.parted_ptr + (((distance - 1) * p.B + b) * p.KV + g) * tiles + i, number, world)
                slot = p.parts_ptr + distance * 2 * whole + place
                dk += _tile(slot, rows, p, p.BLOCK_N, p.KV * p.D, True)
                dv += _tile(slot + whole, rows, p, p.BLOCK_N, p.KV * p.D, True)
        offs, inside = _places(rows, p)
        tl.store(p.dk_ptr + place + offs, dk.to(p.dk_ptr.dtype.element_ty), mask=inside)
        tl.store(p.dv_ptr + place + offs, dv.to(p.dv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def queries_kernel(p, world):
    """dq, while keys and values go to the other ranks.

    No barrier is needed before they overwrite those of the last call. A rank that has read these has sent parts of
    their gradients behind that, for which `sum_kernel` has waited here. It sends its next parts when it has the next
    keys, so behind the last `sum_kernel`, which reads parts."""
    chunks = p.B * num_pieces(p, p.CHUNK) if world.size > 1 else 0
    epoch = pl.epoch(p.ready_ptr, world)
    if tl.program_id(0) == 0:
        tl.store(p.number_ptr, epoch)  # for the kernels behind this one
    tasks = p.B * p.H * num_pieces(p, p.BLOCK_M)
    pl.lcsc(_queries, push, (p, world, epoch), tasks, chunks, p.queue_ptr, epoch, p.num_comm_sms)
