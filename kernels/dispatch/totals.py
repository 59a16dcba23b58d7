"""How many tokens go where: counted by every rank, known to all, and the chunks that follow."""

from __future__ import annotations

import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import ptx

from . import choices

PAIRS = tl.constexpr(256)
"""Of token and expert, counted at a time: one for each thread."""


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
    first, last = choices.share(p)
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
    HIGH: tl.constexpr = max(1, 8192 // N)
    cols = tl.arange(0, N)[None, :]
    total = tl.zeros((N,), tl.int32)
    for start in range(0, below, HIGH):
        rows = start + tl.arange(0, HIGH)[:, None]
        total += tl.sum(tl.load(ptr + rows * n + cols, mask=(rows < below) & (cols < n), other=0), 0)
    return total


@triton.jit
def exchange(half, m, p, world):
    """Tell every rank how many of my tokens go to each expert, and to each rank."""
    if tl.program_id(0) == 0:
        e = tl.arange(0, triton.next_power_of_2(p.EXPERTS))
        ranks = tl.arange(0, triton.next_power_of_2(world.size))
        pairs = before(m.hist, p.EXPERTS, tl.num_programs(0))
        tokens = before(m.sent, world.size, tl.num_programs(0))
        mine = half + world.rank * (p.EXPERTS + world.size)
        for d in range(1, world.size + 1):
            peer = (tl.cast(world.rank, tl.int32) + d) % world.size
            pl.store(mine + e, pairs, peer, world, mask=e < p.EXPERTS)
            pl.store(mine + p.EXPERTS + ranks, tokens, peer, world, mask=ranks < world.size)
        pl.signal_all(m.ready, world)


@triton.jit
def sent(half, source, target, p, world):
    """Tokens that rank `source` sends to rank `target`."""
    return tl.load(half + source * (p.EXPERTS + world.size) + p.EXPERTS + target)


@triton.jit
def chunks(half, target, p, world):
    """Chunks that each rank sends to rank `target`, (W,)."""
    ranks = tl.arange(0, triton.next_power_of_2(world.size))
    tokens = half + ranks * (p.EXPERTS + world.size) + p.EXPERTS + target
    return tl.cdiv(tl.load(tokens, mask=ranks < world.size, other=0), p.CHUNK)


@triton.jit
def chunk(half, g, source, target, p, world):
    """The number at `target` of its chunk g from `source`: sources take turns as long as they have chunks."""
    ranks = tl.arange(0, triton.next_power_of_2(world.size))
    return tl.sum(tl.minimum(chunks(half, target, p, world), g + (ranks < source).to(tl.int32)), 0)


@triton.jit
def fits(room, rank, world):
    ranks = tl.arange(0, triton.next_power_of_2(world.size))
    return tl.sum(tl.where(ranks == rank, room, 0), 0) > 0
