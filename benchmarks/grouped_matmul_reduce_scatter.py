"""Benchmark of the second product of experts that all ranks share, and reduce-scatter: 256 experts, 8 a token, bf16.

    python -m benchmarks.grouped_matmul_reduce_scatter --ranks 2               one run with all baselines
    python -m benchmarks.grouped_matmul_reduce_scatter --device cpu --quick    check in the simulator; time nothing

2048 -> 7168, of which each rank has its share of the 2048 rows of every expert. Sizes and routings are those of
benchmarks/all_gather_grouped_matmul.py. "product alone" exchanges and adds nothing, so its result is not checked.
"torch._grouped_mm + NCCL" multiplies, adds each token's rows in fp32, and reduces with NCCL. Variants named "captured"
are replayed CUDA graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import pkt
from benchmarks._case import Case, captured, normal
from benchmarks._command import main
from benchmarks.all_gather_grouped_matmul import CHOSEN, EXPERTS, F, H, cases, routing, shares

__all__ = ["cases"]
TITLE = "Experts' product + reduce-scatter, bf16"
BASELINES = ("product alone", "torch._grouped_mm + NCCL", "torch._grouped_mm + NCCL, captured")


def variants(device: str, quick: bool) -> list[str]:
    return ["pkt default"] if device == "cpu" else [*BASELINES, "pkt default, captured", "pkt default"]


def case(
    world: Any, T: int, experts: int = EXPERTS, chosen: int = CHOSEN, H: int = H, F: int = F, skewed: bool = False
) -> Case:  # fmt: skip
    size, device, each, own = world.size, world.torch_device, T // world.size, F // world.size
    where = routing(T, size, experts, chosen, skewed, device)
    no_tokens = torch.zeros(each, 16, dtype=torch.bfloat16, device=device)
    no_matrices = torch.zeros(experts, 16, 16, dtype=torch.bfloat16, device=device)
    there = pkt.all_gather_grouped_matmul(
        no_tokens, where.idx[world.rank], where.weights[world.rank], no_matrices, clear=False, world=world
    )

    def hidden(rank: int) -> torch.Tensor:
        return normal((T * chosen, own), (1 << 20) + rank, device)

    x, w = hidden(world.rank), shares((own, H), experts, world.rank, device)

    def run(**options: Any) -> Callable[[], torch.Tensor]:
        return lambda: pkt.grouped_matmul_reduce_scatter(x, w, there, world=world, **options)

    def exact() -> torch.Tensor:
        """Rank by rank and expert by expert, in fp32."""
        out, scale = torch.zeros(T, H, device=device), where.weights.flatten()[where.pairs, None]
        for rank in range(size):
            rows, matrices = hidden(rank), w if rank == world.rank else shares((own, H), experts, rank, device)
            for e, (first, last) in enumerate(zip(where.offsets.tolist(), where.offsets[1:].tolist())):
                y = rows[first:last].float() @ matrices[e].float()
                out.index_add_(0, where.pairs[first:last] // chosen, scale[first:last] * y)
        return out.view(size, each, H)[world.rank]

    def with_nccl() -> torch.Tensor:
        import torch.distributed as dist

        y = torch._grouped_mm(x, w, offs=where.offsets[1:])
        rows = torch.empty_like(y).index_copy(0, where.pairs, y).view(T, chosen, H)
        sums = (rows.float() * where.weights.view(T, chosen, 1)).sum(1).bfloat16()
        out = sums.new_empty(each, H)
        dist.reduce_scatter_tensor(out, sums)
        return out

    runs = {"pkt default": run()}
    if device.type == "cuda":
        runs |= {
            "product alone": lambda: pkt.grouped_matmul(x, w, where.offsets, clear=False, world=world),
            "torch._grouped_mm + NCCL": with_nccl,
        }
        for name in ("torch._grouped_mm + NCCL", "pkt default"):
            runs[f"{name}, captured"] = captured(runs[name])
    return Case(
        nbytes=2.0 * (size - 1) * each * H,
        flops=2.0 * T * chosen * own * H,
        variants=runs,
        exact=exact,
        scaled=x,
        unchecked=frozenset({"product alone"}),
    )


if __name__ == "__main__":
    sys.exit(main("grouped_matmul_reduce_scatter", TITLE))
