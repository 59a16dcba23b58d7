"""The tables that ship with pkt: derived, never written by hand; and the rule of the nearest shape."""

import inspect
import json
import math
from dataclasses import replace
from functools import partial

import pytest

import pkt
from benchmarks import calibrate, tuned
from pkt.model.config import NCCL, Config
from pkt.model.gpu import H200
from pkt.tune import RecordedTimer, cache, choice, tables, tune
from pkt.tune.search import Candidate, Search
from tests.tune.helpers import MODELS, OPERATORS


@pytest.fixture(scope="module")
def written():
    return tuned.tables()


def test_tables_agree_with_the_results(written):
    assert {*written, calibrate.FILE} == {
        *(tuned.ROOT / "kernels").rglob("*.json"),
        *(tuned.ROOT / "pkt").rglob("*.json"),
    }
    for path, content in written.items():
        assert path.read_text() == content, f"{path} is stale: python -m benchmarks.tuned"


@pytest.mark.parametrize("what", MODELS)
def test_every_entry_has_its_source_and_settings_that_the_operator_takes(what):
    names = set(inspect.signature(getattr(pkt, what)).parameters)
    searches = tables.measured(OPERATORS[what])
    assert {search.key["size"] for search in searches} == {2, 4}
    for search in searches:
        source = tables.source(OPERATORS[what], search.key)
        assert set(source) == {"file", "commit", "date", "versions"}
        record = json.loads((tuned.ROOT / source["file"]).read_text())
        assert (record["commit"], record["ranks"]) == (source["commit"], search.key["size"])
        assert search.key["gpu"] == H200.name
        assert search.best == min(search.candidates, key=lambda c: c.time).config
        for candidate in search.candidates:
            assert set(candidate.config) <= names
            low, median, high = candidate.times
            assert low <= candidate.time == median <= high
    assert tables.source(OPERATORS[what], {**searches[0].key, "size": 3}) == {}


def test_the_fastest_configs_of_all_and_of_every_mode_ship():
    for what in MODELS:
        for case in tuned.cases(what):
            (search,) = (s for s in tables.measured(OPERATORS[what]) if s.key == {**case.key, "gpu": H200.name})
            times = {Config(**row["settings"]): row["seconds"] for row in case.measured}
            assert [c.time for c in search.candidates][: tuned.MOST] == sorted(times.values())[: tuned.MOST]
            modes = {config["mode"] for config in times}
            assert NCCL["mode"] in modes == {c.config["mode"] for c in search.candidates}
            for mode in modes:
                first = min(time for config, time in times.items() if config["mode"] == mode)
                assert first in [c.time for c in search.candidates if c.config["mode"] == mode]
            assert len(search.candidates) < tuned.MOST + len(modes)


def test_the_last_search_of_a_case_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(tuned, "RESULTS", tmp_path)
    monkeypatch.setattr(tuned, "ROOT", tmp_path)

    def search(name, date, *sizes):
        row = {"settings": {"mode": "unfused"}, "seconds": len(name), "low": 1, "high": 9, "shares": []}
        found = [{"key": {"M": n, "K": n, "size": 4}, "measured": [row]} for n in sizes]
        host = {"gpus": ["H200"], "versions": {"torch": "2", "triton": "3"}}
        record = {"cases": found, "date": date, "commit": name, "ranks": 4, "host": host}
        (tmp_path / f"exhaustive_one_{name}.json").write_text(json.dumps(record))

    search("a", "2026-11-21", 64, 32)
    search("bc", "2026-11-22", 32, 16)
    search("def", "2026-11-20", 32, 128)
    table = tuned.operator_table("one")
    assert [s["file"] for s in table["sources"]] == [f"exhaustive_one_{name}.json" for name in ("bc", "a", "def")]
    found = {e["key"]["M"]: (table["sources"][e["source"]]["commit"], e["measured"][0]) for e in table["entries"]}
    assert {n: commit for n, (commit, _) in found.items()} == {16: "bc", 32: "bc", 64: "a", 128: "def"}
    assert found[32][1] == {"settings": {"mode": "unfused"}, "seconds": 2, "low": 1, "high": 9}


# -------------------------------------------------------------------------------------------------- the nearest shape
def key(M, N, K, dtype="bfloat16"):
    return {"M": M, "N": N, "K": K, "dtype": dtype}


def carried(what, config):
    return tables.carried(OPERATORS[what], config)


def recorded(times, world):
    return RecordedTimer(times)


@pytest.mark.parametrize("what", MODELS)
def test_a_measured_shape_gets_its_own_config(what):
    for search in tables.measured(OPERATORS[what]):
        assert tables.nearest(OPERATORS[what], search.key, H200.name, search.key["size"]) == search.best


@pytest.fixture
def without_objection(monkeypatch):
    """The model lets every table pass."""
    monkeypatch.setattr(tables.calibration, "error", lambda operator, mode: math.inf)


