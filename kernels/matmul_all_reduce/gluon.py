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
"""

from __future__ import annotations

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
from ..shared.checks import stored
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
    to_peers,
    turn,
)
from ..shared.grid import num_programs
from ..shared.tile_product import Epilogue, Tiles
from .rules import CALL


@gluon.jit
def _tile(t, rank, num_m, num_n, lag, SIZE: gl.constexpr, GROUP: gl.constexpr):
    """Tile t: (d, place among those of rank + d, row block, column); a column below zero where the last turn of all has
    no tile for that rank."""
    d, place = turn(t, gl.cdiv(num_m * num_n, SIZE), lag, SIZE)
    index = place * SIZE + (rank + d) % SIZE
    i, j = grouped(gl.minimum(index, num_m * num_n - 1), num_m, num_n, GROUP)
    return d, place, i, gl.where(index < num_m * num_n, j, -1)


@gluon.jit
def _place(t, rank, num_m, num_n, lag, SIZE: gl.constexpr, GROUP: gl.constexpr):
    """For `consume`: those that I own are mine."""
    d, _, _, j = _tile(t, rank, num_m, num_n, lag, SIZE, GROUP)
    return gl.where(d == 0, 2 * j + 1, 2 * j)


# ------------------------------------------------------------------------------------------------------- warps
@gluon.jit
def _load(
    a, b, inbox, ring, ready_ptr, places, K, where, epoch, world, HALF: gl.constexpr, TRANSPOSED: gl.constexpr,
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
    out, inboxes, outs, ring, outbox, ready_ptr, places, tiles, K, where, epoch, world, HALF: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    count = places // world.size
    done_ptr = ready_ptr + (world.size - 1) * count
    rank = gl.cast(world.rank, gl.int32)
    it = 0
    n = 0
    for t in range(first_tile(), places, gl.num_programs(0)):
        d, place, i, j = _tile(t, *where)
        if j >= 0:
            it += gl.cdiv(K, BLOCK_K) + gl.where(d == 0, 2 * (world.size - 1), 0)
            for h in gl.static_range(CONSUMERS):
                part = take_over(h, it, n, ring, outbox, HALF, BLOCK_M, BLOCK_N, STAGES)
                down = h * (BLOCK_M // CONSUMERS)
                if d == 0:
                    at = [i * BLOCK_M + down, j * BLOCK_N]
                    tma.async_copy_shared_to_global(out, at, part)
                    to_peers(outs, at, part, world.size)
                else:
                    at = [((d - 1) * count + place) * BLOCK_M + down, 0]
                    to_peer(inboxes, d, at, part, world.size)
            if d == 0:
                taken_over(it, ring, outbox, world.size, STAGES)
            else:
                taken_over(it, ring, outbox, 1, STAGES)
            publish(world)
            if d == 0:
                for r in gl.static_range(world.size):  # to all: the tile is in their outputs
                    done = pl.peer(done_ptr, (rank + r) % world.size, world)
                    gl.atomic_add(done, 1, sem="relaxed", scope="sys")
            else:  # to the owner: the tile is in its inbox
                counter = pl.peer(ready_ptr + (d - 1) * count + place, (rank + d) % world.size, world)
                gl.atomic_add(counter, 1, sem="relaxed", scope="sys")
            it += 1
            n += 1
    pl.wait(done_ptr, epoch * tiles, world)  # every tile is here, and every inbox has been read


# ------------------------------------------------------------------------------------------------------ kernel
@gluon.jit(do_not_specialize=["lag"])
def gluon_two_shot_kernel(
    a,  # (M, K) this rank's, blocks of BLOCK_M x BLOCK_K
    b,  # (K, N) this rank's, or (N, K) if TRANSPOSED, blocks of BLOCK_K and BLOCK_N
    inbox,  # ((size - 1) * count * BLOCK_M, BLOCK_N) this rank's, blocks of BLOCK_M / 2 x BLOCK_N: the `count` tiles
    # that a rank owns at most, from rank - 1, then from rank - 2, ...
    out,  # (M, N) this rank's, blocks of BLOCK_M / 2 x BLOCK_N
    i1, i2, i3, i4, i5, i6, i7,  # the inboxes of ranks rank + 1, rank + 2, ...; those past size - 1 are not used
    o1, o2, o3, o4, o5, o6, o7,  # the outputs of the same
    ready_ptr,  # int32 ((size - 1) * count + 1,) on every rank: [d - 1, p] signalled by rank - d when its part of tile
    # p is in the inbox; the last counts the tiles that have landed in this rank's output
    bias,  # (N,) this rank's, or None
    M,
    N,
    K,
    lag,  # tiles that a rank's own are behind the others': from 1 to count
    world,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    HALF: gl.constexpr, TRANSPOSED: gl.constexpr, EPILOGUE: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """The module's kernel: shared memory, barriers, and who does what."""
    epoch = pl.epoch(ready_ptr, world)
    ring = open_ring(a, b, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
    outbox = open_outbox(a.dtype, HALF, BLOCK_M, BLOCK_N)
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    tiles = num_m * num_n
    places = gl.cdiv(tiles, world.size) * world.size
    where = (gl.cast(world.rank, gl.int32), num_m, num_n, lag, world.size, GROUP)
    PLACE: gl.constexpr = _place
    gl.warp_specialize(
        [
            (consume_all, (0, places, ring, outbox, where, bias, N, K, PLACE, world.size - 1, EPILOGUE, HALF,
                           TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, num_warps)),
            (consume_all, (1, places, ring, outbox, where, bias, N, K, PLACE, world.size - 1, EPILOGUE, HALF,
                           TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, num_warps)),
            (_load, (a, b, inbox, ring, ready_ptr, places, K, where, epoch, world, HALF, TRANSPOSED,
                     BLOCK_M, BLOCK_N, BLOCK_K, STAGES)),
            (_store, (out, (i1, i2, i3, i4, i5, i6, i7), (o1, o2, o3, o4, o5, o6, o7), ring, outbox, ready_ptr, places,
                      tiles, K, where, epoch, world, HALF, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)),
        ],
        [num_warps, 1, 1],
        REGISTERS,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- host
class _Space(NamedTuple):
    inbox: SymmetricTensor
    ready: SymmetricTensor


def two_shot_launch(
    world: World,
    a: torch.Tensor,
    b: torch.Tensor,
    out: SymmetricTensor,
    tiles: Tiles,
    lag: int,
    epilogue: Epilogue = "none",
) -> Launch:
    """launch(a, b, bias) -> `out`, plain, for tensors of the same facts as these. `out` (M, N) = the sum over ranks of
    `a` (M, K) @ `b` (K, N), as matmul_all_reduce, whose checks of the operands come before, with what `settings`
    returned. bf16 or fp16, rows at multiples of 16 bytes, on sm_90. Collective."""
    _, transposed = stored(b)
    (M, K), N, size, dtype = a.shape, b.shape[1], world.size, a.dtype
    tiles_of_all = triton.cdiv(M, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    programs = num_programs(world, tiles_of_all)
    places = max(size - 1, 1) * triton.cdiv(tiles_of_all, size)

    def make() -> _Space:
        inbox = empty(places * tiles.block_m, tiles.block_n, dtype=dtype, name=f"{CALL}.gluon.inbox", world=world)
        return _Space(inbox, signals(places + 1, name=f"{CALL}.gluon.ready", world=world))

    space = world.keep((CALL, "gluon", M, N, dtype, programs, tiles[:2]), make)
    block, part = (tiles.block_m, tiles.block_k), half_block(tiles)

    def described(tensor: SymmetricTensor) -> list:
        theirs = [tensor.peer((world.rank + d) % size) for d in range(1, size)]
        own = tensor.plain()
        return [descriptor(own, part), *peer_descriptors(theirs, own, part)]

    inbox, *inboxes = described(space.inbox)
    result, *outs = described(out)
    constants = {
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "STAGES": tiles.num_stages,
        "GROUP": tiles.group, "HALF": layout(dtype, *part), "TRANSPOSED": transposed,
        "EPILOGUE": epilogue, "num_warps": CONSUMER_WARPS,
    }  # fmt: skip
    here = out.plain()
    tiles_of_a, tiles_of_b = descriptor(a, block), weights_descriptor(b, tiles)

    start = cooperative_launch(world, gluon_two_shot_kernel, (programs,), **constants)

    def launch(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        tiles_of_a.base, tiles_of_b.base = a, b
        try:
            start(
                tiles_of_a, tiles_of_b, inbox, result, *inboxes, *outs, space.ready, bias, M, N, K, lag, world.device,
            )  # fmt: skip
        finally:
            tiles_of_a.base = tiles_of_b.base = None
        return here

    return launch
