"""Partial results of attention: their flagged words, and how several become one.

A partial result is a row of the attention over some of the keys, and its lse, the natural logarithm of the sum of their
exponentials. Merged are weights e^(lse - greatest lse), so nothing overflows, and a part with no keys, of lse -inf,
weighs 0. Parts are merged in a fixed order.

A row travels as shared.tile_words lays it out; the third int32 of the words that hold two carries the lse.
"""

from __future__ import annotations

import triton
import triton.language as tl

import pkt.language as pl

from ..shared import tile_words


@triton.jit
def put(ptr, tile, lse, inside, flag, peer, world):
    """Put rows of partial results, fp32 (rows, columns), and their lse, fp32 (rows,), into rank `peer`'s words. ptr:
    int32 (rows,), to the first word of each row; inside: (rows,), the rows to put."""
    tile_words.put(ptr, tile, inside, flag, peer, world, lse.to(tl.int32, bitcast=True))


@triton.jit
def none(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """No parts, to merge others into: (greatest lse, sum of weights, the weighted sums by their places in words)."""
    wide = tl.zeros((ROWS, COLUMNS // 4), tl.float32)
    half = tl.zeros((ROWS, COLUMNS // 8), tl.float32)
    return tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32), wide, wide, wide, half, half


@triton.jit
def weights(most, total, lse):
    """What one more part does to the greatest lse and the sum of weights: (both of them, the factor of the old sums,
    the weight of the new part)."""
    higher = tl.maximum(most, lse)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    old = tl.exp(most - base)
    new = tl.exp(lse - base)
    return higher, total * old + new, old, new


@triton.jit
def take(merged, ptr, apart, begin, end, inside, flag, world, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Merge PARTS more parts, when they are there. ptr: int32 (rows,), to the first word of each row of the first of
    them; apart: int32 from a part to the next; begin, end: numbers or (rows,), outside of which parts weigh nothing."""
    threes, twos, in_threes, in_twos = tile_words.places(ptr, inside, COLUMNS // 4)
    found = pl.take_flagged_all(threes, apart, flag, world, mask=in_threes, parts=PARTS)
    rest = pl.take_flagged_all(twos, apart, flag, world, mask=in_twos, parts=PARTS)
    most, total, a, b, c, low, high = merged
    first = (tl.arange(0, COLUMNS // 8) == 0)[None, :]
    for i in tl.static_range(PARTS):
        # Every word carries the lse. Triton does not move this sum to another layout, as it does a maximum, with which
        # every thread would take all words of a row.
        lse = tl.sum(tl.where(first, _fp32(rest[i][2]), 0.0), 1)
        lse = tl.where((i < begin) | (i >= end), float("-inf"), lse)
        most, total, old, new = weights(most, total, lse)
        a = a * old[:, None] + _fp32(found[i][0]) * new[:, None]
        b = b * old[:, None] + _fp32(found[i][1]) * new[:, None]
        c = c * old[:, None] + _fp32(found[i][2]) * new[:, None]
        low = low * old[:, None] + _fp32(rest[i][0]) * new[:, None]
        high = high * old[:, None] + _fp32(rest[i][1]) * new[:, None]
    return most, total, a, b, c, low, high


@triton.jit
def sums(merged):
    """The weighted sums, fp32 (rows, columns)."""
    _, _, a, b, c, low, high = merged
    return _joined(_joined(a, b), _joined(c, _joined(low, high)))


@triton.jit
def joined(sums, most, total, RUNS: tl.constexpr):
    """Each row's RUNS partial results, which lie side by side, merged: (the weighted sums, the greatest lse, the sum of
    weights)."""
    if RUNS == 1:
        return sums, most, total
    else:
        ROWS: tl.constexpr = most.shape[0] // RUNS
        each = tl.reshape(most, (ROWS, RUNS))
        most = tl.max(each, 1)
        weight = tl.exp(each - tl.where(most == float("-inf"), 0.0, most)[:, None])
        total = tl.sum(tl.reshape(total, (ROWS, RUNS)) * weight, 1)
        sums = tl.reshape(sums, (ROWS, RUNS, sums.shape[1])) * weight[:, :, None]
        return tl.sum(sums, 1), most, total


@triton.jit
def divided(sums, most, total):
    """(the rows, fp32 (rows, columns); their lse, fp32 (rows,)): 0 and -inf where no part has keys."""
    nothing = total == 0
    lse = tl.where(nothing, float("-inf"), most + tl.log(total))
    return sums / tl.where(nothing, 1.0, total)[:, None], lse


@triton.jit
def _fp32(words):
    return words.to(tl.float32, bitcast=True)


@triton.jit
def _joined(x, y):
    """Columns of x and y in turn."""
    return tl.reshape(tl.join(x, y), (x.shape[0], 2 * x.shape[1]))
