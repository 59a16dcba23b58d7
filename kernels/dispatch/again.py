"""The kernel of `dispatch_again`'s push: one launch.
    1. Programs write down which token goes to each slot of each rank, and which place in `tokens` names each row.
    2. Some programs store tokens into the inboxes of the ranks, each token once a rank, chunk by chunk of slots. They
       signal once a chunk.
    3. The other programs copy each token into its rows, times their weights, as its chunk arrives. If they are given y,
       they also take the product of each row with its row of y.

Nothing is counted and nothing exchanged, because the slots are known: see `dispatch`, which numbers them. All slots of
a chunk belong to one rank, and if one of them is taken, the first one is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import pkt.language as pl


class Size(NamedTuple):
    """The numbers of a launch."""

    T: Any  # this rank's tokens
    H: Any  # elements of a token
    R: Any  # rows of the result
    S: Any  # slots
    K: tl.constexpr  # experts of a token
    K2: tl.constexpr  # the next power of two
    CHUNK: tl.constexpr  # slots a signal
    SENDERS: tl.constexpr  # programs that store into inboxes
    ROWS: tl.constexpr  # copied at a time, ROWS x COLS
    COLS: tl.constexpr
    MANY: tl.constexpr  # numbers written down at a time


class Buffers(NamedTuple):
    """A launch's memory, on every rank. What peers do not access is there, too, so that the simulator watches it."""

    inbox: Any  # (S, H): the slot's token, from its source
    ready: Any  # int32 (S / CHUNK,): of each chunk the last launch that has filled it
    grid: Any  # int32 (1,): of the grid barrier
    order: Any  # int32 (size, S): the token that goes to each slot of each rank, if places[token] says so, too
    named: Any  # int32 (R,): where in `tokens` each row is named, if tokens says so, too


@triton.jit
def dispatch_again_kernel(
    x_ptr,  # (T, H) this rank's
    tokens_ptr,  # int32 (S, K) this rank's: the rows of the token in each slot, -1 for none
    places_ptr,  # int32 (T, size) this rank's: the slot of each token on each rank, -1 for none
    weights_ptr,  # fp32 (R,) this rank's
    y_ptr,  # (R, H) this rank's, or None
    rows_ptr,  # (R, H) this rank's
    dots_ptr,  # fp32 (R,) this rank's
    bar_ptr,  # int32 (programs,) on every rank
    m,  # Buffers
    p,  # Size
    world,
):
    pid = tl.program_id(0)
    launch = pl.epoch(m.ready, world)
    pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read the last launch's inbox
    _write_down(tokens_ptr, places_ptr, m, p, world)
    pl.grid_barrier(m.grid, world)  # publish: the tokens and rows of all programs
    alone = tl.num_programs(0) == 1
    if pid < p.SENDERS:
        _send(x_ptr, places_ptr, launch, m, p, world)
    if (pid >= p.SENDERS) | alone:
        first = 0 if alone else pid - p.SENDERS
        step = 1 if alone else tl.num_programs(0) - p.SENDERS
        _place(x_ptr, tokens_ptr, places_ptr, weights_ptr, y_ptr, rows_ptr, dots_ptr, launch, first, step, m, p, world)
        fill(tokens_ptr, rows_ptr, dots_ptr, first, step, m, p)


