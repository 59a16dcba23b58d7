"""The zoo: shapes of published models, pieces, resuming, turns, and what is made from results."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pkt
from benchmarks import _cublasmp, _zoo_inputs, _zoo_measure, _zoo_report, zoo
from benchmarks._timing import Settings
from benchmarks._zoo_cases import LAYOUTS, MODELS, TINY, TOKENS, ZooCase, cases, piece
from pkt.errors import WaitTimeout
from pkt.kernels.operator import operators

AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


def test_products_of_two_models() -> None:
    llama = {name: of[1:] for name, of in MODELS["Llama 3 70B"].products(8).items()}
    # 64 heads and 8 heads of keys and of values, 128 each; columns of qkv on a rank: (64 + 2 * 8) * 128 / 8
    assert llama == {"qkv": (1280, 8192), "o": (8192, 1024), "gate_up": (7168, 8192), "down": (8192, 3584)}
    deepseek = MODELS["DeepSeek V3"].products(2)
    # 128 heads: queries of 128 + 64, keys and values of 128 each; half of them on a rank
    assert deepseek == {
        "q_b": ((AG,), 12288, 1536), "kv_b": ((AG,), 16384, 512), "o": ((RS, AR), 7168, 8192),
        "gate_up": ((AG,), 18432, 7168), "down": ((RS, AR), 7168, 9216),
    }  # fmt: skip


def test_a_rank_has_at_least_one_head_of_keys() -> None:
    assert MODELS["Qwen3 235B-A22B"].products(8)["qkv"][1] == (64 // 8 + 2) * 128
    assert "qkv" not in MODELS["Mixtral 8x22B"].products(5)


def test_equal_products_are_one_case() -> None:
    found = {case.key: case for case in cases(4, tokens=(1, 3, 4))}
    shared = found[AG, 4, 2560, 8192, 4, "row-major"]
    assert (shared.tokens, shared.products) == ([1, 3, 4], ["Llama 3 70B qkv"])  # rows padded to 4 ranks
    assert found[AR, 3, 8192, 2048, 4, "transposed"].tokens == [3]
    both = found[AR, 1, 4096, 1024, 4, "row-major"]
    assert both.products == ["Llama 3 8B o"]
    assert found[AR, 1, 4096, 2048, 4, "row-major"].products == ["Qwen3 235B-A22B o"]
    assert {case.layout for case in found.values()} == set(LAYOUTS)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_pieces_are_a_partition(ranks: int) -> None:
    every = cases(ranks)
    parts = [piece(every, i, 5) for i in range(1, 6)]
    assert sorted(c.key for part in parts for c in part) == sorted(c.key for c in every)
    assert len({c.key for c in every}) == len(every)
    assert [c.key for c in cases(ranks)] == [c.key for c in every]  # the same order in every run
    assert {count for case in every for count in case.tokens} == set(TOKENS)
    assert {case.operator for case in parts[0]} == {AG, RS, AR}


def test_all_forms_are_right_in_the_simulator(capsys: pytest.CaptureFixture) -> None:
    assert zoo.main(["--device", "cpu", "--quick", "--tokens", "3"]) == 0
    said = capsys.readouterr().out
    every = cases(2, TINY, (3,))
    assert f"zoo: {len(every)} of {len(every)} cases" in said
    for operator in (AG, RS, AR):
        for mode, form in operators()[operator].forms.items():
            assert form.gpu or mode == "nccl" or f"pkt {mode}" in said
    assert "FAILED" not in said


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is off by a tenth, and one of an earlier launch."""
    case, right = cases(2, TINY, (3,))[0], _zoo_inputs.Inputs.pkt_runs

    def wrong(inputs: Any, forms: str) -> dict[str, Any]:
        run = right(inputs, forms)["pkt unfused"]
        first = run(inputs.copies[0]).clone()
        return {"right": run, "off": lambda b: run(b) * 1.1, "stale": lambda b: first}

    def main(world: pkt.World) -> dict[str, Any]:
        return _zoo_measure.Bench(world, "unfused", Settings(), "", {}).measured(case)["variants"]

    monkeypatch.setattr(_zoo_inputs.Inputs, "pkt_runs", wrong)
    for found in pkt.launch(main, ranks=2, device="cpu", sms=4):
        assert "failed" not in found["right"]
        assert found["off"]["failed"].startswith("wrong: error 0.1")
        assert found["stale"]["failed"].startswith("wrong: error")


