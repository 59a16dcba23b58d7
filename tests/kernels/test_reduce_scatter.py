"""Reduce-scatter: each rank has its part of the sum, in fp32 and rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.reduce_scatter import reduce_scatter, reference

from .helpers import DTYPES, LAUNCHES, RANKS, SEEDS, assert_within, inputs, on_ranks, sum_bound


def scatters(world: Any, part: tuple[int, ...], dtype: torch.dtype, block: int | None = 16) -> torch.Tensor:
    shape = (world.size * part[0], *part[1:])
    x = pkt.empty(shape, dtype=dtype)
    for launch in range(LAUNCHES):
        everybody = inputs(world, shape, dtype, launch)
        x.copy_(everybody[world.rank])
        got = reduce_scatter(x, block=block)
        bound = sum_bound(everybody).chunk(world.size)[world.rank]
        assert_within(got, reference(everybody, world.rank), bound, world.rank, launch)
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_equals_the_reference(ranks: int, dtype: torch.dtype) -> None:
    on_ranks(ranks, scatters, (13, 3), dtype)


@pytest.mark.parametrize("part", [(1,), (16,), (17,), (5, 1, 3), (64, 4), (333,)])
def test_sizes_that_do_not_divide_the_blocks(part: tuple[int, ...]) -> None:
    on_ranks(3, scatters, part, torch.bfloat16)


def test_every_schedule_gives_the_same_bits() -> None:
    runs = [on_ranks(4, scatters, (40,), torch.bfloat16, seed=seed, sms=2) for seed in SEEDS]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_one_program_and_the_default_block() -> None:
    on_ranks(2, scatters, (100, 7), torch.float16, None, sms=1)


def test_a_given_output() -> None:
    def run(world: Any) -> None:
        out = torch.empty(4)
        assert reduce_scatter(pkt.ones(4 * world.size), out) is out
        assert torch.equal(out, torch.full((4,), float(world.size)))

    on_ranks(3, run)


# ------------------------------------------------------------------------------------------------- bad input
def bad(error: type[Exception], match: str, call: Any) -> None:
    with pytest.raises(error, match=match):
        on_ranks(2, call)


def test_bad_arguments() -> None:
    bad(
        pkt.NotSymmetric,
        "reduce_scatter: x must be a symmetric tensor",
        lambda w: reduce_scatter(torch.ones(4)),
    )
    bad(pkt.ShapeError, "divisible by 2 ranks", lambda w: reduce_scatter(pkt.ones(5)))
    bad(pkt.ShapeError, "divisible by 2 ranks", lambda w: reduce_scatter(pkt.ones(())))
    bad(
        pkt.DtypeError,
        "x: found int32, wanted bfloat16 or float16 or float32",
        lambda w: reduce_scatter(pkt.ones(4, dtype=torch.int32)),
    )
    bad(pkt.ShapeError, r"out: found \(3,\)", lambda w: reduce_scatter(pkt.ones(4), torch.ones(3)))
    bad(pkt.DtypeError, "out: found fp16", lambda w: reduce_scatter(pkt.ones(4), torch.ones(2).half()))


def test_ranks_that_disagree() -> None:
    bad(
        pkt.CollectiveMismatch,
        "rank 0: reduce_scatter.*rank 1: reduce_scatter",
        lambda w: reduce_scatter(pkt.ones(8)[: 4 + 2 * w.rank]),
    )
