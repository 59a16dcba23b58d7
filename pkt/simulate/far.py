"""Puts and signals to ranks of other nodes: the network carries them out late, and in any order.

A far put is an actor of its own. It follows what its program has done and seen, and what a fence puts in front of it.
It reads its source and writes its target at once when it arrives, which the schedule decides. Nobody is ordered after
it but who sees its own signal, or a later signal of the program after a fence; and the program itself after quiet.
The race detector therefore gives every put that may be on its way a column of its own.

The rules are NVSHMEM's, except where they leave a choice: a fence and a quiet cover the calls of their own program.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from pkt.errors import NotSymmetric, RankError, ShapeError
from pkt.simulate import cost, threads
from pkt.simulate.accesses import scalar
from pkt.simulate.atomics import Atomics
from pkt.simulate.bad_address import check_kind
from pkt.simulate.detector import FAR_PUT, FAR_READ, FOUND, accessed
from pkt.simulate.faults import Site
from pkt.simulate.memory import Access, Region, Strided
from pkt.simulate.sites import site


class FarCall:
    """A put, a signal, or both in this order, on the way to rank `peer`."""

    __slots__ = ("task", "at", "peer", "data", "signal", "clock", "after", "fenced", "arrived", "time")

    def __init__(self, task: Any, at: Site, peer: int, after: list[FarCall]) -> None:
        self.task, self.at, self.peer = task, at, peer
        self.after = after  # calls that arrive before it
        self.data: tuple[Strided, Strided] | None = None  # from, to
        self.signal: Any = None  # () -> None
        self.clock: Any = None  # of what its arrival follows, and of its own accesses
        self.fenced = False  # a fence follows it
        self.arrived = False
        self.time = 0.0  # of its arrival on the modelled clock


class Far(Atomics):
    """Calls to other nodes."""

    def far_put(self, dst: Any, src: Any, nbytes: Any, peer: Any, world: Any) -> None:
        self._step(scalar(src))
        to, at = self._peer(peer), site()
        data = self._run(dst, src, scalar(nbytes), to, at)
        self._put(to, data, self._release(True), at)
        self.detector.passed(True)

    def far_put_signal(
        self, dst: Any, src: Any, nbytes: Any, ptr: Any, value: Any, peer: Any, op: str, world: Any
    ) -> None:
        self._step(scalar(src))
        to, at = self._peer(peer), site()
        data = self._run(dst, src, scalar(nbytes), to, at)
        self._post(to, data, ptr, value, at)

    def far_signal(self, ptr: Any, value: Any, peer: Any, op: str, world: Any) -> None:
        self._step(scalar(ptr))
        self._post(self._peer(peer), None, ptr, value, site())

    def far_fence(self) -> None:
        m, task = self.m, self.m.current
        at = site()
        if task.far:
            m.census.note(at, "remove")
        if m.faults.change(at) != "remove":
            for call in task.far:
                call.fenced = True

    def far_quiet(self) -> None:
        m, task = self.m, self.m.current
        self._step()
        at = site()
        change = "remove" if at.call == "quiet" else "relax"
        if task.far:
            m.census.note(at, change)
        if m.faults.change(at) in (change, "remove"):
            return
        while late := [call for call in task.far if not call.arrived]:
            self._deliver(late[m.schedule.choose(len(late))])
        for call in task.far:
            if m.races:
                task.clock = m.clocks.join(task.clock, call.clock)
            task.time = max(task.time, call.time)
        task.far.clear()

    def deliver_one(self) -> None:
        """Let one call arrive that may."""
        m = self.m
        free = [call for call in m.far if all(before.arrived for before in call.after)]
        if free:  # else they follow a call that a fault delays
            self._deliver(free[m.schedule.choose(len(free))])

    def _deliver(self, call: FarCall) -> None:
        """Let a call arrive, after those that a fence puts before it."""
        m = self.m
        if call.arrived:
            return
        for before in call.after:
            self._deliver(before)
        call.arrived = True
        if call in m.far:
            m.order = hash((m.order, m.far.index(call)))
            m.far.remove(call)
        if call.data is not None:
            source, target = call.data
            byte = np.dtype(np.uint8)
            target.view(byte)[...] = source.view(byte)
            self._changed(target)
        if call.signal is not None:
            call.signal()

    def check_far(self, region: Region) -> None:
        """Note a finding if a call on its way still reads or writes memory that host code frees."""
        m, task = self.m, self.m.current
        for call in m.far:
            for access, kind in zip(call.data or (), (FAR_READ, FAR_PUT)):
                if access.region is region:
                    tensor = f"rank {region.rank}'s {region.element(access.first())}"
                    first = accessed(call.task, kind, tensor, call.at)
                    made, at = FOUND[kind], site()
                    pair = region.name, frozenset({(kind, call.at), ("free", at)})
                    m.findings.append(made.between(first, accessed(task, "free", tensor, at), pair))

    # issuing

    def _peer(self, peer: Any) -> int:
        to = scalar(peer)
        if not 0 <= to < self.m.size:
            raise RankError.outside(self.rank, f"{site().call} at {site()}", to, self.m.size)
        return to

    def _run(self, dst: Any, src: Any, nbytes: int, to: int, at: Site) -> tuple[Strided, Strided] | None:
        """The runs that a put reads and writes; None for no bytes. Raises NotSymmetric unless both lie in my heap."""
        itemsize = max(1, src.dtype.element_ty.primitive_bitwidth // 8)
        if nbytes < 0 or nbytes % itemsize:
            wanted = f"a multiple of the element's {itemsize} bytes, from 0"
            raise ShapeError.argument(f"{at.call} at {at}", "nbytes", nbytes, wanted, self.rank)
        if not nbytes:
            return None
        space, task = self.m.space, self.m.current
        for name, pointer in (("src", src), ("dst", dst)):
            owner = space.owner(scalar(pointer))
            if owner != task.rank:
                held = space.holding(scalar(pointer))
                what = "memory outside it" if held is None else f"{held.name}, a plain tensor"
                found = what if owner is None else f"an address of rank {owner}: give this rank's own"
                raise NotSymmetric.argument(task.rank, name, found, f"{at.call} at {at}")
        moved = (to - task.rank) * space.stride
        source = self._box(scalar(src), (nbytes,), (1,), 1, "far put")
        target = self._box(scalar(dst) + moved, (nbytes,), (1,), 1, "far put")
        assert source is not None
        assert target is not None
        return source, target

    def _call(self, to: int, clock: Any, at: Site) -> FarCall:
        """A new call to rank `to`, after the program's fenced calls there."""
        m, task = self.m, self.m.current
        call = FarCall(task, at, to, [before for before in task.far if before.fenced and before.peer == to])
        for before in call.after:
            if clock is not None and before.clock is not None:
                clock = m.clocks.join(clock, before.clock)
        call.clock = clock
        call.time = max([task.time + cost.FAR_US, *(before.time for before in call.after)])
        return call

    def _put(
        self, to: int, data: tuple[Strided, Strided] | None, clock: Any, at: Site, signal: Any = None,
        delayed: bool = False,
    ) -> None:  # fmt: skip
        """Issue a put. clock: of what it follows. signal: `_arrives` without its call. delayed: by a fault."""
        m, task = self.m, self.m.current
        call = self._call(to, clock, at)
        if data is not None:
            source = data[0]  # which one thread of the program gives to the network
            threads.check(m, self.detector.reported, [(source, ...)], (source.count,), FAR_READ, at)
            for access in data:
                self._own_stores(access)
            call.data, call.time = data, call.time + data[0].nbytes / cost.FAR_BYTES_PER_US
            if m.races:
                call.clock, stamp = self._stamped(call.clock)
                self.detector.send(*data, call.clock, stamp, at)
            self._spend("communicate", cost.STEP_US)
        call.signal = None if signal is None else functools.partial(signal, call)
        task.far.append(call)
        if delayed:
            m.late_signals.append(functools.partial(self._deliver, call))
        elif m.schedule.late_stores:
            m.far.append(call)
        else:
            self._deliver(call)

    def _stamped(self, clock: Any) -> tuple[Any, int]:
        """A clock behind `clock` for a put of the current program, and its stamp: in the first of the program's columns
        whose last put is known to be complete."""
        m, task = self.m, self.m.current
        columns = m.hosts[task.rank].far.setdefault(task.index, {})
        known = m.clocks.fit(task.clock)
        column = next((column for column, last in columns.items() if known[column] >= last), None)
        if column is None:
            column = m.clocks.column()
        columns[column] = now = columns.get(column, 0) + 1
        clock = m.clocks.fit(clock).copy()
        clock[column] = now
        return clock, now << 32 | column << 16

    def _post(self, to: int, data: tuple[Strided, Strided] | None, ptr: Any, value: Any, at: Site) -> None:
        """Issue a signal, after its data if there is any."""
        m, task = self.m, self.m.current
        itemsize = ptr.dtype.element_ty.primitive_bitwidth // 8
        address = scalar(ptr) + (to - task.rank) * m.space.stride
        parts = self._resolve(np.array([address], np.uint64), None, itemsize, "far signal", near=False)
        check_kind(m, parts, "far signal", at)
        access = parts[0][0]
        m.census.note(at, "remove", "relax")
        change = m.faults.change(at)
        releases = change != "relax"
        self.detector.begin_update("system", itemsize)
        clock = self._release(releases)
        if change == "remove":
            if data is not None:
                self._put(to, data, clock, at)
            self.detector.passed(releases)
            return
        if data is not None and not releases:
            self._put(to, data, self._release(True), at)
            self.detector.passed(True)
            data = None
        access.region.signalled[address] = at
        event = self._signal(at, access)
        self.detector.write(access, "atomic", is_async=False, at=at)
        copies = 2 if event == m.faults.duplicate else 1
        arrives = functools.partial(self._arrives, task, at, parts, scalar(value), copies)
        signal = None if event == m.faults.drop else arrives
        self._put(to, data, clock, at, signal, delayed=event == m.faults.delay)
        self.detector.passed(releases)

    def _arrives(self, task: Any, at: Site, parts: list, value: int, copies: int, call: FarCall) -> None:
        """Add `value` to the counter: `copies` times where a fault repeats the signal."""
        access: Access = parts[0][0]
        dtype = np.dtype(f"int{8 * access.itemsize}")
        word = [access.first()]
        add = lambda old, where: old + np.array(value).astype(dtype)  # noqa: E731
        for _ in range(copies):
            self._perform(task, at, parts, word, dtype, add, np.zeros(1, dtype), call.clock, "system", set(), True)
        sync = self.detector.sync.get(access.first())
        if sync is not None and call.time > sync.time:
            sync.time, sync.sent = call.time, (task.rank, task.lane, call.time)
