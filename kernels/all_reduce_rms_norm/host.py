"""All-reduce, residual and RMSNorm in one launch: every rank ends with the normed rows and the new residual.

What is computed stands at the top of shared/rms_norm.py. The new residual says all about a row, so only it comes back
from who has added it, and every rank norms all rows: that costs memory, which is ten times as fast as the links.

low_latency: each rank puts its x to every rank, as words of 12 bytes of data and 4 of flag (shared.flagged), and every
    rank adds and norms everything: one flight, 4 / 3 * (W - 1) * |x| bytes out of each rank. `parts` programs share a
    token while there are programs enough; each adds the squares of its columns, and they tell each other the sums.
two_shot: each rank stores tiles of rows into their owners' inboxes; the owner adds, and stores the new residual into
    every rank's inbox; each rank norms what arrives (shared.row_tiles): 2 * (W - 1) / W * |x| bytes.
unfused: pkt's all-reduce, then a kernel that adds the residual and norms: the sum is rounded once more, written and
    read again.

low_latency adds in the order 0, 1, ..., two_shot in the order owner, owner + 1, ..., in fp32, the residual last. All
ranks hold the same bits. No form has a barrier, and none needs symmetric operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import ptx, sync
from pkt.model.gpu import H200
from pkt.runtime.launch.launch import beside, cooperative_launch
from pkt.runtime.memory.factories import empty
from pkt.runtime.world import World

from .all_reduce import OPERATOR as ALL_REDUCE
from .declaration import Call, Case, Form, Launch, Operand, choice, integer, number
from .declaration import block as power_of_two
from .gradients import Backward, Gradients, Recorded
from .operator import Operator
from .reduce_scatter import await_sent
from .shared import flagged, packing, rms_norm, row_tiles
from .shared.checks import FLOATS
from .shared.grid import COPY_OPTIONS, num_programs

Tensors = Sequence[torch.Tensor]


def reference(
    rank: int, x: Tensors, residual: Tensors, weight: Tensors, eps: float = 1e-6, quant: str | None = None
) -> tuple[torch.Tensor, ...]:
    """What `rank` gets, in fp64: (normed, new residual), or (normed / scales, new residual, scales)."""
    new = rms_norm.summed(x) + residual[rank].double()
    normed, *scales = rms_norm.exact(new, weight[rank].double(), eps, quant)
    return normed, new, *scales


def bound(
    rank: int, dtype: torch.dtype, roundings: int, x: Tensors, residual: Tensors, weight: Tensors, eps: float = 1e-6,
    quant: str | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """How far right results may be off."""
    parts = [*x, residual[rank]]
    magnitude = rms_norm.summed([part.abs() for part in parts])
    weights = weight[rank].double()
    return rms_norm.bound(rms_norm.summed(parts), magnitude, len(parts), weights, eps, quant, dtype, roundings)


# ------------------------------------------------------------------------------------------------------- flagged words
class Words(NamedTuple):
    """Tokens in flagged words. A *unit* is what a program has of a token: `part` columns, or fewer at its end."""

    T: Any
    H: Any
    part: Any
    third: Any  # of the int32 of a part, rounded up: words
    room: Any
    eps: Any
    PARTS: tl.constexpr  # units of a token; where there are several, a program has one unit at most
    BLOCK: tl.constexpr  # words that a program moves at a time
    COLS: tl.constexpr  # columns that it norms at a time
    QUANT: tl.constexpr


@triton.jit
def low_latency_kernel(
    x_ptr,  # (T, H) this rank's
    residual_ptr,  # (T, H) this rank's, the same on every rank
    weight_ptr,  # (H,) this rank's, the same on every rank
    out_ptr,  # (T, H) this rank's
    new_ptr,  # (T, H) this rank's
    scales_ptr,  # fp32 (T, scales) this rank's
    slots_ptr,  # int32 (2, room, 4) on every rank; of a half, by the launch's parity, (size, units, third, 4) is used,
    # of which rank r puts [r] of all, and behind it (units, 4), which only its own programs use
    flags_ptr,  # of this rank; only its launch counter is used
    p,  # Words
    world,
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    units = p.T * p.PARTS
    blocks = tl.cdiv(p.third, p.BLOCK)
    tasks = tl.cdiv(units - pid, programs) * blocks
    x = _thirds(x_ptr, 0, blocks, p)  # on its way with the count of launches
    launch = sync.peek_epoch(flags_ptr)
    half = slots_ptr + tl.cast(launch & 1, tl.int64) * p.room * 4
    slot = tl.cast(units, tl.int64) * p.third * 4  # from a rank's words to the next rank's
    mine = half + tl.cast(world.rank, tl.int64) * slot
    for task in range(tasks):
        t = task % blocks * p.BLOCK + tl.arange(0, p.BLOCK)
        at = mine + (tl.cast(pid + task // blocks * programs, tl.int64) * p.third + t) * 4
        for i in tl.static_range(1, world.size + 1):  # to myself too: every rank adds in the same order
            pl.put_flagged(at, x, launch, (world.rank + i) % world.size, world, mask=t < p.third)
        x = _thirds(x_ptr, task + 1, blocks, p)
    ptx.cta_barrier()
    pl.epoch(flags_ptr, world)
    for unit in range(pid, units, programs):
        words = half + tl.cast(unit, tl.int64) * p.third * 4
        row, begin, width = _unit(unit, p)
        at = row * p.H + begin
        squares = tl.zeros((1,), tl.float32)
        most = tl.zeros((1,), tl.float32)
        for first in range(0, p.third, p.BLOCK):
            t = first + tl.arange(0, p.BLOCK)
            found = pl.take_flagged_all(words + 4 * t, slot, launch, world, mask=t < p.third)
            for j in tl.static_range(3):
                h = _added(found, residual_ptr + at, new_ptr + at, t, j, width, p, world)
                squares += tl.sum(h * h)
                if p.QUANT == "fp8_token":
                    weight = _numbers(weight_ptr + begin, t, j, width, p)
                    most = tl.maximum(most, tl.max(tl.abs(h * weight)))
        if p.PARTS > 1:
            squares, most = _of_all_parts(squares, most, half + world.size * slot, unit, launch, p, world)
        root = rms_norm.inverse_root(squares, p.H, p.eps)
        ptx.cta_barrier()  # the new residual is read again, by other threads than have stored it
        for c in range(begin, begin + width, p.COLS):
            col = c + tl.arange(0, p.COLS)[None, :]
            inside = col < begin + width
            h = tl.load(new_ptr + row * p.H + col, mask=inside, other=0).to(tl.float32)
            weight = tl.load(weight_ptr + col, mask=inside, other=0).to(tl.float32)
            normed, scales = rms_norm.finished(h, weight, root, most, out_ptr.dtype.element_ty, p.QUANT)
            tl.store(out_ptr + row * p.H + col, normed, mask=inside)
            if p.QUANT != "none":
                # The scale of a token is stored by the first of its programs.
                here = tl.full((1, 1), 1, tl.int1) & ((p.QUANT == "fp8_group") | (c == 0))
                places, there = rms_norm.places_of_scales(
                    row + tl.zeros((1, 1), tl.int64), c, here, p.H, p.COLS, p.QUANT
                )
                tl.store(scales_ptr + places, scales, mask=there)


@triton.jit
def _unit(unit, p):
    """(row, first column, columns) of a unit."""
    begin = unit % p.PARTS * p.part
    return tl.cast(unit // p.PARTS, tl.int64), begin, tl.minimum(tl.maximum(p.H - begin, 0), p.part)


@triton.jit
def _thirds(x_ptr, task, blocks, p):
    """What goes into the words of a program's block number `task`, counted over all its units."""
    PER: tl.constexpr = 32 // x_ptr.dtype.element_ty.primitive_bitwidth
    unit = tl.program_id(0) + task // blocks * tl.num_programs(0)
    t = task % blocks * p.BLOCK + tl.arange(0, p.BLOCK)
    row, begin, width = _unit(unit, p)
    return packing.thirds(x_ptr + row * p.H + begin, t, p.third, (t < p.third) & (unit < p.T * p.PARTS), width, PER)


