"""The tile product that the fused matmuls share, and the host side of their tiles.

A tile goes through TMA where every row begins at a multiple of 16 bytes, else through masked registers: any M,
N, K.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pkt.errors import ShapeError
from pkt.runtime.world import World

from . import _common


# ------------------------------------------------------------------------------------------------------ device
@triton.jit
def accumulate(
    acc,  # fp32 (BLOCK_M, BLOCK_N)
    a_ptr,  # (M, K), row stride lda
    b_ptr,  # (K, N), row stride ldb
    row,
    col,
    M,
    N,
    K,
    lda,
    ldb,
    TMA: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """acc + A[row : row + BLOCK_M] @ B[:, col : col + BLOCK_N]; what lies outside is zero.

    No wait is in here, so the loop is pipelined. fp32 operands are multiplied in fp32 (no tf32).
    """
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    if TMA:
        a = tl.make_tensor_descriptor(a_ptr, [M, K], [tl.cast(lda, tl.int64), 1], [BLOCK_M, BLOCK_K])
        b = tl.make_tensor_descriptor(b_ptr, [K, N], [tl.cast(ldb, tl.int64), 1], [BLOCK_K, BLOCK_N])
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(a.load([row, k]), b.load([k, col]), acc, input_precision="ieee")
    else:
        rows = row + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, BLOCK_N)
        ks = tl.arange(0, BLOCK_K)
        a_ptrs = a_ptr + tl.cast(rows, tl.int64)[:, None] * lda + ks[None, :]
        b_ptrs = b_ptr + tl.cast(ks, tl.int64)[:, None] * ldb + cols[None, :]
        for k in range(0, K, BLOCK_K):
            inside = k + ks < K
            x = tl.load(a_ptrs, mask=(rows < M)[:, None] & inside[None, :], other=0)
            y = tl.load(b_ptrs, mask=inside[:, None] & (cols < N)[None, :], other=0)
            acc = tl.dot(x, y, acc, input_precision="ieee")
            a_ptrs += BLOCK_K
            b_ptrs += tl.cast(ldb, tl.int64) * BLOCK_K
    return acc


@triton.jit
def store_tile(ptr, tile, row, col, M, N, ld, TMA: tl.constexpr):
    """`tile`, cast, to (row, col) of the (M, N) matrix at `ptr`, row stride ld; what lies outside is cut.

    With TMA the data has landed after the next `pl.signal`, `signal_all`, `barrier` or `quiet`.
    """
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    tile = tile.to(ptr.dtype.element_ty)
    if TMA:
        tl.make_tensor_descriptor(ptr, [M, N], [tl.cast(ld, tl.int64), 1], [ROWS, COLS]).store([row, col], tile)
    else:
        ptrs, inside = tile_pointers(ptr, row, col, M, N, ld, ROWS, COLS)
        tl.store(ptrs, tile, mask=inside)


@triton.jit
def tile_pointers(ptr, row, col, M, N, ld, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Element pointers (ROWS, COLS) of the tile at (row, col), and the mask of those inside (M, N)."""
    rows = row + tl.arange(0, ROWS)
    cols = col + tl.arange(0, COLS)
    ptrs = ptr + tl.cast(rows, tl.int64)[:, None] * ld + cols[None, :]
    return ptrs, (rows < M)[:, None] & (cols < N)[None, :]


# -------------------------------------------------------------------------------------------------------- host
class Tiles(NamedTuple):
    """Tile of the output (block_m x block_n), step along K, rows of tiles that share L2, and how to compile it."""

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group: int = 8
    num_warps: int = 8
    num_stages: int = 4
    maxnreg: int | None = None

    def launch_options(self) -> dict[str, int | bool]:
        options: dict[str, int | bool] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.maxnreg is not None:
            options["maxnreg"] = self.maxnreg
        return options | {"launch_cooperative_grid": True}


FP32_TILES = Tiles(64, 64, 16, num_stages=3, maxnreg=255)
"""fp32 without tf32 has no tensor cores, so operands sit in registers: a small step along K, and leave for all
of them (ptxas otherwise spills to fit a second program on the SM, which never comes)."""


def tiles_for(dtype: torch.dtype) -> Tiles:
    return FP32_TILES if dtype == torch.float32 else Tiles()


def check_tiles(call: str, tiles: Tiles | tuple[int, ...] | None, dtype: torch.dtype, world: World) -> Tiles:
    """`tiles`, or the default for `dtype`; blocks are powers of two from 16, for tensor cores."""
    tiles = Tiles(*tiles) if tiles is not None else tiles_for(dtype)
    for size in tiles[:3]:
        if size < 16 or size & (size - 1):
            raise ShapeError.argument(call, "tiles", tuple(tiles[:3]), "powers of two from 16", world.rank)
    return tiles


def check_operands(call: str, a: torch.Tensor, b: torch.Tensor, world: World, *, peers: bool = False) -> None:
    """`a` and `b` are contiguous matrices of one floating dtype on this rank; `a` symmetric if `peers` read it."""
    _common.check_tensor(call, "a", a, world, ndim=2, dtypes=_common.FLOATS, peers=peers)
    _common.check_tensor(call, "b", b, world, ndim=2, dtype=a.dtype)


def padded(columns: int, dtype: torch.dtype) -> int:
    """Row length, in elements, of a buffer of pkt's own: a multiple of 16 bytes, as TMA and multimem need."""
    run = 16 // dtype.itemsize
    return triton.cdiv(columns, run) * run
