"""The kernel of the form "gluon": attention over a latent cache in specialised warps.

A latent cache has one KV head, whose first E elements are the value, too. Of 64 rows the sums are 64 x E numbers, more
than the registers of a warpgroup hold. So a program has two consumers of four warps, as FlashMLA of DeepSeek has: the
first one computes scores and softmax, and each multiplies the weights with half the columns of the values. The first
one hands its weights to the second through shared memory. A loader warp has TMA fill two slots with a tile of keys
each. A slot has three parts, the halves of the value and the rest of the key, which are filled and freed one by one.
Keys in fp8 are loaded by four warps, which put them into the slots in the dtype of the queries.

Programs share the tiles as in `attention`. Each stores its part of a unit as rows of E numbers and their lse, for
`device.merge_kernel`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty

from ..declaration import Call, Launch
from ..shared import flagged
from ..shared.gluon_host import CONSUMER_WARPS, descriptor
from ..shared.gluon_warps import SWIZZLED, accumulator
from ..shared.grid import num_programs, several
from ..shared.products import fitting
from .attention import LN2, LOG2E
from .device import merge_kernel
from .gluon_loading import convert, load, open_memory
from .gluon_units import KEYS, ROWS, first_unit, share_of
from .planning import OUT, REGISTERS, argument_of, exchanging, launches, results, words_of_all
from .rules import FP8, in_words

LOADING, CONVERTING = gl.constexpr([200, 72]), gl.constexpr([176, 96])
"""Registers of a thread of the second consumer and of the loader; the first consumer has what is left."""
MERGES, TAKE = 4, 8
"""Programs of `device.merge_kernel` on an SM, and rows that one merges at a time, or runs of parts of them."""


# ---------------------------------------------------------------------------------------------------------- consumers
@gluon.jit
def queries_of(slots, u, n):
    """Columns of the queries of a unit, the u-th of the program's that have keys, for its n-th tile. They are the same
    for all tiles, but the index hides that from the compiler, which would keep the addresses of all blocks in registers
    and spill them."""
    slots.take(u)
    return slots.room.index(n >> 30)


@gluon.jit
def begin_scores(u, n, blank, memory):
    """Begin the scores of the program's n-th tile, in three products."""
    queries = memory.queries
    keys = memory.keys
    rest = queries_of(queries.rest, u, n)
    scores = warpgroup_mma(rest, keys.rest.take(n).permute([1, 0]), blank, use_acc=False, is_async=True)
    low = queries_of(queries.low, u, n)
    scores = warpgroup_mma(low, keys.low.take(n).permute([1, 0]), scores, is_async=True)
    high = queries_of(queries.high, u, n)
    return warpgroup_mma(high, keys.high.take(n).permute([1, 0]), scores, is_async=True)


@gluon.jit
def softmax(scores, top, tile, seen, least, scale, p, SHIFT: gl.constexpr):
    """(greatest score, fp32 weights without it, what the sums so far shrink by), in powers of two."""
    scores = scores * scale
    if p.CAPPED:
        scores = p.cap * LOG2E * (1 - 2 / (1 + gl.exp2(scores * (2 / p.cap))))
    if (tile + 1) * KEYS > least:
        key = tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(key[None, :] < seen[:, None], scores, -float("inf"))
    higher = gl.maximum(top, gl.max(scores, 1))
    finite = gl.where(higher == -float("inf"), 0.0, higher)  # no key seen so far
    return higher, gl.exp2(scores - (finite - SHIFT)[:, None]), gl.exp2(top - finite)


@gluon.jit
def hand_over(h, factors, memory):
    """Give the second consumer the h-th factors, and what was stored for it since `await_taken`."""
    memory.factors.store(factors)
    mbarrier.arrive(memory.ready, count=1)


@gluon.jit
def await_taken(h, memory):
    """Wait until the second consumer has what came before the h-th factors."""
    mbarrier.wait(memory.taken, (h & 1) ^ 1)


