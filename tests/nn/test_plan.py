"""pkt.parallelize: torch's plans in the simulator, on a world: results, what is gathered, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import pkt
from pkt.nn import linear, siblings

from .helpers import drawn, near, on_ranks

GATHER = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}


class MLP(nn.Module):
    """Three Linears, of which `other` does not take the input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.other = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, by: Any = None) -> torch.Tensor:
        x = x if by is None else by
        assert x.shape == (2, 4, 8)
        assert len(x) == 2
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def plan(**more: Any) -> dict[str, Any]:
    column = ColwiseParallel()
    rest = {"mlp.gate": column, "mlp.up": column, "mlp.other": ColwiseParallel(output_layouts=Replicate())}
    prepared = PrepareModuleInput(**GATHER)
    down = RowwiseParallel(output_layouts=Shard(1))
    return {"norm": SequenceParallel(), "mlp": prepared, **rest, "mlp.down": down, **more}


def agree(world: Any, split: nn.Module, whole: nn.Module, x: torch.Tensor) -> None:
    """Results and gradients of a model whose ranks have parts of dimension 1."""
    exact = whole.double()
    mine = x.chunk(world.size, 1)[world.rank].requires_grad_()
    wanted_x = x.double().requires_grad_()
    wanted = exact(wanted_x)
    found = split(mine)
    near(found.detach(), wanted.detach().chunk(world.size, 1)[world.rank], "result")
    wanted.square().sum().backward()
    found.square().sum().backward()
    near(mine.grad, wanted_x.grad.chunk(world.size, 1)[world.rank], "x")
    for name, parameter in split.named_parameters():
        if parameter.grad is None:
            continue
        of = exact.get_parameter(name.removeprefix("_orig_mod.")).grad
        if of is None:  # computed ahead, and not taken
            assert not parameter.grad.any()
            continue
        for dim in range(of.ndim):
            if of.shape[dim] != parameter.shape[dim]:
                of = of.chunk(world.size, dim)[world.rank]
        near(parameter.grad, of, name)
    split.zero_grad()


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """By call of all_gather_matmul in planned modules: the rows of each weight."""
    calls: list[list[int]] = []
    real = linear.all_gather_matmul

    def counted(a: torch.Tensor, b: Any, **more: Any) -> Any:
        calls.append([one.shape[1] for one in (b if isinstance(b, list) else [b])])
        return real(a, b, **more)

    for module in (linear, siblings):
        monkeypatch.setattr(module, "all_gather_matmul", counted)
    return calls


def test_linears_of_a_module_share_a_gather(gathers: list[list[int]]) -> None:
    def run(world: Any) -> None:
        split = pkt.parallelize(model(world.rank), world, plan())
        agree(world, split, model(), drawn(2, 4, 8))
        agree(world, split, model(), drawn(2, 4, 8))

    on_ranks(2, run)
    # On two ranks: the Linear that did not take the input was not expected again.
    assert gathers == [[6 + 6 + 4]] * 2 + [[6 + 6]] * 2


def test_layouts_without_a_module_that_gathers(gathers: list[list[int]]) -> None:
    def run(world: Any) -> None:
        each = ColwiseParallel(input_layouts=Shard(1))
        direct = {name: style for name, style in plan().items() if name != "mlp"}
        split = model()
        split.mlp.forward = lambda x: split.mlp.down(functional.silu(split.mlp.gate(x)) * split.mlp.up(x))
        pkt.parallelize(split, None, direct | {"mlp.gate": each, "mlp.up": each})
        assert "runs=all_gather_matmul" in repr(split.mlp.up)
        assert "runs=matmul_reduce_scatter" in repr(split.mlp.down)
        agree(world, split, model(), drawn(2, 4, 8))

    on_ranks(2, run)
    assert gathers == [[6 + 6]] * 2


