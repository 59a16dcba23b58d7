"""The form in flagged words: every rank puts its x to every rank, and all add and norm everything.

Words have 12 bytes of data and 4 of flag (shared.flagged). `parts` programs share a token while there are programs
enough; each adds the squares of its columns, and they tell each other the sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import ptx, sync
from pkt.runtime.launch.launch import cooperative_launch

from ..declaration import Call, Launch
from ..shared import flagged, packing, rms_norm, row_tiles
from ..shared.grid import num_programs

MOST_WORDS = 512
"""That a program moves at a time, one a thread."""


class Words(NamedTuple):
    """Tokens in flagged words. A *unit* is what a program has of a token: `part` columns, or fewer at its end."""

    T: Any
    H: Any
    part: Any
    third: Any  # of the int32 of a part, rounded up: words
    room: Any
    eps: Any
    PARTS: tl.constexpr  # units of a token; where there are several, a program has one unit at most
    BLOCK: tl.constexpr  # words that a program moves at a time
    COLS: tl.constexpr  # columns that it norms at a time
    QUANT: tl.constexpr


@triton.jit
def low_latency_kernel(
    x_ptr,  # (T, H) this rank's
    residual_ptr,  # (T, H) this rank's, the same on every rank
    weight_ptr,  # (H,) this rank's, the same on every rank
    out_ptr,  # (T, H) this rank's
    new_ptr,  # (T, H) this rank's
    scales_ptr,  # fp32 (T, scales) this rank's
    slots_ptr,  # int32 (2, room, 4) on every rank; of a half, by the launch's parity, (size, units, third, 4) is used,
    # of which rank r puts [r] of all, and behind it (units, 4), which only its own programs use
    flags_ptr,  # of this rank; only its launch counter is used
    p,  # Words
    world,
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    units = p.T * p.PARTS
    blocks = tl.cdiv(p.third, p.BLOCK)
    tasks = tl.cdiv(units - pid, programs) * blocks
    x = _thirds(x_ptr, 0, blocks, p)  # on its way with the count of launches
    launch = sync.peek_epoch(flags_ptr)
    half = slots_ptr + tl.cast(launch & 1, tl.int64) * p.room * 4
    slot = tl.cast(units, tl.int64) * p.third * 4  # from a rank's words to the next rank's
    mine = half + tl.cast(world.rank, tl.int64) * slot
    for task in range(tasks):
        t = task % blocks * p.BLOCK + tl.arange(0, p.BLOCK)
        at = mine + (tl.cast(pid + task // blocks * programs, tl.int64) * p.third + t) * 4
        for i in tl.static_range(1, world.size + 1):  # to myself too: every rank adds in the same order
            pl.put_flagged(at, x, launch, (world.rank + i) % world.size, world, mask=t < p.third)
        x = _thirds(x_ptr, task + 1, blocks, p)
    ptx.cta_barrier()
    pl.epoch(flags_ptr, world)
    for unit in range(pid, units, programs):
        words = half + tl.cast(unit, tl.int64) * p.third * 4
        row, begin, width = _unit(unit, p)
        at = row * p.H + begin
        squares = tl.zeros((1,), tl.float32)
        most = tl.zeros((1,), tl.float32)
        for first in range(0, p.third, p.BLOCK):
            t = first + tl.arange(0, p.BLOCK)
            found = pl.take_flagged_all(words + 4 * t, slot, launch, world, mask=t < p.third)
            for j in tl.static_range(3):
                h = _added(found, residual_ptr + at, new_ptr + at, t, j, width, p, world)
                squares += tl.sum(h * h)
                if p.QUANT == "fp8_token":
                    weight = _numbers(weight_ptr + begin, t, j, width, p)
                    most = tl.maximum(most, tl.max(tl.abs(h * weight)))
        if p.PARTS > 1:
            squares, most = _of_all_parts(squares, most, half + world.size * slot, unit, launch, p, world)
        root = rms_norm.inverse_root(squares, p.H, p.eps)
        ptx.cta_barrier()  # the new residual is read again, by other threads than have stored it
        for c in range(begin, begin + width, p.COLS):
            col = c + tl.arange(0, p.COLS)[None, :]
            inside = col < begin + width
            h = tl.load(new_ptr + row * p.H + col, mask=inside, other=0).to(tl.float32)
            weight = tl.load(weight_ptr + col, mask=inside, other=0).to(tl.float32)
            normed, scales = rms_norm.finished(h, weight, root, most, out_ptr.dtype.element_ty, p.QUANT)
            tl.store(out_ptr + row * p.H + col, normed, mask=inside)
            if p.QUANT != "none":
                # The scale of a token is stored by the first of its programs.
                here = tl.full((1, 1), 1, tl.int1) & ((p.QUANT == "fp8_group") | (c == 0))
                places, there = rms_norm.places_of_scales(
                    row + tl.zeros((1, 1), tl.int64), c, here, p.H, p.COLS, p.QUANT
                )
                tl.store(scales_ptr + places, scales, mask=there)


@triton.jit
def _unit(unit, p):
    """(row, first column, columns) of a unit."""
    begin = unit % p.PARTS * p.part
    return tl.cast(unit // p.PARTS, tl.int64), begin, tl.minimum(tl.maximum(p.H - begin, 0), p.part)


@triton.jit
def _thirds(x_ptr, task, blocks, p):
    """What goes into the words of a program's block number `task`, counted over all its units."""
    PER: tl.constexpr = 32 // x_ptr.dtype.element_ty.primitive_bitwidth
    unit = tl.program_id(0) + task // blocks * tl.num_programs(0)
    t = task % blocks * p.BLOCK + tl.arange(0, p.BLOCK)
    row, begin, width = _unit(unit, p)
    return packing.thirds(x_ptr + row * p.H + begin, t, p.third, (t < p.third) & (unit < p.T * p.PARTS), width, PER)


