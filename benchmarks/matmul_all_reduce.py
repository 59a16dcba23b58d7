"""Benchmark of matrix product + all-reduce in bf16.

Every rank gets the sum over ranks of A (N, N / size) @ B (N / size, N), and, as in decoding, of A (M, K / size) @
B (K / size, N) with K = 28672, N = 8192.

    python -m benchmarks.matmul_all_reduce                       4 GPUs
    python -m benchmarks.matmul_all_reduce --device cpu --quick  check in the simulator; time nothing

2 * (size - 1) / size * |C| * 2 bytes leave each GPU if the switch does not add.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks import _kraken
from benchmarks._case import Case, normal
from benchmarks._command import main
from benchmarks._process_group import group_name, torch_symmetric
from benchmarks.matmul_reduce_scatter import NARROW, SMALL, SQUARE, WIDE
from pkt.kernels.matmul_all_reduce import matmul_all_reduce
from pkt.kernels.shared.gluon_fits import TILES

TITLE = "Matmul + all-reduce, N x N x N / size, bf16"
SHARE = 0.15  # of the seconds of benchmarks/operators.py
SIZES = (4096, 6144, 8192, 12288, 16384)
ROWS, INNER, OUTER = (1, 16, 128, 1024), 28672, 8192
TARGETS = {"N = 4096": 0.75, "N = 8192": 0.85, "N = 16384": 0.95}
BASELINES = ("cuBLAS alone", "NCCL + cuBLAS", "cuBLAS + torch two-shot", _kraken.NAME)

PLAIN: dict[str, dict[str, Any]] = {
    "pkt default": {},
    "pkt lcsc": {"mode": "lcsc"},
    "pkt unfused": {"mode": "unfused"},
    "pkt 16 SMs, 128x256": {"num_comm_sms": 16, "tiles": WIDE},
    "pkt 32 SMs, 128x128": {"num_comm_sms": 32, "tiles": SQUARE},
}
GLUON: dict[str, dict[str, Any]] = {
    "pkt gluon": {"mode": "gluon"},
    "pkt gluon, 128x128": {"mode": "gluon", "tiles": NARROW},
}
HOST_COST = {"mode": "lcsc"}  # for benchmarks/runtime.py: by default cuBLAS multiplies so few rows
CHECKED: tuple[dict[str, Any], ...] = (
    {"tiles": TILES, "lag": 1},
    {"tiles": TILES, "lag": 2},
    {"tiles": NARROW, "lag": 1},
    {"tiles": NARROW, "lag": 2},
)  # settings of the Gluon form that benchmarks/operators.py checks
QUICK: dict[str, dict[str, Any]] = {
    "pkt unfused": {"mode": "unfused"},
    "pkt 1 SM": {"num_comm_sms": 1, "tiles": SMALL},
    "pkt after computing": {"num_comm_sms": 0, "tiles": SMALL},
}


def variants(device: str, quick: bool) -> list[str]:
    if device == "cpu":
        return list(QUICK)
    return [*BASELINES, *PLAIN, *GLUON]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    if quick:
        return {"N = 96": {"N": 96}, "M = 3": {"N": 96, "M": 3, "K": 96}}
    return {f"N = {N}": {"N": N} for N in SIZES} | {f"M = {M}": {"N": OUTER, "M": M, "K": INNER} for M in ROWS}


def operands(rank: int, M: int, k: int, N: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return normal((M, k), rank, device), normal((k, N), 100 + rank, device)


def case(world: Any, N: int, M: int = 0, K: int = 0) -> Case:
    """M and K of 0 stand for N."""
    M, k, device = M or N, (K or N) // world.size, world.torch_device
    a, b = operands(world.rank, M, k, N, device)

    def exact() -> torch.Tensor:
        total = torch.zeros(M, N, device=device)
        for rank in range(world.size):
            x, y = operands(rank, M, k, N, device)
            total.addmm_(x.float(), y.float())
        return total

    def out() -> torch.Tensor:
        import pkt

        return world.keep("out", lambda: pkt.empty(M, N, dtype=a.dtype, world=world))

    runs: dict[str, Any] = {
        name: lambda options=options: matmul_all_reduce(a, b, out(), world=world, **options)
        for name, options in (QUICK if device.type == "cpu" else PLAIN | GLUON).items()
    }
    if device.type == "cuda":
        runs |= _baselines(a, b) | _kraken.matmul_all_reduce(a, b, world.size)
    return Case(
        nbytes=2.0 * (world.size - 1) / world.size * M * N * 2.0,
        flops=2.0 * M * N * k,
        variants=runs,
        exact=exact,
        scaled=a,
        unchecked=frozenset({"cuBLAS alone"}),
        skipped=_kraken.missing(),
    )


def _baselines(a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
    import torch.distributed as dist

    product = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    symmetric: list[torch.Tensor] = []

    def nccl() -> torch.Tensor:
        torch.mm(a, b, out=product)
        dist.all_reduce(product)
        return product

    def two_shot() -> torch.Tensor:
        if not symmetric:
            symmetric.append(torch_symmetric(product))
        torch.mm(a, b, out=symmetric[0])
        return torch.ops.symm_mem.two_shot_all_reduce_(symmetric[0], "sum", group_name())

    return {
        "cuBLAS alone": lambda: torch.mm(a, b, out=product),
        "NCCL + cuBLAS": nccl,
        "cuBLAS + torch two-shot": two_shot,
    }


if __name__ == "__main__":
    sys.exit(main("matmul_all_reduce", TITLE, TARGETS))
