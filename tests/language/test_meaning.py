"""Tiles, OpenSHMEM names, the template and long-lived counters on simulated ranks."""

import ctypes
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl

R, C = 16, 32


def launch(fn: Any, ranks: int, **options: Any) -> list[Any]:
    return pkt.launch(fn, ranks=ranks, device="cpu", heap=1 << 22, **options)


def layout(x: Any, tma: bool) -> pl.Layout:
    return pl.Layout(x, *x.shape, tl.constexpr(tma))


@triton.jit
def tile_kernel(
    dst, src, out, bar, peer, world, ADD: tl.constexpr, ALL: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    i = tl.program_id(0)
    j = tl.program_id(1)
    rows = i * R + tl.arange(0, R)
    cols = j * C + tl.arange(0, C)
    inside = (rows < src.r)[:, None] & (cols < src.c)[None, :]
    v = tl.load(src.ptr + rows[:, None] * src.c + cols[None, :], mask=inside, other=0)
    coord = (1, 0, i, j)
    if ALL and ADD:
        pl.tile.store_add_async(dst, v, coord, world)
    elif ALL:
        # the ranks write to the same place one after the other
        for r in range(world.size):
            if r == world.rank:
                pl.tile.store_async(dst, v, coord, world)
            pl.world_barrier(bar.ptr + 8, world)
    elif ADD:
        pl.tile.store_add_async(dst, v, coord, world, peer)
    else:
        pl.tile.store_async(dst, v, coord, world, peer)
    pl.tile.signal_all(bar, (0, 0, 0, 1), world)
    epoch = pl.epoch(bar.ptr, world)
    pl.tile.wait(bar, (0, 0, 0, 1), epoch * world.size * tl.num_programs(0) * tl.num_programs(1), world)
    pl.tile.reduce(out, (0, 0, i, j), dst, coord, world, R, C, "max")


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize(("to_all", "add"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("multicast", "tma"), [(True, True), (False, True), (True, False)])
def test_tile_functions_move_and_add_tiles(ranks: int, to_all: bool, add: bool, multicast: bool, tma: bool) -> None:
    rows, cols = 40, 72 if tma else 71  # no multiples of the tile; 71 floats are not whole groups of 16 bytes

    def main(world: Any) -> None:
        dst = pkt.zeros((2, 1, rows, cols), dtype=torch.float32)
        src = pkt.empty((1, 1, rows, cols), dtype=torch.float32)
        src.copy_(torch.arange(rows * cols).reshape(1, 1, rows, cols) + 10_000 * world.rank)
        out = pkt.zeros((1, 1, rows, cols), dtype=torch.float32)
        bar = pkt.signals(16)
        world.barrier()
        device = world.device._replace(multicast=tl.constexpr(multicast))
        right = (world.rank + 1) % world.size
        tile_kernel[(3, 3)](
            layout(dst, tma), layout(src, tma), layout(out, tma), pl.Layout(bar, 1, 1, 1, 16, tl.constexpr(False)),
            right, device, add, to_all, R, C,
        )  # fmt: skip
        world.synchronize()
        world.barrier()
        mine = torch.arange(rows * cols).reshape(rows, cols).float()
        by_rank = [mine + 10_000 * r for r in range(world.size)]
        if to_all:
            expected = sum(by_rank) if add else by_rank[-1]
            largest = expected
        else:
            expected, largest = by_rank[(world.rank - 1) % world.size], by_rank[-1]
        assert torch.equal(dst[1, 0], expected)
        assert not dst[0].any()
        assert torch.equal(out[0, 0], largest)

    launch(main, ranks)


@triton.jit
def all_reduce_kernel(x, bar, world, R: tl.constexpr, C: tl.constexpr):
    i = tl.program_id(0)
    pl.tile.barrier(bar, (0, 0, 0, i), world)
    if i % world.size == world.rank:
        pl.tile.all_reduce(x, (0, 0, i, 0), world, R, C)
    pl.tile.barrier(bar, (0, 0, 0, i), world)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("multicast", [False, True])
def test_all_reduce_works_in_place(ranks: int, multicast: bool) -> None:
    def main(world: Any) -> None:
        x = pkt.empty((1, 1, 4 * R, C), dtype=torch.bfloat16)
        x.copy_(torch.arange(4 * R * C).reshape(x.shape) % 31 + world.rank)
        bar = pkt.signals(16)
        world.barrier()
        device = world.device._replace(multicast=tl.constexpr(multicast))
        for again in range(2):
            expected = sum(x.peer(r).float() for r in range(world.size)).bfloat16()
            world.barrier()
            all_reduce_kernel[(4,)](
                layout(x, True), pl.Layout(bar, 1, 1, 1, 16, tl.constexpr(False)), device, R, C
            )  # fmt: skip
            world.synchronize()
            assert torch.equal(x, expected), again
            world.barrier()

    launch(main, ranks)


@triton.jit
def shmem_kernel(x, y, z, flags, nbytes, world):
    me = pl.shmem.my_pe(world)
    n = pl.shmem.n_pes(world)
    right = (me + 1) % n
    left = (me + n - 1) % n
    pl.shmem.putmem_signal(y, x, nbytes, flags, 1, pl.shmem.SIGNAL_ADD, right, world, BLOCK=64)
    pl.shmem.signal_wait_until(flags, pl.shmem.CMP_GE, 1, world)
    pl.shmem.getmem(z, x, nbytes, left, world, BLOCK=64)
    pl.shmem.int_p(flags + 1, 7, right, world)
    tl.store(pl.shmem.remote_ptr(flags + 2, left, world), 8)
    pl.shmem.barrier_all(flags + 4, world)
    pl.shmem.broadcast(x, y, nbytes, n - 1, flags + 6, world, BLOCK=64)
    pl.shmem.signal_op(flags + 3, 9, pl.shmem.SIGNAL_SET, right, world)
    pl.shmem.signal_wait_until(flags + 3, pl.shmem.CMP_EQ, 9, world)
    pl.shmem.putmem_nbi(z, x, 16, right, world)
    pl.shmem.quiet()
    pl.shmem.sync_all(flags + 4, world)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_openshmem_functions_move_the_data(ranks: int) -> None:
    def main(world: Any) -> None:
        n = 200
        x = pkt.full((n,), world.rank, dtype=torch.int32)
        y, z = pkt.zeros_like(x), pkt.zeros_like(x)
        flags = pkt.signals(8)
        world.barrier()
        shmem_kernel[(1,)](x, y, z, flags, 4 * n, world.device)
        world.synchronize()
        world.barrier()
        left = (world.rank - 1) % world.size
        assert y.tolist() == [left] * n
        last = (world.size - 2) % world.size  # the data that the last PE received
        assert x.tolist() == [last] * n
        assert z.tolist() == [last] * 4 + [left] * (n - 4)
        assert flags[:4].tolist() == [1, 7, 8, 9]

    launch(main, ranks)


@triton.jit
def count_task(task, done, flags, wanted, world, TELL: tl.constexpr):
    tl.atomic_add(done + task, 1)
    if TELL:
        pl.signal(flags, world.rank, world)


@triton.jit
def wait_task(task, done, flags, wanted, world, TELL: tl.constexpr):
    pl.wait(flags, wanted, world)
    pl.atomic_add(done + 64 + task, 1, world.rank, world)


@triton.jit
def template_kernel(done, flags, queue, tasks, comm_tasks, comm_sms, world, TELL: tl.constexpr):
    epoch = pl.epoch(flags, world)
    pl.lcsc(
        count_task, wait_task, (done, flags, epoch * tasks, world, TELL),
        tasks, comm_tasks, queue, epoch, comm_sms,
    )  # fmt: skip


@pytest.mark.parametrize(("grid", "comm_sms"), [(4, 1), (4, 3), (4, 0), (1, 0)])
@pytest.mark.parametrize(("tasks", "comm_tasks"), [(10, 5), (0, 3), (7, 0)])
def test_the_template_runs_each_task_once_a_launch(grid: int, comm_sms: int, tasks: int, comm_tasks: int) -> None:
    def main(world: Any) -> None:
        done = pkt.zeros(128, dtype=torch.int32)
        flags, queue = pkt.signals(4), torch.zeros(1, dtype=torch.int32)
        world.barrier()
        for launches in (1, 2, 3):
            template_kernel[(grid,)](done, flags, queue, tasks, comm_tasks, comm_sms, world.device, comm_tasks > 0)
            world.synchronize()
            assert done[:64].tolist() == [launches] * tasks + [0] * (64 - tasks)
            assert done[64:].tolist() == [launches] * comm_tasks + [0] * (64 - comm_tasks)

    launch(main, 2)


@triton.jit
def long_lived_kernel(out, flags, world):
    pid = tl.program_id(0)
    epoch = pl.epoch(flags, world)
    pl.signal_all(flags, world)
    pl.wait(flags, epoch * world.size * tl.num_programs(0), world)
    pl.barrier(flags + 1 + pid, world)
    pl.grid_barrier(flags + 3, world)
    pl.world_barrier(flags + 4, world)
    tl.store(out + pid, epoch)


@pytest.mark.parametrize("ranks", [1, 3])
def test_counters_and_epochs_work_across_their_wrap(ranks: int) -> None:
    grid, launches = 2, 6

    def main(world: Any) -> list[int]:
        flags, out = pkt.signals(8), torch.zeros(grid, dtype=torch.int32)
        # the state after 2^32 - 3 launches: the epoch word, and the counter that the epoch implies
        start = 2**32 - 3
        ctypes.c_int64.from_address(flags.data_ptr() - 64).value = (start - 2**32) << 32
        flags[0] = (start * world.size * grid + 2**31) % 2**32 - 2**31
        world.barrier()
        seen = []
        for _ in range(launches):
            long_lived_kernel[(grid,)](out, flags, world.device)
            world.synchronize()
            seen.append(int(out[0]))
        return seen

    for seen in launch(main, ranks):
        assert seen == [-2, -1, 0, 1, 2, 3]
