"""One size of an operator's benchmark: its inputs, its reference and its variants.

A benchmark module has three functions. `variants(device, quick)` returns names in the order of the table.
`cases(quick)` maps labels to keyword arguments. `case(world, **arguments)` makes a case on a rank. Inputs are standard
normal.

_command.py is the command line. It calls _run.py, which starts jobs; _job.py, on each rank, checks variants with
_check.py and times them with _timing.py; _report.py shows the rows, and _results.py writes them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

LINK = 390e9  # bytes a second out of one GPU, reached by the copy engines of an H200 with 18 links


@dataclass
class Case:
    """One size on one rank."""

    nbytes: float  # least number of bytes that leave a GPU
    variants: dict[str, Callable[[], torch.Tensor]]  # name -> computes the result once
    exact: Callable[[], torch.Tensor]  # the result in fp32; called when it is first needed
    scaled: torch.Tensor | None  # an input in which the result is linear; multiplied between launches
    flops: float = 0.0  # on a GPU
    more: dict[str, float] = field(default_factory=dict)  # variant -> flops, where it computes more
    unchecked: frozenset[str] = frozenset()  # variants that compute something else: a part, with no communication
    optional: frozenset[str] = frozenset()  # variants that are left out if they raise Unsupported
    skipped: dict[str, str] = field(default_factory=dict)  # variant -> why it is left out at this size
    fewer: dict[str, float] = field(default_factory=dict)  # variant -> bytes, where it sends fewer than `nbytes`
    bounds: dict[str, float] = field(default_factory=dict)  # variant -> greatest error, where it is not _check.BOUND


def normal(shape: tuple[int, ...], seed: int, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    """Standard normal bf16, the same on every rank for a seed."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).mul_(scale).bfloat16()


def routed(
    tokens: int, experts: int, chosen: int, seed: int, device: torch.device, skewed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of tokens, at random or skewed by Zipf's law, and their weights, alike on ranks for a seed."""
    generator = torch.Generator(device=device).manual_seed(seed)
    likely = 1 / torch.arange(1, experts + 1, device=device) if skewed else torch.ones(experts, device=device)
    idx = torch.multinomial(likely.expand(tokens, -1), chosen, generator=generator)
    return idx, torch.rand(tokens, chosen, generator=generator, device=device)


def captured(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`run` as a CUDA graph, whose replays return the same tensor each time. The first call runs once to compile and
    allocate, then captures. Without a GPU this is `run` itself."""
    if not torch.cuda.is_available():
        return run
    made: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = []

    def replay() -> torch.Tensor:
        if not made:
            run()
            torch.cuda.synchronize()
            gc.collect()  # graphs of other cases: to destroy one during a capture would end it
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = run()
            made.append((graph, result))
        made[0][0].replay()
        return made[0][1]

    return replay
