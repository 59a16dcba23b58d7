"""A signal that is not sent is reported, by name and in time, and nothing hangs. PKT_TEST_DROPS changes how often."""

import re

import pytest

from pkt.errors import RankFailed, WaitTimeout
from tests.gpu.cases_timeouts import HOWS, PROGRAMS, drop_once, many_drops, too_wide, waiters
from tests.gpu.run import launch, on_ranks, scaled

DROPS = scaled("DROPS", 100)
DEADLINE = 0.05  # seconds, in many_drops


@on_ranks(2)
@pytest.mark.parametrize("how", HOWS)
def test_a_dropped_signal_ends_the_launch_with_a_name(how: str, ranks: int) -> None:
    dropper, dropped = ranks - 1, 1
    with pytest.raises(RankFailed) as caught:
        launch(drop_once, ranks, how, dropper, dropped, timeout=3.0)
    assert isinstance(caught.value.__cause__, WaitTimeout)
    text = str(caught.value)
    assert "drop_kernel" in text
    assert re.search(r"flags\[\d+\]", text)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("how", HOWS)
def test_dropped_signals_one_after_the_other(how: str, ranks: int) -> None:
    drops = -(-DROPS // len(HOWS))
    results = launch(many_drops, ranks, how, drops, DEADLINE)
    for i in range(drops):
        told = {rank: said[i][0] for rank, said in enumerate(results)}
        wanted = waiters(how, ranks, i % ranks, i // ranks % PROGRAMS)
        assert all(told[rank] for rank, _ in wanted), (how, i, told)
        named = " ".join(told.values())
        assert any(f"rank {rank}" in named for rank, _ in wanted), named
        assert max(said[i][1] for said in results) < DEADLINE + 2
    print(f"{how}, {ranks} ranks: {drops} drops, {max(s for said in results for _, s in said):.2f} s at most")


@on_ranks(1)
def test_a_grid_that_cannot_be_resident_is_refused(ranks: int) -> None:
    assert launch(too_wide, ranks)[0] >= 1
