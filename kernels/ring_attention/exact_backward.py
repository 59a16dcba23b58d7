"""The exact gradients of attention over the ranks' keys, and how far right ones may be from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .exact import EXPONENTIAL, TINY, UNIT, scores_of
from .sequence import gathered_order

FP32 = 2.0**-24
Ranks = Sequence[torch.Tensor]


class Slopes(NamedTuple):
    """The parts of the gradients that a rank's queries make, in fp64; shapes as of exact.Scores. The sizes are what the
    magnitudes of all terms add up to."""

    q: torch.Tensor
    k: torch.Tensor
    dout: torch.Tensor  # (B, H, S, D)
    weights: torch.Tensor  # (B, H, S, S')
    slopes: torch.Tensor  # (B, H, S, S'): gradients of the scores
    scale: float
    score_size: torch.Tensor  # (B, H, S, S')
    lse: torch.Tensor  # (B, H, S, 1), 0 where a row sees no key
    dot_size: torch.Tensor  # (B, H, S, S'): of dout @ v.T
    delta_size: torch.Tensor  # (B, H, S, 1)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return (x[None] if x.ndim == 3 else x).double().transpose(1, 2)


def slopes_of(
    rank: int, dout: Ranks, q: Ranks, k: Ranks, v: Ranks, result: Ranks, lse: Ranks, dlse: Any, *told: Any
) -> Slopes:
    """Those of `rank`'s queries. told: cu_seqlens, causal, layout, scale, window, length."""
    s = scores_of(rank, q, k, v, *told)
    shape = (*s.scores.shape[:3], 1)
    logarithm = lse[rank].double().reshape(shape)
    top = logarithm.masked_fill(logarithm == -math.inf, 0.0)
    weights = torch.exp(s.scores - top)
    out, grad = _heads_first(result[rank]), _heads_first(dout[rank])
    more = torch.zeros_like(top) if dlse is None else dlse[rank].double().reshape(shape)
    delta = (grad * out).sum(3, keepdim=True) - more
    slopes = torch.where(weights > 0, weights * (grad @ s.v.transpose(2, 3) - delta), 0.0)
    return Slopes(
        s.q, s.k, grad, weights, slopes, s.scale, s.scale * (s.q.abs() @ s.k.abs().transpose(2, 3)), top,
        grad.abs() @ s.v.abs().transpose(2, 3), (grad * out).abs().sum(3, keepdim=True) + more.abs(),
    )  # fmt: skip


def _own_keys(x: torch.Tensor, rank: int, like: Ranks, layout: str) -> torch.Tensor:
    """`rank`'s rows of (B, H, S', D), which is by position, in the shape of k, summed over heads that share keys."""
    b, h, total, d = x.shape
    rows, groups = total // len(like), like[rank].shape[-2]
    place = torch.argsort(gathered_order(rows, layout, len(like)))[rank * rows : (rank + 1) * rows].to(x.device)
    shared = x.reshape(b, groups, h // max(groups, 1), total, d).sum(2) if h else x.new_zeros(b, groups, total, d)
    found = shared.index_select(2, place).transpose(1, 2)
    return found[0] if like[rank].ndim == 3 else found


def _own_queries(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).reshape(like.shape)


def reference(
    rank: int, dout: Ranks, q: Ranks, k: Ranks, v: Ranks, result: Ranks, lse: Ranks, dlse: Ranks | None = None,
    cu_seqlens: Ranks | None = None, causal: bool = False, layout: str = "contiguous", scale: float | None = None,
    window: tuple[int, int] | None = None, length: int | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """dq, dk and dv of `rank`, from the ranks' operands, in fp64."""
    dk, dv, dq = 0, 0, torch.empty(0)
    for r in range(len(q)):
        x = slopes_of(r, dout, q, k, v, result, lse, dlse, cu_seqlens, causal, layout, scale, window, length)
        dk = dk + x.scale * (x.slopes.transpose(2, 3) @ x.q)
        dv = dv + x.weights.transpose(2, 3) @ x.dout
        if r == rank:
            dq = _own_queries(x.scale * (x.slopes @ x.k), q[rank])
    return dq, _own_keys(dk, rank, k, layout), _own_keys(dv, rank, k, layout)


def bound(
    rank: int, dtype: torch.dtype, roundings: int, dout: Ranks, q: Ranks, k: Ranks, v: Ranks, result: Ranks, lse: Ranks,
    dlse: Ranks | None = None, cu_seqlens: Ranks | None = None, causal: bool = False, layout: str = "contiguous",
    scale: float | None = None, window: tuple[int, int] | None = None, length: int | None = None,
    off: tuple[Ranks, Ranks] | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """How far each gradient may be from `reference`. off: how far result and lse may be from those that are given here,
    where the call gets others.

    The error of a score, of D products in fp32, and of its logarithm are errors of the exponential, relative to the
    weight. Those of dout @ v.T and of delta are relative to the sums of the magnitudes of their terms. Weights and
    slopes are rounded to the dtype before the last products. Each of these adds a rounding in fp32 for each term. The
    result is rounded `roundings` times, all but once in parts.
    """
    told = (cu_seqlens, causal, layout, scale, window, length)
    unit, tiny = UNIT[dtype], TINY[dtype]
    dq, dk, dv = torch.empty(0), 0, 0
    for r in range(len(q)):
        x = slopes_of(r, dout, q, k, v, result, lse, dlse, *told)
        depth, keys, seen = x.q.shape[3], x.weights.shape[3], (x.weights > 0).double()
        of_lse, of_delta = 4 * FP32 * x.lse.abs(), (depth + 3) * FP32 * x.delta_size
        if off is not None:
            of_lse = of_lse + off[1][r].double().reshape(of_lse.shape)
            of_delta = of_delta + (_heads_first(off[0][r]) * x.dout.abs()).sum(3, keepdim=True)
        wrong = torch.expm1((depth + 6) * FP32 * x.score_size + of_lse) + EXPONENTIAL
        weights = x.weights * (wrong + unit) + seen * tiny
        factor = x.dot_size + x.delta_size
        slopes = x.weights * (1 + wrong) * ((depth + 3) * FP32 * x.dot_size + of_delta + 2 * FP32 * factor)
        slopes = 1.01 * (slopes + x.weights * wrong * factor) + seen * tiny
        slopes = (1 + unit) * slopes + unit * x.slopes.abs()
        terms = (x.q.shape[2] * x.q.shape[1] + keys + 2 * len(q)) * FP32  # of any of the sums below
        terms += (roundings - 1) * unit
        of_slopes, of_weights = slopes + terms * (x.slopes.abs() + slopes), weights + terms * (x.weights + weights)
        dk = dk + x.scale * (of_slopes.transpose(2, 3) @ x.q.abs())
        dv = dv + of_weights.transpose(2, 3) @ x.dout.abs()
        if r == rank:
            dq = _own_queries(x.scale * (of_slopes @ x.k.abs()), q[rank])
    errors = dq, _own_keys(dk, rank, k, layout), _own_keys(dv, rank, k, layout)
    exact = reference(rank, dout, q, k, v, result, lse, dlse, *told)
    return tuple(1.01 * e + roundings * unit * (g.abs() + e) * 1.01 + tiny for e, g in zip(errors, exact))
