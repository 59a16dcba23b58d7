"""The kernel of dq in specialised warps: `backward._queries`, as gluon.py has the forward pass.

The loader fills slots with a task's queries and dout, and with blocks of keys and values, and waits for the ranks'
chunks in the order of `kernel.visit`. Each of the two consumers has half of a task's queries. While the tensor cores
compute the next block's scores it has the slopes of this one, and while they multiply these with the keys it has the
next block's weights. Weights and slopes never leave the registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ..shared.gluon_aggregate import aggregate
from ..shared.gluon_scales import CONSUMERS
from ..shared.gluon_slots import Slots, open_slots
from ..shared.gluon_warps import accumulator, half_layout, open_barriers, whole_rows
from ..shared.tile_attention import LN2
from .backward import num_places, place_of
from .gluon import REGISTERS, arrived, fetch
from .gluon_tasks import Job, turn, turns


# ----------------------------------------------------------------------------------------------- weights and slopes
@gluon.jit
def needs_mask(block):
    """Whether some pairs of a block are not seen."""
    return (block.at < block.clear_from) | (block.at >= block.clear_to)


@gluon.jit
def weigh(scores, lse, masked, at, end, position, rows, job):
    """fp32 weights of a consumer's scores: 0 where a row does not see a column. lse: in base 2, (rows, 1) or (1,
    columns). masked: whether there are such. at, position: of the first column, and of the first of `rows` rows. No row
    sees columns from position `end` on."""
    weights = gl.exp2(scores * job.p.scale - lse)
    if masked:
        LAYOUT: gl.constexpr = scores.type.layout
        m = gl.arange(0, scores.shape[0], layout=gl.SliceLayout(1, LAYOUT))
        low, high = job.sees(position + m, m < rows)
        column = at + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, LAYOUT))
        seen = (column[None, :] >= low[:, None]) & (column[None, :] < gl.minimum(high, end)[:, None])
        weights = gl.where(seen, weights, 0.0)
    return weights


@gluon.jit
def rounded(x, DTYPE: gl.constexpr, RESULT: gl.constexpr):
    """Weights or slopes as the tensor cores take them from registers for a product of layout RESULT."""
    return gl.convert_layout(x.to(DTYPE), gl.DotOperandLayout(0, RESULT, 2))


@gluon.jit
def slot_of(slots, n):
    """The slot of block n, which has been taken."""
    return slots.room.index(n % slots.STAGES)


# ------------------------------------------------------------------------------------------------------------- roles
@aggregate
class QueriesMemory:
    """What the roles of the kernel of dq share."""

    queries: gl.tuple  # Slots of each consumer for its half of a task. With one slot each its address is a constant
    douts: gl.tuple  # as queries
    keys: Slots
    values: Slots
    landed: gl.shared_memory_descriptor  # a barrier: rows have come of which the last are to be cleared
    results: gl.shared_memory_descriptor  # room for each consumer's result


@gluon.jit
def load_for_dq(p, job, memory, q, dout, own, inboxes):
    """The loader. own, inboxes: as of `gluon.load`."""
    HALF: gl.constexpr = p.BLOCK_M // CONSUMERS
    n = 0
    cleared = 0  # slots
    for k in range(turns(job.tasks())):
        task = job.task(turn(k))
        for c in gl.static_range(CONSUMERS):
            memory.queries[c].load(k, q, task.b, task.row + c * HALF, task.h * p.D)
            memory.douts[c].load(k, dout, task.b, task.row + c * HALF, task.h * p.D)
        column = task.h // (p.H // p.KV) * p.D
        here = -1  # the step whose chunk is here
        block = job.seek(0, task)
        while block.step < job.steps():
            b, here = arrived(block, here, task, job)
            rows = job.kept(block)
            for i in gl.static_range(2):
                slots = memory.keys if i == 0 else memory.values
                if rows < p.BLOCK_N:
                    fetch(slots, n, own[i], inboxes[i], block, b, column, memory.landed)
                    slots.keep_first(n, rows, memory.landed, cleared & 1)
                    cleared += 1
                else:
                    fetch(slots, n, own[i], inboxes[i], block, b, column, slots.filled(n))
            n += 1
            block = job.next(block, task)


@gluon.jit
def compute_dq(CONSUMER: gl.constexpr, p, job, memory):
    """A consumer."""
    HALF: gl.constexpr = p.BLOCK_M // CONSUMERS
    DTYPE: gl.constexpr = memory.keys.room.dtype
    SCORES: gl.constexpr = accumulator(p.BLOCK_N, gl.num_warps())
    RESULT: gl.constexpr = accumulator(p.D, gl.num_warps())
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    n = 0
    for k in range(turns(job.tasks())):
        task = job.task(turn(k))
        position = task.position + CONSUMER * HALF
        rows = task.rows - CONSUMER * HALF
        m = CONSUMER * HALF + gl.arange(0, HALF, layout=ROWS)
        numbers = p.rows_ptr + (gl.cast(task.b, gl.int64) * p.H + task.h) * num_places(p) + place_of(task.row, p)
        lse = gl.load(numbers + m, mask=m < task.rows, other=0.0)
        delta = gl.load(numbers + gl.cast(p.B * p.H, gl.int64) * num_places(p) + m, mask=m < task.rows, other=0.0)
        blank = gl.zeros((HALF, p.BLOCK_N), gl.float32, SCORES)
        acc = gl.zeros((HALF, p.D), gl.float32, RESULT)
        block = job.seek(0, task)
        q = memory.queries[CONSUMER].take(k)
        scores = warpgroup_mma(q, memory.keys.take(n).permute([1, 0]), blank, use_acc=False, is_async=True)
        dout = memory.douts[CONSUMER].take(k)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        weights = weigh(scores, lse[:, None], needs_mask(block), block.at, block.end, position, rows, job)
        block = job.next(block, task)
        while block.step < job.steps():
            values = memory.values.take(n).permute([1, 0])
            products = warpgroup_mma(dout, values, blank, use_acc=False, is_async=True)
            keys = memory.keys.take(n + 1).permute([1, 0])
            scores = warpgroup_mma(q, keys, blank, use_acc=False, is_async=True)
            products = warpgroup_mma_wait(1, deps=(products,))
            memory.values.free(n)
            slopes = rounded(weights * (products - delta[:, None]), DTYPE, RESULT)
            acc = warpgroup_mma(slopes, slot_of(memory.keys, n), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            weights = weigh(scores, lse[:, None], needs_mask(block), block.at, block.end, position, rows, job)
            block = job.next(block, task)
            acc, slopes = warpgroup_mma_wait(0, deps=(acc, slopes))
            memory.keys.free(n)
            n += 1
        memory.queries[CONSUMER].free(k)
        values = memory.values.take(n).permute([1, 0])
        products = warpgroup_mma(dout, values, blank, use_acc=False, is_async=True)
        products = warpgroup_mma_wait(0, deps=(products,))
        memory.values.free(n)
        memory.douts[CONSUMER].free(k)
        slopes = rounded(weights * (products - delta[:, None]), DTYPE, RESULT)
        acc = warpgroup_mma(slopes, slot_of(memory.keys, n), acc, is_async=True)
        acc, slopes = warpgroup_mma_wait(0, deps=(acc, slopes))
        memory.keys.free(n)
        n += 1
        acc = seen_alone(acc * (p.scale * LN2), position, rows, job)
        store_dq(CONSUMER, acc, task, memory.results.index(CONSUMER), p)


@gluon.jit
def seen_alone(x, position, rows, job):
    """The result x of `rows` rows from a position on, and 0 for a row that sees no column: it may be padding that is
    NaN."""
    m = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))
    low, high = job.sees(position + m, m < rows)
    return gl.where((low < high)[:, None], x, 0.0)


@gluon.jit
def store_dq(CONSUMER: gl.constexpr, x, task, room, p):
    """Store a consumer's result. room: shared memory for it, from which each thread stores 16 bytes of a row at a
    time."""
    HALF: gl.constexpr = x.shape[0]
    STORED: gl.constexpr = whole_rows(p.D, room.dtype, gl.num_warps())
    room.store(x.to(room.dtype))
    m = CONSUMER * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, STORED))
    d = gl.arange(0, p.D, layout=gl.SliceLayout(0, STORED))
    base = (gl.cast(task.b, gl.int64) * p.S + task.row) * (p.H * p.D) + task.h * p.D
    places = m[:, None] * (p.H * p.D) + d[None, :]
    gl.store(p.dq_ptr + base + places, room.load(STORED), mask=(m < task.rows)[:, None])


# ------------------------------------------------------------------------------------------------------------ kernel
@gluon.jit(do_not_specialize=["together"])
def gluon_dq_kernel(
    q,  # (B, S, H * D) this rank's, blocks of 1 x BLOCK_M / 2 x D
    dout,  # as q
    k,  # (B, S, KV * D) this rank's, blocks of 1 x BLOCK_N x D
    v,  # as k
    k_inbox,  # ((size - 1) * B, S, KV * D) this rank's, blocks as of k
    v_inbox,  # as k_inbox
    p,  # Backward, without the tensors above
    together,  # heads of all batches that programs work on at a time
    world,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The module's kernel: shared memory, barriers, and who does what."""
    HALF: gl.constexpr = p.BLOCK_M // CONSUMERS
    queries = open_slots(q.dtype, 1, HALF, p.D, 1), open_slots(q.dtype, 1, HALF, p.D, 1)
    douts = open_slots(q.dtype, 1, HALF, p.D, 1), open_slots(q.dtype, 1, HALF, p.D, 1)
    keys = open_slots(q.dtype, STAGES, p.BLOCK_N, p.D, CONSUMERS)
    values = open_slots(q.dtype, STAGES, p.BLOCK_N, p.D, CONSUMERS)
    results = gl.allocate_shared_memory(q.dtype, [CONSUMERS, HALF, p.D], half_layout(HALF, p.D, q.dtype))
    memory = QueriesMemory(queries, douts, keys, values, open_barriers(1).index(0), results)
    number = 0
    if world.size > 1:
        number = gl.load(p.number_ptr)
    job = Job(p, together, gl.cast(world.rank, gl.int32), number, world, None)
    gl.warp_specialize(
        [
            (compute_dq, (0, p, job, memory)),
            (compute_dq, (1, p, job, memory)),
            (load_for_dq, (p, job, memory, q, dout, (k, v), (k_inbox, v_inbox))),
        ],
        [num_warps, 1],
        REGISTERS,
    )
