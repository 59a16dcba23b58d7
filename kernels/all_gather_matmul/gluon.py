"""All-gather + matmul in one Gluon kernel: A is pushed by a few programs before they compute, or by copy engines.

As push in all_gather_matmul, with these differences. The first `num_comm` programs push by TMA, one load and then a
store to each peer: their loader and their storer, each some chunks, through the slots of the ring, which the product
does not need yet. A chunk's signal waits until the chunk has arrived; one of the two is then still sending. A program
that pushes beside its product computes slowly, because its loads queue behind stores that the links hold back, and the
slowest program is the time: so they push first, wait for nothing while they do, and then compute like the others. Until
then the others compute alone, for `rounds_alone` rounds of tiles: which tile is whose is known beforehand. After
`whole_rounds` rounds, or where there is no whole one left, tiles are cut in PIECES: so all programs have a part of the
last round.

A row block is signalled in chunks of CHUNK columns, and the loader waits chunk by chunk, so a tile begins when its
first columns are here. And the order of pushing follows the order of computing: push_rows row blocks at a time, chunk
by chunk. What one TMA operation moves is one piece of memory in the inbox.

COPIED, as copy in all_gather_matmul: no program pushes, and push_rows row blocks of a peer come at once, or chunk by
chunk of their columns, where tiles had better begin before all of a shard is here. The links are faster then, and the
product is, but each copy costs time before it begins: so for large ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

import pkt.language as pl
from pkt.language import ptx
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..declaration import Launch
from ..shared import copies as _copies
from ..shared.checks import stored
from ..shared.gluon_fits import check_tiles
from ..shared.gluon_host import (
    CONSUMER_WARPS,
    descriptor,
    half_block,
    layout,
    peer_descriptors,
    weights_descriptor,
)
from ..shared.gluon_warps import (
    CONSUMERS,
    REGISTERS,
    consume,
    first_tile,
    grouped,
    lend,
    load_step,
    narrowed,
    open_barriers,
    open_outbox,
    open_ring,
    take_over,
    taken_over,
    to_peers,
)
from ..shared.grid import num_programs
from ..shared.tile_product import Epilogue, Tiles
from .rules import CALL, PushPlan, check_plan

LANES = gl.constexpr(2)
"""Warps of a program that push."""


# -------------------------------------------------------------------------------------------------------- order
@gluon.jit
def _tile(t, rank, num_m, num_n, SIZE: gl.constexpr, GROUP: gl.constexpr, push_rows, COPIED: gl.constexpr):
    """Tile t: (source, row block, column). The own shard first; then, push_rows row blocks of every peer at a time, in
    the order in which they come: pushed to all peers at once, or copied to one after the other."""
    own = t < num_m * num_n
    own_i, own_j = grouped(gl.minimum(t, num_m * num_n - 1), num_m, num_n, GROUP)
    others: gl.constexpr = max(SIZE - 1, 1)
    q = gl.maximum(t - num_m * num_n, 0)
    tiles = others * num_n * push_rows
    first = (q // tiles) * push_rows
    rows = gl.minimum(num_m - first, push_rows)
    if COPIED:
        turn = (q % tiles) // (rows * num_n)
        source = gl.where(own, rank, (rank + others - turn) % SIZE)
        i, j = grouped((q % tiles) % (rows * num_n), rows, num_n, GROUP)
    else:
        cells = rows * others
        source = gl.where(own, rank, (rank + 1 + (q % tiles) % cells % others) % SIZE)
        i = (q % tiles) % cells // others
        j = (q % tiles) // cells
    i = gl.where(own, own_i, first + i)
    j = gl.where(own, own_j, j)
    return source, i, j, own


@gluon.jit
def _share(tiles, num_comm, rounds_alone, whole_rounds, PIECES: gl.constexpr):
    """Rounds of one tile a program: `whole_rounds` of them of whole tiles, if there are so many, then those of tiles
    cut in PIECES. The programs that push are left out of the first `rounds_alone` rounds.

    Returns, of the whole tiles and of the parts, where this program begins, the end, and how many rounds those that
    push are left out of; and how many tiles are cut. A place in the rounds, and its tile by `_place`, is
    round * num_programs + first_tile()."""
    programs = gl.num_programs(0)
    computing = programs - num_comm
    alone = gl.minimum(gl.minimum(rounds_alone, whole_rounds), tiles // gl.maximum(computing, 1))
    left = tiles - alone * computing
    joined = gl.minimum(whole_rounds - alone, left // programs)
    cut = left - joined * programs if PIECES > 1 else 0
    late = gl.minimum(gl.maximum(rounds_alone - alone - joined, 0), cut * PIECES // gl.maximum(computing, 1))
    pushes = gl.program_id(0) < num_comm
    begin = gl.where(pushes, alone * programs, 0) + first_tile()
    begin_part = gl.where(pushes, late * programs, 0) + first_tile()
    return begin, tiles - cut + alone * num_comm, alone, begin_part, cut * PIECES + late * num_comm, late, cut


@gluon.jit
def _place(v, first, rounds_alone, num_comm, PARTS: gl.constexpr, order):
    """Place v in the rounds of tiles of PARTS columns from tile `first` on: `_tile` of it, whose other arguments are
    `order`. In the first `rounds_alone` rounds the places of the `num_comm` programs are no tiles."""
    v -= gl.minimum(v // gl.num_programs(0), rounds_alone) * num_comm
    source, i, j, own = _tile(first + v // PARTS, *order)
    return source, i, j * PARTS + v % PARTS, own


@gluon.jit
def _column(v, first, rounds_alone, num_comm, PARTS: gl.constexpr, order):
    """For `consume`: every tile is mine."""
    _, _, j, _ = _place(v, first, rounds_alone, num_comm, PARTS, order)
    return 2 * j + 1


@gluon.jit
def _task(t, num_m, chunks, push_rows):
    """Task t of pushing: (row block, chunk). push_rows row blocks at a time; of those chunk by chunk."""
    first = (t // (push_rows * chunks)) * push_rows
    rows = gl.minimum(num_m - first, push_rows)
    t = t % (push_rows * chunks)
    return first + t % rows, t // rows


# ------------------------------------------------------------------------------------------------------ pushing
@gluon.jit
def _load_unit(
    u, i, chunk, mine, first, step, a, buffers, bars, num_m, chunks,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, UNITS: gl.constexpr, BUFFERS: gl.constexpr, push_rows,
):  # fmt: skip
    """Unit u, if there is one, from this rank's shard into its buffer; `i` and `chunk`: the row block and chunk of the
    unit before, and then of this one. They take divisions, so they are found only where a task begins."""
    if u < mine:
        if u % UNITS == 0:
            i, chunk = _task(first + (u // UNITS) * step, num_m, chunks, push_rows)
        at = [i * BLOCK_M, (chunk * UNITS + u % UNITS) * BLOCK_K]
        mbarrier.expect(bars.index(u % BUFFERS), BLOCK_M * BLOCK_K * 2)
        tma.async_copy_global_to_shared(a, at, bars.index(u % BUFFERS), buffers.index(u % BUFFERS))
    return i, chunk


@gluon.jit
def _push(
    lane, a, peers, buffers, bars, ready_ptr, m, K, num_comm, epoch, world,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, CHUNK: gl.constexpr, push_rows,
):  # fmt: skip
    """The tasks of lane `lane` of this program: a chunk of a row block each, in units of BLOCK_K columns. One half of
    its buffers is being loaded, the other stored; a chunk is signalled when LAG units more have been begun, with which
    the links are in use until then. Waits for nothing that another program or rank does; when it returns, its buffers
    are free."""
    SIZE: gl.constexpr = world.size
    PEERS: gl.constexpr = SIZE - 1
    UNITS: gl.constexpr = CHUNK // BLOCK_K
    BUFFERS: gl.constexpr = buffers.shape[0]
    STORING: gl.constexpr = BUFFERS // 2
    LAG: gl.constexpr = min(STORING, UNITS)
    num_m = gl.cdiv(m, BLOCK_M)
    chunks = gl.cdiv(K, CHUNK)
    rank = gl.cast(world.rank, gl.int32)
    first = gl.program_id(0) * LANES + lane
    step = num_comm * LANES
    mine = gl.cdiv(gl.maximum(num_m * chunks - first, 0), step) * UNITS
    shard = rank * num_m * chunks
    block0 = (epoch & 1) * SIZE * num_m * chunks * UNITS
    load_i, load_chunk = rank, rank  # whatever: the first unit has its own, and so have the next two
    place, before = shard, rank
    for u in gl.static_range(BUFFERS - STORING):
        load_i, load_chunk = _load_unit(u, load_i, load_chunk, mine, first, step, a, buffers, bars, num_m, chunks,
                                        BLOCK_M, BLOCK_K, UNITS, BUFFERS, push_rows)  # fmt: skip
    for u in range(gl.where(mine > 0, mine + LAG, 0)):
        if u < mine:
            if u % UNITS == 0:
                before = place
                i, chunk = _task(first + (u // UNITS) * step, num_m, chunks, push_rows)
                place = shard + i * chunks + chunk
            mbarrier.wait(bars.index(u % BUFFERS), (u // BUFFERS) & 1)
            at = [(block0 + place * UNITS + u % UNITS) * BLOCK_M, 0]
            to_peers(peers, at, buffers.index(u % BUFFERS), SIZE)
            tma.store_wait(STORING * PEERS)  # the buffer that is loaded next has been read
            load_i, load_chunk = _load_unit(
                u + BUFFERS - STORING, load_i, load_chunk, mine, first, step, a, buffers, bars, num_m, chunks,
                BLOCK_M, BLOCK_K, UNITS, BUFFERS, push_rows,
            )  # fmt: skip
        done = u - LAG
        if (done >= 0) & (done % UNITS == UNITS - 1):
            counter = ready_ptr + place  # behind the last task; else the next one has begun
            if u < mine:
                ptx.drain(world, LAG * PEERS)
                counter = ready_ptr + before
            else:
                ptx.drain(world)
            ptx.cta_barrier()
            ptx.fence()
            for d in gl.static_range(1, SIZE):
                gl.atomic_add(pl.peer(counter, (rank + d) % SIZE, world), 1, sem="relaxed", scope="sys")


# ------------------------------------------------------------------------------------------------------- warps
@gluon.jit
def _load_share(
    it, begin, end, where, push, a, inbox, b, ring, ready_ptr, num_m, K, epoch, world, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CHUNK: gl.constexpr,
    COPIED: gl.constexpr, LEAVE_OUT: gl.constexpr,
):  # fmt: skip
    chunks = gl.cdiv(K, CHUNK)
    together = push[2] if COPIED else 1  # row blocks that a counter stands for
    counters = gl.cdiv(num_m, together) * chunks  # of a shard
    for v in range(begin, end, gl.num_programs(0)):
        source, i, j, own = _place(v, *where)
        block = (((epoch & 1) * world.size + source) * num_m + i) * chunks * (CHUNK // BLOCK_K)
        for chunk in range(chunks):
            start = chunk * CHUNK
            if LEAVE_OUT != "wait":
                if not own:
                    pl.wait(ready_ptr + source * counters + i // together * chunks + chunk, epoch, world)
            for k in range(start, gl.minimum(start + CHUNK, K), BLOCK_K):
                if own:
                    load_step(it, a, [i * BLOCK_M, k], b, j * BLOCK_N, k, ring, TRANSPOSED,
                              BLOCK_M, BLOCK_N, BLOCK_K, STAGES)  # fmt: skip
                elif COPIED:
                    load_step(it, inbox, [source * push[0] + i * BLOCK_M, k], b, j * BLOCK_N, k, ring, TRANSPOSED,
                              BLOCK_M, BLOCK_N, BLOCK_K, STAGES)  # fmt: skip
                else:
                    at = [(block + k // BLOCK_K) * BLOCK_M, 0]
                    load_step(it, inbox, at, b, j * BLOCK_N, k, ring, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
                it += 1
        lend(it, ring, STAGES)
        it += 1
    return it


@gluon.jit
def _load(
    push, rounds, left, a, inbox, b, b_part, ring, narrow, ready_ptr, num_m, K, epoch, world, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr,
    CHUNK: gl.constexpr, COPIED: gl.constexpr, LEAVE_OUT: gl.constexpr,
):  # fmt: skip
    if (world.size > 1) and (not COPIED):
        m, num_comm, push_rows, peers, lanes, pushed = push
        if gl.program_id(0) < num_comm:
            _push(0, a, peers, *lanes[0], ready_ptr, m, K, num_comm, epoch, world, BLOCK_M, BLOCK_K, CHUNK, push_rows)
            mbarrier.wait(pushed.index(0), 0)
    it = 0
    it = _load_share(it, *rounds, push, a, inbox, b, ring, ready_ptr, num_m, K, epoch, world, TRANSPOSED,
                     BLOCK_M, BLOCK_N, BLOCK_K, STAGES, CHUNK, COPIED, LEAVE_OUT)  # fmt: skip
    if PIECES > 1:
        _load_share(it, *left, push, a, inbox, b_part, narrow, ready_ptr, num_m, K, epoch, world, TRANSPOSED,
                    BLOCK_M, BLOCK_N // PIECES, BLOCK_K, STAGES, CHUNK, COPIED, LEAVE_OUT)  # fmt: skip


@gluon.jit
def _compute(
    CONSUMER: gl.constexpr, rounds, left, ring, narrow, outbox, outbox_part, bias, N, K, COLUMN: gl.constexpr,
    EPILOGUE: gl.constexpr, HALF: gl.constexpr, HALF_PART: gl.constexpr, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    it = 0
    n = 0
    begin, end, where = rounds
    it, n = consume(CONSUMER, it, n, begin, end, ring, outbox, where, bias, N, K, COLUMN, 0, EPILOGUE, HALF, TRANSPOSED,
                    BLOCK_M, BLOCK_N, BLOCK_K, STAGES, WARPS)  # fmt: skip
    if PIECES > 1:
        begin, end, where = left
        consume(CONSUMER, it, n, begin, end, narrow, outbox_part, where, bias, N, K, COLUMN, 0, EPILOGUE, HALF_PART,
                TRANSPOSED, BLOCK_M, BLOCK_N // PIECES, BLOCK_K, STAGES, WARPS)  # fmt: skip


@gluon.jit
def _store_share(
    it, n, begin, end, where, c, ring, outbox, K, HALF: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    for v in range(begin, end, gl.num_programs(0)):
        source, i, j, _own = _place(v, *where)
        it += gl.cdiv(K, BLOCK_K)
        for h in gl.static_range(CONSUMERS):
            part = take_over(h, it, n, ring, outbox, HALF, BLOCK_M, BLOCK_N, STAGES)
            # Three dimensions: rows past the shard's end are cut, not written over the next shard's.
            part = part._reinterpret(part.dtype, [1, BLOCK_M // CONSUMERS, BLOCK_N], c.layout)
            tma.async_copy_shared_to_global(c, [source, i * BLOCK_M + h * (BLOCK_M // CONSUMERS), j * BLOCK_N], part)
        taken_over(it, ring, outbox, 1, STAGES)
        it += 1
        n += 1
    return it, n


@gluon.jit
def _store(
    push, rounds, left, a, c, c_part, ring, narrow, outbox, outbox_part, ready_ptr, K, epoch, world,
    HALF: gl.constexpr, HALF_PART: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, PIECES: gl.constexpr, CHUNK: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    if (world.size > 1) and (not COPIED):
        m, num_comm, push_rows, peers, lanes, pushed = push
        if gl.program_id(0) < num_comm:
            _push(1, a, peers, *lanes[1], ready_ptr, m, K, num_comm, epoch, world, BLOCK_M, BLOCK_K, CHUNK, push_rows)
            mbarrier.arrive(pushed.index(0), count=1)
    it = 0
    n = 0
    it, n = _store_share(it, n, *rounds, c, ring, outbox, K, HALF, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
    if PIECES > 1:
        _store_share(
            it, n, *left, c_part, narrow, outbox_part, K, HALF_PART, BLOCK_M, BLOCK_N // PIECES, BLOCK_K, STAGES
        )


# ------------------------------------------------------------------------------------------------------ kernel
@gluon.jit(do_not_specialize=["num_comm", "rounds_alone", "whole_rounds", "push_rows", "rows"])
def gluon_push_kernel(
    a,  # (m, K) this rank's shard, blocks of BLOCK_M x BLOCK_K
    inbox,  # (2 * size * blocks of a shard * BLOCK_M, BLOCK_K) this rank's, the same blocks, each one piece of memory,
    # which links and memory take fastest; halves by the parity of the launch. If COPIED (size * m, K)
    b,  # (K, N) this rank's, or (N, K) if TRANSPOSED, blocks of BLOCK_K and BLOCK_N
    b_part,  # the same, blocks of BLOCK_K and BLOCK_N / PIECES
    c,  # (size, m, N) this rank's, blocks of 1 x BLOCK_M / 2 x BLOCK_N
    c_part,  # the same, blocks of 1 x BLOCK_M / 2 x BLOCK_N / PIECES
    d1, d2, d3, d4, d5, d6, d7,  # the inboxes of ranks rank + 1, ...; those past size - 1 are not used
    ready_ptr,  # int32 (size, row blocks, chunks) on every rank; [r] counts how often rank r has pushed each chunk. If
    # COPIED, as _copies.Gathering has it
    bias,  # (N,) this rank's, or None
    m,
    N,
    K,
    num_comm,  # programs that push; 0 if COPIED
    rounds_alone,  # rounds of tiles that they are left out of
    whole_rounds,  # rounds before those of tiles that are cut
    push_rows,  # row blocks that are pushed, or copied, and computed together
    rows,  # m; 0 where, for measurements, nothing is computed
    world,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    PIECES: gl.constexpr, CHUNK: gl.constexpr, HALF: gl.constexpr, HALF_PART: gl.constexpr,
    TRANSPOSED: gl.constexpr, EPILOGUE: gl.constexpr,
    COPIED: gl.constexpr,  # by copy engines: this kernel only computes
    LEAVE_OUT: gl.constexpr,  # for measurements: "wait" is left out, "" nothing
    num_warps: gl.constexpr,
):  # fmt: skip
    """The module's kernel: shared memory, barriers, and who does what."""
    if COPIED:
        epoch = gl.load(ready_ptr + world.size * gl.cdiv(gl.cdiv(m, BLOCK_M), push_rows) * gl.cdiv(K, CHUNK))
    else:
        epoch = pl.epoch(ready_ptr, world)
    ring = open_ring(a, b, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
    narrow = narrowed(ring, b_part, TRANSPOSED, BLOCK_N, BLOCK_K, STAGES, PIECES)
    outbox = open_outbox(a.dtype, HALF, BLOCK_M, BLOCK_N)
    room, there, taken, ahead = outbox
    part = room._reinterpret(a.dtype, [PIECES, BLOCK_M // CONSUMERS, BLOCK_N // PIECES], HALF_PART).index(0)
    outbox_part = (part, there, taken, ahead)
    push = (m, num_comm, push_rows)
    if (world.size > 1) and (not COPIED):
        # The slots of the ring: the loader pushes with those for A, the storer with those for B.
        a_ring, b_ring, _, _ = ring
        BUFFERS: gl.constexpr = STAGES * BLOCK_N // BLOCK_M
        buffers = b_ring._reinterpret(a.dtype, [BUFFERS, BLOCK_M, BLOCK_K], a.layout)
        lanes = ((a_ring, open_barriers(STAGES)), (buffers, open_barriers(BUFFERS)))
        push = (m, num_comm, push_rows, (d1, d2, d3, d4, d5, d6, d7), lanes, open_barriers(1))
    num_m = gl.cdiv(rows, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    tiles = world.size * num_m * num_n
    begin, end, alone, begin_part, end_part, late, cut = _share(tiles, num_comm, rounds_alone, whole_rounds, PIECES)
    order = (gl.cast(world.rank, gl.int32), num_m, num_n, world.size, GROUP, push_rows, COPIED)
    rounds = (begin, end, (0, alone, num_comm, 1, order))
    left = (begin_part, end_part, (tiles - cut, late, num_comm, PIECES, order))
    COLUMN: gl.constexpr = _column
    gl.warp_specialize(
        [
            (_compute, (0, rounds, left, ring, narrow, outbox, outbox_part, bias, N, K, COLUMN, EPILOGUE, HALF,
                        HALF_PART, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PIECES, num_warps)),
            (_compute, (1, rounds, left, ring, narrow, outbox, outbox_part, bias, N, K, COLUMN, EPILOGUE, HALF,
                        HALF_PART, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PIECES, num_warps)),
            (_load, (push, rounds, left, a, inbox, b, b_part, ring, narrow, ready_ptr, num_m, K, epoch, world,
                     TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PIECES, CHUNK, COPIED, LEAVE_OUT)),
            (_store, (push, rounds, left, a, c, c_part, ring, narrow, outbox, outbox_part, ready_ptr, K, epoch, world,
                      HALF, HALF_PART, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PIECES, CHUNK, COPIED)),
        ],
        [num_warps, 1, 1],
        REGISTERS,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- host
ALL = 1 << 30
"""A chunk of all columns, whatever K, so that one compiled kernel serves."""


class _Way(NamedTuple):
    """Where the peers' shards come to this rank, and how it knows."""

    inbox: torch.Tensor
    peers: list[torch.Tensor]  # the inboxes of rank + 1, ..., that are written by the kernel
    ready: SymmetricTensor
    begin: Callable[[torch.Tensor], Callable[[], None]] | None  # as _copies.Gathering has it


def _pushed(world: World, m: int, K: int, dtype: torch.dtype, chunk: int, tiles: Tiles, leave_out: str) -> _Way:
    size, num_m, chunks = world.size, triton.cdiv(m, tiles.block_m), triton.cdiv(K, chunk)
    blocks = num_m * chunks * chunk // tiles.block_k

    def counters() -> SymmetricTensor:
        return signals(size * num_m * chunks, name=f"{CALL}.gluon.ready", world=world)

    def make() -> tuple[SymmetricTensor, SymmetricTensor]:
        shape = 2 * size * blocks * tiles.block_m, tiles.block_k
        return empty(*shape, dtype=dtype, name=f"{CALL}.gluon.inbox", world=world), counters()

    # What the counters count; so plans that differ otherwise share one workspace and its launches.
    counted = (m, K, dtype, tiles.block_m, chunk, num_programs(world, world.num_sms))
    inbox, ready = world.keep((CALL, "gluon", *counted), make)
    if leave_out:  # counters of its own, which may fall behind
        ready = world.keep((CALL, leave_out, *counted), counters)
    return _Way(inbox.plain(), [inbox.peer((world.rank + d) % size) for d in range(1, size)], ready, None)


def _copied(world: World, m: int, K: int, dtype: torch.dtype, rows: int, chunk: int, leave_out: str) -> _Way:
    inbox, ready, begin = _copies.gathering(world, m, K, dtype, rows, min(chunk, K))
    return _Way(inbox.plain().view(world.size * m, K), [], ready, None if leave_out == "push" else begin)


def push_launch(
    world: World,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    plan: PushPlan,
    tiles: Tiles,
    epilogue: Epilogue = "none",
    leave_out: str = "",
) -> Launch:
    """launch(a, b, out, bias), for tensors of the same facts as these: `out` (size * m, N) = the gathered `a` (m, K) @
    `b` (K, N), as all_gather_matmul(shard="rows"), whose checks of the operands come before. bf16 or fp16, rows at
    multiples of 16 bytes, on sm_90. Collective. leave_out: for measurements, "wait" or "product", or "push" for both
    waiting and pushing; the result is then nobody's. Raises ShapeError."""
    _, transposed = stored(b)
    check_tiles(CALL, tiles, world)
    check_plan(plan, tiles, world)
    (m, K), N, size, dtype = a.shape, b.shape[1], world.size, a.dtype
    num_m, num_n = triton.cdiv(m, tiles.block_m), triton.cdiv(N, tiles.block_n)
    programs, copied = num_programs(world, world.num_sms), plan.num_comm_sms == 0 and size > 1
    # Pushed: as many as the programs compute at a time.
    together = num_m if copied else triton.cdiv(programs, num_n * max(size - 1, 1))
    push_rows = min(plan.push_rows or together, num_m)
    columns = triton.cdiv(K, tiles.block_k) * tiles.block_k
    chunk = min(plan.chunk or columns, columns)
    num_comm = min(plan.num_comm_sms, programs) if size > 1 and leave_out != "push" else 0
    if copied:
        chunk = chunk if chunk < columns else ALL
        way = _copied(world, m, K, dtype, push_rows * tiles.block_m, chunk, leave_out)
    else:
        way = _pushed(world, m, K, dtype, chunk, tiles, leave_out)
    block = (tiles.block_m, tiles.block_k)
    inbox, targets = descriptor(way.inbox, block), peer_descriptors(way.peers, way.inbox, block)
    numbers = (m, N, K, num_comm, plan.rounds_alone, plan.whole_rounds, push_rows, 0 if leave_out == "product" else m)
    part = tiles._replace(block_n=tiles.block_n // plan.cut_last)
    constants = {
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "STAGES": tiles.num_stages,
        "GROUP": tiles.group, "PIECES": plan.cut_last, "CHUNK": chunk,
        "HALF": layout(dtype, *half_block(tiles)), "HALF_PART": layout(dtype, *half_block(part)),
        "TRANSPOSED": transposed, "EPILOGUE": epilogue, "COPIED": copied,
        "LEAVE_OUT": "wait" if leave_out in ("wait", "push") or size == 1 else "", "num_warps": CONSUMER_WARPS,
    }  # fmt: skip
    blocks_of_a, blocks_of_b, parts_of_b = (
        descriptor(a, block),
        weights_descriptor(b, tiles),
        weights_descriptor(b, part),
    )
    stacked = out.view(size, m, N)
    halves, half_parts = (descriptor(stacked, (1, *half_block(t))) for t in (tiles, part))

    start = cooperative_launch(world, gluon_push_kernel, (programs,), **constants)

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        blocks_of_a.base, blocks_of_b.base, parts_of_b.base = a, b, b
        halves.base = half_parts.base = out
        join = way.begin(a) if way.begin else None
        try:
            start(
                blocks_of_a, inbox, blocks_of_b, parts_of_b, halves, half_parts, *targets, way.ready, bias, *numbers,
                world.device,
            )  # fmt: skip
        finally:
            blocks_of_a.base = blocks_of_b.base = parts_of_b.base = halves.base = half_parts.base = None
            if join:
                join()
        return out

    return launch
