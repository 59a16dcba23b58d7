"""The kernel of modes "push" and "copy" in plain Triton, and their plans; host.py says how they work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import sync
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.tensor import SymmetricTensor

from ..declaration import Call, Launch
from ..shared import copies, products, scales
from ..shared.checks import aligned, stored
from ..shared.grid import num_programs
from ..shared.tile_product import (
    accumulate,
    columns_each,
    finish,
    padded,
    stack,
    store_tile,
    tile_pointers,
    weights,
)
from .rules import CALL


# ------------------------------------------------------------------------------------------------------ device
class Push(NamedTuple):
    """What push_kernel works on. inbox is used in halves, by the parity of the launch: a peer that is a launch
    ahead has everybody's signals of this one, but not everybody need have finished reading."""

    a_ptr: Any  # (m, k) this rank's; only this rank reads it
    b_ptr: Any  # (K, N), or (N, K) if TRANSPOSED, this rank's; K is k, or size * k if COLUMNS
    bias_ptr: Any  # (N,) this rank's, or None
    out_ptr: Any  # (size * m, N), or (m, N) if COLUMNS, this rank's; half as many columns with swiglu
    scales: Any  # Scales, of operands of fp8, or None
    words_ptr: Any  # as scales.words_of has them, or None
    inbox_ptr: Any  # (2, size, m, ld) on every rank, or (1, ...) if COPIED; rank r stores [:, r] of all the others
    ready_ptr: Any  # int32 (size, num_m) on every rank; [r, i] counts chunks of its row block i that rank r has stored.
    # If COPIED, as copies.Gathering has it
    queue_ptr: Any  # int32, this rank's
    m: Any
    N: Any
    k: Any
    ld: Any
    num_comm_sms: Any
    together: Any  # row blocks that a counter stands for; 1 unless COPIED
    COPIED: tl.constexpr  # by copy engines: this kernel only computes
    GATHERED: tl.constexpr  # by the launch before, for another weight: this kernel only computes
    COLUMNS: tl.constexpr
    TMA: tl.constexpr
    TRANSPOSED: tl.constexpr
    EPILOGUE: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    CHUNK: tl.constexpr  # columns of a shard that one signal stands for, a multiple of BLOCK_K
    GROUP: tl.constexpr


