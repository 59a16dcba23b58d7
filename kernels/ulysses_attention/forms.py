"""Ulysses attention: sequences are split among the ranks before and behind it, and heads within.

Each rank holds some positions of all heads. It gets all positions of its heads of q, k and v, attends to them, and each
position's result goes back to its rank: Ulysses of Jacobs et al., "DeepSpeed Ulysses".

push: one launch. Programs 0 .. num_comm_sms - 1 store heads into inboxes on their ranks, one group of heads after the
    other, and signal. The others take BLOCK_M queries of a head whose group has arrived from all ranks, so that the
    first groups are computed with while the others travel. Each finished tile goes to the rank of its positions: into
    its `out` if that is symmetric, else into an inbox, from which that rank copies it.
copy: copy engines push one group of heads after the other, two streams attend in turn to each group that has arrived,
    and copy engines take its result home meanwhile, see `groups`. All SMs compute.
gluon: the same copies and one launch, of ring attention's kernel in specialised warps, which waits for each group of
    heads and stores each finished tile on the rank of its positions.
unfused: pkt's all-to-all of q, k and v, attention on each rank, and pkt's all-to-all of the result.

In "copy" and "unfused" attention is torch's. With documents or windows it would need masks and skip nothing, so there
it is that of `ring_attention` on one rank, see `local`.

H heads of queries share KV heads of keys and values. Each rank has H / size heads of queries. A head of keys goes to
all ranks whose queries need it, so KV may be less than the number of ranks. A rank gets a head of keys for each
gcd(H / size, H / KV) of its heads of queries: where neither of the two divides the other, it may get one twice.

(size - 1) / size * (2 |q| + 2 |k'|) bytes leave each rank, where k' is k with its heads repeated for the ranks that
need them.

Compiled with D = 64 and 128 in bf16 "push" spills no register, on sm_90 and sm_100; with D = 256 it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.pool import outside_pools
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..declaration import Call, Case, Form, Launch, integer
from ..gradients import Backward, required
from ..operator import Operator
from ..ring_attention import exact, sequence
from ..shared import attention
from ..shared.checks import symmetric_out
from ..shared.grid import COPY_BYTES, barrier_counters, num_programs
from ..shared.replays import in_one_call
from . import rules
from .groups import copied
from .heads import heads_of, is_group
from .kept import ulysses_attention_kept
from .kernel import Exchange, exchange_kernel
from .unfused import ARGUMENTS, TENSORS, backward, bound, local_of, reference, shape, unfused

CALL = "ulysses_attention"
NUM_COMM_SMS = 16
CHUNK = 512
REGISTERS = 1 << 16
"""Of an SM, on which one program runs."""


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    mode: Literal["push", "copy", "gluon", "unfused"] | None = None,
    num_comm_sms: int | None = None,
    heads: int | None = None,
    chunk: int | None = None,
    tiles: Sequence[int] | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks: softmax(scale * q @ k.T) @ v. Collective.

    The sequence has size * S positions; rank r holds those from r * S on, of all heads, as of `pkt.shard_sequence`.

    q: (B, S, H, D), D up to 256; bf16, fp16 or fp32; H is a multiple of the number of ranks. k, v: (B, S, KV, D) of
        q's dtype; H is a multiple of KV, which may be less than the number of ranks; head h of the queries sees head
        h // (H / KV) of the keys. The same shapes on every rank. With cu_seqlens all three are packed: (S, H, D) and
        (S, KV, D).
    out: q's shape and dtype, shares no memory with the operands. A new tensor where None. Into a symmetric one "push"
        and "gluon" store the result without a copy.
    cu_seqlens: int32 (documents + 1,), the same on every rank: document i has the positions cu_seqlens[i] to
        cu_seqlens[i + 1] of the whole sequence, of any lengths, and sees itself only. It is read on the device, so a
        replayed graph may find other lengths.
    causal: a query sees keys up to its own position. window: (left, right): a query at position p sees the keys from
        p - left to p + right; -1 for no limit on a side.
    scale: of the scores, a positive number; 1 / sqrt(D) where None.

    mode: a form that the top of kernels/ulysses_attention/forms.py describes. Where None, the one of "copy", "gluon"
    and "unfused" with the least predicted time (kernels/ulysses_attention/rules.py). With cu_seqlens or window "gluon",
    or "unfused" where that does not run; where `heads` is given "copy". Where gradients are wanted, in bf16 and fp16,
    "unfused", and the backward pass finds what each rank attended with and the result (kept.py). "gluon" takes bf16 and
    fp16, and D of 64 and 128; on sm_90, with Triton 3.6 to 3.9, on 2 ranks or more.
    heads: for "push", "copy" and "gluon": heads of queries in a group, which divides the H / size of a rank, and is a
    divisor or a multiple of those that share a head of keys there. By default in "push" as few as make 8 groups, in
    "gluon" more where these have few bytes, in "copy" the number with the least predicted time.
    For "push" alone: num_comm_sms: programs that push, at least 1, by default 16. chunk: rows of a group that travel
    with one signal, by default 512. tiles: (BLOCK_M, BLOCK_N, NUM_WARPS, NUM_STAGES): queries of a task and keys of a
    step, powers of two from 16. The same on every rank.

    Scores, sums and the result are fp32 until it is rounded once; the weights are rounded to q's dtype before they are
    multiplied with v. In "copy" and "unfused" without cu_seqlens and windows this is up to torch. A row that sees no
    key is 0. Returns `out`, complete; the operands may be overwritten at once. Tensors may have any strides. It
    has run on 2 and 4 GPUs, "gluon" on 2.

    Symmetric memory kept: the bytes of q, of the heads of k and v that a rank gets, and in most calls once more those
    of q for the result, which in "copy" and "gluon" a symmetric `out` saves. Raises ShapeError, DtypeError,
    CollectiveMismatch, Unsupported.
    """
    chosen = (mode, num_comm_sms, heads, chunk, tiles)
    if torch.is_grad_enabled() and required((q, k, v)) and _keeps(q, (out, *chosen)):
        told: dict[str, Any] = {"cu_seqlens": cu_seqlens, "causal": causal, "scale": scale, "window": window}
        return ulysses_attention_kept(q, k, v, **told, world=world)[0]
    return OPERATOR((q, k, v, out, cu_seqlens), (causal, scale, window, *chosen), world)


