"""Linears split by their output features (columns) or input features (rows), in one of two layouts of the tokens.

| tokens | ColumnParallelLinear | RowParallelLinear |
|---|---|---|
| each rank has a part (`sequence_dim`) | all_gather_matmul | matmul_reduce_scatter |
| every rank has all | a product; the input's gradient is all-reduced | matmul_all_reduce |

Weights lie as torch's Linear keeps them, (out_features, in_features), and go to the operators as transposed views.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from pkt.errors import DtypeError, ShapeError
from pkt.kernels.all_gather_matmul import all_gather_matmul
from pkt.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from pkt.runtime.world import World

from . import rows
from .exchange import autocast, gathered, sum_gradient, sum_of_products
from .sharded import Part, Sharded, check_transforms

Keep = Literal["shard", "whole"]


class ParallelLinear(Sharded):
    """What both linears share: how they are made of a whole one."""

    split: int
    """Dimension of the weight that is split."""

    def __init__(self, linear: nn.Linear, sequence_dim: int | None, world: World | None) -> None:
        super().__init__(world)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.sequence_dim = sequence_dim
        features = ("out_features", "in_features")[self.split]
        size = linear.weight.shape[self.split]
        self.divided(features, size)
        weight, bias = linear.weight, linear.bias
        self.hold("weight", [weight], [Part("weight", self.split, size)], weight.requires_grad)
        self.register_parameter("bias", None)
        if bias is not None:
            part = Part("bias", 0 if self.split == 0 else None, self.out_features)
            self.hold("bias", [bias], [part], bias.requires_grad)
        self.train(linear.training)

    @property
    def runs(self) -> str:
        """The operator that a forward pass calls."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        split = f"sequence_dim={self.sequence_dim}, ranks={self.world.size}, runs={self.runs}"
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {split}"


def check_features(call: str, x: torch.Tensor, features: int, world: World) -> None:
    """Raise DtypeError unless x is a tensor with memory, ShapeError unless it is (..., features), of 2 dimensions or
    more, and Unsupported inside a transform of torch.func."""
    check_transforms(call, world)
    if not isinstance(x, torch.Tensor):
        raise DtypeError.argument(call, "x", type(x).__name__, "a tensor", world.rank)
    if x.is_meta:
        raise DtypeError.argument(call, "x", "a tensor on meta", f"one on {world.torch_device.type}", world.rank)
    if x.ndim < 2 or x.shape[-1] != features:
        wanted = f"(..., {features}), 2 dimensions or more"
        raise ShapeError.argument(call, "x", tuple(x.shape), wanted, world.rank)


def multiplied(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dim: int | None, keep: Keep, world: World
) -> torch.Tensor:
    """x (..., in_features) @ weight.t() + bias: of all x where `dim` is None, else of the gathered x, whose dimension
    `dim` is split. Raises ShapeError for a `dim` that x lacks."""
    x, weight, bias = autocast(x, weight, bias)
    if dim is None:
        return functional.linear(sum_gradient(x, world), weight, bias)
    dim = rows.dimension("pkt.nn.ColumnParallelLinear", x, dim, world)
    y = all_gather_matmul(rows.rows(x), weight.t(), bias=bias, keep=keep, world=world)
    return rows.from_ranks(y, x.shape, dim, world.size)


