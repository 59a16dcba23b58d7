"""Reduce-scatter along any dimension: rank r ends with part r of the sum, minimum or maximum over ranks.

pull: each rank loads its part from every rank, run by run where it lies (see shared.runs).
push: each rank stores each tile into its owner's inbox, and the owner adds what came: `x` need not be symmetric.
copy: push by the copy engines, see shared.copy_reduce: for parts of many megabytes.
low_latency: push in words of 12 bytes of data and 4 of flag, see shared.flagged: for small x.
nodes: the only form in a world of several nodes: each node's sums cross the network along the rails, see shared.nodes.
    They are rounded to the dtype. On GPUs it has run on two nodes of one host.

The others reduce in fp32, in the order rank, rank + 1, ...: the same bits every time, and in all of them. Into and out
of each rank go (W - 1) / W * n * itemsize bytes, a third more in low_latency. In pull the programs of one index on all
ranks meet in two barriers. In push there is no barrier, but a signal to each rank for some tiles: stores reach more of
the links than loads. In low_latency there is neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.world import World

from .declaration import Call, Case, Form, Launch, Operand, block, choice, integer
from .gradients import Backward, Gradients, Recorded
from .operator import Operator
from .shared import copies, copy_reduce, flagged, nodes, nodes_rules, runs
from .shared.checks import FLOATS, adds
from .shared.grid import BLOCKED, barrier_counters, resident_launch
from .shared.inbox import await_sent, in_inbox, parcels, send_tiles
from .shared.reduction import OPS, Op, combine, over_ranks, reduced
from .shared.replays import in_one_call

COPIED_BYTES = 512 << 20
"""Least x for which mode None takes copy on more than two ranks, and four times as much on two. On 4 x H200 it takes
4.38 ms for 2 GiB, push 4.52, pull 4.85; for 128 MiB 0.335, 0.300 and 0.317; on 2 it takes 2.94, 2.96 and 3.21 for
2 GiB, 0.819, 0.754 and 0.816 for 512 MiB: benchmarks/results/collectives.json, collectives_sizes_2.json."""
PULLED_BYTES = 8192
"""Bytes of a tile of pull. On 4 x H200 it takes 4.85 ms for 2 GiB, in tiles of 16 KiB 4.94
(benchmarks/results/collectives.json)."""


def reference(rank: int, x: Sequence[torch.Tensor], dim: int = 0, op: Op = "sum") -> torch.Tensor:
    """What `rank` gets from the ranks' `x`, in fp64."""
    return reduced(x, op).chunk(len(x), dim)[rank]


@triton.jit
def pull_kernel(
    x_ptr,  # (rows, size, run) on every rank; rank r reads [:, r] of all of them
    out_ptr,  # (rows, run) this rank's
    bar_ptr,  # int32 (programs,) on every rank
    part,  # Runs
    world,
    OP: tl.constexpr,
):
    pid = tl.program_id(0)
    pl.barrier(bar_ptr + pid, world)  # publish: every rank's x is complete
    for t in range(pid, part.tiles, tl.num_programs(0)):
        row, col, inside = runs.tile(t, part)
        mine = x_ptr + runs.beside(row, col, part, world.rank, world.size)
        total = over_ranks(mine, inside, world, world.rank, OP)
        tl.store(out_ptr + runs.whole(row, col, part), total.to(out_ptr.dtype.element_ty), mask=inside)
    pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read its part of my x