@triton.jit
def _write_down(tokens_ptr, places_ptr, m, p, world):
    """The inverse of `places` and of `tokens`. Numbers of earlier launches stay, and are told by looking them up."""
    step = tl.num_programs(0) * p.MANY
    for start in range(tl.program_id(0) * p.MANY, p.T * world.size, step):
        at = start + tl.arange(0, p.MANY)
        slot = tl.load(places_ptr + at, mask=at < p.T * world.size, other=-1)
        there = m.order + tl.cast(at % world.size, tl.int64) * p.S + slot
        tl.store(there, at // world.size, mask=(slot >= 0) & (slot < p.S))
    name_rows(tokens_ptr, m, p)


@triton.jit
def name_rows(tokens_ptr, m, p):
    """The inverse of `tokens`, in m.named."""
    step = tl.num_programs(0) * p.MANY
    for start in range(tl.program_id(0) * p.MANY, p.S * p.K, step):
        at = start + tl.arange(0, p.MANY)
        row = tl.load(tokens_ptr + at, mask=at < p.S * p.K, other=-1)
        tl.store(m.named + row, at, mask=(row >= 0) & (row < p.R))


@triton.jit
def _tokens_of(places_ptr, peer, chunk, m, p, world):
    """My token in each slot of a chunk of rank `peer`, -1 for none, (CHUNK,)."""
    slot = chunk * p.CHUNK + tl.arange(0, p.CHUNK)
    t = tl.load(m.order + tl.cast(peer, tl.int64) * p.S + slot, mask=slot < p.S, other=-1)
    inside = (t >= 0) & (t < p.T)
    place = tl.load(places_ptr + tl.cast(t, tl.int64) * world.size + peer, mask=inside, other=-1)
    return tl.where(inside & (place == slot), t, -1)


@triton.jit
def _some(tokens, start, p):
    """ROWS of the tokens of a chunk, from `start` on, (ROWS, 1)."""
    wanted = start + tl.arange(0, p.ROWS)
    same = wanted[:, None] == tl.arange(0, p.CHUNK)[None, :]
    return tl.max(tl.where(same, tokens[None, :], -1), 1)[:, None]


@triton.jit
def _send(x_ptr, places_ptr, launch, m, p, world):
    """Store this rank's tokens into the others' inboxes, chunk by chunk: each one where its first token comes."""
    rank = tl.cast(world.rank, tl.int32)
    for start in range(tl.program_id(0) * p.CHUNK, p.T, p.SENDERS * p.CHUNK):
        t = start + tl.arange(0, p.CHUNK)
        for d in range(1, world.size):
            peer = (rank + d) % world.size
            slot = tl.load(places_ptr + tl.cast(t, tl.int64) * world.size + peer, mask=t < p.T, other=-1)
            begun = tl.where((slot >= 0) & (slot % p.CHUNK == 0), slot // p.CHUNK, -1)
            chunk = tl.max(begun, 0)
            while chunk >= 0:
                _send_chunk(x_ptr, _tokens_of(places_ptr, peer, chunk, m, p, world), chunk, peer, m, p, world)
                pl.signal(m.ready + chunk, peer, world, value=launch, op="set")  # publish the chunk
                chunk = tl.max(tl.where(begun < chunk, begun, -1), 0)


@triton.jit
def _send_chunk(x_ptr, tokens, chunk, peer, m, p, world):
    for start in range(0, p.CHUNK, p.ROWS):
        t = tl.cast(_some(tokens, start, p), tl.int64)
        slot = tl.cast(chunk * p.CHUNK + start, tl.int64) + tl.arange(0, p.ROWS)[:, None]
        for col in range(0, p.H, p.COLS):
            cols = col + tl.arange(0, p.COLS)[None, :]
            both = (t >= 0) & (cols < p.H)
            values = tl.load(x_ptr + t * p.H + cols, mask=both)
            pl.store(m.inbox + slot * p.H + cols, values, peer, world, mask=both)


@triton.jit
def _place(
    x_ptr, tokens_ptr, places_ptr, weights_ptr, y_ptr, rows_ptr, dots_ptr, launch, first, step, m, p, world
):  # fmt: skip
    """Copy the token of each slot into its rows: my own from x, the others' from the inbox, once a chunk is there."""
    rank = tl.cast(world.rank, tl.int32)
    k = tl.arange(0, p.K2)[None, :]
    for chunk in range(first, tl.cdiv(p.S, p.CHUNK), step):
        slots = chunk * p.CHUNK + tl.arange(0, p.CHUNK)[:, None]
        named = tl.load(tokens_ptr + tl.cast(slots, tl.int64) * p.K + k, mask=(slots < p.S) & (k < p.K), other=-1)
        if tl.max(tl.max(named, 1), 0) >= 0:
            mine = _tokens_of(places_ptr, rank, chunk, m, p, world)
            own = tl.max(mine, 0) >= 0
            if not own:
                pl.wait(m.ready + chunk, launch, world, cmp="eq")
            for start in range(0, p.CHUNK, p.ROWS):
                slot = tl.cast(chunk * p.CHUNK + start, tl.int64) + tl.arange(0, p.ROWS)[:, None]
                rows = tl.load(tokens_ptr + slot * p.K + k, mask=(slot < p.S) & (k < p.K), other=-1)
                source = m.inbox + slot * p.H
                if own:
                    source = x_ptr + tl.maximum(tl.cast(_some(mine, start, p), tl.int64), 0) * p.H
                into_rows(source, rows, weights_ptr, y_ptr, rows_ptr, dots_ptr, p)


@triton.jit
def into_rows(source, rows, weights_ptr, y_ptr, rows_ptr, dots_ptr, p):
    """Copy tokens, (ROWS, 1) pointers, into their rows (ROWS, K2), -1 for none, times the rows' weights. Their products
    with the rows of y, too."""
    k = tl.arange(0, p.K2)[None, :]
    dots = tl.zeros((p.ROWS, p.K2), tl.float32)
    for col in range(0, p.H, p.COLS):
        cols = col + tl.arange(0, p.COLS)[None, :]
        values = tl.load(source + cols, mask=(tl.max(rows, 1)[:, None] >= 0) & (cols < p.H), other=0)
        for number in tl.static_range(p.K):
            row = tl.max(tl.where(k == number, rows, -1), 1)[:, None]
            at = tl.cast(row, tl.int64) * p.H + cols
            both = (row >= 0) & (cols < p.H)
            if y_ptr is not None:
                products = tl.load(y_ptr + at, mask=both, other=0).to(tl.float32) * values.to(tl.float32)
                dots += tl.where(k == number, tl.sum(products, 1)[:, None], 0)
            scaled = values.to(tl.float32) * tl.load(weights_ptr + row, mask=row >= 0, other=0)
            tl.store(rows_ptr + at, scaled.to(rows_ptr.dtype.element_ty), mask=both)
    tl.store(dots_ptr + rows, dots, mask=rows >= 0)


@triton.jit
def fill(tokens_ptr, rows_ptr, dots_ptr, first, step, m, p):
    """Zeros for the rows that are no token's."""
    for start in range(first * p.ROWS, p.R, step * p.ROWS):
        row = start + tl.arange(0, p.ROWS)
        at = tl.load(m.named + row, mask=row < p.R, other=0)
        inside = (row < p.R) & (at >= 0) & (at < p.S * p.K)
        nobodys = (row < p.R) & (tl.load(tokens_ptr + at, mask=inside, other=-1) != row)
        if tl.max(nobodys.to(tl.int32), 0) > 0:
            tl.store(dots_ptr + row, tl.zeros((p.ROWS,), tl.float32), mask=nobodys)
            zeros = tl.zeros((p.ROWS, p.COLS), rows_ptr.dtype.element_ty)
            for col in range(0, p.H, p.COLS):
                cols = col + tl.arange(0, p.COLS)[None, :]
                there = rows_ptr + tl.cast(row, tl.int64)[:, None] * p.H + cols
                tl.store(there, zeros, mask=nobodys[:, None] & (cols < p.H))
