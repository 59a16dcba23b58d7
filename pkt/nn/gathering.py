"""A module's input that is gathered inside the products that take it.

A plan that gathers a module's input (PrepareModuleInput, Shard to Replicate) gives the module an `Ungathered` tensor:
one of the gathered shape, without its elements. A Linear of the plan that takes it runs all_gather_matmul on this
rank's part. The module's Linears share one gather. Any other use of the elements raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pkt.errors import Unsupported
from pkt.kernels.all_gather_matmul import all_gather_matmul
from pkt.runtime.world import World

from . import rows
from .exchange import autocast

_TENSOR: Any = torch.Tensor
_SHAPE_ONLY = frozenset(
    [getattr(_TENSOR, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")]
    + [getattr(_TENSOR, name) for name in ("size", "dim", "numel", "is_floating_point", "__len__", "__hash__")]
)


class Gather:
    """One input of one call of a module: this rank's part, and the products that were computed ahead."""

    def __init__(self, name: str, shard: torch.Tensor, dim: int, takers: Sequence[Any], world: World) -> None:
        """name: of the module. dim: of `shard`, along which the ranks' parts are one tensor. takers: the Linears that
        are expected to take the input."""
        self.name, self.shard, self.world = name, shard, world
        self.dim = rows.dimension(f"pkt.parallelize: {name!r}", shard, dim, world)
        self.takers = list(takers)
        self.ahead: list[tuple[Any, torch.Tensor]] = []

    def tensor(self) -> torch.Tensor:
        """What the module gets."""
        shape = list(self.shard.shape)
        shape[self.dim] *= self.world.size
        found: Any = self.shard.new_empty(()).expand(shape).as_subclass(Ungathered)
        found.source = self
        return found

    def product(self, linear: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The Linear's product with the gathered input. The first taker's call computes those of all takers."""
        for at, (one, y) in enumerate(self.ahead):
            if one is linear:
                del self.ahead[at]
                return y
        others = []
        if any(t is linear for t in self.takers):
            others = [t for t in self.takers if t is not linear and t.in_features == linear.in_features]
            others = [t for t in others if (t.bias is None) == (bias is None)]
        flat, *weights = autocast(rows.rows(self.shard), weight, *[t.local("weight") for t in others])
        weights = [w.t() for w in weights]
        biases = None if bias is None else list(autocast(bias, *[t.local("bias") for t in others]))
        if others:
            each = all_gather_matmul(flat, weights, bias=biases, world=self.world)
        else:
            alone = None if biases is None else biases[0]
            each = [all_gather_matmul(flat, weights[0], bias=alone, keep=linear.keep, world=self.world)]
        each = [rows.from_ranks(y, self.shard.shape, self.dim, self.world.size) for y in each]
        self.ahead += zip(others, each[1:])
        return each[0]


class Ungathered(torch.Tensor):
    """A tensor of the gathered shape, whose elements only Linears of the plan can use."""

    source: Gather

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _SHAPE_ONLY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = next((x.source.name for x in args if isinstance(x, Ungathered)), "")
        raise Unsupported.here(
            f"pkt.parallelize: {name!r}",
            f"found {getattr(func, '__name__', func)} of the input, which is gathered inside the Linears that take it",
            "use it in Linears that the plan makes ColwiseParallel(), or leave PrepareModuleInput away and plan those "
            "Linears with input_layouts=Shard(dim)",
        )
