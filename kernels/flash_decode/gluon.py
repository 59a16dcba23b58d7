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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pkt.language import ptx
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty

from ..declaration import Call, Launch
from ..shared import flagged
from ..shared.gluon_aggregate import aggregate
from ..shared.gluon_host import CONSUMER_WARPS, descriptor
from ..shared.gluon_slots import Slots, open_slots
from ..shared.gluon_warps import SWIZZLED, accumulator, half_layout, itemsize, open_barriers, whole_rows
from ..shared.grid import num_programs, several
from ..shared.products import fitting
from .attention import LN2, LOG2E
from .device import merge_kernel
from .planning import OUT, REGISTERS, argument_of, exchanging, launches, results, words_of_all
from .rules import FP8, in_words

ROWS = gl.constexpr(64)
"""Of a unit."""
KEYS = gl.constexpr(64)
"""Of a tile."""
STAGES = gl.constexpr(2)
"""Slots for keys."""
LOADING, CONVERTING = gl.constexpr([200, 72]), gl.constexpr([176, 96])
"""Registers of a thread of the second consumer and of the loader; the first consumer has what is left."""
MERGES, TAKE = 4, 8
"""Programs of `device.merge_kernel` on an SM, and rows that one merges at a time, or runs of parts of them."""


# ------------------------------------------------------------------------------------------------------------- shares
@aggregate
class Share:
    """The tiles of a program, which are those of `attention.share_of`."""

    sequence: gl.tensor  # where it begins
    block: gl.tensor  # of rows: the unit is number sequence * BLOCKS + block
    tile: gl.tensor  # of the unit's
    count: gl.tensor


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def share_of(p):
    """This program's share."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [gl.num_warps(), 1], [1, 0])
    b = gl.arange(0, p.BATCH, layout=gl.SliceLayout(1, LAYOUT))
    s = gl.arange(0, p.TOKENS, layout=gl.SliceLayout(0, LAYOUT))
    there = (b < p.B)[:, None] & (s < p.SQ)[None, :]
    lens = gl.load(p.lens_ptr + (b[:, None] * p.SQ + s[None, :]), mask=there, other=0)
    longest = gl.minimum(gl.maximum(gl.max(lens, 1), 0), p.most)
    tiles = gl.where(b < p.B, gl.maximum(gl.cdiv(longest, KEYS), 1), 0)
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tiles = gl.convert_layout(tiles, FLAT)
    b = gl.arange(0, p.BATCH, layout=FLAT)
    total = gl.sum(tiles, 0) * p.BLOCKS
    most = gl.maximum(gl.cdiv(total, gl.num_programs(0)), 1)
    first = gl.program_id(0) * most
    before = gl.associative_scan(tiles, 0, _add) * p.BLOCKS <= first
    sequence = gl.sum(gl.where(before, 1, 0), 0)
    begin = gl.sum(gl.where(b < sequence, tiles, 0), 0) * p.BLOCKS
    of_unit = gl.maximum(gl.sum(gl.where(b == sequence, tiles, 0), 0), 1)
    return Share(sequence, (first - begin) // of_unit, (first - begin) % of_unit, gl.minimum(most, total - first))


@aggregate
class Unit:
    """What a program does next: tiles of a unit."""

    sequence: gl.tensor
    block: gl.tensor
    tile: gl.tensor  # the first
    left: gl.tensor  # tiles that the program has, of this unit and others
    keys: gl.tensor  # the most that a query token of the sequence sees
    least: gl.tensor  # the fewest that one sees

    @gluon.jit
    def end(self):
        """The number behind the program's last tile of the unit. A unit without keys has a tile that nobody reads."""
        return gl.minimum(self.tile + self.left, gl.cdiv(self.keys, KEYS))

    @gluon.jit
    def next(self, p):
        """The program's next unit, if tiles are left."""
        count = gl.maximum(gl.cdiv(self.keys, KEYS), 1)
        block = (self.block + 1) % p.BLOCKS
        sequence = gl.where(block == 0, self.sequence + 1, self.sequence)
        return unit_of(sequence, block, gl.cast(0, gl.int32), self.left - (count - self.tile), p)

    @gluon.jit
    def row(self, p):
        """The number of its first row among all rows of the result."""
        return self.sequence * (p.SQ * p.HEADS) + self.block * ROWS

    @gluon.jit
    def part(self, p):
        """The number of the program's part of it among all parts, see `device.merge_kernel`."""
        return gl.program_id(0) + self.sequence * p.BLOCKS + self.block


@gluon.jit
def unit_of(sequence, block, tile, left, p):
    """The unit of a block of a sequence."""
    most = 0
    least = p.most
    if left > 0:
        for s in range(p.SQ):
            seen = gl.load(p.lens_ptr + (sequence * p.SQ + s))
            most = gl.maximum(most, seen)
            least = gl.minimum(least, seen)
    return Unit(sequence, block, tile, left, gl.minimum(most, p.most), least)


