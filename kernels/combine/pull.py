"""pull: one launch. Some programs of a rank add the rows of each token that they have, times their weights, and leave
the sums, one a token, where the other ranks load them; they signal once a chunk of tokens. The other programs load the
sums of this rank's own tokens from all ranks, as they become ready, and add them.
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
    S: Any  # slots
    K: tl.constexpr  # experts of a token
    K2: tl.constexpr  # the next power of two
    CHUNK: tl.constexpr  # slots a signal
    GROUP: tl.constexpr  # chunks a counter
    COLLECTORS: tl.constexpr  # programs that load sums
    ROWS: tl.constexpr  # added at a time, ROWS x COLS
    LOADED: tl.constexpr  # collected at a time, LOADED x COLS
    COLS: tl.constexpr


@triton.jit
def combine_kernel(
    y_ptr,  # (R, H) this rank's
    tokens_ptr,  # int32 (S, K) this rank's: the rows of the token in each slot, -1 for none
    places_ptr,  # int32 (T, size) this rank's: the slot of each token on each rank, -1 for none
    weights_ptr,  # fp32 (R,) this rank's, or None
    out_ptr,  # (T, H) this rank's
    sums_ptr,  # (S, H) on every rank: of each slot; all ranks load them
    ready_ptr,  # int32 (size, groups of chunks) on every rank: chunks that each rank has ever added, or found empty
    bar_ptr,  # int32 (programs,) on every rank
    p,  # Size
    world,
):
    pid = tl.program_id(0)
    launch = pl.epoch(ready_ptr, world)
    pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read the last launch's sums
    alone = tl.num_programs(0) == 1
    if (pid >= p.COLLECTORS) | alone:
        first = 0 if alone else pid - p.COLLECTORS
        step = 1 if alone else tl.num_programs(0) - p.COLLECTORS
        _add(y_ptr, tokens_ptr, weights_ptr, sums_ptr, ready_ptr, launch, first, step, p, world)
    if pid < p.COLLECTORS:
        _collect(places_ptr, out_ptr, sums_ptr, ready_ptr, launch, p, world)


@triton.jit
def _add(y_ptr, tokens_ptr, weights_ptr, sums_ptr, ready_ptr, launch, first, step, p, world):
    """Add the rows of every slot's token, chunk by chunk."""
    chunks = tl.cdiv(p.S, p.CHUNK)
    for chunk in range(first, chunks, step):
        add_chunk(y_ptr, tokens_ptr, weights_ptr, sums_ptr, chunk, p)
        ready = ready_ptr + tl.cast(world.rank, tl.int32) * tl.cdiv(chunks, p.GROUP) + chunk // p.GROUP
        pl.signal_all(ready, world)  # publish the chunk


@triton.jit
def add_chunk(y_ptr, tokens_ptr, weights_ptr, sums_ptr, chunk, p):
    """Add the rows of the tokens in a chunk of slots."""
    k = tl.arange(0, p.K2)[None, :]
    for start in range(chunk * p.CHUNK, chunk * p.CHUNK + p.CHUNK, p.ROWS):
        slot = tl.cast(start, tl.int64) + tl.arange(0, p.ROWS)[:, None]
        inside = (slot < p.S) & (k < p.K)
        rows = tl.load(tokens_ptr + slot * p.K + k, mask=inside, other=-1)
        if tl.max(tl.max(rows, 1), 0) >= 0:
            for col in range(0, p.H, p.COLS):
                cols = col + tl.arange(0, p.COLS)[None, :]
                total = tl.zeros((p.ROWS, p.COLS), tl.float32)
                for number in tl.static_range(p.K):
                    row = tl.max(tl.where(k == number, rows, -1), 1)[:, None]
                    at = y_ptr + tl.cast(row, tl.int64) * p.H + cols
                    part = tl.load(at, mask=(row >= 0) & (cols < p.H), other=0).to(tl.float32)
                    if weights_ptr is not None:
                        part *= tl.load(weights_ptr + row, mask=row >= 0, other=0)
                    total += part
                sums = sums_ptr + slot * p.H + cols
                tl.store(sums, total.to(sums_ptr.dtype.element_ty), mask=(slot < p.S) & (cols < p.H))


@triton.jit
def _collect(places_ptr, out_ptr, sums_ptr, ready_ptr, launch, p, world):
    """Add the ranks' sums of my tokens."""
    groups = tl.cdiv(tl.cdiv(p.S, p.CHUNK), p.GROUP)
    for start in range(tl.program_id(0) * p.LOADED, p.T, p.COLLECTORS * p.LOADED):
        t = tl.cast(start, tl.int64) + tl.arange(0, p.LOADED)[:, None]
        for source in range(world.size):
            slot = tl.load(places_ptr + t * world.size + source, mask=t < p.T, other=-1)
            group = tl.where(slot >= 0, slot // (p.CHUNK * p.GROUP), -1)
            wanted = tl.max(tl.max(group, 1), 0)
            while wanted >= 0:  # neighbours are mostly in one group
                _wait(ready_ptr, source * groups + wanted, groups, launch, p, world)
                wanted = tl.max(tl.max(tl.where(group < wanted, group, -1), 1), 0)
        for col in range(0, p.H, p.COLS):
            cols = col + tl.arange(0, p.COLS)[None, :]
            total = tl.zeros((p.LOADED, p.COLS), tl.float32)
            for d in tl.static_range(world.size):
                slot = tl.load(places_ptr + t * world.size + d, mask=t < p.T, other=-1)
                at = sums_ptr + tl.cast(slot, tl.int64) * p.H + cols
                total += pl.load(at, d, world, mask=(slot >= 0) & (cols < p.H), other=0).to(tl.float32)
            out = out_ptr + t * p.H + cols
            tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(t < p.T) & (cols < p.H))
    for at in range(tl.program_id(0), groups * world.size, p.COLLECTORS):  # and those that none of my tokens is in
        _wait(ready_ptr, at, groups, launch, p, world)


@triton.jit
def _wait(ready_ptr, at, groups, launch, p, world):
    """Wait until a rank has added a group, at = rank * groups + group."""
    chunks = tl.minimum(tl.cdiv(p.S, p.CHUNK) - at % groups * p.GROUP, p.GROUP)
    pl.wait(ready_ptr + at, launch * chunks, world)
