"""Which accesses the race detector holds for ordered, by scope, launch and bytes; and what a report says of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.errors import UseAfterFree
from pkt.simulate.explore import simulate
from pkt.simulate.findings import DataRace, OutOfBounds
from pkt.simulate.memory import Pending, Place, Region, Scattered, Strided, overlapping
from pkt.simulate.schedule import Schedule
from tests.simulate.helpers import assert_right, line_of, outcome
from tests.simulate.test_races import send_main

pytestmark = pytest.mark.machine


@triton.jit
def hand_over(x, out, flags, HOW: tl.constexpr):
    """Program 0 releases for the whole system, program 1 of the same rank acquires at the scope of the GPU."""
    if tl.program_id(0) == 0:
        tl.store(x, 7)
        tl.atomic_add(flags, 1, sem="release", scope="sys")
    else:
        if HOW == "acquire":
            while tl.atomic_add(flags, 0, sem="acquire", scope="gpu") < 1:
                pass
        else:
            while tl.atomic_add(flags, 0, sem="relaxed", scope="gpu") < 1:
                pass
            pl.fence()
        tl.store(out, tl.load(x))


@pytest.mark.parametrize("how", ["acquire", "relaxed reads and a fence"])
def test_programs_of_one_gpu_need_no_wider_scope(how: str) -> None:
    def main(world: Any) -> None:
        x, flags, out = pkt.zeros(1, dtype=torch.int32), pkt.signals(1), torch.zeros(1, dtype=torch.int32)
        hand_over[(2,)](x, out, flags, how)
        assert out.item() == 7

    assert_right(main, ranks=1, seeds=range(12))


@triton.jit
def hand_over_at_both_scopes(x, out, flags):
    """Programs 0 and 1 release at the scopes of the GPU and of the system, program 2 acquires at that of the system."""
    if tl.program_id(0) == 0:
        tl.store(x, 3)
        tl.atomic_add(flags, 1, sem="release", scope="gpu")
    elif tl.program_id(0) == 1:
        tl.store(x + 1, 4)
        tl.atomic_add(flags, 1, sem="release", scope="sys")
    else:
        while tl.atomic_add(flags, 0, sem="acquire", scope="sys") < 2:
            pass
        tl.store(out, tl.load(x) + tl.load(x + 1))


def test_a_wide_acquire_takes_over_narrow_releases_of_its_gpu() -> None:
    def main(world: Any) -> None:
        x, flags, out = pkt.zeros(2, dtype=torch.int32), pkt.signals(1), torch.zeros(1, dtype=torch.int32)
        hand_over_at_both_scopes[(3,)](x, out, flags)
        assert out.item() == 7

    assert_right(main, ranks=1, seeds=range(12))


@triton.jit
def two_halves(x, out, world):
    if world.rank == 0:
        pl.store(x, 1, 1, world)
        pl.store(x + 1, 2, 1, world)
    else:
        tl.store(out, tl.load(x))


def halves_main(world: Any) -> None:
    x, out = pkt.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    two_halves[(1,)](x, out, world.device)
    world.barrier()


def test_the_second_store_of_a_program_does_not_hide_its_first() -> None:
    """Both lie in one granule of the shadow. In seed 0 rank 0 stores before rank 1 loads."""
    (race,) = outcome(halves_main, 2, 0).findings
    assert isinstance(race, DataRace)
    assert (race.first.rank, race.first.kind) == (0, "store")
    assert race.first.site in {line_of(two_halves, text) for text in ("pl.store(x, 1", "pl.store(x + 1")}
    assert (race.second.rank, race.second.kind, race.second.site) == (1, "load", line_of(two_halves, "tl.load(x)"))
    assert str(race).startswith("data race: load of rank 1's x[0] by rank 1")
    assert "is not ordered after: store of rank 1's x[0] by rank 0" in str(race)


@triton.jit
def touch(x, out, world, FIRST: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    if world.rank == 1:
        pl.store(x + o, o, 0, world)
    elif FIRST == "load":
        tl.store(out + o, tl.load(x + o))
    else:
        tl.atomic_add(x + o, 1, sem="relaxed", scope="sys")


@pytest.mark.parametrize(("first", "kind"), [("load", "load"), ("add", "atomic")])
def test_a_store_is_held_against_earlier_loads_and_atomics(first: str, kind: str) -> None:
    """In seed 0 rank 0 comes first, so the store is the second access."""

    def main(world: Any) -> None:
        x, out = pkt.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
        touch[(1,)](x, out, world.device, first, 8)
        world.barrier()

    (race,) = outcome(main, 2, 0).findings
    assert (race.first.rank, race.first.kind, race.second.rank, race.second.kind) == (0, kind, 1, "store")


@triton.jit
def by_two_programs(x, out, world):
    o = tl.arange(0, 8)
    if world.rank == 0:
        pl.store(x + 4 * tl.program_id(0) + tl.arange(0, 4), 1, 1, world)
    elif tl.program_id(0) == 0:
        tl.store(out + o, tl.load(x + o))


def test_a_tile_with_two_authors_is_held_against_both() -> None:
    def main(world: Any) -> None:
        x, out = pkt.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
        by_two_programs[(2,)](x, out, world.device)
        world.barrier()

    (race,) = outcome(main, 2, 0).findings
    assert (race.first.rank, race.second.rank, race.second.kind) == (0, 1, "load")


@triton.jit
def half_after_the_signal(x, out, flags, world):
    o = tl.arange(0, 8)
    if world.rank == 0:
        pl.store(x + tl.arange(0, 4), 1, 1, world)
        pl.signal(flags, 1, world)
        pl.store(x + 4 + tl.arange(0, 4), 2, 1, world)
    else:
        pl.wait(flags, 1, world)
        tl.store(out + o, tl.load(x + o))


def test_only_the_part_before_the_signal_is_ordered() -> None:
    """The load's clock of rank 0 is one below that of the store behind the signal."""

    def main(world: Any) -> None:
        x, out, flags = pkt.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), pkt.signals(1)
        half_after_the_signal[(1,)](x, out, flags, world.device)
        world.barrier()

    (race,) = outcome(main, 2, 0).findings
    assert race.first.site == line_of(half_after_the_signal, "pl.store(x + 4")
    assert "x[4]" in str(race)


