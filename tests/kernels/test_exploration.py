"""The shipped kernels under thousands of schedules, with every piece of their synchronisation broken in turn.

PKT_SCHEDULES sets how many schedules there are in all (2,000 by default); a failure prints the seed that replays it.
"""

from __future__ import annotations

import os

import pytest

import pkt
from pkt.simulate.run import execute
from tests.kernels.cases import CASES, Case

SCHEDULES = int(os.environ.get("PKT_SCHEDULES", "2000"))
LOST_RANKS = 3  # random points at which a rank stops or dies, for each case


def share() -> int:
    """Schedules of one case: all of them together are at least SCHEDULES."""
    return -(-SCHEDULES // len(CASES))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.ranks}")
def test_right_in_every_schedule_and_every_fault_is_caught(case: Case) -> None:
    report = pkt.simulate(
        case.fn,
        ranks=case.ranks,
        seeds=share(),
        mutants=True,
        lost_signals=True,
        lost_ranks=LOST_RANKS,
        **case.options,
    )
    print(report)
    report.check()
    assert report.schedules == share()
    assert report.mutants
    assert report.signals


def test_there_is_enough_to_break() -> None:
    mutants = set()
    for case in CASES:
        census = execute(case.fn, case.ranks, **case.options).machine.census
        mutants |= set(census.mutants())
    changes = {m.change for m in mutants}
    print(f"{len(mutants)} mutants of {len({m.site for m in mutants})} sites: {', '.join(sorted(changes))}")
    assert len(mutants) >= 30
    assert {"remove", "relax"} <= changes
