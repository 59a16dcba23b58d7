"""Dispatch: every token goes to the ranks of its experts, and arrives there in the order of experts.

push: one launch.
    1. Every program counts the tokens of its share by expert and by rank. The ranks exchange these counts.
    2. Every rank so knows all counts, and where each row of each rank begins. Programs number their tokens.
    3. Some programs store tokens into the inboxes of the ranks, each token once a rank, whatever number of its experts
       is there, with the rows that it takes there. They signal once a chunk of tokens.
    4. The other programs copy each token into its rows: this rank's own tokens first, then chunks as they arrive.

Rows of an expert are in the order of source ranks, then of their tokens, in every run. A rank sends a token once to
each other rank that has an expert of it. Counts, offsets and indices stay on the device.

A token's place in a rank's inbox is its slot. A rank numbers slots chunk by chunk, and its sources take turns, so that
all of them arrive at the same time.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.errors import ShapeError
from pkt.language import ptx
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.world import World

from .declaration import Call, Case, Form, Launch, Operand, Shape, integer
from .experts_gradients import OF_DISPATCH
from .operator import Operator
from .shared.checks import FLOATS
from .shared.grid import COPY_OPTIONS, num_programs

NOWHERE = tl.constexpr(-(1 << 30))
"""A first row from which no row of an expert can be counted up to 0: the expert's rank has no room."""


class Dispatched(NamedTuple):
    """What a rank has received, and what `combine` needs to send it back. All tensors are on the device.

    R is max_tokens, E the experts of a rank, K the experts of a token, T this rank's tokens, W the number of ranks.
    """

    rows: torch.Tensor
    """(R, H) of x's dtype: the tokens, by expert. Rows that fill an expert up to `alignment` are 0; those behind the
    last expert's are undefined."""
    weights: torch.Tensor
    """fp32 (R,): the weight of each row, 0 where it is no token's."""
    counts: torch.Tensor
    """int32 (E,): tokens of each of this rank's experts, true also where they do not fit."""
    offsets: torch.Tensor
    """int32 (E + 1,): where the rows of each expert begin, and where the last one's end."""
    source: torch.Tensor
    """int32 (R, 3): the rank, token and number among the token's experts that each row comes from; -1 if from none."""
    tokens: torch.Tensor
    """int32 (S, K): the rows of each token that this rank has received, by slot; -1 for none."""
    places: torch.Tensor
    """int32 (T * W,): the slot of each of this rank's tokens on each rank; -1 for none."""
    needed: torch.Tensor
    """int32 (2,): the max_tokens that this rank would need, and the rank."""

    def check(self) -> None:
        """Raise ShapeError if this rank's rows do not fit into max_tokens: it has received none. Waits for the GPU."""
        needed, rank = self.needed.tolist()
        room = self.rows.shape[0]
        if needed > room:
            counts = self.counts.tolist()
            expert = max(range(len(counts)), key=counts.__getitem__)
            most = f"expert {rank * len(counts) + expert} has {counts[expert]} of {sum(counts)} rows"
            raise ShapeError.argument("dispatch", "max_tokens", room, f"at least {needed}: {most}", rank)


