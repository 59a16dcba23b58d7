"""pkt.explain says what the operators do, and why, with the figures of the model and of the tables."""

import re
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import pkt
from pkt.cli import app
from pkt.errors import DtypeError, ShapeError
from pkt.kernels import choosing, staging
from pkt.kernels import operator as registry
from pkt.kernels.declaration import Call
from pkt.kernels.forecast import SAFE
from pkt.kernels.operator import Operator
from pkt.kernels.shared import gluon_fits, unfused
from pkt.model.config import NCCL, UNFUSED, Config
from pkt.model.cost import library
from pkt.model.gpu import H200
from pkt.tune import RecordedTimer, cache, choice, explanation, tables, tune
from pkt.tune.candidates import estimate
from pkt.tune.explanation import explain
from pkt.wording import dtype_text
from tests.runtime.conftest import run as in_threads
from tests.tune.helpers import MODELS, OPERATORS

FAR = {"M": 64, "N": 64, "K": 64}
NEAR = {"M": 4096, "N": 4096, "K": 1024}


@pytest.fixture
def on_h200(monkeypatch):
    """Worlds of threads that say they are H200."""
    machine = cache.machine
    monkeypatch.setattr(cache, "machine", lambda world: {**machine(world), "gpu": H200.name})


def own_rule(what, key):
    """The config of an operator's own rule on H200."""
    return Config(**OPERATORS[what].choose(key, H200))


def rows_of(found):
    return {name: row for row in found.rows for name in row.names}


def tuned(what, shape, config, size=2, seconds=2e-3):
    """Tune a case so that `config` wins against NCCL + cuBLAS, or, where it is that, against another mode."""
    other = Config(mode="none") if config == NCCL else NCCL
    key, times = {**shape, "dtype": "bf16", "size": size}, {config: seconds, other: 2 * seconds}

    def main(world):
        tune(lambda **_: None, configs=[*times], key=key, name=what, timer=lambda _: RecordedTimer(times))

    in_threads(size, main)


# -------------------------------------------------------------------------------------------- what choice says, it says
@pytest.mark.parametrize("what", MODELS)
@pytest.mark.parametrize("shape", [NEAR, FAR, {"M": 4096, "N": 4095, "K": 1024}, {"M": 5000, "N": 4000, "K": 1208}])
def test_an_explanation_tells_the_rule_of_choice(what, shape, on_h200, capsys):
    def main(world):
        asked = {**shape, "dtype": "bf16", "size": world.size}
        return choice(what, asked, world), explain(what, **shape).config, own_rule(what, asked)

    for chosen, explained, own in in_threads(4, main):
        assert explained == (chosen or own)
    found = explain(what, **shape)  # without a world, of four H200
    assert found.config == explained
    assert str(found).splitlines() == capsys.readouterr().out.rstrip().splitlines()[-len(str(found).splitlines()) :]


@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize("config", [NCCL, Config(mode="lcsc", num_comm_sms=4)])
def test_a_choice_tuned_here_comes_first(config, off, on_h200, monkeypatch):
    tuned("matmul_all_reduce", FAR, config)
    monkeypatch.setenv("PKT_NCCL", "0" if off else "1")
    chosen = in_threads(2, lambda world: choice("matmul_all_reduce", {**FAR, "dtype": "bf16", "size": 2}, world))[0]
    found = explain(pkt.matmul_all_reduce, **FAR, size=2)
    passed = off and config == NCCL
    assert chosen == (None if passed else config)
    assert found.config == (own_rule("matmul_all_reduce", found.key) if passed else config)
    today = next(iter(cache._read(cache._path("matmul_all_reduce")).values()))["date"]
    assert found.why.startswith(
        "NCCL + cuBLAS was tuned here and is off; " if passed else f"tuned on this machine on {today}"
    )
    assert rows_of(found)["NCCL + cuBLAS" if config == NCCL else "taken"].measured == 2e-3
    assert ("is not taken in any case: PKT_NCCL=0" in str(found)) == off
    for other in ({"size": 4}, {"size": 2, "dtype": torch.float16}, {"size": 2, "gpu": "NVIDIA B200"}):
        assert "tuned on" not in explain("gemm_ar", **FAR, **other).why


