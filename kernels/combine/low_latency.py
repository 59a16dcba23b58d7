"""low_latency: one launch, neither barrier nor fence, for some hundred tokens a rank.

    1. Each program adds the rows of some slots' tokens, times their weights, and puts the sum into the place that the
       token's rank has for this token and this rank. Tokens of other ranks come first, so that their sums travel while
       this rank's own ones are added.
    2. Each program takes the ranks' sums of some of this rank's tokens, as they arrive, and adds them.

All of it travels in flagged words (pkt/language/flagged.py), to this rank itself, too. In every launch each rank also
puts one word to every rank and takes theirs, so that two halves, used in turn, are enough. Sums are added and rounded
as in `pull`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import ptx, sync

from ..dispatch import words
from ..shared import packing

LATER, NONE = tl.constexpr(1 << 30), tl.constexpr(0x7FFFFFFF)
"""Added to the turns of this rank's own tokens, more than any task has; the turn of a free slot."""


class Few(NamedTuple):
    """The numbers of a low-latency combine."""

    T: Any  # this rank's tokens
    H: Any  # elements of a token
    S: Any  # slots
    P: Any  # tokens of a rank at most
    THIRD: Any  # words of a token
    PARTS: Any  # programs that share a token
    K: tl.constexpr  # experts of a token
    K2: tl.constexpr  # the next power of two
    BLOCK: tl.constexpr  # words of a token moved at a time
    LANES: tl.constexpr  # threads
    LOOK: tl.constexpr  # slots that a program looks at together
    TOGETHER: tl.constexpr  # rows loaded together


