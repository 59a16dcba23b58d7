"""Matmul + reduce-scatter in one Gluon kernel: the form "inbox" of matmul_reduce_scatter, tile by tile and by TMA.

Every other rank stores its product of a tile of rank o's part into o's inbox, at a place of its own, and signals it.
Rank o adds these partial sums to its own product, in fp32 and in a fixed order, and rounds once. So the result has the
same bits every time, and is off by at most about 2 * u * s, in the words of matmul_reduce_scatter.

Each rank computes a tile of rank + 1, one of rank + 2, ... and one of its own, in turn (`turn`), its own `lag` tiles
behind the others'. So the links are in use evenly from the first tile to the last, a rank's partial sums were sent long
before it waits for them, and nothing waits to be sent except for the links.

(size - 1) / size * M * N * itemsize bytes leave each rank, and two inboxes of as many bytes are used in turn.

COPIED: the kernel stores the others' tiles on its own rank, and the copy engine takes them from there, some at a time.
A store to the own rank is shorter, so the ring has all its slots sooner. All of rank + 1's tiles come first, then all
of rank + 2's, ..., and its own last: so fewer rows of A are in use at a time, and the last copies have time to arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import pkt.language as pl
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.launch.replay import replayed
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..declaration import Launch
from ..shared import gluon_tma as tma
from ..shared.copies import scattering
from ..shared.gluon_aggregate import aggregate
from ..shared.gluon_host import (
    CONSUMER_WARPS,
    descriptor,
    everywhere,
    half_block,
    here,
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
from .rules import CALL


# --------------------------------------------------------------------------------------------------------- order
@aggregate
class Order:
    """Which tiles this rank computes, and in what order; and where its partial sums are signalled and stored."""

    rank: gl.tensor
    num_m: gl.tensor  # row blocks of a rank's part
    num_n: gl.tensor
    lag: gl.tensor  # tiles that a rank's own are behind the others'
    parcel: gl.tensor  # tiles that a counter stands for
    inbox: gl.tensor  # parts of the inbox that are in front of this launch's half
    SIZE: gl.constexpr
    GROUP: gl.constexpr

    @gluon.jit
    def count(self):
        """Tiles that a rank owns."""
        return self.num_m * self.num_n

    @gluon.jit
    def first(self):
        return first_tile()

    @gluon.jit
    def end(self):
        return self.SIZE * self.count()

    @gluon.jit
    def tile(self, t):
        """Tile t: (d, index, row block, column), the index-th of the part of rank + d."""
        d, index = turn(t, self.count(), self.lag, self.SIZE)
        i, j = grouped(index, self.num_m, self.num_n, self.GROUP)
        return d, index, i, j

    @gluon.jit
    def column(self, t):
        """See `consume`: a rank finishes the tiles of its own part."""
        d, _, _, j = self.tile(t)
        return gl.where(d == 0, 2 * j + 1, 2 * j)

    @gluon.jit
    def rows(self, t):
        """See `consume`: a part of A for each rank."""
        d, _, i, _ = self.tile(t)
        return (self.rank + d) % self.SIZE, i

    @gluon.jit
    def counter(self, p, index):
        """The place of the counter for tile `index` of part p of the inbox."""
        return p * gl.cdiv(self.count(), self.parcel) + index // self.parcel

    @gluon.jit
    def place(self, p, index):
        """The place of tile `index` of part p in the inbox, in tiles."""
        return (self.inbox + p) * self.count() + index


# --------------------------------------------------------------------------------------------------------- roles
@gluon.jit
def _load(a, b, inbox, m, order, ring, signals):
    step = 0
    for t in range(order.first(), order.end(), gl.num_programs(0)):
        d, index, i, j = order.tile(t)
        row = (order.rank + d) % order.SIZE * m + i * ring.BLOCK_M
        for k in range(0, ring.K, ring.BLOCK_K):
            ring.load(step, a, [row, k], b, j * ring.BLOCK_N, k)
            step += 1
        if d == 0:
            for p in range(order.SIZE - 1):
                pl.wait(signals.ptr + order.counter(p, index), signals.epoch, signals.world)
                ring.load_halves(step, inbox, order.place(p, index) * ring.BLOCK_M, 0)
                step += 2
        ring.lend(step)
        step += 1


@gluon.jit
def _store(out, peers, order, ring, outbox, signals, COPIED: gl.constexpr):
    PEERS: gl.constexpr = order.SIZE - 1
    step = 0
    n = 0
    for t in range(order.first(), order.end(), gl.num_programs(0)):
        d, index, i, j = order.tile(t)
        row = order.place(d - 1, index) * ring.BLOCK_M  # in the inbox of rank + d, or in what is copied there
        step += ring.steps() + gl.where(d == 0, 2 * PEERS, 0)
        for h in gl.static_range(CONSUMERS):
            part = outbox.take(h, step, n, ring)
            down = h * (ring.BLOCK_M // CONSUMERS)
            if d == 0:
                tma.async_store(out, [i * ring.BLOCK_M + down, j * ring.BLOCK_N], part)
            elif COPIED:
                tma.async_store(peers.tensors[0], [row + down, 0], part)
            else:
                peers.store(d, [row + down, 0], part)
        outbox.sent(step, ring, 1)
        if d > 0:
            publish(signals.world)  # to the owner: the tile is in its inbox; or to this rank's engine: it may be copied
            counter = signals.ptr + order.counter(d - 1, index)
            if COPIED:
                counter += order.counter(PEERS, 0) + 1
            else:
                counter = pl.peer(counter, (order.rank + d) % order.SIZE, signals.world)
            gl.atomic_add(counter, 1, sem="relaxed", scope="sys")
        step += 1
        n += 1


# ------------------------------------------------------------------------------------------------------ kernel
@gluon.jit(do_not_specialize=["lag", "parcel"])
def gluon_inbox_kernel(
    a,  # (size * m, K) this rank's, blocks of BLOCK_M x BLOCK_K
    b,  # (K, N) this rank's, or (N, K) if TRANSPOSED, blocks of BLOCK_K and BLOCK_N
    out,  # (m, N) this rank's, blocks of BLOCK_M / 2 x BLOCK_N
    inbox,  # (2 * (size - 1) * tiles * BLOCK_M, BLOCK_N) this rank's, blocks of BLOCK_M / 2 x BLOCK_N: a tile is one
    # piece of memory, where links and memory take it fastest, at its place in the order of computing; halves by the
    # parity of the launch, of which rank - d stores the (d - 1)-th part. If COPIED one half
    d1, d2, d3, d4, d5, d6, d7,  # the inboxes of ranks rank + 1, rank + 2, ...; those past size - 1 are not used. If
    # COPIED d1 is what this rank's engine copies there, as large as one half
    ready_ptr,  # int32 (size - 1, parcels) on every rank; rank - d signals [d - 1, t // parcel] when tile t is in the
    # inbox. If COPIED as copies.Scattering has it
    bias,  # (N,) this rank's, or None
    scales,  # scales.Scales of this rank's product, or None
    sizes,  # Sizes; M of a rank's part, m above
    lag,  # tiles that a rank's own are behind the others': from 1 to all of them, as `turn` has it
    parcel,  # tiles that a counter stands for: 1 unless COPIED
    world,
    constants,  # Constants
    COPIED: gl.constexpr,  # by copy engines
    num_warps: gl.constexpr,
):  # fmt: skip
    """The module's kernel: shared memory, barriers, and who does what."""
    BLOCK_M: gl.constexpr = a.block_shape[0]
    num_m = gl.cdiv(sizes.M, BLOCK_M)
    num_n = gl.cdiv(sizes.N, out.block_shape[1])
    if COPIED:
        epoch = gl.load(ready_ptr + (world.size - 1) * gl.cdiv(num_m * num_n, parcel))
    else:
        epoch = pl.epoch(ready_ptr, world)
    ring = open_ring(a, b, out, sizes.K, constants.STAGES, constants.TRANSPOSED)
    outbox = open_outbox(ring)
    half = 0 if COPIED else (epoch & 1) * (world.size - 1)
    rank = gl.cast(world.rank, gl.int32)
    order = Order(rank, num_m, num_n, lag, parcel, half, world.size, constants.GROUP)
    applied = None
    if scales is not None:
        applied = open_scales(scales, sizes.M, world)
    finish = Finish(applied, bias, sizes.N, constants.EPILOGUE)
    signals = Signals(ready_ptr, epoch, world)
    peers = Peers((d1, d2, d3, d4, d5, d6, d7), world.size)
    gl.warp_specialize(
        [
            (consume_all, (0, order, ring, outbox, finish, world.size - 1)),
            (consume_all, (1, order, ring, outbox, finish, world.size - 1)),
            (_load, (a, b, inbox, sizes.M, order, ring, signals)),
            (_store, (out, peers, order, ring, outbox, signals, COPIED)),
        ],
        [num_warps, 1, 1],
        REGISTERS,
    )


