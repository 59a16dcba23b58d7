"""Loses a rank at a chosen step of a chosen protocol, and judges what the others say.

A step is a call of the victim's main thread into the operating system or the GPU's driver: of a socket, a poll, a file,
a descriptor, the journal's memory, the fake driver. The victim counts them in a profile function and gets its signal
before the step. Most protocols wait in loops, so their number of steps differs from run to run.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch.distributed as dist

from pkt.errors import PeerLost, WaitTimeout
from pkt.runtime import bootstrap
from pkt.runtime.memory import factories, heap
from pkt.runtime.processes import rendezvous
from pkt.runtime.processes.network import Board
from pkt.runtime.processes.rendezvous import Meeting, prepare
from pkt.runtime.processes.transport import Transport
from pkt.runtime.world import World

from . import forked
from .fake_driver import FakeDriver, FakeGpu

DEADLINE = 2.0  # seconds; long enough for a busy machine to start the ranks of several worlds
GRACE = 2.0  # seconds after the deadline within which every survivor leaves
PROTOCOLS = ("rendezvous", "votes", "journal", "heap", "exchange", "barrier", "farewell", "close")
"""What the ranks do, in order. rendezvous: with hello and challenge. farewell: the victim gives up instead."""
HOSTS_PROTOCOLS = ("store", *PROTOCOLS)
"""The same on several hosts. store: they read each other's host and address. journal: there is none, and allocations
are compared in exchanges."""
MARKS = {rendezvous.connect.__code__: "rendezvous", Transport.__init__.__code__: "votes"}
"""Functions with which a protocol begins."""
SECRET = b"of every rank " * 3
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT)
_SYSTEM = ("posix", "fcntl")
_INSIDE = ("fileno", "CMSG_SPACE", "register", "unregister", "modify", "gettimeout", "len", "min", "monotonic")
"""Calls that stay inside the process."""
_HERE = os.path.join("pkt", "runtime")


class Stall(NamedTuple):
    """`rank` does nothing for `seconds` before the step number `step` of `protocol`, as on a busy machine."""

    rank: int
    protocol: str
    step: int
    seconds: float


class Loss(NamedTuple):
    """`victim` of `size` ranks gets signal `how` before the step number `step`, from 0, of `protocol`. hosts: a letter
    for each rank's host, which has TCP to the others; "" where all ranks are on this host. stalls: of survivors, each
    rank's in the order of its steps."""

    size: int
    victim: int
    protocol: str
    step: int
    how: signal.Signals
    hosts: str = ""
    stalls: tuple[Stall, ...] = ()


class Steps:
    """Counts the steps of this thread from now on, and calls `due` at one of them, or at the end of its protocol if it
    has fewer. first: the protocol now; marks: functions with which others begin."""

    def __init__(
        self, first: str, marks: Mapping[CodeType, str], protocol: str, step: int, due: Callable[[], None]
    ) -> None:
        self.protocol, self.step, self.due = protocol, step, due
        self.now, self.count, self.marks = first, 0, marks
        sys.setprofile(self._count)

    def begin(self, protocol: str) -> None:
        """From here on the steps belong to `protocol`."""
        if self.now == self.protocol != protocol:
            self._reached()
        self.now, self.count = protocol, 0

    def again(self, protocol: str, step: int) -> None:
        """After the step, count on to a later one."""
        self.protocol, self.step = protocol, step
        sys.setprofile(self._count)

    def _reached(self) -> None:
        sys.setprofile(None)
        self.protocol = ""
        self.due()

    def _count(self, frame: Any, event: str, function: Any) -> None:
        if event == "call" and frame.f_code in self.marks:
            self.begin(self.marks[frame.f_code])
        if is_step(frame, event, function):
            if (self.now, self.count) == (self.protocol, self.step):
                self._reached()
            self.count += 1


def is_step(frame: Any, event: str, function: Any) -> bool:
    """Whether a profile function's arguments tell of a step."""
    file = frame.f_code.co_filename
    if event == "call":
        return file.endswith("fake_driver.py") and _HERE in frame.f_back.f_code.co_filename
    if event != "c_call" or function.__name__ in _INSIDE:
        return False
    owner = getattr(function, "__self__", None)
    if isinstance(owner, (socket.socket, type(select.poll()), dist.Store)):
        return True
    return _HERE in file and (file.endswith("journal.py") or getattr(owner, "__name__", "") in _SYSTEM)


def _store_of(meeting: Meeting) -> str:
    return f"{meeting.directory}.store"  # beside the directory, which rank 0 removes


