"""The host side of the Gluon forms: the TMA descriptors of what they take.

Written for Triton 3.6: later versions renamed parts of Gluon. Where they can run is in gluon_fits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .checks import stored
from .gluon_fits import MAX_PEERS
from .gluon_warps import CONSUMERS
from .tile_product import Tiles

CONSUMER_WARPS = 4
"""Of each consumer."""
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


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
