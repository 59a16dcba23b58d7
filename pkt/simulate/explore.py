"""`pkt.simulate` and its report: many schedules of one program, and of the same program with injected faults."""

from __future__ import annotations

import functools
import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pkt.errors import RankFailed, ShapeError
from pkt.runtime.memory.heap import heap_bytes
from pkt.runtime.world import check_counts, check_flags, check_function
from pkt.simulate.faults import NO_FAULTS, Census, Change, Faults, Loss, Mutant, Signal, Site
from pkt.simulate.findings import DataRace, Deadlock
from pkt.simulate.front_end import Usage, check_compile
from pkt.simulate.interpreter import interpreting
from pkt.simulate.machine import SMS
from pkt.simulate.run import Outcome, execute
from pkt.simulate.turns import turn
from pkt.wording import count_text, html_text, rendered

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
            were = "fault was" if len(self.survivors) == 1 else "faults were"
            raise AssertionError(f"{len(self.survivors)} {were} not caught:\n  {names}")
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
            f"schedules on {count_text(self.ranks, 'rank')}",
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
        runs = f"{count_text(self.schedules, 'schedule')} on {count_text(self.ranks, 'rank')}"
        found = f"{count_text(len(self.findings), 'finding')}, {count_text(len(self.survivors), 'fault')} not caught"
        return f"Report({runs}: {found})"

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        return html_text(str(self))

    def __str__(self) -> str:
        lines = [f"\n{found}" for found in self.findings[:SHOWN]]
        if len(self.findings) > SHOWN:
            lines.append(f"\n... and {len(self.findings) - SHOWN} more")
        lines += [f"not caught: {survivor}" for survivor in self.survivors]
        return "\n".join([rendered(self.table()), *lines])


def simulate(
    fn: Callable[..., Any],
    ranks: int = 4,
    seeds: int | Iterable[int] = 1000,
    args: Sequence[Any] = (),
    *,
    node_size: int | None = None,
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
    processes: int | None = None,
) -> Report:
    """Run `fn(world, *args)` on `ranks` simulated ranks under many schedules and report every failure.

    fn: checks its own results (assert, or raise) and launches its kernels as on GPUs.
    seeds: the number of schedules, or the seeds themselves; seed 0 is the plain order.
    node_size: ranks of a node, a divisor of `ranks`; None: one node. See docs/scale-out.md.
    sms: programs that fit on a rank at once.
    races: run the race detector. Without it a missing order still shows as a wrong value in some schedule.
    mutants: also remove or weaken every wait, signal, barrier and fence in turn.
    lost_signals: also drop every single signal of the plain schedule in turn.
    lost_ranks: also stop or kill a rank, at this many random points. Some schedule must catch each of these faults.
    progress: show a bar with the time left; None: on a terminal and in a notebook.
    max_findings: stop after this many different findings.
    compile: "sm_90" or "sm_100" compiles each kernel to machine code for that target, too, and reports what it takes of
    an SM. By default Triton's front end alone sees it.
    processes: how many forked processes share the runs, once these have taken a moment; None: one a core, or 1 where
    this process has other threads, has used CUDA, or is a test's. What `fn` keeps outside its ranks stays in the
    process that ran it; findings and counts do not depend on the number.

    Never raises for a finding; `Report.check` does. Raises ShapeError if the arguments leave nothing to run."""
    check_function("pkt.simulate", fn, args)
    check_flags("pkt.simulate", races=races, multicast=multicast, mutants=mutants, lost_signals=lost_signals)
    check_flags("pkt.simulate", **({} if progress is None else {"progress": progress}))
    todo = _checked(seeds)
    if isinstance(lost_ranks, bool) or not isinstance(lost_ranks, int) or lost_ranks < 0:
        raise ShapeError.argument("pkt.simulate", "lost_ranks", repr(lost_ranks), "an integer from 0")
    check_counts("pkt.simulate", max_findings=max_findings)
    check_compile("pkt.simulate", compile)
    check_counts("pkt.simulate", processes=1 if processes is None else processes)
    run = functools.partial(
        execute, fn, ranks, tuple(args), heap_bytes(heap), node_size=node_size, sms=sms, multicast=multicast,
        races=races, compile=compile,
    )  # fmt: skip
    report = Report(ranks)
    runs = _Runs(report, run, progress, processes)
    start = time.perf_counter()
    with turn("pkt.simulate"), interpreting():
        census = runs.schedules(todo, max_findings)
        report.seconds = time.perf_counter() - start
        if report.findings:
            wanted = {"mutants": mutants, "lost signals": lost_signals, "lost ranks": lost_ranks}
            report.skipped = [what for what, asked in wanted.items() if asked]
            return report
        if mutants:
            report.mutants = runs.caught("mutants", census.mutants(), lambda mutant: Faults(mutant=mutant))
        if lost_signals:
            report.signals = runs.caught("lost signals", census.signals, lambda signal: Faults(drop=signal))
        if lost_ranks:
            report.losses = runs.lost(lost_ranks)
    return report


def _checked(seeds: Any) -> Sequence[int]:
    """The seeds to run. Raises ShapeError."""
    todo: Sequence[int] = []
    with suppress(TypeError):
        todo = range(seeds) if isinstance(seeds, int) else list(seeds)
    if type(seeds) is bool or not todo or not (isinstance(seeds, int) or all(type(seed) is int for seed in todo)):
        raise ShapeError.argument("pkt.simulate", "seeds", repr(seeds), "a number of schedules, or the seeds of some")
    return todo


