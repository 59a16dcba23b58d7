"""Launches of an operator's kernels: of those whose programs wait for each other, and of those beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.runtime import _allocation
from triton.runtime.errors import OutOfResources

from pkt.errors import GridTooLarge, Unsupported
from pkt.runtime.launch.relaunch import Repeat, repeated
from pkt.runtime.world import World


def _scratch(nbytes: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.int8, device="cuda")  # for the current stream; torch aligns to 512 bytes


def provide_scratch() -> None:
    """Let Triton take memory from torch for the descriptors that kernels make, unless the user has set an allocator.

    Triton cannot launch such a kernel without one. It keeps the allocator in a context variable, which threads and
    notebook cells do not share, so this is called before each launch.
    """
    kept = getattr(_allocation, "_allocator", None)  # private to Triton: another release may not have it
    if kept is None or isinstance(kept.get(), _allocation.NullAllocator):
        triton.set_allocator(_scratch)


def cooperative_launch(world: World, kernel: Any, grid: tuple[int, ...], **options: Any) -> Callable[..., Any]:
    """start(*args): kernel[grid](*args, **options), after the world's last call on whatever stream (see `streams`).

    Every kernel whose programs wait for each other or for peers is launched like this, so all of them must be resident.
    The driver checks that at no cost; `start` raises GridTooLarge with the numbers if it refuses, and Unsupported where
    one program alone needs more than an SM has.
    Nodes of a graph are made ordinary once their grid is known to fit: a cooperative node makes a replay a microsecond
    or two slower (an all-reduce of 16 KiB takes 8.7 us instead of 7.7 on 4 x H200, by
    collectives_cooperative.json and collectives.json of benchmarks/results). No other operator of the world runs
    beside such a node, and all other kernels end, so all its programs become resident. From the third launch on
    `relaunch` repeats the launch.
    """
    streams = world.streams
    named = options | {"launch_cooperative_grid": True, "grid": grid}
    launch = _repeating(world, kernel, grid, named)
    if streams is None:
        return launch

    def fit(compiled: Any, refusal: RuntimeError | None = None) -> None:
        per_sm, programs = resident_per_sm(compiled), math.prod(grid)
        if refusal is not None or programs > per_sm * world.num_sms:
            raise GridTooLarge.resident(kernel.__name__, programs, world.num_sms, per_sm, world.rank) from refusal

    def start(*args: Any) -> Any:
        captured = streams.follow()
        try:
            compiled = launch(*args)
        except OutOfResources as error:
            what = kernel.__name__, error.name, error.required, error.limit
            raise Unsupported.resources(*what, world.rank) from error
        except RuntimeError as error:
            if "cooperative" not in str(error).lower():
                raise
            fit(kernel.warmup(*args, **named), error)
        if captured:
            fit(compiled)
            engines = world.backend.copies
            assert engines is not None, "only GPUs record graphs"
            engines.uncouple()
        return compiled

    return start


def beside_launch(world: World, kernel: Any, grid: tuple[int, ...], **options: Any) -> Callable[..., Any]:
    """start(*args): kernel[grid](*args, **options) on the current stream, not ordered with the world's other calls: for
    a part of an operator that must not wait for another kernel. From the third launch on `relaunch` repeats it."""
    return _repeating(world, kernel, grid, options | {"grid": grid})


def _repeating(world: World, kernel: Any, grid: tuple[int, ...], named: dict[str, Any]) -> Callable[..., Any]:
    """start(*args): kernel.run(*args, **named), which returns the compiled kernel. kernel[grid] would pack all options
    twice at each launch: half the host time of a launch with twenty of them."""
    streams = world.streams
    last: Any = None
    repeat: Repeat | None = None

    def start(*args: Any) -> Any:
        nonlocal last, repeat
        if streams is None:
            return kernel.run(*args, warmup=False, **named)
        provide_scratch()
        compiled = repeat(args, streams.handle()) if repeat is not None else None
        if compiled is None:
            compiled = kernel.run(*args, warmup=False, **named)
            if compiled is not None and compiled is last:  # a kernel that is launched repeatedly
                repeat = repeated(kernel, compiled, grid, args, named)
            last = compiled
        return compiled

    return start


def cooperative(world: World, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """One such launch, for a kernel that is launched once."""
    return cooperative_launch(world, kernel, grid, **options)(*args)


def beside(world: World, kernel: Any, grid: Callable[[], tuple[int, ...]], *args: Any, **options: Any) -> Any:
    """Such a launch, for functions that plan nothing: the world keeps what launches for the same numbers and options,
    from which `grid()` follows."""
    numbers = tuple([x for x in args if isinstance(x, (int, str))])
    key = beside, id(kernel), numbers, *options.items()  # Triton hashes a kernel by its source
    start = world.plans.get(key)
    if start is None:
        start = world.plans[key] = beside_launch(world, kernel, grid(), **options)
    return start(*args)


def resident_per_sm(compiled: Any) -> int:
    """Programs of a compiled kernel that fit on one SM, by its registers, warps and shared memory."""
    from cuda.bindings import driver

    compiled._init_handles()
    threads, shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared
    code, blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(compiled.function, threads, shared)
    if int(code) != 0:
        raise RuntimeError(f"cuOccupancyMaxActiveBlocksPerMultiprocessor: {code}")
    return int(blocks)
