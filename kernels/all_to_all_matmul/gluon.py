"""All-to-all + matmul in one Gluon kernel: copy engines move the heads, and all programs compute.

A tile has a part of K for each rank's heads: this rank's own first, then those of rank - 1, rank - 2, ... The loader
waits for a peer's heads of the tile's rows just before it loads them, so the exchange hides behind the own part. Copy
engines push `step` rows of a sequence at a time, to each peer in turn, with a number behind them.

Ranks meet before the kernel and the first copy, because a peer may be at its last launch still, and read the inbox.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import pkt.language as pl
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.launch.passing import lasts
from pkt.runtime.launch.replay import replayed
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.tensor import SymmetricTensor

from ..declaration import Call, Launch
from ..shared import copies
from ..shared import gluon_tma as tma
from ..shared.gluon_aggregate import aggregate
from ..shared.gluon_host import CONSUMER_WARPS, descriptor, half_block, kernel_constants, weights_descriptor
from ..shared.gluon_tma import viewed
from ..shared.gluon_warps import (
    CONSUMERS,
    REGISTERS,
    Finish,
    Signals,
    Sizes,
    consume_all,
    first_tile,
    grouped,
    open_outbox,
    open_ring,
)
from ..shared.grid import num_programs
from ..shared.heads import Matrix

COPY_ROWS, COPIES = 512, 8
"""Rows of a copy, at least, and copies that a peer's rows of a sequence go in, at most."""


# ------------------------------------------------------------------------------------------------------------ order
@aggregate
class Order:
    """Which tiles this rank computes, in what order, and where their rows are."""

    rank: gl.tensor
    sequences: gl.tensor
    rows: gl.tensor  # of a sequence on this rank
    num_m: gl.tensor  # row blocks of a sequence
    num_n: gl.tensor
    step: gl.tensor  # row blocks of a copy
    SIZE: gl.constexpr
    GROUP: gl.constexpr

    @gluon.jit
    def first(self):
        return first_tile()

    @gluon.jit
    def end(self):
        return self.sequences * self.num_m * self.num_n

    @gluon.jit
    def tile(self, t):
        """Tile t: (sequence, row block, column)."""
        i, j = grouped(t, self.sequences * self.num_m, self.num_n, self.GROUP)
        return i // self.num_m, i % self.num_m, j

    @gluon.jit
    def column(self, t):
        """See `consume`: this rank finishes all of its tiles."""
        _, _, j = self.tile(t)
        return 2 * j + 1

    @gluon.jit
    def counter(self, d, b, i):
        """The place of the counter for row block i of sequence b of rank - d."""
        return ((d - 1) * self.sequences + b) * gl.cdiv(self.num_m, self.step) + i // self.step


# ------------------------------------------------------------------------------------------------------------ roles
@gluon.jit
def _load(x, inbox, weight, order, ring, signals):
    PART = ring.K // order.SIZE  # columns of a rank
    step = 0
    for t in range(order.first(), order.end(), gl.num_programs(0)):
        b, i, j = order.tile(t)
        row = i * ring.BLOCK_M
        for d in range(order.SIZE):
            source = (order.rank - d + order.SIZE) % order.SIZE
            if order.SIZE > 1:  # or no wait would be compiled, which pkt takes for a wait that was lost
                if d > 0:
                    pl.wait(signals.ptr + order.counter(d, b, i), signals.epoch, signals.world)
            for k in range(0, PART, ring.BLOCK_K):
                if d == 0:
                    at = [(b * order.SIZE + order.rank) * order.rows + row, k]
                    ring.load(step, x, at, weight, j * ring.BLOCK_N, source * PART + k)
                else:
                    at = [((d - 1) * order.sequences + b) * order.rows + row, k]
                    ring.load(step, inbox, at, weight, j * ring.BLOCK_N, source * PART + k)
                step += 1
        ring.lend(step)
        step += 1


@gluon.jit
def _store(out, order, ring, outbox):
    HALF: gl.constexpr = ring.BLOCK_M // CONSUMERS
    step = 0
    n = 0
    for t in range(order.first(), order.end(), gl.num_programs(0)):
        b, i, j = order.tile(t)
        step += ring.steps()
        for h in gl.static_range(CONSUMERS):
            part = outbox.take(h, step, n, ring)
            # Three dimensions: rows past a sequence's end are cut, not written over the next one's.
            part = viewed(part, [1, HALF, ring.BLOCK_N], out.layout)
            tma.async_store(out, [b, i * ring.BLOCK_M + h * HALF, j * ring.BLOCK_N], part)
        outbox.sent(step, ring, 1)
        step += 1
        n += 1


