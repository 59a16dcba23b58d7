"""Small programs over the shipped kernels, for exploring schedules, breaking sync sites and dropping signals.

Each case runs on every rank and launches its operator at least twice, with different inputs and nothing reset
between. It reads and writes its tensors with kernels, so that the race detector sees who touches what, and
asserts that the result is exact: the values are small integers. A schedule takes some ten milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

import pkt
from pkt.kernels.all_gather import all_gather
from pkt.kernels.all_gather_matmul import all_gather_matmul
from pkt.kernels.all_gather_matmul import reference as gather_reference
from pkt.kernels.all_reduce import all_reduce
from pkt.kernels.all_to_all import all_to_all
from pkt.kernels.all_to_all import reference as exchange_reference
from pkt.kernels.broadcast import broadcast
from pkt.kernels.matmul_all_reduce import matmul_all_reduce
from pkt.kernels.matmul_all_reduce import reference as reduce_reference
from pkt.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from pkt.kernels.matmul_reduce_scatter import reference as scatter_reference
from pkt.kernels.reduce_scatter import reduce_scatter

LAUNCHES = 2


@dataclass(frozen=True)
class Case:
    """`pkt.simulate(case.fn, ranks=case.ranks, **case.options)`."""

    name: str
    fn: Callable[[Any], None]
    ranks: int = 4
    options: dict[str, Any] = field(default_factory=dict)


CASES: list[Case] = []


def case(
    ranks: int = 4, sms: int = 2, multicast: bool = True, **values: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add `fn(world, **values)` to CASES, under its name and values."""

    def add(fn: Callable[..., None]) -> Callable[..., None]:
        def run(world: Any) -> None:
            fn(world, **values)

        run.__name__ = "_".join((fn.__name__, *(str(v) for v in values.values())))
        if not multicast:
            run.__name__ += "_no_multicast"
        CASES.append(Case(run.__name__, run, ranks, {"sms": sms, "multicast": multicast}))
        return fn

    return add


# ------------------------------------------------------------------------------------------------------ tools
@triton.jit
def _fill(x_ptr, n, seed, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, ((offs * 5 + seed * 3) % 7).to(x_ptr.dtype.element_ty), mask=offs < n)