# -------------------------------------------------------------------------------------------------------- host
class _Way(NamedTuple):
    """The inboxes of partial sums, the counters of their arrival, and what copies them."""

    inboxes: list[TensorDescriptor]  # see `everywhere`; in place of those of other ranks what is copied there
    ready: SymmetricTensor
    parcel: int
    begin: Callable[[], Callable[[], None]] | None  # as copies.Scattering has it


def _stored(world: World, m: int, N: int, dtype: torch.dtype, count: int, tiles: Tiles) -> _Way:
    size, counters = world.size, max(world.size - 1, 1) * count

    def make() -> tuple[SymmetricTensor, SymmetricTensor]:
        inbox = empty(2 * counters * tiles.block_m, tiles.block_n, dtype=dtype, name=f"{CALL}.gluon.inbox", world=world)
        return inbox, signals(counters, name=f"{CALL}.gluon.ready", world=world)

    counted = (m, N, dtype, num_programs(world, size * count), tiles[:2])
    inbox, ready = world.keep((CALL, "gluon", *counted), make)
    return _Way(everywhere(inbox, half_block(tiles), world), ready, 1, None)


def _copied(world: World, dtype: torch.dtype, count: int, tiles: Tiles, copies: int) -> _Way:
    parcel = triton.cdiv(count, copies)
    found = scattering(world, count, tiles.block_m * tiles.block_n, dtype, parcel)
    inbox, outbox = (x.view(-1, tiles.block_n) for x in (found.inbox.plain(), found.outbox))
    return _Way(here(inbox, half_block(tiles), outbox), found.counters, parcel, found.begin)


