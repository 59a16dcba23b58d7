"""Timers: on GPUs, on the simulator's modelled clock, or from a record."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import triton

import pkt.language as pl
from pkt.errors import Unsupported
from pkt.model.config import Config
from pkt.runtime.launch.replay import paused
from pkt.runtime.memory.factories import signals
from pkt.runtime.world import World

FLUSH = 256 << 20  # bytes written to empty L2
TICKS = 2e9  # of torch.cuda._sleep in a second, roughly


@triton.jit
def gate_kernel(counters, world):  # type: ignore[no-untyped-def]
    """All ranks have come here."""
    pl.world_barrier(counters, world)


def sleep(enqueue: float) -> None:
    """Hold the current stream for 1.5 times `enqueue`, the seconds that the host takes to queue the runs, so that they
    follow each other without launch overhead; at most 0.6 s."""
    torch.cuda._sleep(int(min(0.6, 0.001 + 1.5 * enqueue) * TICKS))


class Timer(Protocol):
    """One rank's side of taking times. Any class whose only argument is a World will do."""

    threads: int  # that compile candidates before any runs; 0 where nothing is compiled

    def first(self, config: Config, run: Callable[[], Any]) -> Any:
        """The result of `run()`, after its work is done. All ranks call this together."""

    def times(self, config: Config, run: Callable[[], Any], repeats: int) -> list[float]:
        """Seconds on this rank of each of `repeats` runs, which all ranks start together. Comes after `first`. A
        function's workspaces may have been given back since, so a run that makes them again comes first."""


class CudaTimer:
    """Takes times by events. All runs are queued behind a sleep, so the times have no launch overhead. Each repeat
    empties L2 and meets all ranks in a barrier kernel before it starts."""

    threads = 8

    def __init__(self, world: World) -> None:
        self.world = world
        self._enqueue: dict[Config, float] = {}  # seconds that the host takes to queue a run
        # Made here, these outlive every candidate's workspaces.
        make_flush = functools.partial(torch.empty, FLUSH, dtype=torch.uint8, device=world.torch_device)
        self._flush = world.keep("tune.flush", make_flush)
        self._counters = world.keep("tune.gate", lambda: signals(2, name="tune.gate", world=world))

    def first(self, config: Config, run: Callable[[], Any]) -> Any:
        result = run()
        self.world.synchronize()
        return result

    @paused()  # recording a call in a repeat would hold that repeat up
    def times(self, config: Config, run: Callable[[], Any], repeats: int) -> list[float]:
        world, flush = self.world, self._flush
        start = time.perf_counter()
        run()
        self._enqueue.setdefault(config, time.perf_counter() - start)  # in the first run nothing is made
        world.synchronize()

        def gate() -> None:
            gate_kernel[(1,)](self._counters, world.device, num_warps=1)

        gate()  # compiled before the sleep begins
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        sleep(self._enqueue[config] * repeats)
        for begin, end in events:
            flush.zero_()
            gate()
            begin.record()
            run()
            end.record()
        world.synchronize()
        return [1e-3 * begin.elapsed_time(end) for begin, end in events]


class ClockTimer:
    """Reads the simulator's modelled clock. Every repeat takes the same time, so a candidate runs once."""

    threads = 0

    def __init__(self, world: World) -> None:
        timed = world.backend.timed
        assert timed is not None, "a world on the simulator"
        self._timed = timed
        self._seconds: dict[Config, float] = {}

    def first(self, config: Config, run: Callable[[], Any]) -> Any:
        result, self._seconds[config] = self._timed(run)
        return result

    def times(self, config: Config, run: Callable[[], Any], repeats: int) -> list[float]:
        return [self._seconds[config]] * repeats


class RecordedTimer:
    """Returns seconds that are known already, measured or modelled. Nothing runs."""

    threads = 0

    def __init__(self, seconds: Mapping[Config, float] | Callable[[Config], float]) -> None:
        self._seconds = seconds if callable(seconds) else seconds.__getitem__

    def first(self, config: Config, run: Callable[[], Any]) -> Any:
        return None

    def times(self, config: Config, run: Callable[[], Any], repeats: int) -> list[float]:
        return [self._seconds(config)] * repeats


def timer_of(world: World) -> Timer:
    """The timer for a world: on GPUs or in the simulator."""
    if world.backend.timed is not None:
        return ClockTimer(world)
    if world.torch_device.type == "cuda":
        return CudaTimer(world)
    raise Unsupported.here("pkt.tune", f"found a world on {world.torch_device}", "give a timer=")
