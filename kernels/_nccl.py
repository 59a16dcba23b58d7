"""The operators as PyTorch has them: NCCL moves the ranks' data, cuBLAS multiplies. What pkt's own forms are measured
against, and mode "nccl" of every operator: a candidate like any other, so that pkt need never be slower.

Over gloo, where a world has no GPUs, the same calls run on the CPU. Each function takes plain tensors that were checked
before, queues its work on the current stream and returns `out`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from pkt.runtime.groups import process_group
from pkt.runtime.world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Op = Literal["sum", "min", "max"]


def _group(world: World) -> tuple[Any, ProcessGroup]:
    import torch.distributed as dist

    return dist, process_group(world)


def all_gather(x: torch.Tensor, out: torch.Tensor, world: World, dim: int = 0) -> torch.Tensor:
    """The ranks' x along `dim`; along another than the first by way of a copy."""
    dist, group = _group(world)
    gathered = out if dim == 0 else x.new_empty((world.size, *x.shape))
    dist.all_gather_into_tensor(gathered.view(-1), x.reshape(-1), group=group)
    if dim == 0:
        return out
    # (size, ..., n, ...) -> (..., size, n, ...)
    return out.view(*x.shape[:dim], world.size, *x.shape[dim:]).copy_(gathered.movedim(0, dim)).view(out.shape)


def reduce_scatter(x: torch.Tensor, out: torch.Tensor, world: World, dim: int = 0, op: Op = "sum") -> torch.Tensor:
    """This rank's part along `dim` of the ranks' x reduced, in x's dtype and in an order of NCCL's choice."""
    dist, group = _group(world)
    if dim:
        parts = x.view(*x.shape[:dim], world.size, x.shape[dim] // world.size, *x.shape[dim + 1 :])
        x = parts.movedim(dim, 0)
    dist.reduce_scatter_tensor(out.view(-1), x.reshape(-1), op=_op(dist, op), group=group)
    return out


def all_reduce(x: torch.Tensor, out: torch.Tensor, world: World, op: Op = "sum") -> torch.Tensor:
    """The ranks' x reduced, in x's dtype and in an order of NCCL's choice; `out` may be x."""
    dist, group = _group(world)
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    dist.all_reduce(out, op=_op(dist, op), group=group)
    return out


def _op(dist: Any, op: Op) -> Any:
    return {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}[op]


def all_to_all(x: torch.Tensor, out: torch.Tensor, world: World, scatter: int = 0, gather: int = 0) -> torch.Tensor:
    """Part `rank` along `scatter` of the ranks' x, along `gather`; other axes than the first by way of copies."""
    dist, group = _group(world)
    parts = x.view(*x.shape[:scatter], world.size, x.shape[scatter] // world.size, *x.shape[scatter + 1 :])
    sent = parts.movedim(scatter, 0).contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    shape = sent.shape[1:]
    return out.view(*shape[:gather], world.size, *shape[gather:]).copy_(got.movedim(0, gather)).view(out.shape)


def broadcast(x: torch.Tensor, root: int, world: World) -> torch.Tensor:
    """root's x, in every rank's x."""
    dist, group = _group(world)
    dist.broadcast(x, src=dist.get_global_rank(group, root), group=group)
    return x


def all_gather_matmul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, world: World, columns: bool = False
) -> torch.Tensor:
    """The gathered a, by rows or by columns, times b."""
    m, k = a.shape
    gathered = all_gather(a, a.new_empty((m, world.size * k) if columns else (world.size * m, k)), world, int(columns))
    return torch.mm(gathered, b, out=out)


def matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, world: World) -> torch.Tensor:
    """This rank's rows of the sum of the ranks' a @ b, each rounded to the dtype before it is added."""
    return reduce_scatter(torch.mm(a, b), out, world)


def matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, world: World) -> torch.Tensor:
    """The sum of the ranks' a @ b, each rounded to the dtype before it is added."""
    return all_reduce(torch.mm(a, b, out=out), out, world)
