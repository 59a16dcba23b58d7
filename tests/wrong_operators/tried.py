"""What is tried with an operator: right operands, and what is wrong for each name, by its error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from pkt.errors import DtypeError, PktError, ShapeError
from pkt.kernels.all_gather_grouped_matmul import Gathered
from pkt.kernels.dispatch import Dispatched

Bad = Mapping[str, Mapping[type[PktError], tuple[Any, ...]]]
HUGE = (1 << 31, 1 << 40, 1 << 70)
NO_INTEGER = (2.5, "2", (2,), [], torch.ones(9, 9), b"2", True)
NO_NUMBER = ("1", [], (1.0,), True, 1j, torch.ones(1))
COUNT = {ShapeError: (0, -1, *HUGE), DtypeError: NO_INTEGER}
"""Of a setting that counts something, from 1."""
AT_LEAST_1 = {ShapeError: (0, -1, *HUGE), DtypeError: (*NO_INTEGER, None)}
NO_FLAG = (2, None, "True", [True])
TILES_DIFFER = (16, 16, 16), (16, 32, 16)


class Tried(NamedTuple):
    """One operator. function: what users call. right: its operands and the keywords without a default, by name; those
    that lie in a handle have its name, too, as "dispatched.tokens". wrong: values by name and error. differ: values
    that are right on each of two ranks, and on both together a CollectiveMismatch."""

    function: Callable[..., Any]
    right: Callable[[], dict[str, Any]]
    wrong: Callable[[], Bad]
    differ: Callable[[], Mapping[str, tuple[Any, Any]]] = dict


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def apart(*shape: int) -> torch.Tensor:
    """Ones of which no two lie together."""
    return torch.ones(*shape, 2)[..., 0]


def parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, as the function takes them: those of a handle's parts in a handle."""
    found = {n: v for n, v in values.items() if "." not in n}
    for name, kind in (("dispatched", Dispatched), ("gathered", Gathered)):
        parts = {n.partition(".")[2]: v for n, v in values.items() if n.startswith(f"{name}.")}
        if parts and name not in found:
            found[name] = kind(**{**dict.fromkeys(kind._fields), **parts})
    return found
