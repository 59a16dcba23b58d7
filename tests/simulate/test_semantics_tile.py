"""Tiles, OpenSHMEM names, orders and the template under many schedules; every function has such a test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from tests.simulate.helpers import failures, run

SEEDS = (0, 1, 2, 3, 4, 6)
R, C = 8, 16


def layout(x: Any, tma: bool = True) -> pl.Layout:
    shape = (1,) * (4 - x.dim()) + tuple(x.shape)
    return pl.Layout(x, *shape, tl.constexpr(tma))


# -- tiles -----------------------------------------------------------------------------------------------------------


@triton.jit
def store_tiles(dst, add, everywhere, bar, world, R: tl.constexpr, C: tl.constexpr):
    """Store rank r's tile to plane r of its right neighbour and of all ranks; add to tile (1, 0) of all ranks."""
    me = tl.cast(world.rank, tl.int32)
    right = (me + 1) % world.size
    tile = tl.zeros((R, C), tl.float32) + me + 1
    pl.tile.store_async(dst, tile, (me, 0, 1, 0), world, right)
    pl.tile.store_async(everywhere, tile, (0, me, 0, 1), world)
    pl.tile.store_add_async(add, tile, (0, 0, 1, 0), world)
    pl.tile.store_add_async(add, tile, (0, 0, 0, 1), world, right)
    pl.tile.signal_all(bar, (0, 0, 1, 2), world)
    pl.tile.wait(bar, (0, 0, 1, 2), world.size, world)


@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize("multicast", [True, False])
def test_tiles_arrive_whole_and_are_cut_at_the_edge(multicast: bool, tma: bool) -> None:
    def main(world: Any) -> None:
        n, rows, cols = world.size, 12, 28  # neither a multiple of the tile
        dst, everywhere = pkt.zeros((n, 1, rows, cols)), pkt.zeros((1, n, rows, cols))
        add, bar = pkt.ones((1, 1, rows, cols)), pkt.signals(8).view(2, 4)
        store_tiles[(1,)](
            layout(dst, tma), layout(add, tma), layout(everywhere, tma), layout(bar, False), world.device, R, C
        )
        assert bar[1, 2] == n
        left = (world.rank - 1) % n
        wanted = torch.zeros(n, 1, rows, cols)
        wanted[left, 0, R:, :C] = left + 1
        assert torch.equal(dst, wanted)
        wanted = torch.zeros(1, n, rows, cols)
        wanted[0, :, :R, C:] = torch.arange(1, n + 1).reshape(n, 1, 1)
        assert torch.equal(everywhere, wanted)
        wanted = torch.ones(1, 1, rows, cols)
        wanted[0, 0, R:, :C] += n * (n + 1) / 2
        wanted[0, 0, :R, C:] += left + 1
        assert torch.equal(add, wanted)

    for ranks in (1, 3):
        assert failures(main, ranks, SEEDS, multicast=multicast) == {}


@triton.jit
def reduce_tiles(x, out, inplace, bar, world, R: tl.constexpr, C: tl.constexpr, OP: tl.constexpr):
    pl.tile.barrier(bar, (0, 0, 0, 0), world)
    pl.tile.reduce(out, (0, 0, 0, 1), x, (0, 1, 0, 0), world, R, C, OP)
    me = tl.cast(world.rank, tl.int32)
    pl.tile.all_reduce(inplace, (0, 0, me, 0), world, R, C, OP)
    pl.tile.signal(bar, (0, 0, 0, 1), (me + 1) % world.size, world)  # only to test the signal
    pl.tile.wait(bar, (0, 0, 0, 1), 1, world)
    pl.tile.barrier(bar, (0, 0, 0, 0), world)