def _keeps(q: Any, chosen: Sequence[Any]) -> bool:
    """Whether the backward pass of a call shall find what attention had and gave. torch has better kernels for fp32."""
    if not isinstance(q, torch.Tensor) or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    return q.numel() > 0 and all(value is None for value in chosen)


# --------------------------------------------------------------------------------------------------------- checks
def default_tiles(call: Call) -> attention.Tiles:
    """Those of this rank's GPU; in the simulator those of an H200."""
    known = call.on_gpu and torch.cuda.get_device_capability(call.world.torch_device)
    return tiles_on(known or (9, 0), call)


def tiles_on(capability: tuple[int, int], call: Call) -> attention.Tiles:
    """Those of GPUs of this compute capability: as large as registers allow."""
    tiles = attention.default_tiles(call)
    few = capability >= (10, 0) and call["d"] > 64 and call.dtype.itemsize == 2
    return tiles._replace(block_n=32) if few else tiles


def _settled(call: Call) -> dict[str, Any]:
    """The settings, which must suit the heads."""
    held = heads_of(call["h"], call["g"], call.world.size) if call["h"] else None
    if held and not is_group(call["heads"], held):
        wanted = f"a divisor of {held.queries} and a divisor or a multiple of {held.sharing}"
        raise call.refuse("heads", call["heads"], wanted)
    return call.settings


