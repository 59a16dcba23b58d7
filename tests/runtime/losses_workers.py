"""Loses a worker of pkt.launch at a chosen step of its second job, and judges what the launch says.

The worker is a fork, which has everything imported, and not a new process; what it then does is pkt's own. By INT it
does not lose itself, for a worker ignores it: its caller gets Ctrl-C at that step.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pkt.errors import RankFailed
from pkt.runtime.workers import answers, carry, pipe, worker, workers

from . import forked, processes
from .losses import DEADLINE, GRACE, Loss, Steps

PROTOCOLS = ("take", "world", "work", "answer")
"""take: the job comes and is acknowledged. world: rendezvous, votes, heap. work: the function. answer: its result goes
home, and the world ends."""
ANSWER = 2 << 20  # bytes
_PR_SET_PDEATHSIG = 1


class Forked:
    """As much of subprocess.Popen as the workers' caller uses, of a fork that serves jobs."""

    def __init__(self, end: socket.socket) -> None:
        caller, self.returncode = os.getpid(), None
        outputs = [os.pipe() for _ in range(2)]
        self.pid = os.fork()
        if not self.pid:
            try:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == caller:
                    worker.serve(end.detach())
            finally:
                os._exit(0)
        for _, writer in outputs:
            os.close(writer)
        self.stdout, self.stderr = (os.fdopen(reader, "rb") for reader, _ in outputs)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a worker", timeout)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _start_process(variables: dict[str, str]) -> tuple[socket.socket, Forked]:
    mine, theirs = socket.socketpair()
    with theirs:
        return mine, Forked(theirs)


def arm(world: Any, loss: Loss, note: str) -> None:
    """The first job: the victim counts the steps of its next, and writes the time of the loss to the file `note`."""

    def due() -> None:
        Path(note).write_text(repr(time.monotonic()))
        os.kill(os.getppid() if loss.how == signal.SIGINT else os.getpid(), loss.how)

    if world.rank == loss.victim:
        marks = {
            pipe.receive.__code__: "take", processes.open_fake.__code__: "world", work.__code__: "work",
            carry.dumps.__code__: "answer",
        }  # fmt: skip
        Steps("", marks, loss.protocol, loss.step, due)


def work(world: Any) -> bytes:
    """The second job."""
    assert world.all_gather_object(world.rank) == list(range(world.size))
    world.barrier()
    return bytes(ANSWER)


def _caller(loss: Loss, note: str) -> tuple[str, str, float, list[int]]:
    """How the launch ends, what it says, when, and workers that are still there. It "ended", "failed" or was
    "interrupted"; or the interrupt came while no job ran ("idle"): all workers stay, and serve the next launch."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    workers._start_process = _start_process  # type: ignore[assignment]
    pool, how, said = workers.Workers(loss.size), "ended", ""
    pids = pool.pids
    try:
        pool.run(arm, (loss, note), processes.OPENER, DEADLINE, heap=forked.HEAP)
        assert pool.run(work, (), processes.OPENER, DEADLINE, heap=forked.HEAP) == [bytes(ANSWER)] * loss.size
        time.sleep(0.3)  # for a signal that comes with the last answer
    except RankFailed as error:
        how, said = "failed", str(error)
    except KeyboardInterrupt as error:
        codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
        how = "interrupted" if answers.Answers.all.__code__ in codes else "idle"
    at = time.monotonic()
    left = [pid for pid in pids if os.path.exists(f"/proc/{pid}")] if how != "ended" else []
    if how == "idle":
        how, left = ("idle", []) if left == pids else ("interrupted", left)
    if how in ("ended", "idle"):  # the next launch has other processes where the victim was lost, or says so
        try:
            assert pool.run(work, (), processes.OPENER, DEADLINE, heap=forked.HEAP) == [bytes(ANSWER)] * loss.size
        except RankFailed as error:
            said, at = str(error), time.monotonic()
    pool.kill()
    return how, said, at, left


def lose(picked: Sequence[Loss]) -> dict[Loss, str]:
    """As `losses.lose`: play them, and return those whose launch ended late, or that the machine was too slow to play.
    Asserts that the launch names the victim, and that no worker is left behind."""
    with tempfile.TemporaryDirectory() as folder:
        notes = [os.path.join(folder, str(number)) for number in range(len(picked))]
        callers = [(1, lambda rank, loss=loss, note=note: _caller(loss, note)) for loss, note in zip(picked, notes)]
        found = forked.run_all(callers, at_once=8)
        moments = [float(Path(note).read_text()) if os.path.exists(note) else 0.0 for note in notes]
    return {loss: text for loss, (end,), at in zip(picked, found, moments) if (text := _judged(loss, end, at))}


def _judged(loss: Loss, end: forked.End, at: float) -> str:
    assert end.error is None, (loss, end)
    how, said, ended, left = end.value
    what = (loss, how, said, left)
    if not at:
        return f"the victim was not lost: {what}"
    assert not left, what
    if loss.how == signal.SIGINT:
        assert how == "interrupted" or (how == "idle" and not said and loss.protocol in ("take", "answer")), what
    elif how == "failed" or said:
        # The first to speak may be a rank that says whom it has lost.
        assert re.search(rf"rank {loss.victim}\b", said), what
    else:
        assert loss.protocol == "answer", what
        return ""
    late = ended - at - DEADLINE - GRACE - answers.GRACE  # the caller's own, after the ranks'
    return f"{late:.1f} s late" if late > 0 else ""
