"""Ctrl-C while pkt.launch's processes search: it comes to their parent, which passes it on."""

import os
import signal
import time
from functools import partial

import pytest

from pkt.model.config import Config
from pkt.runtime.workers import interrupts
from pkt.runtime.workers.answers import Answers
from pkt.runtime.workers.workers import Workers
from pkt.tune import tune
from tests.runtime.processes import OPENER
from tests.tune.helpers import Rough, anything, candidates


@pytest.fixture
def workers():
    """As in a script: Ctrl-C raises KeyboardInterrupt here."""
    pool = Workers(2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield pool
    signal.signal(signal.SIGINT, before)
    pool.close()


def run(workers, fn):
    return workers.run(fn, (), OPENER, 5.0, heap=1 << 20)


def pressed(rank, n):
    """Ctrl-C at the terminal while candidate 3 is measured."""
    if (rank, n) == (0, 3):
        os.kill(os.getppid(), signal.SIGINT)
        until_asked(rank, n)


def until_asked(rank, n):
    """Candidate 3 takes until Ctrl-C has come."""
    end = time.monotonic() + 10
    while (rank, n) == (0, 3) and not interrupts.Interrupts._lasting[0].asked and time.monotonic() < end:
        time.sleep(0.005)


def test_a_search_keeps_its_best_and_the_processes_stay(workers):
    def main(world):
        rough = partial(Rough, seconds=lambda n: 9.0 - n, then=pressed)
        found = tune(anything, configs=candidates(8), model=lambda config, key: config["n"], timer=rough)
        return found, os.getpid(), signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    (found, *_), (other, *_) = results = run(workers, main)
    assert found == other
    assert found.interrupted
    assert found.best == Config(n=3)
    assert [pid for _, pid, _ in results] == workers.pids
    assert [ignored for *_, ignored in results] == [True, True], "between searches a process ignores Ctrl-C"


def test_ctrl_c_comes_while_the_parent_looks_at_its_processes(workers, monkeypatch):
    """And not while it waits for them: it is passed on all the same."""
    look, presses = Answers._find_stopped, []

    def looked(self):
        if not presses and any(interrupts.minded(process.pid) for process in self._processes):
            presses.append(os.getpid())
            os.kill(os.getpid(), signal.SIGINT)
        look(self)

    def main(world):
        rough = partial(Rough, seconds=lambda n: 9.0 - n, then=until_asked)
        return tune(anything, configs=candidates(8), model=lambda config, key: config["n"], timer=rough).interrupted

    run(workers, lambda world: None)  # a process that begins has Python's handler
    monkeypatch.setattr(Answers, "_find_stopped", looked)
    assert run(workers, main) == [True, True]
    assert presses == [os.getpid()]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def assert_ended(workers, main):
    """Ctrl-C in `main` ends its sleep of a minute, and the processes."""
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(workers, main)
    assert time.monotonic() - start < 50, "the sleep was not cut short"
    assert not workers.alive


def test_ctrl_c_ends_other_work_and_its_processes(workers):
    def main(world):
        if world.rank == 0:
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)

    assert_ended(workers, main)


def test_a_second_ctrl_c_ends_the_search_and_its_processes(workers):
    def main(world):
        def then(rank, n):
            if rank == 0:
                for _ in range(2):
                    time.sleep(0.5)  # a second press, not two at once
                    os.kill(os.getppid(), signal.SIGINT)
            time.sleep(60)

        tune(anything, configs=candidates(8), timer=partial(Rough, then=then))

    assert_ended(workers, main)


def test_minded_tells_whether_a_process_handles_the_signal():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert not interrupts.minded(os.getpid())
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert interrupts.minded(os.getpid())
        assert not interrupts.minded(-1)
    finally:
        signal.signal(signal.SIGINT, before)
