"""`ExpertParallel`: experts of a model that is not split, found by their attributes, become `MoE` and `Experts`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

from pkt.errors import DtypeError, ShapeError
from pkt.kernels.shared.checks import FLOATS

from .expert_parallel import ExpertParallel
from .experts import MIXTRAL, QWEN, TOGETHER, Experts
from .mlp import SwiGLUMLP
from .moe import MoE
from .place import CALL, Place
from .sharded import HOOKS, Sharded

REMEDY = "plan a block or experts as pkt.nn.ExpertParallel says, or make a pkt.nn.MoE"


class Planned:
    """In front of a module of pkt.nn: DTensors in and out."""

    place: Place
    style: ExpertParallel

    def mine(self, *tensors: Any) -> list[Any]:
        """Inputs as plain tensors. Raises Unsupported for another layout than the style's."""
        layout, found = self.style.layout or Replicate(), []
        for x in tensors:
            if isinstance(x, DTensor):
                x, given = self.place.mine(x, "input")
                if given != layout:
                    raise self.place.refused(f"an input of layout {given!r}", f"give {layout!r}, or plan that layout")
            found.append(x)
        return found

    def given(self, y: torch.Tensor) -> torch.Tensor:
        return self.place.given(y, self.style.layout or Replicate(), self.style.use_local_output)


class PlannedMoE(Planned, MoE):
    """ExpertParallel on a block."""

    def forward(self, x: torch.Tensor, needed: torch.Tensor | None = None) -> Any:
        (mine,) = self.mine(x)
        found = super().forward(mine, needed)
        return (self.given(found[0]), found[1]) if self.router_logits else self.given(found)


class PlannedExperts(Planned, Experts):
    """ExpertParallel on experts."""

    def forward(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, needed: torch.Tensor | None = None
    ) -> torch.Tensor:
        x, topk_idx, topk_weights = self.mine(x, topk_idx, topk_weights)
        return self.given(super().forward(x, topk_idx, topk_weights, needed))


def change(style: ExpertParallel, module: nn.Module, place: Place) -> Callable[[], nn.Module]:
    """As `styles.change`."""
    split = place.tokens(style.layout or Replicate(), "ExpertParallel of") is not None
    if isinstance(module, (MoE, Sharded)):
        raise place.refused(f"{type(module).__name__}, which is parallel already", "plan each module once")
    if any(getattr(one, hooks) for one in module.modules() for hooks in HOOKS):
        raise place.refused("a module with hooks", "add hooks after pkt.parallelize, to the module that it makes")
    for name, parameter in module.named_parameters():
        if parameter.dtype not in FLOATS:
            where = f"{CALL}: module {place.name!r}"
            raise DtypeError.argument(where, name, parameter.dtype, "bfloat16, float16 or float32", place.world.rank)
    if set(module._parameters) == set(TOGETHER):
        return _experts(style, module, place, split)
    return _block(style, cast(Any, module), place, split)


def _experts(style: ExpertParallel, module: nn.Module, place: Place, split: bool) -> Callable[[], nn.Module]:
    gate_up, down = (cast(torch.Tensor, module._parameters[name]) for name in TOGETHER)
    if gate_up.ndim != 3 or gate_up.shape != (down.shape[0], 2 * down.shape[2], down.shape[1]):
        found = f"gate_up_proj {tuple(gate_up.shape)} and down_proj {tuple(down.shape)}"
        raise place.refused(found, "give (experts, 2 * hidden, features) and (experts, features, hidden)")
    _check_silu(module, place)
    _check_count(len(down), place)
    return lambda: _placed(_made(PlannedExperts, gate_up, down, TOGETHER, split, place), style, place)


