"""Matrix product fused into an all-reduce: every rank ends with the sum over ranks of A_r @ B_r, (M, N).

Rank r holds A_r (M, k) and B_r (k, N), a slice of K each. On the LCSC template: a compute task stores a tile of
this rank's product into this rank's own symmetric matrix and signals the tile's owner, rank tile % size. A
communicate task waits until all ranks have theirs, then reduces the tile over the ranks' matrices, writes the
sum back into all of them, in the switch where there is one, and tells every rank. Programs 0 .. num_comm_sms -
1 communicate and then join in computing.

Bytes out of each rank: (1 + 1 / size) * M * N * itemsize in the switch, 2 * (size - 1) / size * M * N *
itemsize without. A partial product is rounded to the dtype once, the sum is in fp32 and rounded once more, by
one rank for all: with s = sum over ranks of |A_r| @ |B_r| and u the unit roundoff, off by at most about 2 * u *
s; all ranks hold the same bits. So do they in the Gluon form, _gluon_matmul_all_reduce, which needs no switch.
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
    whole_runs,
)

CALL = "matmul_all_reduce"
Mode = Literal["lcsc", "gluon", "unfused", "nccl"]
MODES = ("lcsc", "gluon", "unfused", "nccl")


def reference(
    operands: Sequence[tuple[torch.Tensor, torch.Tensor]],
    bias: torch.Tensor | None = None,
    epilogue: Epilogue = "none",
) -> torch.Tensor:
    """What every rank gets from the ranks' (a, b), in fp64."""
    return finished(torch.stack([a.double() @ b.double() for a, b in operands]).sum(0), bias, epilogue)


class Work(NamedTuple):
    """What the kernel works on."""

    a_ptr: Any  # (M, k) this rank's
    b_ptr: Any  # (k, N), or (N, k) if TRANSPOSED, this rank's
    bias_ptr: Any  # (N,) this rank's, or None
    out_ptr: Any  # (M, N) this rank's; the sum itself unless COPY
    sum_ptr: Any  # (M, ld) on every rank: first its own product, tile by tile, then the sum, stored by the tile's owner
    ready_ptr: Any  # int32 (tiles,) on every rank: how many ranks have a tile that this one owns
    done_ptr: Any  # int32, on every rank: tiles whose sum is there
    queue_ptr: Any  # int32, this rank's
    M: Any
    N: Any
    k: Any
    ld: Any
    num_comm_sms: Any
    COPY: tl.constexpr
    TMA: tl.constexpr
    TRANSPOSED: tl.constexpr
    EPILOGUE: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    GROUP: tl.constexpr


@triton.jit
def _place(tile, w):
    """(row, column) of a tile."""
    i, j = pl.order.supergroup(tile, tl.cdiv(w.M, w.BLOCK_M), tl.cdiv(w.N, w.BLOCK_N), w.GROUP)
    return i * w.BLOCK_M, j * w.BLOCK_N


@triton.jit
def _compute(tile, w, world, epoch, a, b, mine):
    row, col = _place(tile, w)
    acc = tl.zeros((w.BLOCK_M, w.BLOCK_N), tl.float32)
    acc = accumulate(acc, a, 0, b, 0, 1, row, col, w.M, w.N, w.k, w.k, w.TMA, w.TRANSPOSED, w.BLOCK_K)
    store_tile(mine, 0, acc, row, col, w.M, w.N, w.ld, True)
    pl.signal(w.ready_ptr + tile, tile % world.size, world)


