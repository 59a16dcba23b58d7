"""Broadcast: every rank's tensor becomes root's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.broadcast import OPERATOR, broadcast, reference
from pkt.kernels.shared import flagged

from .helpers import LAUNCHES, SEEDS, assert_raises, inputs, on_ranks

MODES = tuple(OPERATOR.forms)


def broadcasts(world: Any, shape: tuple[int, ...], dtype: torch.dtype, mode: Any, block: int | None = 16) -> None:
    x = pkt.empty(shape, dtype=dtype)
    for launch in range(LAUNCHES + world.size):
        everybody = inputs(world, shape, dtype, launch)
        root = (launch + 1) % world.size
        x.copy_(everybody[world.rank])
        assert broadcast(x, root, mode=mode, block=block) is x
        assert torch.equal(x.plain(), reference(world.rank, everybody, root)), (world.rank, launch)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_from_every_root(ranks: int, mode: str) -> None:
    on_ranks(ranks, broadcasts, (13, 3), torch.bfloat16, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_schedule(seed: int, mode: str) -> None:
    on_ranks(4, broadcasts, (40,), torch.float32, mode, seed=seed, sms=2)


def test_a_root_that_hurries_waits_for_the_slowest() -> None:
    """Root needs no data, but in each launch it waits for a word from every rank. So it is at most one launch ahead,
    and overwrites no word that a rank has not read."""

    def run(world: Any) -> None:
        x, seen = pkt.empty(300), []
        for launch in range(6):
            x.fill_(10.0 * launch + world.rank)
            seen.append(broadcast(x, 0, mode="low_latency").plain().clone())
        assert [s.unique().tolist() for s in seen] == [[10.0 * launch] for launch in range(6)]

    for seed in SEEDS:
        on_ranks(3, run, seed=seed, sms=2)


def test_small_tensors_are_sent_with_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flagged, "FLAG_BYTES", 50)
    made, launch = [], flagged.broadcast_launch
    monkeypatch.setattr(flagged, "broadcast_launch", lambda *args: made.append(1) or launch(*args))

    def run(world: Any) -> None:
        for dtype, n in ((torch.float32, 37), (torch.float32, 38), (torch.int16, 75), (torch.int8, 10)):
            made.clear()
            x = pkt.full((n,), world.rank, dtype=dtype)
            assert torch.equal(broadcast(x, 1).plain(), torch.ones(n, dtype=dtype))
            world.barrier()
            assert bool(made) == (x.nbytes <= 150 and dtype in flagged.DTYPES)
            world.barrier()

    on_ranks(2, run)


def test_part_of_a_tensor() -> None:
    def run(world: Any) -> None:
        x = pkt.full((40,), float(world.rank))
        broadcast(x[3:20], 2)
        expected = torch.full((40,), float(world.rank))
        expected[3:20] = 2
        assert torch.equal(x.plain(), expected)

    on_ranks(3, run)


# ------------------------------------------------------------------------------------------------- bad input
def test_a_root_that_is_no_rank() -> None:
    assert_raises(
        pkt.RankError, "broadcast: found rank 2, wanted an integer from 0 to 1", lambda w: broadcast(pkt.ones(4), 2)
    )


def test_ranks_that_disagree() -> None:
    assert_raises(pkt.CollectiveMismatch, "root=0.*root=1", lambda w: broadcast(pkt.ones(4), w.rank))
