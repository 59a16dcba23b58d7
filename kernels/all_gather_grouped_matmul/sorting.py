"""The pairs of a token and its expert, of all ranks, sorted by expert: which row of the product each pair gets.

Every rank gathers all ranks' choices and weights, and sorts them alone, in two launches. A program has a share of one
rank's pairs. It counts them by expert, and in the second launch it knows from all counts where its own rows begin.
Rows of an expert are in the order of ranks, tokens and choices, so all ranks have the same. The host learns no count.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pkt.runtime.launch.launch import beside_launch
from pkt.runtime.memory.factories import empty
from pkt.runtime.world import World

from ..declaration import Call, Launch
from ..shared.grid import COPY_BYTES, COPY_OPTIONS

AT_A_TIME = 4096
"""Elements of a block that counts pairs by expert."""
LEAST = 64
"""Pairs of a program, at least, where there are several programs."""


class Size(NamedTuple):
    """The numbers of a sort."""

    T: Any  # tokens of a rank
    EXPERTS: tl.constexpr
    EXPERTS2: tl.constexpr  # the next power of two
    K: tl.constexpr  # experts of a token
    K2: tl.constexpr  # the next power of two
    SIZE: tl.constexpr  # ranks
    SHARES: tl.constexpr  # programs that share a rank's pairs
    PAIRS: tl.constexpr  # counted at a time
    TOKENS: tl.constexpr  # written at a time


class Routes(NamedTuple):
    """Of Gathered what does not depend on x and w, as pointers."""

    weights: Any
    offsets: Any
    source: Any
    tokens: Any
    places: Any


class Sorted(NamedTuple):
    """What else a sort finds, of this rank, in memory that is kept."""

    starts: Any  # int32 (W + 1, E): the first row of each rank's tokens for each expert; at W that behind the last
    row_tokens: Any  # int32 (R,): the token of each row, counted over all ranks; 0 where it is no token's
    queue: Any  # int32 (1,): 0


@triton.jit
def pack_kernel(
    idx_ptr,  # int32 or int64 (T, K)
    w_ptr,  # fp32 (T, K)
    packed_ptr,  # int32 (T, 2 * K): experts, -1 for none, then the weights' bits
    p,  # Size
):
    k = tl.arange(0, p.K2)[None, :]
    for start in range(tl.program_id(0) * p.TOKENS, p.T, tl.num_programs(0) * p.TOKENS):
        t = start + tl.arange(0, p.TOKENS)[:, None]
        inside = (t < p.T) & (k < p.K)
        at = tl.cast(t, tl.int64) * p.K + k
        expert = tl.load(idx_ptr + at, mask=inside, other=-1)
        expert = tl.where((expert >= 0) & (expert < p.EXPERTS), expert, -1).to(tl.int32)
        bits = tl.load(w_ptr + at, mask=inside, other=0).to(tl.int32, bitcast=True)
        to = packed_ptr + tl.cast(t, tl.int64) * (2 * p.K) + k
        tl.store(to, expert, mask=inside)
        tl.store(to + p.K, bits, mask=inside)


@triton.jit
def _share(p):
    """The rank whose pairs this program has, its first pair, and the one behind its last."""
    source = tl.program_id(0) // p.SHARES
    each = tl.cdiv(p.T * p.K, p.SHARES)
    first = tl.minimum(tl.program_id(0) % p.SHARES * each, p.T * p.K)
    return source, first, tl.minimum(first + each, p.T * p.K)


@triton.jit
def _pair(packed_ptr, source, i, inside, p):
    """The token of each pair, counted over all ranks; where it is in `packed`; its expert, -1 for none."""
    token = source * p.T + i // p.K
    at = packed_ptr + tl.cast(token, tl.int64) * (2 * p.K) + i % p.K
    return token, at, tl.load(at, mask=inside, other=-1)


@triton.jit
def count_kernel(
    packed_ptr,  # int32 (W * T, 2 * K)
    hist_ptr,  # int32 (programs, E): pairs of each program by expert
    p,  # Size
):
    source, first, last = _share(p)
    e = tl.arange(0, p.EXPERTS2)
    counts = tl.zeros((p.EXPERTS2,), tl.int32)
    for start in range(first, last, p.PAIRS):
        i = start + tl.arange(0, p.PAIRS)
        _, _, expert = _pair(packed_ptr, source, i, i < last, p)
        counts += tl.sum((expert[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(hist_ptr + tl.program_id(0) * p.EXPERTS + e, counts, mask=e < p.EXPERTS)


@triton.jit
def number_kernel(
    packed_ptr,  # int32 (W * T, 2 * K)
    hist_ptr,  # int32 (programs, E)
    to,  # Routes
    s,  # Sorted
    rank,
    p,  # Size
):
    pid = tl.program_id(0)
    programs: tl.constexpr = p.SIZE * p.SHARES
    source, first, last = _share(p)
    e = tl.arange(0, p.EXPERTS2)
    total = tl.zeros((p.EXPERTS2,), tl.int32)
    before = tl.zeros((p.EXPERTS2,), tl.int32)
    for start in range(0, programs, p.PAIRS):
        q = start + tl.arange(0, p.PAIRS)[:, None]
        counted = tl.load(
            hist_ptr + q * p.EXPERTS + e[None, :], mask=(q < programs) & (e < p.EXPERTS)[None, :], other=0
        )
        total += tl.sum(counted, 0)
        before += tl.sum(tl.where(q < pid, counted, 0), 0)
    offsets = tl.cumsum(total) - total
    rows = tl.sum(total, 0)
    base = offsets + before
    if pid % p.SHARES == 0:
        tl.store(s.starts + source * p.EXPERTS + e, base, mask=e < p.EXPERTS)
    if pid == 0:
        tl.store(to.offsets + e, offsets, mask=e < p.EXPERTS)
        tl.store(to.offsets + p.EXPERTS, rows)
        tl.store(s.starts + p.SIZE * p.EXPERTS + e, offsets + total, mask=e < p.EXPERTS)
        tl.store(s.queue, 0)
    for start in range(first, last, p.PAIRS):
        i = start + tl.arange(0, p.PAIRS)
        token, at, expert = _pair(packed_ptr, source, i, i < last, p)
        mine = (expert[:, None] == e[None, :]).to(tl.int32)
        row = tl.sum(mine * (base[None, :] + tl.cumsum(mine, 0) - mine), 1)
        there = expert >= 0
        tl.store(to.tokens + tl.cast(source, tl.int64) * p.T * p.K + i, tl.where(there, row, -1), mask=i < last)
        weight = tl.load(at + p.K, mask=there, other=0).to(tl.float32, bitcast=True)
        _write(row, weight, source, i // p.K, i % p.K, token, there, to, s)
        base += tl.sum(mine, 0)
    for start in range(rows + pid * p.PAIRS, p.SIZE * p.T * p.K, programs * p.PAIRS):
        row = start + tl.arange(0, p.PAIRS)
        _write(row, 0.0, -1, -1, -1, 0, row < p.SIZE * p.T * p.K, to, s)
    _find_places(packed_ptr, rank, to, p)


@triton.jit
def _write(row, weight, source, t, k, token, there, to, s):
    """What is known of rows."""
    none = tl.zeros_like(row)
    at = to.source + 3 * tl.cast(row, tl.int64)
    tl.store(to.weights + row, none.to(tl.float32) + weight, mask=there)
    tl.store(at, none + source, mask=there)
    tl.store(at + 1, none + t, mask=there)
    tl.store(at + 2, none + k, mask=there)
    tl.store(s.row_tokens + row, none + token, mask=there)


@triton.jit
def _find_places(packed_ptr, rank, to, p):
    """Which of this rank's tokens have an expert."""
    k = tl.arange(0, p.K2)[None, :]
    rank = tl.cast(rank, tl.int32)
    for start in range(tl.program_id(0) * p.TOKENS, p.T, tl.num_programs(0) * p.TOKENS):
        t = start + tl.arange(0, p.TOKENS)
        place = rank * p.T + t
        at = packed_ptr + tl.cast(place, tl.int64)[:, None] * (2 * p.K) + k
        expert = tl.load(at, mask=(t < p.T)[:, None] & (k < p.K), other=-1)
        place = tl.where(tl.max(expert, 1) >= 0, place, -1)
        for other in tl.static_range(p.SIZE):
            tl.store(to.places + tl.cast(t, tl.int64) * p.SIZE + other, place, mask=t < p.T)


