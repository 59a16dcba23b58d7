"""All-to-all: every rank sends each rank another part of `x`, and keeps what the ranks sent in the layout of the whole.

push: each rank stores its parts into the ranks' `out`.
pull: each rank loads its parts from the ranks' `x`.
copy: push by the copy engines, a copy a part (see shared.copies): for parts of many megabytes.
inbox: push into inboxes, from where each rank takes its parts (see shared.inbox): no tensor need be symmetric.
low_latency: push in words of 12 bytes of data and 4 of flag, see shared.flagged: no barrier, and no tensor need be
    symmetric. For small tensors, of elements of 16 or 32 bits.
nodes: the only form in a world of several nodes: the ranks of a node collect what goes to one rank of another node, and
    it crosses the network together, see shared.nodes. On GPUs it has run on two nodes of one host.

Axis `scatter` of x is split among the ranks, and what they sent is put together along axis `gather`. 0 and 0 is the
plain all-to-all. For attention with the sequence sharded (Ulysses) x is (B, S, H, D): scatter=2, gather=1 goes from
my part of the sequence, all heads, to all of the sequence, my heads; scatter=1, gather=2 goes back.

(W - 1) / W * n * itemsize bytes leave and enter each rank, a third more in low_latency. In push, pull and copy each run
(see shared.runs) goes straight to its place: one pass with no staging. One kernel pushes and pulls, because a part is a
matrix of runs on both sides and only the strides between its rows differ. Programs that work at the same time have
different peers. Programs of one index on all ranks meet in two barriers, except in inbox and low_latency.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.world import World

from .all_gather import moved
from .declaration import Call, Case, Form, Launch, Operand, block
from .gradients import Backward, Gradients, Recorded
from .operator import Operator
from .shared import copies, flagged, inbox, nodes, nodes_rules, runs
from .shared.checks import NUMBERS
from .shared.grid import BLOCKED, barrier_counters, resident_launch
from .shared.replays import in_one_call

COPIED_BYTES = 256 << 20
"""Least x for which mode None takes copy. On 4 x H200 it takes 1.06 ms for 512 MiB and 4.14 for 2 GiB, push 1.14 and
4.52; for 128 MiB both take 0.295 (benchmarks/results/collectives.json)."""


def reference(rank: int, x: Sequence[torch.Tensor], scatter: int = 0, gather: int = 0) -> torch.Tensor:
    """What `rank` gets from the ranks' `x`."""
    return torch.cat([one.chunk(len(x), scatter)[rank] for one in x], gather)


