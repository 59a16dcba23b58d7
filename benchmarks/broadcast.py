"""Broadcast from rank 0 beside NCCL. See benchmarks/collectives.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks._collective import Collective, Run, after


def exact(inputs: Iterator[torch.Tensor], rank: int, size: int, root: int = 0) -> torch.Tensor:
    return next(inputs).float()


def baselines(x: torch.Tensor, out: torch.Tensor, size: int, root: int = 0) -> dict[str, Run]:
    import torch.distributed as dist

    return {"NCCL": lambda: after(x, dist.broadcast(x, root))}


COLLECTIVE = Collective("broadcast", sent=lambda size: 1.0, exact=exact, baselines=baselines, blocks={"pass_on": 4096})
