"""The operators' spaces: neither too small nor too large, and every candidate can run."""

import inspect
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

import pkt
from pkt.errors import Unsupported
from pkt.model.config import NCCL, UNFUSED
from pkt.model.gpu import H200
from pkt.tune import RecordedTimer, candidates, tables, tune
from pkt.tune.candidates import thinned
from tests.kernels.test_compile import compile_checked, launched
from tests.tune.helpers import MODELS, OPERATORS

SHAPES = [(512, 512, 512), (4096, 1024, 4096), (32768, 8192, 32768), (1000, 1000, 1000), (3000, 520, 7000)]


def operator_space(what, key, gpu=H200, gluon=True):
    return candidates.operator_space(OPERATORS[what], key, replace(gpu, gluon=gluon))


def own(what, case, *more, **named):
    """The space without the modes that fuse nothing."""
    return [config for config in operator_space(what, case, *more, **named) if config not in (NCCL, UNFUSED)]


def key(M, N, K, dtype="bfloat16", size=4):
    return {"M": M, "N": N, "K": K, "dtype": dtype, "size": size}


@pytest.mark.parametrize("what", MODELS)
def test_100_to_2000_candidates(what):
    names = set(inspect.signature(getattr(pkt, what)).parameters)
    for shape in SHAPES:
        for size in (1, 2, 4, 8):
            found = operator_space(what, key(*shape, size=size))
            assert 100 <= len(found) <= 2000, (shape, size, len(found))
            assert len(set(found)) == len(found)
            assert all(set(config) <= names for config in found)