def test_plain_forms_are_left_out_above_some_rows() -> None:
    few, many = (_zoo_inputs.variants(AG, True, "", rows) for rows in (16, 16384))
    plain = {"pkt push", "pkt copy", "pkt low_latency"}
    assert plain <= few.keys()
    assert few.keys() - many.keys() == plain
    assert {"pkt default", "pkt gluon", "pkt unfused"} <= many.keys()
    assert list(_zoo_inputs.variants(AG, True, "push", 16)) == ["pkt default", "pkt push"]
    assert list(_zoo_inputs.variants(AG, True, "push", 16384)) == ["pkt default"]


@pytest.mark.parametrize(
    ("version", "why"), [("0.7.0.125", ""), ("0.8.1.1", "is 0.8.1.1, wanted 0.7.0"), ("", "not installed")]
)
def test_only_one_version_of_cublasmp_is_loaded(
    version: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later ones create multicast objects."""
    monkeypatch.syspath_prepend(tmp_path)
    if version:
        for folder in ("nvidia/cublasmp/cu13/lib", f"nvidia_cublasmp_cu13-{version}.dist-info", "nvshmem"):
            (tmp_path / folder).mkdir(parents=True)
        (tmp_path / "nvidia/cublasmp/cu13/lib/libcublasmp.so.0").touch()
        facts = f"Metadata-Version: 2.1\nName: nvidia-cublasmp-cu13\nVersion: {version}\n"
        (tmp_path / f"nvidia_cublasmp_cu13-{version}.dist-info" / "METADATA").write_text(facts)
    assert _cublasmp.missing().endswith(why)
    assert bool(_cublasmp.missing()) == bool(why)


def test_the_limit_is_the_product_or_the_links() -> None:
    """16,384 rows of 64 columns send 1 MiB of a bf16 result to one peer: 2.7 us at 390 GB/s."""
    facts = {"operator": RS, "M": 16384, "N": 64, "K": 8, "layout": "row-major", "error": None}
    for alone, limit in ((1.0, 1.0), (0.001, 1e3 * (16384 * 64 * 2 / 2) / 390e9)):
        times = {"pkt default": 2.0, "NCCL + cuBLAS": 3.0, "cuBLAS alone": alone}
        (found,) = _zoo_report.compared([facts | {"variant": name, "ms": ms} for name, ms in times.items()], "ms", 2)
        assert found.limit == pytest.approx(limit)
        assert (found.baseline, found.nccl) == (("NCCL + cuBLAS", 3.0), 3.0)


# ------------------------------------------------------------------------------------------------------------ timing
class Clock:
    """A GPU's clock: each run takes as long as `took` says."""

    now = 0.0

    def event(self, enable_timing: bool) -> Any:
        clock, made = self, SimpleNamespace(at=0.0)
        made.record = lambda: setattr(made, "at", clock.now)
        made.elapsed_time = lambda end: end.at - made.at
        made.synchronize = lambda: None
        return made


def test_variants_take_turns_captured_and_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = Clock(), list[str]()
    world = SimpleNamespace(
        rank=0, size=1, torch_device=torch.device("cpu"), synchronize=lambda: None, barrier=lambda: None,
        all_gather_object=lambda x: [x],
    )  # fmt: skip

    def variant(name: str, ms: float) -> Any:
        def run(b: torch.Tensor) -> torch.Tensor:
            order.append(name)
            clock.now += ms
            return b

        return run

    class Graph:
        def capture_begin(self) -> None:
            order.append("begin")

        def capture_end(self) -> None:
            if order[-1] == "torch":
                raise RuntimeError("cannot be captured")

        def replay(self) -> None:
            order.append("replay")
            clock.now += 0.25

    fakes = {
        "Event": clock.event, "CUDAGraph": Graph, "Stream": object, "_sleep": lambda ticks: None,
        "stream": lambda side: contextlib.nullcontext(), "synchronize": lambda: None,
    }  # fmt: skip
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(_zoo_measure, "gate", lambda world: None)
    bench = _zoo_measure.Bench(world, "", Settings(), "", {})
    bench.flush = torch.empty(1)
    runs = {"pkt default": variant("pkt", 1.0), "torch": variant("torch", 3.0), "cuBLASMp": variant("mp", 2.0)}
    copies = [torch.empty(1) for _ in range(3)]
    found = bench._timed(ZooCase(AG, 8, 8, 8, 1, "row-major"), runs, copies)
    assert {name: of["ms"] for name, of in found.items()} == {"pkt default": 0.25, "torch": 3.0, "cuBLASMp": 2.0}
    assert [name for name, of in found.items() if "captured" not in of] == ["pkt default"]
    assert {name: of["eager_ms"] for name, of in found.items()} == {"pkt default": 1.0, "torch": 3.0, "cuBLASMp": 2.0}
    assert _zoo_measure.ROUNDS >= 20
    assert order.count("mp") == 2 + _zoo_measure.ROUNDS * (1 + _zoo_measure.LEAST_CALLS)
    assert order.count("pkt") == 2 + 1 + _zoo_measure.ROUNDS * 4  # 1 ms a loop at the captured time


# ------------------------------------------------------------------------------------------------- a run of the driver
def synthetic(case: ZooCase, seed: int = 0) -> dict[str, Any]:
    """A measured case: the default is 1.2 times as slow as the fastest baseline."""
    ms = 1e-3 * (1 + random.Random(f"{case.key} {seed}").random())
    times = {"pkt default": 1.2 * ms, "pkt gluon": 1.1 * ms, "NCCL + cuBLAS": ms, "torch symm_mem fused": 2 * ms,
             "cuBLAS alone": 0.9 * ms}  # fmt: skip
    found: dict[str, Any] = {
        name: {"error": 1e-3, "ms": t, "low": t, "high": t, "eager_ms": 3 * t, "host_us": 9.0}
        for name, t in times.items()
    }
    found["cuBLAS alone"]["error"] = None
    found["cuBLASMp"] = {"failed": "not installed", "skipped": True}
    found["pkt push"] = {"failed": "wrong: error 0.5", "ms": ms / 9, "eager_ms": ms / 9}
    return {"case": case.facts(), "variants": found, "seconds": 0.5}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """The cases of each job; a job measures them with no GPU."""
    jobs: list[list[dict[str, Any]]] = []

    def launch(fn, ranks, device, called, **options):
        wanted, _, _, journal, rows, _ = called
        jobs.append(wanted)
        with open(rows, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(synthetic(ZooCase(**facts))) + "\n" for facts in wanted)
        return [[]] * ranks

    monkeypatch.setattr(pkt, "launch", launch)
    monkeypatch.setattr(zoo, "ENVIRONMENT", {})  # they would change this process's environment
    monkeypatch.setattr(_cublasmp, "ENVIRONMENT", {})
    return jobs


def test_a_run_leaves_out_what_is_known(tmp_path: Path, launches: list, capsys: pytest.CaptureFixture) -> None:
    asked = ["--out", str(tmp_path), "--products", "Mixtral", "--tokens", "1,16", "--piece"]
    every = {
        c.key for c in cases(2, tokens=(1, 16)) if "Mixtral 8x22B o" in c.products or "Mixtral 8x22B qkv" in c.products
    }
    assert zoo.main([*asked, "1/2"]) == 1  # the synthetic wrong variant
    first = {ZooCase(**facts).key for facts in launches[0]}
    assert 0 < len(first) < len(every)
    zoo.main([*asked, "1/1"])
    assert {ZooCase(**facts).key for facts in launches[1]} == every - first
    assert set(zoo.measured(tmp_path / "zoo_2.json")) == every
    assert zoo.main([*asked, "2/2"]) == 0
    assert len(launches) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["zoo_2.json", "zoo_2.md", "zoo_2.png"]
    record = json.loads((tmp_path / "zoo_2.json").read_text())
    assert {case["run"] for case in record["measured"]} == {0, 1}
    assert [run["commit"] for run in record["runs"]][:1] == [record["commit"]]
    assert {"date", "command", "commit", "host", "ranks", "rows"} <= record.keys()


def test_a_killed_run_keeps_its_cases(tmp_path: Path, launches: list, capsys: pytest.CaptureFixture) -> None:
    known = cases(2, tokens=(1,))[:3]
    lines = tmp_path / "zoo_2.jsonl"
    facts = {"date": "2026-11-23", "command": "c", "commit": "before", "host": {"gpus": ["GPU"]}}
    cut = json.dumps(synthetic(known[2]))[:50]
    lines.write_text("\n".join([json.dumps(facts), *(json.dumps(synthetic(c)) for c in known[:2]), cut]) + "\n")
    zoo.main(["--out", str(tmp_path), "--tokens", "1"])
    assert len(launches[0]) == len(cases(2, tokens=(1,))) - 2
    record = json.loads((tmp_path / "zoo_2.json").read_text())
    assert record["runs"][0]["commit"] == "before"
    kept = {(e["operator"], e["M"], e["N"], e["K"], 2, e["layout"]) for e in record["measured"] if e["run"] == 0}
    assert kept == {case.key for case in known[:2]}


def test_a_variant_that_ends_its_job_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: list, capsys: pytest.CaptureFixture
) -> None:
    measure_all = pkt.launch
    told: list[dict[str, str]] = []

    def launch(fn, ranks, device, called, **options):
        wanted, _, _, journal, rows, left_out = called
        told.append(dict(left_out))
        if len(told) <= 2:  # the second case of a job hangs
            case = ZooCase(**wanted[1])
            Path(journal).write_text(json.dumps([case.label, "pkt push, capture"]) + "\n")
            measure_all(fn, ranks, device, (wanted[:1], *called[1:]), **options)
            raise WaitTimeout("rank 0 waits")
        return measure_all(fn, ranks, device, called, **options)

    monkeypatch.setattr(pkt, "launch", launch)
    asked = ["--out", str(tmp_path), "--operators", "AG+GEMM", "--tokens", "1", "--row-major"]
    zoo.main(asked)
    expected = [c for c in cases(2, tokens=(1,)) if c.operator == AG and c.layout == "row-major"]
    hung = f"{expected[1].label} | pkt push"
    assert [list(each) for each in told] == [[], [hung], [hung, f"{AG} | pkt push"]]
    assert set(zoo.measured(tmp_path / "zoo_2.json")) == {case.key for case in expected}


