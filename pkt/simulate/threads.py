"""The threads of one program, which only a barrier orders.

The simulator runs a program as one thread. A GPU spreads the elements of a block over the program's threads, and Triton
puts no barrier between its accesses: a thread may load an element before another one has stored it, or store one before
another has loaded it. This module keeps what a program has stored and loaded since its last barrier, and finds accesses
to it by other threads.

Triton chooses the thread of an element. Two blocks of one shape, whose elements are of one size, are taken to be spread
alike, so that `tl.load(p + i)` behind `tl.store(p + i, x)` finds what its own thread has stored. Blocks of up to 32
elements are stored by one warp, whose threads go in step, but loaded by every warp. One number of such a block is taken
to be loaded for all of them, as an index from a table. What else is loaded is taken to be for the warp that stored it.
Nothing is said about a program of one warp, or about TMA.

One store may put two elements at one address, in any number of warps. `check_overlap` finds those of different values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from pkt.simulate.detector import FAR_READ
from pkt.simulate.faults import Site
from pkt.simulate.findings import MissingBarrier, OverlappingStore
from pkt.simulate.memory import Access, Strided
from pkt.wording import Access as Said

STORES = frozenset({"store", "atomic"})
WARP = 32  # threads
KEPT = 16  # of a program's stores to one region, the last ones; of its loads, too
COMPARED = 4  # of those that may meet an access, compared with it element by element


class Done:
    """Elements that a program has stored, updated or loaded. where: which of a block of `shape` they are, flat."""

    __slots__ = ("access", "shape", "where", "kind", "at", "low", "high", "few", "rows")

    def __init__(self, access: Access, shape: tuple[int, ...], where: Any, kind: str, at: Site) -> None:
        self.access, self.shape, self.where, self.kind, self.at = access, shape, where, kind, at
        self.low, self.high = access.span()
        self.few = math.prod(shape) <= WARP
        place = access.place if isinstance(access, Strided) else None
        self.rows = None if place is None or place.repeats() else (shape, place.shape, place.strides, place.itemsize)

    def elements(self) -> np.ndarray:
        """The place in the block of each element."""
        if isinstance(self.where, np.ndarray):
            return self.where
        return np.arange(self.access.count) if self.where is ... else np.arange(self.where.start, self.where.stop)

    def may_meet(self, later: Done) -> bool:
        """Whether `later` may access bytes of this by other threads: mostly a few numbers tell that it does not."""
        if self.low >= later.high or later.low >= self.high:
            return False
        if self.few and later.few and not (self.looks_up() or later.looks_up()):
            return False
        if self.rows is None or self.rows != later.rows:
            return True
        if self.low == later.low:
            return bool(self.where != later.where)
        return _cross(later.low - self.low, *self.rows[1:3])

    def looks_up(self) -> bool:
        """Whether this loads one number. If it is not kept in memory, stored by the same thread, it is of a table."""
        return self.kind == "load" and math.prod(self.shape) == 1

    def meets(self, later: Done) -> int | None:
        """A byte of the region that another thread accesses in `later` than did here; None without one."""
        one, two = self.access, later.access
        if self.shape != later.shape or one.itemsize != two.itemsize:
            return _shared(one, two)
        offsets, here, there = np.intersect1d(one.byte_offsets(), two.byte_offsets(), return_indices=True)
        apart = np.flatnonzero(self.elements()[here] != later.elements()[there])
        return int(offsets[apart[0]]) if apart.size else None


def _cross(distance: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two equal blocks of rows, of which one begins `distance` bytes behind the other, share an element. No row
    of a block begins before the one before it ends."""
    if not shape:
        return distance == 0
    n, step = shape[0], strides[0]
    if n == 1:
        return _cross(distance, shape[1:], strides[1:])
    rows = distance // step
    return any(abs(i) < n and _cross(distance - i * step, shape[1:], strides[1:]) for i in (rows, rows + 1))


def _shared(one: Access, two: Access) -> int | None:
    """A byte in an element of each of two accesses; None without one."""
    begins, others = np.sort(one.byte_offsets()), two.byte_offsets()
    before = np.searchsorted(begins, others + two.itemsize)  # how many of `one` begin before an element of `two` ends
    others, begins = others[before > 0], begins[before[before > 0] - 1]
    shared = np.flatnonzero(begins + one.itemsize > others)
    return max(int(begins[shared[0]]), int(others[shared[0]])) if shared.size else None


def join(task: Any) -> None:
    """The threads of a program meet: what one has done, the others find."""
    task.stored.clear()
    task.loaded.clear()


def _unordered(known: Iterable[tuple], new: Done) -> tuple[Done, int] | None:
    """What another thread may still have to do when `new` is done, with a byte of the region that both access. known:
    what `Done` takes, of each. Two updates are both atomic."""
    done = (Done(*old) for old in known)
    near = (old for old in done if not (old.kind == new.kind == "atomic") and old.may_meet(new))
    for old in itertools.islice(near, COMPARED):
        offset = old.meets(new)
        if offset is not None:
            return old, offset
    return None


def _keep(done: dict[int, list[tuple]], new: tuple) -> None:
    known = done.setdefault(new[0].region.base, [])
    if len(known) == KEPT:
        del known[0]
    known.append(new)


def check(m: Any, reported: set, parts: list, shape: tuple[int, ...], kind: str, at: Site) -> None:
    """Check an access of the current program of machine `m` against those since its last barrier, and keep it. parts:
    of the block of `shape` that it accesses, see `AddressSpace.resolve`. reported: what has been said in this run."""
    task, stores = m.current, kind in STORES
    if not m.races or task.launch.num_warps == 1:
        return
    for access, where in parts:
        region = access.region
        if region.kind in ("signals", "status"):
            continue
        this = access, shape, where, kind, at
        before = task.stored.get(region.base, ())
        if stores:
            before = (*before, *task.loaded.get(region.base, ()))
        found = _unordered(reversed(before), Done(*this)) if before else None
        if found is not None and (region.name, found[0].at, at) not in reported:
            old, offset = found
            reported.add((region.name, old.at, at))
            tensor = f"rank {region.rank}'s {region.element(region.base + offset)}"
            pair = region.name, frozenset({(old.kind, old.at), (kind, at)})
            first, second = (
                Said(task.rank, task.program, task.name, what, tensor, str(line))
                for what, line in ((old.kind, old.at), (kind, at))
            )
            m.findings.append(MissingBarrier.between(first, second, pair))
        if kind != FAR_READ:  # of what overtakes that, MissingQuiet tells
            _keep(task.stored if stores else task.loaded, this)


def check_overlap(m: Any, reported: set, parts: list, values: np.ndarray, at: Site) -> None:
    """Check that elements of a block of `values` that are stored at one address have the same bits. parts, reported: as
    of `check`."""
    for access, where in parts:
        if isinstance(access, Strided) and not access.place.repeats():
            continue
        offsets = access.byte_offsets()
        order = np.argsort(offsets, kind="stable")
        bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").reshape(-1)[where][order]
        offsets = offsets[order]
        apart = np.flatnonzero((offsets[1:] == offsets[:-1]) & (bits[1:] != bits[:-1]))
        region, task = access.region, m.current
        if apart.size and (region.name, at) not in reported:
            reported.add((region.name, at))
            tensor = f"rank {region.rank}'s {region.element(region.base + int(offsets[apart[0]]))}"
            said = Said(task.rank, task.program, task.name, "store", tensor, str(at))
            m.findings.append(OverlappingStore.of_one(said, (region.name, frozenset({("store", at)}))))
