"""Which task runs next and when a store becomes visible: all the randomness of a simulation, from one seed.

Seed 0 is the plain order: programs run until they block, and stores are visible at once. Every third of the other seeds
is adversarial: one rank is slow, and no store is visible before something orders it. The rest are random.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

PATIENCE = 0.97  # how often an adversarial schedule prefers any other rank to its victim
LINGERING = 0.5  # how often a program with pending stores stops after an atomic


class Schedule:
    """The decisions of one run; the same seed and ranks give the same run.

    by_time: in seed 0, the program that is earliest on the modelled clock runs next, and only until its next access.
    Programs then take tasks from a queue in the order of that clock, so that a timeline shows a plausible run.
    """

    def __init__(self, seed: int, ranks: int, by_time: bool = False) -> None:
        self.seed = seed
        self.by_time = by_time and seed == 0
        self._random = random.Random(seed)
        self.policy = "in order" if seed == 0 else "adversarial" if seed % 3 == 0 else "random"
        self.victim = (seed // 3) % ranks if self.policy == "adversarial" else None
        self.late_stores = seed != 0
        # A slow rank is interrupted often: long stretches would hide what other ranks do between two of its steps.
        # At a rate of 1 every interleaving of single accesses is as likely as any other.
        rates = (0.1, 0.4) if self.victim is not None else (0.0, 0.05, 0.3, 1.0)
        self._interrupts = 0.0 if seed == 0 else self._random.choice(rates)
        self._commits = 0.0 if self.policy == "adversarial" else self._random.choice((0.02, 0.2, 0.6))

    def __str__(self) -> str:
        slow = f", rank {self.victim} slow" if self.victim is not None else ""
        return f"seed {self.seed} ({self.policy}{slow})"

    def pick(self, ready: Sequence[Any]) -> int:
        """Index of the task that runs next."""
        if self.by_time:
            return min(range(len(ready)), key=lambda i: ready[i].time)
        if self.seed == 0:
            return 0
        at = self._random.randrange(len(ready))
        if self.victim is not None and ready[at].rank == self.victim and self._random.random() < PATIENCE:
            others = [i for i, task in enumerate(ready) if task.rank != self.victim]
            if others:
                return self._random.choice(others)
        return at

    def interrupts(self) -> bool:
        """Whether another task runs before this access."""
        return self.by_time or (self._interrupts > 0 and self._random.random() < self._interrupts)

    def commits(self) -> bool:
        """Whether some pending store becomes visible now."""
        return self._commits > 0 and self._random.random() < self._commits

    def lingers(self) -> bool:
        """Whether a program with pending stores stops just after an atomic, where a missing order shows."""
        return self._random.random() < LINGERING

    def choose(self, count: int) -> int:
        return self._random.randrange(count) if count > 1 else 0
