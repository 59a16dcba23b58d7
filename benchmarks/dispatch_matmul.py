"""Benchmark of dispatch and the experts' first product in bf16: 256 experts, 8 of them a token, 7168 -> 2048.

    python -m benchmarks.dispatch_matmul --ranks 2                      one run with all baselines
    python -m benchmarks.dispatch_matmul --device cpu --quick           check in the simulator; time nothing

"T = 4096" are the tokens of all ranks, which choose experts at random. "product alone" is pkt's, and
"torch._grouped_mm alone" torch's, of rows that are there already. "NCCL + torch._grouped_mm" sends a row for each pair
of token and expert, and waits on the host for the counts. "captured" is a replayed CUDA graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import pkt
from benchmarks._case import Case, captured, normal, routed
from benchmarks._command import main
from benchmarks.moe import there_with_nccl
from pkt.kernels.dispatch.rules import leaving

TITLE = "Dispatch + experts' product, bf16"
EXPERTS, CHOSEN, H, N = 256, 8, 7168, 2048
TOKENS = (256, 1024, 4096, 8192, 16384, 32768)
ALONE = ("product alone", "torch._grouped_mm alone")
NCCL = "NCCL + torch._grouped_mm"
MODES: dict[str, str | None] = {"pkt default": None, "pkt push": "push"}


def variants(device: str, quick: bool) -> list[str]:
    return list(MODES) if device == "cpu" else [*ALONE, NCCL, *(f"{m}{c}" for m in MODES for c in (", captured", ""))]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    if quick:
        return {"T = 12, random": {"T": 12, "experts": 4, "chosen": 2, "h": 16, "n": 32}}
    return {f"T = {T}, random": {"T": T} for T in TOKENS}


def case(world: Any, T: int, experts: int = EXPERTS, chosen: int = CHOSEN, h: int = H, n: int = N) -> Case:
    size, rank, device = world.size, world.rank, world.torch_device
    each, own = T // size, experts // size

    def tokens(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's, and the experts that they choose."""
        return normal((each, h), 1000 + rank, device), routed(each, experts, chosen, rank, device)[0]

    x, idx = tokens(rank)
    weights = torch.rand(each, chosen, device=device)
    w = torch.stack([normal((h, n), rank * own + e, device, h**-0.5) for e in range(own)])
    given = {"max_tokens": max(1, size * idx.numel()), "clear": False, "world": world}
    there = pkt.dispatch(x, idx, weights, experts, tokens_per_rank=each, **given)
    end = int(there.offsets[-1])

    def exact() -> torch.Tensor:
        """Expert by expert, in fp32, with no communication."""
        every = [tokens(r) for r in range(size)]
        mine = [torch.cat([x[(idx == rank * own + e).any(1)] for x, idx in every]) for e in range(own)]
        return torch.cat([rows.float() @ one.float() for rows, one in zip(mine, w)])

    def joined(mode: str | None) -> torch.Tensor:
        promise = each if mode is None else None  # push takes none
        return pkt.dispatch_matmul(x, idx, weights, w, mode=mode, tokens_per_rank=promise, **given)[1][:end]

    runs: dict[str, Callable[[], torch.Tensor]] = {name: partial(joined, mode) for name, mode in MODES.items()}
    runs |= {f"{name}, captured": captured(run) for name, run in runs.items()}
    if device.type == "cuda":
        rows, ends = there.rows[:end], there.offsets[1:]
        runs["product alone"] = lambda: pkt.grouped_matmul(rows, w, there.offsets, clear=False, world=world)
        runs["torch._grouped_mm alone"] = lambda: torch._grouped_mm(rows, w, offs=ends)
        runs[NCCL] = lambda: grouped(*there_with_nccl(x, idx, own)[:2], w)
    sent = 2.0 * h * leaving(each, chosen, size)
    return Case(
        nbytes=sent, fewer=dict.fromkeys(ALONE, 0.0), flops=2.0 * T * chosen * h * n / size, variants=runs,
        exact=exact, scaled=None,
    )  # fmt: skip


def grouped(rows: torch.Tensor, ends: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(rows, w, offs=ends)


if __name__ == "__main__":
    sys.exit(main("dispatch_matmul", TITLE))
