"""Operands, results and worlds that the properties share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import pkt
from pkt.kernels.declaration import Case
from pkt.kernels.operator import Operator
from tests.conformance import inputs
from tests.kernels.helpers import on_ranks


def on_nodes(operator: Operator, mode: str, ranks: int, run: Callable[[Any], Any], **options: Any) -> None:
    """`on_ranks` in a world where the form runs: for several nodes at least two of them, each of one rank."""
    across = mode in operator.across
    on_ranks(max(ranks, 1 + across), run, node_size=1 if across else None, **options)


def dtypes_of(operator: Operator, mode: str) -> tuple[torch.dtype, ...]:
    """The dtypes that the first operand may have in a form."""
    return operator.form(mode).dtypes or next(iter(operator.tensors.values())).dtypes


def memory_like(operator: Operator, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An operand of any values, for a first one of `dtype`."""
    operand = operator.tensors[name]
    of = inputs.result_dtype(operator, Case(), dtype) if operand.as_result else dtype
    return torch.empty(shape[::-1], dtype=of).t() if operand.turned else torch.empty(shape, dtype=of)


def given(
    world: Any, operator: Operator, mode: str | None, operands: dict[str, Any], out: Any = None,
    offset: int | tuple[int, ...] = 0, transposed: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """This rank's operands, symmetric where the form's peers access them, and `out` where the function takes one.
    offset: elements before a tensor's first one; of several, each rank's for its own tensors. transposed: as transposed
    views where the operator takes those."""

    def start(name: str) -> int:
        return offset if isinstance(offset, int) else 0 if name in symmetric else offset[world.rank]

    symmetric = operator.form(mode).symmetric if mode else tuple(operator.names)
    mine = {
        n: ts
        and inputs.placed(
            world,
            ts[world.rank],
            n in symmetric,
            start(n),
            transposed and operator.tensors[n].transposed,
        )
        for n, ts in operands.items()
    }
    return mine | ({"out": out} if "out" in operator.names else {})


def result_for(
    world: Any, operator: Operator, mode: str, case: Case, like: torch.Tensor, dtype: torch.dtype, kind: str
) -> Any:
    """`out` of a kind: None for "new", an own tensor for "given", one in the heap for "symmetric"."""
    if "out" not in operator.names or kind == "x":
        return None
    dtype = inputs.result_dtype(operator, case, dtype)
    if "out" in operator.form(mode).symmetric or kind == "symmetric":
        return pkt.empty(tuple(like.shape), dtype=dtype)
    return None if kind == "new" else torch.empty(tuple(like.shape), dtype=dtype, device=world.torch_device)
