"""The operators through torch.distributed, in processes over gloo, against the references of pkt's own forms."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from pkt.kernels import (
    _nccl,
    all_gather_matmul,
    all_reduce,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduce_scatter,
)
from tests.runtime import forked

RANKS = 3


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Integers that fp32 adds and multiplies exactly."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def everybodys(*shape: int, seed: int = 0) -> list[torch.Tensor]:
    return [values(shape, seed + rank) for rank in range(RANKS)]


def gathers(world: Any) -> None:
    xs = everybodys(4, 5, 2)
    for dim in range(3):
        wanted = torch.cat(xs, dim)
        assert torch.equal(_nccl.all_gather(xs[world.rank], torch.empty_like(wanted), world, dim), wanted)


def scatters(world: Any) -> None:
    xs = everybodys(6, 3, 9)
    for dim, op in itertools.product(range(3), ("sum", "min", "max")):
        stacked = torch.stack(xs)
        whole = {"sum": stacked.sum, "min": stacked.amin, "max": stacked.amax}[op](0)
        wanted = whole.chunk(RANKS, dim)[world.rank].contiguous()
        found = _nccl.reduce_scatter(xs[world.rank], torch.empty_like(wanted), world, dim, op)
        assert torch.equal(found, wanted), (dim, op)
    first = reduce_scatter.reference(xs, world.rank)
    assert torch.equal(_nccl.reduce_scatter(xs[world.rank], torch.empty(2, 3, 9), world).double(), first)


def reduces(world: Any) -> None:
    xs = everybodys(7, 3)
    mine, out = xs[world.rank].clone(), torch.empty(7, 3)
    assert torch.equal(_nccl.all_reduce(mine, out, world).double(), all_reduce.reference(xs))
    assert torch.equal(mine, xs[world.rank])
    assert torch.equal(_nccl.all_reduce(mine, mine, world, "max"), torch.stack(xs).amax(0))


def exchanges(world: Any) -> None:
    xs = everybodys(3, 6, 9, 2)
    for scatter, gather in itertools.product(range(3), range(4)):
        wanted = torch.cat([x.chunk(RANKS, scatter)[world.rank] for x in xs], gather)
        found = _nccl.all_to_all(xs[world.rank], torch.empty_like(wanted), world, scatter, gather)
        assert torch.equal(found, wanted), (scatter, gather)


def broadcasts(world: Any) -> None:
    xs = everybodys(5)
    for root in range(RANKS):
        assert torch.equal(_nccl.broadcast(xs[world.rank].clone(), root, world), xs[root])


def products(world: Any) -> None:
    rank, many = world.rank, everybodys(6, 4)
    b = everybodys(4, 5, seed=10)
    operands = list(zip(many, b))
    out = _nccl.all_gather_matmul(many[rank], b[rank], torch.empty(18, 5), world)
    assert torch.equal(out.double(), all_gather_matmul.reference(many, b[rank]))
    tall = values((12, 5), 20 + rank)
    out = _nccl.all_gather_matmul(many[rank], tall, torch.empty(6, 5), world, columns=True)
    assert torch.equal(out.double(), all_gather_matmul.reference(many, tall, "columns"))
    out = _nccl.matmul_reduce_scatter(many[rank], b[rank], torch.empty(2, 5), world)
    assert torch.equal(out.double(), matmul_reduce_scatter.reference(operands, rank))
    out = _nccl.matmul_all_reduce(many[rank], b[rank], torch.empty(6, 5), world)
    assert torch.equal(out.double(), matmul_all_reduce.reference(operands))


@pytest.mark.parametrize("main", [gathers, scatters, reduces, exchanges, broadcasts, products])
def test_results(main: Any) -> None:
    def run(world: Any) -> bool:
        world.torch_device = torch.device("cpu")  # the fake driver's memory is this process's own
        main(world)
        return True

    ends = forked.in_worlds(RANKS, run)
    assert [end.value for end in ends] == [True] * RANKS, ends
