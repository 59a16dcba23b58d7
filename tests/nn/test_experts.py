"""pkt.nn.MoE and Experts against blocks that are not split, with the attributes and names of transformers' blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel
from torch.nn import functional

import pkt
from pkt.nn.experts import MIXTRAL, QWEN, TOGETHER

from .helpers import drawn, gradients, near, on_ranks, part

FEATURES, HIDDEN, EXPERTS, CHOSEN = 8, 6, 4, 2


class MLP(nn.Module):
    def __init__(self, hidden: int, names: Any = QWEN) -> None:
        super().__init__()
        sizes = (FEATURES, hidden), (FEATURES, hidden), (hidden, FEATURES)
        self.names, self.act_fn = names, nn.SiLU()
        for name, size in zip(names, sizes):
            self.add_module(name, nn.Linear(*size, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        return down(self.act_fn(gate(x)) * up(x))


class Block(nn.Module):
    """As transformers 4 has it: an expert a module, and the logits returned. Every expert computes every token."""

    def __init__(self, names: Any = QWEN, shared: bool = False) -> None:
        super().__init__()
        self.top_k = CHOSEN
        if names is QWEN:
            self.norm_topk_prob = False
        self.gate = nn.Linear(FEATURES, EXPERTS, bias=False)
        self.experts = nn.ModuleList(MLP(HIDDEN, names) for _ in range(EXPERTS))
        if shared:
            self.shared_expert, self.shared_expert_gate = MLP(4), nn.Linear(FEATURES, 1, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.reshape(-1, FEATURES)
        logits = self.gate(flat)
        weights, idx = logits.softmax(-1).topk(self.top_k, dim=-1)
        if getattr(self, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        y = summed(torch.stack([expert(flat) for expert in self.experts]), idx, weights)
        if hasattr(self, "shared_expert"):
            y = y + self.shared_expert_gate(flat).sigmoid() * self.shared_expert(flat)
        return y.view(x.shape), logits


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(drawn(EXPERTS, FEATURES, seed=5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = functional.linear(x, self.weight)
        weights, idx = logits.softmax(-1).topk(CHOSEN, dim=-1)
        return logits, weights, idx


class TogetherExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(drawn(EXPERTS, 2 * HIDDEN, FEATURES, seed=6))
        self.down_proj = nn.Parameter(drawn(EXPERTS, FEATURES, HIDDEN, seed=7))
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("th,efh->etf", x, self.gate_up_proj).chunk(2, -1)
        return summed(torch.einsum("etf,ehf->eth", self.act_fn(gate) * up, self.down_proj), idx, weights)


class TogetherBlock(nn.Module):
    """As transformers 5 has it: all experts in two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = Router(), TogetherExperts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, FEATURES)
        _, weights, idx = self.gate(flat)
        return self.experts(flat, idx, weights).reshape(x.shape)


