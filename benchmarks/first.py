"""Time to the first result of a product, with an empty cache of compiled kernels and with one that has its kernels.

    python -m benchmarks.first --ranks 2                      on GPUs, in about four minutes
    PKT_SHARE_GPU=1 python -m benchmarks.first --ranks 2      both ranks on one GPU: compilation is the host's work

| row | a call of |
|---|---|
| empty cache | an operator and form that the process has not called, whose kernels must be compiled |
| warm cache | the same in new processes: the kernels are read from the disk |
| new shape | other sizes, in the process of the row before |

A time ends when the result is there, on the slowest rank. The processes have called another operator before.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from typing import Any

import torch

import pkt
from benchmarks import _harness
from pkt.kernels.operator import operators
from pkt.progress import steps
from pkt.runtime.workers.workers import Workers

LIMITS = {"empty cache": 2e3, "warm cache": None, "new shape": 20.0}  # ms
SHAPES = {"64 rows": (64, 8192, 3584), "1500 rows": (1500, 4096, 2048), "4096 rows": (4096, 4096, 4096)}  # M, K, N
MODES = (None, "gluon", "low_latency")


def first(world: pkt.World, name: str, shape: tuple[int, int, int], mode: str | None) -> tuple[float, float] | str:
    """Milliseconds of a call with this shape, and of one with another; why the form cannot run, if so."""
    x = pkt.zeros(1 << 12, dtype=torch.bfloat16, world=world)
    pkt.all_gather(x, world=world)
    m, k, n = shape
    try:
        return timed(world, name, shape, mode), timed(world, name, (m + 8 * world.size, k, n + 256), mode)
    except pkt.Unsupported as error:
        return str(error).splitlines()[0]


def timed(world: pkt.World, name: str, shape: tuple[int, int, int], mode: str | None) -> float:
    m, k, n = shape
    rows = m // world.size if name == "all_gather_matmul" else m
    a, b = (torch.randn(size, device=world.torch_device).bfloat16() for size in ((rows, k), (k, n)))
    torch.mm(a, b)
    world.synchronize()
    world.barrier()
    start = time.perf_counter()
    operators()[name].function(a, b, mode=mode, world=world)
    world.synchronize()
    return 1e3 * (time.perf_counter() - start)


def measured(ranks: int, folder: str, *args: Any) -> tuple[float, float] | str:
    """The slowest rank's times, in new processes that keep compiled kernels in `folder`."""
    workers = Workers(ranks, {"TRITON_CACHE_DIR": folder})
    try:
        opener = "pkt.runtime.bootstrap:open_job"
        times = workers.run(first, args, opener, 60.0, heap=2 << 30, multicast=False, node_size=None)
    finally:
        workers.close()
    return times[0] if isinstance(times[0], str) else (max(t[0] for t in times), max(t[1] for t in times))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=240.0, help="no case is begun after these")
    given = parser.parse_args()
    end, rows, left = time.time() + given.seconds, [], []
    tuned = [name for name, operator in operators().items() if operator.tuning]
    cases = list(itertools.product(MODES, tuned, SHAPES.items()))
    for mode, name, (label, shape) in steps(cases, "first"):
        case = f"{name}, {label}, {mode or 'default'}"
        if time.time() > end:
            left.append(case)
            continue
        with tempfile.TemporaryDirectory() as folder:
            cold, warm = (measured(given.ranks, folder, name, shape, mode) for _ in range(2))
        if isinstance(cold, str) or isinstance(warm, str):
            print(f"{case}: left out, {str(cold)[:120]}", flush=True)
            continue
        for (what, limit), ms in zip(LIMITS.items(), (cold[0], *warm)):
            print(f"{case}, {what}: {ms:.0f} ms", flush=True)
            rows.append(_harness.row(f"{case}, {what}", [ms], "ms", limit))
    _harness.write(f"first_{given.ranks}", rows, "first", ranks=given.ranks, not_begun=left)
    return 0


if __name__ == "__main__":
    sys.exit(main())