@triton.jit
def low_latency_kernel(
    y_ptr,  # (R, H) this rank's
    tokens_ptr,  # int32 (S, K) this rank's: the rows of the token in each slot, -1 for none
    places_ptr,  # int32 (T, size) this rank's: the slot of each token on each rank, -1 for none
    weights_ptr,  # fp32 (R,) this rank's, or None
    source_ptr,  # int32 (R, 3) this rank's: the rank and token of each row
    out_ptr,  # (T, H) this rank's
    m,  # dispatch's Words: of a half size words, then (P, size, THIRD), of which rank r puts [:, r]
    p,  # Few
    world,
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    launch = sync.peek_epoch(m.launches)
    half = words.half_of(m, launch)
    flag = words.flag_of(launch)
    lane = tl.arange(0, p.LANES)
    if pid == 0:
        hello = half + 4 * (tl.cast(world.rank, tl.int32) + lane)
        for d in tl.static_range(1, world.size + 1):
            pl.put_flagged(hello, (lane, lane, lane), flag, (world.rank + d) % world.size, world, mask=lane < 1)
    k = tl.arange(0, p.K2)
    for first in range(pid, p.S * p.PARTS, programs * p.LOOK):
        task = first + programs * tl.arange(0, p.LOOK)
        inside = (task < p.S * p.PARTS)[:, None] & (k < p.K)[None, :]
        at = tokens_ptr + tl.cast(task // p.PARTS, tl.int64)[:, None] * p.K + k[None, :]
        row = tl.max(tl.load(at, mask=inside, other=-1), 1)
        source = source_ptr + 3 * tl.cast(row, tl.int64)
        home = tl.load(source, mask=row >= 0, other=0)
        t = tl.load(source + 1, mask=row >= 0, other=0)
        turn = tl.where(row >= 0, task + tl.where(home == world.rank, LATER, 0), NONE)
        now = tl.min(turn, 0)
        while now < NONE:
            goes_to = tl.sum(tl.where(turn == now, t * world.size + home, 0), 0)
            _put_sum(y_ptr, tokens_ptr, weights_ptr, half, flag, now % LATER, goes_to, p, world)
            now = tl.min(tl.where(turn > now, turn, NONE), 0)
    ptx.cta_barrier()
    pl.epoch(m.launches, world)
    for task in range(programs - 1 - pid, p.T * p.PARTS, programs):  # first those that have put the least
        _take_sums(places_ptr, out_ptr, half, flag, task // p.PARTS, task % p.PARTS, p, world)
    if pid == 0:  # everybody has ended the launch before
        pl.take_flagged_all(half + 4 * lane, 4, flag, world, mask=lane < 1)


@triton.jit
def _of_sum(half, t, rank, p, world):
    """The first word of rank `rank`'s sum of token t."""
    message = tl.cast(t, tl.int64) * world.size + rank
    return half + (world.size + message * p.THIRD) * 4


@triton.jit
def _put_sum(y_ptr, tokens_ptr, weights_ptr, half, flag, task, goes_to, p, world):
    """Put a part of a slot's sum to its token's rank. goes_to: the token times `size`, plus the rank."""
    t = goes_to // world.size
    rows = _rows(tokens_ptr, task // p.PARTS, p)
    at = _of_sum(half, t, tl.cast(world.rank, tl.int32), p, world)
    for block in range(task % p.PARTS, tl.cdiv(p.THIRD, p.BLOCK), p.PARTS):
        word = block * p.BLOCK + tl.arange(0, p.BLOCK)
        sums = _sum(y_ptr, weights_ptr, rows, word, p)
        inside = (word < p.THIRD) & (t < p.P)
        pl.put_flagged(at + 4 * word, sums, flag, goes_to % world.size, world, mask=inside)


@triton.jit
def _take_sums(places_ptr, out_ptr, half, flag, t, part, p, world):
    """Add the ranks' sums of a part of token t, and store the result."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    PER: tl.constexpr = 32 // dtype.primitive_bitwidth
    places = places_ptr + tl.cast(t, tl.int64) * world.size
    there = ()
    for rank in tl.static_range(world.size):
        there = there + (tl.load(places + rank) >= 0,)
    at = _of_sum(half, t, 0, p, world)
    out = out_ptr + tl.cast(t, tl.int64) * p.H
    for block in range(part, tl.cdiv(p.THIRD, p.BLOCK), p.PARTS):
        word = block * p.BLOCK + tl.arange(0, p.BLOCK)
        inside = word < p.THIRD
        wanted = ()
        for rank in tl.static_range(world.size):
            wanted = wanted + (inside & there[rank],)
        found = pl.take_flagged_all(at + 4 * word, 4 * p.THIRD, flag, world, mask=wanted)
        for third in tl.static_range(3):
            total = packing.numbers(tl.zeros_like(word), dtype, PER)
            for rank in tl.static_range(world.size):
                total += packing.numbers(found[rank][third], dtype, PER)
            packing.store(out, word + third * p.THIRD, _rounded(total, dtype, PER), inside, p.H, PER)


@triton.jit
def _rows(tokens_ptr, slot, p):
    """How many rows a slot's token has here, and each of them, as scalars: once, not for each block of the token."""
    k = tl.arange(0, p.K2)
    rows = tl.load(tokens_ptr + tl.cast(slot, tl.int64) * p.K + k, mask=k < p.K, other=-1)
    here = (rows >= 0).to(tl.int32)
    turn = tl.where(rows >= 0, tl.cumsum(here) - 1, -1)
    each = ()
    for i in tl.static_range(p.K):
        each = each + (tl.sum(tl.where(turn == i, rows, 0), 0),)
    return tl.sum(here, 0), each


@triton.jit
def _sum(y_ptr, weights_ptr, rows, word, p):
    """Some words, by thirds, of the sum of `rows`, each times its weight."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    PER: tl.constexpr = 32 // dtype.primitive_bitwidth  # elements in an int32
    count, each = rows
    a = packing.numbers(tl.zeros_like(word), dtype, PER)
    b = tl.zeros_like(a)
    c = tl.zeros_like(a)
    for first in tl.static_range(0, p.K, p.TOGETHER):
        if first < count:
            for i in tl.static_range(first, min(first + p.TOGETHER, p.K)):
                y = y_ptr + tl.cast(each[i], tl.int64) * p.H
                x = packing.thirds(y, word, p.THIRD, (word < p.THIRD) & (i < count), p.H, PER)
                weight = 1.0
                if weights_ptr is not None:
                    weight = tl.load(weights_ptr + each[i], mask=i < count, other=0)
                a += packing.numbers(x[0], dtype, PER) * weight
                b += packing.numbers(x[1], dtype, PER) * weight
                c += packing.numbers(x[2], dtype, PER) * weight
    return _rounded(a, dtype, PER), _rounded(b, dtype, PER), _rounded(c, dtype, PER)


@triton.jit
def _rounded(total, dtype: tl.constexpr, PER: tl.constexpr):
    """Of sums in fp32 the int32 that carry them in `dtype`."""
    if PER == 1:
        return total.to(dtype).to(tl.int32, bitcast=True)
    else:
        return packing.packed(total.to(dtype))
