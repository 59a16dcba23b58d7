"""Rows that have arrived, counted by blocks, for a product that begins with a block when all its rows are there.

The rows of each expert make blocks of HIGH rows; the last one of an expert may be lower. Blocks are numbered expert by
expert. A counter begins at 0 in each launch, and ends at the number of the block's rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import pkt.language as pl


class Arrived(NamedTuple):
    """Where rows are counted."""

    counts: Any  # int32 (blocks,): of each block the rows that are there
    blocks: Any  # at most: R / HIGH and one for each expert
    HIGH: tl.constexpr


@triton.jit
def spans(to, p):
    """Of each of this rank's experts, (OWN2,): its first row, and the one behind its last."""
    e = tl.arange(0, triton.next_power_of_2(p.OWN))
    start = tl.load(to.offsets + e, mask=e < p.OWN, other=0)
    return start, tl.load(to.offsets + e + 1, mask=e < p.OWN, other=0)


@triton.jit
def firsts(start, stop, HIGH: tl.constexpr):
    """Of each expert, of `spans`: its first block, and how many it has."""
    blocks = tl.cdiv(stop - start, HIGH)
    return tl.cumsum(blocks) - blocks, blocks


@triton.jit
def forget(arrived):
    """Begin at 0: before a barrier of the grid, behind which rows arrive."""
    MANY: tl.constexpr = 1024
    for first in range(tl.program_id(0) * MANY, arrived.blocks, tl.num_programs(0) * MANY):
        at = first + tl.arange(0, MANY)
        tl.store(arrived.counts + at, tl.zeros((MANY,), tl.int32), mask=at < arrived.blocks)


@triton.jit
def tell(rows, to, arrived, p, world):
    """These rows (n,) have been stored by this program; -1 for none."""
    start, stop = spans(to, p)
    first, _ = firsts(start, stop, arrived.HIGH)
    mine = (rows[:, None] >= start[None, :]) & (rows[:, None] < stop[None, :])
    block = tl.sum(tl.where(mine, first[None, :] + (rows[:, None] - start[None, :]) // arrived.HIGH, 0), 1)
    pl.atomic_add(arrived.counts + block, 1, world.rank, world, mask=rows >= 0, sem="release", scope="gpu")
