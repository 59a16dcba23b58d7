"""The tile product that the fused matmuls share, and the host side of their tiles.

A tile goes through TMA where every row begins at a multiple of 16 bytes, else through masked registers: any M,
N, K.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl


# ------------------------------------------------------------------------------------------------------ device
@triton.jit
def stack(ptr, count, rows, cols, ld, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """`count` matrices (rows, cols) of row stride ld, one after the other, for `accumulate` and `store_tile`.

    With TMA a descriptor of (1, ROWS, COLS) boxes, which stop at the end of a matrix. It takes a microsecond to make:
    once in a program where that is possible. Otherwise `ptr` itself.
    """
    if TMA:
        ld = tl.cast(ld, tl.int64)
        return tl.make_tensor_descriptor(ptr, [count, rows, cols], [rows * ld, ld, 1], [1, ROWS, COLS])
    else:
        return ptr


@triton.jit
def weights(
    ptr, count, k, N, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """B as `count` matrices (k, N), one below the other, for `accumulate`. TRANSPOSED: `ptr` is (N, count * k)."""
    if TMA and TRANSPOSED:
        ld = tl.cast(k, tl.int64) * count
        return tl.make_tensor_descriptor(ptr, [count, N, k], [tl.cast(k, tl.int64), ld, 1], [1, BLOCK_N, BLOCK_K])
    else:
        return stack(ptr, count, k, N, N, BLOCK_K, BLOCK_N, TMA)


@triton.jit
def accumulate(
    acc,  # fp32 (BLOCK_M, BLOCK_N)
    a,  # stack of (M, K), boxes of BLOCK_M x BLOCK_K; its matrix a_index is A
    a_index,
    b,  # `weights` of (K, N), `shards` of them, boxes of BLOCK_K x BLOCK_N; its matrix b_index is B
    b_index,
    shards,
    row,
    col,
    M,
    N,
    K,
    lda,
    TMA: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    first=0,  # of K, a multiple of BLOCK_K
    last=None,  # of K, behind it; K where None
):
    """acc + A[row : row + BLOCK_M, first:last] @ B[first:last, col : col + BLOCK_N]; what lies outside is zero.

    No wait is in here, so the loop is pipelined. fp32 operands are multiplied in fp32 (no tf32). Products of fp8 are
    added in fp32 every BLOCK_K of them, see scales.py.
    """
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    if last is None:
        last = K
    if TMA:
        for k in range(first, last, BLOCK_K):
            x = tl.reshape(a.load([a_index, row, k]), (BLOCK_M, BLOCK_K))
            if TRANSPOSED:
                y = tl.trans(tl.reshape(b.load([b_index, col, k]), (BLOCK_N, BLOCK_K)))
            else:
                y = tl.reshape(b.load([b_index, k, col]), (BLOCK_K, BLOCK_N))
            acc = _add_product(acc, x, y)
    else:
        # 64-bit bases, 32-bit offsets inside a tile: a register less for each element.
        rows = tl.arange(0, BLOCK_M)
        cols = tl.arange(0, BLOCK_N)
        ks = tl.arange(0, BLOCK_K)
        a_ptr = a + (tl.cast(a_index, tl.int64) * M + row) * lda + first
        a_offs = rows[:, None] * lda + ks[None, :]
        if TRANSPOSED:
            b_ptr = b + tl.cast(col, tl.int64) * shards * K + b_index * K + first
            b_offs = ks[:, None] + cols[None, :] * (shards * K)
            step = tl.cast(BLOCK_K, tl.int64)
        else:
            b_ptr = b + (tl.cast(b_index, tl.int64) * K + first) * N + col
            b_offs = ks[:, None] * N + cols[None, :]
            step = tl.cast(N, tl.int64) * BLOCK_K
        for k in range(first, last, BLOCK_K):
            x = tl.load(a_ptr + a_offs, mask=(rows < M - row)[:, None] & (ks < K - k)[None, :], other=0.0)
            y = tl.load(b_ptr + b_offs, mask=(ks < K - k)[:, None] & (cols < N - col)[None, :], other=0.0)
            acc = _add_product(acc, x, y)
            a_ptr += BLOCK_K
            b_ptr += step
    return acc


@triton.jit
def _add_product(acc, x, y):
    if x.dtype.is_fp8():
        return acc + tl.dot(x, y)
    else:
        return tl.dot(x, y, acc, input_precision="ieee")


@triton.jit
def finish(x, bias_ptr, col, N, EPILOGUE: tl.constexpr):
    """`x`, the columns from `col` on of a finished product of N columns, plus the bias where there is one, through the
    epilogue, in fp32: a column for each `columns_each(EPILOGUE)` of x. `x` itself where there is neither."""
    if bias_ptr is None and EPILOGUE == "none":
        return x
    else:
        x = x.to(tl.float32)
        if bias_ptr is not None:
            cols = col + tl.arange(0, x.shape[1])
            x += tl.load(bias_ptr + cols, mask=cols < N, other=0).to(tl.float32)[None, :]
        return activate(x, EPILOGUE)


@triton.constexpr_function
def columns_each(epilogue):
    """Columns of a product that become one of its result: gate and up, side by side, in "swiglu"."""
    return 2 if epilogue == "swiglu" else 1


FAR = tl.constexpr(8.0)
"""Where `normal_tail` is less than 1e-15."""


@triton.jit
def normal_tail(x):
    """How much of the normal distribution lies beyond |x|, fp32: 2 to the power of a polynomial in |x|. Times |x| it is
    within 1.2e-8, but for rounding. gelu by erf takes more than twice as many instructions, and longer to compile."""
    a = tl.minimum(tl.abs(x), FAR)
    p = 0.00718868115 + a * (-0.000235861055 + a * (-0.000144299846 + a * (3.04122758e-05 - a * 2.07629242e-06)))
    return tl.exp2(-1.0 + a * (-1.15110765 + a * (-0.4591831 + a * (-0.0525788475 + a * p))))


@triton.jit
def activate(x, EPILOGUE: tl.constexpr):
    """The epilogue of `x`, fp32. What is not a number stays so."""
    if EPILOGUE == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif EPILOGUE == "gelu":
        x = tl.where(x < 0, 0.0, x) - tl.minimum(tl.abs(x), FAR) * normal_tail(x)
    elif EPILOGUE == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif EPILOGUE == "swiglu":
        gate, up = x.reshape([x.shape[0], x.shape[1] // 2, 2]).split()
        x = gate / (1.0 + tl.exp(-gate)) * up
    return x


@triton.jit
def store_tile(dst, index, tile, row, col, M, N, ld, TMA: tl.constexpr):
    """`tile`, cast, to (row, col) of matrix `index` of the stack `dst` of (M, N), row stride ld; the outside is cut.

    With TMA the data has landed after the next `pl.signal`, `signal_all`, `barrier` or `quiet`.
    """
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    if TMA:
        dst.store([index, row, col], tl.reshape(tile.to(dst.dtype), (1, ROWS, COLS)))
    else:
        ptrs, inside = tile_pointers(dst + tl.cast(index, tl.int64) * M * ld, row, col, M, N, ld, ROWS, COLS)
        tl.store(ptrs, tile.to(dst.dtype.element_ty), mask=inside)


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
    maxnreg: int = 255

    def launch_options(self) -> dict[str, int]:
        """What a launch takes beside the arguments."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.maxnreg}


