"""Replays, faults, mutants and lost signals, `pkt.simulate` and its command line."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import typer
from typer.testing import CliRunner

import pkt
import pkt.language as pl
from pkt.errors import PeerLost, PktError, RankFailed, ShapeError
from pkt.simulate.command import main
from pkt.simulate.explore import Report, _alone, simulate
from pkt.simulate.faults import Faults, Loss, Mutant
from pkt.simulate.findings import DataRace, Deadlock
from pkt.simulate.machine import Machine
from tests.simulate.helpers import failures, line_of, outcome
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


# -- faults ----------------------------------------------------------------------------------------------------------


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
    with pytest.raises(AssertionError, match=r"(?s)faults were not caught:\n  .*wait removed at test_explore.py:\d+"):
        report.check()
    assert "not caught: wait removed at test_explore.py:" in str(report)


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


@pytest.mark.parametrize("option", ["--seeds", "--ranks", "--sms"])
def test_the_command_line_refuses_to_run_nothing(option: str, tmp_path: Path) -> None:
    file = tmp_path / "push.py"
    file.write_text(FILE)
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, [str(file), option, "0"])
    assert result.exit_code == 2
    assert option in result.output


def test_launch_raises_its_first_finding_with_the_others_as_notes() -> None:
    with pytest.raises(DataRace):
        pkt.launch(send_main, ranks=2, device="cpu", args=("no wait",), heap="1MiB")


# -- the command line ------------------------------------------------------------------------------------------------

FILE = """
import torch, triton, triton.language as tl, pkt, pkt.language as pl

@triton.jit
def push(x, out, flags, world, WAIT: tl.constexpr):
    other = (world.rank + 1) % world.size
    pl.store(x, 1, other, world)
    pl.signal(flags, other, world)
    if WAIT:
        pl.wait(flags, 1, world)
    tl.store(out, tl.load(x))
    pl.wait(flags, 1, world)

def main(world):
    run(world, True)

def broken(world):
    run(world, False)

def run(world, wait):
    x, out, flags = pkt.zeros(1), torch.zeros(1), pkt.signals(1)
    push[(1,)](x, out, flags, world.device, wait)
"""


def command(*arguments: str) -> Any:
    """Run the command in this process; a fresh process takes three seconds to import torch."""
    app = typer.Typer()
    app.command()(main)
    return CliRunner(env={"PKT_HEAP": "1MiB"}).invoke(app, [*arguments, "--ranks", "2"])


def test_the_command_line_takes_the_heap_of_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "large.py"
    file.write_text("import pkt\n\ndef main(world):\n    pkt.empty(1 << 20)\n")
    for heap, found in (((), "HeapFull"), (("--heap", "1GiB"), "no finding")):
        assert found in command(str(file), "--seeds", "1", *heap).output


def test_the_command_line_explores_and_replays(tmp_path: Path) -> None:
    file = tmp_path / "push.py"
    file.write_text(FILE)
    good = command(str(file), "--seeds", "5")
    assert good.exit_code == 0, good.output
    assert "schedules on 2 ranks" in good.output
    assert "no finding" in good.output
    bad = command(f"{file}:broken", "--seeds", "5")
    assert bad.exit_code == 1, bad.output
    assert "DataRace in seed " in bad.output
    assert "push.py:" in bad.output
    seed = bad.output.split("DataRace in seed ")[1].split(":")[0]
    again = command(f"{file}:broken", "--seed", seed)
    assert again.exit_code == 1
    assert f"DataRace in seed {seed}:" in again.output
    missing = command(f"{file}:nothing")
    assert missing.exit_code == 2
    assert "it has" in missing.output
    assert "broken" in missing.output


def test_the_command_loads_a_file_as_python_loads_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "lies_beside.py").write_text("def main(world): world.barrier()\n")
    file = tmp_path / "torch.py"
    file.write_text("from lies_beside import main\n")
    assert command(str(file), "--seeds", "2").exit_code == 0
    assert sys.modules["torch"] is torch


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def main(world:", "SyntaxError: '(' was never closed"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("\n\nraise ValueError('no data')", "line 3, in <module>"),
        ("\0", "SyntaxError"),
        ("import sys\n\ndef main(world): world.barrier()\n\nsys.exit(0)", "line 5, in <module>"),
    ],
)
def test_the_command_shows_where_a_file_fails_and_no_line_of_its_own(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(text)
    done = command(str(file))
    assert done.exit_code == 2
    assert "wrong.py cannot be loaded" in done.output
    assert said in done.output
    assert not [frame for frame in ("command.py", "importlib") if frame in done.output]


def test_the_command_runs_as_a_process(tmp_path: Path) -> None:
    file = tmp_path / "push.py"
    file.write_text(FILE)
    main = "from pkt.cli import app; app()"
    asked = [f"{file}:broken", "--ranks", "2", "--seeds", "3", "--heap", "1MiB"]
    command = [sys.executable, "-c", main, "simulate", *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "DataRace in seed " in done.stdout


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
