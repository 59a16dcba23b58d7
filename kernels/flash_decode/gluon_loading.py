"""Shared memory of the Gluon kernel of flash decode, and the warps that fill it: by TMA, or converting keys in fp8."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from pkt.language import ptx

from ..shared import gluon_tma as tma
from ..shared.gluon_aggregate import aggregate
from ..shared.gluon_slots import Slots, open_slots
from ..shared.gluon_tma import viewed
from ..shared.gluon_warps import SWIZZLED, half_layout, itemsize, open_barriers, whole_rows
from .gluon_units import KEYS, ROWS, first_unit

STAGES = gl.constexpr(2)
"""Slots for keys."""


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
    parts = viewed(room, [PIECES * BLOCKS, 1, BLOCK, SWIZZLED], x.layout)
    for i in gl.static_range(PIECES):
        to = parts.index(i * BLOCKS + place)
        tma.async_load(x, [at, row, column + i * SWIZZLED], landed, to)


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
    parts = viewed(room, [len(pieces), KEYS, SWIZZLED], half_layout(KEYS, SWIZZLED, room.dtype))
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
