"""Explorations: seeds replay, findings are counted once, reports, and what `pkt.simulate` refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.errors import RankFailed, ShapeError
from pkt.simulate.explore import Report, simulate
from pkt.simulate.findings import DataRace, Deadlock
from pkt.simulate.machine import Machine
from tests.simulate.helpers import failures, outcome
from tests.simulate.test_races import gather_main, send_main
from tests.simulate.test_races_tma import tile_in_main, tile_out_main

pytestmark = pytest.mark.machine

# -- a right program with every call that can be broken --------------------------------------------------------------


@triton.jit
def exchange(x, tiles, out, back, flags, world, N: tl.constexpr):
    """Send two messages to the right neighbour: plain stores, which it loads by TMA, and a TMA store, which it loads
    plainly. After the barrier the next launch may overwrite them."""
    o = tl.arange(0, N * N)
    epoch = pl.epoch(flags, world)
    right = (world.rank + 1) % world.size
    pl.store(x + o, o * 0 + epoch, right, world)
    pl.signal(flags, right, world)
    desc = tl.make_tensor_descriptor(pl.peer(tiles, right, world), [N, N], [N, 1], [N, N])
    desc.store([0, 0], tl.zeros((N, N), tl.int32) + epoch * 10)
    pl.signal(flags + 1, right, world)
    pl.wait(flags, epoch, world)
    mine = tl.make_tensor_descriptor(x, [N, N], [N, 1], [N, N])
    tl.store(out + o, mine.load([0, 0]).reshape((N * N,)))
    pl.wait(flags + 1, epoch, world)
    tl.store(back + o, tl.load(tiles + o))
    pl.barrier(flags + 2, world)


def exchange_main(world: Any, launches: int = 2) -> None:
    n = 8
    x, tiles = (pkt.zeros((n, n), dtype=torch.int32) for _ in range(2))
    out, back = (torch.zeros(n * n, dtype=torch.int32) for _ in range(2))
    mailbox = pkt.signals(3)
    for i in range(launches):
        exchange[(1,)](x, tiles, out, back, mailbox, world.device, n)
        assert (out == i + 1).all(), "wrong values"
        assert (back == 10 * (i + 1)).all(), "wrong tiles"


def test_the_program_is_right() -> None:
    assert failures(exchange_main, 2) == {}
    assert failures(exchange_main, 2, races=False) == {}
    assert failures(exchange_main, 3, range(20)) == {}


# -- replay ----------------------------------------------------------------------------------------------------------


def history(monkeypatch: pytest.MonkeyPatch, fn: Any, ranks: int, seed: int, args: tuple) -> tuple[list, list]:
    """The order in which the tasks ran, and every finding."""
    steps: list[tuple] = []
    switch = Machine._switch

    def record(self: Machine, task: Any) -> None:
        steps.append((task.rank, task.name, task.index, task.accesses))
        switch(self, task)

    with monkeypatch.context() as patch:
        patch.setattr(Machine, "_switch", record)
        found = outcome(fn, ranks, seed, args)
    message = [str(found.error), *(str(f) + str(getattr(f, "__notes__", "")) for f in found.findings)]
    return steps, [re.sub(r" at 0x\w+>", "", text) for text in message]  # addresses of objects in pytest's assertions


PROGRAMS = [(gather_main, 3, ("none",)), (send_main, 2, ("relaxed wait",)), (tile_out_main, 2, ("no drain",))]


@pytest.mark.parametrize(("fn", "ranks", "args"), PROGRAMS, ids=lambda p: getattr(p, "__name__", str(p)))
def test_a_seed_replays_exactly(monkeypatch: pytest.MonkeyPatch, fn: Any, ranks: int, args: tuple) -> None:
    seen = set()
    for seed in range(10):
        first = history(monkeypatch, fn, ranks, seed, args)
        assert history(monkeypatch, fn, ranks, seed, args) == first
        seen.add(str(first[0]))
    assert len(seen) >= 8  # other seeds give other orders


def test_a_finding_of_an_exploration_replays_alone() -> None:
    report = simulate(gather_main, 3, seeds=40, args=("none",), heap="1MiB")
    assert report.findings
    assert report.schedules == 40
    for found in report.findings:
        alone = simulate(gather_main, 3, seeds=[found.seed], args=("none",), heap="1MiB")
        assert [str(f) for f in alone.findings] == [str(found)]
        with pytest.raises(type(found.failure)) as raised:
            pkt.launch(gather_main, ranks=3, device="cpu", args=("none",), seed=found.seed, heap="1MiB")
        assert str(raised.value) == str(found.failure)


@pytest.mark.parametrize(("fn", "ranks", "args"), PROGRAMS, ids=lambda p: getattr(p, "__name__", str(p)))
def test_a_brief_run_ends_at_the_first_race(fn: Any, ranks: int, args: tuple) -> None:
    """As those of mutants and lost signals do, which are caught by then."""
    shorter = 0
    for seed in range(10):
        whole, brief = (outcome(fn, ranks, seed, args, brief=brief) for brief in (False, True))
        assert str(brief.failure) == str(whole.failure)
        assert type(brief.failure) is type(whole.failure)
        shorter += brief.machine.steps < whole.machine.steps
    assert shorter


# -- the report ------------------------------------------------------------------------------------------------------


def test_a_report_without_findings_is_ok() -> None:
    report = simulate(exchange_main, 2, seeds=5, heap="1MiB")
    assert isinstance(report, Report)
    assert report.ok
    assert (report.schedules, report.programs) == (5, 5 * 2 * 2)
    assert report.seconds > 0
    assert "no finding" in str(report)


def test_a_report_names_the_seed() -> None:
    report = simulate(gather_main, 3, seeds=40, args=("constant",), heap="1MiB", max_findings=2)
    assert len(report.findings) == 2
    first = report.findings[0]
    assert f"DataRace in seed {first.seed}: data race: " in str(report)
    with pytest.raises(DataRace) as raised:
        report.check()
    assert f"seed {first.seed} replays it" in raised.value.__notes__


@triton.jit
def to_all(x, flags, world, WAIT: tl.constexpr):
    for i in tl.static_range(1, world.size):
        pl.store(x + world.rank, 1.0, (world.rank + i) % world.size, world)
    pl.signal_all(flags, world)
    if WAIT:
        pl.wait(flags, world.size, world)
    tl.load(x + (world.rank + 1) % world.size)
    pl.wait(flags, world.size, world)


def to_all_main(world: Any, waits: bool) -> None:
    x, flags = pkt.zeros(world.size), pkt.signals(1)
    to_all[(1,)](x, flags, world.device, waits)


def test_a_race_is_one_finding_whatever_the_ranks_and_the_direction() -> None:
    report = simulate(to_all_main, 3, seeds=40, args=(False,), heap="1MiB")
    races = [outcome(to_all_main, 3, seed, (False,)).failure for seed in range(40)]
    assert len({str(race) for race in races}) >= 4  # other ranks, and both directions
    (found,) = report.findings
    assert isinstance(found.failure, DataRace)
    name, lines = found.failure.pair
    assert (name, {kind for kind, _ in lines}) == ("x", {"store", "load"})
    assert simulate(to_all_main, 3, seeds=40, args=(True,), heap="1MiB").ok


@triton.jit
def only_two(tickets, world, LINES: tl.constexpr):
    """All but the first two to come wait for ever, the last one in another line if LINES is 2."""
    ticket = pl.atomic_add(tickets, 1, 0, world)
    if ticket == 3 and LINES == 2:
        while pl.load_acquire(tickets + 2, 0, world) == 0:
            pass
    elif ticket >= 2:
        while pl.load_acquire(tickets + 1, 0, world) == 0:
            pass


@pytest.mark.parametrize("lines", [1, 2])
def test_a_deadlock_is_one_finding_whatever_the_ranks(lines: int) -> None:
    def main(world: Any) -> None:
        only_two[(1,)](pkt.zeros(3, dtype=torch.int32), world.device, lines)

    deadlocks = [outcome(main, 4, seed).failure for seed in range(40)]
    assert len({str(error) for error in deadlocks}) >= 4
    (found,) = simulate(main, 4, seeds=40, heap="1MiB").findings
    assert isinstance(found.failure, Deadlock)
    assert len({wait.site for wait in found.failure.waits}) == lines
    (returned,) = found.failure.__notes__  # none of another schedule
    assert not any(str(wait.rank) in returned for wait in found.failure.waits)


def test_a_failed_assertion_is_one_finding_whatever_its_values() -> None:
    @triton.jit
    def take(tickets, out, world):
        tl.store(out, pl.atomic_add(tickets, 1, 0, world))

    def main(world: Any, second: bool) -> None:
        tickets, out = pkt.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        take[(1,)](tickets, out, world.device)
        if second:
            assert world.rank != 2 or out.item() == 2, f"took {out.item()}"
        assert out.item() == world.rank, f"rank {world.rank} took {out.item()}"

    errors = {str(outcome(main, 4, seed, (False,)).failure) for seed in range(20)}
    assert len(errors - {"None"}) >= 4
    assert [type(f.failure) for f in simulate(main, 4, seeds=20, args=(False,), heap="1MiB").findings] == [RankFailed]
    assert len(simulate(main, 4, seeds=20, args=(True,), heap="1MiB").findings) == 2  # of two lines


def test_two_races_of_one_tensor_are_two_findings() -> None:
    @triton.jit
    def twice(x, world):
        tl.store(pl.peer(x, 0, world), 1.0)
        tl.store(pl.peer(x + 1, 0, world), 2.0)

    def main(world: Any) -> None:
        twice[(1,)](pkt.zeros(2), world.device)

    pairs = {race.pair for race in outcome(main, 2).findings}
    assert len(pairs) == 2


def test_seeds_may_be_chosen() -> None:
    report = simulate(tile_in_main, 2, seeds=[3, 1], args=("raw",), heap="1MiB")
    assert report.schedules == 2
    assert {f.seed for f in report.findings} <= {1, 3}


@pytest.mark.parametrize(
    ("option", "value"),
    [("seeds", 0), ("seeds", -1), ("seeds", []), ("ranks", 0), ("sms", 0), ("sms", True), ("max_findings", 0)],
)
def test_simulate_refuses_to_run_nothing(option: str, value: Any) -> None:
    with pytest.raises(ShapeError, match=f"{option}: found .*, wanted "):
        simulate(lambda world: None, **{option: value})


def test_launch_raises_its_first_finding_with_the_others_as_notes() -> None:
    with pytest.raises(DataRace):
        pkt.launch(send_main, ranks=2, device="cpu", args=("no wait",), heap="1MiB")


@triton.jit
def take_tickets(queue, out, world, N: tl.constexpr):
    for i in range(N):
        tl.store(out + i, tl.atomic_add(pl.peer(queue, 0, world), 1, sem="relaxed", scope="sys"))


def test_some_schedules_alternate_single_accesses() -> None:
    """In 1 of 20 interleavings of three tickets each, the two ranks take turns."""

    def main(world: Any) -> None:
        queue, out = pkt.zeros(1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        take_tickets[(1,)](queue, out, world.device, 3)
        assert out.tolist() not in ([0, 2, 4], [1, 3, 5])

    assert len(failures(main, 2, range(120))) >= 3


def test_the_report_counts_policies_and_different_schedules() -> None:
    report = simulate(exchange_main, 2, seeds=12, heap="1MiB")
    assert report.policies == {"in order": 1, "adversarial": 3, "random": 2, "late atomics": 4, "uniform": 2}
    assert len(report.orders) == 12
    assert "different schedules" in str(report)
    assert "2 uniform" in str(report)
    alone = simulate(lambda world: None, 1, seeds=12, heap="1MiB")  # a rank that does nothing has one schedule
    assert (alone.schedules, len(alone.orders)) == (12, 1)


def test_a_report_is_short_in_a_shell_and_a_table_in_a_notebook() -> None:
    report = simulate(lambda world: None, 2, seeds=3, heap="1MiB")
    assert repr(report) == "Report(3 schedules on 2 ranks: 0 findings, 0 faults not caught)"
    assert "schedules on 2 ranks" in report._repr_html_()
