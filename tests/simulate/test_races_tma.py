"""The race detector on TMA: its accesses have a proxy of their own, and its stores land late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from tests.simulate.helpers import SEEDS, assert_right, failures, find_race, line_of

pytestmark = pytest.mark.machine

# -- TMA -------------------------------------------------------------------------------------------------------------


@triton.jit
def tile_out(x, out, flags, world, HOW: tl.constexpr):
    """Store a tile to the neighbour by TMA, then signal."""
    o = tl.arange(0, 256)
    other = (world.rank + 1) % world.size
    desc = tl.make_tensor_descriptor(pl.peer(x, other, world), [16, 16], [16, 1], [16, 16])
    if HOW == "reduce":
        desc.atomic_add([0, 0], tl.full((16, 16), 5, tl.int32))
    else:
        desc.store([0, 0], tl.full((16, 16), 5, tl.int32))
    if HOW == "no drain":
        tl.debug_barrier()
        tl.atomic_add(pl.peer(flags, other, world), 1, sem="release", scope="sys")
    else:
        pl.signal(flags, other, world)
    pl.wait(flags, 1, world)
    tl.store(out + o, tl.load(x + o))


def tile_out_main(world: Any, how: str) -> None:
    x, flags, out = pkt.zeros((16, 16), dtype=torch.int32), pkt.signals(1), torch.zeros(256, dtype=torch.int32)
    tile_out[(1,)](x, out, flags, world.device, how)
    assert (out == 5).all(), "wrong values"
    world.barrier()


@pytest.mark.parametrize("how", ["store", "reduce"])
def test_a_signal_waits_for_tma_stores(how: str) -> None:
    assert_right(tile_out_main, args=(how,))


def test_the_end_of_a_launch_waits_for_tma_stores() -> None:
    @triton.jit
    def fill(x, world):
        desc = tl.make_tensor_descriptor(pl.peer(x, 0, world), [16, 16], [16, 1], [16, 16])
        if world.rank == 0:
            desc.store([0, 0], tl.full((16, 16), 7, tl.int32))

    @triton.jit
    def read(x, out, world):
        o = tl.arange(0, 256)
        tl.store(out + o, pl.load(x + o, 0, world))

    def main(world: Any) -> None:
        x, out = pkt.zeros((16, 16), dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
        fill[(1,)](x, world.device)
        if world.rank == 0:
            read[(1,)](x, out, world.device)
            assert (out == 7).all()
        world.barrier()
        read[(1,)](x, out, world.device)
        assert (out == 7).all()

    assert_right(main)


def test_a_raw_release_does_not_wait_for_tma_stores() -> None:
    race = find_race(tile_out_main, args=("no drain",))
    assert "put pl.signal after the first and pl.wait before the second" in str(race)
    assert {race.first.kind, race.second.kind} == {"TMA store", "load"}
    wrong = failures(tile_out_main, 2, SEEDS, args=("no drain",), races=False)
    assert any("wrong values" in str(e) for e in wrong.values())


@triton.jit
def tile_in(x, out, flags, world, HOW: tl.constexpr):
    """Store plainly to the neighbour, which loads by TMA."""
    o = tl.arange(0, 256)
    other = (world.rank + 1) % world.size
    pl.store(x + o, 6, other, world)
    pl.signal(flags, other, world)
    if HOW == "wait":
        pl.wait(flags, 1, world)
    elif HOW == "test":
        while not pl.test(flags, 1, world):
            pass
    else:
        while tl.atomic_add(flags, 0, sem="acquire", scope="sys") < 1:
            pass
    desc = tl.make_tensor_descriptor(x, [16, 16], [16, 1], [16, 16])
    tl.store(out + o, desc.load([0, 0]).reshape((256,)))


def tile_in_main(world: Any, how: str) -> None:
    x, flags, out = pkt.zeros((16, 16), dtype=torch.int32), pkt.signals(1), torch.zeros(256, dtype=torch.int32)
    tile_in[(1,)](x, out, flags, world.device, how)
    assert (out == 6).all()
    world.barrier()


@pytest.mark.parametrize("how", ["wait", "test"])
def test_a_wait_orders_tma_loads_too(how: str) -> None:
    assert_right(tile_in_main, args=(how,))


def test_a_raw_acquire_does_not_order_tma_loads() -> None:
    race = find_race(tile_in_main, args=("raw",))
    assert "put pl.signal after the first and pl.wait before the second" in str(race)
    assert {race.first.kind, race.second.kind} == {"TMA load", "store"}
    assert line_of(tile_in, "desc.load") in (race.first.site, race.second.site)


def test_a_programs_own_tma_load_after_its_store_needs_a_fence() -> None:
    """Even one program needs a fence between the generic and the async proxy (pl.quiet has one)."""

    @triton.jit
    def own(x, out, world, FENCE: tl.constexpr):
        o = tl.arange(0, 256)
        tl.store(x + o, 4)
        if FENCE:
            pl.quiet()
        desc = tl.make_tensor_descriptor(x, [16, 16], [16, 1], [16, 16])
        tl.store(out + o, desc.load([0, 0]).reshape((256,)))

    def main(world: Any, fence: bool) -> None:
        x, out = pkt.zeros((16, 16), dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
        own[(1,)](x, out, world.device, fence)
        assert (out == 4).all()

    assert_right(main, 1, args=(True,))
    race = find_race(main, 1, args=(False,))
    assert {race.first.kind, race.second.kind} == {"TMA load", "store"}
    assert "call pl.quiet() between the two" in str(race)


@triton.jit
def own_store(x, out, world, AGAIN: tl.constexpr, QUIET: tl.constexpr):
    o = tl.arange(0, 256)
    desc = tl.make_tensor_descriptor(x, [16, 16], [16, 1], [16, 16])
    desc.store([0, 0], tl.full((16, 16), 4, tl.int32))
    if QUIET:
        pl.quiet()
    if AGAIN == "load":
        tl.store(out + o, tl.load(x + o))
    elif AGAIN == "TMA load":
        tl.store(out + o, desc.load([0, 0]).reshape((256,)))
    else:
        desc.store([0, 0], tl.full((16, 16), 5, tl.int32))


@pytest.mark.parametrize("again", ["load", "TMA load", "TMA store"])
def test_a_program_that_races_with_its_own_tma_store_is_told_to_call_quiet(again: str) -> None:
    def main(world: Any, quiet: bool) -> None:
        x, out = pkt.zeros((16, 16), dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
        own_store[(1,)](x, out, world.device, again, quiet)

    assert "call pl.quiet() between the two" in str(find_race(main, 1, args=(False,)))
    assert_right(main, 1, args=(True,))


@triton.jit
def doubled(x, world, HOW: tl.constexpr):
    desc = tl.make_tensor_descriptor(x, [16, 16], [16, 1], [16, 16])
    if HOW == "TMA":
        v = desc.load([0, 0])
    else:
        v = tl.load(x + 16 * tl.arange(0, 16)[:, None] + tl.arange(0, 16)[None, :])
    desc.store([0, 0], v * 2)
    if HOW == "again":
        tl.load(x)


@pytest.mark.parametrize("how", ["TMA", "load", "again"])
def test_a_tile_may_be_stored_where_it_was_loaded(how: str) -> None:
    """The stored tile depends on the loaded one; a later load may see old or new values."""

    def main(world: Any) -> None:
        x = pkt.ones(16, 16)
        doubled[(1,)](x, world.device, how)
        assert x.eq(2).all()

    assert bool(failures(main, 1, range(10))) == (how == "again")
