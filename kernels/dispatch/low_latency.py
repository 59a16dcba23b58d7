"""low_latency: one launch, neither barrier nor fence, for some hundred tokens a rank.

    1. Programs count this rank's tokens by expert and by rank, and put the counts to every rank.
    2. They put each token to the other ranks of its experts at once, into a place that its source has there, whatever
       the other ranks send: the rows are not known yet, so each pair of token and expert carries its number among its
       source's pairs for that expert.
    3. Every program takes the counts of its experts, and so knows where rows begin. Programs copy this rank's own
       tokens into their rows, and write the results that follow from counts. Meanwhile the others' tokens arrive.
    4. Programs take these, and store them into their rows.

With many tokens, half of the programs copy their own ones before they put any, so that memory and links are busy at the
same time. With few tokens, the program that copies a token is not the one that puts it.

Counts and tokens travel in flagged words. In every launch every rank takes the counts of every rank, so that two
halves, used in turn, are enough. The results are those of `push`, bit by bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import ptx, sync

from ..shared import packing
from . import choices, empty_rows, words


@triton.jit
def low_latency_kernel(
    x_ptr,  # (T, H) this rank's
    idx_ptr,  # int32 or int64 (T, K) this rank's
    w_ptr,  # fp32 (T, K) this rank's
    s_ptr,  # int32 (T, G) this rank's: the bits of the tokens' scales; None without
    to,  # Result
    m,  # Words
    p,  # Few
    world,
):
    pid = tl.program_id(0)
    launch = sync.peek_epoch(m.launches)
    half = words.half_of(m, launch)
    flag = words.flag_of(launch)
    words.put_counts(idx_ptr, half, flag, p, world)
    programs = tl.num_programs(0)
    late = (p.PARTS <= 2) & (2 * pid >= programs)
    if not late:
        _put_tokens(x_ptr, idx_ptr, w_ptr, s_ptr, half, flag, p, world)
    ptx.cta_barrier()
    pl.epoch(m.launches, world)
    tasks, own = p.T * p.PARTS, programs - 1 - pid
    mine = _numbers(idx_ptr, tl.where(own < tasks, own // p.PARTS, 0), p, world)  # while the counts are on their way
    counts = words.take_counts(half, flag, p, world)
    total = words.added(counts, world.size, world)
    padded = tl.cdiv(total, p.ALIGNMENT) * p.ALIGNMENT
    needed = tl.sum(padded, 0)
    fits = needed <= p.R
    starts = tl.where(fits, tl.cumsum(padded) - padded, 0)
    rank = tl.cast(world.rank, tl.int32)
    sent = tl.sum(words.take_sent(half, flag, rank + tl.arange(0, 1), p, world), 0)
    sent = tl.where(fits, sent, 0)
    OTHERS: tl.constexpr = max(world.size - 1, 1)
    base = starts + words.added(counts, rank, world)
    while own < tasks:
        _place_own(x_ptr, mine, w_ptr, s_ptr, base, sent, own // p.PARTS, own % p.PARTS, to, p, world)
        own += programs
        if own < tasks:
            mine = _numbers(idx_ptr, own // p.PARTS, p, world)
    if pid == 0:
        _tell(total, starts, needed, to, p, world)
    fill(total, starts, sent, to, p, world)
    if late:
        _put_tokens(x_ptr, idx_ptr, w_ptr, s_ptr, half, flag, p, world)
    last = programs - 1 - pid  # programs that have fewer tokens than others
    for start in range(last * p.TOKENS, p.T, programs * p.TOKENS):
        _find_places(idx_ptr, half, flag, start, to, p, world)
    if world.size > 1:
        for task in range(pid, tl.max(sent, 0) * OTHERS * p.PARTS, programs):
            source = (rank + 1 + task // p.PARTS % OTHERS) % world.size
            j = task // (p.PARTS * OTHERS)
            if j < _of(sent, source):
                base = starts + words.added(counts, source, world)
                _place_token(half, flag, base, sent, source, j, task % p.PARTS, to, p, world)


@triton.jit
def _of(numbers, rank):
    """A rank's number of (W,)."""
    ranks = tl.arange(0, numbers.shape[0])
    return tl.sum(tl.where(ranks == rank, numbers, 0), 0)


