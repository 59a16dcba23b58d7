"""pkt.parallelize with a DeviceMesh, beside torch's parallelize_module: two processes over gloo.

pkt's kernels need GPUs there, so collectives of gloo stand in for the operators. What is tested is the rest: worlds of
meshes, DTensors as parameters, inputs and results, and plans. tests/nn/test_plan.py has the operators.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import pkt
from pkt.nn import embedding, exchange, experts, linear, mlp, plan, sharded, siblings
from pkt.runtime import bootstrap
from tests.runtime import forked
from tests.runtime.test_bootstrap import opened

from .test_experts import block
from .test_llama_tp import example


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Scattered.apply(grad, ctx.dim, ctx.group), None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.chunk(group.size(), dim)[group.rank()]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Gathered.apply(grad, ctx.dim, ctx.group), None, None


def all_gather(x: torch.Tensor, *, dim: int = 0, world: Any) -> torch.Tensor:
    return _Gathered.apply(x, dim, world.group)


def reduce_scatter(x: torch.Tensor, *, world: Any) -> torch.Tensor:
    return _Scattered.apply(x, 0, world.group)


def all_reduce(x: torch.Tensor, *, world: Any) -> torch.Tensor:
    dist.all_reduce(x, group=world.group)
    return x


def all_gather_matmul(
    a: torch.Tensor, b: Any, *, bias: Any = None, epilogue: str = "", keep: str = "shard", world: Any
) -> Any:
    whole = all_gather(a, world=world)
    if epilogue:
        both = whole @ b
        return nn.functional.silu(both[:, ::2]) * both[:, 1::2]
    if isinstance(b, list):
        return [whole @ one + (0 if bias is None else bias[at]) for at, one in enumerate(b)]
    return whole @ b + (0 if bias is None else bias)


def matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, *, bias: Any = None, world: Any) -> torch.Tensor:
    return reduce_scatter(a @ b, world=world) + (0 if bias is None else bias)


def matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, *, bias: Any = None, world: Any) -> torch.Tensor:
    return all_reduce(a @ b, world=world) + (0 if bias is None else bias)


def broadcast(x: torch.Tensor, root: int, *, world: Any) -> torch.Tensor:
    dist.broadcast(x, group=world.group, group_src=root)
    return x


def moe(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, *w: torch.Tensor, world: Any, **_: Any) -> Any:
    """Every rank gathers all experts, and computes those of its own tokens."""
    up, down = (all_gather(each.contiguous(), world=world) for each in w)
    both = torch.einsum("th,ehn->etn", x, up)
    each = torch.einsum("etf,efg->teg", nn.functional.silu(both[..., ::2]) * both[..., 1::2], down)
    return (each.gather(1, idx[..., None].expand(-1, -1, x.shape[-1])) * weights[..., None]).sum(1)


def stand_in() -> None:
    """In a process that ends with the test."""
    for module in (embedding, exchange, experts, linear, mlp, plan, sharded, siblings):
        for name, function in globals().items():
            if name in vars(module) and getattr(function, "__module__", None) == __name__:
                setattr(module, name, function)


def in_mesh(tmp_path: Any, size: int, main: Any, shape: tuple[int, ...], names: tuple[str, ...]) -> list[Any]:
    """main(mesh, tp) in processes with a world of the dimension tp."""

    def run(rank: int) -> Any:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=rank, world_size=size)
        stand_in()
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with opened(bootstrap.place(mesh["tp"], 10.0)):
            return main(mesh)

    ends = forked.run(size, run)
    assert [end.error for end in ends] == [None] * size, ends
    return [end.value for end in ends]


def alike(found: nn.Module, wanted: nn.Module) -> None:
    """Parameters are DTensors in the same layouts, and so are their gradients, with the same elements."""
    for (name, one), (_, other) in zip(found.named_parameters(), wanted.named_parameters(), strict=True):
        assert isinstance(one, DTensor), name
        assert one.placements == other.placements, name
        assert one.grad.placements == one.placements, name
        assert torch.allclose(one.grad.full_tensor(), other.grad.full_tensor(), rtol=1e-4, atol=1e-5), name


def test_one_import_changes(tmp_path: Any) -> None:
    """The Llama of the example, by torch and by pkt, in both of its plans."""
    llama = example()

    def main(mesh: Any) -> None:
        data = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
        for layout in (llama.training, llama.serving):
            torch.manual_seed(dist.get_rank())
            model = llama.Llama(llama.SHAPES["tiny"])
            models = [
                functools.partial(pkt.parallelize, copy.deepcopy(model))(mesh["tp"], layout()),
                functools.partial(parallelize_module, model)(mesh["tp"], layout()),
            ]
            losses = [llama.loss_of(one, data) for one in models]
            assert abs(losses[0].item() - losses[1].item()) < 1e-5
            for loss, one in zip(losses, models):
                loss.backward()
                torch.optim.SGD(one.parameters(), lr=0.1).step()
            if layout is llama.training:
                alike(*models)
            whole = pkt.nn.full_state_dict(models[0])
            fresh = pkt.parallelize(llama.Llama(llama.SHAPES["tiny"]), mesh["tp"], layout())
            for state in (models[0].state_dict(), whole):
                if state is whole:
                    state = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
                    state = {n: t for n, t in state.items() if "norm" not in n}
                fresh.load_state_dict(state, strict=False)
                assert abs(llama.loss_of(fresh, data).item() - llama.loss_of(models[0], data).item()) < 1e-6

    in_mesh(tmp_path, 2, main, (2,), ("tp",))


def test_dtensors_in_and_out_and_a_mesh_of_two_dimensions(tmp_path: Any) -> None:
    def main(mesh: Any) -> tuple[int, int]:
        tp = mesh["tp"]
        torch.manual_seed(0)
        whole, x = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)), torch.randn(2, 4, 8)
        styles = {
            "0": SequenceParallel(),
            "1": ColwiseParallel(use_local_output=False),
            "2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        split = pkt.parallelize(copy.deepcopy(whole), mesh, styles)
        for given in (x.chunk(2, 1)[tp.get_local_rank()], distribute_tensor(x, tp, [Shard(1)])):
            normed = split[0](given)
            assert normed.placements == (Shard(1),)
            hidden = split[1](normed)
            assert hidden.placements == (Shard(2),)
            assert hidden.shape == (2, 4, 12)
            found = split[2](hidden)
            assert found.placements == (Shard(1),)
            assert torch.allclose(found.full_tensor(), whole(x), rtol=1e-4, atol=1e-5)
        prepared = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        inner = {"": prepared, "1": styles["1"], "2": styles["2"]}
        gathering = pkt.parallelize(nn.Sequential(nn.Identity(), *copy.deepcopy(whole[1:])), tp, inner)
        for layout in (Shard(1), Replicate()):
            found = gathering(distribute_tensor(x, tp, [layout]))
            assert torch.allclose(found.full_tensor(), whole[1:](x), rtol=1e-4, atol=1e-5)
        with pytest.raises(pkt.Unsupported, match=r"module '2': found an input of layout .*: give Shard\(-1\)"):
            split[2](distribute_tensor(torch.ones(2, 4, 12), tp, [Replicate()]))
        with pytest.raises(pkt.Unsupported, match=r"module '0': found an input of layout"):
            split[0](distribute_tensor(x, tp, [Replicate()]))
        with pytest.raises(pkt.Unsupported, match=r"module '1': found input: a DTensor on"):
            split[1](distribute_tensor(x, mesh["dp"], [Replicate()]))
        other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        with pytest.raises(pkt.Unsupported, match=r'found a mesh of 2 dimensions.*give one of them, as mesh\["tp"\]'):
            pkt.parallelize(whole, other, styles)
        return split[1].world.rank, split[1].world.size

    assert in_mesh(tmp_path, 4, main, (2, 2), ("dp", "tp")) == [(0, 2), (1, 2)] * 2


def test_experts(tmp_path: Any) -> None:
    """A block whose parameters are DTensors: result, gradients, state dicts."""

    def main(mesh: Any) -> None:
        whole, x = block(shared=True), torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
        split = pkt.parallelize(copy.deepcopy(whole), mesh, pkt.nn.ExpertParallel(Shard(1), use_local_output=False))
        found, _ = split(distribute_tensor(x, mesh, [Shard(1)]))
        assert found.placements == (Shard(1),)
        wanted = whole(x)[0]
        assert torch.allclose(found.full_tensor(), wanted, rtol=1e-4, atol=1e-5)
        found.to_local().square().sum().backward()
        wanted.square().sum().backward()
        assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in split.parameters())
        assert torch.allclose(split.gate.weight.grad.full_tensor(), whole.gate.weight.grad, rtol=1e-4, atol=1e-5)
        down = torch.stack([expert.down_proj.weight.grad for expert in whole.experts])
        assert torch.allclose(split.experts.down_weight.grad.full_tensor(), down, rtol=1e-4, atol=1e-5)
        full = pkt.nn.full_state_dict(split)
        for key, tensor in whole.state_dict().items():
            mine = full[key]
            assert torch.equal(mine.full_tensor() if isinstance(mine, DTensor) else mine, tensor), key
        split.load_state_dict(split.state_dict())
        mine = {key.removeprefix("experts."): tensor for key, tensor in full.items() if key.startswith("experts.")}
        split.experts.load_state_dict(mine)
        assert torch.equal(split(distribute_tensor(x, mesh, [Shard(1)]))[0].full_tensor(), found.full_tensor())
        with pytest.raises(pkt.Unsupported, match="found an input of layout .*: give S"):
            split(distribute_tensor(x, mesh, [Replicate()]))

    in_mesh(tmp_path, 2, main, (2,), ("tp",))
