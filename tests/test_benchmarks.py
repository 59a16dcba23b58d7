"""The operators' benchmarks in the simulator: variants are correct, failures are kept, results are written."""

from __future__ import annotations

import gc
import importlib
import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pkt
from benchmarks import _command, _job, _run, custom_ops, eager, figures, first, runtime
from benchmarks._case import Case
from benchmarks._check import BOUND, checked
from benchmarks._results import against, record, write
from benchmarks._timing import PASSES, Settings
from benchmarks.operators import modules
from pkt import bench
from pkt.errors import Unsupported
from pkt.kernels.operator import operators
from pkt.runtime.launch import replay
from tests.conformance.test_new_operator import written

VARIANTS = [path.stem for name in operators() for path in Path(_run.__file__).parent.glob(f"{name}_*.py")]
"""Further benchmarks of single operators, whose names begin with the operator's."""
OTHERS = (
    "forms",
    "flash_decode",
    "all_reduce_rms_norm",
    "reduce_scatter_rms_norm",
    "moe",
    "dispatch",
    "dispatch_matmul",
    "ulysses_attention",
    "matmul_all_to_all",
    "all_to_all_matmul",
    "all_gather_grouped_matmul",
    "grouped_matmul_reduce_scatter",
    "fp8_products",
)
RANKS = {**dict.fromkeys(VARIANTS, 4), **dict.fromkeys(modules(), 3), **dict.fromkeys(OTHERS, 2)}


@pytest.mark.parametrize(("name", "ranks"), RANKS.items())
def test_every_variant_is_right_in_the_simulator(name: str, ranks: int, capsys: pytest.CaptureFixture) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    rows = _run.run(f"benchmarks.{name}", "cpu", ranks, True, Settings())
    assert [row["variant"] for row in rows] == module.variants("cpu", True) * len(module.cases(True))
    tried = [row for row in rows if not row.get("skipped")]  # a variant may be left out in some cases
    assert {row["variant"] for row in tried} == set(module.variants("cpu", True))
    assert [row["failed"] for row in tried if row.get("failed")] == []
    assert all(row["error"] <= BOUND for row in tried)
    assert "right" in capsys.readouterr().out


@pytest.mark.parametrize("name", modules())
def test_sizes_that_the_ranks_do_not_divide_are_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(_run, "_case", lambda *given: [{"case": given[3], "variant": "pkt default"}])
    rows = _run.run(f"benchmarks.{name}", "cuda", 3, False, Settings())
    found = [row["case"] for row in rows]
    if name == "collectives":  # collectives cut their sizes themselves
        assert found == list(importlib.import_module(f"benchmarks.{name}").cases(False))
        return
    assert found == ["N = 6144", "N = 12288"]
    assert "N = 4096: left out, N = 4096 is not a multiple of 3" in capsys.readouterr().out


def test_a_run_that_is_stopped_leaves_the_cases_that_it_has_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def case(*given: Any) -> list[dict[str, Any]]:
        if given[3] == "N = 6144":
            raise KeyboardInterrupt
        times = {"ms": 2.0, "low": 1.0, "high": 3.0, "runs": 20, "eager_ms": 2.0}
        return [{"case": given[3], "variant": "pkt default", "error": 1e-3, "bytes": 1.0, **times}]

    monkeypatch.setattr(_run, "_case", case)
    with pytest.raises(KeyboardInterrupt):
        _command.main("matmul_all_reduce", "a title", argv=["--ranks", "2", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "matmul_all_reduce_2.json").read_text())
    assert [row["case"] for row in found["rows"]] == ["N = 4096, pkt default"]
    assert [row["case"] for row in found["measured"]] == ["N = 4096"]


def test_against_limits_three_ranks_by_the_ratio_of_bytes() -> None:
    def of(ranks: int, ms: float, nbytes: float, **more: object) -> dict:
        row = {"case": "N", "variant": "pkt default", "error": 1e-3, "ms": ms, "low": ms / 2, "high": 2 * ms}
        measured = [row | {"bytes": nbytes, "runs": 20}, row | {"variant": "pkt gluon"}, {"case": "N", "variant": "x"}]
        return {"host": {}, "commit": "c", "ranks": ranks, "measured": measured} | more

    (row,) = against(of(2, 1.0, 3.0), of(3, 1.25, 4.0))
    assert (row["case"], row["value"], row["limit"]) == ("N, time of pkt default / on 2 ranks", 1.25, 4 / 3)
    assert row["held"]
    assert (row["low"], row["high"]) == (0.3125, 5.0)
    assert not against(of(2, 1.0, 3.0), of(3, 1.5, 4.0))[0]["held"]
    assert against(of(2, 1.0, 3.0, commit="d"), of(3, 1.25, 4.0)) == []


