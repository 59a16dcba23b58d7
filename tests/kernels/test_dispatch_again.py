"""Gradients of dispatch and combine through routings that break things; and rows that are dispatched again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from pkt.kernels import combine as home
from pkt.kernels import dispatch as there
from pkt.kernels.dispatch import Dispatched

from .helpers import UNIT, on_ranks, random
from .test_dispatch import operands, routed

EXPERTS, H = 6, 8


def through(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor, room: int) -> torch.Tensor:
    """What every rank's experts do here: rows times a number of each row, tanh, and home."""
    found = pkt.dispatch(x, idx, weights, EXPERTS, max_tokens=room, alignment=2)
    rows = torch.where(found.source[:, :1] >= 0, found.rows, 0)  # the others are undefined
    return pkt.combine(torch.tanh(rows * scale) * found.weights[:, None].to(x.dtype), found)


def exactly(every: Any, scales: list[torch.Tensor], room: int) -> list[torch.Tensor]:
    """The same for all ranks in fp64, from the references."""
    size = len(scales)
    found = [Dispatched(*there.reference(rank, *every, EXPERTS, room, 2)) for rank in range(size)]
    y = [torch.tanh(of.rows * scale) * of.weights[:, None] for of, scale in zip(found, scales)]
    named = {f"dispatched.{name}": [getattr(of, name) for of in found] for name in ("tokens", "places", "weights")}
    return [home.reference(rank, y, **named) for rank in range(size)]


def assert_gradients(world: Any, every: Any, room: int, dtype: torch.dtype, tolerance: float) -> None:
    """Those of x, of topk_weights, and of what the experts have, against those of the references in fp64."""
    size, rank = world.size, world.rank
    x, idx, weights = every
    scales = [random((room, 1), dtype, r, 7) for r in range(size)]
    grads = [random(tuple(of.shape), dtype, r, 8) for r, of in enumerate(x)]
    mine = [one[rank].clone().to(kind).requires_grad_() for one, kind in ((x, dtype), (weights, None), (scales, dtype))]
    out = through(mine[0], idx[rank], mine[1], mine[2], room)
    out.backward(grads[rank])
    exact = [[one.to(dtype).double().requires_grad_() for one in x], [w.double().requires_grad_() for w in weights]]
    scales = [one.double().requires_grad_() for one in scales]
    results = exactly([exact[0], idx, exact[1]], scales, room)
    loss = sum((found * grad.double()).sum() for found, grad in zip(results, grads))
    wanted = torch.autograd.grad(loss, (exact[0][rank], exact[1][rank], scales[rank]), materialize_grads=True)
    names, found = ("out", "x", "topk_weights", "scale"), (out, *(leaf.grad for leaf in mine))
    for name, one, right in zip(names, found, (results[rank], *wanted), strict=True):
        assert one is not None, name
        most = right.abs().max() if right.numel() else 0
        assert (one.double() - right).abs().le(tolerance * (1 + most)).all(), name


@pytest.mark.parametrize(
    ("routing", "size", "K", "tokens"),
    [
        ("random", 1, 8, (3,)),
        ("skewed", 2, 2, (3, 4)),
        ("none", 2, 1, (2,)),
        ("one rank", 3, 1, (7, 0, 9)),
        ("everywhere", 4, 2, (0, 3, 0, 4)),
    ],
)
def test_gradients_of_every_routing(routing: str, size: int, K: int, tokens: tuple[int, ...]) -> None:
    """One plan, and another routing in the next launch, as in a replayed graph."""

    def run(world: Any) -> None:
        for now in (routing, "random"):
            x, idx, weights = operands(size, now, tokens, K, EXPERTS, H)
            assert_gradients(world, ([one.float() for one in x], idx, weights), 48, torch.float32, 2.0**-17)

    on_ranks(size, run, sms=2)


def test_gradients_in_bf16() -> None:
    """Products of the experts, a rank's sum and the sum of all are rounded, on the way there and back."""

    def run(world: Any) -> None:
        assert_gradients(
            world, operands(2, "random", (4,), 2, EXPERTS, H), 32, torch.bfloat16, 24 * UNIT[torch.bfloat16]
        )

    on_ranks(2, run, seed=1)


def test_a_rank_without_room_has_no_part_in_the_gradients() -> None:
    def run(world: Any) -> None:
        x, idx, weights = operands(2, "random", (6, 5), 2, EXPERTS, H)
        idx[0][:, 1] = idx[1][:, 0] = EXPERTS - 1
        found = pkt.dispatch(x[world.rank], idx[world.rank], weights[world.rank], EXPERTS, max_tokens=12, alignment=2)
        assert (found.needed[0] > 12) == (world.rank == 1)
        assert_gradients(world, ([one.float() for one in x], idx, weights), 12, torch.float32, 2.0**-17)

    on_ranks(2, run)


def test_rows_again() -> None:
    """The rows of a dispatch come again, with zeros behind the last expert's; other tensors go the same way."""

    def run(world: Any) -> None:
        x, idx, weights = (one[world.rank] for one in operands(2, "random", (9, 5), 3, EXPERTS, H))
        for launch in range(2):
            found = pkt.dispatch(x, idx, weights, EXPERTS, max_tokens=64, alignment=4)
            plain = found._replace(weights=torch.ones_like(found.weights))
            end = int(found.offsets[-1])
            again = pkt.dispatch_again(x, plain, found.rows)
            assert torch.equal(again.rows[:end], found.rows[:end])
            assert (again.rows[end:] == 0).all()
            squares = (found.rows.double() ** 2).sum(1)
            assert torch.allclose(again.dots[:end].double(), squares[:end], rtol=1e-6)
            token = torch.arange(len(x), dtype=torch.float32)[:, None] + 10 * world.rank
            ranks, tokens = found.source[:, :1], found.source[:, 1:2]
            scaled = torch.where(ranks >= 0, (10 * ranks + tokens).float() * found.weights[:, None], 0)
            assert torch.equal(pkt.dispatch_again(token, found).rows, scaled)
            idx = routed("skewed", len(x), 3, EXPERTS, world.rank + 5)

    on_ranks(2, run, sms=3)


def test_gradients_of_gradients() -> None:
    """The gradient penalty of a way there and home takes the gradients of all three operators."""
    room = 48

    def run(world: Any) -> None:
        x, idx, weights = operands(2, "random", (4, 3), 2, EXPERTS, 4)
        scales, rank = [random((room, 1), torch.float32, r, 7) for r in range(2)], world.rank

        def penalty(leaves: Any, loss: Any) -> Any:
            first = torch.autograd.grad(loss.pow(3).sum(), leaves, create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

        mine = [one[rank].clone().float().requires_grad_() for one in (x, weights, scales)]
        found = penalty(mine, through(mine[0], idx[rank], mine[1], mine[2], room))
        every = [[one.double().requires_grad_() for one in each] for each in (x, weights, scales)]
        leaves = [one for each in every for one in each]
        exact = penalty(leaves, torch.cat(exactly([every[0], idx, every[1]], every[2], room)))
        for one, right in zip(found, (exact[rank], exact[2 + rank], exact[4 + rank]), strict=True):
            assert (one.double() - right).abs().le(2.0**-14 * (1 + right.abs().max())).all()

    on_ranks(2, run)
