"""Linears of one module that take one input: one product, whatever happens to their weights."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pkt
from pkt.nn import linear, siblings

from .helpers import drawn, near, on_ranks

WIDTHS = (16, 4, 4)
GATHER = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())


class Heads(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, width, bias) for width in WIDTHS)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        q = self.q(x)
        x = x if memory is None else memory
        return q * torch.cat([self.k(x), self.v(x)], -1).repeat(1, 2)


def heads(**options: Any) -> Heads:
    torch.manual_seed(0)
    return Heads(**options)


def split(world: Any, whole: nn.Module, gathers: bool = False, **options: Any) -> Any:
    plan: dict[str, Any] = {"[qkv]": ColwiseParallel()} | ({"": GATHER} if gathers else {})
    return pkt.parallelize(whole, world, plan, src_data_rank=None, **options)


def wanted(world: Any, whole: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What this rank computes, in fp64: the columns of its part of each weight."""
    each = [functional.linear(x.double(), *(p.double().chunk(world.size)[world.rank] for p in one.parameters()))
            for one in (whole.q, whole.k, whole.v)]  # fmt: skip
    return each[0] * torch.cat(each[1:], -1).repeat(1, 2)


def agree(world: Any, one: Any, whole: nn.Module, x: torch.Tensor, gathers: bool = False) -> None:
    """The result, and the gradients of this rank's part of the weights and of x."""
    exact = copy.deepcopy(whole).double()
    of_all = x.double().requires_grad_()
    mine = (x.chunk(world.size)[world.rank] if gathers else x).clone().requires_grad_()
    found, right = one(mine), wanted(world, exact, of_all)
    near(found.detach(), right.detach(), "result")
    found.square().sum().backward()
    right.square().sum().backward()
    for name, parameter in one.named_parameters():
        of = exact.get_parameter(name.removeprefix("_orig_mod.").removeprefix("0.")).grad
        near(parameter.grad, of.chunk(world.size)[world.rank], name)
    total = sum(world.all_gather_object(of_all.grad))
    near(mine.grad, total.chunk(world.size)[world.rank] if gathers else total, "x")
    one.zero_grad()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of the weight in each product of siblings."""
    shapes: list[tuple[int, ...]] = []
    real = linear.multiplied

    def counted(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
        shapes.append(tuple(weight.shape))
        return real(x, weight, *others)

    monkeypatch.setattr(siblings, "multiplied", counted)
    return shapes


def compiled(module: nn.Module, graphs: list[Counter]) -> Any:
    """Compiled in one graph; the ops of each graph behind autograd are counted."""
    torch._dynamo.reset()

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return make_boxed_func(graph.forward)

    return torch.compile(module, backend=aot_autograd(fw_compiler=count), fullgraph=True)


@pytest.mark.parametrize("gathers", [False, True])
def test_one_product(gathers: bool, products: list[tuple[int, ...]]) -> None:
    """Eager and compiled, with gradients and without, and in calls with one input."""

    def run(world: Any) -> None:
        one, x = split(world, heads(), gathers), drawn(4, 8)
        mine = x.chunk(world.size)[world.rank] if gathers else x
        for _ in range(2):
            one(mine)
        agree(world, one, heads(), x, gathers)
        with torch.no_grad():
            near(one(mine), wanted(world, heads(), x).detach())
        graphs: list[Counter] = []
        fast = compiled(nn.Sequential(one), graphs)
        agree(world, fast, heads(), x, gathers)
        with torch.no_grad():
            near(fast(mine), wanted(world, heads(), x).detach())
        op = "pkt.all_gather_matmul.default" if gathers else "aten.addmm.default"
        assert [graph[op] for graph in graphs] == [1, 0, 1]
        assert [graph["pkt.check_below.default"] for graph in graphs] == [1, 0, 1]
        weights = 1 + (not gathers)  # beside x's gradient
        assert graphs[1]["aten.mm.default"] == weights, graphs[1]

    on_ranks(2, run)
    assert set(products) == {(12, 8)}


def test_a_kept_input_is_not_gathered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from pkt.kernels.all_gather_matmul import host

    again: list[int] = []
    monkeypatch.setattr(host, "all_gather", lambda *given, **more: again.append(1))

    def run(world: Any) -> None:
        agree(world, split(world, heads(), True, keep="whole"), heads(), drawn(4, 8), True)

    on_ranks(2, run)
    assert again == []


def moved(one: Any) -> None:
    one.k.weight.data = one.k.weight.data.clone()


def assigned(one: Any) -> None:
    one.load_state_dict({name: tensor.clone() for name, tensor in one.state_dict().items()}, assign=True)


def emptied(one: Any) -> None:
    state = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    one.to_empty(device="cpu")
    one.load_state_dict(state)


def neighbours(one: Any) -> None:
    """Each begins where the one before ends, and has a storage of its own."""
    weights = [each.weight for each in (one.q, one.k, one.v)]
    memory = bytearray(sum(weight.nbytes for weight in weights))
    for weight, end in zip(weights, itertools.accumulate(weight.nbytes for weight in weights)):
        begin = end - weight.nbytes
        data = torch.frombuffer(memory, dtype=weight.dtype, count=weight.numel(), offset=begin).view_as(weight)
        weight.data = data.copy_(weight.data)


CHANGES = [moved, assigned, emptied, neighbours, lambda one: one.double().float(), copy.deepcopy]


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_moved_are_laid_again(change: Callable[[Any], Any], products: list[tuple[int, ...]]) -> None:
    """Compiled code, which was made before, notices."""

    def run(world: Any) -> None:
        one, x = split(world, heads()), drawn(4, 8)
        fast = compiled(one, [])
        fast(x)
        changed = change(one) or one
        if changed is not one:
            fast = torch.compile(changed, backend="aot_eager", fullgraph=True)
            near(fast(x).detach(), wanted(world, heads(), x).detach())
        elif not siblings.are_below([each.weight for each in (one.q, one.k, one.v)]):
            with pytest.raises(pkt.Unsupported, match=r"weights \(16, 8\), \(4, 8\), \(4, 8\) that do not lie below"):
                fast(x)
        products.clear()
        agree(world, changed, heads(), x)
        assert siblings.are_below([each.weight for each in (changed.q, changed.k, changed.v)])
        agree(world, fast, heads(), x)

    on_ranks(1, run)
    assert {shape[0] for shape in products} == {sum(WIDTHS)}


def test_an_input_that_is_written_to(products: list[tuple[int, ...]]) -> None:
    class Written(Heads):
        def forward(self, x: torch.Tensor, memory: Any = None) -> torch.Tensor:
            q = self.q(x)
            x.mul_(2)
            return q * torch.cat([self.k(x), self.v(x)], -1).repeat(1, 2)

    def run(world: Any) -> None:
        torch.manual_seed(0)
        one, x = split(world, Written()), drawn(4, 8)
        exact = heads().double()
        y = x.double()
        right = exact.q(y) * torch.cat([exact.k(2 * y), exact.v(2 * y)], -1).repeat(1, 2)
        with pytest.raises(Exception, match="found a write to the input of Linears between their calls"):
            compiled(one, [])(x.clone())
        for _ in range(2):
            near(one(x.clone()).detach(), right.detach())

    on_ranks(1, run)


@pytest.mark.parametrize("compiles", [False, True])
def test_another_mode(compiles: bool) -> None:
    """q is computed without a gradient, or in bf16; k and v are not."""

    class Mixed(Heads):
        def forward(self, x: torch.Tensor, memory: Any = None) -> torch.Tensor:
            with torch.no_grad():
                q = self.q(x)
            with torch.autocast("cpu", torch.bfloat16):
                k = self.k(x)
            v = self.v(x)
            assert (k.dtype, v.dtype) == (torch.bfloat16, torch.float32)
            return q * torch.cat([k.float(), v], -1).repeat(1, 2)

    def run(world: Any) -> None:
        torch.manual_seed(0)
        one = split(world, Mixed())
        call = compiled(one, []) if compiles else one
        for _ in range(2):
            call(drawn(4, 8)).sum().backward()
        assert [each.weight.grad is None for each in (one.q, one.k, one.v)] == [True, False, False]

    on_ranks(1, run)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_parameters_that_change_before_a_result_is_taken(name: str) -> None:
    def run(world: Any) -> None:
        one, x = split(world, heads()), drawn(4, 8)
        one.q(x)
        with torch.no_grad():
            getattr(one.k, name).add_(1)
        near(one.k(x).detach(), functional.linear(x.double(), one.k.weight.double(), one.k.bias.double()).detach())

    on_ranks(1, run)


class Chosen(Heads):
    """Calls the Linears that it is told to."""

    def forward(self, x: torch.Tensor, names: Any = "qkv") -> torch.Tensor:
        return torch.cat([getattr(self, name)(x) for name in names], -1)


@pytest.mark.parametrize("compiles", [False, True])
def test_results_that_wait_at_a_backward_pass(compiles: bool) -> None:
    """It frees their graph."""

    def run(world: Any) -> None:
        torch.manual_seed(0)
        one, exact, x = split(world, Chosen()), heads().double(), drawn(4, 8)
        call = compiled(one, []) if compiles else one
        for names in ("qk", "v", "q"):
            call(x, names).square().sum().backward()
            Chosen.forward(exact, x.double(), names).square().sum().backward()
        for name, parameter in one.named_parameters():
            near(parameter.grad, exact.get_parameter(name.removeprefix("_orig_mod.")).grad, name)

    on_ranks(1, run)


def test_a_checkpoint_computes_the_same_products_once_more() -> None:
    """Of Linears that do not all take one input, and whose results wait at a later checkpoint."""

    def run(world: Any) -> None:
        torch.manual_seed(0)
        one, exact, x = split(world, Chosen()), heads().double(), drawn(4, 8)
        for _ in range(2):
            results = [checkpoint(one, x, names, use_reentrant=False) for names in ("qk", "qv")]
            torch.cat(results, -1).square().sum().backward()
            right = [Chosen.forward(exact, x.double(), names) for names in ("qk", "qv")]
            torch.cat(right, -1).square().sum().backward()
        for name, parameter in exact.named_parameters():
            near(one.get_parameter(name).grad, parameter.grad, name)

    on_ranks(1, run)


@pytest.mark.parametrize("name", ["input", "v.weight", "v.bias"])
def test_writes_between_calls_of_compiled_code(name: str) -> None:
    """The second call uses no result that waits since the first."""

    def run(world: Any) -> None:
        torch.manual_seed(0)
        one, x = split(world, Chosen()), drawn(4, 8)
        call = compiled(one, [])
        with torch.no_grad():
            call(x, "qk")
            (x if name == "input" else one.get_parameter(name)).mul_(2)
            near(call(x, "qv"), Chosen.forward(copy.deepcopy(one).double(), x.double(), "qv"))

    on_ranks(1, run)


def test_two_frozen_weights_compile() -> None:
    def run(world: Any) -> None:
        torch.manual_seed(0)
        one, x = split(world, Chosen()).requires_grad_(False), drawn(4, 8).requires_grad_()
        eager, found = one(x, "qk"), compiled(one, [])(x, "qk")
        near(found.detach(), eager.detach().double())
        of_eager, of_found = (torch.autograd.grad(y.square().sum(), x)[0] for y in (eager, found))
        near(of_found, of_eager.double())

    on_ranks(1, run)


def test_functional_calls_with_other_weights() -> None:
    def run(world: Any) -> None:
        one, x = split(world, heads()), drawn(4, 8)
        others = {name: tensor.detach() * 2 for name, tensor in one.named_parameters()}

        def call(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(one, parameters, (x,))

        for each in (call, compiled(call, [])):
            near(each(others), 4 * wanted(world, heads(), x).detach())
            near(one(x).detach(), wanted(world, heads(), x).detach())

    on_ranks(1, run)


def test_another_input(products: list[tuple[int, ...]]) -> None:
    """Of k and v: q is not expected to take theirs again, nor they q's."""

    def run(world: Any) -> None:
        one, x, memory = split(world, heads()), drawn(4, 8), drawn(4, 8, seed=1)
        exact = heads().double()
        right = exact.q(x.double()) * torch.cat([exact.k(memory.double()), exact.v(memory.double())], -1).repeat(1, 2)
        for _ in range(3):
            products.clear()
            near(one(x, memory).detach(), right.detach())

    on_ranks(1, run)
    assert products == [(16, 8), (4, 8), (4, 8)]


