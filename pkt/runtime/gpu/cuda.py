"""CudaBackend: one rank's side of W processes on W GPUs, through the driver's virtual memory calls.

Each rank reserves (W + 1) * STRIDE bytes of addresses. Window r holds rank r's memory, window W the multicast object
where there is one. Memory comes in chunks: each rank creates one, all exchange file descriptors (fabric handles if they
are on several hosts), and each maps all W at the same offset of their windows. So the heap grows and nothing moves. The
ranks vote after every step that can fail on one of them, and every step registers its undo. A chunk therefore exists on
all ranks or on none, and close() leaves nothing behind.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pkt.errors import DriverError, Unsupported
from pkt.runtime.backend import Block
from pkt.runtime.gpu import alike, multicast, topology
from pkt.runtime.gpu.driver import CudaDriver, Shared
from pkt.runtime.gpu.votes import Votes, close_shared
from pkt.runtime.processes import journal
from pkt.runtime.processes.frames import close_fds
from pkt.runtime.processes.transport import Transport

STRIDE = 1 << 38  # bytes between two ranks' windows: more than any GPU holds, and 9 of them fit in 47 bits of address


class Recorded:
    """pkt.runtime.backend.Recorded: a graph of the driver's, given back with this object."""

    def __init__(self, driver: CudaDriver, graph: int) -> None:
        self._replay, self._graph = driver.replay, graph
        weakref.finalize(self, driver.forget, graph).atexit = False

    def replay(self, stream: int) -> None:
        self._replay(self._graph, stream)


class _Lent:
    """An attribute of a stream, which ends with the stream. A weak reference to the stream itself is of no use: torch
    2.11 never clears it, and Python crashes at exit when it collects it."""