@triton.jit
def spread_kernel(
    whole_ptr,  # (W * T, H)
    row_tokens_ptr,  # int32 (R,)
    offsets_ptr,  # int32 (E + 1,)
    rows_ptr,  # (R, H)
    H,
    experts,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Each token once for each of its experts, in the experts' order."""
    end = tl.load(offsets_ptr + experts)
    for start in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        token = tl.load(row_tokens_ptr + row, mask=row < end, other=0)
        for col in range(0, H, COLS):
            cols = col + tl.arange(0, COLS)[None, :]
            inside = (row < end)[:, None] & (cols < H)
            x = tl.load(whole_ptr + tl.cast(token, tl.int64)[:, None] * H + cols, mask=inside)
            tl.store(rows_ptr + tl.cast(row, tl.int64)[:, None] * H + cols, x, mask=inside)


# --------------------------------------------------------------------------------------------------------------- host
def planned(call: Call, gather: Any) -> Any:
    """sort(topk_idx, topk_weights, Routes) -> Sorted, for choices like those of `call`. gather: `Operator.planned` of
    the all-gather. Collective."""
    world: World = call.world
    size, E, (T, K) = world.size, call.sizes["e"], call["topk_idx"].shape
    R, shares = size * T * K, max(1, min(world.num_sms // size, T * K // LEAST))
    experts2, K2 = triton.next_power_of_2(max(E, 1)), triton.next_power_of_2(max(K, 1))
    pairs, tokens = max(1, min(LEAST, AT_A_TIME // experts2)), max(1, 1024 // K2)
    sized = Size(T, *map(tl.constexpr, (E, experts2, K, K2, size, shares, pairs, tokens)))
    packers = max(1, min(world.num_sms, triton.cdiv(T, tokens)))

    def make() -> tuple[Any, ...]:
        def int32(name: str, *shape: int) -> torch.Tensor:
            return empty(*shape, dtype=torch.int32, name=f"all_gather_grouped_matmul.{name}", world=world)

        found = Sorted(int32("starts", size + 1, E), int32("row_tokens", R), int32("queue", 1))
        return int32("mine", T, 2 * K), int32("packed", size * T, 2 * K), int32("hist", size * shares, E), found

    mine, packed, hist, found = world.keep(("all_gather_grouped_matmul", "sort", T, K, E, shares), make)
    move: Launch | None = gather(world, mine, packed) if T * K else None
    pack = beside_launch(world, pack_kernel, (packers,))
    count, number = (beside_launch(world, kernel, (size * shares,)) for kernel in (count_kernel, number_kernel))

    def sort(idx: torch.Tensor, weights: torch.Tensor, to: Routes) -> Sorted:
        if world.streams is not None:
            world.streams.follow()  # the last call may have another stream, and still use this memory
        pack(idx, weights, mine, sized)
        if move is not None:
            move(mine, packed)
        count(packed, hist, sized)
        number(packed, hist, to, found, world.rank, sized)
        return found

    return sort


def spreading(call: Call) -> Any:
    """spread(whole, Sorted, offsets, rows): write the rows (R, H) of a grouped product, from the tokens (W * T, H) of
    all ranks; not those behind the last expert's."""
    world, R, H, E = call.world, call.sizes["r"], call["h"], call.sizes["e"]
    cols = min(1024, triton.next_power_of_2(max(H, 1)))
    high = min(triton.next_power_of_2(max(R, 1)), COPY_BYTES // (cols * call.dtype.itemsize))
    grid = (max(1, min(world.num_sms, triton.cdiv(R, high))),)
    start = beside_launch(world, spread_kernel, grid, **COPY_OPTIONS)

    def spread(whole: torch.Tensor, found: Sorted, offsets: torch.Tensor, rows: torch.Tensor) -> None:
        start(whole, found.row_tokens, offsets, rows, H, E, high, cols)

    return spread
