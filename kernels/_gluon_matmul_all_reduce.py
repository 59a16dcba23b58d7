"""Matmul + all-reduce in one Gluon kernel, without multicast: a chain of partial sums to each tile's owner, who
finishes the tile and stores it on every rank.

The tiles come in rounds, and each round's tiles are shared out among the ranks. A tile of rank o is stored into o's
memory by rank o - 1, added to there by o - 2, ..., o + 1, each when the one before has said that its part has landed,
as in _gluon_matmul_reduce_scatter. Then o adds its own product in fp32, applies bias and epilogue, rounds, and stores
the tile by TMA into the output of every rank, and tells them. In every round a rank works on the tiles of rank + 1
first and on its own last, so the chains are long begun when they are waited for, and while the finished tiles of a
round are on their way the next round is computed. A launch ends on a rank when all tiles have landed there.

An output is written by others only after its own rank has added to the tile, so in the same launch; and a launch ends
when every rank has read all that was added up for it. So there is one buffer, and nothing is waited for at the start.

The additions have an order: the same bits every time and on all ranks. They round to the dtype at every rank: off by at
most about size * u * s, in the words of matmul_all_reduce. 2 * (size - 1) / size * M * N * itemsize bytes out of each
rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

import pkt.language as pl
from pkt.runtime.factories import empty, signals
from pkt.runtime.launch import cooperative_launch
from pkt.runtime.tensor import SymmetricTensor
from pkt.runtime.world import World

from . import _common
from ._gluon import (
    CONSUMER_WARPS,
    REGISTERS,
    TILES,
    check,
    check_tiles,
    consume,
    descriptor,
    first_tile,
    grouped,
    half,
    layout,
    lend_halves,
    lend_sum,
    load_step,
    open_ring,
    pass_on,
    peer_descriptors,
    publish,
    release_halves,
    take_over,
    to_peers,
    weights_descriptor,
)
from ._gluon_matmul_reduce_scatter import chain_rounds
from ._matmul import Epilogue, Tiles, stored

CALL = "matmul_all_reduce"
MAX_ROUNDS = 8
NARROW = Tiles(128, 128, 64, num_stages=6)


@gluon.jit
def _tile(t, rank, num_m, num_n, rounds, SIZE: gl.constexpr, GROUP: gl.constexpr):
    """Tile t: (phase, index among all, place in its owner's sums, row block, column). Phase p of a round is the part of
    rank + 1 + p; the last is my own. Rank o's part of a round's `count` tiles begins at o * count // SIZE."""
    tiles = num_m * num_n
    turn = ((t + 1) * rounds - 1) // tiles
    first = turn * tiles // rounds
    count = (turn + 1) * tiles // rounds - first
    u = (t - first + (rank + 1) % SIZE * count // SIZE) % count
    owner = ((u + 1) * SIZE - 1) // count
    place = turn * gl.cdiv(gl.cdiv(tiles, rounds), SIZE) + u - owner * count // SIZE
    i, j = grouped(first + u, num_m, num_n, GROUP)
    return (owner + SIZE - rank - 1) % SIZE, first + u, place, i, j


@gluon.jit
def _place(t, rank, num_m, num_n, rounds, SIZE: gl.constexpr, GROUP: gl.constexpr):
    """For `consume`: those that I own are mine."""
    phase, _, _, _, j = _tile(t, rank, num_m, num_n, rounds, SIZE, GROUP)
    return phase == SIZE - 1, j


# ------------------------------------------------------------------------------------------------------- warps
@gluon.jit
def _load(
    a, b, total, ring, ready_ptr, M, N, K, rounds, epoch, world, HALF: gl.constexpr, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    rank = gl.cast(world.rank, gl.int32)
    it = 0
    for t in range(first_tile(), num_m * num_n, gl.num_programs(0)):
        phase, index, place, i, j = _tile(t, rank, num_m, num_n, rounds, world.size, GROUP)
        for k in range(0, K, BLOCK_K):
            load_step(it, a, i * BLOCK_M, b, j * BLOCK_N, k, ring, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
            it += 1
        if (phase == world.size - 1) & (world.size > 1):
            pl.wait(ready_ptr + index, epoch, world)  # what the others have added up
            lend_sum(it, total, place * BLOCK_M, 0, ring, BLOCK_M, BLOCK_N, STAGES, HALF)
        else:
            lend_halves(it, ring, STAGES)
        it += 2


@gluon.jit
def _store(
    out, sums, outs, ring, ready_ptr, M, N, K, rounds, epoch, world, HALF: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    tiles = num_m * num_n
    steps = gl.cdiv(K, BLOCK_K)
    rank = gl.cast(world.rank, gl.int32)
    it = 0
    n = 0
    for t in range(first_tile(), tiles, gl.num_programs(0)):
        phase, index, place, i, j = _tile(t, rank, num_m, num_n, rounds, world.size, GROUP)
        mine = phase == world.size - 1
        it += steps
        take_over(n, ring)
        if (phase > 0) & (not mine):
            pl.wait(ready_ptr + index, epoch, world)  # before adding: what the rank before me put there has landed
        for h in gl.static_range(2):
            part = half(it + h, ring, BLOCK_M, BLOCK_N, STAGES, HALF)
            if mine:
                at = [i * BLOCK_M, j * BLOCK_N + h * (BLOCK_N // 2)]
                tma.async_copy_shared_to_global(out, at, part)
                to_peers(outs, at, part, world.size)
            else:
                pass_on(sums, phase, [place * BLOCK_M, h * (BLOCK_N // 2)], part, world.size)
        tma.store_wait(0)
        release_halves(it, ring, STAGES)
        publish(world)
        if mine:
            for d in gl.static_range(world.size):  # to all: the tile is in their outputs
                done = pl.peer(ready_ptr + tiles, (rank + d) % world.size, world)
                gl.atomic_add(done, 1, sem="relaxed", scope="sys")
        else:
            next_rank = (rank + world.size - 1) % world.size  # in the chain; at last the owner
            gl.atomic_add(pl.peer(ready_ptr + index, next_rank, world), 1, sem="relaxed", scope="sys")
        it += 2
        n += 1
    pl.wait(ready_ptr + tiles, epoch * tiles, world)  # every tile is here, and every sum has been read


# ------------------------------------------------------------------------------------------------------ kernel
@gluon.jit(do_not_specialize=["rounds"])
def gluon_two_shot_kernel(
    a,  # (M, K) this rank's, blocks of BLOCK_M x BLOCK_K
    b,  # (K, N) this rank's, or (N, K) if TRANSPOSED, blocks of BLOCK_K and BLOCK_N
    total,  # (places * BLOCK_M, BLOCK_N) this rank's, blocks of BLOCK_M x BLOCK_N / 2: its tiles, as far as added up
    out,  # (M, N) this rank's, blocks of BLOCK_M x BLOCK_N / 2
    s1, s2, s3, s4, s5, s6, s7,  # the totals of ranks rank + 1, rank + 2, ...; those past size - 1 are not used
    o1, o2, o3, o4, o5, o6, o7,  # the outputs of the same
    ready_ptr,  # int32 (tiles + 1,) on every rank: [t] signalled by rank + 1 when its part of tile t is in the owner's
    # total; the last counts the tiles that have landed in this rank's output
    bias,  # (N,) this rank's, or None
    M,
    N,
    K,
    rounds,  # 1 to tiles
    world,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    HALF: gl.constexpr, REGISTERS: gl.constexpr, TRANSPOSED: gl.constexpr, EPILOGUE: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """The module's kernel: shared memory, barriers, and who does what."""
    epoch = pl.epoch(ready_ptr, world)
    ring = open_ring(a, b, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    where = (gl.cast(world.rank, gl.int32), num_m, num_n, rounds, world.size, GROUP)
    PLACE: gl.constexpr = _place
    gl.warp_specialize(
        [
            (consume, (ring, num_m * num_n, where, bias, N, K, PLACE, world.size > 1, EPILOGUE, HALF, TRANSPOSED,
                       BLOCK_M, BLOCK_N, BLOCK_K, STAGES, num_warps)),
            (_load, (a, b, total, ring, ready_ptr, M, N, K, rounds, epoch, world, HALF, TRANSPOSED,
                     BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP)),
            (_store, (out, (s1, s2, s3, s4, s5, s6, s7), (o1, o2, o3, o4, o5, o6, o7), ring, ready_ptr, M, N, K, rounds,
                      epoch, world, HALF, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP)),
        ],
        [1, 1],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- host
def settings(M: int, N: int, world: World, tiles: Tiles | None, rounds: int | None) -> tuple[Tiles, int]:
    """`tiles` and `rounds`, or what follows from an M x N output: narrow tiles where the links are the limit, and as
    many rounds, MAX_ROUNDS at most, as leave every program a tile of each rank's part. By
    benchmarks/results/exhaustive_matmul_all_reduce*.json within 5 % of the fastest chain on 4 H200; on 2 of them 10 %
    off at 8192 and a third at 16384, where the tables know better. Raises ShapeError."""
    tiles = tiles or (NARROW if M * N <= 1 << 26 else TILES)
    check_tiles(CALL, tiles, world)
    count = triton.cdiv(M, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    programs = _common.num_programs(world, count or 1)
    return tiles, chain_rounds(CALL, rounds, min(count // (world.size * programs), MAX_ROUNDS), count, world)


class _Space(NamedTuple):
    total: SymmetricTensor
    ready: SymmetricTensor


def two_shot_launch(
    world: World,
    a: torch.Tensor,
    b: torch.Tensor,
    out: SymmetricTensor,
    tiles: Tiles,
    rounds: int,
    epilogue: Epilogue = "none",
) -> _common.Launch:
    """launch(a, b, bias) -> `out`, plain, for tensors of the same facts as these. `out` (M, N) = the sum over ranks of
    `a` (M, K) @ `b` (K, N), as matmul_all_reduce, whose checks of the operands come before, with what `settings`
    returned. bf16 or fp16, rows at multiples of 16 bytes, on sm_90. Collective. Raises Unsupported, ShapeError."""
    rows_b, transposed = stored(b)
    check(CALL, world, a, rows_b, out.plain())
    (M, K), N, size, dtype = a.shape, b.shape[1], world.size, a.dtype
    count = triton.cdiv(M, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    programs = _common.num_programs(world, count)
    places = rounds * triton.cdiv(triton.cdiv(count, rounds), size)

    def make() -> _Space:
        rows = places * tiles.block_m
        total = empty(rows, tiles.block_n, dtype=dtype, name=f"{CALL}.gluon.total", world=world)
        return _Space(total, signals(count + 1, name=f"{CALL}.gluon.ready", world=world))

    space = world.workspace((CALL, "gluon", M, N, dtype, programs, tiles[:2], rounds), make)
    block, part = (tiles.block_m, tiles.block_k), (tiles.block_m, tiles.block_n // 2)

    def described(tensor: SymmetricTensor) -> list:
        theirs = [tensor.peer((world.rank + d) % size) for d in range(1, size)]
        own = tensor.plain()
        return [descriptor(own, part), *peer_descriptors(theirs, own, part)]

    total, *sums = described(space.total)
    result, *outs = described(out)
    constants = {
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "STAGES": tiles.num_stages,
        "GROUP": tiles.group, "HALF": layout(dtype, *part), "REGISTERS": REGISTERS, "TRANSPOSED": transposed,
        "EPILOGUE": epilogue, "num_warps": CONSUMER_WARPS,
    }  # fmt: skip
    here = out.plain()
    tiles_of_a, tiles_of_b = descriptor(a, block), weights_descriptor(b, tiles)

    start = cooperative_launch(world, gluon_two_shot_kernel, (programs,), **constants)

    def launch(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        tiles_of_a.base, tiles_of_b.base = a, b
        try:
            start(
                tiles_of_a, tiles_of_b, total, result, *sums, *outs, space.ready, bias, M, N, K, rounds, world.device,
            )  # fmt: skip
        finally:
            tiles_of_a.base = tiles_of_b.base = None
        return here

    return launch
