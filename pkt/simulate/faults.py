"""Faults to inject: mutants of the synchronisation code, lost signals, ranks that stop or die.

A site is a call of a pkt synchronisation function in a user's kernel. A run without faults finds the sites and the
signals. Each is then broken in turn, and a fault that no schedule catches shows a gap in the checks."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pkt.wording import file_text

Change = Literal["remove", "relax", "no drain", "no proxy fence", "not sc"]

# Calls that synchronise and get mutants. Accesses of atomic_*, load and store have sites too, but get none.
SYNC = frozenset(
    "signal signal_all put_signal wait barrier grid_barrier world_barrier fence quiet barrier_all sync_all signal_op "
    "signal_wait_until putmem_signal putmem_signal_nbi broadcast put_flagged take_flagged "
    "take_flagged_all store_release load_acquire".split()
)
# Of these calls, those whose pointer is a counter of pkt.signals.
COUNTING = SYNC - frozenset(
    "fence quiet put_flagged take_flagged take_flagged_all store_release load_acquire".split()
) | {"test"}
READS = frozenset({"load_acquire"})  # of these calls, those that only read: they can be relaxed, not removed or lost


class Site(NamedTuple):
    """A line of a user's kernel and the outermost function of pkt.language it calls there ("" for plain tl)."""

    file: str
    line: int
    call: str

    def __str__(self) -> str:
        return f"{file_text(self.file)}:{self.line}"


@dataclass(frozen=True)
class Mutant:
    """One change of one site, the same in every program that reaches it."""

    site: Site
    change: Change

    def __str__(self) -> str:
        what = {
            "remove": "{} removed",
            "relax": "{} without its memory order",
            "no drain": "{} before TMA stores have landed",
            "no proxy fence": "{} without the fence for TMA loads",
            "not sc": "{} with sc=False",
        }[self.change]
        return f"{what.format(self.site.call)} at {self.site}"


@dataclass(frozen=True)
class Signal:
    """The n-th signal (from 0) that one program of one launch sent."""

    rank: int
    launch: int
    program: int
    n: int
    site: Site
    counter: Any = field(compare=False, repr=False)  # () -> the counter's name; made only where a message needs it

    @property
    def target(self) -> str:
        return self.counter()

    def __getstate__(self) -> dict[str, Any]:
        """For another process: without the memory that `counter` holds."""
        return vars(self) | {"counter": functools.partial(str, self.target)}

    def __str__(self) -> str:
        sender = f"rank {self.rank} program {self.program} launch {self.launch}"
        return f"signal {self.n} of {sender} to {self.target} at {self.site}"


@dataclass(frozen=True)
class Loss:
    """A rank that runs nothing from `step` of the scheduler on: it stands still or, if `dies`, its process is gone."""

    rank: int
    step: int
    dies: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} {'died' if self.dies else 'stopped'} at step {self.step}"


@dataclass(frozen=True)
class Faults:
    """The faults that are injected into one run."""

    mutant: Mutant | None = None
    drop: Signal | None = None
    duplicate: Signal | None = None
    delay: Signal | None = None
    lose: Loss | None = None

    def change(self, site: Site) -> Change | None:
        return self.mutant.change if self.mutant is not None and self.mutant.site == site else None

    def __str__(self) -> str:
        said = [
            str(self.mutant) if self.mutant else "",
            f"dropped: {self.drop}" if self.drop else "",
            f"sent twice: {self.duplicate}" if self.duplicate else "",
            f"delayed: {self.delay}" if self.delay else "",
            str(self.lose) if self.lose else "",
        ]
        return "; ".join(s for s in said if s)


NO_FAULTS = Faults()


@dataclass
class Census:
    """The sites and signals of a run that can be broken."""

    sites: dict[Site, set[Change]] = field(default_factory=dict)
    signals: list[Signal] = field(default_factory=list)

    def note(self, site: Site, *changes: Change) -> None:
        known = self.sites.get(site)
        if known is None:
            known = self.sites[site] = set()
        known.update(changes)

    def mutants(self) -> list[Mutant]:
        return [
            Mutant(s, c)
            for s in sorted(self.sites, key=lambda s: (s.file, s.line, s.call))
            for c in sorted(self.sites[s])
        ]
