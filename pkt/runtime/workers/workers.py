"""The processes of pkt.launch, one per rank: started once, kept warm between calls, ended with the caller.

A rank's output appears with its number in front. The rank that failed first is raised with its traceback; ranks that
only lost a peer are mentioned after it. If a rank does not come back after another has failed, all are ended, and the
next call starts new ones.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, TextIO

from pkt.errors import PeerLost, RankFailed
from pkt.runtime.processes import rendezvous
from pkt.runtime.workers import interrupts
from pkt.runtime.workers.carry import dumps, loads, receive, send

GRACE = 2.0  # seconds beyond the deadline in which the other ranks must come back once one has failed


class Workers:
    """`size` processes. `pids` in rank order."""

    def __init__(self, size: int, environment: dict[str, str] | None = None) -> None:
        self.size = size
        self._pipes: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._labels: list[threading.Thread] = []
        path = os.pathsep.join(p for p in sys.path if p)
        variables = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(environment or {})}
        try:
            for rank in range(size):
                self._start(rank, variables)
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int, variables: dict[str, str]) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "pkt.runtime.workers.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env=variables,
                start_new_session=True,  # a terminal sends Ctrl-C to the caller only
            )
        self._pipes.append(mine)
        self._processes.append(process)
        assert process.stdout is not None
        assert process.stderr is not None
        # sys.stdout is looked up for each line, so that a notebook's cell gets the lines that are printed in it.
        for source, sink in ((process.stdout, lambda: sys.stdout), (process.stderr, lambda: sys.stderr)):
            thread = threading.Thread(target=_label, args=(rank, source, sink), daemon=True)
            thread.start()
            self._labels.append(thread)

    @property
    def pids(self) -> list[int]:
        """Process numbers, in rank order."""
        return [process.pid for process in self._processes]

    @property
    def alive(self) -> bool:
        """Whether every process can take a job."""
        return bool(self._processes) and all(process.poll() is None for process in self._processes)

    def run(self, fn: Callable[..., Any], args: Sequence[Any], opener: str, timeout: float, **facts: Any) -> list[Any]:
        """The results of `fn(world, *args)` by rank. opener: "module:function" that makes the world from the job.
        facts: added to the job. Raises RankFailed."""
        meeting = rendezvous.prepare()
        try:
            shared = {"fn": dumps(fn), "args": dumps(tuple(args)), "opener": opener, "timeout": timeout, **facts}
            shared |= {"size": self.size, "directory": meeting.directory, "token": meeting.token}
            for rank, pipe in enumerate(self._pipes):
                send(pipe, dumps({**shared, "rank": rank}))
            answers = self._gather(timeout)
        except BaseException:  # an interrupt too: the workers are in the middle of a job
            self.kill()
            raise
        finally:
            meeting.remove()
        self._raise_first(answers)
        return [loads(answer["result"]) for answer in answers]

    def _gather(self, timeout: float) -> list[dict[str, Any]]:
        """Every rank's answer, in rank order, each with the time of its arrival."""
        answers: dict[int, dict[str, Any]] = {}
        last: float | None = None
        interrupted = False
        while len(answers) < self.size:
            left = None if last is None else max(0.0, last - time.monotonic())
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            try:
                ready, _, _ = select.select(list(waiting), [], [], left)
            except KeyboardInterrupt:
                if interrupted or not self._pass_on():
                    raise
                interrupted = True
                continue
            if not ready:  # a rank has failed, and these did not come back in time
                for rank in waiting.values():
                    text = f"did not come back within {timeout + GRACE:.0f} s of that and was ended"
                    answers[rank] = {"error": None, "traceback": text, "remoteness": 3, "at": time.monotonic()}
                self.kill()
                break
            for pipe in ready:
                data = receive(pipe)
                rank = waiting[pipe]
                answers[rank] = {**(loads(data) if data is not None else self._died(rank)), "at": time.monotonic()}
                if "result" not in answers[rank] and last is None:
                    last = time.monotonic() + timeout + GRACE
        if not self.alive:
            self.kill()
        return [answers[rank] for rank in range(self.size)]

    def _pass_on(self) -> bool:
        """Pass Ctrl-C on to the workers whose work can be cut short; False if there is none."""
        minding = [process for process in self._processes if interrupts.minded(process.pid)]
        for process in minding:
            process.send_signal(signal.SIGINT)
        return bool(minding)

    def _died(self, rank: int) -> dict[str, Any]:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(5)
        code = self._processes[rank].returncode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with status {code}"
        text = f"(pid {self._processes[rank].pid}) ended {how}"
        return {"error": None, "traceback": f"the process {text}", "remoteness": 0, "died": text}

    def _raise_first(self, answers: list[dict[str, Any]]) -> None:
        failed = {rank: a for rank, a in enumerate(answers) if "result" not in a}
        if not failed:
            return
        first = min(failed, key=lambda rank: (failed[rank]["remoteness"], failed[rank]["at"]))
        others = {r: a["traceback"].strip().splitlines()[-1] for r, a in failed.items() if r != first}
        error = RankFailed.raised(first, failed[first]["traceback"], also=others)
        cause = loads(failed[first]["error"]) if failed[first]["error"] else None
        if "died" in failed[first]:
            cause = PeerLost.exited(first, {first: failed[first]["died"]}, "pkt.launch")
        raise error from cause

    def close(self) -> None:
        """Let the processes end by themselves, and kill them after 5 s. Idempotent."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 5
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.01, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill all processes. Idempotent."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
        for thread in self._labels:
            thread.join(1)
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes, self._labels = [], [], []


def _label(rank: int, source: IO[bytes], sink: Callable[[], TextIO]) -> None:
    """Print a worker's lines with its rank."""
    with source:
        for line in source:
            text = f"[rank {rank}] {line.decode(errors='replace').rstrip()}\n"
            print(text, end="", file=sink(), flush=True)  # in one write, because the ranks print at the same time


_warm: dict[int, Workers] = {}
_lock = threading.Lock()


def warm(size: int) -> Workers:
    """The processes of an earlier call with as many ranks, if all are alive, or new ones."""
    with _lock:
        workers = _warm.get(size)
        if workers is None or not workers.alive:
            if workers is not None:
                workers.kill()
            workers = _warm[size] = Workers(size)
        return workers


@atexit.register
def _end() -> None:
    for workers in _warm.values():
        workers.close()
    _warm.clear()
