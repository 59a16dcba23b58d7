"""Reduce-scatter, residual, RMSNorm and all-gather in one launch: the residual stays shared by rows among the ranks.

What is computed stands at the top of shared/rms_norm.py. Rank r owns part r of the rows.

push: each rank stores tiles of x into their owners' inboxes; the owner adds, norms, and stores the normed rows into
    every rank's inbox, from where each stores them into `out` (shared.row_tiles): 2 * (W - 1) / W * |x| bytes out of
    each rank, and with fp8 results a quarter less for 16-bit x. No barrier.

The sum is in fp32, in the order owner, owner + 1, ..., the residual last. Each row is normed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import ptx
from pkt.runtime.world import World

from .declaration import Call, Case, Form, Launch, Operand, choice, integer, number
from .gradients import Backward, Gradients, Recorded
from .operator import Operator
from .shared import rms_norm, row_tiles
from .shared.checks import FLOATS
from .shared.inbox import await_sent

Tensors = Sequence[torch.Tensor]


def reference(
    rank: int, x: Tensors, residual: Tensors, weight: Tensors, eps: float = 1e-6, quant: str | None = None
) -> tuple[torch.Tensor, ...]:
    """What `rank` gets, in fp64: (normed, new residual), or (normed / scales, new residual, scales)."""
    news = [part + own.double() for part, own in zip(rms_norm.summed(x).chunk(len(x)), residual)]
    each = [rms_norm.exact(new, w.double(), eps, quant) for new, w in zip(news, weight)]
    normed, *scales = (torch.cat(parts) for parts in zip(*each))
    return normed, news[rank], *scales


def bound(
    rank: int, dtype: torch.dtype, roundings: int, x: Tensors, residual: Tensors, weight: Tensors, eps: float = 1e-6,
    quant: str | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """How far right results may be off."""
    whole = [*x, torch.cat(list(residual))]
    magnitude = rms_norm.summed([part.abs() for part in whole])
    limits = rms_norm.bound(
        rms_norm.summed(whole), magnitude, len(whole), weight[rank].double(), eps, quant, dtype, roundings
    )
    return limits[0], limits[1].chunk(len(x))[rank], *limits[2:]


# ------------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def push_kernel(
    x_ptr,  # (T, H) this rank's
    residual_ptr,  # (T / size, H) this rank's
    weight_ptr,  # (H,) this rank's, the same on every rank
    out_ptr,  # (T, H) this rank's
    new_ptr,  # (T / size, H) this rank's
    scales_ptr,  # fp32 (T, scales) this rank's
    inbox_ptr,  # (2, size - 1, programs, 2, room) on every rank, see row_tiles.Space; the answer is the normed rows,
    # in out's dtype, and their scales
    sent_ptr,  # int32 (programs, size) on every rank
    eps,
    p,  # row_tiles.Rows
    world,
    QUANT: tl.constexpr,
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    rank = tl.cast(world.rank, tl.int32)
    counts = sent_ptr + pid * world.size
    sent = pl.atomic_add(counts + rank, 0, rank, world, sem="relaxed")
    for turn in range(pid, p.turns + programs, programs):
        row_tiles.send(x_ptr, inbox_ptr, sent, turn, p, world, p.HEIGHT * p.COLS)
        pl.signal_all(counts + rank, world)  # publish x, and the last turn's normed rows
        await_sent(counts, sent, world)
        _norm_tile(
            x_ptr, residual_ptr, weight_ptr, out_ptr, new_ptr, scales_ptr, inbox_ptr, sent, turn, eps, p, world, QUANT
        )
        for i in range(1, world.size):
            _receive(out_ptr, scales_ptr, inbox_ptr, sent - 1, turn - programs, i, p, world, QUANT)
        sent += 1


@triton.jit
def _norm_tile(
    x_ptr, residual_ptr, weight_ptr, out_ptr, new_ptr, scales_ptr, inbox_ptr, sent, turn, eps, p, world,
    QUANT: tl.constexpr,
):  # fmt: skip
    """Norm my tile, and store it into `out` and every other rank's inbox."""
    H = p.units * p.UNIT
    rank = tl.cast(world.rank, tl.int32)
    rows = row_tiles.count(rank, turn, p)
    for start in range(0, rows, p.HEIGHT):
        j = start + tl.arange(0, p.HEIGHT)[:, None]
        row = row_tiles.first(rank, turn, p) + j
        own = row - tl.cast(rank, tl.int64) * p.apart  # of my residual
        squares = tl.zeros((p.HEIGHT,), tl.float32)
        most = tl.zeros((p.HEIGHT,), tl.float32)
        for c in range(0, H, p.COLS):
            col = c + tl.arange(0, p.COLS)[None, :]
            inside = (j < rows) & (col < H)
            total = row_tiles.sums(x_ptr, inbox_ptr, sent, row, j * H, col, inside, p, world)
            total += tl.load(residual_ptr + own * H + col, mask=inside, other=0).to(tl.float32)
            new = total.to(new_ptr.dtype.element_ty)
            tl.store(new_ptr + own * H + col, new, mask=inside)
            h = new.to(tl.float32)
            weight = tl.load(weight_ptr + col, mask=col < H, other=0).to(tl.float32)
            squares += tl.sum(h * h, 1)
            most = tl.maximum(most, rms_norm.greatest(h, weight, QUANT))
        ptx.cta_barrier()  # other threads may read the new residual than have stored it
        root = rms_norm.inverse_root(squares, H, eps)
        for c in range(0, H, p.COLS):
            col = c + tl.arange(0, p.COLS)[None, :]
            inside = (j < rows) & (col < H)
            h = tl.load(new_ptr + own * H + col, mask=inside, other=0).to(tl.float32)
            weight = tl.load(weight_ptr + col, mask=col < H, other=0).to(tl.float32)
            normed, scales = rms_norm.finished(h, weight, root, most, out_ptr.dtype.element_ty, QUANT)
            tl.store(out_ptr + row * H + col, normed, mask=inside)
            if QUANT != "none":
                places, there = rms_norm.places_of_scales(row, c, j < rows, H, p.COLS, QUANT)
                tl.store(scales_ptr + places, scales, mask=there)
            for i in tl.static_range(1, world.size):
                answer = row_tiles.place(inbox_ptr, sent, world.size - i, 1, p, world)
                to = answer.to(tl.pointer_type(out_ptr.dtype.element_ty))
                pl.store(to + j * H + col, normed, (rank + i) % world.size, world, mask=inside)
                if QUANT != "none":
                    places, there = rms_norm.places_of_scales(j, c, j < rows, H, p.COLS, QUANT)
                    pl.store(_scales(answer, p) + places, scales, (rank + i) % world.size, world, mask=there)


