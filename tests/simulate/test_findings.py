"""The simulator reports signals that nobody waits for, and host code that raises or disagrees between ranks."""

from __future__ import annotations

import re
import sys
import traceback
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.errors import CollectiveMismatch, LostSignal, RankFailed, ShapeError
from pkt.simulate.findings import Deadlock
from tests.simulate.helpers import failures, line_of, outcome

pytestmark = pytest.mark.machine

SEEDS = range(6)


# -- signals ---------------------------------------------------------------------------------------------------------


@triton.jit
def signal_only(flags, world, ALL: tl.constexpr):
    if ALL:
        pl.signal_all(flags + 2, world)
    else:
        pl.signal(flags + 1, 0, world, value=3)


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_signals_that_nobody_waits_for_are_reported(seed: int) -> None:
    def main(world: Any, everyone: bool) -> None:
        mailbox = pkt.signals(4)
        signal_only[(1,)](mailbox, world.device, everyone)

    lost = outcome(main, 2, seed, (False,)).findings
    assert [type(f) for f in lost] == [LostSignal]
    site = line_of(signal_only, "pl.signal(")
    assert f"rank 0: mailbox[1] was signalled to 6 by {site} but no wait looked at it" in str(lost[0])
    lost = outcome(main, 2, seed, (True,)).findings
    assert [str(f).split(" was")[0] for f in lost] == ["rank 0: mailbox[2]", "rank 1: mailbox[2]"]


def test_signals_read_by_a_test_or_a_spin_are_not_lost() -> None:
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


@triton.jit
def lend(x, full, empty, steps, world, SLOTS: tl.constexpr):
    """Rank 0 sends `steps` values through SLOTS slots of rank 1, which returns a credit for each."""
    for step in range(steps):
        slot, lap = step % SLOTS, step // SLOTS
        if world.rank == 0:
            if lap > 0:
                pl.wait(empty + slot, lap, world)
            pl.store(x + slot, step, 1, world)
            pl.signal(full + slot, 1, world)
        else:
            pl.wait(full + slot, lap + 1, world)
            tl.load(x + slot)
            pl.signal(empty + slot, 0, world)


@pytest.mark.parametrize("meant", [False, True])
def test_credits_that_are_left_over_can_be_said_to_be_meant(meant: bool) -> None:
    def main(world: Any, steps: int) -> None:
        x, full, empty = pkt.zeros(4, dtype=torch.int32), pkt.signals(4), pkt.signals(4, unwaited=meant)
        lend[(1,)](x, full, empty, steps, world.device, 4)

    @triton.jit
    def unheard(flags, world):
        pl.signal(flags, 0, world)

    def other(world: Any) -> None:
        credits, flags = pkt.signals(1, unwaited=meant), pkt.signals(1)
        unheard[(1,)](credits, world.device)
        unheard[(1,)](flags, world.device)

    assert failures(main, 2, SEEDS, args=(8,)) == {}
    left = failures(main, 2, SEEDS, args=(2,))  # the credits of slots that are not used again
    assert {seed: type(error) for seed, error in left.items()} == ({} if meant else dict.fromkeys(SEEDS, LostSignal))
    for seed in SEEDS:
        lost = [str(f) for f in outcome(other, 2, seed).findings]
        assert len(lost) == (1 if meant else 2)
        assert "rank 0: flags[0] was signalled to 2" in lost[-1]
        assert "if it is meant, allocate with pkt.signals(n, unwaited=True)" in lost[-1]


def test_a_counter_that_the_next_kernel_loads_is_not_lost() -> None:
    @triton.jit
    def count(flags, world):
        pl.signal(flags, 0, world)

    @triton.jit
    def report(flags, out, READS: tl.constexpr):
        if READS:
            tl.store(out, tl.load(flags))

    def main(world: Any, reads: bool) -> None:
        flags, out = pkt.signals(1), torch.zeros(1, dtype=torch.int32)
        count[(1,)](flags, world.device)
        world.barrier()
        report[(1,)](flags, out, reads)
        assert out.item() == (2 if reads and world.rank == 0 else 0)

    assert failures(main, 2, SEEDS, args=(True,)) == {}
    assert all(isinstance(error, LostSignal) for error in failures(main, 2, SEEDS, args=(False,)).values())
    assert len(failures(main, 2, SEEDS, args=(False,))) == len(SEEDS)


# -- hosts -----------------------------------------------------------------------------------------------------------


@triton.jit
def never_comes(flags, world):
    pl.wait(flags, 9, world)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_raises_ends_the_run(seed: int) -> None:
    def main(world: Any) -> None:
        mailbox = pkt.signals(8)
        if world.rank == 1:
            raise KeyError("what went wrong")
        never_comes[(1,)](mailbox, world.device)

    with pytest.raises(RankFailed) as caught:
        pkt.launch(main, ranks=3, device="cpu", seed=seed)
    message = str(caught.value)
    assert message.startswith("rank 1 raised:\n\nTraceback (most recent call last):\n")
    assert "test_findings.py" in message
    assert "KeyError: 'what went wrong'" in message
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.rank == 1
    assert (f"seed {seed} replays it" in message) is (seed != 0)


