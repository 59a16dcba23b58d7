"""The all-gather + matmul that reads tiles of A on their owner: right in every schedule, and every fault is caught."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from benchmarks.all_gather_matmul_variants import SMALL_TILE, tiles_kernel
from pkt.runtime.launch.launch import cooperative
from tests.conformance.inputs import fill, read, seed_of, whole

m, K, N = 12, 20, 24


def program(world: Any) -> None:
    a, bar, b = pkt.empty(m, K), pkt.signals(2), whole((K, N), 0)
    out = torch.empty(world.size * m, N)
    for launch in range(2):
        fill(a, seed_of(launch, world.rank, 0))
        cooperative(world, tiles_kernel, (2,), a, b, out, bar, m, N, K, world.device, **SMALL_TILE)
        shards = [whole((m, K), seed_of(launch, rank, 0)) for rank in range(world.size)]
        assert torch.equal(read(out), torch.cat(shards) @ b)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_schedule_is_right_and_every_fault_is_caught(ranks: int) -> None:
    report = pkt.simulate(program, ranks=ranks, seeds=45, mutants=True, lost_signals=True, lost_ranks=3, sms=2)
    report.check()
    assert report.mutants
    assert report.signals
