"""Dispatch: every token goes to the ranks of its experts, and arrives there in the order of experts.

Rows of an expert are in the order of source ranks, then of their tokens, in every run. A rank sends a token once to
each other rank that has an expert of it. Counts, offsets and indices stay on the device.

push: one launch, see push.py. Tokens go into inboxes, chunk by chunk, and from there into their rows.
low_latency: one launch without barriers, see low_latency.py. Tokens go in flagged words, as soon as they are there.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton

from pkt.runtime.world import World

from ..declaration import Call, Case, Form, Operand, Shape, flag, integer
from ..operator import Operator
from ..shared.checks import FLOATS
from . import rules
from .gradients import OF_DISPATCH
from .plans import plan_low_latency, plan_push
from .reference import reference, undefined
from .result import Dispatched, check_promise, slots_of


def dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    out: torch.Tensor | None = None,
    *,
    max_tokens: int,
    alignment: int = 1,
    clear: bool | None = None,
    mode: Literal["push", "low_latency"] | None = None,
    num_comm_sms: int | None = None,
    tokens_per_rank: int | None = None,
    world: World | None = None,
) -> Dispatched:
    """The tokens that have chosen this rank's experts, from all ranks, in the order of experts. Collective.

    x: (T, H), this rank's tokens; ranks may have different T, and none. topk_idx: int32 or int64 (T, K), K from 1 to
    16, the experts of each token; -1, or any number that is no expert's, for none. topk_weights: fp32 (T, K).
    num_experts: of all ranks; rank r has experts r * E to (r + 1) * E - 1, E = num_experts / size, rounded up.
    max_tokens: rows of the result on every rank, padding included. alignment: the rows of each expert are padded with
    zeros to a multiple of it. clear: whether the rows behind the last expert's become zeros, as functions of torch need
    that compute with them; they are not written otherwise. None: they do where gradients are enabled. It is alike on
    all ranks. out: (max_tokens, H) of x's dtype for the rows; a new tensor where None. Returns `Dispatched`, whose
    tensors `pkt.grouped_matmul` and `pkt.combine` take; it is the same in both forms, bit by bit. The host waits for
    nothing, so a CUDA graph replays with other routing.

    mode: a form that the top of kernels/dispatch/host.py describes. tokens_per_rank: a promise that no rank has more
    tokens, alike on all ranks; low_latency keeps a place for each of them at each rank, or for max_tokens where None.
    With it, mode None takes the form that kernels/dispatch/rules.py predicts to be faster, which is low_latency for few
    tokens; without it, push. num_comm_sms: with push only, programs that send, while the others place what arrives.

    If a rank would need more than max_tokens rows, it receives none: its offsets are 0, its counts are true, and
    `Dispatched.check` raises an error that says how many rows it needs. With the greatest T of any rank,
    size * T * K + E * (alignment - 1) rows are always enough.

    Symmetric memory kept: push max_tokens tokens; low_latency, in words of 4 / 3 of their bytes and rounded up to a
    power of two, 2 * size * tokens_per_rank tokens, shared with the low-latency forms of the collectives.
    Differentiable in x and topk_weights. Raises ShapeError, DtypeError, CollectiveMismatch.
    """
    tensors = x, topk_idx, topk_weights, out
    clear = torch.is_grad_enabled() if clear is None else clear
    keywords = num_experts, max_tokens, alignment, clear, mode, num_comm_sms, tokens_per_rank
    return Dispatched(*OPERATOR(tensors, keywords, world))


# -------------------------------------------------------------------------------------------------------- declaration
MOST_ROWS = 1 << 30
"""That alignment may add, at most."""


def default(call: Call) -> str:
    """The form with the least predicted time, or the one that takes a setting that was given."""
    if "num_comm_sms" in call.given:
        return "push"
    tokens = call.given.get("tokens_per_rank")
    return rules.chosen("dispatch", tokens, call["h"] * call.dtype.itemsize, call["k"], call.world.size)


def _bound(call: Call) -> Shape:
    """The shape of the rows, and the letters of the further results."""
    size, R = call.world.size, call["max_tokens"]
    check_promise(call, "x", call.given.get("tokens_per_rank"))
    own = triton.cdiv(call["num_experts"], size)
    most = MOST_ROWS // (own * size)
    if call["alignment"] > most:
        wanted = f"at most {most} for {own * size} experts, so that an int32 counts their rows"
        raise call.refuse("alignment", call["alignment"], wanted)
    call.sizes |= {"r": R, "e": own, "ends": own + 1, "s": slots_of(R, size), "two": 2, "three": 3}
    return R, call["h"]


def some_experts(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    """Experts for tests, a third of the places with none."""
    n = call["num_experts"]
    chosen = torch.randint(0, n, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 1 / 3, -1, chosen)


def _some_weights(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    return torch.rand(shape, generator=generator)


INT32 = (torch.int32,)
FEW = {"num_experts": 5, "max_tokens": 128, "alignment": 2, "clear": True}
OPERATOR = Operator(
    dispatch,
    tensors={
        "x": Operand("t h", FLOATS),
        "topk_idx": Operand("t k", (torch.int64, torch.int32), make=some_experts),
        "topk_weights": Operand("t k", (torch.float32,), make=_some_weights),
    },
    result=_bound,
    also={
        "weights": Operand("r", (torch.float32,)), "counts": Operand("e", INT32), "offsets": Operand("ends", INT32),
        "source": Operand("r three", INT32), "tokens": Operand("s k", INT32), "places": Operand("W*t", INT32),
        "needed": Operand("two", INT32),
    },
    arguments={
        "num_experts": integer(least=1), "max_tokens": integer(least=1), "alignment": integer(least=1), "clear": flag,
    },
    settings={"num_comm_sms": integer(least=1), "tokens_per_rank": integer(least=1)},
    forms={
        "push": Form(
            plan_push, "tokens into inboxes, once a rank, while others are placed",
            "x of tokens that leave, once a rank", settings={"num_comm_sms": None, "tokens_per_rank": None},
        ),
        "low_latency": Form(
            plan_low_latency, "the same in words of data and flag, no barrier",
            "4 / 3 of x of tokens that leave, once a rank", settings={"tokens_per_rank": None},
        ),
    },
    default=default,
    reference=reference,
    bound=undefined,
    backward=OF_DISPATCH,
    exact=True,
    private="t",
    most={"k": 16},
    always=True,
    cases=(
        Case({"t": 4, "h": 4, "k": 2}, arguments=FEW | {"mode": "push"}, ranks=2),
        Case(
            {"t": 3, "h": 4, "k": 2}, arguments=FEW | {"clear": False, "mode": "low_latency"}, ranks=2,
            explore=False, large={"t": 128, "h": 7168, "k": 8},
        ),
        Case({"t": 2, "h": 2, "k": 2}, arguments=FEW | {"max_tokens": 8, "mode": "low_latency"}, ranks=2, sms=1),
    ),
)  # fmt: skip
