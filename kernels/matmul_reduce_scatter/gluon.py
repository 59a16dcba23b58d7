"""Matmul + reduce-scatter in one Gluon kernel: as inbox in matmul_reduce_scatter, tile by tile and by TMA.

A tile of rank o's part is stored by every other rank into o's inbox, at a place of its own, and signalled. Rank o adds
what has come to its own product, in fp32 and in a fixed order, and rounds once: the same bits every time, off by at
most about 2 * u * s, in the words of matmul_reduce_scatter. Each rank computes a tile of rank + 1, one of rank + 2, ...
and one of its own, in turn (`turn`), its own `lag` tiles behind the others'. So the links are in use evenly from the
first tile to the last, what a rank waits for was sent long before, and nothing waits to be sent but for the links.

(size - 1) / size * M * N * itemsize bytes out of each rank, and two inboxes of as many bytes, in turn.

COPIED: the kernel stores the others' tiles on its own rank, from where the copy engine takes them, some at a time. To
store them there is shorter, and so the ring has all its slots sooner. All of rank + 1's tiles come first, then all of
rank + 2's, ..., and its own last: so fewer rows of A are in use at a time, and what is copied last has time to arrive.
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
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..declaration import Launch
from ..shared import copies as _copies
from ..shared.checks import stored
from ..shared.gluon_fits import check_tiles
from ..shared.gluon_host import (
    CONSUMER_WARPS,
    descriptor,
    half_block,
    layout,
    peer_descriptors,
    weights_descriptor,
)
from ..shared.gluon_warps import (
    CONSUMERS,
    REGISTERS,
    consume_all,
    first_tile,
    grouped,
    lend,
    load_partial,
    load_step,
    open_outbox,
    open_ring,
    publish,
    take_over,
    taken_over,
    to_peer,
    turn,
)
from ..shared.grid import num_programs
from ..shared.tile_product import Epilogue, Tiles
from .rules import CALL


@gluon.jit
def _tile(t, num_m, num_n, lag, SIZE: gl.constexpr, GROUP: gl.constexpr):
    """Tile t: (d, index, row block, column), the index-th of the part of rank + d."""
    d, index = turn(t, num_m * num_n, lag, SIZE)
    i, j = grouped(index, num_m, num_n, GROUP)
    return d, index, i, j


@gluon.jit
def _place(t, num_m, num_n, lag, SIZE: gl.constexpr, GROUP: gl.constexpr):
    """For `consume`: the tiles of my own part are mine."""
    d, _, _, j = _tile(t, num_m, num_n, lag, SIZE, GROUP)
    return gl.where(d == 0, 2 * j + 1, 2 * j)


# ------------------------------------------------------------------------------------------------------- warps
@gluon.jit
def _load(
    a, b, inbox, ring, ready_ptr, m, N, K, lag, parcel, epoch, world, HALF: gl.constexpr, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    COPIED: gl.constexpr, LEAVE_OUT: gl.constexpr,
):  # fmt: skip
    num_m = gl.cdiv(m, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    tiles = num_m * num_n
    PEERS: gl.constexpr = world.size - 1
    rank = gl.cast(world.rank, gl.int32)
    it = 0
    half = 0 if COPIED else (epoch & 1) * PEERS
    for t in range(first_tile(), world.size * tiles, gl.num_programs(0)):
        d, index, i, j = _tile(t, num_m, num_n, lag, world.size, GROUP)
        row = (rank + d) % world.size * m + i * BLOCK_M
        for k in range(0, K, BLOCK_K):
            load_step(it, a, [row, k], b, j * BLOCK_N, k, ring, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
            it += 1
        if d == 0:
            for p in range(PEERS):
                if LEAVE_OUT != "links":
                    pl.wait(ready_ptr + p * gl.cdiv(tiles, parcel) + index // parcel, epoch, world)
                at = ((half + p) * tiles + index) * BLOCK_M
                load_partial(it, inbox, at, ring, BLOCK_M, BLOCK_N, STAGES, HALF)
                it += 2
        lend(it, ring, STAGES)
        it += 1


@gluon.jit
def _store(
    out, peers, ring, outbox, ready_ptr, m, N, K, lag, parcel, epoch, world, HALF: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    COPIED: gl.constexpr, LEAVE_OUT: gl.constexpr,
):  # fmt: skip
    num_m = gl.cdiv(m, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    tiles = num_m * num_n
    PEERS: gl.constexpr = world.size - 1
    rank = gl.cast(world.rank, gl.int32)
    it = 0
    n = 0
    half = 0 if COPIED else (epoch & 1) * PEERS
    for t in range(first_tile(), world.size * tiles, gl.num_programs(0)):
        d, index, i, j = _tile(t, num_m, num_n, lag, world.size, GROUP)
        row = ((half + d - 1) * tiles + index) * BLOCK_M  # in the inbox of rank + d, or in what is copied there
        it += gl.cdiv(K, BLOCK_K) + gl.where(d == 0, 2 * PEERS, 0)
        for h in gl.static_range(CONSUMERS):
            part = take_over(h, it, n, ring, outbox, HALF, BLOCK_M, BLOCK_N, STAGES)
            down = h * (BLOCK_M // CONSUMERS)
            if d == 0:
                tma.async_copy_shared_to_global(out, [i * BLOCK_M + down, j * BLOCK_N], part)
            elif COPIED:
                tma.async_copy_shared_to_global(peers[0], [row + down, 0], part)
            else:
                to_peer(peers, d, [row + down, 0], part, world.size)
        taken_over(it, ring, outbox, 1, STAGES)
        if LEAVE_OUT != "links":
            if d > 0:
                publish(world)  # to the owner: the tile is in its inbox; or to this rank's engine: it is there to copy
                counter = ready_ptr + (d - 1) * gl.cdiv(tiles, parcel) + index // parcel
                if COPIED:
                    counter += PEERS * gl.cdiv(tiles, parcel) + 1
                else:
                    counter = pl.peer(counter, (rank + d) % world.size, world)
                gl.atomic_add(counter, 1, sem="relaxed", scope="sys")
        it += 1
        n += 1


# ------------------------------------------------------------------------------------------------------ kernel
@gluon.jit(do_not_specialize=["lag", "parcel"])
def gluon_inbox_kernel(
    a,  # (size * m, K) this rank's, blocks of BLOCK_M x BLOCK_K
    b,  # (K, N) this rank's, or (N, K) if TRANSPOSED, blocks of BLOCK_K and BLOCK_N
    inbox,  # (2 * (size - 1) * tiles * BLOCK_M, BLOCK_N) this rank's, blocks of BLOCK_M / 2 x BLOCK_N: a tile is one
    # piece of memory, where links and memory take it fastest, at its place in the order of computing; halves by the
    # parity of the launch, of which rank - d stores the (d - 1)-th part. If COPIED one half
    out,  # (m, N) this rank's, blocks of BLOCK_M / 2 x BLOCK_N
    d1, d2, d3, d4, d5, d6, d7,  # the inboxes of ranks rank + 1, rank + 2, ...; those past size - 1 are not used. If
    # COPIED d1 is what this rank's engine copies there, as large as one half
    ready_ptr,  # int32 (size - 1, parcels) on every rank; rank - d signals [d - 1, t // parcel] when tile t is in the
    # inbox. If COPIED as _copies.Scattering has it
    bias,  # (N,) this rank's, or None
    m,
    N,
    K,
    lag,  # tiles that a rank's own are behind the others': from 1 to all of them, as `turn` has it
    parcel,  # tiles that a counter stands for: 1 unless COPIED
    world,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    HALF: gl.constexpr, TRANSPOSED: gl.constexpr,
    EPILOGUE: gl.constexpr,
    COPIED: gl.constexpr,  # by copy engines
    LEAVE_OUT: gl.constexpr,  # for measurements: "links" leaves out waits and signals, "" nothing
    num_warps: gl.constexpr,
):  # fmt: skip
    """The module's kernel: shared memory, barriers, and who does what."""
    num_m = gl.cdiv(m, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    if COPIED:
        epoch = gl.load(ready_ptr + (world.size - 1) * gl.cdiv(num_m * num_n, parcel))
    else:
        epoch = pl.epoch(ready_ptr, world)
    ring = open_ring(a, b, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
    outbox = open_outbox(a.dtype, HALF, BLOCK_M, BLOCK_N)
    where = (num_m, num_n, lag, world.size, GROUP)
    PLACE: gl.constexpr = _place
    gl.warp_specialize(
        [
            (consume_all, (0, world.size * num_m * num_n, ring, outbox, where, bias, N, K, PLACE, world.size - 1,
                           EPILOGUE, HALF, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, num_warps)),
            (consume_all, (1, world.size * num_m * num_n, ring, outbox, where, bias, N, K, PLACE, world.size - 1,
                           EPILOGUE, HALF, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, num_warps)),
            (_load, (a, b, inbox, ring, ready_ptr, m, N, K, lag, parcel, epoch, world, HALF, TRANSPOSED,
                     BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, COPIED, LEAVE_OUT)),
            (_store, (out, (d1, d2, d3, d4, d5, d6, d7), ring, outbox, ready_ptr, m, N, K, lag, parcel, epoch, world,
                      HALF, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, COPIED, LEAVE_OUT)),
        ],
        [num_warps, 1, 1],
        REGISTERS,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- host
class _Way(NamedTuple):
    """Where partial tiles come to this rank, and how they get to the others."""

    inbox: torch.Tensor
    targets: list[torch.Tensor]  # where the kernel stores: in the inboxes of rank + 1, ..., or what is copied there
    ready: SymmetricTensor
    parcel: int
    begin: Callable[[], Callable[[], None]] | None  # as _copies.Scattering has it


def _stored(world: World, m: int, N: int, dtype: torch.dtype, count: int, tiles: Tiles, leave_out: str) -> _Way:
    size, counters = world.size, max(world.size - 1, 1) * count

    def make() -> tuple[SymmetricTensor, SymmetricTensor]:
        inbox = empty(2 * counters * tiles.block_m, tiles.block_n, dtype=dtype, name=f"{CALL}.gluon.inbox", world=world)
        return inbox, signals(counters, name=f"{CALL}.gluon.ready", world=world)

    counted = (m, N, dtype, num_programs(world, size * count), tiles[:2])
    inbox, ready = world.keep((CALL, "gluon", *counted), make)
    targets = [inbox.peer((world.rank + d) % size) for d in range(1, size)]
    if leave_out:  # counters of its own, which fall behind
        ready = world.keep((CALL, leave_out, *counted), lambda: signals(counters, world=world))
        targets = [inbox.plain()] * len(targets)
    return _Way(inbox.plain(), targets, ready, 1, None)


def _copied(world: World, dtype: torch.dtype, count: int, tiles: Tiles, copies: int) -> _Way:
    parcel = triton.cdiv(count, copies)
    found = _copies.scattering(world, count, tiles.block_m * tiles.block_n, dtype, parcel)
    inbox, outbox = (x.view(-1, tiles.block_n) for x in (found.inbox.plain(), found.outbox))
    return _Way(inbox, [outbox], found.counters, parcel, found.begin)


def inbox_launch(
    world: World,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    tiles: Tiles,
    lag: int,
    copies: int = 0,
    epilogue: Epilogue = "none",
    leave_out: str = "",
) -> Launch:
    """launch(a, b, out, bias), for tensors of the same facts as these: `out` (m, N) = my rows of the sum over ranks of
    `a` (size * m, K) @ `b` (K, N), as matmul_reduce_scatter, whose checks of the operands come before, with what
    `settings` returned. bf16 or fp16, rows at multiples of 16 bytes, on sm_90. Collective. leave_out: for
    measurements, "links": everything stays on this rank, and the result is nobody's. Raises ShapeError."""
    _, transposed = stored(b)
    check_tiles(CALL, tiles, world)
    (M, K), N, size, dtype = a.shape, b.shape[1], world.size, a.dtype
    m = M // size
    count = triton.cdiv(m, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    copied = copies > 0 and size > 1 and not leave_out
    if copied:
        way = _copied(world, dtype, count, tiles, copies)
    else:
        way = _stored(world, m, N, dtype, count, tiles, leave_out)
    block, part = (tiles.block_m, tiles.block_k), half_block(tiles)
    inbox, targets = descriptor(way.inbox, part), peer_descriptors(way.targets, way.inbox, part)
    constants = {
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "STAGES": tiles.num_stages,
        "GROUP": tiles.group, "HALF": layout(dtype, *part), "TRANSPOSED": transposed,
        "EPILOGUE": epilogue, "COPIED": copied, "LEAVE_OUT": leave_out, "num_warps": CONSUMER_WARPS,
    }  # fmt: skip
    tiles_of_a, tiles_of_b, parts_of_out = descriptor(a, block), weights_descriptor(b, tiles), descriptor(out, part)
    numbers = (m, N, K, lag, way.parcel)
    programs = num_programs(world, size * count)

    start = cooperative_launch(world, gluon_inbox_kernel, (programs,), **constants)

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        tiles_of_a.base, tiles_of_b.base, parts_of_out.base = a, b, out
        send = way.begin() if way.begin else None
        try:
            start(tiles_of_a, tiles_of_b, inbox, parts_of_out, *targets, way.ready, bias, *numbers, world.device)
        finally:
            tiles_of_a.base = tiles_of_b.base = parts_of_out.base = None
        if send:
            send()
        return out

    return launch
