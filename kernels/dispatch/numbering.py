"""The row of every pair on its expert's rank, and the slot of every token on each rank."""

from __future__ import annotations

import triton
import triton.language as tl

from pkt.language import ptx

from . import choices, sorting, totals

NOWHERE = tl.constexpr(-(1 << 30))
"""A first row from which no row of an expert can be counted up to 0: the expert's rank has no room."""


@triton.jit
def begin(half, to, m, p, world):
    """Find the row of this program's first token for each expert. Returns for each rank whether its rows fit, (W,)."""
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    E: tl.constexpr = triton.next_power_of_2(p.EXPERTS)
    e = tl.arange(0, E)
    ranks = tl.arange(0, triton.next_power_of_2(world.size))[:, None]
    there = (ranks < world.size) & (e[None, :] < p.EXPERTS)
    of_ranks = tl.load(half + ranks * (p.EXPERTS + world.size) + e[None, :], mask=there, other=0)
    counts = tl.sum(of_ranks, 0)
    padded = tl.cdiv(counts, p.ALIGNMENT) * p.ALIGNMENT
    owner = e // p.OWN
    owned = owner[None, :] == ranks
    needed = tl.sum(tl.where(owned, padded[None, :], 0), 1)
    begin = tl.sum(tl.where(owner[None, :] < ranks, padded[None, :], 0), 1)
    fits = (needed <= p.R).to(tl.int32)
    starts = tl.cumsum(padded) - padded - tl.sum(tl.where(owned, begin[:, None], 0), 0)
    fitting = tl.sum(tl.where(owned, fits[:, None], 0), 0) > 0
    base = totals.before(m.hist, p.EXPERTS, _earlier(p)) + tl.sum(tl.where(ranks < rank, of_ranks, 0), 0)
    tl.store(m.base + pid * p.EXPERTS + e, tl.where(fitting, base + starts, NOWHERE), mask=e < p.EXPERTS)
    if pid == 0:
        mine = owner == rank
        at = e - rank * p.OWN
        size = tl.sum(tl.where(mine, padded, 0), 0)
        tl.store(to.counts + at, counts, mask=mine)
        tl.store(to.offsets + at, tl.where(fitting, starts, 0), mask=mine)
        tl.store(to.offsets + p.OWN, tl.where(size <= p.R, size, 0))
        tl.store(to.needed, size)
        tl.store(to.needed + 1, rank)
    ptx.cta_barrier()
    return fits


@triton.jit
def _earlier(p):
    """The programs whose tokens come before this program's; none if it has no tokens."""
    pid = tl.program_id(0)
    return tl.where(pid < p.COUNTERS, pid, 0)


@triton.jit
def number(idx_ptr, half, room, to, routes_ptr, m, p, world):
    """Give every pair of this program's tokens its row, and every token its slots. room: of `begin`."""
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    ranks = tl.arange(0, triton.next_power_of_2(world.size))[None, :]
    by = tl.arange(0, triton.next_power_of_2(world.size))[None, None, :]
    both = (ranks[:, :, None] < world.size) & (by < world.size)
    tokens = half + by * (p.EXPERTS + world.size) + p.EXPERTS + ranks[:, :, None]
    chunks = tl.cdiv(tl.load(tokens, mask=both, other=0), p.CHUNK)  # that each rank sends to each, see `totals.first`
    PAIRS: tl.constexpr = p.TOKENS * p.K2
    i = tl.arange(0, PAIRS)
    sent = totals.before(m.sent, world.size, _earlier(p))
    first, last = choices.share(p.T, p.COUNTERS)
    for start in range(first, last, p.TOKENS):
        t = start + i // p.K2
        expert = choices.experts(idx_ptr, t, i % p.K2, t < last, p)
        other = start + i[None, :] // p.K2
        same = expert[:, None] == choices.experts(idx_ptr, other, i[None, :] % p.K2, other < last, p)
        earlier = tl.sum((same & (i[None, :] < i[:, None])).to(tl.int32), 1)
        later = tl.sum((same & (i[None, :] > i[:, None])).to(tl.int32), 1)
        next_row = m.base + pid * p.EXPERTS + expert
        row = tl.load(next_row, mask=expert >= 0, other=NOWHERE) + earlier
        inside = (t < last) & (i % p.K2 < p.K)
        tl.store(routes_ptr + tl.cast(t, tl.int64) * p.K + i % p.K2, tl.where(row >= 0, row, -1), mask=inside)
        ptx.cta_barrier()  # every thread has read its next row
        tl.store(next_row, row + 1, mask=(expert >= 0) & (later == 0))
        ptx.cta_barrier()
        token = start + tl.arange(0, p.TOKENS)[:, None]
        of_token = choices.experts(idx_ptr, token, tl.arange(0, p.K2)[None, :], token < last, p)
        goes = choices.goes(of_token, p, world)
        j = sent[None, :] + tl.cumsum(goes, 0) - goes
        turns = (j // p.CHUNK)[:, :, None] + (by < rank).to(tl.int32)
        slot = tl.sum(tl.minimum(chunks, turns), 2) * p.CHUNK + j % p.CHUNK
        if m.order is not None:  # over nodes nobody looks there
            place = j
            if m.sorting is not None:
                place = sorting.places(of_token, m.sorting, p, world)
            tl.store(m.order + ranks * p.S + place, token + tl.zeros_like(j), mask=(goes > 0) & (place < p.S))
        slot = tl.where((goes > 0) & (room[None, :] > 0), slot, -1)
        places = to.places + tl.cast(token, tl.int64) * world.size + ranks
        tl.store(places, slot, mask=(token < last) & (ranks < world.size))
        sent += tl.sum(goes, 0)
