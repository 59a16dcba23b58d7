"""The columns of one result as results of their own: `parted`.

The gradients of the parts lie side by side in one tensor. For torch's `cat` Inductor makes a kernel that computes all
parts at each element, and stores one of them. For the op `pkt::beside` its kernel stores each part in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

_library = torch.library.Library("pkt", "FRAGMENT")
_library.define("beside(Tensor[] parts) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def parted(y: torch.Tensor, widths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """`widths` columns of y each, as views. In code that is not compiled, a write to one is no write to the others."""
    parts: tuple[torch.Tensor, ...] = _Parted.apply(y, widths)
    return parts


class _Parted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, widths: list[int]) -> Any:
        parts = y.split(widths, -1)
        return parts if torch.compiler.is_compiling() else tuple(part.data for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return torch.ops.pkt.beside(grads), None


def _beside(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts), -1)


def _fake_beside(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    _teach_inductor()
    return _beside(parts)


_library.impl("beside", _beside, "CompositeExplicitAutograd")
torch.library.register_fake("pkt::beside", _fake_beside, lib=_library)
torch.library.register_autograd(
    "pkt::beside",
    lambda ctx, grad: (list(grad.split(ctx.widths, -1)),),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "widths", [part.shape[-1] for part in inputs[0]]),
    lib=_library,
)


@functools.cache
def _teach_inductor() -> None:
    """Called when a compiler first sees the op, because Inductor takes half a second to import."""
    from torch._inductor import ir, lowering

    def lower(parts: Sequence[Any]) -> Any:
        return ir.TensorBox(ir.ConcatKernel.create(parts, len(parts[0].get_size()) - 1))

    lowering.register_lowering(torch.ops.pkt.beside.default, type_promotion_kind=None)(lower)
