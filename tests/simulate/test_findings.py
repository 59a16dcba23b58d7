"""What the simulator reports when programs hang, reach outside, or hosts disagree: the facts are in the messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.errors import (
    CollectiveMismatch,
    Deadlock,
    GridTooLarge,
    LostSignal,
    OutOfBounds,
    RankFailed,
    SignalIndexError,
    TooFewResident,
    UseAfterFree,
)
from tests.simulate.helpers import failures, line_of, outcome

SEEDS = range(6)

# -- deadlocks -------------------------------------------------------------------------------------------------------


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
def test_a_deadlock_says_who_waits_for_what(seed: int) -> None:
    error = outcome(ring_main, 3, seed).error
    assert isinstance(error, Deadlock)
    assert not isinstance(error, TooFewResident)
    told = str(error)
    site = line_of(ring, "pl.wait(")
    assert "deadlock: 2 programs wait and nothing can move" in told
    assert f"rank 0: ring program 0 waits on mailbox[3] at {site}: wanted >= 1, found 0, launch 1" in told
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
def test_a_barrier_that_one_does_not_reach(how: str) -> None:
    def main(world: Any) -> None:
        gate = pkt.signals(2)
        barriers[(1 if how == "barrier" else 2,)](gate, world.device, how)

    error = outcome(main, 2).error
    assert isinstance(error, Deadlock)
    told = str(error)
    assert "barriers program" in told
    assert "waits on gate[" in told
    assert line_of(barriers, f"pl.{how}_barrier(" if how != "barrier" else "pl.barrier(") in told


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
def test_a_spin_of_the_users_own_that_never_ends(how: str) -> None:
    """Also while other ranks wait properly: the report has both."""

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
        assert "rank 0: spin program 0 waits on mailbox[0] at test_findings.py:" in str(error)
        assert ": wanted != 0, found 0, launch 1" in str(error)
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
def test_a_spin_of_the_users_own_ends(how: str) -> None:
    def main(world: Any) -> None:
        mailbox = pkt.signals(1)
        spin_and_set[(1,)](mailbox, world.device, how)

    # A plain store to a plain spin is a race as well; here only that it ends.
    assert failures(main, 2, range(10), races=False) == {}


def test_a_rank_that_does_not_come_to_a_host_barrier() -> None:
    def main(world: Any) -> None:
        if world.rank != 1:
            world.barrier()

    error = outcome(main, 3).error
    assert isinstance(error, Deadlock)
    assert "host code: ranks 0, 2: in barrier()" in str(error)
    assert "ranks that have returned: 1" in "".join(error.__notes__)


def test_a_host_barrier_against_a_kernel_that_waits() -> None:
    def main(world: Any) -> None:
        mailbox = pkt.signals(8)
        if world.rank == 0:
            world.barrier()
        else:
            ring[(1,)](mailbox, 7, world.device)

    error = outcome(main, 2).error
    assert isinstance(error, Deadlock)
    assert "rank 1: ring program 0 waits on mailbox[3]" in str(error)
    assert "host code: rank 0: in barrier()" in str(error)


# -- residency -------------------------------------------------------------------------------------------------------


@triton.jit
def all_together(flags, world):
    pl.grid_barrier(flags, world)


def together_main(world: Any, programs: int, **options: Any) -> None:
    gate = pkt.signals(1)
    all_together[(programs,)](gate, world.device, **options)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_slot_short(seed: int) -> None:
    assert outcome(together_main, 2, seed, (4,), sms=4).failure is None
    error = outcome(together_main, 2, seed, (5,), sms=4).error
    assert isinstance(error, TooFewResident)
    assert "all_together has 5 programs but only 4 are resident" in str(error)
    assert "lower the grid to 4 or make it persistent" in str(error)
    assert (error.grid, error.slots) == (5, 4)
    assert len(error.waits) >= 4
    assert "gate[0]" in str(error)


def test_a_cooperative_launch_is_refused_before_it_starts() -> None:
    def main(world: Any, programs: int) -> None:
        together_main(world, programs, launch_cooperative_grid=True)

    assert outcome(main, 2, args=(4,), sms=4).failure is None
    found = outcome(main, 2, args=(5,), sms=4)
    assert isinstance(found.error, GridTooLarge)
    assert "all_together: grid 5 > 4 resident programs (4 SMs x 1)" in str(found.error)
    assert "rank 0" in str(found.error)
    assert found.machine.programs == 0


def test_programs_take_the_slots_of_those_that_have_finished() -> None:
    @triton.jit
    def independent(x):
        tl.atomic_add(x, 1)

    def main(world: Any) -> None:
        x = torch.zeros(1, dtype=torch.int32)
        independent[(50,)](x)
        assert x.item() == 50

    assert failures(main, 2, SEEDS, sms=3) == {}


def test_low_program_ids_start_first() -> None:
    """The one that signals has the last index: with fewer slots than programs it never starts."""

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


# -- memory ----------------------------------------------------------------------------------------------------------


@triton.jit
def reach(x, at, peer, world, HOW: tl.constexpr):
    if HOW == "long":
        tl.store(x + at + tl.arange(0, 128), 1.0)
    elif HOW == "load":
        v = pl.load(x + at, peer, world)
        tl.store(x, v)
    elif HOW == "store":
        pl.store(x + at + tl.arange(0, 4), 1.0, peer, world)
    elif HOW == "atomic":
        pl.atomic_add(x + at, 1.0, peer, world)
    else:
        desc = tl.make_tensor_descriptor(pl.peer(x, peer, world), [64, 64], [64, 1], [16, 16])
        desc.store([at, 0], tl.zeros((16, 16), tl.float32))


@pytest.mark.parametrize(("how", "kind"), [("load", "load"), ("store", "store"), ("atomic", "atomic")])
def test_out_of_bounds_of_a_symmetric_tensor(how: str, kind: str) -> None:
    def main(world: Any) -> None:
        _, weights = pkt.zeros(64), pkt.zeros(100)
        if world.rank == 0:
            reach[(1,)](weights, 99 if how == "store" else 100, 1, world.device, how)

    error = outcome(main, 2).error
    assert isinstance(error, OutOfBounds)
    told = str(error)
    assert f"out of bounds: {kind} of byte " in told
    assert " of rank 1's heap by rank 0 reach program 0" in told
    assert "nearest: weights of rank 1" in told
    assert "test_findings.py:" in told


def test_out_of_bounds_by_tma() -> None:
    def main(world: Any) -> None:
        weights = pkt.zeros(32, 64)  # the descriptor says 64 rows
        if world.rank == 0:
            reach[(1,)](weights, 16, 1, world.device, "tma")  # these are inside
            reach[(1,)](weights, 32, 1, world.device, "tma")

    error = outcome(main, 2).error
    assert isinstance(error, OutOfBounds)
    assert "TMA store" in str(error)
    assert "weights of rank 1" in str(error)


@pytest.mark.parametrize("multicast", [True, False])
@pytest.mark.parametrize("peer", [-1, 2, 5])
def test_a_rank_that_does_not_exist(peer: int, multicast: bool) -> None:
    def main(world: Any) -> None:
        weights = pkt.zeros(64)
        reach[(1,)](weights, 3, peer, world.device, "load")

    error = outcome(main, 2, multicast=multicast).error
    assert isinstance(error, OutOfBounds)
    assert f"load of rank {peer}'s weights[3] by rank 0 reach" in str(error)
    assert "peers are ranks 0 to 1" in str(error)


@pytest.mark.parametrize("how", ["load", "store", "atomic", "signal"])
def test_a_peers_copy_of_a_plain_tensor(how: str) -> None:
    def main(world: Any) -> None:
        _, plain = pkt.zeros(64), torch.zeros(64, dtype=torch.int32 if how == "signal" else torch.float32)
        if how == "signal":
            signal_at[(1,)](plain, 3, world.device)
        else:
            reach[(1,)](plain, 3, 0, world.device, how)

    error = outcome(main, 2).error  # rank 0's own copy is there
    assert isinstance(error, OutOfBounds)
    name = "flags" if how == "signal" else "x"
    assert f"of rank 0's {name}[3], a peer's copy of a plain tensor by rank 1 " in str(error)
    assert f"allocate {name} with pkt.empty or its like" in str(error)


@pytest.mark.parametrize("count", [63, 64, 65, 127])
def test_past_the_end_there_is_no_other_tensor(count: int) -> None:
    """Whatever its size; and it is the first element outside that is named."""

    def main(world: Any) -> None:
        weights, _ = pkt.zeros(count), pkt.zeros(1000)
        reach[(1,)](weights, 0, 0, world.device, "long")

    error = outcome(main, 1).error
    assert isinstance(error, OutOfBounds)
    assert "nearest: weights of rank 0, which ends 1 byte before" in str(error)


@triton.jit
def count_launches(flags, world):
    pl.epoch(flags, world)


@pytest.mark.parametrize("which", ["data", "a slice", "plain"])
def test_an_epoch_of_what_has_none(which: str) -> None:
    def main(world: Any) -> None:
        _, data, flags = pkt.zeros(64, dtype=torch.int32), pkt.zeros(64, dtype=torch.int32), pkt.signals(4)
        count_launches[(2,)](flags, world.device)
        odd = {"data": data, "a slice": flags[1:], "plain": torch.zeros(64, dtype=torch.int32)}
        count_launches[(2,)](odd[which], world.device)

    error = outcome(main, 1).error
    assert isinstance(error, SignalIndexError)
    assert "epoch: atomic of " in str(error)
    assert "pass the tensor as pkt.signals gave it" in str(error)


@triton.jit
def a_barrier_each(flags, world):
    pl.barrier(flags + tl.program_id(0), world)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("programs", [3, 40])  # the words beside the counters, and what lies past them
def test_too_few_counters_of_a_barrier(programs: int, seed: int) -> None:
    def main(world: Any) -> None:
        flags = pkt.signals(2)
        a_barrier_each[(programs,)](flags, world.device)

    error = outcome(main, 2, seed).failure
    assert isinstance(error, SignalIndexError if programs == 3 else (SignalIndexError, OutOfBounds))
    assert ("wanted flags[0] to flags[1]" if isinstance(error, SignalIndexError) else "nearest: flags") in str(error)


def test_a_barrier_on_freed_counters() -> None:
    @triton.jit
    def keep(flags, kept):
        tl.store(kept, flags.to(tl.int64))

    @triton.jit
    def use(kept, world):
        pl.barrier(tl.load(kept).to(tl.pointer_type(tl.int32)), world)

    def main(world: Any) -> None:
        flags, kept = pkt.signals(1), torch.zeros(1, dtype=torch.int64)
        keep[(1,)](flags, kept)
        flags.free()
        use[(1,)](kept, world.device)

    assert isinstance(outcome(main, 1).error, UseAfterFree)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_signal_to_what_is_no_counter(dtype: torch.dtype) -> None:
    def main(world: Any) -> None:
        signal_at[(1,)](pkt.zeros(4, dtype=dtype), 0, world.device)

    assert "a counter is int32" in str(outcome(main, 1).error)


@triton.jit
def never_ends(x):
    i = 0
    while i < 1:
        i = i * 1
    tl.store(x, i)


def test_a_loop_that_looks_at_nothing() -> None:
    def main(world: Any) -> None:
        never_ends[(1,)](pkt.zeros(1, dtype=torch.int32))

    error = outcome(main, 1).error
    assert isinstance(error, Deadlock)
    assert "a loop of its own" in str(error)


def test_a_tensor_that_was_freed() -> None:
    @triton.jit
    def keep_pointer(x, keep):
        tl.store(keep, x.to(tl.int64))

    @triton.jit
    def use_pointer(keep, out):
        p = tl.load(keep).to(tl.pointer_type(tl.float32))
        tl.store(out, tl.load(p + 2))

    def main(world: Any) -> None:
        keep, out = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
        weights = pkt.ones(64)
        keep_pointer[(1,)](weights, keep)
        use_pointer[(1,)](keep, out)
        assert out.item() == 1
        weights.free()
        use_pointer[(1,)](keep, out)

    error = outcome(main, 2).error
    assert isinstance(error, UseAfterFree)
    told = str(error)
    r = error.access.rank
    assert (
        f"use after free: load of rank {r}'s weights[2] by rank {r} use_pointer program 0 at test_findings.py:" in told
    )
    assert "freed at test_findings.py:" in told


def test_fresh_memory_holds_nothing_useful() -> None:
    def main(world: Any) -> None:
        x, i = pkt.empty(8), pkt.empty(8, dtype=torch.int32)
        assert x.isnan().all()
        assert (i == -1).all()

    assert failures(main, 2, [0]) == {}


@triton.jit
def signal_at(flags, at, world):
    pl.signal(flags + at, 0, world)


@pytest.mark.parametrize("at", [4, 15, -1, -13])
def test_a_signal_beside_the_counters(at: int) -> None:
    """The words around the counters are nobody's; further out there is no allocation, or another tensor."""

    def main(world: Any) -> None:
        _, mailbox, _ = pkt.zeros(64), pkt.signals(4), pkt.zeros(64)
        signal_at[(1,)](mailbox, at, world.device)

    error = outcome(main, 2).error
    assert isinstance(error, SignalIndexError)
    assert f"signal index: atomic of rank 0's mailbox[{at}] by rank 0 signal_at program 0 at " in str(error)
    assert "wanted mailbox[0] to mailbox[3]" in str(error)


