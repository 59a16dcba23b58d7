"""Matmul + all-reduce in one Gluon kernel, without multicast: partial sums go to each tile's owner, who finishes the
tile and stores it on every rank.

Rank 0, 1, ... own a tile each, in turn. Every other rank stores its product of a tile into its owner's inbox, at a
place of its own, and signals it, in the same turns as in matmul_reduce_scatter's Gluon form: a rank's own tiles are
`lag` tiles behind the others'. The owner adds these partial sums to its own product, in fp32 and in a fixed order,
applies bias and epilogue, rounds, stores the tile by TMA on every rank, and signals each of them.

The tiles of others land in the output itself where peers can reach it. Else they land in memory that peers reach, and
two warps of each program copy them to the output while the next ones are computed. Those that land in the end are
copied by the consumers, which have nothing left to compute and more registers. A launch ends on a rank when all tiles
have landed and are in its output.

Others write where a rank's tiles land only after that rank has computed the tile, so in the same launch; and a launch
ends when every rank has read its inbox. So there is one inbox, and a launch waits for nothing at its start.

The result has the same bits every time and on all ranks, and is off by at most about 2 * u * s, in the words of
matmul_all_reduce. 2 * (size - 1) / size * M * N * itemsize bytes leave each rank.
"""

from __future__ import annotations

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import pkt.language as pl
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..declaration import Launch
from ..shared import gluon_tma as tma
from ..shared.gluon_aggregate import aggregate
from ..shared.gluon_host import (
    CONSUMER_WARPS,
    descriptor,
    everywhere,
    half_block,
    kernel_constants,
    weights_descriptor,
)
from ..shared.gluon_scales import open_scales
from ..shared.gluon_warps import (
    CONSUMERS,
    REGISTERS,
    Finish,
    Peers,
    Signals,
    Sizes,
    consume_all,
    first_tile,
    grouped,
    open_outbox,
    open_ring,
    publish,
    turn,
)
from ..shared.grid import num_programs
from ..shared.scales import passing
from ..shared.tile_product import Epilogue, Tiles
from .rules import CALL, early_tiles

COPYING = gl.constexpr(2)
"""Warps that copy tiles: with the loader and the storer they make a warpgroup."""
LANDING = gl.constexpr([*REGISTERS.value, 64])
"""Registers as in REGISTERS, and those of a thread that copies."""
RUN = gl.constexpr(8)
"""Elements that a thread copies at once."""
RUNS = gl.constexpr(4)
"""Runs that a thread of these warps loads before it stores them: twice as many do not fit in its registers."""


# --------------------------------------------------------------------------------------------------------- order
@aggregate
class Order:
    """Which tiles this rank computes, and in what order: tile index is owned by rank index % SIZE."""

    rank: gl.tensor
    num_m: gl.tensor  # row blocks of the output
    num_n: gl.tensor
    lag: gl.tensor  # tiles that a rank's own are behind the others'
    turns: gl.tensor  # of all ranks: as many for each, and so more than tiles where SIZE does not divide these
    SIZE: gl.constexpr
    GROUP: gl.constexpr

    @gluon.jit
    def first(self):
        return first_tile()

    @gluon.jit
    def end(self):
        return self.turns

    @gluon.jit
    def count(self):
        """The most tiles that a rank owns."""
        return self.turns // self.SIZE

    @gluon.jit
    def tile(self, t):
        """Tile t: (d, place among those of rank + d, row block, column); a column below zero where the last turn of all
        has no tile for that rank."""
        d, place = turn(t, gl.cdiv(self.num_m * self.num_n, self.SIZE), self.lag, self.SIZE)
        index = place * self.SIZE + (self.rank + d) % self.SIZE
        i, j = grouped(gl.minimum(index, self.num_m * self.num_n - 1), self.num_m, self.num_n, self.GROUP)
        return d, place, i, gl.where(index < self.num_m * self.num_n, j, -1)

    @gluon.jit
    def column(self, t):
        """See `consume`: a rank finishes the tiles that it owns."""
        d, _, _, j = self.tile(t)
        return gl.where(d == 0, 2 * j + 1, 2 * j)

    @gluon.jit
    def rows(self, t):
        """See `consume`: A is one part."""
        _, _, i, _ = self.tile(t)
        return 0, i

    @gluon.jit
    def others(self):
        """Turns of the other ranks."""
        return (self.SIZE - 1) * self.count()

    @gluon.jit
    def other(self, u):
        """The u-th tile of other ranks, in about the order in which they finish: (index, row block, column). If there
        is no such tile, the index is past the last tile's."""
        PEERS: gl.constexpr = max(self.SIZE - 1, 1)
        index = u // PEERS * self.SIZE + (self.rank + 1 + u % PEERS) % self.SIZE
        index = gl.where(u < self.others(), index, self.num_m * self.num_n)
        i, j = grouped(gl.minimum(index, self.num_m * self.num_n - 1), self.num_m, self.num_n, self.GROUP)
        return index, i, j