def summed(y: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """y (experts, tokens, features): each token's chosen ones, times their weights."""
    each = y.transpose(0, 1).gather(1, idx[..., None].expand(-1, -1, y.shape[-1]))
    return (each * weights[..., None]).sum(1)


class First(nn.Module):
    """The first result of a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)[0]


def by_keys(module: nn.Module, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients by the keys of the state dict, each through the module's own translation."""
    holder = copy.deepcopy(module)
    with torch.no_grad():
        for name, parameter in holder.named_parameters():
            parameter.copy_(found.pop(name))
    return {**found, **holder.state_dict()}


def compare(world: Any, split: nn.Module, whole: nn.Module, x: torch.Tensor, dim: int | None) -> None:
    """Results and gradients. dim: of x and of the result, in which ranks have parts; None: every rank has all."""
    scale = drawn(*x.shape, seed=9)
    wanted = gradients(copy.deepcopy(whole).double(), x.double(), scale.double())
    mine = [t if dim is None else t.chunk(world.size, dim)[world.rank] for t in (x, scale)]
    found = by_keys(split, gradients(split, *mine))
    assert found.keys() <= wanted.keys()
    least = 0.01 * max(value.abs().max() for name, value in wanted.items() if name != "result").item()
    for name, value in found.items():
        if name in ("result", "x"):
            near(value, wanted[name] if dim is None else wanted[name].chunk(world.size, dim)[world.rank], name)
        else:
            near(value, part(wanted[name], value, world), name, least)


def block(names: Any = QWEN, shared: bool = False) -> Block:
    torch.manual_seed(2)
    return Block(names, shared)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_block_with_a_shared_expert(sequence_parallel: bool) -> None:
    def run(world: Any) -> None:
        split = pkt.nn.MoE(
            FEATURES, HIDDEN, EXPERTS, CHOSEN, normalise=False, shared=4, shared_gate=True,
            sequence_parallel=not sequence_parallel, router_logits=True,
        )  # fmt: skip
        split.sequence_parallel = sequence_parallel
        whole = block(shared=True)
        split.load_state_dict(whole.state_dict())
        compare(world, First(split), First(whole), drawn(2, 4, FEATURES), 1 if sequence_parallel else None)

    on_ranks(2, run)


def test_tokens_that_the_ranks_do_not_divide() -> None:
    def run(world: Any) -> None:
        whole, split = block(MIXTRAL), pkt.nn.MoE(FEATURES, HIDDEN, EXPERTS, CHOSEN, names=MIXTRAL, router_logits=True)
        split.load_state_dict(whole.state_dict())
        compare(world, First(split), First(whole), drawn(1, 3, FEATURES), None)

    on_ranks(2, run)


def test_a_route_of_the_callers_and_too_little_room() -> None:
    def run(world: Any) -> int:
        def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.zeros(len(logits), 1, dtype=torch.int64), torch.ones(len(logits), 1)

        whole = block()
        split = pkt.nn.MoE(FEATURES, HIDDEN, EXPERTS, CHOSEN, route=route, sequence_parallel=True)
        split.load_state_dict(whole.state_dict())
        x, needed = drawn(3, FEATURES), torch.zeros(2, dtype=torch.int32)
        near(split(x, needed), whole.double().experts[0](x.double()).detach())
        split.experts.max_tokens = 5
        assert not split(x).any()
        return needed[0].item()

    assert on_ranks(2, run) == [6, 0]


# ---------------------------------------------------------------------------------------------------------- state dicts
def test_state_dicts() -> None:
    def run(world: Any) -> None:
        for whole, names in ((block(), QWEN), (block(MIXTRAL), MIXTRAL), (TogetherBlock(), TOGETHER)):
            split = pkt.nn.MoE(FEATURES, HIDDEN, EXPERTS, CHOSEN, names=names)
            assert str(split.load_state_dict(whole.state_dict())) == "<All keys matched successfully>"
            back = pkt.nn.full_state_dict(split)
            assert back.keys() == whole.state_dict().keys()
            assert all(torch.equal(back[key], tensor) for key, tensor in whole.state_dict().items())
            parts = {key: tensor.clone() for key, tensor in split.state_dict().items()}
            other = pkt.nn.MoE(FEATURES, HIDDEN, EXPERTS, CHOSEN, names=names)
            for assign in (False, True):
                assert str(other.load_state_dict(parts, assign=assign)) == "<All keys matched successfully>"
                assert all(torch.equal(tensor, parts[key]) for key, tensor in other.state_dict().items())
        assert len(parts) == 3  # the last one's: gate, and this rank's part of all experts

    on_ranks(2, run)


def test_keys_that_are_missing_or_wrong() -> None:
    def run(world: Any) -> None:
        split, state = pkt.nn.MoE(FEATURES, HIDDEN, EXPERTS, CHOSEN), block().state_dict()
        kept = {key: tensor.clone() for key, tensor in split.state_dict().items()}
        mine = f"experts.{2 * world.rank}.up_proj.weight"
        less = {key: tensor for key, tensor in state.items() if key != mine}
        with pytest.raises(RuntimeError, match=rf'Missing key.*"{mine}"'):
            split.load_state_dict(less)
        assert split.load_state_dict(less, strict=False).missing_keys == [mine]
        assert torch.equal(split.state_dict()[mine], kept[mine])
        with pytest.raises(RuntimeError, match=r'Unexpected key.*"experts.4.up_proj.weight"'):
            split.load_state_dict({**state, "experts.4.up_proj.weight": state[mine]})
        with pytest.raises(RuntimeError, match=rf"size mismatch for {mine}: .* \[3, 8\] .* \[6, 8\]"):
            split.load_state_dict({**state, mine: torch.ones(3, 8)})

    on_ranks(2, run)


def test_one_seed_makes_one_model_on_any_number_of_ranks() -> None:
    def run(world: Any) -> dict[str, Any]:
        torch.manual_seed(2)
        split = pkt.nn.MoE(FEATURES, HIDDEN, EXPERTS, CHOSEN, shared=4, shared_gate=True)
        return {key: tensor.tolist() for key, tensor in pkt.nn.full_state_dict(copy.deepcopy(split)).items()}

    whole = {key: tensor.tolist() for key, tensor in block(shared=True).state_dict().items()}
    assert on_ranks(1, run)[0] == on_ranks(2, run)[1] == whole


# ---------------------------------------------------------------------------------------------------------------- plans
@pytest.mark.parametrize("names", [QWEN, MIXTRAL])
def test_a_plan_replaces_a_block(names: Any) -> None:
    def run(world: Any) -> None:
        model = nn.Sequential(block(names, shared=names is QWEN))
        x, whole = drawn(2, 4, FEATURES), copy.deepcopy(model[0])
        if world.rank:
            nn.init.zeros_(model[0].experts[0].get_submodule(names[0]).weight)  # rank 0's weights are taken
        pkt.parallelize(model, world, {"0": pkt.nn.ExpertParallel(Shard(1))})
        assert isinstance(model[0], pkt.nn.MoE)
        compare(world, First(model[0]), First(whole), x, 1)

    on_ranks(2, run)


@pytest.mark.parametrize("dim", [1, None])
def test_a_plan_replaces_experts_and_keeps_their_router(dim: int | None) -> None:
    def run(world: Any) -> None:
        model, x = TogetherBlock(), drawn(2, 4, FEATURES)
        whole = copy.deepcopy(model)
        plan: dict[str, Any] = {"experts": pkt.nn.ExpertParallel(Replicate() if dim is None else Shard(dim))}
        if dim is not None:
            plan["gate"] = SequenceParallel()
        pkt.parallelize(model, world, plan)
        assert isinstance(model.experts, pkt.nn.Experts)
        compare(world, model, whole, x, dim)

    on_ranks(2, run)


def test_plans_that_are_refused() -> None:
    def run(world: Any) -> None:
        def refused(module: nn.Module, match: str, style: Any = None, error: type[Exception] = pkt.Unsupported) -> None:
            model = nn.Sequential(module)
            with pytest.raises(error, match=f"rank {world.rank}: pkt.parallelize: module '0': {match}"):
                pkt.parallelize(model, world, {"0": style or pkt.nn.ExpertParallel()})
            assert model[0] is module

        refused(nn.Linear(4, 4), "found Linear with bias, weight in it: plan a block")
        refused(block(), "found ExpertParallel of .*: use Replicate", pkt.nn.ExpertParallel(Partial()))
        changed = block()
        changed.experts[1].act_fn = nn.GELU()
        refused(changed, "found MLP with act_fn GELU.*, which is not silu: make a module of your own")
        changed = block()
        changed.norm = nn.LayerNorm(4)
        refused(changed, "found Block with experts, gate, norm in it")
        changed = block()
        changed.gate = nn.Linear(FEATURES, EXPERTS)
        refused(changed, "found gate, which is no Linear without bias")
        changed = block(MIXTRAL)
        changed.jitter_noise = 0.1
        refused(changed, "found jitter_noise 0.1: set it to 0")
        changed = block()
        changed.experts = changed.experts[:3]
        refused(changed, "experts: found 3, wanted a multiple of 2", error=pkt.ShapeError)
        refused(block().double(), "gate.weight: found fp64", error=pkt.DtypeError)
        changed = TogetherExperts()
        changed.down_proj = nn.Parameter(torch.ones(EXPERTS, HIDDEN, FEATURES))
        refused(changed, r"found gate_up_proj \(4, 12, 8\) and down_proj \(4, 6, 8\)")

    on_ranks(2, run)


def test_wrong_arguments() -> None:
    def run(world: Any) -> None:
        def refused(match: str, call: Any, error: type[Exception] = pkt.ShapeError) -> None:
            with pytest.raises(error, match=rf"rank {world.rank}: {match}"):
                call()

        moe, experts = pkt.nn.MoE, pkt.nn.Experts(8, 6, 4)
        refused("pkt.nn.Experts: experts: found 5, wanted a multiple of 2", lambda: moe(8, 6, 5, 2))
        refused("pkt.nn.MoE: chosen: found 5, wanted 1 to 4", lambda: moe(8, 6, 4, 5))
        refused(r"pkt.nn.MoE: x: found \(2, 7\)", lambda: moe(8, 6, 4, 2)(drawn(2, 7)))
        ones = torch.ones(3, 2)
        refused(
            r"pkt.nn.Experts: topk_idx: found \(3, 2\), wanted \(2, chosen\)",
            lambda: experts(drawn(2, 8), ones.long(), ones),
        )
        refused("pkt.nn.Experts: found 1 name", lambda: pkt.nn.Experts(8, 6, 4, names=("a",)), pkt.Unsupported)

    on_ranks(2, run)


# ------------------------------------------------------------------------------------------------------------- compiled
def test_a_block_is_one_graph() -> None:
    def run(world: Any) -> None:
        torch.manual_seed(2)
        split = pkt.nn.MoE(FEATURES, HIDDEN, EXPERTS, CHOSEN)
        wanted = gradients(split, x := drawn(1, 3, FEATURES), torch.ones(1, 3, FEATURES))
        torch._dynamo.reset()
        found = gradients(torch.compile(split, backend="aot_eager", fullgraph=True), x, torch.ones(1, 3, FEATURES))
        for one, other in zip(found.values(), wanted.values(), strict=True):
            near(one, other.double(), least=0.1)

    on_ranks(2, run)


def test_a_block_with_room_is_exported_for_all_numbers_of_tokens() -> None:
    def run(world: Any) -> None:
        split = pkt.nn.MoE(FEATURES, HIDDEN, EXPERTS, CHOSEN, max_tokens=64)
        shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
        with torch.no_grad():
            program = torch.export.export(split, (drawn(4, 4, FEATURES),), dynamic_shapes=shapes)
            exported = torch.compile(program.module(), backend="eager")
            for batch in (2, 3):
                x = drawn(batch, 4, FEATURES)
                near(exported(x), split(x).double())

    on_ranks(2, run)
