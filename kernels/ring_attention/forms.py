"""Attention of a sequence that is split among the ranks: each rank has its own queries, and the keys of all.

Ring attention of Liu et al., in one launch: Figure 10 of Sul et al., "ParallelKittens".

fused: programs 0 .. num_comm_sms - 1 store this rank's keys and values, chunk by chunk, into an inbox on every peer
    that needs them, and signal each chunk. The others take BLOCK_M queries of a head at a time, and keep maximum, sum
    and result in registers over the keys of all ranks: own keys first, then chunk by chunk those of the peers. A
    program that has pushed its share computes, too. Chunks that a mask or a window hides from a peer are not sent.
copy: the same, but the copy engines push, on a stream of their own.
unfused: pkt's all-gather of keys and values, then the same kernel without waits.

H heads of queries share KV heads of keys and values, which alone travel: 2 * (size - 1) * B * S * KV * D * itemsize
bytes leave each rank, less what nobody sees. The inboxes hold as much; in unfused those of this rank, too.

With D = 256 the kernel spills: some hundred bytes a thread, for sm_90 and sm_100. Compiled with D = 64 and 128 it was
seen not to, in bf16 and with the default tiles; no test holds that for every D.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from pkt.runtime.launch.launch import beside, cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.world import World

from ..all_gather import OPERATOR as ALL_GATHER
from ..declaration import Call, Case, Form, Launch, Operand, choice, integer, number
from ..operator import Operator
from ..shared import attention, copies
from ..shared.checks import FLOATS
from ..shared.grid import COPY_BYTES, barrier_counters, num_programs
from . import sequence
from .exact import bound, reference, view_of
from .kernel import Attention, attention_kernel
from .sequence import LAYOUTS, Layout, View

CALL = "ring_attention"
NUM_COMM_SMS = 16
CHUNK = 512


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = False,
    layout: Layout = "contiguous",
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    length: int | None = None,
    return_lse: bool = False,
    mode: Literal["fused", "copy", "unfused"] | None = None,
    num_comm_sms: int | None = None,
    chunk: int | None = None,
    tiles: Sequence[int] | None = None,
    world: World | None = None,
) -> Any:
    """Attention of this rank's queries to the keys of all ranks: softmax(scale * q @ k.T) @ v. Collective.

    The sequence has size * S positions; each rank holds the same number S of rows, in the order of `layout`, see
    `pkt.shard_sequence` and `pkt.sequence_positions`.

    q: (B, S, H, D), D up to 256; bf16, fp16 or fp32. k, v: (B, S, KV, D) of q's dtype; H is a multiple of KV, and head
        h of the queries sees head h // (H / KV) of the keys. The same shapes on every rank. With cu_seqlens all three
        are packed: (S, H, D) and (S, KV, D).
    out: q's shape and dtype, shares no memory with the operands. A new tensor where None.
    cu_seqlens: int32 (documents + 1,), the same on every rank: document i has the positions cu_seqlens[i] to
        cu_seqlens[i + 1] of the whole sequence, of any lengths, and sees itself only. It is read on the device, so a
        replayed graph may find other lengths.
    causal: a query sees keys up to its own position. window: (left, right): a query at position p sees the keys from
        p - left to p + right; -1 for no limit on a side.
    layout: "contiguous": rank r holds part r of size parts. "zigzag": of 2 * size chunks rank r holds chunks r and
        2 * size - 1 - r, with which all ranks have the same work under a causal mask.
    scale: of the scores, a positive number; 1 / sqrt(D) where None.
    length: positions from here on are padding: keys that nobody sees, and rows of zeros. None: there are none. With
        cu_seqlens its last element says so.
    return_lse: also return the natural logarithm of the sum of exponentials, fp32 (B, H, S), packed (H, S).

    mode: a form that the top of kernels/ring_attention/forms.py describes; "fused" where None.
    num_comm_sms: "fused": programs that push, at least 1, by default 16. chunk: rows that one signal stands for in
    "fused" and "copy", rounded up to BLOCK_N; by default 512. tiles: (BLOCK_M, BLOCK_N, NUM_WARPS, NUM_STAGES): queries
    of a task and keys of a step, powers of two from 16. The same on every rank.

    Scores, sums and the result are fp32 until it is rounded once; the weights are rounded to q's dtype before they are
    multiplied with v. A row that sees no key is 0, its logarithm -inf. Returns `out`, or (out, lse), complete; the
    operands may be overwritten at once. Tensors may have any strides. No gradients yet. It has not run on GPUs.

    Symmetric memory kept: (size - 1) times the bytes of k and v, size times in "unfused". Raises ShapeError,
    DtypeError, CollectiveMismatch, Unsupported.
    """
    values = (causal, layout, scale, window, length, return_lse, mode, num_comm_sms, chunk, tiles)
    found = OPERATOR((q, k, v, out, cu_seqlens), values, world)
    return found if return_lse is True else found[0]


# --------------------------------------------------------------------------------------------------------- checks
def _shape(call: Call) -> tuple[int, ...]:
    """The shape of the result; learns its sizes. Raises ShapeError."""
    shape = attention.shape(call)
    total, length = call.world.size * call["s"], call["length"]
    if length is not None and (call["cu_seqlens"] is not None or length > total):
        packed = call["cu_seqlens"] is not None
        wanted = "None with cu_seqlens, whose last element says it" if packed else f"at most {total}, size * S"
        raise call.refuse("length", length, wanted)
    return shape


# ----------------------------------------------------------------------------------------------------------- host
class _Plan(NamedTuple):
    """What the forms' plans have in common."""

    view: View
    zigzag: bool
    tiles: attention.Tiles
    chunk: int
    pieces: list[sequence.Part]  # chunks of this rank
    tasks: int
    needs: list[list[bool]]  # [d - 1][c]: rank + d needs chunk c