def test_replicated_tokens_and_patterns() -> None:
    def run(world: Any) -> None:
        split, whole, x = model(), model().double(), drawn(2, 4, 8)
        pkt.parallelize(split, world, {"mlp.[gu]*": ColwiseParallel(), "mlp.down": RowwiseParallel()})
        near(split(x).detach(), whole(x.double()).detach())
        assert "runs=matmul_all_reduce" in repr(split.mlp.down)
        one = pkt.parallelize(nn.Linear(8, 4), world, ColwiseParallel(output_layouts=Replicate()))
        assert one(x).shape == (2, 4, 4)

    on_ranks(2, run)


def test_inputs_by_name() -> None:
    def run(world: Any) -> None:
        named = {"input_kwarg_layouts": {"by": Shard(1)}, "desired_input_kwarg_layouts": {"by": Replicate()}}
        split, whole, x = model(), model().double(), drawn(2, 4, 8)
        pkt.parallelize(split, world, plan(mlp=PrepareModuleInput(**named)))
        found = split.mlp(None, by=x.chunk(2, 1)[world.rank])
        near(found.detach(), whole.mlp(x.double()).detach().chunk(2, 1)[world.rank])

    on_ranks(2, run)


def test_whose_parameters_are_split() -> None:
    def run(world: Any) -> None:
        for source in (0, 1, None):
            split = pkt.parallelize(model(world.rank), world, plan(), src_data_rank=source)
            wanted = model(world.rank if source is None else source).mlp.gate.weight.chunk(2)[world.rank]
            assert torch.equal(split.mlp.gate.weight, wanted)
        with pytest.raises(pkt.RankError, match=r"pkt.parallelize\(src_data_rank=\)"):
            pkt.parallelize(model(), world, plan(), src_data_rank=2)

    on_ranks(2, run)


def test_a_team_for_each_tensor_group() -> None:
    """Two models of two ranks each, as in a mesh of data and tensor dimensions."""

    def run(world: Any) -> None:
        first = world.rank // 2 * 2
        team = world.team([first, first + 1])
        agree(team, pkt.parallelize(model(first), team, plan()), model(first), drawn(2, 4, 8, seed=first))

    on_ranks(4, run)


def test_shared_parameters_stay_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.output = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
            self.output.weight = self.embedding.weight

    both = {"embedding": RowwiseParallel(input_layouts=Replicate()), "output": ColwiseParallel()}

    def run(world: Any) -> None:
        tied = pkt.parallelize(Tied(), world, both)
        assert tied.output.weight is tied.embedding.weight
        with pytest.raises(
            pkt.Unsupported, match="module 'output': found a parameter that module 'embedding' has, too"
        ):
            pkt.parallelize(Tied(), world, {"output": ColwiseParallel()})

    on_ranks(2, run)


def test_one_layer_that_is_called_twice() -> None:
    """Under two names, as in ALBERT."""

    def layers() -> nn.Sequential:
        return nn.Sequential(*[model()] * 2)

    def run(world: Any) -> None:
        split = pkt.parallelize(layers(), world, {f"*.{name}": style for name, style in plan().items()})
        assert split.get_submodule("1.mlp.down") is split.get_submodule("0.mlp.down")
        agree(world, split, layers(), drawn(2, 4, 8))
        both = model()
        both.mlp.other = both.mlp.gate
        with pytest.raises(pkt.Unsupported, match="'mlp.gate': found it under the name 'mlp.other', too: make two mod"):
            pkt.parallelize(both, world, {"mlp.gate": ColwiseParallel()})

    on_ranks(2, run)


# -------------------------------------------------------------------------------------------------------------- refused
def test_a_plan_that_replaces_nothing() -> None:
    def run(world: Any) -> None:
        wanted = (
            r"found no Linear, no Embedding and no experts under the plan's names \['mlp.w1'\].*'mlp.gate', 'mlp.up'"
        )
        with pytest.warns(UserWarning, match="the plan's name 'mlp.w1' matches no module"):
            with pytest.raises(pkt.Unsupported, match=wanted):
                pkt.parallelize(model(), world, {"mlp.w1": ColwiseParallel()})
        with pytest.raises(pkt.Unsupported, match="found no Linear"):
            pkt.parallelize(model(), world, {"norm": SequenceParallel()})

    on_ranks(1, run)


