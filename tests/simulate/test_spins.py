"""Loops that poll: one that can never end is a deadlock, found at once; one that can end, ends."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.simulate import accesses, loops
from pkt.simulate.findings import Deadlock
from pkt.simulate.loops import HOST_POLLS
from tests.simulate.helpers import failures, line_of, outcome

pytestmark = pytest.mark.machine

SEEDS = (0, 1, 2, 3, 6)  # rank 1 is slow in seed 3, rank 0 in seed 6
KINDS = ("test", "atomic", "cas", "volatile", "plain")
EFFECTS = ("none", "store", "atomic", "sometimes", "outside")


@triton.jit
def polled(flags, world, KIND: tl.constexpr):
    if KIND == "test":
        return pl.test(flags, 1, world).to(tl.int32)
    elif KIND == "atomic":
        return tl.atomic_add(flags, 0, sem="acquire", scope="sys")
    elif KIND == "cas":
        return tl.atomic_cas(flags, 1, 1, sem="acquire", scope="sys")
    elif KIND == "volatile":
        return tl.load(flags, volatile=True)
    else:
        return tl.load(flags)


@triton.jit
def spin(flags, stats, seen, world, KIND: tl.constexpr, EFFECT: tl.constexpr):
    """Rank 0 sends when SENT; the others wait for it in a loop of their own, which may count its polls."""
    polls = 0
    done = polled(flags, world, KIND) == 1
    while not done:
        polls += 1
        if EFFECT == "store":
            tl.store(stats, polls)
        elif EFFECT == "atomic":
            tl.atomic_add(stats, 1)
        elif EFFECT == "sometimes":
            if polls % 16 == 0:
                tl.store(stats, polls)
        elif EFFECT == "outside":
            pl.store(stats, polls, 0, world)
        done = polled(flags, world, KIND) == 1
    tl.store(seen, 1)


@triton.jit
def exchange(flags, stats, seen, turns, world, KIND: tl.constexpr, EFFECT: tl.constexpr, SENT: tl.constexpr):
    if world.rank == 0:
        if SENT:
            i = 0
            while i < turns:  # a long way to the signal
                i += 1
            for _ in range(turns):
                tl.load(stats + 1, volatile=True)
            tl.atomic_xchg(pl.peer(flags, 1, world), 1, sem="release", scope="sys")
    else:
        spin(flags, stats, seen, world, KIND, EFFECT)


def exchange_main(world: Any, kind: str, effect: str, sent: bool, turns: int = 20) -> None:
    stats = pkt.zeros(8, dtype=torch.int32)
    if kind == "test":
        flags = pkt.signals(1)
    else:
        flags = pkt.zeros(8, dtype=torch.int32)
    seen = torch.zeros(1, dtype=torch.int32)
    exchange[(1,)](flags, stats, seen, turns, world.device, kind, effect, sent)
    assert seen.item() == (world.rank == 1)


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_spin_that_nothing_ends_is_a_deadlock_at_once(kind: str, effect: str) -> None:
    for seed in SEEDS:
        found = outcome(exchange_main, 2, seed, (kind, effect, False), races=False)
        error = found.error
        assert isinstance(error, Deadlock), (seed, error)
        (wait,) = error.waits
        assert (wait.rank, wait.kernel) == (1, "exchange")
        assert wait.counter == "flags[0]"
        assert found.machine.steps < 20_000, seed


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_spin_that_a_signal_ends_goes_on(kind: str, effect: str) -> None:
    assert failures(exchange_main, 2, SEEDS, args=(kind, effect, True), races=False) == {}


def test_a_long_way_to_the_signal_is_no_deadlock() -> None:
    assert failures(exchange_main, 2, (0, 3), args=("test", "none", True, 6000)) == {}


@pytest.mark.parametrize("effect", ["none", "store", "sometimes"])
def test_spins_of_all_ranks_are_a_deadlock_at_once(effect: str) -> None:
    @triton.jit
    def all_spin(flags, stats, seen, world, EFFECT: tl.constexpr):
        spin(flags, stats, seen, world, "test", EFFECT)

    def main(world: Any) -> None:
        flags, stats, seen = pkt.signals(1), pkt.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        all_spin[(2,)](flags, stats, seen, world.device, effect)

    for seed in (0, 3):
        found = outcome(main, 4, seed, races=False)
        assert isinstance(found.error, Deadlock)
        assert len(found.error.waits) == 8
        assert found.machine.steps < 20_000, seed


@triton.jit
def gives_up(flags, out, limit, world, KIND: tl.constexpr):
    polls = 0
    while (polled(flags, world, KIND) != 1) & (polls < limit):
        polls += 1
    tl.store(out, polls)


@pytest.mark.parametrize("kind", KINDS)
def test_a_spin_that_gives_up_ends(kind: str) -> None:
    def main(world: Any) -> None:
        flags, out = pkt.signals(1), torch.zeros(1, dtype=torch.int32)
        gives_up[(1,)](flags, out, 1500, world.device, kind)
        assert out.item() == 1500

    assert failures(main, 2, (0, 3)) == {}


@triton.jit
def hand_over(mine, n, flags, world, HOW: tl.constexpr):
    """Two programs that count each other up until both have seen n; their loops test only whether that has happened."""
    i = 0
    if HOW == "counters":
        while not (pl.test(flags, n, world) & pl.test(pl.peer(flags, 1 - world.rank, world), n, world)):
            pl.signal(flags, 1 - world.rank, world)
    elif HOW == "rarely":
        while not pl.test(flags, 1, world):
            i += 1
            if i == n:
                pl.signal(flags, 0, world)
                pl.signal(flags, 1, world)
    else:
        while (tl.load(mine, volatile=True) < n) | (tl.load(pl.peer(mine, 1 - world.rank, world), volatile=True) < n):
            i += 1
            pl.store(mine, i, 1 - world.rank, world)


@pytest.mark.parametrize("how", ["counters", "rarely", "stores"])
def test_spins_that_end_each_other_are_no_deadlock(how: str) -> None:
    def main(world: Any) -> None:
        x, flags = pkt.zeros(1, dtype=torch.int32), pkt.signals(1)
        hand_over[(1,)](x, 20, flags, world.device, how)

    assert failures(main, 2, SEEDS, races=False) == {}


@triton.jit
def waits_for_a_spinner(flags, n, world):
    if tl.program_id(0) == 0:
        pl.wait(flags, n, world)
        pl.signal(flags + 1, 0, world)
    else:
        while not pl.test(flags + 1, 1, world):
            pl.signal(flags, 0, world)


def test_a_wait_for_a_spin_with_side_effects_ends() -> None:
    def main(world: Any) -> None:
        waits_for_a_spinner[(2,)](pkt.signals(2), 100, world.device)

    assert failures(main, 1, SEEDS) == {}


@triton.jit
def polls_several(flags, world, missing, HOW: tl.constexpr, N: tl.constexpr):
    """Program 0 polls N flags, and each of the others but one sets the peer's."""
    p = tl.program_id(0)
    if p > 0:
        if p - 1 != missing:
            pl.store_release(flags + p - 1, 1, 1 - world.rank, world)
    elif HOW == "block":
        while tl.sum(pl.load_acquire(flags + tl.arange(0, N), world.rank, world), 0) < N:
            pass
    else:
        found = 0
        while found < N:
            found = 0
            for i in range(N):
                found += pl.load_acquire(flags + i, world.rank, world)


