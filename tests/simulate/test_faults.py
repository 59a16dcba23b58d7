"""Mutants, lost signals and lost ranks: each is made, counted and reported."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import triton

import pkt
import pkt.language as pl
from pkt.errors import PeerLost, PktError, RankFailed
from pkt.simulate.explore import _alone, simulate
from pkt.simulate.faults import Faults, Loss, Mutant
from pkt.simulate.findings import DataRace, Deadlock
from tests.simulate.helpers import line_of, outcome

from .test_explore import exchange, exchange_main, to_all_main

pytestmark = pytest.mark.machine


def signals() -> list:
    return outcome(exchange_main, 2).machine.census.signals


def test_every_signal_is_counted() -> None:
    """Two launches of two ranks: two signals each, and a barrier's arrival at either rank."""
    found = signals()
    assert len(found) == 2 * 2 * (2 + 2)
    assert len(set(found)) == len(found)
    text = str(found[0])
    assert "signal 0 of rank 0 program 0 launch 1 to rank 1's mailbox[0]" in text
    assert line_of(exchange, "pl.signal(flags, right") in text


def test_every_dropped_signal_is_reported() -> None:
    for signal in signals():
        found = outcome(exchange_main, 2, faults=Faults(drop=signal))
        assert isinstance(found.failure, Deadlock), signal
        owner, counter = str(signal.target).split("'s ")
        waits = {(f"rank {w.rank}", w.counter): (w.wanted, w.found) for w in found.failure.waits}
        assert (owner, counter) in waits, signal
        if counter != "mailbox[2]":  # mailbox[2] is the barrier's
            assert waits[owner, counter] == (signal.launch, signal.launch - 1)


def test_a_duplicated_signal_is_found() -> None:
    """An extra signal ends a later wait too early: a race, wrong values or a barrier out of step."""
    for signal in signals():
        if signal.launch == 1:
            faults = Faults(duplicate=signal)
            assert any(outcome(exchange_main, 2, seed, (3,), faults=faults).failure for seed in range(60)), signal


def test_a_delayed_signal_is_no_error() -> None:
    for signal in signals():
        for seed in (0, 1, 3):
            assert outcome(exchange_main, 2, seed, faults=Faults(delay=signal)).failure is None, signal


def test_a_report_holds_no_heap_of_a_caught_fault() -> None:
    held: list[weakref.ref] = []

    def main(world: Any) -> None:
        held.append(weakref.ref(world))  # it has the heap
        exchange_main(world, 1)

    report = simulate(main, 2, seeds=1, heap="1MiB", lost_signals=True, lost_ranks=2).check()
    gc.collect()
    assert len(report.signals) > 1
    assert len(report.losses) == 2
    assert not any(world() is not None for world in held)


def test_the_heap_of_a_caught_fault_goes_at_once() -> None:
    """The garbage collector would leave it for long, and the next run's heap would be at another address."""
    held: list[weakref.ref] = []

    def main(world: Any) -> None:
        held.append(weakref.ref(world.backend.machine.space._bytes))
        world.keep("a value that refers to the world", lambda: (world, pkt.empty(4)))
        exchange_main(world, 1)

    gc.disable()
    try:
        simulate(main, 2, seeds=1, heap="1MiB", lost_signals=True, lost_ranks=2).check()
        assert not any(memory() is not None for memory in held)
    finally:
        gc.enable()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", [ValueError, PktError])
def test_a_fault_may_show_as_an_error_that_is_its_own_cause(kind: type[Exception]) -> None:
    """`raise error from error` makes one."""

    def main(world: Any) -> None:
        exchange_main(world)
        error = kind("wrong")
        raise error from error

    found = _alone(outcome(main, 2))
    assert isinstance(found, RankFailed if kind is ValueError else PktError)


def test_an_error_of_pkt_in_a_rank_is_not_made_its_own_cause() -> None:
    def main(world: Any) -> None:
        raise PktError("wrong")

    found = outcome(main, 2).error
    assert isinstance(found, PktError)
    assert found.__cause__ is None


