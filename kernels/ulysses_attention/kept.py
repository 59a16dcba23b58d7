"""ulysses_attention where gradients are wanted: as its form "unfused", and attention's operands and results are kept.

Each rank attends by ring attention of one rank, whose backward pass takes the queries, keys and values of the rank's
heads, the result and its logarithms. All of these are kept from the call on, as torch's attention keeps them. So the
backward pass exchanges the gradient of the result and the gradients of q, k and v, and nothing is computed again.

The registry does not know this operator: `ulysses_attention` calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from pkt.errors import Unsupported
from pkt.runtime.world import World

from ..declaration import Call, Form, Launch, Operand, Shape
from ..gradients import TRACED, Backward, Gradients, Recorded
from ..operator import Operator
from ..ring_attention import OPERATOR as RING_ATTENTION
from ..shared.checks import symmetric_out
from .heads import Heads, heads_of
from .unfused import ARGUMENTS, TENSORS, exchanges, home, reference, shape, there

KEPT = ("queries", "keys", "values", "attended", "lse")


def ulysses_attention_kept(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None, *,
    cu_seqlens: torch.Tensor | None = None, causal: bool = False, scale: float | None = None,
    window: tuple[int, int] | None = None, mode: Literal["unfused"] | None = None, world: World | None = None,
) -> Any:  # fmt: skip
    """(result, queries, keys, values, attended, lse): as `ulysses_attention`, and of all positions of this rank's heads
    what it attended with, (B, size * S, heads, D), the result, and its logarithms, fp32 (B, heads, size * S). These
    have no gradient themselves. Collective."""
    return OPERATOR((q, k, v, out, cu_seqlens), (causal, scale, window, mode), world)


def _held(call: Call) -> Heads:
    return heads_of(call["h"], call["g"], call.world.size)


def _told(of: Call | Recorded) -> dict[str, Any]:
    """The arguments of ring attention."""
    return {name: of[name] for name in ("causal", "scale", "window")}


def _whole(heads: Callable[[Heads], int]) -> Callable[[Call], Shape]:
    """The shape of all positions of so many heads."""
    return lambda call: (call["b"], call.world.size * call["s"], heads(_held(call)), call["d"])


def _lse(call: Call) -> Shape:
    return call["b"], _held(call).queries, call.world.size * call["s"]


def _packed(packed: bool, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of a batch as ring attention takes them: with documents there is one sequence."""
    return [x[0] for x in tensors] if packed else list(tensors)


def _unfused(call: Call) -> Launch:
    whole, move, back = exchanges(call)
    packed = call["cu_seqlens"] is not None
    given = _packed(packed, *whole, torch.empty_like(whole[0]))  # a result like the one that is kept
    attend = RING_ATTENTION.planned(call.world.alone, *given, call["cu_seqlens"], **_told(call))

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor | None,
        *kept: torch.Tensor,
    ) -> Any:  # fmt: skip
        move(q, k, v)
        *operands, attended, logarithms = kept
        for to, x in zip(operands, whole, strict=True):
            to.copy_(x)
        _, lse = attend(*_packed(packed, *whole, attended), cu_seqlens)
        logarithms.view(lse.shape).copy_(lse)
        back(attended, out)
        return out, *kept

    return launch


def backward(call: Recorded) -> Gradients:
    """By `ring_attention_backward` of this rank alone. Raises Unsupported for gradients of gradients."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and type(call.grad) not in TRACED:
        found = "found create_graph=True, and nothing from which gradients of gradients follow"
        remedy = 'call ulysses_attention with mode="unfused", whose backward pass computes attention again'
        raise Unsupported.here(f"rank {call.world.rank}: ulysses_attention", found, remedy)
    cu_seqlens = call["cu_seqlens"]
    kept = _packed(cu_seqlens is not None, there(call, call.grad), *(call[name] for name in KEPT))
    found = call.operator(
        "ring_attention_backward", *kept, cu_seqlens=cu_seqlens, world=call.world.alone, **_told(call)
    )  # fmt: skip
    named = ((name, x if x.ndim == 4 else x[None]) for name, x in zip("qkv", found))
    return home(call, {name: x for name, x in named if name in call.wanted})


OPERATOR = Operator(
    ulysses_attention_kept,
    tensors=TENSORS,
    result=shape,
    also={
        "queries": Operand(_whole(lambda held: held.queries)), "keys": Operand(_whole(lambda held: held.keys)),
        "values": Operand(_whole(lambda held: held.keys)), "attended": Operand(_whole(lambda held: held.queries)),
        "lse": Operand(_lse, (torch.float32,)),
    },
    arguments=ARGUMENTS,
    forms={"unfused": Form(_unfused, "`all_to_all`, attention on each rank, `all_to_all`", agrees=symmetric_out)},
    reference=reference,
    called="ulysses_attention",
    backward=Backward(
        backward, "`all_to_all` of the gradient, attention's backward pass, `all_to_all` back",
        saves=dict.fromkeys("qkv", (*KEPT, "cu_seqlens")), inner=KEPT,
    ),
)  # fmt: skip
