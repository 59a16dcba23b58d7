"""The warps of the Gluon forms of the fused matmuls; where finished tiles go is left to each form.

A program has a loader warp, two consumers of four warps (a warpgroup each) and a storer warp, which run at once:

- The loader fills the ring: STAGES slots, each for BLOCK_K columns of A and BLOCK_K rows of B.
- Each consumer computes half of a tile's rows. The second one begins a tile behind the first. Else they do not wait for
  each other: while one finishes its half, the tensor cores have the other's products.
- The first consumer's half leaves through the outbox, the second one's through a slot that the ring lends.
- The storer sends both halves where they belong, while the consumers compute the next tile.

An outbox for a whole tile would cost a slot for good, and with three slots the loads of 128 x 256 tiles come late.

A form has an aggregate for its order of tiles, whose methods the roles call:

    first()     where this program begins to count tiles
    end()       the number behind the last tile; a program's tiles are num_programs apart
    column(t)   the column of tiles of tile t, times 2, plus 1 if this rank finishes the tile; below 0 if there is none
    rows(t)     of fp8: the part of A that tile t takes its rows from, and the row block in there
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pkt.language import ptx

from . import gluon_tma as tma
from .gluon_aggregate import aggregate
from .gluon_scales import CONSUMERS, Scaling
from .gluon_tma import viewed
from .tile_product import activate, columns_each

SWIZZLED = gl.constexpr(64)
"""Columns of 16 bits that shared memory holds side by side."""
REGISTERS = gl.constexpr([216, 64, 64])
"""A thread of the second consumer, the loader and the storer; the first has what is left."""
PROMOTED = gl.constexpr(128)
"""The widest fp8 tiles whose products are added up in fp32 registers, see scales.py. In wider ones the sum stays in the
tensor cores, because registers do not hold it twice."""
SUMMED = gl.constexpr(4)
"""Steps whose products are added up in the tensor cores, before they are added in registers: 4096 x 8192 x 28672 on 2 x
H200 takes 1.516, 1.545, 1.491 and 1.459 ms with 1, 2, 4 and 8 (benchmarks/results/fp8_products_tried_2.json). With 4
the error of normal numbers is that of 1 to two digits."""


class Sizes(NamedTuple):
    """Of a product on this rank: rows of the output, or of a rank's part of it; its columns; and columns of A."""

    M: Any
    N: Any
    K: Any


class Constants(NamedTuple):
    """Constants of a kernel. STAGES: slots of the ring. GROUP: row blocks that are computed together. TRANSPOSED: B
    lies in memory as (N, K). EPILOGUE: what is done to a finished tile, see `activate`."""

    STAGES: gl.constexpr
    GROUP: gl.constexpr
    TRANSPOSED: gl.constexpr
    EPILOGUE: gl.constexpr


@gluon.constexpr_function
def half_layout(rows, columns, dtype):
    """The layout in shared memory of half a tile."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


@gluon.constexpr_function
def accumulator(columns, warps, itemsize=2):
    """The layout in registers of what the tensor cores add up, so many columns wide. itemsize: of the operands."""
    depth = 32 // itemsize
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, columns, depth])


@gluon.constexpr_function
def whole_rows(columns, dtype, warps):
    """The layout in registers of rows that go to memory in whole sectors, 16 bytes a thread."""
    each = 128 // dtype.primitive_bitwidth
    return gl.BlockedLayout([1, each], [32 * each // columns, columns // each], [warps, 1], [1, 0])


@gluon.constexpr_function
def itemsize(dtype):
    """Bytes of an element."""
    return dtype.primitive_bitwidth // 8


@gluon.jit
def first_columns(room, COLUMNS: gl.constexpr):
    """Room for half a tile in shared memory, seen as room for its first columns alone."""
    ROWS: gl.constexpr = room.shape[0]
    PIECES: gl.constexpr = room.shape[1] // COLUMNS
    if PIECES > 1:
        LAYOUT: gl.constexpr = half_layout(ROWS, COLUMNS, room.dtype)
        room = viewed(room, [PIECES, ROWS, COLUMNS], LAYOUT).index(0)
    return room


@gluon.jit
def first_tile():
    """Where a program begins to count tiles: the first ids get one tile less, where there are not enough for all."""
    return gl.num_programs(0) - 1 - gl.program_id(0)


@gluon.jit
def grouped(t, num_m, num_n, GROUP: gl.constexpr):
    """`pkt.language.order.supergroup`."""
    tiles = GROUP * num_n
    first = (t // tiles) * GROUP
    rows = gl.minimum(num_m - first, GROUP)
    return first + (t % tiles) % rows, (t % tiles) // rows


@gluon.jit
def open_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """`COUNT` barriers for so many arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


