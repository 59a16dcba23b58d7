"""Several processes that share a search: the same report as one process, and none of them left behind."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from pkt.errors import ShapeError
from pkt.simulate import engine, processes
from pkt.simulate.explore import Report, simulate
from tests.simulate.test_explore import exchange_main, to_all_main
from tests.simulate.test_races import gather_main

pytestmark = pytest.mark.machine


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share all but the first item, however short it is."""
    monkeypatch.setattr(processes, "ALONE", 0.0)


def said(report: Report) -> tuple:
    """All that a report says but the time."""
    faults = [{str(k): str(v) for k, v in found.items()} for found in report._tried().values()]
    found = [str(f) for f in report.findings]
    return report.schedules, report.policies, report.orders, report.programs, report.skipped, found, faults


@pytest.mark.parametrize(
    ("fn", "ranks", "args", "options"),
    [
        (gather_main, 3, ("none",), {"seeds": 30}),
        (gather_main, 3, ("constant",), {"seeds": 30, "max_findings": 2}),
        (to_all_main, 3, (False,), {"seeds": [7, 3, 11, 4, 2], "mutants": True}),
        (exchange_main, 2, (), {"seeds": 7, "mutants": True, "lost_signals": True, "lost_ranks": 4}),
    ],
)
def test_the_report_does_not_depend_on_the_number_of_processes(
    fn: Callable, ranks: int, args: tuple, options: dict[str, Any]
) -> None:
    alone, three = (simulate(fn, ranks, args=args, heap="1MiB", processes=n, **options) for n in (1, 3))
    assert said(alone) == said(three)
    assert alone.programs > alone.schedules
    assert not multiprocessing.active_children()


def test_results_come_in_order_from_several_processes() -> None:
    found = list(processes.each(lambda n: (n, os.getpid()), range(20), 3))
    assert [n for n, _ in found] == list(range(20))
    assert len({pid for _, pid in found}) == 4  # the first one is this process's own
    assert found[0][1] == os.getpid()


def test_one_process_does_what_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ALONE", 60.0)
    assert set(processes.each(lambda n: os.getpid(), range(20), 3)) == {os.getpid()}


def failing(n: int) -> int:
    if n == 5:
        raise ValueError("five")
    return n


@pytest.mark.parametrize("first", [0, 1])
def test_one_process_does_all_where_others_cannot_start(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a limit of processes, or with too little memory. first: how many forks do work."""
    fork, forks = os.fork, itertools.count()

    def refused() -> int:
        if next(forks) >= first:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", refused)
    found = list(processes.each(lambda i: (i, os.getpid()), range(9), 3))
    assert found == [(i, os.getpid()) for i in range(9)]
    assert not multiprocessing.active_children()


def test_an_exception_is_raised_in_its_place() -> None:
    results = processes.each(failing, range(20), 2)
    assert list(itertools.islice(results, 5)) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="five"):
        next(results)
    assert not multiprocessing.active_children()


def test_results_that_cannot_be_pickled_are_found_here() -> None:
    found = list(processes.each(lambda n: lambda: n, range(6), 2))
    assert [one() for one in found] == list(range(6))


def test_processes_end_where_the_search_stops_early() -> None:
    with closing(processes.each(lambda n: time.sleep(0.01 * n), range(1000), 2)) as found:
        next(found), next(found)
        children = multiprocessing.active_children()
        assert len(children) == 2
    assert not any(child.is_alive() for child in children)


def test_a_process_that_is_killed_is_an_error() -> None:
    parent = os.getpid()

    def die(n: int) -> None:
        if os.getpid() != parent and n == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(processes.ProcessDied, match="status -9"):
        list(processes.each(die, range(6), 2))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("interrupted", ["next(found)", "time.sleep(60)"], ids=["waiting", "between results"])
def test_ctrl_c_ends_all_processes(interrupted: str) -> None:
    program = textwrap.dedent(f"""
        import multiprocessing, signal, time
        from pkt.simulate import processes
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        processes.ALONE = 0.0
        found = processes.each(lambda n: time.sleep(n), [0.01, 0.01, 0.01, 60, 60], 2)
        next(found), next(found), next(found)
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        {interrupted}
    """)
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    # A session of its own, so that Ctrl-C does not reach pytest, too.
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as run:
        assert run.stdout is not None
        pids = [int(pid) for pid in run.stdout.readline().split()]
        os.killpg(run.pid, signal.SIGINT)
        _, error = run.communicate(timeout=20)
    assert len(pids) == 2
    assert error.count("Traceback") == 1, error  # the caller's own
    assert "KeyboardInterrupt" in error
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_one_process_by_default_where_a_fork_is_not_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.processes() == 1  # inside a test
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    cores = len(os.sched_getaffinity(0))
    if threading.active_count() - engine.idle() == 1:  # pytest-xdist's workers have another one
        assert processes.processes() == cores
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    assert processes.processes() == 1
    stop.set()
    other.join()


def test_a_number_of_processes_is_an_integer_from_1() -> None:
    with pytest.raises(ShapeError, match="processes: found 0, wanted an integer from 1"):
        simulate(lambda world: None, 1, processes=0)
