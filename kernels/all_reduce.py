"""All-reduce: every rank ends with the sum, minimum or maximum over ranks of `x`, n elements.

low_latency: each rank puts its x into a slot on every rank, as words of 12 bytes of data and 4 of flag, and reduces
    what comes, see _low_latency: no barrier, 4 / 3 * (W - 1) * n * itemsize bytes out of each rank.
low_latency_two_shot: as two_shot, in such words, one flight of them more than low_latency: 8 / 3 * (W - 1) / W * n *
    itemsize bytes.
one_shot: each rank loads all of every rank's x and adds: (W - 1) * n * itemsize bytes into each rank; the
    shortest path for small messages.
two_shot: block t belongs to rank t % W, which loads it from every rank, adds, and stores the sum into every
    rank's `out`: 2 * (W - 1) / W * n * itemsize bytes.
two_shot_push: as two_shot, but each rank stores its blocks into their owners' inboxes (see reduce_scatter), some of
    them for each signal, because stores reach more of the links than loads.
copy: as two_shot, moved by the copy engines, see _copy_reduce: for many megabytes.
multimem: as two_shot with the sum and the broadcast in the switch: (1 + 1 / W) * n * itemsize bytes out of each
    rank; without multicast the same source loops over the ranks.
All add in fp32 and round once; low_latency and one_shot add in the order 0, 1, ... on every rank, so all ranks hold
the same bits, as where one rank adds. Minimum and maximum keep a NaN of any rank, except in multimem: what a switch
makes of one is not documented; and it has them for 16-bit floats only. Barriers of the programs of one index on all
ranks: none in the low-latency forms, one in two_shot_push, else two (one_shot in place: one more for each block of a
program). From REST_BYTES on the elements beyond the last whole 16 bytes go by low_latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.errors import ShapeError, Unsupported
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from .reduce_scatter import await_sent, check_chunks, in_inbox, inboxes, pushed_room
from .shared import common as _common
from .shared import copy_reduce as _copy_reduce
from .shared import flagged as _low_latency
from .shared.reduction import OPS, Op, combine, over_ranks, reduced

CALL = "all_reduce"
Mode = Literal["low_latency", "low_latency_two_shot", "one_shot", "two_shot", "two_shot_push", "copy", "multimem"]
MODES: tuple[Mode, ...] = get_args(Mode)
SHOTS = {"low_latency": 1, "low_latency_two_shot": 2}
SENT = (*SHOTS, "two_shot_push", "copy")  # only this rank reads its x
SPREAD = ("two_shot", "two_shot_push", "copy", "multimem")  # peers store into `out`

TWO_SHOT_PUSH_BYTES = 4 << 20
"""Least x for which mode None takes two_shot_push instead of two_shot. On 4 x H200 it takes 17.1, 83 and 1143 us for 1,
16 and 256 MiB, two_shot 17.0, 92 and 1274."""
COPIED_BYTES = 256 << 20
"""Least x for which mode None takes copy instead of two_shot_push. On 4 x H200 it takes 1128 us for 256 MiB and 138 for
16, two_shot_push 1143 and 83; on 3, 977 and 1019 for 256, on 2 722 and 751. All these figures are of
benchmarks/results/collectives*.json."""
REST_BYTES = 1 << 20
"""Least x of which what is no whole 16 bytes goes on its own, by low_latency: the rest then moves in accesses of 16
bytes, and not element by element. On 4 x H200 16 MiB and an element take 87 us, 16 MiB 83."""


def reference(inputs: Sequence[torch.Tensor], op: Op = "sum") -> torch.Tensor:
    """What every rank gets from the ranks' `x`, in fp64."""
    return reduced(inputs, op)


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
    out_ptr,  # (n,) on every rank; rank r stores the tiles r, r + size, ... into all of them
    inbox_ptr,  # (2, size - 1, programs, TOGETHER * BLOCK) on every rank, see Inboxes
    sent_ptr,  # int32 (programs, size) on every rank
    bar_ptr,  # int32 (programs,) on every rank
    n,
    world,
    OP: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,  # blocks in a tile
):
    pid = tl.program_id(0)
    TILE: tl.constexpr = TOGETHER * BLOCK
    rank = tl.cast(world.rank, tl.int32)
    counts = sent_ptr + pid * world.size
    sent = pl.atomic_add(counts + rank, 0, rank, world, sem="relaxed")
    element = tl.arange(0, BLOCK)
    for turn in range(pid, (n - 1) // (world.size * TILE) + 1, tl.num_programs(0)):
        first = tl.cast(turn, tl.int64) * (world.size * TILE) + element
        for j in range(TOGETHER):
            for i in tl.static_range(1, world.size):
                peer = (rank + i) % world.size
                offs = first + peer * TILE + j * BLOCK
                place = in_inbox(inbox_ptr, sent, world.size - i, world, TILE) + j * BLOCK + element
                pl.store(place, tl.load(x_ptr + offs, mask=offs < n, other=0), peer, world)
        pl.signal_all(counts + rank, world)  # publish; and what I sent of x may be overwritten
        await_sent(counts, sent, world)
        for j in range(TOGETHER):
            offs = first + rank * TILE + j * BLOCK
            total = tl.load(x_ptr + offs, mask=offs < n).to(tl.float32)
            for i in tl.static_range(1, world.size):
                x = tl.load(in_inbox(inbox_ptr, sent, i, world, TILE) + j * BLOCK + element)
                total = combine(total, x.to(tl.float32), OP)
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

    x: contiguous, bf16, fp16 or fp32; symmetric unless mode is a low-latency one, two_shot_push or copy. out: x or
    apart from it, of x's shape and dtype; symmetric unless mode is a low-latency one or one_shot. op: "sum", in fp32
    and rounded once; "min", "max": a NaN of any rank is a NaN, but see multimem. mode: see the module; None takes what
    `low_latency` says, else one_shot where `out` is not symmetric, multimem for a sum where the world has multicast and
    the tensors are 16-byte aligned, else two_shot, from TWO_SHOT_PUSH_BYTES on two_shot_push and from COPIED_BYTES on
    copy. Of symmetric memory low_latency keeps 8 / 3 * size times x's bytes, low_latency_two_shot 16 / 3 times, rounded
    up to a power of two, each power once and with all_gather; two_shot_push 2 * (size - 1) tiles a program for each
    size of tile and grid, as reduce_scatter, copy x's bytes less a part for each size of part. block: elements a
    program moves at a time, a power of two; copy: that it adds. chunks: with "copy" only, so many copies of x to each
    rank at most, REDUCE_CHUNKS of _copy_reduce where None. Returns `out` (or x), complete; `x` may be overwritten at
    once. Raises NotSymmetric, ShapeError, DtypeError, Unsupported, CollectiveMismatch.
    """
    world = _common.world_of(CALL, world, x, out)
    out = x if out is None else out
    return _common.planned(CALL, _plan, world, (x, out), (op, mode, block, chunks), out)


def _plan(
    world: World, x: torch.Tensor, out: torch.Tensor, op: Op, mode: Mode | None, block: int | None, chunks: int | None
) -> _common.Launch:
    _common.check_choice(CALL, "op", op, OPS, world)
    _common.check_choice(CALL, "mode", mode, (*MODES, None), world)
    _common.check_block(CALL, block, world)
    check_chunks(CALL, mode, chunks, world)
    _common.check_tensor(CALL, "x", x, world, dtypes=_common.FLOATS, peers=mode not in SENT)
    _common.check_tensor(CALL, "out", out, world, shape=tuple(x.shape), dtype=x.dtype)
    even = x.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0
    mode = mode or _chosen(x, out, op, world, even)
    spread = mode in SPREAD
    _common.check_tensor(CALL, "out", out, world, peers=spread)
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
    if mode in SHOTS:
        return _low_latency.reduce_launch(world, x, op, SHOTS[mode], block)
    rest = n % (16 // x.element_size()) if mode != "multimem" and x.nbytes >= REST_BYTES else 0
    if mode == "copy":
        launch = _copy_reduce.reduce_launch(world, n - rest, x.dtype, op, block, chunks)
    else:
        launch = _launch(world, x, n - rest, mode, op, in_place, block, even)
    if rest == 0:
        return launch
    few = _low_latency.reduce_launch(world, x.view(-1)[n - rest :], op, 1, None)

    def both(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        launch(x, out)
        few(x.view(-1)[n - rest :], out.view(-1)[n - rest :])
        return out

    return both


def _launch(
    world: World, x: torch.Tensor, n: int, mode: Mode, op: Op, in_place: bool, block: int | None, even: bool
) -> _common.Launch:
    """launch(x, out): the first n elements. even: both begin at a multiple of 16 bytes."""
    tile = 1  # of two_shot_push
    if mode == "two_shot_push":
        tile = pushed_room(triton.cdiv(n, world.size), x.element_size(), world.size)
        most = _common.COPY_BYTES if even else _common.COPY_BYTES // 4  # else each element's address has a register
        block = block or min(tile, most // x.element_size())
    BLOCK = _common.copy_block(x, block)
    together = triton.cdiv(tile, BLOCK)
    tasks = triton.cdiv(n, BLOCK * together * (1 if mode == "one_shot" else world.size))
    grid = (_common.num_programs(world, tasks),)
    counters: tuple[torch.Tensor, ...] = (_common.barrier_counters(world),)
    constants = {"one_shot": (op, in_place, BLOCK), "two_shot_push": (op, BLOCK, together)}.get(mode, (op, BLOCK))
    if mode == "two_shot_push":
        counters = (*inboxes(grid[0], together * BLOCK, x.dtype, world), *counters)
    kernel: Any = KERNELS[mode]
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


def low_latency(nbytes: int, world: World) -> Mode | None:
    """The low-latency form that mode None takes for `x` of so many bytes; None: neither."""
    return {0: None, 1: "low_latency", 2: "low_latency_two_shot"}[_low_latency.shots(nbytes, world.size)]


def _chosen(x: torch.Tensor, out: torch.Tensor, op: Op, world: World, even: bool) -> Mode:
    """What mode None takes."""
    flagged = low_latency(x.nbytes, world)
    if flagged:
        return flagged
    if not isinstance(out, SymmetricTensor):
        return "one_shot"
    if world.multicast and even and op == "sum":
        return "multimem"
    if x.nbytes >= COPIED_BYTES:
        return "copy"
    return "two_shot" if x.nbytes < TWO_SHOT_PUSH_BYTES else "two_shot_push"