def test_results_file_has_the_comparison_with_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for ranks, ms in ((2, 1.0), (3, 1.2)):
        row = {"case": "N", "variant": "pkt default", "ms": ms, "low": ms, "high": ms, "runs": 20}
        rows = [row | {"error": 0.0, "ratio": 0.5 / ms, "bytes": ranks}]
        write(tmp_path, record("collectives", rows, ranks, {"N": 0.45}), "table\n")
        assert (tmp_path / f"collectives_{ranks}.md").read_text() == "table\n"
    made = json.loads((tmp_path / "collectives_3.json").read_text())
    assert {"gpus", "cores", "versions"} <= set(made["host"])
    assert {row["case"]: row["held"] for row in made["rows"]} == {
        "N, pkt default": None, "N, limit / time of pkt default": False, "N, time of pkt default / on 2 ranks": True,
    }  # fmt: skip
    assert "N, time of pkt default / on 2 ranks: 1.20, the bytes alone 1.50" in capsys.readouterr().out


def test_a_wrong_variant_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    from benchmarks import matmul_reduce_scatter as module

    right = module.case

    def wrong(world, **arguments):
        case = right(world, **arguments)
        name = next(iter(case.variants))
        run = case.variants[name]
        case.variants[name] = lambda: run() * 1.1
        return case

    monkeypatch.setattr(module, "case", wrong)
    monkeypatch.setattr(_command, "ENVIRONMENT", {})  # it would change this process's environment
    assert _command.main("matmul_reduce_scatter", "title", argv=["--device", "cpu", "--quick"]) == 1
    assert "FAILED wrong: error 0.1" in capsys.readouterr().out


def test_a_variant_may_have_a_bound_of_its_own() -> None:
    world: Any = SimpleNamespace(synchronize=lambda: None, all_gather_object=lambda value: [value])
    off: dict[str, Any] = dict.fromkeys(("strict", "loose"), lambda: torch.full((1,), 1.02))
    made = Case(0.0, off, lambda: torch.ones(1), None, bounds={"loose": 0.03})
    failed = {name: checked(world, made, name, [], False).get("failed") for name in off}
    assert failed == {"strict": "wrong: error 0.02, wanted at most 0.01", "loose": None}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_main_without_gpus_writes_no_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(_command, "ENVIRONMENT", {})
    assert _command.main("matmul_reduce_scatter", "title", argv=["--ranks", "2", "--out", str(tmp_path)]) == 1
    assert "wanted 2 GPUs, found 0" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_runtime_times_host_code_without_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "CALLS", 2)
    monkeypatch.setattr(runtime, "REPEATS", 3)
    table = runtime.rows(pkt.launch(runtime.measure, ranks=1, device="cpu", heap="64MiB"))
    assert [row.case.partition(",")[0] for row in table] == list(operators())
    assert all(row.limit == runtime.OVERHEAD and 0 < row.value < 1e5 for row in table)


