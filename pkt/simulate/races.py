"""Happens-before by vector clocks, and a shadow of the heap with the last accesses to each granule of 16 bytes.

Every program has two columns in the clocks: one for its own instructions, one for its TMA accesses (the async proxy). A
stamp is a column and its clock. An earlier access is ordered before a program when the program's clock for that column
has reached the access' stamp. A release publishes the program's clocks, and an acquire takes them over. The async
column enters the program's own clocks only when the program drains its TMA stores. Its TMA loads follow its acquires
only after a proxy fence. So a missing release, acquire, drain or proxy fence leaves two accesses unordered. That is a
race, whatever values this schedule produces.

The clocks follow Flanagan and Freund, FastTrack (PLDI 2009). A granule keeps one writer, two readers and one atomic
updater.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pkt.simulate.memory import GRANULE, Access, Strided

FULL = 0xFFFF  # all 16 bytes of a granule


class Clocks:
    """The columns of all programs and hosts, and the arithmetic of clocks."""

    def __init__(self) -> None:
        self.columns = 0
        self.width = 256

    def column(self, count: int = 1) -> int:
        first = self.columns
        self.columns += count
        if self.columns > 0xFFFF:
            raise OverflowError("the race detector follows at most 65535 columns; simulate a smaller grid")
        while self.columns > self.width:
            self.width *= 2
        return first

    def zero(self) -> np.ndarray:
        return np.zeros(self.width, np.int64)

    def fit(self, clock: np.ndarray) -> np.ndarray:
        """`clock`, widened if columns have been added since it was made."""
        if len(clock) < self.width:
            clock = np.concatenate([clock, np.zeros(self.width - len(clock), np.int64)])
        return clock

    def join(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.maximum(self.fit(a), self.fit(b))


class Shadow:
    """Per granule of one region: the last writer, two readers and the last atomic updater. Each is one packed stamp,
    clock << 32 | column << 16 | mask of the bytes touched."""

    __slots__ = ("writer", "reader", "other", "updater", "narrow", "written", "looks")

    def __init__(self, nbytes: int) -> None:
        n = -(-nbytes // GRANULE)
        self.writer, self.reader, self.other, self.updater = (np.zeros(n, np.int64) for _ in range(4))
        self.narrow = False  # some update had a scope narrower than the system
        self.written = False  # by a plain access or by TMA
        # (byte offset, bytes) of a word that was read atomically -> column -> stamp. They race with writes only.
        self.looks: dict[tuple[int, int], dict[int, int]] = {}


class Touched:
    """The granules of one access: their place in a shadow array, and a mask of the bytes that it touches in each."""

    __slots__ = ("view", "index", "bytes")

    def __init__(self, access: Access) -> None:
        self.view: Any = None
        self.index: Any = None
        self.bytes: Any = FULL
        if isinstance(access, Strided):
            if math.prod(access.shape) == 1:
                self._single(access.offset, access.itemsize)
                return
            row = access.shape[-1] * access.itemsize
            if not ((access.offset | row) % GRANULE or any(s % GRANULE for s in access.strides[:-1])):
                shape = (*access.shape[:-1], row // GRANULE)
                strides = (*(s // 2 for s in access.strides[:-1]), 8)
                self.view = (shape, access.offset // 2, strides)
                return
            self._scatter(access.byte_offsets(), access.itemsize)
        elif len(access.offsets) == 1:
            self._single(int(access.offsets[0]), access.itemsize)
        else:
            self._scatter(access.offsets, access.itemsize)

    def _single(self, offset: int, itemsize: int) -> None:
        at = offset % GRANULE
        self.index = np.array([offset // GRANULE])
        self.bytes = ((1 << itemsize) - 1) << at & FULL

    def _scatter(self, offsets: np.ndarray, itemsize: int) -> None:
        granule = offsets // GRANULE
        touched = np.int64((1 << itemsize) - 1) << (offsets % GRANULE)
        if (np.diff(granule) < 0).any():
            order = np.argsort(granule, kind="stable")
            granule, touched = granule[order], touched[order]
        starts = np.flatnonzero(np.concatenate(([True], granule[1:] != granule[:-1])))
        self.index = granule[starts]
        self.bytes = np.bitwise_or.reduceat(touched, starts) & FULL

    def get(self, array: np.ndarray) -> np.ndarray:
        if self.view is None:
            return array[self.index]
        shape, offset, strides = self.view
        return np.ndarray(shape, np.int64, array, offset, strides)

    def put(self, array: np.ndarray, stamps: Any) -> None:
        if self.view is None:
            array[self.index] = stamps
        else:
            self.get(array)[...] = stamps

    def offset(self, position: int) -> int:
        """Byte offset in the region of the granule at flat `position`."""
        if self.view is None:
            return int(self.index[position]) * GRANULE
        shape, offset, strides = self.view
        where = np.unravel_index(position, shape)
        return (offset + sum(int(i) * s for i, s in zip(where, strides))) * 2


def unordered(stamps: np.ndarray, touched: Touched, clock: np.ndarray) -> tuple[int, int] | None:
    """(position, stamp) of the first access among `stamps` that overlaps and is not ordered before `clock`, or None."""
    first = int(stamps.flat[0])
    if isinstance(touched.bytes, int) and (stamps == first).all():  # most tiles have one author
        hit = first & touched.bytes and clock[(first >> 16) & 0xFFFF] < first >> 32
        return (0, first) if hit else None
    late = clock[(stamps >> 16) & 0xFFFF] < stamps >> 32
    if not late.any():
        return None
    late &= (stamps & touched.bytes) != 0
    if not late.any():
        return None
    at = int(np.argmax(late))
    return at, int(stamps.flat[at])


def record(array: np.ndarray, touched: Touched, stamp: int) -> None:
    """Make `stamp` (without its mask of bytes) the last access in `array`."""
    if isinstance(touched.bytes, int) and touched.bytes == FULL:
        touched.put(array, stamp | FULL)
        return
    now = touched.get(array)
    same = now & ~FULL == stamp
    touched.put(array, np.where(same, now | touched.bytes, stamp | touched.bytes))


def record_read(shadow: Shadow, touched: Touched, stamp: int, clock: np.ndarray) -> None:
    """Like `record` for the readers, but keep the previous reader as `other` unless it is ordered before `clock`."""
    now = touched.get(shadow.reader)
    first = int(now.flat[0])
    column = stamp & ~FULL & 0xFFFF0000
    if (now == first).all():
        if first & 0xFFFF0000 != column and clock[(first >> 16) & 0xFFFF] < first >> 32:
            touched.put(shadow.other, first)
    else:
        keep = ((now & 0xFFFF0000) != column) & (clock[(now >> 16) & 0xFFFF] < now >> 32)
        if keep.any():
            touched.put(shadow.other, np.where(keep, now, touched.get(shadow.other)))
    record(shadow.reader, touched, stamp)
