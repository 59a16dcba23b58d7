"""The programs that gpu/test_graphs.py replays, a few launches of each in the simulator."""

import pytest

import pkt
from tests.gpu.cases_graphs import CASES, PROGRAMS, skewed


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_many_launches(name: str, ranks: int) -> None:
    seeds = {2: (0, 1), 3: (3,)}[ranks]
    pkt.simulate(CASES[name], ranks=ranks, seeds=seeds, heap="1MiB", multicast=False).check()


@pytest.mark.parametrize("name", PROGRAMS)
def test_skewed(name: str) -> None:
    pkt.simulate(skewed, ranks=2, seeds=(4, 6), args=(name, 4), heap="1MiB", multicast=False).check()