def test_styles_and_layouts_that_pkt_has_not() -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def run(world: Any) -> None:
        def refused(match: str, name: str, style: Any, changed: Any = None) -> None:
            made = model()
            made.embedding = nn.Embedding(4, 8, padding_idx=0)
            if changed is not None:
                changed(made)
            before = world.heap.ledger.free_bytes
            with pytest.raises(pkt.Unsupported, match=rf"rank 0: pkt.parallelize: module '{name}': found {match}"):
                pkt.parallelize(made, world, {name: style}, src_data_rank=None)
            assert world.heap.ledger.free_bytes == before

        output = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        refused("style PrepareModuleOutput: use ColwiseParallel, RowwiseParallel", "mlp", output)
        slices = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
        refused(r"PrepareModuleInput from R.* to S.*: use Shard\(dim\) to Replicate\(\)", "mlp", slices)
        refused(
            r"ColwiseParallel to S.*: use Shard\(-1\) or Repl", "mlp.gate", ColwiseParallel(output_layouts=Shard(1))
        )
        refused(r"ColwiseParallel from S.*: use Replicate\(\)", "mlp.gate", ColwiseParallel(input_layouts=Shard(-1)))
        refused("ColwiseParallel from P", "mlp.gate", ColwiseParallel(input_layouts=Partial()))
        refused(
            r"RowwiseParallel from Rep.*: use input_layouts=Shard\(dim=-1\)",
            "mlp.down",
            RowwiseParallel(input_layouts=Replicate()),
        )
        refused("RowwiseParallel to S", "mlp.down", RowwiseParallel(output_layouts=Shard(-1)))
        refused("ColwiseParallel on an Embedding: use RowwiseParallel", "embedding", ColwiseParallel())
        vocabulary = RowwiseParallel(input_layouts=Replicate())
        refused("an Embedding with padding_idx: make it without", "embedding", vocabulary)
        refused("LayerNorm, which is no plain Linear: plan Linears", "norm", ColwiseParallel())
        refused(
            "Own, which is no plain Linear", "mlp.up", ColwiseParallel(), lambda m: setattr(m.mlp, "up", Own(8, 12))
        )
        refused("SequenceParallel on MLP, inside which modules have.*: plan the norms", "mlp", SequenceParallel())
        hooked = lambda m: m.mlp.up.register_forward_hook(print)  # noqa: E731
        refused("a module with hooks: add hooks after", "mlp.up", ColwiseParallel(), hooked)
        normed = lambda m: parametrizations.weight_norm(m.mlp.up)  # noqa: E731
        refused("Linear with a parametrization, as weight_norm makes: use", "mlp.up", ColwiseParallel(), normed)
        refused(r"the class ColwiseParallel as a style: make one: ColwiseParallel\(\)", "mlp.up", ColwiseParallel)
        twice = lambda m: pkt.parallelize(m, world, {"mlp.up": ColwiseParallel()})  # noqa: E731
        with pytest.raises(pkt.Unsupported, match="module 'mlp.up': found PlannedColumn, which is parallel already"):
            twice(twice(model()))
        split = {"norm": SequenceParallel(), "mlp.up": ColwiseParallel()}
        with pytest.raises(pkt.Unsupported, match="module 'norm': found SequenceParallelLayerNorm, which is parallel"):
            pkt.parallelize(pkt.parallelize(model(), world, split), world, {"norm": SequenceParallel()})
        for key in (0, None, ("mlp", "up")):
            with pytest.raises(
                pkt.DtypeError, match="pkt.parallelize: plan: found the name .*, wanted names of modules"
            ):
                pkt.parallelize(model(), world, {key: ColwiseParallel()})  # type: ignore[dict-item]
        with pytest.raises(pkt.DtypeError, match="pkt.parallelize: mesh: found str, wanted a DeviceMesh"):
            pkt.parallelize(model(), "tp", plan())
        with pytest.raises(pkt.DtypeError, match="pkt.parallelize: module: found World, wanted a torch.nn.Module"):
            pkt.parallelize(world, world, plan())
        with pytest.raises(pkt.DtypeError, match="module 'norm': weight: found fp64, wanted bfloat16"):
            pkt.parallelize(model().double(), world, plan())

    on_ranks(1, run)