@triton.jit
def _numbers(ptr, t, j: tl.constexpr, width, p):
    """Elements at `ptr` of a third, in fp32."""
    PER: tl.constexpr = 32 // ptr.dtype.element_ty.primitive_bitwidth
    return packing.numbers(packing.load(ptr, t + j * p.third, t < p.third, width, PER), ptr.dtype.element_ty, PER)


@triton.jit
def _added(found, residual_ptr, new_ptr, t, j: tl.constexpr, width, p, world):
    """The new residual of a third of some words, which is stored, in fp32."""
    dtype: tl.constexpr = new_ptr.dtype.element_ty
    PER: tl.constexpr = 32 // dtype.primitive_bitwidth
    total = packing.numbers(found[0][j], dtype, PER)
    for i in tl.static_range(1, world.size):
        total += packing.numbers(found[i][j], dtype, PER)
    h = (total + _numbers(residual_ptr, t, j, width, p)).to(dtype)
    whole = h.to(tl.int32, bitcast=True) if PER == 1 else packing.packed(h)
    packing.store(new_ptr, t + j * p.third, whole, t < p.third, width, PER)
    return h.to(tl.float32)


@triton.jit
def _of_all_parts(squares, most, ptr, unit, launch, p, world):
    """Tell the other programs of the token, on this rank, and hear from them. They are resident, and have put first."""
    lane = tl.arange(0, p.BLOCK)
    said = tl.zeros((p.BLOCK,), tl.int32)
    values = (
        said + tl.sum(squares, 0).to(tl.int32, bitcast=True), said + tl.sum(most, 0).to(tl.int32, bitcast=True), said
    )  # fmt: skip
    at = ptr + tl.cast(unit, tl.int64) * 4 + lane * 0
    pl.put_flagged(at, values, launch, world.rank, world, mask=lane == 0)
    one = unit // p.PARTS * p.PARTS + tl.arange(0, p.PARTS)
    found = pl.take_flagged(ptr + tl.cast(one, tl.int64) * 4, launch, world)
    none = tl.zeros((1,), tl.float32)
    parts, greatest = found[0].to(tl.float32, bitcast=True), found[1].to(tl.float32, bitcast=True)
    return none + tl.sum(parts, 0), none + tl.max(greatest, 0)


