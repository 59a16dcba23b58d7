"""How many tokens go where: counted by every rank, known to all, and the chunks and pieces that follow."""

from __future__ import annotations

import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import ptx

from . import choices

PAIRS = tl.constexpr(256)
"""Of token and expert, counted at a time: one for each thread."""
PIECES = tl.constexpr(2)
"""For each program, at least, where tokens allow it. With fewer, programs are idle, or end late."""


@triton.jit
def count(idx_ptr, m, p, world):
    """Count the tokens of this program's share: in hist its pairs by expert, in sent its tokens by rank."""
    W: tl.constexpr = triton.next_power_of_2(world.size)
    MANY: tl.constexpr = max(1, PAIRS // p.K2)
    e = tl.arange(0, triton.next_power_of_2(p.EXPERTS))
    k = tl.arange(0, p.K2)[None, :]
    hist = m.hist + tl.program_id(0) * p.EXPERTS
    tl.store(hist + e, tl.zeros_like(e), mask=e < p.EXPERTS)
    ptx.cta_barrier()  # zeros stand there before anything is added
    tokens = tl.zeros((W,), tl.int32)
    first, last = choices.share(p.T, p.COUNTERS)
    for start in range(first, last, MANY):
        t = start + tl.arange(0, MANY)[:, None]
        expert = choices.experts(idx_ptr, t, k, t < last, p)
        tl.atomic_add(hist + expert, 1, mask=expert >= 0, sem="relaxed", scope="gpu")
        tokens += tl.sum(choices.goes(expert, p, world), 0)
    ranks = tl.arange(0, W)
    tl.store(m.sent + tl.program_id(0) * world.size + ranks, tokens, mask=ranks < world.size)


@triton.jit
def before(ptr, n: tl.constexpr, below):
    """The sum of the first `below` rows of (programs, n) int32, which programs have stored."""
    N: tl.constexpr = triton.next_power_of_2(n)
    HIGH: tl.constexpr = max(1, min(256, 16384 // N))  # so many are on their way at once
    cols = tl.arange(0, N)[None, :]
    total = tl.zeros((HIGH, N), tl.int32)
    for start in range(0, below, HIGH):
        rows = start + tl.arange(0, HIGH)[:, None]
        total += tl.load(ptr + rows * n + cols, mask=(rows < below) & (cols < n), other=0)
    return tl.sum(total, 0)


@triton.jit
def exchange(half, m, p, world):
    """Tell every rank how many of my tokens go to each expert, and to each rank."""
    if tl.program_id(0) == 0:
        e = tl.arange(0, triton.next_power_of_2(p.EXPERTS))
        ranks = tl.arange(0, triton.next_power_of_2(world.size))
        pairs = before(m.hist, p.EXPERTS, p.COUNTERS)
        tokens = before(m.sent, world.size, p.COUNTERS)
        mine = half + world.rank * (p.EXPERTS + world.size)
        for d in range(1, world.size + 1):
            peer = (tl.cast(world.rank, tl.int32) + d) % world.size
            pl.store(mine + e, pairs, peer, world, mask=e < p.EXPERTS)
            pl.store(mine + p.EXPERTS + ranks, tokens, peer, world, mask=ranks < world.size)
        pl.signal_all(m.ready, world)


@triton.jit
def sent(half, p, world):
    """Tokens that each rank sends to each: (W, W), sources by targets."""
    W: tl.constexpr = triton.next_power_of_2(world.size)
    source = tl.arange(0, W)[:, None]
    target = tl.arange(0, W)[None, :]
    tokens = half + source * (p.EXPERTS + world.size) + p.EXPERTS + target
    return tl.load(tokens, mask=(source < world.size) & (target < world.size), other=0)


@triton.jit
def received(sent, target):
    """Tokens that each rank sends to rank `target`, (W,)."""
    return tl.sum(tl.where(tl.arange(0, sent.shape[1])[None, :] == target, sent, 0), 1)


@triton.jit
def of_rank(tokens, rank):
    """Those of one rank."""
    return tl.sum(tl.where(tl.arange(0, tokens.shape[0]) == rank, tokens, 0), 0)


@triton.jit
def piece(sent, p, world):
    """Tokens that are sent, signalled and placed together, alike on all ranks: a chunk, or less where that leaves each
    program fewer than PIECES of the tokens that a rank receives."""
    wanted = tl.max(tl.max(sent, 1), 0) * world.size // (PIECES * tl.num_programs(0))
    tokens = tl.cast(p.LEAST, tl.int32)
    while (tokens < p.CHUNK) & (tokens < wanted):
        tokens *= 2
    return tokens


@triton.jit
def first(tokens, at, source, p):
    """Of `tokens` that each rank sends to one, the place there of token number `at` from `source`, which begins a
    piece: sources take turns, a chunk each, as long as they have chunks."""
    ranks = tl.arange(0, tokens.shape[0])
    chunk = tl.sum(tl.minimum(tl.cdiv(tokens, p.CHUNK), at // p.CHUNK + (ranks < source).to(tl.int32)), 0)
    return chunk * p.CHUNK + at % p.CHUNK


@triton.jit
def fits(room, rank, world):
    ranks = tl.arange(0, triton.next_power_of_2(world.size))
    return tl.sum(tl.where(ranks == rank, room, 0), 0) > 0
