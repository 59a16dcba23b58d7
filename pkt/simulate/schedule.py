"""Which task runs next and when a store becomes visible: all the randomness of a simulation, from one seed.

Seed 0 is the plain order: programs run until they block, and stores are visible at once. The other seeds take turns
with these policies:

adversarial   one rank is slow, and no store is visible before something orders it; flagged words are at once
late atomics  random; atomics, too, become visible late, relaxed ones in any order
uniform       before each access, any program that can run is as likely to go on as any other
random        programs run for stretches, whose length depends on the seed
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

PATIENCE = 0.97  # how often an adversarial schedule prefers any other rank to its victim
LINGERING = 0.5  # how often a program with pending stores stops after an atomic
WITHHOLDING = 0.75  # how often it stops once more after a buffered atomic
HOLDING = 0.97  # how often a buffered atomic stays so where a store would become visible
STAYING = 0.875  # how often a program that spins, as all do, keeps its turn for a whole iteration
POLICIES = ("adversarial", "random", "late atomics", "adversarial", "uniform", "late atomics")  # by seed


class Schedule:
    """The decisions of one run; the same seed and ranks give the same run.

    by_time: in seed 0, the program that is earliest on the modelled clock runs next, and only until its next access.
    Programs then take tasks from a queue in the order of that clock, so that a timeline shows a plausible run.
    """

    def __init__(self, seed: int, ranks: int, by_time: bool = False) -> None:
        self.seed = seed
        self.by_time = by_time and seed == 0
        self._random = random.Random(seed)
        self.policy = "in order" if seed == 0 else POLICIES[seed % len(POLICIES)]
        self.victim = (seed // 3) % ranks if self.policy == "adversarial" else None
        self.late_stores = seed != 0
        self.late_atomics = self.policy == "late atomics"
        # A slow rank is interrupted often: long stretches would hide what other ranks do between two of its steps.
        rates = {"adversarial": (0.1, 0.4), "uniform": (1.0,)}.get(self.policy, (0.0, 0.05, 0.3, 1.0))
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
        at = self._below(len(ready))
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

    def releases(self) -> bool:
        """Whether the buffered atomic that would become visible now does."""
        return self._random.random() > HOLDING

    def lingers(self) -> bool:
        """Whether a program with pending stores stops just after an atomic, where a missing order shows."""
        return self._random.random() < LINGERING

    def withholds(self) -> bool:
        """Whether a program stops once more after an atomic that is buffered."""
        return self._random.random() < WITHHOLDING

    def stays(self) -> bool:
        """Whether a program in a loop goes on for a whole iteration, where all programs spin."""
        return self._random.random() < STAYING

    def choose(self, count: int) -> int:
        return self._below(count) if count > 1 else 0

    def _below(self, count: int) -> int:
        """As `randrange(count)`, in a third of its time."""
        bits, found = count.bit_length(), count
        while found >= count:
            found = self._random.getrandbits(bits)
        return found
