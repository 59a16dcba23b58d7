"""Copies of tensors that a form cannot use where they are, so that collectives take any tensor, as NCCL does.

| tensor | what is made | kept |
|---|---|---|
| not contiguous, or with torch's negative bit | a contiguous copy | no |
| plain, and peers access it | a copy in the symmetric heap, for all calls of its size | as other buffers, see kept.py |
| symmetric, not contiguous, and peers access it | the same | the same |

An operand is copied before the launch, and what is written is copied back after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pkt.errors import ShapeError
from pkt.runtime.memory.factories import empty
from pkt.runtime.memory.pool import adopt
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from .declaration import Call, Launch


def contiguous(call: Call, written: str, but: Sequence[str] = ()) -> dict[str, Callable[[], torch.Tensor]]:
    """In the place of operands that are not contiguous, or whose memory holds the negated elements, others in `call`;
    what makes them at each launch, by name. but: operands that may have any strides. Raises ShapeError if elements of
    `written` share memory."""
    made: dict[str, Callable[[], torch.Tensor]] = {}
    for name, tensor in call.tensors.items():
        if tensor is None or (not tensor.is_neg() and (name in but or tensor.is_contiguous())):
            continue
        if name == written and torch._debug_has_internal_overlap(tensor) == 1:
            strides = f"{tuple(tensor.shape)} with strides {tuple(tensor.stride())}"
            raise ShapeError.argument(call.name, name, strides, "elements that share no memory", call.world.rank)
        make = functools.partial(torch.empty, tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device)
        made[name], call.tensors[name] = make, make()
    return made


def foreign(call: Call, but: Sequence[str]) -> dict[str, torch.Tensor]:
    """Symmetric tensors of other worlds, by name, as plain ones: this world's ranks cannot reach them. but: those that
    must be symmetric."""
    given = [(name, tensor) for name, tensor in call.tensors.items() if isinstance(tensor, SymmetricTensor)]
    with torch._C.DisableTorchFunctionSubclass():
        return {n: t.as_subclass(torch.Tensor) for n, t in given if n not in but and not reached(t, call.world)}


def unreachable(call: Call, names: Sequence[str]) -> list[str]:
    """Those of the tensors `names` that are plain: peers cannot access them."""
    given = [(name, call.tensors[name]) for name in names if call.tensors[name] is not None]
    return [name for name, tensor in given if not reached(tensor, call.world)]


def reached(tensor: torch.Tensor, world: World) -> bool:
    """Whether peers can access a tensor."""
    if isinstance(tensor, SymmetricTensor):
        return tensor._allocation.heap.owner in world.lineage
    return adopt(tensor, world) is not None


def buffer(call: Call, name: str) -> torch.Tensor:
    """The symmetric copy of a tensor. Collective the first time for its size, up to the next power of two."""
    like, world = call.tensors[name], call.world
    room = 1 << max(like.nbytes - 1, 15).bit_length()

    def make() -> SymmetricTensor:
        return empty(room, dtype=torch.uint8, name=f"kernels.staged_{name}", world=world)

    memory = world.keep(("pkt.kernels", "staged", name, room), make)
    return memory[: like.nbytes].view(like.dtype).view(like.shape)


def staged(
    launch: Launch,
    copies: Mapping[int, Callable[[], torch.Tensor]],
    read: Sequence[int],
    written: int,
    world: World,
    back: bool = True,
) -> Launch:
    """`launch` of copies. copies: what returns a copy's memory, by place among the tensors. read: places of operands;
    written: of the tensor that is written, if back. It is returned."""

    @torch.no_grad()
    def through_copies(*tensors: Any) -> torch.Tensor:
        if world.streams is not None:
            world.streams.follow()  # the last call, on whatever stream, has read its copies
        given = list(tensors)
        for at, memory in copies.items():
            given[at] = memory()
            if at in read:
                given[at].copy_(tensors[at])
        result = launch(*given)
        if written not in copies:
            return result
        if back:
            tensors[written].copy_(given[written])
        return (tensors[written], *result[1:]) if isinstance(result, tuple) else tensors[written]

    return through_copies