@pytest.mark.parametrize("how", ["block", "loop"])
@pytest.mark.parametrize("missing", range(4))
def test_of_several_flags_a_deadlock_names_the_missing_one(how: str, missing: int) -> None:
    def main(world: Any) -> None:
        flags = pkt.zeros(4, dtype=torch.int32)
        polls_several[(5,)](flags, world.device, missing, how, 4)

    found = failures(main, 2, SEEDS)
    assert len(found) == len(SEEDS)
    for error in found.values():
        assert isinstance(error, Deadlock)
        assert [(w.counter, w.found) for w in error.waits] == 2 * [(f"flags[{missing}]", 0)]


@triton.jit
def looks_at_all(flags, world, SENDERS: tl.constexpr):
    """Rank 0 looks at one flag after the other until it has seen that of every other rank."""
    if world.rank == 0:
        seen, r = 0, 1
        while seen < world.size - 1:
            if pl.load_acquire(flags + r, 0, world) == 1:
                pl.store_relaxed(flags + r, 2, 0, world)
                seen += 1
            r = r % (world.size - 1) + 1
    elif tl.cast(world.rank, tl.int32) <= SENDERS:
        for _ in range(20 * world.rank):
            pl.load_relaxed(flags, world.rank, world)
        pl.store_release(flags + world.rank, 1, 0, world)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("missing", [0, 1])
def test_a_loop_that_looks_at_all_ranks_in_turn(seed: int, missing: int) -> None:
    def main(world: Any) -> None:
        flags = pkt.zeros(12, dtype=torch.int32)
        world.barrier()
        looks_at_all[(1,)](flags, world.device, world.size - 1 - missing)

    error = outcome(main, 12, seed, max_steps=50_000).failure
    assert (isinstance(error, Deadlock) and error.waits) if missing else error is None


