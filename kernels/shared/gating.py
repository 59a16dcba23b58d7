"""Bias and epilogue "swiglu" after a library's product: one kernel reads M * N elements and writes half as many. The
fused forms need no such kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.world import World

from .grid import num_programs
from .tile_product import columns_each, finish, store_tile, tile_pointers

BLOCK = (8, 256)
"""Rows and columns of the product that a program takes at a time: 16 elements a thread, 16 bytes an access."""


@triton.jit
def gate_kernel(
    product_ptr,  # (M, N) this rank's
    bias_ptr,  # (N,) this rank's, or None
    out_ptr,  # (M, N / columns_each(EPILOGUE)) this rank's
    M,
    N,
    EPILOGUE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    width = N // columns_each(EPILOGUE)
    num_n = tl.cdiv(N, COLS)
    for task in range(tl.program_id(0), tl.cdiv(M, ROWS) * num_n, tl.num_programs(0)):
        row = task // num_n * ROWS
        j = task % num_n
        ptrs, inside = tile_pointers(product_ptr, row, j * COLS, M, N, N, ROWS, COLS)
        tile = finish(tl.load(ptrs, mask=inside, other=0), bias_ptr, j * COLS, N, EPILOGUE)
        store_tile(out_ptr, 0, tile, row, j * tile.shape[1], M, width, width, False)


Gate = Callable[[torch.Tensor, "torch.Tensor | None", torch.Tensor], Any]


def gating(world: World, M: int, N: int) -> Gate:
    """gate(product, bias, out): `out` (M, N / 2) of the product (M, N), plain tensors, and the bias (N,) or None."""
    tasks = triton.cdiv(M, BLOCK[0]) * triton.cdiv(N, BLOCK[1])
    start = cooperative_launch(world, gate_kernel, (num_programs(world, tasks),))
    return lambda product, bias, out: start(product, bias, out, M, N, "swiglu", *BLOCK)
