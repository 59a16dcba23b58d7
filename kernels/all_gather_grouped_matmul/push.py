"""push: one launch, behind the sort.
1. Some programs store this rank's tokens into the inboxes of the ranks, the next rank's first, and signal once a
   chunk of tokens.
2. Every program claims tiles from a queue: first those of this rank's own tokens, then those of the rank before it,
   and so on, in the order in which tokens arrive. A tile has one expert's tokens from one rank, and takes them from
   where they lie, row by row. A program waits for all tokens of a rank before its first tile of them.
3. Every program copies some of all ranks' tokens into the result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import pkt.language as pl

from ..shared.expert_tiles import clear_from
from ..shared.tile_product import stack, tile_pointers


class Push(NamedTuple):
    """What the kernel works on."""

    x: Any  # (T, H) this rank's
    w: Any  # (E, H, N), or (E, N, H) if TRANSPOSED, this rank's
    product: Any  # (R, N) this rank's
    whole: Any  # (W * T, H) this rank's: the tokens of all ranks
    inbox: Any  # (W * T, H) on every rank: rank r stores rows [r * T, (r + 1) * T) on the others
    ready: Any  # int32 (W,) on every rank: chunks that rank r has ever stored here
    bar: Any  # int32 (programs,) on every rank
    starts: Any  # int32 (W + 1, E) this rank's, see sorting.py
    row_tokens: Any  # int32 (R,) this rank's
    queue: Any  # int32 (1,) this rank's: tiles that programs have claimed, 0 before the launch
    T: Any
    H: Any
    N: Any
    R: Any
    EXPERTS: tl.constexpr
    CHUNK: tl.constexpr  # tokens a signal
    SENDERS: tl.constexpr  # programs that store into inboxes
    CLEAR: tl.constexpr  # zeros in the rows behind the last expert's
    ROWS: tl.constexpr  # copied at a time, ROWS x COLS
    COLS: tl.constexpr
    TMA: tl.constexpr  # for w
    TRANSPOSED: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    GROUP: tl.constexpr  # rows of tiles that run over all columns together, and share their rows in L2


@triton.jit
def push_kernel(p, world):
    pid = tl.program_id(0)
    launch = pl.epoch(p.ready, world)
    chunks = tl.cdiv(p.T, p.CHUNK)
    if pid < p.SENDERS:
        pl.barrier(p.bar + pid, world)  # before overwrite: every rank has read the last launch's inbox
        _send(chunks, p, world)
    _multiply(launch * chunks, p, world)
    _copy(launch * chunks, chunks, p, world)
    if p.CLEAR:
        e = tl.arange(0, triton.next_power_of_2(p.EXPERTS))
        ends = tl.load(p.starts + world.size * p.EXPERTS + e, mask=e < p.EXPERTS, other=0)
        clear_from(tl.max(ends), p.product, p.R, p.N)


@triton.jit
def _send(chunks, p, world):
    """Store this rank's tokens into the others' inboxes."""
    rank = tl.cast(world.rank, tl.int32)
    for task in range(tl.program_id(0), (world.size - 1) * chunks, p.SENDERS):
        peer = (rank + 1 + task // chunks) % world.size
        first = task % chunks * p.CHUNK
        for start in range(first, tl.minimum(first + p.CHUNK, p.T), p.ROWS):
            for col in range(0, p.H, p.COLS):
                at, inside = tile_pointers(p.x, start, col, p.T, p.H, p.H, p.ROWS, p.COLS)
                inside &= (start + tl.arange(0, p.ROWS) < first + p.CHUNK)[:, None]
                to, _ = tile_pointers(p.inbox, rank * p.T + start, col, 0, 0, p.H, p.ROWS, p.COLS)
                pl.store(to, tl.load(at, mask=inside), peer, world, mask=inside)
        pl.signal(p.ready + rank, peer, world)  # publish the chunk


@triton.jit
def _multiply(arrived, p, world):
    """Claim tiles, wait for their tokens' rank, and store them. arrived: chunks that a rank has then ever stored."""
    rank = tl.cast(world.rank, tl.int32)
    e = tl.arange(0, triton.next_power_of_2(p.EXPERTS))
    columns = tl.cdiv(p.N, p.BLOCK_N)
    b = _weights(p)
    done = 0  # tiles of the ranks before
    task = tl.atomic_add(p.queue, 1, sem="relaxed", scope="gpu")
    for distance in range(world.size):
        source = (rank + world.size - distance) % world.size
        starts = p.starts + source * p.EXPERTS
        start = tl.load(starts + e, mask=e < p.EXPERTS, other=0)
        # A rank's rows of an expert end where those of the next rank begin; starts[W] is where the expert's end.
        stop = tl.load(starts + p.EXPERTS + e, mask=e < p.EXPERTS, other=0)
        ends = tl.cumsum(tl.cdiv(stop - start, p.BLOCK_M) * columns)
        tiles = tl.max(ends)
        if (distance > 0) & (task - done < tiles):
            pl.wait(p.ready + source, arrived, world)
        while task - done < tiles:
            before = ends <= task - done
            expert = tl.sum(before.to(tl.int32))
            inside = task - done - tl.max(tl.where(before, ends, 0))
            row = tl.load(starts + expert)
            end = tl.load(starts + p.EXPERTS + expert)
            group = inside // (p.GROUP * columns) * p.GROUP
            high = tl.minimum(tl.cdiv(end - row, p.BLOCK_M) - group, p.GROUP)
            inside = inside % (p.GROUP * columns)
            row += (group + inside % high) * p.BLOCK_M
            col = inside // high * p.BLOCK_N
            if distance > 0:
                tokens = p.inbox + tl.cast(source, tl.int64) * p.T * p.H
            else:
                tokens = p.x
            acc = _accumulate(tokens, source * p.T, b, expert, row, end, col, p)
            ptrs, mask = tile_pointers(p.product, row, col, end, p.N, p.N, p.BLOCK_M, p.BLOCK_N)
            tl.store(ptrs, acc.to(p.product.dtype.element_ty), mask=mask)
            task = tl.atomic_add(p.queue, 1, sem="relaxed", scope="gpu")
        done += tiles


