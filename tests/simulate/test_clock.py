"""`timed`: the time of a launch on the modelled clock, which the tuner reads."""

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.simulate import cost

pytestmark = pytest.mark.machine

BLOCK = tl.constexpr(4096)
BLOCK_SECONDS = 1e-6 * 2 * 4 * BLOCK.value / cost.LOCAL_BYTES_PER_US  # load and store of one block


@triton.jit
def queue_kernel(x_ptr, queue_ptr, tasks):
    task = tl.atomic_add(queue_ptr, 1)
    while task < tasks:
        offs = task * BLOCK + tl.arange(0, BLOCK)
        tl.store(x_ptr + offs, tl.load(x_ptr + offs) + 1)
        task = tl.atomic_add(queue_ptr, 1)


def test_programs_take_tasks_from_a_queue_in_the_order_of_the_clock():
    """4 programs share 12 equal tasks. In the order of the schedule the first program would take all of them."""

    def main(world):
        x, queue = torch.zeros(12 * BLOCK.value), torch.zeros(1, dtype=torch.int32)
        result, seconds = world.backend.timed(lambda: (queue_kernel[(4,)](x, queue, 12), "result")[1])
        assert result == "result"
        assert x.unique().tolist() == [1.0]
        return seconds

    first, second = pkt.launch(main, 2, device="cpu", sms=4)
    assert first == second
    assert 3 * BLOCK_SECONDS < first - 1e-6 * cost.LAUNCH_US < 4 * BLOCK_SECONDS


@triton.jit
def meet_kernel(flags, world):
    pl.world_barrier(flags, world)


def test_timed_begins_on_all_ranks_together():
    """Rank 0 starts late, because it is busy. The time of rank 1 does not include its wait for rank 0."""

    def main(world):
        flags = pkt.signals(2)
        x, queue = torch.zeros(64 * BLOCK.value), torch.zeros(1, dtype=torch.int32)
        if world.rank == 0:
            queue_kernel[(1,)](x, queue, 64)
        return world.backend.timed(lambda: meet_kernel[(1,)](flags, world.device))[1]

    first, second = pkt.launch(main, 2, device="cpu", sms=4)
    assert second == pytest.approx(first, rel=0.2)
    assert second < 4 * BLOCK_SECONDS + 1e-6 * (cost.LAUNCH_US + 4 * cost.SIGNAL_US)


def test_timed_restores_the_schedule():
    def main(world):
        schedule = world.backend.machine.schedule
        inside = []
        world.backend.timed(lambda: inside.append(schedule.by_time))
        world.barrier()
        return inside, schedule.by_time

    assert pkt.launch(main, 2, device="cpu") == [([True], False)] * 2
    assert pkt.launch(main, 2, device="cpu", trace=True) == [([True], True)] * 2
    assert pkt.launch(main, 2, device="cpu", seed=7) == [([False], False)] * 2, "an explored schedule does not change"
