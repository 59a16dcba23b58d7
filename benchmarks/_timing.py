"""Time a variant.

All repeats are queued behind a sleep, so the host's launches do not count. Each repeat empties L2, meets all ranks in a
barrier kernel, and is timed by two events; the slowest rank's time counts. A GPU that has worked for a tenth of a
second lowers its clock, by as much as a fifth. So the variants of a case take turns: PASSES times, each time in another
order, with a repeat or two each. Then all variants run at the same clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import pkt
from pkt.tune.timers import FLUSH, sleep

PASSES = 10  # turns over which the repeats of a variant are spread
REPEATS = 20  # of each variant in `take_turns`


@dataclass
class Settings:
    """How often and how long a variant runs."""

    repeats: int = 20
    seconds: float = 45.0  # that a variant may take, compilation included
    flush: int = FLUSH  # bytes written to empty L2
    end: float = float("inf")  # time.time() after which no variant begins


def timed(world: Any, run: Callable[[], Any], settings: Settings) -> dict[str, Any]:
    """One pass: the slowest rank's milliseconds for each repeat, its host time for a call in us, and its time for an
    eager call in ms. Collective."""
    flush = world.keep("benchmarks.flush", lambda: torch.empty(settings.flush, dtype=torch.uint8, device="cuda"))
    repeats = -(-settings.repeats // PASSES)
    run()
    world.synchronize()
    start = time.perf_counter()
    run()
    enqueue = time.perf_counter() - start
    world.synchronize()
    whole = time.perf_counter() - start
    enqueue, whole = (max(column) for column in zip(*world.all_gather_object([enqueue, whole])))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    world.barrier()
    sleep(enqueue * repeats)
    for begin, end in events:
        flush.zero_()
        gate(world)
        begin.record()
        run()
        end.record()
    world.synchronize()
    mine = [begin.elapsed_time(end) for begin, end in events]
    slowest = [max(times) for times in zip(*world.all_gather_object(mine))]
    return {"ms": slowest, "host_us": 1e6 * enqueue, "eager_ms": 1e3 * whole}


def take_turns(
    variants: Sequence[tuple[list[float], Callable[[], Any]]], pause: float, meet: Callable[[], Any] = lambda: None
) -> None:
    """Append the milliseconds of REPEATS calls of each variant, on this GPU, to its list. The variants take turns,
    forwards and backwards. Before a call come `meet()`, a sleep of the GPU of `pause` seconds, and an empty L2."""
    flush = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")
    for repeat in range(REPEATS):
        for times, run in variants if repeat % 2 else reversed(variants):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            meet()
            sleep(pause)
            flush.zero_()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))


def summary(passes: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a row: median, least and greatest time of all passes, least host and eager time."""
    every = [ms for found in passes for ms in found["ms"]]
    return {
        "ms": statistics.median(every), "low": min(every), "high": max(every), "runs": len(every),
        **{name: min(found[name] for found in passes) for name in ("host_us", "eager_ms")},
    }  # fmt: skip


def replayed(world: Any, run: Callable[[], Any]) -> float:
    """Milliseconds of `run`, on this GPU, behind a barrier of all ranks. Collective."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    world.barrier()
    sleep(100e-6)
    gate(world)
    begin.record()
    run()
    end.record()
    world.synchronize()
    return begin.elapsed_time(end)


def gate(world: Any) -> None:
    """Launch a barrier kernel in which the streams of all ranks meet."""
    from pkt.tune.timers import gate_kernel

    counters = world.keep("benchmarks.gate", lambda: pkt.signals(2, name="benchmarks.gate", world=world))
    gate_kernel[(1,)](counters, world.device, num_warps=1)
