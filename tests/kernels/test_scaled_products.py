"""Products of fp8 elements with scales: one scale for all, what is refused, and the form that is taken."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.declaration import Call
from pkt.kernels.forecast import Described
from pkt.kernels.operator import operators
from pkt.kernels.shared.fp8 import FP8
from pkt.kernels.shared.gluon_fits import NARROW8, WIDE8
from pkt.model.gpu import H200

from .helpers import on_ranks

OPERATORS = {
    name: operators()[f"{name}_scaled"] for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
}
SHORT = dict(zip(("AG+GEMM", "GEMM+RS", "GEMM+AR"), OPERATORS))
FORMS = [(name, mode) for name, o in OPERATORS.items() for mode, form in o.forms.items() if not form.gpu]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
BASELINES = (
    "NCCL + torch._scaled_mm",
    "torch symm_mem fused",
    *(f"torch._scaled_mm + torch {n}-shot" for n in ("one", "two")),
)


def operands(rank: int, size: int, name: str, m: int = 9, k: int = 48, n: int = 32) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(rank)
    rows = m * size if name == "matmul_reduce_scatter" else m
    a, w = (torch.randn(shape, generator=random).to(FP8) for shape in ((rows, k), (n, k)))
    scale_a, scale_b = (torch.rand(shape, generator=random) + 3 for shape in ((rows, 1), (1, n)))
    return {"a": a, "b": w.t(), "scale_a": scale_a, "scale_b": scale_b}


@pytest.mark.parametrize("shapes", [((), (1,)), ((1, 1), None), (None, ())])
@pytest.mark.parametrize(("name", "mode"), FORMS)
def test_one_scale_stands_for_all(name: str, mode: str, shapes: tuple[Any, Any]) -> None:
    """Of any shape; each rank has its own. None: a scale for each row, or column."""
    operator, size = OPERATORS[name], 3

    def given(rank: int) -> dict[str, torch.Tensor]:
        found = operands(rank, size, name)
        for scale, shape in zip(("scale_a", "scale_b"), shapes):
            if shape is not None:
                found[scale] = torch.full(shape, 2.0 + rank)
        return found

    def run(world: Any) -> None:
        every = [given(rank) for rank in range(size)]
        ranks = {key: [one[key] for one in every] for key in every[0]}
        exact = operator.reference(world.rank, **ranks)
        for _ in range(2):
            found = operator.function(**every[world.rank], mode=mode, world=world, **operator.forms[mode].small)
            assert found.dtype is torch.bfloat16
            assert (found.double() - exact).norm() <= 2**-7 * exact.norm()

    on_ranks(size, run)


@pytest.mark.parametrize("name", OPERATORS)
def test_wrong_operands_are_refused(name: str) -> None:
    function = OPERATORS[name].function

    def run(world: Any) -> None:
        good = operands(world.rank, 2, name)

        def bad(error: type[Exception], text: str, **others: Any) -> None:
            with pytest.raises(error, match=text):
                function(**{**good, **others}, world=world)

        rows = good["a"].shape[0]
        bad(pkt.DtypeError, "a: found bf16, wanted float8_e4m3fn", a=good["a"].bfloat16())
        bad(pkt.DtypeError, "b: found bf16", b=good["b"].bfloat16())
        bad(pkt.ShapeError, r"b: .* transposed view of a contiguous tensor, as weight.t\(\)", b=good["b"].contiguous())
        bad(pkt.DtypeError, "scale_a: found bf16, wanted float32", scale_a=good["scale_a"].bfloat16())
        bad(pkt.ShapeError, rf"scale_a: found \({rows},\)", scale_a=good["scale_a"].flatten())
        bad(pkt.ShapeError, r"scale_b: found \(32, 1\), wanted \(1, 32\)", scale_b=good["scale_b"].t())
        bad(pkt.DtypeError, "bias: found fp32", bias=torch.ones(32))
        bad(pkt.DtypeError, "out: found fp32, wanted bfloat16", out=torch.ones(rows, 32))
        bad(pkt.ShapeError, "32 along K at least", mode=next(iter(OPERATORS[name].forms)), tiles=(16, 16, 16))
        bad(pkt.DtypeError, "fast_accum: found int 1, wanted True or False", fast_accum=1)
        with pytest.raises(pkt.Unsupported, match="no gradient"):
            function(**good | {"scale_a": good["scale_a"].requires_grad_()}, world=world)
        good["scale_a"].requires_grad_(False)
        odd = operands(world.rank, 2, name, n=24)
        with pytest.raises(pkt.Unsupported, match="24 columns of b, not a multiple of 16"):
            function(**odd, mode="unfused", world=world)
        assert function(**odd, world=world).shape[1] == 24

    on_ranks(2, run)


@pytest.mark.parametrize("name", OPERATORS)
def test_tiles_follow_from_fast_accum(name: str) -> None:
    form = OPERATORS[name].forms["gluon"]
    for fast, tiles in ((False, NARROW8), (True, WIDE8)):
        call = called(name, 4096, 8192, 8192, fast)
        assert form.settings["tiles"](call) == tiles
        call.given, call.settings = {"tiles": WIDE8}, {**dict.fromkeys(form.settings), "tiles": WIDE8}
        if fast:
            assert form.complete(call)["tiles"] == WIDE8
        else:
            with pytest.raises(pkt.ShapeError, match="128 columns, or fast_accum=True"):
                form.complete(call)


def called(name: str, rows: int, k: int, n: int, fast: bool, size: int = 2) -> Call:
    """A call on ranks with H200s, of so many rows of the product that each computes."""
    a = torch.empty(rows // (size if name == "all_gather_matmul" else 1), k, dtype=FP8, device="meta")
    b = torch.empty(n, k, dtype=FP8, device="meta").t()
    call = Call(name, Described(size, H200), {"a": a, "b": b}, {"epilogue": "none", "fast_accum": fast}, {}, None)  # type: ignore[arg-type]
    call.sizes = {"m": rows // (1 if name == "matmul_all_reduce" else size), "n": n, "k": k}
    return call


@pytest.mark.parametrize(("size", "file"), [(2, "fp8_products_2.json"), (4, "fp8_products.json")])
def test_the_choice_is_as_fast_as_every_baseline(size: int, file: str, capsys) -> None:
    """By the captured times of 48 products on H200s, each with and without fast_accum."""
    times: dict[str, float] = {row["case"]: row["value"] for row in json.loads((RESULTS / file).read_text())["rows"]}
    ends = ", pkt unfused, captured"
    products = [case.removesuffix(ends) for case in times if case.endswith(ends)]
    for fast in ("", " fast"):
        losses = []
        for product in products:
            short, _, rows, *_ = product.split()
            K, N = (int(product.partition(f"{side} = ")[2].partition(",")[0]) for side in "KN")
            mode = OPERATORS[SHORT[short]].default(called(SHORT[short], int(rows), K, N, bool(fast), size))
            others = [times.get(f"{product}, {baseline}{fast}, captured", math.inf) for baseline in BASELINES]
            losses.append(times[f"{product}, pkt {mode}{fast}, captured"] / min(others))
        mean = math.exp(sum(map(math.log, losses)) / len(losses))
        with capsys.disabled():
            print(f"\nfp8{fast} on {size}: {len(losses)} products, {mean:.3f} of the fastest baseline,", end=" ")
            print(f"at most {max(losses):.3f}")
        assert len(losses) == 48
        assert mean <= 0.9
        assert max(losses) <= 1.03


def test_no_gluon_and_odd_columns_have_a_form(monkeypatch) -> None:
    for name, operator in OPERATORS.items():
        call = called(name, 8192, 8192, 8192, False)
        assert operator.default(call) == "gluon"
        call.world.lasting["pkt.kernels.gluon"] = "rank 1 has another GPU"
        assert operator.default(call) == "unfused"
        assert operator.default(called(name, 8192, 8192, 8200, False)) == next(iter(operator.forms))
