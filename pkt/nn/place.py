"""Where a style is applied. Only styles import this: it loads torch's DTensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from pkt.errors import DtypeError, ShapeError, Unsupported
from pkt.kernels.shared.checks import FLOATS
from pkt.runtime.world import World

from .sharded import Sharded

CALL = "pkt.parallelize"


class Place:
    """Where a style is applied: the module's name in messages, the world, and torch's mesh where there is one."""

    def __init__(self, name: str, world: World, mesh: Any, keep: Any = "shard") -> None:
        """keep: of the Linears that gather their inputs."""
        self.name, self.world, self.mesh, self.keep = name, world, mesh, keep

    def refused(self, found: str, remedy: str) -> Unsupported:
        where = f"rank {self.world.rank}: {CALL}: module {self.name!r}"
        return Unsupported.here(where, f"found {found}", remedy)

    def tokens(self, layout: Any, what: str) -> int | None:
        """The dimension of tokens that a layout splits; None where it is Replicate()."""
        if layout == Replicate():
            return None
        if type(layout) is Shard and layout.dim != -1:
            return layout.dim
        raise self.refused(f"{what} {layout!r}", "use Replicate(), or Shard(dim) of the dimension of tokens")

    def mine(self, x: torch.Tensor, what: str) -> tuple[torch.Tensor, Any]:
        """A DTensor as this rank's tensor, and its layout. Raises Unsupported for another mesh."""
        assert isinstance(x, DTensor)
        if x.device_mesh != self.mesh:
            raise self.refused(f"{what}: a DTensor on {x.device_mesh}", f"give one on {self.mesh}")
        return x.to_local(), x.placements[0]

    def given(self, y: torch.Tensor, layout: Any, local: bool) -> torch.Tensor:
        """A result as the style wants it."""
        if local or self.mesh is None:
            return y
        return DTensor.from_local(y, self.mesh, [layout], run_check=False)

    def check_parameters(self, module: nn.Module, split: int | None) -> None:
        """Raise DtypeError or ShapeError for parameters that operators do not take. split: dimension of the weight that
        the ranks share."""
        where, rank, size = f"{CALL}: module {self.name!r}", self.world.rank, self.world.size
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype not in FLOATS:
                raise DtypeError.argument(where, name, parameter.dtype, "bfloat16, float16 or float32", rank)
        weight: Any = None if split is None else module._parameters["weight"]
        if weight is not None and weight.shape[split] % size:
            wanted = f"dimension {split} a multiple of {size}, the number of ranks"
            raise ShapeError.argument(where, "weight", tuple(weight.shape), wanted, rank)

    def distribute(self, module: Sharded) -> None:
        """Make the parameters DTensors, as torch's are, where there is a mesh."""
        if self.mesh is None:
            return
        for name, (part, *_) in module.parts.items():
            self._distribute(module, name, Replicate() if part.dim is None else Shard(part.dim))

    def replicate(self, module: nn.Module) -> None:
        """The same for a module whose parameters every rank has."""
        if self.mesh is None:
            return
        for name, old in list(module._parameters.items()):
            if old is not None and not isinstance(old, DTensor):
                self._distribute(module, name, Replicate())

    def _distribute(self, module: nn.Module, name: str, layout: Placement) -> None:
        old = module._parameters[name]
        assert old is not None
        made = DTensor.from_local(old.detach(), self.mesh, [layout], run_check=False)
        module.register_parameter(name, nn.Parameter(made, requires_grad=old.requires_grad))
