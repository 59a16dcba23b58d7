"""The kernel of dk and dv in specialised warps: `backward.keys_kernel`, as gluon.py has the forward pass.

The loader fills slots with a task's keys and values, and with blocks of queries and dout, own ones first, and waits for
the ranks' chunks of these. Each of the two consumers has half of a task's keys. Its scores are transposed, keys by
queries. So weights and slopes are in the registers as the tensor cores take them for the products with dout and with
the queries, and never leave them. While the tensor cores multiply the values with dout, a consumer has the weights, and
while they multiply these with dout the slopes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

import pkt.language as pl

from ..shared import gluon_tma as tma
from ..shared.gluon_aggregate import aggregate
from ..shared.gluon_scales import CONSUMERS
from ..shared.gluon_slots import clear_behind, open_slots
from ..shared.gluon_tma import viewed
from ..shared.gluon_warps import accumulator, half_layout, itemsize, open_barriers
from ..shared.tile_attention import LN2, blocks, interval
from .backward import num_places, place_of
from .gluon import REGISTERS
from .gluon_dq import rounded, seen_alone, weigh
from .gluon_tasks import turn, turns
from .kernel import counter, num_pieces, part, piece


# ------------------------------------------------------------------------------------------------------------- tasks
@aggregate
class KeysTask:
    """The keys of a task, and the queries that see them: `tile_attention.sight` with the two sides exchanged."""

    b: gl.tensor
    g: gl.tensor  # the head of keys
    row: gl.tensor  # the first key's
    rows: gl.tensor
    position: gl.tensor  # the first key's
    least: gl.tensor
    most: gl.tensor
    all_from: gl.tensor
    all_to: gl.tensor
    padding: gl.tensor  # queries from here on may be padding


@aggregate
class Blocks:
    """Blocks of queries of a head that a task looks at in a step. Blocks from `clear` on, up to clear_to, need no mask.
    Queries from position `end` on see none of the keys; those from `here` on may be padding, or another part's."""

    h: gl.tensor
    distance: gl.tensor  # to their rank, which is rank - distance
    upper: gl.tensor  # whether they are of its second part
    begin: gl.tensor  # rows of the part before the first query
    row: gl.tensor  # the first query's
    position: gl.tensor  # the first query's
    count: gl.tensor
    clear: gl.tensor
    clear_to: gl.tensor
    end: gl.tensor
    here: gl.tensor