@triton.jit
def all_to_all_kernel(
    x_ptr,  # (rows / together_x, size, together_x, run) on every rank; [:, r] is for rank r
    out_ptr,  # (rows / together_out, size, together_out, run) on every rank; [:, r] is from rank r
    bar_ptr,  # int32 (programs,) on every rank
    part,  # Runs
    together_x,
    together_out,
    world,
    PUSH: tl.constexpr,
):
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    pl.barrier(bar_ptr + pid, world)  # publish: every rank's x is complete, and its `out` free
    for t in range(pid, part.tiles * world.size, tl.num_programs(0)):
        peer = (rank + 1 + t % world.size) % world.size
        source, target = (rank, peer) if PUSH else (peer, rank)
        row, col, inside = runs.tile(t // world.size, part)
        sent = x_ptr + runs.stacked(row, col, part, target, world.size, together_x)
        got = out_ptr + runs.stacked(row, col, part, source, world.size, together_out)
        pl.copy(got, sent, target, source, world, mask=inside)
    pl.barrier(bar_ptr + pid, world)  # publish: this program's tiles are there; before overwrite: and read


def all_to_all(
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    scatter: int = 0,
    gather: int = 0,
    mode: Literal["push", "pull", "copy", "inbox", "low_latency", "nodes"] | None = None,
    block: int | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """Part `rank` along axis `scatter` of the ranks' `x`, one after the other along axis `gather`. Collective.

    x: of any number of dimensions, its axis `scatter` a multiple of size; the same shape and dtype on every rank. out:
    x's shape with axis `scatter` divided by size and then axis `gather` times size, of x's dtype, apart from x; a new
    tensor where None. mode: a form that the top of kernels/all_to_all.py describes. "push" and "copy" need a symmetric
    `out`, "pull" and "nodes" a symmetric `x`, "low_latency" elements of 16 or 32 bits. None chooses by operands and
    size, see `default`. block: elements a program moves at a time, a power of two; none with "copy". Returns `out`,
    complete; `x` may be overwritten at once. Tensors may have any strides. Without `mode` a plain tensor is copied
    where the form needs a symmetric one.

    Symmetric memory kept: a copied tensor's bytes, rounded up to a power of two; low_latency at most 8 / 3 times x's
    bytes, rounded up to a power of two, each power once and with all_gather; inbox as push of reduce_scatter, and with
    it; nodes 3 times x's bytes for each size; the others nothing for data. Raises NotSymmetric, ShapeError, DtypeError,
    CollectiveMismatch.
    """
    return OPERATOR((x, out), (scatter, gather, mode, block), world)


# -------------------------------------------------------------------------------------------------------------- host
def exchanged(call: Call) -> tuple[int, ...]:
    """The shape of the result."""
    part, gather = runs.share(call, call["scatter"]), call["gather"]
    return (*part[:gather], call.world.size * part[gather], *part[gather + 1 :])


def default(call: Call) -> str:
    """Flagged words for little; else push or copy into a symmetric `out`; else pull from a symmetric x; else inbox."""
    if flagged.taken(call, flagged.few_of_parts(call["x"].nbytes, call.world.size)):
        return "low_latency"
    return moved(call, COPIED_BYTES)


def _layout(call: Call) -> tuple[int, int, int, int]:
    """A part's rows and run, and how many of its runs are in a row in x and in `out`.

    The part's share of the later axis and all behind it is a run in both tensors. The tensor that is cut at the earlier
    axis has a part's runs from there on in a row."""
    scatter, gather = call["scatter"], call["gather"]
    part, first, later = runs.share(call, scatter), min(scatter, gather), max(scatter, gather)
    together = math.prod(part[first:later])
    return (*runs.around(part, later), *((together, 1) if scatter < gather else (1, together)))


def _through_registers(push: bool) -> Callable[[Call], Launch]:
    def plan(call: Call) -> Launch:
        world, (rows, run, *together) = call.world, _layout(call)
        part = runs.runs(rows, run, call.dtype, call["block"])
        arguments = barrier_counters(world), part, *together
        return resident_launch(world, all_to_all_kernel, part.tiles * world.size, arguments, (push,))

    return plan


def _through_inboxes(call: Call) -> Launch:
    world, (rows, run, *together) = call.world, _layout(call)
    return inbox.exchange_launch(world, rows, run, together, world.size, call.dtype, call["block"])


def _by_copy_engines(call: Call) -> Launch:
    world, (rows, run, together_x, together_out) = call.world, _layout(call)
    together = together_x * together_out  # one of them is 1

    def parts(before: int) -> torch.Tensor:
        """(size, rows / together, together, run) of x or out, of which the ranks' parts have `before` runs in a row."""
        whole = copies.layout(rows // before, world.size, before, run).movedim(1, 0)
        return whole if before == together else whole.view(world.size, rows // together, together, run)

    sent, got = parts(together_x), parts(together_out)
    peers = [(world.rank + d) % world.size for d in range(1, world.size + 1)]
    boxes = [box for p in peers for box in copies.boxes(p, got[world.rank], sent[p], call.dtype.itemsize)]
    return copies.exchange_launch(world, boxes)


def _in_flagged_words(call: Call) -> Launch:
    _, run, together_x, together_out = _layout(call)
    return flagged.exchange_launch(call.world, call["x"], together_x * run, together_out * run, call["block"])


def _over_nodes(call: Call) -> Launch:
    rows, run, *together = _layout(call)
    return nodes.exchange_launch(call.world, rows, run, together, call.dtype, call["block"])


def backward(call: Recorded) -> Gradients:
    """The gradient of x, from that of the result. Collective."""
    return {"x": all_to_all(call.grad, scatter=call["gather"], gather=call["scatter"], world=call.world)}


MOVES = "(W - 1) / W |x|"
TURNED = {"scatter": 1, "gather": 0}
OPERATOR = Operator(
    all_to_all,
    tensors={"x": Operand("...", NUMBERS)},
    result=exchanged,
    arguments={"scatter": runs.axis("x"), "gather": runs.axis("x")},
    settings={"block": block},
    forms={
        "push": Form(_through_registers(True), "store into the ranks", MOVES, symmetric=("out",), **BLOCKED),
        "pull": Form(_through_registers(False), "load from them", MOVES, symmetric=("x",), **BLOCKED),
        "copy": Form(in_one_call(_by_copy_engines), "push by the copy engines", MOVES, symmetric=("out",)),
        "inbox": Form(_through_inboxes, "store into the ranks' inboxes, and take from mine", MOVES, **BLOCKED),
        "low_latency": Form(
            _in_flagged_words, "its part in words of data and flag to every rank, no barrier", f"4 / 3 {MOVES}",
            dtypes=flagged.DTYPES, fits=flagged.fits, **BLOCKED,
        ),
    },
    across={
        "nodes": Form(
            _over_nodes, "collect in the node what goes to a rank of another one, and send it together",
            "(W - W / N) / W |x| over the network, (W - N) / W |x| in the node", symmetric=("x",), fits=nodes.fits,
            space=nodes_rules.split_space, seconds=nodes_rules.exchange_seconds,
            **BLOCKED,
        ),
    },
    default=default,
    reference=reference,
    backward=Backward(backward, "`all_to_all`, `scatter` and `gather` exchanged"),
    exact=True,
    cases=(
        Case(shapes={"x": "W*7 3"}, explore=False),
        Case(shapes={"x": "3 W*5"}, arguments={"mode": "push"} | TURNED),
        Case(shapes={"x": "3 W*5"}, arguments={"mode": "pull"} | TURNED, ranks=2),
        Case(shapes={"x": "3 W*5"}, arguments={"mode": "copy"} | TURNED),
        # More tiles than belong to a signal, which has 256 elements.
        Case(shapes={"x": "2 W*300"}, arguments={"mode": "inbox", "block": 128} | TURNED, sms=1),
        Case(shapes={"x": "3 W*5"}, arguments={"mode": "low_latency"} | TURNED, launches=3),
        Case(shapes={"x": "2 5 W*2 3"}, arguments={"scatter": 2, "gather": 1}, explore=False),
        Case(shapes={"x": "1 W*11 1 7"}, arguments={"scatter": -3, "gather": -1}, explore=False),
        Case(shapes={"x": "3 W*6"}, arguments={"mode": "nodes"} | TURNED, ranks=4, node_size=2, sms=1),
        Case(shapes={"x": "W*37"}, arguments={"mode": "nodes"}, ranks=8, node_size=2, explore=False),
        Case(
            shapes={"x": "2 5 W*2 3"}, arguments={"mode": "nodes", "scatter": 2, "gather": 1}, ranks=8, node_size=4,
            explore=False,
        ),
    ),
)  # fmt: skip
