"""Gradients of `dispatch`, `combine` and `dispatch_again`, in terms of these: the routing stays as it was.

`combine` adds rows, and `dispatch_again` copies to rows: each is the transpose of the other. The weight of a row is a
number of the row's rank, whose gradient goes home to its token as a row of K numbers that `combine` adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from ..gradients import Backward, Gradients, Recorded
from ..shared.checks import FLOATS


def _handle(call: Recorded, prefix: str, weights: torch.Tensor | None) -> Any:
    """As much of a `Dispatched` as the operators read, with these weights."""
    return SimpleNamespace(weights=weights, **{name: call[prefix + name] for name in ("tokens", "places", "source")})


def _promised(call: Recorded) -> dict[str, int | None]:
    """The promise of tokens, without which the backward pass would keep places for as many as there are rows."""
    return {"tokens_per_rank": call["tokens_per_rank"]}


def _of_dispatch(call: Recorded) -> Gradients:
    handle, more, found = _handle(call, "", None), _promised(call), {}
    if "x" in call.wanted:
        found["x"] = call.operator("combine", call.grads[0], handle, **more)
    if "topk_weights" in call.wanted:
        number = torch.arange(handle.tokens.shape[1], dtype=torch.int32, device=handle.tokens.device)
        spread = torch.where(call["source"][:, 2:] == number, call.grads[1][:, None], 0)  # fp32 (R, K)
        found["topk_weights"] = call.operator("combine", spread, handle, **more)
    if "scales" in call.wanted:
        found["scales"] = call.operator("combine", call.grads[8], handle, **more)
    return found


def _narrow(keywords: Mapping[str, Any], dtype: torch.dtype) -> str:
    return "" if dtype in FLOATS else f"rows of {str(dtype).removeprefix('torch.')}"


def _of_combine(call: Recorded) -> Gradients:
    weights, y = call["dispatched.weights"], None
    if weights is None:
        weights = torch.ones(call.shape("y")[0], dtype=torch.float32, device=call.grad.device)
    if "dispatched.weights" in call.wanted:
        y = call["y"]
    handle = _handle(call, "dispatched.", weights)
    rows, dots = call.operator("dispatch_again", call.grad, handle, y, **_promised(call))
    return {"y": rows, "dispatched.weights": dots}


def _of_dispatch_again(call: Recorded) -> Gradients:
    rows, dots = call.grads
    found: dict[str, torch.Tensor] = {}
    more = _promised(call)
    if "x" in call.wanted:
        weights = call["dispatched.weights"]
        found["x"] = call.operator("combine", rows, _handle(call, "dispatched.", weights), **more)
        if call["y"] is not None:
            found["x"] = found["x"] + call.operator("combine", call["y"], _handle(call, "dispatched.", dots), **more)
    if call.wanted & {"dispatched.weights", "y"}:
        own = rows if "dispatched.weights" in call.wanted else None
        again = call.operator("dispatch_again", call["x"], _handle(call, "dispatched.", dots), own, **more)
        found |= {"y": again[0], "dispatched.weights": again[1]}
    return found


_ROUTES = ("dispatched.tokens", "dispatched.places", "dispatched.source")
OF_DISPATCH = Backward(
    _of_dispatch,
    "`combine` of the gradients of rows and scales, and of the weights' gradients as rows of K numbers",
    saves=dict.fromkeys(("x", "scales", "topk_weights"), ("tokens", "places", "source")),
    refuses=_narrow,
)
OF_COMBINE = Backward(
    _of_combine,
    "`dispatch_again` of the gradient, with the product of each row and its token's gradient",
    saves={
        "y": (*_ROUTES, "dispatched.weights"),
        "dispatched.weights": (*_ROUTES, "dispatched.weights", "y"),
    },
)
OF_DISPATCH_AGAIN = Backward(
    _of_dispatch_again,
    "of x: `combine`, twice if there is a y. Of y and of the weights: `dispatch_again`",
    saves={
        "x": (*_ROUTES, "dispatched.weights", "y"),
        "dispatched.weights": (*_ROUTES, "x"),
        "y": (*_ROUTES, "x"),
    },
)
