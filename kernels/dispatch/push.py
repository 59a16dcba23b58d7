"""push: one launch.
    1. Every program counts the tokens of its share by expert and by rank. The ranks exchange these counts.
    2. Every rank so knows all counts, and where each row of each rank begins. Programs number their tokens.
    3. Some programs store tokens into the inboxes of the ranks, each token once a rank, whatever number of its experts
       is there, with the rows that it takes there and its scales. They signal once a piece of some tokens.
    4. The other programs copy each token into its rows: this rank's own tokens first, then pieces as they arrive, some
       tokens at a time.

A token has a slot at each rank that it goes to. A rank numbers slots chunk by chunk, and its sources take turns, so
that all of them arrive at the same time. A piece is a chunk, or a part of it where there are few tokens. A token's
place in the inbox is its slot, unless tokens are sorted. Then a source fills its places in the order in which it sends,
and each token brings the number of its slot.
"""

from __future__ import annotations

import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import ptx

from . import arrivals, choices, empty_rows, numbering, scales, sorting, totals


@triton.jit
def dispatch_kernel(
    x_ptr,  # (T, H) this rank's
    idx_ptr,  # int32 or int64 (T, K) this rank's
    w_ptr,  # fp32 (T, K) this rank's
    s_ptr,  # int32 (T, G) this rank's: the bits of the tokens' scales; None without
    to,  # Result
    routes_ptr,  # int32 (T, K) this rank's: the row of each pair of token and expert on the expert's rank
    m,  # Buffers
    p,  # Size
    world,
):
    pid = tl.program_id(0)
    launch, half, room = begin(idx_ptr, to, routes_ptr, m, p, world)
    alone = tl.num_programs(0) == 1
    if pid < p.SENDERS:
        send(x_ptr, idx_ptr, w_ptr, s_ptr, half, room, launch, to, routes_ptr, m, p, world)
    if (pid >= p.SENDERS) | alone:
        first = 0 if alone else pid - p.SENDERS
        step = 1 if alone else tl.num_programs(0) - p.SENDERS
        _, last = tasks(half, room, p, world)
        place(
            x_ptr, idx_ptr, w_ptr, s_ptr, half, launch, first, step, last, step, last, to, routes_ptr, None, m, p, world
        )  # fmt: skip
        fill(half, room, first, step, to, None, p, world)


@triton.jit
def begin(idx_ptr, to, routes_ptr, m, p, world):
    """Steps 1 and 2. Returns the number of the launch, its half of the table, and for each rank whether its rows fit,
    (W,)."""
    launch = pl.epoch(m.ready, world)
    half = m.table + (launch & 1) * (world.size * (p.EXPERTS + world.size))
    totals.count(idx_ptr, m, p, world)
    if m.sorting is not None:
        sorting.count(idx_ptr, m.sorting, p, world)
    pl.grid_barrier(m.grid, world)  # publish: every program's counts
    totals.exchange(half, m, p, world)
    pl.wait(m.ready, launch * world.size, world)  # before overwrite: every rank has read its last launch's inbox
    room = numbering.begin(half, to, m, p, world)
    if m.sorting is not None:
        sorting.begin(m.sorting, p, world)
        ptx.cta_barrier()  # every thread finds its next places
    numbering.number(idx_ptr, half, room, to, routes_ptr, m, p, world)
    pl.grid_barrier(m.grid, world)  # publish: rows and slots of all tokens, counts and offsets
    return launch, half, room