@triton.jit
def _weights(p):
    if p.TRANSPOSED:
        return stack(p.w, p.EXPERTS, p.N, p.H, p.H, p.BLOCK_N, p.BLOCK_K, p.TMA)
    else:
        return stack(p.w, p.EXPERTS, p.H, p.N, p.N, p.BLOCK_K, p.BLOCK_N, p.TMA)


@triton.jit
def _accumulate(tokens, first, b, expert, row, end, col, p):
    """The product of the tokens of rows [row, end) and an expert's matrix, columns from `col` on. tokens: where those
    of their rank lie, the first of which has number `first`. No wait is in here, so the loop is pipelined."""
    rows = tl.arange(0, p.BLOCK_M)
    cols = tl.arange(0, p.BLOCK_N)
    ks = tl.arange(0, p.BLOCK_K)
    there = rows < end - row
    # 32-bit offsets inside a rank's tokens: a register less for each element.
    token = tl.load(p.row_tokens + row + rows, mask=there, other=0) - first
    offs = tl.where(there, token, 0)[:, None] * p.H + ks[None, :]
    if not p.TMA:
        own = b + tl.cast(expert, tl.int64) * p.H * p.N
        if p.TRANSPOSED:
            b_ptr = own + tl.cast(col, tl.int64) * p.H
            b_offs = ks[:, None] + cols[None, :] * p.H
            step = tl.cast(p.BLOCK_K, tl.int64)
        else:
            b_ptr = own + col
            b_offs = ks[:, None] * p.N + cols[None, :]
            step = tl.cast(p.N, tl.int64) * p.BLOCK_K
    acc = tl.zeros((p.BLOCK_M, p.BLOCK_N), tl.float32)
    for k in range(0, p.H, p.BLOCK_K):
        x = tl.load(tokens + offs, mask=there[:, None] & (ks < p.H - k)[None, :], other=0)
        if p.TMA:
            if p.TRANSPOSED:
                y = tl.trans(tl.reshape(b.load([expert, col, k]), (p.BLOCK_N, p.BLOCK_K)))
            else:
                y = tl.reshape(b.load([expert, k, col]), (p.BLOCK_K, p.BLOCK_N))
        else:
            y = tl.load(b_ptr + b_offs, mask=(ks < p.H - k)[:, None] & (cols < p.N - col)[None, :], other=0)
            b_ptr += step
        acc = tl.dot(x, y, acc, input_precision="ieee")
        tokens += p.BLOCK_K
    return acc


@triton.jit
def _copy(arrived, chunks, p, world):
    """This rank's tokens, then the others' in the order in which they arrive, into the result."""
    rank = tl.cast(world.rank, tl.int32)
    for task in range(tl.program_id(0), world.size * chunks, tl.num_programs(0)):
        source = (rank + world.size - task // chunks) % world.size
        if source != rank:
            pl.wait(p.ready + source, arrived, world)
            tokens = p.inbox + tl.cast(source, tl.int64) * p.T * p.H
        else:
            tokens = p.x
        first = task % chunks * p.CHUNK
        for start in range(first, tl.minimum(first + p.CHUNK, p.T), p.ROWS):
            for col in range(0, p.H, p.COLS):
                at, inside = tile_pointers(tokens, start, col, p.T, p.H, p.H, p.ROWS, p.COLS)
                inside &= (start + tl.arange(0, p.ROWS) < first + p.CHUNK)[:, None]
                to, _ = tile_pointers(p.whole, source * p.T + start, col, 0, 0, p.H, p.ROWS, p.COLS)
                tl.store(to, tl.load(at, mask=inside), mask=inside)