# ---------------------------------------------------------------------------------------------------------- reference
def reference(
    rank: int, x: Sequence[torch.Tensor], topk_idx: Sequence[torch.Tensor], topk_weights: Sequence[torch.Tensor],
    num_experts: int, max_tokens: int, alignment: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """What `rank` gets."""
    size, R, (T, K) = len(x), max_tokens, topk_idx[rank].shape
    own, chunk = triton.cdiv(num_experts, size), chunk_of(max_tokens)
    chosen = [[[e if 0 <= e < num_experts else -1 for e in token] for token in idx.tolist()] for idx in topk_idx]
    places = torch.full((T, size), -1)
    mine: dict[tuple[int, int], int] = {}  # (source rank, token) -> its slot here
    for d in range(size):
        sent = [[t for t, token in enumerate(of) if any(e >= 0 and e // own == d for e in token)] for of in chosen]
        chunks = [-(-len(tokens) // chunk) for tokens in sent]
        if _ends(chosen, own, d, alignment)[1][-1] > R:
            continue
        for r in (rank,) if d != rank else range(size):
            for j, t in enumerate(sent[r]):
                turns = (min(n, j // chunk + (q < r)) for q, n in enumerate(chunks))
                slot = sum(turns) * chunk + j % chunk
                if r == rank:
                    places[t, d] = slot
                if d == rank:
                    mine[r, t] = slot
    counts, ends = _ends(chosen, own, rank, alignment)
    rows, weights = x[0].new_zeros(R, x[0].shape[1]), topk_weights[0].new_zeros(R)
    source, tokens = torch.full((R, 3), -1), torch.full((slots_of(R, size), K), -1)
    if ends[-1] <= R:
        pairs = [(r, t, k, e) for r, of in enumerate(chosen) for t, token in enumerate(of) for k, e in enumerate(token)]
        free = list(ends)
        for r, t, k, e in pairs:
            if e >= 0 and e // own == rank:
                row, free[e % own] = free[e % own], free[e % own] + 1
                rows[row], weights[row] = x[r][t], topk_weights[r][t, k]
                source[row], tokens[mine[r, t], k] = torch.tensor((r, t, k)), row
    offsets = torch.tensor(ends if ends[-1] <= R else [0] * (own + 1))
    needed = torch.tensor([ends[-1], rank])
    return rows, weights, torch.tensor(counts), offsets, source, tokens, places.flatten(), needed


def _ends(chosen: list[list[list[int]]], own: int, rank: int, alignment: int) -> tuple[list[int], list[int]]:
    """Tokens of each of a rank's experts, and where the rows of each begin, with the end of the last."""
    every = collections.Counter(e for of in chosen for token in of for e in token)
    counts = [every[e] for e in range(rank * own, (rank + 1) * own)]
    return counts, [0, *itertools.accumulate(-(-n // alignment) * alignment for n in counts)]


def undefined(
    rank: int, dtype: torch.dtype, roundings: int, **operands: Any
) -> tuple[torch.Tensor | float, ...]:  # fmt: skip
    """Infinite for the elements of rows behind the last expert's, 0 for everything else."""
    own, R = triton.cdiv(operands["num_experts"], len(operands["x"])), operands["max_tokens"]
    chosen = [torch.where(idx < operands["num_experts"], idx, -1).tolist() for idx in operands["topk_idx"]]
    _, ends = _ends(chosen, own, rank, operands["alignment"])
    limit = torch.zeros(R, operands["x"][0].shape[1])
    limit[ends[-1] if ends[-1] <= R else 0 :] = float("inf")
    return limit, *(0.0,) * 7


# ------------------------------------------------------------------------------------------------------------- kernel
class Size(NamedTuple):
    """The numbers of a dispatch."""

    T: Any  # this rank's tokens
    H: Any  # elements of a token
    R: Any  # rows of the result
    S: Any  # slots
    EXPERTS: tl.constexpr  # OWN times the number of ranks
    CHOICES: tl.constexpr  # of them exist
    OWN: tl.constexpr  # of a rank
    K: tl.constexpr  # experts of a token
    K2: tl.constexpr  # the next power of two
    ALIGNMENT: tl.constexpr
    CHUNK: tl.constexpr  # tokens a signal
    SENDERS: tl.constexpr  # programs that store into inboxes
    TOKENS: tl.constexpr  # numbered at a time
    ROWS: tl.constexpr  # copied at a time, ROWS x COLS
    COLS: tl.constexpr


class Result(NamedTuple):
    """Dispatched, as pointers, this rank's."""

    rows: Any
    weights: Any
    counts: Any
    offsets: Any
    source: Any
    tokens: Any
    places: Any
    needed: Any


class Buffers(NamedTuple):
    """A launch's memory, on every rank. What peers do not access is there, too, so that the simulator watches it."""

    table: Any  # int32 (2, size, EXPERTS + size): rank r stores [:, r], its totals of hist and sent; halves by the
    # launch's parity: a peer may be a launch ahead, while this rank still reads
    inbox: Any  # (S, H): the slot's token, from its source
    meta: Any  # int32 (S, 2 * K + 1): of a slot the rows here and weights of its pairs, and its number at the source
    ready: Any  # int32 (1 + S / CHUNK,): ranks whose counts are here; of each chunk the last launch that has filled it
    grid: Any  # int32 (1,): of the grid barrier
    hist: Any  # int32 (programs, EXPERTS): pairs of token and expert among the tokens of a program
    sent: Any  # int32 (programs, size): tokens of it that go to each rank
    base: Any  # int32 (programs, EXPERTS): the row of the program's next token for an expert, on the expert's rank
    order: Any  # int32 (size, S): the tokens that go to each rank


@triton.jit
def dispatch_kernel(
    x_ptr,  # (T, H) this rank's
    idx_ptr,  # int32 or int64 (T, K) this rank's
    w_ptr,  # fp32 (T, K) this rank's
    to,  # Result
    routes_ptr,  # int32 (T, K) this rank's: the row of each pair of token and expert on the expert's rank
    m,  # Buffers
    p,  # Size
    world,
):
    pid = tl.program_id(0)
    launch = pl.epoch(m.ready, world)
    half = m.table + (launch & 1) * (world.size * (p.EXPERTS + world.size))
    _count(idx_ptr, m, p, world)
    pl.grid_barrier(m.grid, world)  # publish: every program's counts
    _exchange(half, m, p, world)
    pl.wait(m.ready, launch * world.size, world)  # before overwrite: every rank has read its last launch's inbox
    room = _begin(half, to, m, p, world)
    _number(idx_ptr, half, room, to, routes_ptr, m, p, world)
    pl.grid_barrier(m.grid, world)  # publish: rows and slots of all tokens, counts and offsets
    alone = tl.num_programs(0) == 1
    if pid < p.SENDERS:
        _send(x_ptr, idx_ptr, w_ptr, half, room, launch, routes_ptr, m, p, world)
    if (pid >= p.SENDERS) | alone:
        first = 0 if alone else pid - p.SENDERS
        step = 1 if alone else tl.num_programs(0) - p.SENDERS
        _place(x_ptr, idx_ptr, w_ptr, half, room, launch, first, step, to, routes_ptr, m, p, world)
        _fill(half, room, first, step, to, p, world)


@triton.jit
def _share(p):
    """The first token of this program and the one behind its last."""
    each = tl.cdiv(p.T, tl.num_programs(0))
    first = tl.minimum(tl.program_id(0) * each, p.T)
    return first, tl.minimum(first + each, p.T)


@triton.jit
def _experts(idx_ptr, t, k, inside, p):
    """The expert of each pair, -1 for none."""
    idx = tl.load(idx_ptr + tl.cast(t, tl.int64) * p.K + k, mask=inside & (k < p.K), other=-1)
    return tl.where((idx >= 0) & (idx < p.CHOICES), idx, -1).to(tl.int32)


@triton.jit
def _owner(expert, p):
    return tl.where(expert >= 0, expert // p.OWN, -1)


@triton.jit
def _goes(expert, p, world):
    """Of pairs (tokens, K): whether the token has an expert on each rank, (tokens, W), 1 or 0."""
    ranks = tl.arange(0, triton.next_power_of_2(world.size))[None, None, :]
    return tl.max((_owner(expert, p)[:, :, None] == ranks).to(tl.int32), 1)


@triton.jit
def _count(idx_ptr, m, p, world):
    E: tl.constexpr = triton.next_power_of_2(p.EXPERTS)
    W: tl.constexpr = triton.next_power_of_2(world.size)
    FEW: tl.constexpr = max(1, min(p.TOKENS, 4096 // (E * p.K2)))
    e = tl.arange(0, E)
    ranks = tl.arange(0, W)
    k = tl.arange(0, p.K2)[None, :]
    pairs = tl.zeros((E,), tl.int32)
    tokens = tl.zeros((W,), tl.int32)
    first, last = _share(p)
    for start in range(first, last, FEW):
        t = start + tl.arange(0, FEW)[:, None]
        expert = _experts(idx_ptr, t, k, t < last, p)
        pairs += tl.sum((tl.reshape(expert, (FEW * p.K2, 1)) == e[None, :]).to(tl.int32), 0)
        tokens += tl.sum(_goes(expert, p, world), 0)
    pid = tl.program_id(0)
    tl.store(m.hist + pid * p.EXPERTS + e, pairs, mask=e < p.EXPERTS)
    tl.store(m.sent + pid * world.size + ranks, tokens, mask=ranks < world.size)


@triton.jit
def _before(ptr, n: tl.constexpr, below):
    """The sum of the first `below` rows of (programs, n) int32, which programs have stored."""
    N: tl.constexpr = triton.next_power_of_2(n)
    HIGH: tl.constexpr = max(1, 4096 // N)
    cols = tl.arange(0, N)[None, :]
    total = tl.zeros((N,), tl.int32)
    for start in range(0, below, HIGH):
        rows = start + tl.arange(0, HIGH)[:, None]
        total += tl.sum(tl.load(ptr + rows * n + cols, mask=(rows < below) & (cols < n), other=0), 0)
    return total


@triton.jit
def _exchange(half, m, p, world):
    """Tell every rank how many of my tokens go to each expert, and to each rank."""
    if tl.program_id(0) == 0:
        e = tl.arange(0, triton.next_power_of_2(p.EXPERTS))
        ranks = tl.arange(0, triton.next_power_of_2(world.size))
        pairs = _before(m.hist, p.EXPERTS, tl.num_programs(0))
        tokens = _before(m.sent, world.size, tl.num_programs(0))
        mine = half + world.rank * (p.EXPERTS + world.size)
        for d in range(1, world.size + 1):
            peer = (tl.cast(world.rank, tl.int32) + d) % world.size
            pl.store(mine + e, pairs, peer, world, mask=e < p.EXPERTS)
            pl.store(mine + p.EXPERTS + ranks, tokens, peer, world, mask=ranks < world.size)
        pl.signal_all(m.ready, world)


@triton.jit
def _begin(half, to, m, p, world):
    """Find the row of this program's first token for each expert. Returns for each rank whether its rows fit, (W,)."""
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    E: tl.constexpr = triton.next_power_of_2(p.EXPERTS)
    e = tl.arange(0, E)
    ranks = tl.arange(0, triton.next_power_of_2(world.size))[:, None]
    there = (ranks < world.size) & (e[None, :] < p.EXPERTS)
    of_ranks = tl.load(half + ranks * (p.EXPERTS + world.size) + e[None, :], mask=there, other=0)
    counts = tl.sum(of_ranks, 0)
    padded = tl.cdiv(counts, p.ALIGNMENT) * p.ALIGNMENT
    owner = e // p.OWN
    owned = owner[None, :] == ranks
    needed = tl.sum(tl.where(owned, padded[None, :], 0), 1)
    begin = tl.sum(tl.where(owner[None, :] < ranks, padded[None, :], 0), 1)
    fits = (needed <= p.R).to(tl.int32)
    starts = tl.cumsum(padded) - padded - tl.sum(tl.where(owned, begin[:, None], 0), 0)
    fitting = tl.sum(tl.where(owned, fits[:, None], 0), 0) > 0
    base = _before(m.hist, p.EXPERTS, pid) + tl.sum(tl.where(ranks < rank, of_ranks, 0), 0)
    tl.store(m.base + pid * p.EXPERTS + e, tl.where(fitting, base + starts, NOWHERE), mask=e < p.EXPERTS)
    if pid == 0:
        mine = owner == rank
        at = e - rank * p.OWN
        size = tl.sum(tl.where(mine, padded, 0), 0)
        tl.store(to.counts + at, counts, mask=mine)
        tl.store(to.offsets + at, tl.where(fitting, starts, 0), mask=mine)
        tl.store(to.offsets + p.OWN, tl.where(size <= p.R, size, 0))
        tl.store(to.needed, size)
        tl.store(to.needed + 1, rank)
    ptx.cta_barrier()
    return fits


@triton.jit
def _number(idx_ptr, half, room, to, routes_ptr, m, p, world):
    """Give every pair of this program's tokens its row, and every token its slots. room: of `_begin`."""
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    ranks = tl.arange(0, triton.next_power_of_2(world.size))[None, :]
    by = tl.arange(0, triton.next_power_of_2(world.size))[None, None, :]
    both = (ranks[:, :, None] < world.size) & (by < world.size)
    tokens = half + by * (p.EXPERTS + world.size) + p.EXPERTS + ranks[:, :, None]
    chunks = tl.cdiv(tl.load(tokens, mask=both, other=0), p.CHUNK)  # that each rank sends to each, see `_chunk`
    PAIRS: tl.constexpr = p.TOKENS * p.K2
    i = tl.arange(0, PAIRS)
    sent = _before(m.sent, world.size, pid)
    first, last = _share(p)
    for start in range(first, last, p.TOKENS):
        t = start + i // p.K2
        expert = _experts(idx_ptr, t, i % p.K2, t < last, p)
        other = start + i[None, :] // p.K2
        same = expert[:, None] == _experts(idx_ptr, other, i[None, :] % p.K2, other < last, p)
        earlier = tl.sum((same & (i[None, :] < i[:, None])).to(tl.int32), 1)
        later = tl.sum((same & (i[None, :] > i[:, None])).to(tl.int32), 1)
        next_row = m.base + pid * p.EXPERTS + expert
        row = tl.load(next_row, mask=expert >= 0, other=NOWHERE) + earlier
        inside = (t < last) & (i % p.K2 < p.K)
        tl.store(routes_ptr + tl.cast(t, tl.int64) * p.K + i % p.K2, tl.where(row >= 0, row, -1), mask=inside)
        ptx.cta_barrier()  # every thread has read its next row
        tl.store(next_row, row + 1, mask=(expert >= 0) & (later == 0))
        ptx.cta_barrier()
        token = start + tl.arange(0, p.TOKENS)[:, None]
        goes = _goes(_experts(idx_ptr, token, tl.arange(0, p.K2)[None, :], token < last, p), p, world)
        j = sent[None, :] + tl.cumsum(goes, 0) - goes
        turns = (j // p.CHUNK)[:, :, None] + (by < rank).to(tl.int32)
        slot = tl.sum(tl.minimum(chunks, turns), 2) * p.CHUNK + j % p.CHUNK
        tl.store(m.order + ranks * p.S + j, token + tl.zeros_like(j), mask=(goes > 0) & (j < p.S))
        slot = tl.where((goes > 0) & (room[None, :] > 0), slot, -1)
        places = to.places + tl.cast(token, tl.int64) * world.size + ranks
        tl.store(places, slot, mask=(token < last) & (ranks < world.size))
        sent += tl.sum(goes, 0)


@triton.jit
def _sent(half, source, target, p, world):
    """Tokens that rank `source` sends to rank `target`."""
    return tl.load(half + source * (p.EXPERTS + world.size) + p.EXPERTS + target)


@triton.jit
def _chunks(half, target, p, world):
    """Chunks that each rank sends to rank `target`, (W,)."""
    ranks = tl.arange(0, triton.next_power_of_2(world.size))
    tokens = half + ranks * (p.EXPERTS + world.size) + p.EXPERTS + target
    return tl.cdiv(tl.load(tokens, mask=ranks < world.size, other=0), p.CHUNK)


@triton.jit
def _chunk(half, g, source, target, p, world):
    """The number at `target` of its chunk g from `source`: sources take turns as long as they have chunks."""
    ranks = tl.arange(0, triton.next_power_of_2(world.size))
    return tl.sum(tl.minimum(_chunks(half, target, p, world), g + (ranks < source).to(tl.int32)), 0)


@triton.jit
def _fits(room, rank, world):
    ranks = tl.arange(0, triton.next_power_of_2(world.size))
    return tl.sum(tl.where(ranks == rank, room, 0), 0) > 0


@triton.jit
def _pairs(idx_ptr, w_ptr, t, inside, rank, routes_ptr, p):
    """Of tokens t (ROWS, 1): rows on `rank` of their pairs, -1 for none, and the weights' bits, (ROWS, K2)."""
    k = tl.arange(0, p.K2)[None, :]
    at = tl.cast(t, tl.int64) * p.K + k
    inside = inside & (k < p.K)
    here = _owner(_experts(idx_ptr, t, k, inside, p), p) == rank
    rows = tl.where(here, tl.load(routes_ptr + at, mask=inside, other=-1), -1)
    return rows, tl.load(w_ptr + at, mask=inside, other=0).to(tl.int32, bitcast=True)


@triton.jit
def _send(x_ptr, idx_ptr, w_ptr, half, room, launch, routes_ptr, m, p, world):
    """Store this rank's tokens into the others' inboxes, chunk by chunk."""
    PEERS: tl.constexpr = world.size - 1
    rank = tl.cast(world.rank, tl.int32)
    k = tl.arange(0, p.K2)[None, :]
    for task in range(tl.program_id(0), tl.cdiv(p.T, p.CHUNK) * PEERS, p.SENDERS):
        peer = (rank + 1 + task % PEERS) % world.size
        g = task // PEERS
        count = _sent(half, rank, peer, p, world)
        if (g * p.CHUNK < count) & _fits(room, peer, world):
            chunk = _chunk(half, g, rank, peer, p, world)
            for start in range(0, p.CHUNK, p.ROWS):
                at = start + tl.arange(0, p.ROWS)[:, None]
                inside = g * p.CHUNK + at < count
                slot = tl.cast(chunk * p.CHUNK + at, tl.int64)
                t = tl.load(m.order + peer * p.S + g * p.CHUNK + at, mask=inside, other=0)
                rows, bits = _pairs(idx_ptr, w_ptr, t, inside, peer, routes_ptr, p)
                meta = m.meta + slot * (2 * p.K + 1)
                pl.store(meta + k, rows, peer, world, mask=inside & (k < p.K))
                pl.store(meta + p.K + k, bits, peer, world, mask=inside & (k < p.K))
                pl.store(meta + 2 * p.K, t, peer, world, mask=inside)
                for col in range(0, p.H, p.COLS):
                    cols = col + tl.arange(0, p.COLS)[None, :]
                    both = inside & (cols < p.H)
                    row = tl.load(x_ptr + tl.cast(t, tl.int64) * p.H + cols, mask=both)
                    pl.store(m.inbox + slot * p.H + cols, row, peer, world, mask=both)
            pl.signal(m.ready + 1 + chunk, peer, world, value=launch, op="set")  # publish the chunk


@triton.jit
def _place(x_ptr, idx_ptr, w_ptr, half, room, launch, first, step, to, routes_ptr, m, p, world):
    """Copy tokens into their rows: my own, then the chunks of the other ranks in the order in which they are sent."""
    rank = tl.cast(world.rank, tl.int32)
    k = tl.arange(0, p.K2)[None, :]
    own = tl.cdiv(_sent(half, rank, rank, p, world), p.CHUNK)
    tasks = own + tl.max(_chunks(half, rank, p, world), 0) * (world.size - 1)
    if not _fits(room, rank, world):
        tasks = 0
    for task in range(first, tasks, step):
        source = rank
        g = task
        if world.size > 1:
            if task >= own:
                source = (rank + world.size - 1 - (task - own) % (world.size - 1)) % world.size
                g = (task - own) // (world.size - 1)
        count = _sent(half, source, rank, p, world)
        if g * p.CHUNK < count:
            chunk = _chunk(half, g, source, rank, p, world)
            if source != rank:
                pl.wait(m.ready + 1 + chunk, launch, world, cmp="eq")
            for start in range(0, p.CHUNK, p.ROWS):
                at = start + tl.arange(0, p.ROWS)[:, None]
                inside = g * p.CHUNK + at < count
                slot = tl.cast(chunk * p.CHUNK + at, tl.int64)
                if source == rank:
                    t = tl.load(m.order + rank * p.S + g * p.CHUNK + at, mask=inside, other=0)
                    rows, bits = _pairs(idx_ptr, w_ptr, t, inside, rank, routes_ptr, p)
                    tokens = x_ptr + tl.cast(t, tl.int64) * p.H
                else:
                    meta = m.meta + slot * (2 * p.K + 1)
                    t = tl.load(meta + 2 * p.K, mask=inside, other=0)
                    rows = tl.load(meta + k, mask=inside & (k < p.K), other=-1)
                    bits = tl.load(meta + p.K + k, mask=inside & (k < p.K), other=0)
                    tokens = m.inbox + slot * p.H
                tl.store(to.tokens + slot * p.K + k, rows, mask=k < p.K)
                there = rows >= 0
                tl.store(to.weights + rows, bits.to(tl.float32, bitcast=True), mask=there)
                tl.store(to.source + 3 * tl.cast(rows, tl.int64), source + tl.zeros_like(rows), mask=there)
                tl.store(to.source + 3 * tl.cast(rows, tl.int64) + 1, t + tl.zeros_like(rows), mask=there)
                tl.store(to.source + 3 * tl.cast(rows, tl.int64) + 2, k + tl.zeros_like(rows), mask=there)
                for col in range(0, p.H, p.COLS):
                    cols = col + tl.arange(0, p.COLS)[None, :]
                    both = inside & (cols < p.H)
                    row = tl.load(tokens + cols, mask=both)
                    for number in tl.static_range(p.K):
                        target = tl.sum(tl.where(k == number, rows, 0), 1)[:, None]
                        tl.store(to.rows + tl.cast(target, tl.int64) * p.H + cols, row, mask=both & (target >= 0))


@triton.jit
def _fill(half, room, first, step, to, p, world):
    """What no token fills: rows up to the alignment, and the ends of weights, source and tokens."""
    rank = tl.cast(world.rank, tl.int32)
    MANY: tl.constexpr = max(p.ROWS * p.COLS, 1024)
    for expert in range(first, p.OWN, step):
        start = tl.load(to.offsets + expert) + tl.load(to.counts + expert)
        for row in range(start, tl.load(to.offsets + expert + 1)):
            for col in range(0, p.H, MANY):
                cols = col + tl.arange(0, MANY)
                zeros = tl.zeros((MANY,), to.rows.dtype.element_ty)
                tl.store(to.rows + tl.cast(row, tl.int64) * p.H + cols, zeros, mask=cols < p.H)
            _nobodys(row + tl.arange(0, 1), row + 1, to)
    end = tl.load(to.offsets + p.OWN)
    for start in range(end + first * MANY, p.R, step * MANY):
        _nobodys(start + tl.arange(0, MANY), p.R, to)
    chunks = tl.sum(_chunks(half, rank, p, world), 0)
    if not _fits(room, rank, world):
        chunks = 0
    begin = tl.cast(chunks, tl.int64) * p.CHUNK * p.K
    for start in range(begin + first * MANY, tl.cast(p.S, tl.int64) * p.K, step * MANY):
        at = start + tl.arange(0, MANY)
        tl.store(to.tokens + at, tl.full((MANY,), -1, tl.int32), mask=at < tl.cast(p.S, tl.int64) * p.K)


@triton.jit
def _nobodys(rows, end, to):
    tl.store(to.weights + rows, tl.zeros_like(rows).to(tl.float32), mask=rows < end)
    for i in tl.static_range(3):
        tl.store(to.source + 3 * tl.cast(rows, tl.int64) + i, tl.zeros_like(rows) - 1, mask=rows < end)


def dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    out: torch.Tensor | None = None,
    *,
    max_tokens: int,
    alignment: int = 1,
    mode: Literal["push"] | None = None,
    num_comm_sms: int | None = None,
    world: World | None = None,
) -> Dispatched:
    """The tokens that have chosen this rank's experts, from all ranks, in the order of experts. Collective.

    x: (T, H), this rank's tokens; ranks may have different T, and none. topk_idx: int32 or int64 (T, K), K from 1 to
    16, the experts of each token; -1, or any number that is no expert's, for none. topk_weights: fp32 (T, K).
    num_experts: of all ranks; rank r has experts r * E to (r + 1) * E - 1, E = num_experts / size, rounded up.
    max_tokens: rows of the result on every rank, padding included. alignment: the rows of each expert are padded with
    zeros to a multiple of it. out: (max_tokens, H) of x's dtype for the rows; a new tensor where None. num_comm_sms:
    programs that send, while the others place what arrives. Returns `Dispatched`, whose tensors `pkt.grouped_matmul`
    and `pkt.combine` take. The host waits for nothing, so a CUDA graph replays with other routing.

    If a rank would need more than max_tokens rows, it receives none: its offsets are 0, its counts are true, and
    `Dispatched.check` raises an error that says how many rows it needs. With the greatest T of any rank,
    size * T * K + E * (alignment - 1) rows are always enough.

    Differentiable in x and topk_weights. Symmetric memory kept: max_tokens tokens. Raises ShapeError, DtypeError,
    CollectiveMismatch.
    """
    tensors = x, topk_idx, topk_weights, out
    return Dispatched(*OPERATOR(tensors, (num_experts, max_tokens, alignment, mode, num_comm_sms), world))


# -------------------------------------------------------------------------------------------------------------- host
MOST_CHUNK = 32
"""Tokens between two signals, at most: with 7168 elements a signal takes some hundredths of their time."""
TILE_BYTES = 16384
"""Copied at a time."""
MOST_ROWS = 1 << 30
"""That alignment may add, at most."""
SENDERS = 24
"""Programs that send, by default: so many fill the links (see docs/facts.md), and the others memory."""


def chunk_of(max_tokens: int) -> int:
    """Tokens between two signals: less where there are few tokens, so that several programs work."""
    return min(MOST_CHUNK, max(2, triton.next_power_of_2(max_tokens // 256)))


def slots_of(max_tokens: int, size: int) -> int:
    """Places in an inbox for max_tokens tokens, where each source begins a chunk."""
    chunk = chunk_of(max_tokens)
    return (triton.cdiv(max_tokens, chunk) + size) * chunk


def _bound(call: Call) -> Shape:
    """The shape of the rows, and the letters of the further results."""
    size, R = call.world.size, call["max_tokens"]
    own = triton.cdiv(call["num_experts"], size)
    most = MOST_ROWS // (own * size)
    if call["alignment"] > most:
        wanted = f"at most {most} for {own * size} experts, so that an int32 counts their rows"
        raise call.refuse("alignment", call["alignment"], wanted)
    call.sizes |= {"r": R, "e": own, "ends": own + 1, "s": slots_of(R, size), "two": 2, "three": 3}
    return R, call["h"]


def _buffers(call: Call, p: Size, programs: int) -> Buffers:
    world, size, slots, n = call.world, call.world.size, p.S, p.EXPERTS.value
    meta = 2 * p.K.value + 1

    def int32(name: str, *shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.int32, name=f"dispatch.{name}", world=world)

    def make() -> Buffers:
        return Buffers(
            int32("counts", 2, size, n + size),
            empty(slots, max(p.H, 1), dtype=call.dtype, name="dispatch.inbox", world=world),
            int32("meta", slots, meta),
            signals(1 + slots // p.CHUNK.value, name="dispatch.ready", world=world),
            signals(1, name="dispatch.grid", world=world),
            int32("hist", programs, n), int32("sent", programs, size), int32("base", programs, n),
            int32("order", size, slots),
        )  # fmt: skip

    return world.keep(("dispatch", n, meta, slots, p.CHUNK.value, p.H, call.dtype), make)


def _plan(call: Call) -> Launch:
    world, (T, H), K = call.world, call["x"].shape, call["topk_idx"].shape[1]
    size, own = world.size, call.sizes["e"]
    programs = num_programs(world, world.num_sms)
    cols = min(1024, triton.next_power_of_2(max(H, 1)))
    chunk, K2 = chunk_of(call["max_tokens"]), triton.next_power_of_2(max(K, 1))
    senders = max(1, min(call["num_comm_sms"] or SENDERS, programs - 1))
    sized = Size(
        T, H, call["max_tokens"], call.sizes["s"],
        *map(tl.constexpr, (
            size * own, call["num_experts"], own, K, K2, call["alignment"], chunk, senders, max(1, 64 // K2),
            min(chunk, max(1, TILE_BYTES // (cols * call.dtype.itemsize))), cols,
        )),
    )  # fmt: skip
    buffers = _buffers(call, sized, programs)
    start = cooperative_launch(world, dispatch_kernel, (programs,), **COPY_OPTIONS)

    def launch(*tensors: torch.Tensor) -> Any:
        x, idx, weights, *results = tensors
        routes = idx.new_empty((T, K), dtype=torch.int32)
        start(x, idx, weights, Result(*results), routes, buffers, sized, world.device)
        return tuple(results)

    return launch


def _some_experts(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    """Experts for tests, a third of the places with none."""
    n = call["num_experts"]
    chosen = torch.randint(0, n, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 1 / 3, -1, chosen)


def _some_weights(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    return torch.rand(shape, generator=generator)


INT32 = (torch.int32,)
FEW = {"num_experts": 5, "max_tokens": 128, "alignment": 2}
OPERATOR = Operator(
    dispatch,
    tensors={
        "x": Operand("t h", FLOATS),
        "topk_idx": Operand("t k", (torch.int64, torch.int32), make=_some_experts),
        "topk_weights": Operand("t k", (torch.float32,), make=_some_weights),
    },
    result=_bound,
    also={
        "weights": Operand("r", (torch.float32,)), "counts": Operand("e", INT32), "offsets": Operand("ends", INT32),
        "source": Operand("r three", INT32), "tokens": Operand("s k", INT32), "places": Operand("W*t", INT32),
        "needed": Operand("two", INT32),
    },
    arguments={"num_experts": integer(least=1), "max_tokens": integer(least=1), "alignment": integer(least=1)},
    settings={"num_comm_sms": integer(least=1)},
    forms={
        "push": Form(
            _plan, "tokens into inboxes, once a rank, while others are placed", "x of tokens that leave, once a rank",
            settings={"num_comm_sms": None},
        ),
    },
    reference=reference,
    bound=undefined,
    backward=OF_DISPATCH,
    exact=True,
    private="t",
    most={"k": 16},
    always=True,
    cases=(Case({"t": 4, "h": 4, "k": 2}, arguments=FEW | {"mode": "push"}, ranks=2),),
)  # fmt: skip
