"""The exact sums, and how far right ones may be off."""

from __future__ import annotations

from typing import Any

import torch


def reference(rank: int, y: list[torch.Tensor], **handle: list[torch.Tensor] | None) -> torch.Tensor:
    """What `rank` gets, in fp64."""
    tokens, places, weights = (handle[f"dispatched.{name}"] for name in ("tokens", "places", "weights"))
    assert tokens is not None and places is not None  # noqa: PT018
    size = len(y)
    mine = places[rank].view(-1, size)
    out = torch.zeros(len(mine), y[0].shape[1], dtype=torch.float64, device=y[0].device)
    for d in range(size):
        scaled = y[d].double() * (weights[d].double()[:, None] if weights else 1)
        for t, slot in enumerate(mine[:, d].tolist()):
            rows = [row for row in tokens[d][slot].tolist() if row >= 0] if slot >= 0 else []
            out[t] += scaled[rows].sum(0)
    return out


def bound(
    rank: int, dtype: torch.dtype, roundings: int, y: list[torch.Tensor], **handle: Any
) -> tuple[torch.Tensor | float, ...]:  # fmt: skip
    """How far a right result may be off: each rounding to dtype, and one in fp32 for each product and each sum."""
    weights = handle["dispatched.weights"]
    sizes = handle | {"dispatched.weights": weights and [w.abs() for w in weights]}
    magnitude = reference(rank, [one.abs() for one in y], **sizes)
    facts, ranks = torch.finfo(dtype), len(y)
    terms = 2 * handle["dispatched.tokens"][0].shape[1] + ranks + 2
    return ((roundings * facts.eps / 2 + terms * 2.0**-24) * magnitude + (ranks + 1) * facts.tiny * facts.eps / 2,)
