"""One pass over the keys that a rank holds: every program takes an equal share of them, whatever the lengths are.

A *unit* is what attends together: of one sequence the rows (query token, head) of one KV head, up to ROWS of them. All
rows of a unit share each load of the cache. Its keys are cut into tiles of KEYS. The tiles of all units lie in one row,
in the order of (sequence, KV head, block of rows, tile), and each program takes a run of that row. So all programs have
as many tiles, give or take one run, and the grid does not depend on the lengths, which the kernel reads on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pkt.language import ptx

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Decode(NamedTuple):
    """What the kernels work on. B sequences, SQ query tokens of each, HEADS query heads, GROUP of them to each KV head.
    A row of the result is number (b * SQ + s) * HEADS + h."""

    q_ptr: Any  # (B, SQ, HEADS, D) this rank's, the same on every rank
    k_ptr: Any  # (pages, PAGE, KV heads, D) this rank's, of q's dtype or fp8, as v_ptr
    v_ptr: Any  # (pages, PAGE, KV heads, E) this rank's; k_ptr with SHARED
    table_ptr: Any  # int32 (B, pages_of), the pages of a sequence on this rank, in the order of its keys
    lens_ptr: Any  # int32 (B, SQ), this rank's keys that a query token sees: the first so many
    sinks_ptr: Any  # fp32 (HEADS,), the same on every rank, or None
    out_ptr: Any  # (B, SQ, HEADS, E) this rank's
    k_scale_ptr: Any  # fp32 (KV heads,) or of one element, this rank's: what K's elements are times; or None
    v_scale_ptr: Any  # the same for V; with SHARED k_scale_ptr
    lse_ptr: Any  # fp32 (B, SQ, HEADS) this rank's
    parts_ptr: Any  # int32 (programs + units, ROWS, WORDS, 4) this rank's: parts of units, in flagged words
    flags_ptr: Any  # of this rank; only its launch counter is used
    slots_ptr: Any  # int32 (2, room, 4) on every rank; of a half, by the launch's parity, (size, rows, WORDS, 4) is
    # used, and rank r puts [r] of it. Without FUSED fp32 (rows, E + 1): this rank's result, and its lse
    B: Any
    pages_of: Any
    pages: Any  # of the caches
    most: Any  # keys that the pages of a sequence can hold
    k_page: Any  # elements from one page of K to the next,
    k_token: Any  # from one key to the next in a page,
    k_head: Any  # from one KV head to the next
    v_page: Any
    v_token: Any
    v_head: Any
    room: Any
    scale: Any
    cap: Any
    BATCH: tl.constexpr  # B, rounded up to a power of two, as the next are
    TOKENS: tl.constexpr
    SQ: tl.constexpr
    HEADS: tl.constexpr
    GROUP: tl.constexpr
    D: tl.constexpr
    E: tl.constexpr
    PAGE: tl.constexpr
    SHARED: tl.constexpr  # V is the first D1 elements of K
    K_SCALES: tl.constexpr  # 1: each KV head has a scale of its own; 0: all have the first
    V_SCALES: tl.constexpr
    CAPPED: tl.constexpr
    FUSED: tl.constexpr
    ROWS: tl.constexpr
    BLOCKS: tl.constexpr  # units of a KV head
    UNITS: tl.constexpr  # of a sequence
    KEYS: tl.constexpr
    D1: tl.constexpr  # D is cut in D1, which may be V, and the rest, D2, which may be 0; both are rounded up
    D2: tl.constexpr
    COLUMNS: tl.constexpr  # E, rounded up
    WORDS: tl.constexpr  # of a row
    TMA: tl.constexpr  # TMA loads whole tiles: each lies in a page


# ------------------------------------------------------------------------------------------------------------- shares
@triton.jit
def lens_of_all(p):
    """(BATCH, TOKENS): keys that the query tokens see."""
    b = tl.arange(0, p.BATCH)[:, None]
    s = tl.arange(0, p.TOKENS)[None, :]
    return tl.load(p.lens_ptr + b * p.SQ + s, mask=(b < p.B) & (s < p.SQ), other=0)


@triton.jit
def tiles_of_all(lens, p):
    """(BATCH,): tiles of each sequence's units: one at least, so that somebody reports a unit that has no keys."""
    longest = tl.minimum(tl.maximum(tl.max(lens, 1), 0), p.most)
    return tl.where(tl.arange(0, p.BATCH) < p.B, tl.maximum(tl.cdiv(longest, p.KEYS), 1), 0)


