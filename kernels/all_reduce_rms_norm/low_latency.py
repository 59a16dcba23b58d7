"""The form in flagged words: every rank puts its x to every other, and all add and norm everything.

Words have 12 bytes of data and 4 of flag (shared.flagged). A thread has four words, which are three accesses of 16
bytes. `PARTS` programs share a token, by default one has it where it is no longer than its threads hold; each adds the
squares of its columns, and they tell each other the sums. On 2 x H100 1 and 16 tokens of 8192 take 9.1 and 10.0 us with
one program a token, 9.0 and 10.9 with two, 9.1 and 10.9 with eight (all_reduce_rms_norm_tried_2.json in
benchmarks/results). With more GPUs that has not been measured.

Nothing is loaded between the arrival of the last word and the last store: x, residual and weight are in registers
before, and the new residual stays there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import ptx, sync
from pkt.runtime.launch.launch import cooperative_launch

from ..declaration import Call, Launch
from ..shared import flagged, packing, rms_norm
from ..shared.grid import num_programs

MOST_THREADS = 512
"""Of a program, with one other rank; with several, whose words take more registers, half as many: then no kernel that
the tests compile spills."""
MOST_POLLED = 8
"""Words that a thread polls together: they and their addresses take six registers each."""
GROUP = tl.constexpr(rms_norm.GROUP)


class Words(NamedTuple):
    """Tokens in flagged words. A *unit* is a part of a token, `part` columns or fewer at its end, in BLOCKS blocks. A
    block has three *strips*, in each of which a thread has 16 bytes: the q-th int32 of these go into its word q."""

    T: Any
    H: Any
    part: Any
    strip: Any  # threads of a block that have something
    room: Any
    eps: Any
    PARTS: tl.constexpr  # units of a token; its programs have them at the same time
    BLOCKS: tl.constexpr
    BLOCK: tl.constexpr  # threads
    ONCE: tl.constexpr  # a program has one unit at most
    POLLED: tl.constexpr  # words of a rank that a thread polls together: 1, 2 or 4
    QUANT: tl.constexpr


@triton.jit
def low_latency_kernel(
    x_ptr,  # (T, H) this rank's
    residual_ptr,  # (T, H) this rank's, the same on every rank
    weight_ptr,  # (H,) this rank's, the same on every rank
    out_ptr,  # (T, H) this rank's
    new_ptr,  # (T, H) this rank's
    scales_ptr,  # fp32 (T, scales) this rank's
    slots_ptr,  # int32 (2, room, 4) on every rank; of a half, by the launch's parity, (units, BLOCKS, 4, size - 1,
    # strip, 4) is used, of which the other ranks put [:, :, :, 0], [:, :, :, 1], ... in turn, and behind it (units, 4),
    # which only its own programs use
    flags_ptr,  # of this rank; only its launch counter is used
    p,  # Words
    world,
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    units = p.T * p.PARTS
    rank = tl.cast(world.rank, tl.int32)
    PEERS: tl.constexpr = world.size - 1
    t = tl.arange(0, p.BLOCK)
    slot = tl.cast(p.strip, tl.int64) * 4  # int32 of a word of each thread
    x = _strips(x_ptr, pid, p)  # on its way with the count of launches
    launch = sync.peek_epoch(flags_ptr)
    half = slots_ptr + tl.cast(launch & 1, tl.int64) * p.room * 4
    for unit in range(pid, units, programs):
        for b in tl.static_range(p.BLOCKS):
            columns = (_ints(x[3 * b]), _ints(x[3 * b + 1]), _ints(x[3 * b + 2]))
            for i in tl.static_range(1, world.size):
                peer = (rank + i) % world.size
                mine = rank - (rank > peer).to(tl.int32)  # among the others of the peer
                for q in tl.static_range(4):
                    at = ((tl.cast(unit, tl.int64) * p.BLOCKS + b) * 4 + q) * PEERS + mine
                    values = (columns[0][q], columns[1][q], columns[2][q])
                    pl.put_flagged(half + at * slot + 4 * t, values, launch, peer, world, mask=t < p.strip)
        if not p.ONCE:
            x = _strips(x_ptr, unit + programs, p)
    if not p.ONCE:
        x = _strips(x_ptr, pid, p)
    residual, weight = _operands(residual_ptr, weight_ptr, pid, p)  # while words are under way
    ptx.cta_barrier()
    pl.epoch(flags_ptr, world)
    for unit in range(pid, units, programs):
        words = half + tl.cast(unit, tl.int64) * (4 * p.BLOCKS * PEERS) * slot + 4 * t
        new, squares, most = _added(x, residual, weight, new_ptr, words, unit, launch, p, world)
        if p.PARTS > 1:
            said = half + tl.cast(units, tl.int64) * (4 * p.BLOCKS * PEERS) * slot
            squares, most = _of_all_parts(squares, most, said, unit, launch, p, world)
        root = rms_norm.inverse_root(squares, p.H, p.eps)
        _finish(new, weight, root, most, out_ptr, scales_ptr, unit, p)
        if not p.ONCE:
            x = _strips(x_ptr, unit + programs, p)
            residual, weight = _operands(residual_ptr, weight_ptr, unit + programs, p)


@triton.jit
def _unit(unit, p):
    """(row, first column, columns) of a unit; no columns of one that does not exist."""
    begin = unit % p.PARTS * p.part
    width = tl.minimum(tl.maximum(p.H - begin, 0), p.part)
    return tl.cast(unit // p.PARTS, tl.int64), begin, tl.where(unit < p.T * p.PARTS, width, 0)


@triton.jit
def _columns(k: tl.constexpr, width, VECTOR: tl.constexpr, p):
    """(columns of strip k of a unit, (1, BLOCK * VECTOR); which of them exist)"""
    e = tl.arange(0, p.BLOCK * VECTOR)[None, :]
    col = k * p.strip * VECTOR + e
    return col, (e < p.strip * VECTOR) & (col < width)


@triton.jit
def _strips(ptr, unit, p):
    """A tuple of the strips of a unit of (T, H), each (1, BLOCK * elements of 16 bytes)."""
    row, begin, width = _unit(unit, p)
    return _row_strips(ptr + row * p.H, begin, width, p)


@triton.jit
def _row_strips(ptr, begin, width, p):
    VECTOR: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    found = ()
    for k in tl.static_range(3 * p.BLOCKS):
        col, inside = _columns(k, width, VECTOR, p)
        found += (tl.load(ptr + begin + col, mask=inside, other=0),)
    return found


@triton.jit
def _operands(residual_ptr, weight_ptr, unit, p):
    _, begin, width = _unit(unit, p)
    return _strips(residual_ptr, unit, p), _row_strips(weight_ptr, begin, width, p)


@triton.jit
def _ints(strip):
    """The four int32 that each thread has of a strip: (threads,) each."""
    PER: tl.constexpr = 32 // strip.dtype.primitive_bitwidth
    BLOCK: tl.constexpr = strip.shape[1] // (4 * PER)
    if PER == 1:
        whole = tl.reshape(strip, (BLOCK, 2, 2)).to(tl.int32, bitcast=True)
    else:
        whole = packing.packed(tl.reshape(strip, (BLOCK, 2, 2, PER)))
    even, odd = tl.split(whole)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _whole(a, b, c, d):
    """A strip of which a thread has a, b, c and d, each (threads,) or (threads, 2)."""
    whole = tl.join(tl.join(a, c), tl.join(b, d))
    if len(a.shape) == 2:
        whole = tl.permute(whole, (0, 2, 3, 1))
    return tl.reshape(whole, (1, whole.numel))


@triton.jit
def _added(x, residual, weight, new_ptr, words, unit, launch, p, world):
    """(the strips of the new residual of a unit, which is stored; the sum of its squares; with "fp8_token" the greatest
    |new residual * weight|), the last two (1,)."""
    PEERS: tl.constexpr = world.size - 1
    dtype: tl.constexpr = new_ptr.dtype.element_ty
    VECTOR: tl.constexpr = 128 // dtype.primitive_bitwidth
    row, begin, width = _unit(unit, p)
    inside_strip = tl.arange(0, p.BLOCK) < p.strip
    slot = tl.cast(p.strip, tl.int64) * 4
    squares = tl.zeros((1, p.BLOCK), tl.float32)  # of a thread
    most = tl.zeros((1, p.BLOCK), tl.float32)
    strips = ()
    for b in tl.static_range(p.BLOCKS):
        mine = (_ints(x[3 * b]), _ints(x[3 * b + 1]), _ints(x[3 * b + 2]))
        totals = ()  # [3 * q + j]: of what word q has of strip j
        for first in tl.static_range(0, 4, p.POLLED):
            at = words + (b * 4 + first) * PEERS * slot
            found = pl.take_flagged_all(at, slot, launch, world, mask=inside_strip, parts=p.POLLED * PEERS)
            for q in tl.static_range(p.POLLED):
                for j in tl.static_range(3):
                    totals += (_total(mine[j][first + q], found, q, j, dtype, world),)
        for j in tl.static_range(3):
            total = _whole(totals[j], totals[3 + j], totals[6 + j], totals[9 + j])
            new = (total + residual[3 * b + j].to(tl.float32)).to(dtype)
            col, inside = _columns(3 * b + j, width, VECTOR, p)
            tl.store(new_ptr + row * p.H + begin + col, new, mask=inside)
            h = new.to(tl.float32)
            squares += tl.sum(tl.reshape(tl.where(inside, h * h, 0), (1, p.BLOCK, VECTOR)), 2)
            if p.QUANT == "fp8_token":
                weighted = tl.abs(h * weight[3 * b + j].to(tl.float32))
                most = tl.maximum(most, tl.max(tl.reshape(weighted, (1, p.BLOCK, VECTOR)), 2))
            strips += (new,)
    return strips, tl.sum(squares, 1), tl.max(most, 1)


@triton.jit
def _total(mine, found, Q: tl.constexpr, J: tl.constexpr, dtype: tl.constexpr, world):
    """My int32 and what came as the J-th of the other ranks' Q-th words found, added in the order of the ranks, in
    fp32: (threads,), or (threads, 2) where there are two numbers in one."""
    PER: tl.constexpr = 32 // dtype.primitive_bitwidth
    total = packing.numbers(_of_rank(mine, found, Q, 0, J, world), dtype, PER)
    for i in tl.static_range(1, world.size):
        total += packing.numbers(_of_rank(mine, found, Q, i, J, world), dtype, PER)
    return total


@triton.jit
def _of_rank(mine, found, Q: tl.constexpr, R: tl.constexpr, J: tl.constexpr, world):
    """Rank R's: mine, or what came; the other ranks' lie in turn."""
    PEERS: tl.constexpr = world.size - 1
    rank = tl.cast(world.rank, tl.int32)
    word = mine
    if R < PEERS:
        word = tl.where(rank > R, found[Q * PEERS + R][J], word)
    if R > 0:
        word = tl.where(rank < R, found[Q * PEERS + R - 1][J], word)
    return word


@triton.jit
def _finish(new, weight, root, most, out_ptr, scales_ptr, unit, p):
    """Norm the strips of a unit and store them."""
    VECTOR: tl.constexpr = 128 // new[0].dtype.primitive_bitwidth
    row, begin, width = _unit(unit, p)
    for k in tl.static_range(3 * p.BLOCKS):
        h, w = new[k].to(tl.float32), weight[k].to(tl.float32)
        normed, scales = rms_norm.finished(h, w, root, most, out_ptr.dtype.element_ty, p.QUANT)
        col, inside = _columns(k, width, VECTOR, p)
        tl.store(out_ptr + row * p.H + begin + col, normed, mask=inside)
        if p.QUANT == "fp8_group":
            group = tl.arange(0, p.BLOCK * VECTOR // GROUP)[None, :]
            begins = k * p.strip * VECTOR + group * GROUP
            there = (group * GROUP < p.strip * VECTOR) & (begins < width)
            tl.store(scales_ptr + row * (p.H // GROUP) + (begin + begins) // GROUP, scales, mask=there)
        if p.QUANT == "fp8_token" and k == 0:  # the first of a token's programs stores it
            tl.store(scales_ptr + row + tl.zeros((1, 1), tl.int64), scales, mask=tl.zeros((1, 1), tl.int32) == begin)


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


# ---------------------------------------------------------------------------------------------------------------- host
def plan(call: Call) -> Launch:
    """`Form.plan` of low_latency."""
    world, (T, H), quant, itemsize = call.world, call.shape, call["quant"], call.dtype.itemsize
    peers = world.size - 1
    most = MOST_THREADS if peers < 2 else MOST_THREADS // 2
    parts = parts_of(world, T, H * itemsize, most, call["parts"])
    unit = rms_norm.GROUP if quant == "fp8_group" else 2  # elements of 16 bits go in pairs
    part = H if parts == 1 else triton.cdiv(triton.cdiv(H, parts), unit) * unit
    threads = triton.cdiv(part * itemsize, 48)
    blocks = max(triton.cdiv(threads, most), 1)
    strip = triton.cdiv(threads, blocks)
    if quant == "fp8_group":  # no group is in two strips
        strip = triton.cdiv(strip * 16, unit * itemsize) * (unit * itemsize // 16)
    block = max(triton.next_power_of_2(strip), 32)
    polled = 4
    while polled > 1 and polled * peers > MOST_POLLED:
        polled //= 2
    slots, flags, room = flagged.slots_of(world, T * parts * (peers * blocks * 4 * strip + 1))
    programs = num_programs(world, T * parts) // parts * parts
    constants = map(tl.constexpr, (parts, blocks, block, programs == T * parts, polled, quant or "none"))
    words_of_call = Words(T, H, part, strip, room, float(call["eps"]), *constants)
    registers = min(65536 // block, 255)
    start = cooperative_launch(world, low_latency_kernel, (programs,), num_warps=block // 32, maxnreg=registers)

    def launch(*tensors: torch.Tensor) -> Any:
        x, residual, weight, out, new, scales = tensors
        start(x, residual, weight, out, new, scales, slots, flags, words_of_call, world.device)
        return out, new, scales

    return launch


def parts_of(world: Any, T: int, nbytes: int, most: int, asked: int | None) -> int:
    """Programs that share a token of so many bytes: as asked while there are programs enough, and so many that each has
    one block, of `most` threads."""
    parts, least = asked or 1, triton.next_power_of_2(triton.cdiv(triton.cdiv(nbytes, 48), most))
    while parts > 1 and parts * T > world.num_sms:
        parts //= 2
    while least > world.num_sms:
        least //= 2
    return max(parts, least)
