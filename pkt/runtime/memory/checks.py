"""`pkt.symmetric`: the check that a wrapper makes of an argument that peers access."""

from __future__ import annotations

from typing import Any

import torch

from pkt.errors import DtypeError, NotSymmetric, ShapeError
from pkt.runtime.memory.pool import adopt
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World


def symmetric(
    tensor: Any,
    name: str,
    world: World,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
    call: str = "",
) -> SymmetricTensor:
    """`tensor`, once it is known to be a live symmetric tensor of `world`, or of one that it is a team of, of `shape`
    and `dtype` where given.

    A tensor of the world's mem_pool comes back as a symmetric one over the same memory. Raises NotSymmetric,
    UseAfterFree, Closed, ShapeError or DtypeError, naming `name` and `call`.
    """
    rank = world.rank
    if isinstance(tensor, torch.Tensor) and not isinstance(tensor, SymmetricTensor):
        adopted = adopt(tensor, world)
        tensor = tensor if adopted is None else adopted
    if not isinstance(tensor, SymmetricTensor):
        raise NotSymmetric.argument(rank, name, _described(tensor), call)
    if tensor._allocation.heap.owner not in world.lineage:
        raise NotSymmetric.argument(rank, name, f"a symmetric tensor of another world, {tensor.symbol!r}", call)
    tensor._allocation.use(call or name)
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise ShapeError.argument(call or "call", name, tuple(tensor.shape), str(tuple(shape)), rank)
    if dtype is not None and tensor.dtype != dtype:
        raise DtypeError.argument(call or "call", name, tensor.dtype, str(dtype).removeprefix("torch."), rank)
    return tensor


def _described(found: object) -> str:
    if isinstance(found, torch.Tensor):
        return f"a plain tensor {tuple(found.shape)} {str(found.dtype).removeprefix('torch.')} on {found.device}"
    return f"{type(found).__name__} {found!r}"[:80]
