"""Rows that have arrived, counted by blocks, for a product that begins with a tile when all its rows are there.

A block is HIGH rows of the result, of any experts. A counter begins at 0 in each launch, and ends at the number of the
block's rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import pkt.language as pl


class Arrived(NamedTuple):
    """Where rows are counted."""

    counts: Any  # int32 (blocks,): of each block the rows that are there
    blocks: Any  # R / HIGH, rounded up
    HIGH: tl.constexpr


@triton.jit
def forget(arrived):
    """Begin at 0: before a barrier of the grid, behind which rows arrive."""
    MANY: tl.constexpr = 1024
    for first in range(tl.program_id(0) * MANY, arrived.blocks, tl.num_programs(0) * MANY):
        at = first + tl.arange(0, MANY)
        tl.store(arrived.counts + at, tl.zeros((MANY,), tl.int32), mask=at < arrived.blocks)


@triton.jit
def tell(rows, arrived, world):
    """These rows have been stored by this program; -1 for none."""
    at = arrived.counts + rows // arrived.HIGH
    pl.atomic_add(at, 1, world.rank, world, mask=rows >= 0, sem="release", scope="gpu")


@triton.jit
def wait(first, last, rows, arrived, world):
    """Until rows [first, last), some of all `rows`, are there."""
    for block in range(first // arrived.HIGH, tl.cdiv(last, arrived.HIGH)):
        pl.wait(arrived.counts + block, tl.minimum(rows - block * arrived.HIGH, arrived.HIGH), world)
