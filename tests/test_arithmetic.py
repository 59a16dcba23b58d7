"""The comparison of the simulator's values with a GPU's, and what the docs say of it."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from benchmarks import arithmetic
from benchmarks._expressions import Case, program
from tests.language.compiled import compiled
from tests.simulate.helpers import run

ROOT = Path(__file__).parents[1]


@triton.jit
def scaled_sum(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i) * tl.load(x + N + i) + tl.load(x + 2 * N + i))


def test_a_gpu_rounds_a_product_and_its_sum_once() -> None:
    """The simulator rounds both, as a GPU does without fusion. docs/triton-coverage.md says so."""
    x, y = torch.tensor([1 + 2.0**-12, 1 + 2.0**-12, -(1 + 2.0**-11)]), torch.empty(1)
    for fused, instructions in ((True, ["fma.rn"]), (False, ["mul.rn", "add.rn"])):
        kernel = compiled(scaled_sum, x, y, 1, enable_fp_fusion=fused)
        assert re.findall(r"(\w+\.\w+)\.f32", kernel.asm["ptx"]) == instructions
    run(scaled_sum, (1,), x, y, 1)
    assert y.item() == 0  # 2 ** -24 where it is rounded once


class Stand:
    """The simulator in the place of the GPU, right or off by one."""

    def __init__(self, off: int) -> None:
        self.off, self.computed = off, arithmetic.run
        self.simulated: list[torch.Tensor] = []

    def run(self, kernel: Any, case: Case, device: str) -> list[torch.Tensor]:
        if device == "cpu":
            self.simulated = []
            self.simulated = self.computed(kernel, case, device)
            return self.simulated
        return [x ^ bool(self.off) if x.dtype == torch.bool else x + self.off for x in self.simulated]


@pytest.mark.parametrize("case", [program(3), program(4), Case("quotient", ("int8", "bool"), ("r = a // (b + 1)",))])
def test_the_comparison_with_a_gpu_finds_a_difference(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(arithmetic, "run", Stand(0).run)
    assert arithmetic.compared(str(tmp_path), (0, case)) == ("same", case, [])
    monkeypatch.undo()
    monkeypatch.setattr(arithmetic, "run", Stand(1).run)
    what, _, different = arithmetic.compared(str(tmp_path), (1, case))
    assert what == "different"
    assert len(different) == len(case.results)


def test_the_file_has_the_counts_and_the_largest_distance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Pool(contextlib.nullcontext[Any]):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(self)

        def map(self, fn: Any, items: Any, chunksize: int) -> Any:
            return map(fn, items)

    monkeypatch.setattr(arithmetic, "run", Stand(1).run)
    monkeypatch.setattr(arithmetic, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fp8 = ("float8_e5m2", "float8_e5m2")
    cases = [Case("a + b", dtypes, ("r = a + b",)) for dtypes in (("int8", "int8"), fp8)]
    cases.append(Case("a.c", ("int8",), ("r = a.c",)))
    monkeypatch.setattr(arithmetic, "expressions", lambda: cases)
    monkeypatch.setattr("sys.argv", ["arithmetic", "--programs", "0", "--out", str(tmp_path)])
    assert arithmetic.main() == 0
    made = json.loads((tmp_path / "arithmetic_1.json").read_text())
    only = "refused by the simulator only"  # the stand-in runs what GPUs refuse
    assert made["counts"] == {"expressions, different": 1, "expressions, refused": 1, f"expressions, {only}": 1}
    [row] = made["refused by one only"]
    assert (row["expression"], row["dtypes"]) == ("a + b", list(fp8))
    assert row["what"].startswith(f"{only}: arithmetic of fp8e5 at")
    [row] = made["different"]
    assert (row["expression"], row["result"], row["of"]) == ("a + b", "int8", 1)
    assert row["distance"] in (1, 255)  # 127 + 1 wraps
    assert abs(row["GPU"] - row["simulator"]) == row["distance"]


def test_distances_are_in_units_of_the_dtype() -> None:
    x = torch.tensor([1.0, float("nan"), 0.0, 3.0])
    assert arithmetic.distance(x, x.clone()) is None
    assert arithmetic.distance(x, torch.tensor([1.0, -float("nan"), -0.0, 3.0])) == (0, 2, 0, 0)
    assert arithmetic.distance(x, torch.tensor([1 + 2**-22, float("nan"), 0, 3])) == (
        pytest.approx(2),
        0,
        1,
        1 + 2**-22,
    )
    infinite = arithmetic.distance(x, torch.tensor([1, 2.0, 0, 3]))
    assert infinite is not None
    assert infinite[0] == float("inf")
    with pytest.raises(TypeError, match=r"the simulator has torch.int32, the GPU torch.int64"):
        arithmetic.distance(torch.tensor([1], dtype=torch.int32), torch.tensor([1]))


def test_the_page_on_triton_has_the_counts_of_the_comparison() -> None:
    made = json.loads((ROOT / "benchmarks/results/arithmetic_1.json").read_text())
    page = (ROOT / "docs/triton-coverage.md").read_text()
    for kind in ("expressions", "programs"):
        counts = made["counts"]
        assert f"| {kind} | {counts[f'{kind}, same']} | {counts[f'{kind}, different']} |" in page
    near = sum(row["distance"] <= 8 for row in made["different"])
    assert f"In {near} of the {len(made['different'])} rows" in page