def _block(style: ExpertParallel, block: Any, place: Place, split: bool) -> Callable[[], nn.Module]:
    children: dict[str, Any] = dict(block.named_children())
    known = {"gate", "experts", "shared_expert", "shared_expert_gate"}
    others = [name for name, child in children.items() if name not in known and any(True for _ in child.parameters())]
    gate, experts = cast(Any, children.get("gate")), children.get("experts")
    if not isinstance(experts, nn.ModuleList) or not len(experts) or block._parameters or others:
        found = f"{type(block).__name__} with {', '.join(sorted({*children, *block._parameters})) or 'nothing'} in it"
        raise place.refused(found, REMEDY)
    _check_linear("gate", gate, place)
    names = next((n for n in (QWEN, MIXTRAL) if n[0] in dict(experts[0].named_children())), QWEN)
    for at, expert in enumerate(experts):
        _check_mlp(f"experts.{at}", expert, names, place)
    _check_count(len(experts), place)
    if (noise := getattr(block, "jitter_noise", 0)) != 0:
        raise place.refused(f"jitter_noise {noise}", "set it to 0")
    chosen, normalise = getattr(block, "top_k", None), names is MIXTRAL or getattr(block, "norm_topk_prob", None)
    if not isinstance(chosen, int) or normalise is None:
        raise place.refused(f"{type(block).__name__} without top_k or norm_topk_prob", REMEDY)
    shared, its_gate = children.get("shared_expert"), children.get("shared_expert_gate")
    if shared is not None:
        _check_mlp("shared_expert", shared, QWEN, place)
    if its_gate is not None:
        _check_linear("shared_expert_gate", its_gate, place)

    def made() -> nn.Module:
        each = [[getattr(expert, name).weight for expert in experts] for name in names]
        both = [torch.cat(pair) for pair in zip(*each[:2])]
        one = _made(Experts, both, each[2], names, split, place)
        moe = PlannedMoE.__new__(PlannedMoE)
        mlp = None if shared is None else _mlp(shared, split, place)
        moe._of(gate, one, mlp, its_gate, "shared_expert", chosen, bool(normalise), None, style.router_logits)
        for part in (gate, its_gate):
            if part is not None:
                place.replicate(part)
        return _placed(moe, style, place)

    return made


def _made(kind: Any, gate_up: Any, down: Any, names: Sequence[str], split: bool, place: Place) -> Any:
    return kind.of(gate_up, down, sequence_parallel=split, names=names, world=place.world)


def _mlp(whole: Any, split: bool, place: Place) -> SwiGLUMLP:
    features, hidden = whole.gate_proj.in_features, whole.gate_proj.out_features
    weight = whole.gate_proj.weight
    mlp = SwiGLUMLP(
        features, hidden, sequence_parallel=split, world=place.world, device=weight.device, dtype=weight.dtype
    )
    if not weight.is_meta:
        mlp.load_state_dict(whole.state_dict())
    return mlp


def _placed(made: Any, style: ExpertParallel, place: Place) -> Any:
    made.place, made.style = place, style
    for module in made.modules():
        if isinstance(module, Experts):
            module.max_tokens, module.tokens_per_rank = style.room["max_tokens"], style.room["tokens_per_rank"]
        if isinstance(module, Sharded):
            place.distribute(module)
    return made


def _check_count(experts: int, place: Place) -> None:
    if experts % place.world.size:
        where, wanted = f"{CALL}: module {place.name!r}", f"a multiple of {place.world.size}, the ranks"
        raise ShapeError.argument(where, "experts", experts, wanted, place.world.rank)


def _check_linear(name: str, linear: Any, place: Place) -> None:
    if type(linear) is not nn.Linear or linear.bias is not None:
        raise place.refused(f"{name}, which is no Linear without bias", REMEDY)


def _check_mlp(name: str, mlp: nn.Module, names: Sequence[str], place: Place) -> None:
    """Raise Unsupported unless it is down(silu(gate(x)) * up(x))."""
    linears = {n for n, child in mlp.named_children() if any(True for _ in child.parameters())}
    if linears != set(names):
        raise place.refused(f"{name} with {', '.join(sorted(linears)) or 'nothing'} in it", REMEDY)
    for each in names:
        _check_linear(f"{name}.{each}", getattr(mlp, each), place)
    _check_silu(mlp, place)


def _check_silu(module: Any, place: Place) -> None:
    """Raise Unsupported unless the activation is silu, as far as some values tell."""
    act = getattr(module, "act_fn", None)
    with torch.device("cpu"), torch.no_grad():
        x = torch.linspace(-4, 4, 9)
        if act is None or not torch.allclose(act(x), functional.silu(x)):
            found = f"{type(module).__name__} with act_fn {act}, which is not silu"
            raise place.refused(found, "make a module of your own around pkt.moe, which has other activations")
