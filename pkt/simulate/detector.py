"""The race detector: follows which accesses are ordered while the programs run, and reports those that are not.

`races` has the arithmetic of clocks and shadows. This module applies it to programs: it follows the releases, the
acquires and the accesses of each, with their lines. It does nothing unless the machine looks for races.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from pkt import wording
from pkt.simulate import cost, findings
from pkt.simulate.faults import Site
from pkt.simulate.memory import Access, Region
from pkt.simulate.races import FULL, Last, Shadow, Touched, touched_by
from pkt.simulate.sites import site

FAR_READ, FAR_PUT = "far put's read", "far put"  # the kinds of access of a put to another node
POLLING = "polling "  # begins the kind of a load or an atomic that looks at a flag
FOUND: dict[str, type[findings.DataRace]] = {FAR_READ: findings.MissingQuiet, FAR_PUT: findings.OvertakenPut}
"""The race with an access of such a kind that came first."""

_MOST_ASKED = 1 << 14
_TOO_NARROW = 'one of the two is atomic at scope "{}", which leaves the other out: use scope="sys"'
_OF_TWO_SIZES = "one of the two has {} bytes, the other {}: atomics of two sizes do not order each other: use one size"
_OF_A_FLAG = (
    "poll a flag by pl.wait or pl.load_acquire, set by pl.signal or pl.store_release; order data by a signal and a wait"
)
_OF_ONE_PROGRAM = "call pl.quiet() between the two"
_OF_HOST_CODE = "call world.barrier() between the two in host code, or order them by a signal and a wait in kernels"
_OF_PLAIN = 'order them by atomics with sem="acq_rel", behind the first and before the second, or by two launches'
_OF_TMA = "put pl.signal after the first and pl.wait before the second: other atomics do not order TMA"
_UPDATES = frozenset({"atomic", POLLING + "atomic", "TMA reduce"})
_LOOKS_AT_FLAGS = POLLING, "wait", "failed CAS"  # so do accesses whose kinds begin like these

_WRITER, _READER, _CHANGES = ("writer",), ("reader",), ("writer", "updater")


class Sync:
    """The clocks released at one address: by any rank at system scope, and by each rank at any scope."""

    __slots__ = ("system", "rank", "narrow", "time", "launch", "sent")

    def __init__(self) -> None:
        self.system: Any = None
        self.rank: dict[int, Any] = {}
        self.narrow = False  # some release was at GPU scope; otherwise `system` covers `rank`
        self.time = 0.0
        self.sent: tuple[int, int, float] | None = None  # rank, lane and time of the signal that arrives last
        self.launch: dict[int, int] = {}  # rank -> its newest launch that released here

    def visible(self, scope: str, rank: int) -> list[Any]:
        """The clocks that an acquire at `scope`, "system" or "gpu", by a program of `rank` takes over."""
        if scope == "system" and self.system is not None and not self.narrow:
            return [self.system]
        clocks = self.system if scope == "system" else None, self.rank.get(rank)
        return [clock for clock in clocks if clock is not None]


def accessed(task: Any, kind: str, tensor: str, at: Site) -> wording.Access:
    """An access of `task` as an error names it."""
    return wording.Access(task.rank, task.program, task.name, kind, tensor, str(at))


def _reaches(scope: str, one: Any, other: Any) -> bool:
    """Whether an atomic access at `scope` of one program is atomic for the other program, too."""
    return scope == "system" or (scope == "gpu" and one.rank == other.rank)


def _remedy(one: Any, other: Any, region: Region, *kinds: str) -> str:
    """What mends a race of these programs' accesses of these kinds to a region; "" for what mends most."""
    if one is other:
        return _OF_ONE_PROGRAM
    if region.kind == "local":
        return _OF_PLAIN
    if any(kind.startswith(_LOOKS_AT_FLAGS) for kind in kinds):
        return _OF_A_FLAG
    if one.is_host or other.is_host:
        return _OF_HOST_CODE
    return _OF_TMA if any(kind.startswith("TMA") for kind in kinds) else ""


