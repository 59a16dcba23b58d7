"""All-reduce and all-gather in words that carry their own flag (pkt/language/flagged.py): neither barrier nor fence.

All-reduce in one shot: each rank puts x into a slot on every rank, and reduces what comes: one flight. In two: part r
of x goes to rank r alone, which reduces it and puts the result into a slot on every rank: a second flight, and for more
than two ranks fewer bytes. All-gather: each rank puts x into a slot on every other rank, and stores what comes.

A word has room for three int32. The t-th of a part has its t-th, and those a third and two thirds of the part farther
on, so that threads side by side load and store what lies side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.errors import ShapeError
from pkt.language import ptx, sync
from pkt.language.ptx.flagged import VALUES
from pkt.runtime.factories import signals, zeros
from pkt.runtime.launch import cooperative_launch
from pkt.runtime.tensor import SymmetricTensor
from pkt.runtime.world import World

from . import _common
from .reduce_scatter import combine

FLIGHT_BYTES = 400_000
"""Bytes that a rank sends in the time of a flight: as far as one shot sends no more than that above what two shots do,
it is chosen. 16 KiB take 7.1 us in one and 8.4 in two on 2 x H200, benchmarks/results/collectives_2.json."""
FLAG_BYTES = 1_000_000
"""Flags that a rank sends in the time of the barriers that they save: as far as there are no more, a flagged form is
chosen. In that file 1 MiB takes 11.6 and 11.8 us, and 14.1 without flags."""
MOST_RANKS = 8
"""More of which have but one shot by default, and gather without flags: a thread takes a word of each rank, all at
once."""
LEAST_ROOM = 256
"""Words of the least memory for them."""
LEAST_BLOCK, MOST_BLOCK = 128, 512
"""Words that a program moves at a time, one a thread: a thread waits for its words one after the other."""


def gathers(nbytes: int, size: int) -> bool:
    """Whether x of so many bytes is gathered so by default."""
    return size <= MOST_RANKS and nbytes * (max(size, 2) - 1) / 3 <= FLAG_BYTES


def shots(nbytes: int, size: int) -> int:
    """Shots in which x of so many bytes is reduced by default; 0: in none, but without flags."""
    size = max(size, 2)
    once = nbytes * (size - 1)
    twice = 2 * once / size
    if twice / 3 > FLAG_BYTES:
        return 0
    if 4 / 3 * (once - twice) <= FLIGHT_BYTES:
        return 1
    return 2 if size <= MOST_RANKS else 0


# ------------------------------------------------------------------------------------------------------- device
@triton.jit
def _load(x_ptr, word, inside, end, PER: tl.constexpr):
    """PER elements in each int32; 0 for words not `inside`, and from element `end` on."""
    if PER == 1:
        return tl.load(x_ptr + word, mask=inside & (word < end), other=0).to(tl.int32, bitcast=True)
    else:
        offs = word[:, None] * PER + tl.arange(0, PER)[None, :]
        x = tl.load(x_ptr + offs, mask=inside[:, None] & (offs < end), other=0).to(tl.uint16, bitcast=True)
        low, high = tl.split(x.to(tl.uint32))
        return (high << 16 | low).to(tl.int32, bitcast=True)


@triton.jit
def _thirds(x_ptr, word, third, inside, end, PER: tl.constexpr):
    """What goes into words."""
    return (
        _load(x_ptr, word, inside, end, PER),
        _load(x_ptr, word + third, inside, end, PER),
        _load(x_ptr, word + 2 * third, inside, end, PER),
    )


@triton.jit
def _store(out_ptr, word, values, inside, end, PER: tl.constexpr):
    """The reverse of `_load`."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if PER == 1:
        tl.store(out_ptr + word, values.to(dtype, bitcast=True), mask=inside & (word < end))
    else:
        offs = word[:, None] * PER + tl.arange(0, PER)[None, :]
        tl.store(out_ptr + offs, _halves(values).to(dtype, bitcast=True), mask=inside[:, None] & (offs < end))


