"""A log of collective calls in shared memory, so that ranks compare allocations without waiting for each other.

Every rank has one anonymous memory file that all ranks map: a counter of calls written, and a ring of slots. A slot
carries its ordinal and a checksum, so a reader recognises a half-written one. No rank overwrites a slot that a peer has
not read, because all ranks settle at least every `period` calls, which is half the ring.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Sequence

from pkt.errors import TransportError, WaitTimeout

SLOTS = 2048
SLOT_BYTES = 512
_SLOT = struct.Struct("<QIH")  # ordinal, checksum, bytes of record
_COUNTERS = 4096  # bytes before the slots: how many calls are written, and whether the rank has left
_WRITTEN, _LEFT = 0, 8  # words, a cache line apart
_ROOM = SLOT_BYTES - _SLOT.size


def create() -> int:
    """A file descriptor of a new, empty log. The log lives until the last map of it is closed."""
    fd = os.memfd_create("pkt-journal", os.MFD_CLOEXEC)
    os.ftruncate(fd, _COUNTERS + SLOTS * SLOT_BYTES)
    return fd


class SharedJournal:
    """One log per rank. `check_peers` raises if a rank is lost."""

    period = SLOTS // 2  # a rank settles at least once in so many calls

    def __init__(self, rank: int, fds: Sequence[int], timeout: float, check_peers: Callable[[str], None]) -> None:
        """Map every rank's log. fds: in rank order; the caller closes them."""
        self.rank, self.timeout, self._check_peers = rank, timeout, check_peers
        self._maps = [mmap.mmap(fd, _COUNTERS + SLOTS * SLOT_BYTES) for fd in fds]
        self._counters = [memoryview(m)[:_COUNTERS].cast("Q") for m in self._maps]
        self._written = 0

    def append(self, record: bytes) -> None:
        """Record this rank's next call."""
        ordinal = self._written + 1
        if len(record) > _ROOM:  # a digest takes the place of the end, which a message then lacks
            digest = hashlib.sha256(record).hexdigest().encode()
            record = record[: _ROOM - len(digest)] + digest
        at = _COUNTERS + ordinal % SLOTS * SLOT_BYTES
        slot = _SLOT.pack(ordinal, zlib.crc32(record), len(record)) + record
        self._maps[self.rank][at : at + len(slot)] = slot
        self._written = self._counters[self.rank][_WRITTEN] = ordinal

    def written(self, rank: int) -> int:
        """How many calls `rank` has written."""
        return self._counters[rank][_WRITTEN]

    def read(self, rank: int, ordinal: int) -> bytes:
        """The record of `rank`'s call number `ordinal`: at most `written(rank)`, and not older than the ring."""
        at, log = _COUNTERS + ordinal % SLOTS * SLOT_BYTES, self._maps[rank]
        # The counter may be visible before the slot: a processor may see another one's stores out of order.
        for _ in range(1000):
            found, checksum, length = _SLOT.unpack_from(log, at)
            record = log[at + _SLOT.size : at + _SLOT.size + min(length, _ROOM)]
            if found == ordinal and zlib.crc32(record) == checksum:
                return record
            time.sleep(1e-5)
        wanted = f"call #{ordinal}, whole"
        raise TransportError.refused(self.rank, f"the journal of rank {rank}", f"call #{found}", wanted)

    def settle(self, ordinal: int) -> None:
        """Return once every rank has written its call number `ordinal`. Raises WaitTimeout or PeerLost."""
        deadline, pause = time.monotonic() + self.timeout, 2e-5
        while late := [r for r, counters in enumerate(self._counters) if counters[_WRITTEN] < ordinal]:
            what = f"heap call #{ordinal}"
            if time.monotonic() > deadline:
                raise WaitTimeout.rendezvous(self.rank, what, self.timeout, late)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            if pause == 0.05:
                self._check_peers(what)

    def leave(self) -> None:
        """Record that this rank closes its world, so that the others do not take it for lost."""
        self._counters[self.rank][_LEFT] = 1

    def left(self, rank: int) -> bool:
        """Whether `rank` closed its world, so that the end of its connection is no loss."""
        return bool(self._counters[rank][_LEFT]) if self._counters else True

    def close(self) -> None:
        """Unmap; idempotent."""
        for counters, log in zip(self._counters, self._maps, strict=True):
            counters.release()
            log.close()
        self._counters, self._maps = [], []
