"""Matrix product fused into a reduce-scatter: rank r ends with rows [r * m, (r + 1) * m) of the sum over ranks
of A_r @ B_r.

Rank r holds A_r (size * m, k) and B_r (k, N), a slice of K each. Tiles are computed in an order that ends with
the rank's own rows. (size - 1) / size * M * N * itemsize bytes out of and into each rank, in two forms:

add: each tile is added into its owner's accumulator by TMA, in the output's dtype: no inbox, but size roundings
    in an order that differs from run to run. With s = sum over ranks of |A_r| @ |B_r| and u the unit roundoff
    of the dtype, an element is off by at most about size * u * s (and the fp32 products' own error, k * 2^-24 *
    s).
inbox: each tile is stored into its owner's inbox, at this rank's place, and signalled; the owner adds the
    places 0, 1, ... in fp32 and rounds once: the same bits every time, off by at most about 2 * u * s. size
    times the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.errors import ShapeError
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals, zeros
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

CALL = "matmul_reduce_scatter"
Mode = Literal["add", "inbox", "gluon", "unfused", "nccl"]
MODES = ("add", "inbox", "gluon", "unfused", "nccl")


def reference(
    operands: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rank: int,
    bias: torch.Tensor | None = None,
    epilogue: Epilogue = "none",
) -> torch.Tensor:
    """What `rank` gets from the ranks' (a, b), in fp64."""
    total = torch.stack([a.double() @ b.double() for a, b in operands]).sum(0)
    return finished(total.chunk(len(operands))[rank], bias, epilogue)


