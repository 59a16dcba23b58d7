"""All-gather along any dimension: every rank ends with the shards of all, in rank order, in the layout of the whole.

push: each rank reads its shard once and stores it into every rank's `out`.
pull: each rank loads every rank's `x` into its own `out`.
copy: push by the copy engines, a copy a peer (see shared.copies): for shards of many megabytes.
inbox: push into inboxes, from where each rank takes what came (see shared.inbox): no tensor need be symmetric.
low_latency: push in words of 12 bytes of data and 4 of flag, see shared.flagged: no barrier, and no tensor need be
    symmetric. For shards that are small, of elements of 16 or 32 bits.
nodes: the only form in a world of several nodes: over the network along the rail, then load from the ranks of the node,
    see shared.nodes. On GPUs it has run on two nodes of one host.

In the others (W - 1) * n * itemsize bytes leave and enter each rank, a third more in low_latency. Each run of the
shard goes straight to its place (see shared.runs): no transposed copy. Programs of one index on all ranks meet in two
barriers, except in inbox and low_latency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from .declaration import Call, Case, Form, Launch, Operand, block
from .gradients import Backward, Gradients, Recorded
from .operator import Operator
from .shared import copies, flagged, inbox, nodes, nodes_rules, runs
from .shared.checks import NUMBERS, adds
from .shared.grid import BLOCKED, barrier_counters, resident_launch
from .shared.replays import in_one_call

COPIED_BYTES = 256 << 20
"""Least `out` for which mode None takes copy. On 4 x H200 it takes 4.15 ms for 2 GiB, push 4.59; for 128 MiB
0.299 and 0.297 (benchmarks/results/collectives.json)."""


def reference(rank: int, x: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """What `rank` gets from the ranks' `x`."""
    return torch.cat([shard.reshape(shard.shape or (1,)) for shard in x], dim)


@triton.jit
def push_kernel(
    x_ptr,  # (rows, run) this rank's shard; only this rank reads it
    out_ptr,  # (rows, size, run) on every rank; rank r stores [:, r] of all of them
    bar_ptr,  # int32 (programs,) on every rank
    shard,  # Runs
    world,
):
    pid = tl.program_id(0)
    pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank is done with what it had in `out`
    for t in range(pid, shard.tiles, tl.num_programs(0)):
        row, col, inside = runs.tile(t, shard)
        x = tl.load(x_ptr + runs.whole(row, col, shard), mask=inside)
        place = out_ptr + runs.beside(row, col, shard, world.rank, world.size)
        for i in tl.static_range(1, world.size + 1):
            pl.store(place, x, (world.rank + i) % world.size, world, mask=inside)
    pl.barrier(bar_ptr + pid, world)  # publish: this program's tiles are there on every rank


@triton.jit
def pull_kernel(
    x_ptr,  # (rows, run) on every rank; all ranks read it
    out_ptr,  # (rows, size, run) this rank's
    bar_ptr,  # int32 (programs,) on every rank
    shard,  # Runs
    world,
):
    pid = tl.program_id(0)
    pl.barrier(bar_ptr + pid, world)  # publish: every rank's shard is complete
    for t in range(pid, shard.tiles, tl.num_programs(0)):
        row, col, inside = runs.tile(t, shard)
        for i in tl.static_range(1, world.size + 1):
            peer = (world.rank + i) % world.size
            x = pl.load(x_ptr + runs.whole(row, col, shard), peer, world, mask=inside)
            tl.store(out_ptr + runs.beside(row, col, shard, peer, world.size), x, mask=inside)
    pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read my shard


