"""Which form an operator takes on GPUs: the one asked for, the one that was tuned, or that of its own rule."""

import importlib
from typing import NamedTuple

import pytest
import torch
import triton

from pkt.errors import Unsupported
from pkt.kernels.shared import unfused

from .gluon_compiling import chosen, gather_call, scatter_call


@pytest.mark.parametrize("call", [gather_call, scatter_call])
def test_gluon_is_refused_where_it_cannot_run(h200s, call, monkeypatch):
    world = h200s()
    with pytest.raises(Unsupported, match="float32, not bfloat16 or float16"):
        call(world, 512, 512, 512, torch.float32, mode="gluon")
    with pytest.raises(Unsupported, match="not multiples of 16 bytes"):
        call(world, 512, 509, 512, mode="gluon")
    with pytest.raises(Unsupported, match="1 ranks, not 2 to 8"):
        call(h200s(0, 1), 512, 512, 512, mode="gluon")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    with pytest.raises(Unsupported, match="rank 0 has sm_100, not sm_90"):
        call(h200s(), 512, 512, 512, mode="gluon")
    assert not world.kernels


@pytest.mark.parametrize(("name", "plain"), [("all_gather_matmul", "push"), ("matmul_reduce_scatter", "add")])
def test_elsewhere_the_plain_form_is_the_default(h200s, name, plain, monkeypatch):
    def mode(world, *shape, **options):
        return chosen(name, world, *shape, **options)["mode"]

    special = "gluon"
    assert mode(h200s(), 512, 512, 512) == special
    assert mode(h200s(), 512, 512, 512, dtype=torch.float16) == special
    assert mode(h200s(), 512, 512, 512, mode=plain) == plain
    assert mode(h200s(), 512, 512, 512, dtype=torch.float32) == plain
    assert mode(h200s(), 65, 512, 512) == special
    assert mode(h200s(), 64, 512, 512) == plain  # half of its tiles' rows would be empty
    assert mode(h200s(), 64, 512, 512, mode=special) == special
    assert mode(h200s(), 512, 509, 512) == plain
    assert mode(h200s(), 512, 512, 512, tiles=(128, 128, 64)) == plain
    assert mode(h200s(0, 1), 512, 512, 512) == plain
    assert mode(h200s(0, 9), 512, 512, 512) == plain
    if plain == "push":
        assert mode(h200s(), 512, 512, 509) == plain
        assert mode(h200s(), 512, 512, 512, num_comm_sms=16) == plain
        assert mode(h200s(), 512, 512, 512, chunk=1024) == plain
        assert mode(h200s(), 1025, 512, 512, shard="columns") == plain
        assert mode(h200s(), 1024, 512, 512, shard="columns") == "unfused"
    for version in ("3.5.1", "3.9.0"):
        with monkeypatch.context() as patch:
            patch.setattr(triton, "__version__", version)
            assert mode(h200s(), 512, 512, 512) == plain
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert mode(h200s(), 512, 512, 512) == plain


# ------------------------------------------------------------------------------------------------- what was tuned
class Operator(NamedTuple):
    name: str
    rule: str  # the mode that it takes where the Gluon form cannot run
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
    gluon, rule = OPERATORS[name].gluon, OPERATORS[name].rule
    assert settled_by(h200s, name, gluon, 512, 512, 512, dtype=torch.float32)["mode"] == rule
    assert settled_by(h200s, name, gluon, 512, 509, 512)["mode"] == rule
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    assert settled_by(h200s, name, gluon, 512, 512, 512)["mode"] == rule


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_few_rows_are_multiplied_apart_from_their_all_reduce(h200s, dtype):
    """On GPUs, where nothing is given or tuned."""
    tuned = OPERATORS["reduce"].other

    def mode(rows, settings=None, **given):
        said = settled_by(h200s, "reduce", settings or {}, rows, 512, 512, dtype=dtype, **given)
        assert ("tiles" in said) == (said["mode"] != "unfused")
        return said["mode"]

    fused = "lcsc" if dtype == torch.float32 else "gluon"
    assert [mode(rows) for rows in (1, 16, 128, 129, 512)] == 3 * ["unfused"] + 2 * [fused]
    assert mode(16, tuned) == "lcsc"
    for given in ({"tiles": (32, 32, 32)}, {"num_comm_sms": 8}, {"mode": "lcsc"}):
        assert mode(16, **given) == "lcsc"
    assert mode(512, {"mode": "unfused"}) == "unfused"
    for name in ("gather", "scatter"):
        assert settled_by(h200s, name, {}, 16, 512, 512)["mode"] == OPERATORS[name].rule


@pytest.mark.parametrize("name", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_the_longest_product_of_any_rank_counts(h200s, monkeypatch, name):
    """Ranks may differ in K, but not in the order of tiles, so the longest K of the first call decides. A later call
    with another K asks nobody, because the other ranks may not ask."""
    world, asked, longest = h200s(), [], []
    plain = importlib.import_module(f"pkt.kernels.{name}.plain")
    settings = plain.settings
    monkeypatch.setattr(plain, "settings", lambda m, N, K, *rest: longest.append(K) or settings(m, N, K, *rest))

    def all_gather_object(found):
        if found not in (512, 8192):
            return [found]
        asked.append(found)
        return [found, 4096]

    world.all_gather_object = all_gather_object
    for K in (512, 8192):
        chosen(name, world, 512, 512, K, mode="gluon")
    assert longest == [4096, 4096]
    assert asked == [512]


@pytest.mark.parametrize("name", OPERATORS)
def test_nccl_is_taken_if_it_was_faster_and_can_run(h200s, monkeypatch, name):
    asked = []
    monkeypatch.setattr(unfused, "process_group", asked.append)
    assert settled_by(h200s, name, {"mode": "nccl"}, 512, 512, 512)["mode"] == "nccl"
    assert asked

    def refuses(world):
        raise Unsupported.here("a group", "found others", "make one")

    monkeypatch.setattr(unfused, "process_group", refuses)
    assert settled_by(h200s, name, {"mode": "nccl"}, 512, 512, 512)["mode"] == "gluon"
