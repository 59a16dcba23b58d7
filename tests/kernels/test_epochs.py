"""Launch after launch with nothing reset, across the point where the 32-bit launch number and the counters wrap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pkt.kernels.all_gather import all_gather
from pkt.kernels.all_gather_matmul import all_gather_matmul
from pkt.kernels.all_reduce import all_reduce
from pkt.kernels.broadcast import broadcast
from pkt.kernels.matmul_all_reduce import matmul_all_reduce
from pkt.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from pkt.kernels.reduce_scatter import reduce_scatter

from .cases import TILES, operand, parts, seeds, values
from .helpers import on_ranks

START = 2**32 - 3  # launches that the counters claim to have seen
LAUNCHES = 6


def product_push(world: Any, launch: int, shard: Any) -> None:
    everybody = [values((12, 20), s) for s in seeds(world, launch)]
    b = operand((20 if shard == "rows" else world.size * 20, 24), launch)
    got = all_gather_matmul(everybody[world.rank], b, shard=shard, num_comm_sms=1, chunk=16, tiles=TILES)
    assert torch.equal(got, torch.cat(everybody, dim=0 if shard == "rows" else 1) @ b), launch


def product_scatter(world: Any, launch: int, mode: Any) -> None:
    operands = parts(world, launch, world.size * 20, 16, 24)
    got = matmul_reduce_scatter(*operands[world.rank], mode=mode, tiles=TILES)
    assert torch.equal(got, sum(a @ b for a, b in operands).chunk(world.size)[world.rank]), launch


def product_reduce(world: Any, launch: int, num_comm_sms: int) -> None:
    operands = parts(world, launch, 28, 16, 24)
    got = matmul_all_reduce(*operands[world.rank], num_comm_sms=num_comm_sms, tiles=TILES)
    assert torch.equal(got, sum(a @ b for a, b in operands)), launch


def reduce_words(world: Any, launch: int, mode: Any) -> None:
    everybody = [values((20,), s) for s in seeds(world, launch)]
    got = all_reduce(everybody[world.rank], mode=mode, block=16)
    assert torch.equal(got, sum(values((20,), s) for s in seeds(world, launch))), launch


def gather_words(world: Any, launch: int, n: int) -> None:
    everybody = [values((n,), s) for s in seeds(world, launch)]
    assert torch.equal(all_gather(everybody[world.rank], mode="low_latency"), torch.cat(everybody)), launch


def scatter_words(world: Any, launch: int, n: int) -> None:
    everybody = [values((world.size * n,), s) for s in seeds(world, launch)]
    got = reduce_scatter(everybody[world.rank], mode="low_latency")
    assert torch.equal(got, sum(everybody).chunk(world.size)[world.rank]), launch


def broadcast_words(world: Any, launch: int, n: int) -> None:
    everybody = [values((n,), s) for s in seeds(world, launch)]
    root = launch % world.size
    assert torch.equal(broadcast(everybody[world.rank].clone(), root, mode="low_latency"), everybody[root]), launch


def set_launches(world: Any, launches: int) -> None:
    """After one launch: the operators' counters and launch numbers as `launches` launches leave them.

    Every counter grows by the same in each launch, so it is that many times what it is now, as 32 bits.
    """
    found = 0
    for space in world._scopes[-1].kept.values():
        counters = getattr(space, "counters", None)
        if counters is not None:
            now = counters.plain()
            now.copy_(((now.long() * launches + 2**31) % 2**32 - 2**31).int())
            header = world.backend.view(world.rank, counters._allocation.block.offset, 8).view(torch.int64)
            assert header.item() == 1 << 32  # one launch, nobody in the next
            header.fill_((launches % 2**32 << 32) - (launches >> 31 << 64))
            found += 1
    assert found == 1


@pytest.mark.parametrize("seed", [0, 1, 3])
@pytest.mark.parametrize(
    ("operator", "form"),
    [
        (reduce_words, "low_latency"),
        (reduce_words, "low_latency_two_shot"),
        (gather_words, 20),
        (scatter_words, 20),
        (broadcast_words, 20),
        (product_push, "rows"),
        (product_push, "columns"),
        (product_scatter, "add"),
        (product_scatter, "inbox"),
        (product_reduce, 0),
        (product_reduce, 1),
    ],
)
def test_counters_that_wrap(operator: Callable[..., None], form: Any, seed: int) -> None:
    def run(world: Any) -> None:
        operator(world, 0, form)
        world.barrier()
        set_launches(world, START)
        world.barrier()
        for launch in range(1, LAUNCHES):
            operator(world, launch, form)

    on_ranks(3, run, seed=seed, sms=2)
