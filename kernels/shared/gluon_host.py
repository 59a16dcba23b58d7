"""The host side of the Gluon forms: the TMA descriptors of what they take. Where they can run is in gluon_fits."""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pkt.runtime.launch.passing import lasts
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from .checks import stored
from .fp8 import FP8
from .gluon_fits import MAX_PEERS
from .gluon_warps import CONSUMERS, Constants
from .tile_product import GatedEpilogue, Tiles

CONSUMER_WARPS = 4
"""Of each consumer."""
DTYPES = {
    torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32, FP8: gl.float8e4nv
}  # fmt: skip


def weights_descriptor(b: torch.Tensor, tiles: Tiles) -> TensorDescriptor:
    """A descriptor of `b` (K, N), which is stored so, or as (N, K)."""
    rows, transposed = stored(b)
    return descriptor(rows, (tiles.block_n, tiles.block_k) if transposed else (tiles.block_k, tiles.block_n))


def everywhere(tensor: SymmetricTensor, block: tuple[int, ...], world: World) -> list[TensorDescriptor]:
    """Descriptors of a tensor on this rank, and on the MAX_PEERS next ones: ranks rank + 1, rank + 2, ...; where there
    are fewer this rank's again."""
    theirs = [tensor.peer((world.rank + d) % world.size, world) for d in range(1, world.size)]
    return here(tensor.plain(), block, *theirs)


def here(tensor: torch.Tensor, block: tuple[int, ...], *others: torch.Tensor) -> list[TensorDescriptor]:
    """As many descriptors as from `everywhere`: of this tensor, of the others, and of this one for the rest. They last:
    no launch may lend them another tensor."""
    own = lasts(descriptor(tensor, block))
    theirs = [lasts(descriptor(other, block)) for other in others]
    return [own, *theirs, *[own] * (MAX_PEERS - len(theirs))]


def kernel_constants(tiles: Tiles, b: torch.Tensor, epilogue: GatedEpilogue) -> Constants:
    """The `constants` argument of a kernel."""
    return Constants(*map(gl.constexpr, (tiles.num_stages, tiles.group, stored(b)[1], epilogue)))


def half_block(tiles: Tiles) -> tuple[int, int]:
    """A consumer's half of a tile."""
    return tiles.block_m // CONSUMERS.value, tiles.block_n


@functools.cache
def layout(dtype: torch.dtype, *block: int) -> Any:
    """The shared layout of a TMA block."""
    return gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[dtype])


def descriptor(tensor: torch.Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """A TMA descriptor of `tensor` (contiguous). Its checks take as long as a launch, so a plan makes it once, and
    lends it each launch's tensor as `base`. The launch reads only that tensor's address."""
    swizzle = layout(tensor.dtype, *block)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block), swizzle)