def inbox_launch(
    world: World,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    tiles: Tiles,
    lag: int,
    copies: int = 0,
    epilogue: Epilogue = "none",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> Launch:
    """launch(a, b, out, bias, scale_a, scale_b), for tensors of the same facts as these: `out` (m, N) = my rows of the
    sum over ranks of `a` (size * m, K) @ `b` (K, N), as matmul_reduce_scatter, whose checks of the operands come
    before, with what `settings` returned. bf16 or fp16, or fp8 with scales and b as (N, K); rows at multiples of 16
    bytes, on sm_90. Collective."""
    (M, K), N, size, dtype = a.shape, b.shape[1], world.size, out.dtype
    m = M // size
    count = triton.cdiv(m, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    copied = copies > 0 and size > 1
    if copied:
        way = _copied(world, dtype, count, tiles, copies)
    else:
        way = _stored(world, m, N, dtype, count, tiles)
    tiles_of_a, tiles_of_b = descriptor(a, (tiles.block_m, tiles.block_k)), weights_descriptor(b, tiles)
    parts_of_out, scales_of = descriptor(out, half_block(tiles)), passing(scale_a, scale_b)
    passed = (Sizes(m, N, K), lag, way.parcel, world.device, kernel_constants(tiles, b, epilogue))
    programs = num_programs(world, size * count)

    start = cooperative_launch(world, gluon_inbox_kernel, (programs,), COPIED=copied, num_warps=CONSUMER_WARPS)

    def launch(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None,
        scale_a: torch.Tensor | None = None, scale_b: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        tiles_of_a.base, tiles_of_b.base, parts_of_out.base = a, b, out
        send = way.begin() if way.begin else None
        try:
            scales = scales_of(scale_a, scale_b)
            start(tiles_of_a, tiles_of_b, parts_of_out, *way.inboxes, way.ready, bias, scales, *passed)
        finally:
            tiles_of_a.base = tiles_of_b.base = parts_of_out.base = None
        if send:
            send()
        return out

    return replayed(world, launch) if copied else launch
