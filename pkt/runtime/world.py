"""World: the ranks that work together, the collective calls of host code, and what operators keep between calls."""

from __future__ import annotations

import itertools
import operator
import os
import weakref
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import triton.language as tl

from pkt.errors import Closed, DtypeError, RankError, Unsupported
from pkt.language.world import DeviceWorld, code_hash
from pkt.runtime.backend import Backend
from pkt.runtime.kept import Scope, entered, scratch
from pkt.runtime.launch.streams import OneInFlight
from pkt.runtime.memory.heap import SymmetricHeap, heap_bytes
from pkt.runtime.processes import wire

T = TypeVar("T")

_open: list[World] = []  # this process's worlds; the last one is current
_shared: weakref.WeakSet[World] = weakref.WeakSet()  # worlds of several processes that are not closed


def _current() -> World | None:
    """The world that host code runs in. The simulator, where many ranks share a thread, puts its own function here."""
    return _open[-1] if _open else None


def current_world(call: str = "pkt.current_world()") -> World:
    """The world this code runs in; Unsupported if there is none."""
    world = _current()
    if world is None:
        raise Unsupported.no_world(call)
    return world


class World:
    """One rank's view of the ranks that work together. Made by pkt.init() or pkt.launch().

    A context manager; `close()` may be called twice; every other use after it raises Closed. A process that is forked
    from a rank has no part in the world: every use there raises Closed, and close() does nothing. Threads of a rank
    must take turns with collective calls; a call during another thread's raises Unsupported.
    """

    def __init__(self, backend: Backend, heap: int | str | None = None, group: Any = None) -> None:
        """Collective: `heap` bytes (see pkt.init) of symmetric memory on `backend`. group: torch's process group of the
        same ranks, where there is one."""
        self._backend, self.group = backend, group
        self._closed = False
        self._pid = os.getpid()
        self._device: DeviceWorld | None = None
        self._heap = SymmetricHeap(backend, heap_bytes(heap), self)
        self._scopes = [Scope(self._heap)]  # the world's own, then those that are open, innermost last
        self.span = range(backend.base, backend.base + self._heap.capacity)
        """Addresses of this rank's window."""
        self.rank, self.size = backend.rank, backend.size
        self.torch_device, self.num_sms = backend.torch_device, backend.num_sms
        on_gpu = backend.torch_device.type == "cuda" and torch.cuda.is_available()
        self.streams = OneInFlight(backend.torch_device) if on_gpu else None
        if backend.timeout is not None:
            _shared.add(self)

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"World(rank {self.rank} of {self.size} on {self.torch_device}{closed})"

    @property
    def backend(self) -> Backend:
        """The machine below. Raises Closed after close()."""
        self._check("backend")
        return self._backend

    @property
    def heap(self) -> SymmetricHeap:
        """The symmetric heap. Raises Closed after close()."""
        self._check("heap")
        return self._heap

    @property
    def multicast(self) -> bool:
        """The multicast window exists, on every rank."""
        return self._backend.multicast

    @property
    def capturing(self) -> bool:
        """The current stream records a CUDA graph."""
        return self.streams is not None and self.streams.capturing()

    @property
    def device(self) -> DeviceWorld:
        """The `world` argument of a kernel, passed by value: rank, size and addresses, see pkt.language."""
        self._check("device")
        self._heap.agreement.settle()
        if self._device is None:
            backend = self._backend
            self._device = DeviceWorld(
                rank=backend.rank,
                size=tl.constexpr(backend.size),
                stride=tl.constexpr(backend.stride),
                multicast=tl.constexpr(backend.multicast),
                status=self._heap.tensor(self._heap.status),
                code=tl.constexpr(code_hash()),
            )
        return self._device

    # -------------------------------------------------------------------------------------------- collectives
    def barrier(self) -> None:
        """Collective: return when every rank has called it and its device work is done."""
        self._check("barrier()")
        self._heap.collective_point("barrier()")

    def synchronize(self) -> None:
        """Return when this rank's device work is done."""
        self._check("synchronize()")
        self._backend.synchronize()

    def all_gather_object(self, obj: T) -> list[T]:
        """Collective: every rank's `obj`, in rank order, each a copy. For the types see pkt.runtime.processes.wire."""
        self._check("all_gather_object()")
        what = "all_gather_object()"
        texts = self._backend.exchange(wire.encode(obj, "all_gather_object"), what)
        return [wire.received(text, self.rank, peer, what) for peer, text in enumerate(texts)]

    def broadcast(self, obj: T, root: int = 0) -> T:
        """Collective: a copy of `root`'s `obj`; the `obj` of other ranks is ignored. Raises RankError."""
        self._check("broadcast()")
        root = check_rank(root, self, "broadcast(root=)")
        text = wire.encode(obj, "broadcast") if self.rank == root else None
        what = f"broadcast() from rank {root}"
        return wire.received(self._backend.exchange(text, what)[root], self.rank, root, what)

    # ------------------------------------------------------------------------------------------ kept between calls
    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of the first `make()` for `key` in the innermost open scope, see pkt.runtime.kept: the buffers of
        an operator. Collective if `make` is. Raises Unsupported if it would have to call `make` during the capture of a
        CUDA graph."""
        self._check("keep()")
        scope = self._scopes[-1]
        if key not in scope.kept and self.capturing:
            raise Unsupported.captured(self.rank, key)
        return scope.keep(key, make)

    def scratch(self) -> AbstractContextManager[None]:
        """Collective: a scope around a search or an experiment. Operators inside find all that is kept already; what
        they keep in addition is given back at the end of the `with`.

        The end frees buffers and counters once the device work of every rank is done, and drops the plans. Tensors that
        the user allocated inside stay. Scopes may be nested. A graph that was captured inside must not be replayed
        afterwards. Raises SignalIndexError as SymmetricTensor.free does.

        On an exception nothing is freed and no rank is awaited, because the failure may be this rank's alone: the
        enclosing scope owns what was made. Ranks that leave the scope normally then wait there, and find this rank in
        another call, or lost.
        """
        self._check("scratch()")
        return scratch(self._scopes, self._heap)

    @contextmanager
    def using(self, workspace: Workspace, call: str) -> Iterator[None]:
        """Operators inside keep everything in `workspace`. Raises Closed if it is closed, DtypeError or Unsupported if
        it is no pkt.Workspace of this world."""
        if not isinstance(workspace, Workspace):
            raise DtypeError.argument(call, "workspace", type(workspace).__name__, "a pkt.Workspace", self.rank)
        if workspace.world is not self:
            found = f"found workspace {workspace.number} of another world"
            raise Unsupported.here(f"rank {self.rank}: {call}", found, "make one with pkt.Workspace(world)")
        if workspace.closed:
            raise Closed.used(self.rank, call, f"workspace {workspace.number}", "pkt.Workspace()")
        with entered(self._scopes, workspace):
            yield

    @property
    def handed_in(self) -> int | None:
        """The number of the pkt.Workspace that the current call was given; None if it was given none."""
        return self._scopes[-1].number

    @property
    def plans(self) -> dict[Hashable, Any]:
        """What operators derived from their arguments, in the innermost open scope; this rank's own. Raises Closed."""
        if self._closed:
            self._check("an operator")
        return self._scopes[-1].plans

    @property
    def lasting(self) -> MutableMapping[Hashable, Any]:
        """What the world's own scope keeps, whatever scopes are open: choices of the tuner, a process group, torch's
        pool. Raises Closed."""
        self._check("an operator")
        return self._scopes[0].kept.maps[0]

    def forget_plans(self) -> None:
        """Operators derive everything anew at their next call; buffers stay."""
        for scope in self._scopes:
            scope.plans.clear()

    def check(self) -> None:
        """Raise SignalIndexError if a guard word around this rank's signals was overwritten."""
        self._check("check()")
        self._heap.check_guards("check()")

    # --------------------------------------------------------------------------------------------------- life
    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    def close(self) -> None:
        """Release everything, after a check of the guard words. A second call does nothing."""
        if self._closed:
            return
        try:
            self._heap.check_guards("close()")
        finally:
            self._discard()

    def __enter__(self) -> World:
        self._check("with world")
        _open.append(self)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._backend.abandon(f"{type(error).__name__}: {error}")
            self._discard()  # without the check of guard words: the error that is raised says more

    def _discard(self) -> None:
        self._closed = True
        _shared.discard(self)
        self._heap.close()
        for scope in self._scopes:
            scope.clear()
        self._device = None
        _open[:] = [world for world in _open if world is not self]
        self._backend.close()

    def _check(self, call: str) -> None:
        if self._closed:
            if os.getpid() != self._pid:
                raise Closed.forked(self.rank, call, self._pid)
            raise Closed.used(self.rank, call)