@gluon.jit
def lead(share, memory, parts_ptr, p):
    """The first consumer."""
    HALF: gl.constexpr = p.E // 2
    DTYPE: gl.constexpr = memory.weights.dtype
    SHIFT: gl.constexpr = 15 if DTYPE == gl.float16 else 0  # or small weights were 0
    SCORES: gl.constexpr = accumulator(KEYS, gl.num_warps())
    SUMS: gl.constexpr = accumulator(HALF, gl.num_warps())
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    scale = p.scale * LOG2E
    value = 1.0
    if p.k_scale_ptr is not None:
        value = gl.load(p.k_scale_ptr)
        scale *= value
    blank = gl.zeros((ROWS, KEYS), gl.float32, SCORES)
    u = 0  # units with keys
    n = 0  # tiles
    h = 0  # factors handed over
    unit = first_unit(share, p)
    while unit.left > 0:
        i = unit.block * ROWS + gl.arange(0, ROWS, layout=OF_ROWS)
        exists = i < p.SQ * p.HEADS
        seen = gl.load(p.lens_ptr + (unit.sequence * p.SQ + i // p.HEADS), mask=exists, other=0)
        seen = gl.minimum(seen, p.most)
        top = gl.full((ROWS,), -float("inf"), gl.float32, OF_ROWS)
        total = gl.zeros((ROWS,), gl.float32, OF_ROWS)
        acc = gl.zeros((ROWS, HALF), gl.float32, SUMS)
        end = unit.end()
        if unit.tile < end:
            scores = warpgroup_mma_wait(0, deps=(begin_scores(u, n, blank, memory),))
            memory.keys.rest.free(n)
            top, exact, shrink = softmax(scores, top, unit.tile, seen, unit.least, scale, p, SHIFT)
            total = gl.sum(exact, 1)
            await_taken(h, memory)
            memory.weights.store(exact.to(DTYPE))
            hand_over(h, shrink, memory)
            h += 1
            weights = gl.convert_layout(exact.to(DTYPE), WEIGHTS)
            for tile in range(unit.tile + 1, end):
                acc = warpgroup_mma(weights, memory.keys.low.take(n), acc, is_async=True)
                scores = begin_scores(u, n + 1, blank, memory)
                acc, weights = warpgroup_mma_wait(3, deps=(acc, weights))
                memory.keys.low.free(n)
                scores = warpgroup_mma_wait(0, deps=(scores,))
                memory.keys.rest.free(n + 1)
                top, exact, shrink = softmax(scores, top, tile, seen, unit.least, scale, p, SHIFT)
                total = total * shrink + gl.sum(exact, 1)
                await_taken(h, memory)
                memory.weights.store(exact.to(DTYPE))
                hand_over(h, shrink, memory)
                h += 1
                acc = acc * gl.convert_layout(shrink, OF_SUMS)[:, None]
                weights = gl.convert_layout(exact.to(DTYPE), WEIGHTS)
                n += 1
            acc = warpgroup_mma(weights, memory.keys.low.take(n), acc, is_async=True)
            acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
            memory.keys.low.free(n)
            n += 1
            memory.queries.rest.free(u)
            memory.queries.low.free(u)
            memory.queries.high.free(u)
            u += 1
        empty = total == 0.0
        share_of_row = value / gl.where(empty, 1.0, total)
        await_taken(h, memory)
        hand_over(h, share_of_row, memory)
        h += 1
        store(acc * gl.convert_layout(share_of_row, OF_SUMS)[:, None], unit, 0, parts_ptr, p)
        parts = gl.num_programs(0) + p.B * p.BLOCKS
        lse = gl.where(empty, -float("inf"), (top + gl.log2(total) - SHIFT) * LN2)
        at = (gl.cast(parts, gl.int64) * p.E + unit.part(p)) * ROWS
        gl.store(parts_ptr + at + gl.arange(0, ROWS, layout=OF_ROWS), lse, mask=exists)
        unit = unit.next(p)


@gluon.jit
def follow(share, memory, parts_ptr, p):
    """The second consumer."""
    HALF: gl.constexpr = p.E // 2
    SUMS: gl.constexpr = accumulator(HALF, gl.num_warps())
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    n = 0
    h = 0
    unit = first_unit(share, p)
    while unit.left > 0:
        acc = gl.zeros((ROWS, HALF), gl.float32, SUMS)
        for tile in range(unit.tile, unit.end()):
            mbarrier.wait(memory.ready, h & 1)
            weights = memory.weights.load(WEIGHTS)
            factors = memory.factors.load(OF_SUMS)
            mbarrier.arrive(memory.taken, count=1)
            h += 1
            acc = acc * factors[:, None]
            acc = warpgroup_mma(weights, memory.keys.high.take(n), acc, is_async=True)
            acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
            memory.keys.high.free(n)
            n += 1
        mbarrier.wait(memory.ready, h & 1)
        factors = memory.factors.load(OF_SUMS)
        mbarrier.arrive(memory.taken, count=1)
        h += 1
        store(acc * factors[:, None], unit, HALF, parts_ptr, p)
        unit = unit.next(p)


@gluon.jit
def store(sums, unit, COLUMN: gl.constexpr, parts_ptr, p):
    """Store columns of a program's part of a unit."""
    LAYOUT: gl.constexpr = sums.type.layout
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    e = COLUMN + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    exists = unit.block * ROWS + i < p.SQ * p.HEADS
    base = gl.cast(unit.part(p), gl.int64) * (ROWS * p.E)
    gl.store(parts_ptr + base + (i[:, None] * p.E + e[None, :]), sums, mask=exists[:, None])


# ------------------------------------------------------------------------------------------------------------- kernel
@gluon.jit
def gluon_decode_kernel(
    q,  # (1, B * SQ * HEADS, D), blocks of 1 x ROWS x SWIZZLED
    k,  # (pages, PAGE, D), blocks of 1 x some of the keys of a page x SWIZZLED; None where p.k_ptr is of fp8
    parts_ptr,  # fp32 (programs + units, ROWS, E) this rank's, and behind it (programs + units, ROWS) for their lse
    p,  # Decode of one KV head; of its pointers those of lengths, pages and scales are used, and k_ptr where it is fp8
    num_warps: gl.constexpr,
):
    """The module's kernel. No program waits for another."""
    share = share_of(p)
    memory = open_memory(q.dtype, p)
    if k is None:
        gl.warp_specialize(
            [
                (lead, (share, memory, parts_ptr, p)),
                (follow, (share, memory, parts_ptr, p)),
                (convert, (share, q, memory, p)),
            ],
            [num_warps, num_warps],
            CONVERTING,
        )
    else:
        gl.warp_specialize(
            [
                (lead, (share, memory, parts_ptr, p)),
                (follow, (share, memory, parts_ptr, p)),
                (load, (share, q, k, memory, p)),
            ],
            [num_warps, 1],
            LOADING,
        )


# --------------------------------------------------------------------------------------------------------------- host
def planned_latent(call: Call) -> Launch:
    """The plan of the form. Collective."""
    world, (B, SQ, H, E), D, page, fused = call.world, call.shape, call["d"], call["n"], in_words(call)
    units, programs = B * triton.cdiv(SQ * H, ROWS.value), num_programs(call.world, call.world.num_sms)
    memory, flags, room = (
        flagged.slots_of(world, words_of_all(call)) if fused else (results(call, 1), launches(call), 0)
    )
    name, size = f"{call.name}.shares", (programs + units) * ROWS.value * (E + 1)
    parts = world.keep((name, size), lambda: empty(size, dtype=torch.float32, name=name, world=world))
    fp8 = call["k_cache"].dtype in FP8
    argument = argument_of(call, ROWS.value, KEYS.value, tma=not fp8, fused=fused, room=room)
    fit = fitting(call["q"])

    def fitted(q: torch.Tensor) -> torch.Tensor:
        return (fit(q) if fit else q).view(1, B * SQ * H, D)

    queries = descriptor(fitted(call["q"]), (1, ROWS.value, SWIZZLED.value))
    # Where a rank has no pages nothing is loaded.
    cache = call["k_cache"] if len(call["k_cache"]) else call["k_cache"].new_empty(1, page, 1, D)
    keys = None if fp8 else descriptor(cache[:, :, 0], (1, min(page, KEYS.value), SWIZZLED.value))
    attend = cooperative_launch(world, gluon_decode_kernel, (programs,), num_warps=CONSUMER_WARPS)
    merges = several(call, MERGES, world.num_sms)
    runs = min(TAKE, 1 << max(merges * TAKE // max(B * SQ * H, 1), 1).bit_length() - 1)
    grid = (max(min(B * SQ * H, merges), 1),)
    merge = cooperative_launch(world, merge_kernel, grid, num_warps=4, maxnreg=REGISTERS // (128 * MERGES))
    finish = None if fused else exchanging(call, memory)

    def launch(*tensors: Any) -> Any:
        p = argument(tensors, parts, flags, memory)
        queries.base = fitted(tensors[0])
        if keys:
            keys.base = tensors[1] if len(tensors[1]) else cache
        try:
            attend(queries, keys, parts, p)
        finally:
            queries.base = None
            if keys:
                keys.base = None
        merge(p, parts, programs, world.device, TAKE, runs)
        if finish:
            finish(lambda memory: argument(tensors, parts, flags, memory))
        return tensors[OUT], tensors[-1]

    return launch
