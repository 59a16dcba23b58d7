"""Collectives over several nodes: the network carries data once to a node, and its ranks take it from there.

A tensor of `size` parts is (rows, size, run), see shared.runs. A part is cut into pieces of PIECE elements. A piece
crosses the network in one put with a signal of its own, between ranks with one local rank (a rail). Programs share the
pieces of all nodes. The ranks of a node load from each other. So the network and the links of a node work at the same
time: while pieces of one node arrive, those of another one are passed on.

| kernel | in the node, before | network | in the node, after |
|---|---|---|---|
| gather | | my part to each node | every rank loads what has arrived at the others |
| scatter | the parts for the ranks of my rail are reduced | a sum to each of them | |
| exchange | the parts for the ranks of my rail are collected | they to each of them | |

Puts arrive in boxes of two halves, which launches use in turn. A rank ends a launch when it has data of every rank from
that launch. So when launch l + 2 begins on one rank, launch l has ended on all of them, and with it all reading of its
half. No launch waits for the others before it sends. It ends with `quiet`: a put and its signal of the next launch
might otherwise come before those of this one.

After Triton-distributed's two-dimensional push (all_gather_push_2d), and its reduction in the node before the network.
On GPUs it has run on two nodes of one host, and over no network. No size here is measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import address
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.pool import outside_pools
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..declaration import Call, Launch
from . import runs
from .grid import COPY_BYTES, num_programs, resident_launch
from .reduction import Op, combine

LEAST_PUT, MOST_PUT = 16 << 10, 1 << 20
"""Bytes of a put. Not measured: small enough to arrive in turns, large enough for a message's cost not to count."""
PUTS = 4
"""Pieces of a part for each program, where their size allows it. Not measured."""


class Part(NamedTuple):
    """A part as a kernel's argument; UNIT as in shared.runs."""

    n: int  # elements
    units: int  # in a run, of UNIT elements
    limit: int  # elements of the whole tensor, less than size * n where the last parts are short
    pieces: int
    UNIT: tl.constexpr
    TILE: tl.constexpr  # elements that a program moves at a time
    PIECE: tl.constexpr  # elements of a put
    ITEM: tl.constexpr  # bytes of an element