def test_a_signal_far_from_the_counters() -> None:
    def main(world: Any) -> None:
        mailbox = pkt.signals(4)
        signal_at[(1,)](mailbox, 4 + 16 + 100, world.device)

    error = outcome(main, 2).error
    assert isinstance(error, OutOfBounds)
    assert "nearest: mailbox of rank 0" in str(error)


# -- signals ---------------------------------------------------------------------------------------------------------


@triton.jit
def signal_only(flags, world, ALL: tl.constexpr):
    if ALL:
        pl.signal_all(flags + 2, world)
    else:
        pl.signal(flags + 1, 0, world, value=3)


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_signals_nobody_waits_for(seed: int) -> None:
    def main(world: Any, everyone: bool) -> None:
        mailbox = pkt.signals(4)
        signal_only[(1,)](mailbox, world.device, everyone)

    lost = outcome(main, 2, seed, (False,)).findings
    assert [type(f) for f in lost] == [LostSignal]
    site = line_of(signal_only, "pl.signal(")
    assert f"rank 0: mailbox[1] was signalled to 6 by {site} but no wait looked at it" in str(lost[0])
    lost = outcome(main, 2, seed, (True,)).findings
    assert [str(f).split(" was")[0] for f in lost] == ["rank 0: mailbox[2]", "rank 1: mailbox[2]"]