@aggregate
class KeysJob:
    """What all roles know."""

    p: gl.tuple  # Backward
    together: gl.tensor  # heads of keys of all batches that programs work on at a time
    rank: gl.tensor
    number: gl.tensor  # of this launch
    world: gl.tuple

    @gluon.jit
    def pieces(self):
        """Of a head's keys."""
        return num_pieces(self.p, CONSUMERS * self.p.BLOCK_N)

    @gluon.jit
    def tasks(self):
        return self.p.B * self.p.KV * self.pieces()

    @gluon.jit
    def sees(self, position, inside):
        """The queries that see keys at these positions, [low, high). inside: which of the keys there are."""
        total = self.world.size * self.p.S
        return interval(position, position, total, inside, self.p.right, self.p.left, self.p)

    @gluon.jit
    def task(self, t):
        """Task t. Of some heads at a time all tasks come, those that most queries see under a causal mask first."""
        each = self.together * self.pieces()
        begin = t // each * self.together
        heads = gl.minimum(self.p.B * self.p.KV - begin, self.together)
        head = begin + t % each % heads
        row, rows, position = piece(
            t % each // heads, self.rank, self.p, self.world, CONSUMERS * self.p.BLOCK_N
        )  # fmt: skip
        # The queries that see a key ascend with its row, as the keys in `gluon_tasks.Job.task`.
        last = gl.maximum(gl.minimum(rows, self.p.length - position), 1) - 1
        least, all_to = self.sees(position, rows > 0)
        all_from, most = self.sees(position + last, rows > 0)
        most = gl.where(rows > 0, most, 0)  # behind the second part are keys of another rank
        padding = gl.cast(self.p.length, gl.int32)
        if self.p.spans_ptr is not None:
            padding = most
        return KeysTask(
            head // self.p.KV, head % self.p.KV, row, rows, position, least, most, all_from, all_to, padding
        )  # fmt: skip

    @gluon.jit
    def steps(self):
        """Parts of the ranks' queries, each with all heads that share the keys."""
        PARTS: gl.constexpr = 2 if self.p.ZIGZAG else 1
        return self.world.size * PARTS * (self.p.H // self.p.KV)

    @gluon.jit
    def looked_at(self, step, task):
        """What the task looks at in a step, own queries first."""
        PARTS: gl.constexpr = 2 if self.p.ZIGZAG else 1
        GROUP: gl.constexpr = self.p.H // self.p.KV
        SIZE: gl.constexpr = self.world.size
        distance = step // (PARTS * GROUP)
        upper = step // GROUP % PARTS == 1
        first, count, start = part(upper, (self.rank - distance + SIZE) % SIZE, self.p, self.world)
        begin, end, full, unmasked, masked = blocks(
            start, count, task.least, task.most, task.all_from, task.all_to, self.p.BLOCK_M
        )  # fmt: skip
        return Blocks(
            task.g * GROUP + step % GROUP, distance, upper, begin, first + begin, start + begin, unmasked + masked,
            full, full + unmasked, start + end, gl.minimum(start + count, task.padding),
        )  # fmt: skip

    @gluon.jit
    def kept(self, here, at, row):
        """How many rows of the block of queries at a position and a row are kept, as `gluon_tasks.Job.kept`."""
        cut = (here - at < self.p.BLOCK_M) & (row + here - at < self.p.S)
        return gl.where(cut, here - at, self.p.BLOCK_M)


# ------------------------------------------------------------------------------------------------------------- slots
@aggregate
class QuerySlots:
    """Shared memory for blocks of queries, which the loader fills in turn: block n is in slot n % STAGES."""

    queries: gl.shared_memory_descriptor  # (STAGES, BLOCK_M, D)
    douts: gl.shared_memory_descriptor  # as queries
    lse: gl.shared_memory_descriptor  # fp32 (STAGES, BLOCK_M)
    delta: gl.shared_memory_descriptor  # as lse
    full: gl.shared_memory_descriptor  # a barrier a slot: it has been filled; one more: rows have come of which the
    # last are to be cleared
    empty: gl.shared_memory_descriptor  # a barrier a slot: it is free
    STAGES: gl.constexpr

    @gluon.jit
    def fill(self, n, q, dout, numbers, b, row, column, at, delta_at, cut):
        """Fill the slot of block n: from (b, row, column) of q and dout, and from two places of the numbers. Rows
        behind the last one of q are 0. If `cut`, `keep_first` lets the slot be taken."""
        slot = n % self.STAGES
        mbarrier.wait(self.empty.index(slot), ((n // self.STAGES) & 1) ^ 1)
        full = self.full.index(gl.where(cut, self.STAGES, slot))
        DTYPE: gl.constexpr = self.queries.dtype
        ROWS: gl.constexpr = self.queries.shape[1]
        COLUMNS: gl.constexpr = self.queries.shape[2]
        mbarrier.expect(full, 2 * ROWS * (COLUMNS * itemsize(DTYPE) + itemsize(self.lse.dtype)))
        place = viewed(self.queries.index(slot), [1, ROWS, COLUMNS], q.layout)
        tma.async_load(q, [b, row, column], full, place)
        tma.async_load(numbers, [at], full, self.lse.index(slot))
        place = viewed(self.douts.index(slot), [1, ROWS, COLUMNS], q.layout)
        tma.async_load(dout, [b, row, column], full, place)
        tma.async_load(numbers, [delta_at], full, self.delta.index(slot))

    @gluon.jit
    def keep_first(self, n, rows, cuts):
        """Set all but the first `rows` rows of block n to 0. cuts: blocks that were cut before."""
        mbarrier.wait(self.full.index(self.STAGES), cuts & 1)
        clear_behind(self.queries.index(n % self.STAGES), rows)
        clear_behind(self.douts.index(n % self.STAGES), rows)
        fence_async_shared()
        mbarrier.arrive(self.full.index(n % self.STAGES), count=1)

    @gluon.jit
    def take(self, n):
        """The slot of block n, once it has been filled."""
        slot = n % self.STAGES
        mbarrier.wait(self.full.index(slot), (n // self.STAGES) & 1)
        return slot

    @gluon.jit
    def free(self, slot):
        """Let a slot go."""
        fence_async_shared()  # TMA overwrites numbers that threads have read
        mbarrier.arrive(self.empty.index(slot), count=1)


@gluon.jit
def open_query_slots(q, numbers, STAGES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Empty slots for blocks that both consumers read. q, numbers: descriptors."""
    LAYOUT: gl.constexpr = half_layout(ROWS, COLUMNS, q.dtype)
    queries = gl.allocate_shared_memory(q.dtype, [STAGES, ROWS, COLUMNS], LAYOUT)
    douts = gl.allocate_shared_memory(q.dtype, [STAGES, ROWS, COLUMNS], LAYOUT)
    lse = gl.allocate_shared_memory(numbers.dtype, [STAGES, ROWS], numbers.layout)
    delta = gl.allocate_shared_memory(numbers.dtype, [STAGES, ROWS], numbers.layout)
    return QuerySlots(queries, douts, lse, delta, open_barriers(STAGES + 1), open_barriers(STAGES, CONSUMERS), STAGES)


@aggregate
class KeysMemory:
    """What the roles of the kernel of dk and dv share."""

    keys: gl.tuple  # Slots of each consumer for its half of a task. With one slot each its address is a constant
    values: gl.tuple  # as keys
    queries: QuerySlots


# ------------------------------------------------------------------------------------------------------------- roles
@gluon.jit
def load_for_dkv(p, job, memory, k, v, own, inboxes):
    """The loader. own, inboxes: queries, dout and numbers of this rank, and of the others, see the kernel."""
    n = 0
    cuts = 0  # blocks
    for t in range(turns(job.tasks())):
        task = job.task(turn(t))
        for c in gl.static_range(CONSUMERS):
            memory.keys[c].load(t, k, task.b, task.row + c * p.BLOCK_N, task.g * p.D)
            memory.values[c].load(t, v, task.b, task.row + c * p.BLOCK_N, task.g * p.D)
        for step in range(job.steps()):
            seen = job.looked_at(step, task)
            here = -1  # the chunk that has been waited for
            for i in range(seen.count):
                down = i * p.BLOCK_M
                here = await_queries(here, seen, down, task, job)
                rows = job.kept(seen.here, seen.position + down, seen.row + down)
                cut = rows < p.BLOCK_M
                if seen.distance == 0:
                    fetch_queries(memory.queries, n, own, 0, seen, down, cut, task, p)
                else:
                    fetch_queries(memory.queries, n, inboxes, seen.distance - 1, seen, down, cut, task, p)
                if cut:
                    memory.queries.keep_first(n, rows, cuts)
                    cuts += 1
                n += 1


@gluon.jit
def await_queries(here, seen, down, task, job):
    """Wait for the chunk of the queries `down` rows behind the first of a step, unless it is chunk `here`, which has
    been waited for. (The chunk that is here.)"""
    if job.world.size > 1:  # or no wait would be compiled, which pkt takes for a wait that was lost
        if seen.distance > 0:
            chunks = num_pieces(job.p, job.p.CHUNK)
            chunk = (seen.begin + down) // job.p.CHUNK + gl.where(seen.upper, chunks // 2, 0)
            if chunk != here:
                at = counter(job.world.size - 1 + seen.distance, task.b, chunk, job.p)
                pl.wait(job.p.ready_ptr + at, job.number, job.world)
                here = chunk
    return here


@gluon.jit
def fetch_queries(slots, n, of, rank, seen, down, cut, task, p):
    """Fill slot n from `down` rows behind the first of a step, of the tensors `of` one or more ranks."""
    q, dout, numbers = of
    at = ((rank * 2 * p.B + task.b) * p.H + seen.h) * num_places(p) + place_of(seen.row, p) + down
    delta_at = at + p.B * p.H * num_places(p)
    slots.fill(n, q, dout, numbers, rank * p.B + task.b, seen.row + down, seen.h * p.D, at, delta_at, cut)


@gluon.jit
def compute_dkv(CONSUMER: gl.constexpr, p, job, memory):
    """A consumer."""
    RESULT: gl.constexpr = accumulator(p.D, gl.num_warps())
    n = 0
    for t in range(turns(job.tasks())):
        task = job.task(turn(t))
        dk = gl.zeros((p.BLOCK_N, p.D), gl.float32, RESULT)
        dv = gl.zeros((p.BLOCK_N, p.D), gl.float32, RESULT)
        keys = memory.keys[CONSUMER].take(t)
        values = memory.values[CONSUMER].take(t)
        position = task.position + CONSUMER * p.BLOCK_N
        rows = task.rows - CONSUMER * p.BLOCK_N
        for step in range(job.steps()):
            seen = job.looked_at(step, task)
            for i in range(seen.count):
                masked = (i < seen.clear) | (i >= seen.clear_to)
                down = seen.position + i * p.BLOCK_M
                dk, dv = add_block(dk, dv, keys, values, n, masked, down, seen.end, position, rows, job, memory)
                n += 1
        memory.keys[CONSUMER].free(t)
        memory.values[CONSUMER].free(t)
        store_dkv(CONSUMER, dk, dv, task, job, p)


@gluon.jit
def add_block(dk, dv, keys, values, n, masked, at, end, position, rows, job, memory):
    """A consumer's dk / scale and dv, with those of block n of queries. masked, at, end, position, rows: as of
    `weigh`."""
    DTYPE: gl.constexpr = memory.queries.queries.dtype
    ROWS: gl.constexpr = dk.shape[0]
    COLUMNS: gl.constexpr = memory.queries.queries.shape[1]
    RESULT: gl.constexpr = dk.type.layout
    SCORES: gl.constexpr = accumulator(COLUMNS, gl.num_warps())
    NUMBERS: gl.constexpr = gl.SliceLayout(0, SCORES)
    slot = memory.queries.take(n)
    queries = memory.queries.queries.index(slot)
    douts = memory.queries.douts.index(slot)
    blank = gl.zeros((ROWS, COLUMNS), gl.float32, SCORES)
    scores = warpgroup_mma(keys, queries.permute([1, 0]), blank, use_acc=False, is_async=True)
    products = warpgroup_mma(values, douts.permute([1, 0]), blank, use_acc=False, is_async=True)
    lse = memory.queries.lse.index(slot).load(NUMBERS)[None, :]
    scores = warpgroup_mma_wait(1, deps=(scores,))
    weights = weigh(scores, lse, masked, at, end, position, rows, job)
    narrow = rounded(weights, DTYPE, RESULT)
    dv = warpgroup_mma(narrow, douts, dv, is_async=True)
    products = warpgroup_mma_wait(1, deps=(products,))
    delta = memory.queries.delta.index(slot).load(NUMBERS)[None, :]
    slopes = rounded(weights * (products - delta), DTYPE, RESULT)
    dk = warpgroup_mma(slopes, queries, dk, is_async=True)
    dk, dv, narrow, slopes = warpgroup_mma_wait(0, deps=(dk, dv, narrow, slopes))
    memory.queries.free(slot)
    return dk, dv


@gluon.jit
def store_dkv(CONSUMER: gl.constexpr, dk, dv, task, job, p):
    """Store a consumer's dk and dv."""
    RESULT: gl.constexpr = dk.type.layout
    row = task.row + CONSUMER * p.BLOCK_N
    rows = task.rows - CONSUMER * p.BLOCK_N
    if rows > 0:
        base = ((gl.cast(task.b, gl.int64) * p.S + row) * p.KV + task.g) * p.D
        m = gl.arange(0, p.BLOCK_N, layout=gl.SliceLayout(1, RESULT))
        d = gl.arange(0, p.D, layout=gl.SliceLayout(0, RESULT))
        places = m[:, None] * (p.KV * p.D) + d[None, :]
        inside = (m < rows)[:, None]
        position = task.position + CONSUMER * p.BLOCK_N
        dk = seen_alone(dk * (p.scale * LN2), position, rows, job)
        dv = seen_alone(dv, position, rows, job)
        gl.store(p.dk_ptr + base + places, dk, mask=inside)  # the store rounds
        gl.store(p.dv_ptr + base + places, dv, mask=inside)


# ------------------------------------------------------------------------------------------------------------ kernel
@gluon.jit(do_not_specialize=["together"])
def gluon_dkv_kernel(
    q,  # (B, S, H * D) this rank's, blocks of 1 x BLOCK_M x D
    dout,  # as q
    numbers,  # fp32 (2 * B * H * num_places) this rank's, see Backward.rows_ptr; blocks of BLOCK_M
    k,  # (B, S, KV * D) this rank's, blocks of 1 x BLOCK_N x D
    v,  # as k
    q_inbox,  # ((size - 1) * B, S, H * D) this rank's, blocks as of q
    dout_inbox,  # as q_inbox
    numbers_inbox,  # fp32 ((size - 1) * 2 * B * H * num_places) this rank's, blocks as of numbers
    p,  # Backward, without the tensors above; BLOCK_N: keys of a consumer
    together,  # heads of keys of all batches that programs work on at a time
    world,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The module's kernel: shared memory, barriers, and who does what."""
    keys = open_slots(q.dtype, 1, p.BLOCK_N, p.D, 1), open_slots(q.dtype, 1, p.BLOCK_N, p.D, 1)
    values = open_slots(q.dtype, 1, p.BLOCK_N, p.D, 1), open_slots(q.dtype, 1, p.BLOCK_N, p.D, 1)
    queries = open_query_slots(q, numbers, STAGES, p.BLOCK_M, p.D)
    memory = KeysMemory(keys, values, queries)
    number = 0
    if world.size > 1:
        number = gl.load(p.number_ptr)
    job = KeysJob(p, together, gl.cast(world.rank, gl.int32), number, world)
    gl.warp_specialize(
        [
            (compute_dkv, (0, p, job, memory)),
            (compute_dkv, (1, p, job, memory)),
            (load_for_dkv, (p, job, memory, k, v, (q, dout, numbers), (q_inbox, dout_inbox, numbers_inbox))),
        ],
        [num_warps, 1],
        REGISTERS,
    )
