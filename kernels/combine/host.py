"""Combine: what the experts have made of a token's rows goes home, and is added there. The way back of `dispatch`.

pull: one launch, see pull.py. A rank adds the rows that it has of another rank's token, and that rank loads the sum.
low_latency: one launch without barriers, see low_latency.py. Sums go home in flagged words.
nodes: the only form in a world of several nodes: one launch, see nodes.py. A node's ranks add their sums, and one sum a
    token goes home from each other node that has its experts: H * itemsize bytes over the network, and as many in the
    node for each rank but one that has them. Before that a token costs 4 * M bytes to each other node, of M ranks. On
    GPUs it has run on two nodes of one host.

All sums are in fp32, first over a token's experts on a rank in the token's order, then over the ranks in their order:
every run adds alike. Between the two a sum is rounded to y's dtype. Of each token one sum leaves each rank that has its
experts. Over nodes the ranks' sums are added node by node, and those of other nodes rounded once more.
"""

from __future__ import annotations

from typing import Literal

import torch

from pkt.runtime.world import World

from ..declaration import Call, Case, Form, Operand, Shape, integer
from ..dispatch import Dispatched, rules
from ..dispatch.examples import some_rows, some_slots, some_sources, some_weights
from ..dispatch.gradients import OF_COMBINE
from ..dispatch.result import check_promise, flat
from ..operator import Operator
from ..shared import nodes
from ..shared.checks import FLOATS
from .plans import plan_low_latency, plan_nodes, plan_pull, tokens_at_most
from .reference import bound, reference