def test_signals_that_a_test_or_a_spin_looks_at_are_not_lost() -> None:
    @triton.jit
    def look(flags, out, world):
        pl.signal(flags, world.rank, world)
        tl.store(out, pl.test(flags, 1, world).to(tl.int32))
        pl.signal(flags + 1, world.rank, world)
        while tl.atomic_add(flags + 1, 0, sem="acquire", scope="sys") < 1:
            pass

    def main(world: Any) -> None:
        out = torch.zeros(1, dtype=torch.int32)
        look[(1,)](pkt.signals(2), out, world.device)
        assert out.item() == 1

    assert failures(main, 2, SEEDS) == {}


# -- hosts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_raises_ends_the_run(seed: int) -> None:
    def main(world: Any) -> None:
        mailbox = pkt.signals(8)
        if world.rank == 1:
            raise KeyError("what went wrong")
        ring[(1,)](mailbox, 9, world.device)

    with pytest.raises(RankFailed) as caught:
        pkt.launch(main, ranks=3, device="cpu", seed=seed)
    told = str(caught.value)
    assert told.startswith("rank 1 raised:\n\nTraceback (most recent call last):\n")
    assert "test_findings.py" in told
    assert "KeyError: 'what went wrong'" in told
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.rank == 1
    assert (f"seed {seed} replays it" in told) is (seed != 0)


