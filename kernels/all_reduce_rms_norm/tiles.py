"""The forms over tiles of rows (shared.row_tiles): `two_shot_kernel`, whose owners add and send back, and
`norm_kernel`, after an all-reduce. Both norm a tile alike."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import ptx
from pkt.runtime.launch.launch import beside_launch
from pkt.runtime.memory.factories import empty

from ..all_reduce import OPERATOR as ALL_REDUCE
from ..declaration import Call, Launch
from ..shared import rms_norm, row_tiles
from ..shared.grid import COPY_OPTIONS
from ..shared.inbox import await_sent


@triton.jit
def two_shot_kernel(
    x_ptr,  # (T, H) this rank's
    residual_ptr,  # (T, H) this rank's, the same on every rank; only its own tiles are read
    weight_ptr,  # (H,) this rank's, the same on every rank
    out_ptr,  # (T, H) this rank's
    new_ptr,  # (T, H) this rank's
    scales_ptr,  # fp32 (T, scales) this rank's
    inbox_ptr,  # (2, size - 1, programs, 2, room) on every rank, see row_tiles.Space; the answer is the new residual
    sent_ptr,  # int32 (programs, size) on every rank
    eps,
    p,  # row_tiles.Rows
    world,
    QUANT: tl.constexpr,
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    rank = tl.cast(world.rank, tl.int32)
    counts = sent_ptr + pid * world.size
    sent = pl.atomic_add(counts + rank, 0, rank, world, sem="relaxed")
    results = (weight_ptr, out_ptr, new_ptr, scales_ptr)
    for turn in range(pid, p.turns + programs, programs):
        row_tiles.send(x_ptr, inbox_ptr, sent, turn, p, world, p.HEIGHT * p.COLS)
        pl.signal_all(counts + rank, world)  # publish x, and the last turn's new residuals
        await_sent(counts, sent, world)
        _tile(x_ptr, residual_ptr, inbox_ptr, sent, turn, 0, results, eps, p, world, "mine", QUANT)
        for i in range(1, world.size):
            before = turn - programs
            _tile(x_ptr, residual_ptr, inbox_ptr, sent - 1, before, i, results, eps, p, world, "answer", QUANT)
        sent += 1


@triton.jit
def _tile(
    x_ptr, residual_ptr, inbox_ptr, sent, turn, distance, results, eps, p, world, WHICH: tl.constexpr,
    QUANT: tl.constexpr,
):  # fmt: skip
    """Norm a tile: my own ("mine"), the one that rank + distance has answered ("answer"), or one of which x is the sum
    over ranks already ("sum"), and of which owner 0 has all."""
    weight_ptr, out_ptr, new_ptr, scales_ptr = results
    tensors = (x_ptr, residual_ptr, inbox_ptr, new_ptr)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    H = p.units * p.UNIT
    owner = 0 if WHICH == "sum" else (tl.cast(world.rank, tl.int32) + distance) % world.size
    rows = row_tiles.count(owner, turn, p)
    for start in range(0, rows, p.HEIGHT):
        j = start + tl.arange(0, p.HEIGHT)[:, None]
        row = row_tiles.first(owner, turn, p) + j
        squares = tl.zeros((p.HEIGHT,), tl.float32)
        most = tl.zeros((p.HEIGHT,), tl.float32)
        col = tl.arange(0, p.COLS)[None, :]
        if p.WHOLE:
            inside = (j < rows) & (col < H)
            h = _new(tensors, sent, row, j * H, col, inside, distance, p, world, WHICH)
            weight = tl.load(weight_ptr + col, mask=col < H, other=0).to(tl.float32)
            root = rms_norm.inverse_root(tl.sum(h * h, 1), H, eps)
            most = rms_norm.greatest(h, weight, QUANT)
            normed, scales = rms_norm.finished(h, weight, root, most, dtype, QUANT)
            tl.store(out_ptr + row * H + col, normed, mask=inside)
            _store_scales(scales_ptr, scales, row, 0, j < rows, H, p, QUANT)
        else:
            for c in range(0, H, p.COLS):
                inside = (j < rows) & (c + col < H)
                h = _new(tensors, sent, row, j * H, c + col, inside, distance, p, world, WHICH)
                squares += tl.sum(h * h, 1)
                weight = tl.load(weight_ptr + c + col, mask=c + col < H, other=0).to(tl.float32)
                most = tl.maximum(most, rms_norm.greatest(h, weight, QUANT))
            ptx.cta_barrier()  # other threads may read the new residual than have stored it
            root = rms_norm.inverse_root(squares, H, eps)
            for c in range(0, H, p.COLS):
                inside = (j < rows) & (c + col < H)
                h = tl.load(new_ptr + row * H + c + col, mask=inside, other=0).to(tl.float32)
                weight = tl.load(weight_ptr + c + col, mask=c + col < H, other=0).to(tl.float32)
                normed, scales = rms_norm.finished(h, weight, root, most, dtype, QUANT)
                tl.store(out_ptr + row * H + c + col, normed, mask=inside)
                _store_scales(scales_ptr, scales, row, c, j < rows, H, p, QUANT)


@triton.jit
def _store_scales(scales_ptr, scales, row, begin, inside, H, p, QUANT: tl.constexpr):
    if QUANT != "none":
        places, there = rms_norm.places_of_scales(row, begin, inside, H, p.COLS, QUANT)
        tl.store(scales_ptr + places, scales, mask=there)


@triton.jit
def _new(tensors, sent, row, place, col, inside, distance, p, world, WHICH: tl.constexpr):
    """The new residual of some rows, which is stored, in fp32: of my own tile also into every other rank's inbox."""
    x_ptr, residual_ptr, inbox_ptr, new_ptr = tensors
    H = p.units * p.UNIT
    if WHICH == "sum":
        h = tl.load(x_ptr + row * H + col, mask=inside, other=0).to(tl.float32)
        h += tl.load(residual_ptr + row * H + col, mask=inside, other=0).to(tl.float32)
        h = h.to(new_ptr.dtype.element_ty)
    elif WHICH == "mine":
        total = row_tiles.sums(x_ptr, inbox_ptr, sent, row, place, col, inside, p, world)
        total += tl.load(residual_ptr + row * H + col, mask=inside, other=0).to(tl.float32)
        h = total.to(new_ptr.dtype.element_ty)
        for i in tl.static_range(1, world.size):
            to = row_tiles.place(inbox_ptr, sent, world.size - i, 1, p, world) + place + col
            pl.store(to, h, (world.rank + i) % world.size, world, mask=inside)
    else:
        came = row_tiles.place(inbox_ptr, sent, distance, 1, p, world) + place + col
        h = tl.load(came, mask=inside, other=0)
    tl.store(new_ptr + row * H + col, h, mask=inside)
    return h.to(tl.float32)


