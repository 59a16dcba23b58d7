"""A module's input that is gathered inside the products that take it.

A plan that gathers a module's input (PrepareModuleInput, Shard to Replicate) gives the module an `Ungathered` tensor:
one of the gathered shape, without its elements. A Linear of the plan that takes it runs all_gather_matmul on this
rank's part. Any other use of the elements raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pkt.errors import Unsupported
from pkt.runtime.memory.tensor import TRACED
from pkt.runtime.world import World

from . import rows

_TENSOR: Any = torch.Tensor
_SHAPE_ONLY = frozenset(
    [getattr(_TENSOR, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")]
    + [getattr(_TENSOR, name) for name in ("size", "dim", "numel", "is_floating_point", "__len__", "__hash__")]
)


class Gather:
    """One input of one call of a module: this rank's part."""

    def __init__(self, name: str, shard: torch.Tensor, dim: int, world: World) -> None:
        """name: of the module. dim: of `shard`, along which the ranks' parts are one tensor."""
        self.name, self.shard, self.world = name, shard, world
        self.dim = rows.dimension(f"pkt.parallelize: {name!r}", shard, dim, world)

    def tensor(self) -> torch.Tensor:
        """What the module gets."""
        shape = list(self.shard.shape)
        shape[self.dim] *= self.world.size
        element = self.shard.new_empty(())
        found: Any
        if type(element) in TRACED:
            found = _TENSOR._make_wrapper_subclass(FakeUngathered, shape, dtype=element.dtype, device=element.device)
        else:
            found = element.expand(shape).as_subclass(Ungathered)
        found.source = self
        return found


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
        used = getattr(func.__self__ if getattr(func, "__name__", "") == "__get__" else func, "__name__", func)
        raise Unsupported.here(
            f"pkt.parallelize: {name!r}",
            f"found {used} of the input, which is gathered inside the Linears that take it",
            "use it in Linears that the plan makes ColwiseParallel(), or leave PrepareModuleInput away and plan those "
            "Linears with input_layouts=Shard(dim)",
        )


class FakeUngathered(Ungathered):
    """Of a fake tensor, as torch.export gives, which cannot become one of another class."""

    @classmethod
    def __torch_dispatch__(cls, *call: Any, **more: Any) -> Any:
        """There because torch asks for it: every use goes to `__torch_function__`."""
        raise NotImplementedError
