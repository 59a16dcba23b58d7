"""The kernels that a program launches, recorded in the simulator, and compiled without a GPU.

Kernels compile with the tiles, arguments and options that the operators would launch them with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import pkt
from pkt.language.inspect import Pointer, compile_only, count_markers, device_world
from pkt.language.world import DeviceWorld
from pkt.simulate.machine import Machine

from .machine_code import resources

SHARED_LIMIT = 232448  # bytes of shared memory a program may have, sm_90 and sm_100
RANK = 1  # the rank whose launch is compiled: Triton makes a constant of the integer 1, which is the harder case
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
NAMES |= {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5", torch.uint8: "u8"}


class Launch(NamedTuple):
    kernel: Any
    args: tuple
    options: dict[str, Any]


def stand_in(argument: Any) -> Any:
    """An argument of the recorded launch as `compile_only` takes it."""
    if isinstance(argument, DeviceWorld):
        if argument.node_size.value:  # of several nodes, or a team of such
            world = device_world(argument.rank, argument.size.value, node_size=argument.node_size.value)
            return world._replace(stride=argument.stride, team=argument.team, table=argument.table)
        return device_world(argument.rank, argument.size.value, multicast=argument.multicast.value)
    if isinstance(argument, torch.Tensor):
        return Pointer(NAMES[argument.dtype], 4096 + argument.data_ptr() % 16)
    if isinstance(argument, tuple):
        return (
            type(argument)._make(map(stand_in, argument)) if hasattr(argument, "_make") else (*map(stand_in, argument),)
        )
    return argument


def launched(fn: Callable[[Any], Any], ranks: int, multicast: bool, patch: pytest.MonkeyPatch) -> Launch:
    """The one kernel that `fn(world)` launches on rank RANK (0 where there is one rank)."""
    (launch,) = all_launched(fn, ranks, multicast, patch)
    return launch


def all_launched(
    fn: Callable[[Any], Any], ranks: int, multicast: bool, patch: pytest.MonkeyPatch, node_size: int | None = None
) -> list[Launch]:
    """Every kernel that `fn(world)` launches on rank RANK; on rank 0 where each rank is a node, because there the
    compiler proves more of its code unreachable. Those of several nodes are linked with a made-up device library when
    they compile (tests.device_library), if the test installs it."""
    found: dict[int, list[Launch]] = {r: [] for r in range(ranks)}

    def record(machine: Any, kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        found[machine.current.rank].append(Launch(kernel, tuple(map(stand_in, args)), options))

    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Not computed: where no kernel runs no operand has values, and one that fills a GPU takes a core 13 s."""
        return a.new_empty(a.shape[0], b.shape[1]) if out is None else out

    patch.setattr(Machine, "launch", record)
    patch.setattr(torch, "mm", product)
    pkt.launch(fn, ranks, device="cpu", multicast=multicast, races=False, node_size=node_size)
    return found[0 if node_size == 1 else min(RANK, ranks - 1)]


def compile_checked(launch: Launch, arch: int, folder: Path, signals: bool = True, stack: int = 0) -> Any:
    """The compiled kernel. Every wait and signal is there (`compile_only` raises LostSync), nothing is spilled but
    `stack` bytes of a thread, and shared memory fits. signals: it must signal, unless its world has one rank."""
    compiled = compile_only(launch.kernel, *launch.args, arch=arch, **launch.options)
    usage = resources(compiled, folder)
    assert usage["STACK"] <= stack, usage
    assert usage["LOCAL"] == 0, usage
    assert compiled.metadata.shared <= SHARED_LIMIT
    markers = count_markers(compiled.asm["ptx"])
    alone = launch.args[-1].size.value == 1 if isinstance(launch.args[-1], DeviceWorld) else False
    assert markers["wait"] >= 1
    assert markers["signal"] >= 1 or alone or not signals
    assert launch.options["launch_cooperative_grid"]
    return compiled