def test_first_gives_its_workers_a_job_as_launch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the facts that the worlds of its processes are made of."""
    jobs: list[set[str]] = []

    class Pool:
        def run(self, *job: Any, **facts: Any) -> list[tuple[float, float]]:
            jobs.append(set(facts))
            return [(2.0, 1.0), (1.0, 3.0)]

        def close(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("pkt.runtime.workers.workers.warm", lambda ranks: Pool())
    monkeypatch.setattr(first, "Workers", lambda ranks, environment: Pool())
    pkt.launch(print, 2, "cuda")
    assert first.measured(2, "folder", "all_gather_matmul", (64, 64, 64), None) == (2.0, 3.0)
    assert jobs[0] == jobs[1]


def test_other_variants_run_after_one_ends_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[list[str]] = []

    def one_job(module, device, ranks, label, arguments, names, settings):
        jobs.append(names)
        if "hangs" in names:
            return [], "hangs", "WaitTimeout"
        return [{"case": label, "variant": name, "error": 0.0} for name in names], "", ""

    monkeypatch.setattr(_run, "_one_job", one_job)
    given_up: dict[str, str] = {}

    def case(label: str) -> dict[str, str]:
        of = _run._case("m", "cuda", 2, label, {}, ["first", "hangs", "last"], given_up, Settings())
        return {row["variant"]: row.get("failed", "") for row in of}

    assert case("A") == {"hangs": "WaitTimeout", "first": "", "last": ""}
    assert case("B") == {"hangs": "ended its job at A", "first": "", "last": ""}
    assert jobs == [["first", "hangs", "last"], ["first", "last"], ["first", "last"]]


def test_variants_take_turns_in_the_same_order_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(torch_device=torch.device("cuda"), broadcast=lambda value: value)
    names = ["a", "wrong", "b"]
    variants = {name: name for name in names}
    turns: list[str] = []

    def timed(world, run, settings):
        turns.append(run)
        turn = len(turns)
        return {"ms": [turn, 10.0 * turn], "host_us": 100.0 - turn, "eager_ms": float(turn)}

    made = Case(8.0, variants, lambda: torch.ones(1), torch.ones(1), fewer={"b": 4.0})  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "turns", SimpleNamespace(case=lambda world: made))
    monkeypatch.setattr(_job, "prepare", lambda world: None)
    monkeypatch.setattr(_job, "timed", timed)
    monkeypatch.setattr(_job, "checked", lambda w, c, name, *_: {"failed": "wrong"} if name == "wrong" else {})
    rows = _job.job(world, "turns", "A", {}, names, Settings(), "")  # type: ignore[arg-type]
    passes = list(zip(turns[::2], turns[1::2]))
    assert len(passes) == PASSES
    assert set(passes) == {("a", "b"), ("b", "a")}
    first, wrong, last = rows
    assert (first["bytes"], last["bytes"]) == (8, 4)
    assert "ms" not in wrong
    assert first["runs"] == last["runs"] == 2 * PASSES
    of_a = [turn for turn, name in enumerate(turns, 1) if name == "a"]
    times = [ms for turn in of_a for ms in (turn, 10.0 * turn)]
    assert (first["ms"], first["low"], first["high"]) == (statistics.median(times), min(times), max(times))
    assert (first["host_us"], first["eager_ms"]) == (100.0 - of_a[-1], of_a[0])
    before = turns.copy()
    turns.clear()
    _job.job(world, "turns", "A", {}, names, Settings(), "")  # type: ignore[arg-type]
    assert turns == before


# ------------------------------------------------------------------------------------------------ python -m pkt.bench
@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "__init__.py").touch()
    program = 'import sys\nif __name__ == "__main__":\n    print("ran", __name__, sys.argv[1:])\n    sys.exit(%s)\n'
    (folder / "all_gather_matmul.py").write_text(program % 3)
    (folder / "quiet.py").write_text(program % "")
    (folder / "_shared.py").write_text(program % 0)
    (folder / "module.py").write_text("x = 1\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_bench_runs_a_benchmark_by_its_short_name(checkout: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="3"):
        bench.main(["ag_gemm", "--ranks", "2"], checkout)
    with pytest.raises(SystemExit, match=r"^$"):
        bench.main(["quiet"], checkout)
    assert capsys.readouterr().out == "ran __main__ ['--ranks', '2']\nran __main__ []\n"


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["module"], ["_shared"]], ids=str)
def test_bench_lists_the_benchmarks(arguments: list[str], checkout: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(arguments, checkout)
    said = capsys.readouterr().out
    assert "ag_gemm" in said
    assert "quiet" in said
    assert "module" not in said


def test_help_of_bench_is_the_list(checkout: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="0"):
        bench.main(["--help"], checkout)
    said = capsys.readouterr()
    assert "ag_gemm" in said.out
    assert not said.err
    assert max(map(len, said.out.splitlines())) <= 80


def test_bench_without_a_checkout_says_so(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="pkt bench demo: found no benchmarks .*clone of pkt: install that"):
        bench.main(["demo"], tmp_path)


def test_every_short_name_has_a_benchmark() -> None:
    assert all((bench.CHECKOUT / "benchmarks" / f"{name}.py").is_file() for name in bench.short_names().values())


# ------------------------------------------------------------------------------- an operator that was just declared
def test_a_new_operator_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its forms are measured, and its host cost."""
    monkeypatch.setattr(runtime, "CALLS", 1)
    monkeypatch.setattr(runtime, "REPEATS", 1)
    with written(tmp_path) as operator:
        rows = _run.run("benchmarks.forms", "cpu", 2, True, Settings(), sizes=f"pkt.{operator.name} ")
        costs = pkt.launch(runtime.measure, ranks=1, device="cpu", heap="64MiB")[0]
    right = {row["variant"] for row in rows if not row.get("failed") and row["error"] == 0}
    assert right == {*(f"pkt {mode}" for mode in operator.forms), "pkt default"}
    assert f"{operator.name}, without its launch" in costs


