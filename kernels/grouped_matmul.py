"""Grouped product: rows that lie in the order of their experts, each times its expert's matrix. Local to a rank.

One persistent kernel. Every program finds its tiles from `offsets` on the device: it computes how many tiles each
expert has, and a tile's expert is the number of experts whose tiles end before it. So the host need not know how many
rows an expert has, and a CUDA graph replays with other routing. fp8 with scales has a kernel in grouped_fp8.py.

The tiles of one expert are neighbours, and among them those of the same columns. So the programs that share weights run
at the same time, and memory delivers a weight once: with few rows an expert the product takes the time that the weights
take.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from pkt.errors import Closed, DtypeError, ShapeError, Unsupported
from pkt.runtime.launch.launch import beside_launch
from pkt.runtime.world import World
from pkt.wording import found_text

from . import gradients, grouped_fp8, grouped_gradients
from .agreement import world_of
from .declaration import Call, integer
from .grouped_fp8 import spread
from .grouped_outer import clearing
from .shared import products
from .shared.checks import FLOATS, aligned, check_apart, check_tensor
from .shared.expert_tiles import ends_of, find
from .shared.tile_product import FP32_TILES, UNALIGNED_TILES, Tiles, accumulate, stack, tile_pointers


def reference(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, scales: grouped_fp8.Pair | None = None
) -> torch.Tensor:
    """The exact product in fp64, (M, N); rows of no expert are 0."""
    if scales is not None:
        x, w = x.double() * spread(scales[0], x.shape[1]), w.double() * spread(scales[1], *w.shape[1:])
    out = torch.zeros(x.shape[0], w.shape[2], dtype=torch.float64, device=x.device)
    ends = offsets.tolist()
    for expert, (first, last) in enumerate(itertools.pairwise(ends)):
        out[first:last] = x[first:last].double() @ w[expert].double()
    return out


@triton.jit
def grouped_matmul_kernel(
    x_ptr,  # (M, K) rows by expert
    w_ptr,  # (experts, K, N), or (experts, N, K) if TRANSPOSED
    offsets_ptr,  # int32 (experts + 1,); rows [offsets[e], offsets[e + 1]) are expert e's
    out_ptr,  # (M, N)
    M,
    N,
    K,
    experts,
    EXPERTS: tl.constexpr,  # the next power of two
    TMA: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # rows of tiles that run over all columns together, and share their rows in L2
):
    columns = tl.cdiv(N, BLOCK_N)
    ends = ends_of(offsets_ptr, experts, M, columns, EXPERTS, BLOCK_M)
    a = stack(x_ptr, 1, M, K, K, BLOCK_M, BLOCK_K, TMA)
    b = _weights(w_ptr, experts, K, N, BLOCK_K, BLOCK_N, TMA, TRANSPOSED)
    for tile in range(tl.program_id(0), tl.max(ends), tl.num_programs(0)):
        expert, row, col, stop = find(tile, ends, offsets_ptr, experts, M, columns, BLOCK_M, BLOCK_N, GROUP)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if TMA:
            acc = accumulate(acc, a, 0, b, expert, experts, row, col, M, N, K, K, True, TRANSPOSED, BLOCK_K)
        else:
            own = b + tl.cast(expert, tl.int64) * K * N
            acc = accumulate(acc, a, 0, own, 0, 1, row, col, M, N, K, K, False, TRANSPOSED, BLOCK_K)
        ptrs, mask = tile_pointers(out_ptr, row, col, stop, N, N, BLOCK_M, BLOCK_N)
        tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weights(ptr, experts, K, N, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, T: tl.constexpr):
    if T:
        return stack(ptr, experts, N, K, K, BLOCK_N, BLOCK_K, TMA)
    else:
        return stack(ptr, experts, K, N, N, BLOCK_K, BLOCK_N, TMA)


def grouped_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    scales: grouped_fp8.Pair | None = None,
    clear: bool | None = None,
    tiles: Sequence[int] | None = None,
    expected: int | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """Each expert's rows of `x` times its matrix: out[i] = x[i] @ w[e] for offsets[e] <= i < offsets[e + 1]. Local.

    x: (M, K), rows in the order of their experts. w: (experts, K, N) of x's dtype, or the transposed view of a
    contiguous (experts, N, K). offsets: int32 (experts + 1,) on x's device, ascending; it is read on the device, so its
    values may change between replays of a CUDA graph. out: (M, N) of x's dtype, apart from x and w; a new tensor where
    None. clear: whether rows that no expert has become zeros, as functions of torch after the product need; they are
    not written otherwise. None: they do where the result is new and gradients are enabled. tiles: (block_m, block_n,
    block_k, group, num_warps, num_stages, maxnreg) of a tile of out, the first three at least; None chooses by the
    dtype and the rows an expert. expected: how many rows all experts together have, as far as the host knows; tiles
    follow from it, and the result does not depend on it. None: M. Sums are in fp32.

    scales: (scales of x, scales of w), fp32, for x and w of float8_e4m3fn: a value is an element times its scale. Of x
    they are (M, K / 128), of w (experts, K / 128, N / 128), rounded up, with any strides; a 1 in place of K / 128 or
    N / 128 stands for all blocks. So `dispatch` brings those of x. The result has the dtype of `out`, or bf16. tiles:
    block_k is 128, and block_n divides it. Has no gradient, and is not for compiled code. Fastest with w transposed.

    Returns `out`. Differentiable: the gradient of x is zero in the rows that no
    expert has. Raises ShapeError, DtypeError, and Unsupported where an operand requires grad and `out` is given.
    """
    if clear is None:
        clear = out is None and torch.is_grad_enabled()
    if out is not None and torch.compiler.is_dynamo_compiling():
        raise Unsupported.here("grouped_matmul", "found out= in compiled code", "leave it away")
    if scales is not None:
        return _multiply_scaled(x, w, scales, offsets, tiles, clear, expected, world, out)
    return _multiply(x, w, offsets, tiles, clear, expected, world, out)


def _multiply_scaled(
    x: torch.Tensor, w: torch.Tensor, scales: Any, offsets: torch.Tensor, tiles: Sequence[int] | None, clear: Any,
    expected: int | None, world: World | None, out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    every = *(scales if isinstance(scales, (tuple, list)) else ()), x, w, offsets, out
    if grouped_gradients.is_traced(*every):
        raise Unsupported.here("grouped_matmul", "found scales= in compiled code", "call it outside torch.compile")
    world = world_of("grouped_matmul", world, x, out)
    if torch.is_grad_enabled() and gradients.required(every):
        found = "found scales=, with which a product has no gradient, and a tensor that requires grad"
        remedy = "call it under torch.no_grad(), or with operands that are detached"
        raise Unsupported.here(f"rank {world.rank}: grouped_matmul", found, remedy)
    _check_plain(clear, expected, world)
    return grouped_fp8.multiply(x, w, scales, offsets, tiles, clear, expected, world, out)


def _multiply(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, tiles: Sequence[int] | None, clear: bool,
    expected: int | None, world: World | None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """clear: rows that no expert has become zeros."""
    if grouped_gradients.is_traced(x, w, offsets):
        return grouped_gradients.multiply(x, w, offsets, tiles, clear, expected, world)
    world = world_of("grouped_matmul", world, x, out)
    _check_plain(clear, expected, world)
    transposed = _check(x, w, offsets, out, world)
    if torch.is_grad_enabled() and gradients.required((x, w, out)):
        if out is not None:
            found = "found out=, which autograd does not record, and a tensor that requires grad"
            remedy = "leave out= away, or call it under torch.no_grad(), or with operands that are detached"
            raise Unsupported.here(f"rank {world.rank}: grouped_matmul", found, remedy)
        return grouped_gradients.multiply(x, w, offsets, tiles, clear, expected, world)
    (M, K), N = x.shape, w.shape[2]
    if out is None:
        out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    if not K:
        return out.zero_()
    held = None
    if tiles is not None:
        held = products.tiles(Call("grouped_matmul", world, {}, {}, {}, None), "tiles", tiles)
    tma = aligned(x, w.transpose(1, 2) if transposed else w)
    if held is None:
        held = default_tiles(M if expected is None else min(M, expected), w.shape[0], x.dtype, tma)
    key = planned, x.shape, w.shape, x.dtype, transposed, tma, held, clear
    launch = world.plans.get(key)
    if launch is None:
        launch = world.plans[key] = planned(world, x, w, transposed, held, clear)
    launch(x, w, offsets, out)
    return out


def planned(
    world: World, x: torch.Tensor, w: torch.Tensor, transposed: bool, tiles: Tiles, clear: bool
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """launch(x, w, offsets, out), with no checks, for tensors like these, of which none is kept or empty."""
    (M, K), experts, N = x.shape, *w.shape[::2]
    tma = aligned(x, w.transpose(1, 2) if transposed else w)
    rows_of_tiles = triton.cdiv(M, tiles.block_m) + experts - 1  # at most: each expert ends inside of a tile
    grid = min(rows_of_tiles * triton.cdiv(N, tiles.block_n), world.num_sms * programs_each(tiles, x.dtype))
    constants = triton.next_power_of_2(experts), tma, transposed, *tiles[:4]
    start = beside_launch(world, grouped_matmul_kernel, (grid,), **tiles.launch_options())
    clear_rows = clearing(world, M, N, experts) if clear else None

    def launch(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
        start(x, w, offsets, out, M, N, K, experts, *constants)
        if clear_rows is not None:
            clear_rows(out, offsets)

    return launch


grouped_gradients.take("multiply", _multiply)


# -------------------------------------------------------------------------------------------------------------- host
SHARED, SPARE = 228 << 10, 4 << 10
"""Bytes of an SM's shared memory, sm_90 and sm_100; and those that two programs take beside their stages."""

