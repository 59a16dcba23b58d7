"""All-gather + matmul in one Gluon kernel: A is pushed by a warp of its own, beside the tensor cores.

As push in all_gather_matmul, with three differences. The pushing is done by one warp of each of the first `num_comm`
programs, through small buffers of its own, by TMA: one load, then a store to each peer; no SM is given away. A row
block is signalled in chunks of CHUNK columns, and the loader waits chunk by chunk, so a tile begins when its first
columns are here. And the order of pushing follows the order of computing: push_rows row blocks at a time, chunk by
chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

import pkt.language as pl
from pkt.errors import ShapeError
from pkt.language import ptx
from pkt.runtime.factories import empty, signals
from pkt.runtime.launch import cooperative
from pkt.runtime.tensor import SymmetricTensor
from pkt.runtime.world import World

from . import _common
from ._gluon import (
    CONSUMER_WARPS,
    REGISTERS,
    SHARED,
    TILES,
    check,
    check_tiles,
    consume,
    descriptor,
    first_tile,
    grouped,
    layout,
    lend_halves,
    load_step,
    open_barriers,
    open_ring,
    peer_descriptors,
    release_halves,
    ring_bytes,
    take_over,
    to_peers,
    weights_descriptor,
)
from ._matmul import Epilogue, Tiles, stored

CALL = "all_gather_matmul"


# -------------------------------------------------------------------------------------------------------- order
@gluon.jit
def _tile(t, rank, num_m, num_n, SIZE: gl.constexpr, GROUP: gl.constexpr, push_rows):
    """Tile t: (source, row block, column). The own shard first; then, push_rows row blocks of every peer at a time, in
    the order in which they are pushed, column by column."""
    own = t < num_m * num_n
    own_i, own_j = grouped(gl.minimum(t, num_m * num_n - 1), num_m, num_n, GROUP)
    others: gl.constexpr = max(SIZE - 1, 1)
    q = gl.maximum(t - num_m * num_n, 0)
    tiles = others * num_n * push_rows
    first = (q // tiles) * push_rows
    cells = gl.minimum(num_m - first, push_rows) * others
    cell = (q % tiles) % cells
    source = gl.where(own, rank, (rank + 1 + cell % others) % SIZE)
    i = gl.where(own, own_i, first + cell // others)
    j = gl.where(own, own_j, (q % tiles) // cells)
    return source, i, j, own


@gluon.jit
def _place(t, rank, num_m, num_n, SIZE: gl.constexpr, GROUP: gl.constexpr, push_rows):
    """For `consume`: every tile is mine."""
    _, _, j, _ = _tile(t, rank, num_m, num_n, SIZE, GROUP, push_rows)
    return True, j


@gluon.jit
def _task(t, num_m, num_tasks_k, PER_CHUNK: gl.constexpr, UNITS_M: gl.constexpr, push_rows):
    """Task t of pushing: (row block, rows within it in units, column in tasks). push_rows row blocks at a time; of
    those chunk by chunk; of a chunk row by row."""
    first = (t // (push_rows * UNITS_M * num_tasks_k)) * push_rows
    rows = gl.minimum(num_m - first, push_rows) * UNITS_M
    t = t % (push_rows * UNITS_M * num_tasks_k)
    chunk = t // (rows * PER_CHUNK)
    t = t % (rows * PER_CHUNK)
    width = gl.minimum(num_tasks_k - chunk * PER_CHUNK, PER_CHUNK)
    row = t // width
    return first + row // UNITS_M, row % UNITS_M, chunk * PER_CHUNK + t % width


# ------------------------------------------------------------------------------------------------------- warps
@gluon.jit
def _load(
    a, inbox, b, ring, ready_ptr, m, N, K, epoch, world, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    UNITS_M: gl.constexpr, TASK: gl.constexpr, CHUNK: gl.constexpr, LEAVE_OUT: gl.constexpr, push_rows,
):  # fmt: skip
    num_m = gl.cdiv(m, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    chunks = gl.cdiv(K, CHUNK)
    rank = gl.cast(world.rank, gl.int32)
    it = 0
    for t in range(first_tile(), world.size * num_m * num_n, gl.num_programs(0)):
        source, i, j, own = _tile(t, rank, num_m, num_n, world.size, GROUP, push_rows)
        row = (((epoch & 1) * world.size + source) * num_m + i) * BLOCK_M
        for chunk in range(chunks):
            start = chunk * CHUNK
            end = gl.minimum(start + CHUNK, K)
            if LEAVE_OUT != "wait":
                if not own:
                    arrivals = gl.cdiv(end - start, TASK) * UNITS_M
                    pl.wait(ready_ptr + (source * num_m + i) * chunks + chunk, epoch * arrivals, world)
            for k in range(start, end, BLOCK_K):
                if own:
                    load_step(
                        it, a, i * BLOCK_M, b, j * BLOCK_N, k, ring, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES
                    )
                else:
                    load_step(it, inbox, row, b, j * BLOCK_N, k, ring, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
                it += 1
        lend_halves(it, ring, STAGES)
        it += 2


@gluon.jit
def _store(
    c, ring, m, N, K, rank, SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    push_rows,
):  # fmt: skip
    num_m = gl.cdiv(m, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    _, b_ring, _, _, _, _ = ring
    it = 0
    n = 0
    for t in range(first_tile(), SIZE * num_m * num_n, gl.num_programs(0)):
        source, i, j, _own = _tile(t, gl.cast(rank, gl.int32), num_m, num_n, SIZE, GROUP, push_rows)
        it += steps
        take_over(n, ring)
        for h in gl.static_range(2):
            # Three dimensions: rows past the shard's end are cut, not written over the next shard's.
            part = b_ring.index((it + h) % STAGES)._reinterpret(b_ring.dtype, [1, BLOCK_M, BLOCK_N // 2], c.layout)
            tma.async_copy_shared_to_global(c, [source, i * BLOCK_M, j * BLOCK_N + h * (BLOCK_N // 2)], part)
        tma.store_wait(0)
        release_halves(it, ring, STAGES)
        it += 2
        n += 1


@gluon.jit
def _load_unit(u, mine, first, num_comm, x, buffers, bars, num_m, num_tasks_k,
    BLOCK_M: gl.constexpr, UNIT_M: gl.constexpr, UNIT_K: gl.constexpr, UNITS: gl.constexpr, BUFFERS: gl.constexpr,
    PER_CHUNK: gl.constexpr, push_rows,
):  # fmt: skip
    """Unit u of this program, if there is one, from this rank's shard into its buffer."""
    if u < mine:
        task = first + (u // UNITS) * num_comm
        i, sub, task_k = _task(task, num_m, num_tasks_k, PER_CHUNK, BLOCK_M // UNIT_M, push_rows)
        row = i * BLOCK_M + sub * UNIT_M
        col = (task_k * UNITS + u % UNITS) * UNIT_K
        mbarrier.expect(bars.index(u % BUFFERS), UNIT_M * UNIT_K * 2)
        tma.async_copy_global_to_shared(x, [row, col], bars.index(u % BUFFERS), buffers.index(u % BUFFERS))


@gluon.jit
def _push(
    x, peers, buffers, bars, ready_ptr, m, K, num_comm, nap, epoch, world,
    BLOCK_M: gl.constexpr, UNIT_M: gl.constexpr, UNIT_K: gl.constexpr, UNITS: gl.constexpr, BUFFERS: gl.constexpr,
    LAG: gl.constexpr, CHUNK: gl.constexpr, push_rows,
):  # fmt: skip
    """The communicator. A task is UNITS units side by side, signalled together, LAG units after its last one."""
    SIZE: gl.constexpr = world.size
    PEERS: gl.constexpr = SIZE - 1
    PER_CHUNK: gl.constexpr = CHUNK // (UNITS * UNIT_K)
    UNITS_M: gl.constexpr = BLOCK_M // UNIT_M
    num_m = gl.cdiv(m, BLOCK_M)
    num_tasks_k = gl.cdiv(K, UNITS * UNIT_K)
    chunks = gl.cdiv(K, CHUNK)
    rank = gl.cast(world.rank, gl.int32)
    first = gl.program_id(0)
    mine = gl.maximum(gl.cdiv(num_m * UNITS_M * num_tasks_k - first, num_comm), 0) * UNITS
    mine = gl.where(first < num_comm, mine, 0)
    row0 = ((epoch & 1) * SIZE + rank) * num_m * BLOCK_M
    for u in gl.static_range(BUFFERS - 1):
        _load_unit(u, mine, first, num_comm, x, buffers, bars, num_m, num_tasks_k,
                   BLOCK_M, UNIT_M, UNIT_K, UNITS, BUFFERS, PER_CHUNK, push_rows)  # fmt: skip
    for u in range(gl.where(mine > 0, mine + LAG, 0)):
        if u < mine:
            mbarrier.wait(bars.index(u % BUFFERS), (u // BUFFERS) & 1)
            i, sub, task_k = _task(first + (u // UNITS) * num_comm, num_m, num_tasks_k, PER_CHUNK, UNITS_M, push_rows)
            at = [row0 + i * BLOCK_M + sub * UNIT_M, (task_k * UNITS + u % UNITS) * UNIT_K]
            to_peers(peers, at, buffers.index(u % BUFFERS), SIZE)
            tma.store_wait(PEERS)  # the buffer of the unit before has been read
            _load_unit(u + BUFFERS - 1, mine, first, num_comm, x, buffers, bars, num_m, num_tasks_k,
                       BLOCK_M, UNIT_M, UNIT_K, UNITS, BUFFERS, PER_CHUNK, push_rows)  # fmt: skip
        done = u - LAG
        if done >= 0:
            if done % UNITS == UNITS - 1:
                if u < mine:
                    ptx.drain(world, LAG * PEERS)
                else:
                    ptx.drain(world)
                ptx.cta_barrier()
                ptx.fence("sys")
                i, _sub, task_k = _task(
                    first + (done // UNITS) * num_comm, num_m, num_tasks_k, PER_CHUNK, UNITS_M, push_rows
                )
                counter = ready_ptr + (rank * num_m + i) * chunks + task_k // PER_CHUNK
                for d in gl.static_range(1, SIZE):
                    gl.atomic_add(pl.peer(counter, (rank + d) % SIZE, world), 1, sem="relaxed", scope="sys")
        if nap > 0:
            ptx.pause(nap)
    tma.store_wait(0)


# ------------------------------------------------------------------------------------------------------ kernel
@gluon.jit(do_not_specialize=["num_comm", "nap", "push_rows", "rows"])
def gluon_push_kernel(
    a,  # (m, K) this rank's shard, blocks of BLOCK_M x BLOCK_K
    x,  # the same, in units
    inbox,  # (2 * size * padded m, K) this rank's, blocks of BLOCK_M x BLOCK_K; halves by the parity of the launch
    b,  # (K, N) this rank's, or (N, K) if TRANSPOSED, blocks of BLOCK_K and BLOCK_N
    c,  # (size, m, N) this rank's, blocks of 1 x BLOCK_M x BLOCK_N / 2
    d1, d2, d3, d4, d5, d6, d7,  # the inboxes of ranks rank + 1, ..., in units; those past size - 1 are not used
    ready_ptr,  # int32 (size, row blocks, chunks) on every rank; [r] counts what rank r has pushed of each chunk
    bias,  # (N,) this rank's, or None
    m,
    N,
    K,
    num_comm,  # programs whose communicator pushes
    nap,  # nanoseconds that it rests after each unit
    push_rows,  # row blocks that are pushed, and computed, together
    rows,  # m; 0 where, for measurements, nothing is computed
    world,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    UNIT_M: gl.constexpr, UNIT_K: gl.constexpr, UNITS: gl.constexpr, BUFFERS: gl.constexpr, LAG: gl.constexpr,
    CHUNK: gl.constexpr, HALF: gl.constexpr, REGISTERS: gl.constexpr, TRANSPOSED: gl.constexpr,
    EPILOGUE: gl.constexpr,
    LEAVE_OUT: gl.constexpr,  # for measurements: "wait" is left out, "" nothing
    num_warps: gl.constexpr,
):  # fmt: skip
    """The module's kernel: shared memory, barriers, and who does what."""
    epoch = pl.epoch(ready_ptr, world)
    ring = open_ring(a, b, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
    buffers = gl.allocate_shared_memory(x.dtype, [BUFFERS, UNIT_M, UNIT_K], x.layout)
    bars = open_barriers(BUFFERS)
    UNITS_M: gl.constexpr = BLOCK_M // UNIT_M
    TASK: gl.constexpr = UNITS * UNIT_K
    num_m = gl.cdiv(rows, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    tiles = world.size * num_m * num_n
    where = (gl.cast(world.rank, gl.int32), num_m, num_n, world.size, GROUP, push_rows)
    PLACE: gl.constexpr = _place
    if world.size > 1:
        gl.warp_specialize(
            [
                (consume, (ring, tiles, where, bias, N, K, PLACE, False, EPILOGUE, HALF, TRANSPOSED,
                           BLOCK_M, BLOCK_N, BLOCK_K, STAGES, num_warps)),
                (_load, (a, inbox, b, ring, ready_ptr, rows, N, K, epoch, world, TRANSPOSED,
                         BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, UNITS_M, TASK, CHUNK, LEAVE_OUT, push_rows)),
                (_store, (c, ring, rows, N, K, world.rank, world.size,
                          BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, push_rows)),
                (_push, (x, (d1, d2, d3, d4, d5, d6, d7), buffers, bars, ready_ptr, m, K, num_comm, nap, epoch, world,
                         BLOCK_M, UNIT_M, UNIT_K, UNITS, BUFFERS, LAG, CHUNK, push_rows)),
            ],
            [1, 1, 1],
            [REGISTERS, REGISTERS, REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (ring, tiles, where, bias, N, K, PLACE, False, EPILOGUE, HALF, TRANSPOSED,
                           BLOCK_M, BLOCK_N, BLOCK_K, STAGES, num_warps)),
                (_load, (a, inbox, b, ring, ready_ptr, rows, N, K, epoch, world, TRANSPOSED,
                         BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, UNITS_M, TASK, CHUNK, LEAVE_OUT, push_rows)),
                (_store, (c, ring, rows, N, K, world.rank, world.size,
                          BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, push_rows)),
            ],
            [1, 1],
            [REGISTERS, REGISTERS],
        )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- host
class PushPlan(NamedTuple):
    """How A is pushed, as the keywords of all_gather_matmul say it; `unit` is there the five from unit_m to lag."""

    num_comm_sms: int = 132
    unit_m: int = 64
    unit_k: int = 64
    units: int = 1
    buffers: int = 2
    lag: int = 1
    chunk: int = 512
    push_rows: int = 0
    nap: int = 0


def push_plan(N: int, size: int) -> PushPlan:
    """The plan for `b` of N columns, by the products for each element pushed. Where the links are the limit, all
    programs push; where the tensor cores are, pushing takes memory's bandwidth from them, so few do.

    4 x H200, C (S, S / 4) = A (S, S) @ B (S, S / 4), ms, from benchmarks/results/all_gather_matmul.json:

    | S (N = S / 4)        | 4096   | 8192   | 16384 | 32768 |
    |----------------------|-------:|-------:|------:|------:|
    | 132, chunks of 256   | 0.1061 | 0.4390 | 3.727 | 38.66 |
    | 132, chunks of 512   | 0.1091 | 0.4397 | 3.698 | 36.13 |
    | 32                   | 0.1942 | 0.7193 | 3.130 | 26.11 |
    | 32, 2 units a signal | 0.1420 | 0.5260 | 3.052 | 25.89 |
    """
    if 3 * N * size < 4 * 4096 * (size - 1):
        return PushPlan(132, chunk=256)
    return PushPlan(32, units=2, lag=2)


class _Space(NamedTuple):
    inbox: SymmetricTensor
    ready: SymmetricTensor


def settings(
    N: int, world: World, tiles: Tiles | None, *, unit: Sequence[int] = (), **given: int
) -> tuple[PushPlan, Tiles]:
    """The plan and the tiles for `b` of N columns: what is given, in the words of all_gather_matmul, else what follows
    from the shapes. Raises ShapeError where the parts do not fit together, or into shared memory."""
    if len(unit) > 5:
        raise ShapeError.argument(CALL, "unit", tuple(unit), "at most five numbers", world.rank)
    plan = push_plan(N, world.size)._replace(**given, **dict(zip(PushPlan._fields[1:], unit)))
    tiles = tiles or TILES
    check_tiles(CALL, tiles, world)
    check_plan(plan, tiles, world)
    return plan, tiles


def check_plan(plan: PushPlan, tiles: Tiles, world: World) -> None:
    """ShapeError where the parts do not fit together, or into shared memory beside the ring."""
    unit, task = plan[1:6], plan.units * plan.unit_k
    used = ring_bytes(tiles) + 2 * plan.buffers * plan.unit_m * plan.unit_k

    def need(holds: bool, name: str, found: Any, wanted: str) -> None:
        if not holds:
            raise ShapeError.argument(CALL, name, found, wanted, world.rank)

    need(plan.num_comm_sms >= 1, "num_comm_sms", plan.num_comm_sms, "at least 1")
    need(plan.push_rows >= 0, "push_rows", plan.push_rows, "at least 0")
    need(plan.nap >= 0, "nap", plan.nap, "nanoseconds, at least 0")
    need(plan.unit_m in (32, 64, 128) and plan.unit_k in (64, 128), "unit", unit,
         "32, 64 or 128 rows of 64 or 128 columns")  # fmt: skip
    need(plan.units >= 1 and plan.lag >= 1, "unit", unit, "units and lag at least 1")
    need(plan.buffers >= 2 and used <= SHARED, "unit", unit,
         f"at least 2 buffers that fit beside the ring, {used} bytes, into {SHARED} of shared memory")  # fmt: skip
    need(plan.chunk > 0 and plan.chunk % task == 0 and plan.chunk % tiles.block_k == 0, "chunk", plan.chunk,
         f"a multiple of {task}, UNITS * UNIT_K, and of BLOCK_K, {tiles.block_k}")  # fmt: skip


def push_launch(
    world: World,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    plan: PushPlan,
    tiles: Tiles,
    epilogue: Epilogue = "none",
    leave_out: str = "",
) -> _common.Launch:
    """launch(a, b, out, bias), for tensors of the same facts as these: `out` (size * m, N) = the gathered `a` (m, K) @
    `b` (K, N), as all_gather_matmul(shard="rows"), whose checks of the operands come before. bf16 or fp16, rows at
    multiples of 16 bytes, on sm_90. Collective. leave_out: for measurements, "wait" or "product", or "push" for both
    waiting and pushing; the result is then nobody's. Raises Unsupported, ShapeError."""
    rows_b, transposed = stored(b)
    check(CALL, world, a, rows_b, out)
    check_tiles(CALL, tiles, world)
    check_plan(plan, tiles, world)
    (m, K), N, size, dtype = a.shape, b.shape[1], world.size, a.dtype
    num_m, num_n = triton.cdiv(m, tiles.block_m), triton.cdiv(N, tiles.block_n)
    programs = _common.num_programs(world, world.num_sms)
    if not plan.push_rows:  # as many row blocks as the programs compute at a time
        plan = plan._replace(push_rows=triton.cdiv(programs, num_n * max(size - 1, 1)))
    plan = plan._replace(push_rows=min(plan.push_rows, num_m), num_comm_sms=min(plan.num_comm_sms, programs))
    rows, chunks = num_m * tiles.block_m, triton.cdiv(K, plan.chunk)

    def make() -> _Space:
        inbox = empty(2 * size * rows, K, dtype=dtype, name=f"{CALL}.gluon.inbox", world=world)
        return _Space(inbox, signals(size * num_m * chunks, name=f"{CALL}.gluon.ready", world=world))

    # What the counters count; so plans that differ otherwise share one workspace and its launches.
    counted = (m, K, dtype, tiles.block_m, plan.unit_m, plan.units * plan.unit_k, plan.chunk, programs)
    space = world.workspace((CALL, "gluon", *counted), make)
    ready, num_comm = space.ready, plan.num_comm_sms
    if leave_out:  # counters of its own, which may fall behind
        ready = world.workspace((CALL, leave_out, *counted), lambda: signals(space.ready.numel(), world=world))
        num_comm = 0 if leave_out == "push" else num_comm
    block, unit = (tiles.block_m, tiles.block_k), (plan.unit_m, plan.unit_k)
    inboxes = [space.inbox.peer((world.rank + d) % size) for d in range(1, size)]
    inbox = descriptor(space.inbox.plain(), block)
    targets = peer_descriptors(inboxes, space.inbox.plain(), unit)
    numbers = (m, N, K, num_comm, plan.nap, plan.push_rows, 0 if leave_out == "product" else m)
    constants = {
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "STAGES": tiles.num_stages,
        "GROUP": tiles.group, "UNIT_M": plan.unit_m, "UNIT_K": plan.unit_k, "UNITS": plan.units,
        "BUFFERS": plan.buffers, "LAG": plan.lag, "CHUNK": plan.chunk,
        "HALF": layout(dtype, tiles.block_m, tiles.block_n // 2), "REGISTERS": REGISTERS, "TRANSPOSED": transposed,
        "EPILOGUE": epilogue, "LEAVE_OUT": "wait" if leave_out in ("wait", "push") or size == 1 else "",
        "num_warps": CONSUMER_WARPS,
    }  # fmt: skip
    tiles_of_a, units_of_a, tiles_of_b = descriptor(a, block), descriptor(a, unit), weights_descriptor(b, tiles)
    tiles_of_out = descriptor(out.view(size, m, N), (1, tiles.block_m, tiles.block_n // 2))

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        tiles_of_a.base, units_of_a.base, tiles_of_b.base, tiles_of_out.base = a, a, b, out
        try:
            cooperative(
                world, gluon_push_kernel, (programs,), tiles_of_a, units_of_a, inbox, tiles_of_b, tiles_of_out,
                *targets, ready, bias, *numbers, world.device, **constants,
            )  # fmt: skip
        finally:
            tiles_of_a.base = units_of_a.base = tiles_of_b.base = tiles_of_out.base = None
        return out

    return launch
