"""ParallelKittens' eight primitives on a parallel global layout: an array of one shape (b, d, r, c) on every rank.

Section 3.2.2 and appendix C of the ParallelKittens paper define the primitives. In a `coord` (b, d, r, c), b and d
count elements, and r and c count tiles of the call's shape (elements for the counters of `signal` and `wait`). Tiles at
the edge are cut. Stores are asynchronous: they have landed after `signal`, `signal_all`, `barrier` or `pl.quiet`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import address, multimem, ptx, sync

_ADD = tl.constexpr("add")


class Layout(NamedTuple):
    """A contiguous array (b, d, r, c) in the symmetric heap; `pkt.layout(x)` makes one from a symmetric tensor.

    ptr: pointer to this rank's copy, any element type; b, d, r, c: int32 sizes.
    tma: constexpr bool: each row begins at a multiple of 16 bytes, so that TMA and multimem may be used. Otherwise
        tiles move through registers, one element at a time where alignment requires it.
    """

    ptr: Any
    b: Any
    d: Any
    r: Any
    c: Any
    tma: tl.constexpr


@triton.jit
def _plane(x, coord):
    """Pointer to the matrix (b, d) of the layout, and its 64-bit row length."""
    cols = tl.cast(x.c, tl.int64)
    index = tl.cast(coord[0], tl.int64) * x.d + coord[1]
    return x.ptr + index * x.r * cols


@triton.jit
def _elements(x, coord, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Block of element pointers [ROWS, COLS] of a tile, and the mask of the elements inside the layout."""
    rows = coord[2] * ROWS + tl.arange(0, ROWS)
    cols = coord[3] * COLS + tl.arange(0, COLS)
    ptrs = _plane(x, coord) + tl.cast(rows, tl.int64)[:, None] * x.c + cols[None, :]
    return ptrs, (rows < x.r)[:, None] & (cols < x.c)[None, :]


@triton.jit
def _descriptor(x, coord, rank, world, ROWS: tl.constexpr, COLS: tl.constexpr):
    base = address.of_rank(_plane(x, coord), rank, world)
    return tl.make_tensor_descriptor(
        base, shape=[x.r, x.c], strides=[tl.cast(x.c, tl.int64), 1], block_shape=[ROWS, COLS]
    )


@triton.jit
def _send_to(dst, tile, coord, rank, world, ADD: tl.constexpr):
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    if dst.tma:
        desc = _descriptor(dst, coord, rank, world, ROWS, COLS)
        if ADD:
            desc.atomic_add([coord[2] * ROWS, coord[3] * COLS], tile)
        else:
            desc.store([coord[2] * ROWS, coord[3] * COLS], tile)
    else:
        ptrs, inside = _elements(dst, coord, ROWS, COLS)
        if ADD:
            tl.atomic_add(address.of_rank(ptrs, rank, world), tile, mask=inside, sem="relaxed", scope="sys")
        else:
            tl.store(address.of_rank(ptrs, rank, world), tile, mask=inside)


@triton.jit
def _send(dst, tile, coord, world, peer, ADD: tl.constexpr):
    tile = tile.to(dst.ptr.dtype.element_ty)
    if peer is not None:
        ptx.near_only("a tile for a rank", world)
        _send_to(dst, tile, coord, peer, world, ADD)
    elif world.multicast and dst.tma:
        ptrs, inside = _elements(dst, coord, tile.shape[0], tile.shape[1])
        if ADD:
            multimem.multimem_reduce_add(ptrs, tile, world, mask=inside)
        else:
            multimem.multimem_store(ptrs, tile, world, mask=inside)
    else:
        ptx.near_only("a tile for all ranks' memory", world)
        for i in tl.static_range(1, world.size + 1):
            _send_to(dst, tile, coord, (world.rank + i) % world.size, world, ADD)


@triton.jit
def store_async(dst, tile, coord, world, peer=None):
    """Store tile [R, C] into rank `peer`'s array, or into every rank's (peer=None).

    dst: Layout; tile: 2-D block, cast to the element type; coord: (b, d, r, c).
    TMA: `cp.async.bulk.tensor.2d.global.shared::cta.bulk_group`. To every rank: `multimem.st` where `world.multicast`,
    else a TMA store to each. Making the descriptor takes 13 `tensormap.replace` and a fence, which the compiler hoists
    while dst and coord[0:2] do not change. For many tiles make one descriptor before the loop.
    """
    _send(dst, tile, coord, world, peer, False)


@triton.jit
def store_add_async(dst, tile, coord, world, peer=None):
    """Add tile [R, C] to rank `peer`'s array, or to every rank's: each element atomically, in no fixed order, rounded
    at every addition. TMA: `cp.reduce.async.bulk.tensor.2d...add`; to every rank `multimem.red` where
    `world.multicast`."""
    _send(dst, tile, coord, world, peer, True)


@triton.jit
def _load_reduce(src, coord, world, ROWS: tl.constexpr, COLS: tl.constexpr, op: tl.constexpr):
    ptrs, inside = _elements(src, coord, ROWS, COLS)
    if src.tma:
        return multimem.multimem_load_reduce(ptrs, world, op, mask=inside)
    else:
        return multimem._load_reduce_by_rank(ptrs, world, op, inside)


@triton.jit
def reduce(dst, dst_coord, src, src_coord, world, ROWS: tl.constexpr, COLS: tl.constexpr, op: tl.constexpr = _ADD):
    """Reduce the tile at `src_coord` of every rank's `src`, in the switch or rank by rank with fp32 accumulation, into
    my own `dst` at `dst_coord`. op: "add", "min", "max"."""
    value = _load_reduce(src, src_coord, world, ROWS, COLS, op)
    ptrs, inside = _elements(dst, dst_coord, ROWS, COLS)
    tl.store(ptrs, value.to(dst.ptr.dtype.element_ty), mask=inside)


@triton.jit
def all_reduce(x, coord, world, ROWS: tl.constexpr, COLS: tl.constexpr, op: tl.constexpr = _ADD):
    """Reduce the tile at `coord` of every rank's `x` and write it back to every rank's `x`. One rank calls this for a
    tile, after all ranks have published theirs."""
    value = _load_reduce(x, coord, world, ROWS, COLS, op)
    ptrs, inside = _elements(x, coord, ROWS, COLS)
    if x.tma:
        multimem.multimem_store(ptrs, value, world, mask=inside)
    else:
        for i in tl.static_range(1, world.size + 1):
            tl.store(address.of_rank(ptrs, (world.rank + i) % world.size, world), value, mask=inside)


@triton.jit
def _counter(bar, coord):
    return _plane(bar, coord) + tl.cast(coord[2], tl.int64) * bar.c + coord[3]


@triton.jit
def signal(bar, coord, peer, world, value=1):
    """`pl.signal` on the counter at element `coord` of rank `peer`'s int32 layout `bar`."""
    sync.signal(_counter(bar, coord), peer, world, value)


@triton.jit
def signal_all(bar, coord, world, value=1):
    """`pl.signal_all` on the counter at element `coord` of every rank's `bar`."""
    sync.signal_all(_counter(bar, coord), world, value)


@triton.jit
def wait(bar, coord, at_least, world):
    """`pl.wait` on the counter at element `coord` of my `bar`; returns the value found."""
    return sync.wait(_counter(bar, coord), at_least, world)


@triton.jit
def barrier(bar, coord, world):
    """`pl.barrier` on the counter at element `coord` of `bar`, for the programs that call it with this `coord`."""
    sync.barrier(_counter(bar, coord), world)
