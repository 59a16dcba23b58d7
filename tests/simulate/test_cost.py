"""What a schedule costs, in counts that do not depend on the machine. `make bench` has the seconds."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pkt
from benchmarks.simulator import locked, ring, small, spinning
from pkt.simulate import constants
from pkt.simulate.interpreter import interpreting
from pkt.simulate.run import execute
from tests.simulate.helpers import HEAP

pytestmark = pytest.mark.machine

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("fn", "ranks", "seeds", "most"),
    [(spinning, 4, 20, 1000), (ring, 8, 10, 200), (ring, 16, 6, 400), (locked, 8, 10, 500), (locked, 16, 6, 1500)],
)
def test_steps_of_a_schedule(fn: Callable, ranks: int, seeds: int, most: int) -> None:
    with interpreting():
        for seed in range(seeds):
            outcome = execute(fn, ranks, heap=HEAP, sms=8, seed=seed)
            assert outcome.failure is None
            assert outcome.machine.steps <= most


def calls(run: Callable[[], Any]) -> int:
    """How many functions of Python `run` calls."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_calls_of_a_schedule() -> None:
    """16 programs with 6 accesses each, on 4 ranks that make 3 tensors each."""
    with interpreting():
        execute(small, 4, heap=HEAP, sms=8, seed=7)  # translated and compiled once
        assert calls(lambda: execute(small, 4, heap=HEAP, sms=8, seed=7)) <= 11_500


def test_a_schedule_leaves_little_for_the_garbage_collector() -> None:
    """Its machine goes with it; the worlds stay. In a process of its own: what other tests leave would count, too."""
    program = textwrap.dedent(f"""
        import gc
        from pkt.simulate.interpreter import interpreting
        from pkt.simulate.run import execute
        from benchmarks.simulator import small
        with interpreting():
            execute(small, 4, heap={HEAP}, sms=8)
            gc.collect()
            gc.disable()
            execute(small, 4, heap={HEAP}, sms=8)
            print(gc.collect())
    """)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200


def test_the_memory_of_a_run_goes_with_it() -> None:
    """Without the garbage collector, although the signals of its census keep the names of their counters."""
    memory = []

    def main(world: pkt.World) -> None:
        memory.append(weakref.ref(world._backend.machine.space._bytes))
        small(world)

    gc.disable()
    try:
        outcome = execute(main, 4, heap=HEAP, sms=8, seed=1)
    finally:
        gc.enable()
    assert outcome.failure is None
    assert {str(signal.target)[-8:] for signal in outcome.machine.census.signals} == {f"flags[{i}]" for i in range(4)}
    assert all(ref() is None for ref in memory)


def test_constants_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second schedule makes no new constant, and finds the results of the first, sums of addresses too."""
    with interpreting():
        runs = []
        for seed in range(1, 6):
            space = execute(small, 4, heap=HEAP, sms=8, seed=seed).machine.space
            runs.append((space.base, constants._elements))  # a heap at another address makes other pointers
        again = [(before, after) for before, after in itertools.pairwise(runs) if before[0] == after[0]]
        assert again
        assert all(before == after for before, after in again)
        monkeypatch.setattr(constants, "_MOST", 0)  # as if too many were kept
        execute(small, 4, heap=HEAP, sms=8, seed=3)
        execute(small, 4, heap=HEAP, sms=8, seed=3)


def test_a_computed_integer_is_a_constant() -> None:
    """Whatever it was computed from: the sums of addresses that follow from it are then found again."""
    with interpreting():
        for dtype, ty in ((np.int32, constants.tl.int32), (np.int64, constants.tl.int64)):
            for value in (0, 1, -7):
                made = constants.new_tensor(np.array([value], dtype), ty, True)
                assert made is constants.integer(value, ty)
                assert made.dtype is ty
        one = constants.new_tensor(np.array([1], np.int32), constants.tl.int32, True)
        assert one is not constants.integer(1, constants.tl.int64)
        assert one is not constants.new_tensor(np.array([1], np.int32), constants.tl.int32, False)


def test_nothing_writes_into_a_constant() -> None:
    def main(world: pkt.World) -> None:
        one = constants.integer(1, constants.tl.int32)
        with pytest.raises(ValueError, match="read-only"):
            one.handle.data[0] = 2
        assert torch.equal(torch.ones(1), torch.ones(1))

    with interpreting():
        execute(main, 1, heap=HEAP)
