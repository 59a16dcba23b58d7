"""Benchmark of all-reduce + residual + RMSNorm in bf16: T tokens of 8192 elements.

    python -m benchmarks.all_reduce_rms_norm --ranks 2
    python -m benchmarks.all_reduce_rms_norm --device cpu --quick   check in the simulator; time nothing

"NCCL", "torch two-shot" and "torch one-shot" are that all-reduce, then torch's addition and rms_norm; "compiled" ones
have these two as one kernel of torch.compile. torch's are those of its symmetric memory, without multicast, and copy x
there first, as a product would leave it there. Those named "captured" are replayed. The results of fp8 are not checked
here, but in the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks._case import Case, captured, normal
from benchmarks._command import main
from benchmarks._process_group import group_name, torch_symmetric
from pkt.kernels.all_reduce_rms_norm import all_reduce_rms_norm

TITLE = "All-reduce + residual + RMSNorm, T x 8192, bf16"
TOKENS, H, EPS = (1, 16, 128, 1024, 8192), 8192, 1e-6
PLAIN: dict[str, dict[str, Any]] = {
    "pkt default": {},
    "pkt low_latency": {"mode": "low_latency"},
    "pkt low_latency, 2 programs a token": {"mode": "low_latency", "parts": 2},
    "pkt low_latency, 4 programs a token": {"mode": "low_latency", "parts": 4},
    "pkt low_latency, 8 programs a token": {"mode": "low_latency", "parts": 8},
    "pkt two_shot": {"mode": "two_shot"},
    "pkt two_shot, 1 row": {"mode": "two_shot", "rows": 1},
    "pkt two_shot, 8 rows": {"mode": "two_shot", "rows": 8},
    "pkt unfused": {"mode": "unfused"},
    "pkt fp8_token": {"quant": "fp8_token"},
    "pkt fp8_group": {"quant": "fp8_group"},
}
UNCHECKED = ("pkt fp8_token", "pkt fp8_group")
BASELINES = tuple(
    f"{name}{way}{replay}"
    for name in ("NCCL", "torch two-shot", "torch one-shot")
    for way in ("", ", compiled")
    for replay in ("", ", captured")
)


def variants(device: str, quick: bool) -> list[str]:
    if device == "cpu":
        return [name for name in PLAIN if name not in UNCHECKED]
    return [*BASELINES, *(f"{name}{replay}" for name in PLAIN for replay in ("", ", captured"))]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    if quick:
        return {"T = 3": {"T": 3, "H": 256}}
    return {f"T = {T}": {"T": T, "H": H} for T in TOKENS}


def inputs(world: Any, T: int, H: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's x, and the residual and the weight of all ranks."""
    device = world.torch_device
    return normal((T, H), 2 + world.rank, device), normal((T, H), 0, device), normal((H,), 1, device)


def exact(residual: torch.Tensor, weight: torch.Tensor, size: int) -> torch.Tensor:
    """The norm of the sum of all ranks' `inputs`, in fp32 from the rounded new residual."""
    total = residual.float()
    for rank in range(size):
        total = total + normal(residual.shape, 2 + rank, residual.device).float()
    new = total.bfloat16().float()
    return new * torch.rsqrt(new.square().mean(-1, keepdim=True) + EPS) * weight.float()


def norm(residual: torch.Tensor, weight: torch.Tensor) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """torch's addition and rms_norm: norm(residual, weight)(sum) is the normed rows and the new residual."""

    def added(total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = residual + total
        return torch.nn.functional.rms_norm(new, (new.shape[-1],), weight, EPS), new

    return added


def case(world: Any, T: int, H: int) -> Case:
    size = world.size
    x, residual, weight = inputs(world, T, H)

    def run(options: dict[str, Any]) -> Callable[[], torch.Tensor]:
        return lambda: all_reduce_rms_norm(x, residual, weight, EPS, world=world, **options)[0]

    runs = {name: run(options) for name, options in PLAIN.items()}
    if x.is_cuda:
        runs |= _baselines(x, residual, weight)
        runs |= {f"{name}, captured": captured(one) for name, one in runs.items()}
    return Case(
        nbytes=2.0 * (size - 1) / size * x.nbytes,
        variants=runs,
        exact=lambda: exact(residual, weight, size),
        scaled=None,
        unchecked=frozenset(name for name in runs if name.startswith(UNCHECKED)),
        optional=frozenset(name for name in runs if name.startswith("torch ")),
    )


def _baselines(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    import torch.distributed as dist

    shared, own = torch_symmetric(x), torch.empty_like(x)
    plain = norm(residual, weight)

    def nccl() -> torch.Tensor:
        own.copy_(x)
        dist.all_reduce(own)
        return own

    def reduced(op: str) -> Callable[[], torch.Tensor]:
        def reduce() -> torch.Tensor:
            shared.copy_(x)
            return getattr(torch.ops.symm_mem, op)(shared, "sum", group_name())

        return reduce

    def behind(reduce: Callable[[], torch.Tensor], after: Callable[..., Any]) -> Callable[[], torch.Tensor]:
        return lambda: after(reduce())[0]

    reduces = {
        "NCCL": nccl,
        "torch two-shot": reduced("two_shot_all_reduce_"),
        "torch one-shot": reduced("one_shot_all_reduce"),
    }
    ways = {"": plain, ", compiled": torch.compile(plain, dynamic=False)}
    return {f"{name}{way}": behind(reduce, after) for name, reduce in reduces.items() for way, after in ways.items()}


if __name__ == "__main__":
    sys.exit(main("all_reduce_rms_norm", TITLE))
