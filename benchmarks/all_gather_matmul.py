"""Benchmark of all-gather + matrix product in bf16.

A sharded by rows: C (N, N / size) = A (N, N) @ B (N, N / size). A sharded by columns, as in decoding: C (M, N / size) =
A (M, K) @ B (K, N / size), with K = 8192, N = 28672 of the paper Three Taxes.

    python -m benchmarks.all_gather_matmul                       4 GPUs; benchmarks/results/all_gather_matmul.json
    python -m benchmarks.all_gather_matmul --device cpu --quick  check in the simulator; time nothing

At least (size - 1) / size * |A| * 2 bytes leave each GPU.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from benchmarks import _kraken
from benchmarks._case import Case, normal
from benchmarks._command import main
from benchmarks._parts import Apart, without
from benchmarks._process_group import group_name
from pkt.kernels.all_gather_matmul import all_gather_matmul
from pkt.kernels.all_gather_matmul.rules import settings
from pkt.kernels.shared.gluon_fits import TILES
from pkt.kernels.shared.tile_product import Tiles

TITLE = "All-gather + matmul, N x N / size x N, bf16"
SHARE = 0.33  # of the seconds of benchmarks/operators.py
SIZES = (4096, 6144, 8192, 12288, 16384, 32768)
ROWS, INNER, OUTER = (1, 16, 128, 1024), 8192, 28672
TARGETS = {"N = 4096": 0.78, "N = 8192": 0.92, "N = 16384": 0.98, "N = 32768": 0.97}
BASELINES = ("cuBLAS alone", "NCCL + cuBLAS", "torch symm_mem fused", _kraken.NAME)
WIDE = Tiles(128, 256, 64, 8, 8, 3)
SMALL = Tiles(32, 32, 32, 2, 4, 2)  # for the simulator

PLAIN: dict[str, dict[str, Any]] = {
    "pkt default": {},
    "pkt unfused": {"mode": "unfused"},
    "pkt push, 16 SMs, 128x256": {"num_comm_sms": 16, "tiles": WIDE},
    "pkt copy, 128x256": {"mode": "copy", "tiles": WIDE},
}
GLUON: dict[str, dict[str, Any]] = {
    "pkt gluon, pushed": {"mode": "gluon", "num_comm_sms": 16},
    "pkt gluon, pushed, whole tiles": {"mode": "gluon", "num_comm_sms": 16, "cut_last": 1},
    "pkt gluon, copied": {"mode": "gluon", "num_comm_sms": 0},
    "pkt gluon, copied, whole tiles": {"mode": "gluon", "num_comm_sms": 0, "cut_last": 1},
}
# One part timed without the others. These variants read inboxes that the first launches of GLUON have filled.
PARTS: dict[str, dict[str, Any]] = {
    "(gluon, product alone)": {"leave_out": "push", "num_comm_sms": 16},
    "(gluon, product alone, whole tiles)": {"leave_out": "push", "num_comm_sms": 16, "cut_last": 1},
    "(gluon, push alone, 8)": {"leave_out": "product", "num_comm_sms": 8},
    "(gluon, push alone, 16)": {"leave_out": "product", "num_comm_sms": 16},
    "(gluon, push alone, 24)": {"leave_out": "product", "num_comm_sms": 24},
    "(gluon, copies alone)": {"leave_out": "product", "num_comm_sms": 0},
    "(gluon, both, no waits)": {"leave_out": "wait", "num_comm_sms": 16},
    "(gluon, copied, no waits)": {"leave_out": "wait", "num_comm_sms": 0},
}
COLUMNS: dict[str, dict[str, Any]] = {
    "pkt default": {},
    "pkt unfused": {"mode": "unfused"},
    "pkt push, 4 SMs": {"num_comm_sms": 4},
    "pkt push, 16 SMs, chunks of 256": {"num_comm_sms": 16, "chunk": 256},
    "pkt push, 16x128 tiles": {"tiles": Tiles(16, 128, 128, 8, 4, 4)},
    "pkt push, 64x128 tiles": {"tiles": Tiles(64, 128, 128, 8, 4, 4)},
}
CHECKED: tuple[dict[str, Any], ...] = (
    {"tiles": TILES, "num_comm_sms": 132, "chunk": 512},
    {"tiles": TILES, "num_comm_sms": 0},
    {"tiles": Tiles(128, 128, 64, num_stages=6), "num_comm_sms": 5, "chunk": 256, "rounds_alone": 1, "cut_last": 4},
)  # settings of the Gluon form that benchmarks/operators.py checks
QUICK: dict[str, dict[str, Any]] = {
    "pkt unfused": {"mode": "unfused"},
    "pkt push, 1 SM": {"num_comm_sms": 1, "tiles": SMALL, "chunk": 64},
    "pkt push, 3 SMs": {"num_comm_sms": 3, "tiles": SMALL, "chunk": 32},
    "pkt copy": {"mode": "copy", "tiles": SMALL},
}


def variants(device: str, quick: bool) -> list[str]:
    if device == "cpu":
        return list(QUICK)
    return [
        *BASELINES,
        "pkt default",
        *GLUON,
        *PARTS,
        *dict.fromkeys(n for n in (*PLAIN, *COLUMNS) if n != "pkt default"),
    ]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    if quick:
        return {"N = 96": {"N": 96}, "M = 3": {"N": 96, "M": 3, "K": 96}}
    return {f"N = {N}": {"N": N} for N in SIZES} | {f"M = {M}": {"N": OUTER, "M": M, "K": INNER} for M in ROWS}


def case(world: Any, N: int, M: int = 0, K: int = 0) -> Case:
    return _rows(world, N) if not M else _columns(world, M, N, K)


def _columns(world: Any, M: int, N: int, K: int) -> Case:
    k, device = K // world.size, world.torch_device
    a, b = normal((M, k), world.rank, device), normal((K, N // world.size), 100 + world.rank, device)
    out = torch.empty(M, N // world.size, dtype=a.dtype, device=device)

    def exact() -> torch.Tensor:
        return torch.cat([normal((M, k), r, device) for r in range(world.size)], dim=1).float() @ b.float()

    runs: dict[str, Any] = {}
    for name, options in (QUICK if device.type == "cpu" else COLUMNS).items():
        if options.get("mode") == "copy":
            continue  # only for A sharded by rows
        runs[name] = partial(all_gather_matmul, a, b, out, world=world, shard="columns", **options)
    if device.type == "cuda":
        import torch.distributed as dist

        parts = torch.empty(world.size, M, k, dtype=a.dtype, device=device)
        gathered = torch.cat([normal((M, k), r, device) for r in range(world.size)], dim=1)

        def nccl() -> torch.Tensor:
            dist.all_gather_into_tensor(parts, a)
            return torch.mm(parts.transpose(0, 1).reshape(M, K), b, out=out)

        runs |= {"cuBLAS alone": lambda: torch.mm(gathered, b, out=out), "NCCL + cuBLAS": nccl}
    return Case(
        nbytes=(world.size - 1) * M * k * 2.0,
        flops=2.0 * M * K * (N // world.size),
        variants=runs,
        exact=exact,
        scaled=a,
        unchecked=frozenset({"cuBLAS alone"}),
    )


def _rows(world: Any, N: int) -> Case:
    m, n, device = N // world.size, N // world.size, world.torch_device
    a, b = normal((m, N), world.rank, device), normal((N, n), 100 + world.rank, device)
    if device.type == "cuda":
        a = _kraken.shard(a)
    out = torch.empty(N, n, dtype=a.dtype, device=device)
    runs: dict[str, Any] = {}

    def exact() -> torch.Tensor:
        rows = [normal((m, N), r, device).float() @ b.float() for r in range(world.size)]
        return torch.cat(rows)

    for name, options in (QUICK if device.type == "cpu" else PLAIN | GLUON).items():
        runs[name] = partial(all_gather_matmul, a, b, out, world=world, **options)
    if device.type == "cuda":
        runs |= _baselines(world, a, b, out) | _kraken.all_gather_matmul(a, b)
        runs |= {name: _part(world, a, b, out, **options) for name, options in PARTS.items()}
    return Case(
        nbytes=(world.size - 1) * m * N * 2.0,
        flops=2.0 * N * n * N,
        variants=runs,
        exact=exact,
        scaled=a,
        unchecked=frozenset({"cuBLAS alone", *PARTS}),
        skipped=_kraken.missing(),
    )


def _part(
    world: Any, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, leave_out: str, tiles: Tiles | None = None,
    **given: int,
) -> Any:  # fmt: skip
    made: list[Any] = []

    def run() -> torch.Tensor:
        if not made:  # a variant that does not run makes no workspace
            module = without(leave_out)
            chosen = settings(a.shape[0], b.shape[1], a.shape[1], world, tiles, **given)
            made.append(module.push_launch(Apart(world, module, leave_out), a, b, out, *chosen))
        return made[0](a, b, out, None)

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
