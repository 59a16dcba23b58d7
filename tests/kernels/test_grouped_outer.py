"""The grouped product's gradients: of the weights, of the rows, of these gradients; in compiled code; what compiles."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels import grouped_matmul as product
from pkt.kernels.grouped_outer import default_tiles, grouped_outer, grouped_outer_kernel, reference
from pkt.language.inspect import Pointer, compile_only

from .helpers import TINY, UNIT, on_ranks, product_bound, random
from .launches import SHARED_LIMIT
from .machine_code import resources
from .test_grouped_matmul import ROUTINGS, offsets_of

TILE = (16, 16, 16, 2)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("k", "n", "dtype"), [(24, 40, torch.bfloat16), (7, 13, torch.float32)], ids=str)
def test_every_routing_is_right(k: int, n: int, dtype: torch.dtype, routing: str) -> None:
    def run(world: Any) -> None:
        x, y, offsets = random((70, k), dtype, 1), random((70, n), dtype, 2), offsets_of(*ROUTINGS[routing])
        x[: offsets[0]] = y[offsets[-1] :] = float("nan")  # nobody's
        found, exact = pkt.grouped_outer(x, y, offsets, tiles=TILE), reference(x, y, offsets)
        assert found.dtype == dtype
        for expert, (first, last) in enumerate(itertools.pairwise(offsets)):
            bound = product_bound(x[first:last].t(), y[first:last]) + UNIT[dtype] * exact[expert].abs() + TINY[dtype]
            assert ((found[expert].double() - exact[expert]).abs() <= bound).all()

    on_ranks(1, run)


@pytest.mark.parametrize("ends", [(0, 400, 500, 600), (-30, 5, 9, 2**30), (9, 5, 2, 0), (20, 20, 20, 21)])
def test_offsets_outside_of_x_reach_nothing_outside(ends: tuple[int, ...]) -> None:
    """The simulator raises OutOfBounds where a kernel leaves its tensors."""

    def run(world: Any) -> None:
        found = grouped_outer(torch.ones(9, 8), torch.ones(9, 8), offsets_of(*ends), tiles=TILE)
        assert found.isfinite().all()
        assert found.max() <= 9

    on_ranks(1, run)


def test_empty_and_refused() -> None:
    def run(world: Any) -> None:
        none, x = offsets_of(0, 0, 0), torch.ones(6, 8)
        assert (grouped_outer(torch.ones(0, 4), torch.ones(0, 3), none) == torch.zeros(2, 4, 3)).all()
        assert grouped_outer(x, x[:, :0].contiguous(), none).shape == (2, 8, 0)
        good = {"x": x, "y": torch.ones(6, 4), "offsets": none}
        wrongs = {
            "x": (3, x[0], x.int(), x.half(), x[:, ::2]),
            "y": (None, x[:5], x[0], x.half()),
            "offsets": (None, none.long(), none[:1], none[None]),
            "tiles": ((16, 16), (16, 16, 8), 16),
        }
        for name, values in wrongs.items():
            for wrong in values:
                with pytest.raises(pkt.PktError, match="rank 0: grouped_outer"):
                    grouped_outer(**{**good, name: wrong})

    on_ranks(1, run)


def leaves(transposed: bool) -> tuple[torch.Tensor, ...]:
    """(x, w, the gradient of their product, offsets): rows of no expert at both ends, and an expert without rows."""
    x, w = random((20, 6), torch.float32, 1), random((3, 6, 5), torch.float32, 2)
    if transposed:
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    return x.requires_grad_(), w.requires_grad_(), random((20, 5), torch.float32, 3), offsets_of(2, 9, 9, 16)


def close(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """Sums of some dozen fp32 products of numbers of about 1."""
    return torch.allclose(
        found.double(), exact.double(), rtol=0, atol=2.0**-16 * (1 + exact.detach().abs().max().item())
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_and_theirs(transposed: bool) -> None:
    """Those of x and w together and alone; and of all operands in a gradient penalty, which takes those of both."""

    def run(world: Any) -> None:
        x, w, grad, offsets = leaves(transposed)
        experts = slice(int(offsets[0]), int(offsets[-1]))

        def penalty(x: torch.Tensor, w: torch.Tensor, run: Any) -> tuple[torch.Tensor, ...]:
            y = torch.zeros(20, 5, dtype=x.dtype).index_copy(0, torch.arange(20)[experts], run(x, w, offsets)[experts])
            first = torch.autograd.grad((y * grad).sum() + y.pow(3).sum(), (x, w), create_graph=True)
            return *first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))

        found = penalty(x, w, pkt.grouped_matmul)
        exact = penalty(x.detach().double().requires_grad_(), w.detach().double().requires_grad_(), product.reference)
        assert all(close(one, other) for one, other in zip(found, exact, strict=True))
        for name in (0, 1):
            mine = [t.detach().requires_grad_(at == name) for at, t in enumerate((x, w))]
            y = pkt.grouped_matmul(*mine, offsets)
            (alone,) = torch.autograd.grad(y, mine[name], grad)
            (both,) = torch.autograd.grad(product.reference(*mine, offsets), mine[name], grad.double())
            assert close(alone, both)
            assert alone.stride() == mine[name].stride()
        assert (torch.autograd.grad(pkt.grouped_matmul(x, w, offsets), w, grad)[0][1] == 0).all()

    on_ranks(1, run)


class Poisoned:
    """torch with new tensors of NaNs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: int, **options: Any) -> torch.Tensor:
        return torch.full(shape, float("nan"), **options)


