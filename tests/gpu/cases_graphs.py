"""Programs that are launched many times: from a captured graph, eagerly, behind delays, on two streams.

A step counter in device memory changes the input of every launch. The kernels check the data they receive against the
counter, so the host reads nothing back before the end. Without a GPU every launch is eager.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.runtime.gpu.driver import CudaDriver

BLOCK = 256
WIDE = 2048  # elements for each program of a kernel that fills or checks a matrix
TILES = (32, 32, 32)  # for simulated products with several tiles for each rank


@triton.jit
def advance_kernel(step_ptr):
    tl.store(step_ptr, tl.load(step_ptr) + 1)


@triton.jit
def _value(step, rank, offs):
    return (step * 7919 + rank * 31 + offs) % 1021


@triton.jit
def exchange_kernel(
    box,  # int32 (2, size, programs, BLOCK) on every rank
    flags,  # int32 (programs,) on every rank
    step_ptr,  # int32 of this rank
    wrong_ptr,  # int32 of this rank
    world,
    BLOCK: tl.constexpr,
):
    """Send a block to every rank. The epoch gives the half of the box (by parity) and the target of the wait."""
    pid = tl.program_id(0)
    n = tl.num_programs(0)
    rank = tl.cast(world.rank, tl.int32)
    offs = tl.arange(0, BLOCK)
    epoch = pl.epoch(flags, world)
    step = tl.load(step_ptr)
    half = box + (epoch & 1) * world.size * n * BLOCK
    for r in tl.static_range(world.size):
        pl.store(half + (rank * n + pid) * BLOCK + offs, _value(step, rank, offs) + pid, r, world)
    pl.signal_all(flags + pid, world)
    pl.wait(flags + pid, epoch * world.size, world)
    for r in tl.static_range(world.size):
        found = tl.load(half + (r * n + pid) * BLOCK + offs)
        wrong = tl.sum((found != _value(step, r, offs) + pid).to(tl.int32), 0)
        tl.atomic_add(wrong_ptr, (wrong > 0).to(tl.int32), sem="relaxed", scope="gpu")


@triton.jit
def barrier_kernel(box, bar, step_ptr, wrong_ptr, world):
    """Store a value on the next rank, with a world barrier before and after it is read."""
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    step = tl.load(step_ptr)
    pl.store(box + pid, step * 10 + rank, (world.rank + 1) % world.size, world)
    pl.world_barrier(bar, world)
    wrong = (tl.load(box + pid) != step * 10 + (rank + world.size - 1) % world.size).to(tl.int32)
    tl.atomic_add(wrong_ptr, wrong, sem="relaxed", scope="gpu")
    pl.world_barrier(bar, world)


@triton.jit
def fill_kernel(x_ptr, step_ptr, world, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = _value(tl.load(step_ptr), tl.cast(world.rank, tl.int32), offs)
    tl.store(x_ptr + offs, x.to(x_ptr.dtype.element_ty))


@triton.jit
def check_kernel(x_ptr, n, step_ptr, wrong_ptr, world, SUM: tl.constexpr, BLOCK: tl.constexpr):
    """Check that x is the sum of all ranks' values (SUM), or their values in rank order."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    step = tl.load(step_ptr)
    found = tl.load(x_ptr + offs).to(tl.int32)
    if SUM:
        wanted = tl.zeros((BLOCK,), tl.int32)
        for r in tl.static_range(world.size):
            wanted += _value(step, r, offs)
    else:
        wanted = _value(step, offs // n, offs % n)
    wrong = tl.sum((found != wanted).to(tl.int32), 0)
    tl.atomic_add(wrong_ptr, (wrong > 0).to(tl.int32), sem="relaxed", scope="gpu")


@triton.jit
def _factor(step):
    """A signed power of two that differs from those of the last steps, so data of an earlier launch is detected."""
    return tl.exp2((step % 5).to(tl.float32)) * (1 - 2 * (step % 2)).to(tl.float32)


@triton.jit
def scale_kernel(x_ptr, n, step_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0).to(tl.float32)
    tl.store(y_ptr + offs, (x * _factor(tl.load(step_ptr))).to(y_ptr.dtype.element_ty), mask=offs < n)


@triton.jit
def check_scaled_kernel(exact_ptr, n, step_ptr, found_ptr, wrong_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = tl.load(exact_ptr + offs, mask=offs < n, other=0) * _factor(tl.load(step_ptr))
    found = tl.load(found_ptr + offs, mask=offs < n, other=0).to(tl.float32)
    wrong = tl.sum((found != wanted).to(tl.int32), 0)
    tl.atomic_add(wrong_ptr, (wrong > 0).to(tl.int32), sem="relaxed", scope="gpu")


class Program:
    """A program that is launched many times. `step` counts its launches, `wrong` its wrong results."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.step = torch.zeros(1, dtype=torch.int32, device=world.torch_device)
        self.wrong = torch.zeros(1, dtype=torch.int32, device=world.torch_device)

    def launch(self) -> None:
        advance_kernel[(1,)](self.step)
        self.work()

    def work(self) -> None:
        raise NotImplementedError

    def check(self, launches: int) -> None:
        """Assert that all launches took place and that no result was wrong."""
        self.world.synchronize()
        found = self.step.item(), self.wrong.item()
        assert found == (launches, 0), f"rank {self.world.rank}: {found} launches and wrong results, not {launches, 0}"
        self.world.barrier()


class Exchange(Program):
    """Epochs and signals."""

    def __init__(self, world: Any, programs: int = 4) -> None:
        super().__init__(world)
        self.programs = programs
        self.box, self.flags = (
            pkt.zeros(2, world.size, programs, BLOCK, dtype=torch.int32),
            pkt.signals(programs),
        )

    def work(self) -> None:
        exchange_kernel[(self.programs,)](
            self.box, self.flags, self.step, self.wrong, self.world.device, BLOCK, launch_cooperative_grid=True
        )


class Barriers(Program):
    """World barriers."""

    def __init__(self, world: Any, programs: int = 4) -> None:
        super().__init__(world)
        self.programs, self.box, self.bar = programs, pkt.zeros(programs, dtype=torch.int32), pkt.signals(2)

    def work(self) -> None:
        barrier_kernel[(self.programs,)](
            self.box, self.bar, self.step, self.wrong, self.world.device, launch_cooperative_grid=True
        )


class Collectives(Program):
    """Operators of pkt.kernels."""

    def __init__(self, world: Any, blocks: int = 3) -> None:
        super().__init__(world)
        self.n = blocks * BLOCK
        self.x, self.sum = pkt.empty(self.n), pkt.empty(self.n)
        self.gathered, self.exchanged = pkt.empty(world.size * self.n), pkt.empty(world.size * self.n)
        world.barrier()

    def work(self) -> None:
        device, blocks = self.world.device, self.n // BLOCK
        fill_kernel[(blocks,)](self.x, self.step, device, BLOCK)
        pkt.all_reduce(self.x, self.sum, mode="two_shot")
        check_kernel[(blocks,)](self.sum, self.n, self.step, self.wrong, device, True, BLOCK)
        for way in ("push", "copy", "low_latency"):
            pkt.all_gather(self.x, self.gathered, mode=way)
            check_kernel[(blocks * self.world.size,)](
                self.gathered, self.n, self.step, self.wrong, device, False, BLOCK
            )
        for mode in ("one_shot", "low_latency", "low_latency_two_shot", "copy"):
            pkt.all_reduce(self.x, self.sum, mode=mode)
            check_kernel[(blocks,)](self.sum, self.n, self.step, self.wrong, device, True, BLOCK)
        pkt.all_to_all(self.gathered, self.exchanged, mode="low_latency")  # this rank's x, from every rank
        pkt.reduce_scatter(self.exchanged, self.sum, mode="low_latency")
        check_kernel[(blocks,)](self.sum, self.n, self.step, self.wrong, device, True, BLOCK)
        if self.world.rank > 0:
            self.gathered.fill_(-1)
        pkt.broadcast(self.gathered, mode="low_latency")
        check_kernel[(blocks * self.world.size,)](self.gathered, self.n, self.step, self.wrong, device, False, BLOCK)


class Product(Program):
    """A fused operator on integers. bf16 holds operands and results exactly."""

    m, n, k = 80, 136, 24  # ragged, but rows begin at multiples of 16 bytes: any form may be chosen
    simulated: tuple[int, int, int] | None = None  # m, n, k without a GPU, with tiles of TILES
    mode: str | None = None
    own = False  # a workspace of its own

    def operands(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rank `rank`'s a and b, of -1, 0 and 1."""
        device, rows = self.world.torch_device, self.rows()
        a = torch.arange(rows * self.k, device=device).mul(7).add(rank).remainder(3).sub(1)
        b = torch.arange(self.k * self.n, device=device).mul(5).add(2 * rank).remainder(3).sub(1)
        return a.reshape(rows, self.k).bfloat16(), b.reshape(self.k, self.n).bfloat16()

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.options = {"mode": self.mode, "workspace": pkt.Workspace(world) if self.own else None, "world": world}
        if self.simulated and world.torch_device.type == "cpu":
            self.m, self.n, self.k = self.simulated
            self.options["tiles"] = TILES
        self.a0, self.b = self.operands(world.rank)
        self.a = torch.empty_like(self.a0)
        self.exact = self.result([[t.float() for t in self.operands(rank)] for rank in range(world.size)])
        world.barrier()

    def work(self) -> None:
        n = self.a.numel()
        scale_kernel[(triton.cdiv(n, WIDE),)](self.a0, n, self.step, self.a, WIDE)
        out = self.operator()
        n = out.numel()
        check_scaled_kernel[(triton.cdiv(n, WIDE),)](self.exact, n, self.step, out, self.wrong, WIDE)

    def rows(self) -> int:
        return self.m

    def result(self, operands: list) -> torch.Tensor:
        raise NotImplementedError

    def operator(self) -> torch.Tensor:
        raise NotImplementedError


class Gather(Product):
    """all_gather_matmul."""

    def result(self, operands: list) -> torch.Tensor:
        return torch.cat([a for a, _ in operands]) @ operands[self.world.rank][1]

    def operator(self) -> torch.Tensor:
        return pkt.all_gather_matmul(self.a, self.b, **self.options)


class Reduce(Product):
    """matmul_all_reduce. The default mode would not be fused for so few rows."""

    mode = "lcsc"

    def result(self, operands: list) -> torch.Tensor:
        return torch.stack([a @ b for a, b in operands]).sum(0)

    def operator(self) -> torch.Tensor:
        return pkt.matmul_all_reduce(self.a, self.b, **self.options)


class Scatter(Reduce):
    """matmul_reduce_scatter."""

    mode, own = None, True

    def rows(self) -> int:
        return self.m * self.world.size

    def result(self, operands: list) -> torch.Tensor:
        return super().result(operands).chunk(self.world.size)[self.world.rank].contiguous()

    def operator(self) -> torch.Tensor:
        return pkt.matmul_reduce_scatter(self.a, self.b, **self.options)


class GluonReduce(Reduce):
    """matmul_all_reduce, on a GPU in Gluon. Each rank has several tiles; the last one is ragged."""

    own, m, n = True, 400, 520
    simulated = 100, 136, 24

    def __init__(self, world: Any) -> None:
        if world.torch_device.type == "cuda":
            self.mode = "gluon"
        super().__init__(world)


class CopiedGather(Gather):
    """all_gather_matmul by copy engines, on a GPU in Gluon."""

    mode, own, m, n, k = "copy", True, 400, 520, 136
    simulated = 100, 136, 40

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        if world.torch_device.type == "cuda" and world.size > 1:
            self.options |= {"mode": "gluon", "num_comm_sms": 0, "push_rows": 3, "chunk": 64}


class CopiedScatter(Scatter):
    """matmul_reduce_scatter. On a GPU copy engines send the parts that its kernel has finished."""

    m, n = 400, 520
    simulated = 100, 136, 24

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        if world.torch_device.type == "cuda" and world.size > 1:
            self.options |= {"mode": "gluon", "copies": 2}


class UnfusedGather(Gather):
    """all_gather, then cuBLAS."""

    mode = "unfused"


class UnfusedScatter(Scatter):
    """cuBLAS, then reduce_scatter."""

    mode = "unfused"


class UnfusedReduce(Reduce):
    """cuBLAS, then all_reduce."""

    mode, own, m, n = "unfused", True, 64, 257


PROGRAMS: dict[str, type[Program]] = {
    "exchange": Exchange,
    "barriers": Barriers,
    "collectives": Collectives,
    "all_gather_matmul": Gather,
    "matmul_reduce_scatter": Scatter,
    "matmul_all_reduce": Reduce,
    "matmul_all_reduce, gluon": GluonReduce,
    "all_gather_matmul, copied": CopiedGather,
    "matmul_reduce_scatter, copied": CopiedScatter,
    "all_gather_matmul, unfused": UnfusedGather,
    "matmul_reduce_scatter, unfused": UnfusedScatter,
    "matmul_all_reduce, unfused": UnfusedReduce,
}


def back_to_back(world: Any, name: str, count: int) -> float:
    """Launch `count` times without synchronization, while ranks straggle now and then. Returns us per launch."""
    program, chance = PROGRAMS[name](world), random.Random(world.rank)
    program.launch()  # compiled
    world.synchronize()
    world.barrier()
    start = time.perf_counter()
    for _ in range(count):
        if world.torch_device.type == "cuda" and chance.random() < 1 / 64:
            torch.cuda._sleep(chance.randrange(400_000))  # clock ticks: up to a fifth of a millisecond
        program.launch()
    program.check(1 + count)
    return (time.perf_counter() - start) / count * 1e6


def replays(world: Any, name: str, count: int, eager_every: int = 100) -> float:
    """Replay a captured launch `count` times, with an eager launch after every `eager_every`. Returns us per replay."""
    program = PROGRAMS[name](world)
    program.launch()  # compiled
    world.synchronize()
    world.barrier()
    replay: Callable[[], None] = program.launch
    if world.torch_device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            program.launch()
        replay = graph.replay
    world.barrier()
    start = time.perf_counter()
    for i in range(count):
        replay()
        if i % eager_every == eager_every - 1:
            program.launch()
    world.synchronize()
    taken = time.perf_counter() - start
    program.check(1 + count + count // eager_every)
    return taken / count * 1e6


def not_called_before(world: Any, name: str, count: int) -> None:
    """A capture before any eager call is refused and leaves nothing behind. After an eager call it works."""
    program = PROGRAMS[name](world)
    world.synchronize()
    before = world.heap.ledger.free_bytes
    with pytest.raises(pkt.Unsupported, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        program.operator()
    assert world.heap.ledger.free_bytes == before
    program.launch()
    world.synchronize()
    world.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        program.launch()
    for _ in range(count):
        graph.replay()
    program.check(1 + count)


def skewed(world: Any, name: str, count: int) -> None:
    """Each rank is delayed now and then, on its host and on its GPU."""
    program, chance = PROGRAMS[name](world), random.Random(world.rank)
    gpu = world.torch_device.type == "cuda"
    for _ in range(count):
        if gpu and chance.random() < 0.5:
            torch.cuda._sleep(chance.randrange(1_000_000))  # clock ticks: up to half a millisecond
        if gpu and chance.random() < 0.2:
            time.sleep(chance.random() * 1e-3)
        program.launch()
    program.check(count)


def two_streams(world: Any, count: int, operators: bool = False) -> None:
    """Launch two programs, each on its own stream.

    By default they have counters of their own and do not wait for each other. With `operators` they share counters, and
    pkt keeps their calls in order.
    """
    programs = [Collectives(world), Collectives(world, 5)] if operators else [Exchange(world, 8), Barriers(world, 8)]
    gpu, chance = world.torch_device.type == "cuda", random.Random(world.rank)
    world.synchronize()
    streams = [torch.cuda.Stream(world.torch_device) if gpu else None for _ in programs]
    for _ in range(count):
        for stream, program in zip(streams, programs):
            with torch.cuda.stream(stream):  # None changes nothing
                if gpu and chance.random() < 0.3:
                    torch.cuda._sleep(chance.randrange(200_000))
                program.launch()
    for program in programs:
        program.check(count)


CASES: dict[str, Callable[[Any], Any]] = {
    **{f"{name} replayed": lambda world, name=name: replays(world, name, 3, eager_every=2) for name in PROGRAMS},
    **{f"{name} back to back": lambda world, name=name: back_to_back(world, name, 3) for name in PROGRAMS},
    "two streams": lambda world: two_streams(world, 3),
    "operators on two streams": lambda world: two_streams(world, 3, operators=True),
}
"""Small runs of each, for the simulator."""


@triton.jit
def nothing_kernel(x_ptr):
    tl.store(x_ptr, 0)


def recorded(world: Any, nbytes: int) -> list[bool]:
    """Whether each kernel of a graph is launched cooperatively: an all-reduce's kernel, then one that is not pkt's."""
    from cuda.bindings import driver

    def found(name: str, *args: Any) -> Any:
        code, *values = getattr(driver, name)(*args)
        assert int(code) == 0, (name, code)
        return values

    x, graph = pkt.zeros(nbytes // 4), torch.cuda.CUDAGraph()
    pkt.all_reduce(x)
    nothing_kernel[(1,)](x, launch_cooperative_grid=True)
    attribute = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    with torch.cuda.graph(graph):
        pkt.all_reduce(x)
        nothing_kernel[(1,)](x, launch_cooperative_grid=True)
        _, _, recording, *_ = found("cuStreamGetCaptureInfo", torch.cuda.current_stream().cuda_stream)
        nodes = found("cuGraphGetNodes", recording, found("cuGraphGetNodes", recording)[-1])[0]
        values = [found("cuGraphKernelNodeGetAttribute", node, attribute)[0] for node in nodes]
    world.barrier()
    return [bool(value.cooperative) for value in values]


def written_beside(world: Any) -> None:
    """A graph is whole although words are written, and the drivers of closed worlds are freed, while it is recorded."""
    backend, x = world.backend, torch.zeros(1, dtype=torch.int32)
    drivers = [CudaDriver(world.rank) for _ in range(33)]  # torch has 32 streams
    for driver in drivers:
        driver.write_words(x.data_ptr(), [1], backend.device_index)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        y = x + 1
        drivers.clear()
        del driver
        backend.driver.write_words(x.data_ptr(), [5], backend.device_index)
    torch.empty(64, device="cpu", pin_memory=True)  # torch looks which pages it may use again
    graph.replay()
    assert y.item() == 6


def given_back(world: Any, n: int = 32 << 20) -> None:
    """Calls by the copy engines of a plain tensor that torch gives back to the driver between them: other memory comes
    to the same address, and no recorded call refers to that before."""
    out = pkt.empty(world.size * n, dtype=torch.bfloat16, world=world)
    for turn in range(4):
        for _ in range(5):
            x = torch.full((n,), float(world.rank + turn), dtype=torch.bfloat16)
            pkt.all_gather(x, out, mode="copy", world=world)
            world.synchronize()
            for rank, part in enumerate(out.plain().chunk(world.size)):
                assert bool((part == rank + turn).all()), f"turn {turn}, the part of rank {rank}"
            del x
        world.barrier()
        torch.cuda.empty_cache()
