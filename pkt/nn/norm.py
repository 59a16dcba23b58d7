"""Norms of a part of the tokens: `sequence_parallel`."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from pkt.runtime.world import World, current_world

from .exchange import sum_gradient
from .sharded import copied, local

M = TypeVar("M", bound=nn.Module)


class SequenceParallel:
    """In front of a module's own class: the gradients of its parameters are summed over the ranks."""

    world: World
    _parameters: dict[str, Any]

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        own = dict(self._parameters)
        for name, parameter in own.items():
            if parameter is not None:
                self._parameters[name] = sum_gradient(local(parameter), self.world)
        try:
            return super().forward(*arguments, **keywords)  # type: ignore[misc]
        finally:
            self._parameters.update(own)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copied(self, memo)


def sequence_parallel(module: M, *, world: World | None = None) -> M:
    """`module`, a norm or another function of single tokens, for a rank that has a part of the tokens.

    Its parameters are the same on every rank and the forward pass moves nothing. In the backward pass the ranks sum the
    parameters' gradients, one all-reduce for each parameter. The module is changed, and returned: its class becomes a
    subclass, its parameters and their names stay. A second call changes nothing. world: the current one where None.
    """
    if not isinstance(module, SequenceParallel):
        made = type(module)
        world = current_world("pkt.nn.sequence_parallel") if world is None else world
        module.__class__ = type(f"SequenceParallel{made.__name__}", (SequenceParallel, made), {})
        module.world = world  # type: ignore[assignment]
    return module
