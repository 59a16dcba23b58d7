"""The activation between two grouped products: on the rows that an expert has, and on no others. Local to a rank.

The rows after the last expert's are undefined. Both kernels find from `offsets` on the device which rows exist: they
read no others, and the gradient of the others is zero. Both compute in fp32 and round once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from pkt.errors import DtypeError, ShapeError, Unsupported
from pkt.runtime.launch.launch import beside
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World
from pkt.wording import found_text, value_text

from . import gradients, grouped_gradients
from .agreement import world_of
from .shared.tile_product import GatedEpilogue, activate, columns_each, finished, normal_tail, store_tile, tile_pointers

ACTIVATIONS = ("swiglu", "silu", "gelu", "relu")
BLOCK = (8, 256)
"""Rows and columns of x that a program takes at a time: 16 elements a thread, 16 bytes an access."""


def reference(x: torch.Tensor, offsets: torch.Tensor, activation: GatedEpilogue) -> torch.Tensor:
    """The exact result in fp64; rows of no expert are 0."""
    return finished(torch.where(_inside(x, offsets), x, 0).double(), None, activation)


# ------------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def activate_kernel(
    x_ptr,  # (M, N) rows by expert
    offsets_ptr,  # int32 (experts + 1,)
    out_ptr,  # (M, N / columns_each(ACTIVATION))
    M,
    N,
    experts,
    CLEAR: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """The activation of the experts' rows; zeros in the others if CLEAR."""
    first, last = _rows(offsets_ptr, M, experts)
    begin = 0 if CLEAR else first
    end = M if CLEAR else last
    width = N // columns_each(ACTIVATION)
    wide = tl.cdiv(N, COLS)
    for task in range(tl.program_id(0), tl.cdiv(end - begin, ROWS) * wide, tl.num_programs(0)):
        row = begin + task // wide * ROWS
        x = _there(x_ptr, row, task % wide * COLS, first, last, N, ROWS, COLS)
        tile = activate(x, ACTIVATION)
        store_tile(out_ptr, 0, tile, row, task % wide * tile.shape[1], end, width, width, False)


