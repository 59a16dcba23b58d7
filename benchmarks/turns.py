"""Time every operator of this checkout and of another one, in turns, on the same GPUs.

    python -m benchmarks.turns --other ../pkt-before --ranks 2

Each turn is a process group of its own that imports one of the two checkouts: the other, this one, the other, ... Cases
come from the declarations of this checkout: products that the ranks share, collectives of so many bytes, all with the
settings that the operator chooses. Inputs are random, and the same in every turn. A figure is the median over repeats
of the slowest rank: in a graph, and eagerly. Beside it stand the host cost of a call and how far the results differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton

import pkt.language as pl  # of the checkout that a turn is for

ROOT = Path(__file__).resolve().parents[1]
SIDES = (64, 512, 4096, 8192, 16384)
BYTES = (1 << 14, 1 << 20, 1 << 24, 1 << 28)
REPEATS, CALLS = 30, 50
FLUSH = 256 << 20


def cases(ranks: int) -> list[dict[str, Any]]:
    """One dict a case: operator, label, and the shape of each operand; JSON, so that any checkout can run it."""
    from pkt.kernels.declaration import Case
    from pkt.kernels.operator import operators
    from tests.conformance import inputs

    found = []
    for name, operator in operators().items():
        if operator.tuning is None:
            for nbytes in BYTES:
                shapes = {operand: [nbytes // 2] for operand in operator.tensors}
                if "out" in operator.names:
                    empties = {operand: [torch.empty(s, device="meta")] * ranks for operand, s in shapes.items()}
                    shapes["out"] = list(inputs.exact(operator, Case(), 0, empties).shape)
                found.append({"operator": name, "case": f"{nbytes >> 10} KiB", "shapes": shapes, "symmetric": True})
            continue
        for side in SIDES:
            whole = {"m": side, "n": max(side, 4096), "k": max(side, 4096)}
            sizes = {axis: n // (ranks if axis in operator.tuning.shared else 1) for axis, n in whole.items()}
            every = inputs.shapes_of(operator, Case(sizes=sizes), ranks)
            shapes = {n: list(shape) for n, shape in every.items() if not operator.tensors[n].optional}
            found.append({"operator": name, "case": f"{side} rows", "shapes": shapes, "symmetric": False})
    return found


# ----------------------------------------------------------------------------------------------- in either checkout
@triton.jit
def gate_kernel(counters, world):
    pl.world_barrier(counters, world)


def measured(world: Any, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """On a rank: milliseconds in a graph and eagerly, host microseconds, and the norm of the result, of each case."""
    import pkt

    rows = []
    flush = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")
    for one in wanted:
        with world.scratch():
            tensors: list[Any] = []
            for number, shape in enumerate(one["shapes"].values()):
                generator = torch.Generator("cuda").manual_seed(8 * world.rank + number)
                x = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
                tensors.append(pkt.empty(*shape, dtype=x.dtype).copy_(x) if one["symmetric"] else x)
            call = getattr(pkt, one["operator"])
            rows.append(timed(world, lambda c=call, t=tensors: c(*t, world=world), flush))
            world.synchronize()
            for x in tensors:
                if one["symmetric"]:
                    x.free()
    return rows


def timed(world: Any, run: Any, flush: torch.Tensor) -> dict[str, Any]:
    """One case."""
    result = run()
    norm = float(result.plain().double().norm() if hasattr(result, "plain") else result.double().norm())
    for _ in range(3):
        run()
    world.synchronize()
    world.barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    host = (time.perf_counter() - start) / CALLS
    world.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    row = {"norm": norm, "host_us": 1e6 * host}
    row["graph_ms"] = statistics.median(queued(world, graph.replay, flush, host))
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        world.synchronize()
        world.barrier()
        start = time.perf_counter()
        run()
        world.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    row["eager_ms"] = statistics.median(max(each) for each in zip(*world.all_gather_object(times)))
    del graph
    return {key: max(world.all_gather_object(value)) for key, value in row.items()}


def queued(world: Any, go: Any, flush: torch.Tensor, host: float) -> list[float]:
    """The slowest rank's milliseconds of each repeat, all queued behind a sleep, each behind a barrier of the GPUs."""
    import pkt
    from pkt.tune.timers import sleep

    counters = pkt.signals(2)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    gate_kernel[(1,)](counters, world.device, num_warps=1)
    world.synchronize()
    world.barrier()
    sleep((host + 1e-4) * REPEATS)
    for begin, end in events:
        flush.zero_()
        gate_kernel[(1,)](counters, world.device, num_warps=1)
        begin.record()
        go()
        end.record()
    world.synchronize()
    mine = [begin.elapsed_time(end) for begin, end in events]
    counters.free()
    return [max(each) for each in zip(*world.all_gather_object(mine))]


def work(path: Path) -> None:
    """One turn: the cases of a file, measured, written back."""
    import pkt

    job = json.loads(path.read_text())
    found = pkt.launch(measured, ranks=job["ranks"], device="cuda", args=(job["cases"],), heap="16GiB", multicast=False)
    path.write_text(json.dumps(found[0]))


# ------------------------------------------------------------------------------------------------------ the turns
def turn(checkout: Path, wanted: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """A turn in a process of its own, which imports `checkout`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps({"cases": wanted, "ranks": ranks}))
        environment = os.environ | {"PYTHONPATH": f"{checkout}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, str(Path(__file__).resolve()), "--work", str(path)]
        subprocess.run(command, check=True, env=environment, cwd=checkout)
        return json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="the other checkout")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3, help="of each checkout")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "turns.json")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        return work(given.work)
    from benchmarks._harness import commit, host
    from pkt.progress import steps  # which the other checkout may lack

    wanted = cases(given.ranks)
    found: dict[str, list[list[dict[str, Any]]]] = {"this": [], "other": []}
    order = given.turns * [("other", given.other.resolve()), ("this", ROOT)]
    for name, checkout in steps(order, "turns"):
        found[name].append(turn(checkout, wanted, given.ranks))
    rows = []
    for at, one in enumerate(wanted):
        row: dict[str, Any] = {"operator": one["operator"], "case": one["case"], "shapes": one["shapes"]}
        for name, turns in found.items():
            for figure in ("graph_ms", "eager_ms", "host_us"):
                row[f"{name}_{figure}"] = [turns_at[at][figure] for turns_at in turns]
        norms = [found[name][0][at]["norm"] for name in ("this", "other")]
        row["results_differ"] = abs(norms[0] / norms[1] - 1) if norms[1] else 0.0
        rows.append(row)
        best = {k: min(v) for k, v in row.items() if isinstance(v, list) and k != "shapes"}
        print(
            f"{one['operator']:24}{one['case']:>12}  graph {best['this_graph_ms']:.4f} / {best['other_graph_ms']:.4f}  "
            f"eager {best['this_eager_ms']:.4f} / {best['other_eager_ms']:.4f} ms  "
            f"host {best['this_host_us']:.1f} / {best['other_host_us']:.1f} us  differ {row['results_differ']:.1e}"
        )
    record = {
        "benchmark": "turns",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": " ".join(["python", "-m", "benchmarks.turns", *sys.argv[1:]]),
        "commit": commit(),
        "other": commit_of(given.other),
        "host": host(),
        "rows": rows,
    }
    given.out.write_text(json.dumps(record, indent=1) + "\n")


def commit_of(checkout: Path) -> str:
    """The commit that a file COMMIT beside a packed checkout names, or git."""
    if (checkout / "COMMIT").is_file():
        return (checkout / "COMMIT").read_text().strip()
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=False)
    return done.stdout.strip()[:12]


if __name__ == "__main__":
    main()
