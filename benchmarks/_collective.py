"""What a collective's own benchmark module, benchmarks/NAME.py, adds to the operator's declaration."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from pkt.kernels.operator import Operator, operators

Run = Callable[[], torch.Tensor]
Arguments = dict[str, Any]
MESSAGES = {"16 KiB": 1 << 14, "128 KiB": 1 << 17, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "256 MiB": 1 << 28}
SQUARES = (8192, 32768)  # N of N x N matrices to gather or scatter
SMALL = 1 << 20  # most bytes for which forms with flagged words are timed
LARGE = 1 << 24  # least bytes for which the copy engines are timed


def messages(quick: bool, most: int = MESSAGES["256 MiB"]) -> dict[str, Arguments]:
    """Vectors of up to `most` bytes: label -> arguments of a case."""
    sizes = {"8 KiB": 8192} if quick else MESSAGES
    return {name: {"shape": [n // 2]} for name, n in sizes.items() if n <= most}


def squares(quick: bool) -> dict[str, Arguments]:
    """Matrices along both dimensions, and small vectors: label -> arguments of a case."""
    found = messages(quick, SMALL)
    for N in (64,) if quick else SQUARES:
        found |= {f"{N} x {N}": {"shape": [N, N], "dim": 0}, f"columns {N} x {N}": {"shape": [N, N], "dim": 1}}
    return found


def total(inputs: Iterator[torch.Tensor]) -> torch.Tensor:
    """The sum of `inputs` in fp32, one at a time: all of them may not fit into memory."""
    found = next(inputs).float()
    for one in inputs:
        found += one
    return found


def after(result: torch.Tensor, work: Any) -> torch.Tensor:
    """`result`. The caller's expression for `work` has launched the collective."""
    return result


@dataclass(frozen=True)
class Collective:
    """How to measure a collective of one operand x.

    kind: its name in labels. sent: least bytes that leave each GPU, as a multiple of x's, on so many ranks.
    exact(inputs, rank, size, **arguments): the result of a rank in fp32, from the ranks' x.
    baselines(x, out, size, **arguments): calls of other libraries on plain tensors. names: those of all baselines.
    cases(quick): label -> the shape of the whole tensor and arguments of the operator.
    axes(**arguments): the axes of the whole tensor that x and the result have a share of; None where they are whole.
    blocks: further block sizes to time, by form. captured: forms, and "default", to time as a replay of a graph, too.
    targets: case -> least limit / time that pkt should reach on 4 ranks.
    """

    kind: str
    sent: Callable[[int], float]
    exact: Callable[..., torch.Tensor]
    baselines: Callable[..., dict[str, Run]]
    names: tuple[str, ...] = ("NCCL",)
    cases: Callable[[bool], dict[str, Arguments]] = messages
    axes: Callable[..., tuple[int | None, int | None]] = lambda: (None, None)
    blocks: Mapping[str, int] = field(default_factory=dict)
    captured: tuple[str, ...] = ()
    targets: Mapping[str, float] = field(default_factory=dict)


def module_of(name: str) -> ModuleType | None:
    """The benchmark module of an operator, benchmarks/NAME.py; None where it has none."""
    there = importlib.util.find_spec(f"benchmarks.{name}")
    return importlib.import_module(f"benchmarks.{name}") if there else None


def collectives() -> dict[str, tuple[Operator, Collective]]:
    """Operators of one tensor of any shape that have a benchmark module."""
    found = {}
    for name, operator in operators().items():
        module = module_of(name) if [o.shape for o in operator.tensors.values()] == ["..."] else None
        if module:
            found[name] = operator, module.COLLECTIVE
    return found
