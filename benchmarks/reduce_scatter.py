"""Reduce-scatter beside NCCL and torch's symmetric memory; along the last dimension NCCL needs a transposed copy. See
benchmarks/collectives.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks._case import LINK
from benchmarks._collective import SQUARES, Collective, Run, after, squares, total
from benchmarks._process_group import group_name, torch_copies


def exact(inputs: Iterator[torch.Tensor], rank: int, size: int, dim: int = 0) -> torch.Tensor:
    return total(inputs).chunk(size, dim)[rank].contiguous()


def baselines(x: torch.Tensor, out: torch.Tensor, size: int, dim: int = 0) -> dict[str, Run]:
    import torch.distributed as dist

    turned = torch.empty(size, *out.shape, dtype=x.dtype, device=x.device) if dim else x
    copied = torch_copies(x)

    def scatter() -> torch.Tensor:
        if dim:
            turned.copy_(x.view(x.shape[0], size, -1).movedim(1, 0))
        return after(out, dist.reduce_scatter_tensor(out, turned.view(size * out.shape[0], -1)))

    return {
        "NCCL": scatter,
        "torch symm_mem": lambda: torch.ops.symm_mem.reduce_scatter_out(copied(), group_name(), dim == 1, out),
    }


COLLECTIVE = Collective(
    "reduce-scatter",
    sent=lambda size: (size - 1) / size,
    exact=exact,
    baselines=baselines,
    names=("NCCL", "torch symm_mem"),
    cases=squares,
    axes=lambda dim=0: (None, dim),
    blocks={"push": 32768},
    captured=("copy",),
    targets={
        f"reduce-scatter{columns} {N} x {N}": rate / LINK
        for columns in ("", " columns")
        for N, rate in zip(SQUARES, (330e9, 350e9))
    },
)
