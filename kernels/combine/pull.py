"""pull: one launch. Some programs of a rank add the rows that it has of other ranks' tokens, times their weights, and
leave the sums, one a token, where the tokens' ranks load them; they signal once a piece of some slots. The other
programs add the rows of this rank's own tokens, in registers, and to them the sums of the other ranks, as they become
ready.

`dispatch` fills slots in turns, a chunk for each source, so a program takes a piece of each chunk of a turn: that is as
many rows to add for every program, whichever of the chunks are its own rank's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import pkt.language as pl


class Size(NamedTuple):
    """The numbers of a combine."""

    T: Any  # this rank's tokens
    H: Any  # elements of a token
    S: Any  # slots that tokens can be in
    K: tl.constexpr  # experts of a token
    K2: tl.constexpr  # the next power of two
    CHUNK: tl.constexpr  # slots that a source takes in turn
    PIECE: tl.constexpr  # slots a signal, a part of a chunk
    COLLECTORS: tl.constexpr  # programs that add up this rank's tokens
    ROWS: tl.constexpr  # tokens added at a time, ROWS x COLS
    COLS: tl.constexpr
    TOGETHER: tl.constexpr  # rows of a token loaded at a time


@triton.jit
def combine_kernel(
    y_ptr,  # (R, H) this rank's
    tokens_ptr,  # int32 (S, K) this rank's: the rows of the token in each slot, -1 for none
    places_ptr,  # int32 (T, size) this rank's: the slot of each token on each rank, -1 for none
    weights_ptr,  # fp32 (R,) this rank's, or None
    source_ptr,  # int32 (R, 3) this rank's: the rank and token of each row
    out_ptr,  # (T, H) this rank's
    sums_ptr,  # (S, H) on every rank: of each slot of another rank's token; that rank loads it
    ready_ptr,  # int32 (size, pieces) on every rank: of each rank's pieces the last launch that has left its sums
    bar_ptr,  # int32 (programs,) on every rank
    p,  # Size
    world,
):
    pid = tl.program_id(0)
    launch = pl.epoch(ready_ptr, world)
    pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read the last launch's sums
    alone = tl.num_programs(0) == 1
    if ((pid >= p.COLLECTORS) | alone) & (world.size > 1):
        first = 0 if alone else pid - p.COLLECTORS
        step = 1 if alone else tl.num_programs(0) - p.COLLECTORS
        _add(y_ptr, tokens_ptr, weights_ptr, source_ptr, sums_ptr, ready_ptr, launch, first, step, p, world)
    if pid < p.COLLECTORS:
        _collect(y_ptr, tokens_ptr, places_ptr, weights_ptr, out_ptr, sums_ptr, ready_ptr, launch, p, world)


@triton.jit
def _add(y_ptr, tokens_ptr, weights_ptr, source_ptr, sums_ptr, ready_ptr, launch, first, step, p, world):
    """Leave the sums of other ranks' tokens, piece by piece, up to a turn that no token is in."""
    PIECES: tl.constexpr = p.CHUNK // p.PIECE  # of a chunk
    k = tl.arange(0, p.K2)[None, :]
    heads = tl.arange(0, triton.next_power_of_2(world.size))[:, None] * p.CHUNK
    pieces = tl.cdiv(p.S, p.PIECE)
    task = first
    while task < pieces:
        start = task // PIECES * world.size * p.CHUNK
        inside = (start + heads < p.S) & (heads < world.size * p.CHUNK) & (k < p.K)
        rows = tl.load(tokens_ptr + tl.cast(start + heads, tl.int64) * p.K + k, mask=inside, other=-1)
        task = tl.where(tl.max(tl.max(rows, 1), 0) >= 0, task, pieces)  # slots are filled in their order
        if task < pieces:
            for source in range(world.size):
                piece = (task // PIECES * world.size + source) * PIECES + task % PIECES
                _add_piece(y_ptr, tokens_ptr, weights_ptr, source_ptr, sums_ptr, ready_ptr, launch, piece, p, world)
        task += step


@triton.jit
def _add_piece(y_ptr, tokens_ptr, weights_ptr, source_ptr, sums_ptr, ready_ptr, launch, piece, p, world):
    """Leave the sums of a piece for the rank whose tokens these are, if it is another."""
    slot = tl.cast(piece, tl.int64) * p.PIECE + tl.arange(0, p.PIECE)[:, None]
    k = tl.arange(0, p.K2)[None, :]
    rows = tl.load(tokens_ptr + slot * p.K + k, mask=(slot < p.S) & (k < p.K), other=-1)
    row = tl.max(tl.max(rows, 1), 0)
    if row >= 0:
        home = tl.load(source_ptr + 3 * tl.cast(row, tl.int64))
        if home != world.rank:
            add_piece(y_ptr, tokens_ptr, weights_ptr, sums_ptr, piece, p)
            ready = ready_ptr + tl.cast(world.rank, tl.int32) * tl.cdiv(p.S, p.PIECE) + piece
            pl.signal(ready, home, world, value=launch, op="set")  # publish the piece


@triton.jit
def add_piece(y_ptr, tokens_ptr, weights_ptr, sums_ptr, piece, p):
    """Leave the sums of the tokens in a piece."""
    for start in range(piece * p.PIECE, piece * p.PIECE + p.PIECE, p.ROWS):
        slot = tl.cast(start, tl.int64) + tl.arange(0, p.ROWS)[:, None]
        rows, count = _rows(tokens_ptr, slot, slot < p.S, p)
        if count > 0:
            for col in range(0, p.H, p.COLS):
                cols = col + tl.arange(0, p.COLS)[None, :]
                total = _added(y_ptr, weights_ptr, rows, count, cols, p)
                inside = (slot < p.S) & (cols < p.H)
                tl.store(sums_ptr + slot * p.H + cols, total.to(sums_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rows(tokens_ptr, slot, there, p):
    """The rows of the tokens in slots (ROWS, 1), if `there`, (ROWS, K2): the token's in front, and -1 behind them. And
    the most that one of them has."""
    k = tl.arange(0, p.K2)[None, :]
    rows = tl.load(tokens_ptr + tl.cast(slot, tl.int64) * p.K + k, mask=there & (k < p.K), other=-1)
    some = (rows >= 0).to(tl.int32)
    before = tl.arange(0, p.K2)[None, None, :] < k[:, :, None]
    place = tl.sum(tl.where(before, some[:, None, :], 0), 2)  # not tl.cumsum, which some small blocks do not compile
    front = tl.full((p.ROWS, p.K2), -1, tl.int32)
    for i in tl.static_range(p.K):
        front = tl.where(k == i, tl.max(tl.where(place == i, rows, -1), 1)[:, None], front)
    return front, tl.max(tl.sum(some, 1), 0)


@triton.jit
def _added(y_ptr, weights_ptr, rows, count, cols, p):
    """The sums of tokens' rows, of `_rows`, in these columns, fp32 (ROWS, COLS)."""
    k = tl.arange(0, p.K2)[None, :]
    total = tl.zeros((p.ROWS, p.COLS), tl.float32)
    for start in range(0, count, p.TOGETHER):
        for i in tl.static_range(p.TOGETHER):
            row = tl.max(tl.where(k == start + i, rows, -1), 1)[:, None]
            at = y_ptr + tl.cast(row, tl.int64) * p.H + cols
            part = tl.load(at, mask=(row >= 0) & (cols < p.H), other=0).to(tl.float32)
            if weights_ptr is not None:
                part *= tl.load(weights_ptr + row, mask=row >= 0, other=0)
            total += part
    return total


@triton.jit
def _collect(y_ptr, tokens_ptr, places_ptr, weights_ptr, out_ptr, sums_ptr, ready_ptr, launch, p, world):
    """Add the ranks' sums of my tokens."""
    pieces = tl.cdiv(p.S, p.PIECE)
    rank = tl.cast(world.rank, tl.int32)
    for start in range(tl.program_id(0) * p.ROWS, p.T, p.COLLECTORS * p.ROWS):
        t = tl.cast(start, tl.int64) + tl.arange(0, p.ROWS)[:, None]
        places = places_ptr + t * world.size
        own = tl.load(places + rank, mask=t < p.T, other=-1)
        rows, count = _rows(tokens_ptr, own, own >= 0, p)
        for source in range(world.size):
            if source != rank:
                slots = tl.load(places + source, mask=t < p.T, other=-1)
                _wait(ready_ptr + source * pieces, tl.where(slots >= 0, slots // p.PIECE, -1), launch, world)
        for col in range(0, p.H, p.COLS):
            cols = col + tl.arange(0, p.COLS)[None, :]
            inside = (t < p.T) & (cols < p.H)
            parts = ()
            for d in tl.static_range(world.size):  # on their way before the own rows, which are nearer
                slot = tl.load(places + d, mask=(t < p.T) & (d != rank), other=-1)
                sums = sums_ptr + tl.cast(slot, tl.int64) * p.H + cols
                parts = parts + (pl.load(sums, d, world, mask=(slot >= 0) & inside, other=0),)
            mine = _added(y_ptr, weights_ptr, rows, count, cols, p).to(sums_ptr.dtype.element_ty)
            total = tl.zeros((p.ROWS, p.COLS), tl.float32)
            for d in tl.static_range(world.size):
                total += tl.where(d == rank, mine, parts[d]).to(tl.float32)
            tl.store(out_ptr + t * p.H + cols, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _wait(ready_ptr, piece, launch, world):
    """Wait until a rank has left the sums of these pieces of it, negative for none. Neighbours are mostly in one."""
    wanted = tl.max(tl.max(piece, 1), 0)
    while wanted >= 0:
        pl.wait(ready_ptr + wanted, launch, world, cmp="eq")
        wanted = tl.max(tl.max(tl.where(piece < wanted, piece, -1), 1), 0)
