"""RMSNorm of heads and rotary embedding, which queries and keys get before attention: in a tile, by a kernel, exact.

A head's D elements x become

    y = x * rsqrt(mean of its squares + eps) * weight
    (y1 * cos - y2 * sin, y2 * cos + y1 * sin), where y1 and y2 are the halves of y

cos and sin have a row for each position, and a column for each element of a half. So Llama and Qwen rotate (Hugging
Face's rotate_half). Either step may be left out. Both are computed in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


# ------------------------------------------------------------------------------------------------------------- device
@triton.jit
def turned(tile, norm_ptr, cos_ptr, sin_ptr, head, heads, row, S, eps, D: tl.constexpr):
    """`tile`, fp32 (rows, columns), of whole heads, with those before number `heads` normed and rotated. head: the
    number of its first one; row: its first position, of S. norm_ptr: (heads, D); cos_ptr, sin_ptr: fp32 (S, D / 2)."""
    ROWS: tl.constexpr = tile.shape[0]
    HEADS: tl.constexpr = tile.shape[1] // D
    HALF: tl.constexpr = D // 2
    x = tl.reshape(tile, (ROWS, HEADS, D))
    if norm_ptr is not None:
        i = head + tl.arange(0, HEADS)
        weight_ptr = norm_ptr + i[:, None] * D + tl.arange(0, D)[None, :]
        weight = tl.load(weight_ptr, mask=(i < heads)[:, None], other=0.0).to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, 2) / D + eps)[:, :, None] * weight[None, :, :]
    if cos_ptr is not None:
        rows = row + tl.arange(0, ROWS)
        at = rows[:, None] * HALF + tl.arange(0, HALF)[None, :]
        cos = tl.load(cos_ptr + at, mask=(rows < S)[:, None], other=0.0)[:, None, :]
        sin = tl.load(sin_ptr + at, mask=(rows < S)[:, None], other=0.0)[:, None, :]
        first, second = tl.split(tl.permute(tl.reshape(x, (ROWS, HEADS, 2, HALF)), (0, 1, 3, 2)))
        x = tl.permute(tl.join(first * cos - second * sin, second * cos + first * sin), (0, 1, 3, 2))
    inside = head + tl.arange(0, HEADS * D) // D < heads
    return tl.where(inside[None, :], tl.reshape(x, (ROWS, HEADS * D)), tile)


@triton.jit
def turn_kernel(
    x_ptr,  # (rows, all heads, D), rewritten
    norm_ptr,  # (all heads, D), or None
    cos_ptr,  # fp32 (S, D / 2), or None; row number i has position i % S
    sin_ptr,
    S,
    every,  # heads of a row
    h,  # heads of a rank
    heads,  # of these the first so many are normed and rotated
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,  # of D, rounded up to a power of two
    HEADS: tl.constexpr,  # that a program works on
):
    row = tl.program_id(0)
    i = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    head = i // heads * h + i % heads
    d = tl.arange(0, HALF)
    inside = (head < every)[:, None] & (d < D // 2)[None, :]
    at = tl.cast(row, tl.int64) * every * D + head[:, None] * D + d[None, :]
    first = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + D // 2, mask=inside, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        root = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)[:, None]
        weight_ptr = norm_ptr + head[:, None] * D + d[None, :]
        first *= root * tl.load(weight_ptr, mask=inside, other=0.0).to(tl.float32)
        second *= root * tl.load(weight_ptr + D // 2, mask=inside, other=0.0).to(tl.float32)
    if cos_ptr is not None:
        angle = row % S * (D // 2) + d
        cos = tl.load(cos_ptr + angle, mask=d < D // 2, other=0.0)[None, :]
        sin = tl.load(sin_ptr + angle, mask=d < D // 2, other=0.0)[None, :]
        first, second = first * cos - second * sin, second * cos + first * sin
    tl.debug_barrier()  # several threads load the same element of a small tile: before one of them overwrites it
    tl.store(x_ptr + at, first.to(x_ptr.dtype.element_ty), mask=inside)
    tl.store(x_ptr + at + D // 2, second.to(x_ptr.dtype.element_ty), mask=inside)


# --------------------------------------------------------------------------------------------------------------- host
FP32 = 2.0**-24


def exact(
    x: torch.Tensor, norm: torch.Tensor | None, cos: torch.Tensor | None, sin: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """x (b, s, heads, D) in fp64, normed with norm (heads, D) and rotated by cos and sin (s, D / 2)."""
    if norm is not None:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) / max(x.shape[-1], 1) + eps) * norm.double()
    if cos is None or sin is None:
        return x
    return _rotated(x, cos.double()[:, None], sin.double()[:, None], -1)


def bound(
    x: torch.Tensor, off: torch.Tensor, norm: torch.Tensor | None, cos: torch.Tensor | None, sin: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:  # fmt: skip
    """How far the result may be off in fp32, for the exact x, of which `off` is as much. An error of x moves the root,
    too, and each operation rounds."""
    if norm is not None:
        D, w = max(x.shape[-1], 1), norm.double().abs()
        mean = x.square().sum(-1, keepdim=True) / D
        moved = (2 * x.abs() * off + off.square()).sum(-1, keepdim=True) / D
        moved = moved + (D + 8) * FP32 * (mean + moved)
        root, high = (mean + eps).rsqrt(), (mean + eps - moved).clamp(min=eps / 2).rsqrt() * (1 + 2.0**-21)
        low = (mean + eps + moved).rsqrt() * (1 - 2.0**-21)
        wrong, most = torch.maximum(high - root, root - low), x.abs() + off
        off = w * (most * wrong + off * root + 8 * FP32 * most * high)
        x = x * root * norm.double()
    if cos is None or sin is None:
        return off
    c, s = cos.double().abs()[:, None], sin.double().abs()[:, None]
    return _rotated(off, c, s, 1) + 4 * FP32 * _rotated(x.abs() + off, c, s, 1)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    first, second = x.tensor_split(2, -1)
    return torch.cat([first * cos + sign * second * sin, second * cos + first * sin], -1)
