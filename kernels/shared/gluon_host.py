"""The host side of the Gluon forms: their tiles, and the TMA descriptors of what they take.

Written for Triton 3.6: later versions renamed parts of Gluon. Where they can run is asked in _forms.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pkt.errors import ShapeError
from pkt.runtime.world import World

from .gluon_warps import CONSUMERS
from .tile_product import Tiles, stored

MAX_PEERS = 7
"""Peers that a kernel has descriptors for: as many as an NVLink domain of eight GPUs needs."""
CONSUMER_WARPS = 4
"""Of each consumer."""
SHARED = 232448
"""Bytes of shared memory that a program may have on sm_90."""

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}

TILES = Tiles(128, 256, 64)
"""Where nothing else was found faster: `num_stages` slots of the ring."""

NARROW = Tiles(128, 128, 64, num_stages=6)

BLOCKS = ((128, 256, 64), (128, 128, 64))


def shared_bytes(tiles: Tiles) -> int:
    """Of the ring, the outbox and the barriers."""
    slot = tiles.block_k * (tiles.block_m + tiles.block_n)
    return 2 * tiles.num_stages * slot + tiles.block_m * tiles.block_n + 512


def check_tiles(call: str, tiles: Tiles, world: World) -> None:
    """ShapeError unless the Gluon forms can take `tiles`."""
    used = shared_bytes(tiles)
    wanted = (
        f"blocks of {' or '.join(map(str, BLOCKS))}" if tiles[:3] not in BLOCKS
        else f"{Tiles().num_warps} warps and their registers, as it is by default"
        if (tiles.num_warps, tiles.maxnreg) != (Tiles().num_warps, Tiles().maxnreg)
        else "group at least 1" if tiles.group < 1
        else f"at least 3 stages in {SHARED} bytes of shared memory" if tiles.num_stages < 3 or used > SHARED
        else ""
    )  # fmt: skip
    if wanted:
        raise ShapeError.argument(call, "tiles", tuple(tiles), wanted, world.rank)


def weights_descriptor(b: torch.Tensor, tiles: Tiles) -> TensorDescriptor:
    """Of `b` (K, N), which is stored so, or (N, K)."""
    rows, transposed = stored(b)
    return descriptor(rows, (tiles.block_n, tiles.block_k) if transposed else (tiles.block_k, tiles.block_n))


def peer_descriptors(tensors: Sequence[torch.Tensor], unused: torch.Tensor, block: tuple[int, ...]) -> list:
    """Descriptors for the MAX_PEERS that a kernel takes: of `tensors`, and of `unused` where there are fewer."""
    described = [descriptor(tensor, block) for tensor in tensors]
    return described + [descriptor(unused, block)] * (MAX_PEERS - len(described))


def half_block(tiles: Tiles) -> tuple[int, int]:
    """A consumer's half of a tile."""
    return tiles.block_m // CONSUMERS.value, tiles.block_n


@functools.cache
def layout(dtype: torch.dtype, *block: int) -> Any:
    """The shared layout of a TMA block."""
    return gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[dtype])


def descriptor(tensor: torch.Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """A TMA descriptor of `tensor` (contiguous). Its checks take as long as a launch, so a plan makes it once and lends
    it each launch's tensor as `base`, of which only the address is read, at the launch."""
    swizzle = layout(tensor.dtype, *block)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block), swizzle)
