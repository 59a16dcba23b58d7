"""The multicast window: one object over all GPUs of the world, bound chunk by chunk. Optional at every point.

Nothing here is called unless every rank wants it: the first vote is on the off-switches and the device attribute,
neither of which touches a multicast object. Each later step is voted on as well; if one rank fails, all undo what they
did and go on without the window, with one warning that says which rank failed at what. Not yet run on hardware.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pkt.runtime.gpu import handles
from pkt.runtime.gpu.driver import Shared
from pkt.runtime.gpu.topology import multicast_off
from pkt.wording import ranks_text

if TYPE_CHECKING:
    from pkt.runtime.gpu.cuda import CudaBackend


class Multicast:
    """The object, as this rank holds it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def bind(self, backend: CudaBackend, offset: int, size: int, memory: int, undo: ExitStack) -> bool:
        """Collective: put every rank's new memory behind the window; whether it worked, the same on every rank."""
        driver, device = backend.driver, backend.device_index
        address = backend._windows + backend.size * backend.stride + offset
        with ExitStack() as here:

            def attach() -> None:
                driver.multicast_bind(self.handle, offset, memory, size)
                here.callback(driver.multicast_unbind, self.handle, device, offset, size)

            def map_window() -> None:
                driver.map(address, size, self.handle)
                here.callback(driver.unmap, address, size)
                driver.allow(address, size, device)

            for step, what in ((attach, "multicast: binding memory"), (map_window, "multicast: mapping the window")):
                if not _all(backend, step, what):
                    return False
            undo.push(here.pop_all())
            return True


def create(backend: CudaBackend, wanted: bool, undo: ExitStack) -> Multicast | None:
    """Collective: the object with every GPU added to it, or None on every rank."""
    off = multicast_off() or ("" if wanted else "multicast=False") or ("" if backend.size > 1 else "one rank")
    votes = backend.exchange({"off": off, "supported": not off and backend.topology.multicast}, "multicast: vote")
    if any(vote["off"] or not vote["supported"] for vote in votes):
        return None
    driver, size = backend.driver, backend.size
    with ExitStack() as here:
        unit: list[int] = []
        step = lambda: unit.append(driver.multicast_granularity(size, backend.capacity))  # noqa: E731
        if not _all(backend, step, "multicast: granularity"):
            return None
        # Chunks are bound where they lie in the heap, so the heap's own granularity must be fit for both.
        backend.granularity = max(backend.granularity, *backend.exchange(unit[0], "multicast: unit"))
        backend.capacity = -(-backend.capacity // backend.granularity) * backend.granularity
        handle = _share(backend, here)
        if handle is None:
            return None
        if not _all(backend, lambda: driver.multicast_add(handle, backend.device_index), "multicast: adding the GPU"):
            return None
        undo.push(here.pop_all())
    return Multicast(handle)


def _share(backend: CudaBackend, here: ExitStack) -> int | None:
    """Rank 0 makes the object and sends what stands for it; every rank's handle of it, or None on every rank."""
    driver, sent = backend.driver, list[Shared]()
    held: list[int] = []

    def make() -> None:
        held.append(driver.multicast_create(backend.size, backend.capacity))
        here.callback(driver.release, held[0])
        sent.append(driver.export(held[0]))

    try:
        mine = backend._safely(make) if backend.rank == 0 else {}
        vote = {k: v for k, v in mine.items() if k != "value"}
        said, received = handles.exchange(backend.transport, vote, sent, "multicast: creating")
    finally:
        handles.close(sent)
    try:
        if not _agreed(said, "multicast: creating", backend.rank):
            return None

        def take() -> None:
            if backend.rank != 0:
                (shared,) = received[0]
                held.append(driver.import_memory(shared))
                here.callback(driver.release, held[0])

        return held[0] if _all(backend, take, "multicast: importing") else None
    finally:
        handles.close(shared for some in received.values() for shared in some)


def _all(backend: CudaBackend, step: Callable[[], Any], what: str) -> bool:
    """`step()` on every rank; whether it worked on all. Where it did not, rank 0 warns once."""
    mine = backend._safely(step)
    said = backend.exchange({k: v for k, v in mine.items() if k != "value"}, what)
    return _agreed(said, what, backend.rank)


def _agreed(said: list[dict[str, Any]], what: str, rank: int) -> bool:
    failed = {r: vote["error"] for r, vote in enumerate(said) if "error" in vote}
    if failed and rank == 0:
        warnings.warn(
            f"{what} failed on {ranks_text(failed)}; going on without multicast", RuntimeWarning, stacklevel=2
        )
    return not failed
