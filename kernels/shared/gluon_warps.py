"""What the warps of the Gluon forms of the fused matmuls do, with the tiles' way out left open.

A program has a loader warp, two consumers of four warps (a warpgroup each) and a storer warp, all running at once. What
is loaded goes through a ring of STAGES slots of BLOCK_K columns of A and BLOCK_K rows of B. Each consumer computes half
of a tile's rows; the second begins behind the first, and else they do not wait for each other, so while one finishes
its half the tensor cores have the other's products. The first's half goes through an outbox, the second's through a
slot that the ring lends, and the storer sends both where they belong while the next tile is computed. An outbox for all
of it would cost a slot for good: with three of them the loads of 128 x 256 tiles come late.
"""

from __future__ import annotations

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

from .tile_product import activate

CONSUMERS = gl.constexpr(2)
SWIZZLED = gl.constexpr(64)
"""Columns of 16 bits that shared memory holds side by side."""
REGISTERS = gl.constexpr([216, 64, 64])
"""A thread of the second consumer, the loader and the storer; the first has what is left."""


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
def open_ring(
    a, b, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The ring of a program, empty: slots for A and for B, and a barrier each for their being full and empty.
    TRANSPOSED, here and below: B lies in memory, and in the slots, as (N, K)."""
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES, BLOCK_M, BLOCK_K], a.layout)
    if TRANSPOSED:
        b_ring = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_N, BLOCK_K], b.layout)
    else:
        b_ring = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_K, BLOCK_N], b.layout)
    return a_ring, b_ring, open_barriers(STAGES), open_barriers(STAGES, CONSUMERS)


@gluon.jit
def narrowed(
    ring, b, TRANSPOSED: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """The same ring, for tiles of BLOCK_N / PIECES columns: each slot of B has the blocks of `b`, of which the first
    is used."""
    a_ring, b_ring, full, empty = ring
    if TRANSPOSED:
        b_ring = b_ring._reinterpret(b.dtype, [STAGES * PIECES, BLOCK_N // PIECES, BLOCK_K], b.layout)
    else:
        b_ring = b_ring._reinterpret(b.dtype, [STAGES * PIECES, BLOCK_K, BLOCK_N // PIECES], b.layout)
    return a_ring, b_ring, full, empty


@gluon.jit
def open_outbox(dtype: gl.constexpr, HALF: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Room for half a finished tile, and the barriers of `hand_over` (each half is there; the room is free) and of
    `in_turn`."""
    room = gl.allocate_shared_memory(dtype, [BLOCK_M // CONSUMERS, BLOCK_N], HALF)
    return room, open_barriers(CONSUMERS), open_barriers(1), open_barriers(2)


@gluon.jit
def slot_of_b(ring, slot, STAGES: gl.constexpr):
    """A slot's part for B."""
    _, b_ring, _, _ = ring
    return b_ring.index(slot * (b_ring.shape[0] // STAGES))


@gluon.jit
def open_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """`COUNT` barriers for so many arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def acquire(it, ring, STAGES: gl.constexpr):
    """The slot that step `it` of the ring fills next, once it is free."""
    _, _, _, empty = ring
    slot = it % STAGES
    mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
    return slot


@gluon.jit
def load_step(
    it, a, at, b, col, k, ring, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the slot of step `it` with A from `at` and B from (k, col)."""
    a_ring, _, full, _ = ring
    slot = acquire(it, ring, STAGES)
    mbarrier.expect(full.index(slot), (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
    tma.async_copy_global_to_shared(a, at, full.index(slot), a_ring.index(slot))
    if TRANSPOSED:
        tma.async_copy_global_to_shared(b, [col, k], full.index(slot), slot_of_b(ring, slot, STAGES))
    else:
        tma.async_copy_global_to_shared(b, [k, col], full.index(slot), slot_of_b(ring, slot, STAGES))


@gluon.jit
def lend(it, ring, STAGES: gl.constexpr):
    """Lend the slot of step `it`, empty, for half of a finished tile."""
    _, _, full, _ = ring
    mbarrier.arrive(full.index(acquire(it, ring, STAGES)), count=1)


@gluon.jit
def load_partial(
    it, desc, row, ring, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HALF: gl.constexpr
):
    """Fill the slots of steps `it` and `it` + 1 with the halves of a tile of partial sums, which begins at `row`."""
    _, _, full, _ = ring
    for h in gl.static_range(CONSUMERS):
        slot = acquire(it + h, ring, STAGES)
        mbarrier.expect(full.index(slot), BLOCK_M // CONSUMERS * BLOCK_N * 2)
        where = half_of_b(it + h, ring, BLOCK_M, BLOCK_N, STAGES, HALF)
        tma.async_copy_global_to_shared(desc, [row + h * (BLOCK_M // CONSUMERS), 0], full.index(slot), where)


@gluon.jit
def half_of_b(it, ring, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HALF: gl.constexpr):
    """A slot's part for B, seen as half a tile."""
    _, b_ring, _, _ = ring
    return slot_of_b(ring, it % STAGES, STAGES)._reinterpret(b_ring.dtype, [BLOCK_M // CONSUMERS, BLOCK_N], HALF)


@gluon.jit
def add_partial(
    CONSUMER: gl.constexpr, half, it, ring,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Half a tile, fp32, plus its half of what `load_partial` has put into the slots of steps `it` and `it` + 1, which
    are then free. Each consumer waits for both: a barrier that one had not waited for could be two phases on."""
    _, _, full, empty = ring
    for h in gl.static_range(CONSUMERS):
        mbarrier.wait(full.index((it + h) % STAGES), ((it + h) // STAGES) & 1)
        if h == CONSUMER:
            half += half_of_b(it + h, ring, BLOCK_M, BLOCK_N, STAGES, HALF).load(half.type.layout).to(gl.float32)
            fence_async_shared()
        mbarrier.arrive(empty.index((it + h) % STAGES), count=1)
    return half


@gluon.jit
def in_turn(CONSUMER: gl.constexpr, n, ahead):
    """The second consumer begins its n-th tile behind the first, which nothing but the time depends on: side by side
    they would finish their halves at once, and the tensor cores would stand still. Two barriers, because the first may
    be two tiles ahead."""
    if CONSUMER == 0:
        mbarrier.arrive(ahead.index(n & 1), count=1)
    else:
        mbarrier.wait(ahead.index(n & 1), (n >> 1) & 1)


@gluon.jit
def multiply(
    CONSUMER: gl.constexpr, it, n, steps, ring, ahead, place, t, where, PLACE: gl.constexpr, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A consumer's half of the product of `steps` slots of the ring from step `it` on, fp32. One product is in flight
    while the next begins; a slot is free when the one after it has begun. And PLACE(t, *where), in the stead of
    `place`: it divides, which takes long, so while the first product is in flight."""
    a_ring, _, full, empty = ring
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_N, 16]
    )
    acc = gl.zeros((ROWS, BLOCK_N), gl.float32, LAYOUT)
    in_turn(CONSUMER, n, ahead)
    for k in range(steps):
        slot = it % STAGES
        mbarrier.wait(full.index(slot), (it // STAGES) & 1)
        y = slot_of_b(ring, slot, STAGES)
        if TRANSPOSED:
            y = y.permute([1, 0])
        acc = warpgroup_mma(a_ring.index(slot).slice(CONSUMER * ROWS, ROWS), y, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        if k > 0:
            mbarrier.arrive(empty.index((it - 1) % STAGES), count=1)
        else:
            place = PLACE(t, *where)
        it += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((it - 1) % STAGES), count=1)
    return acc, place


@gluon.jit
def consume(
    CONSUMER: gl.constexpr, it, n, begin, end, ring, outbox, where, bias, N, K, PLACE: gl.constexpr,
    PARTIALS: gl.constexpr, EPILOGUE: gl.constexpr, HALF: gl.constexpr, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One consumer, from step `it` of the ring and hand-over n on, for every tile from `begin` to `end` that is
    this program's; returns the next of both. PLACE(t, *where): tile t's column of tiles times 2, plus 1 if it is mine
    to finish; below zero where there is none. With PARTIALS, to a tile of mine so many are added that the loader has
    put behind it; the others go out as they are."""
    steps = gl.cdiv(K, BLOCK_K)
    _room, _ready, _taken, ahead = outbox
    # One number: of two that come out of the loop in `multiply`, Triton's loop-aware CSE takes one for the first's.
    following = begin
    if begin < end:
        following = PLACE(begin, *where)
    for t in range(begin, end, gl.num_programs(0)):
        place = following
        after = gl.where(t + gl.num_programs(0) < end, t + gl.num_programs(0), t)
        if place < 0:
            following = PLACE(after, *where)
        else:
            half, following = multiply(
                CONSUMER, it, n, steps, ring, ahead, place, after, where, PLACE, TRANSPOSED,
                BLOCK_M, BLOCK_N, STAGES, WARPS,
            )  # fmt: skip
            it += steps
            mine = place & 1
            if PARTIALS > 0:
                for _ in range(mine * PARTIALS):
                    half = add_partial(CONSUMER, half, it, ring, BLOCK_M, BLOCK_N, STAGES, HALF)
                    it += CONSUMERS
            hand_over(CONSUMER, half, it, n, ring, outbox, mine, bias, (place >> 1) * BLOCK_N, N, EPILOGUE, HALF,
                      BLOCK_M, BLOCK_N, STAGES, WARPS)  # fmt: skip
            it += 1
            n += 1
    return it, n


@gluon.jit
def consume_all(
    CONSUMER: gl.constexpr, tiles, ring, outbox, where, bias, N, K, PLACE: gl.constexpr, PARTIALS: gl.constexpr,
    EPILOGUE: gl.constexpr, HALF: gl.constexpr, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One consumer, for this program's share of `tiles`."""
    it = 0
    n = 0
    consume(CONSUMER, it, n, first_tile(), tiles, ring, outbox, where, bias, N, K, PLACE, PARTIALS, EPILOGUE, HALF,
            TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, WARPS)  # fmt: skip


@gluon.jit
def hand_over(
    CONSUMER: gl.constexpr, half, it, n, ring, outbox, mine, bias, col, N, EPILOGUE: gl.constexpr, HALF: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A consumer's half, fp32, of this program's n-th tile, whose first column is `col`, once the tile before has been
    taken: the first's into the outbox, the second's into the slot lent at step `it`. Then the storer is told."""
    _, _, full, _ = ring
    room, ready, taken, _ = outbox
    mbarrier.wait(taken.index(0), (n & 1) ^ 1)
    if CONSUMER == 1:
        mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)
        room = half_of_b(it, ring, BLOCK_M, BLOCK_N, STAGES, HALF)
    if BLOCK_N < 2 * SWIZZLED:
        store_finished(half, room, mine, bias, col, N, EPILOGUE, BLOCK_N)
    else:  # not all of it at once, for want of registers
        PART: gl.constexpr = BLOCK_N // 2
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, PART, 16]
        )
        parts = half.reshape([BLOCK_M // CONSUMERS, 2, PART]).permute(0, 2, 1).split()
        for p in gl.static_range(2):
            store_finished(gl.convert_layout(parts[p], LAYOUT), room.slice(p * PART, PART, 1), mine, bias,
                           col + p * PART, N, EPILOGUE, PART)  # fmt: skip
    fence_async_shared()
    mbarrier.arrive(ready.index(CONSUMER), count=1)


@gluon.jit
def store_finished(part, where, mine, bias, col, N, EPILOGUE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Columns of a tile, fp32, into shared memory; with bias and epilogue if it is mine to finish. Not yet for TMA to
    see."""
    if (bias is not None) or (EPILOGUE != "none"):
        if mine:
            if bias is not None:
                cols = col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, part.type.layout))
                part += gl.load(bias + cols, mask=cols < N, other=0).to(gl.float32)[None, :]
            part = activate(part, EPILOGUE)
    where.store(part.to(where.dtype))


@gluon.jit
def take_over(
    CONSUMER: gl.constexpr, it, n, ring, outbox, HALF: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The storer's side of `hand_over`: that half of the tile, once it is there."""
    room, ready, _, _ = outbox
    mbarrier.wait(ready.index(CONSUMER), n & 1)
    if CONSUMER == 1:
        room = half_of_b(it, ring, BLOCK_M, BLOCK_N, STAGES, HALF)
    return room


@gluon.jit
def taken_over(it, ring, outbox, STORES: gl.constexpr, STAGES: gl.constexpr):
    """What the storer has sent since `take_over`, the first half and then the second one in STORES copies, has been
    read: the outbox is free, and then the slot. The ring is short of a slot until then, which while all programs send
    is as long as half a tile takes on the links."""
    _, _, _, empty = ring
    _, _, taken, _ = outbox
    tma.store_wait(STORES)
    mbarrier.arrive(taken.index(0), count=1)
    tma.store_wait(0)
    mbarrier.arrive(empty.index(it % STAGES), count=CONSUMERS)


@gluon.jit
def publish(world):
    """Before a relaxed signal: what this warp has stored by TMA has landed, for all ranks."""
    ptx.drain(world)
    ptx.cta_barrier()
    ptx.fence()


@gluon.jit
def to_peers(peers, at, part, SIZE: gl.constexpr):
    """A block to the same place on every other rank."""
    for d in gl.static_range(SIZE - 1):
        tma.async_copy_shared_to_global(peers[d], at, part)


@gluon.jit
def to_peer(peers, d, at, part, SIZE: gl.constexpr):
    """A block to rank + d."""
    for p in gl.static_range(1, SIZE):
        if d == p:
            tma.async_copy_shared_to_global(peers[p - 1], at, part)


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