@pytest.mark.parametrize("multicast", [True, False])
@pytest.mark.parametrize("op", ["add", "min", "max"])
def test_tile_reductions_combine_all_ranks(op: str, multicast: bool) -> None:
    def main(world: Any) -> None:
        n = world.size
        x, inplace = (
            pkt.empty((1, 2, R, C), dtype=torch.bfloat16),
            pkt.empty((1, 1, n * R, C), dtype=torch.bfloat16),
        )
        out, bar = torch.zeros(1, 1, R, 2 * C, dtype=torch.bfloat16), pkt.signals(2)
        value = torch.arange(C).float() + 3 * world.rank
        x.copy_(value.expand_as(x))
        inplace.copy_(-value.expand_as(inplace))
        world.barrier()
        reduce_tiles[(1,)](layout(x), layout(out), layout(inplace), layout(bar, False), world.device, R, C, op)
        ranks = torch.stack([torch.arange(C).float() + 3 * r for r in range(n)])
        reduced = {"add": ranks.sum(0), "min": ranks.amin(0), "max": ranks.amax(0)}[op].bfloat16()
        assert torch.equal(out[0, 0, :, C:], reduced.expand(R, C))
        assert (out[0, 0, :, :C] == 0).all()
        negative = {"add": -ranks.sum(0), "min": -ranks.amax(0), "max": -ranks.amin(0)}[op].bfloat16()
        assert torch.equal(inplace, negative.expand_as(inplace))

    assert failures(main, 3, SEEDS, multicast=multicast) == {}


# -- OpenSHMEM names -------------------------------------------------------------------------------------------------


@triton.jit
def puts_and_gets(x, y, got, flags, nbytes, world):
    me, n = pl.shmem.my_pe(world), pl.shmem.n_pes(world)
    right, left = (me + 1) % n, (me + n - 1) % n
    pl.shmem.putmem(y, x, nbytes, right, world, BLOCK=16)
    pl.shmem.fence()
    pl.shmem.putmem_nbi(y + 64, x, nbytes, right, world, BLOCK=16)
    pl.shmem.quiet()
    pl.shmem.putmem_signal(y + 128, x, nbytes, flags, 1, pl.shmem.SIGNAL_ADD, right, world, BLOCK=16)
    pl.shmem.putmem_signal_nbi(y + 192, x, nbytes, flags, 1, pl.shmem.SIGNAL_ADD, right, world, BLOCK=16)
    pl.shmem.signal_wait_until(flags, pl.shmem.CMP_GE, 2, world)
    pl.shmem.getmem(got, x, nbytes, left, world, BLOCK=16)
    pl.shmem.getmem_nbi(got + 64, x, nbytes, left, world, BLOCK=16)
    pl.shmem.int_p(flags + 1, me + 70, right, world)
    pl.shmem.signal_op(flags + 2, 5, pl.shmem.SIGNAL_SET, right, world)
    pl.shmem.signal_wait_until(flags + 2, pl.shmem.CMP_EQ, 5, world)
    for i in range(256):
        tl.store(got + 128 + i, tl.load(y + i))
    tl.store(pl.shmem.remote_ptr(flags + 3, right, world), me + 80)
    pl.shmem.sync_all(flags + 4, world)
    pl.shmem.barrier_all(flags + 4, world)
    pl.shmem.broadcast(x + 64, x, nbytes, n - 1, flags + 6, world, BLOCK=16)


def test_openshmem_names_behave_as_their_functions() -> None:
    def main(world: Any) -> None:
        n, left = world.size, (world.rank - 1) % world.size
        x, y = pkt.zeros(128, dtype=torch.int32), pkt.zeros(256, dtype=torch.int32)
        got, flags = torch.zeros(384, dtype=torch.int32), pkt.signals(8)
        x[:64] = torch.arange(64) + 100 * world.rank
        world.barrier()
        puts_and_gets[(1,)](x, y, got, flags, 4 * 50, world.device)
        block = [*range(100 * left, 100 * left + 50), *[0] * 14]
        assert got.tolist() == block * 6
        assert flags[1:4].tolist() == [left + 70, 5, left + 80]
        assert x[64:].tolist() == [*range(100 * (n - 1), 100 * (n - 1) + 50), *[0] * 14]

    for ranks in (1, 3):
        assert failures(main, ranks, SEEDS) == {}


# -- orders ----------------------------------------------------------------------------------------------------------


