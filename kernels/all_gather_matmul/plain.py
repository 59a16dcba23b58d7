"""All-gather fused into a matrix product: C = A @ B, where rank r holds shard r of A and its own B.

Sharded by rows, A is the shards below each other: C (size * m, N) = A (size * m, K) @ B (K, N). Sharded by
columns, A is the shards beside each other: C (m, N) = A (m, size * k) @ B (size * k, N). Algorithms 1 to 3 of
Trifan et al., "Eliminating Multi-GPU Performance Taxes".

pull: the product's loop loads each tile of A where it is, on its owner (Algorithm 1). Each element of a shard
    crosses the links once for every column of tiles: cdiv(N, BLOCK_N) * (size - 1) * m * k * itemsize bytes
    into each rank, less what L2 keeps. Two barriers of the programs of one index on all ranks.
push: programs 0 .. num_comm_sms - 1 store this rank's shard into an inbox on every peer and signal each chunk
    of a row block (Algorithm 2); the others compute, waiting row block by row block (Algorithm 3), their own
    shard first, then the peers' in the order in which they arrive; a communicator that has finished computes
    too. (size - 1) * m * k * itemsize bytes into and out of each rank.
copy: push by the copy engines, see _copy_all_gather_matmul.
gluon: push or copy in specialised warps, see _gluon_all_gather_matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.errors import ShapeError
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import Workspace, World

from ..shared import common as _common
from ..shared import forms as _forms
from ..shared import unfused as _unfused
from ..shared.tile_product import (
    Epilogue,
    Tiles,
    accumulate,
    check_epilogue,
    check_operands,
    check_out,
    check_tiles,
    default_tiles,
    finish,
    finished,
    padded,
    stack,
    store_tile,
    stored,
    tile_pointers,
    weights,
)

CALL = "all_gather_matmul"
Shard = Literal["rows", "columns"]
Mode = Literal["push", "pull", "copy", "gluon", "unfused", "nccl"]
MODES = ("push", "pull", "copy", "gluon", "unfused", "nccl")


def reference(
    shards: Sequence[torch.Tensor],
    b: torch.Tensor,
    shard: Shard = "rows",
    bias: torch.Tensor | None = None,
    epilogue: Epilogue = "none",
) -> torch.Tensor:
    """C of a rank that holds `b`, in fp64."""
    product = torch.cat(tuple(shards), dim=0 if shard == "rows" else 1).double() @ b.double()
    return finished(product, bias, epilogue)


# -------------------------------------------------------------------------------------------------------- pull
@triton.jit
def pull_kernel(
    a_ptr,  # (m, k) on every rank; all ranks read it
    b_ptr,  # (K, N), or (N, K) if TRANSPOSED, this rank's; K is k, or size * k if COLUMNS
    bias_ptr,  # (N,) this rank's, or None
    out_ptr,  # (size * m, N), or (m, N) if COLUMNS; this rank's
    bar_ptr,  # int32 (programs,) on every rank
    m,
    N,
    k,
    world,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    num_m = tl.cdiv(m, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    shards: tl.constexpr = 1 if COLUMNS else world.size
    b_shards: tl.constexpr = world.size if COLUMNS else 1
    b = weights(b_ptr, b_shards, k, N, BLOCK_K, BLOCK_N, TMA, TRANSPOSED)
    out = stack(out_ptr, shards, m, N, N, BLOCK_M, BLOCK_N, TMA)
    pl.barrier(bar_ptr + pid, world)  # publish: every rank's shard is complete
    for t in range(pid, shards * num_m * num_n, tl.num_programs(0)):
        # Own shard first, then rank + 1, ...: at any time each rank is read by one other.
        source = (rank + t // (num_m * num_n)) % world.size
        i, j = pl.order.supergroup(t % (num_m * num_n), num_m, num_n, GROUP)
        row = i * BLOCK_M
        col = j * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if COLUMNS:
            for d in range(world.size):
                source = (rank + d) % world.size
                a = stack(pl.peer(a_ptr, source, world), 1, m, k, k, BLOCK_M, BLOCK_K, TMA)
                acc = accumulate(acc, a, 0, b, source, b_shards, row, col, m, N, k, k, TMA, TRANSPOSED, BLOCK_K)
            store_tile(out, 0, finish(acc, bias_ptr, col, N, EPILOGUE), row, col, m, N, N, TMA)
        else:
            a = stack(pl.peer(a_ptr, source, world), 1, m, k, k, BLOCK_M, BLOCK_K, TMA)
            acc = accumulate(acc, a, 0, b, 0, b_shards, row, col, m, N, k, k, TMA, TRANSPOSED, BLOCK_K)
            store_tile(out, source, finish(acc, bias_ptr, col, N, EPILOGUE), row, col, m, N, N, TMA)
    pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read my shard


# -------------------------------------------------------------------------------------------------------- push
class Push(NamedTuple):
    """What push_kernel works on. inbox is used in halves, by the parity of the launch: a peer that is a launch
    ahead has everybody's signals of this one, but not everybody need have finished reading."""

    a_ptr: Any  # (m, k) this rank's; only this rank reads it
    b_ptr: Any  # (K, N), or (N, K) if TRANSPOSED, this rank's; K is k, or size * k if COLUMNS
    bias_ptr: Any  # (N,) this rank's, or None
    out_ptr: Any  # (size * m, N), or (m, N) if COLUMNS; this rank's
    inbox_ptr: Any  # (2, size, m, ld) on every rank, or (1, ...) if COPIED; rank r stores [:, r] of all the others
    ready_ptr: Any  # int32 (size, num_m) on every rank; [r, i] counts chunks of its row block i that rank r has stored.
    # If COPIED, as _copies.Gathering has it
    queue_ptr: Any  # int32, this rank's
    m: Any
    N: Any
    k: Any
    ld: Any
    num_comm_sms: Any
    together: Any  # row blocks that a counter stands for; 1 unless COPIED
    COPIED: tl.constexpr  # by copy engines: this kernel only computes
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
    acc = tl.zeros((p.BLOCK_M, p.BLOCK_N), tl.float32)
    if p.COLUMNS:
        i, j = pl.order.supergroup(task, num_m, num_n, p.GROUP)
        for d in range(world.size):  # own shard first
            source = (tl.cast(world.rank, tl.int32) + d) % world.size
            acc = _add_shard(acc, source, source, i, j * p.BLOCK_N, p, world, epoch, b)
        acc = finish(acc, p.bias_ptr, j * p.BLOCK_N, p.N, p.EPILOGUE)
        store_tile(out, 0, acc, i * p.BLOCK_M, j * p.BLOCK_N, p.m, p.N, p.N, p.TMA)
    else:
        source, index = pl.order.peers_interleaved(task, num_m * num_n, world)
        i = index // num_n
        j = index % num_n
        acc = _add_shard(acc, source, 0, i, j * p.BLOCK_N, p, world, epoch, b)
        acc = finish(acc, p.bias_ptr, j * p.BLOCK_N, p.N, p.EPILOGUE)
        store_tile(out, source, acc, i * p.BLOCK_M, j * p.BLOCK_N, p.m, p.N, p.N, p.TMA)


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
    else:
        epoch = pl.epoch(p.ready_ptr, world)
    shards: tl.constexpr = 1 if p.COLUMNS else world.size
    tasks = shards * num_m * tl.cdiv(p.N, p.BLOCK_N)
    chunks = num_m * tl.cdiv(p.k, p.CHUNK) if world.size > 1 else 0
    b = weights(p.b_ptr, world.size if p.COLUMNS else 1, p.k, p.N, p.BLOCK_K, p.BLOCK_N, p.TMA, p.TRANSPOSED)
    out = stack(p.out_ptr, shards, p.m, p.N, p.N, p.BLOCK_M, p.BLOCK_N, p.TMA)
    if p.COPIED:
        for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
            _compute(task, p, world, epoch, b, out)
    else:
        pl.lcsc(_compute, _push_chunk, (p, world, epoch, b, out), tasks, chunks, p.queue_ptr, epoch, p.num_comm_sms)


