"""Compile the kernels that a call would launch, without launching them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from pkt.runtime.gpu.driver import CudaDriver
from pkt.tune.votes import reason


def compile_all(
    calls: Sequence[Callable[[], Any]],
    threads: int,
    begin: float,
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> dict[int, str]:
    """Make every call, in order, with launches that only compile; compile in `threads`. Returns the index of each call
    with a kernel that could not be compiled, and why.

    begin: where in the list of kernels to begin, from 0 to 1. The ranks of a host share Triton's cache, so each begins
    elsewhere and finds the kernels that others have compiled. around: gives the context in which a call is made. An
    exception of the call itself is no failure, because its host code sees results that were not computed; the call's
    first run will tell.
    """
    launched: list[_Launched] = []
    later = _Later()
    with triton.AsyncCompileMode(later, ignore_errors=True):
        for call in calls:
            with around(), _compiling() as found, contextlib.suppress(Exception):
                call()
            launched.append(found)
        later.run(threads, begin)
    return {i: why for i, found in enumerate(launched) if (why := found.failure())}


class _Launched:
    """The kernels that a call would have launched, compiled now or later, and why one of them was refused."""

    def __init__(self) -> None:
        self.kernels: list[Any] = []
        self.refused = ""

    def failure(self) -> str:
        try:
            for kernel in self.kernels:
                if hasattr(kernel, "result"):  # else it was compiled before
                    kernel.result()
        except Exception as error:
            return reason(error)
        return self.refused


_threads: set[int] = set()  # their launches only compile


def only_compiling() -> bool:
    """Whether launches of this thread only compile now, so that no time can be taken."""
    return threading.get_ident() in _threads


@contextlib.contextmanager
def _compiling() -> Iterator[_Launched]:
    """In this context the thread's launches only compile, Triton's own autotuner compiles all its configs, copy engines
    copy nothing, and no stream waits for a kernel's counter."""
    launch, tune, thread, found = JITFunction.run, Autotuner.run, threading.get_ident(), _Launched()
    queued = {name: getattr(CudaDriver, name) for name in ("copy", "hold")}

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        if not only_compiling():
            return launch(self, *args, grid=grid, warmup=warmup, **named)
        try:
            found.kernels.append(launch(self, *args, grid=grid, warmup=True, **named))
        except Exception as error:
            found.refused = reason(error)
            raise
        return found.kernels[-1]

    def autotuned(self: Autotuner, *args: Any, warmup: bool = False, **named: Any) -> Any:
        return self.warmup(*args, **named) if only_compiling() else tune(self, *args, warmup=warmup, **named)

    def unless_compiling(queue: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: None if only_compiling() else queue(*args)

    JITFunction.run, Autotuner.run = run, autotuned
    for name, queue in queued.items():
        setattr(CudaDriver, name, unless_compiling(queue))
    _threads.add(thread)
    try:
        yield found
    finally:
        JITFunction.run, Autotuner.run = launch, tune
        for name, queue in queued.items():
            setattr(CudaDriver, name, queue)
        _threads.discard(thread)


class _Later(Executor):
    """An executor that collects tasks until `run`."""

    def __init__(self) -> None:
        self.tasks: list[tuple[Future, Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **named: Any) -> Future:
        future: Future = Future()
        self.tasks.append((future, lambda: fn(*args, **named)))
        return future

    def run(self, threads: int, begin: float) -> None:
        """Run all tasks, those from `begin` on first."""
        at = int(begin * len(self.tasks))
        with ThreadPoolExecutor(threads) as pool:
            for future, task in (*self.tasks[at:], *self.tasks[:at]):
                pool.submit(_complete, future, task)


def _complete(future: Future, task: Callable[[], Any]) -> None:
    try:
        future.set_result(task())
    except BaseException as error:
        future.set_exception(error)
