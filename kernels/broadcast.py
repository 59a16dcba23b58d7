"""Broadcast: every rank's `x` becomes root's, n elements.

pass_on: tile t belongs to one rank other than root, which loads it from root and stores it into all ranks but root.
inbox: root stores tile t into the inbox of the same rank, which takes it out and stores it into the inboxes of all
    ranks but root (see shared.inbox): `x` need not be symmetric.
low_latency: root puts x into a slot on every rank, as words of 12 bytes of data and 4 of flag, see shared.flagged: `x`
    need not be symmetric. For small ones, of elements of 16 or 32 bits.

In pass_on and inbox root sends each element once, n * itemsize bytes, and no other rank more than (W - 2) / (W - 1) of
that: for large messages no schedule sends less from root. Programs of one index on all ranks meet in two barriers in
pass_on, and signal for some tiles in inbox. In low_latency
4 / 3 * (W - 1) * n * itemsize bytes leave root, and there is no barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from .all_reduce import all_reduce
from .declaration import Call, Case, Form, Launch, Operand, block, rank
from .gradients import Backward, Gradients, Recorded, is_rank
from .operator import Operator
from .shared import flagged, inbox, runs
from .shared.checks import NUMBERS, adds
from .shared.grid import BLOCKED, barrier_counters, resident_launch
from .shared.inbox import await_sent, in_inbox


def reference(rank: int, x: Sequence[torch.Tensor], root: int = 0) -> torch.Tensor:
    """What every rank gets from the ranks' `x`."""
    return x[root]


@triton.jit(do_not_specialize=["root"])
def pass_on_kernel(
    x_ptr,  # (n,) on every rank; root's is read, the others' are stored into, by the tiles' owners
    bar_ptr,  # int32 (programs,) on every rank
    x_runs,  # Runs of all of x
    root,
    world,
):
    pid = tl.program_id(0)
    others: tl.constexpr = world.size - 1
    turn = (tl.cast(world.rank, tl.int32) - root + others) % world.size  # of root's successor 0, of root the last
    pl.barrier(bar_ptr + pid, world)  # publish: root's x is complete, and the others' free
    if turn < others:
        for t in range(turn + others * pid, x_runs.tiles, others * tl.num_programs(0)):
            row, col, inside = runs.tile(t, x_runs)
            place = x_ptr + runs.whole(row, col, x_runs)
            x = pl.load(place, root, world, mask=inside)
            for i in tl.static_range(others):
                pl.store(place, x, (root + 1 + (turn + i) % others) % world.size, world, mask=inside)
    pl.barrier(bar_ptr + pid, world)  # publish: this program's tiles are there on every rank