class Detector:
    """The race detector of one machine; it follows the program `machine.current`."""

    def __init__(self, machine: Any) -> None:
        self.m = machine
        self.sync: dict[int, Sync] = {}
        self.reported: set[tuple] = set()
        self.narrow: dict[tuple[int, int], str] = {}  # (stamp, region) -> scope of an update, unless it is "system"
        self.looked: dict[tuple[int, int], str] = {}  # the same of an atomic read
        self.sizes: dict[tuple[int, int], int] = {}  # (stamp, region) -> bytes of an updated element
        # (stamp, region, role) -> (kind, program, newest line) of the accesses with that stamp there
        self.authors: dict[tuple[int, int, str], tuple[str, Any, Site]] = {}

    # -- releases, acquires and fences ------------------------------------------------------------------------------

    def begin_update(self, scope: str, size: int) -> None:
        """All updates of a stamp have one scope and one size. Called before the clock is taken that is to cover it."""
        task = self.m.current
        if self.m.races and (scope, size) != (task.scope, task.size):
            task.scope, task.size = scope, size
            task.clock[task.column] += 1

    def released(self, releases: bool) -> Any:
        """Return the clock that an atomic of the current program publishes: its clock now if the atomic releases, else
        its clock at the last fence. None if there was no fence, or if the detector is off. The clock covers the atomic
        itself, and `passed` must come behind it."""
        m, task = self.m, self.m.current
        if not m.races:
            return None
        if not releases:
            return task.fence_clock
        task.clock[task.column] += 1
        return task.clock.copy()

    def passed(self, releases: bool) -> None:
        """A released clock does not cover what the current program does from now on."""
        task = self.m.current
        if releases and self.m.races:
            task.clock[task.column] += 1

    def publish(self, address: int, clock: Any, task: Any, scope: str) -> None:
        sync = self.sync.get(address)
        if sync is None:
            sync = self.sync[address] = Sync()
        if clock is not None:
            self._release(sync, clock, task.rank, scope)
        flight = cost.LOCAL_SIGNAL_US if self.m.space.owner(address) in (task.rank, None) else cost.SIGNAL_US
        if task.time + flight > sync.time:
            sync.time, sync.sent = task.time + flight, (task.rank, task.lane, task.time)
        sync.launch[task.rank] = task.launch.ordinal

    def _release(self, sync: Sync, clock: Any, rank: int, scope: str) -> None:
        join = self.m.clocks.join
        if scope == "system":
            sync.system = clock if sync.system is None else join(sync.system, clock)
        if scope != "cta":
            own = sync.rank.get(rank)
            sync.rank[rank] = clock if own is None else join(own, clock)
            sync.narrow = sync.narrow or scope == "gpu"

    def read_relaxed(self, addresses: list[int], scope: str) -> None:
        """Keep the clocks at these addresses for a later fence, the only use of a relaxed read; join them seldom."""
        if not self.m.races or scope == "cta":
            return
        put_by, rank = self.m.current.unacquired, self.m.current.rank
        for address in addresses:
            sync = self.sync.get(address)
            if sync is not None:
                put_by += sync.visible(scope, rank)
        if len(put_by) > 64:
            put_by[:] = [functools.reduce(self.m.clocks.join, put_by)]

    def acquire(self, address: int, scope: str) -> None:
        sync = self.sync.get(address)
        if sync is not None and scope != "cta":
            task = self.m.current
            task.clock = functools.reduce(self.m.clocks.join, sync.visible(scope, task.rank), task.clock)

    def fence(self) -> None:
        """Acquire the clocks that earlier relaxed atomics read; later relaxed atomics publish the joined clock."""
        task = self.m.current
        if self.m.races:
            task.clock = functools.reduce(self.m.clocks.join, task.unacquired, task.clock)
            task.unacquired.clear()
            task.fence_clock = task.clock.copy()
            task.clock[task.column] += 1

    def drained(self) -> None:
        """Order the program's TMA stores like its own stores. The proxy fence of a drain works in both directions."""
        task = self.m.current
        if self.m.races:
            task.clock[task.column + 1] = task.async_clock
            task.async_clock += 1
            self.order_async()

    def order_async(self) -> None:
        """Order the TMA loads from now on after everything that the program has seen and done until now."""
        task = self.m.current
        if self.m.races:
            task.tma_clock = task.clock.copy()
            task.clock[task.column] += 1

    # -- accesses ---------------------------------------------------------------------------------------------------

    def _looks_at(self, region: Region) -> bool:
        """Whether reads of a region are checked: of a plain tensor behind a launch's first write only, because most
        are never written."""
        return self.m.races and (region.kind != "local" or region.shadow is not None)

    def read(self, access: Access, kind: str, is_async: bool = False, at: Site | None = None) -> None:
        """Check and record a read of the current program, by TMA if `is_async`."""
        m, task = self.m, self.m.current
        region = access.region
        if not self._looks_at(region):
            return
        shadow, touched = region.shadow or self._shadow(region), touched_by(access)
        if is_async and region.kind != "local":
            for wait in task.waits:
                m.census.note(wait, "no proxy fence")
        mine = m.clocks.fit(task.clock)
        clock = m.clocks.fit(task.tma_clock) if is_async else mine
        # Host code reads counters after its launches, whose waits have seen the signals.
        counts = task.is_host and region.kind == "signals"
        self._check(kind, access, touched, clock, shadow, _WRITER if counts else _CHANGES)
        stamp = mine.item(task.column) << 32 | task.column << 16
        shadow.reader.record(touched, stamp, mine)
        self.authors[stamp, region.base, "reader"] = (kind, task, at or site())

    def look(self, access: Access, kind: str, at: Site | None = None, scope: str = "system") -> None:
        """Check and record an atomic read of the current program: a wait, a test, a volatile load or a failed CAS. It
        races with plain writes, and with updates for which it is not atomic."""
        m, task = self.m, self.m.current
        region = access.region
        if not self._looks_at(region):
            return
        shadow = region.shadow or self._shadow(region)
        if shadow.written:
            self._check(kind, access, touched_by(access), m.clocks.fit(task.clock), shadow, _WRITER)
        column, size = task.column, access.itemsize
        shadow.sizes.add(size)
        shadow.look_sizes.add(size)
        if shadow.narrow or scope != "system" or len(shadow.sizes) > 1:
            self._check_updates(kind, access, touched_by(access), shadow.updater, m.clocks.fit(task.clock), scope)
        stamp = task.clock.item(column) << 32 | column << 16
        if scope != "system":
            self.looked[stamp, region.base] = scope
        offsets = (access.first() - region.base,) if access.count == 1 else access.byte_offsets().tolist()
        for offset in offsets:
            shadow.looks.setdefault((offset, size), {})[column] = stamp
        self.authors[stamp, region.base, "look"] = (kind, task, at or site())

    def write(self, access: Access, kind: str, is_async: bool, at: Site | None = None, scope: str = "system") -> None:
        """Check and record a write or an atomic update. Two updates race only if the scope of one leaves the other
        program out."""
        m, task = self.m, self.m.current
        region = access.region
        if not m.races:
            return
        updates = kind in _UPDATES
        shadow, touched = region.shadow or self._shadow(region), touched_by(access)
        role = "updater" if updates else "writer"
        if updates and not is_async:
            self.begin_update(scope, access.itemsize)
        column = task.column + 1 if is_async else task.column
        stamp = (task.async_clock if is_async else task.clock.item(column)) << 32 | column << 16
        task.undrained = task.undrained or (is_async and region.kind != "local")
        clock = m.clocks.fit(task.tma_clock if is_async else task.clock)
        if updates and region.kind == "signals":  # they race with plain writes of counters only
            if shadow.written:
                self._check(kind, access, touched, clock, shadow, _WRITER)
        else:
            self._check(kind, access, touched, clock, shadow, _WRITER if updates else _CHANGES)
            if is_async:  # the tile that TMA stores is taken to depend on this program's earlier reads
                clock = clock.copy()
                clock[task.column] = task.clock[task.column]
            self._check(kind, access, touched, clock, shadow, _READER)
        if not updates:
            shadow.written = True
            if shadow.looks:
                self._check_looks(kind, access, shadow, clock)
        if updates:
            counts = access.span()[0] >= region.header  # not launches, as `pl.epoch`, whose word no other call uses
            if scope != "system":
                self.narrow[stamp, region.base] = scope
                shadow.narrow = shadow.narrow or counts
            if not is_async:
                self.sizes[stamp, region.base] = access.itemsize
                if counts:
                    shadow.sizes.add(access.itemsize)
            if shadow.narrow or len(shadow.sizes) > 1:
                self._check_updates("atomic", access, touched, shadow.updater, clock, scope)
            if shadow.looks and (self.looked or scope != "system" or len(shadow.sizes) > 1):
                self._check_looked(access, shadow, clock, scope)
        (shadow.updater if updates else shadow.writer).record(touched, stamp)
        self.authors[stamp, region.base, role] = (kind, task, at or site())

    def send(self, source: Access, target: Access, clock: np.ndarray, stamp: int, at: Site) -> None:
        """Check and record what a far put of the current program reads and writes, whenever the network does it.
        clock: of what the put follows."""
        for access, kind, role in ((source, FAR_READ, "reader"), (target, FAR_PUT, "writer")):
            region, touched = access.region, touched_by(access)
            last = region.shadow or self._shadow(region)
            self._check(kind, access, touched, clock, last, _CHANGES)
            if role == "reader":
                last.reader.record(touched, stamp, clock)
            else:
                self._check(kind, access, touched, clock, last, _READER)
                last.written = True
                if last.looks:
                    self._check_looks(kind, access, last, clock)
                last.writer.record(touched, stamp)
            self.authors[stamp, region.base, role] = (kind, self.m.current, at)

    def _check(
        self, kind: str, access: Access, touched: Touched, clock: np.ndarray, shadow: Shadow, roles: tuple[str, ...]
    ) -> None:
        """Report the first earlier access of each role that is not ordered before this access."""
        for role in roles:
            hit = getattr(shadow, role).unordered(touched, clock)
            if hit is not None:
                position, stamp = hit
                self._report(kind, access, touched.offset(position), stamp, role)

    def _check_looks(self, kind: str, access: Access, shadow: Shadow, clock: np.ndarray) -> None:
        """Report an atomic read that this write overlaps and that is not ordered before it."""
        low, high = access.span()
        for (offset, size), stamps in shadow.looks.items():
            if not (offset < high and low < offset + size):
                continue
            offsets = access.byte_offsets()
            if not ((offsets < offset + size) & (offsets + access.itemsize > offset)).any():
                continue
            late = next((s for column, s in stamps.items() if clock[column] < s >> 32), None)
            if late is not None:
                self._report(kind, access, offset, late, "look")

    def _check_updates(
        self, kind: str, access: Access, touched: Touched, updaters: Last, clock: np.ndarray, scope: str
    ) -> None:
        """Report each earlier unordered update for which this atomic access is not atomic, or the other way round."""
        if updaters.array is None:
            return
        base, states = access.region.base, touched.get(updaters.array)
        for state in sorted(set(states.reshape(-1).tolist())):  # a few are faster so than by numpy
            for entry in updaters.stamps(state):
                stamp = entry & ~FULL
                if not stamp or clock[(stamp >> 16) & 0xFFFF] >= stamp >> 32:
                    continue
                size = self.sizes.get((stamp, base), access.itemsize)
                both = (scope, self.narrow.get((stamp, base), "system"))
                remedy = self._apart(self.authors[stamp, base, "updater"][1], both, access.itemsize, size)
                if not remedy:
                    continue
                at = np.flatnonzero(((states == state) & ((entry & touched.bytes) != 0)).reshape(-1))
                if at.size:
                    self._report(kind, access, touched.offset(int(at[0])), stamp, "updater", remedy)

    def _check_looked(self, access: Access, shadow: Shadow, clock: np.ndarray, scope: str) -> None:
        """Report each earlier unordered atomic read for which this update is not atomic."""
        base, nbytes = access.region.base, access.itemsize
        for first in access.byte_offsets().tolist():
            for size in sorted(shadow.look_sizes):
                for offset in range(first // size * size, first + nbytes, size):
                    for column, stamp in shadow.looks.get((offset, size), {}).items():
                        if clock[column] < stamp >> 32:
                            other = self.authors[stamp, base, "look"][1]
                            both = scope, self.looked.get((stamp, base), "system")
                            remedy = self._apart(other, both, nbytes, size)
                            if remedy:
                                self._report("atomic", access, offset, stamp, "look", remedy)

    def _apart(self, other: Any, scopes: tuple[str, str], *sizes: int) -> str:
        """What mends atomic accesses of the current program and another one that are not atomic for each other; "" if
        they are. In PTX they are if the scope of each covers both programs and if they are of the same bytes."""
        task = self.m.current
        if other is task:
            return ""
        if len(set(sizes)) > 1:
            return _OF_TWO_SIZES.format(*sorted(sizes))
        if all(_reaches(scope, task, other) for scope in scopes):
            return ""
        return _TOO_NARROW.format(min(scopes, key=("cta", "gpu", "system").index))

    @staticmethod
    def _shadow(region: Region) -> Shadow:
        region.shadow = Shadow(region.nbytes)
        return region.shadow

    def _report(self, kind: str, access: Access, offset: int, stamp: int, role: str, remedy: str = "") -> None:
        """offset: a byte of the region that both accesses touch, or the first of its granule. remedy: see `between`."""
        m, task = self.m, self.m.current
        region = access.region
        address = region.base + max(offset, access.span()[0])
        at = site()
        key = (region.name, at, kind)
        if key in self.reported:
            return
        self.reported.add(key)
        tensor = f"rank {region.rank}'s {region.element(address)}"
        first_kind, author, where = self.authors[stamp & ~FULL, region.base, role]
        first = accessed(author, first_kind, tensor, where)
        pair = region.name, frozenset({(first_kind, where), (kind, at)})
        made = FOUND.get(first_kind, findings.DataRace)
        if made is findings.DataRace:
            remedy = remedy or _remedy(author, task, region, first_kind, kind)
        error = made.between(first, accessed(task, kind, tensor, at), pair, remedy)
        if task.satisfied_by is not None:
            error.add_note(task.satisfied_by)
        m.findings.append(error)

    def answered(self, task: Any, blocked: Any, sync: Sync, at_once: bool) -> None:
        """Keep a note for later races if this wait passed at once, on signals that it had found in an earlier launch. A
        program may intend that, so it is no finding of its own."""
        asked, wait, launch = blocked.region.asked, (task.column, blocked.address, blocked.want), task.launch.ordinal
        if at_once:
            newest = max(sync.launch.values(), default=0)
            if newest <= asked.get(wait, 0) < launch:
                task.satisfied_by = str(findings.StaleFlag.found(blocked.waiting(), newest))
        if len(asked) == _MOST_ASKED:  # of epochs, which no launch asks for again; forgetting one costs a note
            asked.clear()
        asked[wait] = launch
