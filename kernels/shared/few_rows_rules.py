"""Rules of the products' form "low_latency": where it runs, its tiles, the tuner's candidates, its predicted time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton

from pkt.model.config import Config, space
from pkt.model.cost import Estimate
from pkt.model.gpu import Gpu

from .product_rules import Key, dtype_of, scattered
from .tile_product import FP32_TILES, UNALIGNED_TILES, Tiles, whole_rows

MOST_ROWS = 256
"""Rows of A up to which the tuner tries the form. With more the tensor cores are the limit, not the weights' bytes."""
MOST_RANKS = 8
"""A program takes a tile of every rank into registers."""
BLOCK = (8, 2048)
"""Of A that a program stores at a time into every inbox: so much that few programs signal, because signals to one
counter come one after the other."""
PREFETCH = 64 << 10
"""Bytes of weights that a gathering program asks for before it waits for A. On 2 x H200 that saves up to 1 us of 17 to
75, twice or four times as much saves nothing more; where tiles are reduced it saves nothing."""
WIDE = 12_000
"""Columns from which a tile has 128 of them: there are then enough tiles for most SMs. These tiles were the fastest of
five to eight for 2 to 128 rows of five products on 2 x H200, weights from 17 to 235 MB."""
SPLITS = (1, 2, 4, 8)
"""Parts of K that the programs of a tile may take."""
LEAST_STEPS = 4
"""Steps of BLOCK_K that a part of K has at least."""


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
    return Tiles(block_m, 64, 128, num_stages=6) if block_m > 16 else Tiles(block_m, 64, 256, num_warps=4, num_stages=5)


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
    """The predicted time, where a rank sends so many bytes."""

    def seconds(config: Mapping[str, Any], key: Key, gpu: Gpu) -> Estimate:
        itemsize = dtype_of(key).itemsize
        nbytes = itemsize * (key["M"] * key["K"] + key["K"] * key["N"] + key["M"] * key["N"])
        moving = sent(key) / gpu.link
        return Estimate(gpu.launch, 0.0, nbytes / gpu.memory, moving, sync=2 * gpu.signal)

    return seconds


def in_one_shot(key: Key) -> float:
    """Bytes that leave a GPU where each rank sends its whole product to every other."""
    return key["size"] * scattered(key)