def combine(
    y: torch.Tensor,
    dispatched: Dispatched,
    out: torch.Tensor | None = None,
    *,
    mode: Literal["pull", "low_latency", "nodes"] | None = None,
    num_comm_sms: int | None = None,
    tokens_per_rank: int | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """The sum of each token's rows of the ranks' `y`, times their weights, where the token came from. Collective.

    y: (R, H), a row for each row that `dispatch` has returned, of which H may be another; its rows that are no token's
    are not read. dispatched: what `dispatch` has returned; `dispatched._replace(weights=None)` adds without weights.
    out: (T, H) of y's dtype; a new tensor where None. A token that has no expert, or whose experts' ranks had no room,
    is 0. Returns `out`, the same in pull and low_latency, bit by bit where a GPU rounds alike in both. The host
    waits for nothing, so a CUDA graph replays with other routing.

    mode: a form that the top of kernels/combine/host.py describes. tokens_per_rank: a promise that no rank has more
    tokens, alike on all ranks; low_latency keeps a place for each of them and each rank, or for R, 64 at least, where
    None. With it, mode None takes the form that kernels/dispatch/rules.py predicts to be faster, which is low_latency
    for few tokens; without it, pull. nodes keeps room as low_latency does. num_comm_sms: with pull only, SMs whose
    programs add up this rank's tokens, while the others add the rows of the other ranks' tokens.

    Differentiable, also in the weights. Symmetric memory kept: pull as many tokens as y has rows, rounded up, or
    size * tokens_per_rank if these are fewer; low_latency, in words of 4 / 3 of their bytes and rounded up to a power
    of two, 2 * size * tokens_per_rank tokens, shared with the low-latency forms of the collectives; nodes, on N of
    them, as many tokens as y has rows and 2 * N * tokens_per_rank. Raises ShapeError, DtypeError, CollectiveMismatch.
    """
    *handle, source = OPERATOR.handle("dispatched", dispatched, world)
    return OPERATOR((y, *handle, flat(source), out), (mode, num_comm_sms, tokens_per_rank), world)


# -------------------------------------------------------------------------------------------------------- declaration
def default(call: Call) -> str:
    """The form with the least predicted time, or the one that takes what was given."""
    if "num_comm_sms" in call.given:
        return "pull"
    tokens = call.given.get("tokens_per_rank")
    return rules.chosen("combine", tokens, call["h"] * call.dtype.itemsize, call["k"], call.world.size)


def _shape(call: Call) -> Shape:
    few = call.asked == "low_latency"
    room = tokens_at_most(call) if few or call.world.nodes > 1 else call.given.get("tokens_per_rank")
    check_promise(call, "dispatched.places", room)
    return call.sizes["t"], call["h"]


INT32 = (torch.int32,)
FEW = {"r": 14, "h": 4, "s": 7, "k": 2, "t": 4}
GIVEN = {"given": ("dispatched.weights",)}
OPERATOR = Operator(
    combine,
    tensors={
        "y": Operand("r h", FLOATS),
        "dispatched.tokens": Operand("s k", INT32, make=some_rows),
        "dispatched.places": Operand("W*t", INT32, make=some_slots),
        "dispatched.weights": Operand("r", (torch.float32,), optional=True, make=some_weights),
        "dispatched.source": Operand("3*r", INT32, make=some_sources),
    },
    result=_shape,
    settings={"num_comm_sms": integer(least=1), "tokens_per_rank": integer(least=1)},
    forms={
        "pull": Form(
            plan_pull, "a rank adds its rows, and the tokens' ranks load the sums", "y's sums that leave, once a token",
            settings={"num_comm_sms": None, "tokens_per_rank": None}, roundings=lambda size: 2,
        ),
        "low_latency": Form(
            plan_low_latency, "the sums go home in words of data and flag, no barrier",
            "4 / 3 of y's sums that leave, once a token", settings={"tokens_per_rank": None}, roundings=lambda size: 2,
        ),
    },
    across={
        "nodes": Form(
            plan_nodes, "a node's ranks add their sums, and put one for each token home, along the rail",
            "y's sums that leave: over the network once a node, in the node once a rank",
            settings={"tokens_per_rank": None}, roundings=lambda size: 3, fits=nodes.fits,
        ),
    },
    default=default,
    reference=reference,
    bound=bound,
    backward=OF_COMBINE,
    private="t",
    most={"k": 16},
    always=True,
    cases=(
        Case(
            FEW, arguments={"mode": "pull", **GIVEN}, ranks=2, out="given",
            large={"r": 4096, "h": 7168, "s": 4096, "k": 8, "t": 2048},
        ),
        *(
            Case(
                {"r": 24, "h": 5, "s": 16, "k": k, "t": 5}, arguments={"mode": "pull"}, explore=False,
                dtype=torch.bfloat16, large={"r": 16384, "h": h, "s": 16384, "k": k, "t": 4096},
            )
            for k, h in ((2, 6144), (4, 2880))
        ),
        # Rank 0 waits for no sum of rank 1. Its third launch meets what its first has put for rank 1.
        Case(
            {"r": 7, "h": 2, "s": 7, "k": 1, "t": 2}, arguments={"mode": "low_latency", **GIVEN}, ranks=2, launches=3,
            large={"r": 64, "h": 7168, "s": 64, "k": 8, "t": 32},
        ),
        Case(FEW, arguments={"mode": "low_latency", **GIVEN}, out="given", explore=False),
        Case({"r": 40, "h": 13, "s": 20, "k": 3, "t": 9}, arguments={"mode": "low_latency", **GIVEN}, explore=False),
        Case({"r": 40, "h": 50, "s": 9, "k": 16, "t": 2}, arguments={"mode": "low_latency", **GIVEN}, explore=False),
        Case(
            {"r": 8, "h": 2, "s": 8, "k": 1, "t": 2}, arguments={"mode": "nodes", **GIVEN}, ranks=4, node_size=2,
            large={"r": 64, "h": 7168, "s": 64, "k": 8, "t": 32},
        ),
        Case(
            {"r": 40, "h": 13, "s": 40, "k": 3, "t": 4}, arguments={"mode": "nodes", **GIVEN}, ranks=8, node_size=4,
            explore=False,
        ),
        Case({"r": 40, "h": 5, "s": 40, "k": 2, "t": 4}, arguments={"mode": "nodes"}, ranks=8, node_size=2,
             explore=False),
    ),
)  # fmt: skip
