"""All-gather beside NCCL, which needs a transposed copy along the last dimension. See benchmarks/collectives.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks._case import LINK
from benchmarks._collective import SQUARES, Collective, Run, after, squares


def exact(inputs: Iterator[torch.Tensor], rank: int, size: int, dim: int = 0) -> torch.Tensor:
    return torch.cat(list(inputs), dim).float()


def baselines(x: torch.Tensor, out: torch.Tensor, size: int, dim: int = 0) -> dict[str, Run]:
    import torch.distributed as dist

    if dim == 0:
        return {"NCCL": lambda: after(out, dist.all_gather_into_tensor(out, x))}
    shards = torch.empty(size, *x.shape, dtype=x.dtype, device=x.device)

    def gather() -> torch.Tensor:
        dist.all_gather_into_tensor(shards.view(-1, x.shape[1]), x)
        out.view(x.shape[0], size, x.shape[1]).copy_(shards.movedim(0, 1))
        return out

    return {"NCCL": gather}


COLLECTIVE = Collective(
    "all-gather",
    sent=lambda size: size - 1.0,
    exact=exact,
    baselines=baselines,
    cases=squares,
    axes=lambda dim=0: (dim, None),
    captured=("copy",),
    targets={
        f"all-gather{columns} {N} x {N}": rate / LINK
        for columns in ("", " columns")
        for N, rate in zip(SQUARES, (330e9, 350e9))
    },
)
