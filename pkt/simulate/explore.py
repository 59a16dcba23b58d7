"""`pkt.simulate` and its report: many schedules of one program, and of the same program with injected faults."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pkt.errors import DataRace, ShapeError
from pkt.runtime.memory.heap import heap_bytes
from pkt.runtime.world import check_function
from pkt.simulate.faults import NO_FAULTS, Census, Faults, Loss, Mutant, Signal
from pkt.simulate.front_end import Usage, check_compile
from pkt.simulate.interpreter import interpreting
from pkt.simulate.machine import SMS, check_count
from pkt.simulate.run import Outcome, execute
from pkt.simulate.turns import turn

if TYPE_CHECKING:
    from rich.table import Table

TRIES = 24  # schedules in which a mutant or a lost signal may show itself
SHOWN = 5  # different findings a report prints in full


@dataclass(frozen=True)
class Found:
    """A failure in one schedule. `seed`, with `faults` if there are any, replays it exactly."""

    seed: int
    failure: Exception
    faults: Faults = NO_FAULTS

    @property
    def kind(self) -> str:
        return type(self.failure).__name__

    def __str__(self) -> str:
        notes = "".join(f"\n  {note}" for note in getattr(self.failure, "__notes__", ()))
        where = f" with {self.faults}" if self.faults != NO_FAULTS else ""
        return f"{self.kind} in seed {self.seed}{where}: {self.failure}{notes}"


@dataclass(repr=False)
class Report:
    """The result of `pkt.simulate`: the runs and the findings.

    findings: failures of the program as it is; empty if every schedule that ran is right.
    policies: how many schedules of each policy of pkt.simulate.schedule ran.
    orders: one number for each different schedule among them: an order of the programs' accesses, and of the moments
    when their stores became visible.
    mutants, signals, losses: every fault that was tried, with the failure that caught it, or None if nothing did.
    skipped: the kinds of faults that were asked for and not tried, because the program itself has findings.
    kernels: registers, spills and shared memory of each compiled kernel, with `compile`.
    """

    ranks: int
    schedules: int = 0
    policies: Counter[str] = field(default_factory=Counter)
    orders: set[int] = field(default_factory=set)
    programs: int = 0
    seconds: float = 0.0
    findings: list[Found] = field(default_factory=list)
    mutants: dict[Mutant, Found | None] = field(default_factory=dict)
    signals: dict[Signal, Found | None] = field(default_factory=dict)
    losses: dict[Loss, Found | None] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    kernels: list[Usage] = field(default_factory=list)

    @property
    def survivors(self) -> list[Mutant | Signal | Loss]:
        """Faults that nothing caught."""
        return [fault for found in self._tried().values() for fault, by in found.items() if by is None]

    def _tried(self) -> dict[str, dict[Any, Found | None]]:
        return {"mutants": self.mutants, "lost signals": self.signals, "lost ranks": self.losses}

    @property
    def ok(self) -> bool:
        return not self.findings and not self.survivors

    def check(self) -> Report:
        """Return self. Raises the first finding, or an AssertionError that names the faults that nothing caught."""
        if self.findings:
            first = self.findings[0]
            first.failure.add_note(f"seed {first.seed} replays it")
            raise first.failure
        if self.survivors:
            names = "\n  ".join(str(s) for s in self.survivors)
            raise AssertionError(f"{len(self.survivors)} faults were not caught:\n  {names}")
        return self

    def table(self) -> Table:
        from rich.table import Table  # imported here: rich takes longer to import than this whole package

        table = Table(show_header=True, header_style="bold", title_justify="left")
        table.add_column("what")
        table.add_column("runs", justify="right")
        table.add_column("result")
        rate = self.schedules / self.seconds if self.seconds else 0.0
        kinds = sorted({f.kind for f in self.findings})
        table.add_row(
            f"schedules on {self.ranks} ranks",
            str(self.schedules),
            f"no finding ({rate:.0f} a second)" if not kinds else f"{len(self.findings)} found: {', '.join(kinds)}",
        )
        policies = [f"{count} {policy}" for policy, count in self.policies.items()]
        table.add_row("different schedules", str(len(self.orders)), ", ".join(policies))
        for what, found in self._tried().items():
            if found:
                caught = sum(by is not None for by in found.values())
                table.add_row(what, str(len(found)), f"{caught} caught, {len(found) - caught} not")
            elif what in self.skipped:
                table.add_row(what, "0", "skipped: the program itself has findings")
        for usage in self.kernels:
            table.add_row(f"{usage.kernel}, sm_{usage.arch}", "", str(usage))
        return table

    def __repr__(self) -> str:
        found = f"{len(self.findings)} findings, {len(self.survivors)} faults not caught"
        return f"Report({self.schedules} schedules on {self.ranks} ranks: {found})"

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        import html  # here, because only notebooks need it

        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=110, color_system=None)
        with console.capture() as out:
            console.print(self.table())
            for found in self.findings[:SHOWN]:
                console.print(f"\n{found}", markup=False, highlight=False)
            if len(self.findings) > SHOWN:
                console.print(f"\n... and {len(self.findings) - SHOWN} more")
            for survivor in self.survivors:
                console.print(f"not caught: {survivor}", markup=False, highlight=False)
        return out.get().rstrip()


def simulate(
    fn: Callable[..., Any],
    ranks: int = 4,
    seeds: int | Iterable[int] = 1000,
    args: Sequence[Any] = (),
    *,
    heap: int | str | None = None,
    sms: int = SMS,
    multicast: bool = True,
    races: bool = True,
    mutants: bool = False,
    lost_signals: bool = False,
    lost_ranks: int = 0,
    progress: bool | None = None,
    max_findings: int = 20,
    compile: str | None = None,
) -> Report:
    """Run `fn(world, *args)` on `ranks` simulated ranks under many schedules and report every failure.

    fn: checks its own results (assert, or raise) and launches its kernels as on GPUs.
    seeds: the number of schedules, or the seeds themselves; seed 0 is the plain order.
    sms: programs that fit on a rank at once.
    races: run the race detector. Without it a missing order still shows as a wrong value in some schedule.
    mutants: also remove or weaken every wait, signal, barrier and fence in turn.
    lost_signals: also drop every single signal of the plain schedule in turn.
    lost_ranks: also stop or kill a rank, at this many random points. Some schedule must catch each of these faults.
    progress: show a bar with the time left; None: on a terminal and in a notebook.
    max_findings: stop after this many different findings.
    compile: "sm_90" or "sm_100" compiles each kernel to machine code for that target, too, and reports what it takes of
    an SM. By default Triton's front end alone sees it.

    Never raises for a finding; `Report.check` does. Raises ShapeError if the arguments leave nothing to run."""
    check_function("pkt.simulate", fn, args)
    try:
        todo = list(range(seeds) if isinstance(seeds, int) else seeds)
    except TypeError:
        todo = []
    if not todo or not all(isinstance(seed, int) for seed in todo):
        raise ShapeError.argument("pkt.simulate", "seeds", repr(seeds), "a number of schedules, or the seeds of some")
    if isinstance(lost_ranks, bool) or not isinstance(lost_ranks, int) or lost_ranks < 0:
        raise ShapeError.argument("pkt.simulate", "lost_ranks", repr(lost_ranks), "an integer from 0")
    check_count("pkt.simulate", "max_findings", max_findings)
    check_compile("pkt.simulate", compile)
    report = Report(ranks)
    options: dict[str, Any] = {"sms": sms, "multicast": multicast, "races": races, "compile": compile}

    def once(seed: int, faults: Faults = NO_FAULTS) -> Outcome:
        outcome = execute(fn, ranks, tuple(args), heap_bytes(heap), seed=seed, faults=faults, **options)
        report.programs += outcome.machine.programs
        report.kernels += [usage for usage in outcome.machine.usage if usage not in report.kernels]
        return outcome

    seen: dict[Hashable, Exception] = {}
    start = time.perf_counter()
    with turn("pkt.simulate"), _bar(progress) as step, interpreting():
        census = Census()
        for seed in step(todo, "schedules"):
            outcome = once(seed)
            report.schedules += 1
            report.policies[outcome.machine.schedule.policy] += 1
            report.orders.add(outcome.machine.order)
            for site, changes in outcome.machine.census.sites.items():
                census.note(site, *changes)
            if not census.signals:
                census.signals = outcome.machine.census.signals
            failure = outcome.failure
            if failure is not None:
                known = seen.setdefault(_same(failure), failure)
                if known is failure:
                    report.findings.append(Found(seed, failure))
                for note in set(getattr(failure, "__notes__", ())) - set(getattr(known, "__notes__", ())):
                    known.add_note(note)  # a cause that shows in this schedule only
            if len(report.findings) >= max_findings:
                break
        report.seconds = time.perf_counter() - start
        if report.findings:
            wanted = {"mutants": mutants, "lost signals": lost_signals, "lost ranks": lost_ranks}
            report.skipped = [what for what, asked in wanted.items() if asked]
            return report
        if mutants:
            for mutant in step(census.mutants(), "mutants"):
                report.mutants[mutant] = _caught(once, Faults(mutant=mutant))
        if lost_signals:
            for signal in step(census.signals, "lost signals"):
                report.signals[signal] = _caught(once, Faults(drop=signal))
        if lost_ranks:
            steps = once(0).machine.steps
            chance = random.Random(ranks)
            for _ in step(range(lost_ranks), "lost ranks"):
                loss = Loss(chance.randrange(ranks), chance.randrange(steps), dies=chance.random() < 0.5)
                outcome = once(0, Faults(lose=loss))
                if outcome.machine.lost:  # the rank had work left to do
                    failure = outcome.failure
                    report.losses[loss] = None if failure is None else Found(0, failure, Faults(lose=loss))
    return report


def _same(failure: Exception) -> Hashable:
    """Equal for two failures that are one finding: a race whatever its ranks and its direction, else an equal text."""
    return failure.pair if isinstance(failure, DataRace) else str(failure)


def _caught(once: Callable[..., Outcome], faults: Faults) -> Found | None:
    for seed in range(TRIES):
        failure = once(seed, faults).failure
        if failure is not None:
            return Found(seed, failure, faults)
    return None


@contextmanager
def _bar(shown: bool | None) -> Iterator[Callable[[Sequence[Any], str], Iterator[Any]]]:
    """Yield a function that wraps a loop's items in a progress bar, or only iterates if not `shown`."""
    if shown is None:
        shown = sys.stderr.isatty() or "ipykernel" in sys.modules
    if not shown:
        yield lambda items, what: iter(items)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield lambda items, what: iter(progress.track(items, description=what))
