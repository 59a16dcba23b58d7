"""Rules of the products' form "low_latency": where it runs, its tiles, the tuner's candidates, its predicted time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton

from pkt.model.config import Config, space
from pkt.model.cost import Estimate, Product
from pkt.model.gpu import Gpu

from .product_rules import Key, dtype_of, scattered
from .tile_product import FP32_TILES, UNALIGNED_TILES, Tiles, whole_rows

MOST_ROWS = 256
"""Rows of A up to which the tuner tries the form. With more the tensor cores are the limit, not the weights' bytes."""
MOST_RANKS = 8
"""A program takes a tile of every rank into registers."""
BLOCK = (8, 2048)
"""Rows and columns of A that a program stores into every inbox at a time. The block is large, so that few programs
signal: atomics on one counter are serialised."""
PREFETCH = 64 << 10
"""Bytes of weights that a program of `gather_kernel` prefetches before it waits for A. On 2 x H200 this saves up to 1
us of 17 to 75. A larger prefetch saves nothing, nor does one in `reduce_kernel`
(benchmarks/results/low_latency_tried_2.json)."""
WIDE = 12_000
"""From so many columns on a tile is 128 columns wide, because there are tiles for most SMs. For up to 128 rows and
weights of 67 MB and more on 2 x H200, tiles and parts of K by these rules were within 3 % of the fastest tried (the
same file). With 64 tiles and smaller weights one part of K instead of two would be up to 11 % faster. Narrower products
of 17 to 32 rows take up to 21 % less time in tiles of 32 x 64 x 256 than of 32 x 64 x 128, and in one case of twelve 2
% more (low_latency_tried_17_to_128_rows_2.json)."""
SPLITS = (1, 2, 4, 8)
"""Parts of K that the programs of a tile may take."""
SM_READS = 55e9
"""Bytes a second that one SM reads from memory. With 16 rows on 2 x H200, 80 SMs read 131 MB in 52 us; 132 SMs take two
rounds and 122 us for 144 units of 302 MB (benchmarks/results/zoo_calibration_2.json)."""
LEAST_STEPS = 4
"""The least number of steps of BLOCK_K in a part of K."""


def tiles_of(M: int, N: int, dtype: torch.dtype) -> Tiles:
    """The tiles of an (M, N) product: as high as all rows, up to 128, and as many weights in flight as shared memory
    holds."""
    block_m = min(128, max(16, triton.next_power_of_2(M)))
    if dtype == torch.float32 or not whole_rows(dtype, N):
        tiles = FP32_TILES if dtype == torch.float32 else UNALIGNED_TILES
        return tiles._replace(block_m=min(block_m, tiles.block_m))
    wide = N >= WIDE
    if block_m > 64:
        return Tiles(block_m, 128, 128, num_stages=3) if wide else Tiles(block_m, 64, 64, num_stages=8)
    if wide:
        return Tiles(block_m, 128, 128, num_stages=4)
    if block_m > 32:
        return Tiles(block_m, 64, 128, num_stages=6)
    return Tiles(block_m, 64, 256, num_warps=4, num_stages=5 if block_m == 16 else 4)


def split_of(M: int, N: int, K: int, tiles: Tiles, programs: int) -> int:
    """Parts of K for each tile: as few as keep half of the programs busy."""
    count = triton.cdiv(M, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    steps = triton.cdiv(K, tiles.block_k)
    enough = (split for split in SPLITS if 2 * count * split >= programs or steps < 2 * LEAST_STEPS * split)
    return next(enough, SPLITS[-1])


def ahead(tiles: Tiles, itemsize: int) -> int:
    """Rows of weights that a program asks for ahead: a power of two."""
    return max(tiles.block_k, 1 << (PREFETCH // (tiles.block_n * itemsize)).bit_length() - 1)


def space_few(key: Key, gpu: Gpu) -> list[Config]:
    """Candidates for the tuner."""
    if key["M"] > MOST_ROWS or key["size"] > MOST_RANKS:
        return []
    dtype = dtype_of(key)
    tiles = tiles_of(key["M"], key["N"], dtype)
    found = {tiles, tiles._replace(block_n=max(tiles.block_n // 2, 16)), tiles._replace(block_n=2 * tiles.block_n)}
    fits = [t for t in found if t.num_stages * t.block_k * (t.block_m + t.block_n) * dtype.itemsize <= gpu.shared]
    return space(mode="low_latency", split_k=list(SPLITS), tiles=[tuple(t) for t in fits])


def seconds_few(sent: Callable[[Key], float]) -> Callable[[Mapping[str, Any], Key, Gpu], Estimate]:
    """The predicted time. sent: bytes that leave a rank. A unit is one tile with one part of K. Its time is that of the
    tile's loop, or of its weights' way to one SM. A round of units takes at least the time in which memory delivers all
    its weights; row blocks share them. What is sent in the last round, or before the first, nothing hides."""

    def seconds(config: Mapping[str, Any], key: Key, gpu: Gpu) -> Estimate:
        M, N, K = math.ceil(key["M"]), key["N"], key["K"]
        tiles = Tiles(*config["tiles"]) if config.get("tiles") else tiles_of(M, N, dtype_of(key))
        split = config.get("split_k") or split_of(M, N, K, tiles, gpu.sms)
        case = Product.of({**key, "K": triton.cdiv(K, split)}, tiles)
        weights = case.block_n * case.K * case.itemsize
        unit = max(case.seconds(gpu, plain=True), weights / SM_READS)
        blocks = triton.cdiv(M, case.block_m)
        rounds, left = divmod(split * case.tiles(M), gpu.sms)

        def taken(units: int) -> float:
            return max(unit, units / blocks * weights / gpu.memory) if units else 0.0

        nbytes, moving = Product.of(key, tiles).memory_bytes, sent(key) / gpu.link
        return Estimate(
            gpu.launch, rounds * taken(gpu.sms) + taken(left), nbytes / gpu.memory, moving,
            exposed=moving / max(1, rounds), sync=2 * gpu.signal,
        )  # fmt: skip

    return seconds


def in_one_shot(key: Key) -> float:
    """Bytes that leave a GPU where each rank sends its whole product to every other."""
    return key["size"] * scattered(key)