def test_the_newest_choice_of_several_machines_with_this_gpu_counts(on_h200):
    key = {**FAR, "dtype": "bf16", "size": 2}
    in_threads(2, lambda world: world.rank or [
        cache.store(world, "op", cache.case(world, "", key).replace('"sms": ', f'"sms": {n}'), Config(n=n), 1.0)
        for n in (1, 2)
    ])  # fmt: skip
    path = cache._path("op")
    path.write_text(path.read_text().replace('"date": "2', '"date": "1', 1))
    (old, new) = cache._read(path).values()
    assert old["date"] < new["date"]
    assert cache.kept("op", key, 2, {"gpu": H200.name}) == new
    assert cache.kept("op", key, 2, {"gpu": H200.name, "sms": -1}) is None


def test_in_the_simulator_nothing_is_looked_up(monkeypatch):
    monkeypatch.setattr(explanation, "_kept", lambda *_: pytest.fail("looked up"))

    def main(world):
        return explain("gemm_rs", **NEAR)

    found = pkt.launch(main, ranks=2, device="cpu")[1]
    assert (found.key["size"], found.key["gpu"]) == (2, "simulated")
    assert found.config["mode"] == "add"
    assert "simulator" in found.why
    assert found.limit is None
    assert [row.predicted for row in found.rows] == [None, None]


# ---------------------------------------------------------------------------------------------- the operator's own rule
class Planned(Exception):
    """The form and the settings that the operator was about to launch."""


