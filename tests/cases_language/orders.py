"""Orders and the template."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl

from ._case import LAUNCHES, case, local, same


@triton.jit
def order_kernel(out, n, m, world, GROUP: tl.constexpr):
    t = tl.program_id(0)
    row, col = pl.order.supergroup(t, n, m, GROUP)
    tl.store(out + 6 * t, row)
    tl.store(out + 6 * t + 1, col)
    tl.store(out + 6 * t + 2, pl.order.own_first(t, n * m, world))
    tl.store(out + 6 * t + 3, pl.order.own_last(t, n * m, world))
    rank, index = pl.order.peers_interleaved(t, n * m // world.size, world)
    tl.store(out + 6 * t + 4, rank)
    tl.store(out + 6 * t + 5, index)


@case("order.supergroup", "order.own_first", "order.own_last", "order.peers_interleaved")
def orders(world: Any, rows: int = 7, group: int = 3) -> None:
    """Each order takes every tile once and begins with the right tile."""
    cols, rank = 2 * world.size, world.rank
    n = rows * cols
    out = local(world, n, 6)
    order_kernel[(n,)](out, rows, cols, world.device, group)
    world.synchronize()
    found = out.cpu()
    assert sorted(map(tuple, found[:, :2].tolist())) == [(i, j) for i in range(rows) for j in range(cols)]
    assert found[:4, 0].tolist() == [0, 1, 2, 0]  # a group's rows, column by column
    assert sorted(found[:, 2].tolist()) == sorted(found[:, 3].tolist()) == list(range(n))
    assert found[0, 2] == rank * n // world.size
    assert found[-1, 3] == ((rank + 1) * n // world.size - 1) % n
    per = n // world.size
    assert sorted(map(tuple, found[:, 4:].tolist())) == [(r, i) for r in range(world.size) for i in range(per)]
    assert found[0, 4] == rank
    assert world.size == 1 or found[per, 4] == (rank + 1) % world.size


@triton.jit
def _square(task, x, y, flags, n, world):
    v = tl.load(x + task)
    pl.store(y + tl.cast(world.rank, tl.int32) * n + task, v * v, world.rank, world)
    pl.signal(flags + task, world.rank, world)


@triton.jit
def _send(task, x, y, flags, n, world):
    at = y + tl.cast(world.rank, tl.int32) * n + task
    epoch = tl.load(x + n)
    pl.wait(flags + task, epoch, world)
    v = tl.load(at)
    for i in tl.static_range(1, world.size):
        pl.store(at, v, (world.rank + i) % world.size, world)


@triton.jit
def lcsc_kernel(x, y, flags, queue, bar, n, num_comm_sms, world):
    """Compute tasks square numbers, and communicate tasks send the squares to all ranks."""
    epoch = pl.epoch(flags, world)
    pl.lcsc(_square, _send, (x, y, flags, n, world), n, n, queue, epoch, num_comm_sms)
    pl.world_barrier(bar, world)


@case("lcsc", "epoch", comm=0)
@case("lcsc", "epoch", comm=2)
def lcsc(world: Any, comm: int, n: int = 9) -> None:
    x, y = local(world, n + 1), pkt.empty(world.size, n, dtype=torch.int32)
    flags, bar, queue = pkt.signals(n), pkt.signals(2), pkt.signals(1)
    for launch in range(LAUNCHES + 1):
        y.fill_(-1)
        x[:n] = torch.arange(n) + world.rank + launch
        x[n] = launch + 1
        world.barrier()
        lcsc_kernel[(4,)](x, y, flags, queue, bar, n, comm, world.device, launch_cooperative_grid=True)
        same(world, y, torch.stack([(torch.arange(n) + r + launch) ** 2 for r in range(world.size)]))
