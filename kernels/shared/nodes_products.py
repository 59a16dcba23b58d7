"""Products whose sums cross nodes: each tile is added in the node as soon as its ranks have it, and then sent.

Rank r holds A_r (M, k) and B_r (k, N); rows [r * m, (r + 1) * m) of the sum of A_r @ B_r are part r. For the ranks of
its rail a rank adds what its node has. On the LCSC template: a compute task stores a tile of a part into this rank's
own symmetric memory and signals the rank of this node on that part's rail. A communicate task waits until all ranks of
the node have a tile, adds them in fp32, and puts the sum, rounded, to the tile's owner; or, of its own part, adds what
came from the other nodes, in a fixed order. Parts of far nodes are computed first, this node's last. All ranks of a
node compute tiles in one order, so that a tile is there on all of them at about the same time.

Where a node has one rank, nothing is added in it. The program that has computed a tile then sends it, or adds to it
what came, and no program only communicates.

Memory that peers access has halves, which launches use in turn. A rank ends a launch when it has a tile of every rank
of its node and of its rail from that launch. So when launch l + 2 begins on one rank, launch l has ended on all that
use its memory. The tiles are kept one behind the other, so that a tile is one put. On GPUs it has run on two
nodes of one host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.pool import outside_pools
from pkt.runtime.memory.tensor import SymmetricTensor

from ..declaration import Call, Launch
from . import nodes
from .checks import aligned, stored
from .grid import num_programs
from .tile_product import accumulate, finish, stack, store_tile, tile_pointers, weights

NUM_COMM_SMS = 32
"""Programs that communicate where the caller gives none. all_gather_matmul at 8192 over two nodes of one H200 each: 1 %
slower than with 24, faster than with 16 and 48 (benchmarks/results/nodes.json). Over a network nothing was measured."""


def gathering_sms(node_size: int) -> int:
    """The same for all_gather_matmul, where ranks of a node pass on to each other what comes over the network. Over two
    nodes of two H200 each, 48 programs take 0.87 times as long as 32, and 32 take 0.85 times as long as 24
    (nodes_4.json). More were not measured."""
    return NUM_COMM_SMS if node_size == 1 else 48


class Work(NamedTuple):
    """What the kernel works on."""

    a_ptr: Any  # (M, k) this rank's
    b_ptr: Any  # (k, N), or (N, k) if TRANSPOSED, this rank's
    bias_ptr: Any  # (N,) this rank's, or None
    out_ptr: Any  # (m, N) this rank's
    partial_ptr: Any  # (2, nodes, tiles, NEAR, BLOCK_M, BLOCK_N) on every rank, halves in turn; [:, k, t, l]: this
    # rank's tile t of the part of local rank l of node k, which the ranks of this node read; None where NEAR is 1
    box_ptr: Any  # (3, nodes, tiles, BLOCK_M, BLOCK_N) on every rank; [0, k]: sums for my rail's rank on node k, [1:,
    # k]: those that come from it, halves in turn
    ready_ptr: Any  # int32 (NEAR, nodes, tiles) on every rank; [l, k, t]: the launch whose tile t, of the part of my
    # rail's rank on node k, local rank l has
    arrived_ptr: Any  # int32 (nodes, tiles) on every rank: the launch whose tile has come from a node
    queue_ptr: Any  # int32, this rank's
    M: Any
    m: Any
    N: Any
    k: Any
    num_comm_sms: Any
    NEAR: tl.constexpr  # ranks of a node
    ANSWERED: tl.constexpr  # as in nodes.gather_kernel
    TMA: tl.constexpr
    TRANSPOSED: tl.constexpr
    EPILOGUE: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    GROUP: tl.constexpr
    ITEM: tl.constexpr  # bytes of an element


@triton.jit
def _tiles(p):
    """Tiles of a part."""
    return tl.cdiv(p.m, p.BLOCK_M) * tl.cdiv(p.N, p.BLOCK_N)


@triton.jit
def _place(t, p):
    """Tile t of a part: (row in the part, column)."""
    i, j = pl.order.supergroup(t, tl.cdiv(p.m, p.BLOCK_M), tl.cdiv(p.N, p.BLOCK_N), p.GROUP)
    return i * p.BLOCK_M, j * p.BLOCK_N


@triton.jit
def _came(origin, t, p, world, launch):
    """Where tile t of my part comes to from a node."""
    NODES: tl.constexpr = world.size // p.NEAR
    return nodes.slot(p.box_ptr, ((1 + (launch & 1)) * NODES + origin) * _tiles(p) + t, p.BLOCK_M * p.BLOCK_N)


@triton.jit
def _send(to, t, p, world, launch):
    """Put tile t of the part of my rail's rank on node `to`, from where it leaves."""
    tiles = _tiles(p)
    rank = tl.cast(world.rank, tl.int32)
    node, local = rank // p.NEAR, rank % p.NEAR
    row, _ = _place(t, p)
    nbytes = tl.minimum(p.m - row, p.BLOCK_M) * p.BLOCK_N * p.ITEM
    arrived = p.arrived_ptr + node * tiles + t
    target, source = _came(node, t, p, world, launch), nodes.slot(p.box_ptr, to * tiles + t, p.BLOCK_M * p.BLOCK_N)
    pl.put_signal(arrived, to * p.NEAR + local, world, dst=target, src=source, nbytes=nbytes)


