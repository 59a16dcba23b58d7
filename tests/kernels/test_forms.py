"""Which form an operator takes on GPUs: the one asked for, the one that was tuned, or that of its own rule."""

import importlib
from typing import NamedTuple

import pytest
import torch
import triton

from pkt.errors import Unsupported
from pkt.kernels.operator import named
from pkt.kernels.shared import unfused
from pkt.kernels.shared.gluon_fits import TILES
from pkt.model.gpu import H200

from .gluon_compiling import chosen, gather_call, scatter_call, with_another_rank


@pytest.mark.parametrize("call", [gather_call, scatter_call])
def test_gluon_is_refused_where_it_cannot_run(h200s, call, monkeypatch):
    world = h200s()
    with pytest.raises(Unsupported, match="float32, not bfloat16 or float16"):
        call(world, 512, 512, 512, torch.float32, mode="gluon")
    with pytest.raises(Unsupported, match="not multiples of 16 bytes"):
        call(world, 512, 509, 512, mode="gluon")
    with pytest.raises(Unsupported, match="1 rank, not 2 to 8"):
        call(h200s(0, 1), 512, 512, 512, mode="gluon")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    with pytest.raises(Unsupported, match="rank 0 has sm_100, not sm_90"):
        call(h200s(), 512, 512, 512, mode="gluon")
    assert not world.kernels


# Shapes of a rank's part of what was measured on four ranks, where the Gluon form is the fastest.
MEASURED = {
    "all_gather_matmul": (1024, 1024, 4096), "matmul_reduce_scatter": (1024, 4096, 1024),
    "matmul_all_reduce": (4096, 4096, 1024),
}  # fmt: skip
PLAIN = {"all_gather_matmul": "push", "matmul_reduce_scatter": "add", "matmul_all_reduce": "lcsc"}


@pytest.mark.parametrize("name", MEASURED)
def test_the_form_that_is_expected_to_be_the_fastest(h200s, name, monkeypatch):
    """Of those that can run a call."""
    m, N, K = shape = MEASURED[name]
    plain, special = PLAIN[name], "gluon"

    def mode(world, *shape, **options):
        return chosen(name, world, *shape, **options)["mode"]

    def without_gluon(size=4, K=K, N=N):
        key = {"M": m * (size if m == 1024 else 1), "N": N, "K": K, "dtype": "bf16", "size": size}
        order = named(name).forecast(key, H200).order
        return next(form for form in order if form != special)

    assert mode(h200s(), *shape) == mode(h200s(), *shape, dtype=torch.float16) == special
    assert mode(h200s(), *shape, mode=plain) == plain
    assert mode(h200s(), *shape, tiles=(128, 128, 64)) == plain, "which has a mode where a setting is given"
    assert mode(h200s(), 64, 512, 512, mode=special) == special
    assert mode(h200s(), m, N - 3, K) == without_gluon(N=N - 3)
    if plain == "push":
        assert mode(h200s(), m, N, K - 3) == without_gluon(K=K - 3)
        assert mode(h200s(), *shape, num_comm_sms=16) == mode(h200s(), *shape, chunk=1024) == plain
    for version in ("3.5.1", "3.10.0"):
        with monkeypatch.context() as patch:
            patch.setattr(triton, "__version__", version)
            assert mode(h200s(), *shape) == without_gluon()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert mode(h200s(), *shape) == without_gluon()


@pytest.mark.parametrize("name", MEASURED)
def test_far_from_everything_that_was_measured_nothing_is_fused(h200s, name):
    """Other products, other dtypes and other GPUs."""
    m, N, K = shape = MEASURED[name]

    def mode(world, *shape, **options):
        return chosen(name, world, *shape, **options)["mode"]

    other = h200s()
    other.backend.gpu = "NVIDIA H800"
    assert mode(other, *shape) == "unfused"
    assert mode(h200s(), *shape, dtype=torch.float32) == "unfused"
    assert mode(h200s(), 512, 64, 64) == mode(h200s(), m, 64 * N, K) == "unfused"


def test_the_choice_is_made_once_for_a_case(h200s, monkeypatch):
    """So that a rank that plans once more, alone, takes the form of the others."""
    world, asked = h200s(), []
    everything = named("all_gather_matmul").forecast
    monkeypatch.setattr(
        type(named("all_gather_matmul")), "forecast", lambda self, key, gpu: asked.append(key) or everything(key, gpu)
    )
    for bias in (False, True, False):
        chosen("all_gather_matmul", world, 512, 512, 512, bias=bias)
    assert len(asked) == 1
    chosen("all_gather_matmul", world, 512, 512, 512, shard="columns")
    assert [key.get("shard") for key in asked] == [None, "columns"]
    assert [key["K"] for key in asked] == [512, 2048], "of the product that each rank computes"
    assert [key["M"] for key in asked] == [2048, 512]