@triton.jit
def push_kernel(
    x_ptr,  # (rows, size, run) this rank's
    out_ptr,  # (rows, run) this rank's
    inbox_ptr,  # (2, size - 1, programs, TOGETHER tiles) on every rank, see Inboxes
    sent_ptr,  # int32 (programs, size) on every rank
    part,  # Runs
    world,
    OP: tl.constexpr,
    TOGETHER: tl.constexpr,  # tiles for each signal; fewer for the first one, so that programs are out of step: while
    # some add, others send
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    TILE: tl.constexpr = part.ROWS * part.COLS
    ROOM: tl.constexpr = TOGETHER * TILE
    rank = tl.cast(world.rank, tl.int32)
    counts = sent_ptr + pid * world.size
    sent = pl.atomic_add(counts + rank, 0, rank, world, sem="relaxed")
    element = tl.arange(0, part.ROWS)[:, None] * part.COLS + tl.arange(0, part.COLS)[None, :]
    mine = tl.cdiv(part.tiles - pid, programs)
    for first in range(-(pid % TOGETHER), mine, TOGETHER):
        begin, end = tl.maximum(first, 0), tl.minimum(first + TOGETHER, mine)
        send_tiles(x_ptr, inbox_ptr, counts, sent, first, begin, end, part, 1, world, world.size, TOGETHER)
        await_sent(counts, sent, world)
        for t in range(begin, end):
            row, col, inside = runs.tile(pid + t * programs, part)
            total = tl.load(x_ptr + runs.beside(row, col, part, rank, world.size), mask=inside).to(tl.float32)
            for i in tl.static_range(1, world.size):
                at = in_inbox(inbox_ptr, sent, i, world, ROOM) + (t - first) * TILE
                total = combine(total, tl.load(at + element).to(tl.float32), OP)
            tl.store(out_ptr + runs.whole(row, col, part), total.to(out_ptr.dtype.element_ty), mask=inside)
        sent += 1


def reduce_scatter(
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    dim: int = 0,
    op: Op = "sum",
    mode: Literal["pull", "push", "copy", "low_latency", "nodes"] | None = None,
    block: int | None = None,
    chunks: int | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """Part `rank` of the ranks' `x`, reduced; the parts are equal slices of dimension `dim`. Collective.

    x: its dimension `dim` a multiple of size, bf16, fp16 or fp32; symmetric to pull, and over nodes. out: x's shape
    with that dimension divided by size, of x's dtype; a new tensor where None. It may be this rank's own part of `x`
    where that is contiguous, and no other memory of x. op: "sum", in fp32 and rounded once, over nodes twice; "min",
    "max": a NaN of any rank is a NaN. mode: a form that the top of kernels/reduce_scatter.py describes. None chooses by
    size, see `default`. block: elements of a tile, a power of two. chunks: with "copy" only, so many copies to each
    rank at most; None: by size. Returns `out`, the same bits every time; `x` may be overwritten at once. Tensors may
    have any strides. Without `mode` a plain tensor is copied where the form needs a symmetric one.

    Symmetric memory kept: a copied tensor's bytes, rounded up to a power of two; pull none; low_latency at most 8 / 3
    times x's bytes, rounded up to a power of two, each power once and with all_gather; push 2 * (size - 1) times a
    program's bytes for a signal, or a tile, for each number of them and grid; copy x's bytes less a part for each size
    of part; nodes 3 / node_size times x's bytes for each size of part. Raises NotSymmetric, ShapeError, DtypeError,
    Unsupported, CollectiveMismatch.
    """
    return OPERATOR((x, out), (dim, op, mode, block, chunks), world)


# -------------------------------------------------------------------------------------------------------------- host
def default(call: Call) -> str:
    """Flagged words for little, copy for much, push between."""
    x, size = call["x"], call.world.size
    if flagged.few_of_parts(x.nbytes, size):
        return "low_latency"
    copied = 4 * COPIED_BYTES if size == 2 else COPIED_BYTES
    return "copy" if x.nbytes >= copies.least(copied, _around(call)[1], x.element_size()) else "push"


def _around(call: Call) -> tuple[int, int]:
    """(rows, run) of a part."""
    return runs.around(call.shape, call["dim"])


def _pull(call: Call) -> Launch:
    part = runs.runs(*_around(call), call.dtype, call["block"] or PULLED_BYTES // call.dtype.itemsize)
    return resident_launch(call.world, pull_kernel, part.tiles, (barrier_counters(call.world), part), (call["op"],))


def _push(call: Call) -> Launch:
    part, together, inbox = parcels(*_around(call), call.dtype, call["block"], call.world)
    return resident_launch(call.world, push_kernel, part.tiles, (*inbox, part), (call["op"], together))


def _by_copy_engines(call: Call) -> Launch:
    return copy_reduce.scatter_launch(call.world, *_around(call), call.dtype, call["op"], call["block"], call["chunks"])


def _in_flagged_words(call: Call) -> Launch:
    return flagged.scatter_launch(call.world, call["x"], _around(call)[1], call["op"], call["block"])


def _over_nodes(call: Call) -> Launch:
    return nodes.scatter_launch(call.world, *_around(call), call.dtype, call["op"], call["block"])


def backward(call: Recorded) -> Gradients:
    """The gradient of x, from that of the result. Collective."""
    return {"x": call.operator("all_gather", call.grad, dim=call["dim"])}


MOVES = "(W - 1) / W |x|"
OPERATOR = Operator(
    reduce_scatter,
    tensors={"x": Operand("...", FLOATS)},
    result=lambda call: runs.share(call, call["dim"]),
    arguments={"dim": runs.axis("x"), "op": choice(*OPS)},
    settings={"block": block, "chunks": integer(1)},
    forms={
        "push": Form(_push, "add what the ranks store, in a fixed order", MOVES, **BLOCKED),
        "pull": Form(_pull, "load its part from every rank", MOVES, symmetric=("x",), **BLOCKED),
        "copy": Form(
            in_one_call(_by_copy_engines), "add what their copy engines bring, in a fixed order", MOVES,
            **copy_reduce.CHUNKED,
        ),
        "low_latency": Form(
            _in_flagged_words, "its part in words of data and flag to every rank, no barrier", f"4 / 3 {MOVES}",
            fits=flagged.fits, **BLOCKED,
        ),
    },
    across={
        "nodes": Form(
            _over_nodes, "reduce in the node what goes over the network, then add what comes, in a fixed order",
            "(N - 1) / W |x| over the network, (W - N) / W |x| in the node", symmetric=("x",), fits=nodes.fits,
            space=nodes_rules.split_space, seconds=nodes_rules.scatter_seconds,
            roundings=lambda size: 2, **BLOCKED,
        ),
    },
    default=default,
    reference=reference,
    backward=Backward(backward, "`all_gather`; of sums alone", refuses=adds),
    place=lambda call: call.world.rank if _around(call)[0] == 1 or call.world.size == 1 else None,
    cases=(
        Case(shapes={"x": "4 W*10"}, arguments={"mode": "pull", "dim": 1}, out="new"),
        Case(shapes={"x": "W*4 10"}, arguments={"mode": "push"}, out="new"),
        Case(shapes={"x": "W*4 10"}, arguments={"mode": "push"}, ranks=2, launches=3, out="new"),
        Case(shapes={"x": "4 W*10"}, arguments={"mode": "copy", "dim": 1, "chunks": 2}, sms=1, out="new"),
        Case(shapes={"x": "W*4 10"}, arguments={"mode": "copy"}, ranks=2, out="new"),
        Case(shapes={"x": "4 W*10"}, arguments={"mode": "low_latency", "dim": 1}, launches=3, out="new"),
        Case(shapes={"x": "W*4 10"}, arguments={"mode": "low_latency"}, ranks=2, launches=3, out="new"),
        Case(shapes={"x": "7 W*3 5"}, arguments={"dim": -2}, explore=False),
        Case(shapes={"x": "5 1 W*17"}, arguments={"dim": 2, "op": "max"}, explore=False),
        Case(shapes={"x": "W*111"}, arguments={"op": "min"}, explore=False),
        Case(shapes={"x": "2 W*9"}, arguments={"mode": "nodes", "dim": 1}, ranks=4, node_size=2, sms=1, out="new"),
        Case(shapes={"x": "W*37"}, arguments={"mode": "nodes", "op": "max"}, ranks=8, node_size=2, explore=False),
        Case(shapes={"x": "2 W*3 5"}, arguments={"mode": "nodes", "dim": 1}, ranks=8, node_size=4, explore=False),
    ),
)  # fmt: skip