@triton.jit(do_not_specialize=["root"])
def inbox_kernel(
    x_ptr,  # (n,) this rank's; root's is read, the others' are stored into
    inbox_ptr,  # (2, size - 1, programs, TOGETHER * BLOCK) on every rank, see Inboxes
    sent_ptr,  # int32 (programs, size) on every rank
    n,
    root,
    world,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,  # blocks in a tile
):
    pid = tl.program_id(0)
    TILE: tl.constexpr = TOGETHER * BLOCK
    others: tl.constexpr = world.size - 1
    rank = tl.cast(world.rank, tl.int32)
    behind = (rank - root + world.size) % world.size  # how far rank is behind root
    counts = sent_ptr + pid * world.size
    sent = pl.atomic_add(counts + rank, 0, rank, world, sem="relaxed")
    element = tl.arange(0, BLOCK)
    for turn in range(pid, (n - 1) // (others * TILE) + 1, tl.num_programs(0)):
        first = tl.cast(turn, tl.int64) * (others * TILE) + element  # of the tile of root's successor
        if behind == 0:
            for j in range(TOGETHER):
                for i in tl.static_range(1, world.size):
                    offs = first + (i - 1) * TILE + j * BLOCK
                    at = in_inbox(inbox_ptr, sent, world.size - i, world, TILE) + j * BLOCK + element
                    pl.store(at, tl.load(x_ptr + offs, mask=offs < n, other=0), (rank + i) % world.size, world)
        pl.signal_all(counts + rank, world)  # publish; and I am done with what came in the other half
        await_sent(counts, sent, world)
        if behind > 0:
            for j in range(TOGETHER):
                offs = first + (behind - 1) * TILE + j * BLOCK
                x = tl.load(in_inbox(inbox_ptr, sent, world.size - behind, world, TILE) + j * BLOCK + element)
                tl.store(x_ptr + offs, x, mask=offs < n)
                for i in tl.static_range(1, world.size):
                    if behind + i != world.size:  # not root
                        at = in_inbox(inbox_ptr, sent + 1, world.size - i, world, TILE) + j * BLOCK + element
                        pl.store(at, x, (rank + i) % world.size, world)
        sent += 1
        if others > 1:
            pl.signal_all(counts + rank, world)  # publish; and I am done with what came from root
            await_sent(counts, sent, world)
            if behind > 0:
                for j in range(TOGETHER):
                    for i in tl.static_range(1, world.size):
                        whose = (behind + i) % world.size
                        if whose > 0:
                            offs = first + (whose - 1) * TILE + j * BLOCK
                            x = tl.load(in_inbox(inbox_ptr, sent, i, world, TILE) + j * BLOCK + element)
                            tl.store(x_ptr + offs, x, mask=offs < n)
            sent += 1


def broadcast(
    x: torch.Tensor,
    root: int = 0,
    *,
    mode: Literal["pass_on", "inbox", "low_latency"] | None = None,
    block: int | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """Root's `x` in every rank's `x`. Collective.

    x: the same shape and dtype on every rank; symmetric for "pass_on". root: the rank whose x it is. mode: a form that
    the top of kernels/broadcast.py describes. "low_latency" takes elements of 16 or 32 bits. None chooses by operand
    and size, see `default`. block: elements a program moves at a time, a power of two. Returns `x`, complete; it may be
    overwritten at once. Tensors may have any strides.

    Symmetric memory kept: low_latency 8 / 3 * (size - 1) times x's bytes, rounded up to a power of two, each power once
    and with all_gather; inbox as two_shot_push of all_reduce, and with it; pass_on nothing. Raises NotSymmetric,
    RankError, ShapeError, DtypeError, CollectiveMismatch.
    """
    return OPERATOR((x,), (root, mode, block), world)


# -------------------------------------------------------------------------------------------------------------- host
def default(call: Call) -> str:
    """Flagged words for little; else pass_on of a symmetric x, else inbox."""
    x, size = call["x"], call.world.size
    if flagged.taken(call, flagged.few(x.nbytes * max(size - 1, 1), size)):
        return "low_latency"
    return "pass_on" if isinstance(x, SymmetricTensor) else "inbox"


def _pass_on(call: Call) -> Launch:
    x, world = call["x"], call.world
    if world.size == 1:
        return lambda x: x
    x_runs = runs.runs(1, x.numel(), x.dtype, call["block"])
    tasks = triton.cdiv(x_runs.tiles, world.size - 1)
    return resident_launch(world, pass_on_kernel, tasks, (barrier_counters(world), x_runs, call["root"]))


def _through_inboxes(call: Call) -> Launch:
    x, world = call["x"], call.world
    if world.size == 1:
        return lambda x: x
    tasks, block, together, room = inbox.tiles(x.numel(), x, call["block"], world.size - 1, world)
    return resident_launch(world, inbox_kernel, tasks, (*room, x.numel(), call["root"]), (block, together))


def _in_flagged_words(call: Call) -> Launch:
    if call.world.size == 1:
        return lambda x: x
    return flagged.broadcast_launch(call.world, call["x"], call["root"], call["block"])


def backward(call: Recorded) -> Gradients:
    """The sum for root, and zeros for the others, whose x was overwritten. No branch depends on the rank: all ranks'
    graphs hold the all-reduce, and simulated ranks share compiled code."""
    total = all_reduce(call.grad.clone(memory_format=torch.contiguous_format), world=call.world)
    return {"x": torch.where(is_rank(call["root"], call.world, total), total, 0)}


OPERATOR = Operator(
    broadcast,
    tensors={"x": Operand("...", NUMBERS)},
    result=lambda call: tuple(call["x"].shape),
    arguments={"root": rank},
    settings={"block": block},
    forms={
        "pass_on": Form(_pass_on, "each block through one other rank", "|x|", symmetric=("x",), **BLOCKED),
        "inbox": Form(_through_inboxes, "each block through one other rank's inbox", "|x|", **BLOCKED),
        "low_latency": Form(
            _in_flagged_words, "root's x in words of data and flag to every rank, no barrier", "4 / 3 (W - 1) |x|",
            dtypes=flagged.DTYPES, fits=flagged.fits, **BLOCKED,
        ),
    },
    default=default,
    reference=reference,
    backward=Backward(backward, "`all_reduce`; zeros on all ranks but root", refuses=adds),
    written="x",
    gives=lambda call: call.world.rank == call["root"],
    exact=True,
    cases=(
        Case(shapes={"x": (40,)}, arguments={"mode": "pass_on"}, launches=3),
        # More tiles than one, which has 256 elements.
        Case(shapes={"x": (900,)}, arguments={"mode": "inbox", "block": 128}, sms=1),
        Case(shapes={"x": (40,)}, arguments={"mode": "low_latency"}, launches=4),
        Case(shapes={"x": (5, 1, 3)}, explore=False),
        Case(shapes={"x": ()}, explore=False),
    ),
)  # fmt: skip
