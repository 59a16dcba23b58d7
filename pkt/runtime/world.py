"""World: who takes part, and the collective calls of host code."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch
import triton.language as tl

from pkt.errors import Closed, ShapeError, Unsupported
from pkt.language.world import DeviceWorld, code_hash
from pkt.runtime import scratch as _scratch
from pkt.runtime.backend import Backend
from pkt.runtime.launch.streams import OneInFlight
from pkt.runtime.memory.heap import SymmetricHeap, heap_bytes
from pkt.runtime.processes import wire
from pkt.wording import size_text

T = TypeVar("T")

_open: list[World] = []  # this process's worlds; the last one is current


def _last_open() -> World | None:
    return _open[-1] if _open else None


# Which world host code runs in. The simulator, where many ranks share a thread, puts its own function here
# for a run.
_current: Callable[[], World | None] = _last_open


def current_world(call: str = "pkt.current_world()") -> World:
    """The world this code runs in; Unsupported if there is none."""
    world = _current()
    if world is None:
        raise Unsupported.no_world(call)
    return world


class World:
    """One rank's view of the ranks that work together. Made by pkt.init() or pkt.launch().

    A context manager; `close()` may be called twice; every other use after it raises Closed.
    """

    def __init__(self, backend: Backend, heap: int | str | None = None, group: Any = None) -> None:
        """Collective: `heap` bytes (see pkt.init) of symmetric memory on `backend`. group: torch's process group of the
        same ranks, if there is one."""
        self._backend, self.group = backend, group
        self._closed = False
        self._device: DeviceWorld | None = None
        self._workspaces: dict[Hashable, Any] = {}
        self._plans: dict[Hashable, Any] = {}
        self._lasting: dict[Hashable, Any] = {}
        self._scopes: list[_scratch.Made] = []
        self.handed_in: int | None = None
        """The number of the pkt.Workspace that the call under way was given; None: it keeps what it needs here."""
        self._heap = SymmetricHeap(backend, heap_bytes(heap))
        self._heap.world = self
        self.span = range(backend.base, backend.base + self._heap.capacity)
        """Addresses of this rank's window."""
        self.rank, self.size = backend.rank, backend.size
        self.torch_device, self.num_sms = backend.torch_device, backend.num_sms
        on_gpu = backend.torch_device.type == "cuda" and torch.cuda.is_available()
        self.streams = OneInFlight(backend.torch_device) if on_gpu else None

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"World(rank {self.rank} of {self.size} on {self.torch_device}{closed})"

    @property
    def backend(self) -> Backend:
        """What lies below; Closed after close()."""
        self._check("backend")
        return self._backend

    @property
    def heap(self) -> SymmetricHeap:
        """The symmetric heap; Closed after close()."""
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
        """What a kernel needs to know of the world, by value: the `world` argument of pkt.language."""
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
        """Collective: return when every rank has come here and its device work is done."""
        self._check("barrier()")
        self._heap.collective_point("barrier()")

    def synchronize(self) -> None:
        """Return when this rank's device work is done."""
        self._check("synchronize()")
        self._backend.synchronize()

    def all_gather_object(self, obj: T) -> list[T]:
        """Collective: every rank's `obj`, in rank order; each is a copy. For what is carried see
        pkt.runtime.processes.wire."""
        self._check("all_gather_object()")
        texts = self._backend.exchange(wire.encode(obj, "all_gather_object"), "all_gather_object()")
        return [wire.decode(text) for text in texts]

    def broadcast(self, obj: T, root: int = 0) -> T:
        """Collective: a copy of `root`'s `obj`; what other ranks give is ignored. Raises RankError."""
        from pkt.runtime.memory.tensor import check_rank

        self._check("broadcast()")
        root = check_rank(root, self, "broadcast(root=)")
        text = wire.encode(obj, "broadcast") if self.rank == root else None
        return wire.decode(self._backend.exchange(text, f"broadcast() from rank {root}")[root])

    def workspace(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make()` returned for `key` the first time: buffers that live as long as the world, or as the
        pkt.Workspace that was given to the operator that asks. Collective if make is. Raises Unsupported where it
        would have to be made while a CUDA graph is captured."""
        self._check("workspace()")
        if key not in self._workspaces:
            if self.capturing:
                raise Unsupported.captured(self.rank, key)
            with _scratch.made(self):
                self._workspaces[key] = make()
        return self._workspaces[key]

    def scratch(self) -> AbstractContextManager[None]:
        """Collective, a context: on leaving it the workspaces and plans that were made inside are forgotten, and the
        symmetric memory that those workspaces allocated is free again. The next call makes them anew.

        What was there before stays, and so does what was allocated inside but not by a workspace. Scopes may be nested.
        A graph that was captured inside must not be replayed afterwards. Left by an exception, a scope frees nothing
        and meets nobody, because it may be one rank's alone: what was made stays, to an enclosing scope or the world;
        peers that left it otherwise wait there, and find this rank in another call, or lost. Raises SignalIndexError
        as SymmetricTensor.free does.
        """
        self._check("scratch()")
        return _scratch.scratch(self)

    @contextmanager
    def _keeping(
        self, number: int, workspaces: dict[Hashable, Any], plans: dict[Hashable, Any], made: _scratch.Made
    ) -> Iterator[None]:
        """Workspaces and plans are kept in these meanwhile, and what the former allocate is noted in `made`."""
        before = self.handed_in, self._workspaces, self._plans
        self.handed_in, self._workspaces, self._plans = number, workspaces, plans
        self._scopes.append(made)
        try:
            yield
        finally:
            self._scopes.pop()
            self.handed_in, self._workspaces, self._plans = before

    @property
    def plans(self) -> dict[Hashable, Any]:
        """What operators have found out about their arguments, by those; this rank's own. Closed after close()."""
        self._check("an operator")
        return self._plans

    @property
    def lasting(self) -> dict[Hashable, Any]:
        """What is no buffer of an operator and known as long as the world: choices of the tuner, a process group,
        torch's pool. Closed after close()."""
        self._check("an operator")
        return self._lasting

    def check(self) -> None:
        """Raise SignalIndexError if a guard word around this rank's signals was overwritten."""
        self._check("check()")
        self._heap.check_guards("check()")

    # --------------------------------------------------------------------------------------------------- life
    @property
    def closed(self) -> bool:
        """close() was called."""
        return self._closed

    def close(self) -> None:
        """Give everything back; guard words are checked first. A second call does nothing."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            abandon = getattr(self._backend, "abandon", None)
            if abandon is not None:
                abandon(f"{type(error).__name__}: {error}")
            self._discard()  # the error on its way out says more than a guard word

    def _discard(self) -> None:
        self._closed = True
        self._heap.close()
        self._workspaces.clear()
        self._plans.clear()
        self._lasting.clear()
        self._device = None
        _open[:] = [world for world in _open if world is not self]
        self._backend.close()

    def _check(self, call: str) -> None:
        if self._closed:
            raise Closed.used(self.rank, call)


def init(
    heap: int | str | None = None,
    *,
    group: Any = None,
    timeout: float | None = None,
    multicast: bool = True,
) -> World:
    """The world of this process: the one it runs in, or a new one over its GPU.

    group: a ProcessGroup or a DeviceMesh of one dimension (mesh["tp"]) whose ranks make the world; without it the
    default process group, else torchrun's environment, else this process alone. Rank and size are those of the group.
    timeout: seconds for every step of the rendezvous and every wait (PKT_TIMEOUT, then 60 where None). multicast: False
    does without the multicast window; it is used only if every rank has it. heap: most bytes of symmetric memory a rank
    may come to hold ("8GiB" or a number; PKT_HEAP, then 1 GiB where None). Inside pkt.launch the world is there
    already. Raises Unsupported where there is no GPU, with what to do instead, and where the ranks' GPUs cannot work
    together, with a table of them: ranks on several hosts need one NVLink domain over these.
    """
    world = _current()
    if world is not None and group is None:
        if heap is not None and heap_bytes(heap) > world.heap.capacity:
            found, wanted = size_text(heap_bytes(heap)), size_text(world.heap.capacity)
            wanted = f"at most {wanted}, which this world was made with"
            raise ShapeError.argument("pkt.init", "heap", found, wanted, world.rank)
        return world
    if not torch.cuda.is_available():
        raise Unsupported.no_gpu("pkt.init()", "found no CUDA GPU here and no world around this code")
    from pkt.runtime import bootstrap  # the driver's bindings load only where they are used
    from pkt.runtime.processes.transport import timeout_seconds

    seconds = timeout_seconds(timeout)
    where = bootstrap.place(group, seconds)
    world = bootstrap.open_world(where, bootstrap.own_device(), heap, seconds, multicast=multicast)
    _open.append(world)
    return world
