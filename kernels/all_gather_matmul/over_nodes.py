"""The form "nodes" of all_gather_matmul: A is gathered over the network and in the node while tiles are computed.

In one launch. Programs 0 .. num_comm_sms - 1 gather as shared.nodes.gather_kernel does: they put this rank's shard to
the rank of its rail on every other node, and load from the ranks of this node what has arrived there. They store it
into `whole`, in this rank's memory, and count the pieces of each row block that are there. What has come along this
rank's own rail stays in the box. The other programs compute: the tiles of this rank's own shard first, those of the
other ranks of its node, then those of far nodes, in the order in which evenly loaded nodes send. A tile waits for the
pieces of its row block. A program that has gathered its share computes, too.

(N - 1) |a| bytes leave each rank over the network, (W - N) |a| in the node. On GPUs it has run on two nodes of one
host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import sync
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.tensor import SymmetricTensor

from ..declaration import Call, Launch
from ..shared import nodes, products
from ..shared.checks import aligned, stored
from ..shared.grid import COPY_BYTES, num_programs
from ..shared.tile_product import accumulate, columns_each, finish, stack, store_tile, weights
from .rules import CALL

AT_ONCE = 4 * COPY_BYTES
"""Bytes that a program copies at a time: few do beside a product, so each has more on the way."""


# ------------------------------------------------------------------------------------------------------ device
class Work(NamedTuple):
    """What the kernel works on."""

    a_ptr: Any  # (m, k) this rank's; only this rank reads it
    b_ptr: Any  # (K, N), or (N, K) if TRANSPOSED, this rank's; K is k, or size * k if COLUMNS
    bias_ptr: Any  # (N,) this rank's, or None
    out_ptr: Any  # (size * m, N), or (m, N) if COLUMNS, this rank's; half as many columns with swiglu
    whole_ptr: Any  # (size, m, k) this rank's: the shards of the others, those of its rail only if WHOLE
    box_ptr: Any  # of these four see shared.nodes.gather_kernel, whose programs are here num_comm_sms
    arrived_ptr: Any
    packed_ptr: Any
    there_ptr: Any
    ready_ptr: Any  # int32 (size, num_m) on every rank, for itself: pieces of each row block that are in whole
    queue_ptr: Any  # int32, this rank's
    m: Any
    N: Any
    k: Any
    num_comm_sms: Any
    NEAR: tl.constexpr  # ranks of a node
    GATHERED: tl.constexpr  # by the launch before, for another weight: this kernel only computes
    WHOLE: tl.constexpr  # the caller wants A: what comes along my rail goes from the box into `whole`, too
    COLUMNS: tl.constexpr
    TMA: tl.constexpr
    TRANSPOSED: tl.constexpr
    EPILOGUE: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    GROUP: tl.constexpr


@triton.jit
def _place(task, tiles, world, NEAR: tl.constexpr):
    """Tile `task` of all shards, each of so many tiles: (source, tile of its shard). My own shard's tiles come first,
    then those of the other ranks of my node, then node by node. The ranks of a node take turns, because their pieces
    come together."""
    OTHERS: tl.constexpr = max(NEAR - 1, 1)
    near = task - tiles  # among those of the other ranks of my node
    far = near - (NEAR - 1) * tiles  # among those of far nodes
    here = far < 0
    i = tl.where(here, 0, 1 + far // (NEAR * tiles))
    j = tl.where(here, 1 + near % OTHERS, far % NEAR)
    index = tl.where(here, near // OTHERS, far % (NEAR * tiles) // NEAR)
    own = near < 0
    return nodes.source_at(i, tl.where(own, 0, j), world, NEAR), tl.where(own, task, index)


@triton.jit
def _half(p, part, world, launch):
    """The half of my box that a launch uses."""
    return nodes.slot(p.box_ptr, (launch & 1) * (world.size // p.NEAR), part.n)


@triton.jit
def _add_shard(acc, source, b_index, i, col, p, part, world, launch, b):
    """acc + row block i of shard `source`, once it is here, times matrix b_index of b."""
    rank = tl.cast(world.rank, tl.int32)
    a_ptr = p.a_ptr
    if source != rank:
        first = tl.cast(i, tl.int64) * p.BLOCK_M * p.k
        last = tl.minimum(first + tl.cast(p.BLOCK_M, tl.int64) * p.k, part.n) - 1
        first_piece, last_piece = tl.cast(first // part.PIECE, tl.int32), tl.cast(last // part.PIECE, tl.int32)
        if (source % p.NEAR == rank % p.NEAR) & (not p.WHOLE):
            origin = source // p.NEAR
            if not p.GATHERED:
                for t in range(first_piece, last_piece + 1):
                    pl.wait(p.arrived_ptr + origin * part.pieces + t, launch, world)
            a_ptr = nodes.slot(_half(p, part, world, launch), origin, part.n)
        else:
            if not p.GATHERED:
                pieces = last_piece - first_piece + 1
                pl.wait(p.ready_ptr + source * tl.cdiv(p.m, p.BLOCK_M) + i, launch * pieces, world)
            a_ptr = nodes.slot(p.whole_ptr, source, part.n)
    # Made for each shard, as in plain.py.
    a = stack(a_ptr, 1, p.m, p.k, p.k, p.BLOCK_M, p.BLOCK_K, p.TMA)
    shards: tl.constexpr = world.size if p.COLUMNS else 1
    return accumulate(
        acc, a, 0, b, b_index, shards, i * p.BLOCK_M, col, p.m, p.N, p.k, p.k, p.TMA, p.TRANSPOSED, p.BLOCK_K
    )


@triton.jit
def _compute(task, p, part, world, launch, b, out):
    num_m = tl.cdiv(p.m, p.BLOCK_M)
    num_n = tl.cdiv(p.N, p.BLOCK_N)
    N = p.N // columns_each(p.EPILOGUE)
    acc = tl.zeros((p.BLOCK_M, p.BLOCK_N), tl.float32)
    if p.COLUMNS:
        i, j = pl.order.supergroup(task, num_m, num_n, p.GROUP)
        for d in range(world.size):
            source = nodes.source_at(d // p.NEAR, d % p.NEAR, world, p.NEAR)
            acc = _add_shard(acc, source, source, i, j * p.BLOCK_N, p, part, world, launch, b)
        tile = finish(acc, p.bias_ptr, j * p.BLOCK_N, p.N, p.EPILOGUE)
        store_tile(out, 0, tile, i * p.BLOCK_M, j * tile.shape[1], p.m, N, N, p.TMA)
    else:
        source, index = _place(task, num_m * num_n, world, p.NEAR)
        i = index // num_n
        j = index % num_n
        acc = _add_shard(acc, source, 0, i, j * p.BLOCK_N, p, part, world, launch, b)
        tile = finish(acc, p.bias_ptr, j * p.BLOCK_N, p.N, p.EPILOGUE)
        store_tile(out, source, tile, i * p.BLOCK_M, j * tile.shape[1], p.m, N, N, p.TMA)


@triton.jit
def _gather(pid, p, part, world, launch, b, out):
    """My share of the gather, as program `pid` of those that gather."""
    half = _half(p, part, world, launch)
    mine = nodes.slot(half, tl.cast(world.rank, tl.int32) // p.NEAR, part.n)
    nodes.send_part(p.a_ptr, mine, p.packed_ptr, p.arrived_ptr, launch, pid, p.num_comm_sms, part, world, p.NEAR)
    if p.NEAR > 1 or p.WHOLE:
        nodes.take_parts(
            p.whole_ptr, half, p.arrived_ptr, p.there_ptr, launch, pid, p.num_comm_sms, part, world, p.NEAR,
            p.ready_ptr, tl.cast(p.BLOCK_M, tl.int64) * p.k, p.WHOLE,
        )  # fmt: skip


@triton.jit
def nodes_kernel(p, part, world):
    num_m = tl.cdiv(p.m, p.BLOCK_M)
    shards: tl.constexpr = 1 if p.COLUMNS else world.size
    tasks = shards * num_m * tl.cdiv(p.N, p.BLOCK_N)
    b = weights(p.b_ptr, world.size if p.COLUMNS else 1, p.k, p.N, p.BLOCK_K, p.BLOCK_N, p.TMA, p.TRANSPOSED)
    EACH: tl.constexpr = columns_each(p.EPILOGUE)
    out = stack(p.out_ptr, shards, p.m, p.N // EACH, p.N // EACH, p.BLOCK_M, p.BLOCK_N // EACH, p.TMA)
    if p.GATHERED:
        launch = sync.peek_epoch(p.there_ptr) - 1
        for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
            _compute(task, p, part, world, launch, b, out)
    else:
        launch = pl.epoch(p.there_ptr, world)
        pl.lcsc(
            _compute, _gather, (p, part, world, launch, b, out), tasks, p.num_comm_sms, p.queue_ptr, launch,
            p.num_comm_sms,
        )  # fmt: skip
        if tl.program_id(0) < p.num_comm_sms:
            pl.quiet(world)  # before the next launch's signals


# -------------------------------------------------------------------------------------------------------- host
class _Space(NamedTuple):
    """Where A is gathered, and by whom."""

    whole: SymmetricTensor
    made: tuple[SymmetricTensor, ...]  # box and counters, as Work has them
    part: nodes.Part
    programs: int
    num_comm_sms: int


def _space(call: Call, *, keep: bool = False) -> _Space:
    """keep: for launches with WHOLE, whose counters count more."""
    world, tiles, dtype, (m, k) = call.world, call["tiles"], call.dtype, call["a"].shape
    num_m, size = triton.cdiv(m, tiles.block_m), world.size
    tasks = (1 if call["shard"] == "columns" else size) * num_m * triton.cdiv(call["b"].shape[1], tiles.block_n)
    programs = num_programs(world, tasks + call["num_comm_sms"])
    num_comm_sms = max(1, min(call["num_comm_sms"], programs - 1))
    rows = call["push_rows"] * tiles.block_m
    piece = rows * k if rows else nodes.put_bytes(m * k * dtype.itemsize, num_comm_sms) // dtype.itemsize
    block = triton.next_power_of_2(min(piece, m * k, 1 << 30))
    part = nodes.cut(world, 1, m * k, dtype, block, at_once=AT_ONCE)

    def make() -> tuple[SymmetricTensor, ...]:
        whole = empty(size, m, k, dtype=dtype, name=f"{CALL}.whole", world=world)
        box = empty(2, world.nodes, part.n, dtype=dtype, name=f"{CALL}.box", world=world)
        counters = {
            "arrived": world.nodes * part.pieces, "packed": part.pieces, "there": world.node_size * num_comm_sms,
            "ready": size * num_m, "queue": 1,
        }  # fmt: skip
        return whole, box, *(signals(n, name=f"{CALL}.{name}", world=world) for name, n in counters.items())

    # By what the counters count, as in plain.py.
    key = CALL, "nodes", keep, m, k, dtype, tasks, programs, num_comm_sms, tiles.block_m, part.PIECE.value
    whole, *made = world.keep(key, make)
    return _Space(whole, tuple(made), part, programs, num_comm_sms)


def gather_and_multiply(call: Call) -> Launch:
    """The plan of mode "nodes"."""
    found = _space(call)
    return _launch(call, found, found.programs, gathered=False)


def gather_whole(call: Call) -> Launch:
    """The same, which leaves the shards of all others in `whole(call)`."""
    found = _space(call, keep=True)
    return _launch(call, found, found.programs, gathered=False, keep=True)


def whole(call: Call) -> SymmetricTensor:
    """The shards of the others, (size, m, k), after each launch of `gather_whole(call)`."""
    return _space(call, keep=True).whole


def several(calls: Sequence[Call]) -> Callable[..., None]:
    """The same for several weights: the first launch gathers A, the others only compute."""
    lead, *others = calls
    found = _space(lead)
    return products.in_turn(gather_and_multiply(lead), *(_computing(call, found) for call in others))


def _computing(call: Call, found: _Space) -> Launch:
    """launch(a, b, out, bias): a kernel that only computes, behind one that has gathered A."""
    world, m, tiles = call.world, call["a"].shape[0], call["tiles"]
    shards = 1 if call["shard"] == "columns" else world.size
    tasks = shards * triton.cdiv(m, tiles.block_m) * triton.cdiv(call["b"].shape[1], tiles.block_n)
    return _launch(call, found, num_programs(world, tasks), gathered=True)


def _launch(call: Call, found: _Space, programs: int, *, gathered: bool, keep: bool = False) -> Launch:
    """launch(a, b, out, bias): the kernel with so many programs. keep: all others' shards come into `whole`."""
    world, (m, k), tiles, (rows, transposed) = call.world, call["a"].shape, call["tiles"], stored(call["b"])
    same = Work(
        None, None, None, None, found.whole, *found.made, m=m, N=call["b"].shape[1], k=k,
        num_comm_sms=found.num_comm_sms, NEAR=tl.constexpr(world.node_size), GATHERED=tl.constexpr(gathered),
        WHOLE=tl.constexpr(keep), COLUMNS=tl.constexpr(call["shard"] == "columns"),
        TMA=tl.constexpr(aligned(call["a"], rows, call["out"])),
        TRANSPOSED=tl.constexpr(transposed), EPILOGUE=tl.constexpr(call["epilogue"]),
        BLOCK_M=tl.constexpr(tiles.block_m), BLOCK_N=tl.constexpr(tiles.block_n), BLOCK_K=tl.constexpr(tiles.block_k),
        GROUP=tl.constexpr(tiles.group),
    )[4:]  # fmt: skip
    start = cooperative_launch(world, nodes_kernel, (programs,), **tiles.launch_options())

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        start(Work(a, b, bias, out, *same), found.part, world.device)
        return out

    return launch
