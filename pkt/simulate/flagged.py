"""Words that carry their own flag: `put_flagged` and `take_flagged`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import triton.language as tl

from pkt.language.ptx.flagged import VALUES, masks_of
from pkt.simulate.accesses import mask_of, scalar
from pkt.simulate.atomics import Atomics
from pkt.simulate.blocked import Blocked, signed
from pkt.simulate.constants import new_tensor
from pkt.simulate.faults import SYNC, Site
from pkt.simulate.memory import Access, Pending
from pkt.simulate.sites import site

WORDS = {values: np.dtype([("values", np.int32, (values,)), ("flag", np.uint32)]) for values in (1, VALUES)}
"""A word by the number of its values."""


class Flagged(Atomics):
    """Flagged words."""

    def put_flagged(self, ptr: Any, values: tuple, flag: Any, mask: Any) -> None:
        """Store words that become visible late and in any order, like plain stores, but each word as a whole."""
        m, task = self.m, self.m.current
        at = site()
        self._step()
        parts = self._flagged(ptr.handle.data, mask_of(mask, ptr), len(values), "put_flagged")
        if at.call in SYNC:
            m.census.note(at, "remove")
        if m.faults.change(at) == "remove" or not parts:
            return
        event = self._signal(at, parts[0][0])
        if event == m.faults.drop:
            return
        words = np.empty(ptr.handle.data.shape, WORDS[len(values)])
        words["flag"] = scalar(flag) & 0xFFFFFFFF
        for i, value in enumerate(values):
            words["values"][..., i] = value.handle.data if isinstance(value, tl.tensor) else signed(value)
        for access, where in parts:
            data = words if where is ... else words.reshape(-1)[where]
            if event == m.faults.delay:
                self.detector.write(access, "atomic", is_async=False)
                m.late_signals.append(functools.partial(self._arrive, Pending(access, data.copy(), False)))
            else:
                self._write(access, data, "atomic", is_async=False)
            self.detector.publish(access.first(), None, task, "system")  # no clock, only the time of arrival
        if m.schedule.victim is not None:  # nothing orders the words: late ones would not come before a slow rank takes
            self._commit(task, lambda p: any(p.access is access for access, _ in parts))
            m.pause()

    def take_flagged(
        self, ptr: Any, stride: Any, parts: int, flag: Any, mask: Any, world: Any, values: int = VALUES
    ) -> tuple[tuple, ...]:
        at = site()
        self._step()
        if at.call in SYNC:
            self.m.census.note(at, "remove")
        compare = self.m.faults.change(at) != "remove"
        words, masks = ptr.handle.data, masks_of(mask, parts) or (mask,) * parts
        inside = [mask_of(each, ptr) for each in masks]
        apart = np.uint64(4 * scalar(stride))
        want = signed(scalar(flag))
        found = (self._take(words + i * apart, inside[i], want, compare, at, values) for i in range(parts))
        return tuple(tuple(new_tensor(value, tl.int32, not ptr.shape) for value in part) for part in found)

    def _flagged(self, words: np.ndarray, mask: Any, values: int, call: str) -> list:
        if values not in WORDS:
            raise ValueError(f"{call}: a word has {' or '.join(map(str, WORDS))} values, not {values}")
        return self._resolve(words, mask, WORDS[values].itemsize, call)

    def _arrive(self, late: Pending) -> None:
        late.commit()
        self._changed(late.access)

    def _take(self, words: np.ndarray, mask: Any, flag: int, compare: bool, at: Site, values: int) -> list[np.ndarray]:
        """The values of the words, once each word has the flag, or at once if not `compare`."""
        m, task = self.m, self.m.current
        out, behind = np.zeros((values, words.size), np.int32), 4 * values  # bytes before the flag
        for access, where in self._flagged(words, mask, values, "take_flagged"):
            self._own_stores(access)
            while compare:
                missing = np.flatnonzero(_found(access)["flag"] != flag & 0xFFFFFFFF)
                if not missing.size:
                    break
                word = int(_words(access)[missing[0]]) + behind
                m.waiting.setdefault(word, []).append(task)
                m.block(Blocked(task, access.region, word, flag, "eq", at))
            sync = self.detector.sync.get(access.first())
            if sync is not None and sync.time > task.time:
                blocked = Blocked(task, access.region, access.first() + behind, flag, "eq", at)
                self._interval("wait", task.time, sync.time, blocked.waiting, sync)
                task.time = sync.time
            self.detector.write(access, "atomic", is_async=False)  # as an atomic it races with plain accesses only
            self._charge(access)
            out[:, where] = _found(access)["values"].T
        if task.looking:
            self._saw(None, out)
        return [value.reshape(words.shape) for value in out]


def _words(access: Access) -> np.ndarray:
    """The addresses of an access' elements."""
    return access.region.base + access.byte_offsets()


def _found(access: Access) -> np.ndarray:
    """The flagged words of an access, flat."""
    return access.read(WORDS[access.itemsize // 4 - 1]).reshape(-1)
