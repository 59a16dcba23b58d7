"""The low_latency forms of the products: bits alike on all ranks, parts of K, tiles for few rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from pkt.errors import ShapeError
from pkt.kernels.shared import few_rows_rules as rules
from pkt.kernels.shared.tile_words import words_of_row
from pkt.model.gpu import H200

TILES = (16, 32, 16)


def products(world: Any, split: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(10 * world.rank + seed)
    a, b = torch.randn(5, 150, dtype=torch.bfloat16), torch.randn(150, 45, dtype=torch.bfloat16)
    return pkt.matmul_all_reduce(a, b, mode="low_latency", tiles=TILES, split_k=split, world=world)


@pytest.mark.parametrize("split", rules.SPLITS)
def test_all_ranks_have_the_same_bits_under_every_schedule(split: int) -> None:
    runs = [pkt.launch(products, 3, "cpu", args=(split,), seed=seed) for seed in (0, 1, 6)]
    first = runs[0][0]
    assert all(torch.equal(found, first) for run in runs for found in run)


def test_launches_of_other_shapes_share_the_words() -> None:
    """All take from the same slots, so a word of an earlier launch must not be taken for one of this launch."""

    def body(world: Any) -> None:
        for launch, (m, k, n) in enumerate(((3, 16, 24), (5, 40, 24), (3, 16, 24), (2, 16, 40))):
            torch.manual_seed(launch)
            a, b = torch.randn(2 * m, k), torch.randn(k, n)
            found = pkt.matmul_reduce_scatter(a, b, mode="low_latency", tiles=TILES, split_k=1, world=world)
            exact = (2 * a.double() @ b.double()).tensor_split(2)[world.rank]
            torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)

    pkt.launch(body, 2, "cpu", seed=3)


def test_a_rank_that_is_a_launch_ahead_spares_the_words_that_others_still_need() -> None:
    def body(world: Any) -> None:
        for launch in range(5):
            a, b = torch.full((3, 16), float(world.rank + launch)), torch.ones(16, 16)
            found = pkt.matmul_reduce_scatter(a, b, mode="low_latency", tiles=(16, 16, 16), split_k=1, world=world)
            assert found.eq(16 * (3 + 3 * launch)).all()

    pkt.simulate(body, ranks=3, seeds=8, sms=1).check()


def test_parts_of_k_are_a_power_of_two() -> None:
    def body(world: Any) -> None:
        with pytest.raises(ShapeError, match=r"split_k: found 3, wanted 1 or 2 or 4 or 8"):
            products(world, 3)

    pkt.launch(body, 1, "cpu")


@pytest.mark.parametrize("M", [1, 16, 17, 64, 65, 128, 256])
@pytest.mark.parametrize("N", [8, 1024, 4096, 14336, 53248])
def test_tiles_fit_shared_memory_and_keep_programs_busy(M: int, N: int) -> None:
    tiles = rules.tiles_of(M, N, torch.bfloat16)
    assert M <= tiles.block_m or tiles.block_m == 128
    ring = tiles.num_stages * tiles.block_k * (tiles.block_m + tiles.block_n) * 2
    assert ring <= H200.shared
    split = rules.split_of(M, N, 8192, tiles, 132)
    count = -(-M // tiles.block_m) * -(-N // tiles.block_n)
    assert split == 1 or 2 * count * (split // 2) < 132, "half as many parts would keep half of the programs busy"


def test_a_row_has_few_more_words_than_it_needs() -> None:
    assert [words_of_row.fn(n, per) for n, per in ((16, 2), (64, 2), (64, 1), (256, 2))] == [3, 12, 24, 48]
