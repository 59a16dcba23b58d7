"""The tuner against every candidate that benchmarks/exhaustive.py measured, replayed without a GPU: its choice after a
few measurements, and its choice for a shape that was not measured."""

import math
import statistics
from functools import partial

import pytest

import pkt
from benchmarks import tuned
from pkt.model.config import Config
from pkt.model.gpu import H200
from pkt.tune import RecordedTimer, tables, tune
from pkt.tune.candidates import operator_space
from pkt.tune.command import shortlist
from pkt.tune.search import LEAST, MOST
from tests.tune.helpers import MODELS, OPERATORS

CLOSE = 0.03


def cases(what):
    """(key, seconds by config) of every case, for the candidates that are still in the operator's space."""
    found = []
    for case in tuned.cases(what):
        space = set(operator_space(OPERATORS[what], case.key))
        times = {Config(**row["settings"]): row["seconds"] for row in case.measured}
        found.append((case.key, {config: seconds for config, seconds in times.items() if config in space}))
    return found


def recorded(times, world):
    return RecordedTimer(times)


def replayed(world, what, sign):
    """By case, how much slower the choice of `pkt tune` is than the best, as a share. The search kept to its budget."""
    found = {}
    for key, times in cases(what):

        def model(config, key):
            return sign * MODELS[what](config, key)

        # In the space's order: in the order of the results the fastest would win every tie.
        space = [config for config in operator_space(OPERATORS[what], key) if config in times]
        configs, most = shortlist(space, model, key)
        timer = partial(recorded, times)
        search = tune(lambda **_: None, configs=configs, key=key, model=model, timer=timer, most=most)
        measured = sum(bool(c.times) for c in search.candidates)
        assert measured <= max(LEAST, MOST * len(times))
        found[what, key["size"], key["M"]] = times[search.best] / min(times.values()) - 1
    return found


@pytest.mark.parametrize("what", MODELS)
def test_the_tuner_measures_an_eighth_and_chooses_close_to_the_best(what):
    losses = pkt.launch(replayed, ranks=1, device="cpu", args=(what, 1))[0]
    assert {size for _, size, _ in losses} == {2, 4}
    assert {case: loss for case, loss in losses.items() if loss > CLOSE} == {}


@pytest.mark.parametrize("what", MODELS)
def test_a_model_that_says_the_opposite_would_be_noticed(what):
    losses = pkt.launch(replayed, ranks=1, device="cpu", args=(what, -1))[0]
    assert statistics.median(losses.values()) > 3 * CLOSE


# ------------------------------------------------------------------------------------------------ the nearest shape
def settled(what, key):
    """The config that the operator takes by its own rule, with the settings that its space has."""
    found = Config(**OPERATORS[what].choose(key, H200))
    left = ["lag"] if found.get("copies") else [name for name in ("copies",) if not found.get("copies")]
    settings = {name: value for name, value in found.items() if name not in left}
    return Config(**settings | {"tiles": found["tiles"][:6]})


def test_a_gluon_form_without_settings_is_predicted_with_those_of_its_rule():
    for what, model in MODELS.items():
        for key, _ in cases(what):
            found = settled(what, key)
            assert found["mode"] == "gluon"
            assert model(Config(mode="gluon"), key) == model(found, key), (what, key)


def taken(what, key, monkeypatch):
    """The config for a case that is taken out of the table: that of the nearest other case, however far."""
    others = tuple(s for s in tables.measured(OPERATORS[what]) if s.key != {**key, "gpu": H200.name})
    with monkeypatch.context() as patch:
        patch.setattr(tables, "measured", lambda _: others)
        patch.setattr(tables, "FARTHEST", math.inf)
        return tables.nearest(OPERATORS[what], key, H200.name, key["size"])


@pytest.mark.parametrize("what", MODELS)
def test_an_untuned_shape_is_within_a_tenth_of_the_best(what, monkeypatch):
    """For the Gluon form with its own rule, and for the config of the nearest shape, of any form."""
    losses = {}
    for key, times in cases(what):
        near = taken(what, key, monkeypatch)
        for how, config in (("rule", Config(mode="gluon")), ("nearest", near)):
            seconds = times.get(settled(what, key) if config == Config(mode="gluon") else config) or statistics.median(
                seconds for c, seconds in times.items() if tables.carried(OPERATORS[what], c) == config
            )
            losses[how, key["size"], key["M"]] = seconds / min(times.values()) - 1
    assert {case: loss for case, loss in losses.items() if loss > 0.1} == {}
