"""Over several nodes: what pkt.explain says there, and the search of `pkt tune` in the simulator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import pkt
from pkt.cli import app
from pkt.errors import DtypeError, ShapeError, Unsupported
from pkt.kernels.operator import Operator, operators
from pkt.model.config import Config
from pkt.model.gpu import H200
from pkt.model.network import Network, TwoLinks
from pkt.tune import predict, space
from pkt.tune.across import Collective, search
from pkt.tune.command import Layer, search_layer
from pkt.tune.explanation import explain
from pkt.tune.prediction import asked, predictable

COLLECTIVES = [name for name, operator in operators().items() if predictable(operator) and operator.tuning is None]


def run(*arguments: Any) -> Any:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


# ------------------------------------------------------------------------------------------------------------- explain
class Planned(Exception):
    """The form that a call was about to launch."""


@pytest.mark.parametrize("name", COLLECTIVES)
def test_an_explanation_has_the_form_of_a_call_and_the_prediction(name: str, monkeypatch: Any, capsys: Any) -> None:
    def planned(self: Operator, call: Any, form: Any) -> None:
        raise Planned(call.mode, call.settings)

    def main(world: Any) -> Any:
        with pytest.raises(Planned) as raised:
            getattr(pkt, name)(torch.zeros(64))
        return raised.value.args, explain(name, shape=64, dtype="fp32")

    monkeypatch.setattr(Operator, "_filled", planned)
    (mode, settings), found = pkt.launch(main, ranks=4, node_size=2, device="cpu")[0]
    assert (found.config, settings) == (Config(mode=mode), {"block": None})
    assert found.key == {
        "x": (64,), "dtype": "fp32", "size": 4, "node_size": 2, "network": "400Gb", "gpu": "NVIDIA H200",
    }  # fmt: skip
    row = found.rows[0].predicted
    assert row == predict(name, 64, 2, 2, dtype="fp32").parts
    assert str(found) in capsys.readouterr().out
    for part in (row.total, row.network, row.node, row.waits, row.memory, row.exposed):
        assert f" {1e3 * part:.3g} " in str(found)
    assert "predicted, not measured" in str(found)


def test_the_longest_part_is_named() -> None:
    def longest(shape: int, size: int, network: str = "400Gb") -> str:
        found = explain("reduce_scatter", shape=shape, size=size, node_size=8, network=network)
        return next(line for line in str(found).splitlines() if line.startswith("in all"))

    assert "here links;" in longest(128 << 20, 512)
    assert "here network;" in longest(128 << 20, 512, "100Gb")
    assert "here waits;" in longest(1 << 19, 4096)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_fastest_of_the_candidates_is_shown(name: str) -> None:
    found = explain(name, shape=1 << 24, size=64, node_size=8)
    case = asked("test", operators()[name], 1 << 24, 8, 8, "400Gb", "bf16", H200)
    times = {config: case.predicted(config).total for config in case.space()}
    assert len(times) > 4
    best = next(row for row in found.rows if "fastest predicted" in row.names)
    assert best.predicted.total == min(times.values()) <= found.rows[0].predicted.total
    assert times[best.config] == min(times.values())


def test_puts_of_every_size_have_their_price() -> None:
    """Tiny puts are issued for longer than they travel; a put of the whole part leaves nothing to overlap."""
    case = asked("test", operators()["all_gather"], 1 << 24, 8, 8, "400Gb", "bf16", H200)

    def parts(**settings: Any) -> Any:
        return case.predicted(Config(mode="nodes", **settings))

    assert parts(block=64).network > 2 * parts(block=1 << 16).network
    assert parts(block=1 << 20).exposed > 10 * parts(block=1 << 13).exposed
    assert parts() == parts(block=1 << 15), "the form's own rule: 64 KiB"
    limits = {parts(block=1 << n).limit for n in range(6, 21)}
    assert len(limits) == 1


def test_a_product_without_a_form_over_nodes_says_so(monkeypatch: Any) -> None:
    monkeypatch.setattr(operators()["matmul_reduce_scatter"], "across", {})
    with pytest.raises(Unsupported, match="found 2 nodes, and matmul_reduce_scatter works within one: give it"):
        explain("gemm_rs", M=64, N=64, K=64, size=4, node_size=2)


def test_a_product_over_nodes_has_its_compute_beside_the_links(monkeypatch: Any, capsys: Any) -> None:
    def seconds(config: Any, key: Any, gpu: Any) -> TwoLinks:
        assert [key[name] for name in ("M", "N", "K", "dtype", "size", "nodes", "node_size")] == [
            64, 32, 16, "bf16", 4, 2, 2,
        ]  # fmt: skip
        return TwoLinks(1e-3, 5e-3, memory=2e-3, communication=4e-3, network=4e-3, node=3e-3, limit=3e-3)

    operator = operators()["matmul_reduce_scatter"]
    form = replace(operator.forms["unfused"], how="somehow", space=None, seconds=seconds)
    monkeypatch.setattr(operator, "across", {"nodes": form})
    found = explain("gemm_rs", M=64, N=32, K=16, size=4, node_size=2)
    said = capsys.readouterr().out
    assert "in all: the longest of compute, network, links, waits, memory, here compute; then" in said
    assert found.rows[0].predicted.total == pytest.approx(6e-3)
    assert explain("gemm_rs", M=64, N=32, K=16, size=4, node_size=2, dtype="fp32").rows[0].predicted is None
    same = predict("matmul_reduce_scatter", (64, 32, 16), 2, 2)
    assert same.parts == found.rows[0].predicted
    assert "max(compute 5, memory 2, network 4" in str(same)
    with pytest.raises(DtypeError, match="bf16 or fp16"):
        predict("matmul_reduce_scatter", (64, 32, 16), 2, 2, dtype="fp32")
    for wrong in ((64, 32), (63, 32, 16)):
        with pytest.raises(ShapeError, match=r"wanted \(M, N, K\) of the product"):
            predict("matmul_reduce_scatter", wrong, 2, 2)


def test_a_form_without_a_prediction_is_explained_without_one(monkeypatch: Any, capsys: Any) -> None:
    operator = operators()["matmul_all_reduce"]
    form = replace(operator.forms["unfused"], how="somehow", moves="all", space=None, seconds=None)
    monkeypatch.setattr(operator, "across", {"nodes": form, "other": form})
    found = explain("gemm_ar", M=64, N=32, K=16, size=4, node_size=2)
    assert found.why == "nodes, the form for 2 nodes of 2: somehow; on request other"
    assert [row.predicted for row in found.rows] == [None]
    assert "nothing is predicted for this form" in capsys.readouterr().out
    assert {name: found.key[name] for name in ("M", "N", "K", "size", "node_size")} == {
        "M": 64, "N": 32, "K": 16, "size": 4, "node_size": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "error", "wanted"),
    [
        (
            {"op": "broadcast"},
            Unsupported,
            "found 2 nodes, and broadcast works within one: give it world=world.on_node",
        ),
        ({"node_size": 3}, ShapeError, "node_size: found 3, wanted a divisor of 4, the number of ranks"),
        ({"node_size": 0}, ShapeError, "node_size: found 0"),
        ({"node_size": True}, ShapeError, "node_size: found True"),
        ({"shape": None}, ShapeError, "shape: found None, wanted the shape of x of all_reduce"),
        ({"shape": (0,)}, ShapeError, "shape"),
        ({"dtype": "int8"}, DtypeError, "dtype"),
        ({"network": "fast"}, ShapeError, "gigabits a second"),
        ({"M": 4}, ShapeError, "none with all_reduce"),
        ({"op": "reduce_scatter", "shape": (7,)}, ShapeError, "divisible by 4 ranks"),
    ],
)
def test_wrong_questions_are_refused(given: dict[str, Any], error: type[Exception], wanted: str, capsys: Any) -> None:
    question = {"op": "all_reduce", "shape": (64,), "size": 4, "node_size": 2} | given
    with pytest.raises(error, match=wanted):
        explain(question.pop("op"), **question)
    assert capsys.readouterr().out == ""


def test_a_network_of_the_users() -> None:
    slow = Network("across the ocean", 1e9, latency=0.03)
    found = explain("all_gather", shape=64, size=4, node_size=2, network=slow)
    assert found.key["network"] == "across the ocean"
    assert found.rows[0].predicted.total > 0.03


# ---------------------------------------------------------------------------------------------------------------- tune
def blocks(found: Any) -> Sequence[int | None]:
    return [c.config.get("block") for c in found.candidates]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_search_tries_every_candidate_and_finds_the_fastest_right_one(name: str) -> None:
    layer = Collective(name, (1024,) if name == "all_gather" else (4096,), "bf16", 2, "400Gb")
    found, gpu = pkt.launch(search, 4, "cpu", (layer,), node_size=2, sms=2)[0]
    assert gpu == "simulated"
    assert sorted(blocks(found), key=lambda block: block or 0) == [None, 128, 256, 512, 1024]
    times = {c.config: c.time for c in found.candidates}
    assert times[found.best] == min(times.values())
    assert len(set(times.values())) > 2
    assert [c.predicted for c in found.candidates] == sorted(c.predicted for c in found.candidates)
    assert not [c.dropped for c in found.candidates if c.dropped]


def test_a_product_is_searched_and_explained_over_nodes() -> None:
    layer = Layer("matmul_reduce_scatter", 32, 32, 32, node_size=2)
    found, _ = pkt.launch(search_layer, 4, "cpu", (layer,), node_size=2, sms=4)[0]
    assert found.key == layer.key(4) == {
        "M": 32, "N": 32, "K": 8, "dtype": "bf16", "size": 4, "node_size": 2, "network": "400Gb",
    }  # fmt: skip
    assert len({c.config["num_comm_sms"] for c in found.candidates}) > 1
    times = {c.config: c.time for c in found.candidates if c.time}
    assert times[found.best] == min(times.values())
    assert not [c.dropped for c in found.candidates if c.dropped]
    row = explain("gemm_rs", M=8192, N=8192, K=1024, size=16, node_size=8).rows[0]
    assert row.predicted == predict("matmul_reduce_scatter", (8192, 8192, 1024), 2, 8).parts
    assert row.predicted.compute > row.predicted.network > 0


def test_a_block_that_gives_a_wrong_result_is_dropped(monkeypatch: Any) -> None:
    operator = operators()["all_gather"]
    right = operator.function

    def sometimes_wrong(x: Any, *, mode: str, block: int | None = None, world: Any) -> Any:
        result = right(x, mode=mode, block=block, world=world)
        return result + (block == 128 and world.rank == 1)

    monkeypatch.setattr(operator, "function", sometimes_wrong)
    layer = Collective("all_gather", (256,), "fp32", 1, "400Gb")
    found = pkt.launch(search, 2, "cpu", (layer,), node_size=1, sms=2)[0][0]
    (dropped,) = [c for c in found.candidates if c.dropped]
    assert dropped.config["block"] == 128
    assert "rank 1" in dropped.dropped
    assert "wrong" in dropped.dropped


def test_the_command_searches_in_the_simulator(tmp_path: Path) -> None:
    done = run("tune", "all_gather", "--shape", "16x8", "--ranks", 2, "--node-size", 1, "--device", "cpu",
               "--out", tmp_path)  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "all_gather: x=(16, 8), dtype=bf16, size=2, node_size=1, network=400Gb" in done.output
    table = json.loads((tmp_path / "all_gather.json").read_text())
    (entry,) = table["entries"]
    assert (table["gpu"], entry["key"]["x"]) == ("simulated", [16, 8])
    assert {row["settings"]["mode"] for row in entry["measured"]} == {"nodes"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--device", "cuda"], "its search runs in the simulator only: --device cpu searches"),
        (["--shape", "4x"], "--shape: found '4x', wanted lengths"),
        (["--shape", "131072"], "wanted at most 131072 elements on all ranks together"),
        (["--ranks", "3"], "node_size: found 2, wanted a divisor of 3"),
        (["--m", "8"], "wanted with --node-size: a collective and --shape, or"),
        (["--all"], "wanted with --node-size: a collective and --shape, or"),
        (["--dtype", "int8"], "wanted with --node-size: a collective and --shape, or"),
        (["--network", "much"], "gigabits a second"),
        (["--node-size", "4"], "--shape is for a collective over several nodes"),
    ],
)
def test_wrong_command_lines_are_refused(more: list[str], said: str, tmp_path: Path) -> None:
    given = {"--shape": "64", "--ranks": "4", "--node-size": "2", "--device": "cpu", "--out": str(tmp_path / "none")}
    given |= {more[0]: more[1]} if len(more) > 1 else {}
    line = [part for pair in given.items() for part in pair] + (more if len(more) == 1 else [])
    done = run("tune", "all_reduce", *line)
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("broadcast", ["--shape", "64"], "broadcast works within one"),
        ("ring", ["--shape", "64"], "found operator 'ring', wanted one with a form over nodes: all_gather"),
        ("gemm_ar", ["--shape", "64"], "wanted with --node-size: a collective and --shape, or a product and --m"),
        ("gemm_ar", ["--m", "64"], "wanted with --node-size: a collective and --shape, or a product and --m"),
        ("gemm_ar", ["--m", "512", "--n", "512", "--k", "512"], "wanted m * n * k up to 16777216"),
        ("gemm_ar", ["--m", "64", "--n", "64", "--k", "63"], "k: found 63, wanted at least 1 and divisible by 4 ranks"),
    ],
)
def test_what_is_not_searched_over_nodes_is_refused(name: str, more: list[str], said: str) -> None:
    done = run("tune", name, *more, "--ranks", "4", "--node-size", "2", "--device", "cpu")
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())


def test_an_operator_of_another_kind_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(operators()["flash_decode"], "across", {"nodes": None})
    done = run("tune", "flash_decode", "--shape", "64", "--ranks", "4", "--node-size", "2", "--device", "cpu")
    assert done.exit_code == 2
    assert "found flash_decode, and nothing predicts it over nodes: give a collective or a product" in done.output


def test_a_form_without_settings_is_not_searched(monkeypatch: Any) -> None:
    operator = operators()["matmul_all_reduce"]
    monkeypatch.setattr(operator, "across", {"nodes": replace(operator.forms["unfused"], space=None, seconds=None)})
    sizes = ["--m", "64", "--n", "64", "--k", "64", "--ranks", "4", "--node-size", "2"]
    done = run("tune", "gemm_ar", *sizes, "--device", "cpu")
    assert done.exit_code == 2
    assert "found no settings to search in its form 'nodes': pkt explain predicts its time" in done.output
    assert "runs in the simulator only: --device cpu" in run("tune", "gemm_ar", *sizes).output


def test_a_simulated_world_of_nodes_tunes_a_function() -> None:
    def layer(x: Any, block: int) -> Any:
        return pkt.all_gather(x, block=block)

    def main(world: Any) -> Any:
        found = pkt.tune.tune(layer, torch.ones(64), configs=space(block=[16, 64]), key=["x"])
        return found.best

    best, other = pkt.launch(main, ranks=2, node_size=1, device="cpu")
    assert best == other
    assert best["block"] in (16, 64)
