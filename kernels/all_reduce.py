"""All-reduce: every rank ends with the sum, minimum or maximum over ranks of `x`, n elements.

low_latency: each rank puts its x into a slot on every rank, as words of 4 bytes of data and 4 of flag, and reduces
    what comes (pkt/language/flagged.py): no barrier, 2 * (W - 1) * n * itemsize bytes out of each rank.
one_shot: each rank loads all of every rank's x and adds: (W - 1) * n * itemsize bytes into each rank; the
    shortest path for small messages.
two_shot: block t belongs to rank t % W, which loads it from every rank, adds, and stores the sum into every
    rank's `out`: 2 * (W - 1) / W * n * itemsize bytes.
two_shot_push: as two_shot, but each rank stores its blocks into their owners' inboxes (see reduce_scatter), because
    stores reach more of the links than loads: 1.17 ms against 1.28 for 256 MiB on 4 x H200.
copy: as two_shot, moved by the copy engines, see _copy_reduce: for many megabytes.
multimem: as two_shot with the sum and the broadcast in the switch: (1 + 1 / W) * n * itemsize bytes out of each
    rank; without multicast the same source loops over the ranks.
All add in fp32 and round once; low_latency and one_shot add in the order 0, 1, ... on every rank, so all ranks hold
the same bits in each form. Minimum and maximum keep a NaN of any rank, except in multimem: what a switch makes of one
is not documented; and it has them for 16-bit floats only. Barriers of the programs of one index on all ranks: none in
low_latency, one in two_shot_push, else two (one_shot in place: one more for each block of a program).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.errors import ShapeError, Unsupported
from pkt.language import ptx
from pkt.runtime.factories import signals, zeros
from pkt.runtime.launch import cooperative_launch
from pkt.runtime.tensor import SymmetricTensor
from pkt.runtime.world import World

from . import _common
from .reduce_scatter import (
    OPS,
    Op,
    add_sent,
    check_chunks,
    combine,
    in_inbox,
    inboxes,
    over_ranks,
    pushed_block,
    reduced,
)

CALL = "all_reduce"
Mode = Literal["low_latency", "one_shot", "two_shot", "two_shot_push", "copy", "multimem"]
MODES = ("low_latency", "one_shot", "two_shot", "two_shot_push", "copy", "multimem")
SENT = ("low_latency", "two_shot_push", "copy")  # only this rank reads its x
SPREAD = ("two_shot", "two_shot_push", "copy", "multimem")  # peers store into `out`

LOW_LATENCY_BYTES = 128 << 10
"""Largest x for which mode None takes low_latency. On 4 x H200 it takes 7.9, 10.4 and 32 us for 16 KiB, 128 KiB and
1 MiB, two_shot 13, 13 and 17. Up to here every thread has one word of each rank to wait for."""
TWO_SHOT_PUSH_BYTES = 4 << 20
"""Least x for which mode None takes two_shot_push instead of two_shot. On 4 x H200 it takes 16.5, 85 and 1170 us for 1,
16 and 256 MiB, two_shot 16.7, 92 and 1279."""
COPIED_BYTES = 512 << 20
"""Least x for which mode None takes copy instead of two_shot_push, on two ranks half of it. On 4 x H200 it takes 1204
us for 256 MiB and 1183 in a captured graph, two_shot_push 1170; on 2, 728 and 762. All these figures are of
benchmarks/results/collectives*.json."""
MOST_PUSHED = 32 << 10
"""Bytes of a block of two_shot_push, at most: with more, registers spill; with 16 KiB 256 MiB take 1198 us."""
LOW_LATENCY_WORDS = 256
"""Words of 4 bytes that a program sends at a time, one a thread: a thread waits for its words one after the other."""


def reference(inputs: Sequence[torch.Tensor], op: Op = "sum") -> torch.Tensor:
    """What every rank gets from the ranks' `x`, in fp64."""
    return reduced(inputs, op)


@triton.jit
def _load_words(x_ptr, word, n, PER: tl.constexpr):
    """PER elements in each int32; 0 behind the end."""
    if PER == 1:
        return tl.load(x_ptr + word, mask=word < n, other=0).to(tl.int32, bitcast=True)
    else:
        offs = word[:, None] * PER + tl.arange(0, PER)[None, :]
        x = tl.load(x_ptr + offs, mask=offs < n, other=0).to(tl.uint16, bitcast=True)
        low, high = tl.split(x.to(tl.uint32))
        return (high << 16 | low).to(tl.int32, bitcast=True)