@triton.jit
def derive_kernel(
    x_ptr,  # (M, N) rows by expert
    grad_ptr,  # (M, N / columns_each(ACTIVATION)) the gradient of the result
    offsets_ptr,  # int32 (experts + 1,)
    out_ptr,  # (M, N) the gradient of x
    M,
    N,
    experts,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """The gradient of the experts' rows, and zeros in the others."""
    first, last = _rows(offsets_ptr, M, experts)
    EACH: tl.constexpr = columns_each(ACTIVATION)
    wide = tl.cdiv(N, COLS)
    for task in range(tl.program_id(0), tl.cdiv(M, ROWS) * wide, tl.num_programs(0)):
        row = task // wide * ROWS
        col = task % wide * COLS
        x = _there(x_ptr, row, col, first, last, N, ROWS, COLS)
        grad = _there(grad_ptr, row, col // EACH, first, last, N // EACH, ROWS, COLS // EACH)
        store_tile(out_ptr, 0, _derived(x, grad, ACTIVATION), row, col, M, N, N, False)


@triton.jit
def _rows(offsets_ptr, M, experts):
    """The first expert's first row and the one after the last expert's last, inside of x."""
    first = tl.minimum(tl.maximum(tl.load(offsets_ptr), 0), M)
    return first, tl.maximum(tl.minimum(tl.load(offsets_ptr + experts), M), first)


@triton.jit
def _there(ptr, row, col, first, last, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A tile in fp32, 0 in the rows of no expert, which are not read."""
    ptrs, inside = tile_pointers(ptr, row, col, last, N, N, ROWS, COLS)
    there = inside & (row + tl.arange(0, ROWS) >= first)[:, None]
    return tl.load(ptrs, mask=there, other=0).to(tl.float32)


@triton.jit
def _derived(x, grad, ACTIVATION: tl.constexpr):
    """The gradient of x, fp32, from that of its activation."""
    if ACTIVATION == "relu":
        return tl.where(x <= 0, 0.0, grad)
    elif ACTIVATION == "gelu":
        density = tl.exp(-0.5 * x * x) * 0.3989422804014327
        return grad * (tl.where(x < 0, normal_tail(x), 1.0 - normal_tail(x)) + x * density)
    elif ACTIVATION == "silu":
        return grad * _silu_slope(x)
    else:
        gate, up = x.reshape([x.shape[0], x.shape[1] // 2, 2]).split()
        of_up = grad * gate / (1.0 + tl.exp(-gate))
        return tl.join(grad * up * _silu_slope(gate), of_up).reshape([x.shape[0], x.shape[1]])


@triton.jit
def _silu_slope(x):
    part = 1.0 / (1.0 + tl.exp(-x))
    return part * (1.0 + x * (1.0 - part))


# ---------------------------------------------------------------------------------------------------------------- host
def grouped_activation(
    x: torch.Tensor,
    offsets: torch.Tensor,
    activation: GatedEpilogue = "swiglu",
    *,
    clear: bool | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """The activation of the rows of `x` that an expert has, those from offsets[0] to offsets[-1]. Local.

    x: (M, N), rows by expert, as `grouped_matmul` returns them. offsets: int32 (experts + 1,), read on the device.
    activation: "swiglu", with N = 2 * F, where the columns are gate and up in turn, as `pkt.interleave` lays them; or
    "silu", "gelu", "relu", with F = N. clear: whether the other rows become zeros, as for `grouped_matmul`. Returns
    (M, F) of x's dtype, computed in fp32. Differentiable: the gradient of rows that no expert has is zero, whatever
    they hold. Raises ShapeError, DtypeError, Unsupported.
    """
    clear = torch.is_grad_enabled() if clear is None else clear
    if not grouped_gradients.is_traced(x, offsets):
        world = world_of("grouped_activation", world, x)
        _check(x, offsets, activation, clear, world)
        if not (torch.is_grad_enabled() and gradients.required((x,))):
            return _activate(x, offsets, activation, clear, world)
        return _Activate.apply(_plain(x), _plain(offsets), activation, clear, world)
    return torch.ops.pkt.grouped_activation(x, offsets, activation, clear, "" if world is None else world.name)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.plain() if isinstance(tensor, SymmetricTensor) else tensor


def _check(x: Any, offsets: Any, activation: Any, clear: Any, world: World) -> None:
    """Raise what the function's docstring says."""
    call, rank = "grouped_activation", world.rank
    grouped_gradients.check_rows(call, x, offsets, world)
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        wanted = " or ".join(map(repr, ACTIVATIONS))
        raise Unsupported.here(f"rank {rank}: {call}", f"found activation {value_text(activation)}", f"wanted {wanted}")
    if x.shape[1] % columns_each(activation):
        wanted = 'an even number of columns for activation "swiglu", gate and up in turn'
        raise ShapeError.argument(call, "x", tuple(x.shape), wanted, rank)
    if not isinstance(clear, bool):
        raise DtypeError.argument(call, "clear", found_text(clear), "True, False or None", rank)


def _activate(
    x: torch.Tensor, offsets: torch.Tensor, activation: GatedEpilogue, clear: bool, world: World | None
) -> torch.Tensor:
    world, (M, N) = world_of("grouped_activation", world, x), x.shape
    out = torch.empty(M, N // columns_each(activation), dtype=x.dtype, device=x.device)
    if out.numel():
        numbers = M, N, len(offsets) - 1, clear, activation, *BLOCK
        beside(world, activate_kernel, _grid(M, N, world), x, offsets, out, *numbers)
    return out


def _derive(
    x: torch.Tensor, grad: torch.Tensor, offsets: torch.Tensor, activation: GatedEpilogue, world: World | None
) -> torch.Tensor:
    """The gradient of x, which has a gradient itself."""
    if grouped_gradients.is_traced(x, grad, offsets):
        name = "" if world is None else world.name
        return torch.ops.pkt.grouped_activation_backward(x, grad, offsets, activation, name)
    if torch.is_grad_enabled() and gradients.required((x, grad)):
        return _Derive.apply(x, grad, offsets, activation, world)
    world, (M, N) = world_of("grouped_activation", world, x), x.shape
    out = torch.empty_like(x)
    if out.numel():
        numbers = M, N, len(offsets) - 1, activation, *BLOCK
        beside(world, derive_kernel, _grid(M, N, world), x, grad, offsets, out, *numbers)
    return out


def _grid(M: int, N: int, world: World) -> Callable[[], tuple[int]]:
    return lambda: (min(triton.cdiv(M, BLOCK[0]) * triton.cdiv(N, BLOCK[1]), world.num_sms),)


# ----------------------------------------------------------------------------------------------------------- gradients
def _inside(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """(M, 1): which rows an expert has."""
    row = torch.arange(x.shape[0], device=x.device)
    return ((row >= offsets[0]) & (row < offsets[-1]))[:, None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, offsets, activation, _, world = inputs
    ctx.save_for_backward(x, offsets)
    ctx.activation, ctx.world = activation, world


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, offsets = ctx.saved_tensors
    world = grouped_gradients.world_named(ctx.world)
    return _derive(x, grad.contiguous(), offsets, ctx.activation, world), None, None, None, None


def _keep_derived(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, grad, offsets, activation, _ = inputs
    ctx.save_for_backward(x, grad, offsets)
    ctx.activation = activation


def _backward_of_derived(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """By torch, in the experts' rows: for gradients of gradients."""
    x, first, offsets = ctx.saved_tensors
    inside, again = _inside(x, offsets), torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, because `first` may depend on x: the inner gradients end at these.
        x, first = (t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in (x, first))
        rows, of_result = torch.where(inside, x, 0), torch.where(inside, first, 0)
        (derived,) = torch.autograd.grad(finished(rows, None, ctx.activation), rows, of_result, create_graph=True)
        found = torch.autograd.grad(
            torch.where(inside, derived, 0), (x, first), grad, create_graph=again, materialize_grads=True
        )
    return *found, None, None, None


_Activate = grouped_gradients.node("_Activate", _activate, _keep, _backward)
_Derive = grouped_gradients.node("_Derive", _derive, _keep_derived, _backward_of_derived)


def _checked(
    x: torch.Tensor, offsets: torch.Tensor, activation: GatedEpilogue, clear: bool, world: World
) -> torch.Tensor:
    _check(x, offsets, activation, clear, world)
    return _activate(x, offsets, activation, clear, world)


grouped_gradients.define(
    "grouped_activation", "Tensor x, Tensor offsets, str activation, bool clear", _checked,
    lambda x, offsets, activation, *_: (x.shape[0], x.shape[1] // columns_each(activation)), _keep, _backward,
)  # fmt: skip
grouped_gradients.define(
    "grouped_activation_backward", "Tensor x, Tensor grad, Tensor offsets, str activation", _derive,
    lambda x, *_: x.shape, _keep_derived, _backward_of_derived,
)  # fmt: skip