# --------------------------------------------------------------------------------------------------------- memory
@aggregate
class Ring:
    """STAGES slots of shared memory, which the steps of all tiles go through in turn: step s uses slot s % STAGES. A
    step is a block of A and one of B, or half a tile of partial sums, or a slot lent for half a finished tile."""

    a: gl.shared_memory_descriptor  # (STAGES, BLOCK_M, BLOCK_K)
    b: gl.shared_memory_descriptor  # (STAGES, BLOCK_K, BLOCK_N), or (STAGES, BLOCK_N, BLOCK_K) if TRANSPOSED
    full: gl.shared_memory_descriptor  # a barrier a slot: it has been filled
    empty: gl.shared_memory_descriptor  # a barrier a slot: it is free
    K: gl.tensor  # columns of A, over all steps of a tile
    STAGES: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCK_K: gl.constexpr
    TRANSPOSED: gl.constexpr
    PROMOTED: gl.constexpr  # products of SUMMED steps are added up in registers
    DTYPE: gl.constexpr  # of finished tiles and of partial sums
    HALF: gl.constexpr  # layout of half a tile of them

    @gluon.jit
    def steps(self):
        """Steps of a tile's product."""
        return gl.cdiv(self.K, self.BLOCK_K)

    @gluon.jit
    def b_slot(self, slot):
        """A slot's part for B."""
        return self.b.index(slot * (self.b.shape[0] // self.STAGES))

    @gluon.jit
    def half(self, step):
        """The part for B of the step's slot, seen as half a tile."""
        rows: gl.constexpr = self.BLOCK_M // CONSUMERS
        return viewed(self.b_slot(step % self.STAGES), [rows, self.BLOCK_N], self.HALF, self.DTYPE)

    @gluon.jit
    def acquire(self, step):
        """The step's slot, once it is free."""
        slot = step % self.STAGES
        mbarrier.wait(self.empty.index(slot), ((step // self.STAGES) & 1) ^ 1)
        return slot

    @gluon.jit
    def await_full(self, step):
        """The step's slot, once it has been filled."""
        slot = step % self.STAGES
        mbarrier.wait(self.full.index(slot), (step // self.STAGES) & 1)
        return slot

    @gluon.jit
    def free(self, step, ARRIVALS: gl.constexpr):
        """Let the step's slot go, for so many of the consumers."""
        mbarrier.arrive(self.empty.index(step % self.STAGES), count=ARRIVALS)

    @gluon.jit
    def load(self, step, a, at, b, col, k):
        """Fill the step's slot with A from `at` and B from (k, col)."""
        BYTES: gl.constexpr = (self.BLOCK_M + self.BLOCK_N) * self.BLOCK_K * itemsize(self.a.dtype)
        slot = self.acquire(step)
        mbarrier.expect(self.full.index(slot), BYTES)
        tma.async_load(a, at, self.full.index(slot), self.a.index(slot))
        if self.TRANSPOSED:
            tma.async_load(b, [col, k], self.full.index(slot), self.b_slot(slot))
        else:
            tma.async_load(b, [k, col], self.full.index(slot), self.b_slot(slot))

    @gluon.jit
    def load_halves(self, step, tensor, row, col):
        """Fill the slots of this step and the next with the halves of a finished tile or of partial sums, which begins
        at (row, col)."""
        ROWS: gl.constexpr = self.BLOCK_M // CONSUMERS
        for h in gl.static_range(CONSUMERS):
            slot = self.acquire(step + h)
            mbarrier.expect(self.full.index(slot), ROWS * self.BLOCK_N * itemsize(self.DTYPE))
            at = [row + h * ROWS, col]
            tma.async_load(tensor, at, self.full.index(slot), self.half(step + h))

    @gluon.jit
    def lend(self, step):
        """Lend the step's slot, empty, for half of a finished tile."""
        mbarrier.arrive(self.full.index(self.acquire(step)), count=1)

    @gluon.jit
    def add_partial(self, step, half, CONSUMER: gl.constexpr):
        """Half a tile, fp32, plus the consumer's half of what `load_halves` has put into the slots of this step and
        the next, which are then free. Each consumer waits for both: a barrier that one had not waited for could be two
        phases on."""
        for h in gl.static_range(CONSUMERS):
            self.await_full(step + h)
            if h == CONSUMER:
                half += self.half(step + h).load(half.type.layout).to(gl.float32)
                fence_async_shared()
            self.free(step + h, 1)
        return half

    @gluon.jit
    def narrowed(self, b, PIECES: gl.constexpr):
        """The same ring for tiles of BLOCK_N / PIECES columns: each slot of B has the blocks of `b`, and the first one
        is used."""
        COLUMNS: gl.constexpr = self.BLOCK_N // PIECES
        if self.TRANSPOSED:
            slots = viewed(self.b, [self.STAGES * PIECES, COLUMNS, self.BLOCK_K], b.layout)
        else:
            slots = viewed(self.b, [self.STAGES * PIECES, self.BLOCK_K, COLUMNS], b.layout)
        HALF: gl.constexpr = half_layout(self.BLOCK_M // CONSUMERS, COLUMNS, self.DTYPE)
        return Ring(self.a, slots, self.full, self.empty, self.K, self.STAGES, self.BLOCK_M, COLUMNS, self.BLOCK_K,
                    self.TRANSPOSED, self.PROMOTED, self.DTYPE, HALF)  # fmt: skip


@gluon.jit
def open_ring(a, b, out, K, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr):
    """An empty ring for the blocks of `a` and `b`, and for finished tiles of the dtype of `out`."""
    BLOCK_M: gl.constexpr = a.block_shape[0]
    BLOCK_K: gl.constexpr = a.block_shape[1]
    BLOCK_N: gl.constexpr = b.block_shape[0 if TRANSPOSED else 1]
    a_slots = gl.allocate_shared_memory(a.dtype, [STAGES, BLOCK_M, BLOCK_K], a.layout)
    if TRANSPOSED:
        b_slots = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_N, BLOCK_K], b.layout)
    else:
        b_slots = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_K, BLOCK_N], b.layout)
    HALF: gl.constexpr = half_layout(BLOCK_M // CONSUMERS, BLOCK_N, out.dtype)
    PROMOTES: gl.constexpr = itemsize(a.dtype) == 1 and BLOCK_N <= PROMOTED
    return Ring(a_slots, b_slots, open_barriers(STAGES), open_barriers(STAGES, CONSUMERS), K, STAGES,
                BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, PROMOTES, out.dtype, HALF)  # fmt: skip


@aggregate
class Outbox:
    """Room for the first consumer's half of a finished tile, and the barriers between consumers and storer."""

    room: gl.shared_memory_descriptor  # (BLOCK_M / 2, BLOCK_N)
    ready: gl.shared_memory_descriptor  # a barrier a consumer: its half is there
    taken: gl.shared_memory_descriptor  # a barrier: the room is free
    ahead: gl.shared_memory_descriptor  # two barriers, for `in_turn`

    @gluon.jit
    def in_turn(self, CONSUMER: gl.constexpr, n):
        """The second consumer begins its n-th tile behind the first, which nothing but the time depends on: side by
        side they would finish their halves at once, and the tensor cores would stand still. Two barriers, because the
        first may be two tiles ahead."""
        if CONSUMER == 0:
            mbarrier.arrive(self.ahead.index(n & 1), count=1)
        else:
            mbarrier.wait(self.ahead.index(n & 1), (n >> 1) & 1)

    @gluon.jit
    def take(self, CONSUMER: gl.constexpr, step, n, ring):
        """For the storer: a consumer's half of this program's n-th tile, once it is there. The second one's is in the
        slot lent at `step`."""
        room = self.room
        mbarrier.wait(self.ready.index(CONSUMER), n & 1)
        if CONSUMER == 1:
            room = ring.half(step)
        return room

    @gluon.jit
    def sent(self, step, ring, STORES: gl.constexpr):
        """For the storer: the room is free, and then the slot lent at `step`. What it has sent since `take`, the first
        half and then the second one in STORES copies, has been read by then. The ring is short of a slot until then:
        while all programs send, for as long as half a tile takes on the links."""
        tma.store_wait(STORES)
        mbarrier.arrive(self.taken.index(0), count=1)
        tma.store_wait(0)
        ring.free(step, CONSUMERS)

    @gluon.jit
    def narrowed(self, ring):
        """The same outbox for the tiles of a narrowed ring."""
        return Outbox(first_columns(self.room, ring.BLOCK_N), self.ready, self.taken, self.ahead)


@gluon.jit
def open_outbox(ring):
    """An empty outbox for the tiles of a ring."""
    room = gl.allocate_shared_memory(ring.DTYPE, [ring.BLOCK_M // CONSUMERS, ring.BLOCK_N], ring.HALF)
    return Outbox(room, open_barriers(CONSUMERS), open_barriers(1), open_barriers(2))


@aggregate
class Finish:
    """What is done to a tile before it is rounded: scales by every rank, the rest by the rank that finishes it. A
    column of the result takes columns_each(EPILOGUE) of the tile's."""

    scales: Scaling  # or None
    bias: gl.tensor  # pointer to N values, or None
    N: gl.tensor
    EPILOGUE: gl.constexpr

    @gluon.jit
    def store(self, part, where, mine, col):
        """Columns of a tile, fp32, from column `col` on, into shared memory; with bias and epilogue if this rank
        finishes it. Not yet for TMA to see."""
        if columns_each(self.EPILOGUE) > 1:  # not of sums: this rank finishes every tile
            part = self.finished(part, col).to(where.dtype)
            part = gl.convert_layout(part, accumulator(where.shape[1], gl.num_warps()))
        elif (self.bias is not None) or (self.EPILOGUE != "none"):
            if mine:
                part = self.finished(part, col)
        where.store(part.to(where.dtype))

    @gluon.jit
    def finished(self, part, col):
        """The same columns with bias and epilogue."""
        if self.bias is not None:
            cols = col + gl.arange(0, part.shape[1], layout=gl.SliceLayout(0, part.type.layout))
            part += gl.load(self.bias + cols, mask=cols < self.N, other=0).to(gl.float32)[None, :]
        return activate(part, self.EPILOGUE)


@aggregate
class Signals:
    """The counters of a launch: each grows by the same number every launch, so it is waited for by the epoch."""

    ptr: gl.tensor  # int32, on every rank
    epoch: gl.tensor  # of this launch: 1, 2, ...
    world: gl.tuple


# ------------------------------------------------------------------------------------------------------ consumers
@gluon.jit
def consume(CONSUMER: gl.constexpr, step, n, order, ring, outbox, finish, PARTIALS: gl.constexpr):
    """A consumer, from a step of the ring and hand-over n on, for every tile of `order` that is this program's; returns
    the next of both. To a tile that this rank finishes PARTIALS partial sums are added, which the loader has put behind
    it; the others go out as they are."""
    steps = ring.steps()
    begin = order.first()
    # One number: of two that come out of the loop in `multiply`, Triton's loop-aware CSE takes one for the first's.
    following = begin
    if begin < order.end():
        following = order.column(begin)
    for t in range(begin, order.end(), gl.num_programs(0)):
        column = following
        after = gl.where(t + gl.num_programs(0) < order.end(), t + gl.num_programs(0), t)
        if column < 0:
            following = order.column(after)
        else:
            if ring.PROMOTED:
                half, following = multiply_promoted(CONSUMER, step, n, column, after, order, ring, outbox)
            else:
                half, following = multiply(CONSUMER, step, n, column, after, order, ring, outbox)
            step += steps
            if finish.scales is not None:
                half = finish.scales.applied(half, CONSUMER, t, (column >> 1) * ring.BLOCK_N, finish.N, order)
            mine = column & 1
            if PARTIALS > 0:
                # In steps of K, which LLVM does not know. Of a loop that runs once at most it makes a branch, and takes
                # a second to merge the 128 values of a thread behind that.
                for _ in range(0, mine * PARTIALS * ring.K, ring.K):
                    half = ring.add_partial(step, half, CONSUMER)
                    step += CONSUMERS
            hand_over(CONSUMER, half, step, n, column, ring, outbox, finish)
            step += 1
            n += 1
    return step, n


@gluon.jit
def consume_all(CONSUMER: gl.constexpr, order, ring, outbox, finish, PARTIALS: gl.constexpr):
    """A consumer, for all tiles of `order` that are this program's."""
    step = 0
    n = 0
    consume(CONSUMER, step, n, order, ring, outbox, finish, PARTIALS)


@gluon.jit
def multiply(CONSUMER: gl.constexpr, step, n, following, after, order, ring, outbox):
    """A consumer's half of this program's n-th tile, fp32: the product of the ring's slots from `step` on. One product
    is in flight while the next begins; a slot is free when the one after it has begun. And order.column(after) in place
    of `following`: it divides, which takes long, so while the first product is in flight."""
    steps = ring.steps()
    ROWS: gl.constexpr = ring.BLOCK_M // CONSUMERS
    LAYOUT: gl.constexpr = accumulator(ring.BLOCK_N, gl.num_warps(), itemsize(ring.a.dtype))
    acc = gl.zeros((ROWS, ring.BLOCK_N), gl.float32, LAYOUT)
    outbox.in_turn(CONSUMER, n)
    for k in range(steps):
        slot = ring.await_full(step)
        y = ring.b_slot(slot)
        if ring.TRANSPOSED:
            y = y.permute([1, 0])
        acc = warpgroup_mma(ring.a.index(slot).slice(CONSUMER * ROWS, ROWS), y, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        if k > 0:
            ring.free(step - 1, 1)
        else:
            following = order.column(after)
        step += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    ring.free(step - 1, 1)
    return acc, following


@gluon.jit
def multiply_promoted(CONSUMER: gl.constexpr, step, n, following, after, order, ring, outbox):
    """As `multiply`, but the products of SUMMED steps are added up in the tensor cores, and these sums in fp32
    registers. Meanwhile the tensor cores have the other consumer's products."""
    steps = ring.steps()
    ROWS: gl.constexpr = ring.BLOCK_M // CONSUMERS
    LAYOUT: gl.constexpr = accumulator(ring.BLOCK_N, gl.num_warps(), itemsize(ring.a.dtype))
    acc = gl.zeros((ROWS, ring.BLOCK_N), gl.float32, LAYOUT)
    part = gl.zeros((ROWS, ring.BLOCK_N), gl.float32, LAYOUT)
    outbox.in_turn(CONSUMER, n)
    for first in range(0, steps, SUMMED):
        for k in range(first, gl.minimum(first + SUMMED, steps)):
            slot = ring.await_full(step)
            x = ring.a.index(slot).slice(CONSUMER * ROWS, ROWS)
            part = warpgroup_mma(x, ring.b_slot(slot).permute([1, 0]), part, use_acc=k > first, is_async=True)
            part = warpgroup_mma_wait(1, deps=(part,))
            if k > first:
                ring.free(step - 1, 1)
            elif first == 0:
                following = order.column(after)
            step += 1
        part = warpgroup_mma_wait(0, deps=(part,))
        ring.free(step - 1, 1)
        acc += part
    return acc, following


@gluon.jit
def hand_over(CONSUMER: gl.constexpr, half, step, n, column, ring, outbox, finish):
    """A consumer's half, fp32, of this program's n-th tile, once the tile before has been taken: the first one's into
    the outbox, the second one's into the slot lent at `step`. Then the storer is told. column: as order.column."""
    room = outbox.room
    mine = column & 1
    col = (column >> 1) * ring.BLOCK_N
    mbarrier.wait(outbox.taken.index(0), (n & 1) ^ 1)
    if CONSUMER == 1:
        ring.await_full(step)
        room = ring.half(step)
    COLUMNS: gl.constexpr = ring.BLOCK_N // columns_each(finish.EPILOGUE)
    room = first_columns(room, COLUMNS)
    if COLUMNS < 2 * SWIZZLED:
        finish.store(half, room, mine, col)
    else:  # not all of it at once, for want of registers
        PART: gl.constexpr = ring.BLOCK_N // 2
        LAYOUT: gl.constexpr = accumulator(PART, gl.num_warps())
        parts = half.reshape([ring.BLOCK_M // CONSUMERS, 2, PART]).permute(0, 2, 1).split()
        for p in gl.static_range(2):
            place = room.slice(p * (COLUMNS // 2), COLUMNS // 2, 1)
            finish.store(gl.convert_layout(parts[p], LAYOUT), place, mine, col + p * PART)
    fence_async_shared()
    mbarrier.arrive(outbox.ready.index(CONSUMER), count=1)


# ---------------------------------------------------------------------------------------------------------- peers
@gluon.jit
def publish(world):
    """Before a relaxed signal: what this warp has stored by TMA has landed, for all ranks."""
    ptx.drain(world)
    ptx.cta_barrier()
    ptx.fence()


@aggregate
class Peers:
    """A tensor of every other rank, at the same place of the heap."""

    tensors: gl.tuple  # descriptors, of ranks rank + 1, rank + 2, ...; those past SIZE - 1 are not used
    SIZE: gl.constexpr

    @gluon.jit
    def store_all(self, at, part):
        """A block to the same place on every other rank."""
        for d in gl.static_range(self.SIZE - 1):
            tma.async_store(self.tensors[d], at, part)

    @gluon.jit
    def store(self, d, at, part):
        """A block to rank + d."""
        for p in gl.static_range(1, self.SIZE):
            if d == p:
                tma.async_store(self.tensors[p - 1], at, part)


@gluon.jit
def turn(t, count, lag, SIZE: gl.constexpr):
    """What a rank computes t-th, where every rank owns `count` tiles: (d, index), tile `index` of those of rank + d.
    Tile by tile, rank + 1's, rank + 2's, ... and its own, which is `lag` tiles behind: until then the others' partial
    sums of it are on their way. Where `lag` is all of them, all of rank + 1's, then all of rank + 2's, ..., and its
    own last: what is computed at a time then has more rows and columns in common."""
    PEERS: gl.constexpr = SIZE - 1
    head = lag * PEERS
    tail = count * SIZE - lag
    g = (t - head) // SIZE
    # Moved on from round to round, because else, where SIZE divides the programs, some would have only tiles of mine.
    place = (t - head + (head + g * SIZE) // gl.num_programs(0)) % SIZE
    mine = (t >= tail) | ((t >= head) & (place == PEERS))
    n = gl.where(t < head, t, head + g * PEERS + place)
    others: gl.constexpr = max(PEERS, 1)
    d = gl.where(mine, 0, 1 + gl.where(lag < count, n % others, n // count))
    index = gl.where(lag < count, n // others, n % count)
    index = gl.where(mine, gl.where(t < tail, g, t - count * PEERS), index)
    return d, index
