"""README.md opens with a sentence, a measured picture and a program; every quoted figure is from a results file."""

import pytest

from benchmarks import figures
from tests.test_docs import BLOCK, ROOT

README = ROOT / "README.md"


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_page_quotes_the_figures_of_the_results_files(page):
    text = page.read_text()
    assert text == figures.filled(text), f"{page.name}: run python -m benchmarks.figures"


def test_only_results_files_of_three_ranks_may_be_missing():
    named = {
        name for page in figures.PAGES for place in figures.PLACE.findall(page.read_text()) for name in place[1].split()
    }
    assert all((ROOT / name).exists() or name.endswith("_3.json") for name in named)
    place = "<!-- benchmarks/results/none_3.json -->\n%s<!-- end -->"
    assert figures.filled(place % "| stale |\n") == place % ""


def test_filled_corrects_a_changed_figure():
    text = README.read_text()
    measured = next(line for line in text.splitlines() if line.startswith("| GEMM"))
    wrong = measured.replace(measured.split("|")[2], " 0.0001 s ")
    assert figures.filled(text.replace(measured, wrong)) == text


def test_the_first_screens_have_a_picture_a_program_and_the_race():
    text = README.read_text()
    head = text.split("\n## ")[0]
    assert len(head.splitlines()) <= 60
    assert "](benchmarks/results/overview.png)" in head
    programs = BLOCK.findall(head)
    assert len(programs) == 1, "one whole program"
    assert len(programs[0].splitlines()) <= 21
    assert "pkt.launch(" in programs[0]
    assert head.index("```python") < head.index("```text\ndata race: ")
    assert figures.PLACE.search(text), "a measured table"


def test_number_keeps_two_or_three_digits():
    assert [figures.number(x) for x in (0.4214, 1.374, 24.23, 100, 1234.5)] == ["0.42", "1.4", "24.2", "100", "1,234"]


def test_table_gives_ratios_two_decimals_and_times_a_unit():
    row = {"case": "N", "value": 0.932, "unit": "", "limit": 1.05, "at_least": True, "held": False}
    host = {"gpus": [], "cores": 2}
    text = figures.table({"host": host, "ranks": 4, "date": "2026-11-21", "rows": [row]})
    assert "| N | 0.93, missed | ≥ 1.05 |" in text
    row |= {"value": 0.0086, "limit": 0.0092}
    assert "| N | 0.0086, missed | ≥ 0.0092 |" in figures.table({"host": host, "ranks": 4, "date": "", "rows": [row]})
    row |= {"value": 0.4, "unit": "s", "limit": 0.5, "at_least": False, "held": True}
    assert "| N | 0.4 s | ≤ 0.5 s |" in figures.table({"host": host, "ranks": 4, "date": "2026-11-21", "rows": [row]})


def test_operators_table_shows_the_default_or_the_fastest_variant_beside_the_baselines():
    """A case without a baseline leaves its cell empty."""

    def row(case, variant, ms, error=1e-3):
        return {"case": case, "variant": variant, "ms": ms, "error": error}

    rows = [row("N = 1", "NCCL + cuBLAS", 0.4), row("N = 1", "pkt a", 0.3), row("N = 1", "pkt b", 0.2)]
    rows += [row("N = 1", "(pkt part)", 0.1, None), row("N = 1", "cuBLAS alone", 0.1, None), row("N = 2", "pkt a", 1.0)]
    rows += [row("N = 3", "pkt a", 1.0), row("N = 3", "pkt default", 1.1)]
    rows += [row("N = 3", "NCCL + cuBLAS", 3.0), row("N = 3", "torch symm_mem fused", 2.0)]
    record = {"benchmark": "matmul_all_reduce", "host": {"gpus": ["GPU"] * 2, "cores": 1}, "ranks": 2, "date": "D"}
    assert figures.operators_table([record | {"measured": rows}]).splitlines() == [
        "| pkt (NCCL + cuBLAS; torch fused) in ms, 2 ranks on 2 GPU, D | N = 1 | N = 2 | N = 3 |",
        "|---|--:|--:|--:|",
        "| GEMM + all-reduce | 0.2 (0.4) |  | 1.1 (3; 2) |",
    ]
