"""Measure pkt's host cost: opening a world, allocating, and calling an operator.

    python -m benchmarks.runtime --ranks 4       on GPUs
    python -m benchmarks.runtime --device cpu    the operators' own host code on a simulated rank, without any launch

A figure is that of the slowest rank. The overhead of an operator is the host time of a call less that of a bare launch:
`kernel[grid](...)` with the same arguments and launch options. Both queue their kernel and do not wait for it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

import pkt
from benchmarks import _harness
from benchmarks._collective import module_of
from pkt.kernels.operator import operators
from pkt.progress import steps
from tests.conformance import inputs

INIT, HEAP_CALL, OVERHEAD = 1.5, 20.0, 10.0  # s; us for an allocation or a free; us that an operator may add
CALLS = 50  # calls between two waits for the device; its queue has room for all of them
REPEATS = 20
TENSORS = 10_000
LAUNCHES = "cooperative_launch", "beside_launch"


def calls_of(world: pkt.World) -> dict[str, Callable[[], Any]]:
    """A call of each operator in the registry on small tensors: products of 128 rows and columns a rank, or symmetric
    vectors. It takes the form that the operator chooses, unless the operator's benchmark has HOST_COST."""
    calls: dict[str, Callable[[], Any]] = {}
    for name, operator in operators().items():
        letters = inputs.letters_of(operator)
        case = inputs.alike(operator, 128, f"W*{4096 // world.size}")
        operands = inputs.everybody(operator, case, world.size, 0, inputs.usual(operator))
        like = inputs.exact(operator, case, world.rank, operands)
        mine = {n: ts and inputs.placed(world, ts[world.rank], not letters) for n, ts in operands.items()}
        if "out" in operator.names:
            mine["out"] = inputs.placed(world, like.bfloat16(), not letters)
        keywords = getattr(module_of(name), "HOST_COST", {})
        calls[name] = inputs.runnable(operator, case, mine, **keywords, world=world)
    world.barrier()
    return calls


class Recorder:
    """Replaces `cooperative_launch`: records each launch and launches nothing."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, Any, Any, Any]] = []

    def __call__(self, world: Any, kernel: Any, grid: Any, **options: Any) -> Callable[..., None]:
        def start(*args: Any) -> None:
            # A descriptor holds its tensor only during the launch.
            self.launches.append((kernel, grid, [copy.copy(a) if hasattr(a, "base") else a for a in args], options))

        return start


def per_call(call: Callable[[], Any], settle: Callable[[], Any]) -> list[float]:
    """Microseconds of each repeat."""
    call()
    settle()
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        taken.append((time.perf_counter() - start) / CALLS * 1e6)
        settle()
    return taken


def time_operators(world: pkt.World) -> dict[str, list[float]]:
    """Microseconds of host time in each repeat, by figure. Collective."""
    found = {}
    gpu = world.torch_device.type == "cuda"
    for name, call in steps(calls_of(world).items(), "operators", None if world.rank == 0 else False):
        call()  # compiles, and makes the plan
        world.synchronize()
        world.barrier()
        recorder = Recorder()
        with recording(recorder, world):
            call()
            launches = list(recorder.launches)
            if not gpu:
                found[f"{name}, without its launch"] = per_call(call, recorder.launches.clear)
        if gpu:

            def bare(launches: list = launches) -> None:
                for kernel, grid, args, options in launches:
                    kernel[grid](*args, launch_cooperative_grid=True, **options)

            ours, theirs = per_call(call, world.synchronize), per_call(bare, world.synchronize)
            found[name] = ours
            found[f"{name} over its bare launch"] = [a - b for a, b in zip(ours, theirs)]
        world.barrier()
    return found


@contextlib.contextmanager
def recording(recorder: Recorder, world: pkt.World) -> Iterator[None]:
    """Plans made in this context use `recorder` instead of `cooperative_launch` and `beside_launch`, in every loaded
    module of pkt."""
    with contextlib.ExitStack() as stack:
        for (name, module), made in itertools.product(list(sys.modules.items()), LAUNCHES):
            if name.startswith("pkt.") and hasattr(module, made):
                stack.enter_context(mock.patch.object(module, made, recorder))
        stack.enter_context(mock.patch.dict(world.plans, clear=True))
        yield


def time_heap(world: pkt.World) -> dict[str, list[float]]:
    """Microseconds of an allocation and of a free. The GPU is busy, so that a call that waits for it shows. Objects
    that exist before are frozen: the garbage collector's walks through them are not a cost of an allocation.
    Collective."""
    gc.collect()
    gc.freeze()
    found: dict[str, list[float]] = {"allocation": [], "free": []}
    for _ in range(5):
        world.barrier()
        if world.torch_device.type == "cuda":
            torch.cuda._sleep(2_000_000_000)  # clock ticks, about a second
        start = time.perf_counter()
        live = [pkt.empty(1000) for _ in range(TENSORS)]
        middle = time.perf_counter()
        for tensor in live:
            tensor.free()
        end = time.perf_counter()
        found["allocation"].append((middle - start) / TENSORS * 1e6)
        found["free"].append((end - middle) / TENSORS * 1e6)
    return found


PROGRAM = """
import time
import torch, pkt
start = time.perf_counter()
world = pkt.init("1GiB", multicast=False)
print(time.perf_counter() - start)
world.close()
"""


def time_init(ranks: int) -> list[float]:
    """Seconds of pkt.init() in fresh processes, with CUDA's own start; the slowest rank of each attempt."""
    taken = []
    for attempt in steps(range(3), "pkt.init"):
        job = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(29400 + os.getpid() % 500 + attempt),
        }
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True,
                env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]  # fmt: skip
        said = [process.communicate(timeout=120)[0] for process in processes]
        taken.append(max(float(text.split()[-1]) for text in said))
    return taken


def measure(world: pkt.World) -> dict[str, list[float]]:
    """All figures of a rank except those of pkt.init."""
    found = time_operators(world)
    return found | time_heap(world) if world.torch_device.type == "cuda" else found


def rows(ranks: list[dict[str, list[float]]]) -> list[_harness.Row]:
    """The slowest rank's figures with their limits."""
    limits = {"allocation": HEAP_CALL, "free": HEAP_CALL}
    found = []
    for name in ranks[0]:
        slowest = [max(values) for values in zip(*(rank[name] for rank in ranks))]
        limit = OVERHEAD if "launch" in name else limits.get(name)
        found.append(_harness.row(name, slowest, "us", limit))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    gpu = given.device == "cuda"
    ranks = given.ranks if gpu else 1  # simulated ranks share a thread, so more ranks add no cost to a call
    from benchmarks.runtime import measure as importable  # workers cannot import it from __main__

    table = rows(pkt.launch(importable, ranks, given.device, heap="2GiB", multicast=False))
    if gpu:
        table.append(_harness.row("pkt.init, 1 GiB heap, fresh processes", time_init(ranks), "s", INIT))
    name = "runtime_cpu" if not gpu else "runtime" if ranks == 4 else f"runtime_{ranks}"
    _harness.write(name, table, "runtime", ranks=ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