def test_writes_to_one_result() -> None:
    """As by rotations in place: they are no writes to the other results, which the backward pass needs."""

    class Rotated(Heads):
        def forward(self, x: torch.Tensor, memory: Any = None) -> torch.Tensor:
            q, k, v = self.q(x), self.k(x), self.v(x)
            squares = v * v  # needs v for its gradient
            q.mul_(1)
            return q * torch.cat([k, squares / v], -1).repeat(1, 2)

    def run(world: Any) -> None:
        torch.manual_seed(0)
        agree(world, split(world, Rotated()), heads(), drawn(4, 8))

    on_ranks(2, run)


def test_a_write_to_a_weight_before_the_backward_pass_raises() -> None:
    def run(world: Any) -> None:
        one = split(world, heads())
        y = one(drawn(4, 8).requires_grad_())
        with torch.no_grad():
            one.v.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    on_ranks(1, run)


def of_other_weights() -> Sequence[tuple[str, Callable[[Heads], None]]]:
    def tied(whole: Heads) -> None:
        whole.v.weight = whole.k.weight

    def frozen(whole: Heads) -> None:
        whole.k.weight.requires_grad_(False)

    def without_bias(whole: Heads) -> None:
        whole.k = nn.Linear(8, WIDTHS[1], bias=False)

    return [(f.__name__, f) for f in (tied, frozen, without_bias)]


