"""Benchmark of the collectives in bf16, beside NCCL and torch's symmetric memory.

    python -m benchmarks.collectives                       4 GPUs
    python -m benchmarks.collectives --device cpu --quick  check in the simulator; time nothing

The least number of bytes that leave each GPU is the limit of a case:

    all-reduce of n bytes                                    2 * (size - 1) / size * n
    all-gather of a shard, reduce-scatter to one, n bytes    (size - 1) * n
    all-to-all of n bytes                                    (size - 1) / size * n
    broadcast of n bytes                                     n

A short message also needs the flight of a signal, 1.5 us one way, which the limit ignores.

"columns": along the last dimension, with the result in the original layout; NCCL needs a transposed copy. "heads": the
all-to-all of Ulysses, (1, S / size, 128, 128) to (1, S, 128 / size, 128). "captured": one replay of a CUDA graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks._case import LINK, Case, captured, normal
from benchmarks._command import main
from benchmarks._process_group import group_name, torch_symmetric
from pkt.kernels.all_gather import all_gather
from pkt.kernels.all_gather import reference as gathered
from pkt.kernels.all_reduce import all_reduce
from pkt.kernels.all_to_all import all_to_all
from pkt.kernels.all_to_all import reference as exchanged
from pkt.kernels.broadcast import broadcast
from pkt.kernels.reduce_scatter import reduce_scatter

TITLE = "Collectives, bf16"
MESSAGES = {"16 KiB": 1 << 14, "128 KiB": 1 << 17, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "256 MiB": 1 << 28}
SQUARES = (8192, 32768)  # N of N x N matrices to gather or scatter
SEQUENCES = {"16k": 1 << 14, "64k": 1 << 16, "256k": 1 << 18}
SMALL = 1 << 20  # most bytes for which the low-latency forms are timed
LARGE = 1 << 24  # least bytes for which the copy engines are timed
TARGETS = {
    **{
        f"all-reduce {name}": 1.5 * MESSAGES[name] / LINK / seconds  # on 4 ranks
        for name, seconds in (("16 KiB", 7e-6), ("1 MiB", 16e-6), ("256 MiB", 1.10e-3))
    },
    **{
        f"{kind}{columns} {N} x {N}": rate / LINK
        for kind in ("all-gather", "reduce-scatter")
        for columns in ("", " columns")
        for N, rate in zip(SQUARES, (330e9, 350e9))
    },
    **{f"all-to-all heads S = {s}": rate / LINK for s, rate in zip(SEQUENCES, (300e9, 360e9, 365e9))},
}
BASELINES = ("NCCL", "NCCL, captured", "torch one-shot", "torch two-shot", "torch symm_mem")
OURS: dict[str, dict[str, dict[str, Any]]] = {
    "all-reduce": {
        "pkt low-latency": {"mode": "low_latency"},
        "pkt low-latency, captured": {"mode": "low_latency"},
        "pkt low-latency two-shot": {"mode": "low_latency_two_shot"},
        "pkt low-latency two-shot, captured": {"mode": "low_latency_two_shot"},
        "pkt one-shot": {"mode": "one_shot"},
        "pkt one-shot, blocks of 1024": {"mode": "one_shot", "block": 1024},
        "pkt two-shot": {"mode": "two_shot"},
        "pkt two-shot, blocks of 2048": {"mode": "two_shot", "block": 2048},
        "pkt two-shot by stores": {"mode": "two_shot_push"},
        "pkt two-shot by stores, blocks of 8192": {"mode": "two_shot_push", "block": 8192},
        "pkt copy": {"mode": "copy"},
        "pkt copy, captured": {"mode": "copy"},
        "pkt default": {},
        "pkt default, captured": {},
    },
    "all-gather": {
        "pkt low-latency": {"mode": "low_latency"},
        "pkt push": {"mode": "push"},
        "pkt pull": {"mode": "pull"},
        "pkt copy": {"mode": "copy"},
        "pkt copy, captured": {"mode": "copy"},
        "pkt default": {},
    },
    "reduce-scatter": {
        "pkt low-latency": {"mode": "low_latency"},
        "pkt pull": {"mode": "pull"},
        "pkt push": {"mode": "push"},
        "pkt push, blocks of 32768": {"mode": "push", "block": 32768},
        "pkt copy": {"mode": "copy"},
        "pkt copy, captured": {"mode": "copy"},
        "pkt default": {},
    },
    "all-to-all": {
        "pkt low-latency": {"mode": "low_latency"},
        "pkt push": {"mode": "push"},
        "pkt pull": {"mode": "pull"},
        "pkt copy": {"mode": "copy"},
        "pkt copy, captured": {"mode": "copy"},
        "pkt default": {},
        "pkt default, captured": {},
    },
    "broadcast": {
        "pkt low-latency": {"mode": "low_latency"},
        "pkt pass on": {"mode": "pass_on"},
        "pkt pass on, blocks of 4096": {"mode": "pass_on", "block": 4096},
        "pkt default": {},
    },
}
Run = Callable[[], torch.Tensor]


def variants(device: str, quick: bool) -> list[str]:
    ours = list(dict.fromkeys(name for options in OURS.values() for name in options))
    if device == "cpu":  # there a captured variant is the same call
        return [name for name in ours if not name.endswith("captured")]
    return [*BASELINES, *ours]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    messages, squares, sequences = ({"8 KiB": 8192}, (64,), {"32": 32}) if quick else (MESSAGES, SQUARES, SEQUENCES)
    heads, width = (16, 16) if quick else (128, 128)
    found: dict[str, dict[str, Any]] = {
        f"all-reduce {name}": {"kind": "all-reduce", "shape": [n // 2]} for name, n in messages.items()
    }
    if not quick:  # the last part is not a multiple of 16 bytes
        found["all-reduce 16 MiB + 2"] = {"kind": "all-reduce", "shape": [MESSAGES["16 MiB"] // 2 + 1]}
    small = {name: [n // 2] for name, n in messages.items() if n <= SMALL}
    for kind in ("all-gather", "reduce-scatter", "all-to-all"):
        found |= {f"{kind} {name}": {"kind": kind, "shape": shape} for name, shape in small.items()}
    for N in squares:
        for kind in ("all-gather", "reduce-scatter"):
            found[f"{kind} {N} x {N}"] = {"kind": kind, "shape": [N, N], "dim": 0}
            found[f"{kind} columns {N} x {N}"] = {"kind": kind, "shape": [N, N], "dim": 1}
    found |= {
        f"all-to-all heads S = {s}": {"kind": "all-to-all", "shape": [1, n, heads, width]} for s, n in sequences.items()
    }
    return found | {f"broadcast {name}": {"kind": "broadcast", "shape": [n // 2]} for name, n in messages.items()}


def case(world: Any, kind: str, shape: list[int], dim: int = 0) -> Case:
    """One size of a collective. shape: of the whole tensor; axes that the ranks share are cut to a multiple of size.
    dim: the dimension of all-gather and reduce-scatter."""
    import pkt

    size, device = world.size, world.torch_device
    headed = len(shape) == 4  # the all-to-all of Ulysses
    scatter, gather = (2, 1) if headed else (0, 0)
    split = {"all-to-all": (scatter, gather), "all-reduce": (), "broadcast": ()}.get(kind, (dim,))
    whole = [n // size * size if axis in split else n for axis, n in enumerate(shape)]

    def shared(axis: int) -> list[int]:
        return [n // size if a == axis else n for a, n in enumerate(whole)]

    given = {"all-gather": shared(dim), "all-to-all": shared(gather) if headed else whole}.get(kind, whole)
    result = {"reduce-scatter": shared(dim), "all-to-all": shared(scatter) if headed else whole}.get(kind, whole)
    x = pkt.empty(given, dtype=torch.bfloat16, world=world)
    x.copy_(normal(tuple(given), world.rank, device))
    out = x if kind == "broadcast" else pkt.empty(result, dtype=torch.bfloat16, world=world)
    world.barrier()

    def exact() -> torch.Tensor:
        inputs = (normal(tuple(given), r, device) for r in range(size))
        if kind == "all-gather":
            return gathered(world.rank, list(inputs), dim).float()
        if kind == "all-to-all":
            return exchanged(world.rank, list(inputs), scatter, gather).float()
        if kind == "broadcast":
            return next(inputs).float()
        total = torch.zeros(given, device=device)
        for one in inputs:
            total += one
        return total if kind == "all-reduce" else total.chunk(size, dim)[world.rank].contiguous()

    calls: dict[str, Callable[..., torch.Tensor]] = {
        "all-reduce": lambda **options: all_reduce(x, out, world=world, **options),
        "all-gather": lambda **options: all_gather(x, out, dim=dim, world=world, **options),
        "reduce-scatter": lambda **options: reduce_scatter(x, out, dim=dim, world=world, **options),
        "all-to-all": lambda **options: all_to_all(x, out, scatter=scatter, gather=gather, world=world, **options),
        "broadcast": lambda **options: broadcast(x, 0, world=world, **options),
    }
    runs: dict[str, Run] = {name: partial(calls[kind], **options) for name, options in OURS[kind].items()}
    if device.type == "cuda":
        runs |= _baselines(kind, x, out, dim, size)
    runs = {name: captured(run) if name.endswith("captured") else run for name, run in runs.items()}
    sent = {"all-reduce": 2.0 * (size - 1) / size, "broadcast": 1.0, "all-gather": size - 1.0}.get(
        kind, (size - 1) / size
    )
    # Only root scales x, so that a rank that misses a broadcast keeps a wrong x.
    scaled = x if kind != "broadcast" or world.rank == 0 else torch.zeros(1, device=device)
    idle = [name for name in runs if "low-latency" in name and x.nbytes > SMALL]
    idle += [name for name in runs if "copy" in name and x.nbytes < LARGE and device.type == "cuda"]
    skipped = dict.fromkeys(idle, "not timed at this size")
    return Case(nbytes=sent * x.nbytes, variants=runs, exact=exact, scaled=scaled, skipped=skipped)


def _baselines(kind: str, x: torch.Tensor, out: torch.Tensor, dim: int, size: int) -> dict[str, Run]:
    import torch.distributed as dist

    plain, result = x.plain(), out.plain()  # type: ignore[attr-defined]
    if kind == "broadcast":
        return {"NCCL": lambda: _after(result, dist.broadcast(result, 0))}
    if kind == "all-to-all" and plain.ndim == 1:
        return {"NCCL": lambda: _after(result, dist.all_to_all_single(result, plain))}
    if kind == "all-to-all":
        staged, parts = torch.empty_like(plain), plain.view(plain.shape[1], size, -1).movedim(1, 0)

        def exchange() -> torch.Tensor:
            staged.view(parts.shape).copy_(parts)
            return _after(result, dist.all_to_all_single(result.view(-1), staged.view(-1)))

        return {"NCCL": exchange}
    if kind == "all-gather" and dim == 0:
        return {"NCCL": lambda: _after(result, dist.all_gather_into_tensor(result, plain))}
    if kind == "all-gather":
        shards = torch.empty(size, *plain.shape, dtype=plain.dtype, device=plain.device)

        def gather() -> torch.Tensor:
            dist.all_gather_into_tensor(shards.view(-1, plain.shape[1]), plain)
            result.view(plain.shape[0], size, plain.shape[1]).copy_(shards.movedim(0, 1))
            return result

        return {"NCCL": gather}
    symmetric: list[torch.Tensor] = []

    def torch_input() -> torch.Tensor:
        if not symmetric:
            symmetric.append(torch_symmetric(plain))
        return symmetric[0].copy_(plain)

    if kind == "reduce-scatter":
        turned = torch.empty(size, *result.shape, dtype=plain.dtype, device=plain.device) if dim else plain

        def scatter() -> torch.Tensor:
            if dim:
                turned.copy_(plain.view(plain.shape[0], size, -1).movedim(1, 0))
            return _after(result, dist.reduce_scatter_tensor(result, turned.view(size * result.shape[0], -1)))

        return {
            "NCCL": scatter,
            "torch symm_mem": lambda: torch.ops.symm_mem.reduce_scatter_out(
                torch_input(), group_name(), dim == 1, result
            ),
        }

    def reduce() -> torch.Tensor:
        result.copy_(plain)
        return _after(result, dist.all_reduce(result))

    return {
        "NCCL": reduce,
        "NCCL, captured": reduce,
        "torch one-shot": lambda: torch.ops.symm_mem.one_shot_all_reduce(torch_input(), "sum", group_name()),
        "torch two-shot": lambda: torch.ops.symm_mem.two_shot_all_reduce_(torch_input(), "sum", group_name()),
    }


def _after(result: torch.Tensor, work: Any) -> torch.Tensor:
    """`result`. The caller's expression for `work` has launched the collective."""
    return result


if __name__ == "__main__":
    sys.exit(main("collectives", TITLE, TARGETS))
