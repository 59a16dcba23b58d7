"""The things that a machine runs.

Task             one program of a grid, or the host code of one rank
Launch           one grid on one rank; at most `sms` of its programs are resident
Host             one rank
Meeting          a collective call of the hosts
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import greenlet
import torch


class Task:
    """One greenlet and the machine's state for it."""

    __slots__ = (
        "greenlet", "rank", "name", "launch", "program", "index", "lane", "column", "clock", "tma_clock", "async_clock",
        "fence_clock", "unacquired", "pending", "blocked", "polls", "progress", "time", "intervals", "mark", "signals",
        "satisfied_by", "accesses", "waits", "undrained", "last", "repeats",
        "polled", "idle_iterations", "iterated_at", "touched", "scope",
    )  # fmt: skip

    def __init__(self, rank: int, name: str, run: Callable[[], Any], parent: Any) -> None:
        self.greenlet = greenlet.greenlet(run, parent=parent)
        self.greenlet.gr_context = contextvars.copy_context()
        self.rank, self.name = rank, name
        self.launch: Launch | None = None
        self.program: tuple[int, int, int] = (0, 0, 0)
        self.index = 0
        self.lane = 0
        self.column = 0
        self.clock: Any = None
        self.tma_clock: Any = None  # clocks that this program's TMA loads are ordered after
        self.async_clock = 0
        self.scope = "system"  # scope of its last atomic
        self.fence_clock: Any = None
        self.unacquired: list[Any] = []
        self.pending: list[Any] = []
        self.blocked: Any = None
        self.polls = 0
        self.progress = -1
        self.time = 0.0
        self.intervals: list[list] = []
        self.mark = "compute"
        self.signals = 0
        self.satisfied_by: str | None = None
        self.accesses = 0
        self.waits: set[Any] = set()  # sites of the waits so far
        self.touched: set[int] = set()  # first addresses of its accesses while it may have been in a spin
        self.last: Any = None  # the last load: first address, number of elements, number of the access
        self.repeats = 0
        self.polled: Any = None  # the last load or atomic
        self.idle_iterations = 0  # iterations of a `while` since its last access
        self.iterated_at = 0  # value of `accesses` at the last iteration of a `while`
        self.undrained = False  # it has stored to the heap by TMA since the last drain

    @property
    def is_host(self) -> bool:
        return self.launch is None


class Launch:
    """One grid on one rank. Its programs start in the hardware's order, x fastest."""

    def __init__(self, rank: int, name: str, grid: tuple[int, int, int], ordinal: int, body: Callable) -> None:
        self.rank, self.name, self.grid, self.ordinal, self.body = rank, name, grid, ordinal, body
        self.total = grid[0] * grid[1] * grid[2]
        self.next = 0
        self.running = 0
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
    """One rank: its host task, its SM slots, and torch's state of a thread (random state, whether gradients are
    recorded)."""

    def __init__(self, rank: int, sms: int) -> None:
        self.rank = rank
        self.task: Task | None = None
        self.slots = list(range(sms))
        self.columns: list[int] = []
        self.launches = 0
        self.launch: Launch | None = None
        self.calls = 0
        self.call = ""
        self.random = torch.get_rng_state()
        self.grad = torch.is_grad_enabled()
        self.result: Any = None


class Meeting:
    """A collective call of the hosts: the value of each host so far; complete when every host has called."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[Any, str]] = {}
        self.clock: Any = None
        self.time = 0.0


class Stopped(greenlet.GreenletExit):
    """Thrown into the remaining greenlets when a run ends early; not an error of its own."""
