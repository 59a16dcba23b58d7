"""The deadline of waits on GPUs, the status page that waits report to, and the thread that watches the peers.

A wait that meets its deadline writes a record to its rank's status page (see pkt.language.world), raises the abort word
of every rank and returns, as do all other waits. The host finds out when it next synchronises, and raises WaitTimeout
with the records of all ranks. Meanwhile a thread watches the peers' processes. When one is gone, the thread raises this
rank's abort word, so that no wait spins until the deadline for a peer that cannot answer. An aborted world stays
aborted: close it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence

import torch
from triton.runtime.jit import JITFunction

from pkt.errors import PeerLost, WaitTimeout
from pkt.language import world as page
from pkt.runtime.gpu.cuda import CudaBackend
from pkt.runtime.memory.heap import SymmetricHeap
from pkt.wording import Waiting

PERIOD = 0.25  # seconds between two checks of the peers
_COMPARISONS = {code: name for name, code in page.CMP_CODES.items()}


def records(words: Sequence[int]) -> list[dict[str, int]]:
    """The complete records of a status page, as {field: word}."""
    found, count = [], words[page.STATUS_RECORDS]
    for slot in range(min(count, page.MAX_RECORDS) if count >= 0 else page.MAX_RECORDS):
        at = page.STATUS_FIRST_RECORD + slot * page.RECORD_WORDS
        record = dict(zip(page.RECORD_FIELDS, words[at : at + page.RECORD_WORDS], strict=False))
        if record["owner"]:
            found.append(record)
    return found


def kernel_name(site: int) -> str:
    """The name of the loaded kernel whose `site_hash` is `site`; slow, for error messages only."""
    gc.unfreeze()  # get_objects() leaves out frozen objects, and workers and the simulator freeze all that is loaded
    # type() and not isinstance(), which asks objects for their class, and some warn when asked.
    kernels = (o for o in gc.get_objects() if issubclass(type(o), JITFunction)) if site else ()
    names = {kernel.__name__ for kernel in kernels}
    return next((name for name in sorted(names) if page.site_hash(name) == site), "a kernel")


def waiting(record: dict[str, int], heap: SymmetricHeap) -> Waiting:
    """A record as a Waiting, with the name of the signals and the index of the counter."""
    wanted, found = record["wanted"], record["found"]
    if record["cmp"] & page.CMP_WIDE:
        wanted = wanted & 0xFFFFFFFF | record["wanted_high"] << 32
        found = found & 0xFFFFFFFF | record["found_high"] << 32
    offset = (record["offset_low"] & 0xFFFFFFFF) | record["offset_high"] << 32
    allocation = heap.find(heap.backend.base + offset)
    counter = f"heap offset {offset:#x}"
    if allocation is not None:
        block = allocation.block
        first = allocation.heap.backend.base + block.start  # a team's heap begins inside this one
        counter = f"{block.name}[{(heap.backend.base + offset - first) // block.dtype.itemsize}]"
    return Waiting(
        rank=record["rank"],
        program=record["program"],
        kernel=kernel_name(record["site"]),
        counter=counter,
        wanted=wanted,
        found=found,
        compare=_COMPARISONS.get(record["cmp"] & (page.CMP_ABORTED - 1), "ge"),
        launch=record["epoch"] or None,
    )


class Watch:
    """This rank's deadline, status page and watchdog. CudaBackend calls `check()` after every synchronisation. Waits of
    other nodes have deadlines and records of their own."""

    def __init__(self, backend: CudaBackend, heap: SymmetricHeap, timeout: float) -> None:
        self.backend, self.heap, self.timeout = backend, heap, timeout
        self.lost: dict[int, str] = {}
        nanoseconds = int(timeout * 1e9)
        words = [nanoseconds & 0x7FFFFFFF | -(nanoseconds & 0x80000000), nanoseconds >> 32]
        backend.driver.write_words(backend.base + 4 * page.STATUS_DEADLINE, words, backend.device_index)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="pkt-watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise PeerLost or WaitTimeout if this rank's waits were cut short."""
        backend = self.backend
        words = self._page(backend.rank)
        if not self.lost and not words[page.STATUS_ABORT] and not words[page.STATUS_RECORDS]:
            return
        found = [r for rank in backend.near for r in records(self._page(rank))]
        expired = [r for r in found if not r["cmp"] & page.CMP_ABORTED]
        waits = [waiting(record, self.heap) for record in expired or found]
        lost = backend.transport.causes(all_words=False) or self.lost
        if lost:
            launch = max((w.launch or 0 for w in waits), default=0)
            raise PeerLost.exited(backend.rank, lost, f"launch {launch}" if launch else "a kernel")
        raise WaitTimeout.after(self.timeout, waits, backend.transport.first_calls())

    def close(self) -> None:
        """Stop the thread; idempotent."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _page(self, rank: int) -> list[int]:
        return self.backend.view(rank, 0, page.STATUS_BYTES).view(torch.int32).tolist()

    def _gone(self) -> dict[int, str]:
        """Peers whose process is gone although they did not close their world."""
        backend = self.backend
        lost = backend.transport.lost()
        return {r: text for r, text in lost.items() if "stopped" not in text and not backend.left(r)}

    def _look(self) -> None:
        backend = self.backend
        while not self._stop.wait(PERIOD):
            lost = self._gone()
            if lost:
                self.lost = lost
                backend.driver.write_words(backend.base + 4 * page.STATUS_ABORT, [1], backend.device_index)
                return
