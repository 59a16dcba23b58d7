"""What each rank gets, worked out with lists, and how far a right result may be off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def reference(
    rank: int, x: Sequence[torch.Tensor], topk_idx: Sequence[torch.Tensor], topk_weights: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor], clear: bool | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """What `rank` gets; the product in fp64."""
    size, (T, K), own = len(x), topk_idx[0].shape, w[rank]
    whole, chosen, every = torch.cat([*x]), torch.cat([*topk_idx]), torch.cat([*topk_weights])
    pairs = [(chosen == e).nonzero() for e in range(len(own))]
    ends = torch.tensor([0, *(len(of) for of in pairs)]).cumsum(0)
    t, k = torch.cat([*pairs, torch.zeros(0, 2, dtype=torch.int64)]).unbind(1)
    behind = size * T * K - len(t)
    parts = [whole[of[:, 0]].double() @ one.double() for of, one in zip(pairs, own)]
    product = torch.cat([*parts, torch.zeros(behind, own.shape[2], dtype=torch.float64)])
    weights = torch.cat([every[t, k], every.new_zeros(behind)])
    source = torch.cat([torch.stack([t // max(T, 1), t % max(T, 1), k], 1), torch.full((behind, 3), -1)])
    tokens = torch.full((size * T, K), -1)
    tokens[t, k] = torch.arange(len(t))
    used = torch.where((tokens >= 0).any(1), torch.arange(size * T), -1)[rank * T : (rank + 1) * T]
    return product, whole, weights, ends, source, tokens, used.repeat_interleave(size)


def bound(rank: int, dtype: torch.dtype, roundings: int, **operands: Any) -> tuple[torch.Tensor | float, ...]:
    """How far right results may be off: the product by a rounding in fp32 a term and one to dtype, by anything in rows
    behind the last expert's that are not cleared, and the rest by nothing."""
    sizes = operands | {name: [one.abs() for one in operands[name]] for name in ("x", "w")}
    product, _, _, ends, *_ = reference(rank, **sizes)
    facts, terms = torch.finfo(dtype), operands["x"][0].shape[1]
    limit = (roundings * facts.eps / 2 + (terms + 2) * 2.0**-24) * product + facts.tiny * facts.eps / 2
    if operands["clear"] is False:
        limit[int(ends[-1]) :] = float("inf")
    return limit, *(0.0,) * 6
