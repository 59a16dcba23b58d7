"""Ranks that are processes: Ctrl-C on one of them, ranks that leave, worlds beside each other."""

import os
import signal
import threading
import time
from functools import partial

import pytest

from pkt.errors import CandidateMismatch, CollectiveMismatch, PeerLost, WaitTimeout
from pkt.model.config import Config
from pkt.runtime.processes.rendezvous import prepare
from pkt.runtime.workers.interrupts import Interrupts
from pkt.tune import choice, tune
from pkt.tune.autotune import autotune
from tests.runtime.conftest import run as in_threads
from tests.runtime.forked import fake_world, in_worlds
from tests.runtime.forked import run as in_processes

from .helpers import Rough, anything, candidates


def press(rank, n, times=1):
    """Ctrl-C on `rank` while it measures candidate `n`."""

    def then(here, measured):
        if (here, measured) == (rank, n):
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    return then


def main_thread(main):
    """As in a script: Ctrl-C raises KeyboardInterrupt."""

    def with_handler(world):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with world:
            return main(world)

    return with_handler


def values(ends):
    errors = [end.error for end in ends if end.error]
    assert not errors, errors
    return [end.value for end in ends]


# ------------------------------------------------------------------------------------------------------------ Ctrl-C
@pytest.mark.parametrize("rank", [0, 2])
def test_an_interrupt_on_one_rank_keeps_the_best_so_far_on_all(rank):
    def main(world):
        rough = partial(Rough, seconds=lambda n: 9.0 - n, then=press(rank, 3))
        found = tune(anything, configs=candidates(8), model=lambda c, key: c["n"], name="op", timer=rough)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler was not given back"
        return found, choice("op", {}, world)

    found = values(in_worlds(3, main_thread(main)))
    assert found[0] == found[1] == found[2]
    search, kept = found[0]
    assert search.interrupted
    assert search.best == Config(n=3), "candidate 3 was measured to its end"
    assert [bool(c.times) for c in search.candidates] == [True] * 4 + [False] * 4
    assert kept is None, "the next run searches again"


def test_autotune_goes_on_with_the_best_so_far():
    def main(world):
        rough = partial(Rough, seconds=lambda n: 9.0 - n, then=press(1, 4))
        fn = autotune(candidates(8), model=lambda c, key: c["n"], timer=rough)(lambda n: n)
        return fn(), fn()

    assert values(in_worlds(2, main_thread(main))) == [(4, 4)] * 2


def test_an_interrupt_before_the_first_time_ends_all_ranks():
    def main(world):
        def pressed(n):
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            autotune(candidates(8), timer=Rough)(pressed)()
        return world.all_gather_object("still here")

    assert values(in_worlds(2, main_thread(main))) == [["still here"] * 2] * 2


def test_a_second_ctrl_c_is_raised_at_once():
    class Hanging(Rough):
        def first(self, config, run):
            if self.world.rank == 0:
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(60)

    def main(world):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(PeerLost if world.rank else KeyboardInterrupt), world:
            tune(anything, configs=candidates(8), timer=Hanging)

    start = time.monotonic()
    ends = in_worlds(2, main)
    values(ends)
    assert max(end.at for end in ends) - start < 50, "the wait was not cut short"


def test_another_handler_of_the_signal_stays():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupts_that_last_together_share_the_signal():
    """Simulated ranks share it, and leave in any order."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        first, second = Interrupts(), Interrupts()
        with first:
            second.__enter__()
            os.kill(os.getpid(), signal.SIGINT)
        assert first.asked
        assert second.asked
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        second.__exit__(None, None, None)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


# -------------------------------------------------------------------------------------------------------- leaving
def test_survivors_name_a_dead_rank():
    def main(world):
        def die(rank, n):
            if rank == 1 and n == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        with world, pytest.raises(PeerLost, match="rank 1"):
            tune(anything, configs=candidates(8), timer=partial(Rough, then=die))

    ends = in_worlds(3, main)
    assert ends[1].died == signal.SIGKILL
    assert [end.error for end in ends if end.rank != 1] == [None, None]


def test_tuning_ends_if_the_worlds_waits_were_cut_short():
    """All later kernels would fail, and their errors would hide the one that says who waits for what."""

    def main(world):
        def aborted():
            raise WaitTimeout.of(f"rank {world.rank}: who waits for what")

        def hang(n):
            world.backend.synchronize = aborted
            aborted()

        with pytest.raises(WaitTimeout, match=f"rank {world.rank}: who waits") as caught:
            tune(hang, configs=candidates(8), model=lambda c, key: c["n"], timer=Rough)
        assert caught.value.__notes__ == [f"rank {world.rank} was tuning hang: the first run of Config(n=0)"]

    in_threads(2, main)


# ------------------------------------------------------------------------------------------------------- subgroups
def test_worlds_over_subgroups_tune_by_themselves():
    """4 processes form one world, and two worlds of two ranks, in which the fast configs and their number differ."""
    whole, halves = prepare(), [prepare(), prepare()]

    def main(process):
        everyone = fake_world(whole, process, 4)
        half = process // 2
        with everyone:
            with fake_world(halves[half], process % 2, 2) as mine:
                count = 4 + 4 * half
                rough = partial(Rough, seconds=lambda n: 1.0 + abs(n - 3 * half), slow=(half,))
                alone = tune(anything, configs=candidates(count), key={"half": half}, timer=rough)
                assert mine.size == 2
            together = tune(anything, configs=candidates(8), timer=partial(Rough, seconds=lambda n: 9.0 - n))
        return alone, together

    try:
        found = values(in_processes(4, main))
    finally:
        for meeting in (whole, *halves):
            meeting.remove()
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert [found[0][0].best["n"], found[2][0].best["n"]] == [0, 3]
    assert [len(found[0][0].candidates), len(found[2][0].candidates)] == [4, 8]
    assert {together.best["n"] for _, together in found} == {7}


def test_every_rank_learns_of_the_error_before_which_the_others_wait():
    def main(world):
        def lonely(n):
            if world.rank == 1:
                raise ValueError("no luck")
            world.barrier()

        with world, pytest.raises(CollectiveMismatch) as caught:
            tune(lonely, configs=candidates(2), timer=Rough)
        return str(caught.value)

    said = "rank 0: barrier(); rank 1: tuning lonely after ValueError: no luck: every rank"
    assert [said in text for text in values(in_worlds(2, main))] == [True, True]


@pytest.mark.parametrize("other", [0, 1, 2])
@pytest.mark.parametrize("what", ["candidates", "case"])
def test_any_one_of_three_ranks_that_differs_is_named(other, what):
    """The one in the middle, too, between two that agree."""

    def main(world):
        differs = world.rank == other
        configs = candidates(4)[1 if differs and what == "candidates" else 0 :]
        key = {"m": 2 if differs and what == "case" else 1}
        with pytest.raises(CandidateMismatch if what == "candidates" else CollectiveMismatch) as caught:
            tune(anything, configs=configs, key=key, timer=Rough)
        return str(caught.value)

    said = in_threads(3, main)
    assert len(set(said)) == 1
    assert f"rank {other}" in said[0]
