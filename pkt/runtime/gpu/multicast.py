"""The multicast window: one object over all GPUs of the world, bound chunk by chunk. Optional at every point.

Nothing here touches a multicast object unless every rank wants one: the first vote is on the off-switches and the
device attribute, which the driver answers without one. The ranks vote on each later step as well. If one rank fails,
all undo what they did and go on without the window, and rank 0 warns once which rank failed at what. Not yet run on
hardware.
"""

from __future__ import annotations

from contextlib import ExitStack

from pkt.runtime.gpu.driver import CudaDriver, Shared
from pkt.runtime.gpu.topology import multicast_off
from pkt.runtime.gpu.votes import Votes, close_shared


class Multicast:
    """The object, as this rank holds it. `granularity`, `capacity`: bytes that the heap has to keep to."""

    def __init__(
        self, votes: Votes, driver: CudaDriver, device: int, handle: int, granularity: int, capacity: int
    ) -> None:
        self._votes, self._driver, self._device, self._handle = votes, driver, device, handle
        self.granularity, self.capacity = granularity, capacity

    def bind(self, window: int, offset: int, size: int, memory: int, undo: ExitStack) -> bool:
        """Collective: put every rank's new `memory` behind [offset, offset + size) of the window at address `window`.
        Returns whether it worked, the same on every rank."""
        driver, device, address = self._driver, self._device, window + offset
        with ExitStack() as here:

            def attach() -> None:
                driver.multicast_bind(self._handle, offset, memory, size)
                here.callback(driver.multicast_unbind, self._handle, device, offset, size)

            def map_window() -> None:
                driver.map(address, size, self._handle)
                here.callback(driver.unmap, address, size)
                driver.allow(address, size, device)

            for step, what in ((attach, "multicast: binding memory"), (map_window, "multicast: mapping the window")):
                if not self._votes.worked(step, what):
                    return False
            undo.push(here.pop_all())
            return True


def create(
    votes: Votes, driver: CudaDriver, device: int, granularity: int, capacity: int, wanted: bool, supported: bool,
    undo: ExitStack,
) -> Multicast | None:  # fmt: skip
    """Collective: the object with every GPU added to it, or None on every rank.

    granularity, capacity: of the heap, bytes. supported: by every GPU.
    """
    transport = votes.transport
    size = transport.size
    off = multicast_off() or ("" if wanted else "multicast=False") or ("" if size > 1 else "one rank")
    said = transport.exchange({"off": off, "supported": not off and supported}, "multicast: vote")
    if any(vote["off"] or not vote["supported"] for vote in said):
        return None
    with ExitStack() as here:
        unit: list[int] = []
        step = lambda: unit.append(driver.multicast_granularity(size, capacity))  # noqa: E731
        if not votes.worked(step, "multicast: granularity"):
            return None
        # Chunks are bound at their offsets in the heap, so the heap's granularity must fit the object's too.
        granularity = max(granularity, *transport.exchange(unit[0], "multicast: unit"))
        capacity = -(-capacity // granularity) * granularity
        handle = _share(votes, driver, capacity, here)
        if handle is None:
            return None
        if not votes.worked(lambda: driver.multicast_add(handle, device), "multicast: adding the GPU"):
            return None
        undo.push(here.pop_all())
    return Multicast(votes, driver, device, handle, granularity, capacity)


def _share(votes: Votes, driver: CudaDriver, capacity: int, here: ExitStack) -> int | None:
    """Every rank's handle of the object that rank 0 makes and exports; None on every rank if a step failed."""
    transport, sent = votes.transport, list[Shared]()
    held: list[int] = []

    def make() -> None:
        held.append(driver.multicast_create(transport.size, capacity))
        here.callback(driver.release, held[0])
        sent.append(driver.export(held[0]))

    mine = votes.attempt(make) if transport.rank == 0 else {}
    said, received = votes.share(mine, sent, "multicast: creating")
    try:
        if not votes.agreed(said, "multicast: creating"):
            return None

        def take() -> None:
            if transport.rank != 0:
                (shared,) = received[0]
                held.append(driver.import_memory(shared))
                here.callback(driver.release, held[0])

        return held[0] if votes.worked(take, "multicast: importing") else None
    finally:
        close_shared(received)
