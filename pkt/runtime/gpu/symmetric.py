"""NVSHMEM in this process: started once, for one list of ranks, and blocks of its memory that worlds take in turn.

NVSHMEM's `free` and `finalize` wait for all ranks, and a lost rank would never come. So a closed world's block is kept
for the next world, and the end of the process gives everything back. Worlds close without waiting for each other. So
the ranks compare their free blocks when they open a world, and take one that is free on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from triton import knobs

from pkt.errors import DriverError, Unsupported
from pkt.language.ptx import nvshmem as tried
from pkt.runtime.backend import ALIGNMENT
from pkt.runtime.gpu import nvshmem
from pkt.runtime.gpu.driver import CudaDriver
from pkt.runtime.gpu.votes import Votes

Libraries = Callable[[int, int, Path], Any]  # (rank, device, folder): an nvshmem.Library

_job: Job | None = None  # of this process


class Job:
    """NVSHMEM as it runs in this process."""

    def __init__(self, library: Any, name: str, rank: int, size: int) -> None:
        """name: the same on all of its ranks, and on no others."""
        self.library, self.name, self.place = library, name, [rank, size]
        self.blocks: dict[int, tuple[int, int]] = {}  # number -> address, bytes
        self.taken: set[int] = set()

    def free(self) -> dict[str, int]:
        """Bytes of the free blocks by number, as JSON has them."""
        return {str(number): nbytes for number, (_, nbytes) in self.blocks.items() if number not in self.taken}

    def load(self, module: int, function: int, name: str, metadata_group: Any, hash: str) -> None:
        """Triton's hook: give NVSHMEM's state to a module that has room for it."""
        if self.holds(module, nvshmem.STATE):
            self.library.hand_over(module)

    def watch_modules(self, driver: CudaDriver) -> None:
        """From now on give the state to every module that Triton loads in this process."""
        self.holds = driver.holds
        knobs.runtime.kernel_load_end_hook.add(self.load)


def take(
    votes: Votes, driver: CudaDriver, device: int, nbytes: int, one_host: bool, libraries: Libraries, undo: ExitStack
) -> list[int]:
    """Collective: the addresses here of `nbytes` of NVSHMEM's memory on each rank, until `undo`; 0 where only the
    network reaches it. The first call of a process starts NVSHMEM. Raises Unsupported, DriverError or HeapFull, the
    same on every rank."""
    driver.synchronize(device)  # kernels of a closed world may still write to its block
    job, transport = _job, votes.transport
    here = {"job": job.name if job else "", "place": job.place if job else [], "free": job.free() if job else {}}
    said = transport.exchange(here, "NVSHMEM: job")
    if job is None and not any(one["job"] for one in said):
        job = _start(votes, driver, device, nbytes, one_host, libraries)
    _check_alike(said)
    assert job is not None
    number = _free_everywhere(said, nbytes)
    if number:
        _together(votes, job, "nvshmem_barrier_all", job.library.barrier)
    else:
        number = 1 + len(job.blocks)
        what = f"taking {nbytes} bytes of NVSHMEM's memory"
        votes.on_all(lambda: job.library.check_room(nbytes), what, nbytes)
        address = _together(votes, job, "nvshmem_malloc", lambda: job.library.malloc(nbytes), nbytes)
        votes.on_all(lambda: _check_address(votes, address), what)
        job.blocks[number] = address, nbytes
    job.taken.add(number)
    undo.callback(job.taken.discard, number)
    mine = job.blocks[number][0]
    return [job.library.address(mine, rank) for rank in range(transport.size)]


def _check_alike(said: list[dict[str, Any]]) -> None:
    """Raise Unsupported unless NVSHMEM runs on no rank, or on all of them as one job of just these ranks."""
    size, places = len(said), [one["place"] for one in said]
    if len({one["job"] for one in said}) == 1 and places in ([[]] * size, [[rank, size] for rank in range(size)]):
        return
    texts = [f"rank {at[0]} of {at[1]}" if at else "not started" for at in places]
    found = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
    raise Unsupported.here(
        "pkt.init",
        f"found NVSHMEM in use, as {found}, and it starts once in a process, for one list of ranks",
        "make all worlds of several nodes from the same ranks, in one order, or start the processes anew",
    )


def _start(votes: Votes, driver: CudaDriver, device: int, nbytes: int, one_host: bool, libraries: Libraries) -> Job:
    """Collective: NVSHMEM, started in this process."""
    global _job
    transport = votes.transport
    _, version, folder = tried.checked("pkt.init, for a world of several nodes")

    def load() -> Any:
        library = libraries(transport.rank, device, folder)
        if library.version() != version:
            text = f"found NVSHMEM {library.version()} loaded, wanted {version}, which is installed"
            raise DriverError.failed(transport.rank, "nvshmemx_vendor_get_version_info", -1, text, "look at LD_PRELOAD")
        if library.started():
            remedy = "let pkt start it, or let nobody else use it in this process"
            raise DriverError.failed(transport.rank, "nvshmemx_init_status", -1, "started by other code", remedy)
        return library

    nvshmem.prepare(one_host, nbytes)
    library = votes.on_all(load, "loading NVSHMEM")
    mine = votes.attempt(lambda: library.unique_id().hex() if transport.rank == 0 else "")
    said = transport.exchange(mine, "NVSHMEM: unique id")
    votes.check(said, "NVSHMEM: unique id")
    name = said[0]["value"]
    job = Job(library, name, transport.rank, transport.size)
    _together(votes, job, "nvshmemx_hostlib_init_attr", lambda: library.start(bytes.fromhex(name), transport.size))
    job.watch_modules(driver)
    _job = job
    return job


def _together(votes: Votes, job: Job, call: str, run: Callable[[], Any], nbytes: int = 0) -> Any:
    """A collective call of NVSHMEM's, with the deadline of the world. Every rank is here: the last vote says so."""
    library, seconds = job.library, votes.transport.timeout
    return votes.on_all(lambda: nvshmem.bounded(library, call, seconds, run), call, nbytes)


def _check_address(votes: Votes, address: int) -> None:
    if address % ALIGNMENT:
        text = f"found address {address:#x}, wanted a multiple of {ALIGNMENT}"
        raise DriverError.failed(votes.transport.rank, "nvshmem_malloc", -1, text)


def _free_everywhere(said: list[dict[str, Any]], nbytes: int) -> int:
    """The number of the smallest block of at least `nbytes` that is free on all ranks; 0 if there is none."""
    first, *others = (one["free"] for one in said)
    free = [(size, int(n)) for n, size in first.items() if size >= nbytes and all(n in other for other in others)]
    return min(free, default=(0, 0))[1]
