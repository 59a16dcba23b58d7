"""Benchmark of Ulysses attention in bf16: S positions, of which every rank holds S / size of all heads.

    python -m benchmarks.ulysses_attention --ranks 2                  on GPUs; results/ulysses_attention_2.json
    python -m benchmarks.ulysses_attention --ranks 2 --only push      some variants
    python -m benchmarks.ulysses_attention --device cpu --quick       check in the simulator; time nothing

"SDPA alone" is torch's attention over this rank's heads, whose positions are all there already, in the backend that
torch chooses. It exchanges nothing, so its result is not checked. "NCCL + SDPA" exchanges heads with NCCL's all-to-all,
which needs permuted copies before and behind it. Variants named "captured" are replayed. All variants of a case run in
the same job. Further settings of "push", "copy" and "gluon" are there to be compared.

128/128 heads: of queries and of keys, 128 elements each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import pkt
from benchmarks._case import Case, captured, normal
from benchmarks._command import main
from pkt.kernels.ulysses_attention import ulysses_attention
from pkt.kernels.ulysses_attention.heads import heads_of

TITLE = "Ulysses attention, bf16"
SIZES = ((128, 128, 16384), (128, 128, 65536), (64, 8, 32768))
PLAIN: dict[str, dict[str, Any]] = {
    "pkt default": {},
    "pkt unfused": {"mode": "unfused"},
    "pkt copy": {"mode": "copy"},
    "pkt copy, symmetric out": {"mode": "copy", "symmetric": True},
    "pkt copy, 4 heads a group": {"mode": "copy", "heads": 4},
    "pkt copy, 8 heads a group": {"mode": "copy", "heads": 8},
    "pkt copy, 16 heads a group": {"mode": "copy", "heads": 16},
    "pkt copy, 32 heads a group": {"mode": "copy", "heads": 32},
    "pkt gluon": {"mode": "gluon"},
    "pkt gluon, symmetric out": {"mode": "gluon", "symmetric": True},
    "pkt gluon, 4 heads a group": {"mode": "gluon", "heads": 4},
    "pkt push": {"mode": "push"},
    "pkt push, symmetric out": {"mode": "push", "symmetric": True},
    "pkt push, 8 programs push": {"mode": "push", "num_comm_sms": 8},
    "pkt push, 32 programs push": {"mode": "push", "num_comm_sms": 32},
    "pkt push, 2 heads a group": {"mode": "push", "heads": 2},
    "pkt push, 16 heads a group": {"mode": "push", "heads": 16},
    "pkt push, 128x128x8x2": {"mode": "push", "tiles": (128, 128, 8, 2)},
    "pkt push, 128x64x8x2": {"mode": "push", "tiles": (128, 64, 8, 2)},
    "pkt push, 64x64x4x3": {"mode": "push", "tiles": (64, 64, 4, 3)},
}
QUICK: dict[str, dict[str, Any]] = {
    "pkt default": {},
    "pkt copy": {"mode": "copy", "heads": 1},
    "pkt push": {"mode": "push", "tiles": (16, 16)},
    "pkt push, symmetric out": {"mode": "push", "symmetric": True, "tiles": (16, 16)},
}
CAPTURED = ("pkt push", "pkt copy", "pkt gluon")
BASELINES = ("SDPA alone", "NCCL + SDPA")


def variants(device: str, quick: bool) -> list[str]:
    return list(QUICK) if device == "cpu" else [*BASELINES, *(f"{name}, captured" for name in CAPTURED), *PLAIN]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    sizes = ((4, 1, 48),) if quick else SIZES
    return {f"{h}/{kv} heads, S = {S}": {"h": h, "kv": kv, "S": S, "D": 16 if quick else 128} for h, kv, S in sizes}


def case(world: Any, h: int, kv: int, S: int, D: int) -> Case:
    size, device = world.size, world.torch_device
    held, rows = heads_of(h, kv, size), S // size
    shapes = ((1, rows, h, D), (1, rows, kv, D), (1, rows, kv, D))

    def of(rank: int) -> list[torch.Tensor]:
        """q, k and v of a rank; the same wherever they are made."""
        return [normal(shape, 3 * rank + i, device) for i, shape in enumerate(shapes)]

    q, k, v = of(world.rank)

    def run(mode: str | None = None, symmetric: bool = False, **settings: Any) -> Callable[[], torch.Tensor]:
        out = pkt.empty(tuple(q.shape), dtype=q.dtype, world=world) if symmetric else None
        if settings.get("heads", 1) > held.queries:
            settings.pop("heads")
        return lambda: ulysses_attention(q, k, v, out, mode=mode, world=world, **settings)  # type: ignore[arg-type]

    def exact() -> torch.Tensor:
        """This rank's queries and all ranks' keys, by torch, some heads at a time."""
        keys, values = (torch.cat(xs, 1) for xs in list(zip(*map(of, range(size))))[1:])
        shared = h // kv
        each = [
            _attend(q[:, :, n * shared : (n + 1) * shared], keys[:, :, n : n + 1], values[:, :, n : n + 1])
            for n in range(kv)
        ]
        return torch.cat(each, 2).float()

    runs = {name: run(**options) for name, options in (QUICK if device.type == "cpu" else PLAIN).items()}
    if device.type == "cuda":
        runs |= {"SDPA alone": _alone(S, held, D, device), "NCCL + SDPA": lambda: _with_nccl(q, k, v, held, size)}
        runs |= {f"{name}, captured": captured(runs[name]) for name in CAPTURED}
    sent = 2 * q.nbytes + (k.nbytes + v.nbytes) * held.repeats
    return Case(
        nbytes=(size - 1) / size * sent,
        flops=4.0 * held.queries * S * S * D,
        variants=runs,
        exact=exact,
        scaled=v,
        unchecked=frozenset({"SDPA alone"}),
    )


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's, of (B, S, heads, D)."""
    a, b, c = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(a, b, c, enable_gqa=a.shape[1] != b.shape[1]).transpose(1, 2)


def _alone(S: int, held: Any, D: int, device: torch.device) -> Callable[[], torch.Tensor]:
    q, k, v = (normal((1, S, n, D), i, device) for i, n in enumerate((held.queries, held.keys, held.keys)))
    return lambda: _attend(q, k, v)


def _with_nccl(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, held: Any, size: int) -> torch.Tensor:
    """Heads by NCCL, attention, and the result by NCCL."""
    import torch.distributed as dist

    def there(x: torch.Tensor) -> torch.Tensor:
        if x is not q:
            x = x.repeat_interleave(held.repeats, 2)
        b, s, n, d = x.shape
        sent = x.view(b, s, size, n // size, d).permute(2, 0, 1, 3, 4).contiguous()
        got = torch.empty_like(sent)  # (source, b, s, heads, d)
        dist.all_to_all_single(got, sent)
        return got.permute(1, 0, 2, 3, 4).reshape(b, size * s, n // size, d)

    found = _attend(there(q), there(k), there(v))
    b, S, n, d = found.shape
    sent = found.reshape(b, size, S // size, n, d).transpose(0, 1).contiguous()
    got = torch.empty_like(sent)  # (rank of the heads, b, s, heads, d)
    dist.all_to_all_single(got, sent)
    return got.permute(1, 2, 0, 3, 4).reshape(q.shape)


if __name__ == "__main__":
    sys.exit(main("ulysses_attention", TITLE))
