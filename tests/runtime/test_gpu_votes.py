"""Votes on a step of the driver: one error on all ranks, and which one."""

import warnings
from types import SimpleNamespace

import pytest

from pkt.errors import DriverError, HeapFull
from pkt.runtime.gpu.driver import OUT_OF_MEMORY
from pkt.runtime.gpu.votes import Votes

FULL, BROKEN = {"error": "rank: no memory", "code": OUT_OF_MEMORY}, {"error": "rank: broken", "code": 719}
VOTES = {"full": FULL, "broken": BROKEN, "well": {}}


def votes(rank=0):
    return Votes(SimpleNamespace(rank=rank), "cuda:0")


@pytest.mark.parametrize("said", [("full", "broken"), ("broken", "full"), ("broken",), ("full", "well", "broken")])
def test_a_heap_is_full_only_if_nothing_else_failed(said):
    with pytest.raises(DriverError) as caught:
        votes().check([VOTES[word] for word in said], "growing", 4096)
    for rank, word in enumerate(said):
        assert (f"rank {rank}: {VOTES[word].get('error')}" in str(caught.value)) == (word != "well")


@pytest.mark.parametrize("said", [("full",), ("well", "full"), ("full", "full")])
def test_a_heap_is_full_if_one_rank_has_no_memory(said):
    with pytest.raises(HeapFull):
        votes().check([VOTES[word] for word in said], "growing", 4096)
    with pytest.raises(DriverError):  # where nothing was to grow
        votes().check([VOTES[word] for word in said], "importing")


def test_nothing_is_raised_if_all_worked():
    votes().check([{}, {}], "growing", 4096)


@pytest.mark.parametrize(("rank", "warned"), [(0, 1), (1, 0)])
def test_rank_0_warns_that_a_rank_goes_on_without(rank, warned):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not votes(rank).agreed([{}, BROKEN], "multicast")
        assert votes(rank).agreed([{}, {}], "multicast")
    assert len(caught) == warned
