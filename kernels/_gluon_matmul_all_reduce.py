"""Matmul + all-reduce in one Gluon kernel, without multicast: partial sums to each tile's owner, who finishes the tile
and stores it on every rank.

Tile after tile is owned by rank 0, 1, ... in turn. It is stored by every other rank into its owner's inbox, at a place
of its own, and signalled, as in _gluon_matmul_reduce_scatter and in the same turns: a rank's own tiles are `lag` tiles
behind the others'. The owner adds what has come to its own product, in fp32 and in a fixed order, applies bias and
epilogue, rounds, and stores the tile by TMA into the output of every rank, and tells them. A launch ends on a rank when
all tiles have landed there.

An output is written by others only after its own rank has computed the tile, so in the same launch; and a launch ends
when every rank has read what came for it. So there is one inbox, and nothing is waited for at the start.

The same bits every time and on all ranks, off by at most about 2 * u * s, in the words of matmul_all_reduce.
2 * (size - 1) / size * M * N * itemsize bytes out of each rank.

COPIED: copy engines move the finished tiles of the first row blocks, `parcel` of them at a time: the owner stores them
in its own output and counts them. It owns a range of columns there, so that they are a box of it; in the order of
computing the owners are spread as before. What is finished last is stored, so that the end waits for no large copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

import pkt.language as pl
from pkt.errors import ShapeError
from pkt.runtime.factories import empty, signals
from pkt.runtime.launch import cooperative_launch
from pkt.runtime.tensor import SymmetricTensor
from pkt.runtime.world import World

from . import _common, _copies
from ._gluon import (
    CONSUMER_WARPS,
    NARROW,
    REGISTERS,
    TILES,
    check,
    check_tiles,
    consume_all,
    descriptor,
    first_tile,
    grouped,
    layout,
    lend,
    load_partial,
    load_step,
    open_outbox,
    open_ring,
    peer_descriptors,
    publish,
    take_over,
    taken_over,
    to_peer,
    to_peers,
    turn,
    weights_descriptor,
)
from ._gluon_matmul_reduce_scatter import lag_of
from ._matmul import Epilogue, Tiles, stored

CALL = "matmul_all_reduce"


@gluon.jit
def _tile(t, rank, num_m, num_n, lag, SIZE: gl.constexpr, GROUP: gl.constexpr, COPIED: gl.constexpr):
    """Tile t: (d, place among those of rank + d, row block, column); a column below zero where the last turn of all has
    no tile for that rank."""
    d, place = turn(t, gl.cdiv(num_m * num_n, SIZE), lag, SIZE)
    if COPIED:
        i, j = grouped(place, num_m, num_n // SIZE, GROUP)
        return d, place, i, (rank + d) % SIZE * (num_n // SIZE) + j
    else:
        index = place * SIZE + (rank + d) % SIZE
        i, j = grouped(gl.minimum(index, num_m * num_n - 1), num_m, num_n, GROUP)
        return d, place, i, gl.where(index < num_m * num_n, j, -1)


@gluon.jit
def _place(t, rank, num_m, num_n, lag, SIZE: gl.constexpr, GROUP: gl.constexpr, COPIED: gl.constexpr):
    """For `consume`: those that I own are mine."""
    d, _, _, j = _tile(t, rank, num_m, num_n, lag, SIZE, GROUP, COPIED)
    return gl.where(d == 0, 2 * j + 1, 2 * j)


# ------------------------------------------------------------------------------------------------------- warps
@gluon.jit
def _load(
    a, b, inbox, ring, ready_ptr, places, N, K, where, epoch, world, HALF: gl.constexpr, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    count = places // world.size
    it = 0
    for t in range(first_tile(), places, gl.num_programs(0)):
        d, place, i, j = _tile(t, *where)
        if j >= 0:
            for k in range(0, K, BLOCK_K):
                load_step(it, a, [i * BLOCK_M, k], b, j * BLOCK_N, k, ring, TRANSPOSED,
                          BLOCK_M, BLOCK_N, BLOCK_K, STAGES)  # fmt: skip
                it += 1
            if d == 0:
                for p in range(world.size - 1):
                    pl.wait(ready_ptr + p * count + place, epoch, world)
                    load_partial(it, inbox, (p * count + place) * BLOCK_M, ring, BLOCK_M, BLOCK_N, STAGES, HALF)
                    it += 2
            lend(it, ring, STAGES)
            it += 1


@gluon.jit
def _store(
    out, inboxes, outs, ring, outbox, ready_ptr, places, tiles, K, copied, parcel, where, epoch, world,
    HALF: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    COPIED: gl.constexpr,
):  # fmt: skip
    PEERS: gl.constexpr = world.size - 1
    count = places // world.size
    done_ptr = ready_ptr + PEERS * count
    rank = gl.cast(world.rank, gl.int32)
    it = 0
    n = 0
    for t in range(first_tile(), places, gl.num_programs(0)):
        d, place, i, j = _tile(t, *where)
        if j >= 0:
            it += gl.cdiv(K, BLOCK_K) + gl.where(d == 0, 2 * PEERS, 0)
            halves = take_over(it, n, ring, outbox, BLOCK_M, BLOCK_N, STAGES, HALF)
            kept = (d == 0) & (place < copied) if COPIED else False
            for h in gl.static_range(1, -1, -1):
                part = halves[h]
                if d == 0:
                    at = [i * BLOCK_M, j * BLOCK_N + h * (BLOCK_N // 2)]
                    tma.async_copy_shared_to_global(out, at, part)
                    if not kept:
                        to_peers(outs, at, part, world.size)
                else:
                    at = [((d - 1) * count + place) * BLOCK_M, h * (BLOCK_N // 2)]
                    to_peer(inboxes, d, at, part, world.size)
            if (d == 0) & (not kept):
                taken_over(it, ring, outbox, world.size, STAGES)
            else:
                taken_over(it, ring, outbox, 1, STAGES)
            publish(world)
            if kept:  # to this rank's engine: it is there to copy
                gl.atomic_add(done_ptr + (PEERS + 2 + place // parcel), 1, sem="relaxed", scope="sys")
            elif d == 0:
                for r in gl.static_range(world.size):  # to all: the tile is in their outputs
                    done = pl.peer(done_ptr, (rank + r) % world.size, world)
                    gl.atomic_add(done, 1, sem="relaxed", scope="sys")
            else:  # to the owner: the tile is in its inbox
                counter = pl.peer(ready_ptr + (d - 1) * count + place, (rank + d) % world.size, world)
                gl.atomic_add(counter, 1, sem="relaxed", scope="sys")
            it += 1
            n += 1
    pl.wait(done_ptr, epoch * tiles, world)  # every tile that is stored is here
    if COPIED:  # and every one that is copied; so every inbox has been read
        for p in range(PEERS):
            pl.wait(done_ptr + (1 + p), epoch, world)


# ------------------------------------------------------------------------------------------------------ kernel
@gluon.jit(do_not_specialize=["lag", "copied", "parcel"])
def gluon_two_shot_kernel(
    a,  # (M, K) this rank's, blocks of BLOCK_M x BLOCK_K
    b,  # (K, N) this rank's, or (N, K) if TRANSPOSED, blocks of BLOCK_K and BLOCK_N
    inbox,  # ((size - 1) * count * BLOCK_M, BLOCK_N) this rank's, blocks of BLOCK_M x BLOCK_N / 2: the `count` tiles
    # that a rank owns at most, from rank - 1, then from rank - 2, ...
    out,  # (M, N) this rank's, blocks of BLOCK_M x BLOCK_N / 2
    i1, i2, i3, i4, i5, i6, i7,  # the inboxes of ranks rank + 1, rank + 2, ...; those past size - 1 are not used
    o1, o2, o3, o4, o5, o6, o7,  # the outputs of the same
    ready_ptr,  # int32 on every rank: (size - 1, count), of which [d - 1, p] is signalled by rank - d when its part of
    # tile p is in the inbox; then a word that counts the tiles that have landed in this rank's output. If COPIED
    # without those that are copied, and then: (size - 1,), [d - 1] the number of the last launch of which all that
    # rank - d copies is here; the number of this launch; and how many tiles of each parcel it has finished
    bias,  # (N,) this rank's, or None
    M,
    N,
    K,
    lag,  # tiles that a rank's own are behind the others': from 1 to count
    copied,  # a rank's first tiles, which are copied, 0 unless COPIED
    parcel,  # of them together
    world,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    HALF: gl.constexpr, REGISTERS: gl.constexpr, TRANSPOSED: gl.constexpr, EPILOGUE: gl.constexpr,
    COPIED: gl.constexpr,  # by copy engines; the ranks can then divide the columns of tiles
    num_warps: gl.constexpr,
):  # fmt: skip
    """The module's kernel: shared memory, barriers, and who does what."""
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    tiles = num_m * num_n - copied * world.size
    places = gl.cdiv(num_m * num_n, world.size) * world.size
    if COPIED:
        epoch = gl.load(ready_ptr + ((world.size - 1) * (places // world.size + 1) + 1))
    else:
        epoch = pl.epoch(ready_ptr, world)
    ring = open_ring(a, b, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
    outbox = open_outbox(a.dtype, HALF, BLOCK_M, BLOCK_N)
    where = (gl.cast(world.rank, gl.int32), num_m, num_n, lag, world.size, GROUP, COPIED)
    PLACE: gl.constexpr = _place
    gl.warp_specialize(
        [
            (consume_all, (places, ring, outbox, where, bias, N, K, PLACE, world.size - 1, EPILOGUE, HALF, TRANSPOSED,
                        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, num_warps)),
            (_load, (a, b, inbox, ring, ready_ptr, places, N, K, where, epoch, world, HALF, TRANSPOSED,
                     BLOCK_M, BLOCK_N, BLOCK_K, STAGES)),
            (_store, (out, (i1, i2, i3, i4, i5, i6, i7), (o1, o2, o3, o4, o5, o6, o7), ring, outbox, ready_ptr, places,
                      tiles, K, copied, parcel, where, epoch, world, HALF, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, COPIED)),
        ],
        [1, 1],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- host
def tiles_of(M: int, N: int, size: int) -> Tiles:
    """The tiles for an M x N output: narrow ones where the links are the limit. On H200 that is up to 8192 x 8192 on 4
    ranks and 4096 x 4096 on 2, by benchmarks/results/exhaustive_matmul_all_reduce*.json."""
    return NARROW if M * N <= (2048 * size) ** 2 else TILES


COPIES, COPIED_AREA = 4, 8192 * 8192
"""Copies that finished tiles go in to each peer, and from which elements of the output on."""


def copies_of(M: int, N: int, size: int, tiles: Tiles) -> int:
    """Copies that a rank's part of an M x N output goes in to each peer; 0: none, as where the ranks cannot divide the
    columns of tiles."""
    return min(COPIES, _copied_groups(M, N, size, tiles)) if M * N >= COPIED_AREA else 0


def _copied_groups(M: int, N: int, size: int, tiles: Tiles) -> int:
    """Groups of row blocks of which tiles can be copied: all but the last."""
    divided = size > 1 and triton.cdiv(N, tiles.block_n) % size == 0
    return (triton.cdiv(M, tiles.block_m) - 1) // tiles.group if divided else 0


def settings(
    M: int, N: int, world: World, tiles: Tiles | None, lag: int | None, copies: int | None = None
) -> tuple[Tiles, int, int]:
    """`tiles`, `lag` and `copies`, or what follows from an M x N output: own tiles two rounds behind, wide ones one,
    and `copies_of`. Raises ShapeError."""
    tiles = tiles or tiles_of(M, N, world.size)
    check_tiles(CALL, tiles, world)
    if copies is None:
        copies = copies_of(M, N, world.size, tiles)
    most = _copied_groups(M, N, world.size, tiles)
    if not 0 <= copies <= most:
        wanted = f"from 0 to {most}: groups of {tiles.group} row blocks but the last, of columns that the ranks divide"
        raise ShapeError.argument(CALL, "copies", copies, wanted, world.rank)
    tiles_of_all = triton.cdiv(M, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    programs = _common.num_programs(world, tiles_of_all or 1)
    rounds = 1 if tiles.block_n > NARROW.block_n else 2
    return tiles, lag_of(CALL, lag, rounds, triton.cdiv(tiles_of_all, world.size), programs, world), copies


class _Space(NamedTuple):
    inbox: SymmetricTensor
    counters: SymmetricTensor


class _Copied(NamedTuple):
    """What is copied of a rank's finished tiles, and how."""

    tiles: int
    parcel: int
    begin: Callable[[], Callable[[], None]]  # as _copies.dispatching has it


def _copied(
    world: World, out: SymmetricTensor, counters: SymmetricTensor, done: int, tiles: Tiles, copies: int
) -> _Copied:
    """done: the word of the counters that counts what is stored."""
    (M, N), rank, size = out.shape, world.rank, world.size
    groups, wide = _copied_groups(M, N, size, tiles), triton.cdiv(N, tiles.block_n) // size
    together = triton.cdiv(groups, copies)
    parcel, rows = together * tiles.group * wide, together * tiles.group * tiles.block_m
    copied = groups * tiles.group * wide
    whole, mine = _copies.layout(M, N), slice(rank * wide * tiles.block_n, (rank + 1) * wide * tiles.block_n)
    number = done + size

    def part(g: int) -> _copies.Parcel:
        """Parcel g, to all. A copy is done when the next begins, so of all that go to a peer the last one is told."""
        box = whole[g * rows : min((g + 1) * rows, groups * tiles.group * tiles.block_m), mine]
        what = [_copies.boxes((rank + d) % size, box, box, out.dtype.itemsize) for d in range(1, size)]
        last = (g + 1) * parcel >= copied
        return _copies.parcel(
            world, counters, number, number + 1 + g, min(parcel, copied - g * parcel), out.plain(), out, what,
            [done + d for d in range(1, size)] if last else [],
        )  # fmt: skip

    parts = [part(g) for g in range(triton.cdiv(groups, together))]
    return _Copied(copied, parcel, _copies.dispatching(world, counters, number, parts))


def two_shot_launch(
    world: World,
    a: torch.Tensor,
    b: torch.Tensor,
    out: SymmetricTensor,
    tiles: Tiles,
    lag: int,
    copies: int = 0,
    epilogue: Epilogue = "none",
) -> _common.Launch:
    """launch(a, b, bias) -> `out`, plain, for tensors of the same facts as these. `out` (M, N) = the sum over ranks of
    `a` (M, K) @ `b` (K, N), as matmul_all_reduce, whose checks of the operands come before, with what `settings`
    returned. bf16 or fp16, rows at multiples of 16 bytes, on sm_90. Collective. Raises Unsupported, ShapeError."""
    rows_b, transposed = stored(b)
    check(CALL, world, a, rows_b, out.plain())
    (M, K), N, size, dtype = a.shape, b.shape[1], world.size, a.dtype
    tiles_of_all = triton.cdiv(M, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    programs, count = _common.num_programs(world, tiles_of_all), triton.cdiv(tiles_of_all, size)
    places = max(size - 1, 1) * count

    def make() -> _Space:
        inbox = empty(places * tiles.block_m, tiles.block_n, dtype=dtype, name=f"{CALL}.gluon.inbox", world=world)
        words = places + 1 + (size + copies if copies else 0)
        return _Space(inbox, signals(words, name=f"{CALL}.gluon.ready", world=world))

    # What the counters count; where tiles are copied they have another order, too.
    counted = (M, N, dtype, programs, tiles[:2], (tiles.group, copies) if copies else None)
    space = world.workspace((CALL, "gluon", *counted), make)
    way = _copied(world, out, space.counters, places, tiles, copies) if copies else _Copied(0, 1, lambda: lambda: None)
    block, part = (tiles.block_m, tiles.block_k), (tiles.block_m, tiles.block_n // 2)

    def described(tensor: SymmetricTensor) -> list:
        theirs = [tensor.peer((world.rank + d) % size) for d in range(1, size)]
        own = tensor.plain()
        return [descriptor(own, part), *peer_descriptors(theirs, own, part)]

    inbox, *inboxes = described(space.inbox)
    result, *outs = described(out)
    constants = {
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "STAGES": tiles.num_stages,
        "GROUP": tiles.group, "HALF": layout(dtype, *part), "REGISTERS": REGISTERS, "TRANSPOSED": transposed,
        "EPILOGUE": epilogue, "COPIED": copies > 0, "num_warps": CONSUMER_WARPS,
    }  # fmt: skip
    here, numbers = out.plain(), (M, N, K, lag, way.tiles, way.parcel)
    tiles_of_a, tiles_of_b = descriptor(a, block), weights_descriptor(b, tiles)

    start = cooperative_launch(world, gluon_two_shot_kernel, (programs,), **constants)

    def launch(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        tiles_of_a.base, tiles_of_b.base = a, b
        send = way.begin()
        try:
            start(
                tiles_of_a, tiles_of_b, inbox, result, *inboxes, *outs, space.counters, bias, *numbers, world.device,
            )  # fmt: skip
        finally:
            tiles_of_a.base = tiles_of_b.base = None
        send()
        return here

    return launch
