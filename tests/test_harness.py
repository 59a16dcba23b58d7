"""The benchmarks' harness: medians, limits, and a results file with host, commit and command."""

import json

import pytest

from benchmarks import _harness


def test_a_row_has_the_median_and_the_spread():
    row = _harness.row("case", [3.0, 1.0, 2.0, 100.0, 0.5], "s", limit=2.5)
    assert (row.value, row.low, row.high, row.runs, row.held) == (2.0, 0.5, 100.0, 5, True)


@pytest.mark.parametrize(("limit", "at_least", "held"), [(1.9, False, False), (1.9, True, True), (2.1, True, False)])
def test_held_compares_with_an_upper_or_a_lower_limit(limit, at_least, held):
    assert _harness.row("case", [2.0], "s", limit, at_least).held is held


def test_seconds_does_not_count_the_warm_up():
    calls = []
    assert len(_harness.seconds(lambda: calls.append(None), repeats=3, warmup=2)) == 3
    assert len(calls) == 5


def test_results_file_names_host_and_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_harness, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["/some/where/probe.py", "--quick"])
    path = _harness.write("probe", [_harness.row("GEMM", [0.25], "s", limit=0.5)], ranks=4)
    record = json.loads(path.read_text())
    assert record["command"] == "python -m benchmarks.probe --quick"
    assert record["rows"] == [
        {"case": "GEMM", "value": 0.25, "unit": "s", "low": 0.25, "high": 0.25, "runs": 1, "limit": 0.5}
        | {"at_least": False, "held": True}
    ]
    assert record["ranks"] == 4
    assert record["host"]["cores"] >= 1
    assert set(record["host"]["versions"]) >= {"python", "torch", "triton"}
    assert "/some/where" not in path.read_text()
    assert "holds" in capsys.readouterr().out
