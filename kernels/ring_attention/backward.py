"""The kernels of the backward pass: gradients of this rank's queries, and its parts of those of everybody's keys and
values, which go to their owners and are added there.

With weights = exp(scale * q @ k.T - lse) and slopes = weights * (dout @ v.T - delta), delta = rowsum(dout * out) - dlse:

    dq = scale * slopes @ k    dk = scale * slopes.T @ q    dv = weights.T @ dout
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import pkt.language as pl

from .kernel import LN2, arrived, blocks, num_pieces, part, piece, push, sight, visit


class Backward(NamedTuple):
    """What the kernel works on, where it differs from `Attention`. A task of queries has BLOCK_M of a head, and looks at
    BLOCK_N keys at a time; one of keys has BLOCK_M of them, and looks at BLOCK_N queries at a time."""

    q_ptr: Any  # (B, S, H, D) this rank's
    k_ptr: Any  # (B, S, KV, D) this rank's
    v_ptr: Any  # as k
    dout_ptr: Any  # as q
    spans_ptr: Any  # int32 (2, size * S) this rank's, or None: the document of each position, see sequence.spans
    rows_ptr: Any  # fp32 (2, B, H, S) this rank's: [0] lse in base 2, 0 of a row that sees no key; [1] delta
    dq_ptr: Any  # as q
    dk_ptr: Any  # as k
    dv_ptr: Any  # as k
    k_inbox_ptr: Any  # (size - 1, B, S, KV, D) on every rank; rank - d stores [d - 1]
    v_inbox_ptr: Any  # as k_inbox
    parts_ptr: Any  # fp32 (size - 1, 2, B, S, KV, D) on every rank; rank + d stores [d - 1], its parts of my dk and dv
    ready_ptr: Any  # int32 (size - 1, B, chunks) on every rank, as of Attention
    parted_ptr: Any  # int32 (size - 1, B, KV, pieces of BLOCK_M rows) on every rank; the number of the last launch whose
    # part of rank + d is here
    needs_ptr: Any  # int32 (size - 1, chunks) this rank's
    queue_ptr: Any
    bar_ptr: Any
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
    CHUNK: tl.constexpr  # rows, a multiple of BLOCK_M and BLOCK_N
    BLOCK: tl.constexpr


@triton.jit
def rows_kernel(
    out_ptr,  # (B, S, H, D)
    dout_ptr,  # as out
    lse_ptr,  # fp32 (B, H, S)
    dlse_ptr,  # fp32 (B, H, S) or None
    rows_ptr,  # fp32 (2, B, H, S), see Backward
    n,  # B * S * H
    S,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """What the tasks need of each row of queries."""
    i = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = (i < n)[:, None] & (d < D)[None, :]
    offs = i[:, None] * D + d[None, :]
    out = tl.load(out_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    h = i % H
    row = i // H
    at = (row // S * H + h) * S + row % S
    lse = tl.load(lse_ptr + at, mask=i < n, other=0.0)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at, mask=i < n, other=0.0)
    blind = lse == -float("inf")  # sees no key: its weights are 0, whatever is written here, but for a NaN
    tl.store(rows_ptr + at, tl.where(blind, 0.0, lse / LN2), mask=i < n)
    tl.store(rows_ptr + n + at, tl.where(blind, 0.0, delta), mask=i < n)


@triton.jit
def _tile(ptr, rows, p, ROWS: tl.constexpr, LD: tl.constexpr, MASKED: tl.constexpr):
    """(ROWS, BLOCK_D) from ptr on, rows LD elements apart; zeros behind the first `rows` rows if MASKED."""
    d = tl.arange(0, p.BLOCK_D)
    n = tl.arange(0, ROWS)
    offs = n[:, None] * LD + d[None, :]  # 32 bits inside a tile
    if MASKED:
        return tl.load(ptr + offs, mask=(n < rows)[:, None] & (d < p.D)[None, :], other=0.0)
    elif p.WHOLE:
        return tl.load(ptr + offs)
    else:
        return tl.load(ptr + offs, mask=(d < p.D)[None, :], other=0.0)


@triton.jit
def _places(rows, p):
    """Where the `rows` rows of a head of keys are, (BLOCK_M, BLOCK_D), and which of these elements are there."""
    d = tl.arange(0, p.BLOCK_D)
    n = tl.arange(0, p.BLOCK_M)
    return n[:, None] * (p.KV * p.D) + d[None, :], (n < rows)[:, None] & (d < p.D)[None, :]


@triton.jit
def _row(begin, step, before, skipped, p, MASKED: tl.constexpr):
    """The first row of a step, as of `_attend`."""
    row = begin + step * p.BLOCK_N
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
    for step in range(steps):
        row = _row(begin, step, before, skipped, p, MASKED)
        base = tl.cast(row, tl.int64) * ld
        k = _tile(k_ptr + base, rows - row, p, p.BLOCK_N, ld, MASKED)
        weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * p.scale - lse[:, None])
        if MASKED:
            at = position + row + n
            seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None]) & ((row + n) < rows)[None, :]
            weights = tl.where(seen, weights, 0.0)
        v = _tile(v_ptr + base, rows - row, p, p.BLOCK_N, ld, MASKED)
        slopes = weights * (tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None])
        dq = tl.dot(slopes.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def _of_keys(
    dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, begin, steps, before, skipped, rows, position, low, high, p,
    MASKED: tl.constexpr,
):  # fmt: skip
    """dk / scale and dv, with `steps` more blocks of queries. Scores have keys as rows and queries as columns."""
    n = tl.arange(0, p.BLOCK_N)
    ld: tl.constexpr = p.H * p.D
    for step in range(steps):
        row = _row(begin, step, before, skipped, p, MASKED)
        base = tl.cast(row, tl.int64) * ld
        q = _tile(q_ptr + base, rows - row, p, p.BLOCK_N, ld, MASKED)
        if MASKED:
            lse = tl.load(lse_ptr + row + n, mask=row + n < rows, other=0.0)
            delta = tl.load(delta_ptr + row + n, mask=row + n < rows, other=0.0)
        else:
            lse = tl.load(lse_ptr + row + n)
            delta = tl.load(delta_ptr + row + n)
        weights = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * p.scale - lse[None, :])
        if MASKED:
            at = position + row + n
            seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None]) & ((row + n) < rows)[None, :]
            weights = tl.where(seen, weights, 0.0)
        dout = _tile(dout_ptr + base, rows - row, p, p.BLOCK_N, ld, MASKED)
        dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision="ieee")
        slopes = weights * (tl.dot(v, tl.trans(dout), input_precision="ieee") - delta[None, :])
        dk = tl.dot(slopes.to(q.dtype), q, dk, input_precision="ieee")
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
        position, world.size * p.S, rows, position, p.left, p.right, p
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
        begin, end, full, unmasked, masked = blocks(start, count, least, most, all_from, all_to, p)
        if begin < end:
            place = ((b * p.S + first) * p.KV + h // (p.H // p.KV)) * p.D
            k_ptr, v_ptr = arrived(c, distance, b, place, p, world, epoch)
            dq = _of_queries(
                dq, q, dout, lse, delta, k_ptr, v_ptr, begin + full * p.BLOCK_N, unmasked, 0, 0, count, start, low,
                high, p, False,
            )  # fmt: skip
            dq = _of_queries(
                dq, q, dout, lse, delta, k_ptr, v_ptr, begin, masked, full, unmasked * p.BLOCK_N, count, start, low,
                high, p, True,
            )  # fmt: skip
    offs = m[:, None] * (p.H * p.D) + d[None, :]
    inside = (m < rows)[:, None] & (d < p.D)[None, :]
    dq *= p.scale * LN2
    tl.store(p.dq_ptr + base + offs, dq.to(p.dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _is_seen(least, most, source, p, world):
    """Whether a query of rank `source` is among the positions [least, most)."""
    seen = False
    for upper in tl.static_range(2 if p.ZIGZAG else 1):
        _, rows, start = part(upper == 1, source, p, world)
        seen = seen | (tl.maximum(least, start) < tl.minimum(most, start + rows))
    return seen


@triton.jit
def _keys(task, p, world, epoch):
    """Task `task` of keys: what this rank's queries make of dk and dv of BLOCK_M keys of a head, of all heads of queries
    that share it. The keys of the ranks at distances 1, 2, ... come first, and the parts go to their owners. Own keys
    come last, and the parts of the ranks rank + 1, rank + 2, ... are added to them: all of these are sent by tasks that
    wait for no part."""
    tiles = num_pieces(p, p.BLOCK_M)
    i = task % tiles
    g = task // tiles % p.KV
    b = tl.cast(task // tiles // p.KV % p.B, tl.int64)
    distance = (task // tiles // p.KV // p.B + 1) % world.size
    rank = tl.cast(world.rank, tl.int32)
    source = (rank - distance + world.size) % world.size
    row, rows, position = piece(i, source, p, world, p.BLOCK_M)
    # Positions of the queries that see these keys; owner and sender of a part find the same.
    low, high, least, most, all_from, all_to = sight(
        position, world.size * p.S, rows, position, p.right, p.left, p
    )  # fmt: skip
    if (distance == 0) | _is_seen(least, most, rank, p, world):
        each = num_pieces(p, p.CHUNK) // 2 if p.ZIGZAG else 0
        upper, _, _ = part(i >= tiles // 2, source, p, world)
        c = (row - upper) // p.CHUNK + tl.where(upper > 0, each, 0)
        place = ((b * p.S + row) * p.KV + g) * p.D
        k_ptr, v_ptr = arrived(c, distance, b, place, p, world, epoch)
        k = _tile(k_ptr, rows, p, p.BLOCK_M, p.KV * p.D, True)
        v = _tile(v_ptr, rows, p, p.BLOCK_M, p.KV * p.D, True)
        dk = tl.zeros((p.BLOCK_M, p.BLOCK_D), tl.float32)
        dv = tl.zeros((p.BLOCK_M, p.BLOCK_D), tl.float32)
        group: tl.constexpr = p.H // p.KV
        parts: tl.constexpr = 2 if p.ZIGZAG else 1
        for step in range(parts * group):
            first, count, start = part(step >= group, rank, p, world)
            begin, end, full, unmasked, masked = blocks(start, count, least, most, all_from, all_to, p)
            if begin < end:
                h = g * group + step % group
                q_ptr = p.q_ptr + ((b * p.S + first) * p.H + h) * p.D
                dout_ptr = p.dout_ptr + ((b * p.S + first) * p.H + h) * p.D
                lse_ptr = p.rows_ptr + (b * p.H + h) * p.S + first
                delta_ptr = lse_ptr + tl.cast(p.B * p.H, tl.int64) * p.S
                dk, dv = _of_keys(
                    dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, begin + full * p.BLOCK_N, unmasked, 0, 0, count,
                    start, low, high, p, False,
                )  # fmt: skip
                dk, dv = _of_keys(
                    dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, begin, masked, full, unmasked * p.BLOCK_N, count,
                    start, low, high, p, True,
                )  # fmt: skip
        dk *= p.scale * LN2
        offs, inside = _places(rows, p)
        whole = tl.cast(p.B * p.S, tl.int64) * p.KV * p.D
        if world.size > 1:
            if distance > 0:
                slot = p.parts_ptr + (distance - 1) * 2 * whole + place
                pl.store(slot + offs, dk, source, world, mask=inside)
                pl.store(slot + whole + offs, dv, source, world, mask=inside)
                at = (((distance - 1) * p.B + b) * p.KV + g) * tiles + i
                pl.signal(p.parted_ptr + at, source, world, epoch, "set")  # publish
            else:
                for other in range(1, world.size):
                    if _is_seen(least, most, (rank + other) % world.size, p, world):
                        pl.wait(p.parted_ptr + (((other - 1) * p.B + b) * p.KV + g) * tiles + i, epoch, world)
                        slot = p.parts_ptr + (other - 1) * 2 * whole + place
                        dk += _tile(slot, rows, p, p.BLOCK_M, p.KV * p.D, True)
                        dv += _tile(slot + whole, rows, p, p.BLOCK_M, p.KV * p.D, True)
        if distance == 0:
            tl.store(p.dk_ptr + place + offs, dk.to(p.dk_ptr.dtype.element_ty), mask=inside)
            tl.store(p.dv_ptr + place + offs, dv.to(p.dv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(task, p, world, epoch):
    queries = p.B * p.H * num_pieces(p, p.BLOCK_M)
    if task < queries:
        _queries(task, p, world, epoch)
    else:
        _keys(task - queries, p, world, epoch)


@triton.jit
def backward_kernel(p, world):
    tasks = p.B * num_pieces(p, p.BLOCK_M) * (p.H + p.KV * world.size)
    chunks = p.B * num_pieces(p, p.CHUNK) if world.size > 1 else 0
    epoch = pl.epoch(p.ready_ptr, world)
    if world.size > 1 and tl.program_id(0) < p.num_comm_sms:
        # Before overwrite: every rank's launch before has ended, and with it what reads its inboxes. A part is sent to a
        # rank when keys of it are here, so behind its barrier.
        pl.barrier(p.bar_ptr + tl.program_id(0), world)
    pl.lcsc(_gradient, push, (p, world, epoch), tasks, chunks, p.queue_ptr, epoch, p.num_comm_sms)
