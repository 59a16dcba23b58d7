"""Gradients of `grouped_matmul` and `grouped_outer`, in terms of each other, and both as ops of torch in compiled code.
These work on one rank alone, so they are not in the registry, and gradients.py does not record them.

For the rows of each expert e, out[e] = x[e] @ w[e]. The gradient of x is that of out times w transposed, and zero in
the rows of no expert. The gradient of w is `grouped_outer` of x and that of out. A call that is recorded is a node of
autograd, and its backward pass is recorded where that is wanted. Offsets have no gradient, and stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pkt.errors import Closed, ShapeError
from pkt.runtime import world as worlds
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World, named_world

from . import traced
from .shared.checks import FLOATS, check_tensor

_run: dict[str, Callable[..., torch.Tensor]] = {}
"""multiply(x, w, offsets, tiles, clear, expected, world): the grouped product; clear: zeros in the rows of no expert.
outer(x, y, offsets, tiles, world)."""


def take(name: str, run: Callable[..., torch.Tensor]) -> None:
    """From now on `run` computes "multiply" or "outer": the files of the kernels hand their functions in."""
    _run[name] = run


def _launch(name: str) -> Callable[..., torch.Tensor]:
    """The function "multiply" or "outer", as it was handed in."""
    return _run[name]


def check_rows(call: str, x: Any, offsets: Any, world: World) -> None:
    """x: (M, K) of a supported dtype; offsets: int32 (experts + 1,). Raises Closed, DtypeError, ShapeError."""
    if world.closed:
        raise Closed.used(world.rank, call)
    check_tensor(call, "x", x, world, dtypes=FLOATS)
    if x.ndim != 2:
        raise ShapeError.argument(call, "x", tuple(x.shape), "2 dimensions", world.rank)
    check_tensor(call, "offsets", offsets, world, dtype=torch.int32)
    if offsets.ndim != 1 or len(offsets) < 2:
        raise ShapeError.argument(call, "offsets", tuple(offsets.shape), "(experts + 1,)", world.rank)


def is_traced(*tensors: Any) -> bool:
    """Whether a call of these tensors goes into a compiler's graph. Raises Unsupported as `traced.is_recorded`."""
    if torch.compiler.is_dynamo_compiling() or traced.has_traced(tensors):
        return True
    return traced.is_recorded(tensors, "experts' products")


def multiply(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, tiles: Sequence[int] | None, clear: bool,
    expected: int | None, world: World | None,
) -> torch.Tensor:  # fmt: skip
    """A grouped product in a graph."""
    return _in_graph(_Multiply, torch.ops.pkt.grouped_matmul, (x, w, offsets), (tiles, clear, expected), world)


def outer(
    x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, tiles: Sequence[int] | None, world: World | None
) -> torch.Tensor:
    """`grouped_outer` in a graph."""
    return _in_graph(_Outer, torch.ops.pkt.grouped_outer, (x, y, offsets), (tiles,), world)


def _in_graph(node: Any, op: Any, tensors: tuple[Any, ...], values: tuple[Any, ...], world: World | None) -> Any:
    if is_traced(*tensors):
        return op(*tensors, *values, "" if world is None else world.name)
    return node.apply(*(x.plain() if isinstance(x, SymmetricTensor) else x for x in tensors), *values, world)


def _keep_multiply(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, offsets, _, _, expected, world = inputs
    ctx.save_for_backward(x if w.requires_grad else None, w if x.requires_grad else None, offsets)
    ctx.world, ctx.expected, ctx.swapped = world, expected, not w.is_contiguous()


def _multiply_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, w, offsets = ctx.saved_tensors
    grad, world = grad.contiguous(), world_named(ctx.world)
    dx = dw = None
    if w is not None:
        dx = _launch("multiply")(grad, w.transpose(1, 2), offsets, None, True, ctx.expected, world)
    if x is not None and ctx.swapped:
        dw = _launch("outer")(grad, x, offsets, None, world).transpose(1, 2)
    elif x is not None:
        dw = _launch("outer")(x, grad, offsets, None, world)
    return dx, dw, None, None, None, None, None


def _keep_outer(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, y, offsets, _, world = inputs
    ctx.save_for_backward(x if y.requires_grad else None, y if x.requires_grad else None, offsets)
    ctx.world = world


def _outer_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, y, offsets = ctx.saved_tensors
    grad, world = grad.contiguous(), world_named(ctx.world)
    dx = None if y is None else _launch("multiply")(y, grad.transpose(1, 2), offsets, None, True, None, world)
    dy = None if x is None else _launch("multiply")(x, grad, offsets, None, True, None, world)
    return dx, dy, None, None, None


def world_named(world: World | str | None) -> World | None:
    """That of a node, or of an op, whose name for it is "" where it is the current one."""
    return named_world(world) if isinstance(world, str) else world


def node(name: str, run: Callable[..., torch.Tensor], keep: Any, backward: Any) -> Any:
    """A function of autograd, whose nodes torch prints as NAMEBackward."""
    methods = {"forward": run, "setup_context": keep, "backward": backward}
    return type(name, (torch.autograd.Function,), {n: staticmethod(method) for n, method in methods.items()})


_Multiply = node("_Multiply", lambda *inputs: _launch("multiply")(*inputs), _keep_multiply, _multiply_backward)
_Outer = node("_Outer", lambda *inputs: _launch("outer")(*inputs), _keep_outer, _outer_backward)


# ---------------------------------------------------------------------------------------------------- what torch sees
_library = torch.library.Library("pkt", "FRAGMENT")


def define(
    name: str, taken: str, run: Callable[..., torch.Tensor], shape: Callable[..., Any], keep: Any, backward: Any
) -> None:
    """Make torch.ops.pkt.NAME of run(*taken, world), a call on one rank alone. shape(*taken): of the result."""

    @torch.no_grad()
    def ran(*inputs: Any) -> torch.Tensor:
        worlds.op_begins(f"torch.ops.pkt.{name}")
        found = run(*inputs[:-1], named_world(inputs[-1]))
        worlds.op_ends()
        return found

    _library.define(f"{name}({taken}, str world) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, ran, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pkt::{name}", lambda x, *rest: x.new_empty(shape(x, *rest)), lib=_library)
    torch.library.register_autograd(f"pkt::{name}", backward, setup_context=keep, lib=_library)


define(
    "grouped_matmul", "Tensor x, Tensor w, Tensor offsets, int[]? tiles, bool clear, SymInt? expected",
    lambda *inputs: _launch("multiply")(*inputs), lambda x, w, *_: (x.shape[0], w.shape[2]), _keep_multiply,
    _multiply_backward,
)  # fmt: skip
define(
    "grouped_outer", "Tensor x, Tensor y, Tensor offsets, int[]? tiles",
    lambda *inputs: _launch("outer")(*inputs),
    lambda x, y, offsets, *_: (offsets.shape[0] - 1, x.shape[1], y.shape[1]), _keep_outer, _outer_backward,
)  # fmt: skip
