"""All-reduce: every rank ends with the sum, minimum or maximum over ranks of `x`, n elements.

one_shot: each rank loads all of every rank's x and adds: (W - 1) * n * itemsize bytes into each rank; the
    shortest path for small messages.
two_shot: block t belongs to rank t % W, which loads it from every rank, adds, and stores the sum into every
    rank's `out`: 2 * (W - 1) / W * n * itemsize bytes.
multimem: as two_shot with the sum and the broadcast in the switch: (1 + 1 / W) * n * itemsize bytes out of each
    rank; without multicast the same source loops over the ranks.
All add in fp32 and round once; one_shot adds in the order 0, 1, ... on every rank, so all ranks hold the same
bits in each form. Minimum and maximum keep a NaN of any rank, except in multimem: what a switch makes of one is not
documented; and it has them for 16-bit floats only. Two barriers of the programs of one index on all ranks (one_shot in
place: one more for each block of a program).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.errors import ShapeError, Unsupported
from pkt.runtime.launch import cooperative
from pkt.runtime.tensor import SymmetricTensor
from pkt.runtime.world import World

from . import _common
from .reduce_scatter import OPS, Op, over_ranks, reduced

Mode = Literal["one_shot", "two_shot", "multimem"]


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
    world: World | None = None,
) -> torch.Tensor:
    """The ranks' `x` reduced, on every rank; in place where `out` is None. Collective.

    x: symmetric, contiguous, bf16, fp16 or fp32. out: x itself or apart from it, of x's shape and dtype, symmetric
    except for one_shot. op: "sum", in fp32 and rounded once; "min", "max": a NaN of any rank is a NaN, but see
    multimem. mode: see the module; None takes one_shot where `out` is not symmetric, multimem for a sum where the
    world has multicast and the tensors are 16-byte aligned, else two_shot. block: elements a program moves at a time, a
    power of two. Returns `out` (or x), complete; `x` may be overwritten at once. Raises NotSymmetric, ShapeError,
    DtypeError, Unsupported, CollectiveMismatch.
    """
    call = "all_reduce"
    world = _common.world_of(call, world, x, out)
    out = x if out is None else out
    _common.check_choice(call, "op", op, OPS, world)
    _common.check_block(call, block, world)
    even = x.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0
    if mode is None and isinstance(x, SymmetricTensor) and not isinstance(out, SymmetricTensor):
        mode = "one_shot"
    mode = mode or ("multimem" if world.multicast and even and op == "sum" else "two_shot")
    _common.check_choice(call, "mode", mode, ("one_shot", "two_shot", "multimem"), world)
    _common.check_tensor(call, "x", x, world, dtypes=_common.FLOATS, peers=True)
    _common.check_tensor(call, "out", out, world, shape=tuple(x.shape), dtype=x.dtype, peers=mode != "one_shot")
    if mode == "multimem" and not even:
        wanted = "a multiple of 16 bytes: multimem moves runs of 16 bytes; two_shot does not need it"
        raise ShapeError.argument(call, "address of x or out", hex(x.data_ptr()), wanted, world.rank)
    if mode == "multimem" and op != "sum" and x.dtype == torch.float32:
        found, remedy = f"{call}: found op {op!r} of float32 with mode 'multimem'", "take two_shot or one_shot"
        raise Unsupported.here(f"rank {world.rank}", found, f"the switch has it for 16-bit floats only: {remedy}")
    in_place = out.data_ptr() == x.data_ptr()
    if not in_place:
        _common.check_apart(call, x, out, world)
    one_shot = mode == "one_shot"  # only this rank stores into its `out`
    _common.check_agreed(call, world, x=x, out=in_place if one_shot else out, op=op, mode=mode, block=block)
    n = x.numel()
    if n == 0:
        return out
    BLOCK = _common.copy_block(x, block)
    blocks = triton.cdiv(n, BLOCK)
    tasks = blocks if mode == "one_shot" else triton.cdiv(blocks, world.size)
    grid = (_common.num_programs(world, tasks),)
    bar = _common.barrier_counters(world)
    options = _common.COPY_OPTIONS
    if mode == "one_shot":
        cooperative(world, one_shot_kernel, grid, x, out, bar, n, world.device, op, in_place, BLOCK, **options)
    elif mode == "two_shot":
        cooperative(world, two_shot_kernel, grid, x, out, bar, n, world.device, op, BLOCK, **options)
    else:
        cooperative(world, multimem_kernel, grid, x, out, bar, n, world.device, op, BLOCK, **options)
    return out
