"""The answers of the workers to one launch: who gets how long, who is lost, and where Ctrl-C goes."""

from __future__ import annotations

import contextlib
import secrets
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from pkt.runtime.processes.transport import process_state
from pkt.runtime.workers import interrupts
from pkt.runtime.workers.carry import loads
from pkt.runtime.workers.pipe import Pipe

GRACE = 2.0  # seconds beyond the deadline in which the other ranks must come back once one has failed
IMPORTS = 120.0  # seconds in which a new process must have imported torch and Triton and taken its first job
_LOOK = 0.2  # seconds between two looks at the processes: a pipe stays open if a worker's child has inherited it

Answer = dict[str, Any]


class _State(NamedTuple):
    """How far one rank's worker is. at: when it last sent or took a byte."""

    at: float
    taken: bool = False


class Answers:
    """One launch: gives every worker its job and gathers the answers."""

    def __init__(
        self,
        pipes: Sequence[Pipe],
        processes: Sequence[subprocess.Popen[bytes]],
        jobs: Sequence[bytes],
        timeout: float,
        new: bool,
    ) -> None:
        """timeout: seconds. new: the processes may still import."""
        self._pipes, self._processes = pipes, processes
        self._number = secrets.randbits(64)
        self._patience = timeout + GRACE  # in which a worker that has something to send or take must do some of it
        self._to_take = max(IMPORTS, self._patience) if new else self._patience
        self._states = {rank: _State(time.monotonic()) for rank in range(len(pipes))}  # of ranks with no answer yet
        self._stopped: dict[int, float] = {}  # workers that were found stopped, and when first
        self._answers: dict[int, Answer] = {}
        self._last: float | None = None  # deadline of the others once a rank has failed
        self._poller = select.poll()
        for pipe, job in zip(pipes, jobs):
            pipe.sock.setblocking(False)
            pipe.queue(self._number, job)
            self._poller.register(pipe, select.POLLIN | select.POLLOUT)

    def all(self) -> list[Answer]:
        """Every rank's answer, in rank order, each with the time of its arrival; "ended" in those of workers that
        cannot go on."""
        passed = False
        with interrupts.Interrupts() as pressed:  # so that Ctrl-C is passed on whatever this process does when it comes
            while self._states:
                try:
                    ready = self._poller.poll(max(0.0, self._wait()) * 1e3)
                except KeyboardInterrupt:
                    if pressed.asked:
                        raise
                    pressed.asked, ready = True, []  # another handler took the signal
                if pressed.asked and not passed:
                    if not self._pass_on():
                        raise KeyboardInterrupt
                    passed = True
                ends = {self._pipes[rank].fileno(): rank for rank in self._states}
                for end, event in ready:
                    self._serve(ends[end], event)
                for rank in [rank for rank in self._states if self._processes[rank].poll() is not None]:
                    self._read_rest(rank)
                if not ready:
                    self._find_stopped()
                    self._give_up_late()
        if pressed.asked and not passed:
            raise KeyboardInterrupt
        return [self._answers[rank] for rank in range(len(self._pipes))]

    def _limit(self, rank: int) -> tuple[float, str]:
        """When the worker must have done what it has begun, and what that is; infinity while its function runs, unless
        the worker is stopped: then the patience, or nothing if another rank has failed."""
        at, taken = self._states[rank]
        if not taken:
            return at + self._to_take, f"did not take its job within {self._to_take:.1f} s"
        if self._pipes[rank].partial:
            return at + self._patience, f"sent no more of its answer for {self._patience:.1f} s"
        if rank in self._stopped:
            since = self._stopped[rank]
            return since + self._patience if self._last is None else since, "did not end its function"
        return float("inf"), ""

    def _find_stopped(self) -> None:
        for rank in self._states:
            if process_state(self._processes[rank].pid) == "stopped":
                self._stopped.setdefault(rank, time.monotonic())
            else:
                self._stopped.pop(rank, None)

    def _wait(self) -> float:
        limits = [self._limit(rank)[0] for rank in self._states]
        return (
            min([*limits, *([] if self._last is None else [self._last]), time.monotonic() + _LOOK]) - time.monotonic()
        )

    def _serve(self, rank: int, event: int) -> None:
        """Do what a worker's pipe is ready for."""
        pipe = self._pipes[rank]
        try:
            if event & select.POLLOUT and pipe.unsent:
                pipe.write()
                self._states[rank] = self._states[rank]._replace(at=time.monotonic())
                if not pipe.unsent:
                    self._poller.modify(pipe, select.POLLIN)
            if event & ~select.POLLOUT:
                self._take(rank, pipe.read())
        except BlockingIOError:
            pass
        except ConnectionError:
            self._answer(rank, self._died(rank))

    def _read_rest(self, rank: int) -> None:
        """The answer that a worker has sent before it ended, or how it ended. Its children may still have the pipe."""
        try:
            while rank in self._states:
                self._take(rank, self._pipes[rank].read())
        except (BlockingIOError, ConnectionError):
            self._answer(rank, self._died(rank))

    def _take(self, rank: int, message: tuple[int, bytes] | None) -> None:
        state = self._states[rank] = self._states[rank]._replace(at=time.monotonic())
        if message is None:
            return
        number, data = message
        if number != self._number:
            text = f"(pid {self._processes[rank].pid}) sent a message that does not belong to this launch"
            self._answer(rank, _ended(text))
        elif not state.taken:
            self._states[rank] = state._replace(taken=True)
        else:
            self._answer(rank, loads(data))

    def _answer(self, rank: int, answer: Answer) -> None:
        now = time.monotonic()
        self._answers[rank] = {**answer, "at": now}
        del self._states[rank]
        self._poller.unregister(self._pipes[rank])
        if "result" not in answer and self._last is None:
            self._last = now + self._patience

    def _give_up_late(self) -> None:
        """End the wait for workers that met a deadline."""
        now = time.monotonic()
        for rank in list(self._states):
            limit, what = self._limit(rank)
            if now >= limit:
                pid = self._processes[rank].pid
                state = process_state(pid)
                what += f" and is {state}" if state else ""
                self._answer(rank, _ended(f"(pid {pid}) {what}; a longer deadline: PKT_TIMEOUT (seconds)"))
        if self._last is not None and now >= self._last:
            for rank in list(self._states):  # a rank has failed, and these did not come back in time
                text = f"did not come back within {self._patience:.0f} s of that and was ended"
                self._answer(rank, {"error": None, "traceback": text, "remoteness": 3, "ended": text})

    def _died(self, rank: int) -> Answer:
        process = self._processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        code = process.returncode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with status {code}"
        return _ended(f"(pid {process.pid}) ended {how}")

    def _pass_on(self) -> bool:
        """Pass Ctrl-C on to the workers whose work can be cut short; False if there is none."""
        minding = [process for process in self._processes if interrupts.minded(process.pid)]
        for process in minding:
            process.send_signal(signal.SIGINT)
        return bool(minding)


def _ended(text: str) -> Answer:
    """The answer for a worker that is lost, by itself and not because of another."""
    return {"error": None, "traceback": f"the process {text}", "remoteness": 0, "died": text, "ended": text}