@triton.jit
def _put_tokens(x_ptr, idx_ptr, w_ptr, s_ptr, half, flag, p, world):
    """Put this program's parts of tokens to the other ranks of their experts."""
    if world.size > 1:
        for task in range(tl.program_id(0), p.T * p.PARTS, tl.num_programs(0)):
            _put_token(x_ptr, idx_ptr, w_ptr, s_ptr, half, flag, task // p.PARTS, task % p.PARTS, p, world)


@triton.jit
def _put_token(x_ptr, idx_ptr, w_ptr, s_ptr, half, flag, t, part, p, world):
    """Put a part of token t to the other ranks of its experts; part 0 has its pairs, too."""
    rank = tl.cast(world.rank, tl.int32)
    k = tl.arange(0, p.K2)
    chosen, pairs, tokens, goes = _numbers(idx_ptr, t, p, world)
    goes_to = ()
    at = ()
    for d in tl.static_range(1, world.size):
        peer = (rank + d) % world.size
        j = _of(tokens, peer)
        goes_to = goes_to + ((_of(goes, peer) > 0) & (j < p.P),)
        at = at + (words.of_token(half, rank, j, p, world),)
    if part == 0:
        lane = tl.arange(0, p.LANES)
        here = lane[:, None] == k[None, :]
        expert = tl.sum(tl.where(here, chosen[None, :], 0), 1)
        number = tl.sum(tl.where(here, pairs[None, :], 0), 1)
        bits = tl.load(w_ptr + tl.cast(t, tl.int64) * p.K + lane, mask=lane < p.K, other=0).to(tl.int32, bitcast=True)
        owner = choices.owner(expert, p)
        for d in tl.static_range(1, world.size):
            peer = (rank + d) % world.size
            first = tl.where(lane < p.K, tl.where(owner == peer, expert - peer * p.OWN, -1), t)
            inside = (lane < p.K + 1) & goes_to[d - 1]
            pl.put_flagged(at[d - 1] + 4 * lane, (first, number, bits), flag, peer, world, mask=inside)
    x_ptr += tl.cast(t, tl.int64) * p.H
    PER: tl.constexpr = 32 // x_ptr.dtype.element_ty.primitive_bitwidth  # elements in an int32
    for block in range(part, tl.cdiv(p.THIRD, p.BLOCK), p.PARTS):
        word = block * p.BLOCK + tl.arange(0, p.BLOCK)
        x = packing.thirds(x_ptr, word, p.THIRD, word < p.THIRD, p.H, PER)
        for d in tl.static_range(1, world.size):
            inside = (word < p.THIRD) & goes_to[d - 1]
            to = at[d - 1] + 4 * (p.K + 1 + word)
            pl.put_flagged(to, x, flag, (rank + d) % world.size, world, mask=inside)
    if p.SCALED:
        for block in range(part, tl.cdiv(p.SCALES, p.BLOCK), p.PARTS):
            word = block * p.BLOCK + tl.arange(0, p.BLOCK)
            own = s_ptr + tl.cast(t, tl.int64) * p.G
            bits = packing.thirds(own, word, p.SCALES, word < p.SCALES, p.G, 1)
            for d in tl.static_range(1, world.size):
                inside = (word < p.SCALES) & goes_to[d - 1]
                to = at[d - 1] + 4 * (p.K + 1 + p.THIRD + word)
                pl.put_flagged(to, bits, flag, (rank + d) % world.size, world, mask=inside)


@triton.jit
def _numbers(idx_ptr, t, p, world):
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
def _chunk(chunks, g, source):
    """The number of chunk g from `source`, see totals.first. chunks: (W,), that each rank sends."""
    ranks = tl.arange(0, chunks.shape[0])
    return tl.sum(tl.minimum(chunks, g + (ranks < source).to(tl.int32)), 0)


@triton.jit
def _place_token(half, flag, base, sent, source, j, part, to, p, world):
    """Store a part of the j-th token from `source` into its rows, when it is there; part 0 has its pairs, too. base:
    (OWN2,), the row of the first pair of `source` for each of my experts."""
    at = words.of_token(half, source, j, p, world)
    k = tl.arange(0, triton.next_power_of_2(p.K + 1))
    expert, number, bits = pl.take_flagged(at + 4 * k, flag, world, mask=k < p.K + 1)
    rows = _rows(tl.where(k < p.K, expert, -1), number, base, p)
    if part == 0:
        t = tl.sum(tl.where(k == p.K, expert, 0), 0)
        _tell_pairs(rows, bits.to(tl.float32, bitcast=True), sent, source, j, t, to, p)
    places = _one_by_one(rows, p)
    PER: tl.constexpr = 32 // to.rows.dtype.element_ty.primitive_bitwidth
    for block in range(part, tl.cdiv(p.THIRD, p.BLOCK), p.PARTS):
        word = block * p.BLOCK + tl.arange(0, p.BLOCK)
        inside = word < p.THIRD
        found = pl.take_flagged(at + 4 * (p.K + 1 + word), flag, world, mask=inside)
        for i in tl.static_range(p.K):
            if places[i] >= 0:
                out = to.rows + tl.cast(places[i], tl.int64) * p.H
                for third in tl.static_range(3):
                    packing.store(out, word + third * p.THIRD, found[third], inside, p.H, PER)
    if p.SCALED:
        for block in range(part, tl.cdiv(p.SCALES, p.BLOCK), p.PARTS):
            word = block * p.BLOCK + tl.arange(0, p.BLOCK)
            inside = word < p.SCALES
            found = pl.take_flagged(at + 4 * (p.K + 1 + p.THIRD + word), flag, world, mask=inside)
            for i in tl.static_range(p.K):
                if places[i] >= 0:
                    out = to.scales + tl.cast(places[i], tl.int64) * p.G
                    for third in tl.static_range(3):
                        packing.store(out, word + third * p.SCALES, found[third], inside, p.G, 1)


@triton.jit
def _place_own(x_ptr, mine, w_ptr, s_ptr, base, sent, t, part, to, p, world):
    """`_place_token` of this rank's own token t, from where it is. mine: its `_numbers`; base: of this rank."""
    rank = tl.cast(world.rank, tl.int32)
    chosen, pairs, tokens, goes = mine
    j = _of(tokens, rank)
    if (_of(goes, rank) > 0) & (j < _of(sent, rank)):  # none are sent where they do not fit
        k = tl.arange(0, p.K2)
        rows = _rows(tl.where(choices.owner(chosen, p) == rank, chosen - rank * p.OWN, -1), pairs, base, p)
        if part == 0:
            weights = tl.load(w_ptr + tl.cast(t, tl.int64) * p.K + k, mask=k < p.K, other=0)
            _tell_pairs(rows, weights, sent, rank, j, t, to, p)
        places = _one_by_one(rows, p)
        _copy(x_ptr + tl.cast(t, tl.int64) * p.H, to.rows, places, part, p.H, p)
        if p.SCALED:
            _copy(s_ptr + tl.cast(t, tl.int64) * p.G, to.scales, places, part, p.G, p)


@triton.jit
def _rows(expert, number, base, p):
    """The rows of pairs, -1 where `expert`, a number among my experts, is -1. number: of the pair, see `base` of
    `_place_token`."""
    begin = tl.gather(base, tl.maximum(expert, 0), 0)
    return tl.where(expert >= 0, begin + number, -1)


@triton.jit
def _one_by_one(rows, p):
    """A token's rows as scalars: once, not for each part of the token that is stored there."""
    k = tl.arange(0, rows.shape[0])
    places = ()
    for i in tl.static_range(p.K):
        places = places + (tl.sum(tl.where(k == i, rows, 0), 0),)
    return places


@triton.jit
def _tell_pairs(rows, weights, sent, source, j, t, to, p):
    """Store whose rows these are: of token t, the j-th from `source`."""
    k = tl.arange(0, rows.shape[0])
    slot = _chunk(tl.cdiv(sent, p.CHUNK), j // p.CHUNK, source) * p.CHUNK + j % p.CHUNK
    tl.store(to.tokens + tl.cast(slot, tl.int64) * p.K + k, rows, mask=k < p.K)
    tl.store(to.weights + rows, weights, mask=rows >= 0)
    of_row = to.source + 3 * tl.cast(rows, tl.int64)
    tl.store(of_row, source + tl.zeros_like(rows), mask=rows >= 0)
    tl.store(of_row + 1, t + tl.zeros_like(rows), mask=rows >= 0)
    tl.store(of_row + 2, k, mask=rows >= 0)


@triton.jit
def _copy(from_ptr, to_ptr, places, part, length, p):
    """Store a part of what lies at `from_ptr`, `length` elements, into each row of `places` that is one."""
    WIDE: tl.constexpr = p.LANES * (128 // from_ptr.dtype.element_ty.primitive_bitwidth)  # 16 bytes a thread
    for start in range(part * WIDE, length, p.PARTS * WIDE):
        at = start + tl.arange(0, WIDE)
        found = tl.load(from_ptr + at, mask=at < length)
        for i in tl.static_range(p.K):
            if places[i] >= 0:
                tl.store(to_ptr + tl.cast(places[i], tl.int64) * length + at, found, mask=at < length)


@triton.jit
def _tell(total, starts, needed, to, p, world):
    """Counts, offsets, and the rows that this rank needs."""
    e = tl.arange(0, p.OWN2)
    tl.store(to.counts + e, total, mask=e < p.OWN)
    tl.store(to.offsets + e, starts, mask=e < p.OWN)
    tl.store(to.offsets + p.OWN, tl.where(needed <= p.R, needed, 0))
    tl.store(to.needed, needed)
    tl.store(to.needed + 1, tl.cast(world.rank, tl.int32))


@triton.jit
def fill(total, starts, sent, to, p, world):
    """What no token fills: rows up to the alignment, if CLEAR those behind the last expert's, and the ends of weights,
    source and tokens."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    MANY: tl.constexpr = 1024
    e = tl.arange(0, total.shape[0])
    padded = tl.cdiv(total, p.ALIGNMENT) * p.ALIGNMENT
    fits = tl.sum(padded, 0) <= p.R
    for expert in range(pid, p.OWN, programs):
        begin = tl.sum(tl.where(e == expert, starts + total, 0), 0)
        end = tl.sum(tl.where(e == expert, starts + padded, 0), 0)
        for row in range(begin, tl.where(fits, end, begin)):
            empty_rows.clear(row, to, p, MANY)
            empty_rows.mark(row + tl.arange(0, 1), row + 1, to)
    end = tl.where(fits, tl.sum(padded, 0), 0)
    for start in range(end + pid * MANY, p.R, programs * MANY):
        empty_rows.mark(start + tl.arange(0, MANY), p.R, to)
    if p.CLEAR:
        for row in range(end + pid, p.R, programs):
            empty_rows.clear(row, to, p, MANY)
    chunks = tl.cdiv(sent, p.CHUNK)
    k = tl.arange(0, p.K2)[None, :]
    for source in range(pid, world.size, programs):  # the rest of each rank's last chunk
        count = _of(sent, source)
        g = tl.maximum(count - 1, 0) // p.CHUNK
        i = tl.arange(0, p.CHUNK)[:, None]
        slot = _chunk(chunks, g, source) * p.CHUNK + i
        inside = (count > 0) & (g * p.CHUNK + i >= count) & (k < p.K)
        at = to.tokens + tl.cast(slot, tl.int64) * p.K + k
        tl.store(at, tl.full((p.CHUNK, p.K2), -1, tl.int32), mask=inside)
    entries = tl.cast(p.S, tl.int64) * p.K
    begin = tl.cast(tl.sum(chunks, 0), tl.int64) * p.CHUNK * p.K
    for start in range(begin + pid * MANY, entries, programs * MANY):
        at = start + tl.arange(0, MANY)
        tl.store(to.tokens + at, tl.full((MANY,), -1, tl.int32), mask=at < entries)


@triton.jit
def _find_places(idx_ptr, half, flag, start, to, p, world):
    """The slots of TOKENS of my tokens on each rank, from `start` on."""
    rank = tl.cast(world.rank, tl.int32)
    ranks = tl.arange(0, triton.next_power_of_2(world.size))
    k = tl.arange(0, p.K2)[None, :]
    fits = words.take_needed(half, flag, p, world) <= p.R
    chunks = tl.cdiv(words.take_sent(half, flag, ranks, p, world), p.CHUNK)  # (to, from)
    tokens = tl.zeros((ranks.shape[0],), tl.int32)
    for first in range(0, start, p.TOKENS):
        u = first + tl.arange(0, p.TOKENS)[:, None]
        tokens += tl.sum(choices.goes(choices.experts(idx_ptr, u, k, u < start, p), p, world), 0)
    t = start + tl.arange(0, p.TOKENS)[:, None]
    goes = choices.goes(choices.experts(idx_ptr, t, k, t < p.T, p), p, world)
    j = tokens[None, :] + tl.cumsum(goes, 0) - goes
    turns = (j // p.CHUNK)[:, :, None] + (ranks < rank).to(tl.int32)[None, None, :]
    slot = tl.sum(tl.minimum(chunks[None, :, :], turns), 2) * p.CHUNK + j % p.CHUNK
    slot = tl.where((goes > 0) & fits[None, :], slot, -1)
    places = to.places + tl.cast(t, tl.int64) * world.size + ranks[None, :]
    tl.store(places, slot, mask=(t < p.T) & (ranks < world.size)[None, :])