@pytest.mark.parametrize("what", MODELS)
@pytest.mark.parametrize("gluon", [True, False])
@pytest.mark.parametrize("shape", [(4096, 1024, 4096), (128, 8192, 2048), (130, 100, 64), (4096, 8192, 8192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_choose_agrees_with_a_call(what, gluon, shape, dtype, monkeypatch):
    if gluon:
        monkeypatch.setattr(gluon_fits, "missing_anywhere", lambda world: "")
        monkeypatch.setattr(Call, "on_gpu", True)
        monkeypatch.setattr(Operator, "_tuned", lambda self, call, key: {})
        monkeypatch.setattr(choosing, "gpu_of", lambda world, case: H200)
        monkeypatch.setattr(unfused, "process_group", lambda world: None)

    def planned(self, call, form):
        raise Planned({"mode": call.mode, **call.settings})

    monkeypatch.setattr(Operator, "_filled", planned)
    (M, N, K), size = shape, 2

    def main(world):
        rows = M // size if what == "all_gather_matmul" else M
        with pytest.raises(Planned) as raised:
            getattr(pkt, what)(torch.empty(rows, K, dtype=dtype), torch.empty(K, N, dtype=dtype), world=world)
        return raised.value.args[0]

    found = OPERATORS[what].choose(
        {"M": M, "N": N, "K": K, "dtype": dtype_text(dtype), "size": size}, H200 if gluon else None
    )
    assert pkt.launch(main, ranks=size, device="cpu", sms=H200.sms) == [found] * size
    assert (found["mode"] in SAFE) != ({"mode", "tiles"} <= set(found))
    assert found["mode"] not in SAFE or gluon, "in the simulator the fused form is the default"


# ------------------------------------------------------------------------------------------------------------- figures
@pytest.mark.parametrize("what", MODELS)
def test_a_measured_shape_has_its_figures(what):
    for search in tables.measured(OPERATORS[what]):
        key = search.key
        found = explain(what, M=key["M"], N=key["N"], K=key["K"], size=key["size"])
        rows, times = rows_of(found), {c.config: c.time for c in search.candidates}
        assert found.config == search.best == rows["pkt's fastest measured"].config
        assert rows["taken"].measured == min(times.values())
        assert rows["NCCL + cuBLAS"].measured == times[NCCL]
        for row in found.rows:
            assert row.predicted == estimate(OPERATORS[what], row.config, key)
        assert rows["pkt's fastest by the model"].predicted.total <= min(row.predicted.total for row in found.rows[:1])
        bytes_out = key["M"] * (key["K"] if what == "all_gather_matmul" else key["N"]) * 2 * (1 - 1 / key["size"])
        bytes_out *= 2 if what == "matmul_all_reduce" else 1
        assert found.limit == max(library(key).total, bytes_out / 390e9)
        text = " ".join(str(found).split())
        assert f"{times[NCCL] / times[found.config]:.2f} times as long, as measured" in text
        assert f"{found.limit / times[found.config]:.2f}" in text
        source = tables.source(OPERATORS[what], search.key)
        assert f"{source['file']} of commit {source['commit']}" in text
        assert "for this shape" in text


def test_the_nearest_shapes_choice_has_a_distance_and_no_time():
    found = explain("ag_gemm", M=8192, N=2048, K=4096)
    assert found.config == tables.nearest(OPERATORS["all_gather_matmul"], found.key, H200.name, 4)
    assert "M=4096, N=1024, K=4096, 1 doubling" not in found.why  # 2 away; 8192 is 1 away
    assert "the nearest shape, M=8192, N=2048, K=8192, 1 doubling away" in found.why
    assert [row.measured for row in found.rows] == [None] * len(found.rows)
    assert "times as long, as predicted" in str(found)
    odd = explain("ag_gemm", M=8192, N=2047, K=8192)
    assert odd.why.startswith("the fastest to expect from what was measured for the nearest shape")
    assert odd.config["mode"] not in ("gluon",)


def test_few_rows_are_not_fused_with_their_all_reduce():
    found = explain("gemm_ar", M=256, N=8192, K=7168)
    assert found.config == UNFUSED
    assert found.rows[0].predicted == estimate(OPERATORS["matmul_all_reduce"], UNFUSED, found.key)
    assert re.match(r"unfused: predicted \d+ us; .*nccl \d+ us", found.why)
    assert re.search(r"NCCL \+ cuBLAS takes 1\.[1-4]\d times as long, as predicted", str(found))
    many = explain("gemm_ar", M=4096, N=8192, K=7168)
    assert many.config["mode"] == "gluon"
    assert re.match(r"gluon: predicted \d+ us; .*unfused \d+ us", many.why)
    assert "doublings" not in many.why


def test_a_reason_says_what_is_not_known():
    found = explain("gemm_ar", M=1024, N=8192, K=28672)
    assert "M = 1024, N = 8192, K = 28672 on 4 ranks is 1.5 doublings from the nearest measured shape" in found.why
    far = explain("gemm_ar", **FAR)
    assert far.config == UNFUSED
    assert far.why.endswith("; M = 64, N = 64, K = 64 on 4 ranks is far from every measured shape")
    assert explain("gemm_ar", **FAR, dtype="fp32").why == "unfused, the safe form: nothing was measured in fp32"
    odd = explain("gemm_ar", M=1024, N=8191, K=7168).why
    assert "gluon" not in odd, "which cannot run there"


def test_gpus_and_dtypes_without_a_model_have_no_prediction():
    for more in ({"gpu": "NVIDIA B200"}, {"dtype": "fp32"}):
        found = explain("gemm_rs", **NEAR, **more)
        assert found.limit is None
        assert "nothing predicted" in str(found)
        assert found.why.startswith("unfused, the safe form: nothing was measured")
        assert set(rows_of(found)) == {"taken", "NCCL + cuBLAS"}


def test_an_operator_without_candidates_and_baseline(monkeypatch):
    """The explanation has only the operator's own rule."""
    operator = Operator.__new__(Operator)  # a copy
    vars(operator).update(vars(OPERATORS["matmul_all_reduce"]))
    operator.name, operator.default = "other", lambda call: "lcsc"
    operator.forms = {"lcsc": replace(operator.forms["lcsc"], space=None, seconds=None)}
    monkeypatch.setattr(explanation, "tuned_operators", lambda: {"other": operator})
    found = explain("other", **NEAR)
    assert found.config["mode"] == "lcsc"
    assert [row.names for row in found.rows] == [("taken",)]
    assert found.why == "lcsc: nothing is predicted for its forms"


# --------------------------------------------------------------------------------------------------------- collectives
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
@pytest.mark.parametrize("shape", [(64,), (2048, 2048)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_collective_is_explained_as_it_is_planned(name, shape, symmetric, monkeypatch, capsys):
    """The form of a call, which copies no tensor; 8 MiB are too much for flagged words."""
    real = staging.buffer

    def buffer(call, operand):
        copied.add(operand)
        return real(call, operand)

    def planned(self, call, form):
        raise Planned(call.mode)

    copied = set()
    monkeypatch.setattr(staging, "buffer", buffer)
    monkeypatch.setattr(Operator, "_filled", planned)
    operator, size = registry.operators()[name], 2

    def main(world):
        make = pkt.empty if symmetric else torch.empty
        x = make(shape, dtype=torch.bfloat16)
        given = [x]
        if "out" in operator.names and name != "all_reduce":
            lengths = [*shape]
            lengths[0] = lengths[0] * size if name == "all_gather" else lengths[0] // size
            lengths[0] = shape[0] if name == "all_to_all" else lengths[0]
            given.append(make(tuple(lengths), dtype=torch.bfloat16))
        with pytest.raises(Planned) as raised:
            operator.function(*given)
        return raised.value.args[0]

    (mode, _) = pkt.launch(main, ranks=size, device="cpu", heap="64MiB", multicast=False)
    found = explain(name, shape=shape, size=size)
    taken = found.symmetric if symmetric else found.plain
    assert taken.mode == mode
    assert not copied, "every collective has a form for plain tensors"
    assert (taken.nbytes > 0) == (mode == "inbox")
    assert str(found) in capsys.readouterr().out


def test_what_a_symmetric_tensor_saves():
    found = explain("broadcast", shape=(4096, 4096), size=2)
    assert found.plain.nbytes == 2 * 4096**2
    assert found.plain.seconds == 2 * found.plain.nbytes / H200.memory
    assert "save the way of 32 MiB through an inbox, about 16 us of the GPU's memory, in each call" in str(found)
    assert explain("all_gather", shape=(4096, 4096), size=4).plain.nbytes == 3 * 2 * 4096**2
    assert "save no copy" in str(explain(pkt.reduce_scatter, shape=[4096, 4096], dtype="fp32"))
    assert explain("all_gather", shape=4096 * 4096, gpu="NVIDIA B200").plain.seconds is None
    assert repr(found) == "Copies(broadcast: 33554432 bytes for plain tensors)"


def test_on_the_command_line():
    run = CliRunner().invoke
    assert (
        "the form for 2 nodes of 2" in run(app, ["explain", "all_reduce", "--shape", "64", "--node-size", "2"]).output
    )
    assert "symmetric tensors save" in run(app, ["explain", "all_reduce", "--shape", "64", "--node-size", "4"]).output
    assert "save the way of 24 MiB" in run(app, ["explain", "all_reduce", "--shape", "4096x4096"]).output
    for line in (["--shape", "4x"], ["--shape", "9" * 30], ["--m", "4", "--n", "4", "--k", "4"], []):
        assert run(app, ["explain", "all_reduce", *line]).exit_code == 2


# --------------------------------------------------------------------------------------------------------------- input
def test_an_operator_has_three_names(capsys):
    for full, operator in OPERATORS.items():
        found = [str(explain(op, **NEAR)) for op in (operator.tuning.short, full, getattr(pkt, full))]
        assert found == found[:1] * 3
        assert found[0].startswith(f"{full}: M=4096, N=4096, K=1024, dtype=bf16, size=4, gpu=NVIDIA H200")
    assert repr(explain("gemm_ar", **FAR)).startswith("Explanation(matmul_all_reduce: Config(")


@pytest.mark.parametrize(
    ("op", "more", "error", "said"),
    [
        ("ring", {}, ShapeError, r"op.*found 'ring'.*all_gather_matmul \(ag_gemm\)"),
        (pkt.all_reduce, {}, ShapeError, "M, N, K: found .*none with all_reduce, but shape="),
        ("gemm_ar", {"shape": 4}, ShapeError, "shape: found 4, wanted none with a product"),
        ("ring_attention", {"shape": 4}, ShapeError, "op: found 'ring_attention', wanted all_gather_matmul"),
        (
            "gemm_ar",
            {"N": 1 << 62},
            ShapeError,
            r"M, N, K: found a tensor \(4096, 4611686018427387904\), wanted at most",
        ),
        ("gemm_ar", {"M": 0}, ShapeError, "M.*found 0"),
        ("gemm_ar", {"M": 8.5}, ShapeError, "M: found 8.5, wanted an integer from 1"),
        ("gemm_rs", {"M": 6}, ShapeError, "M.*found 6.*rows that 4 ranks can share"),
        ("gemm_rs", {"size": 0}, ShapeError, "size.*found 0"),
        ("gemm_ar", {"dtype": torch.int8}, DtypeError, "dtype.*int8.*bf16"),
    ],
)
def test_bad_input_is_named(op, more, error, said, capsys):
    with pytest.raises(error, match=said):
        explain(op, **{**NEAR, **more})
    assert capsys.readouterr().out == ""