# -------------------------------------------------------------------------------------------------------- host
class _PushSpace(NamedTuple):
    inbox: SymmetricTensor
    counters: SymmetricTensor  # ready, then the queue


def _check_tuned(given: dict[str, Any], mode: str, columns: bool, world: World) -> dict[str, Any]:
    """What a plain mode takes beside its tiles: as given, else the default. Raises ShapeError."""
    # By columns a shard's rows are short. K = 8192 on 4 x H200, at commit 769b572e2300: for 16, 128, 1024 rows chunks
    # of 256 take 52, 71, 244 us, of 1024 55, 78, 254, because 2 of them are less than the programs that push.
    chunk = 256 if columns else 1024
    taken = {"push": {"num_comm_sms": 16, "chunk": chunk}, "copy": {"push_rows": 0}}.get(mode, {})
    for name, value in given.items():
        least = 0 if name == "push_rows" else 1
        wanted = f"at least {least}" if name in taken else f'none with mode "{mode}"'
        if name not in taken or value < least:
            raise ShapeError.argument(CALL, name, value, wanted, world.rank)
    return taken | given


def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    epilogue: Epilogue = "none",
    shard: Shard = "rows",
    mode: Mode | None = None,
    num_comm_sms: int | None = None,
    chunk: int | None = None,
    tiles: Sequence[int] | None = None,
    push_rows: int | None = None,
    rounds_alone: int | None = None,
    cut_last: int | None = None,
    whole_rounds: int | None = None,
    workspace: Workspace | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """The product of the gathered A with this rank's `b`. Collective.

    a: this rank's shard (m, k), the same shape on every rank, contiguous, symmetric if mode is "pull"; b: (k, N), or
    (size * k, N) if shard is "columns", contiguous or the transposed view of a contiguous tensor, as w.t() of
    nn.Linear's weight; both bf16, fp16 or fp32. out: (size * m, N), or (m, N) if shard is "columns", of a's dtype,
    apart from what is read; a new tensor where None. bias: (N,) of a's dtype, this rank's. epilogue: "none", "relu",
    "gelu" (exact, with erf, as torch's by default) or "silu", of the sum and the bias. All in fp32, rounded once.
    Returns `out`, complete; `a` may be overwritten at once.

    mode: see the module; "gluon" takes bf16 or fp16, shard "rows", rows at multiples of 16 bytes, 2 to 8 ranks, sm_90,
    Triton 3.6; "copy" takes shard "rows" of rows of whole runs of 16 bytes; "unfused" and "nccl" are pkt's or, through
    torch.distributed, NCCL's all-gather, and cuBLAS, and take nothing of what follows. None, with nothing below given:
    with shard "rows" what was tuned here or measured for the nearest shape; else "gluon" where that can run and m is
    more than 64 (its tiles have 128 rows); with shard "columns" on GPUs "unfused" up to 1024 rows; else "push". The
    rest is the same on every rank, and follows from mode and shapes where None:

    num_comm_sms: programs that push. "push": from 1 to all but one of the grid, 16 if None; "gluon": which push before
        they compute, 0 for copy engines in their stead; if None 0 where copying takes no longer than the product, and
        neither chunk nor rounds_alone is given, else 16.
    chunk: columns of a that one signal stands for. "push": rounded up to BLOCK_K; if None 1024, 256 with shard
        "columns"; "gluon": a multiple of BLOCK_K; if None 128, 256 where fewer than 16 programs push. Copied, of
        one copy: if None half of them, where the own shard is multiplied sooner than a whole one comes, else 0: all.
    tiles: (BLOCK_M, BLOCK_N, BLOCK_K, GROUP, NUM_WARPS, NUM_STAGES, MAXNREG), powers of two from 16 and how to compile;
        those left out are as in `Tiles`. "gluon": (128, 256, 64, GROUP, 8, 3 or 4) or (128, 128, 64, GROUP, 8, 3 to 6),
        NUM_STAGES slots of its ring.
    push_rows: "gluon": row blocks pushed, and computed, together; 0: as many as the programs compute at a time.
        Copied: row blocks that one copy moves and one signal stands for; 0: a quarter of them, in "gluon" all.
    rounds_alone: "gluon" only: rounds of tiles, one a program, that the other programs compute while num_comm_sms
        programs push, if there are so many; 0 where copied.
    cut_last: "gluon" only: 1, 2 or 4 pieces, by columns, that each tile after the whole rounds is cut into.
    whole_rounds: "gluon" only: the most rounds of whole tiles, one a program.

    workspace: what keeps buffers, counters and the plan until it is closed; the world where None.

    Raises NotSymmetric, ShapeError, DtypeError, CollectiveMismatch, Unsupported, Closed.
    """
    world = _common.world_of(CALL, world, a, b, workspace)
    settings = (epilogue, shard, mode, num_comm_sms, chunk, tiles, push_rows, rounds_alone, cut_last, whole_rounds)
    return _common.planned(CALL, _plan, world, (a, b, out, bias), settings, out, workspace)


