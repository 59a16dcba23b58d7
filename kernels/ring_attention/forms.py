"""Attention of a sequence that is split among the ranks: each rank has its own queries, and the keys of all.

Ring attention of Liu et al., in one launch: Figure 10 of Sul et al., "ParallelKittens".

fused: programs 0 .. num_comm_sms - 1 store this rank's keys and values, chunk by chunk, into an inbox on every peer
    that needs them, and signal each chunk. The others take BLOCK_M queries of a head at a time, and keep maximum, sum
    and result in registers over the keys of all ranks: own keys first, then chunk by chunk those of the peers. A
    program that has pushed its share computes, too. Chunks that a mask or a window hides from a peer are not sent.
copy: the same, but the copy engines push, on a stream of their own.
gluon: the same as copy, with the kernel of gluon.py.
unfused: pkt's all-gather of keys and values, then the same kernel without waits.
parts: the copy engines push, whole ranks at a time, and torch attends to own keys, then to each rank's as they arrive.
    A kernel merges the results. See parts.py.

On one rank nothing travels: fused, copy and unfused are one kernel without waits, and parts is torch's kernel alone.

H heads of queries share KV heads of keys and values, which alone travel: 2 * (size - 1) * B * S * KV * D * itemsize
bytes leave each rank, less what nobody sees. The inboxes hold as much; in unfused those of this rank, too.

With D = 256 the kernel spills: some hundred bytes a thread, for sm_90 and sm_100. Compiled with D = 64 and 128 it was
seen not to, in bf16 and with the default tiles; no test holds that for every D.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import triton.language as tl

from pkt.runtime.launch.launch import beside_launch, cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.pool import outside_pools
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..all_gather import OPERATOR as ALL_GATHER
from ..declaration import Call, Case, Form, Launch, Operand, flag, integer
from ..gradients import Backward, Gradients, Recorded
from ..operator import Operator
from ..shared import attention, copies
from ..shared.checks import FLOATS
from ..shared.grid import barrier_counters, num_programs
from ..shared.replays import in_one_call
from . import rules
from .exact import bound, reference
from .exchange import pushing, windows
from .kernel import Attention, attention_kernel
from .parts import fits as fits_parts
from .parts import planned_parts
from .planning import (
    ARGUMENTS,
    CALL,
    CHUNK,
    GLUON_CHUNK,
    GLUON_TILES,
    NUM_COMM_SMS,
    Plan,
    documents,
    joining,
    of_heads,
    planned,
    shape_of,
    sizes,
)  # fmt: skip
from .sequence import Layout


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
    mode: Literal["fused", "copy", "gluon", "unfused", "parts"] | None = None,
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

    mode: a form that the top of kernels/ring_attention/forms.py describes. Where None, the one of "fused", "gluon" and
        "parts" with the least predicted time (kernels/ring_attention/rules.py). "parts" is torch's attention by cuDNN
        or FlashAttention. On GPUs it takes bf16 and fp16, and D that is a multiple of 8; nowhere cu_seqlens, windows or
        padding. "gluon" takes bf16 and fp16, and D of 64 and 128; on sm_90, with Triton 3.6 to 3.9.
    num_comm_sms: "fused": programs that push, at least 1, by default 16. chunk: rows that one signal stands for in
    "fused" and "copy", rounded up to BLOCK_N; by default 512. In "gluon" by default 2048, rounded up to 128. tiles:
    (BLOCK_M, BLOCK_N, NUM_WARPS, NUM_STAGES): queries of a task and keys of a step, powers of two from 16; not of
    "gluon" and "parts". The same on every rank.

    Scores, sums and the result are fp32 until it is rounded once; the weights are rounded to q's dtype before they are
    multiplied with v. In "parts" this is up to torch, and the result over each rank's keys is rounded once more. A row
    that sees no key is 0, its logarithm -inf. Returns `out`, or (out, lse), complete; the operands may be overwritten
    at once, unless a gradient is needed. Tensors may have any strides. Its gradients, also those of lse, are those of
    `pkt.ring_attention_backward`.

    Symmetric memory kept: (size - 1) times the bytes of k and v, size times in "unfused"; none on one rank. "parts"
    holds up to size results while it runs. Raises ShapeError, DtypeError, CollectiveMismatch, Unsupported.
    """
    values = (causal, layout, scale, window, length, return_lse, mode, num_comm_sms, chunk, tiles)
    found = OPERATOR((q, k, v, out, cu_seqlens), values, world)
    return found if return_lse is True else found[0]