def all_gather(
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    dim: int = 0,
    mode: Literal["push", "pull", "copy", "inbox", "low_latency", "nodes"] | None = None,
    block: int | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """The ranks' `x` one after the other along dimension `dim`, on every rank. Collective.

    x: the same shape and dtype on every rank. out: x's shape with size times its dimension `dim`, of x's dtype; a new
    tensor where None. Unless pulled, `x` may be this rank's own place in `out` where that is contiguous. mode: a form
    that the top of kernels/all_gather.py describes. "push" and "copy" need a symmetric `out`, "pull" a symmetric `x`,
    "low_latency" elements of 16 or 32 bits. None chooses by operands and size, see `default`. block: elements a program
    moves at a time, a power of two; none with "copy". Returns `out`, complete; `x` may be overwritten at once. Tensors
    may have any strides. Without `mode` a plain tensor is copied where the form needs a symmetric one.

    Symmetric memory kept: a copied tensor's bytes, rounded up to a power of two; low_latency 8 / 3 * (size - 1) times
    x's bytes, rounded up to a power of two, each power once and with all_reduce; inbox as push of reduce_scatter, and
    with it; nodes twice x's bytes for each node, once for each size; the others nothing for data. Raises NotSymmetric,
    ShapeError, DtypeError, CollectiveMismatch.
    """
    return OPERATOR((x, out), (dim, mode, block), world)


# -------------------------------------------------------------------------------------------------------------- host
def gathered(call: Call) -> tuple[int, ...]:
    """The shape of the result."""
    shape, dim = call["x"].shape, call["dim"]
    return (*shape[:dim], call.world.size * shape[dim], *shape[dim + 1 :]) if shape else (call.world.size,)


def default(call: Call) -> str:
    """Flagged words for little; else push or copy into a symmetric `out`; else pull from a symmetric x; else inbox."""
    x, world = call["x"], call.world
    if flagged.taken(call, flagged.few(x.nbytes * max(world.size - 1, 1), world.size)):
        return "low_latency"
    run = runs.around(x.shape, call["dim"])[1]
    return moved(call, copies.least(COPIED_BYTES, run, x.element_size()))


def moved(call: Call, copied: int) -> str:
    """push, pull, copy or inbox. copied: bytes of `out` from which it is copy."""
    if isinstance(call["out"], SymmetricTensor):
        return "copy" if call.given.get("block") is None and call["out"].nbytes >= copied else "push"
    return "pull" if isinstance(call["x"], SymmetricTensor) else "inbox"


def _through_registers(kernel: object) -> Callable[[Call], Launch]:
    def plan(call: Call) -> Launch:
        x, world = call["x"], call.world
        shard = runs.runs(*runs.around(x.shape, call["dim"]), x.dtype, call["block"])
        return resident_launch(world, kernel, shard.tiles, (barrier_counters(world), shard))

    return plan


def _through_inboxes(call: Call) -> Launch:
    rows, run = runs.around(call["x"].shape, call["dim"])
    return inbox.exchange_launch(call.world, rows, run, (1, 1), 1, call.dtype, call["block"])


def _by_copy_engines(call: Call) -> Launch:
    x, out, world = call["x"], call["out"], call.world
    rows, run = runs.around(x.shape, call["dim"])
    shard, place = copies.layout(rows, run), copies.layout(rows, world.size, run)[:, world.rank]
    there = out.data_ptr() <= x.data_ptr() < out.data_ptr() + out.nbytes  # x is in its place already
    peers = [(world.rank + d) % world.size for d in range(1, world.size + (not there))]
    boxes = [box for p in peers for box in copies.boxes(p, place, shard, x.dtype.itemsize)]
    return copies.exchange_launch(world, boxes)


def _in_flagged_words(call: Call) -> Launch:
    run = runs.around(call["x"].shape, call["dim"])[1]
    return flagged.gather_launch(call.world, call["x"], run, call["block"])


def _over_nodes(call: Call) -> Launch:
    return nodes.gather_launch(call.world, *runs.around(call["x"].shape, call["dim"]), call.dtype, call["block"])


def own_place(call: Call) -> int | None:
    """The part of `out` that `x` may be."""
    rows = runs.around(call["x"].shape, call["dim"])[0]
    return call.world.rank if (rows == 1 or call.world.size == 1) and call.mode != "pull" else None


def backward(call: Recorded) -> Gradients:
    """The gradient of x, from that of the result. Collective."""
    grad = call.operator("reduce_scatter", call.grad, dim=call["dim"])
    return {"x": grad.view(call.shape("x"))}


OPERATOR = Operator(
    all_gather,
    tensors={"x": Operand("...", NUMBERS)},
    result=gathered,
    arguments={"dim": runs.axis("x")},
    settings={"block": block},
    forms={
        "push": Form(
            _through_registers(push_kernel), "store into every rank", "(W - 1) |x|",
            symmetric=("out",), **BLOCKED,
        ),
        "pull": Form(
            _through_registers(pull_kernel), "load from every rank", "(W - 1) |x|",
            symmetric=("x",), **BLOCKED,
        ),
        "copy": Form(
            in_one_call(_by_copy_engines), "push by the copy engines", "(W - 1) |x|", symmetric=("out",)
        ),
        "inbox": Form(
            _through_inboxes, "store into every rank's inbox, and take from mine", "(W - 1) |x|", **BLOCKED
        ),
        "low_latency": Form(
            _in_flagged_words, "words of data and flag to every rank, no barrier", "4 / 3 (W - 1) |x|",
            dtypes=flagged.DTYPES, fits=flagged.fits, **BLOCKED,
        ),
    },
    across={
        "nodes": Form(
            _over_nodes, "over the network along its rail, then load from the ranks of the node",
            "(N - 1) |x| over the network, (W - N) |x| in the node", fits=nodes.fits,
            space=nodes_rules.gather_space, seconds=nodes_rules.gather_seconds, **BLOCKED,
        ),
    },
    default=default,
    reference=reference,
    place=own_place,
    exact=True,
    backward=Backward(backward, "`reduce_scatter`", refuses=adds),
    cases=(
        Case(shapes={"x": (4, 10)}, arguments={"mode": "push"}, ranks=4),
        Case(shapes={"x": (4, 10)}, arguments={"mode": "pull", "dim": 1}),
        Case(shapes={"x": (4, 10)}, arguments={"mode": "copy", "dim": 1}),
        # More tiles than belong to a signal, which has 256 elements.
        Case(shapes={"x": (2, 300)}, arguments={"mode": "inbox", "dim": 1, "block": 128}, sms=1),
        Case(shapes={"x": (4, 10)}, arguments={"mode": "low_latency", "dim": 1}, launches=3),
        Case(shapes={"x": (4, 10)}, arguments={"mode": "low_latency"}, ranks=2, launches=3),
        Case(shapes={"x": (3, 1, 5)}, arguments={"dim": -2}, explore=False),
        Case(shapes={"x": ()}, explore=False),
        # One piece, so that one program packs it and another sends it.
        Case(shapes={"x": (2, 7)}, arguments={"mode": "nodes", "dim": 1}, ranks=4, node_size=2),
        Case(shapes={"x": (37,)}, arguments={"mode": "nodes"}, ranks=8, node_size=2, explore=False),
        Case(shapes={"x": (2, 3, 5)}, arguments={"mode": "nodes", "dim": 1}, ranks=8, node_size=4, explore=False),
    ),
)  # fmt: skip