@triton.jit
def _compute_alone(task, p, world, launch, a, b, leaving):
    """A tile of a part, to its owner or into `out`, where each rank is a node."""
    tiles = _tiles(p)
    rank = tl.cast(world.rank, tl.int32)
    to, t = (rank + 1 + task // tiles) % world.size, task % tiles
    row, col = _place(t, p)
    acc = tl.zeros((p.BLOCK_M, p.BLOCK_N), tl.float32)
    acc = accumulate(acc, a, 0, b, 0, 1, to * p.m + row, col, p.M, p.N, p.k, p.k, p.TMA, p.TRANSPOSED, p.BLOCK_K)
    if to == rank:
        ptrs, there = tile_pointers(p.out_ptr, row, col, p.m, p.N, p.N, p.BLOCK_M, p.BLOCK_N)
        at = tl.arange(0, p.BLOCK_M)[:, None] * p.BLOCK_N + tl.arange(0, p.BLOCK_N)[None, :]
        for d in range(1, world.size):
            origin = (rank + world.size - d) % world.size
            pl.wait(p.arrived_ptr + origin * tiles + t, launch, world)
            acc += tl.load(_came(origin, t, p, world, launch) + at, mask=there, other=0).to(tl.float32)
        acc = finish(acc, p.bias_ptr, col, p.N, p.EPILOGUE)
        tl.store(ptrs, acc.to(p.out_ptr.dtype.element_ty), mask=there)
    else:
        store_tile(leaving, to * tiles + t, acc, 0, 0, p.BLOCK_M, p.BLOCK_N, p.BLOCK_N, True)
        _send(to, t, p, world, launch)


@triton.jit
def _compute(task, p, world, launch, a, b, partial):
    """A tile of a part; the parts of a node take turns."""
    tiles = _tiles(p)
    NODES: tl.constexpr = world.size // p.NEAR
    rank = tl.cast(world.rank, tl.int32)
    node, local = rank // p.NEAR, rank % p.NEAR
    to = (node + 1 + task // (tiles * p.NEAR)) % NODES
    t, owner = task % (tiles * p.NEAR) // p.NEAR, task % p.NEAR
    row, col = _place(t, p)
    acc = tl.zeros((p.BLOCK_M, p.BLOCK_N), tl.float32)
    first = (to * p.NEAR + owner) * p.m + row
    acc = accumulate(acc, a, 0, b, 0, 1, first, col, p.M, p.N, p.k, p.k, p.TMA, p.TRANSPOSED, p.BLOCK_K)
    store_tile(partial, (to * tiles + t) * p.NEAR + owner, acc, 0, 0, p.BLOCK_M, p.BLOCK_N, p.BLOCK_N, True)
    pl.signal(p.ready_ptr + (local * NODES + to) * tiles + t, node * p.NEAR + owner, world)


@triton.jit
def _communicate(task, p, world, launch, a, b, partial):
    """Tile t of the part of my rail's rank on a node: the node's sum for it, and if it is mine, those of all nodes."""
    tiles = _tiles(p)
    NODES: tl.constexpr = world.size // p.NEAR
    TILE: tl.constexpr = p.BLOCK_M * p.BLOCK_N
    ROWS: tl.constexpr = min(p.BLOCK_M, 32)  # at a time: a whole tile of each rank would not fit the registers
    rank = tl.cast(world.rank, tl.int32)
    node, local = rank // p.NEAR, rank % p.NEAR
    to, t = (node + 1 + task // tiles) % NODES, task % tiles
    row, col = _place(t, p)
    rows = tl.minimum(p.m - row, p.BLOCK_M)
    mine = nodes.slot(p.partial_ptr, (((launch & 1) * NODES + to) * tiles + t) * p.NEAR + local, TILE)
    sent = nodes.slot(p.box_ptr, to * tiles + t, TILE)
    for near in tl.static_range(0, p.NEAR):
        pl.wait(p.ready_ptr + (near * NODES + to) * tiles + t, launch, world)
    if to == node:
        for d in range(1, NODES):
            pl.wait(p.arrived_ptr + (node + NODES - d) % NODES * tiles + t, launch, world)
    for start in range(0, rows, ROWS):
        at = (start + tl.arange(0, ROWS))[:, None] * p.BLOCK_N + tl.arange(0, p.BLOCK_N)[None, :]
        inside = at < rows * p.BLOCK_N
        total = nodes.node_sum(mine, at, inside, world, p.NEAR, "sum")
        if to == node:
            for d in range(1, NODES):
                origin = (node + NODES - d) % NODES
                total += tl.load(_came(origin, t, p, world, launch) + at, mask=inside, other=0).to(tl.float32)
            total = finish(total, p.bias_ptr, col, p.N, p.EPILOGUE)
            ptrs, there = tile_pointers(p.out_ptr, row + start, col, p.m, p.N, p.N, ROWS, p.BLOCK_N)
            tl.store(ptrs, total.to(p.out_ptr.dtype.element_ty), mask=there)
        else:
            tl.store(sent + at, total.to(p.box_ptr.dtype.element_ty), mask=inside)
    if to != node:
        tl.debug_barrier()  # one thread sends what the others have stored
        _send(to, t, p, world, launch)


@triton.jit
def product_kernel(p, world):
    launch = pl.epoch(p.ready_ptr, world)
    tiles = _tiles(p)
    a = stack(p.a_ptr, 1, p.M, p.k, p.k, p.BLOCK_M, p.BLOCK_K, p.TMA)
    b = weights(p.b_ptr, 1, p.k, p.N, p.BLOCK_K, p.BLOCK_N, p.TMA, p.TRANSPOSED)
    if p.NEAR == 1:
        leaving = stack(p.box_ptr, world.size * tiles, p.BLOCK_M, p.BLOCK_N, p.BLOCK_N, p.BLOCK_M, p.BLOCK_N, True)
        for task in range(tl.program_id(0), world.size * tiles, tl.num_programs(0)):
            _compute_alone(task, p, world, launch, a, b, leaving)
    else:
        half = nodes.slot(p.partial_ptr, (launch & 1) * world.size * tiles, p.BLOCK_M * p.BLOCK_N)
        partial = stack(half, world.size * tiles, p.BLOCK_M, p.BLOCK_N, p.BLOCK_N, p.BLOCK_M, p.BLOCK_N, True)
        pl.lcsc(
            _compute, _communicate, (p, world, launch, a, b, partial), world.size * tiles,
            world.size // p.NEAR * tiles, p.queue_ptr, launch, p.num_comm_sms,
        )  # fmt: skip
    if not p.ANSWERED:
        pl.quiet(world)  # before the next launch's signals; and what I have sent may be overwritten


# ---------------------------------------------------------------------------------------------------------------- host
def scatter(call: Call) -> Launch:
    """launch(a, b, out, bias): part `rank` of the sum, with bias and epilogue. Takes `tiles` and `num_comm_sms`."""
    return _scattered(call, call["a"].shape[0], answered=False)


def reduce(call: Call) -> Launch:
    """The same for the whole sum: its parts, the last ones cut short, are gathered in a second launch. Each launch
    answers the other, so neither waits for its puts to complete."""
    world, (M, N), dtype = call.world, call.shape, call.dtype
    scattered = _scattered(call, M, answered=True)
    part = nodes.cut(world, 1, triton.cdiv(M, world.size) * N, dtype, None, M * N)
    key, device = ("pkt.kernels", "nodes", "product", part.n, dtype), world.torch_device
    total = world.keep(key, lambda: outside_pools(lambda: torch.empty(part.n, dtype=dtype, device=device), device))
    gather = nodes.answered_gather(world, "product_gather", part, dtype)

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        scattered(a, b, total, bias)
        return gather(total, out)

    return launch


def _scattered(call: Call, M: int, *, answered: bool) -> Launch:
    """launch(a, b, out, bias): part `rank` of the product's M rows into `out`, which has room for whole parts."""
    world, a, tiles, dtype, (rows, transposed) = call.world, call["a"], call["tiles"], call.dtype, stored(call["b"])
    m, N, k, size = triton.cdiv(M, world.size), call["b"].shape[1], a.shape[1], world.size
    count = triton.cdiv(m, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    programs = num_programs(world, size * count + call["num_comm_sms"])

    def make() -> tuple[SymmetricTensor | None, ...]:
        tile = count, tiles.block_m, tiles.block_n
        alone = world.node_size == 1
        partial = None if alone else empty(2, size, *tile, dtype=dtype, name=f"{call.name}.partial", world=world)
        box = empty(3, world.nodes, *tile, dtype=dtype, name=f"{call.name}.box", world=world)
        counters = {"ready": size * count, "arrived": world.nodes * count, "queue": 1}
        made = (signals(n, name=f"{call.name}.{name}", world=world) for name, n in counters.items())
        return partial, box, *made

    buffers = world.keep((call.name, "nodes", m, N, dtype, programs, tiles[:2]), make)
    same = Work(
        None, None, None, None, *buffers, M=M, m=m, N=N, k=k, num_comm_sms=min(call["num_comm_sms"], programs - 1),
        NEAR=tl.constexpr(world.node_size), ANSWERED=tl.constexpr(answered), TMA=tl.constexpr(aligned(a, rows)),
        TRANSPOSED=tl.constexpr(transposed), EPILOGUE=tl.constexpr(call["epilogue"]),
        BLOCK_M=tl.constexpr(tiles.block_m), BLOCK_N=tl.constexpr(tiles.block_n), BLOCK_K=tl.constexpr(tiles.block_k),
        GROUP=tl.constexpr(tiles.group), ITEM=tl.constexpr(dtype.itemsize),
    )[4:]  # fmt: skip
    start = cooperative_launch(world, product_kernel, (programs,), **tiles.launch_options())

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        start(Work(a, b, bias, out, *same), world.device)
        return out

    return launch