@triton.jit
def _communicate(task, w, world, epoch, a, b, mine):
    tile = task * world.size + tl.cast(world.rank, tl.int32)
    row, col = _place(tile, w)
    pl.wait(w.ready_ptr + tile, epoch * world.size, world)
    ROWS: tl.constexpr = min(w.BLOCK_M, 32)  # at a time: without a switch a whole tile would not fit the registers
    for piece in range(0, w.BLOCK_M, ROWS):
        # Up to ld: a row is whole runs of 16 bytes, and what the padding holds is nobody's business.
        ptrs, inside = tile_pointers(w.sum_ptr, row + piece, col, w.M, w.ld, w.ld, ROWS, w.BLOCK_N)
        total = finish(pl.multimem_load_reduce(ptrs, world, mask=inside), w.bias_ptr, col, w.N, w.EPILOGUE)
        pl.multimem_store(ptrs, total.to(w.sum_ptr.dtype.element_ty), world, mask=inside)
    pl.signal_all(w.done_ptr, world)


@triton.jit
def matmul_all_reduce_kernel(w, world):
    epoch = pl.epoch(w.ready_ptr, world)
    tiles = tl.cdiv(w.M, w.BLOCK_M) * tl.cdiv(w.N, w.BLOCK_N)
    owned = (tiles - tl.cast(world.rank, tl.int32) + world.size - 1) // world.size
    a = stack(w.a_ptr, 1, w.M, w.k, w.k, w.BLOCK_M, w.BLOCK_K, w.TMA)
    b = weights(w.b_ptr, 1, w.k, w.N, w.BLOCK_K, w.BLOCK_N, w.TMA, w.TRANSPOSED)
    mine = stack(w.sum_ptr, 1, w.M, w.N, w.ld, w.BLOCK_M, w.BLOCK_N, True)
    pl.lcsc(
        _compute, _communicate, (w, world, epoch, a, b, mine), tiles, owned, w.queue_ptr, epoch, w.num_comm_sms
    )  # fmt: skip
    # Every sum is here; and every owner has read my products, so the next launch may overwrite them.
    pl.wait(w.done_ptr, epoch * tiles, world)
    if w.COPY:
        out = stack(w.out_ptr, 1, w.M, w.N, w.N, w.BLOCK_M, w.BLOCK_N, w.TMA)
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            row, col = _place(tile, w)
            ptrs, inside = tile_pointers(w.sum_ptr, row, col, w.M, w.N, w.ld, w.BLOCK_M, w.BLOCK_N)
            store_tile(out, 0, tl.load(ptrs, mask=inside), row, col, w.M, w.N, w.N, w.TMA)


class _Space(NamedTuple):
    sum: SymmetricTensor | None
    counters: SymmetricTensor  # ready, then done, then the queue


def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    epilogue: Epilogue = "none",
    mode: Mode | None = None,
    num_comm_sms: int | None = None,
    tiles: Sequence[int] | None = None,
    lag: int | None = None,
    workspace: Workspace | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """The sum over ranks of `a @ b`, on every rank. Collective.

    a: (M, k), contiguous, b: (k, N), contiguous or the transposed view of a contiguous tensor, as w.t() of nn.Linear's
    weight; bf16, fp16 or fp32; the same M and N on every rank. out: (M, N) of a's dtype, apart from what is read. A
    symmetric `out` whose rows begin at multiples of 16 bytes is reduced in place; otherwise, and where None, the sum is
    copied from a workspace. bias: (N,) of a's dtype, alike on all ranks, epilogue: "none", "relu", "gelu" (exact, with
    erf, as torch's by default) or "silu": applied once, in fp32, to the sum, by the tile's owner; in mode "lcsc" to a
    sum that is rounded already. Returns `out`, complete.

    mode: "lcsc", see the module; "gluon", the Gluon form of _gluon_matmul_all_reduce, which adds in fp32 in a fixed
    order, and needs no switch: bf16 or fp16, rows of out at multiples of 16 bytes, 2 to 8 ranks, sm_90, Triton 3.6;
    "unfused" and "nccl": cuBLAS and pkt's or, through torch.distributed, NCCL's all-reduce, each product rounded before
    it is added, which take nothing of what follows. None, with nothing below given: what was tuned here or measured for
    the nearest shape; else on GPUs "unfused" up to 128 rows; else "gluon" where that can run; else "lcsc". The rest is
    the same on every rank, and follows from mode and shapes where None:

    num_comm_sms: "lcsc" only: programs that communicate, 16 if None; 0: all of them, after computing.
    tiles: (BLOCK_M, BLOCK_N, BLOCK_K, GROUP, NUM_WARPS, NUM_STAGES, MAXNREG) as in all_gather_matmul; "gluon": (128,
        256, 64, GROUP, 8, 3 or 4) or (128, 128, 64, GROUP, 8, 3 to 6).
    lag: "gluon" only: tiles of every other rank that each computes before the first of its own, at least 1.

    workspace: what keeps buffers, counters and the plan until it is closed; the world where None.

    Raises ShapeError, DtypeError, CollectiveMismatch, Unsupported, Closed.
    """
    world = _common.world_of(CALL, world, a, b, out, workspace)
    settings = (epilogue, mode, num_comm_sms, tiles, lag)
    return _common.planned(CALL, _plan, world, (a, b, out, bias), settings, out, workspace)


