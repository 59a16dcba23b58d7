"""CudaBackend: one rank's side of W processes on W GPUs, through the driver's virtual memory calls.

One reservation of (W + 1) * STRIDE bytes; window r holds rank r's memory, window W the multicast object where there is
one. Memory comes in chunks: each rank creates one, all exchange file descriptors (fabric handles where they are on
several hosts), each maps all W at the same offset of their windows. So the heap grows and nothing moves. Every step
that can fail on one rank is followed by a vote, and every step registers its undo: a chunk either exists on all ranks
or on none, and what is left after close() is nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pkt.errors import AllocationMismatch, DriverError, HeapFull, PeerLost
from pkt.runtime.backend import Block
from pkt.runtime.gpu import handles, multicast, topology
from pkt.runtime.gpu.driver import OUT_OF_MEMORY, Driver, Shared
from pkt.runtime.processes import journal
from pkt.runtime.processes.frames import close_fds
from pkt.runtime.processes.transport import Transport
from pkt.wording import size_text

if TYPE_CHECKING:
    from pkt.runtime.gpu.watch import Watch

STRIDE = 1 << 38  # bytes between two ranks' windows: more than any GPU holds, and 9 of them fit in 47 bits of address
T = TypeVar("T")


class CudaBackend:
    """pkt.runtime.backend.Backend over a Driver and a Transport; made by `open_world` in pkt.runtime.bootstrap."""

    gap = 0

    def __init__(
        self,
        driver: Driver,
        transport: Transport,
        device: int,
        capacity: int,
        *,
        hosts: Sequence[str],
        stride: int = STRIDE,
        want_multicast: bool = True,
    ) -> None:
        """Collective; `hosts` by rank. Raises Unsupported, with the matrix, where the GPUs cannot work together."""
        self.driver, self.transport, self.device_index = driver, transport, device
        self.rank, self.size = transport.rank, transport.size
        self.torch_device = torch.device("cuda", device)
        self.stride = stride
        self._undo = ExitStack()
        self._chunks: list[tuple[int, int]] = []  # offset and bytes of each chunk, in order
        self._watch: Watch | None = None
        self._own: list[int] = []  # handles of this rank's own memory, for the multicast object
        with ExitStack() as undo:
            undo.callback(transport.close)
            spans = len(set(hosts)) > 1
            mine = self._safely(lambda: topology.probe(driver, device, hosts[self.rank], spans)) | {"heap": capacity}
            probes = transport.exchange(mine, "topology")
            if len({p["heap"] for p in probes}) > 1:
                raise AllocationMismatch.differs("heap=", {r: size_text(p["heap"]) for r, p in enumerate(probes)})
            self._raise_any({r: p for r, p in enumerate(probes) if "error" in p}, "topology")
            self.topology = topology.assemble([p["value"] for p in probes])
            self.topology.check()
            driver.fabric = spans
            self.num_sms = self.topology.gpus[self.rank].num_sms
            self.granularity = self._vote(lambda: driver.granularity(device), "memory granularity")
            self.capacity = min(-(-capacity // self.granularity) * self.granularity, stride)
            span = (self.size + 1) * stride
            address = self._vote(
                lambda: self._keep(undo, driver.reserve(span, self.granularity), driver.free, span),
                "reserving addresses",
            )
            self._windows = address
            self.base = address + self.rank * stride
            # Across hosts there is no memory that all processes map: the ranks compare heap calls one by one.
            self.journal = None if spans else self._make_journal(undo)
            self.multicast_object = multicast.create(self, want_multicast, undo)
            self.multicast = self.multicast_object is not None
            self._undo = undo.pop_all()

    # ------------------------------------------------------------------------------------------------------- the memory
    def view(self, rank: int, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return self.driver.view(self._windows + rank * self.stride + offset, nbytes, self.device_index, dtype)

    def reserve(self, nbytes: int) -> None:
        have = sum(size for _, size in self._chunks)
        wanted = -(-nbytes // self.granularity) * self.granularity
        if wanted <= have:
            return
        size = wanted - have
        with ExitStack() as undo:
            self._grow(have, size, undo)
            self._chunks.append((have, size))
            # Undone last in, first out, with everything else at close().
            self._undo.push(undo.pop_all())

    def _grow(self, offset: int, size: int, undo: ExitStack) -> None:
        """Map a chunk of `size` bytes at `offset` of every window, on every rank, or on none."""
        what = f"growing the heap to {offset + size} bytes"
        sent: list[Shared] = []  # an open descriptor pins the memory: closed as soon as the peers have theirs
        try:
            made = self._safely(lambda: self._create(size, sent))
            handle = made.pop("value", 0)
            if sent:
                undo.callback(lambda: self._release_own(handle))
                self._own.append(handle)
            said, received = handles.exchange(self.transport, made, sent, what)
        finally:
            handles.close(sent)
        try:
            self._raise_any({r: s for r, s in enumerate(said) if "error" in s}, what, offset + size)
            odd = {r: len(some) for r, some in received.items() if len(some) != 1}

            def attach() -> None:
                if odd:
                    raise DriverError.handles(self.rank, odd)
                for peer in range(self.size):
                    self._map(peer, offset, size, handle if peer == self.rank else received[peer][0], undo)

            self._vote(attach, what, offset + size)
        finally:
            handles.close(shared for some in received.values() for shared in some)
        if self.multicast_object is not None:
            bound = self.multicast_object.bind(self, offset, size, handle, undo)
            if not bound and offset:  # kernels may have been told of the window: too late to do without it
                raise DriverError.left_behind(what)
            if not bound:
                self.multicast, self.multicast_object = False, None

    def _create(self, size: int, sent: list[Shared]) -> int:
        handle = self.driver.create(self.device_index, size)
        try:
            sent.append(self.driver.export(handle))
        except DriverError:
            self.driver.release(handle)
            raise
        return handle

    def _release_own(self, handle: int) -> None:
        self._own.remove(handle)
        self.driver.release(handle)

    def _map(self, peer: int, offset: int, size: int, source: Shared, undo: ExitStack) -> None:
        """Map `source` (my handle, or what a peer exported) into `peer`'s window; the map alone keeps the memory."""
        driver, address = self.driver, self._windows + peer * self.stride + offset
        handle = int(source) if peer == self.rank else driver.import_memory(source)
        try:
            driver.map(address, size, handle)
            undo.callback(driver.unmap, address, size)
        finally:
            if peer != self.rank:
                driver.release(handle)
        driver.allow(address, size, self.device_index)

    def copy(
        self, target: int, source: int, shape: tuple[int, int, int], to: tuple[int, int], of: tuple[int, int],
        stream: int | None = None,
    ) -> None:  # fmt: skip
        """See Driver.copy: between addresses of any windows and of this GPU; on the current stream where None."""
        if stream is None:
            stream = torch.cuda.current_stream(self.device_index).cuda_stream
        self.driver.copy(target, source, shape, to, of, stream)

    def hold(self, address: int, value: int, stream: int) -> None:
        """See Driver.hold."""
        self.driver.hold(address, value, stream)

    def uncouple(self) -> None:
        """See Driver.uncouple: of the current stream."""
        self.driver.uncouple(torch.cuda.current_stream(self.device_index).cuda_stream)

    def allocated(self, block: Block) -> None:
        """Nothing to do: memory is mapped, and nobody checks accesses here."""

    def freed(self, block: Block) -> None:
        """Nothing to do."""

    def attach(self, watch: Watch) -> None:
        """Look at the status page after every synchronisation, and after the peers all the time."""
        self._watch = watch
        self._undo.callback(watch.close)

    # ------------------------------------------------------------------------------------------------------- together
    def exchange(self, value: Any, what: str) -> list[Any]:
        return self.transport.exchange(value, what)

    def barrier(self, what: str) -> None:
        self.transport.barrier(what)

    def synchronize(self) -> None:
        self.driver.synchronize(self.device_index)
        if self._watch is not None:
            self._watch.check()

    def left(self, rank: int) -> bool:
        """`rank` closed its world as it should; that its connection ended is no loss."""
        return (self.journal or self.transport).left(rank)

    def abandon(self, why: str) -> None:
        """Tell the peers that this rank leaves because of an error; close() follows."""
        self.transport.give_up(why)

    def close(self) -> None:
        """Undo everything, last first. Idempotent; an error of one step does not keep the others from being undone."""
        if not self.transport.closed:
            (self.journal or self.transport).leave()
        self._chunks.clear()
        self._undo.close()

    # -------------------------------------------------------------------------------------------------------- votes
    def _safely(self, step: Callable[[], Any]) -> dict[str, Any]:
        """What `step` gives or how it failed, in a form that can be voted on."""
        try:
            return {"value": step()}
        except DriverError as error:
            return {"error": str(error), "code": getattr(error, "code", 0)}

    def _vote(self, step: Callable[[], T], what: str, nbytes: int = 0) -> T:
        """`step()` on every rank: its value if it worked on all, otherwise the same error on all."""
        mine = self._safely(step)
        said = self.exchange({k: v for k, v in mine.items() if k != "value"}, what)
        self._raise_any({r: s for r, s in enumerate(said) if "error" in s}, what, nbytes)
        return mine["value"]

    def _raise_any(self, failed: dict[int, dict[str, Any]], what: str, nbytes: int = 0) -> None:
        if not failed:
            return
        texts = {r: s["error"] for r, s in failed.items()}
        if nbytes and all(s["code"] == OUT_OF_MEMORY for s in failed.values()):
            raise HeapFull.no_memory(nbytes, str(self.torch_device), texts)
        code = next(iter(failed.values()))["code"]
        raise DriverError.on_ranks(what, texts, code)

    def _keep(self, undo: ExitStack, address: int, free: Callable[[int, int], None], nbytes: int) -> int:
        undo.callback(free, address, nbytes)
        return address

    def _make_journal(self, undo: ExitStack) -> journal.SharedJournal:
        mine = journal.create()
        try:
            send = {r: [mine] for r in range(self.size) if r != self.rank}
            _, received = self.transport.exchange_fds(None, send, "journal")
            try:
                fds = [mine if r == self.rank else received[r][0] for r in range(self.size)]
                log = journal.SharedJournal(
                    self.rank, fds, self.transport.timeout, partial(check_peers, self.transport)
                )
            finally:
                close_fds([fd for some in received.values() for fd in some])
        finally:
            os.close(mine)
        undo.callback(log.close)
        return log


def check_peers(transport: Transport, what: str) -> None:
    """Raise PeerLost if a rank is gone or stopped."""
    lost = transport.lost()
    if lost:
        raise PeerLost.exited(transport.rank, lost, what)
