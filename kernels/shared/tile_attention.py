"""Attention of a tile of queries to keys that come in parts: the running softmax of Flash Attention (Dao et al.).

The functions take `p`, a kernel's argument with these fields:

left, right, length: a query at position p sees the keys from p - left to p + right; `length` and behind is padding
scale: of a score, times log2(e); fp32
spans_ptr: int32 (2, S), or None: the document of each row, see ring_attention.sequence.spans; S: its rows
KV, D: keys lie KV * D elements apart, with D elements each; WHOLE: D is BLOCK_D
BLOCK_M, BLOCK_N, BLOCK_D: queries of a tile, keys of a step, elements of a row; powers of two from 16
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(1 << 30)  # behind every position


@triton.jit
def nothing(p):
    """The softmax of no keys: (top, total, acc).

    top, total: fp32 (BLOCK_M,), the greatest score, in base 2, and the sum of the exponentials without it. acc: fp32
    (BLOCK_M, BLOCK_D), the values times the exponentials.
    """
    top = tl.full((p.BLOCK_M,), -float("inf"), tl.float32)
    return top, tl.zeros((p.BLOCK_M,), tl.float32), tl.zeros((p.BLOCK_M, p.BLOCK_D), tl.float32)


@triton.jit
def interval(at, place, stride, inside, left, right, p):
    """The keys that queries at positions `at` see, [low, high). place: of their documents in spans_ptr, whose ends lie
    `stride` behind the beginnings; inside: which of the queries there are."""
    low = tl.maximum(at - left, 0)
    high = tl.where(at < p.length, tl.minimum(at + right + 1, p.length), 0)
    if p.spans_ptr is not None:
        low = tl.maximum(low, tl.load(p.spans_ptr + place, mask=inside, other=0))
        high = tl.minimum(high, tl.load(p.spans_ptr + stride + place, mask=inside, other=0))
    return low, high


@triton.jit
def sight(place, stride, rows, position, left, right, p, ROWS: tl.constexpr):
    """The keys that each of ROWS queries sees, [low, high), and those that one of them sees, [least, most), and those
    that all of them see, [all_from, all_to). position, place: of the first of the `rows` queries, see `interval`. The
    queries that see each of ROWS keys with the two sides exchanged."""
    m = tl.arange(0, ROWS)
    inside = m < rows
    low, high = interval(position + m, place + m, stride, inside, left, right, p)
    least = tl.min(tl.where(inside, low, FAR), 0)
    all_from = tl.max(tl.where(inside, low, 0), 0)
    most = tl.max(tl.where(inside, high, 0), 0)
    all_to = tl.min(tl.where(inside, high, FAR), 0)
    return low, high, least, most, all_from, all_to


@triton.jit
def blocks(start, count, least, most, all_from, all_to, ROWS: tl.constexpr):
    """Which blocks of ROWS rows are looked at, of `count` rows from position `start` on: they begin at row `begin`,
    `unmasked` of them need no mask and come behind `full` others; `masked` need one. None if begin >= end."""
    begin = tl.maximum(least - start, 0)
    end = tl.minimum(most - start, count)
    begin = tl.where(begin < end, begin // ROWS * ROWS, end)
    full = tl.minimum(tl.cdiv(tl.maximum(all_from - start - begin, 0), ROWS), tl.cdiv(end - begin, ROWS))
    behind = tl.maximum(tl.minimum(all_to - start, count) - begin, 0) // ROWS
    unmasked = tl.maximum(behind - full, 0)
    return begin, end, full, unmasked, tl.cdiv(end - begin, ROWS) - unmasked


@triton.jit
def _steps(
    top, total, acc, q, k_ptr, v_ptr, begin, steps, before, skipped, rows, position, low, high, p, MASKED: tl.constexpr
):
    """The softmax so far, and that of `steps` blocks of keys from row `begin` on; `skipped` rows are left out behind
    the first `before` blocks. No wait is in here, so the loop is pipelined.

    rows: those of the part at k_ptr up to the last that a query sees; position: of the first.
    """
    d = tl.arange(0, p.BLOCK_D)
    n = tl.arange(0, p.BLOCK_N)
    ld: tl.constexpr = p.KV * p.D
    for step in range(steps):
        row = begin + step * p.BLOCK_N
        if MASKED:
            row += tl.where(step >= before, skipped, 0)
        base = tl.cast(row, tl.int64) * ld  # 64-bit bases, 32-bit offsets inside a block
        offs = n[:, None] * ld + d[None, :]
        if MASKED:
            inside = ((row + n) < rows)[:, None] & (d < p.D)[None, :]
            k = tl.load(k_ptr + base + offs, mask=inside, other=0.0)
        elif p.WHOLE:
            k = tl.load(k_ptr + base + offs)
        else:
            k = tl.load(k_ptr + base + offs, mask=(d < p.D)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            at = position + row + n
            seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None]) & ((row + n) < rows)[None, :]
            scores = tl.where(seen, scores, -float("inf"))
        new = tl.maximum(top, tl.max(scores, 1) * p.scale)
        finite = tl.where(new == -float("inf"), 0.0, new)  # no key seen so far
        weights = tl.exp2(scores * p.scale - finite[:, None])
        shrink = tl.exp2(top - finite)
        total = total * shrink + tl.sum(weights, 1)
        if MASKED:
            inside = ((row + n) < rows)[:, None] & (d < p.D)[None, :]
            v = tl.load(v_ptr + base + offs, mask=inside, other=0.0)
        elif p.WHOLE:
            v = tl.load(v_ptr + base + offs)
        else:
            v = tl.load(v_ptr + base + offs, mask=(d < p.D)[None, :], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new
    return top, total, acc


@triton.jit
def attend(
    top, total, acc, q, k_ptr, v_ptr, begin, full, unmasked, masked, rows, position, low, high, p
):  # fmt: skip
    """The softmax so far, and that of the keys of a part, the first one at `position`, in the blocks that `blocks` has
    found from row `begin` on. rows: where `blocks` ends: behind it padding may be NaN. low, high: as of `sight`."""
    top, total, acc = _steps(
        top, total, acc, q, k_ptr, v_ptr, begin + full * p.BLOCK_N, unmasked, 0, 0, rows, position, low, high, p, False
    )
    top, total, acc = _steps(
        top, total, acc, q, k_ptr, v_ptr, begin, masked, full, unmasked * p.BLOCK_N, rows, position, low, high, p, True
    )
    return top, total, acc


@triton.jit
def finished(top, total, acc):
    """(result, fp32 (BLOCK_M, BLOCK_D); natural logarithm of the sum of exponentials): 0 and -inf without a key."""
    empty = total == 0.0
    out = acc / tl.where(empty, 1.0, total)[:, None]
    return out, tl.where(empty, -float("inf"), (top + tl.log2(tl.where(empty, 1.0, total))) * LN2)
