"""A log of collective calls in shared memory, so that ranks compare allocations without waiting for each other.

Every rank has one anonymous memory file that all ranks map: a counter of calls written, and a ring of slots. A slot
carries its ordinal and a checksum, so a reader recognises a half-written one. No rank overwrites a slot that a peer has
not read, because all ranks settle at least every `period` calls, which is half the ring.

The size of a memory file is sealed, because reading a map of a file that has shrunk ends the process (SIGBUS). A rank
refuses a peer's file without these seals.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Sequence

from pkt.errors import TransportError

SLOTS = 2048
SLOT_BYTES = 512
_SLOT = struct.Struct("<QIH")  # ordinal, checksum, bytes of record
_COUNTERS = 4096  # bytes before the slots: how many calls are written, and whether the rank has left
_WRITTEN, _LEFT = 0, 8  # words, a cache line apart
_ROOM = SLOT_BYTES - _SLOT.size
_BYTES = _COUNTERS + SLOTS * SLOT_BYTES
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def create() -> int:
    """A file descriptor of a new, empty log. The log lives until the last map of it is closed."""
    fd = os.memfd_create("pkt-journal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, _BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _mapped(rank: int, owner: int, fds: Sequence[int]) -> mmap.mmap:
    """The map of `owner`'s log. fds: the descriptors that it sent."""
    what, wanted = f"the journal of rank {owner}", f"one memory file of {_BYTES} bytes, of sealed size"
    if len(fds) != 1:
        raise TransportError.refused(rank, what, f"{len(fds)} file descriptors", wanted)
    try:
        nbytes, seals = os.fstat(fds[0]).st_size, fcntl.fcntl(fds[0], fcntl.F_GET_SEALS)
        if nbytes != _BYTES or seals & _SIZE_SEALS != _SIZE_SEALS:
            raise TransportError.refused(rank, what, f"{nbytes} bytes, seals {seals:#x}", wanted)
        return mmap.mmap(fds[0], _BYTES)
    except (OSError, ValueError) as error:  # no memory file, or one that cannot be written
        raise TransportError.refused(rank, what, str(error), wanted) from error


class SharedJournal:
    """One log per rank. `check_peers` is `Transport.check`."""

    period = SLOTS // 2  # a rank settles at least once in so many calls

    def __init__(
        self,
        rank: int,
        fds: Sequence[Sequence[int]],
        timeout: float,
        check_peers: Callable[[str, Sequence[int], float | None], None],
    ) -> None:
        """Map every rank's log. fds: what each rank sent, in rank order; the caller closes them. Raises TransportError
        unless that is one log, whose size is sealed."""
        self.rank, self.timeout, self._check_peers = rank, timeout, check_peers
        self._maps: list[mmap.mmap] = []
        with contextlib.ExitStack() as undo:
            for owner, sent in enumerate(fds):
                self._maps.append(_mapped(rank, owner, sent))
                undo.callback(self._maps[-1].close)
            undo.pop_all()
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
        what, over = f"heap call #{ordinal}", False
        while late := [r for r, counters in enumerate(self._counters) if counters[_WRITTEN] < ordinal]:
            if over:
                self._check_peers(what, late, self.timeout)
            over = time.monotonic() > deadline
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            if pause == 0.05:
                self._check_peers(what, late, None)

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