@triton.jit
def probes(flags, world, SENT: tl.constexpr):
    """The ranks but 0 look at random flags for one that is set. Rank 0 sets one of 8, if SENT."""
    if world.rank == 0:
        for r in range(SENT, world.size if SENT else 0):
            pl.store_release(flags + 5, 1, r, world)
    else:
        v, found = 17 * world.rank, 0
        while found == 0:
            v = (v * 1103515245 + 12345) & 0x7FFFFFFF
            found = pl.load_acquire(flags + (v >> 8) % 8, world.rank, world)


@triton.jit
def takes_a_slot(slots, n, world):
    """Each rank takes one of n slots, at random."""
    v, taken = 17 * world.rank, 0
    while taken == 0:
        v = (v * 1103515245 + 12345) & 0x7FFFFFFF
        if pl.atomic_cas(slots + (v >> 8) % n, 0, 1, 0, world, sem="acquire") == 0:
            taken = 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("missing", [0, 1])
def test_a_loop_that_tries_random_slots(seed: int, missing: int) -> None:
    def main(world: Any) -> None:
        slots = pkt.zeros(8, dtype=torch.int32)
        world.barrier()
        takes_a_slot[(1,)](slots, world.size - missing, world.device)

    error = outcome(main, 4, seed, max_steps=20_000).failure
    assert error is None if not missing else isinstance(error, Deadlock) and len(error.waits) == 1
    assert error is None or "nothing can move" in str(error)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sent", [0, 1])
def test_a_loop_that_looks_at_random_words(seed: int, sent: int) -> None:
    def main(world: Any) -> None:
        flags = pkt.zeros(8, dtype=torch.int32)
        world.barrier()
        probes[(1,)](flags, world.device, sent)

    error = outcome(main, 4, seed, max_steps=20_000).failure
    assert error is None if sent else isinstance(error, Deadlock) and len(error.waits) == 3
    assert error is None or "nothing can move" in str(error)


@triton.jit
def looks_under_a_lock(lock, world, TELL: tl.constexpr):
    """All ranks but the last take the lock to look whether the last one has written, again and again."""
    go = 1
    while go == 1:
        while pl.atomic_cas(lock, 0, 1, 0, world, sem="acquire") != 0:
            pass
        if tl.cast(world.rank, tl.int32) == world.size - 1:
            if TELL:
                pl.store(lock + 1, 1, 0, world)
            go = 0
        elif pl.load(lock + 1, 0, world) == 1:
            go = 0
        pl.store_release(lock, 0, 0, world)


LOCKED = [(2, 1), (2, 8), (3, 11), (8, 3), (8, 9), (16, 4)]


@pytest.mark.parametrize(
    ("ranks", "seed", "tell"),
    [
        *((*run, tell) for run in LOCKED for tell in (False, True)),
        (8, 1, True),
        (8, 23, True),
        (8, 45, True),
        (16, 41, True),
    ],
)
def test_programs_that_look_under_a_lock_take_turns(ranks: int, seed: int, tell: bool) -> None:
    def main(world: Any) -> None:
        lock = pkt.zeros(2, dtype=torch.int32)
        world.barrier()
        looks_under_a_lock[(1,)](lock, world.device, tell)

    error = outcome(main, ranks, seed, max_steps=20_000).failure
    assert error is None if tell else isinstance(error, Deadlock) and error.waits


@triton.jit
def looks_under_one_lock_and_tells_under_both(locks, data, world, TELL: tl.constexpr):
    """The last rank needs both locks at once. The others hold one of them most of the time."""
    me = tl.cast(world.rank, tl.int32)
    go = 1
    while go == 1:
        if me < world.size - 1:
            mine = locks + 2 * (me % 2)
            while pl.atomic_cas(mine, 0, 1, 0, world, sem="acquire") != 0:
                pass
            if pl.load(mine + 1, 0, world) == 1:
                go = 0
            for i in range(60):
                pl.load(data + i % 8, 0, world)
            pl.store_release(mine, 0, 0, world)
        elif pl.atomic_cas(locks, 0, 1, 0, world, sem="acquire") == 0:
            if pl.atomic_cas(locks + 2, 0, 1, 0, world, sem="acquire") == 0:
                if TELL:
                    pl.store(locks + 1, 1, 0, world)
                    pl.store(locks + 3, 1, 0, world)
                go = 0
                pl.store_release(locks + 2, 0, 0, world)
            pl.store_release(locks, 0, 0, world)


@pytest.mark.parametrize("seed", [4, 6, 17, 33])
@pytest.mark.parametrize("tell", [False, True])
def test_a_program_that_rarely_finds_both_locks_free_ends(seed: int, tell: bool) -> None:
    def main(world: Any) -> None:
        locks, data = pkt.zeros(4, dtype=torch.int32), pkt.zeros(8, dtype=torch.int32)
        world.barrier()
        looks_under_one_lock_and_tells_under_both[(1,)](locks, data, world.device, tell)

    error = outcome(main, 8, seed, max_steps=50_000).failure
    assert error is None if tell else isinstance(error, Deadlock) and error.waits


