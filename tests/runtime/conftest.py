"""Runs N ranks as threads over one anonymous mapping: a third implementation of Backend, small enough to check by
reading."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pkt.errors import CollectiveMismatch
from pkt.runtime import world as world_module
from pkt.runtime.backend import Block
from pkt.runtime.world import World

CAPACITY = 1 << 20


class Meeting:
    """Exchanges values between the threads; a rank that raises breaks the barrier for all."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.slots: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any, what: str) -> list[Any]:
        self.slots[rank] = (what, value)
        self.barrier.wait()
        slots = list(self.slots)
        self.barrier.wait()
        if len({what for what, _ in slots}) > 1:
            raise CollectiveMismatch.calls({r: what for r, (what, _) in enumerate(slots)})
        return [value for _, value in slots]


class ThreadBackend:
    """One rank of `Meeting`'s threads."""

    num_sms, gap, gpu = 4, 0, "none"
    node_size = 1 << 20
    arena, network, library = range(0), 0, ""
    timeout = journal = copies = timed = None
    multicast = False
    torch_device = torch.device("cpu")

    def __init__(self, rank: int, meeting: Meeting, memory: mmap.mmap, stride: int) -> None:
        self.rank, self.size, self.meeting, self.memory = rank, len(meeting.slots), meeting, memory
        self.stride = self.capacity = stride
        self.base = torch.frombuffer(memory, dtype=torch.uint8).data_ptr() + rank * stride
        self.reserved: list[int] = []
        self.told: list[tuple[str, Block]] = []
        self.closed = 0

    def view(self, rank: int, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=nbytes, offset=rank * self.stride + offset).view(
            dtype
        )

    def reserve(self, nbytes: int) -> None:
        self.reserved.append(nbytes)

    def allocated(self, block: Block, among: tuple[int, ...] | None = None) -> None:
        self.told.append(("allocated", block))

    def freed(self, block: Block) -> None:
        self.told.append(("freed", block))

    def exchange(self, value: Any, what: str) -> list[Any]:
        return self.meeting.exchange(self.rank, value, what)

    def barrier(self, what: str) -> None:
        self.exchange(None, what)

    def synchronize(self) -> None:
        self.told.append(("synchronized", None))  # type: ignore[arg-type]

    def abandon(self, why: str, lost: Any) -> None:
        self.told.append(("abandoned", None))  # type: ignore[arg-type]

    def close(self) -> None:
        self.closed += 1


def run(size: int, fn: Callable[[World], Any], heap: int = CAPACITY, broken_ok: bool = False) -> list[Any]:
    """Run `fn(world)` on `size` threads and return each rank's result or exception.

    Raises the first error unless `broken_ok`. A rank's error comes before the broken barriers that it causes.
    """
    memory = mmap.mmap(-1, size * CAPACITY)
    meeting, here = Meeting(size), threading.local()
    results: list[Any] = [None] * size

    def rank_main(rank: int) -> None:
        try:
            here.world = World(ThreadBackend(rank, meeting, memory, CAPACITY), heap)
            results[rank] = fn(here.world)
        except BaseException as error:
            results[rank] = error
            if not isinstance(error, threading.BrokenBarrierError):
                meeting.barrier.abort()

    before, world_module._current = world_module._current, lambda: getattr(here, "world", None)
    try:
        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        world_module._current = before
    errors = [r for r in results if isinstance(r, BaseException)]
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if errors and not broken_ok:
        raise (real or errors)[0]
    return results


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """`ranks(size, fn)`: fn(world) on every rank, in threads; raises the first error (returns them with
    broken_ok)."""
    return run