# ------------------------------------------------------------------------------------------------------------ two shot
@triton.jit
def two_shot_kernel(
    x_ptr,  # (T, H) this rank's
    residual_ptr,  # (T, H) this rank's, the same on every rank; only its own tiles are read
    weight_ptr,  # (H,) this rank's, the same on every rank
    out_ptr,  # (T, H) this rank's
    new_ptr,  # (T, H) this rank's
    scales_ptr,  # fp32 (T, scales) this rank's
    inbox_ptr,  # (2, size - 1, programs, 2, room) on every rank, see row_tiles.Space; the answer is the new residual
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
    results = (weight_ptr, out_ptr, new_ptr, scales_ptr)
    for turn in range(pid, p.turns + programs, programs):
        row_tiles.send(x_ptr, inbox_ptr, sent, turn, p, world, p.HEIGHT * p.COLS)
        pl.signal_all(counts + rank, world)  # publish x, and the last turn's new residuals
        await_sent(counts, sent, world)
        _tile(x_ptr, residual_ptr, inbox_ptr, sent, turn, 0, results, eps, p, world, "mine", QUANT)
        for i in range(1, world.size):
            before = turn - programs
            _tile(x_ptr, residual_ptr, inbox_ptr, sent - 1, before, i, results, eps, p, world, "answer", QUANT)
        sent += 1


@triton.jit
def _tile(
    x_ptr, residual_ptr, inbox_ptr, sent, turn, distance, results, eps, p, world, WHICH: tl.constexpr,
    QUANT: tl.constexpr,
):  # fmt: skip
    """Norm a tile: my own ("mine"), the one that rank + distance has answered ("answer"), or one of which x is the sum
    over ranks already ("sum"), and of which owner 0 has all."""
    weight_ptr, out_ptr, new_ptr, scales_ptr = results
    tensors = (x_ptr, residual_ptr, inbox_ptr, new_ptr)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    H = p.units * p.UNIT
    owner = 0 if WHICH == "sum" else (tl.cast(world.rank, tl.int32) + distance) % world.size
    rows = row_tiles.count(owner, turn, p)
    for start in range(0, rows, p.HEIGHT):
        j = start + tl.arange(0, p.HEIGHT)[:, None]
        row = row_tiles.first(owner, turn, p) + j
        squares = tl.zeros((p.HEIGHT,), tl.float32)
        most = tl.zeros((p.HEIGHT,), tl.float32)
        col = tl.arange(0, p.COLS)[None, :]
        if p.WHOLE:
            inside = (j < rows) & (col < H)
            h = _new(tensors, sent, row, j * H, col, inside, distance, p, world, WHICH)
            weight = tl.load(weight_ptr + col, mask=col < H, other=0).to(tl.float32)
            root = rms_norm.inverse_root(tl.sum(h * h, 1), H, eps)
            most = rms_norm.greatest(h, weight, QUANT)
            normed, scales = rms_norm.finished(h, weight, root, most, dtype, QUANT)
            tl.store(out_ptr + row * H + col, normed, mask=inside)
            _store_scales(scales_ptr, scales, row, 0, j < rows, H, p, QUANT)
        else:
            for c in range(0, H, p.COLS):
                inside = (j < rows) & (c + col < H)
                h = _new(tensors, sent, row, j * H, c + col, inside, distance, p, world, WHICH)
                squares += tl.sum(h * h, 1)
                weight = tl.load(weight_ptr + c + col, mask=c + col < H, other=0).to(tl.float32)
                most = tl.maximum(most, rms_norm.greatest(h, weight, QUANT))
            ptx.cta_barrier()  # other threads may read the new residual than have stored it
            root = rms_norm.inverse_root(squares, H, eps)
            for c in range(0, H, p.COLS):
                inside = (j < rows) & (c + col < H)
                h = tl.load(new_ptr + row * H + c + col, mask=inside, other=0).to(tl.float32)
                weight = tl.load(weight_ptr + c + col, mask=c + col < H, other=0).to(tl.float32)
                normed, scales = rms_norm.finished(h, weight, root, most, dtype, QUANT)
                tl.store(out_ptr + row * H + c + col, normed, mask=inside)
                _store_scales(scales_ptr, scales, row, c, j < rows, H, p, QUANT)


@triton.jit
def _store_scales(scales_ptr, scales, row, begin, inside, H, p, QUANT: tl.constexpr):
    if QUANT != "none":
        places, there = rms_norm.places_of_scales(row, begin, inside, H, p.COLS, QUANT)
        tl.store(scales_ptr + places, scales, mask=there)


@triton.jit
def _new(tensors, sent, row, place, col, inside, distance, p, world, WHICH: tl.constexpr):
    """The new residual of some rows, which is stored, in fp32: of my own tile also into every other rank's inbox."""
    x_ptr, residual_ptr, inbox_ptr, new_ptr = tensors
    H = p.units * p.UNIT
    if WHICH == "sum":
        h = tl.load(x_ptr + row * H + col, mask=inside, other=0).to(tl.float32)
        h += tl.load(residual_ptr + row * H + col, mask=inside, other=0).to(tl.float32)
        h = h.to(new_ptr.dtype.element_ty)
    elif WHICH == "mine":
        total = row_tiles.sums(x_ptr, inbox_ptr, sent, row, place, col, inside, p, world)
        total += tl.load(residual_ptr + row * H + col, mask=inside, other=0).to(tl.float32)
        h = total.to(new_ptr.dtype.element_ty)
        for i in tl.static_range(1, world.size):
            to = row_tiles.place(inbox_ptr, sent, world.size - i, 1, p, world) + place + col
            pl.store(to, h, (world.rank + i) % world.size, world, mask=inside)
    else:
        came = row_tiles.place(inbox_ptr, sent, distance, 1, p, world) + place + col
        h = tl.load(came, mask=inside, other=0)
    tl.store(new_ptr + row * H + col, h, mask=inside)
    return h.to(tl.float32)


# ------------------------------------------------------------------------------------------------------------- unfused
@triton.jit
def norm_kernel(
    sum_ptr,  # (T, H) this rank's; the sum over ranks
    residual_ptr,  # (T, H) this rank's
    weight_ptr,  # (H,) this rank's
    out_ptr,  # (T, H) this rank's
    new_ptr,  # (T, H) this rank's
    scales_ptr,  # fp32 (T, scales) this rank's
    eps,
    p,  # row_tiles.Rows of one rank
    world,
    QUANT: tl.constexpr,
):
    results = (weight_ptr, out_ptr, new_ptr, scales_ptr)
    for turn in range(tl.program_id(0), p.turns, tl.num_programs(0)):
        _tile(sum_ptr, residual_ptr, sum_ptr, 0, turn, 0, results, eps, p, world, "sum", QUANT)


# ---------------------------------------------------------------------------------------------------------- prediction
BEGIN = 5.7e-6
"""Seconds of a launch in flagged words but for its flight: 16 KiB are all-reduced in 7.1 us on 2 x H200."""
NORM = 1e-6
"""Seconds from the last word of a token to its last normed element, which nothing hides."""


def seconds(mode: str, nbytes: int, size: int) -> float:
    """The predicted time of a form with x of so many bytes, on GPUs like the H200. The forms have not run on several
    GPUs: all constants are those of the collectives, see pkt.model.gpu and shared.flagged."""
    sent, once = 2 * (size - 1) / size * nbytes / H200.link, nbytes / H200.memory  # once through memory
    if mode == "low_latency":
        words = 4 / 3 * (size - 1) * nbytes
        moved = (2 * 4 / 3 * size + 5) * once  # words of all ranks; x, residual and new residual, both of them again
        return BEGIN + H200.signal + NORM + max(words / H200.link, moved)
    if mode == "two_shot":
        answers = 2 * (H200.signal + flagged.FLIGHT_BYTES / H200.link) if size > 1 else 0.0  # a flight and its fence
        return BEGIN + answers + NORM + max(sent, (4 + 4 / size) * once)
    fewest = flagged.FLAG_BYTES / H200.link  # of barriers, or flags in their stead
    return BEGIN + H200.signal + NORM + max(sent, 4 * once) + min(fewest, sent) + BEGIN / 2 + 4 * once


# ---------------------------------------------------------------------------------------------------------------- host
MOST_WORDS = 512
"""That a program moves at a time, one a thread."""


def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    *,
    quant: rms_norm.Quant | None = None,
    mode: Literal["low_latency", "two_shot", "unfused"] | None = None,
    parts: int | None = None,
    rows: int | None = None,
    world: World | None = None,
) -> tuple[torch.Tensor, ...]:
    """(normed, new residual) of the sum of all ranks' x: all-reduce, residual and RMSNorm in one launch. Collective.

    x: (T, H), bf16, fp16 or fp32, this rank's part of a sum, as a product with rows of the weights leaves it. residual:
    (T, H) and weight: (H,), of x's dtype and the same on every rank; nothing checks that. The new residual, (T, H) of
    x's dtype, is residual + the sum of x, added in fp32 and rounded once. normed = new residual * rsqrt(mean of its
    squares + eps) * weight, computed in fp32 from the rounded new residual, as vLLM's fused kernel does, and rounded
    once to x's dtype.

    quant: normed is float8_e4m3fn, and a third result has its scales, fp32: "fp8_token" one for each token, (T, 1);
    "fp8_group" one for each 128 columns, (T, H / 128), of which H must be a multiple. A scale is the greatest magnitude
    / 448, or 1 / (448 * 512) where that is more; normed * scale is the value.

    out: where normed goes, apart from all operands; a new tensor where None. The other results are new. All are
    complete when the call ends, and the same bits on every rank; x may be overwritten at once. H and T are any numbers;
    accesses are widest where 16 bytes divide a row. Operands may have any strides, and need not be symmetric.

    mode: a form that the top of kernels/all_reduce_rms_norm.py describes. None takes the one with the least predicted
    time, see `seconds`. parts: programs that share a token in low_latency, a power of two, fewer where tokens are many.
    rows: for each signal in two_shot.

    Symmetric memory kept: low_latency 8 / 3 * size times x's bytes and a word a program, rounded up to a power of two,
    shared with the collectives' flagged words; two_shot 4 * (size - 1) tiles a program for each size of tile and grid;
    unfused x's bytes, and what all_reduce keeps. Raises ShapeError, DtypeError, Unsupported, CollectiveMismatch.
    """
    found: Any = OPERATOR((x, residual, weight, out), (eps, quant, mode, parts, rows), world)
    return tuple(found) if quant else tuple(found[:2])


