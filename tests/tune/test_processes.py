"""1,000 searches on ranks in processes, with many faults at once: each has one winner, and no rank hangs."""

import os
import random
from functools import partial

import pytest

from pkt.model.config import Config
from pkt.tune import cache, choice, tune
from tests.runtime.forked import in_worlds

from .helpers import Rough, anything, candidates

WORLDS, RUNS, RANKS, CONFIGS = 4, 250, 4, 8
WITHOUT_CACHE = 2  # the rank whose folder cannot be made


def scenario(number):
    """The faults of run `number`, the same on every rank: arguments of Rough, and each n that fails on some rank."""
    dice = random.Random(number)
    times = [
        dice.choice([1e-3, 2e-3, 2e-3, 3e-3]) * (1 + dice.choice([0, 0.01]) * dice.random()) for _ in range(CONFIGS)
    ]
    failing = dice.randrange(RANKS)  # one rank
    fails = {(failing, dice.randrange(CONFIGS)): RuntimeError("bad luck") for _ in range(dice.randrange(4))}
    return {
        "seconds": times.__getitem__,
        "noise": dice.choice([0.0, 0.005, 0.2]),
        "slow": (dice.randrange(RANKS),) if dice.random() < 0.5 else (),
        "fails": fails,
        "where": dice.choice(["first", "times"]),
        "seed": number,
    }, {n for _, n in fails}


def searches(world, folder, begin):
    """This rank's results of RUNS searches. Every rank has a cache of its own, with other choices in it."""
    os.environ["PKT_TUNE_CACHE"] = str(
        folder / "file" / "x" if world.rank == WITHOUT_CACHE else folder / str(world.rank)
    )
    taken = []
    with world:
        for number in range(begin, begin + RUNS):
            rough, failing = scenario(number)
            key = {"number": number}
            if number % 5 == 0:
                cache.store(world, "op", cache.case(world, "", key), Config(n=world.rank + number), 1.0)
                taken.append(choice("op", key, world))
                assert taken[-1]["n"] == number, "rank 0's cache counts"
                continue
            found = tune(anything, configs=candidates(CONFIGS), key=key, timer=partial(Rough, **rough))
            assert found.best is not None
            assert {c.config["n"] for c in found.candidates if c.dropped} <= failing
            assert found.best["n"] not in {c.config["n"] for c in found.candidates if c.dropped}
            if rough["noise"] < 0.01:  # the best is one of the fastest that were measured
                measured = [rough["seconds"](c.config["n"]) for c in found.candidates if c.times and not c.dropped]
                assert rough["seconds"](found.best["n"]) <= min(measured) * 1.02
            taken.append(found)
    return taken


@pytest.mark.parametrize("part", range(WORLDS))
@pytest.mark.filterwarnings("ignore:pkt.tune")  # the rank without a cache
def test_a_thousand_searches_agree(part, tmp_path):
    (tmp_path / "file").touch()
    ends = in_worlds(RANKS, lambda world: searches(world, tmp_path, part * RUNS))
    assert not [end.error for end in ends if end.error]
    first, *others = [end.value for end in ends]
    assert len(first) == RUNS
    assert all(other == first for other in others)
    assert any(found.candidates[0].dropped for found in first if not isinstance(found, Config)), "nothing went wrong"
