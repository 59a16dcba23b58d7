"""Products over two nodes beside the same products in one node: the GPUs of one host, half of them for each node.

    torchrun --nproc-per-node 2 -m benchmarks.nodes      less than a minute; benchmarks/results/nodes.json
    torchrun --nproc-per-node 4 -m benchmarks.nodes      two nodes of two GPUs; benchmarks/results/nodes_4.json

A product of N x N x N in bf16 is shared by the ranks. The form over nodes sends to the other node through NVSHMEM's
device calls alone. On two GPUs its time may be LIMIT times that of the form that pkt takes in one node. Both are
captured in CUDA graphs and take turns, so they run at one clock.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

import pkt
from benchmarks._case import captured, normal
from benchmarks._check import BOUND
from benchmarks._harness import Row, no_options, row, write
from benchmarks._timing import PASSES, Settings, summary, timed
from pkt.progress import steps
from pkt.runtime import bootstrap
from pkt.runtime.memory.heap import heap_bytes
from pkt.tune.distance import distance

N, LIMIT = 8192, 1.25
HEAP, SECONDS = "6GiB", 30.0  # of each world; seconds that a rank may compile while the other one waits
COMMUNICATORS = (16, 24, 48)  # programs that gather in all_gather_matmul, beside the default
Runs = dict[str, Callable[[], torch.Tensor]]


def all_gather_matmul(near: pkt.World, far: pkt.World, n: int) -> tuple[Runs, torch.Tensor]:
    """Both forms, and the exact result on this rank."""
    size, rank, device = near.size, near.rank, near.torch_device
    b = normal((n, n // size), 100 + rank, device)
    shards = [normal((n // size, n), r, device) for r in range(size)]
    return _runs(pkt.all_gather_matmul, near, far, shards[rank], b), torch.cat(shards).float() @ b.float()


def matmul_reduce_scatter(near: pkt.World, far: pkt.World, n: int) -> tuple[Runs, torch.Tensor]:
    """Both forms, and the exact result on this rank."""
    size, rank, device = near.size, near.rank, near.torch_device
    every = [(normal((n, n // size), r, device), normal((n // size, n), 100 + r, device)) for r in range(size)]
    mine = range(n // size * rank, n // size * (rank + 1))
    exact = sum(a[mine.start : mine.stop].float() @ b.float() for a, b in every)
    assert isinstance(exact, torch.Tensor)
    return _runs(pkt.matmul_reduce_scatter, near, far, *every[rank]), exact


def _runs(operator: Any, near: pkt.World, far: pkt.World, a: torch.Tensor, b: torch.Tensor) -> Runs:
    counts = COMMUNICATORS if operator is pkt.all_gather_matmul else ()
    over = {f"two nodes, {count} programs gather": {"num_comm_sms": count} for count in counts}
    found: Runs = {"one node": lambda: operator(a, b, world=near)}
    for name, given in {"two nodes": dict[str, int](), **over}.items():
        found[name] = functools.partial(operator, a, b, mode="nodes", world=far, **given)
    return found


OPERATORS = {"all_gather_matmul": all_gather_matmul, "matmul_reduce_scatter": matmul_reduce_scatter}


def checked(world: pkt.World, name: str, run: Callable[[], torch.Tensor], exact: torch.Tensor) -> None:
    """Raise AssertionError on every rank unless three calls give the exact result on all."""
    for _ in range(3):
        worst = max(world.all_gather_object(distance(run(), exact)))
        assert worst <= BOUND, f"{name}: error {worst:.2g}, wanted at most {BOUND:g}"


def measure(near: pkt.World, far: pkt.World, operator: str) -> list[Row]:
    """The rows of an operator. A form that fails leaves a line and no row."""
    runs, exact = OPERATORS[operator](near, far, N)
    ready, settings = {}, Settings()
    for name, run in steps(runs.items(), operator):
        again = captured(run)
        checked(near, f"{operator}, {name}", again, exact)
        ready[name] = again
        if near.rank == 0:
            print(f"{operator}, {name}: right", flush=True)
    passes: dict[str, list[dict[str, Any]]] = {name: [] for name in ready}
    for _ in range(PASSES):
        for name, again in ready.items():
            passes[name].append(timed(near, again, settings))
    times = {name: summary(every) for name, every in passes.items()}
    label = f"{operator}, N = {N}"
    rows = [Row(f"{label}: {n}", t["ms"], "ms", t["low"], t["high"], t["runs"]) for n, t in times.items()]
    over, one = ([statistics.median(a["ms"]) for a in passes[name]] for name in ("two nodes", "one node"))
    each = [a / b for a, b in zip(over, one)]
    return [*rows, row(f"{label}: two nodes / one node", each, "times", LIMIT if near.size == 2 else None)]


def opened(node_size: int) -> pkt.World:
    where, device = bootstrap.place(None, SECONDS), bootstrap.own_device()
    return bootstrap.open_world(where, device, heap_bytes(HEAP), SECONDS, multicast=False, node_size=node_size)


def main() -> int:
    os.environ.pop("PKT_NODE_SIZE", None)
    size, rows = int(os.environ.get("WORLD_SIZE", "1")), []
    if size < 2 or size % 2:
        raise pkt.errors.Unsupported.here("benchmarks.nodes", f"found {size} ranks", "give torchrun an even number")
    with opened(size) as near, opened(size // 2) as far:
        for operator in OPERATORS:
            faulthandler.dump_traceback_later(60, exit=True)
            rows += measure(near, far, operator)
            faulthandler.cancel_dump_traceback_later()
            if near.rank == 0:
                print("\n".join(f"{r.case}: {r.value:.4g} {r.unit}" for r in rows), flush=True)
        near.barrier()
        if near.rank == 0:
            write("nodes" if size == 2 else f"nodes_{size}", rows, "nodes", gpus=near.backend.gpu)
    return 0


if __name__ == "__main__":
    no_options(__doc__)
    sys.exit(main())