def _planned(call: Call) -> _Plan:
    world, s, tiles, layout = call.world, call["s"], call["tiles"], call["layout"]
    rank, size = world.rank, world.size
    view = view_of(s, size, call["causal"], call["window"], call["length"])
    most = triton.cdiv(min(call.settings.get("chunk", CHUNK), s), tiles.block_n) * tiles.block_n
    chunks = sequence.pieces(s, layout, rank, size, most)
    tasks = call["b"] * call["h"] * len(sequence.pieces(s, layout, rank, size, tiles.block_m))
    needs = [[sequence.needed(c, view, s, layout, (rank + d) % size, size) for c in chunks] for d in range(1, size)]
    return _Plan(view, layout == "zigzag", tiles, most, chunks, tasks, needs)


def _attention(call: Call, plan: _Plan, way: str, programs: int, pushing: int = 0, **buffers: Any) -> Launch:
    """launch(q, k, v, out, cu_seqlens, lse): the kernel. buffers: of `Attention`. pushing: the first programs."""
    world, s, d = call.world, call["s"], call["d"]
    scale = d**-0.5 if call["scale"] is None else call["scale"]
    blank = dict.fromkeys(("k_inbox_ptr", "v_inbox_ptr", "ready_ptr", "needs_ptr", "queue_ptr", "bar_ptr"))
    block_d = triton.next_power_of_2(max(d, 16))
    same = Attention(
        q_ptr=None, k_ptr=None, v_ptr=None, spans_ptr=None, out_ptr=None, lse_ptr=None, **{**blank, **buffers},
        B=call["b"], S=s,
        **plan.view._asdict(), scale=scale / math.log(2), num_comm_sms=pushing,
        H=tl.constexpr(call["h"]), KV=tl.constexpr(call["g"]), D=tl.constexpr(d),
        WAY=tl.constexpr(way), ZIGZAG=tl.constexpr(plan.zigzag), WHOLE=tl.constexpr(d == block_d),
        BLOCK_M=tl.constexpr(plan.tiles.block_m), BLOCK_N=tl.constexpr(plan.tiles.block_n),
        BLOCK_D=tl.constexpr(block_d), CHUNK=tl.constexpr(plan.chunk),
        BLOCK=tl.constexpr(COPY_BYTES // 2 // call.dtype.itemsize if plan.chunk > 16 else 64),
    )[6:]  # fmt: skip
    options = {"num_warps": plan.tiles.num_warps, "num_stages": plan.tiles.num_stages}
    if way == "gathered":  # it waits for nobody

        def start(*arguments: Any) -> None:
            beside(attention_kernel, (programs,), *arguments, **options)
    else:
        start = cooperative_launch(world, attention_kernel, (programs,), **options)
    packed, total = call["cu_seqlens"] is not None, s * world.size
    at = sequence.positions(s, call["layout"], world.rank, world.size).int().to(world.torch_device)

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor | None,
        lse: torch.Tensor,
    ) -> Any:  # fmt: skip
        documents = sequence.spans(cu_seqlens, at, total) if packed and cu_seqlens is not None else None
        start(Attention(q, k, v, documents, out, lse, *same), world.device)
        return out, lse

    return launch


