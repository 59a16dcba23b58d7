"""Grouped product of fp8 rows and matrices with scales: one for each 128 elements along K, or fewer. Local to a rank.

The elements are multiplied as they are, 128 of K at a time, and these sums are scaled and added in fp32. On sm_90 the
tensor cores keep some 14 bits of a sum of fp8 products: DeepGEMM, too, adds in fp32 every 128 elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from pkt.errors import DtypeError, ShapeError
from pkt.runtime.launch.launch import beside
from pkt.runtime.world import World

from .declaration import Call
from .grouped_outer import clear as clear_rows
from .shared import products
from .shared.checks import FLOATS, check_apart, check_tensor
from .shared.expert_tiles import ends_of, find
from .shared.fp8 import FP8, GROUP
from .shared.tile_product import Tiles, tile_pointers

Pair = Sequence[torch.Tensor]
"""(scales of x, scales of w), fp32: (M, k) and (experts, k, n), where k is K / 128 rounded up, or 1; and n is N / 128
rounded up, or 1."""


@triton.jit
def grouped_fp8_kernel(
    x_ptr,  # fp8 (M, K) rows by expert
    w_ptr,  # fp8 (experts, K, N), or (experts, N, K) if TRANSPOSED
    x_scales_ptr,  # fp32, of row i and elements k from row_step * i + x_step * (k / 128) on
    w_scales_ptr,  # fp32, from expert_step * e + k_step * (k / 128) + n_step * (n / 128) on
    offsets_ptr,  # int32 (experts + 1,); rows [offsets[e], offsets[e + 1]) are expert e's
    out_ptr,  # (M, N)
    M,
    N,
    K,
    experts,
    row_step,
    x_step,
    expert_step,
    k_step,
    n_step,
    EXPERTS: tl.constexpr,  # the next power of two
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides BLOCK_K
    BLOCK_K: tl.constexpr,  # 128
    GROUP: tl.constexpr,
):
    columns = tl.cdiv(N, BLOCK_N)
    ends = ends_of(offsets_ptr, experts, M, columns, EXPERTS, BLOCK_M)
    ks = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    for tile in range(tl.program_id(0), tl.max(ends), tl.num_programs(0)):
        expert, row, col, stop = find(tile, ends, offsets_ptr, experts, M, columns, BLOCK_M, BLOCK_N, GROUP)
        there = rows < stop - row
        x = x_ptr + tl.cast(row, tl.int64) * K
        w = w_ptr + tl.cast(expert, tl.int64) * K * N
        of_x = x_scales_ptr + (row + tl.cast(rows, tl.int64)) * row_step
        of_w = w_scales_ptr + tl.cast(expert, tl.int64) * expert_step + col // BLOCK_K * n_step
        if TRANSPOSED:
            w += tl.cast(col, tl.int64) * K
            w_offs = ks[:, None] + cols[None, :] * K
            step = tl.cast(BLOCK_K, tl.int64)
        else:
            w += col
            w_offs = ks[:, None] * N + cols[None, :]
            step = tl.cast(N, tl.int64) * BLOCK_K
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            a = tl.load(x + rows[:, None] * K + ks[None, :], mask=there[:, None] & (ks < K - k)[None, :], other=0.0)
            b = tl.load(w + w_offs, mask=(ks < K - k)[:, None] & (cols < N - col)[None, :], other=0.0)
            scale = tl.load(of_x, mask=there, other=0) * tl.load(of_w)
            acc += tl.dot(a, b) * scale[:, None]
            x += BLOCK_K
            w += step
            of_x += x_step
            of_w += k_step
        ptrs, mask = tile_pointers(out_ptr, row, col, stop, N, N, BLOCK_M, BLOCK_N)
        tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def spread(scales: torch.Tensor, *shape: int) -> torch.Tensor:
    """A scale for each element, in fp64, of scales for 1 or 128 of the last dimensions `shape`."""
    found = scales.double()
    for at, size in enumerate(shape, -len(shape)):
        times = size if found.shape[at] == 1 else GROUP
        found = found.repeat_interleave(times, at).narrow(at, 0, size)
    return found


def multiply(
    x: torch.Tensor, w: torch.Tensor, scales: Any, offsets: torch.Tensor, tiles: Sequence[int] | None, clear: bool,
    expected: int | None, world: World, out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """What `grouped_matmul` says."""
    transposed = _check(x, w, scales, offsets, out, world)
    (M, K), (experts, _, N) = x.shape, w.shape
    rows = M if expected is None else min(M, expected)
    held = default_tiles(rows, experts) if tiles is None else _tiles(tiles, world)
    if out is None:
        out = torch.empty(M, N, dtype=torch.bfloat16, device=x.device)
    if not out.numel():
        return out
    if not K:
        return out.zero_()

    def grid() -> tuple[int]:
        rows_of_tiles = triton.cdiv(M, held.block_m) + experts - 1  # at most: each expert ends inside of a tile
        return (min(rows_of_tiles * triton.cdiv(N, held.block_n), world.num_sms * programs_each(held)),)

    of_x, of_w = scales
    steps = (*_steps(of_x), *_steps(of_w))
    constants = 1 << (experts - 1).bit_length(), transposed, *held[:4]
    beside(
        world, grouped_fp8_kernel, grid, x, w, of_x, of_w, offsets, out, M, N, K, experts, *steps, *constants,
        **held.launch_options(),
    )  # fmt: skip
    if clear:
        clear_rows(out, offsets, world)
    return out


def _steps(scales: torch.Tensor) -> list[int]:
    """Strides of the scales; 0 where one stands for a whole dimension of blocks. Rows and experts have their own."""
    return [0 if at and size == 1 else step for at, (size, step) in enumerate(zip(scales.shape, scales.stride()))]


# -------------------------------------------------------------------------------------------------------------- host
FEW_ROWS_TILES = Tiles(64, 128, GROUP, num_warps=4, num_stages=4)
TILES = Tiles(128, 128, GROUP, num_stages=4)
FEW_ROWS = 64
"""Of an expert: with so many or fewer, half of a larger tile would be empty. Nobody has measured these tiles."""


def default_tiles(M: int, experts: int) -> Tiles:
    """Tiles for M rows of so many experts."""
    return FEW_ROWS_TILES if M <= FEW_ROWS * experts else TILES


def programs_each(tiles: Tiles) -> int:
    """Programs that fit on an SM."""
    return 2 if tiles.num_warps <= 4 else 1


def _tiles(tiles: Sequence[int], world: World) -> Tiles:
    call = Call("grouped_matmul", world, {}, {}, {}, None)
    held = products.tiles(call, "tiles", tiles)
    if held.block_k != GROUP or GROUP % held.block_n:
        raise call.refuse("tiles", tuple(held), f"block_k {GROUP}, and a block_n that divides it, with scales")
    return held


def _check(
    x: torch.Tensor, w: torch.Tensor, scales: Any, offsets: torch.Tensor, out: torch.Tensor | None, world: World
) -> bool:  # fmt: skip
    """Raise what `grouped_matmul` says; whether w is the view of a transposed tensor."""
    call, rank = "grouped_matmul", world.rank
    check_tensor(call, "x", x, world, dtype=FP8)
    if x.ndim != 2:
        raise ShapeError.argument(call, "x", tuple(x.shape), "2 dimensions", rank)
    check_tensor(call, "w", w, world, dtype=FP8, contiguous=False)
    (M, K), N = x.shape, w.shape[-1]
    if w.ndim != 3 or w.shape[1] != K or not w.shape[0]:
        raise ShapeError.argument(call, "w", tuple(w.shape), f"(experts, {K}, N)", rank)
    transposed = not w.is_contiguous() and w.transpose(1, 2).is_contiguous()
    check_tensor(call, "w", w.transpose(1, 2) if transposed else w, world)
    check_tensor(call, "offsets", offsets, world, dtype=torch.int32, shape=(w.shape[0] + 1,))
    if not isinstance(scales, (tuple, list)) or len(scales) != 2:
        raise DtypeError.argument(call, "scales", type(scales).__name__, "(scales of x, scales of w)", rank)
    k, n = -(-K // GROUP), -(-N // GROUP)  # triton.cdiv takes 5 us on the host
    for name, one, first, most in (("scales[0]", scales[0], (M,), (k,)), ("scales[1]", scales[1], w.shape[:1], (k, n))):
        check_tensor(call, name, one, world, dtype=torch.float32, contiguous=False)
        sizes = tuple(one.shape)
        fits = len(sizes) == 1 + len(most) and all(size in (1, wanted) for size, wanted in zip(sizes[1:], most))
        if not fits or sizes[0] != first[0]:
            wanted = f"({', '.join(map(str, (*first, *most)))}), where 1 stands for all blocks of {GROUP}"
            raise ShapeError.argument(call, name, sizes, wanted, rank)
    if out is not None:
        check_tensor(call, "out", out, world, dtypes=FLOATS, shape=(M, N))
        for name, tensor in (("x", x), ("w", w), ("scales[0]", scales[0]), ("scales[1]", scales[1])):
            check_apart(call, tensor, out, world, None, name)
    return transposed
