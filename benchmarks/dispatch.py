"""Benchmark of dispatch and combine in bf16: tokens to their experts' ranks, and home.

    python -m benchmarks.dispatch --ranks 2                      one run with the baseline
    python -m benchmarks.dispatch --device cpu --quick           check in the simulator; time nothing

"T = 4096" are the tokens of all ranks, of 7168 elements with 8 of 256 experts each, or as the case says. They choose at
random, or "skewed" by Zipf's law. Nothing is multiplied between the two, so a token comes home as itself times its
weights. Variants named "both" do so, and are checked. The others do one of the two. "NCCL, both" sends a row for each
pair of token and expert, sorted by experts on both sides, and waits on the host for the counts. "captured" is a
replayed CUDA graph.
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
from benchmarks.moe import with_nccl
from pkt.kernels.dispatch.rules import leaving

TITLE = "Dispatch and combine, bf16"
EXPERTS, CHOSEN, H = 256, 8, 7168
TOKENS = (128, 512, 1024, 2048, 4096, 8192, 16384)
FORMS = ("push", "pull"), ("low_latency", "low_latency")
MOST_FEW = 4096
"""Tokens of all ranks up to which the low-latency forms are timed."""


def variants(device: str, quick: bool) -> list[str]:
    pairs = [f"{there} and {home}" for there, home in FORMS]
    if device == "cpu":
        return [f"pkt {pair}, both" for pair in pairs]
    alone = [f"pkt {part}, captured" for there, home in FORMS for part in (f"dispatch {there}", f"combine {home}")]
    default = ["pkt default, both", "pkt default, both, captured"]
    return [*alone, "NCCL, both", *default, *(f"pkt {pair}, both, captured" for pair in pairs)]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    if quick:
        return {"T = 12, skewed": {"T": 12, "experts": 4, "chosen": 2, "H": 16, "skewed": True}}
    return {
        **{f"T = {T}, random": {"T": T} for T in TOKENS},
        "T = 8192, skewed": {"T": 8192, "skewed": True},
        "T = 1024, H = 2048, 8 of 128": {"T": 1024, "experts": 128, "H": 2048},
        "T = 16384, H = 2048, 8 of 128": {"T": 16384, "experts": 128, "H": 2048},
        "T = 8192, H = 2880, 4 of 128": {"T": 8192, "experts": 128, "chosen": 4, "H": 2880},
        "T = 16384, H = 6144, 2 of 8": {"T": 16384, "experts": 8, "chosen": 2, "H": 6144},
    }


def case(world: Any, T: int, experts: int = EXPERTS, chosen: int = CHOSEN, H: int = H, skewed: bool = False) -> Case:
    size, device = world.size, world.torch_device
    each = T // size
    x = normal((each, H), 1000 + world.rank, device)
    idx, weights = routed(each, experts, chosen, world.rank, device, skewed)
    promised = {"tokens_per_rank": each, "world": world}
    room = max(1, size * idx.numel())

    def there(mode: str | None) -> Any:
        return pkt.dispatch(x, idx, weights, experts, max_tokens=room, clear=False, mode=mode, **promised)

    def home(handle: Any, mode: str | None) -> torch.Tensor:
        return pkt.combine(handle.rows, handle, mode=mode, **promised)

    runs: dict[str, Callable[[], torch.Tensor]] = {"pkt default, both": lambda: home(there(None), None)}
    handle = there("push")
    end = int(handle.offsets[-1])
    skipped: dict[str, str] = {}
    for to, back in FORMS:
        parts = {
            f"pkt dispatch {to}": partial(lambda to: there(to).rows[:end], to),
            f"pkt combine {back}": partial(home, handle, back),
            f"pkt {to} and {back}, both": partial(lambda to, back: home(there(to), back), to, back),
        }
        if to == "low_latency" and T > MOST_FEW:
            skipped |= {f"{name}, captured": f"more than {MOST_FEW} tokens" for name in parts}
        runs |= parts
    for name in [*runs]:
        runs[f"{name}, captured"] = captured(runs[name])
    if device.type == "cuda":
        runs["NCCL, both"] = lambda: with_nccl(x, idx, weights, experts // size, lambda rows, ends: rows)
    one_way = 2.0 * H * leaving(each, chosen, size)
    alone = {name: one_way for name in runs if "both" not in name}
    return Case(
        nbytes=2 * one_way,
        variants=runs,
        exact=lambda: x.float() * weights.sum(1, keepdim=True),
        scaled=None,
        unchecked=frozenset(alone),
        skipped=skipped,
        fewer=alone,
    )


if __name__ == "__main__":
    sys.exit(main("dispatch", TITLE))
