"""How tensors lie in memory: `layout` for tiles of `pkt.language.tile`, `interleave` for epilogue "swiglu"."""

from __future__ import annotations

import torch
import triton.language as tl

from pkt.errors import DtypeError, ShapeError
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


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """One weight of two, or one bias of two, for `pkt.all_gather_matmul(epilogue="swiglu")`: column 2j is gate's column
    j, and 2j + 1 is up's.

    gate, up: of one shape, dtype and device: weights (k, n), both contiguous or both the transposed view of a
    contiguous tensor, as w.t() of nn.Linear's weight; or biases (n,). Returns a new tensor (k, 2 * n), which lies in
    memory as they do, or (2 * n,); it shares no memory with them. Call it once, where the weights are loaded. Raises
    ShapeError, DtypeError.
    """
    if gate.ndim not in (1, 2) or gate.shape != up.shape:
        found, wanted = f"{tuple(gate.shape)} and {tuple(up.shape)}", "two of one shape, (k, n) or (n,)"
        raise ShapeError.argument("pkt.interleave", "gate and up", found, wanted)
    if gate.dtype != up.dtype:
        raise DtypeError.argument("pkt.interleave", "up", up.dtype, f"gate's, {gate.dtype}")
    if all(x.ndim == 2 and not x.is_contiguous() and x.t().is_contiguous() for x in (gate, up)):
        return torch.stack((gate.t(), up.t()), dim=1).flatten(0, 1).t()
    return torch.stack((gate, up), dim=-1).flatten(-2)
