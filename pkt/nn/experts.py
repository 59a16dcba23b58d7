"""Experts split among the ranks: each rank has some of them, whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pkt.errors import ShapeError, Unsupported
from pkt.runtime.world import World
from pkt.wording import count_text

from . import rows
from .exchange import autocast, gathered, own_part, parted
from .linear import check_features
from .sharded import Part, Sharded, mismatches

QWEN = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = ("w1", "w3", "w2")
TOGETHER = ("gate_up_proj", "down_proj")


def moe(*operands: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """`pkt.moe`, which loads torch's compiler."""
    from pkt.kernels.moe import moe

    return moe(*operands, **keywords)


class Experts(Sharded):
    """down(silu(gate(x)) * up(x)) of each token's experts, times their weights, added: `pkt.moe`.

    x: (..., features). topk_idx: integers (..., chosen), the experts of each token, -1 for none. topk_weights:
    (..., chosen), used in fp32. With `sequence_parallel` these are of this rank's tokens, the same number on every
    rank; without, of all tokens, the same on every rank: each rank then sends a part of the tokens to their experts,
    and the results are gathered. Returns x's shape, in the same layout.

    gate_up_weight: (experts / ranks, 2 * hidden, features), gate and up row by row in turn; down_weight: (experts /
    ranks, features, hidden). Rank r has the experts r * E to (r + 1) * E - 1, E = experts / ranks. In state dicts
    every expert has its own `0.gate_proj.weight`, `0.up_proj.weight`, `0.down_proj.weight`, or other `names`; two
    names stand for all experts in one tensor: `gate_up_proj` (experts, 2 * hidden, features), gates above ups, and
    `down_proj`. `sequence_parallel`, `max_tokens` and `tokens_per_rank` may be changed between calls.
    Raises ShapeError if the ranks do not divide `experts`, and what `pkt.moe` raises.
    """

    def __init__(
        self, features: int, hidden: int, experts: int, *, sequence_parallel: bool = False, names: Sequence[str] = QWEN,
        max_tokens: int | None = None, tokens_per_rank: int | None = None, world: World | None = None,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """max_tokens, tokens_per_rank: as for `pkt.moe`. world: the current one where None. The weights are parts of
        what torch's Linears draw, gate, up and down of each expert in turn; ranks need one seed."""
        self._sized(features, hidden, experts, sequence_parallel, names, max_tokens, tokens_per_rank, world)

        def drawn() -> tuple[torch.Tensor, torch.Tensor]:
            sizes = (features, hidden), (features, hidden), (hidden, features)
            gate, up, down = (nn.Linear(*size, False, device, dtype).weight.detach() for size in sizes)
            return torch.cat((gate, up)), down

        mine = []
        for expert in range(experts):
            pair = drawn()  # of every rank's, because each moves the generator
            if expert // self.own == self.world.rank:
                mine.append(pair)
        self._hold([torch.stack(tensors) for tensors in zip(*mine)], (True, True))

    def _sized(
        self, features: int, hidden: int, experts: int, sequence_parallel: bool, names: Sequence[str],
        max_tokens: int | None, tokens_per_rank: int | None, world: World | None,
    ) -> None:  # fmt: skip
        super().__init__(world)
        if len(names) not in (2, 3):
            found = f"found {count_text(len(names), 'name')}"
            wanted = "give those of gate, up and down, or of gate and up, and down"
            raise Unsupported.here(f"rank {self.world.rank}: pkt.nn.Experts", found, wanted)
        self.features, self.hidden, self.experts, self.names = features, hidden, experts, tuple(names)
        self.own = self.divided("experts", experts)
        self.sequence_parallel, self.max_tokens, self.tokens_per_rank = sequence_parallel, max_tokens, tokens_per_rank

    def _hold(self, tensors: Sequence[torch.Tensor], trained: Sequence[bool]) -> None:
        """gate_up (experts or this rank's, 2 * hidden, features) and down."""
        for name, key, tensor, train in zip(("gate_up_weight", "down_weight"), self._together, tensors, trained):
            self.hold(name, [tensor], [Part(key, 0, self.experts)], train)

    @classmethod
    def of(
        cls, gate_up: torch.Tensor | Sequence[torch.Tensor], down: torch.Tensor | Sequence[torch.Tensor], *,
        sequence_parallel: bool = False, names: Sequence[str] = QWEN, world: World | None = None,
    ) -> Experts:  # fmt: skip
        """This rank's part of whole weights, in new memory. gate_up: (experts, 2 * hidden, features), gates above ups;
        down: (experts, features, hidden); or one tensor for each expert."""
        made = cls.__new__(cls)
        hidden = down[0].shape[1]
        made._sized(down[0].shape[0], hidden, len(down), sequence_parallel, names, None, None, world)
        first = made._first
        mine = [torch.stack(list(each[first : first + made.own])) for each in (gate_up, down)]
        made._hold(mine, [each[0].requires_grad for each in (gate_up, down)])
        return made

    @property
    def _first(self) -> int:
        """The first expert of this rank."""
        return self.world.rank * self.own

    def extra_repr(self) -> str:
        sizes = f"{self.features}, {self.hidden}, experts={self.experts}"
        return f"{sizes}, sequence_parallel={self.sequence_parallel}, ranks={self.world.size}, runs={self.runs}"

    @property
    def runs(self) -> str:
        """The operator that a forward pass calls."""
        return "moe"

    def forward(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, needed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """needed: as for `pkt.moe`."""
        check_features("pkt.nn.Experts", x, self.features, self.world)
        for name, tensor in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if tensor.numel() // max(1, tensor.shape[-1]) != x.numel() // self.features:
                wanted = f"({', '.join(map(str, x.shape[:-1]))}, chosen), one row for each token of x"
                raise ShapeError.argument("pkt.nn.Experts", name, tuple(tensor.shape), wanted, self.world.rank)
        flat, up, down = autocast(rows.rows(x), self.local("gate_up_weight"), self.local("down_weight"))
        idx, weights = rows.rows(topk_idx), rows.rows(topk_weights).float()
        tokens, size = flat.shape[0], self.world.size
        if not self.sequence_parallel:
            missing = -tokens % size  # tokens of no expert, so that every rank has as many
            if missing:
                flat, weights = (functional.pad(t, (0, 0, 0, missing)) for t in (flat, weights))
                idx = functional.pad(idx, (0, 0, 0, missing), value=-1)
            flat, weights = (parted(t, 0, self.world) for t in (flat, weights))
            idx = own_part(idx, 0, self.world)
        y = moe(
            flat, idx, weights, up.transpose(1, 2), down.transpose(1, 2), max_tokens=self.max_tokens,
            tokens_per_rank=self.tokens_per_rank, needed=needed, world=self.world,
        )  # fmt: skip
        if not self.sequence_parallel:
            y = gathered(y, 0, self.world)[:tokens]
        return y.view(x.shape)

    # ------------------------------------------------------------------------------------------------------ state dicts
    # The two parameters are parts of two tensors of all experts. Where experts have keys of their own, those two are
    # taken apart, and put together, between the parameters and the state dict.
    @property
    def _together(self) -> tuple[str, str]:
        return TOGETHER if len(self.names) == 3 else self.names  # type: ignore[return-value]

    def joined(self, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        (tensor,) = tensors
        return _turns(tensor, 2) if name == "gate_up_weight" else tensor

    def separate(self, name: str, parameter: torch.Tensor) -> Sequence[torch.Tensor]:
        return [_turns(parameter, self.hidden) if name == "gate_up_weight" else parameter]

    def _keys(self, expert: int) -> list[str]:
        return [f"{expert}.{name}.weight" for name in self.names]

    def _apart(self, both: Sequence[torch.Tensor], first: int) -> dict[str, torch.Tensor]:
        """The tensors of single experts, by key. both: gate_up and down of the experts from `first` on."""
        found: dict[str, torch.Tensor] = {}
        for at, (gate_up, down) in enumerate(zip(*both)):
            found |= zip(self._keys(first + at), (*gate_up.split(self.hidden), down))
        return found

    def whole(self) -> dict[str, torch.Tensor]:
        found = super().whole()
        return found if len(self.names) == 2 else self._apart([found[key] for key in TOGETHER], 0)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if len(self.names) == 3:
            both = [destination.pop(prefix + key) for key in TOGETHER]
            mine = self._apart([b.to_local() if hasattr(b, "to_local") else b for b in both], self._first)
            destination.update({prefix + key: tensor for key, tensor in mine.items()})

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: Any, unexpected_keys: Any,
        error_msgs: Any,
    ) -> None:  # fmt: skip
        if len(self.names) == 3:
            keys = [prefix + key for e in range(self._first, self._first + self.own) for key in self._keys(e)]
            lacking = [key for key in keys if key not in state_dict]
            given = {key: state_dict.pop(key) for key in keys if key in state_dict}
            wide = (self.hidden, self.features)
            wanted = [wide, wide, wide[::-1]] * self.own
            wrong = [] if lacking else mismatches(keys, list(given.values()), wanted)
            for expert in range(self.experts):  # of other ranks
                for key in self._keys(expert):
                    state_dict.pop(prefix + key, None)
            missing_keys += lacking if strict else []
            error_msgs += wrong
            if lacking or wrong:
                both = [self.separate(name, self.local(name).detach())[0] for name in self.parts]
            else:
                gates, ups, downs = ([given[key] for key in keys[at::3]] for at in range(3))
                both = [torch.stack([torch.cat(pair) for pair in zip(gates, ups)]), torch.stack(downs)]
            state_dict.update({prefix + key: tensor for key, tensor in zip(TOGETHER, both)})
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _turns(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """tensor (experts, `rows` * n, features) with dimension 1 read as (rows, n), transposed: gates above ups become
    gate and up in turn with `rows` 2, and the other way round with `rows` the hidden features."""
    return tensor.unflatten(1, (rows, -1)).transpose(1, 2).flatten(1, 2)
