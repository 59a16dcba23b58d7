"""All-gather + matmul: A sharded by rows and by columns, against fp64."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.all_gather_matmul import all_gather_matmul, reference

from .helpers import (
    FINISHES,
    LAUNCHES,
    REGISTERS,
    TMA,
    as_weight,
    assert_refused,
    assert_within,
    finished_bound,
    inputs,
    on_ranks,
    product_bound,
    random,
    rounded,
)

by_shard = pytest.mark.parametrize("shard", ["rows", "columns"])


def multiplies(
    world: Any,
    mode: Any,
    shard: Any,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    stored: Any = torch.Tensor.contiguous,
    **options: Any,
) -> torch.Tensor:
    m, k, N = sizes
    options = {"tiles": (16, 16, 16)} | ({"num_comm_sms": 1, "chunk": 16} if mode == "push" else {}) | options
    for launch in range(LAUNCHES):
        shards = inputs(world, (m, k), dtype, launch)
        b = random((k if shard == "rows" else world.size * k, N), dtype, launch, world.rank, 9)
        got = all_gather_matmul(shards[world.rank], stored(b), mode=mode, shard=shard, **options)
        exact = reference(0, shards, [b], shard=shard)
        whole = torch.cat(shards, dim=0 if shard == "rows" else 1)
        bound = rounded(exact, product_bound(whole, b), dtype)
        assert_within(got, exact, bound, world.rank, launch, sizes)
    return got


@by_shard
@pytest.mark.parametrize(("epilogue", "with_bias", "dtype", "sizes"), FINISHES)
def test_bias_and_epilogue(
    epilogue: Any, with_bias: bool, dtype: torch.dtype, sizes: tuple[int, int, int], shard: Any
) -> None:
    def run(world: Any) -> None:
        m, k, N = sizes
        shards = inputs(world, (m, k), dtype, 0)
        b = random((k if shard == "rows" else world.size * k, N), dtype, world.rank)
        bias = random((N,), dtype, world.rank, 1) if with_bias else None
        got = all_gather_matmul(shards[world.rank], b, shard=shard, tiles=(16, 16, 16), bias=bias, epilogue=epilogue)
        whole = torch.cat(shards, dim=0 if shard == "rows" else 1)
        bound = finished_bound(reference(0, shards, [b], shard=shard), product_bound(whole, b), bias, epilogue, dtype)
        exact = reference(0, shards, [b], [bias] if with_bias else None, epilogue, shard)
        assert_within(got, exact, bound, world.rank, epilogue)

    on_ranks(3, run)


@pytest.mark.parametrize("ranks", [1, 3, 5])
@pytest.mark.parametrize("push_rows", [1, 2, None])
def test_copies_of_any_size(push_rows: int | None, ranks: int) -> None:
    """By copy engines. The last copy is a smaller one; there are more row blocks than copies, and the reverse."""

    def run(world: Any) -> None:
        for sizes in (TMA, (33, 32, 5), (1, 8, 3)):
            multiplies(world, "copy", "rows", sizes, torch.bfloat16, push_rows=push_rows)
        multiplies(world, "copy", "rows", (20, 8, 40), torch.float32, as_weight, push_rows=push_rows)

    on_ranks(ranks, run)


@by_shard
@pytest.mark.parametrize("sms", [1, 2, 5])
@pytest.mark.parametrize("num_comm_sms", [1, 3, 16])
def test_any_split_of_the_programs(num_comm_sms: int, sms: int, shard: str) -> None:
    def run(world: Any) -> None:
        multiplies(world, "push", shard, (40, 40, 24), torch.bfloat16, num_comm_sms=num_comm_sms, chunk=33)

    on_ranks(2, run, sms=sms, seed=3)


@by_shard
@pytest.mark.parametrize("m", [1, 16, 40, 128])
def test_default_tiles_follow_the_rows(m: int, shard: str) -> None:
    def run(world: Any) -> None:
        multiplies(world, "push", shard, (m, 144, 72), torch.bfloat16, tiles=None)
        multiplies(world, "push", shard, (m, 144, 72), torch.bfloat16, tiles=None, num_comm_sms=None, chunk=None)

    on_ranks(2, run)


def test_default_chunks_are_shorter_by_columns() -> None:
    def run(world: Any) -> list[int]:
        for shard in ("rows", "columns"):
            a, b = torch.ones(2, 1088).bfloat16(), torch.ones(1088 * (2 if shard == "columns" else 1), 8).bfloat16()
            assert pkt.all_gather_matmul(a, b, shard=shard, world=world).eq(b.shape[0]).all()
        return [key[-1] for key in world._scopes[-1].kept if key[0] == "all_gather_matmul"]

    assert on_ranks(2, run) == [[1024, 256]] * 2


def test_shapes_and_shards_in_turn() -> None:
    def run(world: Any) -> None:
        for shard in ("rows", "columns", "rows", "columns"):
            multiplies(world, "push", shard, TMA, torch.bfloat16)
            multiplies(world, "push", shard, REGISTERS, torch.bfloat16)

    on_ranks(3, run, seed=3)


def test_settings_that_count_alike_share_an_inbox() -> None:
    """Otherwise a search among settings would fill the heap."""

    def run(world: Any) -> int:
        for group, stages in ((1, 2), (8, 2), (8, 4)):
            multiplies(world, "push", "rows", TMA, torch.bfloat16, tiles=(16, 16, 16, group, 4, stages))
        return sum(key[0] == "all_gather_matmul" for key in world._scopes[-1].kept)

    assert on_ranks(2, run) == [1, 1]


# ------------------------------------------------------------------------------------------------- bad input
bad = functools.partial(assert_refused, all_gather_matmul)


def test_bad_arguments() -> None:
    bad(pkt.Unsupported, "found rows of 3 elements, not whole runs of 16 bytes", (4, 3), (3, 4), mode="copy")
    bad(pkt.Unsupported, "mode='copy'.*found shard 'columns', not \"rows\"", (4, 4), (8, 4), mode="copy",
        shard="columns")  # fmt: skip
    bad(pkt.ShapeError, 'num_comm_sms: found 3, wanted none with mode "copy"', (4, 4), (4, 4), mode="copy",
        num_comm_sms=3)  # fmt: skip
    bad(pkt.ShapeError, "push_rows: found -1, wanted at least 0", (4, 4), (4, 4), mode="copy", push_rows=-1)
    bad(pkt.ShapeError, r"b: found \(5, 4\), wanted \(4, 4\)", (4, 4), (5, 4))
    bad(pkt.ShapeError, r"b: found \(4, 4\), wanted \(8, 4\)", (4, 4), (4, 4), shard="columns")
    bad(pkt.ShapeError, "a: found .*wanted 2 dimensions", (4,), (4, 4))
    bad(pkt.ShapeError, r"out: found \(4, 4\), wanted \(8, 4\)", (4, 4), (4, 4), (4, 4))
    bad(pkt.ShapeError, "tiles: found .*powers of two from 16", (4, 4), (4, 4), tiles=(8, 16, 16))
    bad(pkt.ShapeError, "num_comm_sms: found 0, wanted at least 1", (4, 4), (4, 4), num_comm_sms=0)
    bad(pkt.ShapeError, "chunk: found 0, wanted at least 1", (4, 4), (4, 4), chunk=0)
    bad(pkt.ShapeError, "tiles: found .*num_warps a power of two", (4, 4), (4, 4), tiles=(16, 16, 16, 1, 3))
    bad(pkt.ShapeError, "tiles: found .*three blocks", (4, 4), (4, 4), tiles=(16, 16))
    bad(pkt.ShapeError, "tiles: found .*at most", (4, 4), (4, 4), tiles=(16,) * 8)
    bad(pkt.ShapeError, 'rounds_alone: found 9, wanted none with mode "push"', (4, 4), (4, 4), rounds_alone=9)
    bad(pkt.ShapeError, 'cut_last: found 2, wanted none with mode "push"', (4, 4), (4, 4), mode="push", cut_last=2)
    bad(pkt.Unsupported, "wanted 'push' or 'copy' or 'gluon'", (4, 4), (4, 4), mode="send")
    bad(pkt.Unsupported, "found the simulator, and Gluon is compiled only", (4, 4), (4, 4), mode="gluon")
    bad(pkt.Unsupported, "found shard 'columns', not \"rows\"", (4, 4), (8, 4), mode="gluon", shard="columns")
    bad(pkt.ShapeError, r"bias: found \(3,\), wanted \(4,\)", (4, 4), (4, 4), bias=torch.ones(3))
    bad(pkt.DtypeError, "bias: found fp16, wanted float32", (4, 4), (4, 4), bias=torch.ones(4).half())
    bad(pkt.Unsupported, "found epilogue 'tanh': wanted 'none' or 'relu'", (4, 4), (4, 4), epilogue="tanh")
    bad(pkt.Unsupported, "wanted 'rows' or 'columns'", (4, 4), (4, 4), shard="diagonal")


def test_weights_contiguous_in_neither_order_are_refused() -> None:
    def run(world: Any) -> None:
        all_gather_matmul(torch.ones(4, 4), torch.ones(8, 8)[::2, ::2])

    with pytest.raises(pkt.ShapeError, match="b: found .*strides.*b.contiguous"):
        on_ranks(2, run)
