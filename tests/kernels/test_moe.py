"""A layer of experts: results and gradients of whole layers against fp64, capacity, compiled code, wrong calls."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.combine import OPERATOR as COMBINE
from pkt.kernels.dispatch import OPERATOR as DISPATCH
from pkt.kernels.moe import reference

from .helpers import UNIT, on_ranks, random
from .test_dispatch import routed

H, F, G = 8, 6, 10


def layer(
    size: int, routing: str, T: tuple[int, ...], K: int, own: int, columns: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Operands of all ranks, by name."""
    every = [T[rank % len(T)] for rank in range(size)]
    return {
        "x": [random((t, H), dtype, r, 0) for r, t in enumerate(every)],
        "topk_idx": [routed(routing, t, K, own * size, r) for r, t in enumerate(every)],
        "topk_weights": [random((t, K), torch.float32, r, 1).abs() for r, t in enumerate(every)],
        "w1": [random((own, H, columns), dtype, r, 2) / H**0.5 for r in range(size)],
        "w2": [random((own, F, G), dtype, r, 3) / F**0.5 for r in range(size)],
    }


def test_products_expect_the_rows_of_an_equal_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for all pairs of all ranks' tokens and experts, 24, and a rank gets a half of them on average."""
    module, found = importlib.import_module("pkt.kernels.moe"), []

    def run(world: Any) -> None:
        every = layer(2, "random", (6,), 2, 3, 2 * F)
        x, *others = (ranks[world.rank] for ranks in every.values())
        pkt.moe(x.requires_grad_(), *others)

    product = module.grouped_matmul
    monkeypatch.setattr(
        module, "grouped_matmul", lambda *a, **b: found.append((len(a[0]), b["expected"])) or product(*a, **b)
    )
    on_ranks(2, run)
    assert found == [(24, 12)] * 4


@pytest.mark.parametrize(("grad", "node_size", "joined"), [(False, None, 2), (True, None, 0), (False, 1, 0)])
def test_dispatch_and_the_first_product_are_one_call_without_gradients(
    grad: bool, node_size: int | None, joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, found = importlib.import_module("pkt.kernels.moe"), []
    call = module.dispatch_matmul
    monkeypatch.setattr(module, "dispatch_matmul", lambda *a, **b: found.append(b) or call(*a, **b))

    def run(world: Any) -> torch.Tensor:
        every = layer(2, "random", (6,), 2, 3, 2 * F)
        mine = [ranks[world.rank].requires_grad_(name in LEAVES) for name, ranks in every.items()]
        with torch.set_grad_enabled(grad):
            out = pkt.moe(*mine)
        exact = reference(world.rank, *([t.detach() for t in ranks] for ranks in every.values()))
        torch.testing.assert_close(out.detach().double(), exact, rtol=1e-5, atol=1e-5)

    pkt.launch(run, 2, device="cpu", node_size=node_size)
    assert len(found) == joined


LEAVES = ("x", "topk_weights", "w1", "w2")


def assert_right(
    world: Any, every: dict[str, Any], tolerance: float, run: Any = pkt.moe, fits: Any = None, **more: Any
) -> None:
    """The result and the gradients, of the sum of all ranks' losses, are those of the reference in fp64."""
    size, rank = world.size, world.rank
    mine = {name: ranks[rank].clone() for name, ranks in every.items()}
    for name in LEAVES:
        mine[name].requires_grad_()
    grads = [random((x.shape[0], G), x.dtype, r, 4) for r, x in enumerate(every["x"])]
    out = run(**mine, **more)
    out.backward(grads[rank])
    exact = {n: [t.double().requires_grad_() if n in LEAVES else t for t in ranks] for n, ranks in every.items()}
    results = [reference(r, *exact.values(), more.get("activation", "swiglu"), fits) for r in range(size)]
    loss = sum((found * grad.double()).sum() for found, grad in zip(results, grads))
    if loss.requires_grad:
        wanted = torch.autograd.grad(loss, [exact[n][rank] for n in LEAVES], materialize_grads=True)
    else:
        wanted = [torch.zeros_like(mine[n]) for n in LEAVES]
    found = (out, *(mine[n].grad for n in LEAVES))
    for name, one, right in zip(("out", *LEAVES), found, (results[rank], *wanted), strict=True):
        assert one.dtype == (torch.float32 if name == "topk_weights" else mine["x"].dtype)
        most = right.abs().max() if right.numel() else 0
        assert (one.double() - right).abs().le(tolerance * (1 + most)).all(), name


@pytest.mark.parametrize(
    ("routing", "size", "K", "T", "activation"),
    [
        ("random", 1, 8, (3,), "swiglu"),
        ("skewed", 2, 2, (5,), "gelu"),
        ("none", 2, 1, (2,), "none"),
        ("one rank", 3, 1, (4,), "relu"),
        ("random", 4, 2, (3,), "swiglu"),
    ],
)
def test_layers(routing: str, size: int, K: int, T: tuple[int, ...], activation: Any) -> None:
    """fp32, with as much room as can be needed."""
    every = layer(size, routing, T, K, 2, 2 * F if activation == "swiglu" else F)
    on_ranks(size, lambda world: assert_right(world, every, 2.0**-17, activation=activation), sms=2)


def test_bf16_and_linears_weights() -> None:
    """bf16, with weights as transposed views: about ten roundings on the way there and back."""
    every = layer(2, "random", (5,), 2, 2, 2 * F, torch.bfloat16)
    for name in ("w1", "w2"):
        every[name] = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in every[name]]
    on_ranks(2, lambda world: assert_right(world, every, 10 * UNIT[torch.bfloat16]), sms=2)


