"""The world of an operator's call, and whether all its ranks made the same call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pkt.errors import CollectiveMismatch, DtypeError
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import Workspace, World, current_world
from pkt.wording import FIRST_CALL


def world_of(call: str, world: World | None, *arguments: Any) -> World:
    """`world`, or that of the first symmetric tensor or workspace, or the current one. Raises DtypeError."""
    if world is not None:
        if not isinstance(world, World):
            raise DtypeError.argument(call, "world", type(world).__name__, "a pkt.World", current_world(call).rank)
        return world
    for argument in arguments:
        # A failing isinstance is slow, and most arguments are None or plain tensors.
        if argument is None or type(argument) is torch.Tensor:
            continue
        if isinstance(argument, (SymmetricTensor, Workspace)):
            return argument.world
    return current_world(call)


class Agreed(NamedTuple):
    """A tensor as the ranks compare it."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    offset: int | None  # in the heap, if peers access it

    def __str__(self) -> str:
        where = "" if self.offset is None else f" at heap offset {self.offset}"
        sizes = ", ".join(map(str, self.shape)) + "," * (len(self.shape) == 1)
        return f"({sizes}) {str(self.dtype).removeprefix('torch.')}{where}"


def check_agreed(call: str, world: World, **arguments: Any) -> None:
    """Collective the first time a signature is seen: every rank made the same call. Raises CollectiveMismatch.
    Symmetric tensors count with their offset in the heap, because peers find them by arithmetic."""
    if world.handed_in is not None:
        arguments["workspace"] = world.handed_in
    signature = tuple(_signature(value, world) for value in arguments.values())

    def compare() -> bool:
        said = ", ".join(f"{n}={v if isinstance(v, Agreed) else repr(v)}" for n, v in zip(arguments, signature))
        # The text is the value, and not the name of the exchange: ranks that differ all see that, and can go on.
        everybody = world.backend.exchange(f"{call}({said})", FIRST_CALL)
        if len(set(everybody)) > 1:
            raise CollectiveMismatch.calls(dict(enumerate(everybody)))
        return True

    world.keep(("pkt.kernels", "agreed", call, signature), compare)


def _signature(value: Any, world: World) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    offset = value.data_ptr() - world.span.start if isinstance(value, SymmetricTensor) else None
    return Agreed(tuple(value.shape), value.dtype, offset)