def test_a_wrong_plan_changes_nothing() -> None:
    def run(world: Any) -> None:
        def refused(match: str, error: type[Exception] = pkt.Unsupported, **styles: Any) -> None:
            made = model()
            made.mlp.up = nn.Linear(8, 13 if error is pkt.ShapeError else 12)
            before, wanted = repr(made), {name: p.clone() for name, p in made.named_parameters()}
            with pytest.raises(error, match=match):
                pkt.parallelize(made, world, plan(**styles), src_data_rank=1)
            assert repr(made) == before
            assert all(torch.equal(p, wanted[name]) for name, p in made.named_parameters())

        refused(r"module 'mlp.up': weight: found \(13, 8\), wanted dimension 0 a multiple of 2", pkt.ShapeError)
        refused("module 'mlp.gate': found two styles: let one name", **{"mlp.g*": ColwiseParallel()})
        refused(
            "module 'mlp.down': found RowwiseParallel to", **{"mlp.down": RowwiseParallel(output_layouts=Shard(-1))}
        )

    on_ranks(2, run)


def test_elements_of_an_input_that_is_not_gathered() -> None:
    def run(world: Any) -> None:
        split, x = model(), drawn(2, 2, 8)
        pkt.parallelize(split, world, {**plan(), "mlp": PrepareModuleInput(**GATHER)})
        split.mlp.forward = lambda x: x * 2
        with pytest.raises(
            pkt.Unsupported, match="pkt.parallelize: 'mlp': found mul of the input.*leave PrepareModule"
        ):
            split(x)
        split.mlp.forward = lambda x: x.T
        with pytest.raises(pkt.Unsupported, match="found T of the input"):
            split(x)
        split.mlp.other = nn.Linear(8, 8)
        split.mlp.forward = lambda x: split.mlp.other(x)
        with pytest.raises(pkt.Unsupported, match="'mlp': found linear of the input"):
            split(x)
        with pytest.raises(pkt.Unsupported, match="module 'mlp': found 2 inputs, and layouts of 1"):
            split.mlp(x, x)

    on_ranks(2, run)


def test_a_plan_is_one_graph() -> None:
    def run(world: Any) -> None:
        split = pkt.parallelize(model(), world, plan())
        del split.mlp.other
        agree(world, torch.compile(split, backend="aot_eager", fullgraph=True), model(), drawn(2, 4, 8))

    on_ranks(2, run)


def test_a_checkpoint_of_a_plan_is_one_graph() -> None:
    """torch.compile lets the code inside change nothing outside."""

    def run(world: Any) -> None:
        split = pkt.parallelize(model(), world, plan())
        del split.mlp.other
        inner = split.forward
        split.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
        agree(world, torch.compile(split, backend="aot_eager", fullgraph=True), model(), drawn(2, 4, 8))

    on_ranks(2, run)


def test_a_plan_is_exported() -> None:
    def run(world: Any) -> None:
        split, x = pkt.parallelize(model(), world, plan()), drawn(2, 4, 8)
        del split.mlp.other
        mine = x.chunk(world.size, 1)[world.rank]
        program = torch.export.export(split, (mine,))
        right = model().double()(x.double()).chunk(world.size, 1)[world.rank]
        near(torch.compile(program.module(), backend="eager")(mine).detach(), right.detach())
        used = pkt.parallelize(Used(), world, {"": PrepareModuleInput(**GATHER), "up": ColwiseParallel()})
        with pytest.raises(Exception, match="found add of the input, which is gathered inside the Linears"):
            torch.export.export(used, (mine,))

    on_ranks(2, run)


class Used(nn.Module):
    """Uses its input beside a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) + x