def _inboxes(call: Call, plan: _Plan, what: str, more: int, *key: Any) -> tuple[Any, Any, Any]:
    """Inboxes of keys and values, and counters with `more` words behind those of the chunks. Collective."""
    world, b, s, g, d = call.world, call["b"], call["s"], call["g"], call["d"]
    count, packed = (world.size - 1) * b * len(plan.pieces) + more, call["cu_seqlens"] is not None

    def make() -> tuple[Any, Any, Any]:
        shape = (max(world.size - 1, 1), b, s, g, d) if world.size > 1 else (1,)
        keys, values = (
            empty(*shape, dtype=call.dtype, name=f"{CALL}.{name}", world=world) for name in ("keys", "values")
        )  # fmt: skip
        # Documents may hide what a causal mask or a window does not.
        return keys, values, signals(count, unwaited=packed, name=f"{CALL}.ready", world=world)

    return world.keep((CALL, what, b, s, g, d, call.dtype, plan.chunk, plan.zigzag, packed, *key), make)


def _fused(call: Call) -> Launch:
    world, plan = call.world, _planned(call)
    pushes = call["b"] * len(plan.pieces) if world.size > 1 else 0
    programs = num_programs(world, plan.tasks + min(call["num_comm_sms"], pushes))
    pushing = max(1, min(call["num_comm_sms"], programs - 1, pushes))
    keys, values, counters = _inboxes(call, plan, "fused", 1, plan.tasks, programs)
    needs = torch.tensor(plan.needs, dtype=torch.int32, device=world.torch_device)
    return _attention(
        call, plan, "fused", programs, pushing, k_inbox_ptr=keys, v_inbox_ptr=values, ready_ptr=counters,
        needs_ptr=needs, queue_ptr=counters[-1:], bar_ptr=barrier_counters(world),
    )  # fmt: skip


def _copied(call: Call) -> Launch:
    world, plan, (b, s, run) = call.world, _planned(call), (call["b"], call["s"], call["g"] * call["d"])
    rank, size, chunks = world.rank, world.size, len(plan.pieces)
    keys, values, counters = _inboxes(call, plan, "copied", 1)
    this_launch, itemsize, side = counters[-1:], call.dtype.itemsize, copies.Side(world)
    begin, bar = cooperative_launch(world, copies.begin_kernel, (1,), num_warps=1), barrier_counters(world)
    shard, theirs = copies.layout(b, s * run), copies.layout(max(size - 1, 1), b, s * run)
    parts = []
    for i, c, d in ((i, c, d) for i in range(b) for c in range(chunks) for d in range(1, size)):
        piece, peer, at = plan.pieces[c], (rank + d) % size, ((d - 1) * b + i) * chunks + c
        if plan.needs[d - 1][c]:
            here = slice(piece.row * run, (piece.row + piece.rows) * run)
            boxes = copies.boxes(peer, theirs[d - 1, i, here], shard[i, here], itemsize)
            moves = [copies.sending(world, boxes, inbox) for inbox in (keys, values)]
            parts.append((*moves, copies.telling(world, peer, counters, at)))
    this = this_launch.plain()
    compute = _attention(
        call, plan, "copied", num_programs(world, plan.tasks), k_inbox_ptr=keys, v_inbox_ptr=values, ready_ptr=counters
    )

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor | None,
        lse: torch.Tensor,
    ) -> Any:  # fmt: skip
        begin(this_launch, bar, 0, world.device)  # before overwrite: every rank's launch before has ended
        with side.behind() as stream:
            for move_keys, move_values, tell in parts:
                move_keys(k, stream)
                move_values(v, stream)
                tell(this, stream)
            sent = side.mark()
        found = compute(q, k, v, out, cu_seqlens, lse)
        side.reach(sent)
        return found

    return launch