def test_a_kernel_that_raises_names_its_line() -> None:
    @triton.jit
    def broken(x):
        y = tl.load(x)
        tl.store(x, y + tl.undefined)

    def main(world: Any) -> None:
        broken[(1,)](torch.zeros(1))

    error = outcome(main, 2).error
    assert isinstance(error, RankFailed)
    assert "in broken\n    tl.store(x, y + tl.undefined)" in str(error)


def test_collective_calls_that_differ() -> None:
    def main(world: Any) -> None:
        if world.rank == 0:
            world.barrier()
        else:
            world.all_gather_object(world.rank)

    error = outcome(main, 3).error
    assert isinstance(error, CollectiveMismatch)
    assert "rank 0: barrier()" in str(error)
    assert "ranks 1, 2: all_gather_object()" in str(error)


def test_allocations_that_differ() -> None:
    def main(world: Any) -> None:
        pkt.zeros(4)
        if world.rank == 2:
            pkt.zeros(16, dtype=torch.bfloat16)
        else:
            pkt.zeros(8, dtype=torch.bfloat16)

    error = outcome(main, 3).error
    assert isinstance(error, pkt.AllocationMismatch)
    told = str(error)
    assert "ranks 0, 1: (8,) bf16 at test_findings.py:" in told
    assert "rank 2: (16,) bf16 at test_findings.py:" in told


def test_an_error_on_the_way_out_does_not_hide_the_first() -> None:
    """Code in `finally` of the ranks that are stopped runs, and what it raises is not the news."""

    def main(world: Any) -> None:
        mailbox = pkt.signals(8)
        try:
            if world.rank == 1:
                raise ValueError("the first")
            ring[(1,)](mailbox, 9, world.device)
        finally:
            if world.rank == 0:
                raise RuntimeError("a later one")

    for seed in SEEDS:
        error = outcome(main, 3, seed).error
        assert isinstance(error, RankFailed)
        if error.rank == 1:
            assert "the first" in str(error)


def test_runs_have_an_end() -> None:
    @triton.jit
    def busy(x):
        while tl.atomic_add(x, 1) < 1_000_000:
            pass

    def main(world: Any) -> None:
        busy[(2,)](torch.zeros(1, dtype=torch.int32))

    error = outcome(main, 1, 1, max_steps=5).error
    assert isinstance(error, Deadlock)
    assert "no end after 5 steps (seed 1 (random)); raise max_steps= for a longer run" in str(error)


# -- what looks like a spin and is none ------------------------------------------------------------------------------


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
def test_no_deadlock(how: str, turns: int, programs: int) -> None:
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
def test_spins_of_all_kinds_end(how: str) -> None:
    def main(world: Any) -> None:
        spins[(2,)](pkt.zeros(8, dtype=torch.int32), how)

    assert isinstance(outcome(main, 1).error, Deadlock)
