"""The part of benchmarks.link that runs on each rank: check every mechanism and latency with random data, then time it.

A bandwidth is that of one direction, out of or into one GPU, while all ranks do the same. Two events of the GPU time a
repeat. They are queued behind a delay and a barrier of the ranks, so neither the host's launches nor a late rank count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

import pkt
from benchmarks import link_gluon
from benchmarks import link_kernels as kernels
from pkt.kernels.all_reduce import all_reduce, one_shot_kernel
from pkt.progress import steps

MIB = 1 << 20
ITEM = 2  # bytes of a bf16
COLS = 128  # of a tile
DELAY = 6_000_000  # clock ticks, 3 ms, in which the host queues a measurement


@dataclass(frozen=True)
class Plan:
    """Sizes and numbers of repeats. Bytes are those of one transfer to one peer."""

    nbytes: int = 256 * MIB
    most: int = 1024 * MIB  # the largest single copy; also the bytes that all peers together send to one
    programs: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 64, 132)
    copies: int = 256  # of one size in a row
    repeats: int = 20
    warmup: int = 5
    rounds: int = 2000  # signals or barriers in a launch
    nodes: int = 50  # barriers in a graph
    steps: int = 4000  # dependent accesses in a launch
    lines: int = 1 << 19  # of 128 bytes: more than the caches hold
    launches: int = 200

    @classmethod
    def quick(cls) -> Plan:
        """A plan that runs every kernel once, with the constants it is timed with."""
        return cls(128 << 10, 512 << 10, (1, 3), 4, 2, 1, 3, 2, 10, 64, 5)

    @classmethod
    def simulated(cls) -> Plan:
        """A quick plan with fewer bytes."""
        return cls(64 << 10, 256 << 10, (3,), 2, 1, 0, 2, 2, 10, 16, 2)


@dataclass(frozen=True)
class Record:
    """One figure of one rank: microseconds of each repeat, for `nbytes` (bandwidth) or `count` accesses (latency)."""

    group: str
    series: str
    x: float
    us: list[float]
    nbytes: int = 0
    count: int = 1


class Bench:
    """The buffers of one rank, its clock, and its records."""

    def __init__(self, world: pkt.World, plan: Plan) -> None:
        self.world, self.plan = world, plan
        self.gpu = world.torch_device.type == "cuda"
        self.records: list[Record] = []
        n = plan.most // ITEM
        self.src = pkt.empty(n, dtype=torch.bfloat16, name="src")
        self.dst = pkt.empty(n, dtype=torch.bfloat16, name="dst")
        self.src.copy_(self.values(world.rank))
        self.before, self.next = self.values(world.rank - 1), self.values(world.rank + 1)
        self.bar = pkt.signals(2 + max(world.num_sms, 1), name="bar")

    def values(self, rank: int) -> torch.Tensor:
        """The random normal numbers that `rank` sends."""
        generator = torch.Generator(device=self.world.torch_device).manual_seed(1000 + rank % self.world.size)
        shape, device = (self.plan.most // ITEM,), self.world.torch_device
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device)

    # -- timing
    def clock(self, op: Callable[[], Any], delay: int = DELAY) -> list[float]:
        """Microseconds of each repeat of `op` on this rank; [] without a GPU."""
        plan = self.plan
        if not self.gpu:
            return []
        for _ in range(plan.warmup):
            op()
        self.world.barrier()
        torch.cuda._sleep(delay)
        kernels.barriers_kernel[(1,)](self.bar, 1, self.world.device, "world_barrier", num_warps=1)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(plan.repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            op()
            mark.record()
        self.world.synchronize()
        return [1e3 * a.elapsed_time(b) for a, b in pairwise(marks)]

    def captured(self, op: Callable[[], Any], times: int = 1) -> Callable[[], Any]:
        """`op`, `times` in a row, as one CUDA graph; without a GPU, as plain calls."""
        if not self.gpu:
            return lambda: [op() for _ in range(times)]
        op()  # compile it
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                op()
        return graph.replay

    # -- bandwidth
    def transfer(
        self, group: str, series: str, x: float, n: int, op: Callable[[], Any], arrives: str = "before"
    ) -> None:
        """Check the data that `op` brings into dst, then time it.

        n: elements from one rank to another. arrives: whose data arrive: "before" and "next" (of the rank before or
        after), "all" (a row of every other rank), or "sum" (added to zeros).
        """
        world, whole = self.world, n * (self.world.size if arrives == "all" else 1)
        self.dst[:whole].fill_(0.0 if arrives == "sum" else torch.nan)
        world.barrier()
        op()
        world.synchronize()
        world.barrier()
        self.verify(n, arrives, f"{series} at {x}")
        world.barrier()
        us = self.clock(op)
        world.barrier()
        if arrives != "sum":  # each repeat has added to the sum
            self.verify(n, arrives, f"{series} at {x}, timed")
        self.records.append(Record(group, series, x, us, n * ITEM * (world.size - 1 if arrives == "all" else 1)))

    def verify(self, n: int, arrives: str, what: str) -> None:
        """Raise AssertionError unless dst holds the data that were sent."""
        rank, size, found = self.world.rank, self.world.size, self.dst.plain()
        rows = [(rank, self.next if arrives == "next" else self.before)]
        if arrives == "all":
            rows = [(r, self.values(r)) for r in range(size) if r != rank]
        for r, sent in rows:
            at = r * n if arrives == "all" else 0
            if not torch.equal(found[at : at + n], sent[:n]):
                wrong = int((found[at : at + n] != sent[:n]).sum())
                raise AssertionError(f"rank {rank}: {what}: {wrong} of {n} elements differ from what was sent")

    def registers(self, n: int, programs: int, push: bool, block: int, warps: int) -> Callable[[], Any]:
        def op() -> None:
            kernels.register_kernel[(programs,)](
                self.dst, self.src, n, self.world.device, 1, push, block, num_warps=warps
            )

        return op

    def tma(self, n: int, programs: int, mode: str, rows: int, stages: int) -> Callable[[], Any]:
        def op() -> None:
            kernels.tma_kernel[(programs,)](
                self.dst, self.src, n, self.world.device, 1, mode, rows, COLS, stages, num_warps=4
            )

        return op

    def copy_engine(self, n: int, times: int, push: bool) -> Callable[[], Any]:
        """`times` copies of n elements each, one after another."""
        other = (self.world.rank + 1) % self.world.size
        there = (self.dst if push else self.src).peer(other)
        source, target = (self.src.plain(), there) if push else (there, self.dst.plain())
        pairs = [(target[i * n : (i + 1) * n], source[i * n : (i + 1) * n]) for i in range(times)]

        def op() -> None:
            for to, of in pairs:
                to.copy_(of)

        return self.captured(op)

    def by_programs(self) -> None:
        """The paper's figure 3: bandwidth of each mechanism by number of SMs, to one peer."""
        n = self.plan.nbytes // ITEM
        group = "one peer, by programs"
        for p in self.plan.programs:
            for warps, block in ((8, 8192), (16, 16384)):
                op = self.registers(n, p, True, block, warps)
                self.transfer(group, f"register store, {warps} warps, {block * ITEM >> 10} KB", p, n, op)
            op = self.registers(n, p, False, 16384, 16)
            self.transfer(group, "register load, 16 warps, 32 KB", p, n, op, "next")
            self.transfer(group, "TMA store, 64x128, 1 stage", p, n, self.tma(n, p, "store", 64, 1))
            self.transfer(group, "TMA store, 128x128, 3 stages", p, n, self.tma(n, p, "store", 128, 3))
            self.transfer(group, "TMA load, 128x128, 3 stages", p, n, self.tma(n, p, "load", 128, 3), "next")
            self.transfer(group, "TMA reduce-add, 128x128, 3 stages", p, n, self.tma(n, p, "add", 128, 3), "sum")

    def by_size(self) -> None:
        """The paper's figure 2: bandwidth of each mechanism by message size, to one peer from all SMs."""
        plan, group = self.plan, "one peer, by message size"
        n, programs = plan.nbytes // ITEM, plan.programs[-1]
        for rows in (8, 16, 32, 64, 128, 256):
            stages = 1 if rows == 256 else 3  # as many as fit into shared memory
            x = rows * COLS * ITEM
            self.transfer(group, "TMA store", x, n, self.tma(n, programs, "store", rows, stages))
            self.transfer(group, "TMA load", x, n, self.tma(n, programs, "load", rows, stages), "next")
        for block, warps in ((512, 2), (1024, 4), (2048, 8), (4096, 8), (8192, 8), (16384, 16), (32768, 16)):
            x = block * ITEM
            self.transfer(group, "register store", x, n, self.registers(n, programs, True, block, warps))
            self.transfer(group, "register load", x, n, self.registers(n, programs, False, block, warps), "next")
        size = 4096
        while size <= plan.most:
            times = max(1, min(plan.copies, plan.most // size))
            whole = times * size // ITEM
            for push in (True, False):
                op = self.copy_engine(size // ITEM, times, push)
                arrives = "before" if push else "next"
                self.transfer(group, f"copy engine {'put' if push else 'get'}", size, whole, op, arrives)
            size *= 4

    def all_peers(self) -> None:
        """Bandwidth from each rank to all others by number of programs, and by copy engines."""
        world, group = self.world, "all peers, by programs"
        if world.size == 1:
            return
        n = min(self.plan.nbytes, self.plan.most // world.size) // ITEM // 32768 * 32768
        assert n > 0, f"{world.size} ranks need at least {world.size * 64} KB to send to all"
        for p in self.plan.programs:

            def registers(p: int = p) -> None:
                kernels.register_all_kernel[(p,)](self.dst, self.src, n, world.device, 16384, num_warps=16)

            def tma(p: int = p) -> None:
                kernels.tma_all_kernel[(p,)](self.dst, self.src, n, world.device, 128, COLS, 2, num_warps=4)

            self.transfer(group, "register store, 16 warps, 32 KB", p, n, registers, "all")
            self.transfer(group, "TMA store, 128x128, 2 stages", p, n, tma, "all")
            if self.gpu and world.size <= 4 and link_gluon.AVAILABLE:

                def gluon(p: int = p) -> None:
                    link_gluon.push_all_kernel[(p,)](self.dst, self.src, n, world.device, 128, COLS, 4, num_warps=1)

                self.transfer(group, "TMA store in Gluon, 128x128, 4 stages", p, n, gluon, "all")
        others = [(world.rank + i) % world.size for i in range(1, world.size)]
        at = slice(world.rank * n, (world.rank + 1) * n)
        targets, source = [self.dst.peer(r)[at] for r in others], self.src.plain()[:n]
        streams = [torch.cuda.Stream() for _ in others] if self.gpu else []

        def copies() -> None:
            if not self.gpu:
                for target in targets:
                    target.copy_(source)
                return
            here = torch.cuda.current_stream()
            for stream, target in zip(streams, targets):
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    target.copy_(source)
                here.wait_stream(stream)

        self.transfer(group, "copy engines, a stream a peer", 0, n, self.captured(copies), "all")

    # -- latency
    def latency(self, series: str, x: float, op: Callable[[], Any], count: int) -> None:
        us = self.clock(op)
        self.world.barrier()
        self.records.append(Record("latency", series, x, us, count=count))

    def signals(self) -> None:
        """Ping-pong of a signal alone and behind a message, between GPUs and inside one."""
        self.pingpong("signal inside a GPU", 0, 0)
        for other in range(1, self.world.size):
            self.pingpong(f"signal to rank {other}", 0, other)
        if self.world.size > 1:
            self.pingpong("signal, 4 warps", 0, 1, warps=4)
            self.pingpong("signal, 8 warps", 0, 1, warps=8)
            self.pingpong("1 KB and signal", 0, 1, block=512, warps=4)
            self.pingpong("16 KB and signal", 0, 1, block=8192, warps=8)

    def pingpong(self, series: str, one: int, two: int, block: int = 0, warps: int = 1) -> None:
        world, rounds = self.world, self.plan.rounds
        flags, box = pkt.signals(2, name="flags"), pkt.zeros(2 * max(block, 1), dtype=torch.bfloat16, name="box")
        sent = 0

        def op() -> None:
            nonlocal sent
            kernels.pingpong_kernel[(2 if one == two else 1,)](
                flags, box, self.src, sent, rounds, one, two, world.device, block, num_warps=warps
            )
            sent += rounds

        op()
        self.latency(series, one == two, op, 2 * rounds)
        if world.rank in (one, two):
            found = flags.plain().tolist()
            wanted = [sent, sent] if one == two else [sent * (world.rank == one), sent * (world.rank == two)]
            assert found == wanted, f"{series}: flags are {found}, not {wanted}"
            came = self.values(two if world.rank == one else one)[:block]
            at = 0 if world.rank == one else block
            assert torch.equal(box.plain()[at : at + block], came), f"{series}: wrong message"
        world.barrier()

    def barriers(self) -> None:
        """Barriers inside a kernel, and as nodes of a graph."""
        world, plan = self.world, self.plan
        most = plan.programs[-1]
        cases = (("barrier", 1, 1), ("world_barrier", 1, 1), ("world_barrier", most, 4), ("grid_barrier", most, 4))
        for kind, programs, warps in cases:

            def op(kind: str = kind, programs: int = programs, warps: int = warps) -> None:
                kernels.barriers_kernel[(programs,)](
                    self.bar, plan.rounds, world.device, kind, num_warps=warps, launch_cooperative_grid=True
                )

            op()
            self.latency(f"{kind} in a kernel, {programs} program{'s' * (programs > 1)}", programs, op, plan.rounds)

        def once() -> None:
            kernels.barriers_kernel[(1,)](self.bar, 1, world.device, "world_barrier", num_warps=1)

        self.latency("world_barrier as a graph's node", 1, self.captured(once, plan.nodes), plan.nodes)

    def remote_access(self) -> None:
        """Dependent accesses: each element gives the address of the next."""
        world, lines, steps = self.world, self.plan.lines, self.plan.steps
        generator = torch.Generator(device=world.torch_device).manual_seed(7)
        way = torch.randperm(lines - 1, generator=generator, device=world.torch_device).int() + 1
        way = torch.cat([torch.zeros_like(way[:1]), way])  # a cycle through all lines, from line 0
        table = pkt.zeros(lines * 32, dtype=torch.int32, name="table")
        table.view(lines, 32)[way.long(), 0] = way.roll(-1) * 32
        out = torch.full((1,), -1, dtype=torch.int32, device=world.torch_device)
        world.barrier()
        for where, other in (("own memory", world.rank), ("a peer's memory", (world.rank + 1) % world.size)):
            for atomic in (False, True):

                def op(other: int = other, atomic: bool = atomic) -> None:
                    kernels.chase_kernel[(1,)](table, out, steps, other, world.device, atomic, num_warps=1)

                op()
                world.synchronize()
                wanted = int(way[steps % lines]) * 32
                assert out.item() == wanted, f"chase through {where} ended at {out.item()}, not {wanted}"
                self.latency(f"{'atomic on' if atomic else 'load from'} {where}", atomic, op, steps)

    # -- the host
    def launches(self) -> None:
        """Host time of a launch, for a small kernel and for an operator."""
        world, n = self.world, 256
        x, y = pkt.ones(n, name="x"), pkt.ones(n, name="y")
        bare_x, bare_y, device = x.plain(), y.plain(), world.device

        def bare() -> None:
            kernels.bare_kernel[(1,)](bare_x, bare_y, n, n)

        def ours() -> None:
            kernels.pkt_kernel[(1,)](x, y, n, world.device, n)

        def operator() -> None:
            all_reduce(x, y, mode="one_shot")

        counters = self.bar.plain()[2:]

        def bare_operator() -> None:
            one_shot_kernel[(1,)](
                bare_x, bare_y, counters, n, device, "sum", False, n, num_warps=8, launch_cooperative_grid=True
            )

        for series, launch in (
            ("bare launch", bare), ("pkt launch", ours),
            ("bare launch of all_reduce's kernel", bare_operator), ("all_reduce", operator),
        ):  # fmt: skip
            launch()
            world.barrier()
            us = []
            for _ in range(self.plan.repeats if self.gpu else 0):
                start = time.perf_counter()
                for _ in range(self.plan.launches):
                    launch()
                us.append(1e6 * (time.perf_counter() - start))
                world.synchronize()
            world.barrier()
            self.records.append(Record("host", series, 0, us, count=self.plan.launches))
        assert torch.equal(y.plain(), torch.full_like(bare_x, world.size)), "all_reduce of ones"


PARTS: dict[str, Callable[[Bench], None]] = {
    "launches": Bench.launches,
    "signals": Bench.signals,
    "barriers": Bench.barriers,
    "remote": Bench.remote_access,
    "programs": Bench.by_programs,
    "all": Bench.all_peers,
    "sizes": Bench.by_size,
}
"""The parts, in the order in which they run."""


def measure(world: pkt.World, plan: Plan, parts: Iterable[str] = tuple(PARTS)) -> list[Record]:
    """Run the parts on this rank and return its records."""
    bench = Bench(world, plan)
    world.barrier()
    for part in steps(parts, "link", None if world.rank == 0 else False):
        start = time.perf_counter()
        PARTS[part](bench)
        world.barrier()
        if world.rank == 0 and bench.gpu:
            print(f"{part}: {time.perf_counter() - start:.1f} s", flush=True)
    return bench.records
