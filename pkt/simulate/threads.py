"""The threads of one program, which only a barrier orders.

The simulator runs a program as one thread. A GPU spreads the elements of a block over the program's threads, and Triton
puts no barrier between a store and a load: a thread may load an element before another one has stored it. This module
keeps what a program has stored since its last barrier, and finds accesses to it by other threads.

Triton chooses the thread of an element. Two blocks of one shape, whose elements are of one size, are taken to be spread
alike, so that `tl.load(p + i)` behind `tl.store(p + i, x)` finds what its own thread has stored. Blocks of up to 32
elements lie in one warp, whose threads go in step. Nothing is said about a program of one warp, about loads that come
before a store, or about TMA.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from pkt.simulate.faults import Site
from pkt.simulate.findings import MissingBarrier
from pkt.simulate.memory import Access, Strided
from pkt.wording import Access as Said

WARP = 32  # threads
KEPT = 64  # stores to one region that a program is remembered for


class Done(NamedTuple):
    """Elements that a program has stored, updated or loaded. where: which of a block of `shape` they are, flat."""

    access: Access
    shape: tuple[int, ...]
    where: Any
    kind: str
    at: Site

    def elements(self) -> np.ndarray:
        """The place in the block of each element."""
        if isinstance(self.where, np.ndarray):
            return self.where
        return np.arange(self.access.count) if self.where is ... else np.arange(self.where.start, self.where.stop)

    def before(self, later: Done) -> int | None:
        """A byte of the region that another thread accesses in `later` than did here; None without one."""
        one, two = self.access, later.access
        low, high = one.span()
        first, end = two.span()
        if high <= first or end <= low or max(math.prod(self.shape), math.prod(later.shape)) <= WARP:
            return None
        if self.shape != later.shape or one.itemsize != two.itemsize:
            return _shared(one, two)
        if _same(one, two):
            return None
        offsets, here, there = np.intersect1d(one.byte_offsets(), two.byte_offsets(), return_indices=True)
        apart = np.flatnonzero(self.elements()[here] != later.elements()[there])
        return int(offsets[apart[0]]) if apart.size else None


def _shared(one: Access, two: Access) -> int | None:
    """A byte in an element of each of two accesses; None without one."""
    begins, others = np.sort(one.byte_offsets()), two.byte_offsets()
    before = np.searchsorted(begins, others + two.itemsize)  # how many of `one` begin before an element of `two` ends
    others, begins = others[before > 0], begins[before[before > 0] - 1]
    shared = np.flatnonzero(begins + one.itemsize > others)
    return max(int(begins[shared[0]]), int(others[shared[0]])) if shared.size else None


def _same(one: Access, two: Access) -> bool:
    """Whether two accesses of one region are seen to be of the same place."""
    return isinstance(one, Strided) and isinstance(two, Strided) and one.place.key() == two.place.key()


Stored = dict[int, list[Done]]
"""What a program has stored and updated since its last barrier, by the first address of the region."""


def _unordered(stored: Stored, new: Done) -> tuple[Done, int] | None:
    """What another thread may still have to do when `new` is done, with a byte of the region that both access. Two
    updates are both atomic."""
    for old in stored.get(new.access.region.base, ()):
        if not (old.kind == new.kind == "atomic") and (offset := old.before(new)) is not None:
            return old, offset
    return None


def _keep(stored: Stored, new: Done) -> None:
    known = stored.setdefault(new.access.region.base, [])
    if known and known[-1].at == new.at and _same(known[-1].access, new.access):
        return  # a loop
    if len(known) == KEPT:
        del known[0]
    known.append(new)


def check(
    m: Any, reported: set, parts: list, shape: tuple[int, ...], kind: str, at: Site, *, stores: bool
) -> None:  # fmt: skip
    """Check an access of the current program of machine `m`, and keep it if it stores. parts: of the block of `shape`
    that it accesses, see `AddressSpace.resolve`. reported: what has been said in this run."""
    task = m.current
    if not m.races or not (stores or task.stored) or task.launch.num_warps == 1:
        return
    for access, where in parts:
        region = access.region
        if region.kind in ("signals", "status"):
            continue
        new = Done(access, shape, where, kind, at)
        found = _unordered(task.stored, new)
        if found is not None and (region.name, found[0].at, at) not in reported:
            old, offset = found
            reported.add((region.name, old.at, at))
            tensor = f"rank {region.rank}'s {region.element(region.base + offset)}"
            pair = region.name, frozenset({(old.kind, old.at), (kind, at)})
            first, second = (
                Said(task.rank, task.program, task.name, done.kind, tensor, str(done.at)) for done in (old, new)
            )
            m.findings.append(MissingBarrier.between(first, second, pair))
        if stores:
            _keep(task.stored, new)
