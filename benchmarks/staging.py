"""Benchmark of collectives of tensors that are not symmetric, beside NCCL, bf16.

    python -m benchmarks.staging --ranks 2                  on GPUs, some minutes; results/staging_2.json
    python -m benchmarks.staging --device cpu --quick       check in the simulator; time nothing

"plain": ordinary contiguous tensors. "strided": every second column of a matrix, operand and result. NCCL takes
contiguous tensors alone, so there it has a contiguous copy before and one behind. "symmetric": in pkt's heap, which
saves pkt its copies. "captured": one replay of a CUDA graph.

An all-reduce is also timed in place. Its results are not checked there, but in the tests.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from benchmarks._case import Case, captured, normal
from benchmarks._collective import MESSAGES, Collective, Run, collectives
from benchmarks._command import main
from pkt.kernels.operator import Operator

TITLE = "Collectives of tensors that are not symmetric, bf16"
KINDS = ("plain", "strided")
ROW = 1024  # elements of a row of the matrices


def variants(device: str, quick: bool) -> list[str]:
    ours = ["pkt default", "pkt default, symmetric"]
    if device == "cpu":
        return ours
    names = ["NCCL", *ours, "NCCL in place", "pkt default, in place"]
    return [name for known in names for name in (known, f"{known}, captured")]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    sizes = {"16 KiB": MESSAGES["16 KiB"]} if quick else MESSAGES
    return {
        f"{own.kind}, {kind}, {label}": {"name": name, "kind": kind, "nbytes": nbytes}
        for name, (_, own) in collectives().items()
        for kind in KINDS
        for label, nbytes in sizes.items()
    }


def matrix(rows: int, kind: str, device: torch.device) -> torch.Tensor:
    """Zeros (rows, ROW), contiguous or every second column of a wider one."""
    wide = torch.zeros(rows, ROW * (2 if kind == "strided" else 1), dtype=torch.bfloat16, device=device)
    return wide[:, ::2] if kind == "strided" else wide


def nccl(own: Collective, x: torch.Tensor, out: torch.Tensor, size: int, written: str) -> Run:
    """The collective by NCCL, with contiguous copies of what is not contiguous."""
    if x.is_contiguous():
        return own.baselines(x, out, size)["NCCL"]
    packed, result = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, out))
    run = own.baselines(packed, result, size)["NCCL"]

    def staged() -> torch.Tensor:
        packed.copy_(x)
        run()
        return x.copy_(packed) if written == "x" else out.copy_(result)

    return staged


def case(world: Any, name: str, kind: str, nbytes: int) -> Case:
    """A collective of `nbytes`: of x where a rank's whole tensor travels, else of the gathered or scattered tensor."""
    import pkt

    operator: Operator
    operator, own = collectives()[name]
    size, device = world.size, world.torch_device
    rows = max(nbytes // (2 * ROW) // size, 1) * size
    axes = own.axes()
    given, result = (rows // size if axis == 0 and len(set(axes)) > 1 else rows for axis in axes)
    x, out = matrix(given, kind, device), matrix(result, kind, device)
    near, there = (pkt.zeros(n, ROW, dtype=torch.bfloat16, world=world) for n in (given, result))
    for one in (x, near):
        one.copy_(normal((given, ROW), world.rank, device))
    world.barrier()

    def exact() -> torch.Tensor:
        return own.exact((normal((given, ROW), r, device) for r in range(size)), world.rank, size)

    takes_out = "out" in operator.names
    call = partial(operator.function, world=world)
    runs: dict[str, Run] = {
        "pkt default": partial(call, *((x, out) if takes_out else (x,))),
        "pkt default, symmetric": partial(call, *((near, there) if takes_out else (near,))),
    }
    if device.type == "cuda":
        runs["NCCL"] = nccl(own, x, out, size, operator.written)
        if name == "all_reduce":
            runs["pkt default, in place"] = partial(call, x, x)
            runs["NCCL in place"] = in_place(x)
        runs |= {f"{variant}, captured": captured(run) for variant, run in runs.items()}
    # Only root scales what is broadcast, so that a rank that misses it keeps a wrong x.
    scaled = x if operator.written != "x" or world.rank == 0 else torch.zeros(1, device=device)
    unchecked = [variant for variant in runs if "in place" in variant or "symmetric" in variant]
    return Case(
        nbytes=own.sent(size) * given * ROW * 2,
        variants=runs,
        exact=exact,
        scaled=scaled,
        unchecked=frozenset(unchecked),
    )


def in_place(x: torch.Tensor) -> Run:
    """NCCL's all-reduce of x in place, through a contiguous copy if x is not contiguous."""
    import torch.distributed as dist

    packed = x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def run() -> torch.Tensor:
        if packed is not x:
            packed.copy_(x)
        dist.all_reduce(packed)
        return x if packed is x else x.copy_(packed)

    return run


if __name__ == "__main__":
    sys.exit(main("staging", TITLE))
