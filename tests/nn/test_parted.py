"""Columns of one result as results of their own, and their gradients in one tensor."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.nn import functional

from pkt.nn.parted import parted

from .helpers import drawn

WIDTHS = [6, 2, 4]


def test_gradients() -> None:
    y = drawn(3, sum(WIDTHS)).double().requires_grad_()

    def some(y: torch.Tensor) -> torch.Tensor:
        first, _, last = parted(y, WIDTHS)
        return (first[:, 2:] * last).sin()  # nobody uses the second

    assert torch.autograd.gradcheck(some, y)
    assert torch.autograd.gradgradcheck(some, y)


@pytest.mark.parametrize("dims", [2, 3])
def test_inductor_computes_gradients_where_they_belong(dims: int) -> None:
    """One kernel computes both in the memory of the result, and calls nothing."""

    def gated(y: torch.Tensor) -> torch.Tensor:
        gate, up = parted(y, [32, 32])
        return functional.silu(gate) * up

    y, dy = drawn(*[2] * (dims - 1), 64), drawn(*[2] * (dims - 1), 32)
    _, vjp = torch.func.vjp(lambda y: functional.silu(y[..., :32]) * y[..., 32:], y.double())
    (exact,) = vjp(dy.double())
    y.requires_grad_()
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(lambda: torch.compile(gated, fullgraph=True)(y).backward(dy))
    assert y.grad is not None
    torch.testing.assert_close(y.grad.double(), exact, rtol=1e-5, atol=1e-6)
    assert len(codes) == 2  # forward and backward
    assert all(code.count("async_compile.cpp_pybinding(") == 1 for code in codes), codes
    assert not any("torch.ops.pkt.beside" in code for code in codes), codes
