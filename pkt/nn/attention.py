"""Self-attention split by heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pkt.errors import ShapeError
from pkt.kernels.all_gather_matmul import all_gather_matmul
from pkt.runtime.world import World
from pkt.wording import count_text

from . import rows
from .exchange import autocast, sum_gradient
from .linear import Keep, RowParallelLinear, check_features
from .sharded import Part, Sharded

Rotate = Callable[[torch.Tensor, torch.Tensor], "tuple[torch.Tensor, torch.Tensor]"]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention by torch; q may have a multiple of k's heads."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Attention(Sharded):
    """o(attend(q(x), k(x), v(x))), split by heads.

    x: (tokens, features) or (batch, tokens, features). With `sequence_parallel` this rank's part of the tokens, the
    same number on every rank: all_gather_matmul, then matmul_reduce_scatter; without, all tokens, the same on every
    rank: a product, then matmul_all_reduce. Returns x's shape, in the same layout.

    q, k and v lie in one parameter, `qkv_weight` ((heads + 2 * kv_heads) / ranks * head, features), so that one product
    computes them. State dicts have them apart: `q_proj.weight`, ..., `o_proj.weight`, or other `names`.
    keep: of the gathered tokens, as for `ColumnParallelLinear`. `sequence_parallel` and `keep` may be changed between
    calls. Raises ShapeError if the ranks do not divide heads and kv_heads.
    """

    def __init__(
        self, features: int, heads: int, kv_heads: int | None = None, head: int | None = None, bias: bool = False, *,
        sequence_parallel: bool = False, keep: Keep = "shard",
        names: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
        world: World | None = None, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """kv_heads: `heads` where None. head: elements of one, features / heads where None. bias: of q, k and v. names:
        of q, k, v and o in state dicts. world: the current one where None. The weights are parts of what torch's
        Linears draw, in the order q, k, v, o; ranks need one seed."""
        super().__init__(world)
        self.named("q, k, v and o", names, 4)
        kv_heads = heads if kv_heads is None else kv_heads
        if kv_heads < 1 or heads < 1 or heads % kv_heads:
            found, wanted = f"{heads} and {kv_heads}", "a multiple of kv_heads, and both at least 1"
            raise ShapeError.argument("pkt.nn.Attention", "heads and kv_heads", found, wanted, self.world.rank)
        if head is None and features % heads:
            found, wanted = f"{features} for {count_text(heads, 'head')}", "a multiple of heads, or head="
            raise ShapeError.argument("pkt.nn.Attention", "features", found, wanted, self.world.rank)
        self.head = features // heads if head is None else head
        self.features, self.keep = features, keep
        self.heads, self.kv_heads = self.divided("heads", heads), self.divided("kv_heads", kv_heads)
        *names, self.o_name = names
        wide = [heads * self.head, kv_heads * self.head, kv_heads * self.head]
        linears = [nn.Linear(features, n, bias, device, dtype) for n in wide]
        self.register_parameter("qkv_bias", None)
        for kind in ("weight", "bias") if bias else ("weight",):
            parts = [Part(f"{name}.{kind}", 0, n) for name, n in zip(names, wide)]
            self.hold(f"qkv_{kind}", [getattr(linear, kind) for linear in linears], parts)
        o = RowParallelLinear(wide[0], features, False, world=self.world, device=device, dtype=dtype)
        self.add_module(self.o_name, o)
        self.sequence_parallel = sequence_parallel

    @property
    def sequence_parallel(self) -> bool:
        """Whether x is of this rank's tokens. It may be changed between calls."""
        o: Any = self._modules[self.o_name]
        return o.sequence_dim is not None

    @sequence_parallel.setter
    def sequence_parallel(self, value: bool) -> None:
        o: Any = self._modules[self.o_name]
        o.sequence_dim = -2 if value else None

    def extra_repr(self) -> str:
        heads = f"{self.features}, heads={self.heads}, kv_heads={self.kv_heads}, head={self.head}"
        return f"{heads}, sequence_parallel={self.sequence_parallel}, ranks={self.world.size}"

    def forward(self, x: torch.Tensor, rotate: Rotate | None = None, attend: Attend = causal) -> torch.Tensor:
        """rotate: of q and k (batch, tokens, this rank's heads or KV heads, head), all tokens; returns both with their
        positions in. attend: of q, k and v (batch, heads or KV heads, tokens, head); returns q's shape. A cache of keys
        and values belongs into it. Causal attention by torch where it is not given."""
        call, world = "pkt.nn.Attention", self.world
        check_features(call, x, self.features, world)
        if x.ndim > 3:
            wanted = "(tokens, features) or (batch, tokens, features)"
            raise ShapeError.argument(call, "x", tuple(x.shape), wanted, world.rank)
        x, weight, bias = autocast(x, self.local("qkv_weight"), self.local("qkv_bias"))
        if self.sequence_parallel:
            y = all_gather_matmul(rows.rows(x), weight.t(), bias=bias, keep=self.keep, world=world)
            y = rows.from_ranks(y, x.shape, x.ndim - 2, world.size)
        else:
            y = functional.linear(sum_gradient(x, world), weight, bias)
        batch, tokens = y.shape[0] if y.ndim == 3 else 1, y.shape[-2]
        y = y.view(batch, tokens, self.heads + 2 * self.kv_heads, self.head)
        q, k, v = y.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        if rotate is not None:
            q, k = rotate(q, k)
        seen = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        seen = seen.transpose(1, 2).reshape(batch, tokens, self.heads * self.head)
        o: Any = self._modules[self.o_name]
        return o(seen if x.ndim == 3 else seen[0])
