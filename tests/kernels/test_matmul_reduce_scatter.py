"""Matmul + reduce-scatter: reduce-add and inbox, against fp64."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.matmul_reduce_scatter import matmul_reduce_scatter, reference

from .helpers import (
    FINISHES,
    LAUNCHES,
    REGISTERS,
    SEEDS,
    TINY,
    TMA,
    UNIT,
    assert_refused,
    assert_within,
    errors_of_products,
    finished_bound,
    on_ranks,
    operands,
    random,
    sum_of_products_bound,
)

MODES = ("add", "inbox")


def bound(ops: list[tuple[torch.Tensor, torch.Tensor]], exact: torch.Tensor, mode: str) -> torch.Tensor:
    """Each partial product is rounded to the dtype. "add" rounds at each addition, to u of a partial sum, which the
    sum of the magnitudes bounds; "inbox" adds in fp32 and rounds once."""
    if mode == "inbox":
        return sum_of_products_bound(ops, exact)
    dtype, size = ops[0][0].dtype, len(ops)
    magnitude, fp32, partials = errors_of_products(ops)
    growth = (1 + UNIT[dtype]) ** size
    return fp32 + partials + (size - 1) * (UNIT[dtype] * growth * (magnitude + fp32) + TINY[dtype])


def multiplies(
    world: Any,
    mode: Any,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    stored: Any = torch.Tensor.contiguous,
    tiles: Any = (16, 16, 16),
) -> torch.Tensor:
    m, k, N = sizes
    for launch in range(LAUNCHES):
        ops = operands(world, (world.size * m, k), (k, N), dtype, launch)
        a, b = ops[world.rank]
        got = matmul_reduce_scatter(a, stored(b), mode=mode, tiles=tiles)
        exact = reference(world.rank, *zip(*ops))
        limit = bound(ops, torch.cat([reference(r, *zip(*ops)) for r in range(world.size)]), mode)
        assert_within(got, exact, limit.chunk(world.size)[world.rank], world.rank, launch, sizes)
    return got


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("epilogue", "with_bias", "dtype", "sizes"), FINISHES)
def test_bias_and_epilogue(
    epilogue: Any, with_bias: bool, dtype: torch.dtype, sizes: tuple[int, int, int], mode: Any
) -> None:
    """Bias and epilogue are applied once, whatever the number of ranks."""

    def run(world: Any) -> None:
        m, k, N = sizes
        ops = operands(world, (world.size * m, k), (k, N), dtype, 0)
        bias = random((N,), dtype, 1) if with_bias else None
        got = matmul_reduce_scatter(*ops[world.rank], mode=mode, tiles=(16, 16, 16), bias=bias, epilogue=epilogue)
        whole = torch.cat([reference(r, *zip(*ops)) for r in range(world.size)])
        bound_of_all = finished_bound(whole, bound(ops, whole, mode), bias, epilogue, dtype)
        limit = bound_of_all.chunk(world.size)[world.rank]
        exact = reference(world.rank, *zip(*ops), [bias] * world.size if with_bias else None, epilogue)
        assert_within(got, exact, limit, world.rank, epilogue)

    on_ranks(3, run)


def test_every_schedule_of_the_inbox_gives_the_same_bits() -> None:
    runs = [on_ranks(4, multiplies, "inbox", REGISTERS, torch.bfloat16, seed=seed, sms=3) for seed in SEEDS]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_one_program(mode: str) -> None:
    on_ranks(2, multiplies, mode, TMA, torch.bfloat16, sms=1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("m", [1, 16, 40, 128])
def test_default_tiles_follow_the_rows(m: int, mode: str) -> None:
    on_ranks(2, multiplies, mode, (m, 144, 72), torch.bfloat16, torch.Tensor.contiguous, None)


def test_shapes_and_forms_in_turn() -> None:
    def run(world: Any) -> None:
        for mode in (*MODES, *MODES):
            multiplies(world, mode, TMA, torch.bfloat16)
            multiplies(world, mode, REGISTERS, torch.bfloat16)

    on_ranks(3, run, seed=3)


# ------------------------------------------------------------------------------------------------- bad input
bad = functools.partial(assert_refused, matmul_reduce_scatter)


def test_bad_arguments() -> None:
    bad(pkt.ShapeError, "a: found .*divisible by 2 ranks", (5, 4), (4, 4))
    bad(pkt.ShapeError, r"b: found \(5, 4\), wanted \(4, 4\)", (4, 4), (5, 4))
    bad(pkt.ShapeError, r"out: found \(4, 4\), wanted \(2, 4\)", (4, 4), (4, 4), (4, 4))
    bad(pkt.ShapeError, "tiles: found", (4, 4), (4, 4), tiles=(16, 48, 16))
    bad(pkt.ShapeError, r"bias: found \(3,\), wanted \(4,\)", (4, 4), (4, 4), bias=torch.ones(3))
    bad(pkt.ShapeError, 'lag: found 2, wanted none with mode "add"', (4, 4), (4, 4), lag=2)
    bad(pkt.Unsupported, "wanted 'add' or 'inbox' or 'gluon'", (4, 4), (4, 4), mode="ring")
    bad(pkt.Unsupported, "found the simulator, and Gluon is compiled only", (4, 4), (4, 4), mode="gluon")
