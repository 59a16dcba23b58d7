"""The tuned operators, and a timer that can be noisy, slow on one rank, fail, hang and lie, as a real one can."""

import random
from dataclasses import dataclass, field

from pkt.model.config import Config
from pkt.tune.candidates import model_of, tuned_operators
from pkt.tune.timers import RecordedTimer

OPERATORS = tuned_operators()
"""Every operator that is tuned, by name."""
MODELS = {name: model_of(operator) for name, operator in OPERATORS.items()}
"""Predicted seconds of a config for a key, by operator."""


def candidates(count):
    """Config(n=0), Config(n=1), ..."""
    return [Config(n=n) for n in range(count)]


def anything(n):
    """A function to tune where only the timer matters."""


@dataclass
class Rough(RecordedTimer):
    """A timer that reports `seconds(n)` for Config(n=n), times a random factor up to 1 + noise, and times 1.5 on the
    ranks in `slow`. fails: errors by (rank, n), which each call of the method `where` raises. `asked` lists the calls
    of `times`."""

    world: object
    seconds: object = lambda n: 1e-3
    noise: float = 0.0
    seed: int = 0
    slow: tuple = ()
    fails: dict = field(default_factory=dict)
    where: str = "first"
    then: object = None  # called with (rank, n) before each of `times`

    def __post_init__(self):
        super().__init__(lambda config: self.seconds(config["n"]))
        self.random = random.Random(f"{self.seed} {self.world.rank}")
        self.asked = []  # (n, repeats)

    threads = 0

    def first(self, config, run):
        self._fail("first", config["n"])
        return run()

    def times(self, config, run, repeats):
        n = config["n"]
        self.asked.append((n, repeats))
        if self.then:
            self.then(self.world.rank, n)
        self._fail("times", n)
        late = 1.5 if self.world.rank in self.slow else 1.0
        return [t * late * (1 + self.noise * self.random.random()) for t in super().times(config, run, repeats)]

    def _fail(self, where, n):
        if where == self.where and (self.world.rank, n) in self.fails:
            raise self.fails[self.world.rank, n]
