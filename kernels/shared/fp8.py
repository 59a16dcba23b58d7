"""fp8 e4m3 (float8_e4m3fn) with scales: a value is an element times its scale, of its token or of its 128 columns.

scale = max(greatest magnitude / 448, a least scale), and value / scale is rounded. vLLM's dynamic quantisation has the
least scale 1 / (448 * 512), DeepEP's 1e-4 / 448.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pkt.runtime.launch.launch import beside
from pkt.runtime.world import World

FP8 = torch.float8_e4m3fn
GROUP = 128
"""Columns that share a scale."""
LARGEST, LEAST_SCALE = 448.0, 1.0 / (448 * 512)
_LARGEST, _GROUP = tl.constexpr(LARGEST), tl.constexpr(GROUP)
BLOCK = (4, 1024)
"""Rows and columns that a program of `quantized` takes at a time."""


@triton.jit
def scale_of(most, LEAST: tl.constexpr):
    """The scale of values whose greatest magnitude is `most`."""
    return tl.maximum(most / _LARGEST, LEAST)


@triton.jit
def by_group(y, LEAST: tl.constexpr):
    """(elements (rows, columns), scales (rows, columns / 128)) of y (rows, columns), fp32."""
    groups = tl.reshape(y, (y.shape[0], y.shape[1] // _GROUP, _GROUP))
    scale = scale_of(tl.max(tl.abs(groups), 2), LEAST)
    return tl.reshape(groups / scale[:, :, None], y.shape).to(tl.float8e4nv), scale


@triton.jit
def quantize_kernel(
    x_ptr,  # (T, H)
    out_ptr,  # fp8 (T, H)
    scales_ptr,  # fp32 (T, H / 128)
    T,
    H,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    inside = (row < T) & (col < H)
    x = tl.load(x_ptr + row * H + col, mask=inside, other=0).to(tl.float32)
    elements, scale = by_group(x, LEAST)
    tl.store(out_ptr + row * H + col, elements, mask=inside)
    group = tl.program_id(1) * (COLS // _GROUP) + tl.arange(0, COLS // _GROUP)[None, :]
    tl.store(scales_ptr + row * (H // _GROUP) + group, scale, mask=(row < T) & (group < H // _GROUP))


def quantized(world: World, x: torch.Tensor, least: float = LEAST_SCALE) -> tuple[torch.Tensor, torch.Tensor]:
    """(elements, fp8 (T, H); scales, fp32 (T, H / 128)) of x (T, H), contiguous, of which H is a multiple of 128."""
    T, H = x.shape
    out, scales = torch.empty_like(x, dtype=FP8), x.new_empty(T, H // GROUP, dtype=torch.float32)
    if x.numel():
        rows, cols = BLOCK

        def grid() -> tuple[int, int]:
            return triton.cdiv(T, rows), triton.cdiv(H, cols)

        beside(world, quantize_kernel, grid, x, out, scales, T, H, least, rows, cols)
    return out, scales