@gluon.jit
def first_unit(share, p):
    """The first unit of a program's share."""
    return unit_of(share.sequence, share.block, share.tile, share.count, p)


# ------------------------------------------------------------------------------------------------------------- memory
@aggregate
class Rows:
    """Shared memory for rows of queries or keys, cut in three."""

    low: Slots  # the first half of the value's columns
    high: Slots  # the second half
    rest: Slots  # the other columns


@aggregate
class Memory:
    """What the roles share."""

    queries: Rows
    keys: Rows
    landed: gl.shared_memory_descriptor  # a barrier: values have come whose last rows are to be cleared
    weights: gl.shared_memory_descriptor  # (ROWS, KEYS) of the first consumer, for the second one
    factors: gl.shared_memory_descriptor  # fp32 (ROWS,): what sums so far are to be multiplied with
    ready: gl.shared_memory_descriptor  # a barrier: both are there
    taken: gl.shared_memory_descriptor  # a barrier: both have been read


@gluon.jit
def open_memory(dtype, p):
    """Empty shared memory."""
    HALF: gl.constexpr = p.E // 2
    queries = Rows(open_slots(dtype, 1, ROWS, HALF, 1), open_slots(dtype, 1, ROWS, HALF, 1),
                   open_slots(dtype, 1, ROWS, SWIZZLED, 1))  # fmt: skip
    # The second consumer alone frees the second half: it has the weights when the first one is done with the scores.
    keys = Rows(open_slots(dtype, STAGES, KEYS, HALF, 1), open_slots(dtype, STAGES, KEYS, HALF, 1),
                open_slots(dtype, STAGES, KEYS, SWIZZLED, 1))  # fmt: skip
    weights = gl.allocate_shared_memory(dtype, [ROWS, KEYS], half_layout(ROWS, KEYS, dtype))
    factors = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = open_barriers(1).index(0)
    return Memory(queries, keys, open_barriers(1).index(0), weights, factors, ready, open_barriers(1).index(0))


# ------------------------------------------------------------------------------------------------------------- loader
@gluon.jit
def fetch(room, x, at, row, column, landed, place):
    """Load rows of x from (at, row, column) into a block of rows of `room`, by its number `place`."""
    BLOCK: gl.constexpr = x.block_shape[1]
    BLOCKS: gl.constexpr = room.shape[0] // BLOCK
    PIECES: gl.constexpr = room.shape[1] // SWIZZLED
    parts = room._reinterpret(room.dtype, [PIECES * BLOCKS, 1, BLOCK, SWIZZLED], x.layout)
    for i in gl.static_range(PIECES):
        to = parts.index(i * BLOCKS + place)
        tma.async_copy_global_to_shared(x, [at, row, column + i * SWIZZLED], landed, to)


@gluon.jit
def load_rows(slots, u, q, row, COLUMN: gl.constexpr):
    """Load columns of the queries from a row on, the u-th time."""
    room = slots.acquire(u)
    mbarrier.expect(slots.filled(u), ROWS * room.shape[1] * itemsize(room.dtype))
    fetch(room, q, 0, row, COLUMN, slots.filled(u), 0)


