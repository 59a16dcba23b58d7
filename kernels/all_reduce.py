"""All-reduce: every rank ends with the sum, minimum or maximum over ranks of `x`, n elements.

low_latency: each rank puts its x into a slot on every rank, as words of 12 bytes of data and 4 of flag, and reduces
    what comes, see shared.flagged: 4 / 3 * (W - 1) * n * itemsize bytes out of each rank.
low_latency_two_shot: as two_shot, in such words, one flight of them more than low_latency: 8 / 3 * (W - 1) / W * n *
    itemsize bytes.
one_shot: each rank loads all of every rank's x and adds: (W - 1) * n * itemsize bytes into each rank; the
    shortest path for small messages.
two_shot: block t belongs to rank t % W, which loads it from every rank, adds, and stores the sum into every
    rank's `out`: 2 * (W - 1) / W * n * itemsize bytes.
two_shot_push: as two_shot, but each rank stores its blocks into their owners' inboxes (see shared.inbox), some of
    them for each signal, because stores reach more of the links than loads.
inbox: as two_shot_push, and the owners store their sums into inboxes too (see shared.inbox): no tensor need be
    symmetric.
copy: as two_shot, moved by the copy engines, see shared.copy_reduce: for many megabytes.
multimem: as two_shot with the sum and the broadcast in the switch: (1 + 1 / W) * n * itemsize bytes out of each
    rank; without multicast the same source loops over the ranks.
nodes: the only form in a world of several nodes: reduce_scatter over nodes, then all_gather, see shared.nodes. Each
    node's sums are rounded to the dtype. On GPUs it has run on two nodes of one host.

The others add in fp32 and round once; low_latency and one_shot add in the order 0, 1, ... on every rank, so all ranks
hold the same bits, as where one rank adds. Minimum and maximum keep a NaN of any rank, except in multimem: nothing
documents what a switch makes of one. A switch has them for 16-bit floats only. Programs of one index on all ranks meet
in barriers: none in inbox and the low-latency forms, one in two_shot_push, else two (one_shot in place: one more for
each block of a program). From REST_BYTES on the elements beyond the last whole 16 bytes go by low_latency.
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

from .declaration import Call, Case, Form, Launch, Operand, choice, integer
from .declaration import block as block_size
from .gradients import Backward, Gradients, Recorded
from .operator import Operator
from .shared import copy_reduce, flagged, inbox, nodes, nodes_rules
from .shared.checks import FLOATS, adds
from .shared.grid import BLOCKED, barrier_counters, copy_block, resident_launch
from .shared.inbox import await_sent, in_inbox
from .shared.reduction import OPS, Op, combine, over_ranks, reduced
from .shared.replays import in_one_call

TWO_SHOT_PUSH_BYTES = 4 << 20
"""Least x for which mode None takes two_shot_push instead of two_shot. On 4 x H200 it takes 17.1, 83 and 1143 us for 1,
16 and 256 MiB, two_shot 17.0, 92 and 1274."""
COPIED_BYTES = 256 << 20
"""Least x for which mode None takes copy instead of two_shot_push. On 4 x H200 it takes 1128 us for 256 MiB and 138 for
16, two_shot_push 1143 and 83; on 3, 977 and 1019 for 256, on 2 721 and 744. All these figures are of
benchmarks/results/collectives*.json."""
REST_BYTES = 1 << 20
"""Least x of which what is no whole 16 bytes goes on its own, by low_latency: the rest then moves in accesses of 16
bytes, and not element by element. On 4 x H200 16 MiB and an element take 87 us, 16 MiB 83
(benchmarks/results/collectives.json)."""

Mode = Literal[
    "low_latency", "low_latency_two_shot", "one_shot", "two_shot", "two_shot_push", "inbox", "copy", "multimem", "nodes"
]  # fmt: skip


def reference(rank: int, x: Sequence[torch.Tensor], op: Op = "sum") -> torch.Tensor:
    """What every rank gets from the ranks' `x`, in fp64."""
    return reduced(x, op)


@triton.jit
def one_shot_kernel(
    x_ptr,  # (n,) on every rank; all ranks read it
    out_ptr,  # (n,) this rank's; x itself if IN_PLACE
    bar_ptr,  # int32 (programs,) on every rank
    n,
    world,
    OP: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    pl.barrier(bar_ptr + pid, world)  # publish: every rank's x is complete
    for block in range(pid, tl.cdiv(n, BLOCK), tl.num_programs(0)):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = over_ranks(x_ptr + offs, offs < n, world, 0, OP)
        if IN_PLACE:
            pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read this block of my x
        tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=offs < n)
    if not IN_PLACE:
        pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read my x


