"""The tiles of matmul_all_reduce's Gluon form, and how far a rank's own lag; up to how many rows nothing is fused."""

from __future__ import annotations

import triton

from pkt.runtime.world import World

from ..all_gather_matmul.rules import tile_seconds
from ..matmul_reduce_scatter.rules import lag_of
from ..shared.gluon_fits import NARROW, TILES, check_tiles
from ..shared.grid import num_programs
from ..shared.tile_product import Tiles

CALL = "matmul_all_reduce"
WIDE = TILES._replace(group=16)
ARRIVES = 10e-6
"""Seconds from the end of a tile of another's until all parts of it are where they are added, unless the links are the
limit. To wait for longer costs, too: by benchmarks/results/exhaustive_matmul_all_reduce.json, 16384 x 16384 on 4 ranks
takes 3.23 ms with a quarter of a round, 3.41 with half and 3.54 with a whole one."""


def links_limit(M: int, N: int, size: int) -> bool:
    """Whether an M x N output takes longer to move than to compute. On H200 that is up to 8192 x 8192 on 4 ranks and
    4096 x 4096 on 2, by benchmarks/results/exhaustive_matmul_all_reduce*.json."""
    return M * N <= (2048 * size) ** 2


def tiles_of(M: int, N: int, size: int) -> Tiles:
    """The tiles for an M x N output."""
    return NARROW if links_limit(M, N, size) else WIDE


def rounds_of(M: int, N: int, K: int, size: int, tiles: Tiles) -> float:
    """Rounds of all programs that own tiles are behind: two of narrow ones; of wide ones one where the links are the
    limit, else as few quarters as parts take to arrive."""
    if tiles.block_n <= NARROW.block_n:
        return 2
    if links_limit(M, N, size):
        return 1
    return next((part for part in (0.25, 0.5) if part * tile_seconds(K, tiles) >= ARRIVES), 1)


def settings(M: int, N: int, K: int, world: World, tiles: Tiles | None, lag: int | None) -> tuple[Tiles, int]:
    """`tiles` and `lag`, or what follows from the shapes by `tiles_of` and `rounds_of`. Raises ShapeError."""
    tiles = tiles or tiles_of(M, N, world.size)
    check_tiles(CALL, tiles, world)
    tiles_of_all = triton.cdiv(M, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    programs = num_programs(world, tiles_of_all or 1)
    rounds = rounds_of(M, N, K, world.size, tiles)
    return tiles, lag_of(CALL, lag, rounds, triton.cdiv(tiles_of_all, world.size), programs, world)


def unfused_rows(size: int) -> int:
    """Rows up to which the product and its all-reduce, left to choose, are not fused. By benchmarks/results/*.json of
    4 x H200: unfused takes 46, 52 and 64 us for 1, 16 and 128 rows, 246 for 1024, the fastest fused form 67, 68, 64 and
    223. On 2, for 1024 rows 363 us, where the fastest fused form takes 392."""
    return 1024 if size == 2 else 128