@triton.jit
def _read(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What `fill` writes: integers from 0 to 6."""
    n = torch.Size(shape).numel()
    return ((torch.arange(n) * 5 + seed * 3) % 7).to(dtype).reshape(shape)


def fill(x: torch.Tensor, seed: int) -> None:
    n = x.numel()
    _fill[(1,)](x, n, seed, triton.next_power_of_2(n))


def check(x: torch.Tensor, expected: torch.Tensor) -> None:
    """`x` as a kernel of this rank reads it now is `expected`, exactly."""
    found = torch.empty(tuple(x.shape), dtype=x.dtype)
    _read[(1,)](x, found, x.numel(), triton.next_power_of_2(x.numel()))
    assert torch.equal(found.double(), expected.double()), (found, expected)


def seeds(world: Any, launch: int) -> list[int]:
    """The seed of each rank's input in a launch."""
    return [launch * world.size + r for r in range(world.size)]


# ------------------------------------------------------------------------------------------------ collectives
@case(mode="push")
@case(ranks=3, mode="pull", dim=1)
@case(ranks=3, mode="copy", dim=1)
@case(ranks=3, mode="low_latency", dim=1, launches=3)
@case(ranks=2, mode="low_latency", launches=3)
def gather(world: Any, mode: str, dim: int = 0, launches: int = LAUNCHES, rows: int = 4, cols: int = 10) -> None:
    x, out = pkt.empty(rows, cols), pkt.empty(rows * world.size ** (1 - dim), cols * world.size**dim)
    for launch in range(launches):
        fill(x, seeds(world, launch)[world.rank])
        got = all_gather(x, out, dim=dim, mode=mode, block=None if mode == "copy" else 16)
        check(got, torch.cat([values((rows, cols), s) for s in seeds(world, launch)], dim))


@case(ranks=3, mode="pull", dim=1)
@case(ranks=3, mode="push", dim=0)
@case(ranks=2, mode="push", dim=0, launches=3)
@case(ranks=3, sms=1, mode="copy", dim=1, chunks=2)
@case(ranks=2, mode="copy", dim=0, chunks=3)
@case(ranks=3, mode="low_latency", dim=1, launches=3)
@case(ranks=2, mode="low_latency", dim=0, launches=3)
def scatter(
    world: Any, mode: Any, dim: int, launches: int = LAUNCHES, chunks: Any = None, rows: int = 4, cols: int = 10
) -> None:
    shape = (rows * world.size ** (1 - dim), world.size**dim * cols)
    x = pkt.empty(shape)
    for launch in range(launches):
        fill(x, seeds(world, launch)[world.rank])
        total = sum(values(shape, s) for s in seeds(world, launch))
        got = reduce_scatter(x, dim=dim, mode=mode, block=16, chunks=chunks)
        check(got, total.chunk(world.size, dim)[world.rank])


@case(ranks=3, mode="push")
@case(ranks=2, mode="pull")
@case(ranks=3, mode="copy")
@case(ranks=3, mode="low_latency", launches=3)
def exchange(world: Any, mode: str, launches: int = LAUNCHES, rows: int = 3, cols: int = 5) -> None:
    shape, turned = (rows, world.size * cols), (world.size * rows, cols)
    x, out = pkt.empty(shape), pkt.empty(turned)
    for launch in range(launches):
        fill(x, seeds(world, launch)[world.rank])
        got = all_to_all(x, out, scatter=1, gather=0, mode=mode, block=None if mode == "copy" else 16)
        check(got, exchange_reference(world.rank, [values(shape, s) for s in seeds(world, launch)], 1, 0))


@case(ranks=3, mode="pass_on")
@case(ranks=3, mode="low_latency", launches=4)
def spread(world: Any, mode: Any, launches: int = LAUNCHES + 1, n: int = 40) -> None:
    x = pkt.empty(n)
    for launch in range(launches):
        fill(x, seeds(world, launch)[world.rank])
        root = int(launch > 0)  # the first call with a root compares the ranks' arguments, which orders them
        check(broadcast(x, root, mode=mode, block=16), values((n,), seeds(world, launch)[root]))


@case(ranks=3, mode="low_latency", launches=3, n=20)  # the third meets what the first left in its half of the slots
@case(ranks=2, mode="low_latency", in_place=True, launches=3, n=20)
@case(ranks=3, mode="low_latency_two_shot", launches=3, n=20)
@case(ranks=2, mode="low_latency_two_shot", in_place=True, launches=3, n=20)
@case(ranks=3, mode="one_shot")
@case(ranks=2, mode="one_shot", in_place=True)
@case(mode="two_shot")
@case(ranks=2, mode="two_shot", in_place=True)
@case(ranks=3, mode="two_shot_push", launches=3)
@case(ranks=2, mode="two_shot_push", in_place=True, launches=3)
@case(ranks=3, sms=1, mode="copy", n=100, chunks=2)
@case(ranks=2, mode="copy", in_place=True, n=150, chunks=3)
@case(mode="multimem")
@case(ranks=2, mode="multimem", in_place=True, multicast=False)
def reduce(
    world: Any, mode: Any, in_place: bool = False, launches: int = LAUNCHES, n: int = 42, chunks: Any = None
) -> None:
    x, out = pkt.empty(n), pkt.empty(n)
    for launch in range(launches):
        fill(x, seeds(world, launch)[world.rank])
        got = all_reduce(x, None if in_place else out, mode=mode, block=16, chunks=chunks)
        check(got, sum(values((n,), s) for s in seeds(world, launch)))


# --------------------------------------------------------------------------------------------- fused products
TILES = (16, 16, 16)


def operand(shape: tuple[int, int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of this rank alone, of what `fill` writes."""
    return values(shape, seed, dtype)


@case(ranks=3, mode="copy", shard="rows")
@case(ranks=3, mode="push", shard="rows")
@case(ranks=3, mode="push", shard="columns")
@case(ranks=3, mode="pull", shard="rows")
@case(ranks=3, mode="pull", shard="columns")
@case(ranks=2, mode="push", shard="rows", N=13)  # rows that TMA cannot take
@case(ranks=2, mode="pull", shard="columns", N=13)
def gather_product(world: Any, mode: str, shard: Any, m: int = 12, k: int = 20, N: int = 24) -> None:
    a = pkt.empty(m, k)
    for launch in range(LAUNCHES + (mode == "push")):  # the third meets what the first left in its half of the inbox
        everybody = seeds(world, launch)
        fill(a, everybody[world.rank])
        b = operand((k if shard == "rows" else world.size * k, N), launch)
        got = all_gather_matmul(
            a if mode == "pull" else a.plain().clone(), b,
            shard=shard, mode=mode, tiles=TILES, **({"num_comm_sms": 1, "chunk": 16} if mode == "push" else {}),
        )  # fmt: skip
        check(got, gather_reference(0, [values((m, k), s) for s in everybody], [b], shard=shard))


def parts(world: Any, launch: int, M: int, k: int, N: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each rank's (a, b) in a launch."""
    return [(operand((M, k), s), operand((k, N), s + 1)) for s in seeds(world, launch)]


@case(ranks=3, mode="add")
@case(ranks=3, mode="inbox")
@case(ranks=2, mode="add", N=13)
def product_scatter(world: Any, mode: Any, m: int = 12, k: int = 16, N: int = 16) -> None:
    for launch in range(LAUNCHES + 1):  # here too
        operands = parts(world, launch, world.size * m, k, N)
        got = matmul_reduce_scatter(*operands[world.rank], mode=mode, tiles=TILES)
        check(got, scatter_reference(world.rank, *zip(*operands)))


@case(ranks=3, num_comm_sms=1)
@case(ranks=3, num_comm_sms=1, multicast=False)
@case(ranks=2, num_comm_sms=0)
@case(ranks=3, num_comm_sms=1, in_place=True)
@case(ranks=2, num_comm_sms=1, N=13)
def product_reduce(
    world: Any, num_comm_sms: int, in_place: bool = False, M: int = 28, k: int = 16, N: int = 24
) -> None:
    out = pkt.empty(M, N) if in_place else None
    for launch in range(LAUNCHES):
        operands = parts(world, launch, M, k, N)
        got = matmul_all_reduce(*operands[world.rank], out, num_comm_sms=num_comm_sms, tiles=TILES)
        check(got, reduce_reference(world.rank, *zip(*operands)))
