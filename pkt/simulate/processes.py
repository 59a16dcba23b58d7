"""One function's calls shared out among forked processes, with their results in order.

A forked process has everything that this one has loaded, translated and checked, and the function itself, which may be
a lambda of a notebook: only results are pickled. A fork copies the thread that forks and no other, whose locks would
stay locked. So `processes` says 1 where there are other threads.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import greenlet
import torch

from pkt.errors import PktError
from pkt.simulate import engine

A = TypeVar("A")
B = TypeVar("B")

ALONE = 0.3  # seconds of work, and of work still to do, below which this process does it alone
_PR_SET_PDEATHSIG = 1


class ProcessDied(PktError):
    """A process ended without a result."""


def processes() -> int:
    """How many processes may share work now: one a core, or 1 where a fork is not safe or tests have the cores."""
    threads = threading.active_count() - engine.idle()
    if not sys.platform.startswith("linux") or threads > 1 or torch.cuda.is_initialized():
        return 1
    if greenlet.getcurrent().parent is not None or multiprocessing.parent_process() is not None:
        return 1  # a simulated rank, or one of several processes
    cores = len(os.sched_getaffinity(0))
    return 1 if cores == 1 or "PYTEST_CURRENT_TEST" in os.environ or _differentiates() else cores


def _differentiates() -> bool:
    """Whether autograd has threads for GPUs: torch then computes no gradients in a forked process."""
    with suppress(OSError):
        return any(name.read_text().startswith("pt_autograd") for name in Path("/proc/self/task").glob("*/comm"))
    return True  # a thread has just ended


def each(call: Callable[[A], B], items: Sequence[A], count: int | None) -> Generator[B, None, None]:
    """Yield `call(item)` for every item, in order. What takes longer than a moment is shared among `count` processes;
    None: as many as `processes` then says. A call's exception is raised in its place. Close the iterator to end the
    processes."""
    start = time.perf_counter()
    for at, item in enumerate(items):
        spent = time.perf_counter() - start
        if at and spent > ALONE and spent / at * (len(items) - at) > ALONE:
            several = min(processes() if count is None else count, len(items) - at)
            if several > 1:
                with closing(_shared(call, items[at:], several)) as rest:
                    yield from rest
                return
        yield call(item)


def _shared(call: Callable[[A], B], items: Sequence[A], count: int) -> Generator[B, None, None]:
    """Process k of `count` has the items k, k + count, and so on. Where so many cannot start, this process has all."""
    engine.end_idle()
    fork = multiprocessing.get_context("fork")
    children: list[tuple[Any, Connection]] = []
    try:
        try:
            for k in range(count):
                mine, its = fork.Pipe(duplex=False)
                # A daemon: Ctrl-C between results leaves the iterator open, and Python's exit joins what is not one.
                child = fork.Process(target=_work, args=(call, items[k::count], its, os.getpid()), daemon=True)
                child.start()
                its.close()  # so that reading ends when the child does
                children.append((child, mine))
        except OSError:  # no memory, process or descriptor is left
            _end(children)
        if not children:
            yield from map(call, items)
            return
        for at, item in enumerate(items):
            child, pipe = children[at % count]
            try:
                message = pipe.recv_bytes()
            except EOFError:
                child.join()
                raise ProcessDied(
                    f"pkt.simulate: found a process that ended with status {child.exitcode} before its last schedule; "
                    "processes=1 runs all schedules in this process"
                ) from None
            if not message:  # what cannot be pickled, this process finds itself
                yield call(item)
                continue
            result, error = pickle.loads(message)
            if error is not None:
                raise error
            yield result
    finally:
        _end(children)


def _end(children: list[tuple[Any, Connection]]) -> None:
    """Kill the processes, and empty the list."""
    while children:
        child, pipe = children.pop()
        child.kill()
        child.join()
        pipe.close()


def _work(call: Callable[[A], B], items: Sequence[A], pipe: Connection, parent: int) -> None:
    """Send (result, None) of each item, or (None, exception); an empty message if that cannot be pickled."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)
    for item in items:
        found: tuple[Any, BaseException | None]
        try:
            found = call(item), None
        except BaseException as error:
            found = None, error
        try:
            message = pickle.dumps(found)
        except Exception:
            message = b""
        pipe.send_bytes(message)