@pytest.fixture
def two_cases(monkeypatch, without_objection):
    """Two measured shapes; the best config of each is right for that shape only."""
    found = []
    for N in (4096, 8192):
        configs = [Config(mode="add", tiles=(128, 256, 64, group, 8, 3)) for group in (N // 1024, 16)]
        shape = {"M": N, "N": N, "K": N // 4, "dtype": "bf16", "size": 4, "gpu": H200.name}
        predicted = MODELS["matmul_reduce_scatter"](configs[0], shape)
        candidates = tuple(Candidate(c, predicted, (1e-4 * (i + 1),) * 3) for i, c in enumerate(configs))
        found.append(Search("matmul_reduce_scatter", shape, candidates, configs[0], 0.0))
    monkeypatch.setattr(tables, "measured", lambda _: tuple(found))
    return found


def taken(M, N, K):
    return tables.nearest(OPERATORS["matmul_reduce_scatter"], key(M, N, K), H200.name, 4)


def test_the_nearest_in_doublings(two_cases):
    small, large = (carried("matmul_reduce_scatter", search.best) for search in two_cases)
    assert [taken(M, 8192, 2048) for M in (6000, 8191, 11000)] == [large] * 3
    assert taken(4000, 4200, 1000) == small != large


def test_a_tie_goes_to_the_smaller_product(two_cases):
    half_way = 2**12.5, 4096, 2048  # M half-way, N of the smaller shape, K of the larger
    assert taken(*half_way) == carried("matmul_reduce_scatter", two_cases[0].best)
    assert taken(half_way[0] + 1, *half_way[1:]) == carried("matmul_reduce_scatter", two_cases[1].best)


def test_settings_right_for_one_shape_only_are_left_to_the_operator():
    for what in MODELS:
        case = next(s.key for s in tables.measured(OPERATORS[what]) if s.best["mode"] == "gluon" and s.key["size"] == 4)
        there, beside = (
            tables.nearest(OPERATORS[what], {**case, "K": case["K"] + more}, H200.name, 4) for more in (0, 8)
        )
        assert {"mode", "tiles"} < set(there)
        assert beside == Config(mode="gluon")
    gluon = Config(
        mode="gluon",
        num_comm_sms=8,
        chunk=512,
        push_rows=1,
        rounds_alone=3,
        cut_last=2,
        whole_rounds=4,
        tiles=(128, 256, 64),
    )
    assert set(carried("all_gather_matmul", gluon)) == {"mode", "num_comm_sms", "chunk", "push_rows", "tiles"}
    assert carried("all_gather_matmul", Config(mode="copy", push_rows=1, tiles=(128, 256, 64))) == (
        Config(mode="copy", tiles=(128, 256, 64))
    )
    lcsc = Config(mode="lcsc", num_comm_sms=8)
    assert carried("matmul_all_reduce", lcsc) == lcsc


def test_times_are_carried_over_by_the_model(monkeypatch, without_objection):
    """The links were the limit, and 24 pushing programs were best. Where they are not the limit, 4 are better."""
    case = {**key(4096, 1024, 4096), "size": 4}
    configs = [Config(mode="push", num_comm_sms=n, chunk=512, tiles=(128, 256, 64, 8, 8, 3)) for n in (24, 4)]
    candidates = tuple(Candidate(c, MODELS["all_gather_matmul"](c, case), (1e-4,) * 3) for c in configs)
    search = Search("all_gather_matmul", {**case, "dtype": "bf16", "gpu": H200.name}, candidates, configs[0], 0.0)
    monkeypatch.setattr(tables, "measured", lambda _: (search,))
    found = [tables.nearest(OPERATORS["all_gather_matmul"], key(4096, N, 4096), H200.name, 4) for N in (1024, 2800)]
    assert found == configs


def test_a_form_that_was_slower_there_has_to_be_ahead_by_its_error(monkeypatch):
    """By the times as the model carries them over, lcsc would take 0.9 of gluon's."""
    case = {**key(8192, 8192, 4096), "size": 2}
    configs = [Config(mode="gluon", lag=17, tiles=(128, 256, 64, 16, 8, 4)), Config(mode="lcsc", num_comm_sms=16)]
    ahead = dict(zip(("gluon", "lcsc"), (2.0, 1.5)))
    monkeypatch.setattr(tables, "model_of", lambda _: lambda config, there: ahead[config["mode"]])
    candidates = tuple(Candidate(c, 1.0, (time,) * 3) for c, time in zip(configs, (1e-3, 1.2e-3)))
    search = Search("matmul_all_reduce", {**case, "dtype": "bf16", "gpu": H200.name}, candidates, configs[0], 0.0)
    monkeypatch.setattr(tables, "measured", lambda _: (search,))
    for error, mode in ((0.05, "lcsc"), (0.2, "gluon")):
        monkeypatch.setattr(tables.calibration, "error", lambda operator, form, error=error: error)
        monkeypatch.setattr(tables, "estimate", lambda *_: None)
        assert tables.nearest(OPERATORS["matmul_all_reduce"], key(8192, 7168, 8192), H200.name, 2)["mode"] == mode


def test_a_form_that_the_model_expects_to_be_slower_is_not_carried_over(monkeypatch):
    """The table has nothing but a slow form: that is a fact for its shape, but not beside it."""
    case, slow = key(4096, 4096, 1024), Config(mode="inbox", tiles=(128, 256, 64, 8, 8, 3))
    candidates = (Candidate(slow, 1e-4, (1e-4,) * 3),)
    there = {**case, "dtype": "bf16", "size": 4, "gpu": H200.name}
    search = Search("matmul_reduce_scatter", there, candidates, slow, 0.0)
    monkeypatch.setattr(tables, "measured", lambda _: (search,))
    assert taken(4096, 4096, 1024) == slow
    assert taken(4096, 4096, 1032) is None
    monkeypatch.setattr(tables.calibration, "error", lambda operator, mode: 1.0)
    assert taken(4096, 4096, 1032) == slow


def test_distant_and_different_cases_have_no_config():
    M = math.ceil(4096 / 2**tables.FARTHEST)
    assert tables.nearest(OPERATORS["matmul_all_reduce"], key(M, 4096, 1024), H200.name, 4) is not None
    assert tables.nearest(OPERATORS["matmul_all_reduce"], key(M - 1, 4096, 1024), H200.name, 4) is None
    same = key(4096, 4096, 1024)
    assert tables.nearest(OPERATORS["matmul_all_reduce"], same, H200.name, 4) is not None
    assert tables.nearest(OPERATORS["matmul_all_reduce"], same, H200.name, 8) is None
    assert tables.nearest(OPERATORS["matmul_all_reduce"], same, "NVIDIA B200", 4) is None
    assert tables.nearest(OPERATORS["matmul_all_reduce"], {**same, "dtype": "float32"}, H200.name, 4) is None
    assert tables.nearest(OPERATORS["matmul_all_reduce"], {**same, "K": 0}, H200.name, 4) is None


def test_the_baseline_is_taken_where_it_was_the_fastest_unless_it_is_off(monkeypatch):
    case = tables.measured(OPERATORS["matmul_all_reduce"])[0]
    assert [c.config for c in case.candidates].count(NCCL) == 1
    first = sorted(case.candidates, key=lambda c: c.config != NCCL)
    monkeypatch.setattr(tables, "measured", lambda _: (replace(case, candidates=tuple(first)),))
    found = [tables.nearest(OPERATORS["matmul_all_reduce"], case.key, H200.name, 4)]
    for value in ("1", "0"):
        monkeypatch.setenv("PKT_NCCL", value)
        found.append(tables.nearest(OPERATORS["matmul_all_reduce"], case.key, H200.name, 4))
    assert found == [NCCL, NCCL, case.best]


def test_rows_that_tma_cannot_take_get_the_fastest_plain_form():
    odd = tables.nearest(OPERATORS["all_gather_matmul"], key(4096, 1023, 4096), H200.name, 4)
    assert odd["mode"] in ("push", "copy", "nccl")
    assert tables.nearest(OPERATORS["matmul_reduce_scatter"], key(4096, 4100, 1024), H200.name, 4)["mode"] == "add"
    assert tables.nearest(OPERATORS["matmul_reduce_scatter"], key(4096, 4096, 1023), H200.name, 4)["mode"] == "gluon"


def test_an_untuned_case_takes_the_choice_of_the_nearest_shape(monkeypatch):
    """Only on four ranks that say they are H200."""
    near = {**key(5000, 1200, 4000), "size": 4}

    def main(world):
        return choice("all_gather_matmul", near, world)

    assert pkt.launch(main, ranks=4, device="cpu") == [None] * 4
    machine = cache.machine
    monkeypatch.setattr(cache, "machine", lambda world: {**machine(world), "gpu": H200.name})
    there = tables.nearest(OPERATORS["all_gather_matmul"], near, H200.name, 4)
    assert there is not None
    assert pkt.launch(main, ranks=4, device="cpu") == [there] * 4
    assert pkt.launch(main, ranks=3, device="cpu") == [None] * 3


def test_a_choice_of_the_baseline_is_passed_over_where_it_is_off(monkeypatch):
    case = {**key(64, 64, 64), "size": 2}

    def main(world):
        timer = partial(recorded, {NCCL: 1e-3, Config(mode="lcsc"): 2e-3})
        tune(lambda mode: None, configs=[Config(mode="lcsc"), NCCL], key=case, name="matmul_all_reduce", timer=timer)
        return choice("matmul_all_reduce", case, world)

    assert pkt.launch(main, ranks=2, device="cpu") == [NCCL] * 2
    monkeypatch.setenv("PKT_NCCL", "0")
    assert pkt.launch(main, ranks=2, device="cpu") == [None] * 2