def _unfused(call: Call) -> Launch:
    world, plan, k = call.world, _planned(call), call["k"]
    shape = (world.size * call["b"], call["s"], call["g"], call["d"])
    key = (CALL, "gathered", shape, call.dtype)

    def make() -> list[Any]:
        return [empty(*shape, dtype=call.dtype, name=f"{CALL}.{name}", world=world) for name in ("keys", "values")]

    whole = world.keep(key, make)
    batched = k.view(shape[0] // world.size, *shape[1:])
    gather = [ALL_GATHER.planned(world, batched, x) for x in whole]
    compute = _attention(call, plan, "gathered", num_programs(world, plan.tasks))
    plain = [x.plain() for x in whole]

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor | None,
        lse: torch.Tensor,
    ) -> Any:  # fmt: skip
        for move, x, to in zip(gather, (k, v), whole):
            move(x, to)
        return compute(q, *plain, out, cu_seqlens, lse)

    return launch


def _from_one(call: Call) -> dict[str, Any]:
    """Settings for which 0 has no meaning."""
    for name in ("num_comm_sms", "chunk"):
        if name in call.settings and call[name] < 1:
            raise call.refuse(name, call[name], "at least 1")
    return call.settings


# ---------------------------------------------------------------------------------------------------- declaration
TILES = {"tiles": attention.default_tiles}
SMALL = {"tiles": (16, 16)}
SHAPES = dict.fromkeys(("q", "k", "v"), (1, 3, 1, 4))
CAUSAL = {"causal": True, "return_lse": True}
OPERATOR = Operator(
    ring_attention,
    tensors={
        "q": Operand("...", FLOATS), "k": Operand("..."), "v": Operand("..."),
        "cu_seqlens": Operand("...", (torch.int32,), optional=True, same=True),
    },
    result=_shape,
    also={"lse": Operand(lambda call: "b h s" if call["cu_seqlens"] is None else "h s", (torch.float32,))},
    arguments={
        "causal": attention.flag, "layout": choice(*LAYOUTS), "scale": number(above=0), "window": attention.window,
        "length": integer(0), "return_lse": attention.flag,
    },
    settings={"num_comm_sms": integer(0), "chunk": integer(0), "tiles": attention.tiles},
    forms={
        "fused": Form(
            _fused, "some programs push keys and values, the others attend to what has arrived", "2 (W - 1) |k|",
            settings={"num_comm_sms": NUM_COMM_SMS, "chunk": CHUNK, **TILES}, complete=_from_one,
            small={"num_comm_sms": 1, "chunk": 16, **SMALL},
        ),
        "copy": Form(
            copies.in_one_call(_copied), "push by the copy engines, on a stream of its own", "2 (W - 1) |k|",
            settings={"chunk": CHUNK, **TILES}, complete=_from_one, small={"chunk": 16, **SMALL},
        ),
        "unfused": Form(
            _unfused, "`pkt.all_gather` of keys and values, then the kernel without waits", "2 (W - 1) |k|",
            settings=TILES, small=SMALL,
        ),
    },
    reference=reference,
    bound=bound,
    cases=(
        Case(shapes=SHAPES, arguments={"mode": "fused", **CAUSAL}, out="new"),  # rank 0 waits for nobody
        Case(shapes=SHAPES, arguments={"mode": "copy", **CAUSAL}, out="new"),
        Case(shapes=SHAPES, arguments={"mode": "unfused", "window": (4, 1), "return_lse": True}, explore=False),
    ),
)  # fmt: skip
