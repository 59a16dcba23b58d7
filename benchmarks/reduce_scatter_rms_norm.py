"""Benchmark of reduce-scatter + residual + RMSNorm + all-gather in bf16: T tokens of 8192 elements.

    python -m benchmarks.reduce_scatter_rms_norm --ranks 2
    python -m benchmarks.reduce_scatter_rms_norm --device cpu --quick   check in the simulator; time nothing

"NCCL" is its reduce-scatter, torch's addition and rms_norm of a rank's rows, and NCCL's all-gather of them; "pkt, one
by one" is the same with pkt's collectives. "compiled" ones have torch's two as one kernel of torch.compile. Those named
"captured" are replayed. The results of fp8 are not checked here, but in the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks._case import Case, captured
from benchmarks._command import main
from benchmarks.all_reduce_rms_norm import EPS, UNCHECKED, H, exact, inputs, norm
from pkt.kernels.all_gather import all_gather
from pkt.kernels.reduce_scatter import reduce_scatter
from pkt.kernels.reduce_scatter_rms_norm import reduce_scatter_rms_norm

TITLE = "Reduce-scatter + residual + RMSNorm + all-gather, T x 8192, bf16"
TOKENS = 16, 128, 1024, 4096, 16384
PLAIN: dict[str, dict[str, Any]] = {
    "pkt default": {},
    "pkt push, 1 row": {"rows": 1},
    "pkt push, 2 rows": {"rows": 2},
    "pkt push, 4 rows": {"rows": 4},
    "pkt push, 8 rows": {"rows": 8},
    "pkt fp8_token": {"quant": "fp8_token"},
    "pkt fp8_group": {"quant": "fp8_group"},
}
WAYS = "", ", compiled"
BASELINES = tuple(f"{name}{way}" for name in ("NCCL", "pkt, one by one") for way in WAYS)


def variants(device: str, quick: bool) -> list[str]:
    if device == "cpu":
        return [name for name in PLAIN if name not in UNCHECKED]
    return [f"{name}{replay}" for name in (*BASELINES, *PLAIN) for replay in ("", ", captured")]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    if quick:
        return {"T = 4": {"T": 4, "H": 256}}
    return {f"T = {T}": {"T": T, "H": H} for T in TOKENS}


def case(world: Any, T: int, H: int) -> Case:
    size = world.size
    x, residual, weight = inputs(world, T, H)
    mine = residual.chunk(size)[world.rank].contiguous()

    def run(options: dict[str, Any]) -> Callable[[], torch.Tensor]:
        return lambda: reduce_scatter_rms_norm(x, mine, weight, EPS, world=world, **options)[0]

    runs = {name: run(options) for name, options in PLAIN.items()}
    if x.is_cuda:
        runs |= _baselines(world, x, mine, weight)
        runs |= {f"{name}, captured": captured(one) for name, one in runs.items()}
    return Case(
        nbytes=2.0 * (size - 1) / size * x.nbytes,
        variants=runs,
        exact=lambda: exact(residual, weight, size),
        scaled=None,
        unchecked=frozenset(name for name in runs if name.startswith(UNCHECKED)),
    )


def _baselines(
    world: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> dict[str, Callable[[], torch.Tensor]]:
    import torch.distributed as dist

    part, whole = torch.empty_like(residual), torch.empty_like(x)

    def nccl(after: Callable[..., Any]) -> torch.Tensor:
        dist.reduce_scatter_tensor(part, x)
        dist.all_gather_into_tensor(whole, after(part)[0])
        return whole

    def one_by_one(after: Callable[..., Any]) -> torch.Tensor:
        return all_gather(after(reduce_scatter(x, world=world))[0], world=world)

    def of(reduced: Callable[..., torch.Tensor], after: Callable[..., Any]) -> Callable[[], torch.Tensor]:
        return lambda: reduced(after)

    plain = norm(residual, weight)
    norms = plain, torch.compile(plain, dynamic=False)
    return {
        f"{name}{way}": of(reduced, after)
        for name, reduced in (("NCCL", nccl), ("pkt, one by one", one_by_one))
        for way, after in zip(WAYS, norms)
    }


if __name__ == "__main__":
    sys.exit(main("reduce_scatter_rms_norm", TITLE))
