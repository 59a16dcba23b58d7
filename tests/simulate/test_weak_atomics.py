"""Relaxed atomics may become visible late and in any order: store buffering, and message passing by atomics alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.simulate.explore import simulate
from pkt.simulate.schedule import Schedule
from tests.simulate.helpers import failures

SEEDS = range(24)


@triton.jit
def dekker(flags, entered, world, FENCE: tl.constexpr):
    """Each rank raises its own flag and enters if the other's is down."""
    other = 1 - world.rank
    if FENCE == "release":
        pl.signal(flags, world.rank, world)
    else:
        tl.atomic_xchg(flags, 1, sem="relaxed", scope="sys")
    if FENCE == "acq_rel":
        pl.fence()
    elif FENCE == "sc":
        pl.fence(sc=True)
    if FENCE == "release":
        raised = pl.load_acquire(flags, other, world)
    else:
        raised = tl.atomic_add(pl.peer(flags, other, world), 0, sem="relaxed", scope="sys")
    if raised == 0:
        tl.atomic_add(pl.peer(entered, 0, world), 1, sem="relaxed", scope="sys")


def dekker_main(world: Any, fence: str) -> None:
    flags, entered = pkt.signals(1), pkt.zeros(1, dtype=torch.int32)
    dekker[(1,)](flags, entered, world.device, fence)
    world.barrier()
    assert world.rank or entered.item() <= 1, "both entered"


@pytest.mark.parametrize("races", [True, False])
@pytest.mark.parametrize("fence", ["none", "release", "acq_rel", "sc"])
def test_only_a_fence_sc_keeps_two_ranks_from_both_entering(fence: str, races: bool) -> None:
    found = failures(dekker_main, 2, SEEDS, args=(fence,), races=races)
    assert all("both entered" in str(error) for error in found.values())
    assert all(Schedule(seed, 2).late_atomics for seed in found)
    assert bool(found) == (fence != "sc")


def test_a_fence_sc_has_mutants_and_both_are_caught() -> None:
    report = simulate(dekker_main, 2, seeds=8, args=("sc",), heap="1MiB", mutants=True)
    report.check()
    assert sorted(mutant.change for mutant in report.mutants) == ["not sc", "remove"]
    assert "fence with sc=False at test_weak_atomics.py:" in str(next(iter(report.mutants)))


@triton.jit
def message(data, out, world, ORDER: tl.constexpr):
    """Rank 0 sends a value, then a flag, both by relaxed atomics; rank 1 polls the flag."""
    if world.rank == 0:
        tl.atomic_xchg(pl.peer(data, 1, world), 7, sem="relaxed", scope="sys")
        if ORDER == "fence":
            pl.fence()
        if ORDER == "release":
            tl.atomic_xchg(pl.peer(data + 1, 1, world), 1, sem="release", scope="sys")
        else:
            tl.atomic_xchg(pl.peer(data + 1, 1, world), 1, sem="relaxed", scope="sys")
    else:
        while tl.atomic_add(data + 1, 0, sem="relaxed", scope="sys") == 0:
            pass
        pl.fence()
        tl.store(out, tl.atomic_add(data, 0, sem="relaxed", scope="sys"))


def message_main(world: Any, order: str) -> None:
    data, out = pkt.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    message[(1,)](data, out, world.device, order)
    assert world.rank == 0 or out.item() == 7, "the flag overtook its data"


@pytest.mark.parametrize("order", ["none", "fence", "release"])
def test_a_relaxed_flag_may_overtake_its_data(order: str) -> None:
    found = failures(message_main, 2, SEEDS, args=(order,))
    assert all("the flag overtook its data" in str(error) for error in found.values())
    assert bool(found) == (order == "none")


@triton.jit
def words_with_flags(box, out, world, FIRST_ONLY: tl.constexpr):
    """Each rank sends eight words, each with a flag in its low bit, and looks at the first flag only, or at all."""
    i = tl.arange(0, 8)
    pl.store_relaxed(box + i, 2 * i + 1, 1 - world.rank, world)
    if FIRST_ONLY:
        while pl.load_relaxed(box, world.rank, world) == 0:
            pass
        words = pl.load_relaxed(box + i, world.rank, world)
    else:
        words = pl.load_relaxed(box + i, world.rank, world)
        while tl.sum(words & 1) < 8:
            words = pl.load_relaxed(box + i, world.rank, world)
    tl.store(out, tl.sum(words & 1))


def words_main(world: Any, first_only: bool) -> None:
    box, out = pkt.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    world.barrier()
    words_with_flags[(1,)](box, out, world.device, first_only)
    assert out.item() == 8, "a part has arrived"


def test_the_elements_of_a_block_become_visible_one_by_one() -> None:
    assert failures(words_main, 2, SEEDS, args=(False,)) == {}
    found = failures(words_main, 2, SEEDS, args=(True,))
    assert found
    assert all("a part has arrived" in str(error) for error in found.values())


def test_a_program_sees_its_own_atomics() -> None:
    @triton.jit
    def count(x, out, N: tl.constexpr):
        for i in range(N):
            tl.atomic_add(x, 1, sem="relaxed", scope="sys")
            tl.atomic_add(x + 1, 2, sem="relaxed", scope="sys")
        tl.store(out, tl.atomic_add(x, 0, sem="relaxed", scope="sys"))
        tl.store(out + 1, tl.load(x + 1))

    def main(world: Any) -> None:
        x, out = pkt.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        count[(1,)](x, out, 5)
        assert out.tolist() == [5, 10]
        assert x.tolist() == [5, 10]

    assert failures(main, 2, SEEDS) == {}


def test_buffered_atomics_wake_waits_and_are_never_lost() -> None:
    @triton.jit
    def all_add(flags, world, N: tl.constexpr):
        for i in range(N):
            tl.atomic_add(pl.peer(flags, 0, world), 1, sem="relaxed", scope="sys")
        if world.rank == 0:
            pl.wait(flags, N * world.size, world)

    def main(world: Any) -> None:
        flags = pkt.signals(1)
        all_add[(1,)](flags, world.device, 3)
        world.barrier()
        assert world.rank or flags.item() == 9

    assert failures(main, 3, SEEDS) == {}
