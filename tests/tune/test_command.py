"""`pkt tune`: its searches, files, messages and exit codes. Searches run in the simulator, or are made up."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import pkt
from pkt.cli import app
from pkt.errors import HeapFull
from pkt.model.config import Config
from pkt.tune import choice, command, tables
from pkt.tune.command import Layer, search_layer
from tests.tune.helpers import OPERATORS


def run(*arguments):
    done = CliRunner().invoke(app, ["tune", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


@pytest.fixture
def made_up(monkeypatch):
    """Replaces each search by one that ships, with no launch; lists the (layer, ranks, device) that were asked for."""
    asked = []

    def searched(layer, ranks, device):
        asked.append((layer, ranks, device))
        return tables.measured(OPERATORS[layer.what])[0], "NVIDIA H200"

    monkeypatch.setattr(command, "_searched", searched)
    return asked


# ---------------------------------------------------------------------------------------------------- in the simulator
def test_a_search_in_the_simulator(tmp_path):
    arguments = ("gemm_ar", "--device", "cpu", "--ranks", 2, "--m", 64, "--n", 48, "--k", 64, "--out", tmp_path)
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    assert "matmul_all_reduce: M=64, N=48, K=32, dtype=bf16, size=2" in done.output
    table = json.loads((tmp_path / "matmul_all_reduce.json").read_text())
    assert (table["operator"], table["gpu"]) == ("matmul_all_reduce", "simulated")
    (entry,) = table["entries"]
    assert entry["key"] == Layer("matmul_all_reduce", 64, 48, 64).key(2)
    times = [row["seconds"] for row in entry["measured"]]
    assert len(times) >= 8
    assert times == sorted(times)
    # and it is remembered: a world of the same kind finds it by name
    best = Config(**entry["measured"][0]["settings"])
    assert pkt.launch(lambda world: choice("matmul_all_reduce", entry["key"], world), 2, "cpu", sms=8) == [best] * 2


@pytest.mark.parametrize("what", OPERATORS)
def test_every_operator_is_searched_and_right(what):
    layer = Layer(what, 48, 32, 32, "fp16")
    search, gpu = pkt.launch(search_layer, 2, "cpu", (layer,), sms=8)[0]
    assert gpu == "simulated"
    assert search.what == what
    assert search.best is not None
    assert not [c.dropped for c in search.candidates if c.dropped]


def test_a_candidate_that_gives_a_wrong_result_is_dropped(monkeypatch):
    operator = OPERATORS["matmul_all_reduce"]
    right = operator.function

    def sometimes_wrong(a, b, out=None, *, mode, num_comm_sms, tiles, world):
        result = right(a, b, out, mode=mode, num_comm_sms=num_comm_sms, tiles=tiles, world=world)
        if num_comm_sms == 2 and world.rank == 1:
            result[0, 0] += 100
        return result

    monkeypatch.setattr(operator, "function", sometimes_wrong)
    search, _ = pkt.launch(search_layer, 2, "cpu", (Layer("matmul_all_reduce", 32, 32, 32),), sms=8)[0]
    dropped = {c.config["num_comm_sms"] for c in search.candidates if c.dropped}
    assert dropped == {2}
    assert all("rank 1" in c.dropped and "wrong" in c.dropped for c in search.candidates if c.dropped)
    assert search.best["num_comm_sms"] != 2


# ------------------------------------------------------------------------------------------------- what is searched for
def test_sizes_on_the_command_line_are_those_of_the_whole_product():
    assert Layer("all_gather_matmul", 8192, 8192, 8192).key(4) == {
        "M": 8192, "N": 2048, "K": 8192, "dtype": "bf16", "size": 4,
    }  # fmt: skip
    for what in ("matmul_reduce_scatter", "matmul_all_reduce"):
        found = Layer(what, 8192, 4096, 1024, "fp16").key(2)
        assert found == {"M": 8192, "N": 4096, "K": 512, "dtype": "fp16", "size": 2}
    for what in OPERATORS:  # the tables' cases are those of the benchmarks
        for search in tables.measured(OPERATORS[what]):
            N = search.key["M"]
            assert {**Layer(what, N, N, N).key(search.key["size"]), "gpu": "NVIDIA H200"} == search.key


def test_all_is_every_operator_at_its_benchmark_s_sizes(made_up, tmp_path):
    done = run("--all", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    sizes = {what: [layer.m for layer, _, _ in made_up if layer.what == what] for what in OPERATORS}
    large = [4096, 6144, 8192, 12288, 16384, 32768]
    assert sizes == {what: large[:5] if what == "matmul_all_reduce" else large for what in OPERATORS}
    assert {path.name for path in tmp_path.iterdir()} == {f"{what}.json" for what in OPERATORS}


def test_short_and_full_names_are_taken(made_up, tmp_path):
    for name in ("ag_gemm", "all_gather_matmul"):
        run(name, "--m", 8, "--n", 16, "--k", 4, "--ranks", 2, "--dtype", "fp16", "--out", tmp_path)
    assert made_up == [(Layer("all_gather_matmul", 8, 16, 4, "fp16"), 2, "cuda")] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "wanted an operator"),
        (("ag_gemm", "--all"), "wanted an operator"),
        (("ring",), "found operator 'ring'"),
        (("ag_gemm", "--m", 8), "go together"),
        (("--all", "--m", 8, "--n", 8, "--k", 8), "go together"),
        (("ag_gemm", "--dtype", "fp8"), "found --dtype 'fp8'"),
        (("ag_gemm", "--device", "tpu"), "found --device 'tpu'"),
        (("ag_gemm", "--device", "cpu", "--m", 8192, "--n", 8192, "--k", 8192), "up to 16777216 with --device cpu"),
    ],
)
def test_wrong_command_lines_are_refused(made_up, arguments, said):
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())
    assert made_up == []


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("ag_gemm", (9, 8, 8), "m: found 9, wanted at least 1 and divisible by 4 ranks"),
        ("ag_gemm", (8, 9, 8), "n: found 9, wanted at least 1 and divisible by 4 ranks"),
        ("gemm_rs", (8, 8, 9), "k: found 9, wanted at least 1 and divisible by 4 ranks"),
        ("gemm_ar", (9, 9, 9), "k: found 9, wanted at least 1 and divisible by 4 ranks"),
        ("gemm_ar", (-1, 8, 8), "m: found -1, wanted at least 1"),
    ],
)
def test_indivisible_sizes_are_refused_before_any_launch(made_up, tmp_path, name, sizes, said):
    m, n, k = sizes
    done = run(name, "--m", m, "--n", n, "--k", k, "--out", tmp_path / "none")
    assert done.exit_code == 2
    assert said in done.output
    assert made_up == []
    assert not (tmp_path / "none").exists()


def test_an_operator_without_a_table_needs_sizes(made_up, monkeypatch):
    monkeypatch.setattr(tables, "measured", lambda _: ())
    done = run("ag_gemm")
    assert done.exit_code == 2
    assert "wanted --m, --n and --k" in " ".join(done.output.replace("│", " ").split())


# ------------------------------------------------------------------------------------------------------------ the end
def test_the_command_says_that_there_are_no_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    done = run("ag_gemm", "--ranks", 4, "--out", tmp_path / "none")
    assert done.exit_code == 1
    assert "all_gather_matmul on 4 ranks: found 1 GPU: --device cpu searches on the simulator's clock" in done.output
    assert not (tmp_path / "none").exists()


def test_ctrl_c_keeps_the_best_so_far(monkeypatch, tmp_path):
    search = replace(tables.measured(OPERATORS["matmul_all_reduce"])[1], interrupted=True)
    monkeypatch.setattr(command, "_searched", lambda *_: (search, "NVIDIA H200"))
    done = run("gemm_ar", "--out", tmp_path)
    assert done.exit_code == 130
    assert "then interrupted: the best so far" in done.output
    assert len(json.loads((tmp_path / "matmul_all_reduce.json").read_text())["entries"]) == 1


def test_a_failure_keeps_the_best_so_far(made_up, monkeypatch, tmp_path):
    searched = command._searched

    def fail_second(layer, ranks, device):
        if layer.m == 6144:
            raise HeapFull.wanted(10, 5, 5)
        return searched(layer, ranks, device)

    monkeypatch.setattr(command, "_searched", fail_second)
    done = run("gemm_rs", "--out", tmp_path)
    assert done.exit_code == 1
    assert str(HeapFull.wanted(10, 5, 5)) in done.output
    assert len(json.loads((tmp_path / "matmul_reduce_scatter.json").read_text())["entries"]) == 1


def test_a_table_that_cannot_be_written_is_said_and_the_next_is_written(made_up, monkeypatch, tmp_path):
    (tmp_path / "all_gather_matmul.json").mkdir()
    done = run("--all", "--out", tmp_path)
    assert done.exit_code == 1
    assert "the table of all_gather_matmul cannot be written: [Errno 21] Is a directory" in done.output
    assert (tmp_path / "matmul_all_reduce.json").is_file()


def test_written_tables_have_the_form_of_shipped_ones(made_up, tmp_path):
    run("ag_gemm", "--m", 4096, "--n", 4096, "--k", 4096, "--out", tmp_path)
    ours = json.loads((tmp_path / "all_gather_matmul.json").read_text())
    shipped = json.loads(tables.path(OPERATORS["all_gather_matmul"]).read_text())
    assert set(ours) == set(shipped)
    for row, there in zip(ours["entries"][0]["measured"], shipped["entries"][0]["measured"], strict=True):
        assert row == {name: there[name] for name in row}
