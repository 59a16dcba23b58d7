"""The MLP of Llama and its kin: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pkt.kernels.all_gather_matmul import all_gather_matmul
from pkt.runtime.world import World

from . import rows
from .exchange import autocast, sum_gradient
from .linear import Keep, RowParallelLinear, check_features
from .sharded import Part, Sharded


class SwiGLUMLP(Sharded):
    """down(silu(gate(x)) * up(x)), split by the hidden features.

    x: (..., features). With `sequence_parallel` this rank's tokens, the same number on every rank: all_gather_matmul
    with epilogue "swiglu", then matmul_reduce_scatter; without, all tokens, the same on every rank: a product, then
    matmul_all_reduce. Returns x's shape, in the same layout.

    gate and up lie in one parameter, `gate_up_weight` (2 * hidden / ranks, features), row by row in turn, so that one
    product computes both. State dicts have them apart: `gate_proj.weight` and `up_proj.weight`, or other `names`.
    keep: of the gathered tokens, as for `ColumnParallelLinear`. `sequence_parallel` and `keep` may be changed between
    calls. Raises ShapeError if the ranks do not divide `hidden`.
    """

    def __init__(
        self, features: int, hidden: int, bias: bool = False, *, sequence_parallel: bool = False, keep: Keep = "shard",
        names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"), world: World | None = None, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """names: of gate, up and down in state dicts. world: the current one where None. The weights are parts of what
        torch's Linears draw, in the order gate, up, down; ranks need one seed."""
        super().__init__(world)
        self.named("gate, up and down", names, 3)
        self.features, self.hidden, self.keep = features, hidden, keep
        self.divided("hidden", hidden)
        gate, up, self.down_name = names
        linears = [nn.Linear(features, hidden, bias, device, dtype) for _ in range(2)]
        self.register_parameter("gate_up_bias", None)
        for kind in ("weight", "bias") if bias else ("weight",):
            parts = [Part(f"{name}.{kind}", 0, hidden) for name in (gate, up)]
            self.hold(f"gate_up_{kind}", [getattr(linear, kind) for linear in linears], parts)
        down = RowParallelLinear(hidden, features, bias, world=self.world, device=device, dtype=dtype)
        self.add_module(self.down_name, down)
        self.sequence_parallel = sequence_parallel

    @property
    def sequence_parallel(self) -> bool:
        """Whether x is of this rank's tokens. It may be changed between calls."""
        down: Any = self._modules[self.down_name]
        return down.sequence_dim is not None

    @sequence_parallel.setter
    def sequence_parallel(self, value: bool) -> None:
        down: Any = self._modules[self.down_name]
        down.sequence_dim = 0 if value else None  # rows stay in the order of the ranks

    def joined(self, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(tensors), dim=1).flatten(0, 1)

    def separate(self, name: str, parameter: torch.Tensor) -> Sequence[torch.Tensor]:
        return parameter[::2], parameter[1::2]

    def extra_repr(self) -> str:
        return f"{self.features}, {self.hidden}, sequence_parallel={self.sequence_parallel}, ranks={self.world.size}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        check_features("pkt.nn.SwiGLUMLP", x, self.features, self.world)
        down: Any = self._modules[self.down_name]
        world = self.world
        mine, weight, bias = autocast(rows.rows(x), self.local("gate_up_weight"), self.local("gate_up_bias"))
        if self.sequence_parallel:
            hidden = all_gather_matmul(mine, weight.t(), bias=bias, epilogue="swiglu", keep=self.keep, world=world)
        else:
            both = functional.linear(sum_gradient(mine, world), weight, bias)
            hidden = functional.silu(both[:, ::2]) * both[:, 1::2]
        return down(hidden).view(x.shape)
