"""All-gather + matmul in one Gluon kernel: a few programs push A before they compute, or copy engines move it.

The first `num_comm` programs push by TMA: one load, and then a store to each peer. The loader and the storer of such a
program push some chunks each, through the slots of the ring, which the product does not need yet. A chunk's signal
waits until the chunk has arrived; meanwhile the other of the two warps is still sending.

A program that pushes beside its product computes slowly, because its loads queue behind stores that the links hold
back; and the slowest program decides the time. So these programs push first, wait for nothing while they do, and then
compute like the others. `gluon_order` deals the tiles out beforehand.

A row block is signalled in chunks of CHUNK columns. The loader waits chunk by chunk, so a tile begins when its first
columns are here. The order of pushing follows the order of computing: push_rows row blocks at a time, chunk by chunk.
One TMA operation moves one piece of memory in the inbox.

COPIED: no program pushes. Copy engines bring push_rows row blocks of a peer at once, or a chunk of their columns at a
time where tiles had better begin before a whole shard is here. Links and product are faster then, but each copy costs
time before it begins: so this is for large products.

GATHERED: the launch before has gathered A, for another weight. Nothing is pushed or waited for.

Where A is to be kept, two more warps of each program copy it as it arrives: the keeper, in `gluon_keep`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import pkt.language as pl
from pkt.language import ptx, sync
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.launch.replay import replayed
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..declaration import Launch
from ..shared import gluon_tma as tma
from ..shared.copies import gathering
from ..shared.gluon_aggregate import aggregate
from ..shared.gluon_host import (
    CONSUMER_WARPS,
    descriptor,
    everywhere,
    half_block,
    here,
    kernel_constants,
    weights_descriptor,
)
from ..shared.gluon_scales import exchange_scales
from ..shared.gluon_tma import viewed
from ..shared.gluon_warps import (
    CONSUMERS,
    REGISTERS,
    Finish,
    Outbox,
    Peers,
    Ring,
    Signals,
    Sizes,
    consume,
    first_columns,
    itemsize,
    open_barriers,
    open_outbox,
    open_ring,
)
from ..shared.grid import num_programs
from ..shared.scales import passing, words_of
from ..shared.tile_product import GatedEpilogue, Tiles, columns_each
from .gluon_keep import Keep, Keeping, keep_share
from .gluon_order import Order, Rounds, deal
from .rules import CALL, PushPlan

LANES = gl.constexpr(2)
"""Warps of a program that push."""
ROLES = gl.constexpr([*REGISTERS.value, 64])
"""Registers of a thread as in `REGISTERS`, and of the keeper."""


# ------------------------------------------------------------------------------------------------------ pushing
@aggregate
class Lane:
    """Slots of the ring for a warp that pushes: the loader has those for A, the storer those for B."""

    buffers: gl.shared_memory_descriptor  # (buffers, BLOCK_M, BLOCK_K)
    loaded: gl.shared_memory_descriptor  # a barrier a buffer


@aggregate
class Push:
    """Who pushes, where to, and through which slots. Without lanes nobody pushes."""

    num_comm: gl.tensor  # programs that push
    inboxes: Peers
    loader: Lane
    storer: Lane
    pushed: gl.shared_memory_descriptor  # a barrier: the storer's buffers are free


@gluon.jit
def open_push(a, num_comm, inboxes, ring):
    """A Push of the first num_comm programs, through the slots of a ring."""
    BUFFERS: gl.constexpr = ring.STAGES * ring.BLOCK_N // ring.BLOCK_M
    buffers = viewed(ring.b, [BUFFERS, ring.BLOCK_M, ring.BLOCK_K], a.layout)
    loader = Lane(ring.a, open_barriers(ring.STAGES))
    storer = Lane(buffers, open_barriers(BUFFERS))
    return Push(num_comm, inboxes, loader, storer, open_barriers(1))


@aggregate
class Tasks:
    """The tasks of a lane: a chunk of a row block each, in UNITS of BLOCK_K columns."""

    first: gl.tensor
    step: gl.tensor
    units: gl.tensor  # of all of them
    order: Order
    UNITS: gl.constexpr

    @gluon.jit
    def of(self, u):
        """The row block and chunk of unit u."""
        return self.order.task(self.first + (u // self.UNITS) * self.step)


@gluon.jit
def _load_unit(u, i, chunk, a, tasks, lane):
    """Load unit u, if there is one, from this rank's shard into its buffer. Takes the row block and chunk of the unit
    before, and returns those of this one: they take divisions, so they are computed only where a task begins."""
    BUFFERS: gl.constexpr = lane.buffers.shape[0]
    BLOCK_M: gl.constexpr = lane.buffers.shape[1]
    BLOCK_K: gl.constexpr = lane.buffers.shape[2]
    if u < tasks.units:
        if u % tasks.UNITS == 0:
            i, chunk = tasks.of(u)
        at = [i * BLOCK_M, (chunk * tasks.UNITS + u % tasks.UNITS) * BLOCK_K]
        mbarrier.expect(lane.loaded.index(u % BUFFERS), BLOCK_M * BLOCK_K * itemsize(lane.buffers.dtype))
        tma.async_load(a, at, lane.loaded.index(u % BUFFERS), lane.buffers.index(u % BUFFERS))
    return i, chunk


@gluon.jit
def _push(index, lane, a, push, order, signals):
    """Push the tasks of this program's lane `index`. One half of its buffers is loaded while the other is stored. A
    chunk is signalled once LAG more units have begun, which keep the links in use until then. Waits for no other
    program or rank. Its buffers are free when it returns."""
    SIZE: gl.constexpr = order.SIZE
    PEERS: gl.constexpr = SIZE - 1
    UNITS: gl.constexpr = order.CHUNK // lane.buffers.shape[2]
    BUFFERS: gl.constexpr = lane.buffers.shape[0]
    STORING: gl.constexpr = BUFFERS // 2
    LAG: gl.constexpr = min(STORING, UNITS)
    first = gl.program_id(0) * LANES + index
    step = push.num_comm * LANES
    units = gl.cdiv(gl.maximum(order.num_m * order.chunks() - first, 0), step) * UNITS
    tasks = Tasks(first, step, units, order, UNITS)
    shard = order.rank * order.num_m * order.chunks()
    block0 = (signals.epoch & 1) * SIZE * order.num_m * order.chunks() * UNITS
    load_i, load_chunk = order.rank, order.rank  # whatever: the first unit has its own, and so have the next two
    place, before = shard, order.rank
    for u in gl.static_range(BUFFERS - STORING):
        load_i, load_chunk = _load_unit(u, load_i, load_chunk, a, tasks, lane)
    for u in range(gl.where(units > 0, units + LAG, 0)):
        if u < units:
            if u % UNITS == 0:
                before = place
                i, chunk = tasks.of(u)
                place = shard + i * order.chunks() + chunk
            mbarrier.wait(lane.loaded.index(u % BUFFERS), (u // BUFFERS) & 1)
            at = [(block0 + place * UNITS + u % UNITS) * lane.buffers.shape[1], 0]
            push.inboxes.store_all(at, lane.buffers.index(u % BUFFERS))
            tma.store_wait(STORING * PEERS)  # the buffer that is loaded next has been read
            load_i, load_chunk = _load_unit(u + BUFFERS - STORING, load_i, load_chunk, a, tasks, lane)
        done = u - LAG
        if (done >= 0) & (done % UNITS == UNITS - 1):
            counter = signals.ptr + place  # behind the last task; else the next one has begun
            if u < units:
                ptx.drain(signals.world, LAG * PEERS)
                counter = signals.ptr + before
            else:
                ptx.drain(signals.world)
            ptx.cta_barrier()
            ptx.fence()
            for d in gl.static_range(1, SIZE):
                other = pl.peer(counter, (order.rank + d) % SIZE, signals.world)
                gl.atomic_add(other, 1, sem="relaxed", scope="sys")


# ------------------------------------------------------------------------------------------------------- roles
@aggregate
class Work:
    """Tiles of one width, and what they go through."""

    rounds: Rounds
    ring: Ring
    outbox: Outbox


@gluon.jit
def _load_rounds(step, work, a, inbox, b, signals):
    rounds = work.rounds
    order = rounds.order
    ring = work.ring
    for v in range(rounds.first(), rounds.end(), gl.num_programs(0)):
        source, i, j, own = rounds.tile(v)
        half = (signals.epoch & 1) * order.SIZE
        block = ((half + source) * order.num_m + i) * order.chunks() * (order.CHUNK // ring.BLOCK_K)
        for chunk in range(order.chunks()):
            start = chunk * order.CHUNK
            if (not own) and (not order.GATHERED):
                pl.wait(signals.ptr + order.counter(source, i) + chunk, signals.epoch, signals.world)
            for k in range(start, gl.minimum(start + order.CHUNK, ring.K), ring.BLOCK_K):
                if own:
                    ring.load(step, a, [i * ring.BLOCK_M, k], b, j * ring.BLOCK_N, k)
                elif order.COPIED:
                    ring.load(step, inbox, [source * order.m + i * ring.BLOCK_M, k], b, j * ring.BLOCK_N, k)
                else:
                    at = [(block + k // ring.BLOCK_K) * ring.BLOCK_M, 0]
                    ring.load(step, inbox, at, b, j * ring.BLOCK_N, k)
                step += 1
        ring.lend(step)
        step += 1
    return step


@gluon.jit
def _load(a, inbox, b, b_part, push, whole, cut, signals):
    if push.loader is not None:
        if gl.program_id(0) < push.num_comm:
            _push(0, push.loader, a, push, whole.rounds.order, signals)
            mbarrier.wait(push.pushed.index(0), 0)
    step = 0
    step = _load_rounds(step, whole, a, inbox, b, signals)
    if cut.rounds.PIECES > 1:
        _load_rounds(step, cut, a, inbox, b_part, signals)


@gluon.jit
def _compute(CONSUMER: gl.constexpr, whole, cut, finish):
    step = 0
    n = 0
    step, n = consume(CONSUMER, step, n, whole.rounds, whole.ring, whole.outbox, finish, 0)
    if cut.rounds.PIECES > 1:
        consume(CONSUMER, step, n, cut.rounds, cut.ring, cut.outbox, finish, 0)


@gluon.jit
def _store_rounds(step, n, work, c):
    rounds = work.rounds
    ring = work.ring
    ROWS: gl.constexpr = ring.BLOCK_M // CONSUMERS
    COLUMNS: gl.constexpr = c.block_shape[2]
    for v in range(rounds.first(), rounds.end(), gl.num_programs(0)):
        source, i, j, _own = rounds.tile(v)
        step += ring.steps()
        for h in gl.static_range(CONSUMERS):
            part = first_columns(work.outbox.take(h, step, n, ring), COLUMNS)
            # Three dimensions: rows past the shard's end are cut, not written over the next shard's.
            part = viewed(part, [1, ROWS, COLUMNS], c.layout)
            tma.async_store(c, [source, i * ring.BLOCK_M + h * ROWS, j * COLUMNS], part)
        work.outbox.sent(step, ring, 1)
        step += 1
        n += 1
    return step, n


@gluon.jit
def _store(a, c, c_part, push, whole, cut, signals):
    if push.storer is not None:
        if gl.program_id(0) < push.num_comm:
            _push(1, push.storer, a, push, whole.rounds.order, signals)
            mbarrier.arrive(push.pushed.index(0), count=1)
    step = 0
    n = 0
    step, n = _store_rounds(step, n, whole, c)
    if cut.rounds.PIECES > 1:
        _store_rounds(step, n, cut, c_part)


# ------------------------------------------------------------------------------------------------------ kernel
@gluon.jit(do_not_specialize=["num_comm", "rounds_alone", "whole_rounds", "push_rows"])
def gluon_push_kernel(
    a,  # (m, K) this rank's shard, blocks of BLOCK_M x BLOCK_K
    b,  # (K, N) this rank's, or (N, K) if TRANSPOSED, blocks of BLOCK_K and BLOCK_N
    b_part,  # the same, blocks of BLOCK_K and BLOCK_N / PIECES
    c,  # (size, m, N) this rank's, blocks of 1 x BLOCK_M / 2 x BLOCK_N; half as many columns, also below, with swiglu
    c_part,  # the same, blocks of 1 x BLOCK_M / 2 x BLOCK_N / PIECES
    inbox,  # (2 * size * blocks of a shard * BLOCK_M, BLOCK_K) this rank's, blocks as of a, each one piece of memory,
    # which links and memory take fastest; halves by the parity of the launch. If COPIED (size * m, K)
    d1, d2, d3, d4, d5, d6, d7,  # the inboxes of ranks rank + 1, ...; those past size - 1 are not used
    ready_ptr,  # int32 (size, row blocks, chunks) on every rank; [r] counts how often rank r has pushed each chunk. If
    # COPIED, as copies.Gathering has it
    bias,  # (N,) this rank's, or None
    scales,  # scales.Scales of this rank's shard, or None
    words_ptr,  # int32 (2, size, A's scales, 2) on every rank, or None: rank r puts its scales into [:, r] of all, as
    # words of data and flag; halves by the parity of the launch
    keeping,  # Keeping where A is kept, which is COPIED, or None
    sizes,  # Sizes; M of a shard, m above
    num_comm,  # programs that push; 0 if COPIED
    rounds_alone,  # rounds of tiles that they are left out of
    whole_rounds,  # rounds before those of tiles that are cut
    push_rows,  # row blocks that are pushed, or copied, and computed together
    world,
    constants,  # Constants
    CHUNK: gl.constexpr,  # columns of A that are pushed, or copied, and signalled together
    PIECES: gl.constexpr,  # that the last tiles are cut in
    COPIED: gl.constexpr,  # by copy engines: this kernel only computes
    GATHERED: gl.constexpr,  # the launch before has waited for all of A: this kernel only computes
    num_warps: gl.constexpr,
):  # fmt: skip
    """The module's kernel: shared memory, barriers, and who does what."""
    SIZE: gl.constexpr = world.size
    num_m = gl.cdiv(sizes.M, a.block_shape[0])
    if COPIED:
        epoch = gl.load(ready_ptr + SIZE * gl.cdiv(num_m, push_rows) * gl.cdiv(sizes.K, CHUNK))
    elif GATHERED:
        epoch = sync.peek_epoch(ready_ptr) - 1
    else:
        epoch = pl.epoch(ready_ptr, world)
    ring = open_ring(a, b, c, sizes.K, constants.STAGES, constants.TRANSPOSED)
    outbox = open_outbox(ring)
    narrow = ring.narrowed(b_part, PIECES)
    push = Push(num_comm, None, None, None, None)
    if (SIZE > 1) and (not COPIED) and (not GATHERED):
        push = open_push(a, num_comm, Peers((d1, d2, d3, d4, d5, d6, d7), SIZE), ring)
    num_n = gl.cdiv(sizes.N, ring.BLOCK_N)
    rank = gl.cast(world.rank, gl.int32)
    order = Order(rank, sizes.M, num_m, num_n, sizes.K, push_rows, SIZE, constants.GROUP, CHUNK, COPIED, GATHERED)
    rounds, cut_rounds = deal(num_comm, rounds_alone, whole_rounds, order, PIECES)
    whole = Work(rounds, ring, outbox)
    cut = Work(cut_rounds, narrow, outbox.narrowed(narrow))
    applied = None
    if scales is not None:
        applied = exchange_scales(scales, words_ptr, sizes.M, epoch, world, num_warps)
    keep = Keep(None, None, None, ring.BLOCK_M, ring.BLOCK_K, 16 // itemsize(a.dtype))
    if keeping is not None:
        keep = Keep(keeping.shard_ptr, keeping.inbox_ptr, keeping.whole_ptr, keep.BLOCK_M, keep.BLOCK_K, keep.RUN)
    finish = Finish(applied, bias, sizes.N, constants.EPILOGUE)
    signals = Signals(ready_ptr, epoch, world)
    gl.warp_specialize(
        [
            (_compute, (0, whole, cut, finish)),
            (_compute, (1, whole, cut, finish)),
            (_load, (a, inbox, b, b_part, push, whole, cut, signals)),
            (_store, (a, c, c_part, push, whole, cut, signals)),
            (keep_share, (keep, order, signals)),
        ],
        [num_warps, 1, 1, 2],
        ROLES,
    )


# -------------------------------------------------------------------------------------------------------- host
ALL = 1 << 30
"""A chunk of all columns, whatever K, so that one compiled kernel serves."""


class _Way(NamedTuple):
    """The inboxes of the peers' shards, and the counters of their arrival."""

    inboxes: list[TensorDescriptor]  # see `everywhere`
    ready: SymmetricTensor
    begin: Callable[[torch.Tensor], Callable[[], None]] | None  # as copies.Gathering has it
    inbox: torch.Tensor  # this rank's
    counted: tuple[Any, ...]  # all that the counters depend on


def _pushed(world: World, m: int, K: int, dtype: torch.dtype, chunk: int, tiles: Tiles) -> _Way:
    size, num_m, chunks = world.size, triton.cdiv(m, tiles.block_m), triton.cdiv(K, chunk)
    blocks = num_m * chunks * chunk // tiles.block_k

    def make() -> tuple[SymmetricTensor, SymmetricTensor]:
        shape = 2 * size * blocks * tiles.block_m, tiles.block_k
        inbox = empty(*shape, dtype=dtype, name=f"{CALL}.gluon.inbox", world=world)
        return inbox, signals(size * num_m * chunks, name=f"{CALL}.gluon.ready", world=world)

    # Plans that differ in other settings share one workspace.
    counted = (m, K, dtype, tiles.block_m, chunk, num_programs(world, world.num_sms))
    inbox, ready = world.keep((CALL, "gluon", *counted), make)
    return _Way(everywhere(inbox, (tiles.block_m, tiles.block_k), world), ready, None, inbox.plain(), counted)


def _copied(world: World, m: int, K: int, dtype: torch.dtype, rows: int, chunk: int, tiles: Tiles) -> _Way:
    inbox, ready, begin = gathering(world, m, K, dtype, rows, min(chunk, K))
    shards = here(inbox.plain().view(world.size * m, K), (tiles.block_m, tiles.block_k))
    return _Way(shards, ready, begin, inbox.plain(), (m, K, dtype, rows, min(chunk, K)))


def _together(world: World, m: int, N: int, K: int, plan: PushPlan, tiles: Tiles) -> tuple[int, int]:
    """Row blocks and columns that one signal stands for."""
    size, copied = world.size, plan.num_comm_sms == 0 and world.size > 1
    num_m, num_n = triton.cdiv(m, tiles.block_m), triton.cdiv(N, tiles.block_n)
    # Pushed: as many as the programs compute at a time.
    together = num_m if copied else triton.cdiv(num_programs(world, world.num_sms), num_n * max(size - 1, 1))
    columns = triton.cdiv(K, tiles.block_k) * tiles.block_k
    chunk = min(plan.chunk or columns, columns)
    return min(plan.push_rows or together, num_m), ALL if copied and chunk == columns else chunk


def push_launch(
    world: World,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    plan: PushPlan,
    tiles: Tiles,
    epilogue: GatedEpilogue = "none",
    gathered: bool = False,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> Launch:
    """launch(a, b, out, bias, scale_a, scale_b, whole), for tensors of the same facts as these: `out` (size * m, N) =
    the gathered `a` (m, K) @ `b` (K, N), half as many columns with epilogue "swiglu", as
    all_gather_matmul(shard="rows"), whose checks of the operands come before, with what `settings` returned. bf16 or
    fp16, or fp8 with scales and b as (N, K); rows at multiples of 16 bytes, on sm_90. `whole` (size * m, K), where it
    is given, gets A; not where this rank's programs push it.
    gathered: the launch before was for another `b`, with this plan but for the dealing out of tiles, and has gathered
    A. Collective."""
    (m, K), N, size, dtype = a.shape, b.shape[1], world.size, a.dtype
    programs, copied = num_programs(world, world.num_sms), plan.num_comm_sms == 0 and size > 1
    push_rows, chunk = _together(world, m, N, K, plan, tiles)
    num_comm = min(plan.num_comm_sms, programs) if size > 1 and not gathered else 0
    if copied:
        way = _copied(world, m, K, dtype, push_rows * tiles.block_m, chunk, tiles)
    else:
        way = _pushed(world, m, K, dtype, chunk, tiles)
    words = words_of(world, f"{CALL}.gluon", scale_a, way.counted)
    scales_of = passing(scale_a, scale_b)
    part = tiles._replace(block_n=tiles.block_n // plan.cut_last)
    numbers = (num_comm, plan.rounds_alone, plan.whole_rounds, push_rows)
    passed = (Sizes(m, N, K), *numbers, world.device, kernel_constants(tiles, b, epilogue))
    constants = {"CHUNK": chunk, "PIECES": plan.cut_last, "COPIED": copied, "GATHERED": gathered}
    blocks_of_a, blocks_of_b, parts_of_b = (
        descriptor(a, (tiles.block_m, tiles.block_k)),
        weights_descriptor(b, tiles),
        weights_descriptor(b, part),
    )
    each = columns_each(epilogue)
    stacked, narrowed = out.view(size, m, N // each), (t._replace(block_n=t.block_n // each) for t in (tiles, part))
    halves, half_parts = (descriptor(stacked, (1, *half_block(t))) for t in narrowed)

    start = cooperative_launch(world, gluon_push_kernel, (programs,), **constants, num_warps=CONSUMER_WARPS)

    def launch(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None,
        scale_a: torch.Tensor | None = None, scale_b: torch.Tensor | None = None, whole: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        blocks_of_a.base, blocks_of_b.base, parts_of_b.base = a, b, b
        halves.base = half_parts.base = out
        keeping = None if whole is None else Keeping(a, way.inbox, whole)
        join = way.begin(a) if way.begin and not gathered else None
        try:
            start(
                blocks_of_a, blocks_of_b, parts_of_b, halves, half_parts, *way.inboxes, way.ready, bias,
                scales_of(scale_a, scale_b), words, keeping, *passed,
            )  # fmt: skip
        finally:
            blocks_of_a.base = blocks_of_b.base = parts_of_b.base = halves.base = half_parts.base = None
            if join:
                join()
        return out

    return replayed(world, launch) if copied else launch
