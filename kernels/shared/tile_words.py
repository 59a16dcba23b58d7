"""Tiles in flagged words (pkt/language/flagged.py), straight from and to registers.

A row of a tile is C int32, as packing.py makes them. Three of every four share a word. The fourth ones go in pairs into
further words. A row takes 3 / 8 C words; the minimum is C / 3, but then blocks would not have a power of two of
elements, as Triton demands.
"""

from __future__ import annotations

import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import address, ptx

from . import packing


@triton.constexpr_function
def words_of_row(columns, per):
    """Words of a row. columns: its elements; per: elements in an int32. The row is a multiple of 8 int32."""
    return columns // per * 3 // 8


@triton.jit
def put(ptr, tile, inside, flag, peer, world, more=None):
    """Put `tile`, of the dtype to send, into rank `peer`'s words. ptr: int32 (rows,), to the first word of each row;
    inside: (rows,), the rows to put; more: int32 (rows,), what the third place of the words of two carries."""
    PER: tl.constexpr = 32 // tile.dtype.primitive_bitwidth
    if PER == 1:
        whole = tile.to(tl.int32, bitcast=True)
    else:
        whole = packing.packed(tl.reshape(tile, (tile.shape[0], tile.shape[1] // PER, PER)))
    even, odd = _halves(whole)
    a, b = _halves(even)
    c, d = _halves(odd)
    low, high = _halves(d)
    third = low if more is None else tl.broadcast_to(more[:, None], low.shape)
    threes, twos, inside_threes, inside_twos = places(ptr, inside, a.shape[1])
    ptx.put_flagged(address.of_rank(threes, peer, world), (a, b, c), flag, inside_threes)
    ptx.put_flagged(address.of_rank(twos, peer, world), (low, high, third), flag, inside_twos)


@triton.jit
def take_sum(ptr, apart, inside, flag, world, COLUMNS: tl.constexpr, dtype: tl.constexpr):
    """The sum of all ranks' tiles, fp32 (rows, COLUMNS), added in the order of ranks. ptr: to the first word of each
    row of rank 0's tile; apart: int32 from a rank's tile to the next rank's; inside: the rows to take."""
    PER: tl.constexpr = 32 // dtype.primitive_bitwidth
    threes, twos, inside_threes, inside_twos = places(ptr, inside, COLUMNS // PER // 4)
    a = tl.zeros((threes.shape[0], threes.shape[1], PER), tl.float32)
    b = tl.zeros_like(a)
    c = tl.zeros_like(a)
    low = tl.zeros((twos.shape[0], twos.shape[1], PER), tl.float32)
    high = tl.zeros_like(low)
    # The registers hold the words of so many ranks at once.
    TOGETHER: tl.constexpr = min(world.size, max(256 // ptr.shape[0], 1))
    for first in tl.static_range(0, world.size, TOGETHER):
        a, b, c, low, high = _add(
            (a, b, c, low, high), threes + first * apart, twos + first * apart, apart, inside_threes, inside_twos, flag,
            world, min(TOGETHER, world.size - first), dtype,
        )  # fmt: skip
    d = _joined(low, high)
    whole = _joined(_joined(a, b), _joined(c, d))
    return tl.reshape(whole, (ptr.shape[0], COLUMNS))


@triton.jit
def _add(
    sums, threes, twos, apart, inside_threes, inside_twos, flag, world, RANKS: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """`sums` and what so many ranks' words hold."""
    PER: tl.constexpr = 32 // dtype.primitive_bitwidth
    a, b, c, low, high = sums
    found = pl.take_flagged_all(threes, apart, flag, world, mask=inside_threes, parts=RANKS)
    rest = pl.take_flagged_all(twos, apart, flag, world, mask=inside_twos, parts=RANKS)
    for i in tl.static_range(RANKS):
        a += _numbers(found[i][0], dtype, PER)
        b += _numbers(found[i][1], dtype, PER)
        c += _numbers(found[i][2], dtype, PER)
        low += _numbers(rest[i][0], dtype, PER)
        high += _numbers(rest[i][1], dtype, PER)
    return a, b, c, low, high


@triton.jit
def places(ptr, inside, QUARTER: tl.constexpr):
    """Where the words of three and of two int32 of each row are, and which of them are inside. QUARTER: words of three
    in a row, of four times as many int32."""
    threes = ptr[:, None] + 4 * tl.arange(0, QUARTER)[None, :]
    twos = ptr[:, None] + 4 * (tl.arange(0, QUARTER // 2) + QUARTER)[None, :]
    return (
        threes,
        twos,
        tl.broadcast_to(inside[:, None], threes.shape),
        tl.broadcast_to(inside[:, None], twos.shape),
    )


@triton.jit
def _halves(x):
    """The columns 0, 2, 4, ... and the columns 1, 3, 5, ..."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _joined(x, y):
    """The reverse of `_halves`, for blocks (rows, columns, elements of an int32)."""
    both = tl.permute(tl.join(x, y), (0, 1, 3, 2))
    return tl.reshape(both, (x.shape[0], 2 * x.shape[1], x.shape[2]))


@triton.jit
def _numbers(words, dtype: tl.constexpr, PER: tl.constexpr):
    """In fp32: (rows, words, elements of an int32)."""
    return tl.reshape(packing.numbers(words, dtype, PER), (words.shape[0], words.shape[1], PER))
