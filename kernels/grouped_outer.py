"""The weights' gradient of a grouped product: each expert's rows of x, transposed, times its rows of y. Local.

Every program computes tiles of an expert's matrix, over the expert's rows, which it finds from `offsets` on the device.
The tiles of one expert are neighbours, and among them those of the same columns, so L2 delivers its rows more than
once. An expert without rows has zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from pkt.errors import ShapeError
from pkt.runtime.launch.launch import beside, beside_launch
from pkt.runtime.world import World

from . import gradients, grouped_gradients
from .agreement import world_of
from .declaration import Call
from .shared import products
from .shared.checks import aligned, check_tensor
from .shared.tile_product import FP32_TILES, UNALIGNED_TILES, Tiles, tile_pointers


def reference(x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The exact matrices in fp64, (experts, K, N)."""
    ends = itertools.pairwise(offsets.tolist())
    return torch.stack([x[first:last].double().t() @ y[first:last].double() for first, last in ends])


@triton.jit
def grouped_outer_kernel(
    x_ptr,  # (M, K) rows by expert
    y_ptr,  # (M, N) rows by expert
    offsets_ptr,  # int32 (experts + 1,); rows [offsets[e], offsets[e + 1]) are expert e's
    out_ptr,  # (experts, K, N)
    M,
    N,
    K,
    experts,
    BLOCK_M: tl.constexpr,  # of K
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # rows at a time
    GROUP: tl.constexpr,  # rows of tiles that run over all columns together
):
    high = tl.cdiv(K, BLOCK_M)
    wide = tl.cdiv(N, BLOCK_N)
    rows = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), experts * high * wide, tl.num_programs(0)):
        expert = tile // (high * wide)
        inside = tile % (high * wide)
        group = inside // (GROUP * wide) * GROUP
        tall = tl.minimum(high - group, GROUP)
        inside = inside % (GROUP * wide)
        i = (group + inside % tall) * BLOCK_M + tl.arange(0, BLOCK_M)
        j = inside // tall * BLOCK_N + tl.arange(0, BLOCK_N)
        first = tl.maximum(tl.load(offsets_ptr + expert), 0)
        last = tl.minimum(tl.load(offsets_ptr + expert + 1), M)
        x = x_ptr + tl.cast(first, tl.int64) * K + rows[:, None] * K + i[None, :]
        y = y_ptr + tl.cast(first, tl.int64) * N + rows[:, None] * N + j[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for row in range(first, last, BLOCK_K):
            there = (rows < last - row)[:, None]
            a = tl.load(x, mask=there & (i < K)[None, :], other=0)
            b = tl.load(y, mask=there & (j < N)[None, :], other=0)
            acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
            x += tl.cast(K, tl.int64) * BLOCK_K
            y += tl.cast(N, tl.int64) * BLOCK_K
        own = out_ptr + tl.cast(expert, tl.int64) * K * N
        at = own + tl.cast(i, tl.int64)[:, None] * N + j[None, :]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(i < K)[:, None] & (j < N)[None, :])


def grouped_outer(
    x: torch.Tensor,
    y: torch.Tensor,
    offsets: torch.Tensor,
    *,
    tiles: Sequence[int] | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """The gradient of `grouped_matmul`'s w: out[e] = x[rows of e].T @ y[rows of e], (experts, K, N). Local.

    x: (M, K), y: (M, N) of x's dtype, both by expert. offsets: int32 (experts + 1,) as in `grouped_matmul`, read on the
    device. tiles: (block_m, block_n, block_k, ...) of a tile of out, block_k rows at a time; None chooses by dtype.
    Sums are in fp32. Returns a new tensor of x's dtype; an expert without rows has zeros. Differentiable. Raises
    ShapeError, DtypeError.
    """
    return _outer(x, y, offsets, tiles, world)


def _outer(
    x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, tiles: Sequence[int] | None, world: World | None
) -> torch.Tensor:
    if grouped_gradients.is_traced(x, y, offsets):
        return grouped_gradients.outer(x, y, offsets, tiles, world)
    call, world = "grouped_outer", world_of("grouped_outer", world, x, y)
    grouped_gradients.check_rows(call, x, offsets, world)
    check_tensor(call, "y", y, world, dtype=x.dtype)
    if y.ndim != 2 or y.shape[0] != x.shape[0]:
        raise ShapeError.argument(call, "y", tuple(y.shape), f"({x.shape[0]}, N), as x has rows", world.rank)
    if torch.is_grad_enabled() and gradients.required((x, y)):
        return grouped_gradients.outer(x, y, offsets, tiles, world)
    held = default_tiles(x.dtype, aligned(x, y))
    if tiles is not None:
        held = products.tiles(Call(call, world, {}, {}, {}, None), "tiles", tiles)
    (M, K), N, experts = x.shape, y.shape[1], len(offsets) - 1
    out = torch.empty(experts, K, N, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out

    def grid() -> tuple[int]:
        return (min(experts * triton.cdiv(K, held.block_m) * triton.cdiv(N, held.block_n), world.num_sms),)

    beside(
        world, grouped_outer_kernel, grid, x, y, offsets, out, M, N, K, experts, held.block_m, held.block_n,
        held.block_k, held.group, **held.launch_options(),
    )  # fmt: skip
    return out


grouped_gradients.take("outer", _outer)
TILES = Tiles(128, 128, 64, num_stages=3)


def default_tiles(dtype: torch.dtype, whole: bool) -> Tiles:
    """Not measured. whole: rows of x and y begin at multiples of 16 bytes."""
    if dtype == torch.float32:
        return FP32_TILES
    return TILES if whole else UNALIGNED_TILES


# ------------------------------------------------------------------------------------------------- rows of no expert
@triton.jit
def clear_kernel(
    out_ptr,  # (M, N)
    offsets_ptr,  # int32 (experts + 1,)
    M,
    N,
    experts,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Zeros for the rows before the first expert's and behind the last one's."""
    first = tl.load(offsets_ptr)
    last = tl.load(offsets_ptr + experts)
    zeros = tl.zeros((ROWS, COLS), out_ptr.dtype.element_ty)
    for start in range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS):
        if (start < first) | (start + ROWS > last):
            row = start + tl.arange(0, ROWS)
            outside = ((row < first) | (row >= last))[:, None]
            for col in range(0, N, COLS):
                ptrs, inside = tile_pointers(out_ptr, start, col, M, N, N, ROWS, COLS)
                tl.store(ptrs, zeros, mask=inside & outside)


ROWS, COLS = 16, 256


def clear(out: torch.Tensor, offsets: torch.Tensor, world: World) -> None:
    """Write zeros into the rows of `out` that no expert has."""
    key = clearing, *out.shape, offsets.shape[0] - 1
    launch = world.plans.get(key)
    if launch is None:
        launch = world.plans[key] = clearing(world, *key[1:])
    launch(out, offsets)


def clearing(world: World, M: int, N: int, experts: int) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """`clear` of an `out` of (M, N), planned."""
    if not M * N:
        return lambda out, offsets: None
    start = beside_launch(world, clear_kernel, (min(triton.cdiv(M, ROWS), world.num_sms),))
    return lambda out, offsets: start(out, offsets, M, N, experts, ROWS, COLS)
