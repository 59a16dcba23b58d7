"""An NVSHMEM of one process, whose collective calls wait for the other ranks. It has the calls of
pkt.runtime.gpu.nvshmem.Library, and fails, hangs or does without memory where a test asks.

Memory comes full of garbage. The windows of a host's ranks form a ring, as NVSHMEM's do: this rank's own, those of the
ranks behind it, then those from the first one on.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pkt.errors import DriverError
from pkt.language.ptx import nvshmem as tried
from pkt.runtime.gpu.driver import OUT_OF_MEMORY

from .fake_driver import MAP_FIXED, MAP_NORESERVE, PAGE, PROT_NONE, FakeDriver, _mmap

GARBAGE = 0xA5
ROOM = 1 << 26  # bytes of a fake GPU


class Meeting:
    """Where the collective calls of forked ranks meet, and the memory of each. near: ranks of a host."""

    def __init__(self, size: int, near: int | None = None) -> None:
        self.near = near or size
        self.memory = [os.memfd_create(f"rank {rank}") for rank in range(size)]
        for fd in self.memory:
            os.ftruncate(fd, ROOM)
        self.wait = multiprocessing.get_context("fork").Barrier(size).wait


class FakeNvshmem:
    """`fail`, `hang`: calls that do so. `meeting`: of all ranks, made before they are forked."""

    running = False  # in this process

    def __init__(self, driver: FakeDriver, meeting: Any, fail: set[str] = frozenset(), hang: set[str] = frozenset()):
        self.driver, self.meeting, self.fail, self.hang = driver, meeting, fail, hang
        self.calls: Counter[str] = Counter()
        self.windows = self.given_out = 0  # address of the ring, bytes of each window that malloc has given
        self.found = tried.TRIED[-1]  # the version that is loaded
        self.given: list[int] = []  # modules that were given the state
        self.threads = 0

    def __call__(self, rank: int, device: int, folder: Path) -> FakeNvshmem:
        """As the class Library."""
        self.rank, self.device = rank, device
        self._called("load")
        return self

    def _called(self, call: str) -> None:
        self.calls[call] += 1
        if call in self.hang:
            time.sleep(300)
        if call in self.fail:
            raise DriverError.failed(self.rank, call, 7, "an error of NVSHMEM's")

    def version(self) -> str:
        return self.found

    def started(self) -> bool:
        return FakeNvshmem.running

    def unique_id(self) -> bytes:
        self._called("unique_id")
        return time.time_ns().to_bytes(128, "little")

    def start(self, unique_id: bytes, ranks: int) -> None:
        assert not FakeNvshmem.running
        assert len(unique_id) == 128
        self._called("start")
        self.meeting.wait()
        FakeNvshmem.running = True

    def check_room(self, nbytes: int) -> None:
        if nbytes > ROOM:
            raise DriverError.failed(self.rank, f"nvshmem_malloc({nbytes})", OUT_OF_MEMORY, "no memory")

    def malloc(self, nbytes: int) -> int:
        assert FakeNvshmem.running
        self._called("malloc")
        self.meeting.wait()
        whole = -(-nbytes // PAGE) * PAGE
        near = self.meeting.near
        if not self.windows:
            kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
            self.windows = _mmap(0, near * ROOM, PROT_NONE, kind, -1)
        first, offset = self.rank // near * near, self.given_out
        for rank in range(first, first + near):
            at, protection = self._window(rank) + offset, mmap.PROT_READ | mmap.PROT_WRITE
            _mmap(at, whole, protection, mmap.MAP_SHARED | MAP_FIXED, self.meeting.memory[rank], offset)
            self.driver.mapped[at] = whole
        mine = self.windows + offset
        ctypes.memset(mine, GARBAGE, whole)
        self.given_out += whole
        self.meeting.wait()
        return mine

    def _window(self, rank: int) -> int:
        return self.windows + (rank - self.rank) % self.meeting.near * ROOM

    def address(self, mine: int, rank: int) -> int:
        here = rank // self.meeting.near == self.rank // self.meeting.near
        return mine - self.windows + self._window(rank) if here else 0

    def barrier(self) -> None:
        self._called("barrier")
        self.meeting.wait()

    def hand_over(self, module: int) -> None:
        self._called("hand_over")
        self.given.append(module)

    def enter(self) -> None:
        self.threads += 1


def install(patch: pytest.MonkeyPatch, version: str = tried.TRIED[-1]) -> None:
    """Let pkt find NVSHMEM of a version in this environment."""
    patch.setattr(tried, "installed", lambda: ("made-up", version, Path("/nowhere")))