@pytest.mark.parametrize("dies", [False, True])
def test_a_rank_that_stops_or_dies_is_reported(dies: bool) -> None:
    steps, lost = outcome(exchange_main, 2).machine.steps, 0
    for step in range(steps):
        for rank in (0, 1):
            found = outcome(exchange_main, 2, faults=Faults(lose=Loss(rank, step, dies)))
            if not found.machine.lost:  # it had nothing left to do
                continue
            lost += 1
            assert isinstance(found.failure, PeerLost if dies else Deadlock), (rank, step)
            notes = "".join(getattr(found.failure, "__notes__", ()))
            if dies:
                assert f"rank {rank} died at step {step}" in str(found.failure)
            else:
                assert f"rank {rank} stopped at step {step}" in notes
    assert lost >= steps, "each rank has work left at most steps"


def test_every_call_has_mutants_and_all_are_caught() -> None:
    report = simulate(
        exchange_main, 2, seeds=20, args=(3,), heap="1MiB", mutants=True, lost_signals=True, lost_ranks=10
    )
    assert report.findings == []
    assert [str(s) for s in report.survivors] == []
    assert report.ok
    assert report.check() is report
    sites = {(m.site.line, m.change) for m in report.mutants}

    def at(text: str) -> int:
        return int(line_of(exchange, text).split(":")[1])

    for text in (
        "pl.signal(flags, right",
        "pl.signal(flags + 1",
        "pl.wait(flags, ep",
        "pl.wait(flags + 1",
        "pl.barrier(",
    ):
        assert (at(text), "remove") in sites, text
        assert (at(text), "relax") in sites, text
    assert (at("pl.signal(flags + 1"), "no drain") in sites
    assert (at("pl.wait(flags, ep"), "no proxy fence") in sites
    assert len(report.signals) == 24
    assert report.losses
    kinds = {found.kind for found in report.mutants.values() if found is not None}
    assert {"Deadlock", "DataRace"} <= kinds
    message = str(report)
    assert f"{len(report.mutants)} caught, 0 not" in message
    assert "24 caught, 0 not" in message


def test_a_mutant_makes_one_change_only() -> None:
    """Without the drain a TMA store has not landed; without the proxy fence a TMA load comes too early."""
    census = outcome(exchange_main, 2).machine.census
    by_change: dict[str, list[Mutant]] = {}
    for mutant in census.mutants():
        by_change.setdefault(mutant.change, []).append(mutant)
    for seed in range(3):
        (drain,) = [m for m in by_change["no drain"] if m.site.call == "signal"]
        race = outcome(exchange_main, 2, seed, faults=Faults(mutant=drain)).failure
        assert isinstance(race, DataRace)
        assert "TMA store" in {race.first.kind, race.second.kind}
        proxy = by_change["no proxy fence"][0]
        race = outcome(exchange_main, 2, seed, faults=Faults(mutant=proxy)).failure
        assert isinstance(race, DataRace)
        assert {race.first.kind, race.second.kind} == {"TMA load", "store"}


def test_the_mutant_of_an_unused_wait_survives_and_is_named() -> None:
    @triton.jit
    def twice(flags, world):
        pl.signal(flags, world.rank, world)
        pl.wait(flags, 1, world)
        pl.wait(flags, 1, world)

    def main(world: Any) -> None:
        twice[(1,)](pkt.signals(1), world.device)

    report = simulate(main, 2, seeds=3, heap="1MiB", mutants=True)
    assert not report.ok
    assert report.findings == []
    lines = {m.site.line for m in report.survivors}
    assert lines
    with pytest.raises(AssertionError, match=r"(?s)faults were not caught:\n  .*wait removed at test_faults.py:\d+"):
        report.check()
    assert "not caught: wait removed at test_faults.py:" in str(report)


def test_faults_that_were_skipped_are_said_to_be() -> None:
    asked: dict[str, Any] = {"mutants": True, "lost_ranks": 1}
    wrong = simulate(to_all_main, 3, seeds=2, args=(False,), heap="1MiB", **asked)
    assert wrong.skipped == ["mutants", "lost ranks"]
    assert not wrong.mutants
    lines = [line for line in str(wrong).splitlines() if "skipped: the program itself has findings" in line]
    assert [line.split()[1] for line in lines] == ["mutants", "lost"]
    right = simulate(to_all_main, 2, seeds=2, args=(True,), heap="1MiB", **asked)
    assert right.skipped == []
    assert "skipped" not in str(right)
