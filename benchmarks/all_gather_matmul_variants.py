"""Benchmark of eight ways to all-gather and multiply, and pkt's own: C (M, N) = gathered A (M, K) @ B (K, N), fp16.

    python -m benchmarks.all_gather_matmul_variants                       4 GPUs
    python -m benchmarks.all_gather_matmul_variants --device cpu --quick  check in the simulator; time nothing

Seven are those of nvFuser's experiment with fused remote products. They show the cost of fusing if the product is
scalar, the time of a gather kernel before a library's product, and so how much one good kernel can gain. Two of them
write through the multicast window and run in the simulator only. The eighth reads tiles of A from their owners, on the
tensor cores: Algorithm 1 of Trifan et al., "Eliminating Multi-GPU Performance Taxes".
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from benchmarks._case import Case
from benchmarks._command import main
from pkt.kernels.all_gather import all_gather
from pkt.kernels.all_gather_matmul import all_gather_matmul
from pkt.kernels.shared.grid import num_programs
from pkt.kernels.shared.tile_product import accumulate, stack, store_tile, weights
from pkt.runtime.launch.launch import cooperative

TITLE = "Eight ways to all-gather + matmul, N x N x N, fp16"
SIZES = (1024, 4096)
NCCL, NATIVE = "NCCL all-gather, cuBLAS", "pkt.all_gather, cuBLAS"
TILES = "fused, tiles of A read on the owner"
NAIVE, LOADS, SWITCH = "fused, remote reads", "fused, rows gathered by loads", "fused, rows multicast"
LOADS_THEN, SWITCH_THEN = "gather kernel by loads, then cuBLAS", "gather kernel by multicast, then cuBLAS"
ALONE, OURS = "cuBLAS alone", "pkt default"
MULTICAST = (SWITCH, SWITCH_THEN)
TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}
SMALL_TILE = dict.fromkeys(TILE, 16)


@triton.jit
def _row_times_columns(row_ptr, b_ptr, col, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """One row of A, at `row_ptr`, times BLOCK_N columns of B: multiplications and additions, no tensor cores."""
    cols = col + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        a = tl.load(row_ptr + ks, mask=ks < K, other=0).to(tl.float32)
        inside = (ks < K)[:, None] & (cols < N)[None, :]
        b = tl.load(b_ptr + tl.cast(ks, tl.int64)[:, None] * N + cols[None, :], mask=inside, other=0)
        acc += tl.sum(a[:, None] * b.to(tl.float32), axis=0)
    return acc


@triton.jit
def naive_kernel(
    a_ptr,  # (m, K) on every rank
    b_ptr,  # (K, N) this rank's
    out_ptr,  # (size * m, N) this rank's
    bar_ptr,  # int32 (programs,) on every rank
    m,
    N,
    K,
    world,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Each block of C reads its row of A from the owner."""
    pid = tl.program_id(0)
    pl.barrier(bar_ptr + pid, world)  # publish: every rank's shard is complete
    blocks = tl.cdiv(N, BLOCK_N)
    for task in range(pid, world.size * m * blocks, tl.num_programs(0)):
        row = task // blocks
        col = task % blocks * BLOCK_N
        theirs = pl.peer(a_ptr + tl.cast(row % m, tl.int64) * K, row // m, world)
        acc = _row_times_columns(theirs, b_ptr, col, N, K, BLOCK_N, BLOCK_K)
        cols = col + tl.arange(0, BLOCK_N)
        tl.store(out_ptr + tl.cast(row, tl.int64) * N + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < N)
    pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read my shard


@triton.jit
def tiles_kernel(
    a_ptr,  # (m, K) on every rank
    b_ptr,  # (K, N) this rank's
    out_ptr,  # (size * m, N) this rank's
    bar_ptr,  # int32 (programs,) on every rank
    m,
    N,
    K,
    world,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The loop of a tiled product loads each tile of A where it is, on its owner. Each element of a shard crosses the
    links once for every column of tiles, less what L2 keeps."""
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    num_m = tl.cdiv(m, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    b = weights(b_ptr, 1, K, N, BLOCK_K, BLOCK_N, True, False)
    out = stack(out_ptr, world.size, m, N, N, BLOCK_M, BLOCK_N, True)
    pl.barrier(bar_ptr + pid, world)  # publish: every rank's shard is complete
    for task in range(pid, world.size * num_m * num_n, tl.num_programs(0)):
        # Own shard first, then rank + 1, ...: at any time each rank is read by one other.
        source = (rank + task // (num_m * num_n)) % world.size
        i, j = pl.order.supergroup(task % (num_m * num_n), num_m, num_n, 8)
        row, col = i * BLOCK_M, j * BLOCK_N
        a = stack(pl.peer(a_ptr, source, world), 1, m, K, K, BLOCK_M, BLOCK_K, True)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc = accumulate(acc, a, 0, b, 0, 1, row, col, m, N, K, K, True, False, BLOCK_K)
        store_tile(out, source, acc, row, col, m, N, N, True)
    pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read my shard


@triton.jit
def loads_kernel(
    a_ptr,  # (m, K) on every rank
    b_ptr,  # (K, N) this rank's
    out_ptr,  # (size * m, N) this rank's
    rows_ptr,  # (size * m, K) this rank's: the gathered rows
    bar_ptr,  # int32 (programs,) on every rank
    m,
    N,
    K,
    world,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program gathers a row, then multiplies it by all of B. N = 0: it only gathers."""
    pid = tl.program_id(0)
    pl.barrier(bar_ptr + pid, world)  # publish: every rank's shard is complete
    for row in range(pid, world.size * m, tl.num_programs(0)):
        here = rows_ptr + tl.cast(row, tl.int64) * K
        for k in range(0, K, BLOCK_K):
            ks = k + tl.arange(0, BLOCK_K)
            piece = pl.load(a_ptr + tl.cast(row % m, tl.int64) * K + ks, row // m, world, mask=ks < K)
            tl.store(here + ks, piece, mask=ks < K)
        tl.debug_barrier()  # other threads of the program read what this one stored
        for col in range(0, N, BLOCK_N):
            acc = _row_times_columns(here, b_ptr, col, N, K, BLOCK_N, BLOCK_K)
            cols = col + tl.arange(0, BLOCK_N)
            tl.store(out_ptr + tl.cast(row, tl.int64) * N + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < N)
    pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read my shard


@triton.jit
def multicast_kernel(
    a_ptr,  # (m, K) this rank's
    b_ptr,  # (K, N) this rank's
    out_ptr,  # (size * m, N) this rank's
    rows_ptr,  # (2, size * m, K) on every rank; rank r writes its rows on all; the launch's parity selects the half
    ready_ptr,  # int32 (size * m,) on every rank: the number of launches in which row i has arrived
    m,
    N,
    K,
    world,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The owner writes each of its rows once, to all ranks. N = 0: it only gathers."""
    pid = tl.program_id(0)
    epoch = pl.epoch(ready_ptr, world)
    rank = tl.cast(world.rank, tl.int32)
    half = rows_ptr + tl.cast(epoch & 1, tl.int64) * world.size * m * K
    for i in range(pid, m, tl.num_programs(0)):
        row = rank * m + i
        for k in range(0, K, BLOCK_K):
            ks = k + tl.arange(0, BLOCK_K)
            piece = tl.load(a_ptr + tl.cast(i, tl.int64) * K + ks, mask=ks < K)
            pl.multimem_store(half + tl.cast(row, tl.int64) * K + ks, piece, world, mask=ks < K)
        pl.signal_all(ready_ptr + row, world)
    for row in range(pid, world.size * m, tl.num_programs(0)):
        pl.wait(ready_ptr + row, epoch, world)
        for col in range(0, N, BLOCK_N):
            acc = _row_times_columns(half + tl.cast(row, tl.int64) * K, b_ptr, col, N, K, BLOCK_N, BLOCK_K)
            cols = col + tl.arange(0, BLOCK_N)
            tl.store(out_ptr + tl.cast(row, tl.int64) * N + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < N)


def variants(device: str, quick: bool) -> list[str]:
    ours = [NATIVE, NAIVE, TILES, LOADS, SWITCH, LOADS_THEN, SWITCH_THEN, OURS]
    return ours if device == "cpu" else [ALONE, NCCL, *ours]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    return {f"N = {N}": {"N": N} for N in ((64,) if quick else SIZES)}


def case(world: Any, N: int) -> Case:
    m, device, dtype = N // world.size, world.torch_device, torch.float16
    whole = [_normal((m, N), rank, device) for rank in range(world.size)]
    b = _normal((N, N), 100, device)  # the same on all ranks
    out = torch.empty(N, N, dtype=dtype, device=device)
    a = pkt.empty(m, N, dtype=dtype, name="a")
    a.copy_(whole[world.rank])
    mine, gathered = a.plain(), pkt.empty(N, N, dtype=dtype, name="gathered")
    staged = pkt.empty(2, N, N, dtype=dtype, name="rows")
    programs = num_programs(world, N)
    bar, ready = pkt.signals(programs, name="bar"), pkt.signals(N, name="ready")
    blocks = {"BLOCK_N": min(128, N), "BLOCK_K": min(64, N)}
    world.barrier()

    def naive() -> torch.Tensor:
        cooperative(world, naive_kernel, (programs,), a, b, out, bar, m, N, N, world.device, **blocks)
        return out

    def by_tiles() -> torch.Tensor:
        sizes, options = TILE if device.type == "cuda" else SMALL_TILE, {"num_warps": 8, "num_stages": 4}
        cooperative(world, tiles_kernel, (programs,), a, b, out, bar, m, N, N, world.device, **sizes, **options)
        return out

    def by_loads(columns: int) -> None:
        rows = gathered.plain()
        cooperative(world, loads_kernel, (programs,), a, b, out, rows, bar, m, columns, N, world.device, **blocks)

    def by_multicast(columns: int) -> int:
        """Launch, and return which half of `staged` holds the rows."""
        cooperative(world, multicast_kernel, (programs,), a, b, out, staged, ready, m, columns, N, world.device,
                    **blocks)  # fmt: skip
        launches[0] += 1
        return launches[0] % 2

    launches = [0]

    def loads() -> torch.Tensor:
        by_loads(N)
        return out

    def multicast() -> torch.Tensor:
        by_multicast(N)
        return out

    def loads_then() -> torch.Tensor:
        by_loads(0)
        return torch.mm(gathered.plain(), b, out=out)

    def multicast_then() -> torch.Tensor:
        return torch.mm(staged.plain()[by_multicast(0)], b, out=out)

    def native() -> torch.Tensor:
        return torch.mm(all_gather(a, gathered).plain(), b, out=out)

    runs: dict[str, Any] = {
        NATIVE: native, NAIVE: naive, TILES: by_tiles, LOADS: loads, SWITCH: multicast, LOADS_THEN: loads_then,
        SWITCH_THEN: multicast_then, OURS: lambda: all_gather_matmul(mine, b, out, world=world),
    }  # fmt: skip
    skipped = {}
    if device.type == "cuda":
        import torch.distributed as dist

        def nccl() -> torch.Tensor:
            dist.all_gather_into_tensor(gathered.plain(), mine)
            return torch.mm(gathered.plain(), b, out=out)

        runs |= {ALONE: lambda: torch.mm(gathered.plain(), b, out=out), NCCL: nccl}
        skipped = dict.fromkeys(MULTICAST, "writes through the multicast window: runs in the simulator only")
    return Case(
        nbytes=(world.size - 1) * m * N * 2.0,
        flops=2.0 * N * N * N,
        variants=runs,
        exact=lambda: torch.cat(whole).float() @ b.float(),
        scaled=mine,
        unchecked=frozenset({ALONE}),
        skipped=skipped,
    )


def _normal(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).half()


if __name__ == "__main__":
    sys.exit(main("all_gather_matmul_variants", TITLE))