class Engines:
    """pkt.runtime.backend.CopyEngines of one GPU."""

    def __init__(self, driver: CudaDriver, device: int) -> None:
        self._driver, self._device = driver, device
        self.allocation = driver.allocation  # itself, as it is asked for each tensor of a call

    def copy(
        self, target: int, source: int, shape: tuple[int, int, int], to: tuple[int, int], of: tuple[int, int],
        stream: int | None = None,
    ) -> None:  # fmt: skip
        self._driver.copy(target, source, shape, to, of, self._current() if stream is None else stream)

    def hold(self, address: int, value: int, stream: int) -> None:
        self._driver.hold(address, value, stream)

    def stream(self) -> torch.cuda.Stream:
        handle = self._driver.lend_stream(self._device)
        found = torch.cuda.ExternalStream(handle, device=self._device)
        lent = vars(found)["pkt.lent"] = _Lent()
        weakref.finalize(lent, self._driver.return_stream, self._device, handle).atexit = False
        return found

    def uncouple(self) -> None:
        self._driver.uncouple(self._current())

    def record(self, run: Callable[[], Any]) -> Recorded:
        return Recorded(self._driver, self._driver.record(run))

    def _current(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream


class CudaBackend:
    """pkt.runtime.backend.Backend over a CudaDriver and a Transport; made by `open_world` in pkt.runtime.bootstrap."""

    gap = 0
    timed = None
    arena, network, library = range(0), 0, ""
    capacity: int
    _granularity: int

    def __init__(
        self,
        driver: CudaDriver,
        transport: Transport,
        device: int,
        capacity: int,
        *,
        hosts: Sequence[str],
        stride: int = STRIDE,
        want_multicast: bool = True,
        node_size: int | None = None,
    ) -> None:
        """Collective; `hosts` by rank. node_size: None where every rank reaches every other one's memory. Raises
        Unsupported, with the matrix, where the GPUs cannot work together."""
        self.driver, self.transport, self.device_index = driver, transport, device
        self.rank, self.size = transport.rank, transport.size
        self.node_size = node_size or self.size
        self.torch_device = torch.device("cuda", device)
        self._undo = ExitStack()
        self._chunks: list[tuple[int, int]] = []  # offset and bytes of each chunk, in order
        self._check: Callable[[], None] = lambda: None  # of the watch, once there is one
        self._calling, self._call = threading.Lock(), ""  # held in a collective call, and its name
        self.copies = Engines(driver, device)
        self._votes = votes = Votes(transport, str(self.torch_device))
        one_node = self.node_size == self.size
        with ExitStack() as undo:
            undo.callback(transport.close)
            spans = len(set(hosts)) > 1
            mine = votes.attempt(lambda: topology.probe(driver, device, hosts[self.rank], spans and one_node))
            said = alike.said(capacity, transport.timeout, self.node_size, self.library)
            probes = transport.exchange(mine | {"alike": said}, "topology")
            alike.check([p["alike"] for p in probes])
            votes.check(probes, "topology")
            found = topology.assemble([p["value"] for p in probes])
            found.check(one_node)
            driver.fabric = spans
            self.num_sms, self.gpu = min(gpu.num_sms for gpu in found.gpus), found.gpus[0].name
            self._place_windows(capacity, stride, spans, undo)
            # Across hosts there is no memory that all processes map: the ranks compare heap calls one by one.
            self.journal = transport.journal = None if spans else self._make_journal(undo)
            self._multicast = multicast.create(
                votes, driver, device, self._granularity, self.capacity, want_multicast, found.multicast, undo
            )
            if self._multicast is not None:
                self._granularity, self.capacity = self._multicast.granularity, self._multicast.capacity
            self.multicast = self._multicast is not None
            self._undo = undo.pop_all()

    def _place_windows(self, capacity: int, stride: int, spans: bool, undo: ExitStack) -> None:
        """Collective: find addresses for the windows, of `capacity` bytes. spans: the ranks are on several hosts."""
        driver = self.driver
        granularity = self._votes.on_all(lambda: driver.granularity(self.device_index), "memory granularity")
        span = (self.size + 1) * stride

        def reserve() -> int:
            address = driver.reserve(span, granularity)
            undo.callback(driver.free, address, span)
            return address

        self._windows = self._votes.on_all(reserve, "reserving addresses")
        self.stride, self.base = stride, self._windows + self.rank * stride
        self.capacity = min(-(-capacity // granularity) * granularity, stride)
        self._granularity = granularity

    @property
    def near(self) -> range:
        """The ranks of this rank's node."""
        first = self.rank // self.node_size * self.node_size
        return range(first, first + self.node_size)

    @property
    def timeout(self) -> float:
        """Seconds that a host call waits for another rank's process."""
        return self.transport.timeout

    # ------------------------------------------------------------------------------------------------------- the memory
    def window(self, rank: int) -> int:
        return self._windows + rank * self.stride

    def view(self, rank: int, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return self.driver.view(self._windows + rank * self.stride + offset, nbytes, self.device_index, dtype)

    def reserve(self, nbytes: int) -> None:
        have = sum(size for _, size in self._chunks)
        wanted = -(-nbytes // self._granularity) * self._granularity
        if wanted <= have:
            return
        size = wanted - have
        with ExitStack() as undo:
            self._grow(have, size, undo)
            self._chunks.append((have, size))
            # close() undoes it with everything else, last in, first out.
            self._undo.push(undo.pop_all())

    def _grow(self, offset: int, size: int, undo: ExitStack) -> None:
        """Map a chunk of `size` bytes at `offset` of every window, on every rank, or on none."""
        what = f"growing the heap to {offset + size} bytes"
        sent: list[Shared] = []
        made = self._votes.attempt(lambda: self._create(size, sent))
        handle = made.get("value", 0)
        if sent:
            undo.callback(self.driver.release, handle)
        said, received = self._votes.share(made, sent, what)
        try:
            self._votes.check(said, what, offset + size)
            odd = {r: len(some) for r, some in received.items() if len(some) != 1}

            def attach() -> None:
                if odd:
                    raise DriverError.handles(self.rank, odd)
                for peer in range(self.size):
                    self._map(peer, offset, size, handle if peer == self.rank else received[peer][0], undo)

            self._votes.on_all(attach, what, offset + size)
        finally:
            close_shared(received)
        if self._multicast is not None:
            bound = self._multicast.bind(self._windows + self.size * self.stride, offset, size, handle, undo)
            if not bound and offset:  # kernels may use the window already: too late to go on without it
                raise DriverError.left_behind(what)
            if not bound:
                self.multicast, self._multicast = False, None

    def _create(self, size: int, sent: list[Shared]) -> int:
        handle = self.driver.create(self.device_index, size)
        try:
            sent.append(self.driver.export(handle))
        except DriverError:
            self.driver.release(handle)
            raise
        return handle

    def _map(self, peer: int, offset: int, size: int, source: Shared, undo: ExitStack) -> None:
        """Map `source` (this rank's handle, or what a peer exported) into `peer`'s window; only the map keeps the
        memory."""
        driver, address = self.driver, self._windows + peer * self.stride + offset
        handle = int(source) if peer == self.rank else driver.import_memory(source)
        try:
            driver.map(address, size, handle)
            undo.callback(driver.unmap, address, size)
        finally:
            if peer != self.rank:
                driver.release(handle)
        driver.allow(address, size, self.device_index)

    def allocated(self, block: Block, among: tuple[int, ...] | None = None) -> None:
        """Nothing to do: the GPU does not check accesses."""

    def freed(self, block: Block, among: tuple[int, ...] | None = None) -> None:
        """Nothing to do."""

    def attach(self, check: Callable[[], None], close: Callable[[], None]) -> None:
        """Call `check` after every synchronisation, and `close` when the world ends."""
        self._check = check
        self._undo.callback(close)

    # ------------------------------------------------------------------------------------------------------- together
    def exchange(self, value: Any, what: str, among: tuple[int, ...] | None = None) -> list[Any]:
        with self._alone(what):
            return self.transport.exchange(value, what, among)

    def barrier(self, what: str) -> None:
        with self._alone(what):
            self.transport.barrier(what)

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Raise Unsupported if another thread of this rank is in a collective call: the ranks could pair the calls
        differently, and give a thread the values of another one's call."""
        if not self._calling.acquire(blocking=False):
            found = f"found a thread of this rank in another collective call, {self._call}"
            remedy = "make a world's collective calls from one thread at a time, in the same order on every rank"
            raise Unsupported.here(f"rank {self.rank}: {what}", found, remedy)
        try:
            self._call = what
            yield
        finally:
            self._calling.release()

    def synchronize(self) -> None:
        self.driver.synchronize(self.device_index)
        self._check()

    def left(self, rank: int) -> bool:
        """Whether `rank` closed its world, so that the end of its connection is no loss."""
        return self.transport.left(rank)

    def abandon(self, why: str, lost: Mapping[int, str]) -> None:
        """Tell the other ranks that an error ends this rank's world; close() follows. lost: ranks that it names."""
        self.transport.give_up(why, lost)

    def close(self) -> None:
        """Undo everything, last first. Idempotent; if one step fails, the others are undone all the same."""
        if not self.transport.closed:
            (self.journal or self.transport).leave()
        self._chunks.clear()
        self._undo.close()

    def _make_journal(self, undo: ExitStack) -> journal.SharedJournal:
        mine = journal.create()
        try:
            send = {r: [mine] for r in range(self.size) if r != self.rank}
            _, received = self.transport.exchange_fds(None, send, "journal")
            try:
                fds = [[mine] if r == self.rank else received[r] for r in range(self.size)]
                log = journal.SharedJournal(self.rank, fds, self.transport.timeout, self.transport.check)
            finally:
                close_fds([fd for some in received.values() for fd in some])
        finally:
            os.close(mine)
        undo.callback(log.close)
        return log
