"""All-to-all beside NCCL. "heads": that of Ulysses, (1, S / size, 128, 128) to (1, S, 128 / size, 128), for which NCCL
needs a transposed copy. See benchmarks/collectives.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks._case import LINK
from benchmarks._collective import SMALL, Arguments, Collective, Run, after, messages

SEQUENCES = {"16k": 1 << 14, "64k": 1 << 16, "256k": 1 << 18}


def cases(quick: bool) -> dict[str, Arguments]:
    sequences, heads = ({"32": 32}, [16, 16]) if quick else (SEQUENCES, [128, 128])
    turned = {"scatter": 2, "gather": 1}
    return messages(quick, SMALL) | {
        f"heads S = {name}": {"shape": [1, n, *heads], **turned} for name, n in sequences.items()
    }


def exact(inputs: Iterator[torch.Tensor], rank: int, size: int, scatter: int = 0, gather: int = 0) -> torch.Tensor:
    return torch.cat([x.chunk(size, scatter)[rank] for x in inputs], gather).float()


def baselines(x: torch.Tensor, out: torch.Tensor, size: int, scatter: int = 0, gather: int = 0) -> dict[str, Run]:
    import torch.distributed as dist

    if scatter == gather:
        return {"NCCL": lambda: after(out, dist.all_to_all_single(out, x))}
    staged, parts = torch.empty_like(x), x.view(x.shape[1], size, -1).movedim(1, 0)

    def exchange() -> torch.Tensor:
        staged.view(parts.shape).copy_(parts)
        return after(out, dist.all_to_all_single(out.view(-1), staged.view(-1)))

    return {"NCCL": exchange}


COLLECTIVE = Collective(
    "all-to-all",
    sent=lambda size: (size - 1) / size,
    exact=exact,
    baselines=baselines,
    cases=cases,
    axes=lambda scatter=0, gather=0: (gather, scatter),
    captured=("copy", "default"),
    targets={f"all-to-all heads S = {s}": rate / LINK for s, rate in zip(SEQUENCES, (300e9, 360e9, 365e9))},
)
