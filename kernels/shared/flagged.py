"""Collectives in words that carry their own flag (pkt/language/flagged.py): neither barrier nor fence.

All-reduce in one shot: each rank puts x into a slot on every rank, and reduces what comes: one flight. In two: part r
of x goes to rank r alone, which reduces it and puts the result into a slot on every rank: a second flight, and for more
than two ranks fewer bytes. Reduce-scatter is the first of them, and all-to-all the same with nothing reduced.
All-gather: each rank puts x into a slot on every other rank, and stores what comes. Broadcast: root does, and the
others put one word each, because in every launch every rank takes from every other (`_launch`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import ptx, sync
from pkt.language.ptx.flagged import VALUES
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import signals, zeros
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..declaration import Call, Launch
from . import packing
from .checks import FLOATS
from .grid import num_programs

DTYPES = (*FLOATS, torch.int16, torch.int32)
"""What fits an int32 of a word."""

FLIGHT_BYTES = 400_000
"""Bytes that a rank sends in the time of a flight: as far as one shot sends no more than that above what two shots do,
it is chosen. 16 KiB take 7.1 us in one and 8.2 in two on 2 x H200, benchmarks/results/collectives_2.json."""
FLAG_BYTES = 1_000_000
"""Flags that a rank sends in the time of the barriers that they save: as far as there are no more, a flagged form is
chosen. In that file 1 MiB takes 11.4 and 11.7 us, and 14.1 without flags."""
PLAIN_FLAG_BYTES = 2_100_000
"""The same of an all-reduce into memory that is not symmetric, where sums would go through inboxes. On H100 4 MiB take
25.1, 30.8 and 32.9 us with flags on 2, 3 and 4 ranks, and 26.3, 31.2 and 34.3 through inboxes; 6 MiB 31.7, 41.4 and
43.3, and 32.4, 39.2 and 43.3 (benchmarks/results/all_reduce_plain.json)."""
MOST_RANKS = 8
"""With more ranks, only a reduction in one shot uses flagged words by default: a thread takes a word of each rank, all
at once."""
LEAST_ROOM = 256
"""Words of the least memory for them."""
LEAST_BLOCK, MOST_BLOCK = 128, 512
"""Words that a program moves at a time, one a thread: a thread waits for its words one after the other."""


def few(sent: float, size: int) -> bool:
    """Whether a call in which each rank sends `sent` bytes uses flagged words by default."""
    return size <= MOST_RANKS and sent / 3 <= FLAG_BYTES


def few_of_parts(nbytes: int, size: int) -> bool:
    """`few` where each rank gets a part of x, of `nbytes` bytes: for half as many, because threads work out where each
    element is. On 2 x H200 reduce_scatter of 2 MiB takes 12.8 us with flagged words and 13.0 pushed; of 4 MiB 17.2 and
    16.3 (benchmarks/results/collectives_sizes_2.json)."""
    return few(2 * nbytes * (1 - 1 / max(size, 2)), size)


def taken(call: Call, enough: bool) -> bool:
    """Whether mode None takes flagged words to move what is little `enough`."""
    return enough and call.dtype in DTYPES


def fits(call: Call) -> str:
    """Why the kernels cannot move a call's elements: they count those of all ranks in 32 bits."""
    n = max(call["x"].numel(), math.prod(call.shape))
    return f"{n} elements of all ranks, 2^31 or more" if n >= 1 << 31 else ""


def shots(nbytes: int, size: int, most: int) -> int:
    """Shots in which x of so many bytes is reduced by default; 0: in none, but without flags. most: bytes of flags."""
    size = max(size, 2)
    once = nbytes * (size - 1)
    twice = 2 * once / size
    if twice / 3 > most:
        return 0
    if 4 / 3 * (once - twice) <= FLIGHT_BYTES:
        return 1
    return 2 if size <= MOST_RANKS else 0