@pytest.mark.parametrize(("low", "overlaps"), [(0, False), (4, False), (5, True), (8, True), (15, True), (16, False)])
def test_a_pending_store_overlaps_what_it_touches(low: int, overlaps: bool) -> None:
    region = Region(0, 64, np.zeros(64, np.uint8), 0, "x", "data", 1, (64,))
    pending = Pending(Strided(region, Place(8, (2,), (4,), 4)), np.zeros(2, np.int32), False)
    assert overlapping([pending], Strided(region, Place(low, (1,), (4,), 4))) == [pending] * overlaps
    assert overlapping([pending], Scattered(region, np.array([low]), 4)) == [pending] * overlaps
    other = Region(64, 64, np.zeros(64, np.uint8), 0, "y", "data", 1, (64,))
    assert not overlapping([pending], Strided(other, Place(low, (1,), (4,), 4)))


@triton.jit
def load_wide(x, out):
    tl.store(out, tl.load((x + 3).to(tl.pointer_type(tl.int64))))


def test_half_of_an_element_outside_is_outside() -> None:
    def main(world: Any) -> None:
        load_wide[(1,)](pkt.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))

    assert isinstance(outcome(main, 1, 0).failure, OutOfBounds)


def test_a_signal_of_the_same_launch_is_not_called_stale() -> None:
    found = [race for seed in range(12) for race in outcome(send_main, 2, seed, ("signal first",)).findings]
    assert found
    assert not [note for race in found for note in getattr(race, "__notes__", ()) if "stale" in note]


