"""Around a launch on GPUs: the deadline that waits obey, the status page they report to, and who watches over the
peers.

A wait that meets its deadline writes a record to its rank's status page (see pkt.language.world), raises the abort word
of every rank and returns; all programs drain. The host finds out when it next synchronises and raises WaitTimeout with
the records of all ranks. A thread looks after the peers' processes meanwhile: when one is gone, it raises this rank's
abort word, so that nothing spins until the deadline for a peer that cannot answer. A world that was aborted stays so:
close it.
"""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import triton
from triton.runtime import _allocation
from triton.runtime.jit import JITFunction

from pkt.errors import GridTooLarge, PeerLost, Waiting, WaitTimeout
from pkt.language.world import (
    CMP_ABORTED,
    CMP_CODES,
    MAX_RECORDS,
    RECORD_FIELDS,
    RECORD_WORDS,
    STATUS_ABORT,
    STATUS_BYTES,
    STATUS_DEADLINE,
    STATUS_FIRST_RECORD,
    STATUS_RECORDS,
    site_hash,
)

if TYPE_CHECKING:
    from pkt.runtime.cuda import CudaBackend
    from pkt.runtime.heap import SymmetricHeap
    from pkt.runtime.world import World

PERIOD = 0.25  # seconds between two looks at the peers
_COMPARISONS = {code: name for name, code in CMP_CODES.items()}


def records(words: Sequence[int]) -> list[dict[str, int]]:
    """The records of a status page that are whole, as {field: word}."""
    found = []
    for slot in range(min(words[STATUS_RECORDS], MAX_RECORDS) if words[STATUS_RECORDS] >= 0 else MAX_RECORDS):
        at = STATUS_FIRST_RECORD + slot * RECORD_WORDS
        record = dict(zip(RECORD_FIELDS, words[at : at + RECORD_WORDS], strict=False))
        if record["owner"]:
            found.append(record)
    return found


def kernel_name(site: int) -> str:
    """The kernel that `site_hash` gave `site` for, among those loaded; asked only when something went wrong."""
    # type(), because isinstance() asks objects that pretend to be something else, some of which warn when asked.
    kernels = (o for o in gc.get_objects() if issubclass(type(o), JITFunction)) if site else ()
    names = {kernel.__name__ for kernel in kernels}
    return next((name for name in sorted(names) if site_hash(name) == site), "a kernel")


def waiting(record: dict[str, int], heap: SymmetricHeap) -> Waiting:
    """A record in words: which counter of which signals, by name."""
    offset = (record["offset_low"] & 0xFFFFFFFF) | record["offset_high"] << 32
    allocation = heap.find(heap.backend.base + offset)
    counter = f"heap offset {offset:#x}"
    if allocation is not None:
        block = allocation.block
        counter = f"{block.name}[{(offset - block.start) // block.dtype.itemsize}]"
    return Waiting(
        rank=record["rank"],
        program=record["program"],
        kernel=kernel_name(record["site"]),
        counter=counter,
        wanted=record["wanted"],
        found=record["found"],
        compare=_COMPARISONS.get(record["cmp"] & (CMP_ABORTED - 1), "ge"),
        launch=record["epoch"] or None,
    )