def test_rows_of_no_expert_have_no_gradient_and_reach_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their results are undefined, and so may be the gradients that come back."""
    monkeypatch.setattr(product, "torch", Poisoned())

    def run(world: Any) -> None:
        x, w, grad, offsets = leaves(False)
        grad[:2] = grad[16:] = float("nan")
        with torch.no_grad():
            x[:2] = x[16:] = float("nan")
        y = pkt.grouped_matmul(x, w, offsets)
        outer = pkt.grouped_outer(x, grad.requires_grad_(), offsets)
        dx, dw = torch.autograd.grad(y, (x, w), grad)
        assert dw.isfinite().all()
        for nobodys in (dx, *torch.autograd.grad(outer.sum(), (x, grad))):
            assert (nobodys[:2] == 0).all()
            assert (nobodys[16:] == 0).all()
            assert nobodys[2:16].isfinite().all()

    on_ranks(1, run)


def test_compiled_code() -> None:
    def run(world: Any) -> None:
        x, w, grad, offsets = leaves(False)

        def both(product: Any) -> tuple[torch.Tensor, ...]:
            y = product(x, w, offsets)
            return y[2:16], *torch.autograd.grad(y, (x, w), grad)

        compiled = torch.compile(lambda *tensors: pkt.grouped_matmul(*tensors), backend="aot_eager", fullgraph=True)
        for one, other in zip(both(compiled), both(pkt.grouped_matmul), strict=True):
            assert torch.equal(one, other)

    torch._dynamo.reset()
    on_ranks(1, run)


def test_out_is_refused_where_a_gradient_is_wanted() -> None:
    def run(world: Any) -> None:
        x, w, _, offsets = leaves(False)
        with pytest.raises(pkt.Unsupported, match="rank 0: grouped_matmul: found out=, which autograd does not record"):
            pkt.grouped_matmul(x, w, offsets, torch.empty(20, 5))
        with torch.no_grad():
            pkt.grouped_matmul(x, w, offsets, torch.empty(20, 5))

    on_ranks(1, run)


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize(("dtype", "whole"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)])
def test_compiles(dtype: torch.dtype, whole: bool, arch: int, tmp_path: Path) -> None:
    """128 experts, 7168 -> 2048, and such with rows that begin anywhere: nothing is spilled."""
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    x, i32 = Pointer(name, 4096 if whole else 4098), Pointer("i32", 4096)
    tiles, (n, k) = default_tiles(dtype, whole), (2048, 7168) if whole else (2047, 7167)
    compiled = compile_only(
        grouped_outer_kernel, x, x, i32, x, 32768, n, k, 128, *tiles[:4], arch=arch, **tiles.launch_options()
    )
    usage = resources(compiled, tmp_path)
    assert usage["STACK"] == usage["LOCAL"] == 0, usage
    assert compiled.metadata.shared <= SHARED_LIMIT
    assert ("wgmma.mma_async" in compiled.asm["ptx"]) == (arch == 90 and dtype == torch.bfloat16)
