"""pkt.nn.fused_norms: which norms are computed with the sum before them, and that results stay right."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional

import pkt
from pkt.kernels import all_reduce, all_reduce_rms_norm, matmul_all_reduce, traced
from pkt.nn import norm_pass

from .helpers import drawn, near, on_ranks, whole_block

FEATURES, HIDDEN, ROWS = 16, 24, 5
PRODUCT = matmul_all_reduce.OPERATOR.op
PLAN = {
    "attention.[qkv]_proj": ColwiseParallel(),
    "attention.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


class Backend:
    """Of torch.compile: runs the pass, then the graph as it is."""

    def __init__(self) -> None:
        self.fused = 0
        self.called: list[str] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.fused += norm_pass.fuse(module.graph)
        module.graph.lint()
        module.recompile()
        self.called += [str(node.target) for node in module.graph.nodes if str(node.target).startswith("pkt.")]
        return module.forward


def run(fn: Callable[..., Any], *inputs: Any, fullgraph: bool = True, **options: Any) -> tuple[Any, Backend]:
    backend = Backend()
    with torch.no_grad():
        return torch.compile(fn, backend=backend, fullgraph=fullgraph, **options)(*inputs), backend


# -------------------------------------------------------------------------------------------------------- what is right
@pytest.fixture(autouse=True)
def forget_compiled_code() -> None:
    torch._dynamo.reset()


def test_a_block_is_right() -> None:
    def main(world: Any) -> list[str]:
        whole, x = whole_block(), drawn(2, 3, FEATURES)
        with torch.no_grad():
            exact = whole_block().double()(x.double())
        split = pkt.parallelize(whole, world, PLAN, src_data_rank=None)
        found, backend = run(split, x)
        near(found, exact)
        return backend.called

    # Behind attention; no norm is behind the MLP. Ranks may share compiled code.
    norm_and_product = ["pkt.all_reduce_rms_norm.default", "pkt.matmul_all_reduce.default"]
    compiled = [[name for name in called if "all_reduce" in name] for called in on_ranks(4, main) if called]
    assert compiled
    assert all(names == norm_and_product for names in compiled)


def test_inductor_takes_the_options() -> None:
    """Twice, the second time from its cache; and the dictionary can hold options of one's own."""

    def main(world: Any) -> None:
        x = drawn(2, 3, FEATURES)
        with torch.no_grad():
            exact = whole_block().double()(x.double())
            for _ in range(2):
                torch._dynamo.reset()
                split = pkt.parallelize(whole_block(), world, PLAN, src_data_rank=None)
                options = {**pkt.nn.fused_norms(), "epilogue_fusion": True}
                near(torch.compile(split, options=options)(x), exact)

    on_ranks(2, main)
    assert pkt.nn.fused_norms() == pkt.nn.fused_norms()


def test_inductor_can_keep_the_pass_in_its_caches_names() -> None:
    (made,) = pkt.nn.fused_norms().values()
    assert pickle.loads(pickle.dumps(made)).uuid() == made.uuid()
    assert len(made.uuid()) == 32