@aggregate
class Landing:
    """Where tiles of other ranks land, and the output that they are copied to. Both are None where tiles land in the
    output itself."""

    source: gl.tensor  # pointer, (M, N) this rank's
    out: gl.tensor  # pointer, (M, N) this rank's
    early: gl.tensor  # the first so many of `Order.other` are copied by warps of their own, the rest by the consumers
    sizes: gl.tuple
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr

    @gluon.jit
    def copy(self, first, end, order, signals, HALF: gl.constexpr):
        """Copy this program's share of tiles first, ..., end - 1 of `order.other` as they land, with all warps of the
        caller: their half HALF, or the whole tiles if that is None."""
        for u in range(first + gl.program_id(0), end, gl.num_programs(0)):
            index, i, j = order.other(u)
            if index < order.num_m * order.num_n:
                pl.wait(signals.ptr + order.others() + index, signals.epoch, signals.world)
                if HALF is None:
                    self.copy_rows(i * self.BLOCK_M, self.BLOCK_M, j, RUNS)
                else:
                    ROWS: gl.constexpr = self.BLOCK_M // CONSUMERS
                    self.copy_rows(i * self.BLOCK_M + HALF * ROWS, ROWS, j, ROWS)

    @gluon.jit
    def copy_rows(self, row, COUNT: gl.constexpr, j, MOST: gl.constexpr):
        """Copy COUNT rows from `row` on of a column of tiles. A thread loads up to MOST runs before it stores them."""
        WARPS: gl.constexpr = gl.num_warps()
        LANES: gl.constexpr = min(self.BLOCK_N // RUN, 32)
        ROWS: gl.constexpr = min(WARPS * (32 // LANES), COUNT)
        MANY: gl.constexpr = min(MOST, COUNT // ROWS)
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, RUN], [32 // LANES, LANES], [WARPS, 1], [1, 0])
        N = self.sizes.N // RUN * RUN  # the same, but now the compiler knows what it is a multiple of
        down = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
        right = gl.arange(0, self.BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        rows = gl.minimum(self.sizes.M - row, COUNT)
        columns = j * self.BLOCK_N + right < N
        each = down * N + right
        at = gl.cast(row, gl.int64) * N + j * self.BLOCK_N
        for begin in range(0, rows, MANY * ROWS):
            runs = ()
            for r in gl.static_range(MANY):
                inside = (begin + r * ROWS + down < rows) & columns
                runs = runs + (gl.load(self.source + (at + r * ROWS * N) + each, mask=inside),)
            for r in gl.static_range(MANY):
                inside = (begin + r * ROWS + down < rows) & columns
                gl.store(self.out + (at + r * ROWS * N) + each, runs[r], mask=inside)
            at += MANY * ROWS * N


# --------------------------------------------------------------------------------------------------------- roles
@gluon.jit
def _consume(CONSUMER: gl.constexpr, order, ring, outbox, finish, landing, signals):
    consume_all(CONSUMER, order, ring, outbox, finish, order.SIZE - 1)
    if landing.source is not None:
        landing.copy(landing.early, order.others(), order, signals, CONSUMER)


@gluon.jit
def _load(a, b, inbox, order, ring, signals):
    count = order.count()
    step = 0
    for t in range(order.first(), order.end(), gl.num_programs(0)):
        d, place, i, j = order.tile(t)
        if j >= 0:
            for k in range(0, ring.K, ring.BLOCK_K):
                ring.load(step, a, [i * ring.BLOCK_M, k], b, j * ring.BLOCK_N, k)
                step += 1
            if d == 0:
                for p in range(order.SIZE - 1):
                    pl.wait(signals.ptr + p * count + place, signals.epoch, signals.world)
                    ring.load_halves(step, inbox, (p * count + place) * ring.BLOCK_M, 0)
                    step += 2
            ring.lend(step)
            step += 1


@gluon.jit
def _store(out, inboxes, outs, landing, order, ring, outbox, signals):
    SIZE: gl.constexpr = order.SIZE
    count = order.count()
    step = 0
    n = 0
    for t in range(order.first(), order.end(), gl.num_programs(0)):
        d, place, i, j = order.tile(t)
        if j >= 0:
            step += ring.steps() + gl.where(d == 0, 2 * (SIZE - 1), 0)
            for h in gl.static_range(CONSUMERS):
                part = outbox.take(h, step, n, ring)
                down = h * (ring.BLOCK_M // CONSUMERS)
                if d == 0:
                    at = [i * ring.BLOCK_M + down, j * ring.BLOCK_N]
                    tma.async_store(out, at, part)
                    outs.store_all(at, part)
                else:
                    at = [((d - 1) * count + place) * ring.BLOCK_M + down, 0]
                    inboxes.store(d, at, part)
            if d == 0:
                outbox.sent(step, ring, SIZE)
            else:
                outbox.sent(step, ring, 1)
            publish(signals.world)
            if d == 0:
                landed_ptr = signals.ptr + order.others() + place * SIZE + order.rank
                for r in gl.static_range(1, SIZE):  # to the others: the tile has landed there
                    counter = pl.peer(landed_ptr, (order.rank + r) % SIZE, signals.world)
                    gl.atomic_add(counter, 1, sem="relaxed", scope="sys")
            else:  # to the owner: the tile is in its inbox
                counter = pl.peer(signals.ptr + (d - 1) * count + place, (order.rank + d) % SIZE, signals.world)
                gl.atomic_add(counter, 1, sem="relaxed", scope="sys")
            step += 1
            n += 1
    if landing.source is None:  # this program's share of the tiles of others has landed
        for u in range(gl.program_id(0), order.others(), gl.num_programs(0)):
            index, _, _ = order.other(u)
            if index < order.num_m * order.num_n:
                pl.wait(signals.ptr + order.others() + index, signals.epoch, signals.world)


@gluon.jit
def _land(order, landing, signals):
    if landing.source is not None:
        landing.copy(0, landing.early, order, signals, None)


# ------------------------------------------------------------------------------------------------------ kernel
@gluon.jit(do_not_specialize=["blocks", "lag", "early"])
def gluon_two_shot_kernel(
    a,  # (M, K) this rank's, blocks of BLOCK_M x BLOCK_K
    b,  # (K, N) this rank's, or (N, K) if TRANSPOSED, blocks of BLOCK_K and BLOCK_N
    inbox,  # ((size - 1) * count * BLOCK_M, BLOCK_N) this rank's, blocks of BLOCK_M / 2 x BLOCK_N: the `count` tiles
    # that a rank owns at most, from rank - 1, then from rank - 2, ...
    i1, i2, i3, i4, i5, i6, i7,  # the inboxes of ranks rank + 1, rank + 2, ...; those past size - 1 are not used
    out,  # (M, N) this rank's, blocks of BLOCK_M / 2 x BLOCK_N
    o1, o2, o3, o4, o5, o6, o7,  # where tiles land on ranks rank + 1, rank + 2, ..., as `out`
    ready_ptr,  # int32 ((size - 1) * count + tiles,) on every rank: [d - 1, p] signalled by rank - d when its part of
    # tile p is in the inbox; behind those one for each tile, signalled by its owner when it has landed here
    landed,  # (M, N) where tiles land on this rank, as a pointer; None where that is its output
    copied,  # `out` as a pointer, or None
    bias,  # (N,) this rank's, or None
    scales,  # scales.Scales of this rank's product, or None
    sizes,  # Sizes
    blocks,  # tiles of the output, in a column and in a row: made here, they would hold registers in every role
    lag,  # tiles that a rank's own are behind the others': from 1 to count
    early,  # tiles that are copied while others are computed, see Landing
    world,
    constants,  # Constants
    num_warps: gl.constexpr,
):  # fmt: skip
    """The module's kernel: shared memory, barriers, and who does what."""
    epoch = pl.epoch(ready_ptr, world)
    ring = open_ring(a, b, out, sizes.K, constants.STAGES, constants.TRANSPOSED)
    outbox = open_outbox(ring)
    num_m, num_n = blocks
    turns = gl.cdiv(num_m * num_n, world.size) * world.size
    order = Order(gl.cast(world.rank, gl.int32), num_m, num_n, lag, turns, world.size, constants.GROUP)
    applied = None
    if scales is not None:
        applied = open_scales(scales, sizes.M, world)
    finish = Finish(applied, bias, sizes.N, constants.EPILOGUE)
    signals = Signals(ready_ptr, epoch, world)
    inboxes = Peers((i1, i2, i3, i4, i5, i6, i7), world.size)
    outs = Peers((o1, o2, o3, o4, o5, o6, o7), world.size)
    landing = Landing(landed, copied, early, sizes, ring.BLOCK_M, ring.BLOCK_N)
    gl.warp_specialize(
        [
            (_consume, (0, order, ring, outbox, finish, landing, signals)),
            (_consume, (1, order, ring, outbox, finish, landing, signals)),
            (_load, (a, b, inbox, order, ring, signals)),
            (_store, (out, inboxes, outs, landing, order, ring, outbox, signals)),
            (_land, (order, landing, signals)),
        ],
        [num_warps, 1, 1, COPYING],
        LANDING,
    )


# -------------------------------------------------------------------------------------------------------- host


def two_shot_launch(
    world: World,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    landed: SymmetricTensor,
    tiles: Tiles,
    lag: int,
    epilogue: Epilogue = "none",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> Launch:
    """launch(a, b, out, bias, scale_a, scale_b) -> out, for tensors of the same facts as these. `out` (M, N) = the sum
    over ranks of `a` (M, K) @ `b` (K, N), as matmul_all_reduce, whose checks of the operands come before, with what
    `settings` returned. bf16 or fp16, or fp8 with scales and b as (N, K); rows at multiples of 16 bytes, on sm_90.
    landed: as `out`, where other ranks store their tiles: `out` itself, or memory from where they are copied.
    Collective."""
    (M, K), N, size, dtype = a.shape, b.shape[1], world.size, out.dtype
    blocks = triton.cdiv(M, tiles.block_m), triton.cdiv(N, tiles.block_n)
    tiles_of_all = math.prod(blocks)
    programs = num_programs(world, tiles_of_all)
    places = max(size - 1, 1) * triton.cdiv(tiles_of_all, size)

    def make() -> tuple[SymmetricTensor, SymmetricTensor]:
        inbox = empty(places * tiles.block_m, tiles.block_n, dtype=dtype, name=f"{CALL}.gluon.inbox", world=world)
        return inbox, signals(places + tiles_of_all, name=f"{CALL}.gluon.ready", world=world)

    inbox, ready = world.keep((CALL, "gluon", M, N, dtype, programs, tiles[:2]), make)
    inboxes, (here, *there) = (everywhere(tensor, half_block(tiles), world) for tensor in (inbox, landed))
    early = early_tiles(tiles_of_all, lag, programs, size)
    passed = (Sizes(M, N, K), blocks, lag, early, world.device, kernel_constants(tiles, b, epilogue))
    in_place, scales_of = out is landed, passing(scale_a, scale_b)
    source = None if in_place else landed.plain()
    tiles_of_a, tiles_of_b = descriptor(a, (tiles.block_m, tiles.block_k)), weights_descriptor(b, tiles)
    lent = [tiles_of_a, tiles_of_b] if in_place else [tiles_of_a, tiles_of_b, descriptor(out, half_block(tiles))]
    tiles_of_out = here if in_place else lent[2]

    start = cooperative_launch(world, gluon_two_shot_kernel, (programs,), num_warps=CONSUMER_WARPS)

    def launch(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None,
        scale_a: torch.Tensor | None = None, scale_b: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        for tensor, each in zip((a, b, out), lent):
            each.base = tensor
        try:
            start(
                tiles_of_a, tiles_of_b, *inboxes, tiles_of_out, *there, ready, source, None if in_place else out, bias,
                scales_of(scale_a, scale_b), *passed,
            )  # fmt: skip
        finally:
            for each in lent:
                each.base = None
        return out

    return launch
