"""What the programs of the simulated machine do to memory and to each other: the device side of `Machine`.

The builder sends every access of `tl` here, and pkt.language sends its primitives. A plain store stays pending in its
program until something makes it visible: an overlapping access of the same program, a release, the end of the grid, or
the schedule. TMA stores are pending in the async proxy, which a release does not wait for: only `drain` does.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from pkt import errors
from pkt.errors import Waiting
from pkt.language.ptx.flagged import VALUES
from pkt.simulate import cost
from pkt.simulate.builder import Tile, np_dtype
from pkt.simulate.detector import Detector, accessed
from pkt.simulate.faults import SYNC, Signal, Site
from pkt.simulate.memory import Access, Pending, Region, Scattered, Strided, Unmapped
from pkt.simulate.numerics import BITS, decode, encode
from pkt.simulate.sites import site, site_of

UNINTERRUPTED = 4096  # accesses of one program after which others run too, and after which it may count as stuck
REPEATS = 64  # loads of one word that count as one poll of a spin

FLAGGED = np.dtype([("values", np.int32, VALUES), ("flag", np.uint32)])
FLAG = 4 * VALUES  # the flag's byte in a word

_ALL = {1: np.arange(1)}  # flat positions of a whole block, for the commonest size

_COMPARE: dict[str, Any] = {
    "ge": lambda d: d >= 0,
    "gt": lambda d: d > 0,
    "le": lambda d: d <= 0,
    "lt": lambda d: d < 0,
    "eq": lambda d: d == 0,
    "ne": lambda d: d != 0,
    "flip": None,
}


def _signed(value: int) -> int:
    """The low 32 bits as a signed number."""
    return (value + 2**31) % 2**32 - 2**31


class Blocked:
    """A program in a wait."""

    def __init__(self, device: SimulatedDevice, task: Any, region: Region, address: int, want: int, cmp: str, at: Site):
        self.device, self.task, self.region, self.address = device, task, region, address
        self.want, self.cmp, self.at = want, cmp, at

    def found(self) -> int:
        offset = self.address - self.region.base
        return int(self.region.memory[offset : offset + 4].view(np.int32)[0])

    def holds(self) -> bool:
        found = self.found()
        if self.cmp == "flip":
            return (found ^ self.want) & 0x80000000 != 0
        return _COMPARE[self.cmp](_signed(found - self.want))

    def waiting(self) -> Waiting:
        task = self.task
        return Waiting(
            rank=task.rank,
            program=task.program,
            kernel=task.name,
            counter=self.region.element(self.address),
            wanted=self.want,
            found=self.found(),
            compare=self.cmp,
            site=str(self.at),
            launch=task.launch.ordinal,
            owner=self.region.rank,
        )


class SimulatedDevice:
    """See the module. One for the machine; `machine.current` says which program calls."""

    def __init__(self, machine: Any) -> None:
        self.m = machine
        self.detector = Detector(machine)

    # -- what pkt.simulate.builder calls ----------------------------------------------------------------------------

    def load(self, addresses: np.ndarray, mask: np.ndarray | None, dtype: np.dtype, volatile: bool) -> np.ndarray:
        self._step(spin=volatile or (addresses.size == 1 and self._repeats(addresses)))
        parts = self._resolve(addresses, mask, dtype.itemsize, "load")
        self.m.current.polled = parts[0][0] if parts and addresses.size == 1 else None
        if len(parts) == 1 and parts[0][1] is ...:
            access = parts[0][0]
            assert isinstance(access, Strided)
            self._before_read(access, "load")
            return access.view(dtype).copy()
        out = np.zeros(addresses.size, dtype)
        for access, where in parts:
            self._before_read(access, "load")
            out[where] = access.read(dtype)
        return out.reshape(addresses.shape)

    def store(self, addresses: np.ndarray, mask: np.ndarray | None, values: np.ndarray) -> None:
        self._step()
        for access, where in self._resolve(addresses, mask, values.dtype.itemsize, "store"):
            self._write(access, values if where is ... else values.reshape(-1)[where], "store", is_async=False)

    def load_tile(self, tile: Tile, fill: float) -> np.ndarray:
        self._step()
        access = self._tile(tile, "TMA load")
        if access is not None:
            self._before_read(access, "TMA load", is_async=True)
            if tile.shape == tile.box:
                return access.view(tile.dtype).copy()
        ty = tile.element
        empty = encode(np.array(fill), ty) if ty in BITS else np.array(fill).astype(tile.dtype)
        out = np.full(tile.box, empty, tile.dtype)
        if access is not None:
            out[tile.inside] = access.view(tile.dtype)
        return out

    def store_tile(self, tile: Tile, values: np.ndarray) -> None:
        self._step()
        access = self._tile(tile, "TMA store")
        if access is not None:
            self._write(access, values[tile.inside], "TMA store", is_async=True)

    def reduce_tile(self, tile: Tile, values: np.ndarray, op: Any) -> None:
        """An atomic update of each element. Performed at once: its order among other updates is free anyway, and that
        nobody may rely on it before a drain is the race detector's business."""
        self._step()
        access = self._tile(tile, "TMA reduce")
        if access is None:
            return
        self._own_stores(access)
        self.detector.write(access, "TMA reduce", is_async=True)
        view = access.view(tile.dtype)
        view[...] = op(view, values[tile.inside])
        self._moved(access)
        self._changed(access)

    def computed(self, flops: float) -> None:
        self._spend("compute", flops / cost.FLOPS_PER_US)

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
    ) -> np.ndarray:
        """`update(old, where)` gives the new values of the flat positions `where`. reads: it only looks, so it is no
        signal that could be lost."""
        m, task = self.m, self.m.current
        at = site()
        self._step(spin=True)
        out = np.zeros(addresses.size, dtype)
        parts = self._resolve(addresses, mask, dtype.itemsize, "atomic")
        task.polled = parts[0][0] if parts else None
        change = None
        if at.call in SYNC:
            m.census.note(at, "remove", "relax")
            change = m.faults.change(at)
            if change == "remove" and not reads:
                return out.reshape(addresses.shape)
        releases = sem in ("release", "acquire_release") and change != "relax"
        acquires = sem in ("acquire", "acquire_release") and change != "relax"
        words = self._sync_addresses(parts)
        copies = 1
        if acquires:
            for access, _ in parts:
                access.region.waited.update(words)
        if at.call in SYNC and parts and not reads:
            access = parts[0][0]
            access.region.signalled[access.first()] = at
            event = self._signal(at, parts[0][0])
            if event == m.faults.drop:  # lost on its way: the sender goes on with what it would have found
                for part, where in parts:
                    out[where] = part.view(dtype).reshape(-1) if isinstance(part, Strided) else part.read(dtype)
                return out.reshape(addresses.shape)
            copies = 2 if event == m.faults.duplicate else 1
            if event == m.faults.delay:
                clock = self._release(releases)
                m.late_signals.append(
                    lambda: self._perform(task, at, parts, words, dtype, update, out.copy(), clock, scope)
                )
                return out.reshape(addresses.shape)
        clock = self._release(releases)
        for _ in range(copies):
            self._perform(task, at, parts, words, dtype, update, out, clock, scope)
        if m.races:
            for address in words:
                if acquires:
                    self.detector.acquire(address, scope)
                elif address in self.detector.sync:
                    self.detector.read_relaxed(self.detector.sync[address], scope)
        if m.schedule.interrupts() or (task.pending and m.schedule.lingers()):
            m.pause()
        return out.reshape(addresses.shape)

    # -- primitives of pkt.language.ptx -----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.m.current.rank

    def wait(self, ptr: Any, want: Any, cmp: str, world_rank: Any, status: Any) -> tl.tensor:
        m, task = self.m, self.m.current
        at = site()
        self._step()
        address, wanted = _scalar(ptr), _signed(_scalar(want))
        access = self._resolve(np.array([address], np.uint64), None, 4, "wait")[0][0]
        region = access.region
        region.waited.add(address)
        if at.call in SYNC:
            m.census.note(at, "remove", "relax")
        change = m.faults.change(at)
        blocked = Blocked(self, task, region, address, wanted, cmp, at)
        start = task.time
        stale = blocked.holds() and cmp != "flip"
        if change != "remove":
            while not blocked.holds():
                m.waiting.setdefault(address, []).append(task)
                m.block(blocked)
            sync = self.detector.sync.get(address)
            if sync is not None:
                task.time = max(task.time, sync.time)
                if stale and m.races and region.kind == "signals":
                    self.detector.note_stale(task, blocked, sync)
            if task.time > start:
                self._interval("wait", start, task.time)
            if change != "relax" and m.races:
                self.detector.acquire(address, "system")
                if at.call in SYNC:
                    task.waits.add(at)
                if change != "no proxy fence":
                    self.detector.order_async()
        return _int32(blocked.found())

    def put_flagged(self, ptr: Any, values: tuple, flag: Any, mask: Any) -> None:
        """Words that may become visible late and in any order, as plain stores do, but each one whole."""
        m, task = self.m, self.m.current
        at = site()
        self._step()
        parts = self._flagged(ptr.handle.data, _mask_of(mask, ptr), "put_flagged")
        if at.call in SYNC:
            m.census.note(at, "remove")
        if m.faults.change(at) == "remove" or not parts:
            return
        event = self._signal(at, parts[0][0])
        if event == m.faults.drop:
            return
        words = np.empty(ptr.handle.data.shape, FLAGGED)
        words["flag"] = _scalar(flag) & 0xFFFFFFFF
        for i, value in enumerate(values):
            words["values"][..., i] = value.handle.data if isinstance(value, tl.tensor) else _signed(value)
        for access, where in parts:
            data = words if where is ... else words.reshape(-1)[where]
            if event == m.faults.delay:
                self.detector.write(access, "atomic", is_async=False)
                m.late_signals.append(functools.partial(self._arrive, Pending(access, data.copy(), False)))
            else:
                self._write(access, data, "atomic", is_async=False)
            self.detector.publish(access.first(), None, task, "system")  # no clock: only the time of arrival

    def _flagged(self, words: np.ndarray, mask: Any, call: str) -> list:
        parts = self._resolve(words, mask, FLAGGED.itemsize, call)
        astray = words[(words % FLAGGED.itemsize != 0) & (True if mask is None else mask)]
        if astray.size:
            at = int(astray.flat[0])
            raise ValueError(f"{call}: {self.m.space.find(at).element(at)} is not at a multiple of 16 bytes")
        return parts

    def _arrive(self, late: Pending) -> None:
        late.commit()
        self._changed(late.access)

    def take_flagged(self, ptr: Any, stride: Any, parts: int, flag: Any, mask: Any) -> tuple[tuple, ...]:
        at = site()
        self._step()
        if at.call in SYNC:
            self.m.census.note(at, "remove")
        compare = self.m.faults.change(at) != "remove"
        words, inside = ptr.handle.data, _mask_of(mask, ptr)
        ty = tl.block_type(tl.int32, list(words.shape)) if ptr.shape else tl.int32
        apart = np.uint64(4 * _scalar(stride))
        found = (self._take(words + i * apart, inside, _signed(_scalar(flag)), compare, at) for i in range(parts))
        return tuple(tuple(tl.tensor(TensorHandle(value, tl.int32), ty) for value in values) for values in found)

    def _take(self, words: np.ndarray, mask: Any, flag: int, compare: bool, at: Site) -> list[np.ndarray]:
        """The values of the words, once each has the flag, or at once."""
        m, task = self.m, self.m.current
        out = np.zeros((VALUES, words.size), np.int32)
        for access, where in self._flagged(words, mask, "take_flagged"):
            self._own_stores(access)
            while compare:
                missing = np.flatnonzero(_found(access)["flag"] != flag & 0xFFFFFFFF)
                if not missing.size:
                    break
                word = int(_words(access)[missing[0]]) + FLAG
                m.waiting.setdefault(word, []).append(task)
                m.block(Blocked(self, task, access.region, word, flag, "eq", at))
            sync = self.detector.sync.get(access.first())
            if sync is not None and sync.time > task.time:
                self._interval("wait", task.time, sync.time)
                task.time = sync.time
            self.detector.write(access, "atomic", is_async=False)  # which races with plain accesses, not with puts
            self._moved(access)
            out[:, where] = _found(access)["values"].T
        return [value.reshape(words.shape) for value in out]

    def load_relaxed(self, ptr: Any) -> tl.tensor:
        addresses = ptr.handle.data
        dtype = np.dtype(np.int32 if ptr.dtype.element_ty.primitive_bitwidth == 32 else np.int64)
        for address in addresses.reshape(-1):
            self.m.space.find(int(address)).waited.add(int(address))
        old = self.atomic(addresses, None, dtype, lambda now, where: now, "relaxed", "system", reads=True)
        ty = ptr.dtype.element_ty
        return tl.tensor(TensorHandle(old, ty), tl.block_type(ty, list(old.shape)) if ptr.shape else ty)

    def fence(self, scope: str) -> None:
        m, task = self.m, self.m.current
        at = site()
        if at.call in SYNC:
            m.census.note(at, "relax" if at.call not in ("fence", "quiet") else "remove")
        if m.faults.change(at) is not None and m.faults.change(at) != "no drain":
            return
        self._commit(task, lambda p: not p.is_async)
        self.detector.fence()

    def proxy_fence(self) -> None:
        if self.m.faults.change(site()) not in ("no proxy fence", "remove"):
            self.detector.order_async()

    def drain(self) -> None:
        m, task = self.m, self.m.current
        at = site()
        if task.undrained:
            m.census.note(at, "no drain")
        if m.faults.change(at) in ("no drain", "remove"):
            return
        self._commit(task, lambda p: p.is_async)
        task.undrained = False
        self.detector.drained()

    def mark(self, kind: str) -> None:
        self.m.current.mark = kind

    def multimem_load_reduce(self, ptr: Any, mask: Any, op: str) -> tl.tensor:
        ty = ptr.dtype.element_ty
        dtype = np_dtype(ty)
        selected = _mask_of(mask, ptr)
        self._step()
        total: Any = None
        combine = {"add": np.add, "min": np.minimum, "max": np.maximum}[op]
        for addresses in self._copies(ptr):
            values = np.zeros(addresses.size, dtype)
            for access, where in self._resolve(addresses, selected, dtype.itemsize, "multimem load_reduce"):
                self._before_read(access, "multimem load_reduce")
                if where is ...:
                    values = access.view(dtype).reshape(-1).copy()
                else:
                    values[where] = access.read(dtype)
            # The 16-bit types add in fp32 and round once: `.acc::f32`.
            wide = decode(values, ty)
            wide = wide.astype(np.float32) if dtype == np.float16 else wide
            total = wide if total is None else combine(total, wide)
        out = (encode(total, ty) if ty in BITS else total.astype(dtype)).reshape(ptr.handle.data.shape)
        return tl.tensor(TensorHandle(out, ty), tl.block_type(ty, list(out.shape)) if ptr.shape else ty)

    def multimem_store(self, ptr: Any, value: Any, mask: Any) -> None:
        self._step()
        data = np.broadcast_to(
            value.handle.data.astype(np_dtype(ptr.dtype.element_ty), copy=False), ptr.handle.data.shape
        )
        for addresses in self._copies(ptr):
            for access, where in self._resolve(addresses, _mask_of(mask, ptr), data.dtype.itemsize, "multimem store"):
                self._write(
                    access,
                    data if where is ... else data.reshape(-1)[where],
                    "multimem store",
                    is_async=False,
                )

    def multimem_reduce_add(self, ptr: Any, value: Any, mask: Any) -> None:
        ty = ptr.dtype.element_ty
        data = np.broadcast_to(value.handle.data, ptr.handle.data.shape).reshape(-1)

        def update(now: np.ndarray, where: Any) -> np.ndarray:
            total = np.add(decode(now, ty), decode(data[where], ty))
            return encode(total, ty) if ty in BITS else total

        for addresses in self._copies(ptr):
            self.atomic(addresses, _mask_of(mask, ptr), np_dtype(ty), update, "relaxed", "system")

    # -- the end of a program and of the run ------------------------------------------------------------------------

    def check_exit(self, task: Any) -> None:
        """TMA stores are performed before a grid ends; what is still pending stays until the whole grid has."""
        if self.m.races:
            task.clock[task.column + 1] = task.async_clock

    def commit_one(self) -> None:
        m = self.m
        task = m.owing[m.schedule.choose(len(m.owing))]
        self._commit_pending(task, [task.pending[m.schedule.choose(len(task.pending))]])

    def commit_rank(self, rank: int) -> None:
        for task in [t for t in self.m.owing if t.rank == rank]:
            self._commit(task, lambda p: True)

    def spinning(self, task: Any) -> Waiting:
        """What a program that polls by itself waits for, as far as one can know: another value than it finds."""
        at, launch = site_of(task), task.launch.ordinal
        if task.polled is None:
            return Waiting(task.rank, task.program, task.name, "a loop of its own", 0, 0, "ne", str(at), launch)
        region, offset = task.polled.region, task.polled.first() - task.polled.region.base
        size = min(task.polled.itemsize, 8)
        found = int.from_bytes(region.memory[offset : offset + size].tobytes(), "little", signed=True)
        counter = region.element(task.polled.first())
        return Waiting(task.rank, task.program, task.name, counter, found, found, "ne", str(at), launch, region.rank)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _step(self, spin: bool = False) -> None:
        """Every access begins here: another program may run first; a spin lets it."""
        m, task = self.m, self.m.current
        task.accesses += 1
        long = not task.accesses % UNINTERRUPTED
        if spin or long:
            if task.progress == m.progress:
                task.polls += 1
            else:
                task.progress, task.polls = m.progress, 0
            if task.polls > 1:
                m.pause()
                return
        if long or m.schedule.interrupts():
            m.pause()

    def _repeats(self, address: np.ndarray) -> bool:
        """Whether a program loads one word again and again, as a spin on a plain load does."""
        task, word = self.m.current, int(address.flat[0])
        alone = task.last == (word, task.accesses)  # nothing else in between
        task.last = word, task.accesses + 1
        task.repeats = task.repeats + 1 if alone else 0
        return alone and not task.repeats % REPEATS

    def _resolve(self, addresses: np.ndarray, mask: Any, itemsize: int, kind: str) -> list:
        try:
            return self.m.space.resolve(addresses, mask, itemsize)
        except Unmapped as unmapped:
            raise self._outside(unmapped, kind) from None

    def _tile(self, tile: Tile, kind: str) -> Strided | None:
        try:
            return self.m.space.tile(tile.address, tile.shape, tile.strides, tile.dtype.itemsize)
        except Unmapped as unmapped:
            raise self._outside(unmapped, kind) from None

    def _outside(self, unmapped: Unmapped, kind: str) -> Exception:
        space, address = self.m.space, unmapped.address
        owner = space.owner(address)
        if unmapped.region is not None:
            tensor = f"rank {unmapped.region.rank}'s {unmapped.region.element(address)}"
            return errors.UseAfterFree.device(accessed(self.m.current, kind, tensor, site()), unmapped.region.freed_at)
        if owner == space.size:
            at_home = address - (space.size - self.rank) * space.stride
            home = space.nearest(at_home)
            tensor = f"the multicast window at {home.element(at_home) if home else f'byte {at_home}'}"
            return errors.MulticastAccess.plain(accessed(self.m.current, kind, tensor, site()))
        # No raw address: it differs from run to run, and the same finding should read the same.
        tensor = "an address in no rank's heap"
        if owner is not None:
            tensor = f"byte {address - space.window(owner)} of rank {owner}'s heap"
        near = space.nearest(address)
        text = ""
        if near is not None and (owner is None or near.rank == owner):
            text = f"{near.name} of rank {near.rank}, which ends {address - near.end + 1} bytes before"
        return errors.OutOfBounds.outside(accessed(self.m.current, kind, tensor, site()), text)

    # stores

    def _write(self, access: Access, values: np.ndarray, kind: str, is_async: bool) -> None:
        m, task = self.m, self.m.current
        self._own_stores(access)
        self.detector.write(access, kind, is_async)
        self._moved(access)
        if not m.schedule.late_stores or access.region.kind == "local":
            Pending(access, values, is_async).commit()
            self._changed(access)
            return
        if not task.pending:
            m.owing.append(task)
        task.pending.append(Pending(access, np.array(values), is_async))

    def _own_stores(self, access: Access) -> None:
        """A program sees its own stores, and they keep their order where they overlap."""
        task = self.m.current
        if task.pending:
            hit = [p for p in task.pending if p.overlaps(access)]
            if hit:
                self._commit_pending(task, hit)

    def _commit(self, task: Any, which: Any) -> None:
        if task.pending:
            self._commit_pending(task, [p for p in task.pending if which(p)])

    def _commit_pending(self, task: Any, stores: list[Pending]) -> None:
        for store in stores:
            task.pending.remove(store)
            store.commit()
            self._changed(store.access)
        if not task.pending and task in self.m.owing:
            self.m.owing.remove(task)

    def _changed(self, access: Access) -> None:
        """Memory changed by something other than a signal: programs that wait on a word inside look again."""
        m = self.m
        m.progress += 1
        if m.waiting:
            base = access.region.base
            low, high = access.span()
            for address in [a for a in m.waiting if base + low <= a < base + high]:
                m.wake(address)

    # atomics

    def _release(self, releases: bool) -> Any:
        """The clock that an atomic publishes; a release makes the program's plain stores visible first."""
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
    ) -> None:
        m = self.m
        for access, where in parts:
            if m.current is task:
                self._own_stores(access)
            flat: Any = _ALL.get(len(out), None) if where is ... else where
            if flat is None:
                flat = np.arange(len(out))
            if isinstance(access, Strided):
                view = access.view(dtype)
                old = view.reshape(-1).copy()
                new = update(old, flat)
                changed = bool((old != new).any())
                view[...] = new.reshape(view.shape)
            elif len(np.unique(access.offsets)) == len(access.offsets):
                old = access.read(dtype).copy()
                new = update(old, flat)
                changed = bool((old != new).any())
                access.write(np.ascontiguousarray(new))
            else:  # one after the other, as the hardware does
                changed = True
                old = np.empty(len(access.offsets), dtype)
                for i in range(len(access.offsets)):
                    one = Scattered(access.region, access.offsets[i : i + 1], access.itemsize)
                    old[i] = one.read(dtype)[0]
                    one.write(update(old[i : i + 1], flat[i : i + 1]))
            out[flat] = old
            if m.current is task:
                self.detector.write(access, "atomic", is_async=False, at=at)
                self._moved(access, signal=access.region.kind == "signals")
            if changed:
                m.progress += 1
        for address in words:
            if clock is not None:
                self.detector.publish(address, clock, task, scope)
            m.wake(address)

    @staticmethod
    def _sync_addresses(parts: list) -> list[int]:
        """Addresses of an atomic that can be a synchronisation variable; a whole tile of data is not one."""
        found: list[int] = []
        for access, _ in parts:
            if isinstance(access, Strided):
                if math.prod(access.shape) == 1:
                    found.append(access.first())
                elif access.nbytes() <= 1024:
                    base = access.region.base
                    found += [base + int(o) for o in _offsets(access)]
            elif len(access.offsets) <= 256:
                found += [access.region.base + int(o) for o in access.offsets]
        return found

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

    def _before_read(self, access: Access, kind: str, is_async: bool = False) -> None:
        self._own_stores(access)
        self._moved(access)
        self.detector.read(access, kind, is_async)

    # timeline

    def _moved(self, access: Access, signal: bool = False) -> None:
        task = self.m.current
        remote = access.region.kind != "local" and access.region.rank != task.rank
        rate = cost.REMOTE_BYTES_PER_US if remote else cost.LOCAL_BYTES_PER_US
        kind = "communicate" if remote or task.mark == "communicate" else task.mark
        self._spend(kind, cost.STEP_US * signal + access.nbytes() / rate)

    def _spend(self, kind: str, microseconds: float) -> None:
        task = self.m.current
        start = task.time
        task.time = start + microseconds
        if self.m.tracing:
            self._interval(kind, start, task.time)

    def _interval(self, kind: str, start: float, end: float) -> None:
        if not self.m.tracing:
            return
        intervals = self.m.current.intervals
        if intervals and intervals[-1][0] == kind and intervals[-1][2] >= start:
            intervals[-1][2] = end
        else:
            intervals.append([kind, start, end])

    def _copies(self, ptr: Any) -> list[np.ndarray]:
        """The addresses behind the multicast window, rank by rank."""
        space = self.m.space
        addresses = ptr.handle.data
        owner = space.owner(int(addresses.reshape(-1)[0]))
        if owner != space.size:
            near = f"address {int(addresses.reshape(-1)[0]):#x}, which is not in the multicast window"
            raise errors.OutOfBounds.outside(
                accessed(self.m.current, "multimem access", near, site()), "use multicast(ptr, world)"
            )
        return [addresses - np.uint64((space.size - r) * space.stride) for r in range(space.size)]


