"""Benchmark of the collectives in bf16: all their forms, beside NCCL and torch's symmetric memory.

    python -m benchmarks.collectives                       4 GPUs
    python -m benchmarks.collectives --device cpu --quick  check in the simulator; time nothing

A collective's own module, as benchmarks/all_gather.py, has its sizes, its baselines and the least bytes that leave each
GPU, which are the limit of a case. A short message also needs the flight of a signal, 1.5 us one way, which the limit
ignores.

"columns": along the last dimension, with the result in the original layout. "captured": one replay of a CUDA graph.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from benchmarks._case import Case, captured, normal
from benchmarks._collective import LARGE, SMALL, Collective, Run, collectives
from benchmarks._command import main
from pkt.kernels.operator import Operator

TITLE = "Collectives, bf16"
SHARE = 0.32  # of the seconds of benchmarks/operators.py
TARGETS = {case: target for _, own in collectives().values() for case, target in own.targets.items()}


def ours(operator: Operator, own: Collective) -> dict[str, dict[str, Any]]:
    """Variants by name: every form, and the operator's choice where none is named."""
    found: dict[str, dict[str, Any]] = {}
    for mode in (*operator.forms, "default"):
        found[f"pkt {mode}"] = options = {} if mode == "default" else {"mode": mode}
        if mode in own.blocks:
            found[f"pkt {mode}, blocks of {own.blocks[mode]}"] = {**options, "block": own.blocks[mode]}
        if mode in own.captured:
            found[f"pkt {mode}, captured"] = options
    return found


def variants(device: str, quick: bool) -> list[str]:
    found = collectives().values()
    names = dict.fromkeys(name for operator, own in found for name in ours(operator, own))
    if device == "cpu":  # there a captured variant is the same call
        return [name for name in names if not name.endswith("captured")]
    return [*dict.fromkeys(name for _, own in found for name in own.names), *names]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    return {
        f"{own.kind} {label}": {"name": name, **arguments}
        for name, (_, own) in collectives().items()
        for label, arguments in own.cases(quick).items()
    }


def case(world: Any, name: str, shape: list[int], **arguments: Any) -> Case:
    """One size of a collective. shape: of the whole tensor; axes that the ranks share are cut to a multiple of size."""
    import pkt

    operator, own = collectives()[name]
    size, device = world.size, world.torch_device
    axes = own.axes(**arguments)
    whole = [n // size * size if axis in axes else n for axis, n in enumerate(shape)]
    given, result = ([n // size if a == axis else n for a, n in enumerate(whole)] for axis in axes)
    if len(set(axes)) == 1:  # parts of one axis change places
        given = result = whole
    x = pkt.empty(given, dtype=torch.bfloat16, world=world)
    x.copy_(normal(tuple(given), world.rank, device))
    out = pkt.empty(result, dtype=torch.bfloat16, world=world)
    tensors = (x, out) if "out" in operator.names else (x,)
    world.barrier()

    def exact() -> torch.Tensor:
        inputs = (normal(tuple(given), r, device) for r in range(size))
        return own.exact(inputs, world.rank, size, **arguments)

    runs: dict[str, Run] = {
        variant: partial(operator.function, *tensors, world=world, **arguments, **options)
        for variant, options in ours(operator, own).items()
    }
    if device.type == "cuda":
        runs |= own.baselines(x.plain(), out.plain(), size, **arguments)
    runs = {variant: captured(run) if variant.endswith("captured") else run for variant, run in runs.items()}
    # Only root scales what is broadcast, so that a rank that misses it keeps a wrong x.
    scaled = x if operator.written != "x" or world.rank == 0 else torch.zeros(1, device=device)
    idle = [variant for variant in runs if "low_latency" in variant and x.nbytes > SMALL]
    idle += [variant for variant in runs if "copy" in variant and x.nbytes < LARGE and device.type == "cuda"]
    skipped = dict.fromkeys(idle, "not timed at this size")
    return Case(
        nbytes=own.sent(size) * x.nbytes,
        variants=runs,
        exact=exact,
        scaled=scaled,
        optional=frozenset(f"pkt {mode}" for mode in operator.forms),  # one may need multicast
        skipped=skipped,
    )


if __name__ == "__main__":
    sys.exit(main("collectives", TITLE, TARGETS))
