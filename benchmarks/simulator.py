"""Measure the simulator's speed and memory: four ranks on this machine's cores.

    python -m benchmarks.simulator

| what | measured |
|---|---|
| fused GEMM + all-reduce (bf16, 128 x 128 tiles, the LCSC template), with and without the race detector | seconds |
| push all-gather, with and without the race detector | programs a second |
| small kernel, 4 programs on each rank | schedules a second, by one process and by one a core |
| the same programs on Triton's own interpreter: one rank, one order, no synchronisation | runs a second |
| all-reduce between two barriers that spin on compare-and-swap | seconds for 100 schedules |
| ring, and a lock that spins, on 8 and 16 ranks | seconds a schedule |
| all of them | largest resident memory |

A time is that of the whole run: making the world, filling the inputs, launching, and the detector's fences.
"""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from benchmarks import _harness
from pkt.kernels.all_gather import all_gather
from pkt.kernels.matmul_all_reduce import matmul_all_reduce
from pkt.progress import steps
from pkt.simulate.interpreter import interpreting
from pkt.simulate.run import execute

RANKS, SMS = 4, 8
REPEATS = 7


def gemm_all_reduce(world: pkt.World, size: int) -> None:
    k = size // world.size
    generator = torch.Generator().manual_seed(world.rank)
    a, b = torch.randn(size, k, generator=generator), torch.randn(k, size, generator=generator)
    matmul_all_reduce(a.bfloat16(), b.bfloat16(), num_comm_sms=2, tiles=(128, 128, 64))


def push_all_gather(world: pkt.World, programs: int, block: int = 1024) -> None:
    n = programs // world.size * block
    x, out = pkt.empty(n, dtype=torch.bfloat16), pkt.empty(world.size * n, dtype=torch.bfloat16)
    x.fill_(world.rank)
    all_gather(x, out, mode="push", block=block)