# ----------------------------------------------------------------------------------------------------------- host
def _push(call: Call) -> Launch:
    world, (b, s, d), size, tiles = call.world, (call["b"], call["s"], call["d"]), call.world.size, call["tiles"]
    held, group, view = heads_of(call["h"], call["g"], size), call["heads"], _view(call)
    groups, direct, piece = held.queries // group, isinstance(call["out"], SymmetricTensor), min(call["chunk"], s)
    pieces, each = triton.cdiv(s, piece), triton.cdiv(s, tiles.block_m)
    pushes, tasks = b * groups * pieces, b * held.queries * size * each
    programs = num_programs(world, tasks + min(call["num_comm_sms"], pushes))
    pushing = max(1, min(call["num_comm_sms"], programs - 1, pushes))
    block_d = triton.next_power_of_2(max(d, 16))
    block_r = max(COPY_BYTES // 2 // call.dtype.itemsize // block_d, 1)

    def make() -> tuple[Any, ...]:
        shapes = {"queries": held.queries, "keys": held.keys, "values": held.keys}
        inboxes = [
            empty(b, n, size * s, d, dtype=call.dtype, name=f"{CALL}.{name}", world=world) for name, n in shapes.items()
        ]
        home = None if direct else empty(b, s, call["h"], d, dtype=call.dtype, name=f"{CALL}.results", world=world)
        return *inboxes, home, signals((b + size) * groups + 1, name=f"{CALL}.ready", world=world)

    key = (CALL, "push", b, s, *held, d, call.dtype, group, direct, pushes, tasks, programs)
    queries, keys, values, results, counters = world.keep(key, make)
    same = Exchange(
        q_ptr=None, k_ptr=None, v_ptr=None, spans_ptr=None, out_ptr=None, q_inbox_ptr=queries, k_inbox_ptr=keys,
        v_inbox_ptr=values, out_inbox_ptr=results, ready_ptr=counters, done_ptr=counters[b * groups :],
        queue_ptr=counters[-1:], bar_ptr=barrier_counters(world), tasks=tasks, tiles=each, pieces=pieces,
        B=b, R=s, S=size * s, **view._asdict(),
        scale=_scale(call) / math.log(2), num_comm_sms=pushing,
        HEADS=tl.constexpr(held.queries), COPIES=tl.constexpr(held.keys), ALL_KV=tl.constexpr(call["g"]),
        KV=tl.constexpr(1), D=tl.constexpr(d), GROUP=tl.constexpr(group), DIRECT=tl.constexpr(direct),
        WHOLE=tl.constexpr(d == block_d), PIECE=tl.constexpr(piece),
        BLOCK_R=tl.constexpr(min(block_r, triton.next_power_of_2(piece))),
        BLOCK_M=tl.constexpr(tiles.block_m), BLOCK_N=tl.constexpr(tiles.block_n), BLOCK_D=tl.constexpr(block_d),
    )[5:]  # fmt: skip
    registers = min(255, REGISTERS // (32 * tiles.num_warps))
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "maxnreg": registers}
    start = cooperative_launch(world, exchange_kernel, (programs,), **options)
    device = world.torch_device
    at = outside_pools(lambda: torch.arange(size * s, dtype=torch.int32, device=device), device)

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> torch.Tensor:
        documents = None if cu_seqlens is None else sequence.spans(cu_seqlens, at, size * s)
        start(Exchange(q, k, v, documents, out, *same), world.device)
        return out

    return launch


def _copied(call: Call) -> Launch:
    return copied(call, local_of(call))


def _gluon(call: Call) -> Launch:
    from .gluon import planned_heads

    return planned_heads(call)


def _view(call: Call) -> sequence.View:
    return exact.view_of(call["s"], call.world.size, call["causal"], call["window"], None)


def _scale(call: Call) -> float:
    return call["d"] ** -0.5 if call["scale"] is None else call["scale"]


# ---------------------------------------------------------------------------------------------------- declaration
SAVED = ("q", "k", "v", "cu_seqlens")
SMALL = {"num_comm_sms": 1, "heads": 1, "chunk": 16, "tiles": (16, 16)}
SHAPES = {"q": "1 3 W*2 64", "k": (1, 3, 1, 64), "v": (1, 3, 1, 64)}  # kernels are compiled for this D
TILED = {"q": "2 150 W*2 64", "k": "2 150 W*1 64", "v": "2 150 W*1 64"}  # more than a tile of the Gluon kernel
HALF = torch.bfloat16  # it takes no fp32
OPERATOR = Operator(
    ulysses_attention,
    tensors=TENSORS,
    result=shape,
    arguments=ARGUMENTS,
    settings={
        "num_comm_sms": integer(1), "heads": integer(1), "chunk": integer(1), "tiles": attention.tiles,
    },
    forms={
        "push": Form(
            _push, "some programs push groups of heads, the others attend to those that have arrived",
            "2 (W - 1) / W (|q| + |k'|)", agrees=symmetric_out, complete=_settled, small=SMALL,
            settings={
                "num_comm_sms": NUM_COMM_SMS, "heads": rules.pushed_heads, "chunk": CHUNK, "tiles": default_tiles,
            },
        ),
        "copy": Form(
            _copied, "copy engines push groups of heads, attention to each that has arrived",
            "2 (W - 1) / W (|q| + |k'|)", agrees=symmetric_out, complete=_settled, small={"heads": 1},
            settings={"heads": rules.default_heads},
        ),
        "gluon": Form(
            in_one_call(_gluon), "copies as in `copy`; one kernel in specialised warps attends and stores home",
            "2 (W - 1) / W (|q| + |k'|)", agrees=symmetric_out, complete=_settled, fits=rules.fits_gluon, gpu=True,
            settings={"heads": rules.gluon_heads},
        ),
        "unfused": Form(
            unfused, "`pkt.all_to_all` of q, k and v, attention, and `pkt.all_to_all` back",
            "2 (W - 1) / W (|q| + |k'|)", agrees=symmetric_out,
        ),
    },
    default=rules.default,
    reference=reference,
    bound=bound,
    backward=Backward(
        backward,
        "`all_to_all` of the gradient, attention's gradients on each rank, `all_to_all` back; in fp32, or where a form "
        "was asked for, of q, k and v too, and attention once more",
        saves=dict.fromkeys("qkv", SAVED),
    ),
    cases=(
        Case(shapes=SHAPES, arguments={"mode": "push", "causal": True}, out="new", ranks=2),
        Case(shapes=dict.fromkeys("qkv", "1 3 W*1 4"), arguments={"mode": "push"}, ranks=2),
        Case(shapes={"q": "1 3 W*2 4", "k": (1, 3, 1, 4), "v": (1, 3, 1, 4)}, arguments={"mode": "copy"}, out="new"),
        Case(shapes=SHAPES, arguments={"mode": "copy", "causal": True}, explore=False),
        Case(shapes=TILED, arguments={"mode": "gluon", "causal": True}, out="new", dtype=HALF, explore=False, ranks=2),
        Case(shapes=SHAPES, arguments={"mode": "unfused", "window": (4, 1)}, explore=False),
    ),
)  # fmt: skip
