"""Scales of fp8 products in the Gluon forms: what a consumer multiplies its half of a tile by, see scales.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import pkt.language as pl

from .gluon_aggregate import aggregate
from .scales import half_of, put_block

CONSUMERS = gl.constexpr(2)
"""Of a program; each has half of a tile's rows."""


@aggregate
class Scaling:
    """What sums of fp8 products are multiplied by."""

    a: gl.tensor  # pointer to fp32; or to int32, words of `pl.put_flagged` that hold the bits of fp32
    b: gl.tensor  # pointer to fp32
    m: gl.tensor  # rows of a part of A
    flag: gl.tensor  # of the words, or None
    world: gl.tuple
    A_EACH: gl.constexpr  # a row of A has a scale of its own
    B_EACH: gl.constexpr  # a column of B has

    @gluon.jit
    def of_a(self, place, mask):
        """Those of A at `place`, fp32, once they are there."""
        if self.flag is None:
            found = gl.load(self.a + place, mask=mask)
        else:
            word = pl.take_flagged(self.a + 2 * place, self.flag, self.world, mask, values=1)
            found = word[0].to(gl.float32, bitcast=True)
        return found

    @gluon.jit
    def applied(self, half, CONSUMER: gl.constexpr, t, col, N, order):
        """A consumer's half of tile t, fp32, which begins at column `col`, times the scales of its rows and columns."""
        part, i = order.rows(t)
        if not self.A_EACH:
            half *= self.of_a(0 if self.flag is None else part, None)
        else:
            rows = gl.arange(0, half.shape[0], layout=gl.SliceLayout(1, half.type.layout))
            rows += (i * CONSUMERS + CONSUMER) * half.shape[0]
            half *= self.of_a(part * self.m + rows, rows < self.m)[:, None]
        if not self.B_EACH:
            half *= gl.load(self.b)
        else:
            cols = col + gl.arange(0, half.shape[1], layout=gl.SliceLayout(0, half.type.layout))
            half *= gl.load(self.b + cols, mask=cols < N, other=0)[None, :]
        return half


@gluon.jit
def open_scales(scales, m, world):
    """By a kernel's scales.Scales, for a part of A of m rows, or several."""
    return Scaling(scales.a_ptr, scales.b_ptr, m, None, world, scales.A_EACH, scales.B_EACH)


@gluon.jit
def exchange_scales(scales, words_ptr, m, epoch, world, num_warps: gl.constexpr):
    """By a kernel's scales.Scales, with A's of all ranks, whose shards have m rows each. The programs put this rank's
    into the words of every rank, its own as well; a tile takes those that it needs."""
    THREADS: gl.constexpr = 32 * num_warps
    count, half = half_of(scales, words_ptr, m, world, epoch)
    for first in range(gl.program_id(0) * THREADS, count, gl.num_programs(0) * THREADS):
        at = first + gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [num_warps], [0]))
        put_block(scales, half, at, count, world, epoch)
    return Scaling(half, scales.b_ptr, m, epoch, world, scales.A_EACH, scales.B_EACH)
