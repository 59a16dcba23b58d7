"""Mode "nccl" of the fused operators, in processes over gloo, against the references of pkt's own forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from pkt.errors import ShapeError, Unsupported
from pkt.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from tests.runtime import forked

RANKS = 3


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Integers that fp32 adds and multiplies exactly."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def everybodys(*shape: int, seed: int = 0) -> list[torch.Tensor]:
    return [values(shape, seed + rank) for rank in range(RANKS)]


def same(found: torch.Tensor, exact: torch.Tensor) -> None:
    assert torch.equal(found.double(), exact), (found, exact)


def products(world: Any) -> None:
    rank, many = world.rank, everybodys(6, 4)
    b, bias = everybodys(4, 5, seed=10), values((5,), 30)
    operands = list(zip(many, b))
    gather, scatter, reduce = (
        module.reference for module in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce)
    )
    for options in ({}, {"bias": bias, "epilogue": "relu"}):
        given = {"mode": "nccl", "world": world, **options}
        same(pkt.all_gather_matmul(many[rank], b[rank], **given), gather(many, b[rank], **options))
        tall, out = values((12, 5), 20 + rank), torch.empty(6, 5)
        assert pkt.all_gather_matmul(many[rank], tall, out, shard="columns", **given) is out
        same(out, gather(many, tall, "columns", **options))
        same(pkt.matmul_reduce_scatter(many[rank], b[rank], **given), scatter(operands, rank, **options))
        transposed = b[rank].t().contiguous().t()
        same(pkt.matmul_all_reduce(many[rank], transposed, **given), reduce(operands, **options))
    symmetric = pkt.empty(6, 5, dtype=torch.float32, name="out", world=world)
    assert pkt.matmul_all_reduce(many[rank], b[rank], symmetric, mode="nccl", world=world) is symmetric
    same(symmetric.plain(), reduce(operands))
    for setting in ({"tiles": (16, 16, 16)}, {"num_comm_sms": 2}):
        with pytest.raises(ShapeError, match=f'{next(iter(setting))}.*none with mode "nccl"'):
            pkt.matmul_all_reduce(many[rank], b[rank], mode="nccl", world=world, **setting)


def test_results() -> None:
    def run(world: Any) -> bool:
        # The fake driver's memory is this process's own.
        world.torch_device, world.streams = torch.device("cpu"), None
        products(world)
        return True

    ends = forked.in_worlds(RANKS, run)
    assert [end.value for end in ends] == [True] * RANKS, ends


def test_the_simulator_has_no_nccl() -> None:
    def main(world: Any) -> None:
        a = torch.zeros(4, 4)
        with pytest.raises(Unsupported, match="pkt's own forms run there"):
            pkt.all_gather_matmul(a, a, mode="nccl", world=world)

    pkt.launch(main, ranks=2, device="cpu", heap="1MiB")