# ------------------------------------------------------------------------------------------------------ kernels
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
    x = packing.thirds(x_ptr, t, third, t < third, n, PER)  # on its way with the count of launches
    launch = sync.peek_epoch(flags_ptr)
    half = slots_ptr + tl.cast(launch & 1, tl.int64) * room * 4
    mine = half + tl.cast(world.rank, tl.int64) * third * 4
    for _ in range(pid, tl.cdiv(third, BLOCK), programs):
        for i in tl.static_range(1, world.size + 1):  # to myself too: every rank adds in the same order
            pl.put_flagged(mine + 4 * t, x, launch, (world.rank + i) % world.size, world, mask=t < third)
        t += programs * BLOCK
        x = packing.thirds(x_ptr, t, third, t < third, n, PER)
    ptx.cta_barrier()
    pl.epoch(flags_ptr, world)
    for block in range(pid, tl.cdiv(third, BLOCK), programs):
        t = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        found = pl.take_flagged_all(half + 4 * t, 4 * third, launch, world, mask=t < third)
        for j in tl.static_range(3):
            total = packing.reduced(found[0][j], found, 1, world.size, j, dtype, OP)
            packing.store(out_ptr, t + j * third, total, t < third, n, PER)


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
            x = packing.thirds(x_ptr, peer * part + t, third, t < third, end, PER)
            at = half + ((PEERS - i) * third + t) * 4  # to the peer, I am rank + size - i
            pl.put_flagged(at, x, launch, peer, world, mask=t < third)
    ptx.cta_barrier()
    pl.epoch(flags_ptr, world)
    for block in range(pid, blocks, programs):
        t = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        word = rank * part + t
        end = tl.minimum(n, (rank + 1) * part * PER)
        x = packing.thirds(x_ptr, word, third, t < third, end, PER)
        found = pl.take_flagged_all(half + 4 * t, 4 * third, launch, world, mask=t < third, parts=PEERS)
        a = packing.reduced(x[0], found, 0, PEERS, 0, dtype, OP)
        b = packing.reduced(x[1], found, 0, PEERS, 1, dtype, OP)
        c = packing.reduced(x[2], found, 0, PEERS, 2, dtype, OP)
        for i in tl.static_range(1, world.size):
            at = sums + ((PEERS - i) * third + t) * 4
            pl.put_flagged(at, (a, b, c), launch, (rank + i) % world.size, world, mask=t < third)
        packing.store(out_ptr, word, a, t < third, end, PER)
        packing.store(out_ptr, word + third, b, t < third, end, PER)
        packing.store(out_ptr, word + 2 * third, c, t < third, end, PER)
    for block in range(pid, blocks, programs):
        t = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        found = pl.take_flagged_all(sums + 4 * t, 4 * third, launch, world, mask=t < third, parts=PEERS)
        for i in tl.static_range(1, world.size):
            peer = (rank + i) % world.size
            word = peer * part + t
            end = tl.minimum(n, (peer + 1) * part * PER)
            for j in tl.static_range(3):
                packing.store(out_ptr, word + j * third, found[i - 1][j], t < third, end, PER)


