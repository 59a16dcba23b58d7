"""The things that a machine runs.

Task             one program of a grid, or the host code of one rank
Launch           one grid on one rank; at most `sms` of its programs are resident
Host             one rank
Meeting          a collective call of the hosts
Trial            the search for the cause of a deadlock
Turn             a stretch of one program, where all programs spin
"""

from __future__ import annotations

import contextvars
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import greenlet
import numpy as np
import torch

from pkt.simulate.faults import Site
from pkt.simulate.loops import Loop
from pkt.simulate.modes import modes
from pkt.simulate.source import builder
from pkt.trace import Event, Signal


@dataclass(slots=True, eq=False)
class Task:
    """One greenlet and the machine's state for it."""

    greenlet: Any
    rank: int
    name: str
    launch: Launch | None = None
    program: tuple[int, int, int] = (0, 0, 0)
    index: int = 0
    lane: int = 0
    column: int = 0
    clock: Any = None
    tma_clock: Any = None  # clocks that this program's TMA loads are ordered after
    async_clock: int = 0
    scope: str = "system"  # scope of its last atomic
    size: int = 0  # bytes of an element of that
    fence_clock: Any = None
    unacquired: list[Any] = field(default_factory=list)
    pending: list[Any] = field(default_factory=list)
    blocked: Any = None
    polls: int = 0
    progress: int = -1
    time: float = 0.0
    intervals: list[list] = field(default_factory=list)  # kind, start, end, tile, wait and the signal that ended it
    mark: str = "compute"
    tile: int | None = None  # that the marked region works on
    signals: int = 0
    satisfied_by: str | None = None
    accesses: int = 0
    waits: set[Any] = field(default_factory=set)  # sites of the waits so far
    touched: set[int] = field(default_factory=set)  # first addresses of its accesses while it may have been in a spin
    last: Any = None  # the last load: first address, number of elements, number of the access
    repeats: int = 0
    loops: dict[int, Loop] = field(default_factory=dict)  # the `while` loops that it is in, by number
    looking: list[tuple] = field(default_factory=list)  # expressions that it is in and that may decide about loops
    strays: list[int] = field(default_factory=list)  # its addresses that it moved to a rank that does not exist
    fenced: bool = False  # a fence follows some of its buffered atomics: its next write comes after those
    far: list[Any] = field(default_factory=list)  # its calls to other nodes since the last quiet
    undrained: bool = False  # it has stored to the heap by TMA since the last drain
    aside: Any = None  # of host code: the thread in which it is in a backward pass, see pkt.simulate.engine
    stored: dict[int, list[Any]] = field(default_factory=dict)  # since its last barrier, see pkt.simulate.threads
    loaded: dict[int, list[Any]] = field(default_factory=dict)  # likewise
    ended: bool = False  # a program: its greenlet may run another one

    def __post_init__(self) -> None:
        self.greenlet.gr_context = contextvars.copy_context()

    @property
    def is_host(self) -> bool:
        return self.launch is None

    @property
    def spins(self) -> Loop | None:
        """A loop that the program cannot leave, unless another one changes memory; or None."""
        for loop in self.loops.values():
            if loop.spins:
                return loop
        return None


def events(task: Task) -> list[Event]:
    """What the timeline shows of a program that has ended."""
    found = []
    for kind, start, end, tile, waiting, signal in task.intervals:
        args: dict[str, Any] = {"kernel": task.name, "program": task.index}
        name = task.name if tile is None else f"tile {tile}"
        if tile is not None:
            args["tile"] = tile
        if waiting is not None:
            name = f"wait {waiting.counter} {waiting.condition}"
            args |= {"counter": waiting.counter, "wanted": waiting.condition, "at": waiting.site}
        sent = None if signal is None else Signal(*signal)
        found.append(Event(task.rank, task.lane, kind, name, start, end, args, sent))
    return found