@triton.jit
def _store_run(out_ptr, word, values, inside, end, run, index, SIZE: tl.constexpr, PER: tl.constexpr):
    """`_store` where each `run` of elements is the `index`-th of SIZE that lie one after the other."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if PER == 1:
        place = (word // run * SIZE + index) * run + word % run
        tl.store(out_ptr + place, values.to(dtype, bitcast=True), mask=inside & (word < end))
    else:
        offs = word[:, None] * PER + tl.arange(0, PER)[None, :]
        place = (offs // run * SIZE + index) * run + offs % run
        tl.store(out_ptr + place, _halves(values).to(dtype, bitcast=True), mask=inside[:, None] & (offs < end))


@triton.jit
def _halves(words):
    bits = words.to(tl.uint32, bitcast=True)
    return tl.join(bits.to(tl.uint16), (bits >> 16).to(tl.uint16))


@triton.jit
def _elements(words, dtype: tl.constexpr, PER: tl.constexpr):
    """In fp32: (words,), or (words, 2) where there are two in one."""
    if PER == 1:
        return words.to(dtype, bitcast=True).to(tl.float32)
    else:
        return _halves(words).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _reduced(
    first, found, BEGIN: tl.constexpr, END: tl.constexpr, THIRD: tl.constexpr, dtype: tl.constexpr, OP: tl.constexpr
):
    """`first` and what `found` from BEGIN to END has of a third, reduced in fp32 in this order, rounded; as int32."""
    PER: tl.constexpr = 32 // dtype.primitive_bitwidth
    total = _elements(first, dtype, PER)
    for i in tl.static_range(BEGIN, END):
        total = combine(total, _elements(found[i][THIRD], dtype, PER), OP)
    if PER == 1:
        return total.to(dtype).to(tl.int32, bitcast=True)
    else:
        low, high = tl.split(total.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32))
        return (high << 16 | low).to(tl.int32, bitcast=True)


@triton.jit
def one_shot_kernel(
    x_ptr,  # (n,) this rank's
    out_ptr,  # (n,) this rank's; may be x
    slots_ptr,  # int32 (2, room, 4) on every rank; of a half, by the launch's parity, (size, third, 4) is used, of
    # which rank r puts [r] of all
    flags_ptr,  # of this rank; only its launch counter is used
    n,
    room,
    third,  # of the int32 of x, rounded up: words
    world,
    OP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PER: tl.constexpr = 32 // dtype.primitive_bitwidth  # elements in an int32
    t = tl.cast(pid, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = _thirds(x_ptr, t, third, t < third, n, PER)  # on its way with the count of launches
    launch = sync.peek_epoch(flags_ptr)
    half = slots_ptr + tl.cast(launch & 1, tl.int64) * room * 4
    mine = half + tl.cast(world.rank, tl.int64) * third * 4
    for _ in range(pid, tl.cdiv(third, BLOCK), programs):
        for i in tl.static_range(1, world.size + 1):  # to myself too: every rank adds in the same order
            pl.put_flagged(mine + 4 * t, x, launch, (world.rank + i) % world.size, world, mask=t < third)
        t += programs * BLOCK
        x = _thirds(x_ptr, t, third, t < third, n, PER)
    ptx.cta_barrier()
    pl.epoch(flags_ptr, world)
    for block in range(pid, tl.cdiv(third, BLOCK), programs):
        t = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        found = pl.take_flagged_all(half + 4 * t, 4 * third, launch, world, mask=t < third)
        for j in tl.static_range(3):
            total = _reduced(found[0][j], found, 1, world.size, j, dtype, OP)
            _store(out_ptr, t + j * third, total, t < third, n, PER)


@triton.jit
def two_shot_kernel(
    x_ptr,  # (n,) this rank's
    out_ptr,  # (n,) this rank's; may be x
    slots_ptr,  # int32 (2, room, 4) on every rank; of a half, by the launch's parity, (2, size - 1, third, 4) is used,
    # of which rank + d puts [:, d - 1], first part `rank` of its x, then its part of the sum
    flags_ptr,  # of this rank; only its launch counter is used
    n,
    part,  # int32 of x that a rank reduces: rank r those from r * part on
    room,
    third,  # of them, rounded up: words
    world,
    OP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    rank = tl.cast(world.rank, tl.int64)
    PEERS: tl.constexpr = world.size - 1
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PER: tl.constexpr = 32 // dtype.primitive_bitwidth  # elements in an int32
    blocks = tl.cdiv(third, BLOCK)
    launch = sync.peek_epoch(flags_ptr)
    half = slots_ptr + tl.cast(launch & 1, tl.int64) * room * 4
    sums = half + tl.cast(PEERS, tl.int64) * third * 4
    for block in range(pid, blocks, programs):
        t = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        for i in tl.static_range(1, world.size):
            peer = (rank + i) % world.size
            end = tl.minimum(n, (peer + 1) * part * PER)
            x = _thirds(x_ptr, peer * part + t, third, t < third, end, PER)
            at = half + ((PEERS - i) * third + t) * 4  # to the peer, I am rank + size - i
            pl.put_flagged(at, x, launch, peer, world, mask=t < third)
    ptx.cta_barrier()
    pl.epoch(flags_ptr, world)
    for block in range(pid, blocks, programs):
        t = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        word = rank * part + t
        end = tl.minimum(n, (rank + 1) * part * PER)
        x = _thirds(x_ptr, word, third, t < third, end, PER)
        found = pl.take_flagged_all(half + 4 * t, 4 * third, launch, world, mask=t < third, parts=PEERS)
        a = _reduced(x[0], found, 0, PEERS, 0, dtype, OP)
        b = _reduced(x[1], found, 0, PEERS, 1, dtype, OP)
        c = _reduced(x[2], found, 0, PEERS, 2, dtype, OP)
        for i in tl.static_range(1, world.size):
            at = sums + ((PEERS - i) * third + t) * 4
            pl.put_flagged(at, (a, b, c), launch, (rank + i) % world.size, world, mask=t < third)
        _store(out_ptr, word, a, t < third, end, PER)
        _store(out_ptr, word + third, b, t < third, end, PER)
        _store(out_ptr, word + 2 * third, c, t < third, end, PER)
    for block in range(pid, blocks, programs):
        t = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        found = pl.take_flagged_all(sums + 4 * t, 4 * third, launch, world, mask=t < third, parts=PEERS)
        for i in tl.static_range(1, world.size):
            peer = (rank + i) % world.size
            word = peer * part + t
            end = tl.minimum(n, (peer + 1) * part * PER)
            for j in tl.static_range(3):
                _store(out_ptr, word + j * third, found[i - 1][j], t < third, end, PER)


@triton.jit
def gather_kernel(
    x_ptr,  # (n / run, run) this rank's
    out_ptr,  # (n / run, size, run) this rank's; x may be [:, rank] of it
    slots_ptr,  # int32 (2, room, 4) on every rank; of a half, by the launch's parity, (size - 1, third, 4) is used, of
    # which rank + d puts [d - 1]
    flags_ptr,  # of this rank; only its launch counter is used
    n,
    run,
    room,
    third,  # of the int32 of x, rounded up: words
    world,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    rank = tl.cast(world.rank, tl.int32)
    PEERS: tl.constexpr = world.size - 1
    PER: tl.constexpr = 32 // x_ptr.dtype.element_ty.primitive_bitwidth  # elements in an int32
    t = pid * BLOCK + tl.arange(0, BLOCK)  # int32, which divides sooner
    x = _thirds(x_ptr, t, third, t < third, n, PER)  # on its way with the count of launches
    launch = sync.peek_epoch(flags_ptr)
    words = tl.cast(third, tl.int64)  # of a slot
    half = slots_ptr + tl.cast(launch & 1, tl.int64) * room * 4
    for _ in range(pid, tl.cdiv(third, BLOCK), programs):
        for i in tl.static_range(1, world.size):
            at = half + ((PEERS - i) * words + t) * 4  # to the peer, I am rank + size - i
            pl.put_flagged(at, x, launch, (rank + i) % world.size, world, mask=t < third)
        for j in tl.static_range(3):
            _store_run(out_ptr, t + j * third, x[j], t < third, n, run, rank, world.size, PER)
        t += programs * BLOCK
        x = _thirds(x_ptr, t, third, t < third, n, PER)
    ptx.cta_barrier()
    pl.epoch(flags_ptr, world)
    for block in range(pid, tl.cdiv(third, BLOCK), programs):
        t = block * BLOCK + tl.arange(0, BLOCK)
        found = pl.take_flagged_all(
            half + 4 * tl.cast(t, tl.int64), 4 * words, launch, world, mask=t < third, parts=PEERS
        )
        for i in tl.static_range(1, world.size):
            peer = (rank + i) % world.size
            for j in tl.static_range(3):
                _store_run(out_ptr, t + j * third, found[i - 1][j], t < third, n, run, peer, world.size, PER)


# --------------------------------------------------------------------------------------------------------- host
class _Space(NamedTuple):
    """Where words come to."""

    slots: SymmetricTensor
    counters: SymmetricTensor


class _Way(NamedTuple):
    """That, and the launch that moves them."""

    space: _Space
    room: int
    third: int
    BLOCK: int
    start: Callable[..., Any]


def _way(world: World, kernel: Any, x: torch.Tensor, part: int, slots: int, block: int | None) -> _Way:
    """For `part` int32 of x, in `slots` slots for each of two launches; `block` elements a program at a time."""
    third = triton.cdiv(part, 3)
    room = max(triton.next_power_of_2(slots * third), LEAST_ROOM)

    # One for all launches that need as much, whatever they move: they count in turn, and in each every rank takes from
    # every other. A launch finds in a word the flag of an earlier one, or the 0 that the memory is filled with, where
    # launches count from 1; after 2^32 of them that could be its own, in a word that none of them has used. `zeros`
    # returns when every rank's is filled.
    def make() -> _Space:
        filled = zeros(2, room, 4, dtype=torch.int32, name="kernels.flagged", world=world)
        return _Space(filled, signals(1, name="kernels.flagged launches", world=world))

    space = world.workspace(("pkt.kernels", "flagged", room), make)
    if block:
        words = triton.next_power_of_2(max(block * x.element_size() // (4 * VALUES), 1))
    else:
        share = triton.next_power_of_2(triton.cdiv(third, _common.num_programs(world, third)))
        words = min(max(share, LEAST_BLOCK), MOST_BLOCK, triton.next_power_of_2(third))
    grid = (_common.num_programs(world, triton.cdiv(third, words)),)
    start = cooperative_launch(world, kernel, grid, num_warps=max(1, min(words, MOST_BLOCK) // 32))
    return _Way(space, room, third, words, start)


def reduce_launch(world: World, x: torch.Tensor, op: str, shots: int, block: int | None) -> _common.Launch:
    """launch(x, out), for tensors of the same facts as `x`: `out` = the ranks' x reduced, as all_reduce, whose checks
    come before. block: elements a program moves at a time. Collective."""
    n, size = x.numel(), world.size
    part = triton.cdiv(triton.cdiv(n * x.element_size(), 4), 1 if shots == 1 else size)
    kernel: Any = one_shot_kernel if shots == 1 else two_shot_kernel
    way = _way(world, kernel, x, part, size if shots == 1 else 2 * (size - 1), block)
    numbers = (n, way.room, way.third) if shots == 1 else (n, part, way.room, way.third)

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        way.start(x, out, *way.space, *numbers, world.device, op, way.BLOCK)
        return out

    return launch


def gather_launch(world: World, x: torch.Tensor, run: int, block: int | None) -> _common.Launch:
    """launch(x, out), for tensors of the same facts as `x`, elements of 16 or 32 bits in runs of `run`: `out` = the
    ranks' x, as all_gather, whose checks come before. Collective. Raises ShapeError."""
    n = x.numel()
    if n * world.size >= 1 << 31:
        wanted = "a whole of less than 2^31 elements with mode 'low_latency'"
        raise ShapeError.argument("all_gather", "x", tuple(x.shape), wanted, world.rank)
    part = triton.cdiv(n * x.element_size(), 4)
    way = _way(world, gather_kernel, x, part, world.size - 1, block)

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        way.start(x, out, *way.space, n, run, way.room, way.third, world.device, way.BLOCK)
        return out

    return launch
