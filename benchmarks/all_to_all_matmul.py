"""Benchmark of the product behind Ulysses attention in bf16: the output projection of Llama 70B.

    python -m benchmarks.all_to_all_matmul --ranks 2                  on GPUs; results/all_to_all_matmul_2.json
    python -m benchmarks.all_to_all_matmul --device cpu --quick       check in the simulator; time nothing

"product alone" multiplies rows that are here already, so its result is not checked. "NCCL + product" exchanges heads
with NCCL's all-to-all, which needs permuted copies before and behind it. Variants named "captured" are replayed. All
variants of a case run in the same job.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import _heads
from benchmarks._case import Case, captured, normal
from benchmarks._command import main
from pkt.kernels.all_to_all_matmul import all_to_all_matmul

TITLE = "All-to-all + output product, bf16"
PLAIN: dict[str, dict[str, Any]] = {
    "pkt default": {},
    "pkt gluon": {"mode": "gluon"},
    "pkt gluon, 128x128x64": {"mode": "gluon", "tiles": (128, 128, 64, 8, 8, 6)},
    "pkt unfused": {"mode": "unfused"},
    "pkt push": {"mode": "push"},
    "pkt push, 8 programs push": {"mode": "push", "num_comm_sms": 8},
    "pkt push, 32 programs push": {"mode": "push", "num_comm_sms": 32},
    "pkt push, chunks of 1024": {"mode": "push", "chunk": 1024},
    "pkt push, 128x256x64": {"mode": "push", "tiles": (128, 256, 64, 8, 8, 3)},
}
QUICK: dict[str, dict[str, Any]] = {
    "pkt default": {},
    "pkt push": {"mode": "push", "tiles": (16, 16, 16)},
}
BASELINES = ("product alone", "NCCL + product")
CAPTURED = ("NCCL + product", "pkt default", "pkt gluon", "pkt unfused", "pkt push")


def variants(device: str, quick: bool) -> list[str]:
    return list(QUICK) if device == "cpu" else [*BASELINES, *(f"{name}, captured" for name in CAPTURED), *PLAIN]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    return _heads.cases(quick, _heads.QUERIES)


def case(world: Any, T: int, k: int, h: int, d: int) -> Case:
    """k: columns of the result."""
    size, device, s = world.size, world.torch_device, T // world.size
    weight = normal((h, d, k), size, device, scale=(h * d) ** -0.5)
    x = normal((1, T, h // size, d), world.rank, device)

    def run(mode: str | None = None, **settings: Any) -> Callable[[], torch.Tensor]:
        return lambda: all_to_all_matmul(x, weight, mode=mode, world=world, **settings)  # type: ignore[arg-type]

    def multiplied(rows: torch.Tensor) -> torch.Tensor:
        return torch.mm(rows.view(s, h * d), weight.flatten(0, 1)).view(1, s, k)

    def exact() -> torch.Tensor:
        """This rank's positions of all ranks' heads, by torch."""
        own = slice(world.rank * s, (world.rank + 1) * s)
        rows = torch.cat([normal((1, T, h // size, d), rank, device)[:, own] for rank in range(size)], 2)
        return torch.mm(rows.flatten(2)[0].float(), weight.flatten(0, 1).float()).view(1, s, k)

    runs = {name: run(**options) for name, options in (QUICK if device.type == "cpu" else PLAIN).items()}
    if device.type == "cuda":
        here = normal((1, s, h, d), size + 1, device)
        runs |= {
            "product alone": lambda: multiplied(here),
            "NCCL + product": lambda: multiplied(_heads.to_rows(x, size)),
        }
        runs |= {f"{name}, captured": captured(runs[name]) for name in CAPTURED}
    return Case(
        nbytes=(size - 1) / size * x.nbytes,
        flops=2.0 * s * k * h * d,
        variants=runs,
        exact=exact,
        scaled=x,
        unchecked=frozenset({"product alone"}),
    )


if __name__ == "__main__":
    sys.exit(main("all_to_all_matmul", TITLE))