@triton.jit
def send_wrongly(x, flags, world, launch, HOW: tl.constexpr):
    """The signal overtakes the data. With credits, the sender first waits until the peer has taken the last message."""
    peer = 1 - world.rank
    if HOW == "credits":
        pl.wait(flags + 1, launch - 1, world)
    pl.signal(flags, peer, world)
    pl.store(x, launch, peer, world)


@triton.jit
def take(x, out, flags, world, launch):
    pl.wait(flags, launch, world)
    tl.store(out, tl.load(x))
    pl.signal(flags + 1, 1 - world.rank, world)


@pytest.mark.parametrize("how", ["credits", "no credits"])
def test_a_wait_for_an_earlier_launch_is_not_called_stale(how: str) -> None:
    def main(world: Any) -> None:
        x, out = pkt.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        flags = pkt.signals(2, unwaited=True)
        for launch in range(1, 4):
            send_wrongly[(1,)](x, flags, world.device, launch, how)
            take[(1,)](x, out, flags, world.device, launch)

    found = [race for seed in range(12) for race in outcome(main, 2, seed).findings]
    assert found
    assert not [note for race in found for note in getattr(race, "__notes__", ()) if "stale" in note]


@triton.jit
def load_address(address, out):
    tl.store(out, tl.load(address.to(tl.int64).to(tl.pointer_type(tl.int32))))


def test_the_last_region_that_was_used_is_not_used_after_it_is_freed() -> None:
    def main(world: Any) -> None:
        x, out = pkt.zeros(4, dtype=torch.int32), pkt.zeros(4, dtype=torch.int32)
        address = x.data_ptr()
        load_address[(1,)](address, out)
        x.free()
        load_address[(1,)](address, out)

    failure = outcome(main, 1, 0).failure
    assert isinstance(failure, UseAfterFree), failure


@pytest.mark.parametrize(("nbytes", "offsets"), [(24, [4, 12]), (24, [1, 13]), (22, [0, 8])])
def test_elements_that_are_not_aligned_are_read_and_written(nbytes: int, offsets: list[int]) -> None:
    memory = np.arange(nbytes, dtype=np.uint8)
    region = Region(0, nbytes, memory, 0, "x", "data", 1, (nbytes,))
    access = Scattered(region, np.array(offsets), 8)
    before = [bytes(memory[at : at + 8]) for at in offsets]
    assert access.read(np.dtype(np.int64)).tobytes() == b"".join(before)
    wanted = bytearray(memory)
    values = np.array([-2, 1 << 40], np.int64)
    for at, value in zip(offsets, values):
        wanted[at : at + 8] = value.tobytes()
    access.write(values)
    assert memory.tobytes() == bytes(wanted)


def test_stores_are_late_in_every_seed_but_the_first() -> None:
    assert [Schedule(seed, 2).late_stores for seed in range(8)] == [False] + 7 * [True]
    assert not any(Schedule(3, 2).commits() for _ in range(100)), "an adversarial schedule lets no store become visible"
    assert {Schedule(seed, 2).victim for seed in (3, 6, 9, 12)} == {0, 1}
    assert Schedule(1, 2).victim is None


@triton.jit
def quiet_then_flag(x, flags, world):
    other = (world.rank + 1) % world.size
    pl.store(x, 3, other, world)
    pl.quiet()
    pl.atomic_add(flags, 1, other, world, sem="relaxed")
    pl.wait(flags, 1, world)
    tl.store(x + 8, tl.load(x))


def test_every_call_that_orders_is_broken_in_turn() -> None:
    def main(world: Any) -> None:
        x, flags = pkt.zeros(16, dtype=torch.int32), pkt.signals(1)
        quiet_then_flag[(1,)](x, flags, world.device)
        assert x[8].item() == 3

    report = simulate(main, 2, seeds=6, heap="1MiB", mutants=True)
    caught = {mutant.site.call for mutant, found in report.mutants.items() if found is not None}
    assert caught == {"quiet", "wait"}