@triton.jit
def _partial(
    t, a, b, m, N, k, world, TMA: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Tile t of this rank's product, in fp32: (tile, owner, row in the owner's part, column). My own part comes
    last."""
    num_m = tl.cdiv(m, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    owner = (tl.cast(world.rank, tl.int32) + 1 + t // (num_m * num_n)) % world.size
    i, j = pl.order.supergroup(t % (num_m * num_n), num_m, num_n, GROUP)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = accumulate(acc, a, owner, b, 0, 1, i * BLOCK_M, j * BLOCK_N, m, N, k, k, TMA, TRANSPOSED, BLOCK_K)
    return acc, owner, i * BLOCK_M, j * BLOCK_N


@triton.jit
def add_kernel(
    a_ptr,  # (size * m, k) this rank's
    b_ptr,  # (k, N), or (N, k) if TRANSPOSED, this rank's
    bias_ptr,  # (N,) this rank's, or None
    out_ptr,  # (m, N) this rank's
    sum_ptr,  # (2, m, ld) on every rank, zero between launches; all ranks add into one half, by the launch's parity
    done_ptr,  # int32 (1,) on every rank: programs of all ranks whose additions have landed everywhere
    m,
    N,
    k,
    ld,
    world,
    TMA: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = pl.epoch(done_ptr, world)
    a = stack(a_ptr, world.size, m, k, k, BLOCK_M, BLOCK_K, TMA)
    b = weights(b_ptr, 1, k, N, BLOCK_K, BLOCK_N, TMA, TRANSPOSED)
    out = stack(out_ptr, 1, m, N, N, BLOCK_M, BLOCK_N, TMA)
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    half = sum_ptr + tl.cast(epoch & 1, tl.int64) * m * ld
    for t in range(pid, world.size * tiles, programs):
        acc, owner, row, col = _partial(t, a, b, m, N, k, world, TMA, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, GROUP)
        target = tl.make_tensor_descriptor(
            pl.peer(half, owner, world), [m, N], [tl.cast(ld, tl.int64), 1], [BLOCK_M, BLOCK_N]
        )
        target.atomic_add([row, col], acc.to(sum_ptr.dtype.element_ty))
    # publish: my additions have landed, and the other half of my sum is zero since the launch before
    pl.signal_all(done_ptr, world)
    pl.wait(done_ptr, epoch * programs * world.size, world)
    for t in range(pid, tiles, programs):
        i, j = pl.order.supergroup(t, tl.cdiv(m, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
        ptrs, inside = tile_pointers(half, i * BLOCK_M, j * BLOCK_N, m, N, ld, BLOCK_M, BLOCK_N)
        total = finish(tl.load(ptrs, mask=inside), bias_ptr, j * BLOCK_N, N, EPILOGUE)
        store_tile(out, 0, total, i * BLOCK_M, j * BLOCK_N, m, N, N, TMA)
        tl.store(ptrs, tl.zeros((BLOCK_M, BLOCK_N), sum_ptr.dtype.element_ty), mask=inside)


@triton.jit
def inbox_kernel(
    a_ptr,  # (size * m, k) this rank's
    b_ptr,  # (k, N), or (N, k) if TRANSPOSED, this rank's
    bias_ptr,  # (N,) this rank's, or None
    out_ptr,  # (m, N) this rank's
    inbox_ptr,  # (2, size, m, ld) on every rank; rank r stores [:, r] of all; halves by the launch's parity
    ready_ptr,  # int32 (size, tiles) on every rank; [r, t] is signalled by rank r when its tile t is in the inbox
    m,
    N,
    k,
    ld,
    world,
    TMA: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    rank = tl.cast(world.rank, tl.int32)
    epoch = pl.epoch(ready_ptr, world)
    a = stack(a_ptr, world.size, m, k, k, BLOCK_M, BLOCK_K, TMA)
    b = weights(b_ptr, 1, k, N, BLOCK_K, BLOCK_N, TMA, TRANSPOSED)
    out = stack(out_ptr, 1, m, N, N, BLOCK_M, BLOCK_N, TMA)
    num_n = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(m, BLOCK_M) * num_n
    half = inbox_ptr + tl.cast(epoch & 1, tl.int64) * world.size * m * ld
    mine = half + tl.cast(rank, tl.int64) * m * ld
    for t in range(pid, world.size * tiles, programs):
        acc, owner, row, col = _partial(t, a, b, m, N, k, world, TMA, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, GROUP)
        target = stack(pl.peer(mine, owner, world), 1, m, N, ld, BLOCK_M, BLOCK_N, True)
        store_tile(target, 0, acc, row, col, m, N, ld, True)
        # A counter for each source: one for all would take a fast rank's next launch for a slow rank's this one.
        pl.signal(ready_ptr + rank * tiles + row // BLOCK_M * num_n + col // BLOCK_N, owner, world)
    for t in range(pid, tiles, programs):
        i, j = pl.order.supergroup(t, tl.cdiv(m, BLOCK_M), num_n, GROUP)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for r in range(world.size):
            pl.wait(ready_ptr + r * tiles + i * num_n + j, epoch, world)
            part = half + tl.cast(r, tl.int64) * m * ld
            ptrs, inside = tile_pointers(part, i * BLOCK_M, j * BLOCK_N, m, N, ld, BLOCK_M, BLOCK_N)
            total += tl.load(ptrs, mask=inside, other=0).to(tl.float32)
        total = finish(total, bias_ptr, j * BLOCK_N, N, EPILOGUE)
        store_tile(out, 0, total, i * BLOCK_M, j * BLOCK_N, m, N, N, TMA)


class _Space(NamedTuple):
    buffer: SymmetricTensor  # the sum, or the inbox
    counters: SymmetricTensor


def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    epilogue: Epilogue = "none",
    mode: Mode | None = None,
    tiles: Sequence[int] | None = None,
    lag: int | None = None,
    copies: int | None = None,
    workspace: Workspace | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """Rows [rank * m, (rank + 1) * m) of the sum over ranks of `a @ b`. Collective.

    a: (size * m, k), contiguous, b: (k, N), contiguous or the transposed view of a contiguous tensor, as w.t() of
    nn.Linear's weight; bf16, fp16 or fp32; the same m and N on every rank. out: (m, N) of a's dtype, apart from what is
    read; a new tensor where None. bias: (N,) of a's dtype, epilogue: "none", "relu", "gelu" (exact, with erf, as
    torch's by default) or "silu": applied once, in fp32, to the sum, by its owner, with the owner's bias; in mode "add"
    to a sum that is rounded already. Returns `out`, complete; nothing of the call is read by a peer after it.

    mode: "add" is fast and rounds at every addition, "inbox" adds in fp32 in a fixed order; see the module.
    "gluon", the Gluon form of "inbox": bf16 or fp16, N whole runs of 16 bytes, 2 to 8 ranks, sm_90, Triton 3.6.
    "unfused" and "nccl": cuBLAS and pkt's or, through torch.distributed, NCCL's reduce-scatter, each product rounded
    before it is added; they take no tiles. None, with nothing below given: what was tuned here or measured for the
    nearest shape; else "gluon" where that can run and m is more than 64 (its tiles have 128 rows); else "add".
    tiles: (BLOCK_M, BLOCK_N, BLOCK_K, GROUP, NUM_WARPS, NUM_STAGES, MAXNREG) as in all_gather_matmul; "gluon": (128,
        256, 64, GROUP, 8, 3 or 4) or (128, 128, 64, GROUP, 8, 3 to 6). The same on every rank; from the shapes where
        None.
    lag: "gluon": tiles that each rank computes of every other rank's part before the first of its own, at least 1; from
        all of them on one rank's part after another, its own last. From the shapes where None.
    copies: "gluon": copies by the copy engines that each other rank's part goes in, own tiles last; 0: the kernel
        stores them there. The same on every rank; from the shapes where None, and 0 where a lag is given.

    workspace: what keeps buffers, counters and the plan until it is closed; the world where None.

    Raises ShapeError, DtypeError, CollectiveMismatch, Unsupported, Closed.
    """
    world = _common.world_of(CALL, world, a, b, workspace)
    settings = (epilogue, mode, tiles, lag, copies)
    return _common.planned(CALL, _plan, world, (a, b, out, bias), settings, out, workspace)


def _plan(
    world: World, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None,
    epilogue: Epilogue, mode: Mode | None, tiles: Sequence[int] | None, lag: int | None, copies: int | None,
) -> _common.Launch:  # fmt: skip
    """Checks, and the form and its settings."""
    if mode is not None:
        _common.check_choice(CALL, "mode", mode, MODES, world)
    _common.check_integers(CALL, world, lag=lag, copies=copies)
    check_operands(CALL, a, b, world)
    M, N, size = a.shape[0], b.shape[1], world.size
    if M % size:
        wanted = f"a first dimension divisible by {size} ranks"
        raise ShapeError.argument(CALL, "a", tuple(a.shape), wanted, world.rank)
    m, dtype = M // size, a.dtype
    left = mode is None and tiles is None and lag is None and copies is None
    if left:
        key = {"M": M, "N": N, "K": a.shape[1]}
        found = _forms.tuned(CALL, world, key, dtype, m, N, by="MN")  # ranks may differ in k
        left = not found
        mode, tiles, lag, copies = (found.get(name) for name in ("mode", "tiles", "lag", "copies"))
    chosen = check_tiles(CALL, tiles, world)
    for name, value in (("lag", lag), ("copies", copies)):
        if value is not None and mode != "gluon":
            raise ShapeError.argument(CALL, name, value, f'none with mode "{mode or "add"}"', world.rank)
    check_epilogue(CALL, bias, epilogue, N, dtype, world)
    check_out(CALL, out, (m, N), a, b, bias, world)
    if mode in _unfused.MODES:
        _forms.check_unfused(CALL, mode, {} if chosen is None else {"tiles": chosen}, world)
    elif _forms.gluon(CALL, mode == "gluon", left, world, dtype, m, N):
        mode = "gluon"
    else:
        mode, chosen = mode or "add", chosen or default_tiles(m, dtype, N)
    _common.check_agreed(
        CALL, world, M=M, N=N, dtype=dtype, mode=mode, tiles=chosen, lag=lag, copies=copies,
        bias=bias is not None, epilogue=epilogue,
    )  # fmt: skip
    if mode == "gluon":
        from .gluon import settings

        k = _forms.longest(CALL, world, a.shape[1], M, N, dtype)
        chosen, lag, copies = settings(m, N, k, world, chosen, lag, copies)
    fresh = _common.fresh((m, N), dtype, world)
    if m == 0 or N == 0:
        return lambda a, b, out, bias: fresh() if out is None else out
    result = fresh() if out is None else out
    fit = None if chosen is None else whole_runs(a)
    a, b = fit(a, b) if fit else (a, b)
    if chosen is None:
        launch = _unfused.matmul_reduce_scatter(world, mode, M, N, dtype, epilogue)
    elif lag is not None and copies is not None:
        launch = _gluon_launch(world, a, b, result, chosen, lag, copies, epilogue)
    else:
        launch = _plain_launch(world, a, b, result, mode, chosen, epilogue)

    if fit is None and out is not None:
        return launch

    def whole(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        return launch(*(fit(a, b) if fit else (a, b)), fresh() if out is None else out, bias)

    return whole


def _gluon_launch(
    world: World, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, tiles: Tiles, lag: int, copies: int,
    epilogue: Epilogue,
) -> _common.Launch:  # fmt: skip
    from .gluon import inbox_launch

    return _forms.fitted(lambda a, b, out: inbox_launch(world, a, b, out, tiles, lag, copies, epilogue), a, b, out)


def _plain_launch(
    world: World, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, mode: Mode, tiles: Tiles, epilogue: Epilogue
) -> _common.Launch:
    (M, k), N, size, dtype = a.shape, b.shape[1], world.size, a.dtype
    m = M // size
    rows, transposed = stored(b)
    ld = padded(N, dtype)
    owned = triton.cdiv(m, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    programs = _common.num_programs(world, size * owned)

    def make() -> _Space:
        if mode == "add":
            buffer = zeros(2, m, ld, dtype=dtype, name="matmul_reduce_scatter.sum", world=world)
            return _Space(buffer, signals(1, name="matmul_reduce_scatter.done", world=world))
        buffer = empty(2, size, m, ld, dtype=dtype, name="matmul_reduce_scatter.inbox", world=world)
        return _Space(buffer, signals(size * owned, name="matmul_reduce_scatter.ready", world=world))

    space = world.keep((CALL, m, N, dtype, programs, tiles[:2], mode), make)
    kernel = add_kernel if mode == "add" else inbox_kernel
    constants = (_common.aligned(a, rows, out), transposed, epilogue, *tiles[:4])
    start = cooperative_launch(world, kernel, (programs,), **tiles.launch_options())

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = b.t() if transposed else b
        start(a, rows, bias, out, space.buffer, space.counters, m, N, k, ld, world.device, *constants)
        return out

    return launch
