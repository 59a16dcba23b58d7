"""do_bench for Triton's own autotuner: the same time on every rank."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pkt.model.config import Config
from pkt.runtime.workers.interrupts import Interrupts
from pkt.runtime.world import current_world
from pkt.tune.timers import timer_of
from pkt.tune.votes import Votes

REPEATS = 10


def do_bench(kernel_call: Callable[[], Any], quantiles: Sequence[float] | None = None) -> Any:
    """Milliseconds of `kernel_call()`, the same on every rank; pass it to @triton.autotune as do_bench=. Collective.

    Takes the maximum over ranks of each of a fixed number of repeats, which all ranks start together; returns the
    median, or a list of the `quantiles`. If the call fails on one rank, the time is infinite on every rank, with a
    warning that says why, and Triton takes another config. Give all ranks the same configs, because Triton lists them
    on each rank apart. Raises Unsupported where there is no world.
    """
    world = current_world("pkt.tune.do_bench")
    timer, config = timer_of(world), Config()
    with Interrupts() as interrupts:
        votes = Votes(world, "by Triton's autotuner", interrupts)
        times: list[list[float]] = []
        _, failed = votes.step(lambda: timer.first(config, kernel_call) and None, "the first run")
        if not failed:
            times, failed = votes.step(lambda: timer.times(config, kernel_call, REPEATS), "measuring")
    if votes.stopped:
        raise KeyboardInterrupt
    if failed:
        if world.rank == 0:
            warnings.warn(f"pkt.tune.do_bench: a config is left out: {failed}", stacklevel=2)
        return math.inf if quantiles is None else [math.inf] * len(quantiles)
    slowest = [1e3 * max(some) for some in zip(*times)]
    found = np.quantile(slowest, 0.5 if quantiles is None else quantiles)
    return float(found) if quantiles is None else found.tolist()
