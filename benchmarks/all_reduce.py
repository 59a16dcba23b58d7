"""All-reduce beside NCCL and torch's symmetric memory. See benchmarks/collectives.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks._case import LINK
from benchmarks._collective import MESSAGES, Arguments, Collective, Run, after, messages, total
from benchmarks._process_group import group_name, torch_copies


def cases(quick: bool) -> dict[str, Arguments]:
    odd = {} if quick else {"16 MiB + 2": {"shape": [MESSAGES["16 MiB"] // 2 + 1]}}  # no whole 16 bytes at its end
    return messages(quick) | odd


def exact(inputs: Iterator[torch.Tensor], rank: int, size: int) -> torch.Tensor:
    return total(inputs)


def baselines(x: torch.Tensor, out: torch.Tensor, size: int) -> dict[str, Run]:
    import torch.distributed as dist

    copied = torch_copies(x)

    def reduce() -> torch.Tensor:
        out.copy_(x)
        return after(out, dist.all_reduce(out))

    return {
        "NCCL": reduce,
        "NCCL, captured": reduce,
        "torch one-shot": lambda: torch.ops.symm_mem.one_shot_all_reduce(copied(), "sum", group_name()),
        "torch two-shot": lambda: torch.ops.symm_mem.two_shot_all_reduce_(copied(), "sum", group_name()),
    }


COLLECTIVE = Collective(
    "all-reduce",
    sent=lambda size: 2.0 * (size - 1) / size,
    exact=exact,
    baselines=baselines,
    names=("NCCL", "NCCL, captured", "torch one-shot", "torch two-shot"),
    cases=cases,
    blocks={"one_shot": 1024, "two_shot": 2048, "two_shot_push": 8192},
    captured=("low_latency", "low_latency_two_shot", "copy", "default"),
    targets={
        f"all-reduce {name}": 1.5 * MESSAGES[name] / LINK / seconds  # on 4 ranks
        for name, seconds in (("16 KiB", 7e-6), ("1 MiB", 16e-6), ("256 MiB", 1.10e-3))
    },
)
