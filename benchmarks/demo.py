"""`make demo`: run a fused GEMM + all-reduce on four simulated ranks, check it, search it for races, and break it.

1. M = N = K = 512 in bf16. Every rank multiplies its share of K while other programs of the same kernel reduce finished
   tiles. Every rank compares the result with an fp64 reference.
2. 200 random schedules of a smaller product, with the race detector on. No schedule may have a finding.
3. The same kernel with one wait removed. The simulator finds the error and says where it is.

The demo prints a table of the results and draws the timeline of the first run.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import pkt
from pkt.kernels.matmul_all_reduce import matmul_all_reduce, reference
from pkt.simulate.faults import Faults, Mutant
from pkt.simulate.run import Outcome, execute
from pkt.wording import columns, count_text

RANKS, SMS, COMM_SMS = 4, 8, 2
SIZE, TILE = 512, 128  # of the run that is timed and drawn
SMALL, SMALL_TILE = 128, 64  # of the runs that are explored
SCHEDULES = 200
EPSILON = 2.0**-8  # bf16's greatest relative rounding error


def shards(rank: int, ranks: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's parts of A, (size, size / ranks), and B, (size / ranks, size). Every run has the same matrices."""
    generator = torch.Generator().manual_seed(2026)
    a, b = (torch.randn(size, size, generator=generator).bfloat16() for _ in "ab")
    k = size // ranks
    return a[:, rank * k : (rank + 1) * k].contiguous(), b[rank * k : (rank + 1) * k].contiguous()


def fused(world: pkt.World, size: int, tile: int) -> float:
    """The greatest error of one fused product, divided by the bound that bf16 and fp32 accumulation allow."""
    a, b = shards(world.rank, world.size, size)
    out = matmul_all_reduce(a, b, num_comm_sms=COMM_SMS, tiles=(tile, tile, tile // 2))
    operands = [shards(r, world.size, size) for r in range(world.size)]
    exact = reference(world.rank, *zip(*operands))
    # Each rank rounds its product to bf16 once, and the sum is rounded once.
    products = sum((x.double() @ y.double()).abs() for x, y in operands)
    bound = EPSILON * (products + exact.abs()) * 1.01
    worst = ((out.double() - exact).abs() / bound).max().item()
    assert worst <= 1, f"rank {world.rank}: error {worst:.2f} times the bound"
    return worst


def run(size: int, tile: int, **options: Any) -> Outcome:
    return execute(fused, RANKS, (size, tile), sms=SMS, **options)


def main() -> int:
    parser = argparse.ArgumentParser(
        "pkt demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/demo-timeline.png"), help="where the picture goes")
    parser.add_argument("--schedules", type=int, default=SCHEDULES, help="how many to explore")
    arguments = parser.parse_args()
    console = Console(width=columns(120))

    table = Table(title=f"Fused GEMM + all-reduce on {RANKS} simulated ranks, bf16", title_justify="left")
    for column in ("step", "result", "seconds"):
        table.add_column(column, justify="right" if column == "seconds" else "left")

    with console.status(f"{SIZE} x {SIZE} x {SIZE}, race detector on ..."):
        start = time.perf_counter()
        outcome = run(SIZE, TILE, trace=True)
        seconds = time.perf_counter() - start
    if outcome.failure is not None or outcome.results is None:
        console.print(f"the product is wrong: {outcome.failure}")
        return 1
    worst = max(outcome.results)
    table.add_row(
        f"{SIZE} x {SIZE} x {SIZE} against fp64", f"correct; greatest error {worst:.2f} of the bound", f"{seconds:.1f}"
    )

    start = time.perf_counter()
    seeds = range(1, arguments.schedules + 1)
    report = pkt.simulate(fused, RANKS, seeds, (SMALL, SMALL_TILE), sms=SMS)
    found = count_text(len(report.findings), "finding") if report.findings else "no race, no deadlock, no wrong result"
    table.add_row(count_text(report.schedules, "random schedule"), found, f"{time.perf_counter() - start:.1f}")

    start = time.perf_counter()
    mutant = one_wait_removed(run(SMALL, SMALL_TILE).machine.census.mutants())
    caught = next(
        (f for f in (run(SMALL, SMALL_TILE, seed=s, faults=Faults(mutant)).failure for s in range(20)) if f), None
    )
    table.add_row(str(mutant), "found" if caught else "NOT FOUND", f"{time.perf_counter() - start:.1f}")

    console.print(table)
    console.print(outcome.timeline().table())
    if caught is not None:
        console.print(f"\n[bold]The simulator's finding without that wait[/bold]\n{type(caught).__name__}: {caught}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    title = f"GEMM + all-reduce, {SIZE} x {SIZE} x {SIZE} bf16, {COMM_SMS} of {SMS} programs communicate"
    outcome.timeline(title).to_png(arguments.out)
    console.print(f"\ntimeline: {arguments.out}")
    return 0 if report.ok and caught is not None else 1


def one_wait_removed(mutants: list[Mutant]) -> Mutant:
    """The mutant without the communicators' wait for finished tiles."""
    return next(m for m in mutants if m.change == "remove" and m.site.call == "wait")


if __name__ == "__main__":
    sys.exit(main())
