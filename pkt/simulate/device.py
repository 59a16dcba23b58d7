"""The device side of `Machine`: the accesses and the synchronisation of the simulated programs.

The builder sends every access of `tl` here, and pkt.language sends its primitives. Each kind of access has a file of
its own. This file has the waits, the fences and the drain.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import triton.language as tl

from pkt.simulate import cost, threads
from pkt.simulate.accesses import scalar, words_of
from pkt.simulate.bad_address import check_kind
from pkt.simulate.blocked import Blocked, signed
from pkt.simulate.far import Far
from pkt.simulate.faults import COUNTING, SYNC
from pkt.simulate.findings import FalseAssumption
from pkt.simulate.flagged import Flagged
from pkt.simulate.loops import Loop
from pkt.simulate.memory import Buffered
from pkt.simulate.multimem import Multimem
from pkt.simulate.shortcuts import new_tensor
from pkt.simulate.sites import host_call, site, site_of, user_frame
from pkt.simulate.standstill import settle
from pkt.wording import Waiting

CLOCK = 0  # what counts as the address of the clock
# While all programs only poll, each reading moves the clock further than the last one: to 100 ms in 800 readings.
UNHURRIED = 2048
MOST_POLLS = 4096


class SimulatedDevice(Flagged, Multimem, Far):
    """The device of one machine; `machine.current` is the program that calls."""

    def wait(self, ptr: Any, want: Any, cmp: str) -> tl.tensor:
        m, task = self.m, self.m.current
        at = site()
        self._step()
        bits = ptr.dtype.element_ty.primitive_bitwidth
        address, wanted = scalar(ptr), signed(scalar(want), bits)
        parts = self._resolve(ptr.handle.data, None, bits // 8, "wait")
        if at.call in COUNTING:
            check_kind(m, parts, "wait", at)
        access = parts[0][0]
        region = access.region
        region.waited.add(address)
        if at.call in SYNC:
            m.census.note(at, "remove", "relax")
        change = m.faults.change(at)
        blocked = Blocked(task, region, address, wanted, cmp, at, bits)
        self._own_stores(access)
        self.detector.look(access, "wait", at)
        start = task.time
        holds = at_once = blocked.holds()
        if change != "remove":
            while not holds:
                m.waiting.setdefault(address, []).append(task)
                m.block(blocked)
                holds = blocked.holds()
            sync = self.detector.sync.get(address)
            if sync is not None:
                task.time = max(task.time, sync.time)
                if m.races and cmp != "flip" and region.kind == "signals":
                    self.detector.answered(task, blocked, sync, at_once)
            if task.time > start:
                self._interval("wait", start, task.time, blocked.waiting, sync)
            if change != "relax" and m.races:
                self.detector.acquire(address, "system")
                if at.call in SYNC:
                    task.waits.add(at)
                if change != "no proxy fence":
                    self.detector.order_async()
        found = blocked.found()
        if task.looking:
            self._saw(access, found)
        dtype = tl.int32 if bits == 32 else tl.int64
        return new_tensor(np.array([found], f"int{bits}"), dtype, True)

    def fence(self, sc: bool = False) -> None:
        m, task = self.m, self.m.current
        at = site()
        if at.call in SYNC:
            m.census.note(at, "relax" if at.call not in ("fence", "quiet") else "remove")
            if sc:
                m.census.note(at, "not sc")
        change = m.faults.change(at)
        if change not in (None, "no drain", "not sc"):
            return
        # Only a fence.sc orders earlier writes before later reads. After any other one, earlier relaxed atomics may
        # still be buffered, until the program's next write.
        everything = sc and change is None
        self._commit(task, lambda p: not p.is_async and (everything or not isinstance(p, Buffered)))
        task.fenced = not everything and any(isinstance(p, Buffered) for p in task.pending)
        self.detector.fence()

    def proxy_fence(self, world: Any) -> None:
        if self.m.faults.change(site()) not in ("no proxy fence", "remove"):
            self.detector.order_async()

    def drain(self, world: Any, pending: int = 0) -> None:
        m, task = self.m, self.m.current
        if task.undrained:
            m.census.note(site(), "no drain")
        if m.faults.mutant is not None and m.faults.change(site()) in ("no drain", "remove"):
            return
        self._commit(task, lambda p: p.is_async)
        task.undrained = False
        self.detector.drained()

    def prefetch(self, ptr: Any, mask: Any) -> None:
        """Nothing: there are no caches."""

    def register(self, name: str) -> int:
        """`globaltimer`, the modelled clock in ns, which each reading moves on; or `smid`, the program's slot."""
        task = self.m.current
        if name == "globaltimer":
            self._step(CLOCK, spin=True)
            task.time += cost.STEP_US * (1 + self._polls_in_vain() ** 2 // UNHURRIED)
        value = task.lane if name == "smid" else int(1000 * task.time)
        if task.looking:
            self._saw(None, value)
        return value

    def _polls_in_vain(self) -> int:
        """How often the program has polled since memory changed; 0 where another one may do anything but poll."""
        m = self.m
        for task in (m.current, *m.ready):
            loop = task.spins
            by_clock = task.polls and CLOCK in task.touched and task.progress == m.progress
            if not by_clock and (loop is None or loop.progress != m.progress):
                return 0
        return 0 if settle(m) else min(m.current.polls, MOST_POLLS)

    def assumed_falsely(self, what: str) -> None:
        task = self.m.current
        raise FalseAssumption.at(task.rank, task.name, task.program, str(site()), what)

    def take_address(self, tensor: Any, address: int) -> None:
        """Note that host code has read the address of a tensor. A launch reads those of its arguments, too."""
        if self.on_host and not self.m.binding and self.m.space.owner(address) is None:
            self.m.taken.note(tensor, str(site()))

    def mark(self, kind: str, task: Any = None) -> None:
        current = self.m.current
        current.mark, current.tile = kind, None if task is None else scalar(task)

    def check_exit(self, task: Any) -> None:
        """Order a program's TMA stores when it ends. Stores that are still pending stay so until the grid ends."""
        threads.join(task)  # what it has done must not keep memory
        if self.m.races:
            task.clock[task.column + 1] = task.async_clock

    def spinning(self, task: Any) -> Waiting:
        """The Waiting of a program that polls in a loop of its own. Where its condition compares no word with a number,
        it is taken to wait for another value, and for the smallest of several words: counters grow, and flags begin at
        0. A loop that polls no memory waits on a variable."""
        loop = task.spins or next(reversed(task.loops.values()), None)
        launch = None if task.is_host else task.launch.ordinal
        at = host_call(task.greenlet.gr_frame)[1] if task.is_host else site_of(task)
        polled = (loop.polled or loop.before).values() if loop is not None else ()
        words = [(access, address) for access in polled for address in words_of(access) or [access.first()]]
        if not words:
            counter, found = _variable(task, loop)
            return Waiting(task.rank, task.program, task.name, counter, found, found, "ne", str(at), launch)
        values = [_value(access, address) for access, address in words]
        found = min(values)
        access, address = words[values.index(found)]
        region, counter = access.region, access.region.element(address)
        want, compare = found, "ne"
        ending = loop.slice.ending if loop is not None and len(words) == 1 else None
        number = ending and ending.number(user_frame(task.greenlet.gr_frame))
        if ending is not None and number is not None and not getattr(operator, ending.compare)(found, number):
            want, compare = number, ending.compare
        return Waiting(task.rank, task.program, task.name, counter, want, found, compare, str(at), launch, region.rank)


def _variable(task: Any, loop: Loop | None) -> tuple[str, Any]:
    """The variable of its own that decides when a program's loop ends, in words, and its value."""
    frame = user_frame(task.greenlet.gr_frame)
    if loop is not None and frame is not None:
        parameters = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        for name in sorted(loop.slice.decides, key=lambda name: name in parameters):  # which nothing may assign to
            value = frame.f_locals.get(name)
            value = value.handle.data.item() if isinstance(value, tl.tensor) and not value.shape else value
            if isinstance(value, (int, float)):
                return f"its own variable {name}", value
    return "a loop of its own", 0


def _value(access: Any, address: int) -> int:
    """The word of an access at `address`, as a signed number."""
    at = address - access.region.base
    return int.from_bytes(access.region.memory[at : at + min(access.itemsize, 8)].tobytes(), "little", signed=True)