@triton.jit
def norm_kernel(
    sum_ptr,  # (T, H) this rank's; the sum over ranks
    residual_ptr,  # (T, H) this rank's
    weight_ptr,  # (H,) this rank's
    out_ptr,  # (T, H) this rank's
    new_ptr,  # (T, H) this rank's
    scales_ptr,  # fp32 (T, scales) this rank's
    eps,
    p,  # row_tiles.Rows of one rank
    world,
    QUANT: tl.constexpr,
):
    results = (weight_ptr, out_ptr, new_ptr, scales_ptr)
    for turn in range(tl.program_id(0), p.turns, tl.num_programs(0)):
        _tile(sum_ptr, residual_ptr, sum_ptr, 0, turn, 0, results, eps, p, world, "sum", QUANT)


# ---------------------------------------------------------------------------------------------------------------- host
def two_shot(call: Call) -> Launch:
    """`Form.plan` of two_shot."""
    return rms_norm.over_tiles(call, two_shot_kernel)


def unfused(call: Call) -> Launch:
    """`Form.plan` of unfused."""
    world, eps, quant, name = call.world, float(call["eps"]), call["quant"] or "none", "all_reduce_rms_norm.sum"
    T, H = call.shape
    total = world.keep((name, T, H, call.dtype), lambda: empty(T, H, dtype=call.dtype, name=name, world=world))
    reduce = ALL_REDUCE.planned(world, call["x"], total)
    p, programs = row_tiles.rows(world, call.shape, call.dtype, 1)
    start = beside_launch(world, norm_kernel, (programs,), **COPY_OPTIONS)

    def launch(*tensors: torch.Tensor) -> Any:
        x, residual, weight, out, new, scales = tensors
        reduce(x, total)
        start(total, residual, weight, out, new, scales, eps, p, world.device, quant)
        return out, new, scales

    return launch
