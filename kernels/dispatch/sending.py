"""How `low_latency` puts its tokens: to the ranks that have experts of theirs, each into a place of its own there.

A rank has P places on every other rank, the least of tokens_per_rank and max_tokens. Token t has place t, so it leaves
before anything is counted. If a rank has more than P tokens, the j-th token that goes to a rank has place j there, and
tokens are numbered first.
"""

from __future__ import annotations

import triton
import triton.language as tl

import pkt.language as pl

from ..shared import packing
from . import choices, words


@triton.jit
def put_tokens(x_ptr, idx_ptr, s_ptr, half, flag, sender, p, world):
    """Put this sender's share of all tokens, and of their scales, to the other ranks of their experts."""
    if p.SCALED:
        _put_rows(s_ptr, p.G, p.SCALES, p.K + 1 + p.THIRD, idx_ptr, half, flag, sender, p, world)
    _put_rows(x_ptr, p.H, p.THIRD, p.K + 1, idx_ptr, half, flag, sender, p, world)


@triton.jit
def _put_rows(ptr, length, third, behind, idx_ptr, half, flag, sender, p, world):
    """Put this sender's blocks of rows. length: elements of a row; third: its words; behind: words of a place before
    them. The next block is loaded while one is put."""
    rank = tl.cast(world.rank, tl.int32)
    senders = p.SENDING * p.EACH
    blocks = tl.maximum(tl.cdiv(third, p.SENT), 1)
    x = _block(ptr, length, third, sender, blocks, p)
    for task in range(sender, p.T * blocks, senders):
        following = _block(ptr, length, third, task + senders, blocks, p)
        goes, places = _goes(idx_ptr, task // blocks, p, world)
        word = task % blocks * p.SENT + tl.arange(0, p.SENT)
        for d in tl.static_range(1, world.size):
            at = words.of_token(half, rank, places[d - 1], p, world) + 4 * (behind + word)
            pl.put_flagged(at, x, flag, (rank + d) % world.size, world, mask=(word < third) & goes[d - 1])
        x = following


@triton.jit
def _block(ptr, length, third, task, blocks, p):
    """Some words, by thirds, of a row: block task % blocks of row task // blocks."""
    PER: tl.constexpr = 32 // ptr.dtype.element_ty.primitive_bitwidth  # elements in an int32
    t = task // blocks
    word = task % blocks * p.SENT + tl.arange(0, p.SENT)
    return packing.thirds(ptr + tl.cast(t, tl.int64) * length, word, third, (word < third) & (t < p.T), length, PER)


@triton.jit
def _goes(idx_ptr, t, p, world):
    """For the other ranks in turn whether token t goes there, and its place there."""
    rank = tl.cast(world.rank, tl.int32)
    found = ()
    places = ()
    if p.AT_ONCE:
        k = tl.arange(0, p.K2)
        owner = choices.owner(choices.experts(idx_ptr, t, k, k < p.K, p), p)
        for d in tl.static_range(1, world.size):
            found = found + (tl.max((owner == (rank + d) % world.size).to(tl.int32), 0) > 0,)
            places = places + (t,)
    else:
        _, _, tokens, goes = numbers(idx_ptr, t, p, world)
        for d in tl.static_range(1, world.size):
            peer = (rank + d) % world.size
            j = of(tokens, peer)
            found = found + ((of(goes, peer) > 0) & (j < p.P),)
            places = places + (j,)
    return found, places


@triton.jit
def put_pairs(idx_ptr, w_ptr, half, flag, first, step, p, world):
    """Put the pairs of tokens `first`, `first + step`, ...: of each pair its expert there, or -1, its number and its
    weight; then the token and its number. To every other rank if AT_ONCE, else to those that the token goes to."""
    rank = tl.cast(world.rank, tl.int32)
    k = tl.arange(0, p.K2)
    lane = tl.arange(0, p.LANES)
    for t in range(first, p.T, step):
        chosen, pairs, tokens, goes = numbers(idx_ptr, t, p, world)
        here = lane[:, None] == k[None, :]
        expert = tl.sum(tl.where(here, chosen[None, :], 0), 1)
        number = tl.sum(tl.where(here, pairs[None, :], 0), 1)
        weight = tl.load(w_ptr + tl.cast(t, tl.int64) * p.K + lane, mask=lane < p.K, other=0)
        owner = choices.owner(expert, p)
        for d in tl.static_range(1, world.size):
            peer = (rank + d) % world.size
            j = of(tokens, peer)
            there = tl.where(owner == peer, expert - peer * p.OWN, -1)
            pair = tl.where(lane < p.K, there, t), tl.where(lane < p.K, number, j), weight.to(tl.int32, bitcast=True)
            if p.AT_ONCE:
                place = t
                wanted = lane < p.K + 1
            else:
                place = j
                wanted = (lane < p.K + 1) & (of(goes, peer) > 0) & (j < p.P)
            pl.put_flagged(words.of_token(half, rank, place, p, world) + 4 * lane, pair, flag, peer, world, mask=wanted)


@triton.jit
def numbers(idx_ptr, t, p, world):
    """Token t's experts, (K2,); how many earlier pairs have each of them, (K2,); how many earlier tokens go to each
    rank, (W,), and whether this one does."""
    k = tl.arange(0, p.K2)
    own = t + tl.zeros((1, 1), tl.int32)
    mine = choices.experts(idx_ptr, own, k[None, :], own < p.T, p)
    chosen = tl.reshape(mine, (p.K2,))
    pairs = tl.sum(((chosen[:, None] == chosen[None, :]) & (k[:, None] < k[None, :])).to(tl.int32), 0)
    goes = tl.sum(choices.goes(mine, p, world), 0)
    tokens = tl.zeros_like(goes)
    for start in range(0, t, p.TOKENS):
        u = start + tl.arange(0, p.TOKENS)[:, None]
        other = choices.experts(idx_ptr, u, k[None, :], u < t, p)
        tokens += tl.sum(choices.goes(other, p, world), 0)
        pairs += tl.sum((tl.reshape(other, (p.TOKENS * p.K2, 1)) == chosen[None, :]).to(tl.int32), 0)
    return chosen, pairs, tokens, goes


@triton.jit
def of(numbers, rank):
    """A rank's number of (W,)."""
    ranks = tl.arange(0, numbers.shape[0])
    return tl.sum(tl.where(ranks == rank, numbers, 0), 0)
