"""The processes of pkt.launch, one per rank: started once, kept warm between calls, ended with the caller.

A rank's output appears with its number in front. The rank that failed first is raised with its traceback; ranks that
only lost a peer are mentioned after it. If a rank does not come back after another has failed, all are ended, and the
next call starts new ones.

Threads may call `run` at the same time: one launch follows the other. A function may run as long as it likes; every
other step of a launch has a deadline: a worker must take its job, and an answer that has begun must go on. A worker
that is stopped is lost at the deadline, or at once where another rank has failed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import IO, Any, TextIO

from pkt.errors import CollectiveMismatch, PeerLost, RankFailed, Unsupported
from pkt.progress import OF_WORKERS, watched
from pkt.runtime.processes import rendezvous
from pkt.runtime.workers.answers import Answer, Answers
from pkt.runtime.workers.carry import dumps, loads
from pkt.runtime.workers.pipe import Pipe

_PROGRAM = os.path.join(os.path.dirname(__file__), "start.py")


class Workers:
    """`size` processes. `pids` in rank order."""

    def __init__(self, size: int, environment: dict[str, str] | None = None) -> None:
        self.size = size
        self._environment = environment or {}
        self._pipes: list[Pipe] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._labels: list[threading.Thread] = []
        self._running = threading.Lock()  # held by a launch
        self._owner: int | None = None  # the thread that holds it
        self._new = True  # no launch has ended well yet: the processes may still import
        self._closed = False
        self._start()
        _pools.add(self)

    def _start(self) -> None:
        self._new = True
        try:
            for rank in range(self.size):
                self._start_rank(rank, {**os.environ, **self._environment})
        except BaseException:
            self.kill()
            raise

    def _start_rank(self, rank: int, variables: dict[str, str]) -> None:
        started = _on_lasting_thread(lambda: _start_process(variables))
        try:
            mine, process = started.result()
        except BaseException:  # an interrupt: the process may be on its way
            started.add_done_callback(_end_unwanted)
            raise
        self._pipes.append(Pipe(mine))
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
        facts: added to the job. Starts new processes if some have ended. A call from another thread waits until this
        one is done. Raises RankFailed; Unsupported after close(), and for a call inside a call of the same
        thread, as from a signal handler."""
        shared = {"fn": dumps(fn), "args": dumps(tuple(args)), "opener": opener, "timeout": timeout, **facts}
        me = threading.get_ident()
        if self._owner == me:
            found = "found a launch of this thread that has not returned, as in a signal handler"
            raise Unsupported.here("pkt.launch", found, "call it when the first launch has returned")
        with self._running:
            self._owner = me
            try:
                answers = self._run(shared, timeout)
            finally:
                self._owner = None
        self._raise_first(answers)
        return [loads(answer["result"]) for answer in answers]

    def _run(self, shared: dict[str, Any], timeout: float) -> list[Answer]:
        if self._closed:
            found = "found worker processes that are closed"
            raise Unsupported.here("pkt.launch", found, "make new ones, or close them later")
        if not self.alive:
            self.kill()
            self._start()
        meeting = rendezvous.prepare()
        try:
            shared |= {"size": self.size, "directory": meeting.directory, "token": meeting.token}
            jobs = [dumps({**shared, "rank": rank}) for rank in range(self.size)]
            answers = Answers(self._pipes, self._processes, jobs, timeout, self._new).all()
            self._new = False
        except BaseException:  # an interrupt too: the workers are in the middle of a job
            self.kill()
            raise
        finally:
            meeting.remove()
        if any("ended" in answer for answer in answers):
            self.kill()
        return answers

    def _raise_first(self, answers: list[dict[str, Any]]) -> None:
        failed = {rank: a for rank, a in enumerate(answers) if "result" not in a}
        if not failed:
            closed = {rank: "" for rank, answer in enumerate(answers) if answer["closed"]}
            if 0 < len(closed) < self.size:
                raise CollectiveMismatch.closed(closed, self.size)
            return
        first = min(failed, key=lambda rank: (failed[rank]["remoteness"], failed[rank]["at"]))
        others = {r: a["traceback"].strip().splitlines()[-1] for r, a in failed.items() if r != first}
        error = RankFailed.raised(first, failed[first]["traceback"], also=others)
        cause = loads(failed[first]["error"]) if failed[first]["error"] else None
        if "died" in failed[first]:
            cause = PeerLost.exited(first, {first: failed[first]["died"]}, "pkt.launch")
        raise error from cause

    def close(self) -> None:
        """Let the processes end by themselves, and kill them after 5 s, or at once during a launch. Idempotent."""
        self._closed = True
        idle = self._running.acquire(blocking=False)
        if not idle:  # a daemon thread's launch at the end of the program: its own thread tidies up
            for process in self._processes:
                process.kill()
            return
        try:
            for pipe in self._pipes:
                pipe.close()
            deadline = time.monotonic() + 5
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.01, deadline - time.monotonic()))
            self.kill()
        finally:
            self._running.release()

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

    def forget(self) -> None:
        """In a forked child: the processes are the parent's. Closes this process's copies of the pipes, so that the
        workers still see the end of the parent's."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.returncode = 0  # so that the object waits for nothing
        self._pipes, self._processes, self._labels = [], [], []
        self._running, self._owner = threading.Lock(), None


def _start_process(variables: dict[str, str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A new worker process, and this process's end of its pipe."""
    # Entries of sys.path that are no str are ignored by Python, here and there.
    path = [entry for entry in sys.path if isinstance(entry, str)]
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # such as -I; multiprocessing's way
    mine, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, *flags, "-u", _PROGRAM, str(theirs.fileno()), str(os.getpid()), *path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={**variables, OF_WORKERS: str(int(watched()))},
                start_new_session=True,  # a terminal sends Ctrl-C to the caller only
            )
    except BaseException:
        mine.close()
        raise
    return mine, process


