"""Flagged words (pkt/language/flagged.py) of `low_latency`: where they lie on every rank, and those that carry counts.

A half, by the launch's parity, has COUNTED words of each source rank. Behind them come the places of all source ranks;
sending.py says which token lies in which place. A place has a word for each pair, one with the token and its number,
the words of the elements, and those of the scales.

No word's flag is ever the 0 that the memory is filled with: `flag_of`. Flags repeat after 2^32 launches, as in all
flagged words: a word is taken too early if it was last used exactly so many launches ago.
"""

from __future__ import annotations

import triton
import triton.language as tl

import pkt.language as pl

from . import choices


@triton.jit
def flag_of(launch):
    """The flag of a launch, which no earlier launch has used in its half: launch 0, after 2^32, has 1, which is odd."""
    return tl.where(launch == 0, 1, launch)


@triton.jit
def half_of(m, launch):
    return m.words + tl.cast(launch & 1, tl.int64) * m.room * 4


@triton.jit
def of_token(half, source, place, p, world):
    """The first word of a place of rank `source`."""
    message = tl.cast(place, tl.int64) * world.size + source
    return half + (world.size * p.COUNTED + message * (p.K + 1 + p.THIRD + p.SCALES)) * 4


@triton.jit
def item(found, at):
    """Of words that hold the items 3 * (at // 3) and the next two, those at `at`."""
    return tl.where(at % 3 == 0, found[0], tl.where(at % 3 == 1, found[1], found[2]))


@triton.jit
def put_counts(idx_ptr, half, flag, first, step, p, world):
    """Put to every rank how many pairs I have for each expert, three in a word; and for each rank a word: how many
    tokens go there, and how many of my places there have words."""
    rank = tl.cast(world.rank, tl.int32)
    lane = tl.arange(0, p.LANES)
    k = tl.arange(0, p.K2)[None, :]
    for word in range(first, p.COUNTED, step):
        a = tl.zeros((p.TOKENS,), tl.int32)
        b = tl.zeros_like(a)
        c = tl.zeros_like(a)
        for start in range(0, p.T, p.TOKENS):
            t = start + tl.arange(0, p.TOKENS)
            expert = choices.experts(idx_ptr, t[:, None], k, t[:, None] < p.T, p)
            if word < p.EXPERT_WORDS:
                a += _times(expert, 3 * word)
                b += _times(expert, 3 * word + 1)
                c += _times(expert, 3 * word + 2)
            else:
                goes = tl.minimum(_times(choices.owner(expert, p), word - p.EXPERT_WORDS), 1)
                a += goes
                b += tl.where(p.AT_ONCE, (t < p.T).to(tl.int32), goes)
        numbers = _everywhere(a, lane), _everywhere(b, lane), _everywhere(c, lane)
        at = half + (rank * p.COUNTED + word + lane) * 4
        for d in tl.static_range(1, world.size + 1):
            pl.put_flagged(at, numbers, flag, (rank + d) % world.size, world, mask=lane < 1)


@triton.jit
def _times(chosen, wanted):
    """How often each token has chosen what is wanted."""
    return tl.sum((chosen == wanted).to(tl.int32), 1)


@triton.jit
def _everywhere(counts, lane):
    return tl.sum(counts, 0) + tl.zeros_like(lane)


@triton.jit
def _of_all(half, flag, word, inside, p, world):
    """Some words of every rank's counts, when they are there."""
    return pl.take_flagged_all(half + 4 * word, 4 * p.COUNTED, flag, world, mask=inside)


@triton.jit
def take_counts(half, flag, p, world):
    """Of each rank how many pairs it has for each of my experts: a tuple of (OWN2,), when they are there."""
    e = tl.arange(0, p.OWN2)
    expert = tl.cast(world.rank, tl.int32) * p.OWN + e
    found = _of_all(half, flag, expert // 3, e < p.OWN, p, world)
    counts = ()
    for rank in tl.static_range(world.size):
        counts = counts + (item(found[rank], expert),)
    return counts


@triton.jit
def added(counts, below, world):
    """The sum of what the ranks up to `below` have, itself not included."""
    total = tl.zeros_like(counts[0])
    for rank in tl.static_range(world.size):
        total += tl.where(rank < below, counts[rank], 0)
    return total


@triton.jit
def take_sent(half, flag, target, p, world):
    """How many tokens each rank sends to the ranks `target`, and how many of its places there have words: two blocks of
    that shape and (W,), when they are there."""
    ranks = tl.arange(0, triton.next_power_of_2(world.size))
    at = half + ((ranks * p.COUNTED + p.EXPERT_WORDS)[None, :] + target[:, None]) * 4
    inside = (ranks < world.size)[None, :] & (target < world.size)[:, None]
    found = pl.take_flagged(at, flag, world, mask=inside)
    return found[0], found[1]


@triton.jit
def take_needed(half, flag, p, world):
    """The rows that each rank would need, (W,), when all counts are there."""
    word = tl.arange(0, triton.next_power_of_2(p.EXPERT_WORDS))
    ranks = tl.arange(0, triton.next_power_of_2(world.size))
    found = _of_all(half, flag, word, word < p.EXPERT_WORDS, p, world)
    padded = ()
    for i in tl.static_range(3):
        counts = tl.zeros_like(word)
        for rank in tl.static_range(world.size):
            counts += found[rank][i]
        padded = padded + (tl.cdiv(counts, p.ALIGNMENT) * p.ALIGNMENT,)
    needed = tl.zeros_like(ranks)
    for rank in tl.static_range(world.size):
        rows = tl.zeros_like(word)
        for i in tl.static_range(3):
            rows += tl.where((3 * word + i) // p.OWN == rank, padded[i], 0)
        needed += tl.where(ranks == rank, tl.sum(rows, 0), 0)
    return needed
