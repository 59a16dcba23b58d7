"""Dispatch: every token goes to the ranks of its experts, and arrives there in the order of experts.

Rows of an expert are in the order of source ranks, then of their tokens, in every run. A rank sends a token once to
each other rank that has an expert of it. Counts, offsets and indices stay on the device.

push: one launch, see push.py. Tokens go into inboxes, chunk by chunk, and from there into their rows. A token with K
    experts and G scales costs H * itemsize + 4 * G + 8 * K + 8 bytes to each rank that it goes to.
low_latency: one launch without barriers, see low_latency.py. Tokens go in flagged words, as soon as they are there. A
    word is 12 bytes of data and 4 of flag: 16 * (ceil(H * itemsize / 12) + ceil(G / 3)) bytes to each rank that the
    token goes to, and 16 * (K + 1) bytes to every other rank, or to those alone if a rank has more tokens than places.
nodes: the only form in a world of several nodes: one launch, see nodes.py. A token crosses the network once to each
    node that has an expert of it, to the rank of its rail, and every rank of that node that needs it loads it there. It
    costs H * itemsize + 4 * G + 12 * K bytes for each node, and as many for each rank that loads it from another. To
    each other node, of M ranks, go 4 * M bytes more for every token. On GPUs it has run on two nodes of one host.

So 7168 elements of fp8 with 56 scales and 8 experts are 7464 bytes in push and 10016 in low_latency; without scales and
in bf16 they are 14408 and 19264.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton

from pkt.runtime.world import World

from ..declaration import Call, Case, Form, Operand, Shape, flag, integer
from ..operator import Operator
from ..shared import nodes
from ..shared.checks import FLOATS
from ..shared.fp8 import FP8
from . import rules
from .examples import some_experts, some_weights
from .gradients import OF_DISPATCH
from .plans import plan_low_latency, plan_nodes, plan_push, scales_of, tokens_over_nodes
from .reference import reference, undefined
from .result import Dispatched, check_alignment, check_promise, slots_of


def dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    out: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    max_tokens: int,
    alignment: int = 1,
    clear: bool | None = None,
    mode: Literal["push", "low_latency", "nodes"] | None = None,
    num_comm_sms: int | None = None,
    tokens_per_rank: int | None = None,
    world: World | None = None,
) -> Dispatched:
    """The tokens that have chosen this rank's experts, from all ranks, in the order of experts. Collective.

    x: (T, H), bf16, fp16, fp32 or float8_e4m3fn, this rank's tokens; ranks may have different T, and none. topk_idx:
    int32 or int64 (T, K), K from 1 to 16, the experts of each token; -1, or any number that is no expert's, for none.
    topk_weights: fp32 (T, K). scales: fp32 (T, G), numbers that travel with their tokens and arrive beside the rows, in
    `Dispatched.scales`; fp8 tokens have one for each 128 elements, G = H / 128, or one each, G = 1. Any G is taken,
    alike on all ranks, because nothing here computes with them.
    num_experts: of all ranks; rank r has experts r * E to (r + 1) * E - 1, E = num_experts / size, rounded up.
    max_tokens: rows of the result on every rank, padding included. alignment: the rows of each expert are padded with
    zeros to a multiple of it. clear: whether the rows behind the last expert's become zeros, as functions of torch need
    that compute with them; they are not written otherwise. None: they do where gradients are enabled. It is alike on
    all ranks. out: (max_tokens, H) of x's dtype for the rows; a new tensor where None. Returns `Dispatched`, whose
    tensors `pkt.grouped_matmul` and `pkt.combine` take; it is the same in all forms, bit by bit. The host waits for
    nothing, so a CUDA graph replays with other routing.

    mode: a form that the top of kernels/dispatch/host.py describes. tokens_per_rank: a promise that no rank has more
    tokens, alike on all ranks; low_latency keeps a place for each of them at each rank, or for max_tokens where None.
    With it, mode None takes the form that kernels/dispatch/rules.py predicts to be faster, which is low_latency for few
    tokens; without it, push. nodes keeps a place for each token of the ranks of a rail, or for max_tokens of each
    where None, and no rank may have more. num_comm_sms: with push only, programs that send, while the others place what
    arrives.

    If a rank would need more than max_tokens rows, it receives none: its offsets are 0, its counts are true, and
    `Dispatched.check` raises an error that says how many rows it needs. With the greatest T of any rank,
    size * T * K + E * (alignment - 1) rows are always enough.

    Symmetric memory kept: push max_tokens tokens with their scales, or size * tokens_per_rank if these are fewer;
    low_latency, in words of 4 / 3 of their bytes and rounded up to a power of two, 2 * size * tokens_per_rank of them,
    shared with the low-latency forms of the collectives; nodes, on N of them, N * tokens_per_rank tokens with their
    pairs and scales. Differentiable in x, topk_weights and scales, but in nothing if x is fp8. Raises ShapeError,
    DtypeError, Unsupported, CollectiveMismatch.
    """
    tensors = x, topk_idx, topk_weights, out, scales
    clear = torch.is_grad_enabled() if clear is None else clear
    keywords = num_experts, max_tokens, alignment, clear, mode, num_comm_sms, tokens_per_rank
    found = OPERATOR(tensors, keywords, world)
    return Dispatched(*(found[:8] if scales is None else found))


# -------------------------------------------------------------------------------------------------------- declaration
def default(call: Call) -> str:
    """The form with the least predicted time, or the one that takes a setting that was given."""
    if "num_comm_sms" in call.given:
        return "push"
    tokens = call.given.get("tokens_per_rank")
    nbytes = call["h"] * call.dtype.itemsize + 4 * scales_of(call)
    return rules.chosen("dispatch", tokens, nbytes, call["k"], call.world.size)


def _bound(call: Call) -> Shape:
    """The shape of the rows, and the letters of the further results."""
    size, R = call.world.size, call["max_tokens"]
    check_promise(call, "x", tokens_over_nodes(call) if call.world.nodes > 1 else call.given.get("tokens_per_rank"))
    own = triton.cdiv(call["num_experts"], size)
    check_alignment(call, own * size)
    call.sizes.setdefault("g", 0)
    call.sizes |= {"r": R, "e": own, "ends": own + 1, "s": slots_of(R, size), "two": 2, "three": 3}
    return R, call["h"]


INT32 = (torch.int32,)
FEW = {"num_experts": 5, "max_tokens": 128, "alignment": 2, "clear": True}
SCALED = {"given": ("scales",)}
LARGE = {"t": 128, "h": 7168, "k": 8, "g": 56}
OPERATOR = Operator(
    dispatch,
    tensors={
        "x": Operand("t h", (*FLOATS, FP8)),
        "topk_idx": Operand("t k", (torch.int64, torch.int32), make=some_experts(lambda call: call["num_experts"])),
        "topk_weights": Operand("t k", (torch.float32,), make=some_weights),
        "scales": Operand("t g", (torch.float32,), optional=True, make=some_weights),
    },
    result=_bound,
    also={
        "weights": Operand("r", (torch.float32,)), "counts": Operand("e", INT32), "offsets": Operand("ends", INT32),
        "source": Operand("r three", INT32), "tokens": Operand("s k", INT32), "places": Operand("W*t", INT32),
        "needed": Operand("two", INT32), "row_scales": Operand("r g", (torch.float32,)),
    },
    arguments={
        "num_experts": integer(least=1), "max_tokens": integer(least=1), "alignment": integer(least=1), "clear": flag,
    },
    settings={"num_comm_sms": integer(least=1), "tokens_per_rank": integer(least=1)},
    forms={
        "push": Form(
            plan_push, "tokens into inboxes, once a rank, while others are placed",
            "x and scales of tokens that leave, once a rank", settings={"num_comm_sms": None, "tokens_per_rank": None},
        ),
        "low_latency": Form(
            plan_low_latency, "the same in words of data and flag, no barrier",
            "4 / 3 of x and scales of tokens that leave, once a rank", settings={"tokens_per_rank": None},
        ),
    },
    across={
        "nodes": Form(
            plan_nodes, "once over the network to each node, along the rail, and from there into the rows",
            "x, scales and pairs of tokens that leave: over the network once a node, in the node once a rank",
            settings={"tokens_per_rank": None}, fits=nodes.fits,
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
        Case({"t": 4, "h": 4, "k": 2, "g": 0}, arguments=FEW | {"mode": "push"}, ranks=2, explore=False),
        Case(
            {"t": 3, "h": 4, "k": 2, "g": 0}, arguments=FEW | {"clear": False, "mode": "low_latency"}, ranks=2,
            explore=False, large=LARGE,
        ),
        # With scales a token has more to wait for than without.
        Case(
            {"t": 3, "h": 5, "k": 2, "g": 65}, arguments=FEW | SCALED | {"mode": "push"}, ranks=2, dtype=FP8,
            large=LARGE,
        ),
        Case(
            {"t": 2, "h": 5, "k": 2, "g": 4}, arguments=FEW | SCALED | {"max_tokens": 8, "mode": "low_latency"},
            ranks=2, sms=1, dtype=FP8, large=LARGE,
        ),
        Case(
            {"t": 2, "h": 2, "k": 1, "g": 0}, arguments=FEW | {"max_tokens": 8, "mode": "nodes", "tokens_per_rank": 2},
            ranks=4, node_size=2, large={"t": 8, "h": 7168, "k": 8, "g": 0},
        ),
        Case(
            {"t": 3, "h": 5, "k": 2, "g": 5}, arguments=FEW | SCALED | {"max_tokens": 24, "mode": "nodes"}, ranks=8,
            node_size=4, explore=False, dtype=FP8, large=LARGE | {"t": 24},
        ),
        Case(
            {"t": 5, "h": 4, "k": 3, "g": 0}, arguments=FEW | {"max_tokens": 24, "mode": "nodes"}, ranks=8, node_size=2,
            explore=False,
        ),
    ),
)  # fmt: skip
