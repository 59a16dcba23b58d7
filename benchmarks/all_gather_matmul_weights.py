"""Benchmark of all_gather_matmul as layers call it: swiglu of gate and up, and q, k, v after one gather, bf16.

    python -m benchmarks.all_gather_matmul_weights                       4 GPUs
    python -m benchmarks.all_gather_matmul_weights --device cpu --quick  check in the simulator; time nothing

The shapes are those of a layer with hidden size 4096, 14336 columns of gate and of up, and 4096, 1024 and 1024 of q, k
and v, which the ranks share. "One call" is `epilogue="swiglu"`, or a list of weights; "apart" has a kernel of torch's
behind the product, or a call for each weight.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import pkt
from benchmarks._case import Case, normal
from benchmarks._command import main
from pkt.kernels.all_gather_matmul import all_gather_matmul
from pkt.kernels.shared.tile_product import finished

TITLE = "All-gather + matmul with the weights of layers"
HIDDEN, GATE, QKV = 4096, 14336, (4096, 1024, 1024)
ROWS = (512, 4096, 16384)
ONE, SIDE, APART = "pkt, one call", "pkt, one call, weights side by side", "pkt, apart"
LIBRARY = "NCCL all-gather, cuBLAS, apart"


def variants(device: str, quick: bool) -> list[str]:
    return [ONE, SIDE, APART, *([LIBRARY] if device == "cuda" else [])]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    return {
        f"{kind}, {rows} rows": {"kind": kind, "rows": rows, "scale": 64 if quick else 1}
        for kind in ("swiglu", "q, k, v")
        for rows in ((32,) if quick else ROWS)
    }


def case(world: Any, kind: str, rows: int, scale: int) -> Case:
    """scale: what all columns are divided by."""
    m, k, device = rows // world.size, HIDDEN // scale, world.torch_device
    shards = [normal((m, k), rank, device) for rank in range(world.size)]
    columns = (GATE, GATE) if kind == "swiglu" else QKV
    whole = normal((sum(columns) // scale // world.size, k), 100, device, k**-0.5).t()  # as a Linear holds it
    weights = whole.split([n // scale // world.size for n in columns], dim=1)
    runs, exact = (_swiglu if kind == "swiglu" else _several)(world, shards[world.rank], weights)
    return Case(
        nbytes=(world.size - 1) * m * k * 2.0,
        flops=2.0 * world.size * m * k * whole.shape[1],
        variants=runs,
        exact=lambda: exact(torch.cat(shards).float()),
        scaled=None,
        skipped={} if kind == "q, k, v" else {SIDE: "one weight"},
    )


def _swiglu(world: Any, a: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[dict[str, Any], Any]:
    """The variants, and what the result is for the gathered A."""
    b = pkt.interleave(*weights)

    def apart(product: torch.Tensor) -> torch.Tensor:
        return finished(product, None, "swiglu")

    runs: dict[str, Any] = {
        ONE: partial(all_gather_matmul, a, b, epilogue="swiglu", world=world),
        APART: lambda: apart(all_gather_matmul(a, b, world=world)),
    }
    if world.torch_device.type == "cuda":
        gather = _gatherer(world, a)
        runs[LIBRARY] = lambda: apart(gather() @ b)
    return runs, lambda whole: apart(whole @ b.float())


def _several(world: Any, a: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[dict[str, Any], Any]:
    """As `_swiglu`; the result is the last weight's."""
    separate = [w.t().clone().t() for w in weights]
    runs: dict[str, Any] = {
        ONE: lambda: all_gather_matmul(a, separate, world=world)[-1],
        SIDE: lambda: all_gather_matmul(a, weights, world=world)[-1],
        APART: lambda: [all_gather_matmul(a, b, world=world) for b in separate][-1],
    }
    if world.torch_device.type == "cuda":
        gather = _gatherer(world, a)

        def library() -> torch.Tensor:
            whole = gather()
            return [whole @ b for b in separate][-1]

        runs[LIBRARY] = library
    return runs, lambda whole: whole @ weights[-1].float()


def _gatherer(world: Any, a: torch.Tensor) -> Any:
    """NCCL's all-gather of `a`."""
    import torch.distributed as dist

    gathered = torch.empty(world.size * a.shape[0], a.shape[1], dtype=a.dtype, device=a.device)

    def gather() -> torch.Tensor:
        dist.all_gather_into_tensor(gathered, a)
        return gathered

    return gather


if __name__ == "__main__":
    sys.exit(main("all_gather_matmul_weights", TITLE))