@pytest.mark.parametrize("what", MODELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_tile_fits(what, dtype):
    itemsize = {"bfloat16": 2, "float32": 4}[dtype]
    for config in own(what, key(8192, 8192, 2048, dtype)):
        block_m, block_n, block_k, group, warps, stages = config["tiles"]
        assert min(block_m, block_n, block_k) >= 16
        assert block_m * block_n / (32 * warps) <= 128
        assert stages * block_k * (block_m + block_n) * itemsize <= H200.shared
        if config["mode"] == "gluon" and what != "all_gather_matmul":
            assert config.keys() & {"lag", "copies"}
            last = 8192 * 8192 // (block_m * block_n) // 4 if what == "matmul_all_reduce" else 1  # all own tiles
            assert 1 <= config.get("lag", 1) <= 132 or config["lag"] == last
        elif config["mode"] == "gluon":
            assert config["chunk"] % block_k == 0
            assert config["num_comm_sms"] < H200.sms
            assert config["rounds_alone"] >= 0


def test_own_tiles_of_the_all_reduce_may_come_last():
    found = [c for c in own("matmul_all_reduce", key(8192, 8192, 7168)) if c["mode"] == "gluon"]
    assert {c["lag"] for c in found if c["tiles"][1] == 256} == {9, 17, 33, 66, 132, 512}
    assert {c["lag"] for c in found if c["tiles"][1] == 128} == {9, 17, 33, 66, 132, 1024}
    few = [c for c in own("matmul_all_reduce", key(1024, 1024, 7168)) if c["mode"] == "gluon"]
    assert max(c["lag"] for c in few) == 132, "a rank owns fewer, so they come last already"


def test_choices_of_skipped_rounds_and_of_cutting_the_last_whole_one():
    for N, rounds in ((4096, {1}), (8192, {4}), (16384, {16})):
        found = [c for c in own("all_gather_matmul", key(N, N // 4, N)) if c["mode"] == "gluon"]
        assert len(found) <= 160
        mine = [c for c in found if c["num_comm_sms"] == 8 and c["tiles"][1] == 256]
        assert {c["whole_rounds"] for c in mine if c["cut_last"] == 1} == rounds
        assert {c["whole_rounds"] for c in mine} == rounds | {n - 1 for n in rounds}
        assert {len({c["rounds_alone"] for c in mine if (c["cut_last"], c["whole_rounds"]) == how}) for how in
                {(c["cut_last"], c["whole_rounds"]) for c in mine}} == {3}  # fmt: skip
        assert {c["cut_last"] for c in found} == {1, 2, 4}
        assert {c["tiles"][1]: c["tiles"][5] for c in found} == {256: 4}
        copied = [c for c in found if c["num_comm_sms"] == 0]
        rows = N // 4 // 128
        assert {c["push_rows"] for c in copied} == {0, *(math.ceil(rows / n) for n in (2, 3, 4))}
        assert all(c["rounds_alone"] == 0 for c in copied)
        assert {(c["chunk"], c["push_rows"]) for c in copied if c["chunk"]} == {(N // 2, 0)}


def test_the_shared_memory_of_the_gpu_counts():
    small = replace(H200, shared=200_000, sms=8)
    for what in MODELS:
        some, all_ = own(what, key(8192, 8192, 2048), small), own(what, key(8192, 8192, 2048))
        assert 0 < len(some) < len(all_)
        assert max(c.get("num_comm_sms", 0) for c in some) <= 8
        assert all(c["tiles"][5] * c["tiles"][2] * sum(c["tiles"][:2]) * 2 <= small.shared for c in some)


def modes(what, **changed):
    found = operator_space(what, {**key(4096, 1024, 4096), **{k: v for k, v in changed.items() if k != "gluon"}},
                           gluon=changed.get("gluon", True))  # fmt: skip
    return {config["mode"] for config in found}


def test_gluon_where_it_can_run():
    for what, row in (("all_gather_matmul", "N"), ("matmul_reduce_scatter", "N"), ("all_gather_matmul", "K"),
                      ("matmul_all_reduce", "N")):  # fmt: skip
        assert "gluon" in modes(what)
        for changed in ({"gluon": False}, {"dtype": "float32"}, {"size": 1}, {"size": 9}, {row: 1001}):
            assert "gluon" not in modes(what, **changed), changed


@pytest.mark.parametrize("what", MODELS)
def test_the_best_measured_are_in_the_space_or_next_to_it(what):
    """For the measured best of each size, the space has a config with the same mode, blocks, num_comm_sms and chunk."""
    for search in tables.measured(OPERATORS[what]):
        found = own(what, search.key)
        same = [
            config
            for config in found
            if config["tiles"][:3] == search.best["tiles"][:3]
            and all(config.get(name) == search.best.get(name) for name in ("mode", "num_comm_sms", "chunk"))
        ]
        assert same, (search.key, search.best)


@pytest.mark.parametrize("what", MODELS)
def test_the_model_predicts_every_candidate(what):
    case = key(8192, 8192, 2048)
    times = [MODELS[what](config, case) for config in operator_space(what, case)]
    assert all(0 < seconds < 1 for seconds in times)
    assert max(times) > 1.4 * min(times)


# -------------------------------------------------------------------------------------------------------- the baseline
@pytest.mark.parametrize("what", MODELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_baseline_comes_first_and_can_be_turned_off(what, dtype, monkeypatch):
    case = key(8192, 8192, 2048, dtype)
    assert operator_space(what, case)[:2] == [NCCL, UNFUSED]
    for gluon in (True, False):
        found = operator_space(what, case, gluon=gluon)
        assert found.count(NCCL) == found.count(UNFUSED) == 1
    monkeypatch.setenv("PKT_NCCL", "0")
    found = operator_space(what, case)
    assert found[0] == UNFUSED
    assert NCCL not in found


def seldom(world, model):
    """A search in which the model, or the even spread where None, would leave out the modes that fuse nothing."""
    case = key(8192, 8192, 2048)
    found = thinned(operator_space("matmul_all_reduce", case), MODELS["matmul_all_reduce"], case, 1)
    search = tune(
        lambda **_: None,
        configs=[*found[2:], *found[:2]],
        key=case,
        model=model,
        timer=lambda _: RecordedTimer(lambda config: 1e-3),
    )
    measured = [c.config for c in search.candidates if c.times]
    return {NCCL, UNFUSED} <= set(measured), len(measured)


@pytest.mark.parametrize("model", [lambda config, _: 1.0 if config in (NCCL, UNFUSED) else 0.5, None])
def test_unfused_modes_are_always_measured(model):
    for both, count in pkt.launch(seldom, 2, "cpu", (model,)):
        assert both
        assert 8 <= count < 40


def test_dtypes_without_a_space():
    with pytest.raises(Unsupported, match=r"found dtype 'fp64'.*'bf16'"):
        operator_space("matmul_all_reduce", key(1, 1, 1, "float64"))


def multiply(world, what, picked):
    """Assert that every config of `picked` gives the product on this rank."""
    torch.manual_seed(world.rank)
    a, b = torch.randn(64, 32, dtype=torch.float16), torch.randn(32, 48, dtype=torch.float16)
    everybody = [(x.double(), y.double()) for x, y in world.all_gather_object((a, b))]
    if what == "all_gather_matmul":
        exact = torch.cat([x for x, _ in everybody]) @ b.double()
    else:
        exact = sum(x @ y for x, y in everybody)
        if what == "matmul_reduce_scatter":
            exact = exact.chunk(world.size)[world.rank]
    for config in picked:
        got = getattr(pkt, what)(a, b, **config).double()
        assert (got - exact).abs().max() < 0.1, config
    return len(picked)


@pytest.mark.parametrize("what", MODELS)
def test_candidates_run(what):
    """Some candidates, spread over the whole space, in a simulator of 8 SMs."""
    rows = 128 if what == "all_gather_matmul" else 64
    found = own(what, key(rows, 48, 32, "float16", size=2), replace(H200, sms=8), gluon=False)
    picked = found[:: max(1, len(found) // 6)]
    assert pkt.launch(multiply, ranks=2, device="cpu", args=(what, picked), sms=8) == [len(picked)] * 2


def test_thinned_keeps_some_candidates_of_equal_prediction():
    case, model = key(8192, 2048, 8192), MODELS["all_gather_matmul"]
    found = [config for config in operator_space("all_gather_matmul", case) if config["mode"] == "gluon"]
    kept = thinned(found, model, case, 3)
    everything, some = (Counter(model(config, case) for config in configs) for configs in (found, kept))
    assert set(everything) == set(some)
    assert all(some[seconds] == min(3, everything[seconds]) for seconds in everything)
    assert max(everything.values()) > 6
    # the three are no neighbours: they differ in a setting that the model ignores
    first = min(everything, key=lambda seconds: (-everything[seconds], seconds))
    alike = [config for config in kept if model(config, case) == first]
    assert {config["push_rows"] for config in alike} == {0, 1}


@pytest.mark.parametrize(
    ("what", "mode", "of"),
    [
        ("all_gather_matmul", "push", "shared"),
        ("matmul_reduce_scatter", "add", "shared"),
        ("matmul_reduce_scatter", "inbox", "shared"),
        ("matmul_all_reduce", "lcsc", "registers"),
    ],
)
def test_the_largest_tiles_compile_without_spills(what, mode, of, monkeypatch, tmp_path):
    """For sm_90, the tiles with the most operands in shared memory, or with the most accumulators a thread."""
    found = [config for config in operator_space(what, key(8192, 8192, 8192)) if config["mode"] == mode]

    def most(config):
        block_m, block_n, block_k, _, warps, stages = config["tiles"]
        ring, result = stages * block_k * (block_m + block_n), block_m * block_n
        staged = result if what == "matmul_reduce_scatter" else 0
        return (ring + staged, 0) if of == "shared" else (result / warps, stages)

    config = max(found, key=most)

    def launch(world):
        rows = 2048 if what == "all_gather_matmul" else 8192
        a, b = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((rows, 8192), (8192, 8192)))
        getattr(pkt, what)(a, b, **config)

    compile_checked(launched(launch, 4, False, monkeypatch), 90, tmp_path)