# ----------------------------------------------------------------------------------------------------------- host
def _attention(call: Call, plan: Plan, way: str, programs: int, pushing: int = 0, **buffers: Any) -> Launch:
    """launch(q, k, v, out, cu_seqlens, lse): the kernel. buffers: of `Attention`. pushing: the first programs."""
    world, spans_of = call.world, documents(call)
    blank = dict.fromkeys(("k_inbox_ptr", "v_inbox_ptr", "ready_ptr", "needs_ptr", "queue_ptr", "bar_ptr"))
    same = Attention(
        q_ptr=None, k_ptr=None, v_ptr=None, spans_ptr=None, out_ptr=None, lse_ptr=None, **{**blank, **buffers},
        **sizes(call, plan), num_comm_sms=pushing, WAY=tl.constexpr(way),
    )[6:]  # fmt: skip
    prepare = beside_launch if way == "gathered" else cooperative_launch  # gathered, it waits for nobody
    start = prepare(world, attention_kernel, (programs,), **plan.tiles.options)

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor | None,
        lse: torch.Tensor,
    ) -> Any:  # fmt: skip
        start(Attention(q, k, v, spans_of(cu_seqlens), out, lse, *same), world.device)
        return out, lse

    return launch


def _tasks(call: Call, plan: Plan) -> int:
    return call["b"] * call["h"] * plan.blocks


def _counters(call: Call, plan: Plan, *key: Any) -> SymmetricTensor:
    """Those of the chunks, and one more word. Collective."""
    world, packed = call.world, call["cu_seqlens"] is not None
    count = call["b"] * len(plan.pieces) * (world.size - 1) + 1
    # Documents may hide what a causal mask or a window does not.
    return world.keep(
        (CALL, "ready", count, plan.chunk, packed, *key),
        lambda: signals(count, unwaited=packed, name=f"{CALL}.ready", world=world),
    )


def _fused(call: Call) -> Launch:
    world, plan = call.world, planned(call)
    if world.size == 1:
        return _copied(call)
    pushes, tasks = call["b"] * plan.pushes, _tasks(call, plan)
    programs = num_programs(world, tasks + min(call["num_comm_sms"], pushes))
    pushing = max(1, min(call["num_comm_sms"], programs - 1, pushes))
    keys, values = windows(call)
    counters = _counters(call, plan, "fused", tasks, programs)
    needs = outside_pools(
        lambda: torch.tensor(plan.needs, dtype=torch.int32, device=world.torch_device), world.torch_device
    )
    return _attention(
        call, plan, "fused", programs, pushing, k_inbox_ptr=keys, v_inbox_ptr=values, ready_ptr=counters,
        needs_ptr=needs, queue_ptr=counters[-1:], bar_ptr=barrier_counters(world),
    )  # fmt: skip


def _copied(call: Call) -> Launch:
    plan = joining(call, planned(call))
    programs = num_programs(call.world, _tasks(call, plan))
    if call.world.size == 1:
        return _attention(call, plan, "gathered", programs)

    def attention_to(keys: SymmetricTensor, values: SymmetricTensor, counters: SymmetricTensor) -> Launch:
        buffers = {"k_inbox_ptr": keys, "v_inbox_ptr": values, "ready_ptr": counters}
        return _attention(call, plan, "copied", programs, **buffers)

    return _copying(call, plan, attention_to)


def _gluon(call: Call) -> Launch:
    from .gluon import planned_attention

    plan = joining(call, planned(call, GLUON_TILES))
    if call.world.size == 1:
        return planned_attention(call, plan)
    return _copying(call, plan, functools.partial(planned_attention, call, plan))


def _copying(call: Call, plan: Plan, attention_to: Callable[..., Launch]) -> Launch:
    """Copy engines push, and attention_to(keys, values, counters) waits for it. Collective."""
    world, (keys, values) = call.world, windows(call)
    counters = _counters(call, plan, "copied", call["b"], call["s"], call["g"] * call["d"])
    begin, side = copies.counting(world, counters[-1:]), copies.Side(world)
    push = pushing(call, plan, plan.needs, (keys, values), counters, side)
    compute = attention_to(keys, values, counters)

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor | None,
        lse: torch.Tensor,
    ) -> Any:  # fmt: skip
        begin()  # before overwrite: every rank's launch before has ended
        sent = push(k, v)
        found = compute(q, k, v, out, cu_seqlens, lse)
        side.reach(sent)
        return found

    return launch


def _unfused(call: Call) -> Launch:
    world, plan, k = call.world, planned(call), call["k"]
    if world.size == 1:
        return _copied(call)
    shape = (world.size * call["b"], call["s"], call["g"], call["d"])
    key = (CALL, "gathered", shape, call.dtype)

    def make() -> list[Any]:
        return [empty(*shape, dtype=call.dtype, name=f"{CALL}.{name}", world=world) for name in ("keys", "values")]

    whole = world.keep(key, make)
    batched = k.view(shape[0] // world.size, *shape[1:])
    gather = [ALL_GATHER.planned(world, batched, x) for x in whole]
    compute = _attention(call, plan, "gathered", num_programs(world, _tasks(call, plan)))
    plain = [x.plain() for x in whole]

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor | None,
        lse: torch.Tensor,
    ) -> Any:  # fmt: skip
        for move, x, to in zip(gather, (k, v), whole):
            move(x, to)
        return compute(q, *plain, out, cu_seqlens, lse)

    return launch