def _end_unwanted(started: Future[tuple[socket.socket, subprocess.Popen[bytes]]]) -> None:
    if started.exception() is None:
        mine, process = started.result()
        mine.close()
        with process:
            process.kill()


def _label(rank: int, source: IO[bytes], sink: Callable[[], TextIO]) -> None:
    """Print a worker's lines with its rank."""
    with source:
        for line in source:
            text = f"[rank {rank}] {line.decode(errors='replace').rstrip()}\n"
            print(text, end="", file=sink(), flush=True)  # in one write, because the ranks print at the same time


_warm: dict[int, Workers] = {}
_pools: weakref.WeakSet[Workers] = weakref.WeakSet()
_lock = threading.Lock()
_tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] | None = None


def warm(size: int) -> Workers:
    """The processes of earlier calls with as many ranks, or new ones."""
    with _lock:
        if size not in _warm:
            _warm[size] = Workers(size)
        return _warm[size]


def _on_lasting_thread(make: Callable[[], Any]) -> Future[Any]:
    """`make()` on a thread that lasts as long as this process: the kernel ends a worker with the thread that started
    it, and a launch's own thread may end while another one's launch runs."""
    global _tasks
    with _starting:
        if _tasks is None:
            _tasks = queue.SimpleQueue()
            threading.Thread(target=_do, args=(_tasks,), name="pkt.launch starts workers", daemon=True).start()
    made: Future[Any] = Future()
    _tasks.put((make, made))
    return made


_starting = threading.Lock()


def _do(tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]) -> None:
    while True:
        make, made = tasks.get()
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)


def _forked() -> None:
    """A forked child has no workers, no thread that starts them, and no locks held by other threads."""
    global _lock, _starting, _tasks
    _lock, _starting, _tasks = threading.Lock(), threading.Lock(), None
    for workers in list(_pools):
        workers.forget()
    _pools.clear()
    _warm.clear()


os.register_at_fork(after_in_child=_forked)


@atexit.register
def _end() -> None:
    for workers in _warm.values():
        workers.close()
    _warm.clear()