def cut(
    world: World, rows: int, run: int, dtype: torch.dtype, block: int | None, limit: int | None = None,
    at_once: int = COPY_BYTES,
) -> Part:  # fmt: skip
    """A part of `rows` runs of `run` elements, in pieces of `block` elements. limit: of the whole tensor's elements.
    at_once: bytes that a program copies at a time."""
    n, item = rows * run, dtype.itemsize
    piece = block or min(put_bytes(n * item, world.num_sms) // item, triton.next_power_of_2(n))
    unit = min(math.gcd(run, 16 // item), piece)
    tile = min(piece, at_once // 16 * unit)  # short runs take more addresses, each in a register
    constants = (tl.constexpr(size) for size in (unit, tile, piece, item))
    return Part(n, run // unit, limit or n * world.size, triton.cdiv(n, piece), *constants)


def put_bytes(part: float, sms: int) -> int:
    """Bytes of a put of a part of so many bytes, with so many programs."""
    each = triton.next_power_of_2(max(math.ceil(part / (PUTS * sms)), 1))
    return max(LEAST_PUT, min(each, MOST_PUT))


def fits(call: Call) -> str:
    """Why the world's ranks do not suit the kernels, "" where they do."""
    world, near = call.world, call.world.node_size
    places = [rank // world.backend.node_size for rank in world.ranks]
    groups = [places[at : at + near] for at in range(0, world.size, near)]
    if all(len(group) == near and len(set(group)) == 1 for group in groups) and len(groups) == world.nodes:
        return ""
    return f"ranks on the nodes {', '.join(map(str, places))}, and not as many on each, one node after the other"


# ------------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def tile(first, start, part):
    """Elements first + start, ... of a part: unit [TILE / UNIT, 1], element [TILE / UNIT, UNIT], int64, and the mask of
    those that are there."""
    unit = (first + start) // part.UNIT + tl.arange(0, part.TILE // part.UNIT)[:, None]
    element = unit * part.UNIT + tl.arange(0, part.UNIT)[None, :]
    return unit, element, element < part.n


@triton.jit
def in_whole(unit, element, part, index, size, together=1):
    """Where a part's elements are in the whole tensor, of whose parts `index` is one, see `runs.stacked`."""
    row = unit // part.units
    return runs.stacked(row, element - row * (part.units * part.UNIT), part, index, size, together)


@triton.jit
def slot(box, index, n):
    """Place `index` of a box, each of n elements."""
    return box + tl.cast(index, tl.int64) * n


@triton.jit
def signal_node(ptr, world, NEAR: tl.constexpr):
    """`signal` each other rank of my node."""
    rank = tl.cast(world.rank, tl.int32)
    local = rank % NEAR
    for j in tl.static_range(1, NEAR):
        pl.signal(ptr, rank - local + (local + j) % NEAR, world)


@triton.jit
def send_part(x_ptr, mine, packed_ptr, arrived_ptr, launch, pid, programs, part, world, NEAR: tl.constexpr):
    """Copy my part x to `mine`, in my box, and put its pieces to the rail's rank of every other node. My share of
    both, as program `pid` of `programs`; pointers as in gather_kernel."""
    NODES: tl.constexpr = world.size // NEAR
    rank = tl.cast(world.rank, tl.int32)
    node, local = rank // NEAR, rank % NEAR
    for t in range(pid, part.pieces, programs):
        for start in range(0, part.PIECE, part.TILE):
            _, element, inside = tile(tl.cast(t, tl.int64) * part.PIECE, start, part)
            tl.store(mine + element, tl.load(x_ptr + element, mask=inside), mask=inside)
        pl.signal(packed_ptr + t, rank, world)  # publish: other programs may send it
    for task in range(pid, NODES * part.pieces, programs):
        i, t = task // part.pieces, task % part.pieces
        if i > 0:
            first = tl.cast(t, tl.int64) * part.PIECE
            nbytes = tl.minimum(part.n - first, part.PIECE) * part.ITEM
            to, arrived = (node + i) % NODES * NEAR + local, arrived_ptr + node * part.pieces + t
            pl.wait(packed_ptr + t, launch, world)
            pl.put_signal(arrived, to, world, dst=mine + first, src=mine + first, nbytes=nbytes)


@triton.jit
def source_at(i, j, world, NEAR: tl.constexpr):
    """The rank whose part comes i-th among the nodes and j-th within its node: from my own node and rank on, the nodes
    in the order in which evenly loaded ones send."""
    NODES: tl.constexpr = world.size // NEAR
    rank = tl.cast(world.rank, tl.int32)
    return (rank // NEAR + NODES - i) % NODES * NEAR + (rank + j) % NEAR


@triton.jit
def take_parts(
    out_ptr, half, arrived_ptr, there_ptr, launch, pid, programs, part, world, NEAR: tl.constexpr,
    ready_ptr=None,  # int32 (size, blocks) on every rank: pieces of each block of each part that are in `out`
    block=1,  # elements of such a block
    BOXED: tl.constexpr = True,  # take what is in my own box, too
):  # fmt: skip
    """Load all parts into `out`, piece by piece, from the boxes of my node's ranks, whose halves are `half`. My share
    of it, as program `pid` of `programs`; pointers as in gather_kernel. With ready_ptr my own part stays where it is.
    """
    NODES: tl.constexpr = world.size // NEAR
    rank = tl.cast(world.rank, tl.int32)
    local, tasks = rank % NEAR, NODES * part.pieces
    turn = (launch - 1) * tl.cdiv(tasks - pid, programs)
    for task in range(pid, tasks, programs):
        i, t = task // part.pieces, task % part.pieces
        origin = source_at(i, 0, world, NEAR) // NEAR
        turn += 1
        if i > 0:
            pl.wait(arrived_ptr + origin * part.pieces + t, launch, world)
        signal_node(there_ptr + local * programs + pid, world, NEAR)  # publish
        first = tl.cast(t, tl.int64) * part.PIECE
        for j in tl.static_range(0, NEAR):
            source = source_at(i, j, world, NEAR)
            if j > 0:
                pl.wait(there_ptr + source % NEAR * programs + pid, turn, world)
            taken = BOXED or j > 0
            if taken & ((source != rank) | (ready_ptr is None)):
                for start in range(0, part.PIECE, part.TILE):
                    unit, element, inside = tile(first, start, part)
                    at = in_whole(unit, element, part, source, world.size)
                    inside &= at < part.limit
                    box = address.of_rank(slot(half, origin, part.n), rank - local + source % NEAR, world)
                    x = tl.load(box + element, mask=inside)
                    tl.store(out_ptr + at, x, mask=inside)
                if ready_ptr is not None:
                    last = tl.minimum(first + part.PIECE, part.n) - 1
                    for b in range(tl.cast(first // block, tl.int32), tl.cast(last // block, tl.int32) + 1):
                        pl.signal(ready_ptr + source * tl.cast(tl.cdiv(part.n, block), tl.int32) + b, rank, world)


@triton.jit
def gather_kernel(
    x_ptr,  # (rows, run) this rank's
    out_ptr,  # (rows, size, run) this rank's; x may be [:, rank] of it
    box_ptr,  # (2, nodes, n) on every rank; [:, k]: the part of the rail's rank on node k, which the ranks of this node
    # read; [:, node]: mine, as it leaves
    arrived_ptr,  # int32 (nodes, pieces) on every rank: the launch whose piece has come from a node
    packed_ptr,  # int32 (pieces,) on every rank: the launch whose piece of mine is in my box
    there_ptr,  # int32 (NEAR, programs) on every rank: pieces that are in the box of a rank of this node
    part,  # Part
    world,
    NEAR: tl.constexpr,  # ranks of a node
    ANSWERED: tl.constexpr,  # before the next launch the rail's ranks answer, with data that they send after mine came
):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    launch = pl.epoch(there_ptr, world)
    NODES: tl.constexpr = world.size // NEAR
    rank = tl.cast(world.rank, tl.int32)
    half = slot(box_ptr, (launch & 1) * NODES, part.n)
    send_part(
        x_ptr, slot(half, rank // NEAR, part.n), packed_ptr, arrived_ptr, launch, pid, programs, part, world, NEAR
    )
    take_parts(out_ptr, half, arrived_ptr, there_ptr, launch, pid, programs, part, world, NEAR)
    if not ANSWERED:
        pl.quiet(world)  # before the next launch's signals


@triton.jit
def node_sum(x_ptr, at, inside, world, NEAR: tl.constexpr, OP: tl.constexpr):
    """The elements at `x_ptr + at` on my node's ranks, reduced in fp32 in the order of the ranks from mine on."""
    rank = tl.cast(world.rank, tl.int32)
    local = rank % NEAR
    total = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)
    for j in tl.static_range(1, NEAR):
        x = address.of_rank(x_ptr, rank - local + (local + j) % NEAR, world)
        total = combine(total, tl.load(x + at, mask=inside, other=0).to(tl.float32), OP)
    return total


@triton.jit
def scatter_kernel(
    x_ptr,  # (rows, size, run) on every rank; the ranks of my node read it
    out_ptr,  # (rows, run) this rank's
    box_ptr,  # (3, nodes, n) on every rank; [0, k]: sums for node k, [1:, k]: those that come from it, halves in turn
    arrived_ptr,  # int32 (nodes, pieces) on every rank: the launch whose piece has come from a node
    ready_ptr,  # int32 (programs,) on every rank: ranks of my node whose x is complete
    read_ptr,  # int32 (programs,) on every rank: ranks of my node that have read my x
    part,  # Part
    world,
    NEAR: tl.constexpr,  # ranks of a node
    OP: tl.constexpr,
    ANSWERED: tl.constexpr,  # as in gather_kernel
):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    launch = pl.epoch(read_ptr, world)
    NODES: tl.constexpr = world.size // NEAR
    rank = tl.cast(world.rank, tl.int32)
    node, local = rank // NEAR, rank % NEAR
    got = slot(box_ptr, (1 + (launch & 1)) * NODES, part.n)
    signal_node(ready_ptr + pid, world, NEAR)  # publish: my x is complete
    if NEAR > 1:
        pl.wait(ready_ptr + pid, launch * (NEAR - 1), world)
    for task in range(pid, (NODES - 1) * part.pieces, programs):
        to, t = (node + 1 + task // part.pieces) % NODES, task % part.pieces
        first, sent = tl.cast(t, tl.int64) * part.PIECE, slot(box_ptr, to, part.n)
        for start in range(0, part.PIECE, part.TILE):
            unit, element, inside = tile(first, start, part)
            at = in_whole(unit, element, part, to * NEAR + local, world.size)
            total = node_sum(x_ptr, at, inside & (at < part.limit), world, NEAR, OP)
            tl.store(sent + element, total.to(x_ptr.dtype.element_ty), mask=inside)
        nbytes = tl.minimum(part.n - first, part.PIECE) * part.ITEM
        arrived, target = arrived_ptr + node * part.pieces + t, slot(got, node, part.n) + first
        tl.debug_barrier()  # one thread sends what the others have stored
        pl.put_signal(arrived, to * NEAR + local, world, dst=target, src=sent + first, nbytes=nbytes)
    for t in range(pid, part.pieces, programs):
        for start in range(0, part.PIECE, part.TILE):
            unit, element, inside = tile(tl.cast(t, tl.int64) * part.PIECE, start, part)
            at = in_whole(unit, element, part, rank, world.size)
            total = node_sum(x_ptr, at, inside & (at < part.limit), world, NEAR, OP)
            for i in range(1, NODES):
                origin = (node + NODES - i) % NODES
                if start == 0:
                    pl.wait(arrived_ptr + origin * part.pieces + t, launch, world)
                sums = tl.load(slot(got, origin, part.n) + element, mask=inside, other=0)
                total = combine(total, sums.to(tl.float32), OP)
            tl.store(out_ptr + element, total.to(out_ptr.dtype.element_ty), mask=inside)
    signal_node(read_ptr + pid, world, NEAR)  # before overwrite: I have read the x of my node's ranks
    if NEAR > 1:
        pl.wait(read_ptr + pid, launch * (NEAR - 1), world)
    if not ANSWERED:
        pl.quiet(world)  # before the next launch's signals; and what I have sent may be overwritten


@triton.jit
def exchange_kernel(
    x_ptr,  # (rows / together_x, size, together_x, run) on every rank; the ranks of my node read it
    out_ptr,  # (rows / together_out, size, together_out, run) this rank's
    box_ptr,  # (3, nodes, NEAR * n) on every rank; [0, k]: for node k, [1:, k]: what comes from it, halves in turn
    arrived_ptr,  # int32 (nodes, pieces) on every rank: the launch whose piece has come from a node
    ready_ptr,  # int32 (programs,) on every rank: ranks of my node whose x is complete
    read_ptr,  # int32 (programs,) on every rank: ranks of my node that have read my x
    part,  # Part; a piece holds a piece of the part of each rank of a node, one after the other
    together_x,
    together_out,
    world,
    NEAR: tl.constexpr,  # ranks of a node
):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    launch = pl.epoch(read_ptr, world)
    NODES: tl.constexpr = world.size // NEAR
    rank = tl.cast(world.rank, tl.int32)
    node, local = rank // NEAR, rank % NEAR
    got = slot(box_ptr, (1 + (launch & 1)) * world.size, part.n)
    signal_node(ready_ptr + pid, world, NEAR)  # publish: my x is complete
    if NEAR > 1:
        pl.wait(ready_ptr + pid, launch * (NEAR - 1), world)
    for task in range(pid, (NODES - 1) * part.pieces, programs):
        to, t = (node + 1 + task // part.pieces) % NODES, task % part.pieces
        first, sent = tl.cast(t, tl.int64) * part.PIECE, slot(box_ptr, to * NEAR, part.n)
        count = tl.minimum(part.n - first, part.PIECE)
        for j in range(NEAR):
            peer = (local + j) % NEAR
            place = sent + (first * NEAR + peer * count - first)
            for start in range(0, part.PIECE, part.TILE):
                unit, element, inside = tile(first, start, part)
                at = in_whole(unit, element, part, to * NEAR + local, world.size, together_x)
                x = tl.load(address.of_rank(x_ptr, node * NEAR + peer, world) + at, mask=inside)
                tl.store(place + element, x, mask=inside)
        tl.debug_barrier()  # one thread sends what the others have stored
        arrived, nbytes = arrived_ptr + node * part.pieces + t, count * (NEAR * part.ITEM)
        source, target = sent + first * NEAR, slot(got, node * NEAR, part.n) + first * NEAR
        pl.put_signal(arrived, to * NEAR + local, world, dst=target, src=source, nbytes=nbytes)
    for task in range(pid, NODES * part.pieces, programs):
        i, t = task // part.pieces, task % part.pieces
        origin, first = (node + NODES - i) % NODES, tl.cast(t, tl.int64) * part.PIECE
        count = tl.minimum(part.n - first, part.PIECE)
        if i > 0:
            pl.wait(arrived_ptr + origin * part.pieces + t, launch, world)
        for j in range(NEAR):
            peer = (local + j) % NEAR
            place = slot(got, origin * NEAR, part.n) + (first * NEAR + peer * count - first)
            for start in range(0, part.PIECE, part.TILE):
                unit, element, inside = tile(first, start, part)
                if i > 0:
                    x = tl.load(place + element, mask=inside)
                else:  # from my own node
                    at = in_whole(unit, element, part, rank, world.size, together_x)
                    x = tl.load(address.of_rank(x_ptr, node * NEAR + peer, world) + at, mask=inside)
                at = in_whole(unit, element, part, origin * NEAR + peer, world.size, together_out)
                tl.store(out_ptr + at, x, mask=inside)
    signal_node(read_ptr + pid, world, NEAR)  # before overwrite: I have read the x of my node's ranks
    if NEAR > 1:
        pl.wait(read_ptr + pid, launch * (NEAR - 1), world)
    pl.quiet(world)  # before the next launch's signals; and what I have sent may be overwritten


# ---------------------------------------------------------------------------------------------------------------- host
def kept(
    world: World, kernel: str, part: Part, dtype: torch.dtype, shape: tuple[int, ...], counters: Mapping[str, int]
) -> tuple[SymmetricTensor, ...]:
    """The box of parts in a `shape`, and so many counters by name. Made once for each kernel, size of a part and size
    of a piece: all launches with them have the same pieces in the same programs."""

    def make() -> tuple[SymmetricTensor, ...]:
        box = empty(*shape, part.n, dtype=dtype, name=f"kernels.{kernel}_box", world=world)
        return box, *(signals(n, name=f"kernels.{kernel}_{name}", world=world) for name, n in counters.items())

    return world.keep(("pkt.kernels", "nodes", kernel, part.n, part.PIECE.value, dtype), make)


def _tasks(world: World, part: Part) -> int:
    """Pieces that a rank sends, or takes, from every node."""
    return world.nodes * part.pieces


def _gather_memory(world: World, kernel: str, part: Part, dtype: torch.dtype) -> tuple[SymmetricTensor, ...]:
    tasks = _tasks(world, part)
    there = world.node_size * num_programs(world, tasks)
    counters = {"arrived": tasks, "packed": part.pieces, "there": there}
    return kept(world, kernel, part, dtype, (2, world.nodes), counters)


def _scatter_memory(
    world: World, kernel: str, part: Part, dtype: torch.dtype, places: int = 1
) -> tuple[SymmetricTensor, ...]:
    """places: parts for each node."""
    tasks = _tasks(world, part)
    counters = {"arrived": tasks, **dict.fromkeys(("ready", "read"), num_programs(world, tasks))}
    return kept(world, kernel, part, dtype, (3, world.nodes * places), counters)


def gather_launch(world: World, rows: int, run: int, dtype: torch.dtype, block: int | None) -> Launch:
    """launch(x, out): the parts (rows, run) of all ranks in `out` (rows, size, run). Any tensors."""
    part = cut(world, rows, run, dtype, block)
    made = _gather_memory(world, "gather", part, dtype)
    return resident_launch(world, gather_kernel, _tasks(world, part), (*made, part), (world.node_size, False))


def answered_gather(world: World, kernel: str, part: Part, dtype: torch.dtype) -> Launch:
    """launch(x, out): the ranks' parts x in `out`, between two launches in which the rail's ranks send data. kernel:
    whose memory it is."""
    made = _gather_memory(world, kernel, part, dtype)
    return resident_launch(world, gather_kernel, _tasks(world, part), (*made, part), (world.node_size, True))


def scatter_launch(world: World, rows: int, run: int, dtype: torch.dtype, op: Op, block: int | None) -> Launch:
    """launch(x, out): this rank's part (rows, run) of the ranks' symmetric x (rows, size, run), reduced. Each node's
    sum is rounded to the dtype."""
    part = cut(world, rows, run, dtype, block)
    made = _scatter_memory(world, "scatter", part, dtype)
    return resident_launch(world, scatter_kernel, _tasks(world, part), (*made, part), (world.node_size, op, False))


def reduce_launch(world: World, n: int, dtype: torch.dtype, op: Op, block: int | None) -> Launch:
    """launch(x, out): the ranks' symmetric x (n,) reduced, on every rank: scatter, then gather, of parts of whole 16
    bytes, the last ones cut short. Each answers the other, so neither waits for its puts to complete."""
    line = 16 // dtype.itemsize
    run = triton.cdiv(triton.cdiv(n, world.size), line) * line
    part = cut(world, 1, run, dtype, block, n)
    key = "pkt.kernels", "nodes", "reduced", run, dtype
    device = world.torch_device
    total = world.keep(key, lambda: outside_pools(lambda: torch.empty(run, dtype=dtype, device=device), device))
    sums = _scatter_memory(world, "reduce_scatter", part, dtype)
    scatter = resident_launch(world, scatter_kernel, _tasks(world, part), (*sums, part), (world.node_size, op, True))
    gather = answered_gather(world, "reduce_gather", part, dtype)

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return gather(scatter(x, total), out)

    return launch


def exchange_launch(
    world: World, rows: int, run: int, together: Sequence[int], dtype: torch.dtype, block: int | None
) -> Launch:
    """launch(x, out): part `rank` of the ranks' symmetric x, each (rows, run), into `out`. together: how many runs of a
    part are in a row in x, and in `out`."""
    part = cut(world, rows, run, dtype, block)
    made = _scatter_memory(world, "exchange", part, dtype, world.node_size)
    return resident_launch(world, exchange_kernel, _tasks(world, part), (*made, part, *together), (world.node_size,))
