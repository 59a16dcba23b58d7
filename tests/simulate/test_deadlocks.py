"""The simulator reports programs that hang, and no programs that only seem to hang."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.errors import GridTooLarge
from pkt.simulate.findings import Deadlock, TooFewResident
from tests.simulate.helpers import failures, line_of, outcome

pytestmark = pytest.mark.machine

SEEDS = range(6)


@triton.jit
def ring(flags, wanted, world):
    pid = tl.program_id(0)
    if world.rank != 2:
        pl.signal(flags + 3 + pid, (world.rank + 1) % world.size, world)
    pl.wait(flags + 3 + pid, wanted, world)


def ring_main(world: Any, wanted: int = 1) -> None:
    mailbox = pkt.signals(8)
    ring[(2,)](mailbox, wanted, world.device)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_deadlock_names_the_waiters_and_their_counters(seed: int) -> None:
    error = outcome(ring_main, 3, seed).error
    assert isinstance(error, Deadlock)
    assert not isinstance(error, TooFewResident)
    message = str(error)
    site = line_of(ring, "pl.wait(")
    assert "deadlock: 2 programs wait and nothing can move" in message
    assert f"rank 0: ring program 0 waits on mailbox[3] at {site}: wanted >= 1, found 0, launch 1" in message
    assert [(w.rank, w.program[0], w.counter, w.wanted, w.found, w.launch) for w in error.waits] == [
        (0, 0, "mailbox[3]", 1, 0, 1),
        (0, 1, "mailbox[4]", 1, 0, 1),
    ]
    assert all(w.site == site for w in error.waits)
    notes = "".join(getattr(error, "__notes__", ()))
    assert "ranks that have returned: 1, 2" in notes


def test_a_deadlock_of_all_ranks_has_a_table() -> None:
    error = outcome(ring_main, 3, args=(2,)).error
    assert isinstance(error, Deadlock)
    assert "6 programs wait" in str(error)
    rows = [line.split() for line in str(error).splitlines() if line.startswith("  ") and "mailbox[" in line]
    assert len(rows) == 6
    assert {row[0] for row in rows} == {"0", "1", "2"}


@triton.jit
def barriers(flags, world, HOW: tl.constexpr):
    if HOW == "barrier":
        if world.rank != 1:
            pl.barrier(flags, world)
    elif HOW == "grid":
        if tl.program_id(0) != 1:
            pl.grid_barrier(flags, world)
    elif HOW == "world":
        if tl.program_id(0) + world.rank != 1:
            pl.world_barrier(flags, world)


@pytest.mark.parametrize("how", ["barrier", "grid", "world"])
def test_a_barrier_that_one_program_misses_is_a_deadlock(how: str) -> None:
    def main(world: Any) -> None:
        gate = pkt.signals(2)
        barriers[(1 if how == "barrier" else 2,)](gate, world.device, how)

    error = outcome(main, 2).error
    assert isinstance(error, Deadlock)
    message = str(error)
    assert "barriers program" in message
    assert "waits on gate[" in message
    assert line_of(barriers, f"pl.{how}_barrier(" if how != "barrier" else "pl.barrier(") in message


@triton.jit
def spin(flags, world, HOW: tl.constexpr):
    if HOW == "volatile":
        while tl.load(flags, volatile=True) < 1:
            pass
    elif HOW == "atomic":
        while tl.atomic_add(flags, 0, sem="acquire", scope="sys") < 1:
            pass
    elif HOW == "plain":
        while tl.load(flags) < 1:
            pass
    else:
        while tl.atomic_cas(flags, 1, 2, sem="acquire", scope="sys") != 1:
            pass


SPINS = ["volatile", "atomic", "cas", "plain"]


@pytest.mark.parametrize("how", SPINS)
def test_an_endless_spin_of_the_user_is_a_deadlock(how: str) -> None:
    """The report lists the spinning programs, and the pl.wait of the other rank."""

    def main(world: Any) -> None:
        mailbox = pkt.signals(8)
        if world.rank == 0:
            spin[(2,)](mailbox, world.device, how)
        else:
            ring[(1,)](mailbox, 7, world.device)

    text = {"volatile": "flags, vol", "atomic": "tl.atomic_add", "plain": "tl.load(flags) <", "cas": "tl.atomic_cas"}
    for seed in (0, 1, 3):
        error = outcome(main, 2, seed).error
        assert isinstance(error, Deadlock), error
        spins, (wait,) = ([w for w in error.waits if w.rank == r] for r in (0, 1))
        assert [w.program[0] for w in spins] == [0, 1]
        assert all(w.kernel == "spin" and w.site == line_of(spin, text[how]) for w in spins)
        assert "rank 0: spin program 0 waits on mailbox[0] at test_deadlocks.py:" in str(error)
        assert f": wanted {'== 1' if how == 'cas' else '>= 1'}, found 0, launch 1" in str(error)
        assert (wait.kernel, wait.counter, wait.wanted) == ("ring", "mailbox[3]", 7)


@triton.jit
def spin_and_set(flags, world, HOW: tl.constexpr):
    if world.rank == 0:
        if HOW == "volatile" or HOW == "plain":
            tl.store(pl.peer(flags, 1, world), 1)
        else:
            tl.atomic_xchg(pl.peer(flags, 1, world), 1, sem="release", scope="sys")
    else:
        spin(flags, world, HOW)


@pytest.mark.parametrize("how", SPINS)
def test_a_spin_of_the_user_sees_the_store_that_ends_it(how: str) -> None:
    def main(world: Any) -> None:
        mailbox = pkt.signals(1)
        spin_and_set[(1,)](mailbox, world.device, how)

    # A plain store to a plain spin is also a race; this test checks only that the spin ends.
    assert failures(main, 2, range(10), races=False) == {}


def test_a_rank_that_misses_a_host_barrier_is_a_deadlock() -> None:
    def main(world: Any) -> None:
        if world.rank != 1:
            world.barrier()

    error = outcome(main, 3).error
    assert isinstance(error, Deadlock)
    assert "host code: ranks 0, 2: in barrier() at test_deadlocks.py:" in str(error)
    assert "rank 1: returned\nevery rank must make the same collective calls" in str(error)


@pytest.mark.parametrize("call", [pkt.ones, pkt.empty, pkt.all_gather])
def test_a_collective_that_ranks_leave_out_is_named_with_its_line(call: Any) -> None:
    line = main_line = 0

    def main(world: Any) -> None:
        nonlocal line, main_line
        if world.rank == 0:
            line = sys._getframe().f_lineno + 1
            call(torch.ones(4) if call is pkt.all_gather else 4)
        elif world.rank == 1:
            main_line = sys._getframe().f_lineno + 1
            world.barrier()

    error = outcome(main, 3).error
    assert isinstance(error, Deadlock)
    assert f"rank 0: in {call.__name__}() at test_deadlocks.py:{line}" in str(error)
    assert f"rank 1: in barrier() at test_deadlocks.py:{main_line}" in str(error)
    assert "rank 2: returned" in str(error)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_line_of_a_rank_that_has_returned_is_that_of_its_operator(seed: int) -> None:
    def main(world: Any) -> None:
        for _ in range(2 - world.rank):
            pkt.all_reduce(torch.ones(4))
        if world.rank:
            world.barrier()

    error = outcome(main, 2, seed).error
    line = main.__code__.co_firstlineno + 2
    assert f"rank 0: in the launch of one_shot_kernel at test_deadlocks.py:{line}" in str(error)


def test_different_collectives_are_named_with_their_lines() -> None:
    def main(world: Any) -> None:
        world.barrier() if world.rank else world.broadcast(3)

    error = outcome(main, 2).error
    assert isinstance(error, pkt.CollectiveMismatch)
    line = main.__code__.co_firstlineno + 1
    assert f"rank 0: broadcast() from rank 0 in broadcast() at test_deadlocks.py:{line}" in str(error)
    assert f"rank 1: barrier() in barrier() at test_deadlocks.py:{line}" in str(error)


def test_a_host_barrier_and_a_waiting_kernel_are_a_deadlock() -> None:
    def main(world: Any) -> None:
        mailbox = pkt.signals(8)
        if world.rank == 0:
            world.barrier()
        else:
            ring[(1,)](mailbox, 7, world.device)

    error = outcome(main, 2).error
    assert isinstance(error, Deadlock)
    assert "rank 1: ring program 0 waits on mailbox[3]" in str(error)
    assert "host code: rank 0: in barrier() at test_deadlocks.py:" in str(error)
    assert "rank 1: in the launch of ring at test_deadlocks.py:" in str(error)
    assert "every rank must make the same collective calls in the same order" in str(error)


@triton.jit
def rank_1_waits(flags, world):
    if world.rank == 1:
        pl.wait(flags, 1, world)


@pytest.mark.parametrize("seed", [0, 1])
def test_where_all_ranks_have_made_the_launch_no_call_is_to_blame(seed: int) -> None:
    def main(world: Any) -> None:
        rank_1_waits[(1,)](pkt.signals(1), world.device)
        world.barrier()

    error = outcome(main, 3, seed).error
    assert isinstance(error, Deadlock)
    assert "rank 1: rank_1_waits program 0 waits on signals@" in str(error)
    assert "host code: ranks 0, 1, 2: in barrier() at test_deadlocks.py:" in str(error)
    assert "collective calls" not in str(error)


@triton.jit
def never_ends(x, n, HOW: tl.constexpr):
    if HOW == "variable":
        i = n
        while i < 1:
            i = i * n
        tl.store(x, i)
    elif HOW == "fraction":
        share = 0.5
        while share < 1:
            share = share * 1
        tl.store(x, n)
    elif HOW == "parameter":
        while n < 1:
            tl.store(x + 1, n)
    else:
        seen = tl.load(x, mask=n > 0, other=0)
        while seen == 0:
            seen = tl.load(x, mask=n > 0, other=0)


@pytest.mark.parametrize(
    ("how", "variable", "value"),
    [("variable", "i", "0"), ("fraction", "share", "0.5"), ("parameter", "n", "0"), ("masked", "seen", "0")],
)
def test_an_endless_loop_that_polls_no_memory_names_its_variable(how: str, variable: str, value: str) -> None:
    def main(world: Any) -> None:
        never_ends[(1,)](pkt.zeros(2, dtype=torch.int32), 0, how)

    error = outcome(main, 1).error
    assert isinstance(error, Deadlock)
    site = line_of(never_ends, f"while {variable} ")
    said = f"its own variable {variable} at {site}: wanted != {value}, found {value}, launch 1"
    assert f"rank 0: never_ends program 0 waits on {said}" in str(error)


@triton.jit
def sums_again(x, world):
    i = tl.arange(0, 4)
    total = tl.sum(pl.multimem_load_reduce(x + i, world))
    while total == 0:
        total = tl.sum(pl.multimem_load_reduce(x + i, world))


def test_an_endless_loop_over_the_multicast_window_names_a_word() -> None:
    error = outcome(lambda world: sums_again[(1,)](pkt.zeros(4, name="x"), world.device), 2).error
    assert isinstance(error, Deadlock)
    assert "rank 0: sums_again program 0 waits on x[0] of rank 1 at test_deadlocks.py" in str(error)


# -- code that only looks like a spin --------------------------------------------------------------------------------


@triton.jit
def looks_often(x, m, flags, n, world, HOW: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    for t in range(tl.program_id(0), n, tl.num_programs(0)):
        if HOW == "greatest":
            tl.atomic_max(m, tl.max(tl.abs(tl.load(x + t * N + i))))
        elif HOW == "masked":
            v = tl.load(x + t * N + i)
            tl.atomic_add(x + i, 1.0, mask=v > 0)
        elif HOW == "volatile":
            tl.load(x + t, volatile=True)
        elif HOW == "test":
            tl.load(x + t * N + i)
            pl.test(flags, 1, world)
        elif HOW == "bounded":
            tl.atomic_add(flags + 1, 0, sem="relaxed", scope="sys")
        elif HOW == "one word":
            tl.load(x)


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize(
    ("how", "turns"),
    [("greatest", 800), ("masked", 800), ("volatile", 800), ("test", 400), ("bounded", 500), ("one word", 5000)],
)
def test_repeated_polls_that_end_are_no_deadlock(how: str, turns: int, programs: int) -> None:
    def main(world: Any) -> None:
        x, m = torch.zeros(4 * turns), torch.zeros(1)
        looks_often[(programs,)](x, m, pkt.signals(2), turns, world.device, how, 4)

    assert failures(main, 1, [0, 1, 3]) == {}


@triton.jit
def spins(flags, HOW: tl.constexpr):
    i = tl.arange(0, 8)
    if HOW == "block":
        while tl.sum(tl.load(flags + i)) < 8:
            pass
    elif HOW == "two words":
        while tl.load(flags, volatile=True) + tl.load(flags + 1, volatile=True) < 2:
            pass
    else:
        while tl.atomic_add(flags, 0, sem="acquire", scope="sys") < 1:
            tl.load(flags + i)


@pytest.mark.parametrize("how", ["block", "two words", "with a load"])
def test_endless_spins_of_all_kinds_are_deadlocks(how: str) -> None:
    def main(world: Any) -> None:
        spins[(2,)](pkt.zeros(8, dtype=torch.int32), how)

    assert isinstance(outcome(main, 1).error, Deadlock)


# -- residency -------------------------------------------------------------------------------------------------------


@triton.jit
def all_together(flags, world):
    pl.grid_barrier(flags, world)


def together_main(world: Any, programs: int, **options: Any) -> None:
    gate = pkt.signals(1)
    all_together[(programs,)](gate, world.device, **options)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_grid_of_one_program_too_many_is_too_few_resident(seed: int) -> None:
    assert outcome(together_main, 2, seed, (4,), sms=4).failure is None
    error = outcome(together_main, 2, seed, (5,), sms=4).error
    assert isinstance(error, TooFewResident)
    assert "all_together has 5 programs but only 4 are resident" in str(error)
    assert "lower the grid to 4 or make it persistent" in str(error)
    assert (error.grid, error.slots) == (5, 4)
    assert len(error.waits) >= 4
    assert "gate[0]" in str(error)


@triton.jit
def forgets(gate, flags, world, FORGETS: tl.constexpr, TOGETHER: tl.constexpr, SPIN: tl.constexpr):
    pid = tl.program_id(0)
    if TOGETHER:
        pl.grid_barrier(gate, world)
    if world.rank == 0 or not FORGETS:
        pl.signal(flags + pid, 1 - world.rank, world)
    if SPIN:
        while not pl.test(flags + pid, 1, world):
            pass
    else:
        pl.wait(flags + pid, 1, world)


@pytest.mark.parametrize("spin", [False, True])
def test_the_cause_that_is_named_is_one_that_mends_the_program(spin: bool) -> None:
    def main(world: Any, forgets_signal: bool, together: bool) -> None:
        gate, flags = pkt.signals(1), pkt.signals(8)
        forgets[(8,)](gate, flags, world.device, forgets_signal, together, spin)

    for seed in SEEDS:
        assert outcome(main, 2, seed, (False, False), sms=4).failure is None
        assert isinstance(outcome(main, 2, seed, (False, True), sms=4).failure, TooFewResident)
        for together in (False, True):  # a forgotten signal stays one with all programs resident
            found = outcome(main, 2, seed, (True, together), sms=4)
            error = found.failure
            assert isinstance(error, Deadlock)
            assert not isinstance(error, TooFewResident)
            assert [(w.rank, w.program[0]) for w in error.waits] == [(0, i) for i in range(8)]
            assert "4 of 8 programs of forgets fit at once; if all did, the deadlock would" in "".join(error.__notes__)


def test_a_cooperative_launch_is_refused_before_it_starts() -> None:
    def main(world: Any, programs: int) -> None:
        together_main(world, programs, launch_cooperative_grid=True)

    assert outcome(main, 2, args=(4,), sms=4).failure is None
    found = outcome(main, 2, args=(5,), sms=4)
    assert isinstance(found.error, GridTooLarge)
    assert "all_together: grid 5 > 4 resident programs (4 SMs x 1)" in str(found.error)
    assert "rank 0" in str(found.error)
    assert found.machine.programs == 0


def test_programs_take_the_slots_of_finished_programs() -> None:
    @triton.jit
    def independent(x):
        tl.atomic_add(x, 1)

    def main(world: Any) -> None:
        x = torch.zeros(1, dtype=torch.int32)
        independent[(50,)](x)
        assert x.item() == 50

    assert failures(main, 2, SEEDS, sms=3) == {}


def test_low_program_ids_start_first() -> None:
    """The program that signals has the last index: with fewer slots than programs it never starts."""

    @triton.jit
    def last_one_signals(flags, world):
        last = tl.num_programs(0) - 1
        if tl.program_id(0) == last:
            pl.signal(flags, world.rank, world, value=100)
        else:
            pl.wait(flags, 1, world)

    def main(world: Any) -> None:
        last_one_signals[(5,)](pkt.signals(1), world.device)

    for seed in SEEDS:
        assert outcome(main, 1, seed, sms=5).failure is None
        assert isinstance(outcome(main, 1, seed, sms=4).error, TooFewResident)


def test_an_endless_run_ends_after_max_steps() -> None:
    @triton.jit
    def busy(x):
        while tl.atomic_add(x, 1) < 1_000_000:
            pass

    def main(world: Any) -> None:
        busy[(2,)](torch.zeros(1, dtype=torch.int32))

    error = outcome(main, 1, 1, max_steps=5).error
    assert isinstance(error, Deadlock)
    assert "not finished after 5 steps (seed 1 (random)); raise max_steps= for a longer run" in str(error)


def test_max_steps_bounds_the_accesses_of_a_program_that_runs_alone() -> None:
    @triton.jit
    def past(x, out):
        while tl.atomic_add(x, 2) != 21:
            tl.store(out, tl.load(x))

    x = torch.zeros(1, dtype=torch.int32)
    assert isinstance(outcome(lambda world: past[(1,)](x, torch.zeros(1)), 1, max_steps=20_000).error, Deadlock)
    assert x.item() < 2 * 20_000


@triton.jit
def counts_past(x, flags, world):
    if world.rank == 0:
        while tl.atomic_add(x, 2) != 21:
            pass
    else:
        pl.wait(flags, 1, world)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_endless_run_says_where_each_program_is(seed: int) -> None:
    def main(world: Any) -> None:
        x, gate = pkt.zeros(1, dtype=torch.int32, name="x"), pkt.signals(1)
        counts_past[(1,)](x, gate, world.device)

    error = outcome(main, 2, seed, max_steps=500).error
    assert isinstance(error, Deadlock)
    counts, waits = error.waits
    assert (counts.rank, counts.counter, counts.site) == (0, "x[0]", line_of(counts_past, "while tl.atomic_add"))
    assert (waits.rank, waits.counter, waits.site) == (1, "gate[0]", line_of(counts_past, "pl.wait"))
    assert re.search(r"\n  0 +counts_past  0 +x\[0\] ", str(error))
