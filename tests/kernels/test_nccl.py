"""The operators through torch.distributed, in processes over gloo, against the references of pkt's own forms."""

from __future__ import annotations

from typing import Any

import torch

from pkt.kernels import (
    _nccl,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from tests.runtime import forked

RANKS = 3


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Integers that fp32 adds and multiplies exactly."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def everybodys(*shape: int, seed: int = 0) -> list[torch.Tensor]:
    return [values(shape, seed + rank) for rank in range(RANKS)]


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


def test_results() -> None:
    def run(world: Any) -> bool:
        world.torch_device = torch.device("cpu")  # the fake driver's memory is this process's own
        products(world)
        return True

    ends = forked.in_worlds(RANKS, run)
    assert [end.value for end in ends] == [True] * RANKS, ends