def _plan(
    world: World, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None,
    epilogue: Epilogue, mode: Mode | None, num_comm_sms: int | None, tiles: Sequence[int] | None, lag: int | None,
) -> _common.Launch:  # fmt: skip
    """Checks, and the form and its settings."""
    if mode is not None:
        _common.check_choice(CALL, "mode", mode, MODES, world)
    _common.check_integers(CALL, world, num_comm_sms=num_comm_sms, lag=lag)
    check_operands(CALL, a, b, world)
    M, N, dtype = a.shape[0], b.shape[1], a.dtype
    check_epilogue(CALL, bias, epilogue, N, dtype, world)
    check_out(CALL, out, (M, N), a, b, bias, world)
    in_place = isinstance(out, SymmetricTensor) and _common.aligned(out)
    if in_place:
        _common.check_tensor(CALL, "out", out, world, peers=True)
    left = mode is None and num_comm_sms is None and tiles is None and lag is None
    if left:
        key = {"M": M, "N": N, "K": a.shape[1]}
        found = _forms.tuned(CALL, world, key, dtype, M, N, by="MN")  # ranks may differ in k
        mode, num_comm_sms, tiles, lag = (found.get(name) for name in ("mode", "num_comm_sms", "tiles", "lag"))
        left = not found
        if left and _forms.unfused(CALL, world, M):
            mode = "unfused"
    chosen = check_tiles(CALL, tiles, world)
    refused = ("num_comm_sms", num_comm_sms) if mode == "gluon" else ("lag", lag)
    if refused[1] is not None:
        raise ShapeError.argument(CALL, *refused, f'none with mode "{mode or "lcsc"}"', world.rank)
    tuned: dict[str, Any] = {}
    if mode in _unfused.MODES:
        given = {"num_comm_sms": num_comm_sms, "tiles": chosen}
        _forms.check_unfused(CALL, mode, {name: value for name, value in given.items() if value is not None}, world)
    elif _forms.gluon(CALL, mode == "gluon", left, world, dtype, M, N):
        mode, tuned["lag"] = "gluon", lag
    else:
        mode, chosen = "lcsc", chosen or default_tiles(M, dtype, N)
        tuned["num_comm_sms"] = 16 if num_comm_sms is None else num_comm_sms
        if tuned["num_comm_sms"] < 0:
            raise ShapeError.argument(CALL, "num_comm_sms", num_comm_sms, "at least 0", world.rank)
    _common.check_agreed(
        CALL, world, M=M, N=N, dtype=dtype, out=out if in_place else None, mode=mode, tiles=chosen,
        **tuned, bias=bias is not None, epilogue=epilogue,
    )  # fmt: skip
    if mode == "gluon":
        from .gluon import settings

        k = _forms.longest(CALL, world, a.shape[1], M, N, dtype)
        chosen, tuned["lag"] = settings(M, N, k, world, chosen, lag)
    fresh = _common.fresh((M, N), dtype, world)
    if M == 0 or N == 0:
        return lambda a, b, out, bias: fresh() if out is None else out
    result = fresh() if out is None else out
    fit = None if chosen is None else whole_runs(a)
    a, b = fit(a, b) if fit else (a, b)
    if chosen is None:
        launch = _unfused.matmul_all_reduce(world, mode, M, N, dtype, in_place, epilogue)
    elif mode == "gluon":
        launch = _gluon_launch(world, a, b, result, in_place, chosen, tuned["lag"], epilogue)
    else:
        launch = _lcsc_launch(world, a, b, result, in_place, tuned["num_comm_sms"], chosen, epilogue)

    if fit is None and out is not None:
        return launch

    def whole(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        return launch(*(fit(a, b) if fit else (a, b)), fresh() if out is None else out, bias)

    return whole


def _gluon_launch(
    world: World, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, in_place: bool, tiles: Tiles, lag: int,
    epilogue: Epilogue,
) -> _common.Launch:  # fmt: skip
    from .gluon import two_shot_launch

    (M, N), dtype, name = out.shape, out.dtype, "matmul_all_reduce.result"
    if isinstance(out, SymmetricTensor) and in_place:
        result = out
    else:  # where peers store the finished tiles of an output that they cannot reach
        result = world.keep((name, M, N, dtype), lambda: empty(M, N, dtype=dtype, name=name, world=world))

    def make(a: torch.Tensor, b: torch.Tensor, _: None) -> _common.Launch:
        two_shot = two_shot_launch(world, a, b, result, tiles, lag, epilogue)

        def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            found = two_shot(a, b, bias)
            if not in_place:
                out.detach().copy_(found)  # as a kernel stores: also into what is trained
            return out

        return launch

    return _forms.fitted(make, a, b, None)


def _lcsc_launch(
    world: World, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, in_place: bool, num_comm_sms: int, tiles: Tiles,
    epilogue: Epilogue,
) -> _common.Launch:  # fmt: skip
    (M, k), N, dtype = a.shape, b.shape[1], a.dtype
    rows, transposed = stored(b)
    ld = N if in_place else padded(N, dtype)
    total = triton.cdiv(M, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    programs = _common.num_programs(world, total + num_comm_sms)

    def make() -> _Space:
        buffer = None
        if not in_place:
            buffer = empty(M, ld, dtype=dtype, name="matmul_all_reduce.sum", world=world)
        return _Space(buffer, signals(total + 2, name="matmul_all_reduce.ready", world=world))

    space = world.keep((CALL, M, N, dtype, programs, tiles[:2], in_place), make)
    counters = space.counters
    work = Work(
        a_ptr=None, b_ptr=None, bias_ptr=None, out_ptr=None, sum_ptr=space.sum, ready_ptr=counters,
        done_ptr=counters[total:], queue_ptr=counters[total + 1 :], M=M, N=N, k=k, ld=ld,
        num_comm_sms=min(num_comm_sms, programs - 1), COPY=tl.constexpr(not in_place),
        TMA=tl.constexpr(_common.aligned(a, rows, out)), TRANSPOSED=tl.constexpr(transposed),
        EPILOGUE=tl.constexpr(epilogue), BLOCK_M=tl.constexpr(tiles.block_m),
        BLOCK_N=tl.constexpr(tiles.block_n), BLOCK_K=tl.constexpr(tiles.block_k), GROUP=tl.constexpr(tiles.group),
    )  # fmt: skip
    start = cooperative_launch(world, matmul_all_reduce_kernel, (programs,), **tiles.launch_options())
    sums, same = space.sum, work[5:]

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        these = Work(a, b.t() if transposed else b, bias, out, out if in_place else sums, *same)
        start(these, world.device)
        return out

    return launch
