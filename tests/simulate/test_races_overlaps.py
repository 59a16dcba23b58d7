"""The race detector on bytes, granules and regions: it reports overlaps, and no neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from tests.simulate.helpers import assert_right, find_race

pytestmark = pytest.mark.machine

# -- bytes, granules and regions -------------------------------------------------------------------------------------


@triton.jit
def neighbours(x, world, STEP: tl.constexpr):
    """Every rank writes its own bytes of one 16-byte granule in rank 0's copy."""
    pl.store(x + world.rank * STEP, world.rank + 1, 0, world)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32], ids=str)
def test_neighbouring_bytes_are_no_race(dtype: torch.dtype) -> None:
    def main(world: Any, step: int) -> None:
        x = pkt.zeros(16, dtype=dtype)
        neighbours[(1,)](x, world.device, step)
        world.barrier()
        if world.rank == 0:
            assert x[:4].tolist() == ([1, 2, 3, 4] if step else x[:4].tolist())

    assert_right(main, 4, args=(1,))
    race = find_race(main, 4, args=(0,))
    assert race.first.tensor == race.second.tensor == "rank 0's x[0]"


@triton.jit
def rows_and_columns(x, world, N: tl.constexpr, COLUMNS: tl.constexpr):
    o = tl.arange(0, N)
    me = tl.cast(world.rank, tl.int32)
    at = o * N + me if COLUMNS else me * N + o
    pl.store(x + at, me, 0, world)


def test_interleaved_columns_are_no_race() -> None:
    def main(world: Any, columns: bool) -> None:
        x = pkt.zeros((4, 4), dtype=torch.int32)
        rows_and_columns[(1,)](x, world.device, 4, columns)

    assert_right(main, 4, args=(True,))
    assert_right(main, 4, args=(False,))


def test_readers_alone_are_no_race() -> None:
    @triton.jit
    def read(x, out, world):
        o = tl.arange(0, 32)
        tl.store(out + o, pl.load(x + o, (world.rank + 1) % world.size, world))

    def main(world: Any) -> None:
        x, out = pkt.ones(32), torch.zeros(32)
        read[(3,)](x, out, world.device)
        assert (out == 1).all()

    assert_right(main, 3)


@pytest.mark.parametrize("readers", [1, 3])
def test_a_write_races_with_every_earlier_reader(readers: int) -> None:
    """The detector remembers every reader, not only the last one."""

    @triton.jit
    def read_then_write(x, out, flags, wanted, world):
        if world.rank < world.size - 1:
            tl.store(out, pl.load(x, world.size - 1, world))
            pl.signal(flags, world.size - 1, world)
        else:
            pl.wait(flags, wanted, world)
            tl.store(x, 2.0)

    def main(world: Any, wanted: int) -> None:
        x, out, flags = pkt.ones(4), torch.zeros(1), pkt.signals(1)
        read_then_write[(1,)](x, out, flags, wanted, world.device)
        world.barrier()

    assert_right(main, readers + 1, args=(readers,))
    race = find_race(main, readers + 1, args=(readers - 1,), seeds=range(30))
    assert race.second.kind in ("load", "store")


@pytest.mark.parametrize("sizes", [(4, 4), (16, 32), (32, 16)])
@pytest.mark.parametrize("awaited", [0, 1])
def test_the_reader_before_the_last_one_is_remembered(awaited: int, sizes: tuple[int, int]) -> None:
    """In the plain order two ranks read one after the other; the writer waits for only one of them."""

    @triton.jit
    def read_both(x, out, flags, awaited, size, world, N: tl.constexpr):
        o = tl.arange(0, N)
        if world.rank < 2:
            tl.store(out + o, pl.load(x + o, 2, world, mask=o < size))
            pl.signal(flags + world.rank, 2, world)
        else:
            pl.wait(flags + awaited, 1, world)
            tl.store(x + o, 2.0)
            pl.wait(flags + 1 - awaited, 1, world)

    def main(world: Any) -> None:
        x, out, flags = pkt.ones(32), torch.zeros(32), pkt.signals(2)
        size = (*sizes, 0)[world.rank]
        read_both[(1,)](x, out, flags, awaited, size, world.device, 32)

    race = find_race(main, 3, seeds=[0])
    assert (race.first.rank, race.first.kind, race.second.kind) == (1 - awaited, "load", "store")


def test_atomics_race_with_stores_but_not_with_each_other() -> None:
    @triton.jit
    def update(x, world, STORE: tl.constexpr):
        if STORE and world.rank == 0:
            tl.store(x, 1)
        else:
            pl.atomic_add(x, 1, 0, world, sem="relaxed")

    def main(world: Any, store: bool) -> None:
        x = pkt.zeros(1, dtype=torch.int32)
        update[(2,)](x, world.device, store)
        world.barrier()
        assert store or world.rank or x.item() == 2 * world.size

    assert_right(main, 3, args=(False,))
    race = find_race(main, 3, args=(True,))
    assert {race.first.kind, race.second.kind} == {"atomic", "store"}
