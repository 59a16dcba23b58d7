"""The exact result in fp64, and how far a right one may be from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

Tensors = Sequence[torch.Tensor]
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
TINY = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float32: 2.0**-150}
FP32 = 2.0**-24


def _rows(
    q: Tensors, k_cache: Tensors, v_cache: Tensors | None, block_table: Tensors, seq_lens: Tensors,
    k_scale: Tensors | None, v_scale: Tensors | None, v_dim: int | None,
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor, torch.Tensor]]:  # fmt: skip
    """(b, s, q (KV heads, group, D), K (KV heads, n, D), V (KV heads, n, E)) of each query token, over the keys of all
    ranks that it sees, in fp64. Where q, or K, or V, has no elements there are no keys."""
    B, SQ, heads, D = q[0].shape
    for b in range(B):
        for s in range(SQ):
            keys, values = [], []
            for rank, table in enumerate(block_table):
                k = k_cache[rank]
                v = k[..., :v_dim] if v_cache is None else v_cache[rank]
                n = min(int(seq_lens[rank][b, s]), table.shape[1] * k.shape[1] if k.numel() and v.numel() else 0)
                at = torch.arange(max(n, 0), device=k.device)
                page = table[b, at // max(k.shape[1], 1)].long()
                own = k_scale if v_cache is None else v_scale
                keys.append(_scaled(k[page, at % max(k.shape[1], 1)], k_scale, rank))
                values.append(_scaled(v[page, at % max(k.shape[1], 1)], own, rank))
            k, v = torch.cat(keys).transpose(0, 1), torch.cat(values).transpose(0, 1)
            groups = max(k.shape[0], 1)
            yield b, s, q[0][b, s].double().reshape(groups, heads // groups, D), k, v


def _scaled(x: torch.Tensor, scale: Tensors | None, rank: int) -> torch.Tensor:
    """x (n, KV heads, columns) in fp64, times the scales of a rank."""
    return x.double() if scale is None else x.double() * scale[rank].double().reshape(-1, 1)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float | None, soft_cap: float | None) -> torch.Tensor:
    """(KV heads, group, n); scores of no KV head are of no key."""
    if k.shape[0] == 0:
        return q.new_zeros((*q.shape[:2], 0))
    score = torch.einsum("ghd,gnd->ghn", q, k) * (scale if scale is not None else max(q.shape[-1], 1) ** -0.5)
    return score if soft_cap is None else soft_cap * torch.tanh(score / soft_cap)


def _attended(weights: torch.Tensor, v: torch.Tensor, heads: int, E: int) -> torch.Tensor:
    """(heads, E)"""
    if weights.shape[-1] == 0:
        return weights.new_zeros(heads, E)
    return torch.einsum("ghn,gne->ghe", weights, v).reshape(heads, E)


def reference(
    rank: int, q: Tensors, k_cache: Tensors, v_cache: Tensors | None, block_table: Tensors, seq_lens: Tensors,
    sinks: Tensors | None, k_scale: Tensors | None = None, v_scale: Tensors | None = None, v_dim: int | None = None,
    scale: float | None = None, soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What every rank gets: out (B, SQ, heads, E) and lse (B, SQ, heads), in fp64."""
    B, SQ, heads, _ = q[0].shape
    E = v_cache[0].shape[-1] if v_cache is not None else k_cache[0].shape[-1] if v_dim is None else v_dim
    out = torch.zeros(B, SQ, heads, E, dtype=torch.float64, device=q[0].device)
    lse = torch.full((B, SQ, heads), -math.inf, dtype=torch.float64, device=q[0].device)
    for b, s, x, k, v in _rows(q, k_cache, v_cache, block_table, seq_lens, k_scale, v_scale, v_dim):
        score = _scores(x, k, scale, soft_cap)
        sink = torch.full((heads,), -math.inf, device=x.device) if sinks is None else sinks[0]
        both = torch.cat([score, sink.double().reshape(*score.shape[:2], 1)], -1)
        lse[b, s] = torch.logsumexp(both, -1).flatten()
        weights = torch.nan_to_num(torch.exp(both - torch.logsumexp(both, -1, keepdim=True)))  # of no keys: 0
        out[b, s] = _attended(weights[..., :-1], v, heads, E)
    return out, lse


def bound(
    rank: int, dtype: torch.dtype, roundings: int, q: Tensors, k_cache: Tensors, v_cache: Tensors | None,
    block_table: Tensors, seq_lens: Tensors, sinks: Tensors | None, k_scale: Tensors | None = None,
    v_scale: Tensors | None = None, v_dim: int | None = None, scale: float | None = None, soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A score is off by `wrong`: a sum of D products in fp32, then a few operations. Each weight is a power of two of
    that score less the greatest, so its relative error is twice as much, with exp2's own; it is rounded to the dtype
    before it is multiplied with V. Sums over n keys round n times. Merging rounds a few times more. With fp8 caches and
    q in bf16 both are multiplied in fp16: q, a row of which is less than 2 there, loses up to 2 ** -25 of its greatest
    element. Weights in fp16 are times 2 ** 15, and lose up to 2 ** -25 of that."""
    caches, scales = (q, k_cache, v_cache, block_table, seq_lens), (k_scale, v_scale)
    exact, lse = reference(rank, *caches, sinks, *scales, v_dim, scale, soft_cap)
    off, off_lse = torch.zeros_like(exact), torch.zeros_like(lse)
    heads, parts, squeezed = exact.shape[2], 8 + len(block_table), dtype == torch.bfloat16 and k_cache[0].itemsize == 1
    for b, s, x, k, v in _rows(*caches, *scales, v_dim):
        sink = torch.zeros(heads, device=x.device) if sinks is None else sinks[0].abs().nan_to_num(0, 0, 0)
        size = _scores(x.abs(), k.abs(), abs(scale) if scale is not None else None, None)
        largest = size.amax(-1).flatten() if size.shape[-1] else lse.new_zeros(heads)
        largest = largest + sink.double().flatten()
        wrong = (x.shape[-1] + 8) * FP32 * largest + (0 if soft_cap is None else soft_cap * 2.0**-20)
        if squeezed:
            same = x.abs().amax(-1, keepdim=True).expand_as(x) if x.shape[-1] else x
            lost = _scores(same, k.abs(), abs(scale) if scale is not None else None, None)
            wrong = wrong + 2.0**-25 * (lost.amax(-1).flatten() if lost.shape[-1] else 0)
        count = (size.shape[-1] + 4 * parts) * FP32
        relative = torch.expm1(2 * wrong + 16 * FP32) + count
        score = _scores(x, k, scale, soft_cap)
        weights = torch.exp(score - lse[b, s].reshape(*score.shape[:2], 1)).nan_to_num()
        magnitude = _attended(weights, v.abs(), heads, exact.shape[-1])
        off[b, s] = (2 * relative[:, None] + UNIT[dtype]) * magnitude
        if squeezed or dtype == torch.float16:
            off[b, s] += _attended(2.0**-40 * torch.ones_like(score), v.abs(), heads, exact.shape[-1])
        off_lse[b, s] = 2 * relative + 4 * FP32 * lse[b, s].abs().nan_to_num(0, 0, 0)
    return off + roundings * UNIT[dtype] * (exact.abs() + off) + TINY[dtype], off_lse