FEW_ROWS_TILES = Tiles(64, 256, 64, num_stages=4)
TILES = Tiles(128, 256, 64)
FEW_ROWS = 160


def default_tiles(M: int, experts: int, dtype: torch.dtype, tma: bool) -> Tiles:
    """Tiles for M rows of so many experts. Weights are the limit up to some hundred rows an expert. FEW_ROWS_TILES are
    within 4 % of the best tiles for 8, 32 and 128 rows an expert on an H200, TILES for 255 and 510 rows
    (`benchmarks/results/grouped_matmul.json`)."""
    if dtype == torch.float32:
        return FP32_TILES
    if not tma:
        return UNALIGNED_TILES
    return FEW_ROWS_TILES if M <= FEW_ROWS * experts else TILES


def programs_each(tiles: Tiles, dtype: torch.dtype) -> int:
    """Programs that fit on an SM: two where registers and the stages' shared memory leave room. Tiles of less than 64
    rows go through registers to the tensor cores, and one of their stages is there."""
    stage = (tiles.block_m + tiles.block_n) * tiles.block_k * dtype.itemsize
    stages = tiles.num_stages - (tiles.block_m < 64)
    return 2 if tiles.num_warps <= 4 and 2 * stages * stage + SPARE <= SHARED else 1


def _check_plain(clear: Any, expected: Any, world: World) -> None:
    """Raise Closed, and DtypeError or ShapeError unless `clear` is True or False, and `expected` a number of rows."""
    if world.closed:
        raise Closed.used(world.rank, "grouped_matmul")
    if not isinstance(clear, bool):
        found = found_text(clear)
        raise DtypeError.argument("grouped_matmul", "clear", found, "True, False or None", world.rank)
    if expected is not None:
        integer(least=0)(Call("grouped_matmul", world, {}, {}, {}, None), "expected", expected)


def _check(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor | None, world: World
) -> bool:  # fmt: skip
    """Raise what the function's docstring says; whether w is the view of a transposed tensor."""
    call, rank = "grouped_matmul", world.rank
    check_tensor(call, "x", x, world, dtypes=FLOATS)
    if x.ndim != 2:
        raise ShapeError.argument(call, "x", tuple(x.shape), "2 dimensions", rank)
    check_tensor(call, "w", w, world, dtype=x.dtype, contiguous=False)
    if w.ndim != 3 or w.shape[1] != x.shape[1] or not w.shape[0]:
        raise ShapeError.argument(call, "w", tuple(w.shape), f"(experts, {x.shape[1]}, N)", rank)
    transposed = not w.is_contiguous() and w.transpose(1, 2).is_contiguous()
    check_tensor(call, "w", w.transpose(1, 2) if transposed else w, world)
    check_tensor(call, "offsets", offsets, world, dtype=torch.int32, shape=(w.shape[0] + 1,))
    if out is not None:
        check_tensor(call, "out", out, world, dtype=x.dtype, shape=(x.shape[0], w.shape[2]))
        check_apart(call, x, out, world, None, "x")
        check_apart(call, w, out, world, None, "w")
    return transposed
