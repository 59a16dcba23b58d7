"""Measure the simulator's speed and memory: four ranks on this machine's cores.

    python -m benchmarks.simulator

It times a fused GEMM + all-reduce (bf16, 128 x 128 tiles, the LCSC template) with and without the race detector. It
counts programs a second of a push all-gather and schedules a second of a small kernel, and reports the largest resident
memory. A time is that of the whole run: making the world, filling the inputs, launching, and the detector's fences.
"""

from __future__ import annotations

import itertools
import resource
from typing import Any

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from benchmarks import _harness
from pkt.kernels.all_gather import all_gather
from pkt.kernels.matmul_all_reduce import matmul_all_reduce
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
        for size, limit in _harness.progress([(512, 0.5), (1024, 3.0)], "GEMM + all-reduce"):
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
        taken = timed(small, step=1, repeats=200)
        rows.append(_harness.row("small kernel, 4 x 4 programs", [1 / t for t in taken], "schedules/s", 100, True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rows.append(_harness.row("largest resident memory", [peak], "GiB", 1.0))
    _harness.write("simulator", rows, ranks=RANKS, sms=SMS)


if __name__ == "__main__":
    main()
