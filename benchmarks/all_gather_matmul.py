"""All-gather + matrix product, C (N, N / size) = A (N, N) @ B (N, N / size), A sharded by rows, in bf16.

    python -m benchmarks.all_gather_matmul                       4 GPUs; benchmarks/results/all_gather_matmul.json
    python -m benchmarks.all_gather_matmul --device cpu --quick  the same variants in the simulator: results only

(size - 1) / size * N * N * 2 bytes leave each GPU at least.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks._operators import Case, group_name, main, normal
from pkt.kernels._matmul import Tiles
from pkt.kernels.all_gather_matmul import all_gather_matmul

TITLE = "All-gather + matmul, N x N / size x N, bf16"
SIZES = (4096, 8192, 16384, 32768)
TARGETS = {"N = 4096": 0.78, "N = 8192": 0.92, "N = 16384": 0.98, "N = 32768": 0.97}
BASELINES = ("cuBLAS alone", "NCCL + cuBLAS", "torch symm_mem fused")
WIDE, SQUARE = Tiles(128, 256, 64, 8, 8, 3), Tiles(128, 128, 64, 8, 8, 4)
SMALL = Tiles(32, 32, 32, 2, 4, 2)  # for the simulator

PLAIN: dict[str, dict[str, Any]] = {
    "pkt push, 8 SMs, 128x256": {"num_comm_sms": 8, "tiles": WIDE},
    "pkt push, 16 SMs, 128x256": {"num_comm_sms": 16, "tiles": WIDE},
    "pkt push, 16 SMs, 128x128": {"num_comm_sms": 16, "tiles": SQUARE},
    "pkt pull, 128x256": {"mode": "pull", "tiles": WIDE},
}
QUICK = {
    "pkt push, 1 SM": {"num_comm_sms": 1, "tiles": SMALL, "chunk": 64},
    "pkt push, 3 SMs": {"num_comm_sms": 3, "tiles": SMALL, "chunk": 32},
    "pkt pull": {"mode": "pull", "tiles": SMALL},
}


def variants(device: str, quick: bool) -> list[str]:
    if device == "cpu":
        return list(QUICK)
    return [*BASELINES, *PLAIN]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    return {f"N = {N}": {"N": N} for N in ((128,) if quick else SIZES)}


def case(world: Any, N: int) -> Case:
    m, n, device = N // world.size, N // world.size, world.torch_device
    a, b = normal((m, N), world.rank, device), normal((N, n), 100 + world.rank, device)
    out = torch.empty(N, n, dtype=a.dtype, device=device)
    runs: dict[str, Any] = {}

    def exact() -> torch.Tensor:
        rows = [normal((m, N), r, device).float() @ b.float() for r in range(world.size)]
        return torch.cat(rows)

    for name, options in (QUICK if device.type == "cpu" else PLAIN).items():
        if options.get("mode") == "pull":
            runs[name] = _pull(world, a, b, out, options)
        else:
            runs[name] = lambda options=options: all_gather_matmul(a, b, out, world=world, **options)
    if device.type == "cuda":
        runs |= _baselines(world, a, b, out)
    return Case(
        nbytes=(world.size - 1) * m * N * 2.0,
        flops=2.0 * N * n * N,
        variants=runs,
        exact=exact,
        scaled=a,
        unchecked=frozenset({"cuBLAS alone"}),
    )


def _pull(world: Any, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, options: dict[str, Any]) -> Any:
    import pkt

    def run() -> torch.Tensor:
        shard = world.workspace("shard", lambda: pkt.empty(*a.shape, dtype=a.dtype, world=world))
        shard.copy_(a)  # counted: what a caller without a symmetric shard pays
        return all_gather_matmul(shard, b, out, world=world, **options)

    return run


def _baselines(world: Any, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
    import torch.distributed as dist

    gathered = torch.cat([normal(tuple(a.shape), r, a.device) for r in range(world.size)])

    def nccl() -> torch.Tensor:
        dist.all_gather_into_tensor(gathered, a)
        return torch.mm(gathered, b, out=out)

    def fused() -> torch.Tensor:
        return torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, group_name())[1][0]

    return {
        "cuBLAS alone": lambda: torch.mm(gathered, b, out=out),
        "NCCL + cuBLAS": nccl,
        "torch symm_mem fused": fused,
    }


if __name__ == "__main__":
    sys.exit(main("all_gather_matmul", TITLE, TARGETS))