# ----------------------------------------------------------------------------------------------------------- kernel
@gluon.jit(do_not_specialize=["step"])
def gluon_heads_product_kernel(
    x,  # (B * size * S, k) this rank's, blocks of BLOCK_M x BLOCK_K
    inbox,  # ((size - 1) * B * S, k) this rank's, blocks as of x; rank - d stores the (d - 1)-th part
    weight,  # (size * k, N) this rank's, or (N, size * k) if TRANSPOSED, blocks of BLOCK_K and BLOCK_N
    out,  # (B, S, N) this rank's, blocks of 1 x BLOCK_M / 2 x BLOCK_N
    ready_ptr,  # int32 (size - 1, B, copies of a sequence), this rank's; [d - 1, b, c] is the number of the last launch
    # whose rows c of sequence b of rank - d are here; the number of this launch follows
    bias,  # (N,) this rank's, or None
    sizes,  # Sizes: M is S, K is size * k
    sequences,  # B
    step,  # row blocks of a copy
    world,
    constants,  # Constants
    num_warps: gl.constexpr,
):
    """The module's kernel: shared memory, barriers, and who does what."""
    num_m = gl.cdiv(sizes.M, x.block_shape[0])
    number = gl.load(ready_ptr + (world.size - 1) * sequences * gl.cdiv(num_m, step))
    ring = open_ring(x, weight, out, sizes.K, constants.STAGES, constants.TRANSPOSED)
    outbox = open_outbox(ring)
    num_n = gl.cdiv(sizes.N, ring.BLOCK_N)
    rank = gl.cast(world.rank, gl.int32)
    order = Order(rank, sequences, sizes.M, num_m, num_n, step, world.size, constants.GROUP)
    finish = Finish(None, bias, sizes.N, constants.EPILOGUE)
    gl.warp_specialize(
        [
            (consume_all, (0, order, ring, outbox, finish, 0)),
            (consume_all, (1, order, ring, outbox, finish, 0)),
            (_load, (x, inbox, weight, order, ring, Signals(ready_ptr, number, world))),
            (_store, (out, order, ring, outbox)),
        ],
        [num_warps, 1, 1],
        REGISTERS,
    )


# ------------------------------------------------------------------------------------------------------------- host
class Rows(NamedTuple):
    """Of a sequence's rows on a rank: row blocks of a copy, and how many copies there are."""

    step: int
    count: int

    @classmethod
    def of(cls, s: int, block_m: int) -> Rows:
        """Few copies, each of enough rows."""
        blocks, least, most = triton.cdiv(s, block_m), max(COPY_ROWS // block_m, 1), COPIES
        step = max(least, triton.cdiv(blocks, most))
        return cls(step, triton.cdiv(blocks, step))


def planned(call: Call) -> Launch:
    """The plan of the form. Collective."""
    world, tiles, dtype, x, out = call.world, call["tiles"], call.dtype, call["x"], call["out"]
    rank, size, b, s, k, N = world.rank, world.size, call["b"], call["s"], call["h"] * call["d"], call["n"]
    step, count = Rows.of(s, tiles.block_m)

    def make() -> tuple[SymmetricTensor, SymmetricTensor]:
        inbox = empty(size - 1, b, s, k, dtype=dtype, name=f"{call.name}.gluon.inbox", world=world)
        return inbox, signals((size - 1) * b * count + 1, name=f"{call.name}.gluon.ready", world=world)

    inbox, counters = world.keep((call.name, "gluon", b, s, k, dtype, step), make)
    mine, theirs, rows = copies.layout(b, size * s, k), copies.layout(size - 1, b, s, k), step * tiles.block_m
    sends = []
    for i in range(b):
        for c in range(count):
            part = slice(c * rows, min((c + 1) * rows, s))
            for d in range(1, size):
                peer = (rank + d) % size
                source = mine[i, peer * s + part.start : peer * s + part.stop]
                boxes = copies.boxes(peer, theirs[d - 1, i, part], source, dtype.itemsize)
                at = ((d - 1) * b + i) * count + c
                sends.append((copies.sending(world, boxes, inbox), copies.telling(world, peer, counters, at)))
    begin = copies.announcing(world, counters, sends)
    matrix = Matrix.of(call["weight"], 0)
    blocks_of_x = descriptor(x.view(-1, k), (tiles.block_m, tiles.block_k))
    blocks_of_inbox = lasts(descriptor(inbox.plain().view(-1, k), (tiles.block_m, tiles.block_k)))
    flat = call["weight"].flatten(0, 1)
    blocks_of_weight = weights_descriptor(flat, tiles)
    halves = descriptor(out, (1, *half_block(tiles)))
    constants = kernel_constants(tiles, flat, "none")
    programs = num_programs(world, b * triton.cdiv(s, tiles.block_m) * triton.cdiv(N, tiles.block_n))
    start = cooperative_launch(world, gluon_heads_product_kernel, (programs,), num_warps=CONSUMER_WARPS)
    passed = Sizes(s, N, size * k), b, step, world.device, constants

    def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        join = begin(x)
        blocks_of_x.base, blocks_of_weight.base, halves.base = x, matrix.rows(weight), out
        try:
            start(blocks_of_x, blocks_of_inbox, blocks_of_weight, halves, counters, bias, *passed)
        finally:
            blocks_of_x.base = blocks_of_weight.base = halves.base = None
        join()
        return out

    return replayed(world, launch) if matrix.dense else launch  # or each graph would keep a copy of the weight
