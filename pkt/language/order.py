"""Tile orders: map a task index to its tile by integer arithmetic."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def supergroup(t, num_m, num_n, GROUP: tl.constexpr):
    """Task t of num_m x num_n tiles -> (m, n), in groups of GROUP tile rows, column by column within a group, so that
    programs that run together share rows and columns in L2. The last group may have fewer rows."""
    tiles = GROUP * num_n
    first = (t // tiles) * GROUP
    rows = tl.minimum(num_m - first, GROUP)
    return first + (t % tiles) % rows, (t % tiles) // rows


@triton.jit
def own_first(t, num_tasks, world):
    """Task t rotated: rank r begins at task `r * num_tasks // size`, its own shard if tasks are sharded evenly."""
    return (t + tl.cast(world.rank, tl.int32) * num_tasks // world.size) % num_tasks


@triton.jit
def own_last(t, num_tasks, world):
    """Task t rotated: rank r begins behind its own shard and ends with it, so that tiles for other ranks go first."""
    return (t + (tl.cast(world.rank, tl.int32) + 1) * num_tasks // world.size) % num_tasks


@triton.jit
def peers_interleaved(t, per_rank, world):
    """Task t of size * per_rank -> (rank, index): my own `per_rank` tasks first, then index by index with the other
    ranks innermost, in the order rank + 1, rank + 2, ..., in which evenly loaded links deliver."""
    rank = tl.cast(world.rank, tl.int32)
    others: tl.constexpr = max(world.size - 1, 1)
    q = t - per_rank
    own = q < 0
    return tl.where(own, rank, (rank + 1 + q % others) % world.size), tl.where(own, t, q // others)
