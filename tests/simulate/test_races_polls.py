"""Waits, tests, volatile loads and CAS as accesses: what they race with, and what they publish."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from tests.simulate.helpers import assert_right, failures, find_race, line_of

pytestmark = pytest.mark.machine


@triton.jit
def look_at(x, flags, out, world, HOW: tl.constexpr):
    """Every rank reads rank 0's word, some by a volatile load."""
    if HOW == "a writer":
        if world.rank == 0:
            tl.store(x, 1)
    elif HOW == "an ordered writer":
        if world.rank == 0:
            tl.store(x, 1)
        pl.barrier(flags, world)
    elif HOW == "an updater":
        tl.atomic_add(pl.peer(x, 0, world), 1, sem="relaxed", scope="sys")
    if world.rank == 1:
        tl.store(out, tl.load(pl.peer(x, 0, world), volatile=True))
    elif HOW != "an updater":
        tl.store(out, pl.load(x, 0, world))


def look_main(world: Any, how: str) -> None:
    x, flags = pkt.zeros(4, dtype=torch.int32), pkt.signals(1)
    look_at[(1,)](x, flags, torch.zeros(1, dtype=torch.int32), world.device, how)


@pytest.mark.parametrize("how", ["no writer", "an ordered writer", "an updater"])
def test_a_volatile_load_is_a_read(how: str) -> None:
    assert_right(look_main, 3, (how,), range(7))


def test_a_volatile_load_races_with_a_store() -> None:
    message = str(find_race(lambda world: look_main(world, "a writer"), 2))
    assert "volatile load of rank 0's x[0] by rank 1" in message
    assert "store of rank 0's x[0] by rank 0" in message


@triton.jit
def ring_by_hand(flags, world, HOW: tl.constexpr, POLL: tl.constexpr):
    peer = 1 - world.rank
    if world.rank == 0:
        if HOW == "store":
            tl.store(pl.peer(flags, peer, world), 1)
        elif HOW == "exchange":
            tl.atomic_xchg(pl.peer(flags, peer, world), 1, sem="release", scope="sys")
        elif HOW == "reset":  # what the peer has waited for is over
            pl.signal(flags, peer, world)
            pl.wait(flags, 1, world)
            tl.store(pl.peer(flags, peer, world), 0)
    else:
        if POLL == "wait":
            pl.wait(flags, 1, world)
        else:
            while not pl.test(flags, 1, world):
                pass
        if HOW == "reset":
            pl.signal(flags, peer, world)


def ring_main(world: Any, how: str, poll: str) -> None:
    flags = pkt.signals(1)
    ring_by_hand[(1,)](flags, world.device, how, poll)


@pytest.mark.parametrize("poll", ["wait", "test"])
def test_a_plain_store_to_a_counter_that_a_peer_looks_at_is_a_race(poll: str) -> None:
    found = failures(lambda world: ring_main(world, "store", poll), 2, range(7))
    assert len(found) == 7
    for error in found.values():
        assert isinstance(error, pkt.DataRace)
        assert "of rank 1's flags[0]" in str(error)
        assert line_of(ring_by_hand, "tl.store(pl.peer(flags, peer, world), 1)") in str(error)


@pytest.mark.parametrize("poll", ["wait", "test"])
@pytest.mark.parametrize("how", ["exchange", "reset"])
def test_atomics_and_ordered_stores_to_a_counter_are_no_race(how: str, poll: str) -> None:
    assert_right(ring_main, 2, (how, poll), range(7))


@triton.jit
def polls_plainly(flag, x, out, world, LOOP: tl.constexpr):
    if world.rank == 0:
        tl.store(x, 1)
        tl.store(flag, 1)
    elif LOOP:
        polls = 0
        while pl.load(flag, 0, world) != 1:
            polls += tl.load(out)
    else:
        pl.load(flag, 0, world)


@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("seed", range(7))
def test_a_race_of_a_plain_poll_says_how_to_poll(seed: int, loop: bool) -> None:
    def main(world: Any) -> None:
        flag, x = pkt.zeros(1, dtype=torch.int32), pkt.zeros(1, dtype=torch.int32)
        polls_plainly[(1,)](flag, x, pkt.zeros(1, dtype=torch.int32), world.device, loop)

    message = str(find_race(main, 2, seeds=[seed]))
    assert ("polling load of rank 0's flag[0] by rank 1" in message) is loop
    assert ("poll a flag by pl.wait or pl.load_acquire" in message) is loop


@triton.jit
def polls_atomically(flag, x, out, world, HOW: tl.constexpr, MENDED: tl.constexpr):
    if world.rank == 0:
        pl.store(x, 1, 1, world)
        if MENDED:
            pl.store_release(flag, 1, 1, world)
        else:
            pl.store(flag, 1, 1, world)
    else:
        if HOW == "load_acquire":
            seen = pl.load_acquire(flag, 1, world)
            while seen != 1:
                seen = pl.load_acquire(flag, 1, world)
        elif HOW == "cas":
            while pl.atomic_cas(flag, 1, 0, 1, world) != 1:
                pass
        elif HOW == "add":
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != 1:
                pass
        elif HOW == "volatile":
            while tl.load(flag, volatile=True) != 1:
                pass
            pl.fence()
        else:
            pl.wait(flag, 1, world)
        tl.store(out, tl.load(x))


