"""Helpers of the simulator's tests: run a kernel on one rank, and a program under many schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

import pkt
from pkt.simulate.findings import DataRace
from pkt.simulate.interpreter import interpreting
from pkt.simulate.run import Outcome, execute
from pkt.simulate.schedule import POLICIES
from pkt.simulate.turns import turn

HEAP = 1 << 20  # bytes of a rank's heap: enough for every test here
SEEDS = range(50)
EVERY_POLICY = 1 + len(POLICIES)  # so many seeds from 0 have every policy


def run(kernel: Any, grid: Any, *args: Any, **named: Any) -> None:
    """Launch `kernel[grid](*args, **named)` on a world of one rank; raise any finding."""
    pkt.launch(lambda world: kernel[grid](*args, **named), ranks=1, device="cpu", heap=HEAP)


def launch(fn: Callable, ranks: int = 3, seed: int = 0, **options: Any) -> list[Any]:
    """What `fn(world)` returns on each rank in one schedule."""
    return pkt.launch(fn, ranks=ranks, device="cpu", seed=seed, heap=HEAP, **options)


def outcome(fn: Callable, ranks: int = 2, seed: int = 0, args: tuple = (), **options: Any) -> Outcome:
    """The outcome of one run of `fn(world, *args)`, right or wrong."""
    return execute(fn, ranks, args, HEAP, seed=seed, **options)


def failures(fn: Callable, ranks: int = 2, seeds: Iterable[int] = SEEDS, **options: Any) -> dict[int, Exception]:
    """The failures of `fn` by seed; empty if every schedule is right."""
    with turn("the tests"), interpreting():  # once for all schedules
        found = {seed: outcome(fn, ranks, seed, **options).failure for seed in seeds}
    return {seed: error for seed, error in found.items() if error is not None}


def line_of(kernel: Any, text: str) -> str:
    """The place of `text` in the kernel's source, as `file.py:12`."""
    at = next(i for i, line in enumerate(kernel.raw_src) if text in line)
    return f"{kernel.fn.__code__.co_filename.rsplit('/', 1)[1]}:{kernel.starting_line_number + at}"


def assert_right(fn: Callable, ranks: int = 2, args: tuple = (), seeds: Iterable[int] = SEEDS) -> None:
    """Assert that no schedule has a finding or a wrong result, and that the first ones, of every policy, have none
    without the race detector, either. It changes no schedule."""
    assert failures(fn, ranks, seeds, args=args) == {}
    assert failures(fn, ranks, [*seeds][:EVERY_POLICY], args=args, races=False) == {}


def find_race(fn: Callable, ranks: int = 2, args: tuple = (), seeds: Any = range(8)) -> DataRace:
    """A race that one of the first schedules shows, whatever the values are."""
    with turn("the tests"), interpreting():
        found = [f for s in seeds for f in outcome(fn, ranks, s, args).findings if isinstance(f, DataRace)]
    assert found
    return found[0]


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Assert that the tensors are equal bit for bit, except that every NaN equals every other."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    f, w = (t.double() if t.is_floating_point() else t for t in (found, wanted))
    equal = (f == w) & (f.signbit() == w.signbit()) if f.is_floating_point() else f == w
    if f.is_floating_point():
        equal |= f.isnan() & w.isnan()
    at = torch.nonzero(~equal.reshape(-1)).reshape(-1)
    assert not len(at), (
        f"{len(at)} of {equal.numel()} differ, first at {at[0]}: {f.reshape(-1)[at[0]]}, not {w.reshape(-1)[at[0]]}"
    )
