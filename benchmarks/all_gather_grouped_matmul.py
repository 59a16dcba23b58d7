"""Benchmark of all-gather and the first product of experts that all ranks share: 256 experts, 8 of them a token, bf16.

    python -m benchmarks.all_gather_grouped_matmul --ranks 2                   one run with all baselines
    python -m benchmarks.all_gather_grouped_matmul --device cpu --quick        check in the simulator; time nothing

7168 -> 2 * 2048 columns, of which each rank has its share for every expert. "T = 4096" are the tokens of all ranks, and
"skewed" ones choose experts by Zipf's law. "product alone" is the grouped product of rows that are here already, so its
result is not checked. "NCCL + torch._grouped_mm" gathers tokens and choices, sorts them, and multiplies. Variants named
"captured" are replayed CUDA graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import pkt
from benchmarks._case import Case, captured, normal, routed
from benchmarks._command import main

TITLE = "All-gather + experts' product, bf16"
EXPERTS, CHOSEN, H, F = 256, 8, 7168, 2048
TOKENS = (256, 1024, 4096, 16384)
PLAIN: dict[str, dict[str, Any]] = {
    "pkt unfused": {"mode": "unfused"},
    "pkt push": {"mode": "push"},
    "pkt push, 12 programs send": {"mode": "push", "num_comm_sms": 12},
    "pkt push, 48 programs send": {"mode": "push", "num_comm_sms": 48},
}
QUICK: dict[str, dict[str, Any]] = {
    "pkt unfused": {"mode": "unfused"},
    "pkt push": {"mode": "push", "tiles": (16, 16, 16)},
}
BASELINES = ("product alone", "NCCL + torch._grouped_mm", "NCCL + torch._grouped_mm, captured")


def variants(device: str, quick: bool) -> list[str]:
    return list(QUICK) if device == "cpu" else [*BASELINES, "pkt unfused, captured", "pkt push, captured", *PLAIN]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    if quick:
        return {"T = 12, skewed": {"T": 12, "experts": 4, "chosen": 2, "H": 16, "F": 12, "skewed": True}}
    sizes: dict[str, dict[str, Any]] = {f"T = {T}, random": {"T": T} for T in TOKENS}
    return sizes | {f"T = {T}, skewed": {"T": T, "skewed": True} for T in (1024, 4096)}


class Routing(NamedTuple):
    """The choices of all ranks' tokens, and the pairs of a token and its expert in the order of experts."""

    idx: torch.Tensor  # (size, tokens of a rank, chosen)
    weights: torch.Tensor  # fp32, as idx
    pairs: torch.Tensor  # (R,) token * chosen + number
    offsets: torch.Tensor  # int32 (experts + 1,)


def routing(T: int, size: int, experts: int, chosen: int, skewed: bool, device: torch.device) -> Routing:
    """Alike on all ranks."""
    idx, weights = routed(T, experts, chosen, 0, device, skewed)
    counts = torch.bincount(idx.flatten(), minlength=experts)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    pairs = idx.flatten().argsort(stable=True)
    return Routing(idx.view(size, -1, chosen), weights.view(size, -1, chosen), pairs, offsets)


def shares(shape: tuple[int, int], experts: int, rank: int, device: torch.device) -> torch.Tensor:
    """A rank's share of every expert's matrix."""
    return torch.stack([normal(shape, rank * experts + e, device, shape[0] ** -0.5) for e in range(experts)])


def case(
    world: Any, T: int, experts: int = EXPERTS, chosen: int = CHOSEN, H: int = H, F: int = F, skewed: bool = False
) -> Case:  # fmt: skip
    size, device, each, N = world.size, world.torch_device, T // world.size, 2 * F // world.size
    where = routing(T, size, experts, chosen, skewed, device)
    idx, weights = where.idx[world.rank], where.weights[world.rank]
    every = normal((T, H), 1 << 20, device)
    x, w = every.view(size, each, H)[world.rank].clone(), shares((H, N), experts, world.rank, device)

    def run(**options: Any) -> Callable[[], torch.Tensor]:
        return lambda: pkt.all_gather_grouped_matmul(x, idx, weights, w, clear=False, world=world, **options).product

    def exact() -> torch.Tensor:
        rows, out = every[where.pairs // chosen], torch.empty(T * chosen, N, device=device)
        for e, (first, last) in enumerate(zip(where.offsets, where.offsets[1:])):
            out[first:last] = rows[first:last].float() @ w[e].float()
        return out

    runs = {name: run(**options) for name, options in (QUICK if device.type == "cpu" else PLAIN).items()}
    if device.type == "cuda":
        rows = every[where.pairs // chosen]
        runs |= {
            "product alone": lambda: pkt.grouped_matmul(rows, w, where.offsets, clear=False, world=world),
            "NCCL + torch._grouped_mm": lambda: _with_nccl(x, idx, w, size),
        }
        for name in ("NCCL + torch._grouped_mm", "pkt unfused", "pkt push"):
            runs[f"{name}, captured"] = captured(runs[name])
    return Case(
        nbytes=(size - 1) * (x.nbytes + 8.0 * idx.numel()),
        flops=2.0 * T * chosen * H * N,
        variants=runs,
        exact=exact,
        scaled=x,
        unchecked=frozenset({"product alone"}),
    )


def _with_nccl(x: torch.Tensor, idx: torch.Tensor, w: torch.Tensor, size: int) -> torch.Tensor:
    import torch.distributed as dist

    every, chosen = (t.new_empty(size * t.shape[0], t.shape[1]) for t in (x, idx))
    dist.all_gather_into_tensor(every, x)
    dist.all_gather_into_tensor(chosen, idx)
    pairs = chosen.flatten().argsort(stable=True)
    counts = torch.zeros(len(w), dtype=torch.int32, device=x.device)
    counts = counts.scatter_add(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=torch.int32))
    return torch._grouped_mm(every[pairs // idx.shape[1]], w, offs=counts.cumsum(0).int())


if __name__ == "__main__":
    sys.exit(main("all_gather_grouped_matmul", TITLE))
