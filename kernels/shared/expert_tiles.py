"""Tiles of a grouped product, found from `offsets` on the device, so that the host need not know any expert's rows."""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_product import tile_pointers


@triton.jit
def rows_of(offsets_ptr, expert, experts, M):
    """The first row of `expert` and the one behind its last, whatever the offsets are: inside of x, and in order."""
    start = tl.load(offsets_ptr + expert, mask=expert < experts, other=0)
    stop = tl.load(offsets_ptr + expert + 1, mask=expert < experts, other=0)
    start = tl.maximum(start, 0)
    return start, tl.maximum(tl.minimum(stop, M), start)


@triton.jit
def ends_of(offsets_ptr, experts, M, columns, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Tiles of each expert and of those before it, (EXPERTS,), if the result has so many columns of tiles."""
    starts, stops = rows_of(offsets_ptr, tl.arange(0, EXPERTS), experts, M)
    return tl.cumsum(tl.cdiv(stops - starts, BLOCK_M) * columns)


@triton.jit
def find(
    tile, ends, offsets_ptr, experts, M, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """(the expert of a tile, its first row and column, the row behind the expert's last). GROUP rows of tiles run over
    all columns together."""
    before = ends <= tile
    expert = tl.sum(before.to(tl.int32))
    inside = tile - tl.max(tl.where(before, ends, 0))
    start, stop = rows_of(offsets_ptr, expert, experts, M)
    rows = tl.cdiv(stop - start, BLOCK_M)
    group = inside // (GROUP * columns) * GROUP
    high = tl.minimum(rows - group, GROUP)
    inside = inside % (GROUP * columns)
    return expert, start + (group + inside % high) * BLOCK_M, inside // high * BLOCK_N, stop


@triton.jit
def clear_from(end, out_ptr, R, N):
    """Zeros for the rows of `out_ptr` (R, N) from `end` on, which no expert has."""
    ROWS: tl.constexpr = 16
    COLS: tl.constexpr = 256
    for row in range(end + tl.program_id(0) * ROWS, R, tl.num_programs(0) * ROWS):
        for col in range(0, N, COLS):
            ptrs, inside = tile_pointers(out_ptr, row, col, R, N, N, ROWS, COLS)
            tl.store(ptrs, tl.zeros((ROWS, COLS), out_ptr.dtype.element_ty), mask=inside)
