"""A program in a wait: the condition that it waits for, and whether it holds."""

from __future__ import annotations

import operator
from typing import Any

from pkt.simulate.faults import Site
from pkt.simulate.memory import Region
from pkt.wording import Waiting


def signed(value: int, bits: int = 32) -> int:
    """The low bits as a signed number."""
    half = 1 << (bits - 1)
    return (value + half) % (2 * half) - half


class Blocked:
    """A program in a wait. cmp: "ge", "gt", "le", "lt", "eq", "ne", as in `operator`, or "flip" (the top bit). bits: of
    the counter."""

    def __init__(self, task: Any, region: Region, address: int, want: int, cmp: str, at: Site, bits: int = 32):
        self.task, self.region, self.address = task, region, address
        self.want, self.cmp, self.at, self.bits = want, cmp, at, bits
        self._offset = address - region.base

    def found(self) -> int:
        at = self._offset
        return int.from_bytes(self.region.memory[at : at + self.bits // 8].tobytes(), "little", signed=True)

    def holds(self) -> bool:
        found = self.found()
        if self.cmp == "flip":
            return (found ^ self.want) & 0x80000000 != 0
        return getattr(operator, self.cmp)(signed(found - self.want, self.bits), 0)

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
