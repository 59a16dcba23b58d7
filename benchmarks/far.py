"""Check and time calls to far ranks over NVSHMEM: two GPUs of one host, each a node of its own.

    pip install 'pkt-triton[nvshmem]'
    torchrun --nproc-per-node 2 -m benchmarks.far              check, then time: less than a minute; results/far.json
    torchrun --nproc-per-node 2 -m benchmarks.far --check      check only
    python -m benchmarks.far --simulate                        the same kernels and checks in the simulator

Nothing here accesses a peer's memory but NVSHMEM's own functions. A wait ends after 20 s. It has run on two GPUs of one
host, and never over a network.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from benchmarks._harness import Row, row, write
from pkt.progress import steps
from pkt.tune.timers import sleep

PROGRAMS, ELEMENTS = 4, 3000  # of a check; elements of a put, which are no multiple of 16 bytes a thread
BIG, HEAP, SECONDS = 64 << 20, "256MiB", 20
LAUNCH = 1e-3  # seconds that the host may take to launch a kernel
BLOCK = tl.constexpr(1024)
WAYS = ("put_signal", "fence", "quiet")


class Ground(NamedTuple):
    """What a check needs of a world."""

    rank: int
    worlds: tuple[Any, Any, Any]  # the kernels' argument: of all ranks, of this node, of the rail
    empty: Callable[[int], Any]  # (elements): symmetric int32
    signals: Callable[[int, torch.dtype], Any]
    device: torch.device
    meet: Callable[[], None]  # return when both ranks' kernels are done


def ground(world: pkt.World) -> Ground:
    """Of a world of nodes of one rank."""
    empty = functools.partial(pkt.empty, dtype=torch.int32, name="data", world=world)
    return Ground(
        world.rank,
        (world.device, world.on_node.device, world.rail.device),
        empty,
        lambda count, dtype: pkt.signals(count, dtype=dtype, name="counters", world=world),
        world.torch_device,
        world.barrier,
    )


# ------------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def value(rank, turn, i):
    """What rank `rank` sends in turn `turn`."""
    return rank * 1000003 + turn * 7919 + i


@triton.jit(do_not_specialize=["before", "turns"])
def exchange_kernel(
    dst,  # int32 (programs, n) on both ranks
    src,  # int32 (programs, n) on both ranks
    ready,  # counters (programs,) on both ranks: the data is here
    done,  # counters (programs,) on both ranks: it was read there
    wrong,  # int32 (1,): elements that were not what was sent
    n,
    before,  # turns of earlier launches
    turns,
    world,
    HOW: tl.constexpr,
):
    """In each turn both ranks send a run and compare what they get."""
    pid, me = tl.program_id(0), tl.cast(world.rank, tl.int32)
    other = 1 - me
    for turn in range(before + 1, before + turns + 1):
        for start in range(0, n, BLOCK):
            i = start + tl.arange(0, BLOCK)
            tl.store(src + pid * n + i, value(me, turn, i), mask=i < n)
        tl.debug_barrier()
        if HOW == "put_signal":
            pl.put_signal(ready + pid, other, world, dst=dst + pid * n, src=src + pid * n, nbytes=n * 4)
        else:
            pl.put(dst=dst + pid * n, src=src + pid * n, nbytes=n * 4, peer=other, world=world)
            if HOW == "fence":
                pl.fence(world=world)
            else:
                pl.quiet(world)
            pl.signal(ready + pid, other, world)
        pl.wait(ready + pid, turn, world)
        for start in range(0, n, BLOCK):
            i = start + tl.arange(0, BLOCK)
            found = tl.load(dst + pid * n + i, mask=i < n, other=0)
            tl.atomic_add(wrong, tl.sum(((found != value(other, turn, i)) & (i < n)).to(tl.int32), 0), sem="relaxed")
        pl.signal(done + pid, other, world)  # the other rank may write src again, and send to dst
        pl.wait(done + pid, turn, world)


@triton.jit(do_not_specialize=["turns"])
def barrier_kernel(dst, src, bar, wrong, turns, world):
    """A barrier completes a put of 4 bytes that has no signal of its own."""
    pid, me = tl.program_id(0), tl.cast(world.rank, tl.int32)
    for turn in range(turns):
        tl.store(src + pid, value(me, turn, pid))
        tl.debug_barrier()
        pl.put(dst=dst + pid, src=src + pid, nbytes=4, peer=1 - me, world=world)
        pl.barrier(bar + pid, world)
        tl.atomic_add(wrong, (tl.load(dst + pid) != value(1 - me, turn, pid)).to(tl.int32), sem="relaxed")
        pl.barrier(bar + pid, world)  # before overwrite


@triton.jit(do_not_specialize=["before", "turns"])
def ping_kernel(dst, src, ready, before, turns, world):
    """8 bytes and a signal go to and fro."""
    me = tl.cast(world.rank, tl.int32)
    for turn in range(before + 1, before + turns + 1):
        if me == 1:
            pl.wait(ready, turn, world)
        pl.put_signal(ready, 1 - me, world, dst=dst, src=src, nbytes=8)
        if me == 0:
            pl.wait(ready, turn, world)


@triton.jit
def send_kernel(dst, src, n, world):
    """Send n elements, a part by each program, and wait until they have arrived."""
    part = n // tl.num_programs(0)
    at = tl.cast(part, tl.int64) * tl.program_id(0)
    pl.put(dst=dst + at, src=src + at, nbytes=part * 4, peer=1 - tl.cast(world.rank, tl.int32), world=world)
    pl.quiet(world)


# --------------------------------------------------------------------------------------------------------------- check
def check(on: Ground, turns: int, n: int = ELEMENTS, programs: int = PROGRAMS, grids: bool = True) -> list[str]:
    """Raise AssertionError unless every call does what it promises; returns what was checked. grids: launch
    cooperatively, as GPUs need where programs wait."""
    world, options = on.worlds[0], {"launch_cooperative_grid": True} if grids else {}
    dst, src = on.empty(programs * n), on.empty(programs * n)
    wrong = torch.zeros(1, dtype=torch.int32, device=on.device)
    passed = []

    def verify(what: str) -> None:
        found = int(wrong.item())
        assert found == 0, f"rank {on.rank}: {what}: {found} elements differ from what was sent"
        passed.append(what)

    for dtype in (torch.int32, torch.int64):
        ready, done = on.signals(programs, dtype), on.signals(programs, dtype)
        on.meet()
        for before, how in enumerate(WAYS):
            for count in (0, turns):  # no turn: compile, which may take one rank longer than a wait of the other lasts
                args = dst, src, ready, done, wrong, n, before * turns, count, world, how
                exchange_kernel[(programs,)](*args, **options)
                on.meet()
            verify(f"{how} with counters of {dtype.itemsize * 8} bits")
    bar = on.signals(programs, torch.int32)
    on.meet()
    for count in (0, turns):
        barrier_kernel[(programs,)](dst, src, bar, wrong, count, world, **options)
        on.meet()
    verify("barrier")
    _check_all_gather(on, turns, n, programs, options)
    passed.append("all_gather over nodes")
    return passed


def _check_all_gather(on: Ground, turns: int, n: int, programs: int, options: dict[str, Any]) -> None:
    """examples/all_gather_nodes.py, whose kernel takes three worlds."""
    from examples.all_gather_nodes import all_gather_kernel

    out, x = on.empty(2 * n), torch.empty(n, dtype=torch.int32, device=on.device)
    far, near, bar = (on.signals(count * programs, torch.int32) for count in (2, 1, 1))
    args = x, out, far, near, bar, n, *on.worlds, 1024
    if options:
        all_gather_kernel.warmup(*args, grid=(programs,), **options)  # compiled on both ranks before one waits
    for turn in range(turns):
        x.copy_(torch.arange(n, dtype=torch.int32) * (on.rank + 1) + turn)
        on.meet()
        all_gather_kernel[(programs,)](*args, **options)
        on.meet()
        for rank in range(2):
            wanted = torch.arange(n, dtype=torch.int32) * (rank + 1) + turn
            found = torch.as_tensor(out[rank * n : (rank + 1) * n]).cpu()
            assert torch.equal(found, wanted), f"rank {on.rank}: all_gather, launch {turn}: rank {rank}'s part"


def simulated(world: pkt.World, turns: int = 2, n: int = 40, programs: int = 2) -> list[str]:
    """`check` on a simulated rank."""
    return check(ground(world), turns, n, programs, grids=False)


# ------------------------------------------------------------------------------------------------------------- on GPUs
def timed(on: Ground, run: Callable[[], Any], repeats: int = 20) -> list[float]:
    """Seconds of `run()` on this GPU, in each repeat but the first three, which may compile."""
    found = []
    for _ in range(repeats + 3):
        on.meet()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        sleep(LAUNCH)  # the host launches meanwhile
        begin.record()
        run()
        end.record()
        on.meet()
        found.append(begin.elapsed_time(end) / 1e3)
    return found[3:]


def measure(on: Ground, turns: int = 1000) -> list[Row]:
    """One-way time of put_signal, and GB/s of 64 MB from some numbers of programs."""
    world = on.worlds[0]
    dst, src, ready = on.empty(BIG // 4), on.empty(BIG // 4), on.signals(1, torch.int32)
    launches = iter(range(1 << 20))
    ping = lambda: ping_kernel[(1,)](dst, src, ready, next(launches) * turns, turns, world)  # noqa: E731
    ping_kernel[(1,)](dst, src, ready, 0, 0, world)  # compiled on both ranks before one waits
    on.meet()
    one_way = [seconds / (2 * turns) * 1e6 for seconds in timed(on, ping)]
    rows = [row("put_signal of 8 bytes, one way", one_way, "us", 2.5)]
    for programs in steps((1, 8, 16, 64), "64 MB from programs"):

        def send(programs: int = programs) -> None:
            if on.rank == 0:
                send_kernel[(programs,)](dst, src, BIG // 4, world, num_warps=16)

        rates = [BIG / seconds / 1e9 for seconds in timed(on, send)]
        limit = 260.0 if programs == 16 else None
        rows.append(row(f"64 MB from {programs} program{'s'[: programs > 1]}", rates, "GB/s", limit, at_least=True))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="time nothing")
    parser.add_argument("--simulate", action="store_true", help="check in the simulator")
    parser.add_argument("--turns", type=int, default=2000, help="of each check")
    given = parser.parse_args()
    if given.simulate:
        from benchmarks.far import simulated as importable

        print("\n".join(pkt.launch(importable, ranks=2, node_size=1, device="cpu")[0]))
        return 0
    os.environ["PKT_NODE_SIZE"] = "1"
    with pkt.init(HEAP, timeout=SECONDS) as world:
        if world.size != 2:
            raise pkt.Unsupported.here("benchmarks.far", f"found {world.size} ranks", "give torchrun 2")
        begun, on = time.perf_counter(), ground(world)
        passed = check(on, given.turns)
        if world.rank == 0:
            print("\n".join(f"right: {what}" for what in passed), f"{time.perf_counter() - begun:.0f} s", sep="\n")
        rows = [] if given.check else measure(on)
        if world.rank == 0 and rows:
            write("far", rows, gpus=world.backend.gpu)
    return 0


if __name__ == "__main__":
    sys.exit(main())