class Watch:
    """This rank's deadline, status page and watchdog. `check()` is called whenever the host has synchronised."""

    def __init__(self, backend: CudaBackend, heap: SymmetricHeap, timeout: float) -> None:
        self.backend, self.heap, self.timeout = backend, heap, timeout
        self.lost: dict[int, str] = {}
        nanoseconds = int(timeout * 1e9)
        words = [nanoseconds & 0x7FFFFFFF | -(nanoseconds & 0x80000000), nanoseconds >> 32]
        backend.driver.write_words(backend.base + 4 * STATUS_DEADLINE, words, backend.device_index)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="pkt-watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise PeerLost or WaitTimeout if this rank's waits were cut short."""
        page = self._page(self.backend.rank)
        if not self.lost and not page[STATUS_ABORT] and not page[STATUS_RECORDS]:
            return
        found = [r for rank in range(self.backend.size) for r in records(self._page(rank))]
        expired = [r for r in found if not r["cmp"] & CMP_ABORTED]
        waits = [waiting(record, self.heap) for record in expired or found]
        lost = self.lost or self._gone()
        if lost:
            launch = max((w.launch or 0 for w in waits), default=0)
            raise PeerLost.exited(self.backend.rank, lost, f"launch {launch}" if launch else "a kernel")
        raise WaitTimeout.after(self.timeout, waits)

    def close(self) -> None:
        """Stop looking; idempotent."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _page(self, rank: int) -> list[int]:
        return self.backend.view(rank, 0, STATUS_BYTES).view(torch.int32).tolist()

    def _gone(self) -> dict[int, str]:
        """Peers whose process is gone although they have not closed their world."""
        backend = self.backend
        lost = backend.transport.lost()
        return {r: text for r, text in lost.items() if "stopped" not in text and not backend.left(r)}

    def _look(self) -> None:
        backend = self.backend
        while not self._stop.wait(PERIOD):
            lost = self._gone()
            if lost:
                self.lost = lost
                backend.driver.write_words(backend.base + 4 * STATUS_ABORT, [1], backend.device_index)
                return


def _scratch(nbytes: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.int8, device="cuda")  # on the launch's stream; torch aligns to 512 bytes


def provide_scratch() -> None:
    """Let Triton take memory from torch for the descriptors that kernels make, unless the user has said otherwise.

    Without, such a kernel cannot be launched. Triton keeps this by thread and by notebook cell: once is not enough.
    """
    kept = getattr(_allocation, "_allocator", None)  # private to Triton: where it is gone, nobody is asked
    if kept is None or isinstance(kept.get(), _allocation.NullAllocator):
        triton.set_allocator(_scratch)


def cooperative_launch(world: World, kernel: Any, grid: tuple[int, ...], **options: Any) -> Callable[..., Any]:
    """start(*args): kernel[grid](*args, **options) behind the world's last call; GridTooLarge unless all its programs
    are resident.

    For kernels whose programs wait for each other or for peers; every operator of pkt.kernels is launched so. For
    streams see pkt.runtime.streams. The driver's own check of the grid costs nothing; the numbers are found on refusal.
    A replay takes a microsecond or two longer for each node that is cooperative (an all-reduce of 16 KiB 8.7 us and not
    7.8 on 4 x H200), so nodes are not, once their grid is known to fit: nothing else of the world runs beside them, and
    what does run ends, so that all programs become resident.
    """
    streams = world.streams
    # kernel[grid] would pack all options anew at each launch, twice: half the host time of one with twenty of them.
    named = options | {"launch_cooperative_grid": True, "grid": grid}

    def fit(compiled: Any, refusal: RuntimeError | None = None) -> None:
        per_sm, programs = resident_per_sm(compiled), math.prod(grid)
        if refusal is not None or programs > per_sm * world.num_sms:
            name = getattr(kernel, "__name__", "a kernel")
            raise GridTooLarge.resident(name, programs, world.num_sms, per_sm, world.rank) from refusal

    def start(*args: Any) -> Any:
        captured = False
        if streams is not None:
            captured = streams.follow()
            provide_scratch()
        try:
            compiled = kernel.run(*args, warmup=False, **named)
        except RuntimeError as error:
            if "cooperative" not in str(error).lower():
                raise
            fit(kernel.warmup(*args, **named), error)
        if captured:
            fit(compiled)
            cast("CudaBackend", world.backend).uncouple()
        return compiled

    return start


def cooperative(world: World, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """One such launch, of what is not launched again and again."""
    return cooperative_launch(world, kernel, grid, **options)(*args)


def beside(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """kernel[grid](*args, **options) in no order with the world's other calls: a part of an operator that goes on
    beside its other kernels, on a stream that the operator forks and joins. It must wait for nobody."""
    return kernel[grid](*args, **options)


def resident_per_sm(compiled: Any) -> int:
    """Programs of a compiled kernel that fit on one SM, by its registers, warps and shared memory."""
    from cuda.bindings import driver

    compiled._init_handles()
    threads, shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared
    code, blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(compiled.function, threads, shared)
    if int(code) != 0:
        raise RuntimeError(f"cuOccupancyMaxActiveBlocksPerMultiprocessor: {code}")
    return int(blocks)
