"""Kernels in which one program of one rank does not send its signal, or does not come to the barrier."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.errors import GridTooLarge, WaitTimeout
from pkt.language.world import STATUS_ABORT, STATUS_DEADLINE, STATUS_FIRST_RECORD, STATUS_RECORDS

PROGRAMS = 4
HOWS = ("signal", "signal_all", "barrier", "grid_barrier", "world_barrier")


@triton.jit(do_not_specialize=["dropper", "dropped", "first"])
def drop_kernel(flags, first, dropper, dropped, world, HOW: tl.constexpr):
    """Program `dropped` of rank `dropper` sends nothing; flags[first + i] are counters that nobody has used."""
    pid = tl.program_id(0)
    sends = (tl.cast(world.rank, tl.int32) != dropper) | (pid != dropped)
    own = flags + first + pid
    if HOW == "signal":
        if sends:
            pl.signal(own, (world.rank + 1) % world.size, world)
        pl.wait(own, 1, world)
    elif HOW == "signal_all":
        if sends:
            pl.signal_all(own, world)
        pl.wait(own, world.size, world)
    elif HOW == "barrier":
        if sends:
            pl.barrier(own, world)
    elif HOW == "grid_barrier":
        if sends:
            pl.grid_barrier(flags + first, world)
    else:
        if sends:
            pl.world_barrier(flags + first, world)


def waiters(how: str, ranks: int, dropper: int, dropped: int) -> set[tuple[int, int]]:
    """(rank, program) of every program that waits in vain."""
    everybody = {(r, p) for r in range(ranks) for p in range(PROGRAMS)}
    return {
        "signal": {((dropper + 1) % ranks, dropped)},
        "signal_all": {(r, dropped) for r in range(ranks)},
        "barrier": {(r, dropped) for r in range(ranks)} - {(dropper, dropped)},
        "grid_barrier": {(dropper, p) for p in range(PROGRAMS)} - {(dropper, dropped)},
        "world_barrier": everybody - {(dropper, dropped)},
    }[how]


def drop_once(world: Any, how: str, dropper: int, dropped: int) -> None:
    """Drop one signal, and run until the error."""
    flags = pkt.signals(2 * PROGRAMS, name="flags")
    drop_kernel[(PROGRAMS,)](flags, 0, -1, -1, world.device, how, launch_cooperative_grid=True)
    world.synchronize()
    drop_kernel[(PROGRAMS,)](flags, PROGRAMS, dropper, dropped, world.device, how, launch_cooperative_grid=True)
    world.synchronize()
    world.barrier()


def many_drops(world: Any, how: str, count: int, seconds: float) -> list[tuple[str, float]]:
    """Make `count` drops in one world. Returns for each drop this rank's error text and the seconds until it.

    The status page is wiped after every drop. A round without a drop then shows that counters and ranks work again.
    """
    flags = pkt.signals((2 * count + 1) * PROGRAMS, name="flags")
    status = world.device.status
    drop_kernel[(PROGRAMS,)](flags, 0, -1, -1, world.device, how, launch_cooperative_grid=True)
    world.synchronize()
    nanoseconds = torch.tensor([int(seconds * 1e9)]).view(torch.int32)
    status[STATUS_DEADLINE : STATUS_DEADLINE + 2] = nanoseconds.to(status.device)
    torch.cuda.synchronize()
    world.all_gather_object(0)
    said = []
    for i in range(count):
        dropper, dropped = i % world.size, i // world.size % PROGRAMS
        start = time.perf_counter()
        first = (2 * i + 1) * PROGRAMS
        drop_kernel[(PROGRAMS,)](flags, first, dropper, dropped, world.device, how, launch_cooperative_grid=True)
        text = ""
        try:
            world.synchronize()
        except WaitTimeout as error:
            text = str(error)
        said.append((text, time.perf_counter() - start))
        world.all_gather_object(0)  # every rank's kernel has ended
        status[STATUS_ABORT] = 0
        status[STATUS_RECORDS] = 0
        status[STATUS_FIRST_RECORD:] = 0
        torch.cuda.synchronize()
        world.all_gather_object(0)
        drop_kernel[(PROGRAMS,)](flags, first + PROGRAMS, -1, -1, world.device, how, launch_cooperative_grid=True)
        world.synchronize()
    world.barrier()
    return said


@triton.jit
def wide_kernel(flags, world):
    pl.grid_barrier(flags, world)


def too_wide(world: Any) -> int:
    """Launch as many programs as fit, then one more, which is refused. Returns how many fit on an SM."""
    from pkt.runtime.launch.launch import cooperative, resident_per_sm

    flags, device = pkt.signals(1), world.device
    compiled = wide_kernel.warmup(flags, device, grid=(1,), num_warps=32, launch_cooperative_grid=True)
    most = resident_per_sm(compiled) * world.num_sms
    cooperative(world, wide_kernel, (most,), flags, device, num_warps=32)
    world.synchronize()
    with pytest.raises(GridTooLarge, match=str(most + 1)):
        cooperative(world, wide_kernel, (most + 1,), flags, device, num_warps=32)
    world.synchronize()  # nothing was launched
    return most // world.num_sms
