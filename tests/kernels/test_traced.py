"""Operators in graphs that torch makes: torch.compile without a graph break, torch.export, fake tensors, transforms."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import pkt
from pkt.kernels.operator import Operator, operators

from .helpers import on_ranks


def compiled(function: Any, backend: str = "aot_eager", **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, **options)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Block(nn.Module):
    """A Llama layer, tensor and sequence parallel: x (m, width) are this rank's tokens."""

    def __init__(self, width: int = 16, heads: int = 2, head: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.heads, self.head = heads, head
        self.before, self.between = Norm(width), Norm(width)
        shapes = [(heads * head, width)] * 3 + [(width, heads * head), (2 * hidden, width), (width, hidden)]
        self.weights = nn.ParameterList(0.2 * torch.randn(shape) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v, o, up, down = (weight.t() for weight in self.weights)
        each = pkt.all_gather_matmul(self.before(x), [q, k, v])
        each = [one.view(-1, self.heads, self.head).transpose(0, 1) for one in each]
        seen = nn.functional.scaled_dot_product_attention(*each, is_causal=True)
        x = x + pkt.matmul_reduce_scatter(seen.transpose(0, 1).reshape(-1, self.heads * self.head), o)
        hidden = pkt.all_gather_matmul(self.between(x), up, epilogue="swiglu")
        return x + pkt.matmul_reduce_scatter(hidden, down)


class Gathered(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return pkt.all_gather(x)


def gradients(model: Any, x: torch.Tensor, parameters: Any) -> list[torch.Tensor]:
    """The result, and the gradients of its squared sum."""
    result = model(x)
    return [result.detach(), *torch.autograd.grad(result.square().sum(), [x, *parameters])]


def assert_alike(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-5 * (1 + b.abs().max()), (a - b).abs().max()


def test_a_llama_layer_is_one_graph() -> None:
    def run(world: Any) -> None:
        torch.manual_seed(world.rank)
        block, x = Block(), torch.randn(4, 16, requires_grad=True)
        wanted = gradients(block, x, block.parameters())
        assert_alike(gradients(compiled(block), x, block.parameters()), wanted)

    on_ranks(2, run, seed=1)


def test_inductor() -> None:
    def run(world: Any) -> None:
        x = torch.randn(4, 8, requires_grad=True)
        found = compiled(lambda x: pkt.all_gather(x), "inductor")(x)
        found.sum().backward()
        assert torch.equal(found[4 * world.rank :][:4], x)
        assert x.grad.eq(2).all()

    on_ranks(2, run)


def test_torchs_caches_know_the_size_of_a_world(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code in torch's caches, which other processes use too, has the shapes of results for as many ranks."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def run(world: Any) -> list[tuple[int, ...]]:
        x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 6)
        team = world.team(range(world.size - 1, -1, -1))

        def called(x: torch.Tensor) -> Any:
            return pkt.all_gather(x), *pkt.all_gather_matmul(x, [w, w]), pkt.all_gather(x, world=team)

        found = compiled(called, "inductor")(x)
        for one, wanted in zip(found, called(x), strict=True):
            assert torch.allclose(one, wanted, rtol=1e-4, atol=1e-4)
        return [tuple(one.shape) for one in found]

    for ranks in (1, 2, 3):
        rows = 4 * ranks
        (shapes, *others) = on_ranks(ranks, run)
        assert shapes == [(rows, 8), (rows, 6), (rows, 6), (rows, 8)]
        assert all(other == shapes for other in others)


def test_code_of_a_world_of_another_size_is_refused() -> None:
    programs = []

    def export(world: Any) -> None:
        programs.append(torch.export.export(Gathered(), (torch.randn(4, 8),)))

    def run(world: Any) -> None:
        found = "of world 'of 1': found a world of 2: compile or export the code in this world"
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=found):
            compiled(programs[0].module(), "eager")(torch.randn(4, 8))

    on_ranks(1, export)
    on_ranks(2, run)


def test_results_that_are_written() -> None:
    """A given output, a reduction in place of an input, and one that autograd sees."""

    def several(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, world: Any) -> Any:
        given = pkt.all_gather(x, out, world=world)
        assert given is out
        inside = pkt.all_reduce(y * 2)
        return pkt.all_reduce(x, world=world), inside, out + 1

    def run(world: Any) -> None:
        x, y, out = torch.full((2,), 1.0 + world.rank), torch.ones(2, requires_grad=True), torch.empty(4)
        reduced, inside, more = compiled(several)(x, y, out, world)
        inside.sum().backward()
        assert reduced is x
        assert x.tolist() == [3.0] * 2
        assert inside.tolist() == [4.0] * 2
        assert y.grad.tolist() == [4.0] * 2
        assert out.tolist() == [1.0, 1.0, 2.0, 2.0]
        assert torch.equal(more, out + 1)

    on_ranks(2, run, seed=2)


def test_sizes_that_change_and_a_workspace() -> None:
    def run(world: Any) -> None:
        with pkt.Workspace(world) as workspace:
            before = world.heap.ledger.free_bytes
            product = compiled(
                lambda a, b: pkt.all_gather_matmul(a, b, workspace=workspace, mode="push", tiles=(16, 16, 16)),
                dynamic=True,
            )
            for m in (4, 6, 9):
                a, b = torch.randn(m, 8), torch.randn(8, 6)
                found = product(a, b)
                assert torch.allclose(found, torch.cat(world.all_gather_object(a)) @ b, rtol=1e-4, atol=1e-4)
        assert world.heap.ledger.free_bytes == before
        with pytest.raises(pkt.Closed, match="workspace 1"):
            product(a, b)

    on_ranks(2, run)


def _attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q, k, v = (x @ w[0]).view(1, len(x), 8, 8).split([4, 2, 2], 2)
    return pkt.ulysses_attention(q, k, v, causal=True)


def _routed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(2).expand(len(x), 2), x[:, :2].softmax(1)


def _experts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    there, hidden = pkt.dispatch_matmul(x, *_routed(x), w, max_tokens=64, clear=True)
    return pkt.matmul_combine(pkt.grouped_activation(hidden, there.offsets), w[:, :, :32].mT.contiguous(), there)


def _layer_of_experts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return pkt.moe(x, *_routed(x), w, w[:, :, :32].mT.contiguous(), max_tokens=64)


def _shared_experts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    there = pkt.all_gather_grouped_matmul(x, *_routed(x), w, clear=True)
    return pkt.grouped_matmul_reduce_scatter(there.product, w.mT, there)


def _norms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    normed, residual = pkt.all_reduce_rms_norm(x @ w[0], x @ w[1], w[0, 0])
    return pkt.reduce_scatter_rms_norm(normed, residual[: len(x) // 2], w[1, 0])[0]


@pytest.mark.parametrize("call", [_attention, _experts, _layer_of_experts, _shared_experts, _norms])
def test_all_sizes_that_change(call: Any) -> None:
    """Results whose sizes are sums or parts of the operands', forwards and backwards."""

    def run(world: Any) -> None:
        in_graph, frames = compiled(call, dynamic=True), []
        for m in (4, 10):
            x, w = torch.randn(m, 8), torch.randn(2, 8, 64) / 8
            each = []
            for function in (call, in_graph):
                own = [t.clone().requires_grad_() for t in (x, w)]
                out = function(*own)
                out.square().sum().backward()
                each.append((out, *(t.grad for t in own)))
            for eager, traced in zip(*each):
                assert torch.allclose(eager, traced, rtol=1e-3, atol=1e-3)
            frames.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert frames[0] == frames[-1]  # one graph for all sizes

    on_ranks(2, run)


@pytest.mark.parametrize("tiles", [None, (16, 16, 16)])
def test_an_op_plans_once(tiles: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it takes a tuple, which torch makes a list of."""
    plans: list[str] = []
    plan = Operator.plan

    def counting(self: Operator, *arguments: Any, **keywords: Any) -> Any:
        plans.append(self.name)
        return plan(self, *arguments, **keywords)

    monkeypatch.setattr(Operator, "plan", counting)

    def run(world: Any) -> None:
        product = compiled(lambda a, b: pkt.all_gather_matmul(a, b, mode="push", tiles=tiles), "eager")
        a, b = torch.randn(4, 8), torch.randn(8, 6)
        for _ in range(3):
            product(a, b)
        pkt.all_gather_matmul(a, b, mode="push", tiles=tiles)

    on_ranks(2, run)
    assert plans == ["all_gather_matmul"] * 2


def test_checkpoint_in_a_graph() -> None:
    def run(world: Any) -> None:
        w = torch.randn(8, 6, requires_grad=True)
        x = torch.randn(4, 8, requires_grad=True)

        def model(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda y: pkt.all_gather_matmul(y, w, epilogue="silu"), x, use_reentrant=False)

        assert_alike(gradients(compiled(model), x, [w]), gradients(model, x, [w]))

    on_ranks(2, run)


def test_export() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return pkt.all_gather_matmul(x, self.weight, epilogue="gelu")

    def run(world: Any) -> None:
        model, x = Model(), torch.randn(4, 8)
        program = torch.export.export(model, (x,))
        called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert called[0] == "pkt.all_gather_matmul.default"
        with pytest.raises(pkt.Unsupported, match="compiled outside of the simulation"):
            program.module()(x)
        assert torch.allclose(compiled(program.module(), "eager")(x), model(x))

    on_ranks(2, run)


@pytest.mark.filterwarnings("error:Accessing the data pointer of FakeTensor")
def test_fake_tensors_have_the_shapes_of_results() -> None:
    def run(world: Any) -> None:
        with FakeTensorMode():
            x, w = torch.empty(4, 8), torch.empty(8, 6, requires_grad=True)
            assert pkt.all_gather(x, dim=1).shape == (4, 16)
            assert pkt.all_reduce(x).shape == (4, 8)
            q, k = pkt.all_gather_matmul(x, [w, w])
            assert q.shape == k.shape == (8, 6)
            with pytest.raises(pkt.ShapeError, match=r"b: found \(7, 6\), wanted \(8, 6\)"):
                pkt.all_gather_matmul(x, torch.empty(7, 6))
            for other in (x.bfloat16(), x.double()):
                with pytest.raises(pkt.DtypeError, match=r"all_gather_matmul: (a: found fp64|b: found fp32), wanted"):
                    pkt.all_gather_matmul(other, w)

    on_ranks(2, run)


def test_transforms_and_direct_calls_are_refused() -> None:
    def run(world: Any) -> None:
        x = torch.ones(3, 4)
        with pytest.raises(pkt.DtypeError, match=r"no memory of its own.*wanted .* outside torch\.vmap"):
            torch.vmap(pkt.all_reduce)(x)
        with pytest.raises(pkt.DtypeError, match="no memory of its own"):
            torch.func.functionalize(lambda x: pkt.all_gather(x))(x)
        with pytest.raises(pkt.DtypeError, match="found a tensor on meta, wanted one on cpu"):
            pkt.all_gather(x.to("meta"))
        with pytest.raises(pkt.Unsupported, match=r"all_gather: found torch\.jit\.trace"):
            torch.jit.trace(lambda x: pkt.all_gather(x), x)
        with pytest.raises(pkt.Unsupported, match=r"all_gather: found a transform of torch\.func"):
            torch.func.grad(lambda x: pkt.all_gather(x).sum())(x)
        for _ in range(2):  # planned or not, a derivative is not lost
            with pytest.raises(pkt.Unsupported, match=r"found a dual tensor of torch\.autograd\.forward_ad"):
                torch.func.jvp(pkt.all_gather, (x,), (x,))
            with forward_ad.dual_level(), pytest.raises(pkt.Unsupported, match="found a dual tensor"):
                pkt.all_gather_matmul(x, [forward_ad.make_dual(x.t(), x.t())])
            with forward_ad.dual_level(), pytest.raises(pkt.Unsupported, match="found a dual tensor"):
                pkt.grouped_matmul(forward_ad.make_dual(x, x), x.t()[None], torch.tensor([0, 3], dtype=torch.int32))
            assert pkt.all_gather_matmul(pkt.all_gather(x), [x.t()])[0].shape == (3, 3)
        with pytest.raises(pkt.Unsupported, match="call torch.compile in the function"):
            torch.ops.pkt.all_gather(x, 0, None, None, "", 0)

    on_ranks(1, run)


def test_transforms_are_refused_in_a_graph() -> None:
    """torch would call an op for each part of a batch, and take the derivative of what it returns for zero."""

    def run(world: Any) -> None:
        x = torch.ones(3, 4)
        gather = pkt.all_gather
        for function in (torch.vmap(gather), lambda x: torch.func.jvp(gather, (x,), (x,))):
            with pytest.raises(Exception, match=r"found a transform of torch\.func or torch\.vmap in compiled code"):
                compiled(function, "eager")(x)

    on_ranks(1, run)


def test_make_fx_sees_calls_with_real_tensors() -> None:
    """Also one with a plan. The simulator says that it does not run the op."""

    def run(world: Any) -> None:
        x = torch.ones(3, 4)
        for _ in range(2):
            with pytest.raises(pkt.Unsupported, match=r"torch\.ops\.pkt\.all_gather: found code"):
                make_fx(lambda x: pkt.all_gather(x))(x)
            pkt.all_gather(x)

    on_ranks(1, run)


def test_a_call_without_gradients_is_refused_in_a_graph() -> None:
    def run(world: Any) -> None:
        x = torch.ones(4, requires_grad=True)
        for call in (lambda x: pkt.reduce_scatter(x, op="max"), lambda x: pkt.all_gather(x, torch.empty(8))):
            with pytest.raises(Exception, match="has no gradient|leave out= away"):
                compiled(call)(x)

    on_ranks(2, run)


def test_symmetric_tensors_come_in_as_plain_ones() -> None:
    def run(world: Any) -> None:
        x = pkt.full(4, 1.0 + world.rank)
        gathered = compiled(lambda x: pkt.all_gather(x) + 1)
        assert gathered(x.plain()).tolist() == [2.0] * 4 + [3.0] * 4
        with pytest.raises(Exception, match=r"found a symmetric tensor in compiled code: give x\.plain\(\)"):
            gathered(x)
        assert compiled(lambda x: x * 2, "eager")(x).tolist() == (2 * x).tolist()

    on_ranks(2, run)


def test_ranks_that_compile_do_not_wait_for_each_other() -> None:
    """The compiler asks a tensor for facts again and again, under a lock of the process. No other rank may run there,
    as after many reads of the same words."""

    def run(world: Any) -> None:
        with contextlib.suppress(TypeError):  # torch's, of a symmetric tensor in a graph that it breaks
            torch.compile(lambda x: pkt.all_gather(x), backend="eager")(pkt.full(4, 1.0 + world.rank))

    on_ranks(2, run)


def test_schemas_say_what_is_written() -> None:
    for name, operator in operators().items():
        assert operator.op._schema.name == f"pkt::{name}"
        assert not operator.op._schema.is_mutable
        if operator.op_out is not None:
            written = [a.name for a in operator.op_out._schema.arguments if a.alias_info and a.alias_info.is_write]
            assert written == ["out"]


class Decided(NamedTuple):
    """What Inductor finds of a graph for which the user wants CUDA graphs."""

    backward: bool
    against: list[str]
    """Why it leaves the CUDA graph out, whatever tensors come."""
    written: set[int]
    """Inputs that the graph writes, but for parameters and buffers. With any it leaves the CUDA graph out, too."""


def decided(monkeypatch: pytest.MonkeyPatch) -> list[Decided]:
    """Collects what Inductor decides in `with_cuda_graphs` from now on, as if the CPU had CUDA graphs."""
    from torch._inductor import cudagraph_utils, output_code

    found: list[Decided] = []

    def note(inputs: Any, graph: Any, cudagraphs: Any, *rest: Any) -> None:
        static = graph.fx_kwargs["static_input_idxs"] or ()
        against = [*graph.cudagraph_info.cudagraph_fail_reasons, *filter(None, [graph.disabled_cudagraphs_reason])]
        found.append(Decided(graph.fx_kwargs["is_backward"], against, {*graph.mutated_input_idxs} - {*static}))

    monkeypatch.setattr(cudagraph_utils, "check_multiple_devices_or_any_cpu_nodes", lambda devices: None)
    monkeypatch.setattr(output_code, "cudagraph_post_compile", note)
    return found


def with_cuda_graphs(function: Any) -> Any:
    """As mode="reduce-overhead" compiles, but for the whole graph or not at all."""
    from torch._inductor import list_mode_options

    options = {**list_mode_options("reduce-overhead"), "graph_partition": False, "fx_graph_cache": False}
    return compiled(function, "inductor", options=options)


def test_nothing_keeps_inductor_from_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards and backwards. The memory of the calls themselves is tests/conformance's."""
    found = decided(monkeypatch)

    def run(world: Any) -> None:
        x, *weights = (torch.randn(shape, requires_grad=True) for shape in ((4, 8), (8, 6), (8, 4), (6, 8)))

        def model(x: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            up, _ = pkt.all_gather_matmul(x, [up, gate])
            return pkt.all_reduce(pkt.matmul_reduce_scatter(up, down))  # in place, of a value of the graph

        result = with_cuda_graphs(model)(x, *weights)
        result.backward(torch.ones_like(result))

    on_ranks(2, run)
    assert {one.backward for one in found} == {False, True}
    assert all(not one.against and not one.written for one in found), found


def test_a_call_that_writes_an_input_keeps_inductor_from_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = decided(monkeypatch)

    def run(world: Any) -> None:
        x = torch.ones(4)
        with_cuda_graphs(pkt.all_reduce)(x)
        assert x.tolist() == [2.0] * 4

    on_ranks(2, run)
    assert found
    assert all(one.written == {0} for one in found), found