def test_a_rank_that_calls_sys_exit_does_not_end_the_caller() -> None:
    """On GPUs, too, it is an error of the rank."""

    def main(world: Any) -> None:
        if world.rank == 1:
            sys.exit(0)
        world.barrier()

    with pytest.raises(RankFailed, match="rank 1 raised:(.|\n)*SystemExit: 0"):
        pkt.launch(main, ranks=3, device="cpu")
    (found,) = pkt.simulate(main, ranks=3, seeds=2, max_findings=1).findings
    assert isinstance(found.failure, RankFailed)


def simulators(error: Any) -> list[str]:
    """The functions of the simulator that a traceback goes through."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__) if "pkt/simulate" in frame.filename]


def test_a_rank_that_raises_shows_its_own_lines_only() -> None:
    def main(world: Any) -> None:
        raise ValueError("on purpose")

    with pytest.raises(RankFailed) as caught:
        pkt.launch(main, ranks=2, device="cpu")
    assert simulators(caught.value.__cause__) == []
    assert "pkt/simulate" not in str(caught.value)
    assert 'in main\n    raise ValueError("on purpose")' in str(caught.value)
    assert simulators(caught.value) == ["run"]


def test_an_error_of_pkt_shows_the_line_of_the_rank_that_made_it() -> None:
    def main(world: Any) -> None:
        pkt.empty(-1)

    with pytest.raises(ShapeError) as caught:
        pkt.launch(main, ranks=2, device="cpu")
    assert simulators(caught.value) == ["run"]
    assert "main" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_a_kernel_that_raises_names_its_line() -> None:
    @triton.jit
    def broken(x):
        y = tl.load(x)
        tl.device_assert(y > 0, "not positive")

    def main(world: Any) -> None:
        broken[(1,)](torch.zeros(1))

    error = outcome(main, 2).error
    assert isinstance(error, RankFailed)
    assert 'in broken\n    tl.device_assert(y > 0, "not positive")' in str(error)


def test_different_collective_calls_are_reported() -> None:
    def main(world: Any) -> None:
        if world.rank == 0:
            world.barrier()
        else:
            world.all_gather_object(world.rank)

    error = outcome(main, 3).error
    assert isinstance(error, CollectiveMismatch)
    assert "rank 0: barrier()" in str(error)
    assert "ranks 1, 2: all_gather_object()" in str(error)


@pytest.mark.parametrize("other", ["all_gather", "all_reduce"])
def test_a_call_that_one_rank_has_made_before_and_another_has_not_is_reported(other: str) -> None:
    """Ranks compare first calls only: rank 0 launches, and the others wait to compare."""

    def main(world: Any) -> None:
        pkt.all_gather(torch.ones(8))
        if world.rank == 0:
            pkt.all_gather(torch.ones(8))
        else:
            getattr(pkt, other)(torch.ones(12))

    for seed in (0, 1, 2):
        error = outcome(main, 3, seed).error
        assert isinstance(error, CollectiveMismatch)
        before = (
            r"rank 0: all_gather\(\) at test_findings.py:\d+, a call that it made before, and waits in launch 2 of "
        )
        assert re.search(before, str(error))
        assert re.search(rf"ranks 1, 2: {other}\(x=\(12,\) float32, .*\) at test_findings.py:\d+: every", str(error))


def test_a_wait_in_a_launch_that_all_ranks_made_stays_a_deadlock() -> None:
    """Rank 0 waits for what nobody sends, while the others make the next call for the first time."""

    @triton.jit
    def forgotten(flags, world):
        if world.rank == 0:
            pl.wait(flags, 1, world)

    def main(world: Any) -> None:
        flags = pkt.signals(1)
        forgotten[(1,)](flags, world.device)
        if world.rank == 0:
            world.synchronize()
        pkt.all_gather(torch.ones(8))

    error = outcome(main, 3).error
    assert isinstance(error, Deadlock)
    assert "rank 0: forgotten program 0 waits on flags[0]" in str(error)


def test_different_allocations_are_reported() -> None:
    def main(world: Any) -> None:
        pkt.zeros(4)
        if world.rank == 2:
            pkt.zeros(16, dtype=torch.bfloat16)
        else:
            pkt.zeros(8, dtype=torch.bfloat16)

    error = outcome(main, 3).error
    assert isinstance(error, pkt.AllocationMismatch)
    message = str(error)
    assert "ranks 0, 1: (8,) bf16 at test_findings.py:" in message
    assert "rank 2: (16,) bf16 at test_findings.py:" in message


def test_an_error_in_finally_does_not_hide_the_first() -> None:
    """The other ranks' code in `finally` runs, but its errors are not reported."""

    def main(world: Any) -> None:
        mailbox = pkt.signals(8)
        try:
            if world.rank == 1:
                raise ValueError("the first")
            never_comes[(1,)](mailbox, world.device)
            world.synchronize()
        finally:
            if world.rank == 0:
                raise RuntimeError("a later one")

    for seed in SEEDS:
        error = outcome(main, 3, seed).error
        assert isinstance(error, RankFailed)
        assert error.rank == 1
        assert "the first" in str(error)
