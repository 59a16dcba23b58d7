"""The activation between grouped products: on the rows that exist, with their gradients; zeros in the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels import declaration
from pkt.kernels.grouped_activation import ACTIVATIONS, activate_kernel, derive_kernel, grouped_activation, reference
from pkt.language.inspect import Pointer, compile_only

from .helpers import TINY, UNIT, on_ranks, random
from .machine_code import resources
from .test_grouped_matmul import offsets_of

NAN = float("nan")


def operands(dtype: torch.dtype, N: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, offsets): rows 2 to 15 are experts', the others NaN."""
    x = random((20, N), dtype, 1)
    x[:2] = x[16:] = NAN
    return x, offsets_of(2, 9, 9, 16)


def bound(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One rounding to dtype, and some in fp32 of numbers of about 1, among them those of exp and erf."""
    return UNIT[dtype] * exact.abs() + 2.0**-19 * (1 + exact.abs()) + TINY[dtype]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_and_gradients(activation: Any, dtype: torch.dtype) -> None:
    """Those of the experts' rows are right. The others are cleared or left alone, and have no gradient."""

    def run(world: Any) -> None:
        x, offsets = operands(dtype, 300 if dtype == torch.bfloat16 else 10)
        leaf, right = x.clone().requires_grad_(), x.double().requires_grad_()
        found, exact = grouped_activation(leaf, offsets, activation), reference(right, offsets, activation)
        assert found.dtype == dtype
        assert ((found.double() - exact).abs() <= bound(exact, dtype)).all()
        assert (found[:2] == 0).all()
        assert (found[16:] == 0).all()
        grad = random(tuple(found.shape), dtype, 2)
        grad[:2] = grad[16:] = NAN
        (dx,) = torch.autograd.grad(found, leaf, grad)
        (wanted,) = torch.autograd.grad(exact, right, grad.nan_to_num().double())
        assert ((dx.double() - wanted).abs() <= 4 * bound(wanted, dtype)).all()
        assert (dx[:2] == 0).all()
        assert (dx[16:] == 0).all()

    on_ranks(1, run)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_gradients(activation: Any) -> None:
    """A penalty on the gradient, which has that of x and of the gradient that comes in."""

    def run(world: Any) -> None:
        x, offsets = operands(torch.float32)

        def penalty(x: torch.Tensor, run: Any) -> torch.Tensor:
            y = run(x, offsets, activation)
            (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), x)[0]

        found = penalty(x.clone().requires_grad_(), grouped_activation)
        exact = penalty(x.double().requires_grad_(), reference)
        assert ((found.double() - exact).abs() <= 2.0**-14 * (1 + exact.abs().max())).all()

    on_ranks(1, run)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is full of NaNs."""
    empty = torch.empty

    def poisoned(*shape: Any, **keywords: Any) -> torch.Tensor:
        found = empty(*shape, **keywords)
        return found.fill_(NAN) if found.is_floating_point() else found

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(declaration, "_deterministic", lambda: True)  # all is then made by torch.empty


def test_rows_that_no_expert_has_are_left_alone_without_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(world: Any) -> None:
        x, offsets = operands(torch.float32)
        for found in (grouped_activation(x, offsets, clear=False), torch.no_grad()(grouped_activation)(x, offsets)):
            assert found[:2].isnan().all()
            assert found[16:].isnan().all()
            assert found[2:16].isfinite().all()

    poison(monkeypatch)
    on_ranks(1, run)


@pytest.mark.parametrize("ends", [(0, 400, 500, 600), (-30, 5, 9, 2**30), (9, 5, 2, 0), (20, 20, 20, 21)])
def test_offsets_outside_of_x_reach_nothing_outside(ends: tuple[int, ...]) -> None:
    """The simulator raises OutOfBounds where a kernel leaves its tensors."""

    def run(world: Any) -> None:
        x = torch.ones(9, 8, requires_grad=True)
        grouped_activation(x, offsets_of(*ends)).sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()

    on_ranks(1, run)


def test_empty_and_compiled_code() -> None:
    def run(world: Any) -> None:
        assert grouped_activation(torch.ones(0, 8), offsets_of(0, 0)).shape == (0, 4)
        x, offsets = operands(torch.float32)
        compiled = torch.compile(lambda *t: grouped_activation(*t), backend="aot_eager", fullgraph=True)
        found = []
        for function in (compiled, grouped_activation):
            leaf = x.clone().requires_grad_()
            y = function(leaf, offsets)
            found.append((y, *torch.autograd.grad(y, leaf, torch.ones_like(y))))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)

    torch._dynamo.reset()
    on_ranks(1, run)


def test_a_parameter_of_all_rows_has_a_finite_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with torch's functions between, on rows of which some are nobody's."""

    def run(world: Any) -> None:
        idx, weights = torch.tensor([[0, 1], [1, -1]]), torch.ones(2, 2)
        x, w = random((2, 4), torch.float32, world.rank), random((1, 4, 4), torch.float32, 2).requires_grad_()
        scale, gain = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
        there = pkt.dispatch(x, idx, weights, 2, max_tokens=6, mode="push")
        y = pkt.grouped_matmul(there.rows * scale, w, there.offsets)
        pkt.combine(y * gain, there).sum().backward()
        assert scale.grad is not None
        assert gain.grad is not None
        assert scale.grad.isfinite().all()
        assert gain.grad.isfinite().all()
        for mode in ("push", "low_latency"):
            there = pkt.dispatch(x, idx, weights, 2, max_tokens=6, mode=mode)
            end = int(there.offsets[-1])
            assert end == (2, 4)[world.rank]
            assert (there.rows[end:] == 0).all()
            with torch.no_grad():  # no gradient is wanted, so nobody writes them
                there = pkt.dispatch(x, idx, weights, 2, max_tokens=6, mode=mode)
            assert there.rows[end:].isnan().all()

    poison(monkeypatch)
    on_ranks(2, run)


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compiles(activation: str, arch: int, tmp_path: Path) -> None:
    """Nothing is spilled, and 16 bytes of x go in a load."""
    x, i32 = Pointer("bf16", 4096), Pointer("i32", 4096)
    rest = 32768, 4096, 128
    for kernel, pointers, more in ((activate_kernel, (x, i32, x), (True,)), (derive_kernel, (x, x, i32, x), ())):
        compiled = compile_only(kernel, *pointers, *rest, *more, activation, 8, 256, arch=arch)
        usage = resources(compiled, tmp_path)
        assert usage["STACK"] == usage["LOCAL"] == 0, usage
        assert "ld.global.v4" in compiled.asm["ptx"]


def test_gelu_is_as_near_as_torchs() -> None:
    """Nearer than 0.5 x (1 + erf) in fp32, which is off by 1.06e-7 max(|x|, 1); also where it is nearly 0."""

    def run(world: Any) -> None:
        x = torch.linspace(-12, 12, 1 << 16).view(-1, 256)
        exact = torch.nn.functional.gelu(x.double())
        off = (grouped_activation(x, offsets_of(0, len(x)), "gelu") - exact).abs()
        assert (off <= 9e-8 * x.abs().clamp(min=1)).all()
        assert (off <= 0.01 * exact.abs())[(x > -5) & (x < -1e-3)].all()
        ends = torch.tensor([[float("inf"), -float("inf"), NAN, 0.0] * 4])
        found = grouped_activation(ends, offsets_of(0, 1), "gelu")
        torch.testing.assert_close(found, torch.tensor([[float("inf"), 0.0, NAN, 0.0] * 4]), equal_nan=True)

    on_ranks(1, run)
