"""The form over several nodes: `decode_kernel` on every rank, then one kernel that merges the ranks' results. On one
node the kernel merges many rows of "gluon", and 1. and 2. are one step, without the box.

The rows are cut into pieces. The ranks of a node share the pieces; ranks with one local rank (a rail) merge the same:

    1. A rank merges what the ranks of its node have of its pieces, and puts each piece to the other nodes, to its rail.
    2. It merges the nodes' results of its pieces, in the order of the nodes, and stores them at the ranks of its node.

So a node sends each row once to each other node, and all ranks get the same bits. Pieces arrive in a box of two halves,
which launches use in turn: see shared.nodes, whose reasons hold here, too.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import address
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..shared import nodes
from ..shared.grid import num_programs
from . import device, merging


class Memory(NamedTuple):
    """A launch's memory, on every rank. A row is E + 1 fp32: a result, and its lse."""

    box: Any  # (2, nodes, share): [:, k]: pieces of the rail's rank on node k; [:, node]: mine, as they leave
    whole: Any  # (rows, E + 1): finished rows, from the rank of this node that has merged them
    ready: Any  # int32 (programs,): ranks of this node whose results are there
    arrived: Any  # int32 (nodes, pieces of a rank): the launch whose piece has come from a node
    there: Any  # int32 (pieces,): the launch whose finished piece is in `whole`
    share: Any  # elements of the pieces of a rank


@triton.jit
def nodes_kernel(
    p,  # Decode
    results_ptr,  # fp32 (rows, E + 1) on every rank: of decode_kernel; the ranks of its node read it
    m,  # Memory
    world,
    NEAR: tl.constexpr,  # ranks of a node
    TAKE: tl.constexpr,  # rows at a time
    PIECE: tl.constexpr,  # rows of a put
):
    """Nobody waits for another node before all that it sends is on its way."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    launch = pl.epoch(m.ready, world)
    NODES: tl.constexpr = world.size // NEAR
    rank = tl.cast(world.rank, tl.int32)
    node, local = rank // NEAR, rank % NEAR
    rows = p.B * p.SQ * p.HEADS
    pieces = tl.cdiv(rows, PIECE)
    each = tl.cdiv(pieces, NEAR)
    mine = tl.cdiv(pieces - local, NEAR)
    half = nodes.slot(m.box, (launch & 1) * NODES, m.share)
    nodes.signal_node(m.ready + pid, world, NEAR)  # publish my results; before overwrite: I have read the last `whole`
    if NEAR > 1:
        pl.wait(m.ready + pid, launch * (NEAR - 1), world)
    for task in range(pid, mine, programs):
        first = (task * NEAR + local) * PIECE
        at = tl.cast(task, tl.int64) * PIECE * (p.E + 1)
        sent = nodes.slot(half, node, m.share) + at
        for start in range(0, PIECE, TAKE):
            number = first + start + tl.arange(0, TAKE)
            row = results_ptr + tl.cast(number, tl.int64) * (p.E + 1)
            merged = device.no_rows(p, TAKE)
            for j in tl.static_range(NEAR):
                merged = device.with_rows(merged, address.of_rank(row, node * NEAR + j, world), number < rows, p)
            if NODES > 1:
                part, lse = merging.divided(merged[2], merged[0], merged[1])
                _store(part, lse, sent + (number - first) * (p.E + 1), number < rows, rank, p, world)
            else:
                _finish(merged, number, number < rows, m, p, world, NEAR)
        if NODES > 1:
            nbytes = tl.minimum(rows - first, PIECE) * (p.E + 1) * 4
            for i in range(1, NODES):
                to = (node + i) % NODES * NEAR + local
                pl.put_signal(m.arrived + node * each + task, to, world, dst=sent, src=sent, nbytes=nbytes)
        else:
            nodes.signal_node(m.there + (task * NEAR + local), world, NEAR)  # publish
    if NODES > 1:
        for task in range(pid, mine, programs):
            piece = task * NEAR + local
            at = tl.cast(task, tl.int64) * PIECE * (p.E + 1)
            for i in range(1, NODES):
                pl.wait(m.arrived + (node + NODES - i) % NODES * each + task, launch, world)
            for start in range(0, PIECE, TAKE):
                row = start + tl.arange(0, TAKE)
                number = piece * PIECE + row
                merged = device.no_rows(p, TAKE)
                for origin in range(NODES):
                    got = nodes.slot(half, origin, m.share) + at
                    merged = device.with_rows(merged, got + row * (p.E + 1), number < rows, p)
                _finish(merged, number, number < rows, m, p, world, NEAR)
            nodes.signal_node(m.there + piece, world, NEAR)  # publish
    for piece in range(pid, pieces, programs):
        if piece % NEAR != local:
            pl.wait(m.there + piece, launch, world)
            for start in range(0, PIECE, TAKE):
                number = piece * PIECE + start + tl.arange(0, TAKE)
                whole = m.whole + tl.cast(number, tl.int64) * (p.E + 1)
                part, lse = device.load_rows(whole, number < rows, p)
                device.store_rows(part, lse, number, number < rows, p)
    if NODES > 1:
        pl.quiet(world)  # before the next launch's signals


@triton.jit
def _finish(merged, number, exists, m, p, world, NEAR: tl.constexpr):
    """Store finished rows as the operator's, and in `whole` of the other ranks of the node."""
    most, total, acc = device.with_sink(merged[0], merged[1], merged[2], number, exists, p)
    part, lse = merging.divided(acc, most, total)
    device.store_rows(part, lse, number, exists, p)
    rank = tl.cast(world.rank, tl.int32)
    whole = m.whole + tl.cast(number, tl.int64) * (p.E + 1)
    for j in tl.static_range(1, NEAR):
        _store(part, lse, whole, exists, rank - rank % NEAR + (rank + j) % NEAR, p, world)


