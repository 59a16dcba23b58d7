"""A program in a wait: the condition that it waits for, and whether it holds."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from pkt.simulate.faults import Site
from pkt.simulate.memory import Region
from pkt.wording import Waiting


def signed(value: int) -> int:
    """The low 32 bits as a signed number."""
    return (value + 2**31) % 2**32 - 2**31


class Blocked:
    """A program in a wait. cmp: "ge", "gt", "le", "lt", "eq", "ne", as in `operator`, or "flip" (the top bit)."""

    def __init__(self, task: Any, region: Region, address: int, want: int, cmp: str, at: Site):
        self.task, self.region, self.address = task, region, address
        self.want, self.cmp, self.at = want, cmp, at

    def found(self) -> int:
        offset = self.address - self.region.base
        return int(self.region.memory[offset : offset + 4].view(np.int32)[0])

    def holds(self) -> bool:
        found = self.found()
        if self.cmp == "flip":
            return (found ^ self.want) & 0x80000000 != 0
        return getattr(operator, self.cmp)(signed(found - self.want), 0)

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
