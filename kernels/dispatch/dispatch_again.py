"""Dispatch again: other values of the same tokens go the way of an earlier `dispatch`. The gradient of `combine`.

push: one launch, see again.py: tokens into inboxes, chunk by chunk of slots, and from there into their rows.
nodes: the only form in a world of several nodes: one launch, see nodes_again.py. A token crosses the network once to
    each node that has an expert of it: H * itemsize bytes, and as many once to each rank that it goes to from another
    rank of its node. Beside that a token costs 4 * M bytes to each other node, of M ranks. It has run in the simulator
    only.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals, zeros
from pkt.runtime.world import World

from ..declaration import Call, Case, Form, Launch, Operand, integer
from ..operator import Operator
from ..shared import nodes, rails
from ..shared.checks import FLOATS
from ..shared.grid import COPY_OPTIONS, barrier_counters, num_programs
from . import nodes_again
from .again import Buffers, Size, dispatch_again_kernel
from .examples import some_rows, some_slots, some_sources, some_weights
from .gradients import OF_DISPATCH_AGAIN
from .result import Dispatched, check_promise, chunk_of, flat, slots_filled


def reference(
    rank: int, x: list[torch.Tensor], y: list[torch.Tensor] | None = None, **handle: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `rank` gets, in fp64."""
    tokens, places, weights = (handle[f"dispatched.{name}"] for name in ("tokens", "places", "weights"))
    scale = weights[rank].double()
    rows = [torch.zeros(x[0].shape[1], dtype=torch.float64, device=x[0].device)] * len(scale)
    for r, own in enumerate(places):
        for t, slot in enumerate(own.view(-1, len(x))[:, rank].tolist()):
            for row in tokens[rank][slot].tolist() if slot >= 0 else ():
                if row >= 0:
                    rows[row] = x[r][t].double()
    found = torch.stack(rows) if rows else x[0].new_zeros(0, x[0].shape[1], dtype=torch.float64)
    dots = found.new_zeros(len(scale)) if y is None else (found * y[rank].double()).sum(1)
    return found * scale[:, None], dots


