"""kraken's fused products as baselines, if that package is installed: github.com/meta-pytorch/kraken.

Install it from there: the package index has another package of its name. Its kernels take weights in a Linear's layout.
Its all-gather takes a shard in torch's symmetric memory. Its product with a one-shot all-reduce needs signals for each
block of 64 x 64, and torch's signal pads have room for few.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks._process_group import torch_symmetric

NAME = "kraken"
MISSING = {NAME: "kraken is not installed"}
BLOCK = 64

Run = Callable[[], torch.Tensor]


def found() -> bool:
    """Whether kraken is installed, and not another package of this name."""
    return importlib.util.find_spec("kraken") is not None and importlib.util.find_spec("kraken.fused") is not None


def missing() -> dict[str, str]:
    """The variant and the reason to skip it, for `Case.skipped`; {} if kraken is installed."""
    return {} if found() else MISSING


def shard(a: torch.Tensor) -> torch.Tensor:
    """`a`, or, if kraken is installed, a copy that kraken can gather. All variants use it. Collective."""
    return torch_symmetric(a).copy_(a) if found() else a


def all_gather_matmul(a: torch.Tensor, b: torch.Tensor) -> dict[str, Run]:
    """kraken's all-gather + product by name; {} if kraken is missing. a: a result of `shard`."""
    return _variant(lambda fused, weights: fused.all_gather_matmul(a, weights)[1], b)


def matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor) -> dict[str, Run]:
    return _variant(lambda fused, weights: fused.gemm_reduce_scatter_ce_persistent(a, weights), b)


def matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, size: int) -> dict[str, Run]:
    """kraken's product + all-reduce by name; {} if kraken is missing or torch's signal pads are too small."""
    if not found():
        return {}
    import torch.distributed._symmetric_memory as symm_mem

    signals = -(-a.shape[0] // BLOCK) * -(-b.shape[1] // BLOCK) * size
    if 4 * signals > symm_mem.get_signal_pad_size():
        return {}
    return _variant(lambda fused, weights: fused.gemm_one_shot_all_reduce_fused(a, weights), b)


def _variant(call: Callable[[Any, torch.Tensor], torch.Tensor], b: torch.Tensor) -> dict[str, Run]:
    if not found():
        return {}
    made: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        if not made:
            made.append(b.t().contiguous().t())
        _forget()
        return call(importlib.import_module("kraken.fused"), made[0])

    return {NAME: run}


def _forget() -> None:
    """Clear kraken's caches. They hold a descriptor of each result, and so each result, which fills memory at 32768."""
    for name, module in list(sys.modules.items()):
        if name.startswith("kraken.fused."):
            getattr(module, "_tma_desc_cache", {}).clear()
