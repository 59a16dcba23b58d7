"""The kernel of `kernel` in specialised warps, where copy engines move keys and values: FlashAttention-3 of Shah et al.

A program has a loader warp and two consumers of four warps, a warpgroup each. The loader fills slots with queries, keys
and values, and waits for the ranks' chunks in the order in which `kernel.visit` has them. Each consumer attends half of
a task's queries to all keys that the task sees. It begins the scores of the next block of keys and the product with the
values of this one at once, and while the tensor cores work at the second it has the softmax of the first. The consumers
take turns at beginning products, so that one has softmax while the tensor cores have the other's products.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

import pkt.language as pl
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.launch.passing import lasts
from pkt.runtime.memory.tensor import SymmetricTensor

from ..declaration import Call, Launch
from ..shared.gluon_aggregate import aggregate
from ..shared.gluon_host import CONSUMER_WARPS, descriptor
from ..shared.gluon_scales import CONSUMERS
from ..shared.gluon_slots import Slots, open_slots
from ..shared.gluon_warps import accumulator, half_layout, open_barriers, whole_rows
from ..shared.grid import num_programs
from ..shared.products import fitting
from ..shared.tile_attention import LN2
from .gluon_tasks import Job, turn, turns
from .kernel import Attention, counter, num_pieces
from .planning import GLUON_ROWS, GLUON_TILES, Plan, documents, sizes
from .rules import delay
from .sequence import parts as parts_of
from .sequence import pieces
from .turns import NEAR, heads_together, task_costs

STAGES = 2
"""Slots for keys, and as many for values."""
REGISTERS = gl.constexpr([240, 32])
"""A thread of the second consumer and of the loader; the first consumer has what is left."""


# ------------------------------------------------------------------------------------------------------------- roles
@aggregate
class Memory:
    """What the roles share."""

    queries: Slots  # of a consumer's half of a task each, in turn
    keys: Slots
    values: Slots
    landed: gl.shared_memory_descriptor  # a barrier: values have come whose last rows are to be cleared
    results: gl.shared_memory_descriptor  # room for each consumer's result
    begins: gl.shared_memory_descriptor  # a barrier a consumer: it may begin its next products


@gluon.jit
def open_memory(dtype, p, STAGES: gl.constexpr):
    """Empty slots and barriers."""
    HALF: gl.constexpr = p.BLOCK_M // CONSUMERS
    queries = open_slots(dtype, CONSUMERS, HALF, p.D, 1)
    keys = open_slots(dtype, STAGES, p.BLOCK_N, p.D, CONSUMERS)
    values = open_slots(dtype, STAGES, p.BLOCK_N, p.D, CONSUMERS)
    results = gl.allocate_shared_memory(dtype, [CONSUMERS, HALF, p.D], half_layout(HALF, p.D, dtype))
    begins = open_barriers(CONSUMERS)
    mbarrier.arrive(begins.index(0), count=1)
    return Memory(queries, keys, values, open_barriers(1).index(0), results, begins)


@gluon.jit
def fetch(slots, n, own, inbox, block, b, column, landed):
    """Fill the slot of block n of keys, or of values, from those of this rank or of the others. b, column: where they
    are in there. landed: as of `Slots.fill`."""
    row = block.at + block.shift
    if block.distance == 0:
        slots.fill(n, own, b, row, column, landed)
    else:
        slots.fill(n, inbox, b, row, column, landed)


@gluon.jit
def arrived(block, here, task, job):
    """Wait for the block's chunk, unless it is of step `here`, which has been waited for. (The batch of the block's
    keys in the tensors that they are in; the step whose chunk is here.)"""
    b = task.b
    if job.world.size > 1:  # or no wait would be compiled, which pkt takes for a wait that was lost
        if block.distance > 0:
            if job.heads is None:  # or `await_heads` has waited
                if block.step != here:
                    at = counter(block.distance, task.b, block.chunk, job.p)
                    pl.wait(job.p.ready_ptr + at, job.epoch, job.world)
                    here = block.step
            b += (block.distance - 1) * job.p.B
    return b, here


@gluon.jit
def await_heads(here, task, job):
    """Wait for the group of the task's head from all peers, unless it is group `here`, which has been waited for. (The
    group that is here.)"""
    first = task.b // job.p.joined * job.p.joined
    group = (first * job.p.H + task.h) // job.heads.GROUP
    if group != here:
        for d in range(job.world.size - 1):
            pl.wait(job.p.ready_ptr + group * (job.world.size - 1) + d, job.epoch, job.world)
    return group


@gluon.jit
def begin_together(k, p, job):
    """Wait until all programs are about to begin their task k, if all have one: programs that drift apart do not find
    in the L2 cache what others have read."""
    if p.bar_ptr is not None:
        if (k + 1) * gl.num_programs(0) <= job.tasks():
            pl.grid_barrier(p.bar_ptr, job.world)


@gluon.jit
def load(p, job, memory, own, inboxes):
    """The loader. own, inboxes: queries, keys and values of this rank, and of the others, see the kernels."""
    HALF: gl.constexpr = p.BLOCK_M // CONSUMERS
    n = 0
    cleared = 0  # blocks
    group = -1  # of heads, that is here
    for k in range(turns(job.tasks())):
        task = job.task(turn(k))
        if job.heads is not None:
            begin_together(k, p, job)
            group = await_heads(group, task, job)
        for c in gl.static_range(CONSUMERS):
            row = task.row + c * HALF
            if job.heads is None:
                memory.queries.load(k * CONSUMERS + c, own[0], task.b, row, task.h * p.D)
            elif task.distance == 0:
                memory.queries.load(k * CONSUMERS + c, own[0], task.b, row, (job.rank * p.H + task.h) * p.D)
            else:
                b = (task.distance - 1) * p.B + task.b
                memory.queries.load(k * CONSUMERS + c, inboxes[0], b, row, task.h * p.D)
        here = -1  # the step whose chunk is here
        block = job.seek(0, task)
        while block.step < job.steps():
            b, here = arrived(block, here, task, job)
            column = job.column(task, block)
            fetch(memory.keys, n, own[1], inboxes[1], block, b, column, memory.keys.filled(n))
            rows = job.kept(block)
            if rows < p.BLOCK_N:
                fetch(memory.values, n, own[2], inboxes[2], block, b, column, memory.landed)
                memory.values.keep_first(n, rows, memory.landed, cleared & 1)
                cleared += 1
            else:
                fetch(memory.values, n, own[2], inboxes[2], block, b, column, memory.values.filled(n))
            n += 1
            block = job.next(block, task)


@gluon.jit
def masked(CONSUMER: gl.constexpr, scores, block, task, job):
    """A consumer's scores without those of keys that a query does not see."""
    LAYOUT: gl.constexpr = scores.type.layout
    m = CONSUMER * scores.shape[0] + gl.arange(0, scores.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    low, high = job.sees(task.position + m, m < task.rows)
    at = block.at + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    seen = (at[None, :] >= low[:, None]) & (at[None, :] < gl.minimum(high, block.end)[:, None])
    return gl.where(seen, scores, -float("inf"))


@gluon.jit
def begin_scores(CONSUMER: gl.constexpr, q, n, memory, blank):
    """Begin a consumer's scores of block n, when it is its turn."""
    keys = memory.keys.take(n)
    mbarrier.wait(memory.begins.index(CONSUMER), n & 1)
    return warpgroup_mma(q, keys.permute([1, 0]), blank, use_acc=False, is_async=True)


@gluon.jit
def softmax(CONSUMER: gl.constexpr, scores, block, top, task, job):
    """(greatest score, fp32 weights without it, what the weights so far shrink by), all in base 2."""
    if (block.at < block.clear_from) | (block.at >= block.clear_to):
        scores = masked(CONSUMER, scores, block, task, job)
    new = gl.maximum(top, gl.max(scores, 1) * job.p.scale)
    finite = gl.where(new == -float("inf"), 0.0, new)  # no key seen so far
    return new, gl.exp2(scores * job.p.scale - finite[:, None]), gl.exp2(top - finite)


@gluon.jit
def attend(CONSUMER: gl.constexpr, p, job, memory):
    """A consumer."""
    HALF: gl.constexpr = p.BLOCK_M // CONSUMERS
    DTYPE: gl.constexpr = memory.queries.room.dtype
    SCORES: gl.constexpr = accumulator(p.BLOCK_N, gl.num_warps())
    RESULT: gl.constexpr = accumulator(p.D, gl.num_warps())
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    ROWS_OF_RESULT: gl.constexpr = gl.SliceLayout(1, RESULT)
    n = 0
    for k in range(turns(job.tasks())):
        task = job.task(turn(k))
        q = memory.queries.take(k * CONSUMERS + CONSUMER)
        top = gl.full((HALF,), -float("inf"), gl.float32, ROWS)
        blank = gl.zeros((HALF, p.BLOCK_N), gl.float32, SCORES)
        acc = gl.zeros((HALF, p.D), gl.float32, RESULT)
        block = job.seek(0, task)
        scores = begin_scores(CONSUMER, q, n, memory, blank)
        mbarrier.arrive(memory.begins.index(1 - CONSUMER), count=1)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        memory.keys.free(n)
        top, exact, _ = softmax(CONSUMER, scores, block, top, task, job)
        total = gl.sum(exact, 1)
        weights = gl.convert_layout(exact.to(DTYPE), WEIGHTS)
        block = job.next(block, task)
        while block.step < job.steps():
            scores = begin_scores(CONSUMER, q, n + 1, memory, blank)
            acc = warpgroup_mma(weights, memory.values.take(n), acc, is_async=True)
            mbarrier.arrive(memory.begins.index(1 - CONSUMER), count=1)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            memory.keys.free(n + 1)
            top, exact, shrink = softmax(CONSUMER, scores, block, top, task, job)
            total = total * shrink + gl.sum(exact, 1)
            acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
            memory.values.free(n)
            acc = acc * gl.convert_layout(shrink, ROWS_OF_RESULT)[:, None]
            weights = gl.convert_layout(exact.to(DTYPE), WEIGHTS)
            block = job.next(block, task)
            n += 1
        memory.queries.free(k * CONSUMERS + CONSUMER)
        acc = warpgroup_mma(weights, memory.values.take(n), acc, is_async=True)
        acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
        memory.values.free(n)
        n += 1
        finish(CONSUMER, acc, top, total, task, memory.results.index(CONSUMER), p, job)


@gluon.jit
def finish(CONSUMER: gl.constexpr, acc, top, total, task, room, p, job):
    """Store a consumer's result where its queries come from, and its logarithms, unless nobody wants them. room: shared
    memory for the result, from which each thread stores 16 bytes of a row at a time."""
    HALF: gl.constexpr = acc.shape[0]
    DTYPE: gl.constexpr = room.dtype
    STORED: gl.constexpr = whole_rows(p.D, DTYPE, gl.num_warps())
    row = task.row + CONSUMER * HALF
    rows = task.rows - CONSUMER * HALF
    empty = total == 0.0  # all scores are minus infinity
    total = gl.where(empty, 1.0, total)
    share = gl.convert_layout(1.0 / total, gl.SliceLayout(1, acc.type.layout))
    room.store((acc * share[:, None]).to(DTYPE))
    m = gl.arange(0, HALF, layout=gl.SliceLayout(1, STORED))
    d = gl.arange(0, p.D, layout=gl.SliceLayout(0, STORED))
    out_ptr = p.out_ptr
    head = task.h
    WIDTH: gl.constexpr = (p.H if job.heads is None else p.H * job.world.size) * p.D
    if job.heads is not None:
        out_ptr = pl.peer(out_ptr, (job.rank - task.distance + job.world.size) % job.world.size, job.world)
        head += job.rank * p.H
    base = (gl.cast(task.b, gl.int64) * p.S + row) * WIDTH + head * p.D
    places = m[:, None] * WIDTH + d[None, :]
    gl.store(out_ptr + base + places, room.load(STORED), mask=(m < rows)[:, None])
    if p.lse_ptr is not None:
        m = gl.arange(0, HALF, layout=total.type.layout)
        base = (gl.cast(task.b, gl.int64) * p.H + task.h) * p.S + row
        lse = gl.where(empty, -float("inf"), (top + gl.log2(total)) * LN2)
        gl.store(p.lse_ptr + base + m, lse, mask=m < rows)


# ------------------------------------------------------------------------------------------------------------ kernel
@gluon.jit(do_not_specialize=["together"])
def gluon_attention_kernel(
    q,  # (B, S, H * D) this rank's, blocks of 1 x BLOCK_M / 2 x D
    k,  # (B, S, KV * D) this rank's, blocks of 1 x BLOCK_N x D
    v,  # as k
    k_inbox,  # ((size - 1) * B, S, KV * D) this rank's, blocks as of k
    v_inbox,  # as k_inbox
    p,  # Attention, in the way "copied", without the tensors above
    together,  # heads of all batches that programs work on at a time
    world,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The module's kernel."""
    epoch = 0
    if world.size > 1:
        epoch = gl.load(p.ready_ptr + (world.size - 1) * p.B * num_pieces(p, p.CHUNK))
    memory = open_memory(q.dtype, p, STAGES)
    job = Job(p, together, gl.cast(world.rank, gl.int32), epoch, world, None)
    gl.warp_specialize(
        [
            (attend, (0, p, job, memory)),
            (attend, (1, p, job, memory)),
            (load, (p, job, memory, (q, k, v), (q, k_inbox, v_inbox))),
        ],
        [num_warps, 1],
        REGISTERS,
    )


# -------------------------------------------------------------------------------------------------------------- host
def costs_of_queries(call: Call, plan: Plan) -> list[float]:
    """What the tasks of a head of queries cost, in their order."""
    s, layout, size = call["s"], call["layout"], call.world.size
    queries = pieces(s, layout, call.world.rank, size, GLUON_TILES.block_m)[::-1]
    keys = [part for rank in range(size) for part in parts_of(s, layout, rank, size)]
    return task_costs(call, queries, keys, plan.view, GLUON_ROWS)


def planned_attention(call: Call, plan: Plan, *inboxes: SymmetricTensor) -> Launch:
    """launch(q, k, v, out, cu_seqlens, lse). inboxes: of keys and values, as `planning.windows` has them, and the
    counters, `Attention`'s ready_ptr; none on one rank."""
    world = call.world
    b, s, h, g, d = (call[letter] for letter in "bshgd")
    one, others = (b, s), ((world.size - 1) * b, s)

    def rows(x: torch.Tensor, outer: tuple[int, int], heads: int, block: int) -> Any:
        return descriptor(x.view(*outer, heads * d), (1, block, d))

    fits = [fitting(call[name]) for name in ("q", "k", "v")]

    def fitted(*tensors: torch.Tensor) -> list[torch.Tensor]:
        """The operands, which TMA can address."""
        return [fit(x) if fit else x for fit, x in zip(fits, tensors)]

    some_q, *some = fitted(*(call[name] for name in ("q", "k", "v")))
    q_rows = rows(some_q, one, h, GLUON_TILES.block_m // CONSUMERS.value)
    own = [rows(x, one, g, GLUON_TILES.block_n) for x in some]
    theirs = [lasts(rows(x.plain(), others, g, GLUON_TILES.block_n)) for x in inboxes[:2]] or own
    ready = inboxes[2] if inboxes else None
    spans_of = documents(call)
    same = {**dict.fromkeys(Attention._fields), **sizes(call, plan), "num_comm_sms": 0, "WAY": tl.constexpr("copied")}
    group, programs = h // g, num_programs(world, b * h * plan.blocks)
    near = max(NEAR // (2 * world.size * s * d * call.dtype.itemsize), 1) * group
    together = heads_together(costs_of_queries(call, plan), b * h, near, programs, group, delay(call, 2))
    start = cooperative_launch(world, gluon_attention_kernel, (programs,), STAGES=STAGES, num_warps=CONSUMER_WARPS)

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor | None,
        lse: torch.Tensor,
    ) -> Any:  # fmt: skip
        of_call = {"spans_ptr": spans_of(cu_seqlens), "out_ptr": out, "lse_ptr": lse}
        p = Attention(**{**same, **of_call, "ready_ptr": ready})
        q_rows.base, own[0].base, own[1].base = fitted(q, k, v)
        try:
            start(q_rows, *own, *theirs, p, together, world.device)
        finally:
            q_rows.base = own[0].base = own[1].base = None
        return out, lse

    return launch