def test_bench_measures_the_forms_of_an_operator_without_a_benchmark(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (checkout / "benchmarks" / "forms.py").write_text((checkout / "benchmarks" / "quiet.py").read_text())
    with written(tmp_path) as operator, pytest.raises(SystemExit, match=r"^$"):
        bench.main([operator.name, "--ranks", "2"], checkout)
    assert capsys.readouterr().out == f"ran __main__ ['--sizes', 'pkt.{operator.name} ', '--ranks', '2']\n"


def test_results_are_named_by_what_they_compute() -> None:
    names = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul", "all_to_all")
    words = ["all-gather + GEMM", "GEMM + reduce-scatter", "GEMM + all-reduce", "GEMM", "all-to-all"]
    assert [figures.operation(name) for name in names] == words


def test_host_costs_of_eager_calls_are_counted_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A form that copies is one call of the driver when it comes again; one kernel always is."""
    monkeypatch.setattr(eager, "REPEATS", 1)
    monkeypatch.setattr(eager._harness, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["eager", "--device", "cpu", "--only", "copy,push"])
    assert eager.main() == 0
    figures = json.loads((tmp_path / "eager_cpu.json").read_text())["figures"]
    copied = {name for name in figures if name.endswith(", copy")}
    assert copied == {f"{name}, copy" for name, operator in operators().items() if "copy" in operator.forms}
    for name, found in figures.items():
        new_results = operators()[name.partition(",")[0]].also  # at other addresses each time, so nothing is replayed
        assert found["driver calls"] == 1 or new_results, name
        assert (found["driver calls, new"] > 1) == (name in copied) or new_results, name
        assert found["host"] > 0
    assert "all_gather, copy" in capsys.readouterr().out


def test_custom_ops_cost_the_host_little(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few Python functions more than the plain call, which the times say only where nothing else runs."""

    def functions(call: custom_ops.Call) -> float:
        count: list[str] = []
        gc.disable()  # what it finds may have finalizers of Python
        sys.setprofile(lambda frame, event, _: count.append(frame.f_code.co_name) if event == "call" else None)
        try:
            call()
        finally:
            sys.setprofile(None)
            gc.enable()
        return float(len(count))

    def counting(world: pkt.World, calls: tuple[custom_ops.Call, custom_ops.Call], repeats: int) -> list[float]:
        with replay.paused():  # else a call counts less where its result lies at an address of before
            return [min(functions(call) for _ in range(3)) for call in calls]

    monkeypatch.setattr(custom_ops._harness, "RESULTS", tmp_path)
    monkeypatch.setattr(custom_ops, "taken", counting)
    assert custom_ops.main(["--device", "cpu"]) == 0
    rows = json.loads((tmp_path / "custom_ops_cpu.json").read_text())["rows"]
    counts = {row["case"]: row["value"] for row in rows}
    assert {"all_gather", "all_gather_matmul", "all_reduce", "matmul_reduce_scatter"} <= counts.keys()
    assert max(counts.values()) <= 9, str(counts)


@pytest.mark.parametrize("only", ["all_to_all", "broadcast"])
def test_host_costs_are_measured_in_turn(only: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program for GPUs, on simulated ranks."""
    for name, number in (("REPEATS", 1), ("CALLS", 1), ("WARM", 1), ("prepare", lambda world: None)):
        monkeypatch.setattr(eager, name, number)
    ordered = eager.ordered

    def own(world: pkt.World, sizes: eager.Sizes, only: str, gpu: bool) -> Any:
        """Without the fused operators whose names contain this one's."""
        return (form for form in ordered(world, sizes, only, False) if form[0].startswith(f"{only}, "))

    monkeypatch.setattr(eager, "ordered", own)

    def main(world: pkt.World) -> dict:
        assert eager.measure(world, eager.Sizes(512, 16), only, end=0) == {}
        return eager.measure(world, eager.Sizes(512, 16), only, end=float("inf"))

    first, second = pkt.launch(main, 2, "cpu", sms=2, multicast=False)
    assert list(first) == list(second)
    forms = {name: form for name, form in operators()[only].forms.items() if not form.gpu}
    assert {name.split(", ")[1] for name in first} == set(forms)
    for name, found in first.items():
        assert set(found) == {"host", "loop", "host, new", "loop, new"} | ({"bare"} if "copy" not in name else set())