@triton.jit
def pass_on(x_ptr, y_ptr, flags_ptr, world, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    peer = (world.rank + 1) % world.size
    pl.store(y_ptr + offs, tl.load(x_ptr + offs), peer, world)
    pl.signal(flags_ptr + pid, peer, world)
    pl.wait(flags_ptr + pid, 1, world)
    tl.store(x_ptr + offs, tl.load(y_ptr + offs))


def small(world: pkt.World, programs: int = 4, block: int = 64) -> None:
    x, y = pkt.empty(programs * block), pkt.empty(programs * block)
    flags = pkt.signals(programs)
    x.fill_(world.rank)
    pass_on[(programs,)](x, y, flags, world.device, block)
    assert x[0].item() == (world.rank - 1) % world.size


@triton.jit
def meet(flags_ptr, world):
    """A barrier of the programs with this index on all ranks, by compare-and-swap alone. flags_ptr: one word a rank."""
    for peer in tl.static_range(world.size):
        mine = pl.peer(flags_ptr + world.rank, peer, world)
        while tl.atomic_cas(mine, 0, 1, sem="release", scope="sys") != 0:
            pass
    for peer in tl.static_range(world.size):
        while tl.atomic_cas(flags_ptr + peer, 1, 0, sem="acquire", scope="sys") != 1:
            pass


@triton.jit
def spin_all_reduce(x_ptr, y_ptr, flags_ptr, world, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    meet(flags_ptr + pid * world.size, world)
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(world.size):
        total += pl.load(x_ptr + offs, peer, world)
    meet(flags_ptr + pid * world.size, world)
    tl.store(y_ptr + offs, total)
    tl.store(x_ptr + offs, 0.0)


def spinning(world: pkt.World, programs: int = 2, block: int = 64) -> None:
    x, y = pkt.empty(programs * block), torch.empty(programs * block)
    flags = pkt.zeros(programs * world.size, dtype=torch.int32)
    x.fill_(world.rank + 1)
    spin_all_reduce[(programs,)](x, y, flags, world.device, block)
    assert (y == world.size * (world.size + 1) / 2).all()


def ring(world: pkt.World) -> None:
    small(world, programs=1)


@triton.jit
def count_locked(lock_ptr, count_ptr, world):
    """Add 1 to rank 0's count under rank 0's lock."""
    lock, count = pl.peer(lock_ptr, 0, world), pl.peer(count_ptr, 0, world)
    while tl.atomic_cas(lock, 0, 1, sem="acquire", scope="sys") != 0:
        pass
    tl.store(count, tl.load(count) + 1)
    pl.store_release(lock_ptr, 0, 0, world)


def locked(world: pkt.World) -> None:
    lock, count = pkt.zeros(1, dtype=torch.int32), pkt.zeros(1, dtype=torch.int32)
    count_locked[(1,)](lock, count, world.device)
    world.barrier()
    if world.rank == 0:
        assert count.item() == world.size


def interpreted() -> float:
    """Runs a second of `pass_on`'s loads and stores by Triton's interpreter: RANKS x 4 programs in one grid, in a
    process of its own, because the interpreter is chosen before Triton is imported."""
    program = """
import time, torch, triton, triton.language as tl
@triton.jit
def pass_on(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs))
    tl.store(x_ptr + offs, tl.load(y_ptr + offs))
x, y = torch.ones(PROGRAMS * 64), torch.empty(PROGRAMS * 64)
taken = []
for _ in range(100):
    start = time.perf_counter()
    pass_on[(PROGRAMS,)](x, y, 64)
    taken.append(time.perf_counter() - start)
print(100 / sum(taken))
"""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:  # the interpreter reads a kernel's source from a file
        file.write(program.replace("PROGRAMS", str(RANKS * 4)))
        file.flush()
        command = [sys.executable, file.name]
        done = subprocess.run(
            command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True
        )
    return float(done.stdout)


def explored(fn: Any, seeds: int, processes: int | None = None, ranks: int = RANKS) -> pkt.Report:
    """The report of a program without findings."""
    report = pkt.simulate(fn, ranks, seeds, sms=SMS, processes=processes, progress=False)
    return report.check()


def timed(fn: Any, *args: Any, **options: Any) -> list[float]:
    def once() -> None:
        outcome = execute(
            fn, RANKS, args, sms=options.get("sms", SMS), races=options.get("races", True), seed=next(seeds)
        )
        assert outcome.failure is None, outcome.failure

    seeds = itertools.count(options.get("seed", 0), options.get("step", 0))
    return _harness.seconds(once, options.get("repeats", REPEATS), warmup=2)


def main() -> None:
    rows = []
    with interpreting():
        for size, limit in steps([(512, 0.5), (1024, 3.0)], "GEMM + all-reduce"):
            plain, checked = (timed(gemm_all_reduce, size, races=races) for races in (False, True))
            rows += [
                _harness.row(f"GEMM + all-reduce {size}^3, no race detector", plain, "s"),
                _harness.row(f"GEMM + all-reduce {size}^3, race detector on", checked, "s", limit),
                _harness.row(
                    f"race detector, {size}^3", [c / p for c, p in zip(sorted(checked), sorted(plain))], "times", 1.4
                ),
            ]
        programs = 80
        plain, checked = (
            timed(push_all_gather, programs, sms=programs, races=races, repeats=21) for races in (False, True)
        )
        what = f"push all-gather, {programs} programs"
        rows += [
            _harness.row(f"{what}, no race detector", [programs / t for t in plain], "programs/s", 1000, True),
            _harness.row(f"{what}, race detector on", [programs / t for t in checked], "programs/s"),
            _harness.row(
                f"race detector, {what}", [c / p for c, p in zip(sorted(checked), sorted(plain))], "times", 1.4
            ),
        ]
    cores = len(os.sched_getaffinity(0))
    for processes in sorted({1, cores}):
        reports = [explored(small, 1000, processes) for _ in range(3)]
        rates, what = [r.schedules / r.seconds for r in reports], f"{processes} process{'es' * (processes > 1)}"
        rows.append(_harness.row(f"small kernel, 4 x 4 programs, {what}", rates, "schedules/s", 100, True))
    peers = [interpreted() for _ in range(3)]
    rows.append(_harness.row("its loads and stores, Triton's interpreter, 16 programs", peers, "runs/s"))
    taken = [explored(spinning, 100).seconds for _ in range(3)]
    rows.append(_harness.row("all-reduce between CAS barriers, 100 schedules", taken, "s", 10.0))
    for ranks in (8, 16):
        for fn in (ring, locked):
            taken = [(report := explored(fn, 20, 1, ranks)).seconds / report.schedules for _ in range(3)]
            rows.append(_harness.row(f"{fn.__name__}, {ranks} ranks", taken, "s/schedule", 1.0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rows.append(_harness.row("largest resident memory", [peak], "GiB", 1.0))
    _harness.write("simulator", rows, ranks=RANKS, sms=SMS)


if __name__ == "__main__":
    _harness.no_options(__doc__)
    main()
