"""The exact result of attention over the ranks' keys, and how far a right result may be from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .sequence import View, everywhere, positions, spans

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""Unit roundoff."""
TINY = {torch.bfloat16: 2.0**-120, torch.float16: 2.0**-24, torch.float32: 2.0**-120}
"""How far a probability may be rounded where it is too small for its dtype."""
EXPONENTIAL = 2.0**-21
"""Relative error of exp2 and log2 on GPUs, ex2.approx and lg2.approx."""


def view_of(
    rows: int, size: int, causal: bool, window: tuple[int, int] | None, length: int | None
) -> View:  # fmt: skip
    """The keys that a query sees. Window sides of -1 have no limit."""
    total = rows * size
    left, right = (total if side < 0 else min(side, total) for side in window or (-1, -1))
    return View(left, 0 if causal else right, total if length is None else length)


class Scores(NamedTuple):
    """The operands of attention in fp64, and its scores. Heads of keys are repeated for those of queries; S' is
    size * S."""

    q: torch.Tensor  # (B, H, S, D)
    k: torch.Tensor  # (B, H, S', D)
    v: torch.Tensor  # (B, H, S', D)
    scores: torch.Tensor  # (B, H, S, S'), times the scale; -inf of a key that is not seen
    scale: float


class Weights(NamedTuple):
    """The parts of attention in fp64, as Scores."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    weights: torch.Tensor  # (B, H, S, S') softmax; zero in rows that see no key
    lse: torch.Tensor  # (B, H, S), natural log; -inf there
    scale: float


def scores_of(rank, q, k, v, cu_seqlens, causal, layout, scale, window, length) -> Scores:  # type: ignore
    """Those of `rank`'s queries."""
    if q[rank].ndim == 3:  # packed: a batch of one
        q, k, v = ([x[None] for x in xs] for xs in (q, k, v))
    size, rows, heads = len(q), q[rank].shape[1], q[rank].shape[2]
    scale = q[rank].shape[3] ** -0.5 if scale is None and q[rank].shape[3] else 1.0 if scale is None else scale
    view = view_of(rows, size, causal, window, length)
    mine, theirs = positions(rows, layout, rank, size), torch.arange(rows * size, device="cpu")
    if torch.device(q[rank].device).type != "meta":
        mine, theirs = mine.to(q[rank].device), theirs.to(q[rank].device)
    seen = (theirs >= mine[:, None] - view.left) & (theirs <= mine[:, None] + view.right)
    seen &= (theirs < view.length) & (mine[:, None] < view.length)
    if cu_seqlens is not None:
        first, behind = spans(cu_seqlens[rank], mine, rows * size)
        seen &= (theirs >= first[:, None]) & (theirs < behind[:, None])
    group = heads // max(k[rank].shape[2], 1)
    mine_q = q[rank].double().transpose(1, 2)
    keys, values = (
        everywhere(xs, layout, 1).double().transpose(1, 2).repeat_interleave(group, 1) for xs in (k, v)
    )  # fmt: skip
    scores = (mine_q @ keys.transpose(2, 3) * scale).masked_fill(~seen.to(mine_q.device), -math.inf)
    return Scores(mine_q, keys, values, scores, scale)


def weights_of(*call) -> Weights:  # type: ignore
    """Those of a rank's queries; takes what `scores_of` does."""
    q, keys, values, scores, scale = scores_of(*call)
    lse = torch.logsumexp(scores, 3) if scores.shape[3] else scores.new_full(scores.shape[:3], -math.inf)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return Weights(q, keys, values, weights, lse, scale)


def _as(q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In the shapes of the call's results."""
    out = out.transpose(1, 2)
    return (out[0], lse[0]) if q.ndim == 3 else (out, lse)


def reference(
    rank: int, q: Sequence[torch.Tensor], k: Sequence[torch.Tensor], v: Sequence[torch.Tensor],
    cu_seqlens: Sequence[torch.Tensor] | None = None, causal: bool = False, layout: str = "contiguous",
    scale: float | None = None, window: tuple[int, int] | None = None, length: int | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What `rank` gets from the ranks' operands, in fp64, and the logarithm of the sum of exponentials."""
    w = weights_of(rank, q, k, v, cu_seqlens, causal, layout, scale, window, length)
    return _as(q[rank], w.weights @ w.v, w.lse)


def bound(
    rank: int, dtype: torch.dtype, roundings: int, q: Sequence[torch.Tensor], k: Sequence[torch.Tensor],
    v: Sequence[torch.Tensor], cu_seqlens: Sequence[torch.Tensor] | None = None, causal: bool = False,
    layout: str = "contiguous", scale: float | None = None, window: tuple[int, int] | None = None,
    length: int | None = None, return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """How far each result may be from `reference`.

    A score is a sum of D products in fp32, is scaled to base 2 and the running maximum is taken off: its error is an
    error of the exponential, relative to it. Each key's weight is also rounded to the dtype before it is multiplied
    with the value, but not in the sum by which the result is divided. A step over a block of keys rescales both sums:
    at most an error of 2^-24 and of exp2 a key. The result is rounded `roundings` times, all but once in parts whose
    weights are exponentials of differences of logarithms.
    """
    w = weights_of(rank, q, k, v, cu_seqlens, causal, layout, scale, window, length)
    fp32, keys, depth = 2.0**-24, w.k.shape[2], w.q.shape[3]
    size = w.q.abs() @ w.k.abs().transpose(2, 3) * w.scale
    top = (w.q @ w.k.transpose(2, 3) * w.scale).abs().amax(3, keepdim=True) if keys else size
    wrong = torch.expm1((depth + 3) * fp32 * size + 4 * fp32 * (size + top)) + EXPONENTIAL
    wrong = wrong + keys * (2 * fp32 + EXPONENTIAL)
    if roundings > 1:
        wrong = wrong + 8 * fp32 * (top + 1 + math.log(max(keys, 1))) + 2 * EXPONENTIAL
    of_sum = (w.weights * wrong).sum(3, keepdim=True)
    values = w.v.abs()
    out = (w.weights * (wrong + roundings * UNIT[dtype])) @ values + of_sum * (w.weights @ values)
    seen = (w.weights > 0).to(values.dtype)
    out = 1.01 * out + TINY[dtype] * (seen @ values) + UNIT[dtype] * (w.weights @ w.v).abs() * 1.01
    finite = w.lse.masked_fill(w.lse == -math.inf, 0.0).abs()
    lse = 1.01 * of_sum[..., 0] + 4 * fp32 * (finite + 1 + math.log(max(keys, 1))) + EXPONENTIAL
    return _as(q[rank], out + TINY[dtype], lse)
