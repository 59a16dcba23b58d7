"""The race detector keeps every access that matters: all readers of a word, and the last writer of every byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.simulate import races
from pkt.simulate.memory import Region, Scattered
from tests.simulate.helpers import assert_right, failures

pytestmark = pytest.mark.machine


@triton.jit
def acknowledge(x, acks, world, relaxed, BLOCK: tl.constexpr):
    """All ranks but the last read the last one's block one after the other and acknowledge; then it overwrites it.
    Rank `relaxed` does not release."""
    i = tl.arange(0, BLOCK)
    last = world.size - 1
    if world.rank < last:
        if world.rank > 0:  # the turn has come, but nothing is acquired: the readers stay unordered among each other
            while tl.atomic_add(acks, 0, sem="relaxed", scope="sys") == 0:
                pass
        tl.load(pl.peer(x + i, last, world))
        if world.rank == relaxed:
            tl.atomic_add(pl.peer(acks, last, world), 1, sem="relaxed", scope="sys")
        else:
            tl.atomic_add(pl.peer(acks, last, world), 1, sem="release", scope="sys")
        tl.atomic_add(pl.peer(acks, world.rank + 1, world), 1, sem="relaxed", scope="sys")
    else:
        while tl.atomic_add(acks, 0, sem="acquire", scope="sys") < world.size:
            pass
        tl.store(x + i, tl.zeros((BLOCK,), tl.float32))


def acknowledge_main(world: Any, relaxed: int, block: int) -> None:
    x, acks = pkt.zeros(64), pkt.zeros(1, dtype=torch.int32)
    acknowledge[(1,)](x, acks, world.device, relaxed, block)


@pytest.mark.parametrize("block", [1, 2, 64])
@pytest.mark.parametrize("readers", [2, 3, 5])
def test_a_reader_that_does_not_release_is_a_race(readers: int, block: int) -> None:
    assert_right(acknowledge_main, readers + 1, (-1, block), (0, 1, 3))
    for relaxed in range(readers):
        found = failures(acknowledge_main, readers + 1, (0, 1, 3), args=(relaxed, block))
        assert len(found) == 3, relaxed
        for error in found.values():
            assert isinstance(error, pkt.DataRace)
            assert f"by rank {relaxed} acknowledge" in str(error)


@triton.jit
def token(x, turn, out, world, RELAXED: tl.constexpr):
    """Each rank writes its word of rank 0's tensor, and passes a token on; the last rank reads all words."""
    rank = world.rank
    if rank > 0:
        if RELAXED:
            while tl.atomic_add(turn, 0, sem="relaxed", scope="sys") == 0:
                pass
        else:
            pl.wait(turn, 1, world)
    pl.store(x + rank, rank + 1, 0, world)
    if rank < world.size - 1:
        if RELAXED:
            tl.atomic_add(pl.peer(turn, rank + 1, world), 1, sem="relaxed", scope="sys")
        else:
            pl.signal(turn, rank + 1, world)
    else:
        tl.store(out, pl.load(x, 0, world))


def token_main(world: Any, relaxed: bool, dtype: torch.dtype) -> None:
    x, turn = pkt.zeros(16, dtype=dtype), pkt.signals(1)
    token[(1,)](x, turn, torch.zeros(1, dtype=dtype), world.device, relaxed)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_words_of_several_ranks_side_by_side_are_kept_apart(dtype: torch.dtype) -> None:
    assert_right(token_main, 4, (False, dtype), (0, 1, 3))
    found = failures(lambda world: token_main(world, True, dtype), 4, (0, 1, 3))
    assert len(found) == 3
    assert all(isinstance(error, pkt.DataRace) for error in found.values())


# -- against a table with one entry a byte ---------------------------------------------------------------------------


@pytest.mark.parametrize("few", [races.FEW, 0])  # granules by a loop, and by numpy
@pytest.mark.parametrize("reads", [True, False])
def test_the_shadow_keeps_what_a_table_of_bytes_keeps(reads: bool, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(races, "MANY_SETS", 40)
    monkeypatch.setattr(races, "FEW", few)
    chance = np.random.default_rng(7)
    nbytes, columns = 96, 6
    region = Region(0, nbytes, np.zeros(nbytes, np.uint8), 0, "x", "data", 4, (24,))
    last = races.Last(nbytes // 16)
    table: list[dict[int, int]] = [{} for _ in range(nbytes)]  # byte -> column -> clock
    clocks = np.zeros((columns, columns), np.int64)
    for _ in range(1500):
        mine = int(chance.integers(columns))
        clocks[mine, mine] += chance.integers(2)
        if chance.random() < 0.3:
            clocks[mine] = np.maximum(clocks[mine], clocks[chance.integers(columns)])
        clock = np.maximum(clocks[mine], np.eye(columns, dtype=np.int64)[mine])
        clocks[mine] = clock
        size = int(chance.choice([1, 2, 4, 8]))
        count = int(chance.integers(1, 6))
        offsets = size * chance.choice(nbytes // size, count, replace=False)
        touched = races.Touched(Scattered(region, np.sort(offsets), size))
        bytes_ = sorted({int(o) + b for o in offsets for b in range(size)})
        wanted = {(b, c) for b in bytes_ for c, at in table[b].items() if clock[c] < at}
        found = last.unordered(touched, clock)
        assert (found is not None) == bool(wanted)
        if found is not None:
            column, at = (found[1] >> 16) & 0xFFFF, found[1] >> 32
            assert any(table[b].get(column) == at for b in bytes_)
        last.record(touched, int(clock[mine]) << 32 | mine << 16, clock if reads else None)
        for b in bytes_:
            kept = {c: at for c, at in table[b].items() if reads and c != mine and clock[c] < at}
            table[b] = {**kept, mine: int(clock[mine])}
    assert len(last.sets) <= 200