@triton.jit
def two_shot_kernel(
    x_ptr,  # (n,) on every rank; rank r reads the blocks r, r + size, ... of all of them
    out_ptr,  # (n,) on every rank; rank r stores those blocks into all of them; may be x
    bar_ptr,  # int32 (programs,) on every rank
    n,
    world,
    OP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    pl.barrier(bar_ptr + pid, world)  # publish: every rank's x is complete, and its `out` free
    for block in range(rank + world.size * pid, tl.cdiv(n, BLOCK), world.size * tl.num_programs(0)):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = over_ranks(x_ptr + offs, offs < n, world, world.rank, OP).to(out_ptr.dtype.element_ty)
        for i in tl.static_range(1, world.size + 1):
            pl.store(out_ptr + offs, total, (world.rank + i) % world.size, world, mask=offs < n)
    pl.barrier(bar_ptr + pid, world)  # publish: this program's sums are there on every rank


@triton.jit
def two_shot_push_kernel(
    x_ptr,  # (n,) this rank's; may be `out`
    out_ptr,  # (n,) this rank's; if DIRECT on every rank: rank r stores the tiles r, r + size, ... into all of them
    inbox_ptr,  # (2, size - 1, programs, TOGETHER * BLOCK) on every rank, see Inboxes
    sent_ptr,  # int32 (programs, size) on every rank
    bar_ptr,  # int32 (programs,) on every rank, if DIRECT
    n,
    world,
    OP: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,  # blocks in a tile
    DIRECT: tl.constexpr,  # sums go straight to their places, else through inboxes
):
    pid = tl.program_id(0)
    TILE: tl.constexpr = TOGETHER * BLOCK
    rank = tl.cast(world.rank, tl.int32)
    counts = sent_ptr + pid * world.size
    sent = pl.atomic_add(counts + rank, 0, rank, world, sem="relaxed")
    element = tl.arange(0, BLOCK)
    for turn in range(pid, (n - 1) // (world.size * TILE) + 1, tl.num_programs(0)):
        first = tl.cast(turn, tl.int64) * (world.size * TILE) + element
        for j in range(TOGETHER):
            for i in tl.static_range(1, world.size):
                peer = (rank + i) % world.size
                offs = first + peer * TILE + j * BLOCK
                place = in_inbox(inbox_ptr, sent, world.size - i, world, TILE) + j * BLOCK + element
                pl.store(place, tl.load(x_ptr + offs, mask=offs < n, other=0), peer, world)
        pl.signal_all(counts + rank, world)  # publish; and what I sent of x, or took out, may be overwritten
        await_sent(counts, sent, world)
        for j in range(TOGETHER):
            offs = first + rank * TILE + j * BLOCK
            total = tl.load(x_ptr + offs, mask=offs < n, other=0).to(tl.float32)
            for i in tl.static_range(1, world.size):
                x = tl.load(in_inbox(inbox_ptr, sent, i, world, TILE) + j * BLOCK + element)
                total = combine(total, x.to(tl.float32), OP)
            rounded = total.to(out_ptr.dtype.element_ty)
            for i in tl.static_range(1, world.size):
                peer = (rank + i) % world.size
                if DIRECT:
                    pl.store(out_ptr + offs, rounded, peer, world, mask=offs < n)
                else:
                    place = in_inbox(inbox_ptr, sent + 1, world.size - i, world, TILE) + j * BLOCK + element
                    pl.store(place, rounded, peer, world)
            tl.store(out_ptr + offs, rounded, mask=offs < n)
        sent += 1
        if not DIRECT:
            pl.signal_all(counts + rank, world)  # publish; and I am done with the parts in the other half
            await_sent(counts, sent, world)
            for j in range(TOGETHER):
                for i in tl.static_range(1, world.size):
                    offs = first + (rank + i) % world.size * TILE + j * BLOCK
                    x = tl.load(in_inbox(inbox_ptr, sent, i, world, TILE) + j * BLOCK + element)
                    tl.store(out_ptr + offs, x, mask=offs < n)
            sent += 1
    if DIRECT:
        pl.barrier(bar_ptr + pid, world)  # publish: this program's sums are there on every rank


@triton.jit
def multimem_kernel(
    x_ptr,  # (n,) on every rank, at a multiple of 16 bytes; rank r reduces the blocks r, r + size, ... of all
    out_ptr,  # (n,) on every rank; rank r stores those blocks into all of them; may be x
    bar_ptr,  # int32 (programs,) on every rank
    n,
    world,
    OP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    IN_SWITCH: tl.constexpr = "add" if OP == "sum" else OP
    run: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth  # elements in 16 bytes
    whole = n - n % run  # the switch takes whole runs of 16 bytes
    pl.barrier(bar_ptr + pid, world)  # publish: every rank's x is complete, and its `out` free
    for block in range(rank + world.size * pid, tl.cdiv(whole, BLOCK), world.size * tl.num_programs(0)):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = pl.multimem_load_reduce(x_ptr + offs, world, IN_SWITCH, mask=offs < whole)
        pl.multimem_store(out_ptr + offs, total, world, mask=offs < whole)
    if rank == 0:
        if pid == 0:
            offs = whole + tl.arange(0, run)
            rest = over_ranks(x_ptr + offs, offs < n, world, 0, OP).to(out_ptr.dtype.element_ty)
            for i in tl.static_range(1, world.size + 1):
                pl.store(out_ptr + offs, rest, i % world.size, world, mask=offs < n)
    pl.barrier(bar_ptr + pid, world)  # publish: this program's sums are there on every rank


def all_reduce(
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    op: Op = "sum",
    mode: Mode | None = None,
    block: int | None = None,
    chunks: int | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """The ranks' `x` reduced, on every rank; in place where `out` is None. Collective.

    x: bf16, fp16 or fp32; symmetric unless mode is a low-latency one, two_shot_push, inbox or copy. out: x or apart
    from it, of x's shape and dtype; symmetric unless mode is a low-latency one, one_shot, inbox or nodes. op: "sum", in
    fp32 and rounded once, over nodes twice; "min", "max": a NaN of any rank is a NaN, except in multimem. mode: a form
    that the top of kernels/all_reduce.py describes. None chooses by operands and size, see `default`. block: elements a
    program moves at a time, a power of two; copy: that it adds. chunks: with "copy" only, so many copies of x to each
    rank at most, REDUCE_CHUNKS of shared.copy_reduce where None. Returns `out` (or x), complete; `x` may be overwritten
    at once. Tensors may have any strides. Without `mode` a plain tensor is copied where the form needs a symmetric one.

    Symmetric memory kept: a copied tensor's bytes, rounded up to a power of two; low_latency 8 / 3 * size times x's
    bytes, low_latency_two_shot 16 / 3 times, rounded up to a power of two, each power once and with all_gather;
    two_shot_push and inbox 2 * (size - 1) tiles a program for each size of tile and grid, as reduce_scatter; copy x's
    bytes less a part for each size of part; nodes 5 / node_size times x's bytes for each size. Raises NotSymmetric,
    ShapeError, DtypeError, Unsupported, CollectiveMismatch.
    """
    out = x if out is None else out
    return OPERATOR((x, out), (op, mode, block, chunks), world)


# -------------------------------------------------------------------------------------------------------------- host
def default(call: Call) -> str:
    """Flagged words for little. Else by whether `out` is symmetric. If not: inbox. If so: the switch for a sum, where
    the world has one and x is symmetric, too; else two_shot, two_shot_push or copy, by size. Pushes need no symmetric
    x."""
    x, world, direct = call["x"], call.world, isinstance(call["out"], SymmetricTensor)
    shots = flagged.shots(x.nbytes, world.size, flagged.FLAG_BYTES if direct else flagged.PLAIN_FLAG_BYTES)
    if shots:
        return "low_latency" if shots == 1 else "low_latency_two_shot"
    if not direct:
        return "inbox"
    near = isinstance(x, SymmetricTensor)
    if near and world.multicast and call["op"] == "sum" and _even(call):
        return "multimem"
    if x.nbytes >= COPIED_BYTES:
        return "copy"
    return "two_shot" if near and x.nbytes < TWO_SHOT_PUSH_BYTES else "two_shot_push"


def _even(call: Call) -> bool:
    """Whether x and `out` begin at a multiple of 16 bytes."""
    return call["x"].data_ptr() % 16 == 0 and call["out"].data_ptr() % 16 == 0


def _fits_switch(call: Call) -> str:
    if call["op"] != "sum" and call.dtype == torch.float32:
        return f"op {call['op']!r} of float32, and the switch has it for 16-bit floats only"
    return "" if _even(call) else "x or out at no multiple of 16 bytes, and multimem moves runs of 16 bytes"


def _in_place(call: Call) -> bool:
    return call["x"].data_ptr() == call["out"].data_ptr()


def _in_flagged_words(shots: int) -> Callable[[Call], Launch]:
    return lambda call: flagged.reduce_launch(call.world, call["x"], call["op"], shots, call["block"])


def _end_of(like: torch.Tensor, begin: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The elements from `begin` on of tensors of the same facts as `like`: of a symmetric one, which lies where `like`
    does, the view is made once, because that takes as long as two launches."""
    end = like.view(-1)[begin:]
    return (lambda tensor: end) if isinstance(like, SymmetricTensor) else lambda tensor: tensor.view(-1)[begin:]


def _with_the_rest(make: Callable[[Call, int], Launch]) -> Callable[[Call], Launch]:
    """make(call, n) for the first n elements of x, and flagged words for those beyond the last whole 16 bytes."""

    def plan(call: Call) -> Launch:
        x, n = call["x"], call["x"].numel()
        rest = n % (16 // x.element_size()) if x.nbytes >= REST_BYTES else 0
        launch = make(call, n - rest)
        if rest == 0:
            return launch
        few = flagged.reduce_launch(call.world, x.view(-1)[n - rest :], call["op"], 1, None)
        rest_of_x, rest_of_out = (_end_of(call[name], n - rest) for name in ("x", "out"))

        def both(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            launch(x, out)
            few(rest_of_x(x), rest_of_out(out))
            return out

        return both

    return plan


def _one_shot(call: Call, n: int) -> Launch:
    world, BLOCK = call.world, copy_block(call["x"], call["block"])
    constants = call["op"], _in_place(call), BLOCK
    return resident_launch(world, one_shot_kernel, triton.cdiv(n, BLOCK), (barrier_counters(world), n), constants)


def _two_shot(kernel: object) -> Callable[[Call, int], Launch]:
    def make(call: Call, n: int) -> Launch:
        world, BLOCK = call.world, copy_block(call["x"], call["block"])
        tasks = triton.cdiv(n, BLOCK * world.size)
        return resident_launch(world, kernel, tasks, (barrier_counters(world), n), (call["op"], BLOCK))

    return make


def _by_pushes(direct: bool) -> Callable[[Call, int], Launch]:
    def make(call: Call, n: int) -> Launch:
        world = call.world
        access = 1 if _even(call) else 4  # else each element's address has a register
        tasks, BLOCK, together, room = inbox.tiles(n, call["x"], call["block"], world.size, world, access)
        constants = call["op"], BLOCK, together, direct
        return resident_launch(world, two_shot_push_kernel, tasks, (*room, barrier_counters(world), n), constants)

    return make


def _by_copy_engines(call: Call, n: int) -> Launch:
    return copy_reduce.reduce_launch(call.world, n, call.dtype, call["op"], call["block"], call["chunks"])


def _over_nodes(call: Call) -> Launch:
    return nodes.reduce_launch(call.world, call["x"].numel(), call.dtype, call["op"], call["block"])


def backward(call: Recorded) -> Gradients:
    """The gradient of x, from that of the result. Collective."""
    return {"x": all_reduce(call.grad.clone(memory_format=torch.contiguous_format), world=call.world)}


MOVES = "2 (W - 1) / W |x|"
OPERATOR = Operator(
    all_reduce,
    tensors={"x": Operand("...", FLOATS)},
    result=lambda call: tuple(call["x"].shape),
    arguments={"op": choice(*OPS)},
    settings={"block": block_size, "chunks": integer(1)},
    forms={
        "low_latency": Form(
            _in_flagged_words(1), "words of data and flag to every rank, no barrier", "4 / 3 (W - 1) |x|", **BLOCKED
        ),
        "low_latency_two_shot": Form(
            _in_flagged_words(2), "the same, each part to its owner, and the sum to all", "8 / 3 (W - 1) / W |x|",
            **BLOCKED,
        ),
        "one_shot": Form(
            _with_the_rest(_one_shot), "load everything", "(W - 1) |x|", symmetric=("x",),
            agrees=lambda call: {"in_place": _in_place(call)}, **BLOCKED,
        ),
        "two_shot": Form(
            _with_the_rest(_two_shot(two_shot_kernel)), "each block loaded, reduced and stored by its owner", MOVES,
            symmetric=("x", "out"), **BLOCKED,
        ),
        "two_shot_push": Form(
            _with_the_rest(_by_pushes(True)), "each block sent to its owner, reduced and stored by it",
            MOVES, symmetric=("out",), **BLOCKED,
        ),
        "inbox": Form(
            _with_the_rest(_by_pushes(False)), "the same, and the sums sent to every rank's inbox", MOVES,
            **BLOCKED,
        ),
        "copy": Form(
            in_one_call(_with_the_rest(_by_copy_engines)), "the same, by the copy engines", MOVES,
            symmetric=("out",), **copy_reduce.CHUNKED,
        ),
        "multimem": Form(
            lambda call: _two_shot(multimem_kernel)(call, call["x"].numel()), "two_shot in the switch",
            "(1 + 1 / W) |x|", fits=_fits_switch, symmetric=("x", "out"), **BLOCKED,
        ),
    },
    across={
        "nodes": Form(
            _over_nodes, "reduce_scatter over nodes, then all_gather", "2 (N - 1) / W |x| over the network, "
            "2 (W - N) / W |x| in the node", symmetric=("x",), fits=nodes.fits,
            space=nodes_rules.split_space, seconds=nodes_rules.reduce_seconds, roundings=lambda size: 2, **BLOCKED,
        ),
    },
    default=default,
    reference=reference,
    in_place=True,
    backward=Backward(backward, "`all_reduce`; of sums alone", refuses=adds),
    place=lambda call: 0,
    cases=(
        # The third launch meets what the first left in its half of the slots.
        Case(shapes={"x": (20,)}, arguments={"mode": "low_latency"}, launches=3),
        Case(shapes={"x": (20,)}, arguments={"mode": "low_latency"}, ranks=2, launches=3, out="x"),
        Case(shapes={"x": (20,)}, arguments={"mode": "low_latency_two_shot"}, launches=3),
        Case(shapes={"x": (20,)}, arguments={"mode": "low_latency_two_shot"}, ranks=2, launches=3, out="x"),
        Case(shapes={"x": (42,)}, arguments={"mode": "one_shot"}),
        Case(shapes={"x": (42,)}, arguments={"mode": "one_shot"}, ranks=2, out="x"),
        Case(shapes={"x": (42,)}, arguments={"mode": "two_shot"}, ranks=4),
        Case(shapes={"x": (42,)}, arguments={"mode": "two_shot"}, ranks=2, out="x"),
        Case(shapes={"x": (42,)}, arguments={"mode": "two_shot_push"}, launches=3),
        Case(shapes={"x": (42,)}, arguments={"mode": "two_shot_push"}, ranks=2, launches=3, out="x"),
        # More tiles than one, which has 256 elements.
        Case(shapes={"x": (900,)}, arguments={"mode": "inbox", "block": 128}, sms=1),
        Case(shapes={"x": (42,)}, arguments={"mode": "inbox"}, ranks=2, launches=3, out="x"),
        Case(shapes={"x": (100,)}, arguments={"mode": "copy", "chunks": 2}, sms=1),
        Case(shapes={"x": (150,)}, arguments={"mode": "copy", "chunks": 3}, ranks=2, out="x"),
        Case(shapes={"x": (42,)}, arguments={"mode": "multimem"}, ranks=4),
        Case(shapes={"x": (42,)}, arguments={"mode": "multimem"}, ranks=2, multicast=False, out="x"),
        Case(shapes={"x": (5, 1, 3)}, explore=False),
        Case(shapes={"x": ()}, explore=False),
        Case(shapes={"x": (333,)}, arguments={"mode": "low_latency_two_shot", "op": "min"}, explore=False),
        Case(shapes={"x": (13, 3)}, arguments={"mode": "two_shot_push", "op": "max"}, explore=False),
        # One piece, so that one program packs it and another sends it.
        Case(shapes={"x": (30,)}, arguments={"mode": "nodes"}, ranks=2, node_size=1, out="x"),
        Case(shapes={"x": (42,)}, arguments={"mode": "nodes"}, ranks=4, node_size=2, explore=False),
        Case(shapes={"x": (3, 67)}, arguments={"mode": "nodes", "op": "min"}, ranks=8, node_size=2, explore=False),
        Case(shapes={"x": (200,)}, arguments={"mode": "nodes"}, ranks=8, node_size=4, explore=False),
    ),
)  # fmt: skip