@pytest.mark.parametrize(("name", "change"), of_other_weights())
@pytest.mark.parametrize("gathers", [False, True])
def test_weights_that_are_not_alike(name: str, change: Callable[[Heads], None], gathers: bool) -> None:
    def run(world: Any) -> None:
        whole = heads()
        change(whole)
        one, x = split(world, copy.deepcopy(whole), gathers), drawn(4, 8)
        exact = copy.deepcopy(whole).double()
        for run in (one, one, compiled(nn.Sequential(one), [])):
            found = run(x.chunk(world.size)[world.rank] if gathers else x)
            near(found.detach(), wanted(world, exact, x).detach())
        found.sum().backward()
        assert (one.k.weight.grad is None) == (name == "frozen")
        assert (one.v.weight is one.k.weight) == (name == "tied")
        with torch.no_grad():
            for module in (one, exact):
                for parameter in module.parameters():
                    parameter.add_(1)
            near(one(x.chunk(world.size)[world.rank] if gathers else x), wanted(world, exact, x).detach())

    on_ranks(2, run)


def test_inference_mode_where_writes_are_not_seen(products: list[tuple[int, ...]]) -> None:
    def run(world: Any) -> None:
        one, x = split(world, heads()), drawn(4, 8)
        with torch.inference_mode():
            y = one(x.clone())
        near(y.clone(), wanted(world, heads(), x).detach())

    on_ranks(1, run)
    assert products == [(16, 8), (4, 8), (4, 8)]


def test_an_optimiser_keeps_the_weights_where_they_are() -> None:
    def run(world: Any) -> None:
        one, x = split(world, heads()), drawn(4, 8)
        before = one.q.weight.detach().clone()
        for step in (lambda o: o.step(), lambda o: torch.compile(o.step, backend="aot_eager")()):
            one(x).sum().backward()
            step(torch.optim.SGD(one.parameters(), lr=0.1))
        assert siblings.are_below([each.weight for each in (one.q, one.k, one.v)])
        assert not torch.equal(one.q.weight, before)

    on_ranks(1, run)
