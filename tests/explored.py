"""Counts what the tests explore in simulation, and prints the sums of all pytest workers at the end of a run.

The counts show that a cheaper test run finds no less than before: they must not fall.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

COUNTS: Counter[str] = Counter()
"""Kind of exploration -> its count, in this process and in the workers that have ended."""

LINE = (
    "explored: {schedules:,} schedules, {orders:,} orders of Gluon kernels, "
    "{mutants:,} mutants, {signals:,} lost signals, {losses:,} lost ranks"
)


def _before(owner: Any, name: str, count: Callable[..., None]) -> None:
    """Make `owner.name` call `count` with its own arguments first."""
    whole = getattr(owner, name)

    @functools.wraps(whole)
    def counted(*args: Any, **named: Any) -> Any:
        count(*args, **named)
        return whole(*args, **named)

    setattr(owner, name, counted)


def count_explorations() -> None:
    """Count from now on: every run of a simulated program without a fault (a schedule), every mutant, lost signal and
    lost rank that `pkt.simulate` tries, and every run of a Gluon kernel's source (an order of events)."""
    from pkt.simulate import explore
    from pkt.simulate.faults import NO_FAULTS, Faults
    from pkt.simulate.machine import Machine

    def run(machine: Machine, body: Any) -> None:
        COUNTS["schedules"] += machine.faults == NO_FAULTS

    def caught(once: Any, faults: Faults) -> None:
        COUNTS["mutants"] += faults.mutant is not None
        COUNTS["signals"] += faults.drop is not None

    def execute(*args: Any, faults: Faults, **named: Any) -> None:
        COUNTS["losses"] += faults.lose is not None

    def orders(machine: Any, launches: Any) -> None:
        COUNTS["orders"] += 1

    _before(Machine, "run", run)
    _before(explore, "_caught", caught)
    _before(explore, "execute", execute)
    # Tests import this module under different names.
    for module in [m for name, m in sys.modules.items() if name.endswith("kernels.gluon_machine")]:
        _before(module.Machine, "run", orders)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.items:  # the process that only distributes tests to workers has none
        count_explorations()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    COUNTS.update(getattr(node, "workeroutput", {}).get("explored", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["explored"] = dict(COUNTS)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if COUNTS:
        kinds = ("schedules", "orders", "mutants", "signals", "losses")
        terminalreporter.write_line(LINE.format(**{kind: COUNTS[kind] for kind in kinds}))
