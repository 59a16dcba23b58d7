"""Benchmark of matrix product + reduce-scatter in bf16.

Each rank gets its rows of the sum over ranks of A (N, N / size) @ B (N / size, N).

    python -m benchmarks.matmul_reduce_scatter                       4 GPUs
    python -m benchmarks.matmul_reduce_scatter --device cpu --quick  check in the simulator; time nothing

At least (size - 1) / size * N * N * 2 bytes leave each GPU.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks import _kraken
from benchmarks._case import Case, normal
from benchmarks._command import main
from benchmarks._process_group import group_name
from pkt.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from pkt.kernels.matmul_reduce_scatter.gluon import inbox_launch
from pkt.kernels.matmul_reduce_scatter.rules import settings
from pkt.kernels.shared.tile_product import Tiles

TITLE = "Matmul + reduce-scatter, N x N x N / size, bf16"
SIZES = (4096, 6144, 8192, 12288, 16384, 32768)
TARGETS = {"N = 4096": 0.70, "N = 8192": 0.88, "N = 16384": 1.05, "N = 32768": 1.00}
BASELINES = ("cuBLAS alone", "NCCL + cuBLAS", "torch symm_mem fused", _kraken.NAME)
WIDE, SQUARE = Tiles(128, 256, 64, 8, 8, 3), Tiles(128, 128, 64, 8, 8, 4)
SMALL = Tiles(32, 32, 32, 2, 4, 2)  # for the simulator

PLAIN: dict[str, dict[str, Any]] = {
    "pkt default": {},
    "pkt unfused": {"mode": "unfused"},
    "pkt add, 128x256": {"mode": "add", "tiles": WIDE},
    "pkt inbox, 128x256": {"mode": "inbox", "tiles": WIDE},
}
NARROW = Tiles(128, 128, 64, num_stages=6)
PARTS: dict[str, dict[str, Any]] = {  # the product alone
    "(gluon, nothing sent)": {"copies": 0},
    "(gluon, nothing sent, in turn)": {"lag": 33},
}
GLUON: dict[str, dict[str, Any]] = {
    "pkt gluon": {"mode": "gluon"},
    "pkt gluon, stored": {"mode": "gluon", "copies": 0},
    "pkt gluon, stored, in turn": {"mode": "gluon", "lag": 33},
    "pkt gluon, 2 copies": {"mode": "gluon", "copies": 2},
    "pkt gluon, 4 copies": {"mode": "gluon", "copies": 4},
    "pkt gluon, 128x128": {"mode": "gluon", "tiles": NARROW},
}
QUICK: dict[str, dict[str, Any]] = {
    "pkt unfused": {"mode": "unfused"},
    "pkt add": {"mode": "add", "tiles": SMALL},
    "pkt inbox": {"mode": "inbox", "tiles": SMALL},
}


def variants(device: str, quick: bool) -> list[str]:
    if device == "cpu":
        return list(QUICK)
    return [*BASELINES, "pkt default", *PARTS, *GLUON, *(name for name in PLAIN if name != "pkt default")]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    return {f"N = {N}": {"N": N} for N in ((96,) if quick else SIZES)}


def operands(rank: int, N: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return normal((N, N // size), rank, device), normal((N // size, N), 100 + rank, device)


def case(world: Any, N: int) -> Case:
    m, device = N // world.size, world.torch_device
    a, b = operands(world.rank, N, world.size, device)
    out = torch.empty(m, N, dtype=a.dtype, device=device)

    def exact() -> torch.Tensor:
        total = torch.zeros(m, N, device=device)
        for rank in range(world.size):
            x, y = operands(rank, N, world.size, device)
            total.addmm_(x[world.rank * m : (world.rank + 1) * m].float(), y.float())
        return total

    runs: dict[str, Any] = {
        name: lambda options=options: matmul_reduce_scatter(a, b, out, world=world, **options)
        for name, options in (QUICK if device.type == "cpu" else PLAIN | GLUON).items()
    }
    if device.type == "cuda":
        runs |= _baselines(a, b, out) | _kraken.matmul_reduce_scatter(a, b)
        runs |= {name: _part(world, a, b, out, **options) for name, options in PARTS.items()}
    return Case(
        nbytes=(world.size - 1) * m * N * 2.0,
        flops=2.0 * N * N * (N // world.size),
        variants=runs,
        exact=exact,
        scaled=a,
        unchecked=frozenset({"cuBLAS alone", *PARTS}),
        skipped=_kraken.missing(),
    )


def _part(world: Any, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **given: int) -> Any:
    made: list[Any] = []

    def run() -> torch.Tensor:
        if not made:  # a variant that does not run makes no workspace
            tiles, lag, _ = settings(*out.shape, a.shape[1], world, None, **{"lag": None, **given})
            made.append(inbox_launch(world, a, b, out, tiles, lag, leave_out="links"))
        return made[0](a, b, out, None)

    return run


def _baselines(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
    import torch.distributed as dist

    product = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)

    def nccl() -> torch.Tensor:
        torch.mm(a, b, out=product)
        dist.reduce_scatter_tensor(out, product)
        return out

    def fused() -> torch.Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, group_name())

    return {
        "cuBLAS alone": lambda: torch.mm(a, b, out=product),
        "NCCL + cuBLAS": nccl,
        "torch symm_mem fused": fused,
    }


if __name__ == "__main__":
    sys.exit(main("matmul_reduce_scatter", TITLE, TARGETS))
