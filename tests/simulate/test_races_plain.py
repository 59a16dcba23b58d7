"""Races between the programs of a rank on plain tensors, which no other rank sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
from pkt.simulate.findings import DataRace

PROGRAMS, N = 4, 64


@triton.jit
def split_kernel(x, parts, count, out, N: tl.constexpr, SEM: tl.constexpr):
    """The program that arrives last adds the parts of all; without SEM it is the last one by number."""
    program, i = tl.program_id(0), tl.arange(0, N)
    tl.store(parts + program * N + i, tl.load(x + program * N + i))
    arrived = program
    if SEM is not None:
        arrived = tl.atomic_add(count, 1, sem=SEM)
    if arrived == tl.num_programs(0) - 1:
        total = tl.zeros((N,), tl.float32)
        for part in range(tl.num_programs(0)):
            total += tl.load(parts + part * N + i)
        tl.store(out + i, total)


def split(world: Any, sem: str | None, again: bool = False) -> None:
    """again: the parts are there from an earlier call with the same x."""
    x, out = torch.randn(PROGRAMS, N), torch.zeros(N)
    parts = x.clone() if again else torch.full((PROGRAMS, N), 7.0)
    for _ in range(2):
        split_kernel[(PROGRAMS,)](x, parts, torch.zeros(1, dtype=torch.int32), out, N, sem)
        torch.testing.assert_close(out, x.sum(0))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("sem", [None, "relaxed", "acquire", "release"])
def test_parts_that_are_added_without_order_are_a_race(sem: str | None, again: bool) -> None:
    report = pkt.simulate(split, 2, args=(sem, again), seeds=8)
    races = [found for found in report.findings if "data race" in str(found)]
    assert len(races) == 1, "both ranks' are one"
    assert "load of rank 0's parts[0, 0]" in str(races[0]) or "load of rank 1's parts[0, 0]" in str(races[0])
    assert 'atomics with sem="acq_rel", behind the first and before the second, or by two launches' in str(races[0])


def test_parts_that_the_last_arrival_adds_are_right() -> None:
    pkt.simulate(split, 2, args=("acq_rel",), seeds=20).check()


@triton.jit
def lock_kernel(x, lock, N: tl.constexpr, SEM: tl.constexpr):
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    i = tl.arange(0, N)
    tl.store(x + i, tl.load(x + i) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem=SEM)


@pytest.mark.parametrize("sem", ["acq_rel", "release", "relaxed"])
def test_a_lock_orders_what_it_guards_if_it_releases(sem: str) -> None:
    def main(world: Any) -> None:
        x = torch.zeros(N)
        lock_kernel[(PROGRAMS,)](x, torch.zeros(1, dtype=torch.int32), N, sem)
        assert x.unique().tolist() == [PROGRAMS]

    report = pkt.simulate(main, 1, seeds=8)
    assert report.ok == (sem != "relaxed")
    assert report.ok or "of rank 0's x[0] by" in str(report)


@triton.jit
def store_kernel(x, N: tl.constexpr, SAME: tl.constexpr):
    tl.store(x + tl.arange(0, N), 3.0 if SAME else 1.0 * tl.program_id(0))


@pytest.mark.parametrize("same", [True, False])
def test_two_stores_are_a_race_unless_they_store_the_same(same: bool) -> None:
    def main(world: Any) -> None:
        store_kernel[(PROGRAMS,)](torch.full((N,), float("nan")), N, same)

    report = pkt.simulate(main, 1, seeds=4)
    assert report.ok == same
    assert same or "store of rank 0's x[0] by" in str(report)


@triton.jit
def shift_kernel(x, out, N: tl.constexpr):
    """Program p stores what lies a block behind its own, into its own block."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, tl.load(x + at + N))


@pytest.mark.parametrize("place", ["apart", "one storage", "the same"])
def test_arguments_of_one_storage_are_one_tensor(place: str) -> None:
    """A read that comes before the launch's first store is forgotten, so one schedule in order finds nothing."""

    def main(world: Any) -> None:
        memory = torch.randn(PROGRAMS + 1, N)
        out = memory if place == "the same" else memory[:PROGRAMS].flatten() if place == "one storage" else None
        shift_kernel[(PROGRAMS,)](memory, torch.empty(PROGRAMS, N) if out is None else out, N)

    report = pkt.simulate(main, 1, seeds=20)
    assert report.ok == (place == "apart")


def test_launches_of_one_rank_are_in_order() -> None:
    def main(world: Any) -> None:
        memory, out = torch.randn(PROGRAMS + 1, N), torch.zeros(PROGRAMS, N)
        expected = memory[1:].clone()
        for _ in range(3):
            shift_kernel[(PROGRAMS,)](memory, out, N)
            split_kernel[(PROGRAMS,)](out, memory, torch.zeros(1, dtype=torch.int32), torch.zeros(N), N, "acq_rel")
        assert torch.equal(out[-1], expected[-1])

    pkt.simulate(main, 2, seeds=10).check()


@triton.jit
def count_kernel(x, count, N: tl.constexpr):
    tl.atomic_add(count, 1, sem="relaxed")
    if tl.program_id(0) == 0:
        tl.store(x, tl.load(count))


def test_a_plain_load_beside_atomics_is_a_race() -> None:
    def main(world: Any) -> None:
        count_kernel[(PROGRAMS,)](torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), N)

    with pytest.raises(
        DataRace, match=r"(?s)(load|atomic) of rank 0's count\[0\] by .* is not ordered after: (load|atomic)"
    ):
        pkt.simulate(main, 1, seeds=20).check()


def test_nothing_is_checked_without_races() -> None:
    pkt.simulate(split, 2, args=(None,), seeds=1, races=False)