@triton.jit
def _scales(answer, p):
    """Where the scales of a tile of answers are: after its rows, of one byte an element."""
    return answer.to(tl.pointer_type(tl.float32)) + (p.ROWS * p.units * p.UNIT + 3) // 4


@triton.jit
def _receive(out_ptr, scales_ptr, inbox_ptr, sent, turn, distance, p, world, QUANT: tl.constexpr):
    """Store the normed rows of the tile that rank + distance owns."""
    H = p.units * p.UNIT
    BLOCK: tl.constexpr = p.HEIGHT * p.COLS
    owner = (tl.cast(world.rank, tl.int32) + distance) % world.size
    rows = row_tiles.count(owner, turn, p)
    row = row_tiles.first(owner, turn, p)
    answer = row_tiles.place(inbox_ptr, sent, distance, 1, p, world)
    came = answer.to(tl.pointer_type(out_ptr.dtype.element_ty))
    for begin in range(0, rows * H, BLOCK):
        offs = begin + tl.arange(0, BLOCK)
        tl.store(out_ptr + row * H + offs, tl.load(came + offs, mask=offs < rows * H), mask=offs < rows * H)
    if QUANT != "none":
        each = 1 if QUANT == "fp8_token" else H // rms_norm._GROUP
        for begin in range(0, rows * each, 256):
            offs = begin + tl.arange(0, 256)
            scales = tl.load(_scales(answer, p) + offs, mask=offs < rows * each)
            tl.store(scales_ptr + row * each + offs, scales, mask=offs < rows * each)


