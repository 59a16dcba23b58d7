"""Happens-before by vector clocks, and a shadow of the heap with the last accesses to each granule of 16 bytes.

Every program has two columns in the clocks: one for its own instructions, one for its TMA accesses (the async proxy). A
stamp is a column and its clock. An earlier access is ordered before a program when the program's clock for that column
has reached the access' stamp. A release publishes the program's clocks, and an acquire takes them over. The async
column enters the program's own clocks only when the program drains its TMA stores. Its TMA loads follow its acquires
only after a proxy fence. So a missing release, acquire, drain or proxy fence leaves two accesses unordered. That is a
race, whatever values this schedule produces.

The clocks follow Flanagan and Freund, FastTrack (PLDI 2009). For each byte a granule keeps the last writer, the last
atomic updater, and every reader that no later one is ordered after.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pkt.simulate.memory import GRANULE, Access, Strided
from pkt.simulate.rows import KEPT, SMALL

FULL = 0xFFFF  # all 16 bytes of a granule
COLUMN = 0xFFFF0000
FEW = 16  # granules
MANY_SETS = 1 << 14  # sets of stamps after which those that no granule has any more are dropped


COLUMNS = 1 << 16  # as many as a stamp can name


class Clocks:
    """The columns of all programs and hosts, and the arithmetic of clocks."""

    def __init__(self) -> None:
        self.columns = 0
        self.width = 256

    def column(self, count: int = 1) -> int:
        first = self.columns
        self.columns += count
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
        if not len(a) == len(b) == self.width:
            a, b = self.fit(a), self.fit(b)
        return np.maximum(a, b)


class Last:
    """The last accesses of one role, such as the readers, to every granule of one region.

    A granule has one stamp (clock << 32 | column << 16 | mask of the bytes touched), or a negative number: the place of
    a set of stamps in `sets`, from the end. Most tiles have one stamp all over, and few sets are ever made.
    """

    __slots__ = ("granules", "array", "sets", "places", "limit")

    def __init__(self, granules: int) -> None:
        self.granules = granules
        self.array: Any = None  # made at the first access: most roles of most regions have none
        self.sets: list[tuple[int, ...]] = []
        self.places: dict[tuple[int, ...], int] = {}
        self.limit = MANY_SETS

    def stamps(self, state: int) -> tuple[int, ...]:
        """The stamps of a granule."""
        return (state,) if state >= 0 else self.sets[-state - 1]

    def unordered(self, touched: Touched, clock: np.ndarray) -> tuple[int, int] | None:
        """(position, stamp) of an access that overlaps and is not ordered before `clock`, or None."""
        if self.array is None:
            return None
        state = touched.state(self.array)
        if state is not None:
            return self._late(state, touched.bytes, clock)
        states = touched.get(self.array)
        if touched.few and not any(self._late(*each, clock) for each in zip(states.tolist(), touched.few)):
            return None
        alone = np.maximum(states, 0) if self.sets else states
        late = clock[(alone >> 16) & 0xFFFF] < alone >> 32
        if np.count_nonzero(late):  # half the time of late.any()
            late &= (alone & touched.bytes) != 0
            if np.count_nonzero(late):
                at = int(np.argmax(late))
                return at, int(states.flat[at])
        if self.sets:
            for state in np.unique(states[states < 0]).tolist():
                for stamp in self.sets[-state - 1]:
                    if clock.item((stamp >> 16) & 0xFFFF) < stamp >> 32:
                        hit = np.flatnonzero(((states == state) & ((touched.bytes & stamp) != 0)).reshape(-1))
                        if hit.size:
                            return int(hit[0]), stamp
        return None

    def _late(self, state: int, mask: int, clock: np.ndarray) -> tuple[int, int] | None:
        """As `unordered`, for granules that all are in `state`."""
        for stamp in (state,) if state >= 0 else self.sets[-state - 1]:
            if stamp & mask and clock.item((stamp >> 16) & 0xFFFF) < stamp >> 32:
                return 0, stamp
        return None

    def record(self, touched: Touched, stamp: int, clock: np.ndarray | None = None) -> None:
        """Add an access with `stamp` (without its mask). It takes the place of earlier accesses to its bytes; if
        `clock` is given, only of those that are ordered before that."""
        mask = touched.bytes
        if self.array is None:
            self.array = np.zeros(self.granules, np.int64)
        if clock is None and type(mask) is int and mask == FULL:
            touched.put(self.array, stamp | FULL)
            return
        state = touched.state(self.array)
        if state is not None:
            touched.put(self.array, self._merged(state, stamp, mask, clock))
            return
        states = touched.get(self.array)
        if touched.few:
            each = zip(states.tolist(), touched.few)
            touched.put(self.array, [self._merged(state, stamp, m, clock) for state, m in each])
        else:
            touched.put(self.array, self._all_merged(states, stamp, mask, clock))
        if len(self.sets) > self.limit:
            self._forget()

    def _all_merged(self, states: np.ndarray, stamp: int, mask: Any, clock: np.ndarray | None) -> np.ndarray:
        """`_merged` of many granules."""
        alone = np.maximum(states, 0)
        simple = (states >= 0) & ((states & ~mask & FULL) == 0)
        if clock is not None:
            simple &= ((alone & COLUMN) == (stamp & COLUMN)) | (clock[(alone >> 16) & 0xFFFF] >= alone >> 32)
        new = np.where(simple, stamp | mask, states)
        if not simple.all():
            masks = np.broadcast_to(np.asarray(mask, np.int64), states.shape)
            pairs = list(zip(states[~simple].tolist(), masks[~simple].tolist()))
            # A tile's granules are mostly alike, and a set is faster than numpy's sort.
            merged = {(state, m): self._merged(state, stamp, m, clock) for state, m in sorted(set(pairs))}
            new[~simple] = [merged[pair] for pair in pairs]
        return new

    def _merged(self, state: int, stamp: int, mask: int, clock: np.ndarray | None) -> int:
        """The state of a granule in `state` after the access."""
        new, rest = stamp | mask, []
        for old in (state,) if state >= 0 else self.sets[-state - 1]:
            if old & ~FULL == stamp:
                new |= old & FULL
            elif clock is None or old & COLUMN == stamp & COLUMN or clock.item((old >> 16) & 0xFFFF) >= old >> 32:
                left = old & ~mask
                if left & FULL:
                    rest.append(left)
            else:
                rest.append(old)
        if not rest:
            return new
        both = (new, *rest)
        place = self.places.get(both)
        if place is None:
            self.sets.append(both)
            place = self.places[both] = -len(self.sets)
        return place

    def _forget(self) -> None:
        """Drop the sets that no granule has any more."""
        held = self.array < 0
        states, where = np.unique(self.array[held], return_inverse=True)
        self.sets = [self.sets[-state - 1] for state in states.tolist()]
        self.places = {stamps: -at for at, stamps in enumerate(self.sets, 1)}
        self.array[held] = -1 - where.reshape(-1)
        self.limit = max(MANY_SETS, 2 * len(self.sets))


class Shadow:
    """The last accesses to the granules of one region."""

    __slots__ = ("writer", "reader", "updater", "narrow", "written", "looks", "sizes", "look_sizes")

    def __init__(self, nbytes: int) -> None:
        n = -(-nbytes // GRANULE)
        self.writer, self.reader, self.updater = Last(n), Last(n), Last(n)
        self.narrow = False  # some update had a scope narrower than the system
        self.written = False  # by a plain access or by TMA
        # (byte offset, bytes) of a word that was read atomically -> column -> stamp. They race with plain writes, and
        # with updates of other bytes or of too narrow a scope.
        self.looks: dict[tuple[int, int], dict[int, int]] = {}
        self.sizes: set[int] = set()  # bytes of an element, of all updates and atomic reads
        self.look_sizes: set[int] = set()  # of the atomic reads


class Touched:
    """The granules of one access: their place in a shadow array, and a mask of the bytes that it touches in each."""

    __slots__ = ("one", "view", "index", "bytes", "few")

    def __init__(self, access: Access) -> None:
        self.few: list[int] = []  # the masks of a few granules: a loop over those is faster than numpy
        self.one = -1  # the only granule; or else a view of several axes, or a slice or an array of granules
        self.view: Any = None
        self.index: Any = None
        self.bytes: Any = FULL
        if access.count == 1:
            offset = access.span()[0]
            self.one = offset // GRANULE
            self.bytes = ((1 << access.itemsize) - 1) << offset % GRANULE & FULL
        elif isinstance(access, Strided):
            place = access.place
            row = place.shape[-1] * place.itemsize
            if (place.offset | row) % GRANULE or any(s % GRANULE for s in place.strides[:-1]):
                self._scatter(access.byte_offsets(), access.itemsize)
            elif len(place.shape) == 1:
                self.index = slice(place.offset // GRANULE, (place.offset + row) // GRANULE)
            else:
                shape = (*place.shape[:-1], row // GRANULE)
                strides = (*(s // 2 for s in place.strides[:-1]), 8)
                self.view = (shape, place.offset // 2, strides)
        else:
            self._scatter(access.offsets, access.itemsize)

    def _scatter(self, offsets: np.ndarray, itemsize: int) -> None:
        granule = offsets // GRANULE
        touched = np.int64((1 << itemsize) - 1) << (offsets % GRANULE)
        if (np.diff(granule) < 0).any():
            order = np.argsort(granule, kind="stable")
            granule, touched = granule[order], touched[order]
        starts = np.flatnonzero(np.concatenate(([True], granule[1:] != granule[:-1])))
        self.index = granule[starts]
        self.bytes = np.bitwise_or.reduceat(touched, starts) & FULL
        if len(starts) <= FEW:
            self.few = self.bytes.tolist()

    def get(self, array: np.ndarray) -> np.ndarray:
        if self.one >= 0:
            return array[self.one : self.one + 1]
        if self.view is None:
            return array[self.index]
        shape, offset, strides = self.view
        return np.ndarray(shape, np.int64, array, offset, strides)

    def state(self, array: np.ndarray) -> int | None:
        """The state that all granules have, as those of most tiles do; None if they or their masks differ."""
        if self.one >= 0:
            return array.item(self.one)
        if type(self.bytes) is not int:
            return None
        states = array[self.index] if self.view is None else self.get(array)
        data = states.tobytes()  # on bytes, which takes half the time of an array of bools
        return states.item(0) if data == data[:8] * states.size else None

    def put(self, array: np.ndarray, stamps: Any) -> None:
        if self.one >= 0:
            array[self.one] = stamps
        elif self.view is None:
            array[self.index] = stamps
        else:
            self.get(array)[...] = stamps

    def offset(self, position: int) -> int:
        """Byte offset in the region of the granule at flat `position`."""
        if self.one >= 0:
            return self.one * GRANULE
        if self.view is None:
            chosen = self.index
            return (chosen.start + position if isinstance(chosen, slice) else int(chosen[position])) * GRANULE
        shape, offset, strides = self.view
        where = np.unravel_index(position, shape)
        return (offset + sum(int(i) * s for i, s in zip(where, strides))) * 2


_kept: dict[tuple, Touched] = {}


def touched_by(access: Access) -> Touched:
    """`Touched(access)`. Those of few elements are kept: every schedule makes the same accesses again."""
    if isinstance(access, Strided):
        place = access.place
        if place.touched is None:
            place.touched = _touched_by(access, place.key()) if place.count <= SMALL else Touched(access)
        return place.touched
    return _touched_by(access, access.key()) if access.count <= SMALL else Touched(access)


def _touched_by(access: Access, key: tuple) -> Touched:
    known = _kept.get(key)
    if known is None:
        if len(_kept) >= KEPT:
            _kept.clear()
        known = _kept[key] = Touched(access)
    return known