@triton.jit
def gather_kernel(
    x_ptr,  # (n / span, span) this rank's
    out_ptr,  # (n / span, size, span) this rank's; x may be [:, rank] of it
    slots_ptr,  # int32 (2, room, 4) on every rank; of a half, by the launch's parity, (size - 1, third, 4) is used, of
    # which rank + d puts [d - 1]
    flags_ptr,  # of this rank; only its launch counter is used
    n,
    span,
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
    x = packing.thirds(x_ptr, t, third, t < third, n, PER)  # on its way with the count of launches
    launch = sync.peek_epoch(flags_ptr)
    words = tl.cast(third, tl.int64)  # of a slot
    half = slots_ptr + tl.cast(launch & 1, tl.int64) * room * 4
    for _ in range(pid, tl.cdiv(third, BLOCK), programs):
        for i in tl.static_range(1, world.size):
            at = half + ((PEERS - i) * words + t) * 4  # to the peer, I am rank + size - i
            pl.put_flagged(at, x, launch, (rank + i) % world.size, world, mask=t < third)
        for j in tl.static_range(3):
            packing.store_part(out_ptr, t + j * third, x[j], t < third, n, span, rank, world.size, PER)
        t += programs * BLOCK
        x = packing.thirds(x_ptr, t, third, t < third, n, PER)
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
                packing.store_part(out_ptr, t + j * third, found[i - 1][j], t < third, n, span, peer, world.size, PER)


@triton.jit
def _put_parts(x_ptr, half, launch, n, span, third, world, BLOCK: tl.constexpr, PER: tl.constexpr):
    """Part r of x, n elements, to every other rank r: into the slot that rank r + d has for rank r, [d - 1]."""
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    PEERS: tl.constexpr = world.size - 1
    words = tl.cast(third, tl.int64)  # of a slot
    for block in range(pid, tl.cdiv(third, BLOCK), tl.num_programs(0)):
        t = block * BLOCK + tl.arange(0, BLOCK)
        for i in tl.static_range(1, world.size):
            peer = (rank + i) % world.size
            x = packing.thirds_of_part(x_ptr, t, third, t < third, n, span, peer, world.size, PER)
            at = half + ((PEERS - i) * words + t) * 4  # to the peer, I am rank + size - i
            pl.put_flagged(at, x, launch, peer, world, mask=t < third)


@triton.jit
def scatter_kernel(
    x_ptr,  # (n / span, size, span) this rank's
    out_ptr,  # (n / span, span) this rank's; may be x[:, rank]
    slots_ptr,  # int32 (2, room, 4) on every rank, as of gather_kernel; rank + d puts part `rank` of its x
    flags_ptr,  # of this rank; only its launch counter is used
    n,  # of a part
    span,
    room,
    third,  # of the int32 of a part, rounded up: words
    world,
    OP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    PEERS: tl.constexpr = world.size - 1
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PER: tl.constexpr = 32 // dtype.primitive_bitwidth  # elements in an int32
    launch = sync.peek_epoch(flags_ptr)
    half = slots_ptr + tl.cast(launch & 1, tl.int64) * room * 4
    _put_parts(x_ptr, half, launch, n, span, third, world, BLOCK, PER)
    ptx.cta_barrier()
    pl.epoch(flags_ptr, world)
    for block in range(pid, tl.cdiv(third, BLOCK), tl.num_programs(0)):
        t = block * BLOCK + tl.arange(0, BLOCK)
        x = packing.thirds_of_part(x_ptr, t, third, t < third, n, span, rank, world.size, PER)
        slot = half + 4 * tl.cast(t, tl.int64)
        found = pl.take_flagged_all(slot, 4 * tl.cast(third, tl.int64), launch, world, mask=t < third, parts=PEERS)
        for j in tl.static_range(3):
            total = packing.reduced(x[j], found, 0, PEERS, j, dtype, OP)
            packing.store(out_ptr, t + j * third, total, t < third, n, PER)


@triton.jit
def exchange_kernel(
    x_ptr,  # (n / span_x, size, span_x) this rank's
    out_ptr,  # (n / span_out, size, span_out) this rank's
    slots_ptr,  # int32 (2, room, 4) on every rank, as of gather_kernel; rank + d puts part `rank` of its x
    flags_ptr,  # of this rank; only its launch counter is used
    n,  # of a part
    span_x,
    span_out,
    room,
    third,  # of the int32 of a part, rounded up: words
    world,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    PEERS: tl.constexpr = world.size - 1
    PER: tl.constexpr = 32 // x_ptr.dtype.element_ty.primitive_bitwidth  # elements in an int32
    launch = sync.peek_epoch(flags_ptr)
    half = slots_ptr + tl.cast(launch & 1, tl.int64) * room * 4
    _put_parts(x_ptr, half, launch, n, span_x, third, world, BLOCK, PER)
    ptx.cta_barrier()
    pl.epoch(flags_ptr, world)
    for block in range(pid, tl.cdiv(third, BLOCK), tl.num_programs(0)):
        t = block * BLOCK + tl.arange(0, BLOCK)
        x = packing.thirds_of_part(x_ptr, t, third, t < third, n, span_x, rank, world.size, PER)
        slot = half + 4 * tl.cast(t, tl.int64)
        found = pl.take_flagged_all(slot, 4 * tl.cast(third, tl.int64), launch, world, mask=t < third, parts=PEERS)
        for j in tl.static_range(3):
            packing.store_part(out_ptr, t + j * third, x[j], t < third, n, span_out, rank, world.size, PER)
            for i in tl.static_range(1, world.size):
                peer = (rank + i) % world.size
                packing.store_part(
                    out_ptr, t + j * third, found[i - 1][j], t < third, n, span_out, peer, world.size, PER
                )


@triton.jit(do_not_specialize=["root"])
def broadcast_kernel(
    x_ptr,  # (n,) this rank's: root's is read, the others' are stored into
    slots_ptr,  # int32 (2, room, 4) on every rank, as of gather_kernel; of all but root's the first word is used
    flags_ptr,  # of this rank; only its launch counter is used
    n,
    root,
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
    words = tl.cast(third, tl.int64)  # of a slot
    mine = tl.where(rank == root, third, 1)  # words that I put: who is not root says that it is here
    launch = sync.peek_epoch(flags_ptr)
    half = slots_ptr + tl.cast(launch & 1, tl.int64) * room * 4
    for block in range(pid, tl.cdiv(mine, BLOCK), programs):
        t = block * BLOCK + tl.arange(0, BLOCK)
        x = packing.thirds(x_ptr, t, third, t < mine, n, PER)
        for i in tl.static_range(1, world.size):
            at = half + ((PEERS - i) * words + t) * 4  # to the peer, I am rank + size - i
            pl.put_flagged(at, x, launch, (rank + i) % world.size, world, mask=t < mine)
    ptx.cta_barrier()
    pl.epoch(flags_ptr, world)
    if rank != root:
        slot = half + ((root - rank + PEERS) % world.size) * words * 4
        for block in range(pid, tl.cdiv(third, BLOCK), programs):
            t = block * BLOCK + tl.arange(0, BLOCK)
            x = pl.take_flagged(slot + 4 * t, launch, world, mask=t < third)
            for j in tl.static_range(3):
                packing.store(x_ptr, t + j * third, x[j], t < third, n, PER)
    if pid == 0:
        first = tl.arange(0, BLOCK)
        pl.take_flagged_all(half + 4 * first, 4 * words, launch, world, mask=first < 1, parts=PEERS)


# --------------------------------------------------------------------------------------------------------- host
def slots_of(world: World, words: int) -> tuple[SymmetricTensor, SymmetricTensor, int]:
    """Memory on every rank for so many words in each of two launches: int32 (2, room, 4), the counter of its launches,
    and the room. Collective.

    All launches that need as much share it, whatever they move: they count in turn, and in each every rank takes from
    every other. A launch finds in a word the flag of an earlier one, or the 0 that the memory is filled with, where
    launches count from 1; after 2^32 of them that could be its own, in a word that none of them has used."""
    room = max(triton.next_power_of_2(words), LEAST_ROOM)

    def make() -> tuple[SymmetricTensor, SymmetricTensor]:
        # `zeros` returns when every rank's is filled.
        filled = zeros(2, room, 4, dtype=torch.int32, name="kernels.flagged", world=world)
        return filled, signals(1, name="kernels.flagged launches", world=world)

    return *world.keep(("pkt.kernels", "flagged", room), make), room


def _launch(
    world: World, kernel: Any, x: torch.Tensor, part: int, slots: int, block: int | None,
    numbers: tuple[int, ...], constants: tuple[Any, ...] = (),
) -> Launch:  # fmt: skip
    """launch(*tensors), for tensors of the same facts as `x`: moves `part` int32 of x, in `slots` slots for each of two
    launches, `block` elements a program at a time. Returns the last tensor. Collective."""
    third = triton.cdiv(part, 3)
    *space, room = slots_of(world, slots * third)
    if block:
        words = triton.next_power_of_2(max(block * x.element_size() // (4 * VALUES), 1))
    else:
        share = triton.next_power_of_2(triton.cdiv(third, num_programs(world, third)))
        words = min(max(share, LEAST_BLOCK), MOST_BLOCK, triton.next_power_of_2(third))
    grid = (num_programs(world, triton.cdiv(third, words)),)
    start = cooperative_launch(world, kernel, grid, num_warps=max(1, min(words, MOST_BLOCK) // 32))
    before, after = (*space, *numbers, room, third), (*constants, words)

    def launch(*tensors: torch.Tensor) -> torch.Tensor:
        start(*tensors, *before, world.device, *after)
        return tensors[-1]

    return launch


def reduce_launch(world: World, x: torch.Tensor, op: str, shots: int, block: int | None) -> Launch:
    """launch(x, out): `out` = the ranks' x reduced."""
    n, size = x.numel(), world.size
    if shots == 1:
        return _launch(world, one_shot_kernel, x, _int32(x, n), size, block, (n,), (op,))
    part = triton.cdiv(_int32(x, n), size)
    return _launch(world, two_shot_kernel, x, part, 2 * (size - 1), block, (n, part), (op,))


def gather_launch(world: World, x: torch.Tensor, span: int, block: int | None) -> Launch:
    """launch(x, out): `out` = the ranks' x in turn, `span` elements of each at a time."""
    n = x.numel()
    return _launch(world, gather_kernel, x, _int32(x, n), world.size - 1, block, (n, span))


def scatter_launch(world: World, x: torch.Tensor, span: int, op: str, block: int | None) -> Launch:
    """launch(x, out): `out` = this rank's part of the ranks' x reduced. In x `span` elements of a part lie together."""
    n = x.numel() // world.size
    return _launch(world, scatter_kernel, x, _int32(x, n), world.size - 1, block, (n, span), (op,))


def exchange_launch(world: World, x: torch.Tensor, span_x: int, span_out: int, block: int | None) -> Launch:
    """launch(x, out): `out` = this rank's part of every rank's x. In x and in `out` so many elements of a part lie
    together."""
    n = x.numel() // world.size
    return _launch(world, exchange_kernel, x, _int32(x, n), world.size - 1, block, (n, span_x, span_out))


def broadcast_launch(world: World, x: torch.Tensor, root: int, block: int | None) -> Launch:
    """launch(x): `x` = root's."""
    n = x.numel()
    return _launch(world, broadcast_kernel, x, _int32(x, n), world.size - 1, block, (n, root))


def _int32(x: torch.Tensor, n: int) -> int:
    """That n elements of x fill."""
    return triton.cdiv(n * x.element_size(), 4)