def _plan(
    world: World, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None,
    epilogue: Epilogue, shard: Shard, mode: Mode | None, num_comm_sms: int | None, chunk: int | None,
    tiles: Sequence[int] | None, push_rows: int | None, rounds_alone: int | None,
    cut_last: int | None, whole_rounds: int | None,
) -> _common.Launch:  # fmt: skip
    """Checks, and the form and its settings."""
    if mode is not None:
        _common.check_choice(CALL, "mode", mode, MODES, world)
    given = {
        "num_comm_sms": num_comm_sms, "chunk": chunk, "tiles": tiles, "push_rows": push_rows,
        "rounds_alone": rounds_alone, "cut_last": cut_last, "whole_rounds": whole_rounds,
    }  # fmt: skip
    tuned: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    _common.check_integers(CALL, world, **{name: value for name, value in tuned.items() if name != "tiles"})
    _common.check_choice(CALL, "shard", shard, ("rows", "columns"), world)
    columns = shard == "columns"
    check_operands(CALL, a, b, world, shards=world.size if columns else 1, peers=mode == "pull")
    (m, k), N, size = a.shape, b.shape[1], world.size
    check_epilogue(CALL, bias, epilogue, N, a.dtype, world)
    shape = (m if columns else size * m, N)
    check_out(CALL, out, shape, a, b, bias, world)
    if mode in ("gluon", "copy") and columns:
        raise ShapeError.argument(CALL, "shard", "columns", f'shard "rows" with mode "{mode}"', world.rank)
    if mode == "copy" and padded(k, a.dtype) != k:
        wanted = 'whole runs of 16 bytes in a row with mode "copy"'
        raise ShapeError.argument(CALL, "a", (m, k), wanted, world.rank)
    left = mode is None and not tuned and not columns
    if left:
        tuned = _forms.tuned(CALL, world, {"M": size * m, "N": N, "K": k}, a.dtype, m, k, N)
        mode, left = tuned.pop("mode", None), not tuned
    elif mode is None and not tuned and _forms.unfused(CALL, world, m):
        mode = "unfused"
    plan = None
    wanted = check_tiles(CALL, tuned.pop("tiles", None), world)
    if mode in _unfused.MODES:
        _forms.check_unfused(CALL, mode, tuned | ({} if wanted is None else {"tiles": wanted}), world)
    elif _forms.gluon(CALL, mode == "gluon", left, world, a.dtype, m, k, N):
        from .gluon import settings

        mode = "gluon"
        plan, wanted = settings(m, N, k, world, wanted, **tuned)
        tuned = plan._asdict()
    else:
        mode = mode or "push"
        wanted = wanted or default_tiles(m, a.dtype, k, N)
        tuned = _check_tuned(tuned, mode, columns, world)
    _common.check_agreed(
        CALL, world, a=a if mode == "pull" else a.shape, dtype=a.dtype, N=N, shard=shard, mode=mode, tiles=wanted,
        bias=bias is not None, epilogue=epilogue, **tuned,
    )  # fmt: skip
    fresh = _common.fresh(shape, a.dtype, world)
    result = fresh() if out is None else out
    if m == 0 or N == 0 or k == 0:

        @torch.no_grad()  # as of kernels
        def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return out.copy_(finished(torch.zeros_like(out), bias, epilogue))

    elif mode in _unfused.MODES:
        launch = _unfused.all_gather_matmul(world, mode, a, columns, epilogue)
    elif plan is not None and wanted is not None:
        launch = _gluon_launch(world, a, b, result, plan, wanted, epilogue)
    elif mode == "pull":
        launch = _pull_launch(world, a, b, result, columns, wanted, epilogue)
    elif mode == "copy":
        from .copy import copy_launch

        launch = copy_launch(world, a, b, result, tuned["push_rows"], wanted, epilogue)
    else:
        launch = _push_launch(world, a, b, result, columns, tuned["num_comm_sms"], tuned["chunk"], wanted, epilogue)
    if out is not None:
        return launch
    return lambda a, b, out, bias: launch(a, b, fresh(), bias)