@triton.jit
def _add_shard(acc, source, b_index, i, col, p, world, epoch, b):
    """acc + row block i of shard `source`, once it is here, times matrix b_index of b."""
    a_ptr = p.a_ptr
    lda = tl.cast(p.k, tl.int32)
    if source != tl.cast(world.rank, tl.int32):
        if not p.GATHERED:
            counters = tl.cdiv(tl.cdiv(p.m, p.BLOCK_M), p.together)
            pl.wait(p.ready_ptr + source * counters + i // p.together, epoch * tl.cdiv(p.k, p.CHUNK), world)
        slot = source if p.COPIED else (epoch & 1) * world.size + source
        a_ptr = p.inbox_ptr + tl.cast(slot, tl.int64) * p.m * p.ld
        lda = tl.cast(p.ld, tl.int32)
    # Made for each shard, because a loop over mine beside one over the inbox would need shared memory of its own.
    a = stack(a_ptr, 1, p.m, p.k, lda, p.BLOCK_M, p.BLOCK_K, p.TMA)
    shards: tl.constexpr = world.size if p.COLUMNS else 1
    return accumulate(
        acc, a, 0, b, b_index, shards, i * p.BLOCK_M, col, p.m, p.N, p.k, lda, p.TMA, p.TRANSPOSED, p.BLOCK_K
    )


@triton.jit
def _compute(task, p, world, epoch, b, out):
    num_m = tl.cdiv(p.m, p.BLOCK_M)
    num_n = tl.cdiv(p.N, p.BLOCK_N)
    N = p.N // columns_each(p.EPILOGUE)
    acc = tl.zeros((p.BLOCK_M, p.BLOCK_N), tl.float32)
    if p.COLUMNS:
        i, j = pl.order.supergroup(task, num_m, num_n, p.GROUP)
        for d in range(world.size):  # own shard first
            source = (tl.cast(world.rank, tl.int32) + d) % world.size
            acc = _add_shard(acc, source, source, i, j * p.BLOCK_N, p, world, epoch, b)
        tile = finish(acc, p.bias_ptr, j * p.BLOCK_N, p.N, p.EPILOGUE)
        store_tile(out, 0, tile, i * p.BLOCK_M, j * tile.shape[1], p.m, N, N, p.TMA)
    else:
        source, index = pl.order.peers_interleaved(task, num_m * num_n, world)
        i = index // num_n
        j = index % num_n
        acc = _add_shard(acc, source, 0, i, j * p.BLOCK_N, p, world, epoch, b)
        acc = scales.scaled_of(acc, p.scales, p.words_ptr, source, i * p.BLOCK_M, p.m, j * p.BLOCK_N, p.N, world, epoch)
        tile = finish(acc, p.bias_ptr, j * p.BLOCK_N, p.N, p.EPILOGUE)
        store_tile(out, source, tile, i * p.BLOCK_M, j * tile.shape[1], p.m, N, N, p.TMA)


@triton.jit
def _push_chunk(task, p, world, epoch, b, out):
    """Chunk `task` of my shard, row block by row block, to every peer: one load, then a store to each."""
    chunks = tl.cdiv(p.k, p.CHUNK)
    i = task // chunks
    start = (task % chunks) * p.CHUNK
    rank = tl.cast(world.rank, tl.int32)
    slot = (epoch & 1) * world.size + rank
    inbox = p.inbox_ptr + tl.cast(slot, tl.int64) * p.m * p.ld
    for col in range(start, tl.minimum(start + p.CHUNK, p.k), p.BLOCK_K):
        source, inside = tile_pointers(p.a_ptr, i * p.BLOCK_M, col, p.m, p.k, p.k, p.BLOCK_M, p.BLOCK_K)
        target, _ = tile_pointers(inbox, i * p.BLOCK_M, col, p.m, p.k, p.ld, p.BLOCK_M, p.BLOCK_K)
        tile = tl.load(source, mask=inside)
        for d in tl.static_range(1, world.size):
            pl.store(target, tile, (rank + d) % world.size, world, mask=inside)
    for d in tl.static_range(1, world.size):
        pl.signal(p.ready_ptr + rank * tl.cdiv(p.m, p.BLOCK_M) + i, (rank + d) % world.size, world)


@triton.jit
def push_kernel(p, world):
    num_m = tl.cdiv(p.m, p.BLOCK_M)
    if p.COPIED:
        epoch = tl.load(p.ready_ptr + world.size * tl.cdiv(num_m, p.together))
    elif p.GATHERED:
        epoch = sync.peek_epoch(p.ready_ptr) - 1
    else:
        epoch = pl.epoch(p.ready_ptr, world)
    scales.put(p.scales, p.words_ptr, p.m, world, epoch, p.BLOCK_M)
    shards: tl.constexpr = 1 if p.COLUMNS else world.size
    tasks = shards * num_m * tl.cdiv(p.N, p.BLOCK_N)
    chunks = num_m * tl.cdiv(p.k, p.CHUNK) if world.size > 1 else 0
    b = weights(p.b_ptr, world.size if p.COLUMNS else 1, p.k, p.N, p.BLOCK_K, p.BLOCK_N, p.TMA, p.TRANSPOSED)
    EACH: tl.constexpr = columns_each(p.EPILOGUE)
    out = stack(p.out_ptr, shards, p.m, p.N // EACH, p.N // EACH, p.BLOCK_M, p.BLOCK_N // EACH, p.TMA)
    if p.COPIED or p.GATHERED:
        for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
            _compute(task, p, world, epoch, b, out)
    else:
        pl.lcsc(_compute, _push_chunk, (p, world, epoch, b, out), tasks, chunks, p.queue_ptr, epoch, p.num_comm_sms)


# -------------------------------------------------------------------------------------------------------- host
class _Inbox(NamedTuple):
    """Where the shards of peers are, or come to, and what the counters count."""

    inbox: SymmetricTensor
    counters: SymmetricTensor
    together: int  # row blocks that a counter stands for
    chunk: int  # columns that it counts by
    words: SymmetricTensor | None  # as scales.words_of has them


def _pushed(call: Call) -> tuple[_Inbox, int]:
    """That of mode "push", and the programs of its grid."""
    world, tiles, dtype, (m, k) = call.world, call["tiles"], call.dtype, call["a"].shape
    num_m, size = triton.cdiv(m, tiles.block_m), world.size
    tasks = (1 if products.by_columns(call) else size) * num_m * triton.cdiv(call["b"].shape[1], tiles.block_n)
    chunk = triton.cdiv(min(call["chunk"], k), tiles.block_k) * tiles.block_k
    programs = num_programs(world, tasks + call["num_comm_sms"])

    def make() -> tuple[SymmetricTensor, SymmetricTensor]:
        inbox = empty(2, size, m, padded(k, dtype), dtype=dtype, name=f"{CALL}.inbox", world=world)
        return inbox, signals(size * num_m + 1, name=f"{CALL}.ready", world=world)  # ready, then the queue

    # By what the counters count: settings that differ otherwise share an inbox, and its launches.
    counted = (CALL, m, k, dtype, tasks, programs, tiles.block_m, chunk)
    inbox, counters = world.keep(counted, make)
    return _Inbox(
        inbox, counters, 1, chunk, scales.words_of(world, CALL, call.tensors.get("scale_a"), counted)
    ), programs


def push(call: Call) -> Launch:
    """The plan of mode "push"."""
    found, programs = _pushed(call)
    return _launch(call, found, programs, found.counters[-1:], max(1, min(call["num_comm_sms"], programs - 1)))


def push_several(calls: Sequence[Call]) -> Callable[..., None]:
    """`push` for several weights: the first launch gathers A, the others only compute."""
    lead, *others = calls
    found, _ = _pushed(lead)
    return products.in_turn(push(lead), *(_computing(call, found, gathered=True) for call in others))


def _computing(call: Call, found: _Inbox, *, gathered: bool) -> Launch:
    """launch(a, b, out, bias): a kernel that only computes. gathered: the launch before has waited for the shards."""
    world, a, b, tiles = call.world, call["a"], call["b"], call["tiles"]
    shards = 1 if products.by_columns(call) else world.size
    tasks = shards * triton.cdiv(a.shape[0], tiles.block_m) * triton.cdiv(b.shape[1], tiles.block_n)
    return _launch(call, found, num_programs(world, tasks), None, 0, gathered)


def copied(call: Call) -> tuple[_Inbox, Callable[[torch.Tensor], Callable[[], None]]]:
    """That of mode "copy", and what begins the copies, as copies.Gathering has it."""
    tiles, (m, k) = call["tiles"], call["a"].shape
    num_m = triton.cdiv(m, tiles.block_m)
    together = min(call["push_rows"] or triton.cdiv(num_m, 4), num_m)
    found = copies.gathering(call.world, m, k, call.dtype, together * tiles.block_m)
    chunk = triton.cdiv(k, tiles.block_k) * tiles.block_k
    words = scales.words_of(call.world, CALL, call.tensors.get("scale_a"), (m, k, together * tiles.block_m))
    return _Inbox(found.inbox, found.counters, together, chunk, words), found.begin


def copy(call: Call) -> Launch:
    """The plan of mode "copy"."""
    found, begin = copied(call)
    compute = _computing(call, found, gathered=False)

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: Any, *scales: Any) -> torch.Tensor:
        join = begin(a)
        compute(a, b, out, bias, *scales)
        join()
        return out

    return launch


def copy_several(calls: Sequence[Call]) -> Callable[..., None]:
    """`copy` for several weights: A is copied once."""
    found, begin = copied(calls[0])
    compute = products.in_turn(*(_computing(call, found, gathered=False) for call in calls))

    def launch(a: torch.Tensor, bs: Any, outs: Any, biases: Any) -> None:
        join = begin(a)
        compute(a, bs, outs, biases)
        join()

    return launch


def _launch(
    call: Call, found: _Inbox, programs: int, queue: Any, num_comm_sms: int, gathered: bool = False
) -> Launch:  # fmt: skip
    """launch(a, b, out, bias, *scales): push_kernel with so many programs. queue: None where it only computes."""
    world, (m, k), tiles, (rows, transposed) = call.world, call["a"].shape, call["tiles"], stored(call["b"])
    same = Push(
        a_ptr=None, b_ptr=None, bias_ptr=None, out_ptr=None, scales=None,
        words_ptr=found.words, inbox_ptr=found.inbox, ready_ptr=found.counters, queue_ptr=queue,
        m=m, N=call["b"].shape[1], k=k, ld=padded(k, call.dtype), num_comm_sms=num_comm_sms, together=found.together,
        COPIED=tl.constexpr(queue is None and not gathered), GATHERED=tl.constexpr(gathered),
        COLUMNS=tl.constexpr(products.by_columns(call)),
        TMA=tl.constexpr(aligned(call["a"], rows, call["out"])), TRANSPOSED=tl.constexpr(transposed),
        EPILOGUE=tl.constexpr(call["epilogue"]), BLOCK_M=tl.constexpr(tiles.block_m),
        BLOCK_N=tl.constexpr(tiles.block_n), BLOCK_K=tl.constexpr(tiles.block_k), CHUNK=tl.constexpr(found.chunk),
        GROUP=tl.constexpr(tiles.group),
    )[5:]  # fmt: skip
    start = cooperative_launch(world, push_kernel, (programs,), **tiles.launch_options())
    passed = scales.passing(*scales.given(call))

    def launch(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: Any, scale_a: Any = None, scale_b: Any = None
    ) -> torch.Tensor:
        start(Push(a, b, bias, out, passed(scale_a, scale_b), *same), world.device)
        return out

    return launch
