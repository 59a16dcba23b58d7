"""A router and the experts that it chooses from, with the experts split among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pkt.errors import ShapeError
from pkt.kernels.agreement import world_of
from pkt.runtime.world import World

from .exchange import sum_gradient
from .experts import QWEN, Experts
from .linear import check_features
from .mlp import SwiGLUMLP
from .sharded import local

Route = Callable[[torch.Tensor], "tuple[torch.Tensor, torch.Tensor]"]


class MoE(nn.Module):
    """A mixture of experts: a router chooses experts for each token, whose results are added with its weights.

    x: (..., features). With `sequence_parallel` this rank's tokens, the same number on every rank; without, all
    tokens, the same on every rank. Returns x's shape, in the same layout. With `router_logits` it returns (result,
    logits), logits (tokens, experts) of the tokens of x, as the blocks of Mixtral and Qwen in transformers 4 do.

    gate: a Linear (features to experts), the same on every rank. Its logits go through `route`: by default a softmax
    in fp32, then its `chosen` largest values, with `normalise` divided by their sum. The weights stay in fp32.
    experts: `Experts`, each on one rank. shared: the hidden features of an expert for all tokens, a `SwiGLUMLP` that
    is split by them; with `shared_gate` times sigmoid(its gate(x)).

    State dicts are those of the block that is not split: `gate.weight`, `experts.0.gate_proj.weight` or other
    `names`, see `Experts`; `shared_expert.gate_proj.weight`, or under `shared_name`; `shared_expert_gate.weight`.
    Raises ShapeError if the ranks do not divide `experts` and `shared`.
    """

    def __init__(
        self, features: int, hidden: int, experts: int, chosen: int, *, normalise: bool = True,
        shared: int | None = None, shared_gate: bool = False, shared_name: str = "shared_expert",
        route: Route | None = None, router_logits: bool = False, sequence_parallel: bool = False,
        names: Sequence[str] = QWEN, max_tokens: int | None = None, tokens_per_rank: int | None = None,
        world: World | None = None, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """hidden: features of each expert. route: of logits (tokens, experts), returns topk_idx and topk_weights
        (tokens, K) in the place of softmax and top k. max_tokens, tokens_per_rank: as for `pkt.moe`. world: the current
        one where None. The weights are parts of what torch's Linears draw: gate, experts, shared; ranks need one
        seed."""
        world = world_of("pkt.nn.MoE", world)
        given: Any = {"sequence_parallel": sequence_parallel, "world": world, "device": device, "dtype": dtype}
        gate = nn.Linear(features, experts, False, device, dtype)
        room: Any = {"max_tokens": max_tokens, "tokens_per_rank": tokens_per_rank}
        made = Experts(features, hidden, experts, names=names, **room, **given)
        one = None if shared is None else SwiGLUMLP(features, shared, **given)
        its_gate = nn.Linear(features, 1, False, device, dtype) if shared is not None and shared_gate else None
        self._of(gate, made, one, its_gate, shared_name, chosen, normalise, route, router_logits)

    def _of(
        self, gate: nn.Linear, experts: Experts, shared: SwiGLUMLP | None, shared_gate: nn.Linear | None,
        shared_name: str, chosen: int, normalise: bool, route: Route | None, router_logits: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.world = experts.world
        if not 1 <= chosen <= experts.experts:
            wanted = f"1 to {experts.experts}, the number of experts"
            raise ShapeError.argument("pkt.nn.MoE", "chosen", chosen, wanted, self.world.rank)
        self.chosen, self.normalise, self.shared_name = chosen, normalise, shared_name
        self.router_logits, self.route, self.gate, self.experts = router_logits, route, gate, experts
        if shared is not None:
            self.add_module(shared_name, shared)
        self.shared_expert_gate = shared_gate

    @property
    def sequence_parallel(self) -> bool:
        """Whether x is of this rank's tokens. It may be changed between calls."""
        return self.experts.sequence_parallel

    @sequence_parallel.setter
    def sequence_parallel(self, value: bool) -> None:
        for module in (self.experts, self._modules.get(self.shared_name)):
            if module is not None:
                module.sequence_parallel = value  # type: ignore[assignment]

    def extra_repr(self) -> str:
        return f"chosen={self.chosen}, normalise={self.normalise}"

    def top_k(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The `chosen` experts of each token, and the weights (tokens, chosen), fp32."""
        weights, idx = logits.softmax(-1, dtype=torch.float32).topk(self.chosen, dim=-1)
        return idx, weights / weights.sum(-1, keepdim=True) if self.normalise else weights

    def forward(self, x: torch.Tensor, needed: torch.Tensor | None = None) -> Any:
        """needed: as for `pkt.moe`: the rows that this rank needed are copied to it."""
        check_features("pkt.nn.MoE", x, self.gate.in_features, self.world)
        logits = self._linear(self.gate, x.reshape(-1, x.shape[-1]))
        y = self.experts(x, *(self.route or self.top_k)(logits), needed)
        shared = self._modules.get(self.shared_name)
        if shared is not None:
            also = shared(x)
            if self.shared_expert_gate is not None:
                also = self._linear(self.shared_expert_gate, x).sigmoid() * also
            y = y + also
        return (y, logits) if self.router_logits else y

    def _linear(self, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """Of a weight that every rank has. If each rank has a part of the tokens, the ranks sum its gradient."""
        weight = local(linear.weight)
        return functional.linear(x, sum_gradient(weight, self.world) if self.sequence_parallel else weight)
