"""What modules exchange between the ranks, with the gradients of one loss that every rank computes alike.

An operator's own gradient is that of the sum of all ranks' losses. Behind a result that all ranks hold, that is
`world.size` times the gradient of one loss. The functions here differ from the operators in that: their backward pass
moves nothing where the forward pass makes a result alike on all ranks, and the other way round (Megatron-LM's f and g,
arXiv:1909.08053). Results that each rank holds a part of need no such function: the operators' own gradients are right.

The backward pass of each function is another one of these functions: gradients of gradients are of one loss, too.
"""

from __future__ import annotations

from typing import Any

import torch

from pkt.kernels.all_gather import all_gather
from pkt.kernels.all_reduce import all_reduce
from pkt.kernels.matmul_all_reduce import matmul_all_reduce
from pkt.runtime.world import World


def reduced(x: torch.Tensor, world: World) -> torch.Tensor:
    """The sum of the ranks' x, in new memory."""
    return all_reduce(x.clone(memory_format=torch.contiguous_format), world=world)


def own_part(x: torch.Tensor, dim: int, world: World) -> torch.Tensor:
    """This rank's part of dimension `dim`, which the ranks divide. Unlike `chunk` it fixes no size in a graph."""
    size = x.shape[dim] // world.size
    return x.narrow(dim, world.rank * size, size)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World) -> torch.Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return summed(grad, ctx.world), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World) -> torch.Tensor:
        ctx.world = world
        return reduced(x, world)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return sum_gradient(grad, ctx.world), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, world: World) -> torch.Tensor:
        ctx.dim, ctx.world = dim, world
        return all_gather(x.contiguous(), dim=dim, world=world)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return parted(grad, ctx.dim, ctx.world), None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, world: World) -> torch.Tensor:
        ctx.dim, ctx.world = dim, world
        return own_part(x, dim, world)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return gathered(grad, ctx.dim, ctx.world), None, None


class _SumOfProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world: World) -> Any:
        ctx.save_for_backward(a, weight)
        ctx.world = world
        return matmul_all_reduce(a, weight.t(), bias=bias, world=world)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        a, weight = ctx.saved_tensors
        of_a, of_weight, of_bias, _ = ctx.needs_input_grad
        mine = sum_gradient(grad, ctx.world)
        return (
            mine @ weight if of_a else None,
            mine.t() @ a if of_weight else None,
            grad.sum(0) if of_bias else None,
            None,
        )


def sum_gradient(x: torch.Tensor, world: World) -> torch.Tensor:
    """x, alike on all ranks, each of which uses it for its own part; its gradient is the sum of the ranks'."""
    return _SumGradient.apply(x, world)


def summed(x: torch.Tensor, world: World) -> torch.Tensor:
    """The sum of the ranks' x, on every rank; the gradient is that of the sum."""
    return _Sum.apply(x, world)


def gathered(x: torch.Tensor, dim: int, world: World) -> torch.Tensor:
    """The ranks' x one after the other along `dim`, on every rank; the gradient is this rank's part of the result's."""
    return _Gather.apply(x, dim, world)


def parted(x: torch.Tensor, dim: int, world: World) -> torch.Tensor:
    """This rank's part of x along `dim`, of an x that is alike on all ranks; its gradient is gathered."""
    return _Part.apply(x, dim, world)


def sum_of_products(a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world: World) -> torch.Tensor:
    """The sum over ranks of a (M, k) @ weight (N, k).t(), and bias (N,), on every rank; the backward pass moves
    nothing."""
    return _SumOfProducts.apply(a, weight, bias, world)


def autocast(*tensors: torch.Tensor | None) -> Any:
    """Tensors, or None, in the dtype in which torch.autocast would multiply them."""
    kind = next(tensor for tensor in tensors if tensor is not None).device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple([None if tensor is None else tensor.to(dtype) for tensor in tensors])
