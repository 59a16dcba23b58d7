"""The tables that ship with pkt: derived, never written by hand; and the rule of the nearest shape."""

import inspect
import json
import math
import statistics
from dataclasses import replace
from functools import partial

import pytest

import pkt
from benchmarks import tuned
from pkt.tune import RecordedTimer, cache, choice, tables, tune
from pkt.tune.config import NCCL, Config
from pkt.tune.gpu import H200
from pkt.tune.model import MODELS


@pytest.fixture(scope="module")
def written():
    return tuned.tables()


def test_tables_are_what_the_results_say(written):
    assert {path.name for path in written} == {path.name for path in tuned.TABLES.glob("*.json")}
    for path, content in written.items():
        assert path.read_text() == content, f"{path.name} is stale: python -m benchmarks.tuned"


@pytest.mark.parametrize("what", MODELS)
def test_every_entry_has_its_source_and_settings_that_the_operator_takes(what):
    assert set(tables.source(what)) == {"file", "commit", "date", "versions"}
    record = json.loads((tuned.ROOT / tables.source(what)["file"]).read_text())
    assert record["commit"] == tables.source(what)["commit"]
    names = set(inspect.signature(getattr(pkt, what)).parameters)
    searches = tables.measured(what)
    assert [search.key["M"] for search in searches] == [4096, 8192, 16384, 32768][: len(searches)]
    for search in searches:
        assert search.key["gpu"] == H200.name
        assert search.key["size"] == 4
        assert search.best == min(search.candidates, key=lambda c: c.time).config
        for candidate in search.candidates:
            assert set(candidate.config) <= names
            low, median, high = candidate.times
            assert low <= candidate.time == median <= high


def test_every_right_variant_of_pkt_and_the_baseline_are_in_the_table():
    for what in MODELS:
        record = json.loads((tuned.RESULTS / f"{what}.json").read_text())
        wanted = ("pkt ", "NCCL + cuBLAS")
        timed = [r["variant"] for r in record["measured"] if r["variant"].startswith(wanted) and "ms" in r]
        rows = [row["variant"] for entry in tuned.operator_table(what)["entries"] for row in entry["measured"]]
        assert sorted(rows) == sorted(v for v in timed if v != "pkt default")


# -------------------------------------------------------------------------------------------------- the nearest shape
def key(M, N, K, dtype="bfloat16"):
    return {"M": M, "N": N, "K": K, "dtype": dtype}


def recorded(times, world):
    return RecordedTimer(times)


def config_of(what, M):
    return next(search.best for search in tables.measured(what) if search.key["M"] == M)


@pytest.mark.parametrize("what", MODELS)
def test_a_measured_shape_gets_its_own_config(what):
    for search in tables.measured(what):
        assert tables.nearest(what, search.key, H200.name, 4) == search.best


def test_the_nearest_in_doublings():
    nearest = [tables.nearest("all_gather_matmul", key(M, 2048, 8192), H200.name, 4) for M in (8192, 6000, 11000)]
    assert nearest == [config_of("all_gather_matmul", 8192)] * 3
    close = tables.nearest("all_gather_matmul", key(15000, 4096, 15000), H200.name, 4)
    assert close == config_of("all_gather_matmul", 16384) != nearest[0]


def test_a_tie_goes_to_the_smaller_product():
    tie = {"M": 2**12.5, "N": 2048, "K": 4096, "dtype": "torch.bfloat16"}  # half-way, at one end, at the other
    distances = [
        sum(abs(math.log2(tie[axis] / search.key[axis])) for axis in tables.AXES)
        for search in tables.measured("all_gather_matmul")[:2]
    ]
    assert distances[0] == pytest.approx(distances[1], abs=1e-9)
    assert tables.nearest("all_gather_matmul", tie, H200.name, 4) == config_of("all_gather_matmul", 4096)