def bound(
    rank: int, dtype: torch.dtype, roundings: int, x: list[torch.Tensor], y: list[torch.Tensor] | None = None,
    **handle: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """How far right results may be off: the rows by a product and a rounding, the sums by a rounding in fp32 a term."""
    sizes = handle | {"dispatched.weights": [w.abs() for w in handle["dispatched.weights"]]}
    rows, dots = reference(rank, [one.abs() for one in x], y and [one.abs() for one in y], **sizes)
    facts = torch.finfo(dtype)
    limit = (roundings * facts.eps / 2 + 2.0**-24) * rows + facts.tiny * facts.eps / 2
    return limit, (x[0].shape[1] + 2) * 2.0**-24 * dots


class Again(NamedTuple):
    """What a rank has received."""

    rows: torch.Tensor
    """(R, H) of x's dtype: the token of each row, times the row's weight; 0 where it is no token's."""
    dots: torch.Tensor
    """fp32 (R,): the product of each row of y with its token, without the weight; 0 where there is no y or no token."""


def dispatch_again(
    x: torch.Tensor,
    dispatched: Dispatched,
    y: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    mode: Literal["push", "nodes"] | None = None,
    num_comm_sms: int | None = None,
    tokens_per_rank: int | None = None,
    world: World | None = None,
) -> Again:
    """Send other values of the tokens the way of `dispatch`; rows are multiplied by their weights. Collective.

    x: (T, H), a row for each of this rank's tokens; H and dtype may differ from those in `dispatch`. dispatched: what
    `dispatch` has returned; with `dispatched._replace(weights=torch.ones_like(dispatched.weights))` rows are copied. y:
    (R, H) of x's dtype, or None. out: (R, H) of x's dtype for the rows; a new tensor where None. num_comm_sms: with
    push only, programs that send, while the others place what arrives. tokens_per_rank: a promise that no rank has more
    tokens, alike on all ranks, which bounds the memory kept; over nodes each rank keeps places for so many, or for R,
    64 at least, where None.
    Returns `Again`: the rows, and in fp32 the product of each row of y with its token. The host waits for nothing, so a
    CUDA graph replays with other routing.

    This is the gradient of `combine`: of y the rows, of the weights the products. So it recomputes the rows of a
    `dispatch` in a backward pass, too. Differentiable. Symmetric memory kept: push R tokens, or size * tokens_per_rank
    if these are fewer; nodes, on N of them, 2 * N * tokens_per_rank. Raises ShapeError, DtypeError, CollectiveMismatch.
    """
    *handle, source = OPERATOR.handle("dispatched", dispatched, world)
    return Again(*OPERATOR((x, *handle, flat(source), y, out), (mode, num_comm_sms, tokens_per_rank), world))


# -------------------------------------------------------------------------------------------------------------- host
TILE_BYTES, SENDERS = 16384, 24
"""Copied at a time, and programs that send, by default. Larger blocks and more programs have not been tried."""
LEAST_ROOM = 64
"""Tokens of a rank for which `nodes` has room at least, where the caller promises nothing."""


def _shape(call: Call) -> str:
    check_promise(call, "x", _tokens_over_nodes(call) if call.world.nodes > 1 else call.given.get("tokens_per_rank"))
    return "r h"


def _tokens_over_nodes(call: Call) -> int:
    """Tokens of a rank for which the ranks of its rail have room: as promised, or as many as there are rows, and
    LEAST_ROOM."""
    promised: int | None = call.given.get("tokens_per_rank")
    return max(call.sizes["r"], LEAST_ROOM) if promised is None else promised


def _sized(call: Call, slots: int, senders: int) -> Size:
    (T, H), K, R = call["x"].shape, call["dispatched.tokens"].shape[1], call.sizes["r"]
    cols, chunk = min(1024, triton.next_power_of_2(max(H, 1))), chunk_of(R)
    rows = min(chunk, max(1, TILE_BYTES // (cols * call.dtype.itemsize)))
    K2 = triton.next_power_of_2(max(K, 1))
    return Size(T, H, R, slots, *map(tl.constexpr, (K, K2, chunk, senders, rows, cols, 1024)))


def _plan(call: Call) -> Launch:
    world, H, R = call.world, call.sizes["h"], call.sizes["r"]
    programs, chunk = num_programs(world, world.num_sms), chunk_of(R)
    slots = slots_filled(call.sizes["s"], R, world.size, call.given.get("tokens_per_rank"))
    sized = _sized(call, slots, max(1, min(call["num_comm_sms"] or SENDERS, programs - 1)))

    def buffers() -> Buffers:
        shape, count = (max(slots, 1), max(H, 1)), triton.cdiv(max(slots, 1), chunk)
        return Buffers(
            empty(*shape, dtype=call.dtype, name="dispatch_again.inbox", world=world),
            signals(count, name="dispatch_again.ready", world=world),
            signals(1, name="dispatch_again.grid", world=world),
            zeros(world.size, max(slots, 1), dtype=torch.int32, name="dispatch_again.order", world=world),
            zeros(max(R, 1), dtype=torch.int32, name="dispatch_again.named", world=world),
        )

    memory = world.keep(("dispatch_again", slots, chunk, R, H, call.dtype), buffers)
    start = cooperative_launch(world, dispatch_again_kernel, (programs,), **COPY_OPTIONS)
    bar = barrier_counters(world)

    def launch(
        x: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor, weights: Any, source: Any, y: Any,
        rows: torch.Tensor, dots: torch.Tensor,
    ) -> Any:  # fmt: skip
        start(x, tokens, places, weights, y, rows, dots, bar, memory, sized, world.device)
        return rows, dots

    return launch


def _plan_nodes(call: Call) -> Launch:
    world, H, R = call.world, call.sizes["h"], call.sizes["r"]
    programs, count = num_programs(world, world.num_sms), world.nodes
    sized = _sized(call, call.sizes["s"], 1)
    most = _tokens_over_nodes(call)

    def int32(name: str, *shape: int) -> torch.Tensor:
        return zeros(*shape, dtype=torch.int32, name=name, world=world)

    def counters(name: str, n: int) -> torch.Tensor:
        return signals(n, name=name, world=world)

    def make() -> tuple[nodes_again.Buffers, rails.Pieces]:
        r = rails.pieces("dispatch_again", most, 2, programs, world.node_size, count, int32, counters)
        shape = 2, count, programs, r.each, max(H, 1)
        lines = empty(*shape, dtype=call.dtype, name="dispatch_again.lines", world=world)
        grid, named = counters("dispatch_again.grid", 1), int32("dispatch_again.named", max(R, 1))
        return nodes_again.Buffers(lines, grid, named), r

    memory = world.keep(("dispatch_again", "nodes", most, R, H, call.dtype), make)
    start = cooperative_launch(world, nodes_again.nodes_kernel, (programs,), **COPY_OPTIONS)

    def launch(x: Any, tokens: Any, places: Any, weights: Any, source: Any, *others: Any) -> Any:
        start(x, tokens, places, weights, *others, *memory, sized, world.device)
        return others[-2:]

    return launch


INT32 = (torch.int32,)
FEW = {"t": 4, "h": 4, "s": 12, "k": 2, "r": 12}
OPERATOR = Operator(
    dispatch_again,
    tensors={
        "x": Operand("t h", FLOATS),
        "dispatched.tokens": Operand("s k", INT32, make=some_rows),
        "dispatched.places": Operand("W*t", INT32, make=some_slots),
        "dispatched.weights": Operand("r", (torch.float32,), make=some_weights),
        "dispatched.source": Operand("3*r", INT32, make=some_sources),  # for the gradient, which is a `combine`
        "y": Operand("r h", optional=True),
    },
    result=_shape,
    also={"dots": Operand("r", (torch.float32,))},
    settings={"num_comm_sms": integer(least=1), "tokens_per_rank": integer(least=1)},
    forms={
        "push": Form(
            _plan, "tokens into inboxes, once a rank, while others are placed", "x of tokens that leave, once a rank",
            settings={"num_comm_sms": None, "tokens_per_rank": None},
        ),
    },
    across={
        "nodes": Form(
            _plan_nodes, "once over the network to each node, along the rail, and from there into the rows",
            "x of tokens that leave: over the network once a node, in the node once a rank",
            settings={"tokens_per_rank": None}, fits=nodes.fits,
        ),
    },
    reference=reference,
    bound=bound,
    backward=OF_DISPATCH_AGAIN,
    private="t",
    most={"k": 16},
    always=True,
    cases=(
        Case(FEW, arguments={"mode": "push", "given": ("y",)}, ranks=2, out="given"),
        Case(FEW | {"k": 1, "h": 5}, arguments={"mode": "push"}, explore=False),
        Case(
            {"t": 2, "h": 3, "s": 8, "k": 1, "r": 8}, arguments={"mode": "nodes", "given": ("y",)}, ranks=4,
            node_size=2, large={"r": 64, "h": 7168, "s": 64, "k": 8, "t": 32},
        ),
        *(
            Case({"t": 4, "h": 5, "s": 40, "k": 3, "r": 40}, arguments={"mode": "nodes"}, ranks=8, node_size=near,
                 explore=False)
            for near in (4, 2)
        ),
    ),
)  # fmt: skip
