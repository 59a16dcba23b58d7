"""The effect of the simulated programs' accesses on memory.

A plain store stays pending in its program until something makes it visible: an overlapping access of the same program,
a release, the end of the grid, or the schedule. TMA stores are pending in the async proxy. A release does not wait for
TMA stores; only `drain` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from pkt.simulate import cost, threads
from pkt.simulate.bad_address import bad_address, check_counters, check_near, misaligned
from pkt.simulate.builder import Tile
from pkt.simulate.detector import POLLING, Detector, Sync
from pkt.simulate.faults import Site
from pkt.simulate.findings import Deadlock
from pkt.simulate.loops import UNPAUSED, Loop, Slice, digest
from pkt.simulate.memory import Access, Buffered, Pending, Strided, Unmapped, overlapping
from pkt.simulate.numerics import BITS, encode
from pkt.simulate.sites import site
from pkt.wording import Waiting

UNINTERRUPTED = 4096  # accesses of one program before it must let others run
POLLS_OF_A_STRETCH = 16  # polls that such a stretch of accesses counts for
REPEATS = 16  # loads of the same words, with no other access in between, that count as one poll
ALONE = 1 << 20  # iterations of a `while` without an access after which it counts as endless: some 8 seconds
_LOOKING = frozenset({"load_acquire", "load_relaxed", "test"})  # calls of pkt.language that look at a flag once


class Accesses:
    """Loads and stores, plain and by tiles, of the program `machine.current`."""

    def __init__(self, machine: Any) -> None:
        self.m = machine
        self.detector = Detector(machine)

    @property
    def rank(self) -> int:
        return self.m.current.rank

    @property
    def on_host(self) -> bool:
        """Whether host code runs now, and not a program of a kernel."""
        task = self.m.current
        return task is None or task.launch is None

    def load(self, addresses: np.ndarray, mask: np.ndarray | None, dtype: np.dtype, volatile: bool) -> np.ndarray:
        first = addresses.item(0)
        self._step(first, spin=self._repeats(first, addresses.size) or volatile)
        parts = self._resolve(addresses, mask, dtype.itemsize, "load")
        at = site() if self.m.races else None  # here, where fewer frames lie in between
        kind = "volatile load" if volatile else "load"
        if self.m.current.looking:
            kind = self._polls(kind)
        if at is not None:
            threads.check(self.m, self.detector.reported, parts, addresses.shape, kind, at)
        before_read = self._before_poll if volatile else self._before_read
        for access, _ in parts:
            if access.region.kind == "signals":
                access.region.waited.update(words_of(access))
        if len(parts) == 1 and parts[0][1] is ...:
            access = parts[0][0]
            assert isinstance(access, Strided)
            before_read(access, kind, at=at)
            out = access.view(dtype).copy()
        else:
            flat = np.zeros(addresses.size, dtype)
            for access, where in parts:
                before_read(access, kind, at=at)
                flat[where] = access.read(dtype)
            out = flat.reshape(addresses.shape)
        if self.m.current.looking:
            self._saw(parts[0][0] if parts else None, out)
        return out

    def store(self, addresses: np.ndarray, mask: np.ndarray | None, values: np.ndarray) -> None:
        self._step(addresses.item(0))
        at = site() if self.m.races else None
        parts = self._resolve(addresses, mask, values.dtype.itemsize, "store")
        if at is not None:
            threads.check(self.m, self.detector.reported, parts, addresses.shape, "store", at)
            threads.check_overlap(self.m, self.detector.reported, parts, values, at)
        for access, where in parts:
            self._write(access, values if where is ... else values.reshape(-1)[where], "store", is_async=False, at=at)

    def load_tile(self, tile: Tile, fill: float) -> np.ndarray:
        self._step(tile.address)
        access = self._tile(tile, "TMA load")
        if access is not None:
            self._before_read(access, "TMA load", is_async=True)
            if self.m.current.looking:
                self._saw(access, access.view(tile.dtype))
            if tile.shape == tile.box:
                return access.view(tile.dtype).copy()
        ty = tile.element
        empty = encode(np.array(fill), ty) if ty.name in BITS else np.array(fill).astype(tile.dtype)
        out = np.full(tile.box, empty, tile.dtype)
        if access is not None:
            out[tile.inside] = access.view(tile.dtype)
        return out

    def store_tile(self, tile: Tile, values: np.ndarray) -> None:
        self._step(tile.address)
        access = self._tile(tile, "TMA store")
        if access is not None:
            self._write(access, values[tile.inside], "TMA store", is_async=True)

    def reduce_tile(self, tile: Tile, values: np.ndarray, op: Any) -> None:
        """Update each element atomically, at once: the order among updates is free anyway, and the race detector
        reports a program that relies on the update before a drain."""
        self._step(tile.address)
        access = self._tile(tile, "TMA reduce")
        if access is None:
            return
        self._own_stores(access)
        if self.m.current.fenced:
            self._commit_buffered(self.m.current)
        self.detector.write(access, "TMA reduce", is_async=True)
        view = access.view(tile.dtype)
        view[...] = op(view, values[tile.inside])
        self._charge(access)
        self._changed(access)

    # loops: see pkt.simulate.loops

    def enter_loop(self, number: int, of: Slice) -> None:
        self.m.current.loops[number] = Loop(of)

    def leave_loops(self, numbers: tuple[int, ...]) -> None:
        m = self.m
        for number in numbers:
            loop = m.current.loops.pop(number, None)
            if loop is not None:
                self.end_round(loop)

    def iterated(self, number: int, variables: dict[str, Any]) -> None:
        """Begin an iteration of a `while`. A loop that has only seen the same again lets other programs run."""
        m = self.m
        loop = m.current.loops[number]
        decides = [digest(variables.get(name)) for name in loop.slice.decides]
        guards = [digest(variables.get(name)) for name in loop.slice.guards]
        alike = loop.turned(tuple(decides), tuple(guards))
        if not alike:
            self.end_round(loop)
        unpaused = loop.steps == m.steps  # since the last one
        loop.alone = loop.alone + 1 if unpaused else 0
        if loop.alone >= ALONE:
            raise Deadlock.alone(m.current, str(site()), ALONE)
        its_turn = m.turn is not None and m.turn.loop is loop  # which ends here
        if (alike and (unpaused or its_turn)) or (unpaused and not loop.turns % UNPAUSED):
            m.pause()
        loop.steps, loop.progress = m.steps, m.progress

    def end_round(self, loop: Loop) -> None:
        """End the round of a loop that has seen something new. One in another loop of the round does not matter: what
        the other sees does."""
        m = self.m
        if loop.round == m.round and not any(
            other.round == m.round for other in m.current.loops.values() if other is not loop
        ):
            m.round += 1

    def look(self, expressions: tuple[tuple[int, int], ...]) -> None:
        """Begin an expression that may decide about loops, given by (number, index in its Source); without any, end
        it."""
        looking = self.m.current.looking
        if expressions:
            looking.append(expressions)
        else:
            looking.pop()

    def _polls(self, kind: str, call: str = "") -> str:
        """The kind of an access, which polls if it helps to decide when a loop of the current program ends. So does one
        of a `call` in pkt.language that looks at a flag."""
        task = self.m.current
        looking = ((task.loops.get(number), at) for expressions in task.looking for number, at in expressions)
        polls = call in _LOOKING or any(loop is not None and at in loop.slice.expressions for loop, at in looking)
        return POLLING + kind if polls else kind

    def _saw(self, access: Access | None, values: Any) -> None:
        """Note the values that an expression which decides about loops has loaded."""
        task = self.m.current
        for number, at in {of for expressions in task.looking for of in expressions}:
            loop = task.loops.get(number)
            if loop is None or at not in loop.slice.guarding:
                continue
            found = values.tobytes() if isinstance(values, np.ndarray) else values
            found = (access.first() if access is not None else 0, found)
            loop.guards_seen = hash((loop.guards_seen, found))
            if loop.round == self.m.round and access is not None:
                self.m.polled.update(words_of(access))
            if at in loop.slice.expressions:
                loop.seen = hash((loop.seen, found))
                if access is not None:
                    loop.polled[access.first()] = access

    def join_threads(self) -> None:
        """The program's threads meet: at a barrier, or in an operation that Triton compiles with one."""
        threads.join(self.m.current)

    def computed(self, flops: float) -> None:
        self._spend("compute", flops / cost.FLOPS_PER_US)

    def commit_one(self, surely: bool = False) -> None:
        """Make a pending store visible. A buffered atomic mostly stays buffered, unless `surely`."""
        m = self.m
        task = m.with_stores[m.schedule.choose(len(m.with_stores))]
        at = m.schedule.choose(len(task.pending))
        store, m.order = task.pending[at], hash((m.order, task.column, -1 - at))
        if surely or not isinstance(store, Buffered) or m.schedule.releases():
            self._commit_pending(task, [store])

    def commit_rank(self, rank: int) -> None:
        for task in [t for t in self.m.with_stores if t.rank == rank]:
            self._commit(task, lambda p: True)

    def _step(self, first: int | None = None, spin: bool = False) -> None:
        """Begin an access: another program may run first, and a spin lets it.

        first: address of the first element. spin: the access may be a poll of a spin loop. The poll count restarts
        when memory changes anywhere, and when the program accesses an address that is new since that change."""
        m, task = self.m, self.m.current
        task.accesses += 1
        long = not task.accesses % UNINTERRUPTED
        if long:
            m.steps += UNINTERRUPTED
        if spin or long or task.polls:
            if task.progress != m.progress:
                task.progress, task.polls = m.progress, 0
                task.touched.clear()
            if first is None or first in task.touched:
                task.polls += POLLS_OF_A_STRETCH if long else spin
            else:
                task.touched.add(first)
                task.polls = 0
            if (spin or long) and task.polls > 1:
                m.pause()
                return
        if long or m.schedule.interrupts():
            m.pause()

    def _repeats(self, first: int, count: int) -> bool:
        """Whether a program loads the same words repeatedly, as a spin on a plain load does."""
        task = self.m.current
        alone = task.last == (first, count, task.accesses)  # no other access in between
        task.last = first, count, task.accesses + 1
        task.repeats = task.repeats + 1 if alone else 0
        return alone and not task.repeats % REPEATS

    def _resolve(self, addresses: np.ndarray, mask: Any, itemsize: int, kind: str, near: bool = True) -> list:
        """The regions that are accessed. `near`: refuses those of other nodes."""
        try:
            parts = self.m.space.resolve(addresses, mask, itemsize)
        except Unmapped as unmapped:
            raise bad_address(self.m, unmapped, kind) from None
        near &= self.m.apart
        for access, _ in parts:
            if access.misaligned():
                raise misaligned(self.m, access, kind)
            if access.region.kind == "signals":
                check_counters(self.m, access, kind)
            if near:
                check_near(self.m, access, kind)
        return parts

    def _tile(self, tile: Tile, kind: str) -> Strided | None:
        access = self._box(tile.address, tile.shape, tile.strides, tile.dtype.itemsize, kind)
        if self.m.apart and access is not None:
            check_near(self.m, access, kind)
        return access

    def _box(self, address: int, shape: tuple, strides: tuple, itemsize: int, kind: str) -> Strided | None:
        try:
            return self.m.space.tile(address, shape, strides, itemsize)
        except Unmapped as unmapped:
            raise bad_address(self.m, unmapped, kind) from None

    # stores

    def _write(self, access: Access, values: np.ndarray, kind: str, is_async: bool, at: Site | None = None) -> None:
        m, task = self.m, self.m.current
        self._own_stores(access)
        if task.fenced:
            self._commit_buffered(task)
        if not _changes_nothing(access, values):
            self.detector.write(access, kind, is_async, at)
        self._charge(access)
        if not m.schedule.late_stores or access.region.kind == "local":
            Pending(access, values, is_async).commit()
            self._changed(access)
            return
        if not task.pending:
            m.with_stores.append(task)
        task.pending.append(Pending(access, np.array(values), is_async))

    def _before_read(self, access: Access, kind: str, is_async: bool = False, at: Site | None = None) -> None:
        self._own_stores(access)
        self._charge(access)
        self.detector.read(access, kind, is_async, at)

    def _before_poll(self, access: Access, kind: str, at: Site | None = None) -> None:
        """As `_before_read` for a volatile load, which is a relaxed atomic load."""
        self._own_stores(access)
        self._charge(access)
        self.detector.look(access, kind, at)
        words = words_of(access)
        access.region.waited.update(words)
        self.detector.read_relaxed(words, "system")

    def _own_stores(self, access: Access) -> None:
        """Commit the program's own pending stores that `access` overlaps: it sees them, and they keep their order."""
        task = self.m.current
        if task.pending:
            hit = overlapping(task.pending, access)
            if hit:
                self._commit_pending(task, hit)

    def _commit_buffered(self, task: Any) -> None:
        """Make the relaxed atomics visible that a fence orders before the program's next write."""
        task.fenced = False
        self._commit(task, lambda p: isinstance(p, Buffered))

    def _commit(self, task: Any, which: Any) -> None:
        if task.pending:
            self._commit_pending(task, [p for p in task.pending if which(p)])

    def _commit_pending(self, task: Any, stores: list[Pending]) -> None:
        for store in stores:
            task.pending.remove(store)
            store.commit()
            self._changed(store.access)
        if not task.pending and task in self.m.with_stores:
            self.m.with_stores.remove(task)

    def _changed(self, access: Access) -> None:
        """Wake the programs that wait on a word of `access`, which something other than a signal has changed."""
        m = self.m
        m.progress += 1
        self._contend(access)
        if m.waiting:
            base = access.region.base
            first, end = access.span()
            low, high = base + first, base + end
            for address in [a for a in m.waiting if low <= a < high]:
                m.wake(address)

    def _contend(self, access: Access) -> None:
        """Note that `access` has changed a word which a loop of this round polls."""
        m = self.m
        if m.polled and not m.contended:
            m.contended = not m.polled.isdisjoint(words_of(access))

    # timeline

    def _charge(self, access: Access, signal: bool = False) -> None:
        task = self.m.current
        remote = access.region.rank != task.rank and access.region.kind != "local"
        rate = cost.REMOTE_BYTES_PER_US if remote else cost.LOCAL_BYTES_PER_US
        self._spend("communicate" if remote else task.mark, cost.STEP_US * signal + access.nbytes / rate)

    def _spend(self, kind: str, microseconds: float) -> None:
        task = self.m.current
        start = task.time
        task.time = start + microseconds
        if self.m.tracing:
            self._interval(kind, start, task.time)

    def _interval(
        self,
        kind: str,
        start: float,
        end: float,
        waiting: Callable[[], Waiting] | None = None,
        sync: Sync | None = None,
    ) -> None:
        """Add a stretch to the timeline, if there is one. waiting: what a wait waited for. sync: the signals that it
        found."""
        if not self.m.tracing:
            return
        task = self.m.current
        last = task.intervals[-1] if task.intervals else None
        if last and waiting is None and last[0] == kind and last[3] == task.tile and last[2] >= start:
            last[2] = end
        else:
            signal = None if sync is None else sync.sent
            task.intervals.append([kind, start, end, task.tile, waiting and waiting(), signal])


def scalar(value: Any) -> int:
    """The value of a scalar as a Python int."""
    return int(value.handle.data.item(0)) if isinstance(value, tl.tensor) else int(value)


def _changes_nothing(access: Access, values: np.ndarray) -> bool:
    """Whether these bits are there already, in a plain tensor behind a launch's first write to it: no race, so that all
    programs may store the same."""
    if access.region.kind != "local" or access.region.shadow is None:
        return False
    return access.read(values.dtype).tobytes() == values.tobytes()


def mask_of(mask: Any, ptr: Any) -> Any:
    """The mask as an array of ptr's shape, or None if it is true everywhere."""
    if mask is None:
        return None
    data = np.broadcast_to(mask.handle.data if isinstance(mask, tl.tensor) else np.asarray(mask), ptr.handle.data.shape)
    return None if data.all() else data


def words_of(access: Access, most: int = 256) -> list[int]:
    """Addresses of the elements of an access, as possible synchronisation variables; empty for more than `most`
    elements, which are a tile of data."""
    count = access.count
    if count == 1:
        return [access.first()]
    return (access.region.base + access.byte_offsets()).tolist() if count <= most else []
