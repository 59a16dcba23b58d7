"""A deadlock of a loop that compares a word with a number names the number that ends the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.simulate.findings import Deadlock
from tests.simulate.helpers import failures, outcome

pytestmark = pytest.mark.machine


@triton.jit
def meets(flag, launch, world):
    while pl.load_acquire(flag, world.rank, world) != launch:
        pass


@triton.jit
def overshot(flag, launch, start, world, HOW: tl.constexpr, FROM: tl.constexpr):
    """Both ranks set each other's flag to 2, and poll their own."""
    pl.store_release(flag, start + launch, 1 - world.rank, world)
    me = world.rank
    if HOW == "call":
        meets(flag, launch, world)
    elif HOW == "variable":
        seen = pl.load_acquire(flag, me, world)
        while not (seen == launch + FROM):
            seen = pl.load_acquire(flag, me, world)
    elif HOW == "less":
        while pl.atomic_add(flag, 0, me, world) < launch + 2:
            pass
    elif HOW == "mirrored":
        while launch + 2 > pl.load_acquire(flag, me, world):
            pass
    elif HOW == "cas":
        while pl.atomic_cas(flag, launch, 5, me, world) != 1:
            pass
    elif HOW == "volatile":
        while tl.load(flag, volatile=True) != launch:
            pass
    elif HOW == "masked":  # no comparison of the word itself
        while (pl.load_acquire(flag, me, world) & 3) != launch:
            pass
    elif HOW == "last seen":  # of two words
        while pl.load_acquire(flag, me, world) != pl.load_acquire(flag + 1, me, world) + launch:
            pass


def overshot_main(world: Any, how: str, start: int) -> None:
    overshot[(1,)](pkt.zeros(2, dtype=torch.int32, name="flag"), 1, start, world.device, how, 0)


WANTED = {
    "call": "flag[0] == 1 2", "variable": "flag[0] == 1 2", "less": "flag[0] >= 3 2", "mirrored": "flag[0] >= 3 2",
    "cas": "flag[0] == 1 2", "volatile": "flag[0] == 1 2", "masked": "flag[0] != 2 2", "last seen": "flag[1] != 0 0",
}  # fmt: skip


@pytest.mark.parametrize("how", WANTED)
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_the_number_that_ends_a_loop_is_named(how: str, seed: int) -> None:
    error = outcome(overshot_main, 2, seed, (how, 1)).failure
    assert isinstance(error, Deadlock)
    assert {f"{w.counter} {w.condition} {w.found}" for w in error.waits} == {WANTED[how]}


@pytest.mark.parametrize("how", [how for how in WANTED if how not in ("less", "mirrored")])
def test_a_loop_that_finds_the_number_ends(how: str) -> None:
    assert failures(overshot_main, 2, range(7), args=(how, 0)) == {}