def default(call: Call) -> str:
    """The form with the least predicted time; one rank has nobody to send words to."""
    size, forms = call.world.size, list(OPERATOR.forms)
    if size == 1 or size > flagged.MOST_RANKS:
        forms.remove("low_latency")
    return min(forms, key=lambda mode: seconds(mode, call["x"].nbytes, size))


def _shape(call: Call) -> tuple[int, ...]:
    rms_norm.check_groups(call)
    return call.sizes["t"], call.sizes["h"]


def _low_latency(call: Call) -> Launch:
    world, (T, H), quant, itemsize = call.world, call.shape, call["quant"], call.dtype.itemsize
    words = triton.cdiv(triton.cdiv(H * itemsize, 4), 3)
    wanted = call["parts"] or triton.next_power_of_2(triton.cdiv(words, MOST_WORDS))
    parts = wanted
    while parts > 1 and parts * T > world.num_sms:
        parts //= 2
    unit = rms_norm.GROUP if quant == "fp8_group" else 2  # elements of 16 bits go in pairs
    part = H if parts == 1 else triton.cdiv(triton.cdiv(H, parts), unit) * unit
    third = triton.cdiv(triton.cdiv(part * itemsize, 4), 3)
    block = max(min(triton.next_power_of_2(third), MOST_WORDS), 32)
    slots, flags, room = flagged.slots_of(world, T * parts * (world.size * third + 1))
    cols = rms_norm.columns(part, row_tiles.TILE_ELEMENTS)
    words_of_call = Words(
        T, H, part, third, room, float(call["eps"]), *map(tl.constexpr, (parts, block, cols, quant or "none"))
    )
    grid = (num_programs(world, T * parts),)
    start = cooperative_launch(world, low_latency_kernel, grid, num_warps=block // 32)

    def launch(*tensors: torch.Tensor) -> Any:
        x, residual, weight, out, new, scales = tensors
        start(x, residual, weight, out, new, scales, slots, flags, words_of_call, world.device)
        return out, new, scales

    return launch


def _two_shot(call: Call) -> Launch:
    programs, rest = rms_norm.over_tiles(call)
    start = cooperative_launch(call.world, two_shot_kernel, (programs,), **COPY_OPTIONS)

    def launch(*tensors: torch.Tensor) -> Any:
        start(*tensors, *rest)
        return tensors[3:]

    return launch


def _unfused(call: Call) -> Launch:
    world, eps, quant, name = call.world, float(call["eps"]), call["quant"] or "none", "all_reduce_rms_norm.sum"
    T, H = call.shape
    total = world.keep((name, T, H, call.dtype), lambda: empty(T, H, dtype=call.dtype, name=name, world=world))
    reduce = ALL_REDUCE.planned(world, call["x"], total)
    p, programs = row_tiles.rows(world, call.shape, call.dtype, 1)

    def launch(*tensors: torch.Tensor) -> Any:
        x, residual, weight, out, new, scales = tensors
        reduce(x, total)
        beside(
            norm_kernel, (programs,), total, residual, weight, out, new, scales, eps, p, world.device, quant,
            **COPY_OPTIONS,
        )  # fmt: skip
        return out, new, scales

    return launch


def backward(call: Recorded) -> Gradients:
    """The gradients of x, residual and weight. Collective. Every rank's x is in every rank's results, but a rank's
    residual and weight count as its own."""
    of_sum, found = rms_norm.pulled_back(call, call.grads[0])
    if "x" in call.wanted:
        found["x"] = call.operator("all_reduce", of_sum.clone(memory_format=torch.contiguous_format))
    return found


GIVEN: dict[str, Any] = {"out": "given", "large": {"t": 512, "h": 8192}}
MOVES = "2 (W - 1) / W |x|"
OPERATOR = Operator(
    all_reduce_rms_norm,
    tensors={
        "x": Operand("t h", FLOATS),
        "residual": Operand("t h", same=True),
        "weight": Operand("h", same=True),
    },
    result=_shape,
    dtype=rms_norm.dtype_of,
    also={"new_residual": Operand("t h"), "scales": Operand(rms_norm.scales_of, (torch.float32,))},
    arguments={"eps": number(above=0), "quant": choice(None, *rms_norm.QUANTS)},
    settings={"parts": power_of_two, "rows": integer(1)},
    forms={
        "low_latency": Form(
            _low_latency, "words of data and flag to every rank, which all add and norm, no barrier",
            "4 / 3 (W - 1) |x|", settings={"parts": None}, small={"parts": 2},
        ),
        "two_shot": Form(
            _two_shot, "rows to their owner, which adds; all norm what comes back", MOVES,
            settings={"rows": None}, small={"rows": 4},
        ),
        "unfused": Form(
            _unfused, "pkt's all-reduce, then a kernel that norms", "as all_reduce's", roundings=lambda size: 2
        ),
    },
    default=default,
    reference=reference,
    bound=bound,
    backward=Backward(
        backward, "torch's of the norm; of x its `all_reduce`",
        saves=rms_norm.SAVES, refuses=rms_norm.refuses,
    ),
    cases=(
        # One program with two turns, so that both halves of its inbox have answers.
        Case({"t": 16, "h": 3}, arguments={"mode": "two_shot"}, ranks=2, sms=1, **GIVEN),
        Case({"t": 1, "h": 3}, arguments={"mode": "two_shot"}, **GIVEN),
        # The third launch meets what the first left in its half of the slots. On one SM one program has a token.
        Case({"t": 1, "h": 3}, arguments={"mode": "low_latency"}, sms=1, launches=3, **GIVEN),
        Case({"t": 1, "h": 4}, arguments={"mode": "low_latency"}, ranks=2, launches=3, **GIVEN),
        Case({"t": 1, "h": 256}, arguments={"quant": "fp8_group"}, explore=False),
    ),
)  # fmt: skip