@triton.jit
def share_of(tiles, shares, p):
    """Tiles in each of so many shares: the first program's are from 0 on, the second one's from there on, ..."""
    return tl.maximum(tl.cdiv(tl.sum(tiles, 0) * p.UNITS, shares), 1)


@triton.jit
def unit_at(tile, tiles, p):
    """The unit that a tile of the row belongs to."""
    b = tl.sum((tl.cumsum(tiles, 0) * p.UNITS <= tile).to(tl.int32), 0)
    first, count = tiles_of(b * p.UNITS, tiles, p)
    return b * p.UNITS + (tile - first) // tl.maximum(count, 1)


@triton.jit
def tiles_of(unit, tiles, p):
    """(the first tile of a unit, how many it has)"""
    b = tl.arange(0, p.BATCH)
    before = tl.sum(tl.where(b < unit // p.UNITS, tiles, 0), 0)
    count = tl.sum(tl.where(b == unit // p.UNITS, tiles, 0), 0)
    return before * p.UNITS + unit % p.UNITS * count, count


@triton.jit
def place_of(unit, i, p):
    """Of rows i of a unit: (sequence, KV head, query token, number of the row of the result, which of them exist)."""
    b = unit // p.UNITS
    g = unit % p.UNITS // p.BLOCKS
    row = unit % p.BLOCKS * p.ROWS + i
    s = row // p.GROUP
    exists = row < p.SQ * p.GROUP
    return b, g, s, (b * p.SQ + s) * p.HEADS + g * p.GROUP + row % p.GROUP, exists


# ---------------------------------------------------------------------------------------------------------- attention
@triton.constexpr_function
def math_of(dtype, fp8):
    """The dtype of what is multiplied. A GPU converts two numbers of fp8 to fp16 at once, and to bf16 by way of it."""
    return tl.float16 if fp8 and dtype == tl.bfloat16 else dtype


@triton.jit
def _power_of_two(x):
    """The greatest power of two that is no more than x, of fp32; the least normal number for smaller ones."""
    return (tl.maximum(x, 2.0**-126).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def boxes(tokens, p):
    """TMA descriptors of tiles: of the first D1 elements of keys, of the D2 others, and of values. Of each page they
    reach the first `tokens` keys; TMA loads zeros in the place of the others. Making them takes a microsecond. Without
    TMA these are the caches."""
    keys = p.k_ptr
    others = p.k_ptr
    values = p.v_ptr
    if p.TMA:
        heads: tl.constexpr = p.HEADS // p.GROUP
        page = tl.cast(p.k_page, tl.int64)
        head = tl.cast(p.k_head, tl.int64)
        token = tl.cast(p.k_token, tl.int64)
        shape = p.pages, heads, tokens, p.D
        keys = tl.make_tensor_descriptor(p.k_ptr, shape, [page, head, token, 1], [1, 1, p.KEYS, p.D1])
        if p.D2:
            others = tl.make_tensor_descriptor(p.k_ptr, shape, [page, head, token, 1], [1, 1, p.KEYS, p.D2])
        if not p.SHARED:
            page = tl.cast(p.v_page, tl.int64)
            head = tl.cast(p.v_head, tl.int64)
            token = tl.cast(p.v_token, tl.int64)
            shape = p.pages, heads, tokens, p.E
            values = tl.make_tensor_descriptor(p.v_ptr, shape, [page, head, token, 1], [1, 1, p.KEYS, p.COLUMNS])
    return keys, others, values


@triton.jit
def _box(descriptor, page, g, row, column, KEYS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.reshape(descriptor.load([page, g, row, column]), (KEYS, COLUMNS))


@triton.jit
def _rows(ptr, at, there, first, end, COLUMNS: tl.constexpr):
    """Columns [first, end) of the rows that are there, zeros elsewhere. at: (KEYS,), from ptr to each row."""
    column = first + tl.arange(0, COLUMNS)[None, :]
    return tl.load(ptr + at[:, None] + column, mask=there[:, None] & (column < end), other=0.0)


@triton.jit
def _add_boxes(sums, query, tile, boxes, page, g, row, p, SHIFT: tl.constexpr):
    """`sums` with a tile that begins at key `row` of a page, see `_weigh`."""
    acc, most, total = sums
    dtype: tl.constexpr = query[0].dtype
    keys, others, values = boxes
    k1 = _box(keys, page, g, row, 0, p.KEYS, p.D1).to(dtype)
    k2 = k1
    if p.D2:
        k2 = _box(others, page, g, row, p.D1, p.KEYS, p.D2).to(dtype)
    weight, old, most, total = _weigh(most, total, query, tile, k1, k2, p, SHIFT)
    v = k1
    if not p.SHARED:
        v = _box(values, page, g, row, 0, p.KEYS, p.COLUMNS).to(dtype)
    if dtype != p.k_ptr.dtype.element_ty:
        v = ptx.unknown(v)
    acc = tl.dot(weight.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
    return acc, most, total


@triton.jit
def _add_rows(sums, query, tile, end, table, g, p, SHIFT: tl.constexpr):
    """`sums` with a tile that may lie in several pages: with its keys before number `end`."""
    acc, most, total = sums
    dtype: tl.constexpr = query[0].dtype
    key = tile * p.KEYS + tl.arange(0, p.KEYS)
    there = key < end
    page = tl.cast(tl.load(table + key // p.PAGE, mask=there, other=0), tl.int64)
    k_ptr = p.k_ptr + tl.cast(g, tl.int64) * p.k_head
    at = page * p.k_page + key % p.PAGE * p.k_token
    # Every number of fp8 is one of fp16 and fp32, too.
    k1 = _rows(k_ptr, at, there, 0, p.D, p.D1).to(dtype)
    k2 = k1
    if p.D2:
        k2 = _rows(k_ptr, at, there, p.D1, p.D, p.D2).to(dtype)
    weight, old, most, total = _weigh(most, total, query, tile, k1, k2, p, SHIFT)
    v = k1
    if not p.SHARED:
        at = page * p.v_page + key % p.PAGE * p.v_token
        v = _rows(p.v_ptr + tl.cast(g, tl.int64) * p.v_head, at, there, 0, p.E, p.COLUMNS).to(dtype)
    if dtype != p.k_ptr.dtype.element_ty:
        # The compiler would convert V as an operand of tl.dot, for which a thread loads only single bytes of fp8.
        v = ptx.unknown(v)
    acc = tl.dot(weight.to(dtype), v, acc * old[:, None], input_precision="ieee")
    return acc, most, total


@triton.jit
def _weigh(most, total, query, tile, k1, k2, p, SHIFT: tl.constexpr):
    """A tile's keys in the softmax of each row: (their weights, what the sums of before are times, the greatest score
    so far, in powers of two, the sum of weights). query: (its first D1 elements, the others, what scores are times, how
    many keys it sees)."""
    q1, q2, scale, seen = query
    key = tile * p.KEYS + tl.arange(0, p.KEYS)
    score = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    if p.D2:
        score = tl.dot(q2, tl.trans(k2), score, input_precision="ieee")
    score *= scale[:, None]
    if p.CAPPED:
        # tanh(x) = 1 - 2 / (1 + e^2x), right for infinite powers, too
        score = p.cap * LOG2E * (1 - 2 / (1 + tl.exp2(score * (2 / p.cap))))
    score = tl.where(key[None, :] < seen[:, None], score, float("-inf"))
    higher = tl.maximum(most, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # or a row that has seen no key were inf - inf
    weight = tl.exp2(score - (base - SHIFT)[:, None])
    old = tl.exp2(most - base)
    return weight, old, higher, total * old + tl.sum(weight, 1)


@triton.jit
def attend(unit, first, last, boxes_of_pages, p):
    """Tiles [first, last) of a unit's keys: (the attention over them, fp32 (ROWS, COLUMNS); its lse, fp32 (ROWS,)). A
    row that sees none of them has 0 and -inf. boxes_of_pages: of whole pages. No wait is in here, so the loops are
    pipelined."""
    FP8: tl.constexpr = p.k_ptr.dtype.element_ty.primitive_bitwidth == 8
    dtype: tl.constexpr = math_of(p.q_ptr.dtype.element_ty, FP8)
    SHIFT: tl.constexpr = 15 if dtype == tl.float16 else 0  # weights are times 2 ** SHIFT, or small ones were 0 in fp16
    b, g, s, number, exists = place_of(unit, tl.arange(0, p.ROWS), p)
    d1 = tl.arange(0, p.D1)
    q_row = p.q_ptr + tl.cast(number, tl.int64)[:, None] * p.D
    q1 = tl.load(q_row + d1[None, :], mask=exists[:, None] & (d1 < p.D)[None, :], other=0)
    q2 = q1
    if p.D2:
        d2 = p.D1 + tl.arange(0, p.D2)
        q2 = tl.load(q_row + d2[None, :], mask=exists[:, None] & (d2 < p.D)[None, :], other=0)
    scale = p.scale * LOG2E + tl.zeros((p.ROWS,), tl.float32)
    if dtype != p.q_ptr.dtype.element_ty:
        greatest = tl.max(tl.abs(q1).to(tl.float32), 1)
        if p.D2:
            greatest = tl.maximum(greatest, tl.max(tl.abs(q2).to(tl.float32), 1))
        power = _power_of_two(greatest)
        q1 = (q1.to(tl.float32) / power[:, None]).to(dtype)
        q2 = (q2.to(tl.float32) / power[:, None]).to(dtype)
        scale *= power
    seen = tl.load(p.lens_ptr + b * p.SQ + s, mask=exists, other=0)
    seen = tl.minimum(seen, p.most)
    end = tl.max(seen, 0)
    table = p.table_ptr + tl.cast(b, tl.int64) * p.pages_of
    if p.k_scale_ptr is not None:
        scale *= tl.load(p.k_scale_ptr + g * p.K_SCALES)
    query = q1, q2, scale, seen
    acc = tl.zeros((p.ROWS, p.COLUMNS), tl.float32)
    most = tl.full((p.ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((p.ROWS,), tl.float32)
    if p.TMA:
        whole = tl.maximum(tl.minimum(last, end // p.KEYS), first)
        page = tl.load(table + first * p.KEYS // p.PAGE, mask=first < whole, other=0)
        for tile in range(first, whole):
            here = page
            # The number of the next page is on its way while this tile is added.
            page = tl.load(table + (tile + 1) * p.KEYS // p.PAGE, mask=tile + 1 < whole, other=0)
            row = tile * p.KEYS % p.PAGE
            acc, most, total = _add_boxes((acc, most, total), query, tile, boxes_of_pages, here, g, row, p, SHIFT)
        # The last tile may end in the middle of a page, behind which there may be anything.
        for tile in tl.range(whole, tl.minimum(last, tl.cdiv(end, p.KEYS)), num_stages=1):
            row = tile * p.KEYS % p.PAGE
            page = tl.load(table + tile * p.KEYS // p.PAGE)
            ended = boxes(end - tile * p.KEYS + row, p)
            acc, most, total = _add_boxes((acc, most, total), query, tile, ended, page, g, row, p, SHIFT)
    else:
        for tile in range(first, last):
            acc, most, total = _add_rows((acc, most, total), query, tile, end, table, g, p, SHIFT)
    nothing = total == 0
    lse = tl.where(nothing, float("-inf"), (most + tl.log2(total) - SHIFT) * LN2)
    acc /= tl.where(nothing, 1.0, total)[:, None]
    if p.v_scale_ptr is not None:
        acc *= tl.load(p.v_scale_ptr + g * p.V_SCALES)
    return acc, lse