@triton.jit
def send(x_ptr, idx_ptr, w_ptr, s_ptr, half, room, launch, to, routes_ptr, m, p, world):
    """Store this rank's tokens into the others' inboxes, piece by piece."""
    PEERS: tl.constexpr = world.size - 1
    rank = tl.cast(world.rank, tl.int32)
    sent = totals.sent(half, p, world)
    piece = totals.piece(sent, p, world)
    k = tl.arange(0, p.K2)[None, :]
    for task in range(tl.program_id(0), tl.cdiv(p.T, piece) * PEERS, p.SENDERS):
        peer = (rank + 1 + task % PEERS) % world.size
        begin = task // PEERS * piece
        received = totals.received(sent, peer)
        end = tl.minimum(totals.of_rank(received, rank), begin + piece)
        if (begin < end) & totals.fits(room, peer, world):
            head = totals.first(received, begin, rank, p)
            order = m.order + peer * p.S + begin
            at = tl.arange(0, p.CHUNK)[:, None]
            inside = begin + at < end
            t = tl.load(order + at, mask=inside, other=0)
            rows, bits = choices.rows_and_weights(idx_ptr, w_ptr, t, inside, peer, routes_ptr, p)
            slot = tl.load(to.places + tl.cast(t, tl.int64) * world.size + peer, mask=inside, other=0)
            meta = m.meta + tl.cast(head + at, tl.int64) * (2 * p.K + 2 + p.G)
            pl.store(meta + k, rows, peer, world, mask=inside & (k < p.K))
            pl.store(meta + p.K + k, bits, peer, world, mask=inside & (k < p.K))
            pl.store(meta + 2 * p.K, t, peer, world, mask=inside)
            pl.store(meta + 2 * p.K + 1, slot, peer, world, mask=inside)
            if p.SCALED:
                scales.send(s_ptr, t, inside, pl.peer(meta + 2 * p.K + 2, peer, world), p)
            for start in range(0, end - begin, p.ROWS):
                i = start + tl.arange(0, p.ROWS)[:, None]
                some = begin + i < end
                tokens = x_ptr + tl.cast(tl.load(order + i, mask=some, other=0), tl.int64) * p.H
                inbox = m.inbox + tl.cast(head + i, tl.int64) * p.H
                cols = tl.arange(0, p.COLS)[None, :]
                for col in tl.range(0, p.H, p.COLS, num_stages=p.STAGES):
                    both = some & (col + cols < p.H)
                    pl.store(inbox + col + cols, tl.load(tokens + col + cols, mask=both), peer, world, mask=both)
            pl.signal(m.ready + 1 + head // p.LEAST, peer, world, value=launch, op="set")  # publish the piece


@triton.jit
def tasks(half, room, p, world):
    """Parts of this rank's own tokens, see `place`; and with as many of each other rank as the one has that sends
    most."""
    rank = tl.cast(world.rank, tl.int32)
    sent = totals.sent(half, p, world)
    part = tl.minimum(totals.piece(sent, p, world), p.ROWS)
    received = totals.received(sent, rank)
    own = tl.cdiv(totals.of_rank(received, rank), part)
    last = own + tl.cdiv(tl.max(received, 0), part) * (world.size - 1)
    if not totals.fits(room, rank, world):
        own = 0
        last = 0
    return own, last


@triton.jit
def place(
    x_ptr, idx_ptr, w_ptr, s_ptr, half, launch, first, step, common, placers, last, to, routes_ptr, arrived, m, p, world
):  # fmt: skip
    """Copy tokens into their rows, a part of a piece at a time: my own, then those of the other ranks in the order in
    which they are sent.

    The `step` programs that place share the `tasks` below `common`. The first `placers` of them share the rest, up to
    `last`. first: the number of this program among them. arrived: where rows are counted that are there, see
    arrivals.py, or None.
    """
    rank = tl.cast(world.rank, tl.int32)
    k = tl.arange(0, p.K2)[None, :]
    sent = totals.sent(half, p, world)
    piece = totals.piece(sent, p, world)
    part = tl.minimum(piece, p.ROWS)
    received = totals.received(sent, rank)
    own = tl.cdiv(totals.of_rank(received, rank), part)
    early = tl.cdiv(tl.maximum(common - first, 0), step)
    late = tl.where(first < placers, tl.cdiv(tl.maximum(last - common - first, 0), placers), 0)
    for turn in range(early + late):
        task = tl.where(turn < early, first + turn * step, common + first + (turn - early) * placers)
        source = rank
        begin = task * part
        if world.size > 1:
            if task >= own:
                source = (rank + world.size - 1 - (task - own) % (world.size - 1)) % world.size
                begin = (task - own) // (world.size - 1) * part
        count = totals.of_rank(received, source)
        end = tl.minimum(count, begin + part)
        if begin < end:
            head = totals.first(received, begin, source, p)
            if source != rank:
                pl.wait(m.ready + 1 + head // piece * piece // p.LEAST, launch, world, cmp="eq")
            at = tl.arange(0, p.ROWS)[:, None]
            inside = begin + at < end
            there = tl.cast(head + at, tl.int64)
            tokens = m.inbox + there * p.H
            meta = m.meta + there * (2 * p.K + 2 + p.G)
            if source == rank:
                t = tl.load(m.order + rank * p.S + begin + at, mask=inside, other=0)
                tokens = x_ptr + tl.cast(t, tl.int64) * p.H
                rows, bits = choices.rows_and_weights(idx_ptr, w_ptr, t, inside, rank, routes_ptr, p)
                slot = tl.load(to.places + tl.cast(t, tl.int64) * world.size + rank, mask=inside, other=0)
            else:
                t = tl.load(meta + 2 * p.K, mask=inside, other=0)
                rows = tl.load(meta + k, mask=inside & (k < p.K), other=-1)
                bits = tl.load(meta + p.K + k, mask=inside & (k < p.K), other=0)
                slot = tl.load(meta + 2 * p.K + 1, mask=inside, other=0)
            tl.store(to.tokens + tl.cast(slot, tl.int64) * p.K + k, rows, mask=inside & (k < p.K))
            if end == count:
                _leave_free(head + end - begin, to, p)
            describe(rows, bits, source, t, to)
            if p.SCALED:
                scales.place(s_ptr, t, meta + 2 * p.K + 2, source == rank, inside, rows, to, p)
            into_rows(tokens, rows, inside, to, p)
            if arrived is not None:
                arrivals.tell(rows, arrived, world)


@triton.jit
def _leave_free(slot, to, p):
    """The slots from this one up to the end of its chunk are nobody's."""
    free = slot + tl.arange(0, p.CHUNK)[:, None]
    k = tl.arange(0, p.K2)[None, :]
    nobody = tl.full((p.CHUNK, p.K2), -1, tl.int32)
    same = free // p.CHUNK == (slot - 1) // p.CHUNK
    tl.store(to.tokens + tl.cast(free, tl.int64) * p.K + k, nobody, mask=same & (k < p.K))


@triton.jit
def describe(rows, bits, source, t, to):
    """Store the weights, of which these are the bits, and the sources of rows (tokens, K2), -1 for none. The rows are
    those of rank `source`'s tokens t."""
    k = tl.arange(0, rows.shape[1])[None, :]
    there = rows >= 0
    tl.store(to.weights + rows, bits.to(tl.float32, bitcast=True), mask=there)
    tl.store(to.source + 3 * tl.cast(rows, tl.int64), source + tl.zeros_like(rows), mask=there)
    tl.store(to.source + 3 * tl.cast(rows, tl.int64) + 1, t + tl.zeros_like(rows), mask=there)
    tl.store(to.source + 3 * tl.cast(rows, tl.int64) + 2, k + tl.zeros_like(rows), mask=there)


@triton.jit
def into_rows(tokens, rows, inside, to, p):
    """Copy tokens into their rows (ROWS, K2), -1 for none. tokens: (ROWS, 1) pointers to those that are `inside`."""
    k = tl.arange(0, p.K2)[None, :]
    cols = tl.arange(0, p.COLS)[None, :]
    for col in tl.range(0, p.H, p.COLS, num_stages=p.STAGES):
        both = inside & (col + cols < p.H)
        part = tl.load(tokens + col + cols, mask=both)
        for number in tl.static_range(p.K):
            target = tl.sum(tl.where(k == number, rows, 0), 1)[:, None]
            tl.store(to.rows + tl.cast(target, tl.int64) * p.H + col + cols, part, mask=both & (target >= 0))


@triton.jit
def fill(half, room, first, step, to, arrived, p, world):
    """What no token fills: rows up to the alignment, if CLEAR those behind the last expert's, and the ends of weights,
    source and tokens."""
    rank = tl.cast(world.rank, tl.int32)
    MANY: tl.constexpr = max(p.ROWS * p.COLS, 1024)
    for expert in range(first, p.OWN, step):
        start = tl.load(to.offsets + expert) + tl.load(to.counts + expert)
        for row in range(start, tl.load(to.offsets + expert + 1)):
            empty_rows.clear(row, to, p, MANY)
            empty_rows.mark(row + tl.arange(0, 1), row + 1, to)
            if arrived is not None:
                arrivals.tell(row + tl.arange(0, 1), arrived, world)
    end = tl.load(to.offsets + p.OWN)
    for start in range(end + first * MANY, p.R, step * MANY):
        empty_rows.mark(start + tl.arange(0, MANY), p.R, to)
    if p.CLEAR:
        for row in range(end + first, p.R, step):
            empty_rows.clear(row, to, p, MANY)
    chunks = tl.sum(tl.cdiv(totals.received(totals.sent(half, p, world), rank), p.CHUNK), 0)
    if not totals.fits(room, rank, world):
        chunks = 0
    begin = tl.cast(chunks, tl.int64) * p.CHUNK * p.K
    for start in range(begin + first * MANY, tl.cast(p.S, tl.int64) * p.K, step * MANY):
        at = start + tl.arange(0, MANY)
        tl.store(to.tokens + at, tl.full((MANY,), -1, tl.int32), mask=at < tl.cast(p.S, tl.int64) * p.K)