def _forked() -> None:
    """In a forked process: its copies of the connections and of the journal's memory are the parent's."""
    for world in list(_shared):
        world._closed = True
        world._heap.close()
    _open[:] = [world for world in _open if world not in _shared]
    _shared.clear()


os.register_at_fork(after_in_child=_forked)


def check_rank(rank: Any, world: World | Backend, call: str) -> int:
    """`rank` as an int. Raises RankError if it is none from 0 to world.size - 1."""
    try:
        index = operator.index(rank)
    except TypeError:
        index = -1
    if not 0 <= index < world.size:
        raise RankError.outside(world.rank, call, rank, world.size)
    return index


def check_function(call: str, fn: Any, args: Any) -> None:
    """Raise DtypeError unless `fn` is a function and `args` a sequence of its further arguments."""
    if not callable(fn):
        raise DtypeError.argument(call, "fn", f"{type(fn).__name__} {fn!r:.40}", "a function of the world")
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise DtypeError.argument(call, "args", f"{type(args).__name__} {args!r:.40}", "a tuple, as in (x,)")


class Workspace(Scope):
    """Buffers, counters and plans of the calls that it is given to as `workspace=`. A context manager:

        with pkt.Workspace() as workspace:
            for x in layers:
                y = pkt.matmul_all_reduce(x, w, workspace=workspace)
        # its memory is free again

    Every rank makes its workspaces in the same order and gives them to the same calls; otherwise the first call with
    given shapes raises CollectiveMismatch. Making one allocates nothing and is not collective. The first call with
    given shapes allocates, so it must come before the capture of a graph. A workspace that is never closed lasts as
    long as the world.

    Calls with different workspaces share no memory. They still run in the order in which host code makes them, on
    whatever streams, like all operators of a world: each takes as many SMs as it can get, so two at once might each
    wait for peers that run the other.
    """

    def __init__(self, world: World | None = None) -> None:
        """world: the current one where None."""
        self.world = world or current_world("pkt.Workspace")
        super().__init__(self.world.heap)
        numbers = self.world.lasting.setdefault(_NUMBERS, itertools.count(1))
        self.number = next(numbers)  # by which ranks find out that they gave different ones to a call
        self.closed = False

    def __repr__(self) -> str:
        return f"Workspace({self.number} of {self.world}{', closed' if self.closed else ''})"

    def close(self) -> None:
        """Collective: free everything once the device work of every rank is done. A second call does nothing. Every
        other use afterwards raises Closed, and a graph that was captured with it must not be replayed. Raises
        SignalIndexError as SymmetricTensor.free does."""
        if not self.closed:
            self._forget()
            if not self.world.closed:
                self.free("Workspace.close()", f"the end of workspace {self.number}")

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
        else:  # the error may be this rank's alone, and freeing is collective: the memory stays allocated
            self._forget()

    def _forget(self) -> None:
        self.closed = True
        self.clear()


_NUMBERS = "pkt.Workspace"
