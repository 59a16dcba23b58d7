"""Matmul + reduce-scatter in one Gluon kernel: partial sums travel from rank to rank in a chain, tile by tile.

A tile of rank o's part is stored into o's memory by rank o - 1, added to there by o - 2, ..., o + 1, each when the one
before has said that its part has landed, and finished by o: it loads the sum into the slots lent for its own tile, adds
its own product in fp32 and stores the result. The tiles of a part come in rounds. In each, all ranks work on the part
of rank + 1 first, then of rank + 2, ..., and on their own last: so what a rank waits for was begun long before, and
while a round's own tiles are computed, which leave the links idle, those of the rounds around it are on their way.

So nothing has to be zeroed, nothing is copied at the end, and the additions have an order: the same bits every time.
They round to the dtype at every rank: off by at most about size * u * s, in the words of matmul_reduce_scatter.
(size - 1) / size * M * N * itemsize bytes out of each rank, by TMA from a warp of its own.
"""

from __future__ import annotations

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

from . import _common
from ._gluon import (
    CONSUMER_WARPS,
    MAX_PEERS,
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
    weights_descriptor,
)
from ._matmul import Epilogue, Tiles, stored

CALL = "matmul_reduce_scatter"
MAX_ROUNDS = 16


@gluon.jit
def _tile(t, rank, num_m, num_n, rounds, SIZE: gl.constexpr, GROUP: gl.constexpr):
    """Tile t: (phase, owner, row block, column). Phase p of a round is the part of rank + 1 + p; the last is my own."""
    tiles = num_m * num_n
    turn = ((t // SIZE + 1) * rounds - 1) // tiles
    first = turn * tiles // rounds
    count = (turn + 1) * tiles // rounds - first
    t -= first * SIZE
    phase = t // count
    i, j = grouped(first + t % count, num_m, num_n, GROUP)
    return phase, (rank + 1 + phase) % SIZE, i, j


@gluon.jit
def _place(t, rank, num_m, num_n, rounds, SIZE: gl.constexpr, GROUP: gl.constexpr):
    """For `consume`: the tiles of my own part are mine."""
    phase, _, _, j = _tile(t, rank, num_m, num_n, rounds, SIZE, GROUP)
    return phase == SIZE - 1, j


# ------------------------------------------------------------------------------------------------------- warps
@gluon.jit
def _load(
    a, b, total, ring, ready_ptr, m, N, K, rounds, epoch, world, HALF: gl.constexpr, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    LEAVE_OUT: gl.constexpr,
):  # fmt: skip
    num_m = gl.cdiv(m, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    rank = gl.cast(world.rank, gl.int32)
    it = 0
    for t in range(first_tile(), world.size * num_m * num_n, gl.num_programs(0)):
        phase, owner, i, j = _tile(t, rank, num_m, num_n, rounds, world.size, GROUP)
        row = owner * m + i * BLOCK_M
        for k in range(0, K, BLOCK_K):
            load_step(it, a, row, b, j * BLOCK_N, k, ring, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
            it += 1
        if (phase == world.size - 1) & (world.size > 1):
            if LEAVE_OUT != "links":  # what the others have added up
                pl.wait(ready_ptr + (rank * num_m + i) * num_n + j, epoch, world)
            at = ((epoch & 1) * num_m + i) * BLOCK_M
            lend_sum(it, total, at, j * BLOCK_N, ring, BLOCK_M, BLOCK_N, STAGES, HALF)
        else:
            lend_halves(it, ring, STAGES)
        it += 2


@gluon.jit
def _store(
    out, peers, ring, ready_ptr, m, N, K, rounds, epoch, world,
    HALF: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, LEAVE_OUT: gl.constexpr,
):  # fmt: skip
    num_m = gl.cdiv(m, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    rank = gl.cast(world.rank, gl.int32)
    it = 0
    n = 0
    for t in range(first_tile(), world.size * num_m * num_n, gl.num_programs(0)):
        phase, owner, i, j = _tile(t, rank, num_m, num_n, rounds, world.size, GROUP)
        counter = ready_ptr + (owner * num_m + i) * num_n + j
        row = ((epoch & 1) * num_m + i) * BLOCK_M
        mine = phase == world.size - 1
        it += steps
        take_over(n, ring)
        if LEAVE_OUT != "links":
            if (phase > 0) & (not mine):
                pl.wait(counter, epoch, world)  # before adding: what the rank before me put there has landed
        for h in gl.static_range(2):
            col = j * BLOCK_N + h * (BLOCK_N // 2)
            part = half(it + h, ring, BLOCK_M, BLOCK_N, STAGES, HALF)
            if mine:
                tma.async_copy_shared_to_global(out, [i * BLOCK_M, col], part)
            else:
                pass_on(peers, phase, [row, col], part, world.size)
        tma.store_wait(0)
        release_halves(it, ring, STAGES)
        if LEAVE_OUT != "links":
            if not mine:
                # publish: to the next in the chain, who is at last the owner
                publish(world)
                next_rank = (rank + world.size - 1) % world.size
                gl.atomic_add(pl.peer(counter, next_rank, world), 1, sem="relaxed", scope="sys")
        it += 2
        n += 1


# ------------------------------------------------------------------------------------------------------ kernel
@gluon.jit(do_not_specialize=["rounds"])
def gluon_chain_kernel(
    a,  # (size * m, K) this rank's, blocks of BLOCK_M x BLOCK_K
    b,  # (K, N) this rank's, or (N, K) if TRANSPOSED, blocks of BLOCK_K and BLOCK_N
    total,  # (2 * padded m, N) this rank's, blocks of BLOCK_M x BLOCK_N / 2; halves by the parity of the launch
    out,  # (m, N) this rank's, blocks of BLOCK_M x BLOCK_N / 2
    d1, d2, d3, d4, d5, d6, d7,  # the totals of ranks rank + 1, rank + 2, ...; those past size - 1 are not used
    ready_ptr,  # int32 (size, tiles) on every rank; rank + 1 signals [o, t] when its part of tile t is in o's total
    bias,  # (N,) this rank's, or None
    m,
    N,
    K,
    rounds,  # 1 to the tiles of a part
    world,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    HALF: gl.constexpr, REGISTERS: gl.constexpr, TRANSPOSED: gl.constexpr,
    EPILOGUE: gl.constexpr,
    LEAVE_OUT: gl.constexpr,  # for measurements: "links" leaves out waits and signals, "" nothing
    num_warps: gl.constexpr,
):  # fmt: skip
    """The module's kernel: shared memory, barriers, and who does what."""
    epoch = pl.epoch(ready_ptr, world)
    ring = open_ring(a, b, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
    num_m = gl.cdiv(m, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    tiles = world.size * num_m * num_n
    where = (gl.cast(world.rank, gl.int32), num_m, num_n, rounds, world.size, GROUP)
    PLACE: gl.constexpr = _place
    gl.warp_specialize(
        [
            (consume, (ring, tiles, where, bias, N, K, PLACE, world.size > 1, EPILOGUE, HALF, TRANSPOSED,
                       BLOCK_M, BLOCK_N, BLOCK_K, STAGES, num_warps)),
            (_load, (a, b, total, ring, ready_ptr, m, N, K, rounds, epoch, world, HALF, TRANSPOSED,
                     BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, LEAVE_OUT)),
            (_store, (out, (d1, d2, d3, d4, d5, d6, d7), ring, ready_ptr, m, N, K, rounds, epoch, world,
                      HALF, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, LEAVE_OUT)),
        ],
        [1, 1],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- host
def chain_tiles(m: int, N: int) -> Tiles:
    """The tiles for a part of m x N; not by k, in which ranks may differ. With the rounds of `settings` within
    2 % of the fastest on 4 H200 and 5 % on 2, by benchmarks/results/exhaustive_matmul_reduce_scatter*.json."""
    return TILES._replace(num_stages=3 if m * N >= 1 << 28 else 4)


def settings(m: int, N: int, world: World, tiles: Tiles | None, rounds: int | None) -> tuple[Tiles, int]:
    """`tiles` and `rounds`, or what follows from a part of m x N: as many rounds, MAX_ROUNDS at most, as leave every
    other program a tile of each rank's part. Raises ShapeError."""
    tiles = tiles or chain_tiles(m, N)
    check_tiles(CALL, tiles, world)
    count = triton.cdiv(m, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    programs = _common.num_programs(world, world.size * count or 1)
    return tiles, chain_rounds(CALL, rounds, min(2 * count // programs, MAX_ROUNDS), count, world)


def chain_rounds(call: str, given: int | None, otherwise: int, count: int, world: World) -> int:
    """Rounds of a chain of `count` tiles: what is given, or `otherwise`. Raises ShapeError."""
    if given is not None and given < 1:
        raise ShapeError.argument(call, "rounds", given, "at least 1", world.rank)
    return max(1, min(otherwise if given is None else given, count))


class _Space(NamedTuple):
    total: SymmetricTensor
    ready: SymmetricTensor


def chain_launch(
    world: World,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    tiles: Tiles,
    rounds: int,
    epilogue: Epilogue = "none",
    leave_out: str = "",
) -> _common.Launch:
    """launch(a, b, out, bias), for tensors of the same facts as these: `out` (m, N) = my rows of the sum over ranks of
    `a` (size * m, K) @ `b` (K, N), as matmul_reduce_scatter, whose checks of the operands come before, with what
    `settings` returned. bf16 or fp16, rows at multiples of 16 bytes, on sm_90. Collective. leave_out: for
    measurements, "links": everything stays on this rank, and the result is nobody's. Raises Unsupported, ShapeError."""
    rows_b, transposed = stored(b)
    check(CALL, world, a, rows_b, out)
    check_tiles(CALL, tiles, world)
    (M, K), N, size, dtype = a.shape, b.shape[1], world.size, a.dtype
    m = M // size
    num_m, num_n = triton.cdiv(m, tiles.block_m), triton.cdiv(N, tiles.block_n)
    programs = _common.num_programs(world, size * num_m * num_n)

    def make() -> _Space:
        total = empty(2 * num_m * tiles.block_m, N, dtype=dtype, name=f"{CALL}.gluon.total", world=world)
        return _Space(total, signals(size * num_m * num_n, name=f"{CALL}.gluon.ready", world=world))

    space = world.workspace((CALL, "gluon", m, N, dtype, programs, tiles[:2]), make)
    ready = space.ready
    if leave_out:  # counters of its own, which fall behind
        key = (CALL, leave_out, m, N, dtype, programs, tiles[:2])
        ready = world.workspace(key, lambda: signals(space.ready.numel(), world=world))
    block, part = (tiles.block_m, tiles.block_k), (tiles.block_m, tiles.block_n // 2)
    total = descriptor(space.total.plain(), part)
    totals = [space.total.peer((world.rank + d) % size) for d in range(1, size)]
    targets = [total] * MAX_PEERS if leave_out else peer_descriptors(totals, space.total.plain(), part)
    constants = {
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "STAGES": tiles.num_stages,
        "GROUP": tiles.group, "HALF": layout(dtype, *part), "REGISTERS": REGISTERS, "TRANSPOSED": transposed,
        "EPILOGUE": epilogue, "LEAVE_OUT": leave_out, "num_warps": CONSUMER_WARPS,
    }  # fmt: skip
    tiles_of_a, tiles_of_b, parts_of_out = descriptor(a, block), weights_descriptor(b, tiles), descriptor(out, part)

    start = cooperative_launch(world, gluon_chain_kernel, (programs,), **constants)

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        tiles_of_a.base, tiles_of_b.base, parts_of_out.base = a, b, out
        try:
            start(
                tiles_of_a, tiles_of_b, total, parts_of_out, *targets, ready, bias, m, N, K, rounds, world.device,
            )  # fmt: skip
        finally:
            tiles_of_a.base = tiles_of_b.base = parts_of_out.base = None
        return out

    return launch
