"""all_reduce low_latency with a thread for each word of each rank: a candidate beside low_latency_kernel.

low_latency_kernel has on the way of a message what is not here: an atomic to count the launch, whose answer every put
waits for (here a load beside that of x: each program counts for itself); this rank's own words through memory; and in
each thread a wait for each rank, one after the other, of a round trip to L2 each though all words may have come.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.factories import zeros
from pkt.runtime.launch import cooperative_launch
from pkt.runtime.tensor import SymmetricTensor
from pkt.runtime.world import World

from . import _common
from .reduce_scatter import Op, combine

BLOCK_WORDS = 64
"""Words of 4 bytes of each rank that a program has at a time."""


@triton.jit
def _words(x_ptr, word, n, PER: tl.constexpr):
    """PER elements in each int32, (BLOCK, 1); 0 behind the end."""
    if PER == 1:
        return tl.load(x_ptr + word, mask=word < n, other=0).to(tl.int32, bitcast=True)
    else:
        offs = word[:, :, None] * PER + tl.arange(0, PER)[None, None, :]
        x = tl.load(x_ptr + offs, mask=offs < n, other=0).to(tl.uint16, bitcast=True)
        low, high = tl.split(x.to(tl.uint32))
        return (high << 16 | low).to(tl.int32, bitcast=True)


@triton.jit
def _least(a, b):
    return combine(a, b, "min")


@triton.jit
def _most(a, b):
    return combine(a, b, "max")


@triton.jit
def _over_ranks(x, there, OP: tl.constexpr):
    """(BLOCK, RANKS) reduced over those that are there; a tree, the same on every rank."""
    if OP == "sum":
        return tl.sum(tl.where(there, x, 0.0), 1)
    elif OP == "min":
        return tl.reduce(tl.where(there, x, float("inf")), 1, _least)
    else:
        tl.static_assert(OP == "max", 'op is "sum", "min" or "max"')
        return tl.reduce(tl.where(there, x, -float("inf")), 1, _most)


@triton.jit
def spread_kernel(
    x_ptr,  # (n,) this rank's
    out_ptr,  # (n,) this rank's; may be x
    slots_ptr,  # int64 (2, size, words) on every rank; rank r puts [:, r] of the others', halves by the launch's parity
    count_ptr,  # int32 (programs,) of this rank: launches so far
    n,
    words,
    world,
    OP: tl.constexpr,
    RANKS: tl.constexpr,  # the power of two from size on
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PER: tl.constexpr = 32 // dtype.primitive_bitwidth  # elements in a word
    rank = tl.cast(world.rank, tl.int32)
    source = tl.arange(0, RANKS)[None, :]
    there = source < world.size
    launch = tl.load(count_ptr + pid) + 1
    half = slots_ptr + tl.cast(launch & 1, tl.int64) * world.size * words
    for block in range(pid, tl.cdiv(words, BLOCK), tl.num_programs(0)):
        word = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
        x = _words(x_ptr, word, n, PER)
        others = there & (source != rank) & (word < words)
        pl.put_flagged(half + tl.cast(rank, tl.int64) * words + word, x, launch, source, world, mask=others)
    for block in range(pid, tl.cdiv(words, BLOCK), tl.num_programs(0)):
        word = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
        x = _words(x_ptr, word, n, PER)
        others = there & (source != rank) & (word < words)
        taken = pl.take_flagged(half + tl.cast(source, tl.int64) * words + word, launch, world, mask=others)
        bits = tl.where(source == rank, x, taken)
        offs = (tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)) * PER
        if PER == 1:
            total = _over_ranks(bits.to(dtype, bitcast=True).to(tl.float32), there, OP)
            tl.store(out_ptr + offs, total.to(dtype), mask=offs < n)
        else:
            bits = bits.to(tl.uint32, bitcast=True)
            low = _over_ranks(bits.to(tl.uint16).to(dtype, bitcast=True).to(tl.float32), there, OP)
            high = _over_ranks((bits >> 16).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32), there, OP)
            tl.store(out_ptr + offs, low.to(dtype), mask=offs < n)
            tl.store(out_ptr + offs + 1, high.to(dtype), mask=offs + 1 < n)
    tl.debug_barrier()  # every thread has read the count
    tl.store(count_ptr + pid, launch)


class _Space(NamedTuple):
    slots: SymmetricTensor
    counts: torch.Tensor


def spread_launch(
    world: World, n: int, dtype: torch.dtype, op: Op, block: int | None, together: bool
) -> _common.Launch:
    """launch(x, out). together: a cooperative launch, which this kernel does without: no more programs than SMs, and
    each waits only for those of its own index, so that it comes to an end in whatever order they start. Collective."""
    per = 4 // dtype.itemsize
    words, ranks = triton.cdiv(n, per), triton.next_power_of_2(world.size)
    BLOCK = (block and max(block // per, 1)) or min(BLOCK_WORDS, triton.next_power_of_2(words))
    grid = (_common.num_programs(world, triton.cdiv(words, BLOCK)),)

    # As for low_latency_kernel, and for each grid, because every program counts its own launches.
    def make() -> _Space:
        slots = zeros(2, world.size, words, dtype=torch.int64, name="all_reduce.spread", world=world)
        return _Space(slots, torch.zeros(grid[0], dtype=torch.int32, device=world.torch_device))

    space = world.workspace(("all_reduce", "spread", words, grid), make)
    warps = max(1, min(BLOCK * ranks // 32, 32))
    start = cooperative_launch(world, spread_kernel, grid, num_warps=warps, launch_cooperative_grid=together)

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        start(x, out, space.slots, space.counts, n, words, world.device, op, ranks, BLOCK)
        return out

    return launch
