"""Shift: rank r ends with the x of rank r - by, (n,), n * itemsize bytes out of each rank.

push: every rank stores its x into an inbox of the rank that is `by` places on, and signals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.kernels.declaration import Call, Case, Form, Launch, Operand, block, integer
from pkt.kernels.operator import Operator
from pkt.kernels.shared.checks import FLOATS
from pkt.kernels.shared.grid import num_programs
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.world import World


def reference(rank: int, x: Sequence[torch.Tensor], by: int = 1) -> torch.Tensor:
    """What `rank` gets."""
    return x[(rank - by) % len(x)]


@triton.jit
def shift_kernel(
    x_ptr,  # (n,) this rank's
    out_ptr,  # (n,) this rank's
    inbox_ptr,  # (2, n) on every rank; rank r - by stores, halves by the launch's parity
    ready_ptr,  # int32 (programs,) on every rank
    n,
    by,
    world,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    launch = pl.epoch(ready_ptr, world)
    to = (tl.cast(world.rank, tl.int32) + by) % world.size
    half = inbox_ptr + tl.cast(launch & 1, tl.int64) * n
    for start in range(pid * BLOCK, n, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        pl.put(half + offs, x_ptr + offs, to, world, mask=offs < n)
    pl.signal(ready_ptr + pid, to, world)  # publish: my blocks are there
    pl.wait(ready_ptr + pid, launch, world)
    for start in range(pid * BLOCK, n, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + offs, tl.load(half + offs, mask=offs < n), mask=offs < n)
    pl.signal(ready_ptr + tl.num_programs(0) + pid, (to + 2 * (world.size - by)) % world.size, world)  # I have read
    pl.wait(ready_ptr + tl.num_programs(0) + pid, launch, world)


def plan(call: Call) -> Launch:
    """A grid and an inbox for x of this size."""
    x, world, length = call["x"], call.world, call["block"]
    n, by, programs = x.numel(), call["by"] % world.size, num_programs(world, triton.cdiv(x.numel(), length))
    inbox = world.keep(("shift", n, x.dtype), lambda: empty(2 * n, dtype=x.dtype, name="shift.inbox", world=world))
    ready = world.keep(("shift", n, x.dtype, length, by), lambda: signals(2 * programs, name="shift", world=world))
    start = cooperative_launch(world, shift_kernel, (programs,), num_warps=4)

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        start(x, out, inbox, ready, n, by, world.device, length)
        return out

    return launch


def shift(
    x: torch.Tensor, out: torch.Tensor | None = None, *, by: int = 1, mode: Literal["push"] | None = None,
    block: int | None = None, world: World | None = None,
) -> torch.Tensor:  # fmt: skip
    """The x of the rank that is `by` places before this one. Collective."""
    return OPERATOR((x, out), world=world, by=by, mode=mode, block=block)


OPERATOR = Operator(
    shift,
    tensors={"x": Operand("n", FLOATS)},
    result="n",
    arguments={"by": integer(least=0)},
    settings={"block": block},
    forms={"push": Form(plan, "store into an inbox", "|x|", settings={"block": 1024}, small={"block": 16})},
    reference=reference,
    exact=True,
    cases=(Case(sizes={"n": 40}, arguments={"mode": "push"}), Case(sizes={"n": 7}, arguments={"by": 2}, explore=False)),
)