@triton.jit
def _store(part, lse, row, exists, peer, p, world):
    """Store rows and their lse at `row`, (TAKE,) pointers, of rank `peer`."""
    e, there = tl.arange(0, p.COLUMNS), address.of_rank(row, peer, world)
    tl.store(there[:, None] + e[None, :], part, mask=exists[:, None] & (e < p.E)[None, :])
    tl.store(there + p.E, lse, mask=exists)


# ---------------------------------------------------------------------------------------------------------------- host
def launch_merging(world: World, rows: int, E: int, take: int, results: SymmetricTensor) -> Any:
    """launch(p): merge the ranks' `results` of `rows` rows, of which a program takes `take` at a time."""
    piece, near = _rows_of_put(rows, E, world), world.node_size
    pieces, take = triton.cdiv(rows, piece), min(take, piece)
    each, programs = triton.cdiv(pieces, near), num_programs(world, pieces)

    def counters(name: str, n: int) -> SymmetricTensor:
        return signals(n, name=f"flash_decode.{name}", world=world)

    def make() -> Memory:
        share = each * piece * (E + 1)
        return Memory(
            empty(2, world.nodes, share if world.nodes > 1 else 1, name="flash_decode.box", world=world),
            empty(rows, E + 1, name="flash_decode.whole", world=world),
            counters("ready", programs), counters("arrived", world.nodes * each), counters("there", pieces), share,
        )  # fmt: skip

    memory = world.keep(("flash_decode", "nodes", rows, E, piece), make)
    start = cooperative_launch(world, nodes_kernel, (programs,))
    return lambda p: start(p, results, memory, world.device, near, take, piece)


def _rows_of_put(rows: int, E: int, world: World) -> int:
    """Rows of a put, a power of two: at most so many that every rank of a node has some."""
    nbytes, share = 4 * (E + 1), math.ceil(rows / world.node_size)
    most = max(nodes.put_bytes(share * nbytes, world.num_sms) // nbytes, 1)
    return min(1 << most.bit_length() - 1, triton.next_power_of_2(share))