@triton.jit
def takes_a_permit(permits, world, RETURNED: tl.constexpr):
    """A semaphore on rank 0. A program that finds no permit takes back what it subtracted, so the word has many values,
    some of them rarely."""
    permit = 0
    while permit == 0:
        if pl.atomic_add(permits, -1, 0, world, sem="acquire") > 0:
            permit = 1
        else:
            pl.atomic_add(permits, 1, 0, world, sem="relaxed")
    if RETURNED:
        pl.atomic_add(permits, 1, 0, world, sem="release")


@pytest.mark.parametrize("seed", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("returned", [False, True])
def test_a_semaphore_whose_permits_are_not_returned_is_a_deadlock(seed: int, returned: bool) -> None:
    def main(world: Any) -> None:
        permits = pkt.full(1, 2 * (world.rank == 0), dtype=torch.int32)
        world.barrier()
        takes_a_permit[(2,)](permits, world.device, returned)

    error = outcome(main, 8, seed, max_steps=50_000).failure
    assert error is None if returned else isinstance(error, Deadlock) and error.waits


@triton.jit
def runs_alone(x, last):
    i = tl.cast(0, tl.int32)
    while i != last:
        i += 2
    tl.store(x, i)


def test_a_loop_that_runs_on_by_itself_is_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accesses, "ALONE", 3000)

    def main(world: Any, last: int) -> None:
        runs_alone[(1,)](pkt.zeros(1, dtype=torch.int32), last)

    error = outcome(main, args=(-1,)).failure
    assert type(error) is Deadlock
    place = f"runs_alone program 0 at {line_of(runs_alone, 'while i != last')}"
    assert re.match(rf"endless loop: rank \d: {place}: found 3,000 iterations of a while", str(error))
    assert outcome(main, args=(2 * 2990,)).failure is None


@triton.jit
def looks_often(x, n):
    i = tl.cast(0, tl.int32)
    while i != n:
        i += tl.load(x)
    tl.store(x + 1, i)


def test_a_loop_that_loads_is_not_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accesses, "ALONE", 100)
    assert outcome(lambda world: looks_often[(1,)](pkt.full(2, 1, dtype=torch.int32), 300)).failure is None


@triton.jit
def tell_peer(flags, world):
    pl.signal(flags, 1 - world.rank, world)


def host_polls(world: Any, how: str) -> None:
    flags = pkt.signals(2, unwaited=True)
    if world.rank == 0:
        if not how.endswith("nothing"):
            tell_peer[(1,)](flags, world.device)
    else:
        polls, flags = 0, flags.plain() if how.startswith("plain") else flags
        while flags[0].item() == 0 or (how == "two" and not flags.tolist()[1]):
            polls += how.startswith("counted")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["one", "counted", "plain"])
def test_host_code_may_poll_until_a_kernel_signals(seed: int, how: str) -> None:
    assert outcome(host_polls, 2, seed, (how,)).failure is None


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["nothing", "two", "counted nothing", "plain nothing"])
def test_host_code_that_polls_for_ever_is_a_deadlock(seed: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "COUNTED_POLLS", HOST_POLLS)
    error = outcome(host_polls, 2, seed, (how,)).failure
    assert isinstance(error, Deadlock)
    assert str(error).splitlines()[1].startswith("rank 1: host code waits on flags[")
    assert [(w.rank, w.kernel, w.counter) for w in error.waits] == [
        (1, "host code", "flags[1]" if how == "two" else "flags[0]")
    ]


def test_host_code_that_counts_its_polls_is_a_deadlock_within_seconds() -> None:
    polls = 0

    def main(world: Any) -> None:
        nonlocal polls
        flags = pkt.signals(1, unwaited=True)
        while flags[0].item() == 0:
            polls += 1

    assert isinstance(outcome(main, 1).failure, Deadlock)
    assert HOST_POLLS < polls < 40_000


@pytest.mark.parametrize("seed", [3, 6, 9])  # one rank is slow
def test_a_slow_rank_goes_on_where_host_code_counts_its_polls(seed: int) -> None:
    polls = []

    def main(world: Any) -> None:
        flags = pkt.signals(1, unwaited=True)
        for n in range(3):
            tell_peer[(1,)](flags, world.device)
            polls.append(0)
            while flags[0].item() <= n:
                polls[-1] += 1
            world.barrier()

    assert outcome(main, 2, seed).failure is None
    assert max(polls) < 2 * HOST_POLLS


def test_host_code_may_read_the_same_often_while_others_wait() -> None:
    def main(world: Any) -> None:
        x = pkt.zeros(1)
        for _ in range(HOST_POLLS + 100 if world.rank else 0):
            x.item()
        world.barrier()

    assert failures(main, 2, range(2)) == {}
