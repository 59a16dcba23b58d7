"""Grids that are resident on every rank, and the counters of their barriers."""

from __future__ import annotations

from typing import Any

import torch
import triton

from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import signals
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..declaration import Call, Launch

COPY_BYTES = 16384
"""Bytes of a block that a program moves through registers at a time: with 8 warps, 16 programs fill the links."""

COPY_OPTIONS = {"num_warps": 8, "maxnreg": 255}
"""How kernels are launched that only move and add: one program an SM, so all registers are its own."""

SMALL, SMALL_OPTIONS = 4, {"num_warps": 4, "maxnreg": 128}
"""The same with SMALL programs an SM: while one waits, for memory or before a signal, the others move. So combine of
8,192 tokens takes 0.225 ms instead of 0.263 on 2 H200 (`dispatch_four_an_sm_2.json`, `dispatch_before_2.json`)."""

BLOCKED: dict[str, Any] = {"settings": {"block": None}, "small": {"block": 16}}
"""Of forms whose only setting is how many elements a program moves at a time."""


def num_programs(world: World, tasks: int) -> int:
    """A grid that is resident on every rank, the same on all, no larger than `tasks` asks for."""
    return max(1, min(world.num_sms, tasks))


def several(call: Call, each: int, sms: int) -> int:
    """`each` programs for each of so many SMs on GPUs, one in the simulator."""
    return (each if call.on_gpu else 1) * sms


def barrier_counters(world: World) -> SymmetricTensor:
    """A counter for each program index, for `pl.barrier`. All operators share them and leave them balanced."""
    most = SMALL * num_programs(world, world.num_sms)
    return world.keep(("pkt.kernels", "barrier"), lambda: signals(most, name="kernels.barrier", world=world))


def copy_block(tensor: torch.Tensor, block: int | None) -> int:
    """Elements a program moves at a time: `block`, or COPY_BYTES of them, less where there are fewer."""
    return block or min(COPY_BYTES // tensor.element_size(), triton.next_power_of_2(max(tensor.numel(), 16)))


def resident_launch(
    world: World, kernel: Any, tasks: int, arguments: tuple[Any, ...], constants: tuple[Any, ...] = ()
) -> Launch:
    """launch(*tensors): `kernel`, which only moves and adds, on (*tensors, *arguments, world.device, *constants), in a
    program an SM but no more than `tasks`. Returns the last tensor."""
    start = cooperative_launch(world, kernel, (num_programs(world, tasks),), **COPY_OPTIONS)

    def launch(*tensors: torch.Tensor) -> torch.Tensor:
        start(*tensors, *arguments, world.device, *constants)
        return tensors[-1]

    return launch
