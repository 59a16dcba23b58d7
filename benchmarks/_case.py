"""What a benchmark of an operator makes of one size.

A benchmark module has `variants(device, quick)`, the names in the order of the table, `cases(quick)`, label -> keyword
arguments, and `case(world, **arguments)`, which makes a case on a rank. Inputs are standard normal.

What becomes of it: _check.py finds whether a variant is right and _timing.py what it takes, _job.py does both on each
rank, _run.py starts the jobs, _report.py shows the rows, _results.py writes them, and _command.py is asked for it all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

LINK = 390e9  # bytes a second out of one GPU: what the copy engines reach on an H200 with 18 links


@dataclass
class Case:
    """One size on one rank. `variants`: name -> what computes the result once; `exact()`: the result in fp32, made
    when it is first needed; `scaled`: an input that the result is linear in, multiplied between launches."""

    nbytes: float  # that leave a GPU at least
    variants: dict[str, Callable[[], torch.Tensor]]
    exact: Callable[[], torch.Tensor]
    scaled: torch.Tensor
    flops: float = 0.0  # on a GPU
    unchecked: frozenset[str] = frozenset()  # variants that compute something else: a part, with no communication
    skipped: dict[str, str] = field(default_factory=dict)  # variant -> why there is none of it at this size


def normal(shape: tuple[int, ...], seed: int, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    """Standard normal bf16, the same on every rank for a seed."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).mul_(scale).bfloat16()


def captured(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`run` as a CUDA graph: called once to compile and allocate, then captured, then replayed, with the same result
    tensor each time. Without a GPU `run` itself."""
    if not torch.cuda.is_available():
        return run
    made: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = []

    def replay() -> torch.Tensor:
        if not made:
            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = run()
            made.append((graph, result))
        made[0][0].replay()
        return made[0][1]

    return replay
