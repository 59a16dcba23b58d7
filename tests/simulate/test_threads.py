"""Accesses of one program by different threads: each case with a barrier between them, and without."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.simulate.faults import Site
from pkt.simulate.findings import MissingBarrier, OverlappingStore
from pkt.simulate.memory import Place, Region, Scattered, Strided
from pkt.simulate.threads import Done
from tests.simulate.helpers import assert_right, find_race, line_of, outcome

N, SITE = 128, Site("x.py", 1, "")
NOTHING, BARRIER = "nothing", "a barrier"
ORDERED_BY = (
    "tl.dot", "tl.sum", "tl.cumsum", "tl.trans", "pl.signal", "an atomic whose result is used",
    "an atomic that releases",
)  # fmt: skip


@triton.jit
def between(x, flags, world, HOW: tl.constexpr):
    if HOW == "a barrier":
        tl.debug_barrier()
    if HOW == "tl.dot":
        ones = tl.full((16, 16), 1.0, tl.float32)
        at = 16 * tl.arange(0, 16)[:, None] + tl.arange(0, 16)[None, :]
        tl.store(x + 2048 + at, tl.dot(ones, ones).to(tl.int32))
    if HOW == "tl.sum":
        tl.store(x + 2048, tl.sum(tl.arange(0, 64)))
    if HOW == "tl.cumsum":
        tl.store(x + 2048 + tl.arange(0, 64), tl.cumsum(tl.arange(0, 64)))
    if HOW == "tl.trans":
        row, col = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
        tl.store(x + 2048 + 16 * row + col, tl.trans(row + 2 * col))
    if HOW == "pl.signal":
        pl.signal(flags, world.rank, world)
    if HOW == "an atomic whose result is used":
        tl.store(x + 2048, tl.atomic_add(x + 2049, 1, sem="relaxed"))
    if HOW == "an atomic that releases":
        tl.atomic_add(x + 2049, 1, sem="release")
    if HOW == "an atomic":
        tl.atomic_add(x + 2049, 1, sem="relaxed")


@triton.jit
def backwards(x, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, i)
    between(x, flags, world, HOW)
    tl.store(x + 1024 + i, tl.load(x + N - 1 - i))


@triton.jit
def scalar_to_all(x, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x, 7)
    between(x, flags, world, HOW)
    tl.store(x + 1024 + i, tl.load(x + 0 * i))


@triton.jit
def element_of_a_block(x, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 7)
    between(x, flags, world, HOW)
    tl.store(x + 1024, tl.load(x + N - 1))


@triton.jit
def two_stores(x, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 0)
    between(x, flags, world, HOW)
    tl.store(x + 64 + tl.arange(0, N // 2), 1)


@triton.jit
def zeros_then_atomics(x, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, 0)
    between(x, flags, world, HOW)
    tl.atomic_add(x + i // 2, 1)


@triton.jit
def atomics_then_load(x, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_add(x + i // 2, 1)
    between(x, flags, world, HOW)
    tl.store(x + 1024 + i, tl.load(x + i))


@triton.jit
def released_then_loaded(x, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_add(x + N // 2, 1, sem="release")
    between(x, flags, world, HOW)
    tl.store(x + 1024 + i, tl.load(x + i))


@triton.jit
def transposed(x, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    row, col = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    tl.store(x + 16 * row + col, row)
    between(x, flags, world, HOW)
    tl.store(x + 1024 + 16 * row + col, tl.load(x + row + 16 * col))


@triton.jit
def halves_of_words(x, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, i)
    between(x, flags, world, HOW)
    halves = tl.load(x.to(tl.pointer_type(tl.int16)) + 2 * i + 1)
    tl.store(x + 1024 + i, halves.to(tl.int32))


@triton.jit
def in_a_loop(x, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    for n in range(3):
        tl.store(x + i, n)
        between(x, flags, world, HOW)
        tl.store(x + 1024 + N * n + i, tl.load(x + (i + 1) % N))
        tl.debug_barrier()


@triton.jit
def some_of_a_block(x, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, i, mask=i % 3 == 0)
    between(x, flags, world, HOW)
    tl.store(x + 1024 + i, tl.load(x + i + 1, mask=i % 3 == 2, other=0))


@triton.jit
def moved_in_place(x, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    y = tl.load(x + i + 1)
    between(x, flags, world, HOW)
    tl.store(x + i, y)


@triton.jit
def loaded_then_cleared(x, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    y = tl.load(x + i)
    between(x, flags, world, HOW)
    tl.store(x + N // 2, 0)
    tl.store(x + 1024 + i, y)


@triton.jit
def loaded_then_counted(x, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    y = tl.load(x + i)
    between(x, flags, world, HOW)
    tl.atomic_add(x + i // 2, y)


KERNELS = (
    backwards, scalar_to_all, element_of_a_block, two_stores, zeros_then_atomics, atomics_then_load, transposed,
    released_then_loaded, halves_of_words, in_a_loop, some_of_a_block, moved_in_place, loaded_then_cleared,
    loaded_then_counted,
)  # fmt: skip


def main(world: Any, kernel: Any, how: str, n: int = N, where: str = "heap", **options: Any) -> None:
    x = pkt.zeros(4096, dtype=torch.int32) if where == "heap" else torch.zeros(4096, dtype=torch.int32)
    flags = pkt.signals(1, unwaited=True)
    kernel[(1,)](x, flags, world.device, how, n, **options)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.fn.__name__)
def test_other_threads_need_a_barrier(kernel: Any) -> None:
    assert_right(main, 2, (kernel, BARRIER), seeds=range(8))
    for where in ("heap", "plain tensor"):
        assert type(find_race(main, 2, (kernel, NOTHING, N, where))) is MissingBarrier


@pytest.mark.parametrize("how", ORDERED_BY)
@pytest.mark.parametrize("kernel", [backwards, moved_in_place], ids=lambda k: k.fn.__name__)
def test_so_do_operations_that_triton_compiles_with_a_barrier(kernel: Any, how: str) -> None:
    assert_right(main, 2, (kernel, how), seeds=range(8))


def test_an_atomic_whose_result_nobody_needs_is_no_barrier() -> None:
    assert type(find_race(main, 2, (backwards, "an atomic"))) is MissingBarrier


@triton.jit
def own_elements(x, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    for n in range(3):
        tl.store(x + i, tl.load(x + i) + n)
        tl.store(x + i, tl.load(x + i, mask=i > 3), mask=i > 5)
        tl.store(x + i, tl.load(x + i, mask=i % 4 == 0, other=0), mask=i % 2 == 0)
    tl.atomic_add(x + i, 1)
    tl.atomic_add(x + N // 2, 1, sem="release")  # behind what all threads have done
    tl.debug_barrier()
    tl.store(x + 1024, tl.load(x + 1024) + 1)
    tl.store(x + 1024, tl.load(x + 1024) + 1)
    tl.store(x + 2048 + i, tl.load(x + i))


@triton.jit
def beside(x, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + 2 * i, i)
    tl.store(x + 1024 + i, tl.load(x + 2 * (N - 1 - i) + 1))
    half = tl.arange(0, N // 2)
    tl.store(x + 2048 + half, tl.load(x + 2 * half + 1))
    tl.store(x + 3072 + i, tl.load(x + 3072 + N - 1 - i + N))


@triton.jit
def atomics_only(x, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_add(x + i, 1)
    tl.atomic_max(x + N - 1 - i, i)


@pytest.mark.parametrize("kernel", [own_elements, beside, atomics_only], ids=lambda k: k.fn.__name__)
def test_a_thread_sees_what_it_has_stored(kernel: Any) -> None:
    assert_right(main, 2, (kernel, NOTHING), seeds=range(8))


def one_warp(world: Any, kernel: Any) -> None:
    main(world, kernel, NOTHING, num_warps=1)


def test_the_threads_of_a_warp_go_in_step() -> None:
    assert_right(one_warp, 2, (backwards,), seeds=range(8))
    assert_right(main, 2, (backwards, NOTHING, 32), seeds=range(8))
    assert type(find_race(main, 2, (backwards, NOTHING, 64))) is MissingBarrier


@triton.jit
def element_before_a_block(x, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    y = tl.load(x + N - 1)
    between(x, flags, world, HOW)
    tl.store(x + tl.arange(0, N), y)


@pytest.mark.parametrize("kernel", [element_of_a_block, element_before_a_block], ids=lambda k: k.fn.__name__)
@pytest.mark.parametrize("n", [2, 32])
def test_all_warps_load_one_number_of_a_small_block(kernel: Any, n: int) -> None:
    assert_right(main, 2, (kernel, BARRIER, n), seeds=range(8))
    assert type(find_race(main, 2, (kernel, NOTHING, n))) is MissingBarrier


@triton.jit
def overlapping(x, HOW: tl.constexpr, n):
    i = tl.arange(0, 64)
    if HOW == "pairs":
        tl.store(x + i // 2, i.to(tl.float32))
    if HOW == "rows":
        row, col = i[:, None], tl.arange(0, 4)[None, :]
        tl.store(x + 2 * row + col, (row + 0 * col).to(tl.float32))
    if HOW == "some of a block":
        tl.store(x + i // 2, i.to(tl.float32), mask=(i < n) & (i != 7))
    if HOW == "equal":
        tl.store(x + i // 2, i // 2 * float("nan"))
    if HOW == "one of each":
        tl.store(x + i // 2, i.to(tl.float32), mask=i % 2 == 0)
    if HOW == "rows apart":
        row, col = i[:, None], tl.arange(0, 4)[None, :]
        tl.store(x + 3 * row + col, (row + col).to(tl.float32), mask=col < n - 57)


def overlapped(world: Any, how: str, **options: Any) -> None:
    overlapping[(1,)](pkt.zeros(512, name="x"), how, 60, **options)


@pytest.mark.parametrize("how", ["pairs", "rows", "some of a block"])
@pytest.mark.parametrize("warps", [1, 4])
def test_a_store_has_one_value_for_an_address(how: str, warps: int) -> None:
    error = find_race(lambda world: overlapped(world, how, num_warps=warps), 1)
    assert type(error) is OverlappingStore
    place, element = line_of(overlapping, "tl.store"), 2 if how == "rows" else 0
    assert f"overlapping store: store of rank 0's x[{element}] by rank 0 overlapping program 0 at " in str(error)
    assert place.split(":")[0] in str(error)


def test_an_overlap_is_told_once() -> None:
    def twice(world: Any) -> None:
        for _ in range(2):
            overlapped(world, "pairs")

    assert len(outcome(twice, 1).findings) == 1


@pytest.mark.parametrize("how", ["equal", "one of each", "rows apart"])
def test_equal_values_and_other_addresses_are_right(how: str) -> None:
    assert_right(lambda world: overlapped(world, how), 1, seeds=range(2))


def some(rng: np.random.Generator) -> Done:
    """A random access to a region of 512 bytes: a block of rows, a part of a block, or scattered elements."""
    region = Region(0, 512, np.zeros(512, np.uint8), 0, "x", "data", 4, (128,))
    itemsize = int(rng.choice([2, 4]))
    if rng.random() < 0.3:  # elements that a mask leaves of a block
        n = int(rng.integers(1, 50))
        offsets = np.sort(rng.choice(512 // itemsize, n, replace=False)) * itemsize
        where = np.sort(rng.choice(64, n, replace=False))
        return Done(Scattered(region, offsets.astype(np.int64), itemsize), (64,), where, "store", SITE)
    if rng.random() < 0.5:  # one row, perhaps of a longer block
        n, begin = int(rng.integers(20, 50)), int(rng.integers(0, 14))
        place = Place(int(rng.integers(0, 60)) * itemsize, (n,), (itemsize,), itemsize)
        return Done(Strided(region, place), (64,), slice(begin, begin + n), "store", SITE)
    shape = (int(rng.choice([2, 4])), 16)
    strides = (int(rng.choice([4, 20])) * itemsize, itemsize)
    place = Place(int(rng.integers(0, 60)) * itemsize, shape, strides, itemsize)
    return Done(Strided(region, place), shape, ..., "store", SITE)


def test_what_two_accesses_share_is_found_as_by_looking_at_each_byte() -> None:
    rng, met = np.random.default_rng(0), 0
    for _ in range(4000):
        one, two = some(rng), some(rng)
        if rng.random() < 0.3:  # the same place, perhaps of other elements of the block
            where = one.where
            if isinstance(where, slice):
                begin = int(rng.integers(0, 3)) + where.start
                where = slice(begin, begin + where.stop - where.start)
            two = Done(one.access, one.shape, where, "load", SITE)
        same = one.shape == two.shape and one.access.itemsize == two.access.itemsize
        threads: dict[int, set[int]] = {}
        for offset, element in zip(one.access.byte_offsets(), one.elements()):
            for byte in range(offset, offset + one.access.itemsize):
                threads.setdefault(byte, set()).add(int(element) if same else -1)
        shared = [
            byte
            for offset, element in zip(two.access.byte_offsets(), two.elements())
            for byte in range(offset, offset + two.access.itemsize)
            if byte in threads and threads[byte] != {int(element)}
        ]
        few = max(np.prod(one.shape), np.prod(two.shape)) <= 32
        found = one.meets(two) if one.may_meet(two) else None
        met += found is not None
        if any(isinstance(d.access, Strided) and d.access.place.repeats() for d in (one, two)):
            continue  # an element there twice has two threads
        assert (found is not None) == (bool(shared) and not few), (one.access, two.access)
        assert found is None or found in shared
    assert 200 < met < 3000


def test_a_program_says_nothing_about_others() -> None:
    """Two programs of one rank, of which each accesses its own part."""

    @triton.jit
    def parts(x, N: tl.constexpr):
        i = tl.program_id(0) * N + tl.arange(0, N)
        tl.store(x + i, i)

    def run(world: Any) -> None:
        x = pkt.zeros(512, dtype=torch.int32)
        parts[(4,)](x, 128)
        parts[(2,)](x, 256)

    assert_right(run, 2, seeds=range(8))


def test_the_message_has_both_lines_and_the_remedy() -> None:
    race = find_race(main, 2, (backwards, NOTHING))
    assert (race.first.rank, race.first.kind) == (race.second.rank, "store")
    assert race.second.kind == "load"
    assert (race.first.site, race.second.site) == (
        line_of(backwards, "tl.store(x + i, i)"), line_of(backwards, "tl.load(x + N")
    )  # fmt: skip
    load, store, remedy = str(race).splitlines()
    assert re.match(r"missing barrier: load of rank \d's zeros@test_threads.py:\d+\[0\] by rank", load)
    assert store.startswith("  another thread of the program may not have done this yet: store of rank")
    assert remedy == "  call tl.debug_barrier() between the two"


def test_one_is_found_once() -> None:
    found = outcome(main, 2, args=(in_a_loop, NOTHING)).findings
    assert [type(error) for error in found] == [MissingBarrier] * len(found)
    assert len(found) <= 2  # each rank's


def test_the_race_detector_finds_them() -> None:
    assert outcome(main, 2, args=(backwards, NOTHING), races=False).failure is None
