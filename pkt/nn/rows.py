"""Tokens as rows: the operators take (rows, features) and split rows; a model splits any dimension of its tensors.

Rows lie in the order of the ranks. If the dimension is the first, or those before it have one element, that is the
order of the tensor, too, and nothing is copied. Otherwise the gathered result, or what is reduced, is copied once.
"""

from __future__ import annotations

import math

import torch

from pkt.errors import DtypeError, ShapeError
from pkt.runtime.world import World
from pkt.wording import found_text


def rows(x: torch.Tensor) -> torch.Tensor:
    """x (..., k) as (rows, k), contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def dimension(call: str, x: torch.Tensor, dim: int, world: World) -> int:
    """`dim` of x as a number from 0. Raises ShapeError for the last one, and one that x lacks, and DtypeError."""
    if not isinstance(dim, int):
        raise DtypeError.argument(call, "sequence_dim", found_text(dim), "an integer", world.rank)
    found = dim + x.ndim if dim < 0 else dim
    if not 0 <= found < x.ndim - 1:
        said, wanted = f"x {tuple(x.shape)} and sequence dimension {dim}", "a dimension of x before the last"
        raise ShapeError.argument(call, "x", said, wanted, world.rank)
    return found


def from_ranks(y: torch.Tensor, shape: torch.Size, dim: int, size: int) -> torch.Tensor:
    """y (size * rows, n), the ranks' rows in turn, as shape[:-1] + (n,) with `size` times dimension `dim`. shape: of
    a rank's part."""
    before, n = shape[:dim], y.shape[-1]
    whole = (*before, size * shape[dim], *shape[dim + 1 : -1], n)
    if math.prod(before) == 1:
        return y.view(whole)
    return y.view(size, math.prod(before), math.prod(shape[dim:-1]), n).transpose(0, 1).reshape(whole)


def to_ranks(call: str, x: torch.Tensor, dim: int, world: World) -> torch.Tensor:
    """x (..., k) as (rows, k), such that the rows of each rank's part of dimension `dim` lie together, in the order of
    the ranks. Raises ShapeError."""
    if x.shape[dim] % world.size:
        found, wanted = f"x {tuple(x.shape)}", f"a multiple of {world.size} in dimension {dim}, one part a rank"
        raise ShapeError.argument(call, "x", found, wanted, world.rank)
    before = math.prod(x.shape[:dim])
    if before != 1:
        x = x.reshape(before, world.size, math.prod(x.shape[dim:-1]) // world.size, x.shape[-1]).transpose(0, 1)
    return rows(x)


def part_shape(shape: torch.Size, dim: int, size: int, features: int) -> tuple[int, ...]:
    """The shape of a rank's part of `shape`, with `features` in the last dimension."""
    return (*shape[:dim], shape[dim] // size, *shape[dim + 1 : -1], features)
