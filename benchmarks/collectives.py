"""All-reduce, all-gather and reduce-scatter alone, in bf16, beside NCCL and torch's symmetric memory.

    python -m benchmarks.collectives                       4 GPUs
    python -m benchmarks.collectives --device cpu --quick  in the simulator: results only

Bytes that leave each GPU at least: all-reduce of n bytes 2 * (size - 1) / size * n; all-gather of a shard of n bytes
and reduce-scatter to one (size - 1) * n. A short message has no limit here but a signal's flight, 1.5 us one way.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks._operators import Case, group_name, main, normal, torch_symmetric
from pkt.kernels.all_gather import all_gather
from pkt.kernels.all_reduce import all_reduce
from pkt.kernels.reduce_scatter import reduce_scatter

TITLE = "Collectives, bf16"
MESSAGES = {"16 KiB": 1 << 14, "128 KiB": 1 << 17, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "256 MiB": 1 << 28}
SQUARES = (8192, 32768)  # N x N gathered, or scattered
TARGETS = {"all-gather 8192 x 8192": 0.85, "reduce-scatter 8192 x 8192": 0.85}
KINDS = ("all-reduce", "all-gather", "reduce-scatter")
BASELINES = ("NCCL", "torch one-shot", "torch two-shot")
OURS: dict[str, dict[str, dict[str, Any]]] = {
    "all-reduce": {
        "pkt one-shot": {"mode": "one_shot"},
        "pkt one-shot, blocks of 1024": {"mode": "one_shot", "block": 1024},
        "pkt two-shot": {"mode": "two_shot"},
        "pkt two-shot, blocks of 2048": {"mode": "two_shot", "block": 2048},
    },
    "all-gather": {"pkt push": {"mode": "push"}, "pkt pull": {"mode": "pull"}},
    "reduce-scatter": {"pkt pull": {}, "pkt pull, blocks of 4096": {"block": 4096}},
}


def variants(device: str, quick: bool) -> list[str]:
    ours = list(dict.fromkeys(name for kind in KINDS for name in OURS[kind]))
    return ours if device == "cpu" else [*BASELINES, *ours]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    if quick:
        return {f"{kind} 8 KiB": {"kind": kind, "nbytes": 8192} for kind in KINDS}
    messages = {f"all-reduce {name}": {"kind": "all-reduce", "nbytes": n} for name, n in MESSAGES.items()}
    return messages | {f"{kind} {N} x {N}": {"kind": kind, "nbytes": 2 * N * N} for N in SQUARES for kind in KINDS[1:]}


def case(world: Any, kind: str, nbytes: int) -> Case:
    import pkt

    size, device = world.size, world.torch_device
    whole = nbytes // 2 // size * size  # elements of the larger side
    n = whole if kind != "all-gather" else whole // size
    x = pkt.empty(n, dtype=torch.bfloat16, world=world)
    x.copy_(normal((n,), world.rank, device))
    out = pkt.empty(whole if kind != "reduce-scatter" else whole // size, dtype=torch.bfloat16, world=world)
    world.barrier()

    def exact() -> torch.Tensor:
        inputs = (normal((n,), r, device) for r in range(size))
        if kind == "all-gather":
            return torch.cat(list(inputs)).float()
        total = torch.zeros(n, device=device)
        for one in inputs:
            total += one
        return total if kind == "all-reduce" else total.chunk(size)[world.rank]

    call = {"all-reduce": all_reduce, "all-gather": all_gather, "reduce-scatter": reduce_scatter}[kind]
    runs: dict[str, Any] = {
        name: lambda options=options: call(x, out, world=world, **options) for name, options in OURS[kind].items()
    }
    if device.type == "cuda":
        runs |= _baselines(kind, x, out)
    factor = {"all-reduce": 2.0 * (size - 1) / size, "all-gather": size - 1.0, "reduce-scatter": size - 1.0}[kind]
    shard = nbytes if kind == "all-reduce" else nbytes / size
    return Case(nbytes=factor * shard, variants=runs, exact=exact, scaled=x)


def _baselines(kind: str, x: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
    import torch.distributed as dist

    plain, result = x.plain(), out.plain()  # type: ignore[attr-defined]

    def nccl() -> torch.Tensor:
        if kind == "all-gather":
            dist.all_gather_into_tensor(result, plain)
        elif kind == "reduce-scatter":
            dist.reduce_scatter_tensor(result, plain)
        else:
            result.copy_(plain)
            dist.all_reduce(result)
        return result

    if kind != "all-reduce":
        return {"NCCL": nccl}
    symmetric: list[torch.Tensor] = []

    def torch_input() -> torch.Tensor:
        if not symmetric:
            symmetric.append(torch_symmetric(plain))
        return symmetric[0].copy_(plain)

    return {
        "NCCL": nccl,
        "torch one-shot": lambda: torch.ops.symm_mem.one_shot_all_reduce(torch_input(), "sum", group_name()),
        "torch two-shot": lambda: torch.ops.symm_mem.two_shot_all_reduce_(torch_input(), "sum", group_name()),
    }


if __name__ == "__main__":
    sys.exit(main("collectives", TITLE, TARGETS))
