"""Rows of a dispatch's result that no token fills."""

from __future__ import annotations

import triton
import triton.language as tl

from . import scales


@triton.jit
def clear(row, to, p, MANY: tl.constexpr):
    """Zeros for a row and its scales, MANY elements at a time."""
    for col in range(0, p.H, MANY):
        cols = col + tl.arange(0, MANY)
        zeros = tl.zeros((MANY,), to.rows.dtype.element_ty)
        tl.store(to.rows + tl.cast(row, tl.int64) * p.H + cols, zeros, mask=cols < p.H)
    if p.SCALED:
        scales.clear(row, to, p)


@triton.jit
def mark(rows, end, to):
    """Weight 0 and source -1 for those of `rows` that are below `end`."""
    tl.store(to.weights + rows, tl.zeros_like(rows).to(tl.float32), mask=rows < end)
    for i in tl.static_range(3):
        tl.store(to.source + 3 * tl.cast(rows, tl.int64) + i, tl.zeros_like(rows) - 1, mask=rows < end)