@gluon.jit
def load_queries(u, q, unit, memory, p):
    """Load the queries of a unit, if it has keys. u: units with keys that the program had. (u, and this one.)"""
    if unit.tile < unit.end():
        load_rows(memory.queries.rest, u, q, unit.row(p), p.E)
        load_rows(memory.queries.low, u, q, unit.row(p), 0)
        load_rows(memory.queries.high, u, q, unit.row(p), p.E // 2)
        u += 1
    return u


@gluon.jit
def load_keys(slots, n, k, unit, tile, landed, p, COLUMN: gl.constexpr):
    """Load columns of a tile, the program's n-th. In the place of keys behind the last one there may be anything."""
    BLOCK: gl.constexpr = k.block_shape[1]
    room = slots.acquire(n)
    mbarrier.expect(landed, KEYS * room.shape[1] * itemsize(room.dtype))
    table = p.table_ptr + gl.cast(unit.sequence, gl.int64) * p.pages_of
    for i in gl.static_range(KEYS // BLOCK):
        key = tile * KEYS + i * BLOCK
        page = gl.load(table + key // p.PAGE, mask=key < unit.keys, other=0)
        fetch(room, k, page, key % p.PAGE, COLUMN, landed, i)


@gluon.jit
def load_values(slots, n, k, unit, tile, cleared, memory, p, COLUMN: gl.constexpr):
    """As `load_keys`, of columns that are values, too: behind the last key they are 0. (How many were cleared.)"""
    rows = unit.keys - tile * KEYS
    if rows < KEYS:
        load_keys(slots, n, k, unit, tile, memory.landed, p, COLUMN)
        slots.keep_first(n, rows, memory.landed, cleared & 1)
        cleared += 1
    else:
        load_keys(slots, n, k, unit, tile, slots.filled(n), p, COLUMN)
    return cleared


@gluon.jit
def load(share, q, k, memory, p):
    """The loader."""
    HALF: gl.constexpr = p.E // 2
    u = 0
    n = 0
    cleared = 0
    unit = first_unit(share, p)
    while unit.left > 0:
        u = load_queries(u, q, unit, memory, p)
        for tile in range(unit.tile, unit.end()):
            load_keys(memory.keys.rest, n, k, unit, tile, memory.keys.rest.filled(n), p, p.E)
            cleared = load_values(memory.keys.low, n, k, unit, tile, cleared, memory, p, 0)
            cleared = load_values(memory.keys.high, n, k, unit, tile, cleared, memory, p, HALF)
            n += 1
        unit = unit.next(p)


# ---------------------------------------------------------------------------------------------------------- converter
@aggregate
class Places:
    """Where the keys of a tile lie, of a cache in fp8."""

    at: gl.tensor  # int64 (KEYS,), from the cache's first number to each key
    there: gl.tensor  # which of them the program reads

    @gluon.jit
    def prefetch(self, p):
        """Have the L2 cache fetch the keys, in lines of 128 bytes and what is left of one."""
        LAYOUT: gl.constexpr = whole_rows(SWIZZLED, gl.int8, gl.num_warps())
        line = 128 * gl.arange(0, 8, layout=gl.SliceLayout(0, LAYOUT))
        ptx.prefetch(p.k_ptr + (self.at[:, None] + line[None, :]), self.there[:, None] & (line < p.D)[None, :])

    @gluon.jit
    def load(self, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, p):
        """Columns of the keys in pieces of SWIZZLED, 0 behind the last key and the last column. A thread loads 16 bytes
        of a row at once."""
        LAYOUT: gl.constexpr = whole_rows(SWIZZLED, gl.int8, gl.num_warps())
        pieces = ()
        for i in gl.static_range(COLUMNS // SWIZZLED):
            column = COLUMN + i * SWIZZLED + gl.arange(0, SWIZZLED, layout=gl.SliceLayout(0, LAYOUT))
            inside = self.there[:, None] & (column < p.D)[None, :]
            pieces = pieces + (gl.load(p.k_ptr + (self.at[:, None] + column[None, :]), mask=inside, other=0.0),)
        return pieces


@gluon.jit
def places_of(unit, tile, end, p):
    """The places of a tile's keys before number `end`."""
    LAYOUT: gl.constexpr = whole_rows(SWIZZLED, gl.int8, gl.num_warps())
    key = tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    there = key < end
    table = p.table_ptr + gl.cast(unit.sequence, gl.int64) * p.pages_of
    page = gl.load(table + key // p.PAGE, mask=there, other=0)
    return Places(gl.cast(page, gl.int64) * p.k_page + key % p.PAGE * p.k_token, there)


@gluon.jit
def put(slots, n, pieces):
    """Put columns of a tile, the program's n-th, into its slot, in the dtype of the queries."""
    room = slots.acquire(n)
    parts = room._reinterpret(room.dtype, [len(pieces), KEYS, SWIZZLED], half_layout(KEYS, SWIZZLED, room.dtype))
    for i in gl.static_range(len(pieces)):
        numbers = pieces[i].to(gl.float16)
        if room.dtype == gl.bfloat16:
            numbers = numbers.to(gl.float32)  # few units of an SM convert fp16 to bf16, and all of them fp32
        parts.index(i).store(numbers.to(room.dtype))


@gluon.jit
def convert(share, q, memory, p):
    """The loader of a cache in fp8. While it converts a tile, the page numbers of the one after the next are on their
    way, and then its keys to the L2 cache. A fence waits for all loads before it, so there is one a tile."""
    HALF: gl.constexpr = p.E // 2
    keys = memory.keys
    u = 0
    n = 0
    unit = first_unit(share, p)
    while unit.left > 0:
        u = load_queries(u, q, unit, memory, p)
        end = gl.minimum(unit.keys, unit.end() * KEYS)
        here = places_of(unit, unit.tile, end, p)
        following = places_of(unit, unit.tile + 1, end, p)
        following.prefetch(p)
        for tile in range(unit.tile, unit.end()):
            rest = here.load(p.E, SWIZZLED, p)
            low = here.load(0, HALF, p)
            high = here.load(HALF, HALF, p)
            here = following
            following = places_of(unit, tile + 2, end, p)
            put(keys.rest, n, rest)
            put(keys.low, n, low)
            put(keys.high, n, high)
            fence_async_shared()
            mbarrier.arrive(keys.rest.filled(n), count=1)
            mbarrier.arrive(keys.low.filled(n), count=1)
            mbarrier.arrive(keys.high.filled(n), count=1)
            following.prefetch(p)
            n += 1
        unit = unit.next(p)


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
