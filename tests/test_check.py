"""The check of the benchmarks' results finds one wrong tile of many, and lets rounding pass."""

import pytest
import torch

from benchmarks._check import BOUND
from pkt.tune import distance as module
from pkt.tune.distance import TILE, distance


def product(rows, cols):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(2048, 4096), (4096, 2048), (100, 70), (1, 5), (513, 257)])
@pytest.mark.parametrize("scale", [1.0, -2.0])
def test_rounding_passes(shape, scale):
    exact = product(*shape)
    assert 1e-4 < distance((scale * exact).bfloat16(), exact, scale) < BOUND / 2
    assert distance(scale * exact, exact, scale) == 0.0


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (17, 60), (31, 63)])
def test_one_wrong_tile_of_many_is_found(value, place):
    """A tile of 64 x 64 of 2,048. If its elements are 0, that is 2.2e-2 of the whole result's norm; of 10,000 1e-2."""
    exact = product(32 * 64, 64 * 64)
    found = exact.bfloat16()
    row, col = 64 * place[0], 64 * place[1]
    found[row : row + 64, col : col + 64] = value
    assert distance(found, exact, 1.0) > 5 * BOUND


def test_one_wrong_tile_in_a_million_is_found():
    """A tile that misses a part of its sum, 32 of 4096 terms, so that its elements are off by 9 %, among the tiles of a
    result of any width. Tiles are compared alone, so how many there are cannot matter."""
    exact = product(TILE, 1000 * TILE)
    found = exact.bfloat16()
    late = slice(777 * TILE, 778 * TILE)
    found[:, late] += (0.09 * exact[:, late].flip(0)).bfloat16()
    assert distance(exact.bfloat16(), exact) < BOUND / 2
    assert distance(found, exact) > 5 * BOUND


def test_the_whole_is_compared_in_parts(monkeypatch):
    exact = product(5 * TILE + 3, TILE + 5)
    found = exact.clone()
    found[-1, -1] += 5.0
    whole = distance(found, exact)
    monkeypatch.setattr(module, "_AT_ONCE", 1)
    assert whole == distance(found, exact) > BOUND
    assert distance(exact, exact) == 0.0
    assert distance(torch.zeros(0), torch.zeros(0)) == 0.0


def test_a_tile_of_zeros_is_held_against_the_rest():
    exact = product(2 * TILE, 2 * TILE)
    exact[:TILE, TILE:] = 0.0
    found = exact.clone()
    found[0, TILE:] = 1e-6
    assert distance(found, exact) < 1e-4
    found[0, TILE:] = 1.0
    assert distance(found, exact) > 0.1
