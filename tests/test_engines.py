"""examples/engines: pkt under small fakes of vLLM's, SGLang's and torchtitan's interfaces, on simulated ranks.

The fakes look names up, and call them, where the engines do. The engines themselves are not run.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pkt

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "engines"
COMMUNICATORS = {
    "vllm": "vllm.distributed.device_communicators",
    "sglang": "sglang.srt.distributed.device_communicators",
}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a file of examples/engines, whose groups are worlds here."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def imported(name: str) -> Any:
        module = importlib.import_module(f"pkt_engines_{name}")
        monkeypatch.setattr(module, "open_world", lambda group: group.world, raising=False)
        return module

    classes = imported("all_reduce").PktAllReduce
    monkeypatch.setattr(classes, "open_world", staticmethod(lambda group: group))
    return imported


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> ModuleType:
    """A module, and the packages around it."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        full = ".".join(parts[:end])
        if full not in sys.modules:
            monkeypatch.setitem(sys.modules, full, ModuleType(full))
    module = sys.modules[name]
    vars(module).update(names)
    return module


class EngineAllReduce:
    """Of the engine itself."""


class Group:
    """A tensor-parallel group of either engine: its own all-reduce where that takes a tensor, else NCCL's."""

    def __init__(self, kind: Any, group: Any) -> None:
        self.ca_comm, self.left = kind(group=group, device=torch.device("cpu")), 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        ca = self.ca_comm
        if not ca.disabled and ca.should_custom_ar(x):
            out = ca.custom_all_reduce(x)
            assert out is not None
            return out
        self.left += 1
        return None

    @contextlib.contextmanager
    def graph_capture(self) -> Iterator[None]:
        with self.ca_comm.capture():
            yield


