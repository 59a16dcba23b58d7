"""The effect of the simulated programs' atomic accesses on memory and on the order of other accesses."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import triton.language as tl

from pkt.errors import SignalIndexError
from pkt.simulate import threads
from pkt.simulate.accesses import Accesses, words_of
from pkt.simulate.bad_address import check_kind
from pkt.simulate.constants import new_tensor
from pkt.simulate.detector import accessed
from pkt.simulate.faults import COUNTING, READS, SYNC, Signal, Site
from pkt.simulate.memory import Access, Buffered, Scattered, Strided
from pkt.simulate.sites import site, unused

ALL_OF_THEM = 1 << 62


class Atomics(Accesses):
    """Atomic updates, signals included."""

    def atomic(
        self,
        addresses: np.ndarray,
        mask: np.ndarray | None,
        dtype: np.dtype,
        update: Any,
        sem: str,
        scope: str,
        *,
        reads: bool = False,
        expected: np.ndarray | None = None,
    ) -> np.ndarray:
        """Perform an atomic update; return the old values, in the shape of `addresses`.

        update: `update(old, where)` returns the new values of the flat positions that the index `where` chooses. reads:
        the update changes nothing, so it is no signal that could be lost. expected: the values that a CAS compares,
        flat. Where it finds others it fails: it has only read, and releases nothing."""
        m, task = self.m, self.m.current
        at = site()
        self._step(addresses.item(0), spin=mask is None or bool(np.count_nonzero(mask)))
        out = np.zeros(addresses.size, dtype)
        parts = self._resolve(addresses, mask, dtype.itemsize, "atomic")
        self.detector.begin_update(scope, dtype.itemsize)
        if at.call == "epoch" and parts and parts[0][0].region.kind != "signals":
            region = parts[0][0].region
            tensor = f"rank {region.rank}'s {region.element(parts[0][0].first())}"
            raise SignalIndexError.epoch(accessed(task, "atomic", tensor, at))
        if at.call in COUNTING:
            check_kind(m, parts, "atomic", at)
        change = None
        if at.call in SYNC:
            reads = reads or at.call in READS
            m.census.note(at, *(("relax",) if at.call in READS else ("remove", "relax")))
            change = m.faults.change(at)
            if change == "remove" and not reads:
                return out.reshape(addresses.shape)
        releases = sem in ("release", "acquire_release") and change != "relax"
        scalar = addresses.size == 1  # one thread of the program updates it
        if scalar and releases:  # behind the others
            self.join_threads()
        threads.check(m, self.detector.reported, parts, addresses.shape, "atomic", at)
        if scalar and (task.stored or task.loaded) and not unused():  # it tells the others the old value
            self.join_threads()
        acquires = sem in ("acquire", "acquire_release") and change != "relax"
        most = ALL_OF_THEM if acquires or releases else 256
        words = [word for access, _ in parts for word in words_of(access, most)]
        copies = 1
        failed = set() if expected is None else self._failed_words(parts, dtype, expected)
        if failed and len(failed) == len(words):
            releases = False
        if acquires:
            for access, _ in parts:
                access.region.waited.update(words)
        if at.call in SYNC and parts and not reads:
            access = parts[0][0]
            access.region.signalled[access.first()] = at
            event = self._signal(at, parts[0][0])
            if event == m.faults.drop:  # lost in transit: the sender still gets the old values
                for part, where in parts:
                    out[where] = part.read(dtype)
                return out.reshape(addresses.shape)
            copies = 2 if event == m.faults.duplicate else 1
            if event == m.faults.delay:
                clock = self._release(releases)
                m.late_signals.append(
                    lambda: self._perform(task, at, parts, words, dtype, update, out.copy(), clock, scope, failed)
                )
                self.detector.passed(releases)
                return out.reshape(addresses.shape)
        clock = self._release(releases)
        if task.fenced and self._changes(parts, dtype, update):
            self._commit_buffered(task)
        writes = not (acquires or reads) and expected is None and copies == 1 and parts
        if m.schedule.late_atomics and writes and not self._overtakes(task) and unused():
            self._buffer(task, at, parts, dtype, update, len(out), clock, scope, most)
            self.detector.passed(releases)
            self._linger(task)
            return out.reshape(addresses.shape)
        for _ in range(copies):
            changed = self._perform(task, at, parts, words, dtype, update, out, clock, scope, failed)
        self.detector.passed(releases)
        if not changed:  # the program has only looked at the words
            for access, _ in parts:
                access.region.waited.update(words)
        if acquires:
            for address in words:
                self.detector.acquire(address, scope)
        else:
            self.detector.read_relaxed(words, scope)
        self._linger(task)
        if task.looking:
            self._saw(parts[0][0] if parts else None, out)
        return out.reshape(addresses.shape)

    def load_relaxed(self, ptr: Any) -> tl.tensor:
        addresses = ptr.handle.data
        dtype = np.dtype(np.int32 if ptr.dtype.element_ty.primitive_bitwidth == 32 else np.int64)
        for access, _ in self._resolve(addresses, None, dtype.itemsize, "wait"):
            access.region.waited.update(addresses.reshape(-1).tolist())
        old = self.atomic(addresses, None, dtype, lambda now, where: now, "relaxed", "system", reads=True)
        return new_tensor(old, ptr.dtype.element_ty, not ptr.shape)

    def _release(self, releases: bool) -> Any:
        """Return the clock that an atomic publishes; if it releases, make the program's plain stores visible first."""
        if releases:
            self._commit(self.m.current, lambda p: not p.is_async)
        return self.detector.released(releases)

    def _perform(
        self,
        task: Any,
        at: Site,
        parts: list,
        words: list[int],
        dtype: Any,
        update: Any,
        out: Any,
        clock: Any,
        scope: str,
        failed: set[int],
        recorded: bool = False,
    ) -> bool:
        """Perform the update itself; return whether it changed anything. failed: words of a CAS that it only reads.
        recorded: the race detector knows of the update since the program made it."""
        m, anything = self.m, False
        record = m.current is task and not recorded
        for access, where in parts:
            if record:
                self._own_stores(access)
            if isinstance(access, Strided) and access.place.repeats():  # of a block that was broadcast, for one
                access = Scattered(access.region, access.byte_offsets(), access.itemsize)
            if isinstance(access, Strided):
                view = access.view(dtype)
                old = view.reshape(-1).copy()
                new = update(old, where)
                changed = bool(old[0] != new[0] if len(old) == 1 else np.count_nonzero(old != new))
                view[...] = new.reshape(view.shape)
            elif len(np.unique(access.offsets)) == len(access.offsets):
                old = access.read(dtype).copy()
                new = update(old, where)
                changed = bool(np.count_nonzero(old != new))
                access.write(np.ascontiguousarray(new))
            else:  # one after the other, as the hardware does
                changed = False
                flat = np.arange(len(out))[where]
                old = np.empty(len(access.offsets), dtype)
                for turn in _turns(access.offsets):
                    part = Scattered(access.region, access.offsets[turn], access.itemsize)
                    old[turn] = now = part.read(dtype)
                    new = update(now, flat[turn])
                    changed |= bool(np.count_nonzero(now != new))
                    part.write(np.ascontiguousarray(new))
            out[where] = old
            if record:
                kind = "failed CAS" if failed and len(failed) == len(words) else self._polls("atomic", at.call)
                if changed or clock is not None:
                    self.detector.write(access, kind, is_async=False, at=at, scope=scope)
                else:  # it has only read: Triton compiles the addition of 0 to a load
                    self.detector.look(access, kind, at, scope)
                self._charge(access, signal=access.region.kind == "signals")
            if changed:
                m.progress += 1
                self._contend(access)
                anything = True
        for address in words:
            if clock is not None and address not in failed:
                self.detector.publish(address, clock, task, scope)
            if anything:
                m.wake(address)
        return anything

    def _linger(self, task: Any) -> None:
        """Let other programs run just after an atomic, where a missing order shows: for long after a buffered one."""
        m = self.m
        if m.schedule.interrupts() or (task.pending and m.schedule.lingers()):
            m.pause()
        if m.schedule.late_atomics:
            while any(isinstance(p, Buffered) for p in task.pending) and m.schedule.withholds():
                m.pause()

    def _overtakes(self, task: Any) -> bool:
        """Whether a relaxed atomic becomes visible at once, before one that is buffered."""
        return any(isinstance(p, Buffered) for p in task.pending) and self.m.schedule.lingers()

    def _buffer(
        self, task: Any, at: Site, parts: list, dtype: Any, update: Any, count: int, clock: Any, scope: str, most: int
    ) -> None:
        """Record the update now, and perform it when the schedule or the program's order makes it visible."""
        m = self.m
        for access, where in itertools.chain.from_iterable(self._apart(*part) for part in parts):
            self._own_stores(access)
            self.detector.write(access, "atomic", is_async=False, at=at, scope=scope)
            self._charge(access, signal=access.region.kind == "signals")
            words, out = words_of(access, most), np.zeros(count, dtype)
            perform = functools.partial(
                self._perform, task, at, [(access, where)], words, dtype, update, out, clock, scope, set(), True
            )
            if not task.pending:
                m.with_stores.append(task)
            task.pending.append(Buffered(access, perform))

    def _apart(self, access: Access, where: Any) -> list:
        """The two parts of a block's update that become visible one after the other: its elements are atomics of their
        own. A tile of data stays whole."""
        count = access.count
        if not 1 < count <= 256:
            return [(access, where)]
        cut, offsets = 1 + self.m.schedule.choose(count - 1), access.byte_offsets()
        flat = (
            np.arange(count) if where is ... else np.arange(where.start, where.stop) if type(where) is slice else where
        )
        sides = slice(None, cut), slice(cut, None)
        return [(Scattered(access.region, offsets[side], access.itemsize), flat[side]) for side in sides]

    def _changes(self, parts: list, dtype: Any, update: Any) -> bool:
        """Whether the update will change any word."""
        for access, where in parts:
            old = access.read(dtype).copy()
            if np.count_nonzero(update(old, where) != old):
                return True
        return False

    def _failed_words(self, parts: list, dtype: Any, expected: np.ndarray) -> set[int]:
        """The addresses where a CAS will find another value than it expects."""
        out: set[int] = set()
        for access, where in parts:
            self._own_stores(access)
            found = access.read(dtype)
            if where is ... and len(found) == 1:
                if found[0] != expected[0]:
                    out.add(access.first())
                continue
            wrong = found != (expected if where is ... else expected[where])
            out.update((access.region.base + access.byte_offsets()[wrong]).tolist())
        return out

    def _signal(self, at: Site, access: Access) -> Signal:
        m, task = self.m, self.m.current
        region, address = access.region, access.first()
        event = Signal(
            task.rank, task.launch.ordinal, task.index, task.signals, at,
            lambda: f"rank {region.rank}'s {region.element(address)}",
        )  # fmt: skip
        task.signals += 1
        m.census.signals.append(event)
        return event


def _turns(offsets: np.ndarray) -> list[np.ndarray]:
    """The indices of the first element at each offset, of the second ones, and so on."""
    order = np.argsort(offsets, kind="stable")
    first = np.flatnonzero(np.diff(offsets[order], prepend=-1))  # of each offset
    counts = np.diff(first, append=len(order))
    turn = np.arange(len(order)) - np.repeat(first, counts)
    return np.split(order[np.argsort(turn, kind="stable")], np.cumsum(np.bincount(turn))[:-1])