def test_too_far_and_other_cases_have_none():
    M = 4096 / 2**tables.FARTHEST
    assert tables.nearest("matmul_all_reduce", key(M, 4096, 1024), H200.name, 4) == config_of("matmul_all_reduce", 4096)
    assert tables.nearest("matmul_all_reduce", key(M - 1, 4096, 1024), H200.name, 4) is None
    same = key(4096, 4096, 1024)
    assert tables.nearest("matmul_all_reduce", same, H200.name, 4) is not None
    assert tables.nearest("matmul_all_reduce", same, H200.name, 8) is None
    assert tables.nearest("matmul_all_reduce", same, "NVIDIA B200", 4) is None
    assert tables.nearest("matmul_all_reduce", {**same, "dtype": "float32"}, H200.name, 4) is None
    assert tables.nearest("matmul_all_reduce", {**same, "K": 0}, H200.name, 4) is None
    assert tables.nearest("all_to_all", same, H200.name, 4) is None


def test_the_baseline_is_taken_where_it_was_the_fastest_unless_it_is_off(monkeypatch):
    case = tables.measured("matmul_all_reduce")[0]
    assert [c.config for c in case.candidates].count(NCCL) == 1
    first = sorted(case.candidates, key=lambda c: c.config != NCCL)
    monkeypatch.setattr(tables, "measured", lambda _: (replace(case, candidates=tuple(first)),))
    found = [tables.nearest("matmul_all_reduce", case.key, H200.name, 4)]
    for value in ("1", "0"):
        monkeypatch.setenv("PKT_NCCL", value)
        found.append(tables.nearest("matmul_all_reduce", case.key, H200.name, 4))
    assert found == [NCCL, NCCL, case.best]


def test_rows_that_tma_cannot_take_get_the_fastest_plain_form():
    odd = tables.nearest("all_gather_matmul", key(4096, 1023, 4096), H200.name, 4)
    assert odd["mode"] == "push" != config_of("all_gather_matmul", 4096)["mode"]
    assert tables.nearest("matmul_reduce_scatter", key(4096, 4100, 1024), H200.name, 4)["mode"] == "add"
    assert tables.nearest("matmul_reduce_scatter", key(4096, 4096, 1023), H200.name, 4)["mode"] == "chain"


def test_what_a_config_from_a_whole_size_away_costs():
    """Why FARTHEST is less than a size: each case asked for with itself left out."""
    losses = []
    for what in MODELS:
        searches = tables.measured(what)
        for search in searches:
            others = [other for other in searches if other is not search]
            near = min(others, key=lambda other: (abs(math.log2(other.key["M"] / search.key["M"])), other.key["M"]))
            times = {c.config: c.time for c in search.candidates}
            losses.append(times[near.best] / min(times.values()) - 1)
    assert len(losses) == 11
    assert 0.01 < statistics.median(losses) < 0.02
    assert 0.25 < max(losses) < 0.295


def test_a_choice_that_was_not_tuned_is_that_of_the_nearest_shape(monkeypatch):
    """On four ranks that say they are H200, and on those that do not."""
    near = {**key(5000, 1200, 4000), "size": 4}

    def main(world):
        return choice("all_gather_matmul", near, world)

    assert pkt.launch(main, ranks=4, device="cpu") == [None] * 4
    machine = cache.machine
    monkeypatch.setattr(cache, "machine", lambda world: {**machine(world), "gpu": H200.name})
    best = config_of("all_gather_matmul", 4096)
    assert pkt.launch(main, ranks=4, device="cpu") == [best] * 4
    assert pkt.launch(main, ranks=2, device="cpu") == [None] * 2


def test_a_choice_of_the_baseline_is_passed_over_where_it_is_off(monkeypatch):
    case = {**key(64, 64, 64), "size": 2}

    def main(world):
        timer = partial(recorded, {NCCL: 1e-3, Config(mode="lcsc"): 2e-3})
        tune(lambda mode: None, configs=[Config(mode="lcsc"), NCCL], key=case, name="matmul_all_reduce", timer=timer)
        return choice("matmul_all_reduce", case, world)

    assert pkt.launch(main, ranks=2, device="cpu") == [NCCL] * 2
    monkeypatch.setenv("PKT_NCCL", "0")
    assert pkt.launch(main, ranks=2, device="cpu") == [None] * 2
