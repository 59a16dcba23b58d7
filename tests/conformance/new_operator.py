"""Shift: rank r ends with the x of rank r - by; n * itemsize bytes leave each rank.

push: every rank stores its x into the inbox of the rank `by` places on, and signals.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.kernels.declaration import Call, Case, Form, Launch, Operand, block, integer
from pkt.kernels.operator import Operator
from pkt.kernels.shared.checks import FLOATS
from pkt.kernels.shared.grid import barrier_counters, num_programs
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals


@triton.jit
def shift_kernel(
    x_ptr,  # (n,) this rank's
    out_ptr,  # (n,) this rank's
    inbox_ptr,  # (n,) on every rank; rank r - by stores
    ready_ptr,  # int32 (programs,) on every rank
    bar_ptr,  # int32 (programs,) on every rank
    n,
    by,
    world,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    launch = pl.epoch(ready_ptr, world)
    to = (tl.cast(world.rank, tl.int32) + by) % world.size
    pl.barrier(bar_ptr + pid, world)  # before overwrite: everyone has read the last launch's inbox
    for start in range(pid * BLOCK, n, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        pl.put(inbox_ptr + offs, x_ptr + offs, to, world, mask=offs < n)
    pl.signal(ready_ptr + pid, to, world)  # publish
    pl.wait(ready_ptr + pid, launch, world)
    for start in range(pid * BLOCK, n, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + offs, tl.load(inbox_ptr + offs, mask=offs < n), mask=offs < n)


def plan(call: Call) -> Launch:
    """A grid, an inbox and counters for x of this size."""
    x, world, length = call["x"], call.world, call["block"]
    n, by, programs = x.numel(), call["by"] % world.size, num_programs(world, triton.cdiv(x.numel(), length))
    inbox = world.keep(("shift", n, x.dtype), lambda: empty(n, dtype=x.dtype, world=world))
    ready = world.keep(("shift", n, x.dtype, programs), lambda: signals(programs, world=world))
    start, bar = cooperative_launch(world, shift_kernel, (programs,)), barrier_counters(world)

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        start(x, out, inbox, ready, bar, n, by, world.device, length)
        return out

    return launch


def shift(x, out=None, *, by=1, mode=None, block=None, world=None) -> torch.Tensor:
    """The x (n,) of the rank `by` places before this one, into `out` or a new tensor. Collective."""
    return OPERATOR((x, out), world=world, by=by, mode=mode, block=block)


OPERATOR = Operator(
    shift,
    tensors={"x": Operand("n", FLOATS)},
    result="n",
    arguments={"by": integer(least=0)},
    settings={"block": block},
    forms={"push": Form(plan, "store into an inbox", "|x|", settings={"block": 1024}, small={"block": 16})},
    reference=lambda rank, x, by=1: x[(rank - by) % len(x)],
    exact=True,
    cases=(Case(sizes={"n": 40}, arguments={"mode": "push"}), Case(sizes={"n": 7}, arguments={"by": 2}, explore=False)),
)
