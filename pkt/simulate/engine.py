"""Backward passes and compiled functions of simulated ranks: each has a thread of its own while it runs.

Ranks are greenlets of one thread. Autograd's engine, the compiler and torch's calls of ops keep what they are doing for
each thread: if a rank waited for a peer inside one of these, and the peer began one, the engine would run either rank's
nodes for the other, and torch would abort. So the thread runs the code, and the rank's greenlet leaves and comes back
for it. Only one of the two runs at a time. Autograd numbers its nodes for each thread, and differentiates those with
higher numbers first: so the numbers go on from thread to thread.

On GPUs torch's own work is ordered after a launch by the stream. Here it is done at once, by code that no watch sees
(see pkt.simulate.stream), so in such a thread the host waits for each launch.
"""

from __future__ import annotations

import contextvars
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import _TorchDispatchModeKey as Key

from pkt.simulate import modes

_running: list[tuple[Any, int]] = []  # machines, innermost last, and their threads
_idle: list[_Thread] = []
os.register_at_fork(after_in_child=_idle.clear)  # a fork copies no other thread


class _Thread:
    """A thread that runs one piece of code after another. Its numbers of nodes go on, where a new thread would have to
    count up to those of the simulation."""

    def __init__(self) -> None:
        self._code: Callable[[], Any] | None = None
        self._given, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._python = threading.Thread(target=self._run, daemon=True, name="pkt: host code of a simulated rank")
        self._python.start()

    def begin(self, code: Callable[[], Any] | None) -> None:
        """Run `code` next. None: end."""
        self._code = code
        self._given.release()

    def rest(self) -> None:
        """Return when the thread has run the code and holds nothing of it, and is idle."""
        self._done.acquire()
        _idle.append(self)

    def end(self) -> None:
        """Return when the thread, which is idle, has ended."""
        self.begin(None)
        self._python.join()

    def _run(self) -> None:
        while True:
            self._given.acquire()
            code, self._code = self._code, None
            if code is None:
                return
            code()
            del code
            self._done.release()


def idle() -> int:
    """How many threads run nothing."""
    return len(_idle)


def end_idle() -> None:
    """End the threads that run nothing."""
    while _idle:
        _idle.pop().end()


class Aside:
    """Host code of a rank in another thread than the simulation's."""

    def __init__(self, hub: Any) -> None:
        self.hub, self.frame = hub, sys._getframe(2)
        self._asked, self._answered = threading.Semaphore(0), threading.Semaphore(0)
        self.thread: int | None = None
        """Where the code runs."""
        self._ended = False
        self._next = 0  # the number of the next node, at the end
        self._result: Any = None
        self._error: BaseException | None = None  # of the code, at the end
        self._thrown: BaseException | None = None  # into the greenlet while the code waited

    def run(self, code: Callable[[], Any], wanted: modes.Modes) -> Any:
        """What `code()` returns or raises in these modes. Called in the rank's greenlet, which goes on when that has
        ended."""
        _hold_guard()
        # With the caller's context variables: among them are numpy's, by which kernels do not warn of an overflow.
        context = contextvars.copy_context()
        first = _next_number()
        thread = _idle.pop() if _idle else _Thread()
        thread.begin(functools.partial(context.run, self._body, code, wanted, first))
        while True:
            self._asked.acquire()
            if self._ended:
                break
            try:
                self.hub.switch()
            except BaseException as thrown:  # the end of the run: it goes through the code in the thread
                self._thrown = thrown
            self._answered.release()
        thread.rest()
        _number_from(self._next)
        if self._error is not None:
            raise self._error
        return self._result

    def _body(self, code: Callable[[], Any], wanted: modes.Modes, first: int) -> None:
        self.thread = threading.get_ident()
        _number_from(first)
        guard = modes.Guard(wanted)
        try:
            self._result = code()
        except BaseException as error:
            self._error = error
        finally:
            guard.leave()
            self._ended, self._next = True, _next_number()
            self._asked.release()

    def leave(self) -> None:
        """In the thread: let other tasks run, as the greenlet would."""
        self._asked.release()
        self._answered.acquire()
        if self._thrown is not None:
            thrown, self._thrown = self._thrown, None
            raise thrown


def _next_number() -> int:
    """The number of the next node that this thread makes."""
    return torch._C._autograd._get_sequence_nr()


def _number_from(first: int) -> None:
    """Give the nodes that this thread makes numbers from `first` on."""
    for _ in range(first - _next_number()):
        torch._C._functions.UndefinedGrad()  # a node, which takes a number


@functools.cache
def _hold_guard() -> None:
    """Call torch's `_ensureCUDADeviceGuardSet` in a thread that does not end.

    Fake tensors call it where torch is built for CUDA and finds no GPU. Before torch 2.13 it may put an object of the
    calling thread into a table of all threads (pytorch #178950): when this thread has ended, the next call from
    another is a segmentation fault."""
    if torch.__version__ >= "2.13" or not torch.backends.cuda.is_built() or torch.cuda.is_available():
        return
    if threading.current_thread() is threading.main_thread():
        torch._C._ensureCUDADeviceGuardSet()
        return
    held = threading.Event()

    def hold() -> None:
        torch._C._ensureCUDADeviceGuardSet()
        held.set()
        threading.Event().wait()

    threading.Thread(target=hold, daemon=True, name="pkt: torch's CUDA guard").start()
    held.wait()


def aside(code: Callable[[], Any]) -> Any:
    """What `code()` returns: in a thread, if a simulated rank calls this and is in none."""
    if not _running:
        return code()
    machine, thread = _running[-1]
    task = machine.current
    if task is None or not task.is_host or threading.get_ident() != thread or _tracing():
        return code()
    if torch._C._are_functorch_transforms_active():  # each thread has its own; operators refuse to run inside
        return code()
    machine.finish_launches()
    task.aside = Aside(machine.hub)
    try:
        return task.aside.run(code, modes.inherited(machine.stream.watch_of(task.rank)))
    finally:
        task.aside = None


def _tracing() -> bool:
    """Whether tensors stand for others in a graph: then nothing is launched."""
    return any(torch._C._get_dispatch_mode(key) is not None for key in (Key.FAKE, Key.FUNCTIONAL, Key.PROXY))


class _Engine:
    """Stands in for autograd's engine while ranks are simulated."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """As the engine's."""
        return aside(lambda: self._engine.run_backward(*args, **kwargs))


def _compiling(compile: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile while ranks are simulated."""

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return aside(lambda: function(*args, **kwargs))

        return called

    @functools.wraps(compile)
    def compiled(model: Any = None, **options: Any) -> Any:
        found = compile(model, **options)
        if model is None:  # a decorator, which calls torch.compile
            return found
        if isinstance(found, torch.nn.Module):
            found.forward = wrapped(found.forward)
            return found
        return wrapped(found)

    return compiled


@contextmanager
def running(machine: Any) -> Iterator[None]:
    """Inside the `with`, backward passes and compiled functions of the machine's ranks run in threads."""
    variable: Any = torch.autograd.Variable
    engine, compile = variable._execution_engine, torch.compile
    variable._execution_engine, torch.compile = _Engine(engine), _compiling(compile)
    _running.append((machine, threading.get_ident()))
    try:
        yield
    finally:
        _running.pop()
        variable._execution_engine, torch.compile = engine, compile
