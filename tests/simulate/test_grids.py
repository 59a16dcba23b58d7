"""Barriers and epochs on grids of three axes and of many programs; tiles far from the beginning of their array."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.language.tile import Layout, _elements
from pkt.simulate import machine
from tests.simulate.helpers import failures, run


@triton.jit
def meet(x, out, flags, world, WORLD: tl.constexpr):
    me = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
    n = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    tl.store(x + me, me + 1)
    if WORLD:
        pl.world_barrier(flags, world)
    else:
        pl.grid_barrier(flags, world)
    total = 0
    for i in range(n):
        total += tl.load(x + i)
    tl.store(out + me, total)


@pytest.mark.parametrize("everywhere", [False, True], ids=["grid", "world"])
@pytest.mark.parametrize("grid", [(1, 1, 3), (1, 3, 1), (2, 1, 2), (2, 2, 2)])
def test_barriers_count_the_programs_of_every_axis(grid: tuple[int, ...], everywhere: bool) -> None:
    """Twice on the same counters: a wrong share of one round would show in the next at the latest."""
    n = grid[0] * grid[1] * grid[2]

    def main(world: Any) -> None:
        x, out, flags = pkt.zeros(n, dtype=torch.int32), torch.zeros(n, dtype=torch.int32), pkt.signals(2)
        for _ in range(2):
            out.zero_()
            meet[grid](x, out, flags, world.device, everywhere)
            assert out.tolist() == n * [n * (n + 1) // 2]
            world.barrier()

    assert failures(main, 2, (0, 1, 3)) == {}


@triton.jit
def neighbours(x):
    i = tl.program_id(0)
    tl.store(x + i, i)
    tl.store(x + i + 1, i)


def test_more_programs_than_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some share one. No false alarm follows, and races of those next to each other are found."""
    monkeypatch.setattr(machine, "COLUMNS", 2 * (1 + 2 * 4))

    def right(world: Any) -> None:
        x, out, flags = pkt.zeros(23, dtype=torch.int32), torch.zeros(23, dtype=torch.int32), pkt.signals(2)
        for _ in range(2):
            meet[(23,)](x, out, flags, world.device, WORLD=True)
        assert out.tolist() == 23 * [23 * 24 // 2]
        assert max(len(host.columns) for host in world.backend.machine.hosts) == 4

    def wrong(world: Any) -> None:
        neighbours[(23,)](pkt.zeros(24, dtype=torch.int32))

    assert failures(right, 2, range(4)) == {}
    assert isinstance(failures(wrong, 2, [0])[0], pkt.DataRace)


@triton.jit
def count_launch(out, flags, world):
    tl.store(out, pl.epoch(flags, world))


@pytest.mark.parametrize("grid", [3, lambda bound: 3, (), (1, 1, 1, 1), (-1,), (1.5,)])
def test_a_grid_is_a_tuple_of_one_to_three_integers(grid: Any) -> None:
    def launch(world: Any) -> None:
        x = torch.zeros(1)
        meet[grid](x, x, x, world.device, WORLD=False)

    with pytest.raises(
        pkt.ShapeError, match="rank 0: meet: grid: found .*, wanted a tuple of one to three integers from 0"
    ):
        pkt.launch(launch, ranks=1, device="cpu")


@pytest.mark.parametrize("before", [0x7FFE, 0x7FFF, 0x8000, 0xFFFF, 0x10000])
def test_an_epoch_counts_more_arrivals_than_fit_into_16_bits(before: int) -> None:
    """As if so many programs of a larger grid had arrived: a grid of one program is not their last."""

    def main(world: Any) -> None:
        flags, out = pkt.signals(1), torch.zeros(1, dtype=torch.int32)
        page = world.heap.backend.view(0, flags.data_ptr() - world.heap.backend.base - 64, 8).view(torch.int64)
        assert page.item() == 0
        page.fill_((5 << 32) + before)
        count_launch[(1,)](out, flags, world.device)
        assert out.item() == 6
        assert page.item() == (5 << 32) + before + 1
        page.fill_(5 << 32)
        count_launch[(1,)](out, flags, world.device)
        assert page.item() == 6 << 32

    pkt.launch(main, ranks=1, device="cpu", heap="1MiB")


@triton.jit
def far_offsets(out, base, rows_of, R: tl.constexpr, C: tl.constexpr):
    x = Layout(base, 1, 1, rows_of, 1 << 20, False)
    ptrs, inside = _elements(x, (0, 0, 3000, 1), R, C)
    at = (ptrs.to(tl.int64) - base.to(tl.int64)) // 4
    i = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(out + i, tl.where(inside, at, -1))


def test_the_offset_of_a_tile_has_64_bits() -> None:
    """Row 3,000 * 4 of rows of 2^20 elements is more than 2^31 elements away; no memory is touched there."""
    R, C = 4, 4
    out, base = torch.zeros(R * C, dtype=torch.int64), torch.zeros(16, dtype=torch.int32)
    run(far_offsets, (1,), out, base, 12003, R, C)
    row, col = torch.arange(R)[:, None], torch.arange(C)[None, :]
    wanted = torch.where(row < 3, (12000 + row) * (1 << 20) + C + col, -1)
    assert out.tolist() == wanted.reshape(-1).tolist()


@triton.jit
def plane_of(out, base, b, d):
    x = Layout(base, 2, 3, 5, 7, False)
    ptrs, _ = _elements(x, (b, d, 0, 0), 4, 4)
    at = (ptrs.to(tl.int64) - base.to(tl.int64)) // 4
    tl.store(out + tl.arange(0, 4)[:, None] * 4 + tl.arange(0, 4)[None, :], at)


@pytest.mark.parametrize(("b", "d"), [(0, 2), (1, 0), (1, 2)])
def test_a_tile_lies_in_its_matrix_of_its_batch(b: int, d: int) -> None:
    out, base = torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.int32)
    run(plane_of, (1,), out, base, b, d)
    assert out.tolist() == [((b * 3 + d) * 5 + row) * 7 + col for row in range(4) for col in range(4)]
