"""Runs ranks as forked processes, cheap enough to kill by the hundred. Results, errors and signals come back."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pkt.runtime.bootstrap import Place, open_world
from pkt.runtime.processes.rendezvous import Meeting, prepare
from pkt.runtime.world import World

from .fake_driver import FakeDriver

STRIDE = 1 << 30
HEAP = 1 << 20


@dataclass
class End:
    """How one rank ended. `at`: the time of its end by time.monotonic(), one clock for all processes of a host."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    died: int = 0  # the signal that ended it
    at: float = 0.0


def run(size: int, main: Callable[[int], Any], patience: float = 90.0) -> list[End]:
    """Run main(rank) in `size` processes. A rank that is not back after `patience` seconds ends with a TimeoutError."""
    return run_all([(size, main)], patience)[0]


def run_all(
    worlds: Sequence[tuple[int, Callable[[int], Any]]], patience: float = 90.0, at_once: int = 12
) -> list[list[End]]:
    """Do `run` for each (size, main), `at_once` of them at a time, because most only wait for a deadline."""
    ends: list[list[End]] = [[] for _ in worlds]
    running: dict[int, _Forked] = {}
    begun = 0
    try:
        while begun < len(worlds) or running:
            while begun < len(worlds) and len(running) < at_once:
                running[begun] = _Forked(*worlds[begun], patience)
                begun += 1
            readers = {reader: forked for forked in running.values() for reader in forked.pipes}
            for reader in select.select(list(readers), [], [], 0.1)[0]:
                readers[reader].read(reader)
            for at in [at for at, forked in running.items() if forked.over()]:
                ends[at] = running[at].end()
                del running[at]
    finally:
        for forked in running.values():
            forked.end()
    return ends


class _Forked:
    """The processes of one `run`."""

    def __init__(self, size: int, main: Callable[[int], Any], patience: float) -> None:
        self.deadline = time.monotonic() + patience
        self.pids: list[int] = []
        self.pipes: dict[int, int] = {}  # reading end -> rank
        self.ends = [End(rank, error=TimeoutError(f"rank {rank} hangs")) for rank in range(size)]
        self.data = [b""] * size
        for rank in range(size):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                _child(rank, main, writer)
            os.close(writer)
            self.pids.append(pid)
            self.pipes[reader] = rank

    def read(self, reader: int) -> None:
        """Read the data that a rank has written; at its end, note how the rank ended."""
        rank, more = self.pipes[reader], os.read(reader, 1 << 16)
        self.data[rank] += more
        if not more:
            os.close(reader)
            del self.pipes[reader]
            self.ends[rank] = _end(rank, self.data[rank])
            if self.ends[rank].died:
                _, status = os.waitpid(self.pids[rank], 0)
                self.ends[rank].died, self.pids[rank] = os.WTERMSIG(status), 0

    def over(self) -> bool:
        """Whether all ranks are back, except those that a test has stopped, or the patience is over."""
        return all(_stopped(self.pids[rank]) for rank in self.pipes.values()) or time.monotonic() > self.deadline

    def end(self) -> list[End]:
        """Kill the remaining processes."""
        for reader in self.pipes:
            os.close(reader)
        for pid in self.pids:
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return self.ends


def _child(rank: int, main: Callable[[int], Any], writer: int) -> None:
    try:
        answer = ("value", main(rank), time.monotonic())
    except BaseException as error:
        answer = ("error", error, time.monotonic())
    try:
        data = pickle.dumps(answer)
    except Exception as error:
        data = pickle.dumps(("error", RuntimeError(f"{answer[1]!r} cannot be sent: {error}"), answer[2]))
    while data:
        data = data[os.write(writer, data) :]
    os.close(writer)
    time.sleep(300)  # the parent kills this process
    os._exit(1)  # skips the exit handlers of pytest


def _end(rank: int, data: bytes) -> End:
    if not data:
        return End(rank, died=signal.SIGKILL, at=time.monotonic())
    kind, content, at = pickle.loads(data)
    return End(rank, at=at, **{kind: content})


def _stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def place(meeting: Meeting, rank: int, size: int) -> Place:
    return Place(rank, size, meeting)


def fake_world(meeting: Meeting, rank: int, size: int, timeout: float = 10.0, **driver: Any) -> World:
    """This rank's world over a FakeDriver (`world.backend.driver`)."""
    fake = FakeDriver(rank, **driver)
    return open_world(Place(rank, size, meeting), rank, HEAP, timeout, driver=lambda rank: fake, stride=STRIDE)


def in_worlds(size: int, main: Callable[[World], Any], timeout: float = 10.0, **options: Any) -> list[End]:
    """main(world) on `size` forked ranks of one world."""
    meeting = prepare()

    def rank_main(rank: int) -> Any:
        return main(fake_world(meeting, rank, size, timeout, **options))

    try:
        return run(size, rank_main)
    finally:
        meeting.remove()