FP8_BLOCK_K = 128
"""Of fp8: how many products are added up in the tensor cores, as in DeepGEMM."""

FP32_TILES = Tiles(64, 32, 16, num_stages=3)
"""fp32 without tf32 has no tensor cores: operands sit in registers, 214 of 255 with this tile."""

UNALIGNED_TILES = Tiles(64, 64, 32, num_stages=3)
"""Where TMA cannot go, each element has an address and a mask in registers."""

FEW_ROWS = 64
"""Of a product: so many or fewer are bound by the bytes of the weights, not by the tensor cores; and the tiles of the
Gluon forms, of 128 rows, would be half empty."""

FEW_ROWS_TILES = Tiles(64, 64, 128, num_warps=4, num_stages=6)
"""16 KB of weights a stage, and enough tiles for all SMs where N is some thousands."""

MORE_ROWS = 128
"""Of a product: from FEW_ROWS to here two rows of tiles keep more SMs at the weights than one of Tiles()."""

MORE_ROWS_TILES = Tiles(64, 128, 128, num_warps=4)
"""For fewer rows FEW_ROWS_TILES are faster, for more Tiles()."""


WIDE_TILES = Tiles(128, 256, 64, num_stages=3)
"""For kernels that were measured with them. all_gather_matmul at 8192, mode "copy", on 2 x H200: 0.761 ms, with Tiles()
0.939 (nodes_tried_2.json of benchmarks/results). all_to_all_matmul of 2,048 rows a rank, K = N = 8192, on 2 x H100:
0.400 ms, with Tiles() 0.521 (all_to_all_matmul_2.json)."""

WIDE_ELEMENTS = 1 << 22
"""Of an output with WIDE_TILES, at least: one of these tiles for each SM."""


def default_tiles(m: int, dtype: torch.dtype, *columns: int, wide: bool = False) -> Tiles:
    """Tiles for m rows of output, or of each part of it, and operands whose rows are `columns` long, the last those of
    the output: the same on every rank. No higher than m needs, from 16, the least that tensor cores take. Reasoned, and
    where a figure stands beside them measured. wide: WIDE_TILES are allowed.

    maxnreg is all that a thread of 8 warps may have: ptxas otherwise spills a little to fit a second program on
    the SM, which never comes.
    """
    fp8 = dtype.itemsize == 1  # whose two sums, see scales.py, would not fit beside each other in WIDE_TILES
    tiles = FP32_TILES if dtype == torch.float32 else UNALIGNED_TILES
    if whole_rows(dtype, *columns) and dtype != torch.float32:
        large = WIDE_TILES if wide and not fp8 and m * columns[-1] >= WIDE_ELEMENTS else Tiles()
        tiles = FEW_ROWS_TILES if m <= FEW_ROWS else MORE_ROWS_TILES if m <= MORE_ROWS else large
    block_k = FP8_BLOCK_K if fp8 else tiles.block_k
    return tiles._replace(block_m=min(tiles.block_m, max(16, triton.next_power_of_2(m))), block_k=block_k)


Epilogue = Literal["none", "relu", "gelu", "silu"]
GatedEpilogue = Literal["none", "relu", "gelu", "silu", "swiglu"]


def finished(x: torch.Tensor, bias: torch.Tensor | None, epilogue: GatedEpilogue) -> torch.Tensor:
    """`finish` in torch, in x's dtype. gelu is the exact form with erf, as torch's is by default."""
    x = x if bias is None else x + bias.to(x.dtype)
    functional = torch.nn.functional
    if epilogue == "swiglu":
        return functional.silu(x[:, 0::2]) * x[:, 1::2]
    return {"none": lambda x: x, "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}[epilogue](x)


def padded(columns: int, dtype: torch.dtype) -> int:
    """Row length, in elements, of a buffer of pkt's own: a multiple of 16 bytes, as TMA and multimem need."""
    run = 16 // dtype.itemsize
    return triton.cdiv(columns, run) * run


def whole_rows(dtype: torch.dtype, *columns: int) -> bool:
    """Whether rows of so many elements begin at multiples of 16 bytes, as TMA needs."""
    return all(padded(length, dtype) == length for length in columns)