@pytest.mark.parametrize("name", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_ranks_with_parts_of_other_lengths_choose_by_the_longest(h200s, monkeypatch, name):
    world = h200s()
    told = with_another_rank(monkeypatch, world, 1024)
    shape = MEASURED[name][:2]
    for k in (8, 16, 8):
        assert chosen(name, world, *shape, k)["mode"] == "gluon"
    assert told == [8, 16], "once for each k"
    fresh = h200s()
    fresh.capturing = True
    with pytest.raises(Unsupported, match="captur"):
        chosen(name, fresh, *shape, 1024)


# ------------------------------------------------------------------------------------------------- what was tuned
class Operator(NamedTuple):
    name: str
    rule: str  # the mode that it takes where some settings are given, and no mode
    gluon: dict  # settings of that form
    other: dict  # settings of another form


OPERATORS = {
    "gather": Operator(
        "all_gather_matmul",
        rule="push",
        gluon={"mode": "gluon", "num_comm_sms": 12, "chunk": 256, "rounds_alone": 3, "cut_last": 2, "push_rows": 1},
        other={"mode": "push", "num_comm_sms": 5, "chunk": 512, "tiles": (64, 64, 64)},
    ),
    "scatter": Operator(
        "matmul_reduce_scatter",
        rule="add",
        gluon={"mode": "gluon", "tiles": (128, 128, 64, 16, 8, 5)},
        other={"mode": "inbox", "tiles": (64, 64, 64)},
    ),
    "reduce": Operator(
        "matmul_all_reduce",
        rule="lcsc",
        gluon={"mode": "gluon", "tiles": (128, 128, 64), "lag": 3},
        other={"num_comm_sms": 9, "tiles": (64, 64, 64)},
    ),
}
TUNED = [(name, settings) for name, found in OPERATORS.items() for settings in (found.gluon, found.other)]


def settled_by(h200s, name, settings, *shape, **given):
    """The form and the settings of a call for which `settings` were tuned."""
    operator = OPERATORS[name].name
    return chosen(operator, h200s(**{operator: settings}), *shape, **given)


@pytest.mark.parametrize(("name", "settings"), TUNED)
def test_tuned_settings_are_taken(h200s, name, settings):
    said = settled_by(h200s, name, settings, 512, 512, 512)
    for setting, value in settings.items():
        found = said.get(setting)
        if setting == "tiles":
            found = tuple(found)[: len(value)]
        assert found == value, (setting, said)


@pytest.mark.parametrize(("name", "settings"), TUNED)
def test_given_settings_come_before_tuned_ones(h200s, name, settings):
    said = settled_by(h200s, name, settings, 512, 512, 512, tiles=(32, 32, 32))
    assert tuple(said["tiles"])[:3] == (32, 32, 32)
    assert said["mode"] == OPERATORS[name].rule


@pytest.mark.parametrize("name", OPERATORS)
def test_a_tuned_form_that_cannot_run_leaves_the_operators_own_rule(h200s, monkeypatch, name):
    gluon, rule = OPERATORS[name].gluon, "unfused"  # far from all that was measured
    assert settled_by(h200s, name, gluon, 512, 512, 512, dtype=torch.float32)["mode"] == rule
    assert settled_by(h200s, name, gluon, 512, 509, 512)["mode"] == rule
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    assert settled_by(h200s, name, gluon, 512, 512, 512)["mode"] == rule


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_few_rows_are_multiplied_apart_from_their_all_reduce(h200s, dtype):
    """On GPUs, where nothing is given or tuned."""
    tuned = OPERATORS["reduce"].other

    def mode(rows, settings=None, **given):
        said = settled_by(h200s, "reduce", settings or {}, rows, 8192, 7168, dtype=dtype, **given)
        assert ("tiles" in said) == (said["mode"] != "unfused")
        return said["mode"]

    many = "unfused" if dtype == torch.float32 else "gluon"
    few = {"unfused"} if dtype == torch.float32 else {"unfused", "low_latency"}
    assert {mode(rows) for rows in (1, 16, 64)} <= few
    assert mode(1024) == many
    assert mode(16, tuned) == "lcsc"
    for given in ({"tiles": (32, 32, 32)}, {"num_comm_sms": 8}, {"mode": "lcsc"}):
        assert mode(16, **given) == "lcsc"
    assert mode(1024, {"mode": "unfused"}) == "unfused"
    for name in ("gather", "scatter"):
        assert settled_by(h200s, name, {}, 16, 512, 512, dtype=dtype)["mode"] == "unfused"


@pytest.mark.parametrize("name", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_the_longest_product_of_any_rank_counts(h200s, monkeypatch, name):
    """Ranks may differ in K, but not in the order of tiles."""
    world, longest = h200s(), []
    plain = importlib.import_module(f"pkt.kernels.{name}.plain")
    settings = plain.settings
    monkeypatch.setattr(plain, "settings", lambda m, N, K, *rest: longest.append(K) or settings(m, N, K, *rest))
    with_another_rank(monkeypatch, world, 4096)
    for K in (512, 8192):
        chosen(name, world, 512, 512, K, mode="gluon")
    assert longest == [4096, 8192]


@pytest.mark.parametrize("name", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_nobody_asks_for_the_longest_k_where_settings_are_given(h200s, monkeypatch, name):
    """So a rank's k may change alone from call to call."""
    world = h200s()
    told = with_another_rank(monkeypatch, world, 4096)
    tiles = TILES._replace(group=8)
    for k in (512, 1024):
        found = chosen(name, world, 512, 512, k, mode="gluon", tiles=tuple(tiles), lag=2)
        assert (found["tiles"], found["lag"]) == (tiles, 2)
    assert told == []


@pytest.mark.parametrize("name", OPERATORS)
def test_nccl_is_taken_if_it_was_faster_and_can_run(h200s, monkeypatch, name):
    asked = []
    monkeypatch.setattr(unfused, "process_group", asked.append)
    assert settled_by(h200s, name, {"mode": "nccl"}, 512, 512, 512)["mode"] == "nccl"
    assert asked

    def refuses(world):
        raise Unsupported.here("a group", "found others", "make one")

    monkeypatch.setattr(unfused, "process_group", refuses)
    assert settled_by(h200s, name, {"mode": "nccl"}, 512, 512, 512)["mode"] == "unfused"
