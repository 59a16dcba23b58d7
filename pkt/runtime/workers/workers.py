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
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import IO, Any, NamedTuple, TextIO

from pkt.errors import CollectiveMismatch, PeerLost, RankFailed, Unsupported
from pkt.runtime.processes import rendezvous
from pkt.runtime.processes.transport import process_state
from pkt.runtime.workers import interrupts
from pkt.runtime.workers.carry import dumps, loads
from pkt.runtime.workers.pipe import Pipe

GRACE = 2.0  # seconds beyond the deadline in which the other ranks must come back once one has failed
IMPORTS = 120.0  # seconds in which a new process must have imported torch and Triton and taken its first job
_LOOK = 0.2  # seconds between two looks at the processes: a pipe stays open if a worker's child has inherited it
_PROGRAM = os.path.join(os.path.dirname(__file__), "start.py")

Answer = dict[str, Any]


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
            answers = _Launch(self._pipes, self._processes, jobs, timeout, self._new).answers()
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


class _State(NamedTuple):
    """How far one rank's worker is. at: when it last sent or took a byte."""

    at: float
    taken: bool = False


class _Launch:
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

    def answers(self) -> list[Answer]:
        """Every rank's answer, in rank order, each with the time of its arrival; "ended" in those of workers that
        cannot go on."""
        interrupted = False
        while self._states:
            try:
                ready = self._poller.poll(max(0.0, self._wait()) * 1e3)
            except KeyboardInterrupt:
                if interrupted or not self._pass_on():
                    raise
                interrupted = True
                continue
            ends = {self._pipes[rank].fileno(): rank for rank in self._states}
            for end, event in ready:
                self._serve(ends[end], event)
            for rank in [rank for rank in self._states if self._processes[rank].poll() is not None]:
                self._read_rest(rank)
            if not ready:
                self._find_stopped()
                self._give_up_late()
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
                env=variables,
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