@triton.jit
def _unpacked(words, dtype: tl.constexpr, PER: tl.constexpr):
    """The elements of `_load_words`, in fp32: (words,), or (words, 2) where there are two in one."""
    if PER == 1:
        return words.to(dtype, bitcast=True).to(tl.float32)
    else:
        bits = words.to(tl.uint32, bitcast=True)
        halves = tl.join(bits.to(tl.uint16), (bits >> 16).to(tl.uint16))
        return halves.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def low_latency_kernel(
    x_ptr,  # (n,) this rank's
    out_ptr,  # (n,) this rank's; may be x
    slots_ptr,  # int64 (2, size, words) on every rank; rank r puts [:, r] of all, halves by the launch's parity
    flags_ptr,  # of this rank; only its launch counter is used
    n,
    words,
    world,
    OP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PER: tl.constexpr = 32 // dtype.primitive_bitwidth  # elements in a word
    word = tl.cast(pid, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = _load_words(x_ptr, word, n, PER)  # on its way while the launch is counted
    launch = pl.epoch(flags_ptr, world)
    half = slots_ptr + tl.cast(launch & 1, tl.int64) * world.size * words
    mine = half + tl.cast(world.rank, tl.int64) * words
    for _ in range(pid, tl.cdiv(words, BLOCK), tl.num_programs(0)):
        for i in tl.static_range(1, world.size + 1):  # to myself too: every rank adds in the same order
            pl.put_flagged(mine + word, x, launch, (world.rank + i) % world.size, world, mask=word < words)
        word += tl.num_programs(0) * BLOCK
        x = _load_words(x_ptr, word, n, PER)
    for block in range(pid, tl.cdiv(words, BLOCK), tl.num_programs(0)):
        word = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        found = pl.take_flagged_all(half + word, words, launch, world, mask=word < words)
        total = _unpacked(found[0], dtype, PER)
        for r in tl.static_range(1, world.size):
            total = combine(total, _unpacked(found[r], dtype, PER), OP)
        if PER == 1:
            tl.store(out_ptr + word, total.to(dtype), mask=word < n)
        else:
            offs = word[:, None] * PER + tl.arange(0, PER)[None, :]
            tl.store(out_ptr + offs, total.to(dtype), mask=offs < n)


@triton.jit
def one_shot_kernel(
    x_ptr,  # (n,) on every rank; all ranks read it
    out_ptr,  # (n,) this rank's; x itself if IN_PLACE
    bar_ptr,  # int32 (programs,) on every rank
    n,
    world,
    OP: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    pl.barrier(bar_ptr + pid, world)  # publish: every rank's x is complete
    for block in range(pid, tl.cdiv(n, BLOCK), tl.num_programs(0)):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = over_ranks(x_ptr + offs, offs < n, world, 0, OP)
        if IN_PLACE:
            pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read this block of my x
        tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=offs < n)
    if not IN_PLACE:
        pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read my x


@triton.jit
def two_shot_kernel(
    x_ptr,  # (n,) on every rank; rank r reads the blocks r, r + size, ... of all of them
    out_ptr,  # (n,) on every rank; rank r stores those blocks into all of them; may be x
    bar_ptr,  # int32 (programs,) on every rank
    n,
    world,
    OP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    pl.barrier(bar_ptr + pid, world)  # publish: every rank's x is complete, and its `out` free
    for block in range(rank + world.size * pid, tl.cdiv(n, BLOCK), world.size * tl.num_programs(0)):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = over_ranks(x_ptr + offs, offs < n, world, world.rank, OP).to(out_ptr.dtype.element_ty)
        for i in tl.static_range(1, world.size + 1):
            pl.store(out_ptr + offs, total, (world.rank + i) % world.size, world, mask=offs < n)
    pl.barrier(bar_ptr + pid, world)  # publish: this program's sums are there on every rank


@triton.jit
def two_shot_push_kernel(
    x_ptr,  # (n,) this rank's; may be `out`
    out_ptr,  # (n,) on every rank; rank r stores the blocks r, r + size, ... into all of them
    inbox_ptr,  # (2, size - 1, programs, BLOCK) on every rank, see Inboxes
    sent_ptr,  # int32 (programs, size) on every rank
    bar_ptr,  # int32 (programs,) on every rank
    n,
    world,
    OP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    counts = sent_ptr + pid * world.size
    sent = ptx.load_relaxed(counts + rank)  # not an atomic, whose result goes round: x is loaded meanwhile
    element = tl.arange(0, BLOCK)
    for turn in range(pid, (n - 1) // (world.size * BLOCK) + 1, tl.num_programs(0)):
        first = tl.cast(turn, tl.int64) * (world.size * BLOCK) + element
        for i in tl.static_range(1, world.size):
            peer = (rank + i) % world.size
            offs = first + peer * BLOCK
            place = in_inbox(inbox_ptr, sent, world.size - i, world, BLOCK) + element
            pl.store(place, tl.load(x_ptr + offs, mask=offs < n), peer, world, mask=offs < n)
        pl.signal_all(counts + rank, world)  # publish; and what I sent of x may be overwritten
        offs = first + rank * BLOCK
        total = tl.load(x_ptr + offs, mask=offs < n).to(tl.float32)
        total = add_sent(total, inbox_ptr, element, offs < n, counts, sent, world, OP, BLOCK)
        for i in tl.static_range(1, world.size + 1):
            peer = (rank + i) % world.size
            pl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), peer, world, mask=offs < n)
        sent += 1
    pl.barrier(bar_ptr + pid, world)  # publish: this program's sums are there on every rank


@triton.jit
def multimem_kernel(
    x_ptr,  # (n,) on every rank, at a multiple of 16 bytes; rank r reduces the blocks r, r + size, ... of all
    out_ptr,  # (n,) on every rank; rank r stores those blocks into all of them; may be x
    bar_ptr,  # int32 (programs,) on every rank
    n,
    world,
    OP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    IN_SWITCH: tl.constexpr = "add" if OP == "sum" else OP
    run: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth  # elements in 16 bytes
    whole = n - n % run  # the switch takes whole runs of 16 bytes
    pl.barrier(bar_ptr + pid, world)  # publish: every rank's x is complete, and its `out` free
    for block in range(rank + world.size * pid, tl.cdiv(whole, BLOCK), world.size * tl.num_programs(0)):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = pl.multimem_load_reduce(x_ptr + offs, world, IN_SWITCH, mask=offs < whole)
        pl.multimem_store(out_ptr + offs, total, world, mask=offs < whole)
    if rank == 0:
        if pid == 0:
            offs = whole + tl.arange(0, run)
            rest = over_ranks(x_ptr + offs, offs < n, world, 0, OP).to(out_ptr.dtype.element_ty)
            for i in tl.static_range(1, world.size + 1):
                pl.store(out_ptr + offs, rest, i % world.size, world, mask=offs < n)
    pl.barrier(bar_ptr + pid, world)  # publish: this program's sums are there on every rank


def all_reduce(
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    op: Op = "sum",
    mode: Mode | None = None,
    block: int | None = None,
    chunks: int | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """The ranks' `x` reduced, on every rank; in place where `out` is None. Collective.

    x: contiguous, bf16, fp16 or fp32; symmetric unless mode is low_latency, two_shot_push or copy. out: x or apart from
    it, of x's shape and dtype; symmetric unless mode is low_latency or one_shot. op: "sum", in fp32 and rounded
    once; "min", "max": a NaN of any rank is a NaN, but see multimem. mode: see the module; None takes low_latency up to
    LOW_LATENCY_BYTES, else one_shot where `out` is not symmetric, multimem for a sum where the world has multicast and
    the tensors are 16-byte aligned, else two_shot, from TWO_SHOT_PUSH_BYTES on two_shot_push and from COPIED_BYTES on
    copy. Of symmetric memory low_latency keeps 4 * size times x's bytes for each size of x, two_shot_push
    2 * (size - 1) blocks a program for each block and grid, copy x's bytes less a part for each size of part. block:
    elements a program moves at a time, a power of two; copy: that it adds. chunks: with "copy" only, so many copies of
    x to each rank at most, REDUCE_CHUNKS of _copy_reduce where None. Returns `out` (or x), complete; `x` may be
    overwritten at once. Raises NotSymmetric, ShapeError, DtypeError, Unsupported, CollectiveMismatch.
    """
    world = _common.world_of(CALL, world, x, out)
    out = x if out is None else out
    return _common.planned(CALL, _plan, world, (x, out), (op, mode, block, chunks), _common.overlap(x, out))


def _plan(
    world: World, x: torch.Tensor, out: torch.Tensor, op: Op, mode: Mode | None, block: int | None, chunks: int | None
) -> _common.Launch:
    _common.check_choice(CALL, "op", op, OPS, world)
    _common.check_choice(CALL, "mode", mode, (*MODES, None), world)
    _common.check_block(CALL, block, world)
    check_chunks(CALL, mode, chunks, world)
    _common.check_tensor(CALL, "x", x, world, dtypes=_common.FLOATS, peers=mode not in SENT)
    even = x.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0
    mode = mode or _chosen(x, out, op, world, even)
    spread = mode in SPREAD
    _common.check_tensor(CALL, "out", out, world, shape=tuple(x.shape), dtype=x.dtype, peers=spread)
    if mode == "multimem" and not even:
        wanted = "a multiple of 16 bytes: multimem moves runs of 16 bytes; two_shot does not need it"
        raise ShapeError.argument(CALL, "address of x or out", hex(x.data_ptr()), wanted, world.rank)
    if mode == "multimem" and op != "sum" and x.dtype == torch.float32:
        found, remedy = f"{CALL}: found op {op!r} of float32 with mode 'multimem'", "take two_shot or one_shot"
        raise Unsupported.here(f"rank {world.rank}", found, f"the switch has it for 16-bit floats only: {remedy}")
    in_place = out.data_ptr() == x.data_ptr()
    if not in_place:
        _common.check_apart(CALL, x, out, world)
    _common.check_agreed(
        CALL, world, x=_common.anywhere(x) if mode in SENT else x,
        out=out if spread else in_place if mode == "one_shot" else None, op=op, mode=mode, block=block, chunks=chunks,
    )  # fmt: skip
    n = x.numel()
    if n == 0:
        return lambda x, out: out
    if mode == "low_latency":
        return _low_latency(x, op, block, world)
    if mode == "copy":
        from ._copy_reduce import reduce_launch

        return reduce_launch(world, n, x.dtype, op, block, chunks)
    if mode == "two_shot_push":
        most = MOST_PUSHED if n * x.element_size() % 16 == 0 else _common.COPY_BYTES  # else element by element
        block = block or pushed_block(triton.cdiv(n, world.size), x.element_size(), most)
    BLOCK = _common.copy_block(x, block)
    blocks = triton.cdiv(n, BLOCK)
    tasks = blocks if mode == "one_shot" else triton.cdiv(blocks, world.size)
    grid = (_common.num_programs(world, tasks),)
    bar = _common.barrier_counters(world)
    kernel: Any = KERNELS[mode]
    constants = (op, in_place, BLOCK) if mode == "one_shot" else (op, BLOCK)
    counters = (*inboxes(grid[0], BLOCK, x.dtype, world), bar) if mode == "two_shot_push" else (bar,)
    start = cooperative_launch(world, kernel, grid, **_common.COPY_OPTIONS)

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        start(x, out, *counters, n, world.device, *constants)
        return out

    return launch


KERNELS = {
    "one_shot": one_shot_kernel,
    "two_shot": two_shot_kernel,
    "two_shot_push": two_shot_push_kernel,
    "multimem": multimem_kernel,
}


def _chosen(x: torch.Tensor, out: torch.Tensor, op: Op, world: World, even: bool) -> Mode:
    """What mode None takes."""
    if x.nbytes <= LOW_LATENCY_BYTES:
        return "low_latency"
    if not isinstance(out, SymmetricTensor):
        return "one_shot"
    if world.multicast and even and op == "sum":
        return "multimem"
    if x.nbytes >= (COPIED_BYTES // 2 if world.size == 2 else COPIED_BYTES):
        return "copy"
    return "two_shot" if x.nbytes < TWO_SHOT_PUSH_BYTES else "two_shot_push"


class _Space(NamedTuple):
    slots: SymmetricTensor
    counters: SymmetricTensor


def _low_latency(x: torch.Tensor, op: Op, block: int | None, world: World) -> _common.Launch:
    n, per = x.numel(), 4 // x.element_size()
    words = triton.cdiv(n, per)

    # Slots for each size: a launch then puts into every word of its half, so the flag that it finds in a word is that
    # of the launch before the last, or in the first two launches, which are 1 and 2, the 0 that the memory is filled
    # with. `zeros` returns when every rank's is filled.
    def make() -> _Space:
        slots = zeros(2, world.size, words, dtype=torch.int64, name="all_reduce.slots", world=world)
        return _Space(slots, signals(1, name="all_reduce.launches", world=world))

    space = world.workspace(("all_reduce", "low_latency", words), make)
    BLOCK = (block and max(block // per, 1)) or min(LOW_LATENCY_WORDS, triton.next_power_of_2(words))
    grid = (_common.num_programs(world, triton.cdiv(words, BLOCK)),)
    start = cooperative_launch(world, low_latency_kernel, grid, num_warps=max(1, min(BLOCK // 32, 8)))

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        start(x, out, space.slots, space.counters, n, words, world.device, op, BLOCK)
        return out

    return launch