def _words(access: Access) -> np.ndarray:
    """The addresses of an access' elements."""
    return access.region.base + (_offsets(access) if isinstance(access, Strided) else access.offsets)


def _found(access: Access) -> np.ndarray:
    """The flagged words of an access, flat."""
    return (access.view(FLAGGED) if isinstance(access, Strided) else access.read(FLAGGED)).reshape(-1)


def _offsets(access: Strided) -> np.ndarray:
    offsets: Any = np.int64(access.offset)
    for axis, (n, s) in enumerate(zip(access.shape, access.strides)):
        offsets = offsets + (np.arange(n, dtype=np.int64) * s).reshape((n,) + (1,) * (len(access.shape) - 1 - axis))
    return offsets.reshape(-1)


def _scalar(value: Any) -> int:
    return int(value.handle.data.reshape(-1)[0]) if isinstance(value, tl.tensor) else int(value)


def _int32(value: int) -> tl.tensor:
    return tl.tensor(TensorHandle(np.array([value], np.int32), tl.int32), tl.int32)


def _mask_of(mask: Any, ptr: Any) -> Any:
    if mask is None:
        return None
    data = np.broadcast_to(mask.handle.data if isinstance(mask, tl.tensor) else np.asarray(mask), ptr.handle.data.shape)
    return None if data.all() else data
