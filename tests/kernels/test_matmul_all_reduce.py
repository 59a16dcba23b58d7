"""Matmul + all-reduce on the LCSC template, against fp64; all ranks hold the same bits."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.matmul_all_reduce import matmul_all_reduce, reference

from .helpers import (
    FINISHES,
    LAUNCHES,
    REGISTERS,
    SEEDS,
    TMA,
    assert_refused,
    assert_same_on_all,
    assert_within,
    finished_bound,
    on_ranks,
    operands,
    random,
    sum_of_products_bound,
)


def multiplies(
    world: Any,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    in_place: bool = False,
    num_comm_sms: int = 1,
    stored: Any = torch.Tensor.contiguous,
    tiles: Any = (16, 16, 16),
) -> torch.Tensor:
    M, k, N = sizes
    out = pkt.empty(M, N, dtype=dtype) if in_place else None
    for launch in range(LAUNCHES):
        ops = operands(world, (M, k), (k, N), dtype, launch)
        a, b = ops[world.rank]
        got = matmul_all_reduce(a, stored(b), out, num_comm_sms=num_comm_sms, tiles=tiles)
        exact = reference(0, *zip(*ops))
        assert_within(got, exact, sum_of_products_bound(ops, exact), world.rank, launch, sizes)
    return got.clone()


@pytest.mark.parametrize("multicast", [False, True])
@pytest.mark.parametrize(("epilogue", "with_bias", "dtype", "sizes"), FINISHES)
def test_bias_and_epilogue(
    epilogue: Any, with_bias: bool, dtype: torch.dtype, sizes: tuple[int, int, int], multicast: bool
) -> None:
    """Bias and epilogue are applied once, whatever the number of ranks."""

    def run(world: Any) -> torch.Tensor:
        M, k, N = sizes
        ops = operands(world, (M, k), (k, N), dtype, 0)
        bias = random((N,), dtype, 1) if with_bias else None
        out = pkt.empty(M, N, dtype=dtype) if multicast else None
        got = matmul_all_reduce(*ops[world.rank], out, tiles=(16, 16, 16), bias=bias, epilogue=epilogue)
        whole = reference(0, *zip(*ops))
        limit = finished_bound(whole, sum_of_products_bound(ops, whole), bias, epilogue, dtype)
        exact = reference(0, *zip(*ops), [bias] if with_bias else None, epilogue)
        assert_within(got, exact, limit, world.rank, epilogue)
        return got.clone()

    assert_same_on_all(on_ranks(3, run, multicast=multicast))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("multicast", [False, True])
def test_every_schedule_gives_the_same_bits(multicast: bool, in_place: bool) -> None:
    runs = [on_ranks(4, multiplies, TMA, torch.bfloat16, in_place, seed=seed, multicast=multicast) for seed in SEEDS]
    for run in runs:
        assert all(torch.equal(r, runs[0][0]) for r in run)


@pytest.mark.parametrize("sms", [1, 2, 5])
@pytest.mark.parametrize("num_comm_sms", [0, 1, 3, 16])
def test_any_split_of_the_programs(num_comm_sms: int, sms: int) -> None:
    on_ranks(2, multiplies, (40, 16, 40), torch.float16, False, num_comm_sms, sms=sms, seed=3)


@pytest.mark.parametrize("M", [1, 16, 40, 128])
def test_default_tiles_follow_the_rows(M: int) -> None:
    assert_same_on_all(on_ranks(2, multiplies, (M, 144, 72), torch.bfloat16, False, 1, torch.Tensor.contiguous, None))


def test_shapes_in_turn() -> None:
    def run(world: Any) -> None:
        for sizes in (TMA, REGISTERS, TMA, REGISTERS):
            multiplies(world, sizes, torch.bfloat16)

    on_ranks(3, run, seed=3)


# ------------------------------------------------------------------------------------------------- bad input
bad = functools.partial(assert_refused, matmul_all_reduce)


def test_bad_arguments() -> None:
    bad(pkt.ShapeError, r"b: found \(5, 4\), wanted \(4, 4\)", (4, 4), (5, 4))
    bad(pkt.ShapeError, r"out: found \(4, 3\), wanted \(4, 4\)", (4, 4), (4, 4), (4, 3))
    bad(pkt.ShapeError, "num_comm_sms: found -1, wanted at least 0", (4, 4), (4, 4), num_comm_sms=-1)
    bad(pkt.ShapeError, "tiles: found", (4, 4), (4, 4), tiles=(16, 16, 8))
    bad(pkt.ShapeError, r"bias: found \(3,\), wanted \(4,\)", (4, 4), (4, 4), bias=torch.ones(3))
    bad(pkt.ShapeError, 'lag: found 2, wanted none with mode "lcsc"', (4, 4), (4, 4), lag=2)
    bad(
        pkt.ShapeError,
        'num_comm_sms: found 2, wanted none with mode "gluon"',
        (4, 4),
        (4, 4),
        mode="gluon",
        num_comm_sms=2,
    )
    bad(pkt.Unsupported, "wanted 'lcsc' or 'gluon'", (4, 4), (4, 4), mode="ring")
    bad(pkt.Unsupported, "found the simulator, and Gluon is compiled only", (4, 4), (4, 4), mode="gluon")


def test_ranks_that_disagree() -> None:
    def run(world: Any) -> None:
        out = pkt.empty(4, 4)
        matmul_all_reduce(torch.ones(4, 4), torch.ones(4, 4), out if world.rank else None)

    with pytest.raises(pkt.CollectiveMismatch, match=r"out=None.*out=\(4, 4\) "):
        on_ranks(2, run)