def _backward(call: Recorded) -> Gradients:
    """By `pkt.ring_attention_backward`, in the form that the call was told to take, or "fused" where there is none of
    the name. "parts" takes no gradients of lse."""
    kept = (call[name] for name in ("q", "k", "v", "out", "lse"))
    found = call.operator(
        "ring_attention_backward", call.grad, *kept, dlse=call.grads[1] if call["return_lse"] else None,
        cu_seqlens=call["cu_seqlens"], mode=_behind(call["mode"], call["return_lse"]),
        **{name: call[name] for name in ARGUMENTS},
    )  # fmt: skip
    return dict(zip(("q", "k", "v"), found))


def _behind(mode: str | None, with_lse: bool) -> str | None:
    """The form of the backward pass behind a call in the form `mode`."""
    if mode == "parts":
        return None if with_lse else mode
    return mode if mode in (None, "gluon") else "fused"


# ---------------------------------------------------------------------------------------------------- declaration
TILES = {"tiles": attention.default_tiles}
SMALL = {"tiles": (16, 16)}
SHAPES = dict.fromkeys(("q", "k", "v"), (1, 3, 1, 4))
EIGHT = dict.fromkeys(SHAPES, (1, 3, 1, 8))  # the least D that torch's kernels for GPUs take
TILED = dict.fromkeys(SHAPES, (2, 150, 2, 64))  # more than a tile of the Gluon kernel
HALF = torch.bfloat16  # these kernels take no fp32
CAUSAL = {"causal": True, "return_lse": True}
OPERATOR = Operator(
    ring_attention,
    tensors={
        "q": Operand("...", FLOATS), "k": Operand("..."), "v": Operand("..."),
        "cu_seqlens": Operand("...", (torch.int32,), optional=True, same=True),
    },
    result=shape_of,
    also={"lse": Operand(of_heads, (torch.float32,))},
    arguments={**ARGUMENTS, "return_lse": flag},
    settings={"num_comm_sms": integer(1), "chunk": integer(1), "tiles": attention.tiles},
    forms={
        "fused": Form(
            _fused, "some programs push keys and values, the others attend to what has arrived", "2 (W - 1) |k|",
            settings={"num_comm_sms": NUM_COMM_SMS, "chunk": CHUNK, **TILES},
            small={"num_comm_sms": 1, "chunk": 16, **SMALL},
        ),
        "copy": Form(
            in_one_call(_copied), "push by the copy engines, on a stream of its own", "2 (W - 1) |k|",
            settings={"chunk": CHUNK, **TILES}, small={"chunk": 16, **SMALL},
        ),
        "gluon": Form(
            in_one_call(_gluon), "`copy`, with the kernel in specialised warps", "2 (W - 1) |k|",
            fits=rules.fits_gluon, settings={"chunk": GLUON_CHUNK}, gpu=True,
        ),
        "unfused": Form(
            in_one_call(_unfused), "`pkt.all_gather` of keys and values, then the kernel without waits",
            "2 (W - 1) |k|", settings=TILES, small=SMALL,
        ),
        "parts": Form(
            planned_parts, "push by the copy engines; torch's attention to each rank's keys, then a merge",
            "2 (W - 1) |k|", fits=fits_parts, roundings=lambda size: 2,
        ),
    },
    default=rules.default,
    reference=reference,
    bound=bound,
    backward=Backward(
        _backward, "`ring_attention_backward`",
        saves=dict.fromkeys(("q", "k", "v"), ("q", "k", "v", "cu_seqlens", "out", "lse")),
    ),
    cases=(
        Case(shapes=SHAPES, arguments={"mode": "fused", **CAUSAL}, out="new"),  # rank 0 waits for nobody
        Case(shapes=SHAPES, arguments={"mode": "copy", **CAUSAL}, out="new"),
        Case(shapes=SHAPES, arguments={"mode": "unfused", "window": (4, 1), "return_lse": True}, explore=False),
        Case(shapes=EIGHT, arguments={"mode": "parts", "layout": "zigzag", **CAUSAL}, out="new", dtype=HALF),
        Case(shapes=TILED, arguments={"mode": "gluon", **CAUSAL}, out="new", dtype=HALF, explore=False),
    ),
)  # fmt: skip