# ---------------------------------------------------------------------------------------------------------------- host
def reduce_scatter_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    *,
    quant: rms_norm.Quant | None = None,
    mode: Literal["push"] | None = None,
    rows: int | None = None,
    world: World | None = None,
) -> tuple[torch.Tensor, ...]:
    """(normed, this rank's new residual) of the sum of all ranks' x: reduce-scatter, residual, RMSNorm and all-gather
    of the normed rows in one launch, for sequence parallelism. Collective.

    x: (T, H), bf16, fp16 or fp32, this rank's part of a sum; T a multiple of the number of ranks. residual: (T / size,
    H), of x's dtype, of this rank's part of the rows. weight: (H,), of x's dtype and the same on every rank; nothing
    checks that. The new residual, (T / size, H) of x's dtype, is residual + this rank's rows of the sum of x, added in
    fp32 and rounded once. normed, (T, H), has all rows on every rank: new residual * rsqrt(mean of its squares + eps) *
    weight, in fp32 from the rounded new residual, rounded once.

    quant: as of all_reduce_rms_norm: normed is float8_e4m3fn, and a third result has its scales, fp32: "fp8_token" (T,
    1), "fp8_group" (T, H / 128).

    out: where normed goes, apart from all operands; a new tensor where None. The other results are new. All are
    complete when the call ends, normed with the same bits on every rank; x may be overwritten at once. Operands may
    have any strides, and need not be symmetric. mode: the form that the top of kernels/reduce_scatter_rms_norm.py
    describes. rows: for each signal.

    Symmetric memory kept: 4 * (size - 1) tiles a program for each size of tile and grid, shared with
    all_reduce_rms_norm. Raises ShapeError, DtypeError, Unsupported, CollectiveMismatch.
    """
    found: Any = OPERATOR((x, residual, weight, out), (eps, quant, mode, rows), world)
    return tuple(found) if quant else tuple(found[:2])


def _shape(call: Call) -> tuple[int, ...]:
    rms_norm.check_groups(call)
    return call.sizes["t"] * call.world.size, call.sizes["h"]


def _push(call: Call) -> Launch:
    return rms_norm.over_tiles(call, push_kernel, owned=True)


def backward(call: Recorded) -> Gradients:
    """The gradients of x, residual and weight. Collective. A rank's residual and weight are in the normed rows of all
    ranks, by the rows that the rank owns."""
    of_sum, found = rms_norm.pulled_back(call, call.operator("reduce_scatter", call.grads[0].contiguous()))
    if "x" in call.wanted:
        found["x"] = call.operator("all_gather", of_sum)
    return found


GIVEN: dict[str, Any] = {"out": "given", "large": {"t": 512, "h": 8192}}
OPERATOR = Operator(
    reduce_scatter_rms_norm,
    tensors={"x": Operand("W*t h", FLOATS), "residual": Operand("t h"), "weight": Operand("h", same=True)},
    result=_shape,
    dtype=rms_norm.dtype_of,
    also={"new_residual": Operand("t h"), "scales": Operand(rms_norm.scales_of, (torch.float32,))},
    arguments={"eps": number(above=0), "quant": choice(None, *rms_norm.QUANTS)},
    settings={"rows": integer(1)},
    forms={
        "push": Form(
            _push, "rows to their owner, which adds and norms; all get the normed rows", "2 (W - 1) / W |x|",
            settings={"rows": None}, small={"rows": 4},
        ),
    },
    reference=reference,
    bound=bound,
    backward=Backward(
        backward, "`reduce_scatter`, torch's of the norm, and of x `all_gather`",
        saves=rms_norm.SAVES, refuses=rms_norm.refuses,
    ),
    cases=(
        # One program with two turns, so that both halves of its inbox have answers.
        Case({"t": 8, "h": 3}, arguments={"mode": "push"}, ranks=2, sms=1, **GIVEN),
        Case({"t": 1, "h": 3}, arguments={"mode": "push"}, **GIVEN),
        Case({"t": 1, "h": 256}, arguments={"quant": "fp8_group"}, explore=False),
    ),
)  # fmt: skip
