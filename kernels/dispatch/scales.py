"""Scales of tokens, which travel with them. Nothing here looks at them: they are the bits of fp32, as int32."""

from __future__ import annotations

import triton
import triton.language as tl

COLS = tl.constexpr(64)  # copied at a time


@triton.jit
def send(s_ptr, t, inside, to, p):
    """Store the scales of my tokens t (ROWS, 1) to `to` (ROWS, 1), pointers into any rank's memory."""
    for col in range(0, p.G, COLS):
        cols = col + tl.arange(0, COLS)[None, :]
        both = inside & (cols < p.G)
        bits = tl.load(s_ptr + tl.cast(t, tl.int64) * p.G + cols, mask=both)
        tl.store(to + cols, bits, mask=both)


@triton.jit
def place(s_ptr, t, arrived, own, inside, rows, to, p):
    """Copy the scales of tokens t (ROWS, 1) to their rows (ROWS, K2): from mine if `own`, or from `arrived`."""
    k = tl.arange(0, p.K2)[None, :]
    for col in range(0, p.G, COLS):
        cols = col + tl.arange(0, COLS)[None, :]
        both = inside & (cols < p.G)
        found = arrived
        if own:
            found = s_ptr + tl.cast(t, tl.int64) * p.G
        bits = tl.load(found + cols, mask=both)
        for number in tl.static_range(p.K):
            target = tl.sum(tl.where(k == number, rows, 0), 1)[:, None]
            tl.store(to.scales + tl.cast(target, tl.int64) * p.G + cols, bits, mask=both & (target >= 0))


@triton.jit
def clear(row, to, p):
    """Zeros for a row's."""
    for col in range(0, p.G, COLS):
        cols = col + tl.arange(0, COLS)
        tl.store(to.scales + tl.cast(row, tl.int64) * p.G + cols, tl.zeros((COLS,), tl.int32), mask=cols < p.G)
