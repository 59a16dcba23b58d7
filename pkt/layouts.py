"""`pkt.layout`: a symmetric tensor as the parallel global layout that `pkt.language.tile` takes."""

from __future__ import annotations

import torch
import triton.language as tl

from pkt.errors import ShapeError
from pkt.language.tile import Layout
from pkt.runtime.memory.checks import symmetric
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import current_world


def layout(x: torch.Tensor) -> Layout:
    """`x` as a (b, d, r, c) array on every rank, for a kernel that moves tiles of it.

    x: symmetric and contiguous, 1 to 4 dimensions; missing ones are 1, from the left. Tiles move by TMA if every row
    begins at a multiple of 16 bytes. The layout shares the memory of x. Raises NotSymmetric, ShapeError.
    """
    world = x.world if isinstance(x, SymmetricTensor) else current_world("pkt.layout")
    symmetric(x, "x", world, call="pkt.layout")
    if not 1 <= x.ndim <= 4:
        raise ShapeError.argument("pkt.layout", "x", tuple(x.shape), "1 to 4 dimensions", world.rank)
    if not x.is_contiguous():
        raise ShapeError.argument("pkt.layout", "x", f"strides {tuple(x.stride())}", "a contiguous tensor", world.rank)
    b, d, r, c = (1,) * (4 - x.ndim) + tuple(x.shape)
    even = x.data_ptr() % 16 == 0 and (c * x.element_size()) % 16 == 0
    return Layout(ptr=x, b=b, d=d, r=r, c=c, tma=tl.constexpr(even))