@triton.jit
def orders(out, n, num_m, num_n, world, GROUP: tl.constexpr):
    for t in range(n):
        m, k = pl.order.supergroup(t, num_m, num_n, GROUP)
        tl.store(out + t, m * num_n + k)
        tl.store(out + n + t, pl.order.own_first(t, n, world))
        tl.store(out + 2 * n + t, pl.order.own_last(t, n, world))
        rank, index = pl.order.peers_interleaved(t, n // world.size, world)
        tl.store(out + 3 * n + t, rank * (n // world.size) + index)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_orders_are_permutations_with_the_own_shard_in_place(ranks: int) -> None:
    num_m, num_n, group = 5, 12, 2

    def main(world: Any) -> None:
        n = num_m * num_n
        out = torch.full((4, n), -1, dtype=torch.int32)
        orders[(1,)](out, n, num_m, num_n, world.device, group)
        for row in out:
            assert sorted(row.tolist()) == list(range(n))
        walked = [divmod(t, num_n) for t in out[0].tolist()]
        assert walked[:4] == [(0, 0), (1, 0), (0, 1), (1, 1)]
        assert walked[-num_n:] == [(4, k) for k in range(num_n)]  # the last group has one row
        own = set(range(n * world.rank // ranks, n * (world.rank + 1) // ranks))
        assert set(out[1, : len(own)].tolist()) == own
        assert set(out[2, n - len(own) :].tolist()) == own
        assert set(out[3, : n // ranks].tolist()) == own
        others = [t // (n // ranks) for t in out[3, n // ranks :].tolist()]
        assert others == [(world.rank + 1 + i % max(ranks - 1, 1)) % ranks for i in range(len(others))]

    pkt.launch(main, ranks=ranks, device="cpu")


# -- the template ----------------------------------------------------------------------------------------------------


@triton.jit
def produce(task, x, y, flags, out, epoch, world):
    tl.store(x + task, (task + 1) * epoch * (world.rank + 1))
    pl.signal(flags + task, world.rank, world)


@triton.jit
def send(task, x, y, flags, out, epoch, world):
    """Send a computed task's value to the right neighbour, and take the left neighbour's."""
    pl.wait(flags + task, epoch, world)
    pl.store(y + task, tl.load(x + task), (world.rank + 1) % world.size, world)
    pl.signal(flags + 16 + task, (world.rank + 1) % world.size, world)
    pl.wait(flags + 16 + task, epoch, world)
    tl.store(out + task, tl.load(y + task))


@triton.jit
def template(x, y, flags, out, queue, tasks, comm_sms, world):
    epoch = pl.epoch(flags, world)
    pl.template.lcsc(produce, send, (x, y, flags, out, epoch, world), tasks, tasks, queue, epoch, comm_sms)
    pl.barrier(flags + 32 + tl.program_id(0), world)  # y is read before the next launch writes it


@pytest.mark.parametrize(("programs", "comm_sms"), [(4, 1), (4, 3), (3, 0)])
def test_the_template_overlaps_and_relaunches(programs: int, comm_sms: int) -> None:
    assert pl.lcsc is pl.template.lcsc

    def main(world: Any) -> None:
        x, y, flags = (*pkt.zeros((2, 16), dtype=torch.int32).unbind(), pkt.signals(40))
        queue, out = torch.zeros(1, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
        for launch in (1, 2, 3):
            template[(programs,)](x, y, flags, out, queue, 10, comm_sms, world.device)
            left = (world.rank - 1) % world.size
            assert out.tolist() == [(t + 1) * launch * (left + 1) for t in range(10)] + [0] * 6
            assert queue.item() == launch * (10 + programs)

    assert failures(main, 2, range(12)) == {}


# -- completeness ----------------------------------------------------------------------------------------------------

MODULES = {"tile", "shmem", "order", "template", "inspect"}


def test_every_function_of_the_language_has_a_test_here() -> None:
    """Each public name is called by a kernel with a checked result, so that a function that does nothing is found."""
    source = "".join(p.read_text() for p in Path(__file__).parent.glob("test_semantics_*.py"))
    wanted = {f"pl.{name}" for name in set(pl.__all__) - MODULES}
    for module in (pl.tile, pl.shmem, pl.order, pl.template):
        part = module.__name__.rsplit(".", 1)[1]
        names = [n for n, v in vars(module).items() if hasattr(v, "fn") and not n.startswith("_")]
        assert names
        wanted |= {f"pl.{part}.{name}" for name in names}
    missing = {name for name in wanted if not re.search(rf"\b{re.escape(name)}\b", source)}
    assert not missing


@triton.jit
def hand_made(x):
    pl.fence()


def test_primitives_outside_the_simulator_are_refused() -> None:
    with pytest.raises(Exception, match=r"pkt\.launch|driver|CUDA|cpu"):
        hand_made[(1,)](torch.zeros(1))
    run(hand_made, (1,), torch.zeros(1))
