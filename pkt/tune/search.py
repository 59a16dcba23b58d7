"""A search: which candidates are measured, how often, when it stops, and its result."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pkt.errors import NoCandidate
from pkt.model.config import Config
from pkt.progress import Advance, bar
from pkt.runtime.workers.interrupts import Interrupts
from pkt.runtime.world import World
from pkt.tune.timers import Timer
from pkt.tune.votes import Votes
from pkt.wording import count_text, html_text, ranks_text, table

MOST = 0.12  # largest share of the candidates that is measured
LEAST = 8  # fewest candidates that are measured
REPEATS = 3  # of every candidate that is measured; each round doubles them for candidates that stay
MOST_REPEATS = 24
HEAT = 0.3
"""Seconds of work before the first repeat that counts, if a launch takes longer than HEATING. Power limits the clock of
a GPU that has worked for a while, so candidates measured before that would win by as much as a tenth."""
HEATING = 1e-3
SHOWN = 8  # candidates that a notebook shows
CLOSE = 0.005  # a smaller relative difference of two times is not worth another repeat

Model = Callable[[Config, Mapping[str, Any]], "float | None"]
"""Predicted seconds of a config for a key; None where nothing can be predicted."""


@dataclass(frozen=True)
class Candidate:
    """A config and its part in a search.

    predicted: seconds, by the model. times: seconds of each repeat, the maximum over ranks; empty if not measured.
    dropped: why it was left out, naming the rank; "" if it was not.
    """

    config: Config
    predicted: float | None = None
    times: tuple[float, ...] = ()
    dropped: str = ""

    @property
    def time(self) -> float | None:
        """Median of the times, in seconds."""
        return statistics.median(self.times) if self.times else None

    @property
    def scatter(self) -> float:
        """Greatest minus least of the times, in seconds."""
        return max(self.times) - min(self.times)


@dataclass(frozen=True, repr=False)
class Search:
    """The result of a search, the same on every rank.

    what: the operator or kernel. key: the case. candidates: in the order that rank 0 fixed. best: None if every
    candidate was dropped or none could be measured. seconds: duration of the search on rank 0. interrupted: Ctrl-C
    ended it.
    """

    what: str
    key: Mapping[str, Any]
    candidates: tuple[Candidate, ...]
    best: Config | None
    seconds: float
    interrupted: bool = False

    @property
    def measured(self) -> list[Candidate]:
        """The candidates that were measured and right, the fastest first."""
        return sorted((c for c in self.candidates if c.times and not c.dropped), key=lambda c: c.time or 0.0)

    def __repr__(self) -> str:
        measured = sum(bool(c.times) for c in self.candidates)
        return f"Search({self.what}: {measured} of {len(self.candidates)} measured, best {self.best})"

    def _repr_html_(self) -> str:
        """As a notebook shows it: the fastest candidates. pkt.tune.report has the whole table."""
        rows = [(f"{1e3 * (c.time or 0.0):.4g}", c.config) for c in self.measured[:SHOWN]]
        case = ", ".join(f"{name}={value}" for name, value in self.key.items())
        return html_text(f"{self!r}\n{case}\n{table(('ms', 'settings'), rows)}")


class Work(Protocol):
    """A call to be tuned, with the arguments of one case."""

    what: str

    def compile(self, configs: Sequence[Config], threads: int, begin: float) -> dict[int, str]:
        """Compile all and launch none. Returns the index of each config that cannot be compiled, and why. begin: where
        in the list to begin, from 0 to 1."""

    def scope(self) -> AbstractContextManager[None]:
        """Collective: a context for all work with one config; the config holds no symmetric memory after it."""

    def run(self, config: Config) -> Any:
        """Launch once."""

    def verify(self, config: Config, result: Any) -> None:
        """Raise if the `result` of `run` is wrong."""

    restores: bool  # whether `restore` has anything to do

    def restore(self) -> None:
        """Give the arguments the values that they had before the first run."""


def slots(count: int, most: float) -> int:
    """How many of `count` candidates may be measured. most: the largest share."""
    return min(count, max(LEAST, int(most * count)))


def search(
    world: World,
    timer: Timer,
    work: Work,
    key: Mapping[str, Any],
    order: Sequence[tuple[Config, float | None]],
    most: float = MOST,
) -> Search:
    """Collective: the fastest of the candidates, by successive halving.

    order: configs with predicted seconds, the same on every rank. The first that compile and run everywhere, as many as
    `slots` says, are measured REPEATS times, in turns. Then rounds follow: the faster half stays, without those that
    are further behind the best than the times of both scatter, and each of them gets twice as many repeats, again in
    turns. The search ends when one candidate is left, or all that are left are within CLOSE of the best or have
    MOST_REPEATS. A time is the median over repeats of the maximum over ranks; of equal times the first in order wins.
    Raises NoCandidate if every candidate was dropped.
    """
    start = time.perf_counter()
    shown = None if world.rank == 0 else False
    with Interrupts() as interrupts, bar(f"tuning {work.what}", slots(len(order), most), shown) as advance:
        votes = Votes(world, work.what, interrupts)
        state = _State([Candidate(config, predicted) for config, predicted in order], votes, timer, work)
        state.admit(slots(len(order), most), advance)
        state.halve()
    best = state.ranked()
    if work.restores:
        work.restore()
    # All ranks have found the same, and rank 0 still decides.
    decision: tuple[int, float] = (best[0] if best else -1, time.perf_counter() - start)
    chosen, seconds = world.broadcast(decision)
    found = tuple(state.candidates)
    if chosen < 0 and not votes.stopped:
        raise NoCandidate.left(work.what, {repr(c.config): c.dropped for c in found if c.dropped})
    config = found[chosen].config if chosen >= 0 else None
    return Search(work.what, dict(key), found, config, seconds, votes.stopped)


class _State:
    """The candidates so far. All ranks take every step together, so they hold the same after each."""

    def __init__(self, candidates: list[Candidate], votes: Votes, timer: Timer, work: Work) -> None:
        self.candidates, self.votes, self.timer, self.work = candidates, votes, timer, work

    def ranked(self) -> list[int]:
        """Indices of the candidates that were measured and not dropped, the fastest first."""
        measured = [(c.time, i) for i, c in enumerate(self.candidates) if c.time is not None and not c.dropped]
        return [i for _, i in sorted(measured)]

    def admit(self, count: int, advance: Advance) -> None:
        """Measure the first `count` that compile and run, REPEATS times, once in each turn, so that a changing clock
        favours no candidate."""
        admitted = begin = 0
        while admitted < count and begin < len(self.candidates) and not self.votes.stopped:
            batch = range(begin, min(len(self.candidates), begin + count - admitted))
            begin = batch.stop
            for i in self.compiled(batch):
                if self.votes.stopped:
                    return
                with self.work.scope():
                    measured = self.runs(i) and not self.votes.stopped and self.measure(i, 1)
                    if measured and not admitted:
                        self.heat(i)
                if measured and not self.candidates[i].dropped:
                    admitted += 1
                    advance(f"best {1e6 * (self.candidates[self.ranked()[0]].time or 0.0):,.1f} µs")
        first = sorted(self.ranked())
        self.turns(first * (REPEATS - 1), dict.fromkeys(first, 1))

    def compiled(self, batch: range) -> list[int]:
        """Indices of the candidates that compile on every rank."""
        if not self.timer.threads:
            return list(batch)
        configs = [self.candidates[i].config for i in batch]
        world = self.votes.world

        def alone() -> dict[str, str]:  # JSON's keys are text
            failures = self.work.compile(configs, self.timer.threads, world.rank / world.size)
            return {str(batch[n]): why for n, why in failures.items()}

        values, failed = self.votes.step(alone, "compiling")
        for i in batch:
            reasons = {rank: said[str(i)] for rank, said in enumerate(values) if said and str(i) in said}
            if failed or reasons:
                self.drop(i, failed or ranks_text(reasons))
        return [i for i in batch if not self.candidates[i].dropped]

    def runs(self, i: int) -> bool:
        """Whether candidate `i` runs, and is right, on every rank."""
        work, config = self.work, self.candidates[i].config

        def alone() -> None:
            work.verify(config, self.timer.first(config, lambda: work.run(config)))

        failed = ""
        if work.restores:  # no rank runs before every rank has restored
            _, failed = self.votes.step(work.restore, "restore")
        if not failed:
            _, failed = self.votes.step(alone, f"the first run of {config}")
        if failed:
            self.drop(i, failed)
        return not failed

    def measure(self, i: int, repeats: int) -> bool:
        """`repeats` more times of candidate `i`."""
        candidate = self.candidates[i]
        config = candidate.config
        values, failed = self.votes.step(
            lambda: self.timer.times(config, lambda: self.work.run(config), repeats), f"measuring {config}"
        )
        if not failed:
            failed = ranks_text({r: _odd(times, repeats) for r, times in enumerate(values) if _odd(times, repeats)})
        if failed:
            self.drop(i, failed)
            return False
        slowest = tuple(max(times) for times in zip(*values))
        self.candidates[i] = replace(candidate, times=candidate.times + slowest)
        return True

    def turns(self, order: Sequence[int], repeats: Mapping[int, int]) -> None:
        """Measure the candidates in `order`, each with so many more repeats."""
        for i in order:
            if self.votes.stopped:
                return
            if not self.candidates[i].dropped:
                with self.work.scope():
                    self.measure(i, repeats[i])

    def heat(self, i: int) -> None:
        """Run candidate `i` until the GPU is warm, then measure it again."""
        cold = self.candidates[i]
        if HEATING < (cold.time or 0.0) < HEAT / REPEATS and self.measure(i, math.ceil(HEAT / (cold.time or HEAT))):
            self.candidates[i] = replace(cold, times=())
            self.measure(i, 1)

    def halve(self) -> None:
        """Measure the best ones again until it is clear which is fastest. A candidate that was left out comes back if
        those before it fall behind it."""
        left = self.ranked()
        keep = len(left)
        while len(left) > 1 and not self.votes.stopped:
            best, time = self.candidates[left[0]], self.median(left[0])
            keep = max(2, math.ceil(keep / 2))
            rivals = [i for i in left[:keep] if self.median(i) - time <= self.candidates[i].scatter + best.scatter]
            far = any(self.median(i) > time * (1 + CLOSE) for i in rivals)
            again = [i for i in rivals if len(self.candidates[i].times) < MOST_REPEATS]
            if not far or not again:
                return
            self.turns(again * REPEATS, {i: len(self.candidates[i].times) // REPEATS for i in again})
            left = self.ranked()

    def median(self, i: int) -> float:
        return statistics.median(self.candidates[i].times)

    def drop(self, i: int, why: str) -> None:
        self.candidates[i] = replace(self.candidates[i], dropped=why)


def _odd(times: Any, repeats: int) -> str:
    """Why a rank's times cannot be used, in words; "" if they can."""
    if len(times) != repeats:
        return f"gave {count_text(len(times), 'time')}, wanted {repeats}"
    return next((f"took {t} s" for t in times if not 0 <= t < math.inf), "")
