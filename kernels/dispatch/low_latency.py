"""low_latency: one launch, neither barrier nor fence, for some hundred tokens a rank.

    1. The senders, programs of a few SMs, put each token to the other ranks of its experts at once. Its place there
       does not depend on other tokens, unless a rank has more tokens than places: see sending.py.
    2. The workers, all other programs, count this rank's tokens by expert and by rank, and put the counts to every
       rank. Then they put what each rank must know of a token. The rows are not known yet, so each pair of token and
       expert has its number among its source's pairs for that expert.
    3. Every worker takes the counts of its experts, and so knows where rows begin. Workers copy this rank's own tokens
       into their rows, and write the results that follow from counts. Meanwhile the others' tokens arrive.
    4. Workers take these, and store them into their rows.

Few SMs send, presumably because what an SM loads waits behind its stores to other ranks while the links are busy.
Workers share counts, pairs, own tokens and arrived tokens in one sequence, so with few tokens each has about one task.

Counts and tokens travel in flagged words. In every launch every rank takes the counts of every rank, so that two
halves, used in turn, are enough. The results are those of `push`, bit by bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import ptx, sync

from ..shared import packing
from . import choices, empty_rows, sending, words


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
    launch = sync.peek_epoch(m.launches)
    half = words.half_of(m, launch)
    flag = words.flag_of(launch)
    sender, worker, workers = _roles(p)
    told = _behind(worker, p.COUNTED, workers)
    if worker >= 0:
        words.put_counts(idx_ptr, half, flag, worker, workers, p, world)
    if world.size > 1:
        if sender >= 0:
            sending.put_tokens(x_ptr, idx_ptr, s_ptr, half, flag, sender, p, world)
        if worker >= 0:
            sending.put_pairs(idx_ptr, w_ptr, half, flag, told, workers, p, world)
    ptx.cta_barrier()
    pl.epoch(m.launches, world)
    if worker >= 0:
        own = _behind(told, p.T, workers)
        _place(x_ptr, idx_ptr, w_ptr, s_ptr, half, flag, worker, workers, own, to, p, world)


@triton.jit
def _roles(p):
    """This program's number among the senders, and among the workers, -1 where it is none; and how many workers there
    are. Programs `sms` apart have the same role: they share an SM if the GPU deals programs out to its SMs in turn.
    Results do not depend on it. One SM alone has both roles; on one rank nobody sends."""
    sms = tl.num_programs(0) // p.EACH
    sm = tl.program_id(0) % sms
    turn = tl.program_id(0) // sms
    working = tl.maximum(sms - p.SENDING, 1)
    sender = sm - (sms - p.SENDING)
    return (
        tl.where(sender >= 0, sender + turn * p.SENDING, -1),
        tl.where(sm < working, sm + turn * working, -1),
        working * p.EACH,
    )


@triton.jit
def _place(x_ptr, idx_ptr, w_ptr, s_ptr, half, flag, worker, workers, own, to, p, world):
    """Store tokens into their rows: this rank's, from task `own` on, and the others'; and what follows from counts."""
    tasks = p.T * p.PARTS
    # Number the first own token while the counts are on their way.
    mine = sending.numbers(idx_ptr, tl.where(own < tasks, own // p.PARTS, 0), p, world)
    counts = words.take_counts(half, flag, p, world)
    total = words.added(counts, world.size, world)
    padded = tl.cdiv(total, p.ALIGNMENT) * p.ALIGNMENT
    needed = tl.sum(padded, 0)
    fits = needed <= p.R
    starts = tl.where(fits, tl.cumsum(padded) - padded, 0)
    rank = tl.cast(world.rank, tl.int32)
    here = tl.where(fits, rank, world.size) + tl.arange(0, 1)  # where rows do not fit, all sent and places are 0
    sent, places = words.take_sent(half, flag, here, p, world)
    sent = tl.sum(sent, 0)
    places = tl.sum(places, 0)
    base = starts + words.added(counts, rank, world)
    for task in range(own, tasks, workers):
        if task != own:
            mine = sending.numbers(idx_ptr, task // p.PARTS, p, world)
        _place_own(x_ptr, mine, w_ptr, s_ptr, base, sent, task // p.PARTS, task % p.PARTS, to, p, world)
    if worker == 0:
        _tell(total, starts, needed, to, p, world)
    fill(total, starts, sent, worker, workers, to, p, world)
    first = _behind(own, tasks, workers)
    last = workers - 1 - first  # the workers with the fewest arrived tokens first
    for start in range(last * p.TOKENS, p.T, workers * p.TOKENS):
        _find_places(idx_ptr, half, flag, start, to, p, world)
    OTHERS: tl.constexpr = world.size - 1
    if OTHERS > 0:
        for task in range(first, tl.max(places, 0) * OTHERS * p.PARTS, workers):
            source = (rank + 1 + task // p.PARTS % OTHERS) % world.size
            place = task // (p.PARTS * OTHERS)
            if place < sending.of(places, source):
                base = starts + words.added(counts, source, world)
                _place_token(half, flag, base, sent, source, place, task % p.PARTS, to, p, world)


@triton.jit
def _behind(first, tasks, programs):
    """The first task of the program whose first one would be `first`, if programs take `tasks` others before."""
    return (first + programs - tasks % programs) % programs


@triton.jit
def _chunk(chunks, g, source):
    """The number of chunk g from `source`, see totals.first. chunks: (W,), that each rank sends."""
    ranks = tl.arange(0, chunks.shape[0])
    return tl.sum(tl.minimum(chunks, g + (ranks < source).to(tl.int32)), 0)


@triton.jit
def _place_token(half, flag, base, sent, source, place, part, to, p, world):
    """Store a part of the token in a place of `source` into its rows, when it is there; part 0 has its pairs, too.
    base: (OWN2,), the row of the first pair of `source` for each of my experts."""
    at = words.of_token(half, source, place, p, world)
    k = tl.arange(0, triton.next_power_of_2(p.K + 1))
    expert, number, bits = pl.take_flagged(at + 4 * k, flag, world, mask=k < p.K + 1)
    rows = _rows(tl.where(k < p.K, expert, -1), number, base, p)
    if tl.max(rows, 0) >= 0:  # else it has no expert here
        if part == 0:
            t = tl.sum(tl.where(k == p.K, expert, 0), 0)
            j = tl.sum(tl.where(k == p.K, number, 0), 0)
            _tell_pairs(rows, bits.to(tl.float32, bitcast=True), sent, source, j, t, to, p)
        _place_rows(at + 4 * (p.K + 1), flag, _one_by_one(rows, p), part, to, p, world)


@triton.jit
def _place_rows(at, flag, places, part, to, p, world):
    """Store a part of the token whose words are at `at` into each row of `places` that is one."""
    for block in range(part, tl.cdiv(p.THIRD, p.BLOCK), p.PARTS):
        _place_block(at, block, p.THIRD, flag, to.rows, p.H, places, p, world)
    if p.SCALED:
        for block in range(part, tl.cdiv(p.SCALES, p.BLOCK), p.PARTS):
            _place_block(at + 4 * p.THIRD, block, p.SCALES, flag, to.scales, p.G, places, p, world)


@triton.jit
def _place_block(at, block, third, flag, rows_ptr, length, places, p, world):
    """Take a block of words, of 3 * third int32, and store it into the rows of `length` elements."""
    PER: tl.constexpr = 32 // rows_ptr.dtype.element_ty.primitive_bitwidth
    word = block * p.BLOCK + tl.arange(0, p.BLOCK)
    inside = word < third
    found = pl.take_flagged(at + 4 * word, flag, world, mask=inside)
    parts = ()
    for n in tl.static_range(3):
        parts = parts + (packing.unpacked(rows_ptr.dtype.element_ty, word + n * third, found[n], inside, length, PER),)
    for i in tl.static_range(p.K):
        if places[i] >= 0:
            row = rows_ptr + tl.cast(places[i], tl.int64) * length
            for n in tl.static_range(3):
                offs, values, mask = parts[n]
                tl.store(row + offs, values, mask=mask)


@triton.jit
def _place_own(x_ptr, mine, w_ptr, s_ptr, base, sent, t, part, to, p, world):
    """`_place_token` of this rank's own token t, from where it is. mine: its `sending.numbers`; base: of this rank."""
    rank = tl.cast(world.rank, tl.int32)
    chosen, pairs, tokens, goes = mine
    j = sending.of(tokens, rank)
    if (sending.of(goes, rank) > 0) & (j < sending.of(sent, rank)):  # sent is 0 where rows do not fit
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
def fill(total, starts, sent, pid, programs, to, p, world):
    """What no token fills: rows up to the alignment, if CLEAR those behind the last expert's, and the ends of weights,
    source and tokens."""
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
        count = sending.of(sent, source)
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
    chunks = tl.cdiv(words.take_sent(half, flag, ranks, p, world)[0], p.CHUNK)  # (to, from)
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
