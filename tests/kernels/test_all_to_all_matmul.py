"""all_to_all_matmul beyond what the registry's suite covers: heads, weights' strides, chunks, its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from pkt.kernels import all_to_all_matmul as module
from tests.kernels.helpers import on_ranks, random


def test_heads_and_positions_that_do_not_fit_are_refused() -> None:
    def run(world: Any) -> None:
        x, weight = torch.ones(1, 6, 2, 4), torch.ones(6, 4, 5)
        assert pkt.all_to_all_matmul(x, weight).shape == (1, 2, 5)
        with pytest.raises(pkt.ShapeError, match=r"x: found \(1, 5, 2, 4\), wanted dimension 1 divisible by 3 ranks"):
            pkt.all_to_all_matmul(x[:, :5], weight)
        with pytest.raises(pkt.ShapeError, match=r"weight: found \(5, 4, 5\), wanted \(6, 4, 5\)"):
            pkt.all_to_all_matmul(x, weight[:5])

    on_ranks(3, run)


@pytest.mark.parametrize("mode", ["push", "unfused"])
def test_a_linears_weight(mode: str) -> None:
    """As the transposed view that it is, and some of its columns."""
    x = [random((1, 10, 2, 6), torch.float32, rank) for rank in range(2)]
    linear = random((7, 24), torch.float32, 2)
    settings = {"tiles": (16, 16, 16)} if mode == "push" else {}

    def run(world: Any) -> None:
        for part in (linear, linear[:5]):
            for weight in (part.t().unflatten(0, (4, 6)), linear.t().contiguous()[:, : len(part)].unflatten(0, (4, 6))):
                right = module.reference(world.rank, x, [weight, weight])
                found = pkt.all_to_all_matmul(x[world.rank], weight, mode=mode, **settings)
                assert (found.double() - right).abs().max() < 1e-5

    on_ranks(2, run)


def test_any_programs_and_chunks() -> None:
    """More programs than there are chunks, and chunks of all columns and of few."""
    x = [random((1, 3 * 18, 1, 40), torch.float32, rank) for rank in range(3)]
    weight = random((3, 40, 20), torch.float32, 3)

    def run(world: Any) -> None:
        right = module.reference(world.rank, x, [weight] * 3)
        for num_comm_sms, chunk in ((1, 1), (2, 32), (3, 1 << 20), (99, 16)):
            settings = {"mode": "push", "tiles": (16, 16, 16), "num_comm_sms": num_comm_sms, "chunk": chunk}
            for _ in range(2):
                found = pkt.all_to_all_matmul(x[world.rank], weight, **settings)
                assert (found.double() - right).abs().max() < 1e-5

    on_ranks(3, run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_that_cancel(dtype: torch.dtype) -> None:
    """Heads of some hundreds on one rank and their negatives on the other: what remains is right to a rounding, as the
    sum over all heads stays in fp32."""
    x, small = (random((1, 32, 2, 16), dtype, at) for at in range(2))
    weight = torch.ones(4, 16, 16, dtype=dtype)
    large = 256 * x
    others = (-large).clone()
    others[:, :, 0, 0] = small[:, :, 0, 0]
    large[:, :, 0, 0] = 0

    def run(world: Any) -> None:
        everybody = [large, others]
        right = module.reference(world.rank, everybody, [weight] * 2)
        found = pkt.all_to_all_matmul(everybody[world.rank], weight, mode="push", tiles=(16, 16, 16)).double()
        unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
        size = module.reference(world.rank, [large.abs(), others.abs()], [weight] * 2)
        assert ((found - right).abs() <= unit * right.abs() + 66 * 2.0**-24 * size).all()

    on_ranks(2, run)


def test_gradients_of_gradients() -> None:
    """Both operators' backward passes, of the push form, twice."""

    def run(world: Any) -> None:
        mine = [random((1, 6, 1, 4), torch.float32, world.rank), random((2, 4, 5), torch.float32, 9)]
        everybody = world.all_gather_object(mine[0])
        leaves = [x.clone().requires_grad_() for x in mine]
        settings = {"mode": "push", "tiles": (16, 16, 16)}
        out = pkt.all_to_all_matmul(*leaves, **settings)
        first = torch.autograd.grad(out.pow(3).sum(), leaves, create_graph=True)
        found = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        exact = [[x.double().requires_grad_() for x in everybody], [mine[1].double().requires_grad_() for _ in "ab"]]
        loss = sum(module.reference(rank, *exact).pow(3).sum() for rank in range(2))
        flat = [*exact[0], *exact[1]]
        again = torch.autograd.grad(loss, flat, create_graph=True)
        right = torch.autograd.grad(sum(g.square().sum() for g in again), flat)
        for x, y in zip(found, (right[world.rank], right[2 + world.rank]), strict=True):
            assert (x.double() - y).abs().max() <= 2.0**-16 * y.abs().max()

    on_ranks(2, run)
