"""How tensors lie in memory: `layout` for tiles of `pkt.language.tile`, `interleave` for epilogue "swiglu",
`join_heads` for `matmul_all_to_all`."""

from __future__ import annotations

import torch
import triton.language as tl

from pkt.errors import DtypeError, ShapeError
from pkt.language.tile import Layout
from pkt.runtime.memory.checks import symmetric
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import check_counts, current_world


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
    for name, weight in (("gate", gate), ("up", up)):
        if not isinstance(weight, torch.Tensor) or weight.layout is not torch.strided:
            found = f"layout {weight.layout}" if isinstance(weight, torch.Tensor) else type(weight).__name__
            raise DtypeError.argument("pkt.interleave", name, found, "a dense tensor")
    if gate.ndim not in (1, 2) or gate.shape != up.shape:
        found, wanted = f"{tuple(gate.shape)} and {tuple(up.shape)}", "two of one shape, (k, n) or (n,)"
        raise ShapeError.argument("pkt.interleave", "gate and up", found, wanted)
    if gate.dtype != up.dtype:
        raise DtypeError.argument("pkt.interleave", "up", up.dtype, f"gate's, {gate.dtype}")
    if gate.device != up.device:
        raise DtypeError.argument("pkt.interleave", "up", f"a tensor on {up.device}", f"one on {gate.device}, as gate")
    if all(x.ndim == 2 and not x.is_contiguous() and x.t().is_contiguous() for x in (gate, up)):
        return torch.stack((gate.t(), up.t()), dim=1).flatten(0, 1).t()
    return torch.stack((gate, up), dim=-1).flatten(-2)


def join_heads(*weights: torch.Tensor, ranks: int) -> torch.Tensor:
    """One weight of those of queries, keys and values, or one bias of three, for `pkt.matmul_all_to_all` on so many
    ranks: the heads of rank 0 first, in the order of `weights`, then those of rank 1.

    weights: (K, H, D) of one K and D, or biases (H, D); of one dtype. Each has its own number of heads H, a multiple or
    a divisor of `ranks`. A head of fewer heads than ranks is in the result for each rank that needs it: rank r gets
    head r * H // ranks. Returns a new tensor (K, ranks * h, D), or (ranks * h, D); what a rank then gets of h heads is
    `result.split([max(H // ranks, 1) for each H], 2)`. Call it once, where the weights are loaded. Raises ShapeError,
    DtypeError.
    """
    call, first = "pkt.join_heads", weights[0] if weights else None
    check_counts(call, ranks=ranks)
    for at, weight in enumerate(weights):
        if not isinstance(weight, torch.Tensor):
            raise DtypeError.argument(call, f"weights[{at}]", type(weight).__name__, "a tensor")
    if first is None or first.ndim not in (2, 3):
        found = "none" if first is None else tuple(first.shape)
        raise ShapeError.argument(call, "weights", found, "tensors (K, H, D), or (H, D)")
    parts = []
    for at, weight in enumerate(weights):
        shape, heads = tuple(weight.shape), weight.shape[-2] if weight.ndim > 1 else 0
        if weight.ndim != first.ndim or (*shape[:-2], shape[-1]) != (*first.shape[:-2], first.shape[-1]):
            wanted = f"all but the number of heads as in weights[0], {tuple(first.shape)}"
            raise ShapeError.argument(call, f"weights[{at}]", shape, wanted)
        if not heads or (heads % ranks and ranks % heads):
            wanted = f"a number of heads that is a multiple or a divisor of {ranks} ranks"
            raise ShapeError.argument(call, f"weights[{at}]", shape, wanted)
        if weight.dtype != first.dtype:
            raise DtypeError.argument(call, f"weights[{at}]", weight.dtype, f"that of weights[0], {first.dtype}")
        each = weight.repeat_interleave(max(ranks // heads, 1), -2)
        parts.append(each.unflatten(-2, (ranks, -1)))
    return torch.cat(parts, -2).flatten(-3, -2)
