"""Dispatch: every token goes to the ranks of its experts, and arrives there in the order of experts.

Rows of an expert are in the order of source ranks, then of their tokens, in every run. A rank sends a token once to
each other rank that has an expert of it. Counts, offsets and indices stay on the device.

push: one launch, see push.py. Rank by rank tokens go into inboxes, and from there into their rows.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl

from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.world import World

from ..declaration import Call, Case, Form, Launch, Operand, Shape, integer
from ..operator import Operator
from ..shared.checks import FLOATS
from ..shared.grid import COPY_OPTIONS, num_programs
from .arguments import Buffers, Result, Size
from .push import dispatch_kernel
from .reference import reference, undefined
from .result import Dispatched, chunk_of, slots_of


def dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    out: torch.Tensor | None = None,
    *,
    max_tokens: int,
    alignment: int = 1,
    mode: Literal["push"] | None = None,
    num_comm_sms: int | None = None,
    world: World | None = None,
) -> Dispatched:
    """The tokens that have chosen this rank's experts, from all ranks, in the order of experts. Collective.

    x: (T, H), this rank's tokens; ranks may have different T, and none. topk_idx: int32 or int64 (T, K), K from 1 to
    16, the experts of each token; -1, or any number that is no expert's, for none. topk_weights: fp32 (T, K).
    num_experts: of all ranks; rank r has experts r * E to (r + 1) * E - 1, E = num_experts / size, rounded up.
    max_tokens: rows of the result on every rank, padding included. alignment: the rows of each expert are padded with
    zeros to a multiple of it. out: (max_tokens, H) of x's dtype for the rows; a new tensor where None. num_comm_sms:
    programs that send, while the others place what arrives. Returns `Dispatched`, whose tensors `pkt.grouped_matmul`
    and `pkt.combine` take. The host waits for nothing, so a CUDA graph replays with other routing.

    If a rank would need more than max_tokens rows, it receives none: its offsets are 0, its counts are true, and
    `Dispatched.check` raises an error that says how many rows it needs. With the greatest T of any rank,
    size * T * K + E * (alignment - 1) rows are always enough.

    Symmetric memory kept: max_tokens tokens. Raises ShapeError, DtypeError, CollectiveMismatch. Not differentiable so
    far.
    """
    tensors = x, topk_idx, topk_weights, out
    return Dispatched(*OPERATOR(tensors, (num_experts, max_tokens, alignment, mode, num_comm_sms), world))


# -------------------------------------------------------------------------------------------------------------- host
TILE_BYTES = 16384
"""Copied at a time."""
SENDERS = 24
"""Programs that send, by default: so many fill the links (see docs/facts.md), and the others memory."""


def _bound(call: Call) -> Shape:
    """The shape of the rows, and the letters of the further results."""
    size, R = call.world.size, call["max_tokens"]
    own = triton.cdiv(call["num_experts"], size)
    call.sizes |= {"r": R, "e": own, "ends": own + 1, "s": slots_of(R, size), "two": 2, "three": 3}
    return R, call["h"]


def _buffers(call: Call, p: Size, programs: int) -> Buffers:
    world, size, slots, n = call.world, call.world.size, p.S, p.EXPERTS.value
    meta = 2 * p.K.value + 1

    def int32(name: str, *shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.int32, name=f"dispatch.{name}", world=world)

    def make() -> Buffers:
        return Buffers(
            int32("counts", 2, size, n + size),
            empty(slots, max(p.H, 1), dtype=call.dtype, name="dispatch.inbox", world=world),
            int32("meta", slots, meta),
            signals(1 + slots // p.CHUNK.value, name="dispatch.ready", world=world),
            signals(1, name="dispatch.grid", world=world),
            int32("hist", programs, n), int32("sent", programs, size), int32("base", programs, n),
            int32("order", size, slots),
        )  # fmt: skip

    return world.keep(("dispatch", n, meta, slots, p.CHUNK.value, p.H, call.dtype), make)


def _plan(call: Call) -> Launch:
    world, (T, H), K = call.world, call["x"].shape, call["topk_idx"].shape[1]
    size, own = world.size, call.sizes["e"]
    programs = num_programs(world, world.num_sms)
    cols = min(1024, triton.next_power_of_2(max(H, 1)))
    chunk, K2 = chunk_of(call["max_tokens"]), triton.next_power_of_2(max(K, 1))
    senders = max(1, min(call["num_comm_sms"] or SENDERS, programs - 1))
    sized = Size(
        T, H, call["max_tokens"], call.sizes["s"],
        *map(tl.constexpr, (
            size * own, call["num_experts"], own, K, K2, call["alignment"], chunk, senders, max(1, 64 // K2),
            min(chunk, max(1, TILE_BYTES // (cols * call.dtype.itemsize))), cols,
        )),
    )  # fmt: skip
    buffers = _buffers(call, sized, programs)
    start = cooperative_launch(world, dispatch_kernel, (programs,), **COPY_OPTIONS)

    def launch(*tensors: torch.Tensor) -> Any:
        x, idx, weights, *results = tensors
        routes = idx.new_empty((T, K), dtype=torch.int32)
        start(x, idx, weights, Result(*results), routes, buffers, sized, world.device)
        return tuple(results)

    return launch


def _some_experts(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    """Experts for tests, a third of the places with none."""
    n = call["num_experts"]
    chosen = torch.randint(0, n, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 1 / 3, -1, chosen)


def _some_weights(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    return torch.rand(shape, generator=generator)


INT32 = (torch.int32,)
FEW = {"num_experts": 5, "max_tokens": 128, "alignment": 2}
OPERATOR = Operator(
    dispatch,
    tensors={
        "x": Operand("t h", FLOATS),
        "topk_idx": Operand("t k", (torch.int64, torch.int32), make=_some_experts),
        "topk_weights": Operand("t k", (torch.float32,), make=_some_weights),
    },
    result=_bound,
    also={
        "weights": Operand("r", (torch.float32,)), "counts": Operand("e", INT32), "offsets": Operand("ends", INT32),
        "source": Operand("r three", INT32), "tokens": Operand("s k", INT32), "places": Operand("W*t", INT32),
        "needed": Operand("two", INT32),
    },
    arguments={"num_experts": integer(least=1), "max_tokens": integer(least=1), "alignment": integer(least=1)},
    settings={"num_comm_sms": integer(least=1)},
    forms={
        "push": Form(
            _plan, "tokens into inboxes, once a rank, while others are placed", "x of tokens that leave, once a rank",
            settings={"num_comm_sms": None},
        ),
    },
    reference=reference,
    bound=undefined,
    exact=True,
    private="t",
    most={"k": 16},
    always=True,
    cases=(Case({"t": 4, "h": 4, "k": 2}, arguments=FEW | {"mode": "push"}, ranks=2),),
)  # fmt: skip