@triton.jit
def _numbers(ptr, t, j: tl.constexpr, width, p):
    """Elements at `ptr` of a third, in fp32."""
    PER: tl.constexpr = 32 // ptr.dtype.element_ty.primitive_bitwidth
    return packing.numbers(packing.load(ptr, t + j * p.third, t < p.third, width, PER), ptr.dtype.element_ty, PER)


@triton.jit
def _added(found, residual_ptr, new_ptr, t, j: tl.constexpr, width, p, world):
    """The new residual of a third of some words, which is stored, in fp32."""
    dtype: tl.constexpr = new_ptr.dtype.element_ty
    PER: tl.constexpr = 32 // dtype.primitive_bitwidth
    total = packing.numbers(found[0][j], dtype, PER)
    for i in tl.static_range(1, world.size):
        total += packing.numbers(found[i][j], dtype, PER)
    h = (total + _numbers(residual_ptr, t, j, width, p)).to(dtype)
    whole = h.to(tl.int32, bitcast=True) if PER == 1 else packing.packed(h)
    packing.store(new_ptr, t + j * p.third, whole, t < p.third, width, PER)
    return h.to(tl.float32)


@triton.jit
def _of_all_parts(squares, most, ptr, unit, launch, p, world):
    """Tell the other programs of the token, on this rank, and hear from them. They are resident, and have put first."""
    lane = tl.arange(0, p.BLOCK)
    said = tl.zeros((p.BLOCK,), tl.int32)
    values = (
        said + tl.sum(squares, 0).to(tl.int32, bitcast=True), said + tl.sum(most, 0).to(tl.int32, bitcast=True), said
    )  # fmt: skip
    at = ptr + tl.cast(unit, tl.int64) * 4 + lane * 0
    pl.put_flagged(at, values, launch, world.rank, world, mask=lane == 0)
    one = unit // p.PARTS * p.PARTS + tl.arange(0, p.PARTS)
    found = pl.take_flagged(ptr + tl.cast(one, tl.int64) * 4, launch, world)
    none = tl.zeros((1,), tl.float32)
    parts, greatest = found[0].to(tl.float32, bitcast=True), found[1].to(tl.float32, bitcast=True)
    return none + tl.sum(parts, 0), none + tl.max(greatest, 0)


# ---------------------------------------------------------------------------------------------------------------- host
def plan(call: Call) -> Launch:
    """`Form.plan` of low_latency."""
    world, (T, H), quant, itemsize = call.world, call.shape, call["quant"], call.dtype.itemsize
    words = triton.cdiv(triton.cdiv(H * itemsize, 4), 3)
    wanted = call["parts"] or triton.next_power_of_2(triton.cdiv(words, MOST_WORDS))
    parts = wanted
    while parts > 1 and parts * T > world.num_sms:
        parts //= 2
    unit = rms_norm.GROUP if quant == "fp8_group" else 2  # elements of 16 bits go in pairs
    part = H if parts == 1 else triton.cdiv(triton.cdiv(H, parts), unit) * unit
    third = triton.cdiv(triton.cdiv(part * itemsize, 4), 3)
    block = max(min(triton.next_power_of_2(third), MOST_WORDS), 32)
    slots, flags, room = flagged.slots_of(world, T * parts * (world.size * third + 1))
    cols = rms_norm.columns(part, row_tiles.TILE_ELEMENTS)
    words_of_call = Words(
        T, H, part, third, room, float(call["eps"]), *map(tl.constexpr, (parts, block, cols, quant or "none"))
    )
    grid = (num_programs(world, T * parts),)
    start = cooperative_launch(world, low_latency_kernel, grid, num_warps=block // 32)

    def launch(*tensors: torch.Tensor) -> Any:
        x, residual, weight, out, new, scales = tensors
        start(x, residual, weight, out, new, scales, slots, flags, words_of_call, world.device)
        return out, new, scales

    return launch
