"""Against every candidate that benchmarks/exhaustive.py measured: what the tuner finds having seen a few, and what is
taken for a shape that was not measured. Replayed, with no GPU."""

import math
import statistics
from functools import partial
from types import SimpleNamespace

import pytest

import pkt
from benchmarks import tuned
from pkt.kernels.all_gather_matmul import gluon as push
from pkt.kernels.matmul_all_reduce import gluon as two_shot
from pkt.kernels.matmul_reduce_scatter import gluon as scatter
from pkt.kernels.shared.tile_product import Tiles
from pkt.tune import RecordedTimer, tables, tune
from pkt.tune.command import shortlist
from pkt.tune.config import Config
from pkt.tune.gpu import H200
from pkt.tune.model import MODELS
from pkt.tune.search import LEAST, MOST
from pkt.tune.spaces import operator_space

CLOSE = 0.03
IN_TURNS = ("matmul_reduce_scatter", "matmul_all_reduce")
"""Operators whose Gluon form has a lag."""


def cases(what):
    """Of every case the key, and the seconds of each candidate that is still in the operator's space."""
    found = []
    for case in tuned.cases(what):
        space = set(operator_space(what, case.key))
        times = {Config(**row["settings"]): row["seconds"] for row in case.measured}
        found.append((case.key, {config: seconds for config, seconds in times.items() if config in space}))
    return found


def recorded(times, world):
    return RecordedTimer(times)


def replayed(world, what, sign):
    """The search of `pkt tune` in each case: how far what it chose is from the best, and the share it measured."""
    found = {}
    for key, times in cases(what):

        def model(config, key):
            return sign * MODELS[what](config, key)

        # In the space's order: that of the results would let the fastest win every tie.
        space = [config for config in operator_space(what, key) if config in times]
        configs, most = shortlist(space, model, key)
        timer = partial(recorded, times)
        search = tune(lambda **_: None, configs=configs, key=key, model=model, timer=timer, most=most)
        measured = sum(bool(c.times) for c in search.candidates)
        assert measured <= max(LEAST, MOST * len(times))
        found[what, key["size"], key["M"]] = times[search.best] / min(times.values()) - 1
    return found


@pytest.mark.parametrize("what", MODELS)
def test_the_tuner_s_choice_is_close_to_the_best_having_measured_an_eighth(what):
    losses = pkt.launch(replayed, ranks=1, device="cpu", args=(what, 1))[0]
    assert {size for _, size, _ in losses} == {2, 4}
    assert {case: loss for case, loss in losses.items() if loss > CLOSE} == {}


@pytest.mark.parametrize("what", MODELS)
def test_a_model_that_says_the_opposite_would_be_noticed(what):
    losses = pkt.launch(replayed, ranks=1, device="cpu", args=(what, -1))[0]
    assert statistics.median(losses.values()) > 3 * CLOSE


# ------------------------------------------------------------------------------------------------ the nearest shape
class World(SimpleNamespace):
    """As much of one as an operator's settings need."""

    rank, num_sms = 0, H200.sms

    @property
    def lasting(self):
        return {"pkt.kernels.sms": self.num_sms}


def test_the_model_takes_the_lag_that_the_operator_does():
    """Where none is given."""
    for what in IN_TURNS:
        module = scatter if what == "matmul_reduce_scatter" else two_shot
        for key, _ in cases(what):
            rows = key["M"] // (key["size"] if module is scatter else 1)
            bare = Config(mode="gluon", tiles=(128, 256, 64, 8, 8, 4))
            world = World(size=key["size"])
            _, lag, *copies = module.settings(rows, key["N"], key["K"], world, Tiles(*bare["tiles"]), None)
            taken = {"copies": copies[0]} if any(copies) else {"lag": lag}
            assert MODELS[what](bare, key) == MODELS[what](Config(**bare, **taken), key), (what, key)


def test_the_model_takes_the_copies_that_the_operator_does():
    for key, _ in cases("all_gather_matmul"):
        bare = Config(mode="gluon", num_comm_sms=0, tiles=(128, 256, 64, 8, 8, 4))
        rows, world = key["M"] // key["size"], World(size=key["size"])
        plan, _ = push.settings(rows, key["N"], key["K"], world, None, num_comm_sms=0)
        model, push_rows = MODELS["all_gather_matmul"], math.ceil(rows / 128)
        assert model(bare, key) == model(Config(**bare, push_rows=push_rows, chunk=plan.chunk), key), key


def settled(what, config, key):
    """`config` with what the operator says that it takes for a case where its Gluon form is given nothing else."""
    if config != Config(mode="gluon"):
        return config
    world, size = World(size=key["size"]), key["size"]
    if what == "all_gather_matmul":
        plan, tiles = push.settings(key["M"] // size, key["N"], key["K"], world, None)
        return Config(mode="gluon", **plan._asdict(), tiles=tuple(tiles)[:6])
    module, rows = (scatter, key["M"] // size) if what == "matmul_reduce_scatter" else (two_shot, key["M"])
    tiles, lag, *copies = module.settings(rows, key["N"], key["K"], world, None, None)
    taken = {"copies": copies[0]} if any(copies) else {"lag": lag}
    return Config(mode="gluon", **taken, tiles=tuple(tiles)[:6])


def taken(what, key, monkeypatch):
    """The config for a case if it were not in the table, from the nearest that is, however far."""
    others = tuple(s for s in tables.measured(what) if s.key != {**key, "gpu": H200.name})
    with monkeypatch.context() as patch:
        patch.setattr(tables, "measured", lambda _: others)
        patch.setattr(tables, "FARTHEST", math.inf)
        return tables.nearest(what, key, H200.name, key["size"])


@pytest.mark.parametrize("what", MODELS)
def test_an_untuned_shape_is_within_a_tenth_of_the_best(what, monkeypatch):
    """The Gluon form by its own rule; and what is taken from the nearest shape, whichever form."""
    losses = {}
    for key, times in cases(what):
        near = taken(what, key, monkeypatch)
        for how, config in (("rule", Config(mode="gluon")), ("nearest", near)):
            seconds = times.get(settled(what, config, key)) or statistics.median(
                seconds for c, seconds in times.items() if tables.carried(c) == config
            )
            losses[how, key["size"], key["M"]] = seconds / min(times.values()) - 1
    assert {case: loss for case, loss in losses.items() if loss > 0.1} == {}
