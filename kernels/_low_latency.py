"""All-reduce in words that carry their own flag (pkt/language/flagged.py): neither barrier nor fence.

In one shot, each rank puts x into a slot on every rank, and reduces what comes: one flight. In two, part r of x goes to
rank r alone, which reduces it and puts the result into a slot on every rank: a second flight, and for more than two
ranks fewer bytes.

A word has room for three int32. The t-th of a part has its t-th, and those a third and two thirds of the part farther
on, so that threads side by side load and store what lies side by side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import ptx, sync
from pkt.runtime.factories import signals, zeros
from pkt.runtime.launch import cooperative_launch
from pkt.runtime.tensor import SymmetricTensor
from pkt.runtime.world import World

from . import _common
from .reduce_scatter import combine

FLIGHT_BYTES = 400_000
"""Bytes that a rank sends in the time of a flight, 1.2 us on H200: as far as one shot sends no more than that above
what two shots do, it is chosen."""
FLAG_BYTES = 1_000_000
"""Flags that a rank sends in the time of the barriers that they save, 3 us: as far as there are no more, a flagged form
is chosen."""
LEAST_BLOCK, MOST_BLOCK = 128, 512
"""Words that a program moves at a time, one a thread: a thread waits for its words one after the other."""


def shots(nbytes: int, size: int) -> int:
    """Shots in which x of so many bytes is reduced by default; 0: in none, but without flags."""
    size = max(size, 2)
    once = nbytes * (size - 1)
    twice = 2 * once / size
    if twice / 3 > FLAG_BYTES:
        return 0
    return 1 if 4 / 3 * (once - twice) <= FLIGHT_BYTES else 2


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
def _store(out_ptr, word, values, inside, end, PER: tl.constexpr):
    """The reverse of `_load`."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if PER == 1:
        tl.store(out_ptr + word, values.to(dtype, bitcast=True), mask=inside & (word < end))
    else:
        offs = word[:, None] * PER + tl.arange(0, PER)[None, :]
        tl.store(out_ptr + offs, _halves(values).to(dtype, bitcast=True), mask=inside[:, None] & (offs < end))


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
    slots_ptr,  # int32 (2, size, third, 4) on every rank; rank r puts [:, r] of all, halves by the launch's parity
    flags_ptr,  # of this rank; only its launch counter is used
    n,
    part,  # int32 of x, all of them
    third,  # of them, rounded up: words
    world,
    OP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PER: tl.constexpr = 32 // dtype.primitive_bitwidth  # elements in an int32
    t = tl.cast(pid, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = _load(x_ptr, t, t < third, n, PER)  # on their way with the count of launches
    b = _load(x_ptr, t + third, t < third, n, PER)
    c = _load(x_ptr, t + 2 * third, t < third, n, PER)
    launch = sync.peek_epoch(flags_ptr)
    half = slots_ptr + tl.cast(launch & 1, tl.int64) * world.size * third * 4
    mine = half + tl.cast(world.rank, tl.int64) * third * 4
    for _ in range(pid, tl.cdiv(third, BLOCK), programs):
        for i in tl.static_range(1, world.size + 1):  # to myself too: every rank adds in the same order
            pl.put_flagged(mine + 4 * t, (a, b, c), launch, (world.rank + i) % world.size, world, mask=t < third)
        t += programs * BLOCK
        a = _load(x_ptr, t, t < third, n, PER)
        b = _load(x_ptr, t + third, t < third, n, PER)
        c = _load(x_ptr, t + 2 * third, t < third, n, PER)
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
    slots_ptr,  # int32 (2, 2, size - 1, third, 4) on every rank; rank + d puts [:, :, d - 1], first part `rank` of its
    # x, then its part of the sum; halves by the launch's parity
    flags_ptr,  # of this rank; only its launch counter is used
    n,
    part,  # int32 of x that a rank reduces: rank r those from r * part on
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
    half = slots_ptr + tl.cast(launch & 1, tl.int64) * 2 * PEERS * third * 4
    sums = half + tl.cast(PEERS, tl.int64) * third * 4
    for block in range(pid, blocks, programs):
        t = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        for i in tl.static_range(1, world.size):
            peer = (rank + i) % world.size
            word = peer * part + t
            end = tl.minimum(n, (peer + 1) * part * PER)
            a = _load(x_ptr, word, t < third, end, PER)
            b = _load(x_ptr, word + third, t < third, end, PER)
            c = _load(x_ptr, word + 2 * third, t < third, end, PER)
            at = half + ((PEERS - i) * third + t) * 4  # to the peer, I am rank + size - i
            pl.put_flagged(at, (a, b, c), launch, peer, world, mask=t < third)
    ptx.cta_barrier()
    pl.epoch(flags_ptr, world)
    for block in range(pid, blocks, programs):
        t = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        word = rank * part + t
        end = tl.minimum(n, (rank + 1) * part * PER)
        a = _load(x_ptr, word, t < third, end, PER)
        b = _load(x_ptr, word + third, t < third, end, PER)
        c = _load(x_ptr, word + 2 * third, t < third, end, PER)
        found = pl.take_flagged_all(half + 4 * t, 4 * third, launch, world, mask=t < third, parts=PEERS)
        a = _reduced(a, found, 0, PEERS, 0, dtype, OP)
        b = _reduced(b, found, 0, PEERS, 1, dtype, OP)
        c = _reduced(c, found, 0, PEERS, 2, dtype, OP)
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


# --------------------------------------------------------------------------------------------------------- host
class _Space(NamedTuple):
    slots: SymmetricTensor
    counters: SymmetricTensor


def launch_in(shots: int, world: World, x: torch.Tensor, op: str, block: int | None) -> _common.Launch:
    """launch(x, out), for tensors of the same facts as `x`: `out` = the ranks' x reduced, as all_reduce, whose checks
    come before. block: elements a program moves at a time. Collective."""
    n, per = x.numel(), 4 // x.element_size()
    part = triton.cdiv(triton.cdiv(n, per), 1 if shots == 1 else world.size)
    third = triton.cdiv(part, 3)

    # Slots for each size: a launch then puts into every word of its half, so the flag that it finds in a word is that
    # of the launch before the last, or in the first two launches, which are 1 and 2, the 0 that the memory is filled
    # with. `zeros` returns when every rank's is filled.
    def make() -> _Space:
        senders = world.size if shots == 1 else max(world.size - 1, 1)
        slots = zeros(2, shots, senders, third, 4, dtype=torch.int32, name="all_reduce.slots", world=world)
        return _Space(slots, signals(1, name="all_reduce.launches", world=world))

    space = world.workspace(("all_reduce", "flagged", shots, third), make)
    everybody = triton.cdiv(
        third, _common.num_programs(world, third)
    )  # words of a program, were there one word for each
    fitting = min(max(triton.next_power_of_2(everybody), LEAST_BLOCK), MOST_BLOCK, triton.next_power_of_2(third))
    BLOCK = triton.next_power_of_2(max(block // (3 * per), 1)) if block else fitting
    grid = (_common.num_programs(world, triton.cdiv(third, BLOCK)),)
    kernel: Any = one_shot_kernel if shots == 1 else two_shot_kernel
    start = cooperative_launch(world, kernel, grid, num_warps=max(1, min(BLOCK // 32, MOST_BLOCK // 32)))

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        start(x, out, space.slots, space.counters, n, part, third, world.device, op, BLOCK)
        return out

    return launch
