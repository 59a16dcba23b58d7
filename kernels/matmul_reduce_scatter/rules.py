"""How matmul_reduce_scatter's Gluon form sends its tiles: stored by the kernel or copied, and how far own tiles lag."""

from __future__ import annotations

import math

import triton

from pkt.errors import ShapeError
from pkt.runtime.world import World

from ..shared.gluon_fits import TILES, check_tiles
from ..shared.grid import num_programs
from ..shared.tile_product import Tiles

CALL = "matmul_reduce_scatter"
COPIES, COPIED_K, COPIED_BYTES = 2, 2048, 16 << 20
"""Copies that a part goes in, from which K and which size of a part on it is copied: the others' parts then take longer
to compute than to copy, and what each copy costs before it begins is little. The fastest of each in
benchmarks/results/exhaustive_matmul_reduce_scatter.json, of 4 x H200: copying takes 0.412 ms where storing takes 0.423
at K = 2048, of parts of 32 MiB, and 0.270 where that takes 0.225 at K = 1536, of 18 MiB; in its _2.json, of 2, 0.108
and 0.126 at K = 2048, of 16 MiB. Four copies take up to 1.2 % less than two, but there 8 % more."""


def copies_of(m: int, N: int, K: int, size: int) -> int:
    """Copies that a part (m, N), 16 bits an element, of the product of (size * m, K) and (K, N) goes in; 0: none."""
    return COPIES if size > 1 and K >= COPIED_K and 2 * m * N >= COPIED_BYTES else 0


def settings(
    m: int, N: int, K: int, world: World, tiles: Tiles | None, lag: int | None, copies: int | None = None
) -> tuple[Tiles, int, int]:
    """`tiles`, `lag` and `copies`, or what follows from the shapes as `copies_of` has them: copied, own tiles last, or
    own tiles a round behind. Raises ShapeError."""
    tiles = tiles or TILES
    check_tiles(CALL, tiles, world)
    count = triton.cdiv(m, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    programs = num_programs(world, world.size * count or 1)
    if copies is None:
        copies = copies_of(m, N, K, world.size) if lag is None else 0
    if copies < 0:
        raise ShapeError.argument(CALL, "copies", copies, "at least 0", world.rank)
    if copies and lag is not None:
        raise ShapeError.argument(CALL, "lag", lag, "none with copies", world.rank)
    return tiles, max(count, 1) if copies else lag_of(CALL, lag, 1, count, programs, world), copies


def lag_of(call: str, given: int | None, rounds: float, count: int, programs: int, world: World) -> int:
    """Tiles that a rank's own, of `count`, are behind the others': what is given, or those of so many rounds of all
    programs, in which the others compute and send theirs. At least 1: what a rank waits for was begun before,
    everywhere. Raises ShapeError."""
    if given is not None and given < 1:
        raise ShapeError.argument(call, "lag", given, "at least 1", world.rank)
    return max(1, min(math.ceil(rounds * programs / world.size) if given is None else given, count))
