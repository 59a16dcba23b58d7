"""Benchmark of Ulysses attention in bf16: B sequences of S positions, of which every rank holds S / size of all heads.

    python -m benchmarks.ulysses_attention --ranks 2                  on GPUs; results/ulysses_attention_2.json
    python -m benchmarks.ulysses_attention --ranks 2 --only push      some variants
    python -m benchmarks.ulysses_attention --device cpu --quick       check in the simulator; time nothing

"SDPA alone" is torch's attention over this rank's heads, whose positions are all there already, in the backend that
torch chooses. It exchanges nothing, so its result is not checked. "NCCL + SDPA" exchanges heads with NCCL's all-to-all,
which needs permuted copies before and behind it. Variants named "captured" are replayed; those named "forward +
backward" also compute the gradients of q, k and v. All variants of a case run in the same job. Further settings of
"push", "copy" and "gluon" are there to be compared.

128/128 heads: of queries and of keys, 128 elements each.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import pkt
from benchmarks._case import Case, captured, normal
from benchmarks._command import main
from benchmarks.ring_attention import BOTH, trained
from pkt.kernels.ulysses_attention import ulysses_attention
from pkt.kernels.ulysses_attention.heads import heads_of

TITLE = "Ulysses attention, bf16"
SIZES = (
    (1, 128, 128, 16384, False), (1, 128, 128, 65536, False), (1, 64, 8, 32768, False), (1, 32, 8, 32768, True),
    (1, 32, 8, 8192, True), (4, 64, 8, 4096, True),
)  # fmt: skip
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
TRAINED = tuple(f"{name}, {BOTH}" for name in ("SDPA", "NCCL", "pkt", "unfused"))


def variants(device: str, quick: bool) -> list[str]:
    if device == "cpu":
        return list(QUICK)
    more = [*(f"{name}, captured" for name in CAPTURED), *TRAINED]
    return [*BASELINES, *more, *PLAIN]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    found = {}
    for B, h, kv, S, causal in ((1, 4, 1, 48, False), (2, 4, 1, 48, True)) if quick else SIZES:
        label = f"{'causal, ' if causal else ''}{h}/{kv} heads, {f'{B} x ' if B > 1 else ''}S = {S}"
        found[label] = {"B": B, "h": h, "kv": kv, "S": S, "D": 16 if quick else 128, "causal": causal}
    return found


def case(world: Any, B: int, h: int, kv: int, S: int, D: int, causal: bool) -> Case:
    size, device = world.size, world.torch_device
    held, rows = heads_of(h, kv, size), S // size
    shapes = ((B, rows, h, D), (B, rows, kv, D), (B, rows, kv, D))

    def of(rank: int) -> list[torch.Tensor]:
        """q, k and v of a rank; the same wherever they are made."""
        return [normal(shape, 3 * rank + i, device) for i, shape in enumerate(shapes)]

    q, k, v = of(world.rank)

    def run(mode: str | None = None, symmetric: bool = False, **settings: Any) -> Callable[[], torch.Tensor]:
        out = pkt.empty(tuple(q.shape), dtype=q.dtype, world=world) if symmetric else None
        if settings.get("heads", 1) > held.queries:
            settings.pop("heads")
        settings |= {"mode": mode, "causal": causal, "world": world}
        return lambda: ulysses_attention(q, k, v, out, **settings)

    def exact() -> torch.Tensor:
        """This rank's results by torch, some heads at a time, from all ranks' operands."""
        queries, keys, values = (torch.cat(xs, 1) for xs in zip(*map(of, range(size))))
        shared, here, each = h // kv, slice(world.rank * rows, (world.rank + 1) * rows), []
        for n in range(kv):
            some, one = slice(n * shared, (n + 1) * shared), slice(n, n + 1)
            each.append(_attend(queries[:, :, some], keys[:, :, one], values[:, :, one], causal))
        return torch.cat([x[:, here] for x in each], 2).float()

    runs = {name: run(**options) for name, options in (QUICK if device.type == "cpu" else PLAIN).items()}
    flops = 4.0 * B * held.queries * S * S * D / (1 + causal)
    if device.type == "cuda":
        whole = [normal((B, S, n, D), i, device) for i, n in enumerate((held.queries, held.keys, held.keys))]
        attend = functools.partial(_attend, causal=causal)
        with_nccl = functools.partial(_with_nccl, held=held, causal=causal, size=size)
        runs |= {"SDPA alone": lambda: attend(*whole), "NCCL + SDPA": lambda: with_nccl(q, k, v)}
        runs |= {f"{name}, captured": captured(runs[name]) for name in CAPTURED}
        ours = functools.partial(ulysses_attention, causal=causal, world=world)
        calls: tuple[Callable[..., torch.Tensor], ...] = (
            attend, with_nccl, ours, functools.partial(ours, mode="unfused"),
        )  # fmt: skip
        for name, call in zip(TRAINED, calls, strict=True):
            operands = whole if call is attend else [q, k, v]
            runs[name] = functools.partial(trained, call, *operands)
    sent = 2 * q.nbytes + (k.nbytes + v.nbytes) * held.repeats
    return Case(
        nbytes=(size - 1) / size * sent,
        flops=flops,
        more=dict.fromkeys(TRAINED, 3.5 * flops),
        variants=runs,
        exact=exact,
        scaled=v,
        unchecked=frozenset({"SDPA alone", TRAINED[0]}),
    )


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """torch's, of (B, S, heads, D)."""
    a, b, c = (x.transpose(1, 2) for x in (q, k, v))
    shared = a.shape[1] != b.shape[1]
    return F.scaled_dot_product_attention(a, b, c, is_causal=causal, enable_gqa=shared).transpose(1, 2)


def _with_nccl(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, held: Any, causal: bool, size: int
) -> torch.Tensor:  # fmt: skip
    """Heads by NCCL, attention, and the result by NCCL. Gradients go the same way back."""
    from torch.distributed.nn.functional import all_to_all_single as exchange  # differentiable

    def there(x: torch.Tensor) -> torch.Tensor:
        if x is not q:
            x = x.repeat_interleave(held.repeats, 2)
        b, s, n, d = x.shape
        sent = x.view(b, s, size, n // size, d).permute(2, 0, 1, 3, 4).contiguous()
        got = exchange(torch.empty_like(sent), sent)  # (source, b, s, heads, d)
        return got.permute(1, 0, 2, 3, 4).reshape(b, size * s, n // size, d)

    found = _attend(there(q), there(k), there(v), causal)
    b, S, n, d = found.shape
    sent = found.reshape(b, size, S // size, n, d).transpose(0, 1).contiguous()
    got = exchange(torch.empty_like(sent), sent)  # (rank of the heads, b, s, heads, d)
    return got.permute(1, 2, 0, 3, 4).reshape(q.shape)


if __name__ == "__main__":
    sys.exit(main("ulysses_attention", TITLE))