def opened(meeting: Meeting, rank: int, loss: Loss) -> World:
    """This rank's world over a FakeDriver."""
    if not loss.hosts:
        return forked.fake_world(meeting, rank, loss.size, DEADLINE)
    gpu = FakeGpu(f"uuid-{rank}", attributes={"HANDLE_TYPE_FABRIC_SUPPORTED": 1}, domain="c1/7")
    fake = FakeDriver(rank, gpus=[gpu])
    board = Board(dist.FileStore(_store_of(meeting)), "pkt/world", rank, SECRET)
    place = bootstrap.Place(rank, loss.size, meeting, host=loss.hosts[rank], board=board)
    return bootstrap.open_world(place, 0, forked.HEAP, DEADLINE, driver=lambda rank: fake, stride=forked.STRIDE)


def ranks_of(meeting: Meeting, lost_at: memoryview[float], loss: Loss) -> Callable[[int], Any]:
    """main(rank) of a world in which `loss` happens; its result is what leaks. lost_at: takes the time of the
    loss, for all processes."""

    def due() -> None:
        lost_at[0] = time.monotonic()
        os.kill(os.getpid(), loss.how)

    def all_protocols(rank: int, begin: Callable[[str], None]) -> Any:
        heap.FIRST_BYTES = 1 << 17  # so that the heap has to grow
        with opened(meeting, rank, loss) as world:
            begin("journal")
            for _ in range(3):
                factories.empty(1000, world=world)
            world.heap.agreement.settle()
            begin("heap")
            factories.empty(1 << 17, world=world)
            begin("exchange")
            assert world.all_gather_object(rank) == list(range(loss.size))
            begin("barrier")
            world.barrier()
            begin("farewell")
            if rank == loss.victim and loss.protocol == "farewell":
                raise RuntimeError("the victim gives up")
            if loss.protocol != "close":
                world.barrier()  # nobody gets here whose victim was lost before
            begin("close")
        return world._backend.driver.leaks()  # type: ignore[attr-defined]

    def main(rank: int) -> Any:
        first = (HOSTS_PROTOCOLS if loss.hosts else PROTOCOLS)[0]
        if rank != loss.victim:
            return all_protocols(rank, _stalling([stall for stall in loss.stalls if stall.rank == rank], first))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell ignore it
        steps = Steps(first, MARKS, loss.protocol, loss.step, due)
        try:
            try:
                return all_protocols(rank, steps.begin)
            finally:
                steps.begin("")
        except (KeyboardInterrupt, RuntimeError):
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # as Python itself ends after Ctrl-C
            os.kill(os.getpid(), signal.SIGINT)
            raise

    return main


def _stalling(stalls: Sequence[Stall], first: str) -> Callable[[str], None]:
    """What begins a protocol on a rank with these stalls. first: the protocol now."""
    if not stalls:
        return lambda protocol: None
    waiting = list(stalls)

    def due() -> None:
        time.sleep(waiting.pop(0).seconds)
        if waiting:
            steps.again(waiting[0].protocol, waiting[0].step)

    steps = Steps(first, MARKS, stalls[0].protocol, stalls[0].step, due)
    return steps.begin


def lose(losses: Sequence[Loss]) -> dict[Loss, str]:
    """Play the losses, several at a time, and return those whose survivors left late, or that the machine was too slow
    to play. Asserts that every survivor names the victim. One that had nothing left to do may end well."""
    places = [prepare() for _ in losses]
    moments = [memoryview(mmap.mmap(-1, 8)).cast("d") for _ in losses]
    try:
        worlds = [(loss.size, ranks_of(place, at, loss)) for place, at, loss in zip(places, moments, losses)]
        found = forked.run_all(worlds, at_once=24)
    finally:
        for place in places:
            place.remove()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_store_of(place))
    return {loss: text for loss, ends, at in zip(losses, found, moments) if (text := _judged(loss, ends, at[0]))}


def _judged(loss: Loss, ends: Sequence[forked.End], at: float) -> str:
    """How late a survivor left; "" if all were in time. Asserts that they name the victim."""
    if not at:
        return f"the victim was not lost: {ends[loss.victim]}"
    for end in ends:
        what = (loss, end)
        if end.rank == loss.victim:
            assert end.died or loss.how == signal.SIGSTOP, what
        elif end.error is None and loss.protocol == "close":
            assert not end.value, what  # nothing leaks
        else:
            assert isinstance(end.error, (PeerLost, WaitTimeout)), what
            assert f"rank {loss.victim}" in str(end.error), what
            # A rank that waits for the victim in the rendezvous has not met the ranks after it, and names them too.
            assert loss.protocol in ("store", "rendezvous") or _named(end.error) == {loss.victim}, what
    stalled = max((sum(s.seconds for s in loss.stalls if s.rank == end.rank) for end in ends), default=0.0)
    late = max(end.at for end in ends if end.rank != loss.victim) - at - DEADLINE - GRACE - stalled
    return f"{late:.1f} s late" if late > 0 else ""


def _named(error: PeerLost | WaitTimeout) -> set[int]:
    return set(error.lost if isinstance(error, PeerLost) else error.missing)
