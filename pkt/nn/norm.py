"""Norms of a part of the tokens: `sequence_parallel`. Norms with the sum before them: `fused_norms`."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from pkt.errors import Unsupported
from pkt.kernels.agreement import world_of
from pkt.runtime.world import World

from .exchange import sum_gradient
from .sharded import check_transforms, held, local

M = TypeVar("M", bound=nn.Module)


class SequenceParallel:
    """In front of a module's own class: the gradients of its parameters are summed over the ranks."""

    world: World
    parameter_names: tuple[str, ...]
    _parameters: dict[str, Any]

    def summed(self: Any, name: str) -> Any:
        """A parameter whose gradient is summed; None where there is none."""
        check_transforms("pkt.nn.sequence_parallel", self.world)
        parameter = held(self, name, self.world)
        return None if parameter is None else sum_gradient(local(parameter), self.world)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        own = dict(self._parameters)
        self._parameters.update({name: self.summed(name) for name in dict.fromkeys((*self.parameter_names, *own))})
        try:
            return super().forward(*arguments, **keywords)  # type: ignore[misc]
        finally:
            self._parameters.update(own)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For `copy` and `pickle`, which cannot find this class by its name."""
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        _, (kind, *given), *state = reduced
        return _new, (kind.__bases__[1], *given), *state


# Without a change to the module, which torch.compile refuses inside torch.utils.checkpoint.
class _RMSNorm(SequenceParallel):
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.summed("weight"), self.eps)


class _LayerNorm(SequenceParallel):
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.summed("weight"), self.summed("bias"), self.eps)


_OF_TORCHS = {nn.RMSNorm.forward: _RMSNorm, nn.LayerNorm.forward: _LayerNorm}


def sequence_parallel(module: M, *, world: World | None = None) -> M:
    """`module`, a norm or another function of single tokens, for a rank that has a part of the tokens.

    Its parameters are the same on every rank and the forward pass moves nothing. In the backward pass the ranks sum the
    parameters' gradients, one all-reduce for each parameter. The module is changed, and returned: its class becomes a
    subclass, its parameters and their names stay. world: the current one where None. Raises Unsupported if modules
    inside this one have parameters.
    """
    call = "pkt.nn.sequence_parallel"
    world = world_of(call, world)
    if has_inner_parameters(module):
        found = f"found {type(module).__name__}, inside which modules have parameters of their own"
        raise Unsupported.here(f"rank {world.rank}: {call}", found, "call it for the norms inside")
    if not isinstance(module, SequenceParallel):
        kind: Any = type(module)
        module.__class__ = _subclass(kind)
    module.world, module.parameter_names = world, tuple(module._parameters)  # type: ignore[assignment]
    return module


@functools.cache
def _subclass(kind: type) -> type:
    """One for each class: torch.compile compiles anew for a layer whose norm has another class."""
    first = _OF_TORCHS.get(kind.forward, SequenceParallel)  # type: ignore[attr-defined]
    return type(f"SequenceParallel{kind.__name__}", (first, kind), {})


def _new(kind: type, *given: Any) -> Any:
    return _subclass(kind).__new__(_subclass(kind), *given)


def has_inner_parameters(module: nn.Module) -> bool:
    """Whether modules inside this one have parameters."""
    return any(True for child in module.children() for _ in child.parameters())


def fused_norms() -> dict[str, Any]:
    """Options of torch.compile: norms behind a sum of products over the ranks are computed with the sum, in one launch.

        model = torch.compile(pkt.parallelize(model, world, plan), options=pkt.nn.fused_norms())

    For models that decode: torch's RMSNorm of `residual + y`, or that of Hugging Face's and Meta's Llama, where y is
    what a RowParallelLinear returns that keeps all tokens on every rank, or `pkt.matmul_all_reduce` itself. It becomes
    a product and `pkt.all_reduce_rms_norm`, which rounds the sum once less, and the norm once, behind the weight. Left
    as they are: products of more than 256 rows, or of a number that the compiler does not know; those with a bias, an
    epilogue or a form of their own; worlds of several nodes; and forward passes that are recorded for a backward pass.

    Returns {"pre_grad_custom_pass": the pass}; put options of your own beside it.
    """
    from .norm_pass import PASS  # here, because it imports Inductor

    return {"pre_grad_custom_pass": PASS}