class _Runs:
    """The runs of one program, in this process and in forked ones. Their counts are added to `report`."""

    def __init__(
        self, report: Report, run: Callable[..., Outcome], progress: bool | None, processes: int | None
    ) -> None:
        """run: `execute`, with all but seed, faults and brief."""
        self.report, self._run, self._progress, self._processes = report, run, progress, processes
        self._tally = _Tally()

    def once(self, seed: int, faults: Faults = NO_FAULTS, brief: bool = False) -> Outcome:
        outcome = self._run(seed=seed, faults=faults, brief=brief)
        self._tally.programs += outcome.machine.programs
        self._tally.kernels |= outcome.machine.usage
        return outcome

    def results(self, what: str, items: Sequence[Any], call: Callable[[Any], Any]) -> Generator[Any, None, None]:
        """call(item) for each of `items`. what: their name in the progress bar."""
        from pkt.progress import steps as shown  # here, because importing pkt should load little
        from pkt.simulate.processes import each

        def tallied(item: Any) -> tuple[Any, _Tally]:
            self._tally = _Tally()
            return call(item), self._tally

        report = self.report
        with closing(each(tallied, items, self._processes)) as found:
            for result, counts in shown(found, what, self._progress, len(items)):
                report.programs += counts.programs
                report.kernels += [usage for usage in counts.kernels if usage not in report.kernels]
                yield result

    def schedules(self, seeds: Sequence[int], max_findings: int) -> Census:
        """Run the program as it is, until there are `max_findings`. Returns what can be broken in it."""
        report, census = self.report, Census()
        seen: dict[Hashable, Exception] = {}
        with closing(self.results("schedules", seeds, lambda seed: _Ran.of(self.once(seed), census))) as schedules:
            for ran, seed in zip(schedules, seeds):
                report.schedules += 1
                report.policies[ran.policy] += 1
                report.orders.add(ran.order)
                for site, changes in ran.sites.items():
                    census.note(site, *changes)
                census.signals = census.signals or ran.signals
                failure = ran.failure
                if failure is not None:
                    known = seen.setdefault(_same(failure), failure)
                    if known is failure:
                        report.findings.append(Found(seed, failure))
                    # A cause may show in this schedule only. Notes of a deadlock are about the ranks of its schedule.
                    notes = () if isinstance(failure, Deadlock) else getattr(failure, "__notes__", ())
                    for note in set(notes) - set(getattr(known, "__notes__", ())):
                        known.add_note(note)
                if len(report.findings) >= max_findings:
                    break
        return census

    def caught(self, what: str, broken: Sequence[Any], faults: Callable[[Any], Faults]) -> dict[Any, Found | None]:
        """Each of `broken`, with the failure that caught it, or None."""
        return dict(zip(broken, self.results(what, broken, lambda one: _caught(self.once, faults(one)))))

    def lost(self, count: int) -> dict[Loss, Found | None]:
        """As `caught`, for ranks lost at `count` random points. Without those of ranks that had no work left."""
        (steps,) = self.results("lost ranks", [0], lambda seed: self.once(seed).machine.steps)
        losses = _losses(self.report.ranks, count, steps)
        found = self.results("lost ranks", losses, lambda loss: _lost(self.once, loss))
        return {loss: by for loss, (had_work, by) in zip(losses, found) if had_work}


@dataclass
class _Tally:
    """What some runs add to the counts of a report."""

    programs: int = 0
    kernels: dict[Usage, None] = field(default_factory=dict)


@dataclass
class _Ran:
    """What a report takes from one schedule. Processes send it to each other."""

    failure: Exception | None
    policy: str
    order: int
    sites: dict[Site, set[Change]]
    signals: list[Signal]

    @classmethod
    def of(cls, outcome: Outcome, known: Census) -> _Ran:
        """known: the census of earlier schedules, which need not be repeated."""
        machine = outcome.machine
        sites = {s: c for s, c in machine.census.sites.items() if not c <= known.sites.get(s, set())}
        signals = [] if known.signals else machine.census.signals
        return cls(outcome.failure, machine.schedule.policy, machine.order, sites, signals)


def _same(failure: Exception) -> Hashable:
    """Equal for two failures that are one finding: a race whatever its ranks and its direction, a deadlock in the same
    lines whatever the ranks, the programs and the counters, an exception of the same lines whatever its values, else an
    equal text, apart from the seed."""
    if isinstance(failure, DataRace):
        return failure.pair
    if isinstance(failure, Deadlock) and failure.waits:
        return type(failure), frozenset((wait.kernel, wait.site) for wait in failure.waits)
    if isinstance(failure, RankFailed):
        lines = failure.traceback.splitlines()
        return tuple(line for line in lines if line.startswith("  File ")) or failure.traceback
    return str(failure)


def _caught(once: Callable[..., Outcome], faults: Faults) -> Found | None:
    for seed in range(TRIES):
        failure = _alone(once(seed, faults, brief=True))
        if failure is not None:
            return Found(seed, failure, faults)
    return None


def _alone(outcome: Outcome) -> Exception | None:
    """The failure of a run with a fault, without the frames of its traceback, as another process would send it. They
    hold the run's heap, and a report of hundreds of faults would hold as many heaps. The next run's heap is then where
    this one's was, and so are the constants that follow from its address."""
    error: BaseException | None = outcome.error
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # an error may be its own cause
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    outcome.discard()
    return outcome.failure


def _losses(ranks: int, count: int, steps: int) -> list[Loss]:
    chance = random.Random(ranks)
    return [Loss(chance.randrange(ranks), chance.randrange(steps), dies=chance.random() < 0.5) for _ in range(count)]


def _lost(once: Callable[..., Outcome], loss: Loss) -> tuple[bool, Found | None]:
    """Whether the loss kept a rank from anything, and the failure that caught it."""
    faults = Faults(lose=loss)
    outcome = once(0, faults)
    failure = _alone(outcome)
    return outcome.machine.lost, None if failure is None else Found(0, failure, faults)