class Known(torch.fx.Interpreter):
    """Runs a graph, and lets each node know its value, as torch.compile does. Calls operators, because the simulator
    refuses their ops in code that torch has not compiled."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args = (*args, *kwargs.values()) if target is PRODUCT else args
        for one in (matmul_all_reduce, all_reduce_rms_norm, all_reduce):
            if target is one.OPERATOR.op:
                count, world = len(one.OPERATOR.tensors), pkt.current_world()
                return traced._fresh(one.OPERATOR, args[:count], tuple(args[count:-2]), world, None)
        return super().call_function(target, args, kwargs)

    def run_node(self, node: torch.fx.Node) -> Any:
        found = super().run_node(node)
        node.meta[norm_pass.VALUE] = found.clone() if isinstance(found, torch.Tensor) else found
        return found


# --------------------------------------------------------------------------------------------------- what is left alone
class Parts:
    """What a rank multiplies, its residual and weight; the same residual and weight on every rank."""

    def __init__(self, world: Any, dtype: torch.dtype = torch.float32) -> None:
        k = HIDDEN // world.size
        self.a = drawn(ROWS, HIDDEN, seed=1)[:, world.rank * k :][:, :k].contiguous().to(dtype)
        self.b = drawn(HIDDEN, FEATURES, seed=2)[world.rank * k :][:k].contiguous().to(dtype)
        self.residual, self.weight = drawn(ROWS, FEATURES, seed=3).to(dtype), drawn(FEATURES, seed=4).to(dtype)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.a, self.b, self.residual, self.weight


SETTINGS = {argument.name: None for argument in PRODUCT._schema.arguments} | {"epilogue": "none"}


SETTINGS_BEHIND = dict(list(SETTINGS.items())[3:])


def product(a: Any, b: Any, **given: Any) -> Any:
    """`pkt.matmul_all_reduce` as compiled code calls it, in the current world."""
    return PRODUCT(*(SETTINGS | {"a": a, "b": b, "world": "", "workspace": 0} | given).values())


def normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float | None = 1e-5) -> torch.Tensor:
    return functional.rms_norm(x, (FEATURES,), weight, eps)


def plain(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual + product(a, b)
    return new, normed(new, weight)


def sum_first(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = torch.add(product(a, b), residual)
    return new, torch.rms_norm(new, (FEATURES,), weight)


def new_is_changed_behind(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual + product(a, b)
    after = normed(new, weight)
    return new.mul_(2), after


def a_is_changed_before(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    a = a + 0
    y = product(a, b)
    a.zero_()
    return a + 1, normed(residual + y, weight)


def with_dimensions_in_front(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual[None] + product(a, b).view(1, ROWS, FEATURES)
    return new, normed(new, weight)


def as_hugging_face(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual + product(a, b)
    x = new.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return new, weight * x.to(residual.dtype)


def as_meta(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual + product(a, b)
    x = new.float()
    normed = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5)
    return new, normed.type_as(new) * weight


FUSED = [
    as_hugging_face,
    as_meta,
    plain,
    sum_first,
    new_is_changed_behind,
    a_is_changed_before,
    with_dimensions_in_front,
]


def new_is_changed_between(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual + product(a, b)
    new.mul_(2)
    return new, normed(new, weight)


def a_view_of_new_is_changed_between(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual + product(a, b)
    new[:2].mul_(2)
    return new, normed(new, weight)


def the_weight_is_changed_between(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    weight = weight + 0
    new = residual + product(a, b)
    weight.mul_(2)
    return new, normed(new, weight)


def the_sum_has_another_use(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    y = product(a, b)
    return y, normed(residual + y, weight)


def in_place(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = (residual + 0).add_(product(a, b))
    return new, normed(new, weight)


def with_alpha(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = torch.add(residual, product(a, b), alpha=2)
    return new, normed(new, weight)


def with_bias(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual + product(a, b, bias=weight)
    return new, normed(new, weight)


def with_an_epilogue(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual + product(a, b, epilogue="relu")
    return new, normed(new, weight)


def with_a_form(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual + product(a, b, form="unfused")
    return new, normed(new, weight)


def without_weight(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual + product(a, b)
    return new, normed(new, None)


def one_row_for_all(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual[:1] + product(a, b)
    return new, normed(new, weight)


def a_number(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = 1.0 + product(a, b)
    return new, normed(new, weight)


def two_dimensions(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual + product(a, b)
    return new, functional.rms_norm(new, (ROWS, FEATURES), weight.expand(ROWS, FEATURES))


def other_columns(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    half = FEATURES // 2
    new = residual.view(-1, half) + product(a, b).view(-1, half)
    return new, functional.rms_norm(new, (half,), weight[:half])


def turned(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual.t() + product(a, b).t()
    return new, functional.rms_norm(new, (ROWS,), weight[:ROWS])


def another_dtype(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual.double() + product(a, b)
    return new, normed(new, weight.double())


def written_out(x: Any, weight: Any, over: int = -1, eps: Any = 1e-5, power: int = 2, to: Any = torch.float32) -> Any:
    whole = x.to(torch.float32)
    scale = torch.rsqrt(whole.pow(power).mean(over, keepdim=True) + eps)
    return weight * (whole * scale).to(to)


def over_rows(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    return (written_out(residual + product(a, b), weight, over=0),)


def of_fourth_powers(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    return (written_out(residual + product(a, b), weight, power=4),)


def with_epsilon_of_a_tensor(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    return (written_out(residual + product(a, b), weight, eps=weight[0] ** 2),)


def with_a_mean_of_something_else(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual + product(a, b)
    x = new.float()
    return (weight * (x * torch.rsqrt(residual.float().pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(new),)


def with_a_scale_that_is_used(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual + product(a, b)
    x = new.float()
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * (x * scale).type_as(new), scale


def with_another_result(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    return (written_out(residual + product(a, b), weight, to=torch.float64),)


def with_a_weight_made_between(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual + product(a, b)
    return (normed(new, weight + 1),)


def without_epsilon(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    return (normed(residual + product(a, b), weight, 0.0),)


def by_keywords(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual + PRODUCT(a, b, None, **(SETTINGS_BEHIND | {"world": "", "workspace": 0}))
    return (normed(new, weight),)


def multiplied_by_keywords(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    return (torch.mul(residual + product(a, b), other=weight),)


def no_product(a: Any, b: Any, residual: Any, weight: Any) -> Any:
    new = residual + all_reduce.OPERATOR.op(a @ b, "sum", *[None] * (len(all_reduce.OPERATOR.keywords) - 1), "", 0)
    return new, normed(new, weight)


LEFT = [
    new_is_changed_between, a_view_of_new_is_changed_between, the_weight_is_changed_between, the_sum_has_another_use,
    over_rows, of_fourth_powers, with_epsilon_of_a_tensor, with_a_mean_of_something_else, with_a_scale_that_is_used,
    with_another_result, with_a_weight_made_between, in_place, with_alpha, with_bias, with_an_epilogue, with_a_form,
    without_weight, without_epsilon, by_keywords, multiplied_by_keywords, one_row_for_all, a_number, two_dimensions,
    other_columns, turned, another_dtype, no_product,
]  # fmt: skip


@pytest.mark.parametrize("fn", [*FUSED, *LEFT], ids=lambda fn: fn.__name__)
def test_what_is_fused_and_that_it_is_right(fn: Callable[..., Any]) -> None:
    def main(world: Any) -> None:
        graph = torch.fx.symbolic_trace(fn)
        wanted = Known(graph).run(*Parts(world).inputs())
        assert norm_pass.fuse(graph.graph) == (fn in FUSED)
        graph.graph.lint()
        for one, exact in zip(Known(graph).run(*Parts(world).inputs()), wanted, strict=True):
            near(one, exact.double())

    on_ranks(2, main)


@pytest.mark.parametrize("eps", [None, 1e-5, 0.5])
def test_epsilon_is_torchs(eps: float | None) -> None:
    def fn(a: Any, b: Any, residual: Any, weight: Any) -> Any:
        return normed(residual + product(a, b), weight, eps)

    def main(world: Any) -> None:
        parts, graph = Parts(world), torch.fx.symbolic_trace(fn)
        small = parts.a * 1e-4, parts.b, parts.residual * 1e-4, parts.weight  # where epsilon decides
        wanted = Known(graph).run(*small)
        assert norm_pass.fuse(graph.graph) == 1
        near(Known(graph).run(*small), wanted.double())

    on_ranks(2, main)


def test_rows_that_are_many_or_not_known_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(world: Any) -> tuple[int, ...]:
        inputs = Parts(world).inputs()
        a, b, residual, weight = inputs
        for x in (a, residual):
            torch._dynamo.mark_dynamic(x, 0)
        _, any_rows = run(plain, a, b, residual, weight)
        graph = torch.fx.symbolic_trace(plain)
        Known(graph).run(*Parts(world).inputs())
        monkeypatch.setattr(norm_pass, "MOST_ROWS", ROWS - 1)
        return any_rows.fused, norm_pass.fuse(graph.graph)

    assert on_ranks(1, main) == [(0, 0)]


def test_a_forward_pass_with_gradients_stays() -> None:
    def main(world: Any) -> None:
        split, x, backend = pkt.parallelize(whole_block(), world, PLAN, src_data_rank=None), drawn(2, 3, 16), Backend()
        torch.compile(split, backend=backend)(x.requires_grad_()).sum().backward()
        assert backend.fused == 0
        assert x.grad is not None

    on_ranks(2, main)


def test_over_nodes_nothing_is_fused() -> None:
    def main(world: Any) -> None:
        graph = torch.fx.symbolic_trace(plain)
        Known(graph).run(*Parts(world).inputs())
        assert norm_pass.fuse(graph.graph) == 0

    pkt.launch(main, 2, device="cpu", node_size=1)


class LlamaRMSNorm(nn.Module):
    """With the arithmetic of Hugging Face's."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(features)), 1e-6

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        dtype = states.dtype
        states = states.to(torch.float32)
        variance = states.pow(2).mean(-1, keepdim=True)
        states = states * torch.rsqrt(variance + self.eps)
        return self.weight * states.to(dtype)


@pytest.mark.parametrize("kind", [nn.RMSNorm, LlamaRMSNorm])
def test_a_module_of_its_own(kind: Callable[[int], nn.Module]) -> None:
    """RowParallelLinear and a norm, without a plan."""

    class Half(nn.Module):
        def __init__(self, world: Any) -> None:
            super().__init__()
            self.down = pkt.nn.RowParallelLinear(HIDDEN, FEATURES, bias=False, world=world)
            self.norm = kind(FEATURES)

        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return self.norm(self.down(x) + residual)

    def main(world: Any) -> int:
        torch.manual_seed(0)
        half, parts = Half(world), Parts(world)
        with torch.no_grad():
            wanted = half(parts.a, parts.residual)
        found, backend = run(half, parts.a, parts.residual)
        near(found, wanted.double())
        return backend.fused

    assert max(on_ranks(3, main)) == 1