def serve(world: Any, kind: Any) -> tuple[int, int]:
    """What a model's layers ask of a group; returns how many calls went to NCCL, and to pkt."""
    group, made = Group(kind, world), 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in ((1, 40), (3, 8), (7,)):
            x = torch.arange(torch.Size(shape).numel()).view(shape).remainder(5).to(dtype) + world.rank
            before = x.clone()
            out = group.all_reduce(x)
            assert torch.equal(x, before)
            assert torch.equal(
                out.double(), world.size * before.double() + sum(range(world.size)) - world.size * world.rank
            )
            made += 1
    assert group.all_reduce(torch.ones(4, 6)[:, ::2]) is None
    assert group.all_reduce(torch.ones(4, dtype=torch.int64)) is None
    assert group.all_reduce(torch.ones(0, 4)) is None
    group.ca_comm.max_size = 64
    assert group.all_reduce(torch.ones(17)) is None
    assert group.all_reduce(torch.ones(16)).eq(world.size).all()
    return group.left, made + 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_vllm(engines: Any, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    module = fake(monkeypatch, f"{COMMUNICATORS['vllm']}.custom_all_reduce", CustomAllreduce=EngineAllReduce)
    engines("vllm").register()
    engines("vllm").register()
    kind = module.CustomAllreduce
    assert kind is not EngineAllReduce
    assert pkt.launch(serve, ranks, device="cpu", args=(kind,), races=True) == [(4, 10)] * ranks
    del module.CustomAllreduce
    with pytest.raises(ImportError, match="written for another version of vLLM"):
        engines("vllm").register()


def test_sglang(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def dispatch_custom_allreduce() -> type:
        return EngineAllReduce

    names = {"CustomAllreduce": EngineAllReduce, "dispatch_custom_allreduce": dispatch_custom_allreduce}
    module = fake(monkeypatch, f"{COMMUNICATORS['sglang']}.custom_all_reduce", **names)
    state = fake(
        monkeypatch, "sglang.srt.distributed.parallel_state", dispatch_custom_allreduce=dispatch_custom_allreduce
    )
    engines("sglang").register()
    assert module.dispatch_custom_allreduce() is module.CustomAllreduce is state.dispatch_custom_allreduce()

    def run(world: Any) -> Any:
        kind = state.dispatch_custom_allreduce()
        ours = kind(world, torch.device("cpu"), max_size=1024)
        with pytest.raises(pkt.Unsupported, match="PktAllReduce: found override_algo=1: leave it away"):
            ours.custom_all_reduce(torch.ones(4), override_algo=1)
        return serve(world, kind)

    assert pkt.launch(run, 2, device="cpu") == [(4, 10)] * 2
    del module.CustomAllreduce, module.dispatch_custom_allreduce
    with pytest.raises(ImportError, match="written for another SGLang"):
        engines("sglang").register()


def test_a_capture_takes_what_was_planned(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, capturing = engines("all_reduce").PktAllReduce, []
    monkeypatch.setattr(kind, "_capturing", lambda self: bool(capturing))

    def run(world: Any) -> None:
        group = Group(kind, world)
        with group.graph_capture():
            assert group.all_reduce(torch.ones(2, 8)).eq(world.size).all()  # the warm-up
            world.barrier()
            capturing.append(world.rank)
            assert group.all_reduce(torch.ones(2, 8)).eq(world.size).all()
            assert group.all_reduce(torch.ones(4, 8)) is None
            assert group.all_reduce(torch.ones(2, 8, dtype=torch.bfloat16)) is None
            world.barrier()
            capturing.clear()
        assert group.all_reduce(torch.ones(4, 8)).eq(world.size).all()
        group.ca_comm.register_graph_buffers()
        group.ca_comm.finalize_p2p()

    pkt.launch(run, 2, device="cpu")


def test_where_it_is_disabled(engines: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    kind = engines("all_reduce").PktAllReduce
    assert pkt.launch(lambda world: kind(world, None).disabled, 1, device="cpu") == [True]

    def unreachable(group: Any) -> Any:
        raise pkt.Unsupported("GPU 0 cannot reach GPU 1")

    monkeypatch.setattr(kind, "open_world", staticmethod(unreachable))
    ours = kind(None, None, symm_mem_enabled=False)
    assert ours.disabled
    assert not ours.should_custom_ar(torch.ones(4))
    assert ours.custom_all_reduce(torch.ones(4)) is None
    ours.close()
    assert "pkt's all-reduce is disabled: GPU 0 cannot reach GPU 1" in caplog.text


# ----------------------------------------------------------------------------------------------------------- torchtitan
class FeedForward(nn.Module):
    """torchtitan's AllGatherFusedFeedForward and a QKV projection with a bias, of one rank's weights."""

    def __init__(self, linear: Any, weights: dict[str, torch.Tensor], group: Any) -> None:
        super().__init__()
        self.linear, self.group = linear, group
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight.clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group, name, linear = self.group, self.group.group_name, self.linear
        x = linear.LinearReduceScatter.apply(
            linear.AllGatherLinear.apply(x, self.wq, self.bq, group, name), self.wo, self.bo, group, name
        )
        h1, h3 = linear.AllGatherLinearMulti.apply(x, self.w1, self.w3, group, name)
        return linear.LinearReduceScatter.apply(functional.silu(h1) * h3, self.w2, None, group, name)


SPLIT = {"wq": 0, "bq": 0, "wo": 1, "bo": None, "w1": 0, "w3": 0, "w2": 1}


@pytest.mark.parametrize(("ranks", "keep", "compiled"), [(2, "shard", False), (3, "whole", False), (2, "shard", True)])
def test_torchtitan(engines: Any, monkeypatch: pytest.MonkeyPatch, ranks: int, keep: str, compiled: bool) -> None:
    names = dict.fromkeys(("AllGatherLinear", "AllGatherLinearMulti", "LinearReduceScatter"))
    linear, used = (
        fake(monkeypatch, f"torchtitan.{name}", **names) for name in ("distributed.linear", "models.common.dist_gemm")
    )
    engine = engines("torchtitan")
    monkeypatch.setattr(engine, "KEEP", keep)
    generator = torch.Generator().manual_seed(1)
    shapes = {"wq": (12, 8), "bq": (12,), "wo": (8, 12), "bo": (8,), "w1": (18, 8), "w3": (18, 8), "w2": (8, 18)}
    whole = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    x, scale = (torch.randn(6, 8, generator=generator) for _ in range(2))

    def wanted() -> dict[str, torch.Tensor]:
        leaves = {name: t.double().requires_grad_() for name, t in {**whole, "x": x}.items()}
        hidden = functional.linear(
            functional.linear(leaves["x"], leaves["wq"], leaves["bq"]), leaves["wo"], leaves["bo"]
        )
        gated = functional.silu(hidden @ leaves["w1"].t()) * (hidden @ leaves["w3"].t())
        y = gated @ leaves["w2"].t()
        grads = torch.autograd.grad((y * scale).square().sum(), list(leaves.values()))
        return {"y": y.detach(), **dict(zip(leaves, grads))}

    def part(t: torch.Tensor, dim: int | None, world: Any) -> torch.Tensor:
        return t if dim is None else t.chunk(world.size, dim)[world.rank]

    def run(world: Any) -> None:
        group = SimpleNamespace(group_name=f"tp of rank {world.rank}", world=world)
        assert engine.replace(group) is world
        weights = {name: part(t, SPLIT[name], world) for name, t in whole.items()}
        model = FeedForward(used, weights, group)
        mine = part(x, 0, world).clone().requires_grad_()
        if compiled:
            torch._dynamo.reset()
        y = (torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model)(mine)
        (y * part(scale, 0, world)).square().sum().backward()
        found = {"y": y.detach(), "x": mine.grad, **{name: p.grad for name, p in model.named_parameters()}}
        for name, exact in wanted().items():
            exact = part(exact, {"y": 0, "x": 0, **SPLIT}[name], world)
            assert torch.allclose(found[name].double(), exact, rtol=0, atol=1e-5 * exact.abs().max().item()), name

    pkt.launch(run, ranks, device="cpu", heap="64MiB")
    assert used.AllGatherLinear is linear.AllGatherLinear is engine.AllGatherLinear


def test_torchtitan_of_another_version(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, "torchtitan.distributed.linear", AllGatherLinear=None)
    with pytest.raises(ImportError, match="has no AllGatherLinearMulti: this file was written for another torchtitan"):
        engines("torchtitan").replace(SimpleNamespace(group_name="tp"))


def test_the_files_are_short_and_are_packaged() -> None:
    files = sorted(FOLDER.glob("*.py"))
    text = (FOLDER / "pyproject.toml").read_text()
    assert files
    for file in files:
        assert len(file.read_text().splitlines()) <= 150
        assert f'"{file.stem}"' in text