def test_ranks_with_other_numbers_of_tokens_and_too_little_room() -> None:
    """max_tokens given: the experts of rank 1 have no room, and the host may look up how much they need."""
    every = layer(2, "random", (6, 4), 2, 2, 2 * F)
    for idx in every["topk_idx"]:
        idx[:, 0] = 3
    here = [sum(int(((idx // 2 == r) & (idx >= 0)).sum()) for idx in every["topk_idx"]) for r in range(2)]
    assert here[0] < here[1]

    def run(world: Any) -> None:
        needed = torch.zeros(2, dtype=torch.int32)
        assert_right(world, every, 2.0**-17, fits=(True, False), max_tokens=here[1] - 1, needed=needed)
        assert needed.tolist() == [here[world.rank], world.rank]

    on_ranks(2, run, sms=2)


def test_ranks_with_other_numbers_of_tokens_need_max_tokens() -> None:
    every = layer(2, "random", (6, 4), 2, 2, 2 * F)
    with pytest.raises(pkt.CollectiveMismatch, match="max_tokens=24.*max_tokens=16"):
        on_ranks(2, lambda world: pkt.moe(*(ranks[world.rank] for ranks in every.values())))


WRONG: dict[str, tuple[Any, str]] = {  # by operand: a value, and what the message says
    "w1": (torch.ones(2, 8, 12, 2)[..., 0], r"w1: found .* strides .*: w1\.contiguous\(\)"),
    "w2": (torch.ones(2, 6, 4, 2)[..., 0], r"w2: found .* strides .*: w2\.contiguous\(\)"),
    "topk_idx": (torch.zeros(3, 17, dtype=torch.int64), r"topk_idx: found \(3, 17\), wanted at most 16 experts"),
    "max_tokens": (0, "max_tokens: found 0, wanted at least 1$"),
    "tokens_per_rank": (2, "tokens_per_rank: found 2, wanted at least 3, with as many tokens on this rank$"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_this_call_and_not_those_that_it_makes(name: str) -> None:
    right = {
        "x": torch.ones(3, 8), "topk_idx": torch.zeros(3, 2, dtype=torch.int64), "topk_weights": torch.ones(3, 2),
        "w1": torch.ones(2, 8, 12), "w2": torch.ones(2, 6, 4),
    }  # fmt: skip
    value, said = WRONG[name]

    def run(world: Any) -> None:
        with pytest.raises(pkt.PktError, match=f"^rank {world.rank}: moe: {said}"):
            pkt.moe(**{**right, name: value})
        pkt.moe(**right)

    on_ranks(2, run)


def test_few_tokens_travel_by_the_low_latency_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    every, used = layer(2, "random", (3, 2), 2, 2, 2 * F), []
    for operator in (DISPATCH, COMBINE):
        for mode, form in operator.forms.items():
            plan = form.plan
            called = dataclasses.replace(form, plan=lambda call, mode=mode, plan=plan: used.append(mode) or plan(call))
            monkeypatch.setitem(operator.forms, mode, called)

    def run(world: Any) -> None:
        assert_right(world, every, 2.0**-17, max_tokens=16, tokens_per_rank=3)
        with pytest.raises(pkt.ShapeError, match="tokens_per_rank"):
            pkt.moe(**{name: ranks[world.rank] for name, ranks in every.items()}, max_tokens=16, tokens_per_rank=1)

    on_ranks(2, run)
    assert used[:4].count("low_latency") == 4, used


def test_shared_experts() -> None:
    """They are added, and have gradients."""
    every = layer(1, "random", (4,), 2, 2, 2 * F)

    def run(world: Any) -> None:
        mine = [ranks[0] for ranks in every.values()]
        shared = [random(shape, torch.float32, 5).requires_grad_() for shape in ((H, 8), (4, G))]
        out, plain = pkt.moe(*mine, shared=shared), pkt.moe(*mine)
        hidden = mine[0] @ shared[0]
        beside = torch.nn.functional.silu(hidden[:, 0::2]) * hidden[:, 1::2] @ shared[1]
        assert torch.equal(out, plain + beside)
        for one, other in zip(torch.autograd.grad(out.sum(), shared), torch.autograd.grad(beside.sum(), shared)):
            assert torch.equal(one, other)

    on_ranks(1, run)


def test_compiled_code() -> None:
    """One graph, forwards and backwards."""
    every = layer(2, "random", (3,), 2, 1, 2 * F)

    def run(world: Any) -> None:
        compiled = torch.compile(pkt.moe, backend="aot_eager", fullgraph=True)
        assert_right(world, every, 2.0**-17, compiled)

    torch._dynamo.reset()
    on_ranks(2, run, sms=2)