@pytest.mark.parametrize("how", ["load_acquire", "cas", "add", "volatile", "wait"])
def test_a_race_of_a_poll_with_a_plain_store_says_how_to_set_a_flag(how: str) -> None:
    def main(world: Any, mended: bool) -> None:
        flag = pkt.signals(1) if how == "wait" else pkt.zeros(1, dtype=torch.int32)
        x, out = pkt.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        polls_atomically[(1,)](flag, x, out, world.device, how, mended)
        assert out.item() == world.rank

    found = failures(main, 2, range(7), args=(False,))
    assert len(found) == 7
    for error in found.values():
        message = str(error)
        assert "store of rank 1's" in message
        assert "poll a flag by pl.wait or pl.load_acquire, set by pl.signal or pl.store_release" in message
    assert_right(main, 2, (True,), range(7))


@triton.jit
def elect(x, lock, count, flags, out, world, HOW: tl.constexpr):
    """Ranks 0 and 1 store data and try to take the lock on rank 2, which reads once the winner has it and both have
    counted. The loser's CAS publishes nothing, so its count must."""
    i = world.rank
    if i < 2:
        if i == 1:
            pl.wait(flags, 1, world)
        pl.store(x + i, 7, 2, world)
        tl.atomic_cas(pl.peer(lock, 2, world), 0, 1 + i, sem="acq_rel", scope="sys")
        if i == 0:
            pl.signal(flags, 1, world)
        if HOW == "relaxed":
            tl.atomic_add(pl.peer(count, 2, world), 1, sem="relaxed", scope="sys")
        else:
            tl.atomic_add(pl.peer(count, 2, world), 1, sem="release", scope="sys")
    else:
        while tl.atomic_add(count, 0, sem="acquire", scope="sys") < 2:
            pass
        if tl.atomic_add(lock, 0, sem="acquire", scope="sys") > 0:
            tl.store(out, tl.load(x) + tl.load(x + 1))


def elect_main(world: Any, how: str) -> None:
    x, lock, count = (pkt.zeros(4, dtype=torch.int32) for _ in range(3))
    elect[(1,)](x, lock, count, pkt.signals(1), torch.zeros(1, dtype=torch.int32), world.device, how)


def test_a_cas_that_fails_releases_nothing() -> None:
    assert_right(elect_main, 3, ("release",), range(7))
    found = failures(lambda world: elect_main(world, "relaxed"), 3, range(7))
    assert len(found) == 7
    for error in found.values():
        assert isinstance(error, pkt.DataRace)
        assert "[1] by rank 1" in str(error)  # the loser's; the winner's is in order


@triton.jit
def read_twice(flag, out, world, HOW: tl.constexpr):
    """A program reads by a plain load, or within its GPU alone, and the others by atomic reads."""
    me = world.rank * tl.num_programs(0) + tl.program_id(0)
    if HOW == "gpu":
        found = pl.load_acquire(flag, 0, world, scope="gpu")
    elif me == 0:
        found = tl.load(flag)
    elif HOW == "test":
        found = pl.test(flag, 1, world).to(tl.int32)
    elif HOW == "relaxed":
        found = pl.load_relaxed(flag, world.rank, world)
    else:
        found = pl.load_acquire(flag, world.rank, world)
    tl.store(out + me, found)


def reads(world: Any, how: str) -> None:
    flag, out = pkt.signals(1, unwaited=True), torch.empty(4, dtype=torch.int32)
    if how != "test":
        flag = pkt.zeros(1, dtype=torch.int32)
    read_twice[(2,)](flag, out, world.device, how)


@pytest.mark.parametrize("how", ["acquire", "relaxed", "test", "gpu"])
def test_reads_are_no_race_with_each_other(how: str) -> None:
    assert failures(reads, 2, range(12), args=(how,)) == {}


@triton.jit
def too_near(flag, out, world, scope: tl.constexpr):
    if world.rank == 0:
        tl.atomic_add(flag, 1, sem="relaxed", scope="sys")
    else:
        tl.store(out, pl.load_acquire(flag, 0, world, scope=scope))


@pytest.mark.parametrize("scope", ["gpu", "sys"])
def test_an_atomic_read_within_its_gpu_races_with_another_gpus_update(scope: str) -> None:
    """Whichever comes first."""

    def main(world: Any) -> None:
        too_near[(1,)](pkt.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), world.device, scope)

    found = failures(main, 2, range(12))
    assert len(found) == (12 if scope == "gpu" else 0)
