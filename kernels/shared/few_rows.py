"""Products with few rows, fused with a collective: each rank reads its weights once, at the speed of memory.

The time of such a product is that of its weights' way from memory. So the form "low_latency" of the three products adds
little to it: one launch and no barrier.

gather: some programs store this rank's A into every rank's inbox, and signal once each. All programs prefetch their
    first weights into L2 before they wait for A. Tiles are as high as A, so a weight is read once.
reduce: a program that has finished a tile puts it from registers into flagged words (pkt/language/flagged.py) on the
    ranks that need it, and takes and adds the other ranks' tiles.

Where there are fewer tiles than SMs, SPLIT programs take a tile, each a part of K. They leave fp32 parts in memory, and
the program that is last to arrive adds all of them in the order of K.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import ptx, sync
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.tensor import SymmetricTensor

from ..declaration import Call, Form, Launch, integer
from . import flagged, products, tile_words
from .checks import aligned, stored
from .few_rows_rules import (
    BLOCK,
    MOST_RANKS,
    SPLITS,
    ahead,
    in_one_shot,
    seconds_few,
    space_few,
    split_of,
    tiles_of,
)
from .grid import num_programs
from .product_rules import Key, gathered, scattered
from .tile_product import accumulate, columns_each, finish, padded, stack, tile_pointers, weights
from .tile_words import words_of_row


# --------------------------------------------------------------------------------------------------- tiles and parts
class Tile(NamedTuple):
    """How both kernels cut a product (M, K) @ (K, N)."""

    parts_ptr: Any  # fp32 (tiles, SPLIT, BLOCK_M, BLOCK_N), this rank's; None if SPLIT is 1
    arrived_ptr: Any  # int32 (tiles,), this rank's: parts that were ever left; None if SPLIT is 1
    SPLIT: tl.constexpr
    TMA: tl.constexpr
    TRANSPOSED: tl.constexpr
    EPILOGUE: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr


@triton.jit
def _place(unit, M, K, t):
    """(row, column, first and last of K) of a unit. The parts of a tile are neighbours, and run together."""
    tile = unit // t.SPLIT
    num_m = tl.cdiv(M, t.BLOCK_M)
    span = tl.cdiv(tl.cdiv(K, t.BLOCK_K), t.SPLIT) * t.BLOCK_K
    first = unit % t.SPLIT * span
    return tile % num_m * t.BLOCK_M, tile // num_m * t.BLOCK_N, first, tl.minimum(first + span, K)


@triton.jit
def _units(M, N, t):
    return tl.cdiv(M, t.BLOCK_M) * tl.cdiv(N, t.BLOCK_N) * t.SPLIT


@triton.jit
def _ask_ahead(unit, b_ptr, M, N, K, t, AHEAD: tl.constexpr):
    """Prefetch the first AHEAD rows of a unit's weights into L2, if there is such a unit."""
    _, col, first, last = _place(unit, M, K, t)
    LINE: tl.constexpr = 1024 // b_ptr.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
    if unit < _units(M, N, t):
        if t.TRANSPOSED:
            rows = col + tl.arange(0, t.BLOCK_N)
            ks = first + tl.arange(0, max(AHEAD // LINE, 1)) * LINE
            inside = (rows < N)[:, None] & (ks < last)[None, :]
            pl.prefetch(b_ptr + tl.cast(rows, tl.int64)[:, None] * K + ks[None, :], mask=inside)
        else:
            ks = first + tl.arange(0, AHEAD)
            cols = col + tl.arange(0, max(t.BLOCK_N // LINE, 1)) * LINE
            inside = (ks < last)[:, None] & (cols < N)[None, :]
            pl.prefetch(b_ptr + tl.cast(ks, tl.int64)[:, None] * N + cols[None, :], mask=inside)


@triton.jit
def _multiply(unit, a, b, M, N, K, lda, t):
    row, col, first, last = _place(unit, M, K, t)
    acc = tl.zeros((t.BLOCK_M, t.BLOCK_N), tl.float32)
    return accumulate(acc, a, 0, b, 0, 1, row, col, M, N, K, lda, t.TMA, t.TRANSPOSED, t.BLOCK_K, first, last)


@triton.jit
def _leave_part(acc, unit, world, t):
    """Leave the part of a tile for its last program. Returns whether this is the last."""
    pl.store(_part(unit, t), acc, world.rank, world)
    before = pl.atomic_add(t.arrived_ptr + unit // t.SPLIT, 1, world.rank, world)
    return (before & (t.SPLIT - 1)) == t.SPLIT - 1


@triton.jit
def _sum_of_parts(unit, t):
    total = tl.load(_part(unit // t.SPLIT * t.SPLIT, t))
    for part in tl.static_range(1, t.SPLIT):
        total += tl.load(_part(unit // t.SPLIT * t.SPLIT + part, t))
    return total


@triton.jit
def _part(unit, t):
    inside = tl.arange(0, t.BLOCK_M)[:, None] * t.BLOCK_N + tl.arange(0, t.BLOCK_N)[None, :]
    return t.parts_ptr + tl.cast(unit, tl.int64) * (t.BLOCK_M * t.BLOCK_N) + inside


# ---------------------------------------------------------------------------------------------------------- gathered
class Gather(NamedTuple):
    """What gather_kernel works on."""

    a_ptr: Any  # (m, k) this rank's
    b_ptr: Any  # (K, N), or (N, K) if TRANSPOSED, this rank's
    bias_ptr: Any  # (N,) this rank's, or None
    out_ptr: Any  # (M, N) this rank's; half as many columns with swiglu
    inbox_ptr: Any  # (2, M, ld) on every rank: A, in halves by the launch's parity. A peer that is a launch ahead has
    # everybody's signals of this one, but not everybody need have finished reading
    ready_ptr: Any  # int32 (1,) on every rank: blocks of A that programs of all ranks have stored here
    m: Any
    N: Any
    k: Any
    ld: Any
    COLUMNS: tl.constexpr  # the shards lie beside each other, not below each other
    GATHERED: tl.constexpr  # the launch before, for another weight, has waited for all of A: this kernel only computes
    ROWS: tl.constexpr  # a block that a program stores at a time, ROWS x CHUNK
    CHUNK: tl.constexpr
    AHEAD: tl.constexpr  # rows of weights that a program asks for before it waits


@triton.jit
def gather_kernel(p, t, world):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    rank = tl.cast(world.rank, tl.int32)
    M = p.m if p.COLUMNS else p.m * world.size
    K = p.k * world.size if p.COLUMNS else p.k
    launch = sync.peek_epoch(p.ready_ptr)
    if p.GATHERED:
        launch -= 1
    half = p.inbox_ptr + tl.cast(launch & 1, tl.int64) * M * p.ld
    blocks = tl.cdiv(p.k, p.CHUNK)
    tasks = 0 if p.GATHERED else tl.cdiv(p.m, p.ROWS) * blocks
    for task in range(pid, tasks, programs):
        x, inside = tile_pointers(
            p.a_ptr, task // blocks * p.ROWS, task % blocks * p.CHUNK, p.m, p.k, p.k, p.ROWS, p.CHUNK
        )  # fmt: skip
        mine = half + rank * p.k if p.COLUMNS else half + tl.cast(rank * p.m, tl.int64) * p.ld
        there, _ = tile_pointers(
            mine, task // blocks * p.ROWS, task % blocks * p.CHUNK, p.m, p.k, p.ld, p.ROWS, p.CHUNK
        )  # fmt: skip
        block = tl.load(x, mask=inside)
        for d in tl.static_range(1, world.size + 1):
            pl.store(there, block, (rank + d) % world.size, world, mask=inside)
    senders = tl.minimum(tasks, programs)
    if not p.GATHERED:
        if pid < senders:
            pl.signal_all(p.ready_ptr, world)
        _ask_ahead(pid, p.b_ptr, M, p.N, K, t, p.AHEAD)
    a = stack(half, 1, M, K, p.ld, t.BLOCK_M, t.BLOCK_K, t.TMA)
    b = weights(p.b_ptr, 1, K, p.N, t.BLOCK_K, t.BLOCK_N, t.TMA, t.TRANSPOSED)
    if not p.GATHERED:
        pl.wait(p.ready_ptr, launch * senders * world.size, world)
        pl.epoch(p.ready_ptr, world)
    for unit in range(pid, _units(M, p.N, t), programs):
        row, col, _, _ = _place(unit, M, K, t)
        acc = _multiply(unit, a, b, M, p.N, K, p.ld, t)
        if t.SPLIT == 1:
            _store(acc, row, col, M, p, t)
        elif _leave_part(acc, unit, world, t):
            _store(_sum_of_parts(unit, t), row, col, M, p, t)


@triton.jit
def _store(total, row, col, M, p, t):
    total = finish(total, p.bias_ptr, col, p.N, t.EPILOGUE)
    EACH: tl.constexpr = columns_each(t.EPILOGUE)
    N = p.N // EACH
    ptrs, inside = tile_pointers(p.out_ptr, row, col // EACH, M, N, N, t.BLOCK_M, t.BLOCK_N // EACH)
    tl.store(ptrs, total.to(p.out_ptr.dtype.element_ty), mask=inside)


# ----------------------------------------------------------------------------------------------------------- reduced
class Reduce(NamedTuple):
    """What reduce_kernel works on."""

    a_ptr: Any  # (M, k) this rank's
    b_ptr: Any  # (k, N), or (N, k) if TRANSPOSED, this rank's
    bias_ptr: Any  # (N,) this rank's, or None
    out_ptr: Any  # (M, N), or (M / size, N) if SCATTER, this rank's
    slots_ptr: Any  # int32 (2, room, 4) on every rank; of a half, by the launch's parity, (size, rows of out, words of
    # a row, 4) is used, and rank r puts [r] of it
    flags_ptr: Any  # of this rank; only its launch counter is used
    M: Any
    N: Any
    k: Any
    room: Any
    SCATTER: tl.constexpr  # rank r gets rows [r * m, (r + 1) * m) of the sum, m = M / size; else every rank gets all


@triton.jit
def reduce_kernel(p, t, world):
    """Why it cannot deadlock: a program waits only for other ranks, for the tile that it has just finished itself, and
    takes tiles in ascending order. So on every rank somebody computes the lowest tile that anybody waits for."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    launch = sync.peek_epoch(p.flags_ptr)
    half = p.slots_ptr + tl.cast(launch & 1, tl.int64) * p.room * 4
    a = stack(p.a_ptr, 1, p.M, p.k, p.k, t.BLOCK_M, t.BLOCK_K, t.TMA)
    b = weights(p.b_ptr, 1, p.k, p.N, t.BLOCK_K, t.BLOCK_N, t.TMA, t.TRANSPOSED)
    for unit in range(pid, _units(p.M, p.N, t), programs):
        row, col, _, _ = _place(unit, p.M, p.k, t)
        acc = _multiply(unit, a, b, p.M, p.N, p.k, p.k, t)
        if t.SPLIT == 1:
            _exchange(acc, half, launch, row, col, p, t, world)
        elif _leave_part(acc, unit, world, t):
            _exchange(_sum_of_parts(unit, t), half, launch, row, col, p, t, world)
    ptx.cta_barrier()
    pl.epoch(p.flags_ptr, world)


@triton.jit
def _exchange(acc, half, launch, row, col, p, t, world):
    """Put my tile to the ranks that need it, take theirs, and store the sum, which is added in the order of ranks."""
    dtype: tl.constexpr = p.out_ptr.dtype.element_ty
    WORDS: tl.constexpr = words_of_row(t.BLOCK_N, 32 // dtype.primitive_bitwidth)
    rank = tl.cast(world.rank, tl.int32)
    m = p.M // world.size if p.SCATTER else p.M  # rows of a slot
    a_row = tl.cdiv(p.N, t.BLOCK_N) * WORDS
    slot = tl.cast(m, tl.int64) * a_row * 4
    rows = row + tl.arange(0, t.BLOCK_M)
    column = col // t.BLOCK_N * WORDS
    mine = acc.to(dtype)
    for d in tl.static_range(1, world.size + 1):  # to myself, too, where all then add the same
        peer = (rank + d) % world.size
        first = peer * m if p.SCATTER else 0
        inside = (rows >= first) & (rows < first + m)
        at = half + rank * slot + ((rows - first).to(tl.int64) * a_row + column) * 4
        tile_words.put(at, mine, inside, launch, peer, world)
    first = rank * m if p.SCATTER else 0
    inside = (rows >= first) & (rows < first + m)
    at = half + ((rows - first).to(tl.int64) * a_row + column) * 4
    total = tile_words.take_sum(at, slot, inside, launch, world, t.BLOCK_N, dtype)
    total = finish(total, p.bias_ptr, col, p.N, t.EPILOGUE)
    cols = col + tl.arange(0, t.BLOCK_N)
    ptrs = p.out_ptr + (rows - first).to(tl.int64)[:, None] * p.N + cols[None, :]
    tl.store(ptrs, total.to(dtype), mask=inside[:, None] & (cols < p.N)[None, :])


# -------------------------------------------------------------------------------------------------------------- host
def gather_form() -> Form:
    """That of all_gather_matmul."""
    return _form(
        products.fitted(_gather, out=False),
        "few rows: weights are on their way while A travels",
        "(W - 1) |a|",
        gathered,
        several=_gather_several,
    )


def scatter_form() -> Form:
    """That of matmul_reduce_scatter."""
    return _form(_into_words(True), REDUCES, "3 / 2 (W - 1) / W |C|", scattered, roundings=lambda size: 2)


def all_form() -> Form:
    """That of matmul_all_reduce."""
    return _form(_into_words(False), REDUCES, "3 / 2 (W - 1) |C|", in_one_shot, roundings=lambda size: 2)


REDUCES = "few rows: tiles in words of data and flag"


def _form(
    plan: Callable[[Call], Launch], how: str, moves: str, sent: Callable[[Key], float], **more: Any
) -> Form:  # fmt: skip
    return Form(
        plan, how, moves, settings={"tiles": None, "split_k": None}, complete=settled, fits=fits,
        small={**products.SMALL, "split_k": 2}, space=space_few, seconds=seconds_few(sent), **more,
    )  # fmt: skip


def _into_words(scatter: bool) -> Callable[[Call], Launch]:
    return products.whole_runs(products.fitted(functools.partial(_reduce, scatter=scatter), out=False))


def splits(call: Call, name: str, value: Any) -> Any:
    """The check of the keyword `split_k`."""
    integer()(call, name, value)
    if value is not None and value not in SPLITS:
        raise call.refuse(name, value, " or ".join(map(str, SPLITS)))
    return value


def fits(call: Call) -> str:
    """Why the form cannot run a call, in words; "" where it can."""
    size = call.world.size
    return f"{size} ranks, more than {MOST_RANKS}" if size > MOST_RANKS else ""


def settled(call: Call) -> dict[str, Any]:
    """The tiles, and the parts of K that the programs of a tile take. Ranks may differ in K, so in those parts."""
    M, N = _rows(call), call["b"].shape[1]
    tiles = call["tiles"] or tiles_of(M, N, call.dtype)
    programs = num_programs(call.world, call.world.num_sms)
    return {"tiles": tiles, "split_k": call["split_k"] or split_of(M, N, call["b"].shape[0], tiles, programs)}


def _pushed(call: Call) -> tuple[SymmetricTensor, SymmetricTensor, int]:
    """The inbox of A, the counter of its blocks, and the programs that store them."""
    world, (m, k), dtype = call.world, call["a"].shape, call.dtype
    columns, M = call["shard"] == "columns", _rows(call)
    K = world.size * k if columns else k
    blocks = triton.cdiv(m, BLOCK[0]) * triton.cdiv(k, BLOCK[1])
    programs = num_programs(world, max(blocks, _count(call, M)))

    def make() -> tuple[SymmetricTensor, SymmetricTensor]:
        inbox = empty(2, M, padded(K, dtype), dtype=dtype, name=f"{call.name}.few rows", world=world)
        return inbox, signals(1, name=f"{call.name}.few rows ready", world=world)

    # By what the counter counts: others share an inbox, and its launches.
    return *world.keep((call.name, "few rows", columns, m, k, dtype, programs), make), programs


def _gather(call: Call) -> Launch:
    """The plan of all_gather_matmul's form."""
    return _multiplying(call, *_pushed(call), False)


def _gather_several(calls: Sequence[Call]) -> Callable[..., None]:
    """Each weight has tiles and parts of K of its own, where none are given."""
    lead, *others = calls
    inbox, ready, _ = _pushed(lead)

    def again(call: Call) -> Launch:
        call.settings = {name: call.given.get(name) for name in ("tiles", "split_k")}
        call.settings = settled(call)
        programs = num_programs(call.world, _count(call, _rows(call)))
        return _multiplying(call, inbox, ready, programs, True)

    fitted = products.fitted
    return products.in_turn(fitted(_gather, out=False)(lead), *(fitted(again, out=False)(call) for call in others))


def _multiplying(call: Call, inbox: SymmetricTensor, ready: SymmetricTensor, programs: int, again: bool) -> Launch:
    """launch(a, b, out, bias). again: the launch before, for another weight, has gathered A."""
    world, (m, k), N, tiles = call.world, call["a"].shape, call["b"].shape[1], call["tiles"]
    tile = _tile(call, aligned(stored(call["b"])[0]))
    start = cooperative_launch(world, gather_kernel, (programs,), **tiles.launch_options())
    constants = call["shard"] == "columns", again, *BLOCK, ahead(tiles, call.dtype.itemsize)
    same = inbox, ready, m, N, k, inbox.shape[-1], *map(tl.constexpr, constants)

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        start(Gather(a, b, bias, out, *same), tile, world.device)
        return out

    return launch


def _reduce(call: Call, scatter: bool) -> Launch:
    """The plan of the operators that reduce."""
    world, (M, k), N, tiles, dtype = call.world, call["a"].shape, call["n"], call["tiles"], call.dtype
    a_row = triton.cdiv(N, tiles.block_n) * words_of_row.fn(tiles.block_n, 4 // dtype.itemsize)
    slots, flags, room = flagged.slots_of(world, M * a_row if scatter else world.size * M * a_row)
    tile = _tile(call, aligned(call["a"], stored(call["b"])[0]))
    programs = num_programs(world, _count(call, M))
    start = cooperative_launch(world, reduce_kernel, (programs,), **tiles.launch_options())
    same = slots, flags, M, N, k, room, tl.constexpr(scatter)

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        start(Reduce(a, b, bias, out, *same), tile, world.device)
        return out

    return launch


def _rows(call: Call) -> int:
    """Rows of the product that a rank computes."""
    letters = call["a"].shape[0]
    return letters * call.world.size if call.arguments.get("shard") == "rows" else letters


def _count(call: Call, M: int) -> int:
    """Units of a product of M rows."""
    tiles = call["tiles"]
    return triton.cdiv(M, tiles.block_m) * triton.cdiv(call["b"].shape[1], tiles.block_n) * call["split_k"]


def _tile(call: Call, tma: bool) -> Tile:
    tiles, split, world = call["tiles"], call["split_k"], call.world
    transposed = stored(call["b"])[1]
    units = _count(call, _rows(call))
    parts = arrived = None
    if split > 1:

        def make() -> tuple[SymmetricTensor, SymmetricTensor]:
            shape = units, tiles.block_m, tiles.block_n
            parts = empty(*shape, dtype=torch.float32, name=f"{call.name}.parts of K", world=world)
            return parts, signals(units // split, name=f"{call.name}.parts that arrived", world=world)

        parts, arrived = world.keep((call.name, "parts of K", units, split, tiles[:2]), make)
    return Tile(
        parts_ptr=parts, arrived_ptr=arrived, SPLIT=tl.constexpr(split), TMA=tl.constexpr(tma),
        TRANSPOSED=tl.constexpr(transposed), EPILOGUE=tl.constexpr(call["epilogue"]),
        BLOCK_M=tl.constexpr(tiles.block_m), BLOCK_N=tl.constexpr(tiles.block_n), BLOCK_K=tl.constexpr(tiles.block_k),
    )  # fmt: skip