class ColumnParallelLinear(ParallelLinear):
    """A Linear, of whose output features this rank computes its part.

    x: (..., in_features). Where `sequence_dim` is None, all of it, the same on every rank. Else this rank's part of
    dimension `sequence_dim`, the same size on every rank: the ranks' parts are gathered in the product.
    Returns (..., out_features / ranks), this rank's part; with `gather_output` (..., out_features), the same on every
    rank, through one more all-gather. Dimension `sequence_dim` is whole.

    keep: what a call keeps of its input for the weight's gradient, where tokens are split and the weight requires grad.
    "shard": this rank's part, which the backward pass gathers once more. "whole": the gathered input, `ranks` times as
    many bytes until the backward pass, which then gathers nothing; see `pkt.all_gather_matmul`.

    weight: (out_features / ranks, in_features), bias: (out_features / ranks,). `sequence_dim` and `keep` may be changed
    between calls. Raises ShapeError if the ranks do not divide out_features, and what the operators raise.
    """

    split = 0

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, sequence_dim: int | None = None,
        gather_output: bool = False, keep: Keep = "shard", world: World | None = None, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """world: the current one where None. The weight is this rank's part of what torch's Linear draws, so ranks
        with one seed make the parts of one weight."""
        linear = nn.Linear(in_features, out_features, bias, device, dtype)
        super().__init__(linear, sequence_dim, world)
        self.gather_output, self.keep = gather_output, keep

    @classmethod
    def of(
        cls, linear: nn.Linear, *, sequence_dim: int | None = None, gather_output: bool = False, keep: Keep = "shard",
        world: World | None = None,
    ) -> ColumnParallelLinear:  # fmt: skip
        """This rank's part of a whole Linear, in new memory."""
        made = cls.__new__(cls)
        ParallelLinear.__init__(made, linear, sequence_dim, world)
        made.gather_output, made.keep = gather_output, keep
        return made

    @property
    def runs(self) -> str:
        return "linear" if self.sequence_dim is None else "all_gather_matmul"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        check_features("pkt.nn.ColumnParallelLinear", x, self.in_features, self.world)
        y = multiplied(x, self.local("weight"), self.local("bias"), self.sequence_dim, self.keep, self.world)
        return self.finished(y)

    def finished(self, y: torch.Tensor) -> torch.Tensor:
        """The result of this rank's features."""
        return gathered(y, y.ndim - 1, self.world) if self.gather_output else y


class RowParallelLinear(ParallelLinear):
    """A Linear, of whose input features this rank has its part; the ranks' products are summed.

    x: (..., in_features / ranks), this rank's features of all tokens, as ColumnParallelLinear returns them.
    Returns (..., out_features): where `sequence_dim` is None, all tokens, the same on every rank; else this rank's part
    of dimension `sequence_dim`, which is a multiple of the ranks.

    weight: (out_features, in_features / ranks). bias: (out_features,), the same on every rank, added once.
    `sequence_dim` may be changed between calls. Raises ShapeError if the ranks do not divide in_features, and what the
    operators raise.
    """

    split = 1

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, sequence_dim: int | None = None,
        world: World | None = None, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """world: the current one where None. The weight is this rank's part of what torch's Linear draws; ranks need
        one seed, or their biases differ."""
        super().__init__(nn.Linear(in_features, out_features, bias, device, dtype), sequence_dim, world)

    @classmethod
    def of(cls, linear: nn.Linear, *, sequence_dim: int | None = None, world: World | None = None) -> RowParallelLinear:
        """This rank's part of a whole Linear, in new memory."""
        made = cls.__new__(cls)
        ParallelLinear.__init__(made, linear, sequence_dim, world)
        return made

    @property
    def runs(self) -> str:
        return "matmul_all_reduce" if self.sequence_dim is None else "matmul_reduce_scatter"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        call = "pkt.nn.RowParallelLinear"
        check_features(call, x, self.in_features // self.world.size, self.world)
        x, weight, bias = autocast(x, self.local("weight"), self.local("bias"))
        if self.sequence_dim is None:
            y = sum_of_products(rows.rows(x), weight, bias, self.world)
            return y.view(*x.shape[:-1], self.out_features)
        dim = rows.dimension(call, x, self.sequence_dim, self.world)
        bias = None if bias is None else sum_gradient(bias, self.world)
        mine = rows.to_ranks(call, x, dim, self.world)
        y = matmul_reduce_scatter(mine, weight.t(), bias=bias, world=self.world)
        return y.view(rows.part_shape(x.shape, dim, self.world.size, self.out_features))
