"""The kernel of dk and dv in specialised warps: `backward.keys_kernel`, as gluon.py has the forward pass.

The loader fills slots with a task's keys and values, and with blocks of this rank's queries and dout. Each of the two
consumers has half of a task's keys. Its scores are transposed, keys by queries. So weights and slopes are in the
registers as the tensor cores take them for the products with dout and with the queries, and never leave them. While the
tensor cores multiply the values with dout, a consumer has the weights, and while they multiply these with dout the
slopes.
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

import pkt.language as pl

from ..shared.gluon_aggregate import aggregate
from ..shared.gluon_scales import CONSUMERS
from ..shared.gluon_warps import accumulator, half_layout, itemsize, open_barriers
from ..shared.tile_attention import LN2, blocks, interval
from .backward import is_seen
from .gluon import REGISTERS, clear_behind, open_slots, turn, turns
from .gluon_dq import num_places, place_of, rounded, seen_alone, weigh
from .kernel import num_pieces, part, piece


# ------------------------------------------------------------------------------------------------------------- tasks
@aggregate
class KeysTask:
    """The keys of a task, and the queries that see them: `tile_attention.sight` with the two sides exchanged."""

    b: gl.tensor
    g: gl.tensor  # the head of keys
    distance: gl.tensor  # to their rank, which is rank - distance
    source: gl.tensor  # their rank
    row: gl.tensor  # the first key's
    rows: gl.tensor
    position: gl.tensor  # the first key's
    least: gl.tensor
    most: gl.tensor
    all_from: gl.tensor
    all_to: gl.tensor
    padding: gl.tensor  # queries from here on may be padding


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
        """Of a head's keys of a rank."""
        return num_pieces(self.p, CONSUMERS * self.p.BLOCK_N)

    @gluon.jit
    def tasks(self):
        return self.world.size * self.p.B * self.p.KV * self.pieces()

    @gluon.jit
    def sees(self, position, inside):
        """The queries that see keys at these positions, [low, high). inside: which of the keys there are."""
        total = self.world.size * self.p.S
        return interval(position, position, total, inside, self.p.right, self.p.left, self.p)

    @gluon.jit
    def task(self, t):
        """Task t. Of some heads at a time all tasks come, those that most queries see under a causal mask first. The
        ranks' keys take turns, own ones last, so that parts travel all the time, and few of them at once."""
        SIZE: gl.constexpr = self.world.size
        each = SIZE * self.pieces()  # tasks of a head
        begin = t // (self.together * each) * self.together
        heads = gl.minimum(self.p.B * self.p.KV - begin, self.together)
        r = t % (self.together * each)
        head = begin + r % heads
        distance = (r // heads + 1) % SIZE
        source = (self.rank - distance + SIZE) % SIZE
        i = r // heads // SIZE
        row, rows, position = piece(i, source, self.p, self.world, CONSUMERS * self.p.BLOCK_N)
        # The queries that see a key ascend with its row, as the keys in `gluon.Job.task`.
        last = gl.maximum(gl.minimum(rows, self.p.length - position), 1) - 1
        least, all_to = self.sees(position, rows > 0)
        all_from, most = self.sees(position + last, rows > 0)
        padding = gl.cast(self.p.length, gl.int32)
        if self.p.spans_ptr is not None:
            padding = most
        return KeysTask(
            head // self.p.KV, head % self.p.KV, distance, source, row, rows, position, least, most,
            all_from, all_to, padding,
        )  # fmt: skip

    @gluon.jit
    def steps(self):
        """Parts of this rank's queries, each with all heads that share the keys."""
        PARTS: gl.constexpr = 2 if self.p.ZIGZAG else 1
        return PARTS * (self.p.H // self.p.KV)

    @gluon.jit
    def seen(self, task):
        """Whether a query here sees one of the task's keys. Else nobody computes or waits for anything of it."""
        return (task.distance == 0) | is_seen(task.least, task.most, self.rank, self.p, self.world)

    @gluon.jit
    def looked_at(self, step, task):
        """Which blocks of queries the task looks at in a step: the row and the position of the first, how many, and
        which of them need no mask, [clear, clear_to). Queries from position `end` on see none of the keys; those from
        `here` on may be padding, or another part's."""
        first, count, start = part(step >= self.p.H // self.p.KV, self.rank, self.p, self.world)
        begin, end, full, unmasked, masked = blocks(
            start, count, task.least, task.most, task.all_from, task.all_to, self.p.BLOCK_M
        )  # fmt: skip
        here = gl.minimum(start + count, task.padding)
        return first + begin, start + begin, unmasked + masked, full, full + unmasked, start + end, here

    @gluon.jit
    def kept(self, here, at, row):
        """How many rows of the block of queries at a position and a row are kept, as `gluon.Job.kept`."""
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
    full: gl.shared_memory_descriptor  # a barrier a slot: it has been filled
    empty: gl.shared_memory_descriptor  # a barrier a slot: it is free
    STAGES: gl.constexpr

    @gluon.jit
    def filled(self, n):
        """The barrier that lets the slot of block n be taken."""
        return self.full.index(n % self.STAGES)

    @gluon.jit
    def fill(self, n, q, dout, numbers, b, row, column, at, delta_at, full):
        """Fill the slot of block n: from (b, row, column) of q and dout, and from two places of the numbers. Rows
        behind the last one of q are 0. full: the barrier that will know. Where it is not `filled`, `keep_first` lets
        the slot be taken."""
        slot = n % self.STAGES
        mbarrier.wait(self.empty.index(slot), ((n // self.STAGES) & 1) ^ 1)
        DTYPE: gl.constexpr = self.queries.dtype
        ROWS: gl.constexpr = self.queries.shape[1]
        COLUMNS: gl.constexpr = self.queries.shape[2]
        mbarrier.expect(full, 2 * ROWS * (COLUMNS * itemsize(DTYPE) + itemsize(self.lse.dtype)))
        place = self.queries.index(slot)._reinterpret(DTYPE, [1, ROWS, COLUMNS], q.layout)
        tma.async_copy_global_to_shared(q, [b, row, column], full, place)
        tma.async_copy_global_to_shared(numbers, [at], full, self.lse.index(slot))
        place = self.douts.index(slot)._reinterpret(DTYPE, [1, ROWS, COLUMNS], q.layout)
        tma.async_copy_global_to_shared(dout, [b, row, column], full, place)
        tma.async_copy_global_to_shared(numbers, [delta_at], full, self.delta.index(slot))

    @gluon.jit
    def keep_first(self, n, rows, landed, phase):
        """Set all but the first `rows` rows of block n to 0. landed: the barrier of `fill`, in `phase`."""
        mbarrier.wait(landed, phase)
        clear_behind(self.queries.index(n % self.STAGES), rows)
        clear_behind(self.douts.index(n % self.STAGES), rows)
        fence_async_shared()
        mbarrier.arrive(self.filled(n), count=1)

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
    return QuerySlots(queries, douts, lse, delta, open_barriers(STAGES), open_barriers(STAGES, CONSUMERS), STAGES)


@aggregate
class KeysMemory:
    """What the roles of the kernel of dk and dv share."""

    keys: gl.tuple  # Slots of each consumer for its half of a task. With one slot each its address is a constant
    values: gl.tuple  # as keys
    queries: QuerySlots
    landed: gl.shared_memory_descriptor  # a barrier: rows have come of which the last are to be cleared


# ------------------------------------------------------------------------------------------------------------- roles
@gluon.jit
def load_for_dkv(p, job, memory, q, dout, numbers, own, inboxes):
    """The loader. own, inboxes: as of `gluon.load`. numbers: all of `Backward.rows_ptr`, one after the other."""
    GROUP: gl.constexpr = p.H // p.KV
    m = 0
    n = 0
    cleared = 0  # slots
    for k in range(turns(job.tasks())):
        task = job.task(turn(k))
        if job.seen(task):
            for c in gl.static_range(CONSUMERS):
                row = task.row + c * p.BLOCK_N
                if task.distance == 0:
                    memory.keys[c].load(m, own[0], task.b, row, task.g * p.D)
                    memory.values[c].load(m, own[1], task.b, row, task.g * p.D)
                else:
                    b = task.b + (task.distance - 1) * p.B
                    memory.keys[c].load(m, inboxes[0], b, row, task.g * p.D)
                    memory.values[c].load(m, inboxes[1], b, row, task.g * p.D)
            m += 1
            for step in range(job.steps()):
                row, position, count, _, _, _, here = job.looked_at(step, task)
                h = task.g * GROUP + step % GROUP
                at = (task.b * p.H + h) * num_places(p) + place_of(row, p)
                for i in range(count):
                    down = i * p.BLOCK_M
                    behind = at + down + p.B * p.H * num_places(p)
                    rows = job.kept(here, position + down, row + down)
                    if rows < p.BLOCK_M:
                        memory.queries.fill(
                            n, q, dout, numbers, task.b, row + down, h * p.D, at + down, behind, memory.landed
                        )
                        memory.queries.keep_first(n, rows, memory.landed, cleared & 1)
                        cleared += 1
                    else:
                        memory.queries.fill(
                            n,
                            q,
                            dout,
                            numbers,
                            task.b,
                            row + down,
                            h * p.D,
                            at + down,
                            behind,
                            memory.queries.filled(n),
                        )
                    n += 1


@gluon.jit
def compute_dkv(CONSUMER: gl.constexpr, p, job, memory):
    """A consumer."""
    RESULT: gl.constexpr = accumulator(p.D, gl.num_warps())
    m = 0
    n = 0
    for k in range(turns(job.tasks())):
        task = job.task(turn(k))
        if job.seen(task):
            dk = gl.zeros((p.BLOCK_N, p.D), gl.float32, RESULT)
            dv = gl.zeros((p.BLOCK_N, p.D), gl.float32, RESULT)
            keys = memory.keys[CONSUMER].take(m)
            values = memory.values[CONSUMER].take(m)
            position = task.position + CONSUMER * p.BLOCK_N
            rows = task.rows - CONSUMER * p.BLOCK_N
            for step in range(job.steps()):
                _, at, count, clear, clear_to, end, _ = job.looked_at(step, task)
                for i in range(count):
                    masked = (i < clear) | (i >= clear_to)
                    down = at + i * p.BLOCK_M
                    dk, dv = add_block(dk, dv, keys, values, n, masked, down, end, position, rows, job, memory)
                    n += 1
            memory.keys[CONSUMER].free(m)
            memory.values[CONSUMER].free(m)
            m += 1
            send(CONSUMER, dk, dv, task, job, p)


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
def send(CONSUMER: gl.constexpr, dk, dv, task, job, p):
    """Store a consumer's part of dk and dv where their keys are, with a signal; on one rank dk and dv themselves. If
    nobody here sees one half of a task's keys, `sum_kernel` does not read what comes of it."""
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
        if job.world.size == 1:  # the store rounds
            gl.store(p.dk_ptr + base + places, dk, mask=inside)
            gl.store(p.dv_ptr + base + places, dv, mask=inside)
        else:
            whole = gl.cast(p.B * p.S, gl.int64) * p.KV * p.D
            target = pl.peer(p.parts_ptr + task.distance * 2 * whole + base, task.source, job.world)
            gl.store(target + places, dk, mask=inside)
            gl.store(target + whole + places, dv, mask=inside)
            if task.distance > 0:
                at = ((task.distance - 1) * p.B + task.b) * p.KV + task.g
                at = at * num_pieces(p, p.BLOCK_N) + place_of(row, p) // p.BLOCK_N
                pl.signal(p.parted_ptr + at, task.source, job.world, job.number, "set")  # publish


# ------------------------------------------------------------------------------------------------------------ kernel
@gluon.jit(do_not_specialize=["together"])
def gluon_dkv_kernel(
    q,  # (B, S, H * D) this rank's, blocks of 1 x BLOCK_M x D
    dout,  # as q
    numbers,  # fp32 (2 * B * H * num_places) this rank's, see Backward.rows_ptr; blocks of BLOCK_M
    k,  # (B, S, KV * D) this rank's, blocks of 1 x BLOCK_N x D
    v,  # as k
    k_inbox,  # ((size - 1) * B, S, KV * D) this rank's, blocks as of k
    v_inbox,  # as k_inbox
    p,  # Backward, without the tensors above; BLOCK_N: keys of a consumer
    together,  # heads of keys of all batches that programs work on at a time
    world,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The module's kernel: shared memory, barriers, and who does what. It waits for nothing, as `keys_kernel`."""
    keys = open_slots(q.dtype, 1, p.BLOCK_N, p.D, 1), open_slots(q.dtype, 1, p.BLOCK_N, p.D, 1)
    values = open_slots(q.dtype, 1, p.BLOCK_N, p.D, 1), open_slots(q.dtype, 1, p.BLOCK_N, p.D, 1)
    queries = open_query_slots(q, numbers, STAGES, p.BLOCK_M, p.D)
    memory = KeysMemory(keys, values, queries, open_barriers(1).index(0))
    number = 0
    if world.size > 1:
        number = gl.load(p.number_ptr)
    job = KeysJob(p, together, gl.cast(world.rank, gl.int32), number, world)
    gl.warp_specialize(
        [
            (compute_dkv, (0, p, job, memory)),
            (compute_dkv, (1, p, job, memory)),
            (load_for_dkv, (p, job, memory, q, dout, numbers, (k, v), (k_inbox, v_inbox))),
        ],
        [num_warps, 1],
        REGISTERS,
    )
