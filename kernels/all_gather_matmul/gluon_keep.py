"""The keeper of the Gluon kernel in `gluon`: two warps of each program copy a share of A as it arrives (see `kept`)."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import pkt.language as pl

from ..shared.gluon_aggregate import aggregate

KEPT = gl.constexpr(32)
"""Rows of a block of A that the keeper's two warps copy at a time, in the registers that they have."""


class Keeping(NamedTuple):
    """Where A is while it is gathered, and where it is kept."""

    shard_ptr: Any  # (m, K) this rank's
    inbox_ptr: Any  # (size, m, K) this rank's, as copies.Gathering has it
    whole_ptr: Any  # (size, m, K) this rank's


@aggregate
class Keep:
    """`Keeping`, whose pointers are None where A is not kept, in blocks of rows and columns."""

    shard: gl.tensor
    inbox: gl.tensor
    whole: gl.tensor
    BLOCK_M: gl.constexpr
    BLOCK_K: gl.constexpr
    RUN: gl.constexpr  # elements in 16 bytes, of which rows of A have a whole number

    @gluon.jit
    def copy(self, source, i, k, order):
        """Keep row block i of a source's shard, from column k on, which is here."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, self.RUN], [4, 8], [gl.num_warps(), 1], [1, 0])
        row = gl.arange(0, KEPT, layout=gl.SliceLayout(1, LAYOUT))
        column = gl.arange(0, self.BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))
        runs = order.K // self.RUN
        offset = row[:, None] * (runs * self.RUN) + column[None, :]
        inside = (column // self.RUN < runs - k // self.RUN)[None, :]
        given = gl.where(source == order.rank, self.shard, self.inbox + self.place(source, 0, order))
        for first in range(i * self.BLOCK_M, (i + 1) * self.BLOCK_M, KEPT):
            there = (row < order.m - first)[:, None] & inside
            values = gl.load(given + self.place(0, first, order) + k + offset, mask=there)
            gl.store(self.whole + self.place(source, first, order) + k + offset, values, mask=there)

    @gluon.jit
    def place(self, source, row, order):
        """Where a row of a source's shard begins, in elements."""
        return gl.cast(source * order.m + row, gl.int64) * (order.K // self.RUN * self.RUN)


@gluon.jit
def keep_share(keep, order, signals):
    if keep.whole is not None:
        units = gl.cdiv(order.K, keep.BLOCK_K)
        blocks = order.num_m * units
        for t in range(gl.program_id(0), order.SIZE * blocks, gl.num_programs(0)):
            source = (order.rank + order.SIZE - t // blocks) % order.SIZE  # in the order of their arrival
            i = t % blocks // units
            k = t % units * keep.BLOCK_K
            if source != order.rank:
                pl.wait(signals.ptr + order.counter(source, i) + k // order.CHUNK, signals.epoch, signals.world)
            keep.copy(source, i, k, order)