# ------------------------------------------------------------------------------------------------------------ results
def test_table_and_map_of_a_small_result(tmp_path: Path) -> None:
    every = [c for c in cases(2, tokens=(1, 2, 66)) if "Llama 3 8B down" in c.products or "Qwen3 32B qkv" in c.products]
    measured = [_zoo_report.stored(synthetic(case), 0) for case in every]
    found = _zoo_report.entries(measured)
    assert len(found) == 7 * len(every)
    assert {"operator", "product", "models", "tokens", "M", "N", "K", "layout", "variant"} <= found[0].keys()
    record = {"ranks": 2, "date": "2026-11-23", "host": {"gpus": ["NVIDIA H200"] * 2}, "measured": measured}
    rows = {row["case"]: row["value"] for row in _zoo_report.summary(found, 2)}
    assert rows["AG+GEMM, captured: pkt default / fastest baseline, geometric mean"] == pytest.approx(1.2)
    assert rows["all, eager: share within 1.03 of the fastest baseline"] == 0
    assert rows["GEMM+RS, captured: pkt default / fastest form of pkt, geometric mean"] == pytest.approx(1.2 / 1.1)
    assert rows["all, captured: NCCL + cuBLAS / pkt default, geometric mean"] == pytest.approx(1 / 1.2)
    assert rows["AG+GEMM, captured: limit / pkt default, geometric mean"] == pytest.approx(0.9 / 1.2)
    assert "all, eager: limit / pkt default, geometric mean" not in rows
    text = _zoo_report.markdown(record, found)
    assert "2 x NVIDIA H200, 2026-11-23" in text
    assert text.count("NCCL + cuBLAS, ") >= min(10, len(every))
    assert f"- FAILED in {len(every)} cases: pkt push: wrong: error 0.5" in text
    (tmp_path / "zoo_2.json").write_text(json.dumps(record))
    times = zoo.measured(tmp_path / "zoo_2.json")[AR, 66, 4096, 7168, 2, "transposed"]
    assert set(times) == {
        "pkt default",
        "pkt gluon",
        "NCCL + cuBLAS",
        "torch symm_mem fused",
        "cuBLAS alone",
    }  # right ones
    # padded to two ranks, one token and two have the same rows
    assert {tuple(e["tokens"]) for e in found if e["operator"] == RS} == {(1, 2), (66,)}
