"""Benchmark of the product before Ulysses attention in bf16: queries, keys and values of Llama 70B in one weight.

    python -m benchmarks.matmul_all_to_all --ranks 2                  on GPUs; results/matmul_all_to_all_2.json
    python -m benchmarks.matmul_all_to_all --device cpu --quick       check in the simulator; time nothing

"product alone" multiplies and exchanges nothing, so its result is not checked. "product + NCCL" exchanges heads with
NCCL's all-to-all, which needs permuted copies before and behind it. Variants named "captured" are replayed. All
variants of a case run in the same job. In the cases "normed and rotated" the heads of queries and keys get an RMSNorm
and a rotary embedding: in pkt's call, and by torch, in fp32, behind NCCL's exchange.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import pkt
from benchmarks import _heads
from benchmarks._case import Case, captured, normal
from benchmarks._command import main
from pkt.kernels.matmul_all_to_all import matmul_all_to_all

TITLE = "QKV product + all-to-all, bf16"
PLAIN: dict[str, dict[str, Any]] = {
    "pkt default": {},
    "pkt copy": {"mode": "copy"},
    "pkt copy, symmetric out": {"mode": "copy", "symmetric": True},
    "pkt unfused": {"mode": "unfused"},
    "pkt push": {"mode": "push"},
    "pkt push, symmetric out": {"mode": "push", "symmetric": True},
    "pkt push, 128x256x64": {"mode": "push", "tiles": (128, 256, 64, 8, 8, 3)},
    "pkt push, 128x256x64, symmetric out": {"mode": "push", "symmetric": True, "tiles": (128, 256, 64, 8, 8, 3)},
}
QUICK: dict[str, dict[str, Any]] = {
    "pkt default": {},
    "pkt copy": {"mode": "copy"},
    "pkt copy, symmetric out": {"mode": "copy", "symmetric": True},
    "pkt push": {"mode": "push", "tiles": (16, 16, 16)},
    "pkt push, symmetric out": {"mode": "push", "symmetric": True, "tiles": (16, 16, 16)},
}
BASELINES = ("product alone", "product + NCCL")
CAPTURED = ("product + NCCL", "pkt default", "pkt copy", "pkt copy, symmetric out", "pkt unfused", "pkt push")


def variants(device: str, quick: bool) -> list[str]:
    return list(QUICK) if device == "cpu" else [*BASELINES, *(f"{name}, captured" for name in CAPTURED), *PLAIN]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    plain = _heads.cases(quick, _heads.QUERIES + 2 * _heads.KEYS)
    turned = {f"{label}, normed and rotated": {**sizes, "turned": True} for label, sizes in plain.items()}
    if quick:  # "push" takes heads of 16 elements at least
        turned = {label: {**sizes, "d": 16} for label, sizes in turned.items()}
    return plain | turned


def case(world: Any, T: int, k: int, h: int, d: int, turned: bool = False) -> Case:
    size, device, s = world.size, world.torch_device, T // world.size
    weight = normal((k, h, d), size, device, scale=k**-0.5)
    x = normal((1, s, k), world.rank, device)
    each = h // size
    heads = each - max(_heads.KEYS * each // (_heads.QUERIES + 2 * _heads.KEYS), 1)  # of a rank's queries and keys
    norm, angles = normal((h, d), size + 1, device), torch.arange(T, device=device)[:, None] * _rates(d, device)
    own = angles[world.rank * s :][:s]
    more: dict[str, Any] = {"norm": norm, "cos": own.cos(), "sin": own.sin(), "qk_heads": heads} if turned else {}

    def run(mode: str | None = None, symmetric: bool = False, **settings: Any) -> Callable[[], torch.Tensor]:
        out = pkt.empty(1, T, each, d, dtype=x.dtype, world=world) if symmetric else None
        return lambda: matmul_all_to_all(x, weight, out, mode=mode, world=world, **more, **settings)  # type: ignore[arg-type]

    def finished(there: torch.Tensor) -> torch.Tensor:
        """All positions of my heads, those of queries and keys normed and rotated by torch, in fp32."""
        if not turned:
            return there
        mine = norm.tensor_split(size, 0)[world.rank][:heads].float()
        qk = torch.nn.functional.rms_norm(there[:, :, :heads].float(), (d,), eps=1e-6) * mine
        first, second = qk.chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        qk = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return torch.cat([qk.to(there.dtype), there[:, :, heads:]], 2)

    def multiplied() -> torch.Tensor:
        return torch.mm(x.view(s, k), weight.flatten(1)).view(1, s, h, d)

    def exact() -> torch.Tensor:
        """This rank's heads of all ranks' positions, by torch."""
        mine = weight.tensor_split(size, 1)[world.rank].flatten(1)
        tokens = torch.cat([normal((1, s, k), rank, device) for rank in range(size)], 1)
        return finished(torch.mm(tokens.view(T, k).float(), mine.float()).view(1, T, each, d))

    runs = {name: run(**options) for name, options in (QUICK if device.type == "cpu" else PLAIN).items()}
    if device.type == "cuda":
        runs |= {"product alone": multiplied, "product + NCCL": lambda: finished(_heads.to_heads(multiplied(), size))}
        runs |= {f"{name}, captured": captured(runs[name]) for name in CAPTURED}
    return Case(
        nbytes=(size - 1) / size * s * h * d * x.itemsize,
        flops=2.0 * s * k * h * d,
        variants=runs,
        exact=exact,
        scaled=None if turned else x,
        unchecked=frozenset({"product alone"}),
    )


def _rates(d: int, device: torch.device) -> torch.Tensor:
    """Of Llama 3: the angle of each element of a half head from one position to the next."""
    return 500000.0 ** (-torch.arange(0, d, 2, device=device, dtype=torch.float32) / d)


if __name__ == "__main__":
    sys.exit(main("matmul_all_to_all", TITLE))
