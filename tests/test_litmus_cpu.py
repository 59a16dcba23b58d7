"""The litmus tests in the simulator: right in every schedule, wrong if a part of the synchronisation is missing."""

from typing import Any

import pytest

import pkt
from pkt.simulate.findings import DataRace
from tests.cases_litmus import LITMUS, WITHOUT_FENCE, WRONG

PROGRAMS, ROUNDS = 3, 3


def program(world: Any, name: str, rounds: int = ROUNDS) -> None:
    found = LITMUS[name](world, PROGRAMS, rounds)
    assert found.messages > 0 or name == "store buffering, tickets"  # the same partner may be last every time
    assert found.stale == 0


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", LITMUS)
def test_no_message_is_stale(name: str, ranks: int) -> None:
    seeds = {2: (0, 1), 3: (3,), 4: (6,)}[ranks]  # in order, random; adversarial
    pkt.simulate(program, ranks=ranks, seeds=seeds, args=(name,), heap="1MiB", multicast=False).check()


@pytest.mark.parametrize("name", LITMUS)
def test_each_part_of_the_synchronisation_is_needed(name: str) -> None:
    report = pkt.simulate(
        program, ranks=3, seeds=2, args=(name, 2), heap="1MiB", multicast=False, mutants=True, max_findings=1
    )
    assert report.mutants or name == "store buffering, tickets"
    report.check()


@pytest.mark.parametrize("races", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_a_stale_message_is_detected(name: str, races: bool) -> None:
    """The race detector finds stale messages. So do the values alone, as on a GPU.

    Only the race detector finds a missing fence, because all simulated ranks see TMA accesses at once.
    """

    def early(world: Any) -> None:
        assert WRONG[name](world, PROGRAMS, ROUNDS).stale == 0, "stale messages"

    report = pkt.simulate(early, ranks=2, seeds=12, heap="1MiB", races=races, max_findings=1)
    if name == WITHOUT_FENCE and not races:
        report.check()
        return
    (found,) = report.findings
    assert isinstance(found.failure, DataRace) if races else "stale messages" in str(found.failure)