def _gluon_launch(
    world: World, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, plan: Any, tiles: Tiles, epilogue: Epilogue
) -> _common.Launch:
    from .gluon import push_launch

    return _forms.fitted(lambda a, b, out: push_launch(world, a, b, out, plan, tiles, epilogue), a, b, out)


def _pull_launch(
    world: World, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, columns: bool, tiles: Tiles, epilogue: Epilogue
) -> _common.Launch:
    (m, k), N = a.shape, b.shape[1]
    rows, transposed = stored(b)
    tasks = (1 if columns else world.size) * triton.cdiv(m, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    grid = (_common.num_programs(world, tasks),)
    bar = _common.barrier_counters(world)
    constants = (columns, _common.aligned(a, rows, out), transposed, epilogue, *tiles[:4])
    start = cooperative_launch(world, pull_kernel, grid, **tiles.launch_options())

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        start(a, b.t() if transposed else b, bias, out, bar, m, N, k, world.device, *constants)
        return out

    return launch


def _push_launch(
    world: World, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, columns: bool, num_comm_sms: int, chunk: int,
    tiles: Tiles, epilogue: Epilogue,
) -> _common.Launch:  # fmt: skip
    (m, k), N, size, dtype = a.shape, b.shape[1], world.size, a.dtype
    rows, transposed = stored(b)
    num_m, num_n = triton.cdiv(m, tiles.block_m), triton.cdiv(N, tiles.block_n)
    tasks = (1 if columns else size) * num_m * num_n
    chunk = triton.cdiv(min(chunk, k), tiles.block_k) * tiles.block_k
    programs = _common.num_programs(world, tasks + num_comm_sms)
    ld = padded(k, dtype)

    def make() -> _PushSpace:
        inbox = empty(2, size, m, ld, dtype=dtype, name="all_gather_matmul.inbox", world=world)
        return _PushSpace(inbox, signals(size * num_m + 1, name="all_gather_matmul.ready", world=world))

    # By what the counters count: settings that differ otherwise share an inbox, and its launches.
    space = world.keep((CALL, m, k, dtype, tasks, programs, tiles.block_m, chunk), make)
    args = Push(
        a_ptr=None, b_ptr=None, bias_ptr=None, out_ptr=None, inbox_ptr=space.inbox, ready_ptr=space.counters,
        queue_ptr=space.counters[-1:], m=m, N=N, k=k, ld=ld, num_comm_sms=max(1, min(num_comm_sms, programs - 1)),
        together=1, COPIED=tl.constexpr(False), COLUMNS=tl.constexpr(columns),
        TMA=tl.constexpr(_common.aligned(a, rows, out)), TRANSPOSED=tl.constexpr(transposed),
        EPILOGUE=tl.constexpr(epilogue), BLOCK_M=tl.constexpr(tiles.block_m), BLOCK_N=tl.constexpr(tiles.block_n),
        BLOCK_K=tl.constexpr(tiles.block_k), CHUNK=tl.constexpr(chunk), GROUP=tl.constexpr(tiles.group),
    )  # fmt: skip
    start, same = cooperative_launch(world, push_kernel, (programs,), **tiles.launch_options()), args[4:]

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        start(Push(a, b.t() if transposed else b, bias, out, *same), world.device)
        return out

    return launch
