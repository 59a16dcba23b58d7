"""The gradient of a weight lies in memory as the weight does, so torch adds it up without a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.shared import products
from tests.kernels.helpers import on_ranks

CALLS = {
    "all_gather_matmul": pkt.all_gather_matmul,
    "all_gather_matmul, kept": lambda a, b, world: pkt.all_gather_matmul(a, b, keep="whole", world=world),
    "matmul_reduce_scatter": pkt.matmul_reduce_scatter,
    "matmul_all_reduce": pkt.matmul_all_reduce,
}


def strides_of(call: Any, weights: list[torch.Tensor], world: Any) -> list[Any]:
    """Of the weights' gradients as autograd gets them, for a call with one weight, or with a list of them."""
    found: list[Any] = []
    for weight in weights:
        weight.requires_grad_().register_hook(lambda grad: found.append(grad.stride()))
    turned = [w.t() if w.shape[1] == 8 else w for w in weights]
    results = call(torch.ones(4, 8), turned[0] if len(turned) == 1 else turned, world=world)
    sum(y.sum() for y in (results if isinstance(results, list) else [results])).backward()
    return found


@pytest.mark.parametrize("name", CALLS)
def test_the_gradient_of_a_weight_lies_as_the_weight_does(name: str) -> None:
    def run(world: Any) -> None:
        assert strides_of(CALLS[name], [torch.ones(6, 8)], world) == [(8, 1)]
        assert strides_of(CALLS[name], [torch.ones(8, 6)], world) == [(6, 1)]

    on_ranks(2, run)


def test_the_gradients_of_several_weights_lie_as_they_do() -> None:
    def run(world: Any) -> None:
        assert sorted(strides_of(pkt.all_gather_matmul, [torch.ones(6, 8), torch.ones(8, 4)], world)) == [
            (4, 1),
            (8, 1),
        ]

    on_ranks(2, run)


def test_the_gradients_of_the_weights_of_heads_lie_as_they_do() -> None:
    """With heads, as views of an nn.Linear's weight."""

    def run(world: Any) -> None:
        found: list[torch.Tensor] = []
        into, out = (torch.randn(8, 8, requires_grad=True) for _ in range(2))  # (heads * head, features), and back
        for weight in (into, out):
            weight.register_hook(found.append)
        y = pkt.matmul_all_to_all(torch.ones(1, 4, 8), into.view(4, 2, 8).permute(2, 0, 1), world=world)
        pkt.all_to_all_matmul(y, out.view(8, 4, 2).permute(1, 2, 0), world=world).sum().backward()
        assert [grad.stride() for grad in found] == [(8, 1), (8, 1)]

    on_ranks(2, run)


def test_weights_are_joined_as_they_lie() -> None:
    tall, wide = torch.randn(6, 8), torch.randn(3, 8)
    joined = products.beside([tall.t(), wide.t()])
    assert torch.equal(joined, torch.cat([tall.t(), wide.t()], dim=1))
    assert joined.t().is_contiguous()
    mixed = products.beside([tall.t(), wide.t().contiguous()])
    assert torch.equal(mixed, joined)
    assert mixed.is_contiguous()