class Launch:
    """One grid on one rank. Its programs start in the hardware's order, x fastest."""

    def __init__(
        self, rank: int, name: str, grid: tuple[int, int, int], ordinal: int, body: Callable, local: list[int],
        site: Site,
    ) -> None:  # fmt: skip
        self.rank, self.name, self.grid, self.ordinal, self.body = rank, name, grid, ordinal, body
        self.local = local  # addresses of its local tensors
        self.site = site  # of the launch in the user's host code
        self.call: tuple[str, Site | None] = "host code", None  # of pkt that launched it, and the user's line
        self.total = grid[0] * grid[1] * grid[2]
        self.num_warps = 4
        self.next = 0
        self.running = 0
        self.before: Any = None  # clock of what its programs come after: the host code, and the launches in front of it
        self.begin = 0.0
        self.clock: Any = None  # joined clocks of the programs that have finished
        self.time = 0.0

    def take(self) -> tuple[int, tuple[int, int, int]]:
        index = self.next
        self.next += 1
        x, y, _ = self.grid
        return index, (index % x, index // x % y, index // (x * y))

    @property
    def done(self) -> bool:
        return self.next == self.total and self.running == 0


class Host:
    """One rank: its host task, its stream of launches, its SM slots, and torch's state of a thread (random state,
    whether gradients are recorded)."""

    task: Task  # this and the next two: from the start of the run on
    random: torch.Tensor
    settled: np.ndarray  # clock of the device work that its host code knows to be done

    def __init__(self, rank: int, sms: int) -> None:
        self.rank = rank
        self.slots = list(range(sms))
        self.columns: list[int] = []
        self.far: dict[int, dict[int, int]] = {}  # program index -> columns of its far puts -> clock of the last one
        self.launches = 0
        self.launch: Launch | None = None  # the one that runs
        self.queue: deque[Launch] = deque()  # the launches after it
        self.finished: Any = None  # clock of the launches that have ended since the host last waited for them
        self.finished_at = 0.0
        self.watched = False  # it holds plain tensors over the heap
        self.waits = False  # for its launches, in a torch function
        self.calls: Counter[tuple[int, ...]] = Counter()  # collective ones, by the ranks that meet
        self.call = ""
        self.closed: Site | None = None  # where it closed its world
        self.modes = modes()
        self.result: Any = None

    @property
    def launched(self) -> bool:
        """Whether some of its launches have not ended."""
        return self.launch is not None


@dataclass(eq=False)
class Meeting:
    """A collective call of the hosts: the value of each host so far; complete when every host has called."""

    values: dict[int, tuple[Any, str]] = field(default_factory=dict)
    clock: Any = None
    time: float = 0.0


@dataclass(eq=False)
class Trial:
    """The rest of a run after a deadlock, with all programs of `launches` resident: `error` is the error, unless they
    still wait. findings: the number of findings before."""

    launches: list[Launch]
    error: Exception
    findings: int


@dataclass(eq=False)
class Turn:
    """A stretch of a program that spins: until `loop`, its outermost one, has turned again, or up to step `end`."""

    task: Task
    loop: Loop
    turns: int  # of the loop when the stretch began
    end: int


_MOST_IDLE = 256
_idle: list[Any] = []  # greenlets whose programs have ended


def runner(hub: Any) -> Any:
    """A greenlet that runs the program of the task that is current when it is switched to. It may have run others of
    `hub` before: a new one takes ten times as long to start, because Python maps a stack for it."""
    while _idle:
        known = _idle.pop()
        if known.parent is hub:
            return known
    return greenlet.greenlet(_run_programs, hub)


def _run_programs() -> None:
    while True:
        _run_program()
        greenlet.getcurrent().parent.switch()


def _run_program() -> None:
    """Run the current program. A function of its own, so that an idle greenlet holds nothing of a run."""
    task = builder.pkt.m.current
    task.launch.body()
    task.ended = True
    if len(_idle) < _MOST_IDLE:
        _idle.append(task.greenlet)


def drop_runners() -> None:
    """End the idle greenlets, in the thread in which they ran."""
    _idle.clear()


class Stopped(greenlet.GreenletExit):
    """Thrown into the remaining greenlets when a run ends early; not an error of its own."""
