"""Tokens leave in the order of their first experts on the rank that they go to: its first experts have all their rows
early, and a product can begin with them. A sort by counting, next to the counts that dispatch makes anyway."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pkt.language import ptx

from . import choices, totals


class Sorting(NamedTuple):
    """What each program has counted, on this rank."""

    firsts: Any  # int32 (programs, EXPERTS): its tokens whose first expert on its rank this is
    nexts: Any  # int32 (programs, EXPERTS): the place of the next of these among all tokens that go to that rank


@triton.jit
def count(idx_ptr, s, p, world):
    """Count the tokens of this program's share."""
    MANY: tl.constexpr = max(1, totals.PAIRS // p.K2)
    e = tl.arange(0, triton.next_power_of_2(p.EXPERTS))
    firsts = s.firsts + tl.program_id(0) * p.EXPERTS
    tl.store(firsts + e, tl.zeros_like(e), mask=e < p.EXPERTS)
    ptx.cta_barrier()  # zeros stand there before anything is added
    begin, end = choices.share(p.T, p.COUNTERS)
    for start in range(begin, end, MANY):
        t = start + tl.arange(0, MANY)[:, None]
        first = _first(choices.experts(idx_ptr, t, tl.arange(0, p.K2)[None, :], t < end, p), p, world)
        tl.atomic_add(firsts + first, 1, mask=first < p.EXPERTS, sem="relaxed", scope="gpu")


@triton.jit
def begin(s, p, world):
    """Find the place of this program's first token for each expert; behind a barrier of the grid."""
    e = tl.arange(0, triton.next_power_of_2(p.EXPERTS))
    ranks = tl.arange(0, triton.next_power_of_2(world.size))[:, None]
    of_all = totals.before(s.firsts, p.EXPERTS, p.COUNTERS)
    # Of each rank the tokens that go to the ranks before it.
    lower = tl.sum(tl.where((e // p.OWN)[None, :] < ranks, of_all[None, :], 0), 1)
    start = tl.cumsum(of_all) - of_all - tl.sum(tl.where((e // p.OWN)[None, :] == ranks, lower[:, None], 0), 0)
    own = totals.before(s.firsts, p.EXPERTS, tl.program_id(0))
    tl.store(s.nexts + tl.program_id(0) * p.EXPERTS + e, start + own, mask=e < p.EXPERTS)


@triton.jit
def places(expert, s, p, world):
    """The places (tokens, W) of this program's next tokens, of which these are the experts (tokens, K2), among all
    tokens that go to each rank."""
    first = _first(expert, p, world)
    same = first[:, None, :] == first[None, :, :]
    i = tl.arange(0, expert.shape[0])
    earlier = tl.sum((same & (i[None, :, None] < i[:, None, None])).to(tl.int32), 1)
    later = tl.sum((same & (i[None, :, None] > i[:, None, None])).to(tl.int32), 1)
    following = s.nexts + tl.program_id(0) * p.EXPERTS + first
    place = tl.load(following, mask=first < p.EXPERTS, other=0) + earlier
    ptx.cta_barrier()  # every thread has read its next place
    tl.store(following, place + 1, mask=(first < p.EXPERTS) & (later == 0))
    ptx.cta_barrier()
    return place


@triton.jit
def _first(expert, p, world):
    """The first expert of tokens on each rank, (tokens, W); EXPERTS for none."""
    ranks = tl.arange(0, triton.next_power_of_2(world.size))[None, None, :]
    there = choices.owner(expert, p)[:, :, None] == ranks
    return tl.min(tl.where(there, expert[:, :, None], p.EXPERTS), 1)
