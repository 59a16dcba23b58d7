"""Broadcast: every rank's tensor becomes root's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.broadcast import OPERATOR, broadcast, reference
from pkt.kernels.shared import flagged
from pkt.kernels.shared.checks import NUMBERS

from .helpers import DTYPES, LAUNCHES, RANKS, SEEDS, inputs, on_ranks

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
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_equals_the_reference_from_every_root(ranks: int, dtype: torch.dtype, mode: str) -> None:
    on_ranks(ranks, broadcasts, (13, 3), dtype, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1,), (16,), (17,), (5, 1, 3), (64, 4), (333,)])
def test_sizes_that_do_not_divide_the_blocks(shape: tuple[int, ...], mode: str) -> None:
    on_ranks(3, broadcasts, shape, torch.bfloat16, mode)
    on_ranks(2, broadcasts, shape, torch.bfloat16, mode, None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_schedule(seed: int, mode: str) -> None:
    on_ranks(4, broadcasts, (40,), torch.float32, mode, seed=seed, sms=2)


def test_a_root_that_hurries_waits_for_the_slowest() -> None:
    """Root gets nothing of what is broadcast, but a word of everybody in every launch: so it is one launch ahead at
    most, and puts nothing where what it put has not been taken."""

    def run(world: Any) -> None:
        x, seen = pkt.empty(300), []
        for launch in range(6):
            x.fill_(10.0 * launch + world.rank)
            seen.append(broadcast(x, 0, mode="low_latency").plain().clone())
        assert [s.unique().tolist() for s in seen] == [[10.0 * launch] for launch in range(6)]

    for seed in SEEDS:
        on_ranks(3, run, seed=seed, sms=2)


def test_what_is_small_is_sent_with_flags(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_tensor_of_this_rank_alone_in_flagged_words() -> None:
    def run(world: Any) -> None:
        x = torch.full((11,), float(world.rank))
        assert broadcast(x, 2, mode="low_latency") is x
        assert x.eq(2).all()

    on_ranks(3, run)


def test_any_element_type() -> None:
    def run(world: Any) -> None:
        for dtype in NUMBERS:
            x = pkt.full((11,), world.rank, dtype=dtype)
            assert torch.equal(broadcast(x, 1).plain(), torch.ones(11, dtype=dtype))

    on_ranks(2, run)


def test_part_of_a_tensor() -> None:
    def run(world: Any) -> None:
        x = pkt.full((40,), float(world.rank))
        broadcast(x[3:20], 2)
        expected = torch.full((40,), float(world.rank))
        expected[3:20] = 2
        assert torch.equal(x.plain(), expected)

    on_ranks(3, run)


def test_nothing_to_send() -> None:
    on_ranks(2, lambda world: broadcast(pkt.empty(0, 4)).shape == (0, 4) or pytest.fail("shape"))


# ------------------------------------------------------------------------------------------------- bad input
def bad(error: type[Exception], match: str, call: Any) -> None:
    with pytest.raises(error, match=match):
        on_ranks(2, call)


def test_bad_arguments() -> None:
    bad(pkt.NotSymmetric, "broadcast: x must be a symmetric tensor", lambda w: broadcast(torch.ones(4)))
    bad(pkt.RankError, "broadcast: found rank 2, wanted an integer from 0 to 1", lambda w: broadcast(pkt.ones(4), 2))
    bad(pkt.DtypeError, "x: found complex64", lambda w: broadcast(pkt.empty(4, dtype=torch.complex64)))
    bad(pkt.ShapeError, "wanted a contiguous tensor", lambda w: broadcast(pkt.ones(4, 4).t()))
    bad(pkt.Unsupported, "wanted 'pass_on' or 'low_latency'", lambda w: broadcast(pkt.ones(4), mode="push"))
    bad(pkt.DtypeError, "x: found int8", lambda w: broadcast(pkt.ones(4, dtype=torch.int8), mode="low_latency"))
    bad(pkt.ShapeError, "block: found 0, wanted a power of two", lambda w: broadcast(pkt.ones(4), block=0))


def test_ranks_that_disagree() -> None:
    bad(pkt.CollectiveMismatch, "root=0.*root=1", lambda w: broadcast(pkt.ones(4), w.rank))
