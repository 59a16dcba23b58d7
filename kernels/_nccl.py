"""The fused operators as PyTorch has them: NCCL moves the ranks' data, cuBLAS multiplies. What pkt's own forms are
measured against, and mode "nccl" of each operator: a candidate like any other, so that pkt need never be slower.

Over gloo, where a world has no GPUs, the same calls run on the CPU. Each function takes plain tensors that were checked
before, queues its work on the current stream and returns `out`.
"""

from __future__ import annotations

import torch

from pkt.runtime.groups import process_group
from pkt.runtime.world import World


def all_gather_matmul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, world: World, columns: bool = False
) -> torch.Tensor:
    """The gathered a, by rows or by columns, times b. By columns by way of a copy."""
    import torch.distributed as dist

    m, k = a.shape
    gathered = a.new_empty((world.size * m, k))
    dist.all_gather_into_tensor(gathered, a, group=process_group(world))
    if columns:
        gathered = gathered.view(world.size, m, k).transpose(0, 1).reshape(m, world.size * k)
    return torch.mm(gathered, b, out=out)


def matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, world: World) -> torch.Tensor:
    """This rank's rows of the sum of the ranks' a @ b, each rounded to the dtype before it is added, in an order of
    NCCL's choice."""
    import torch.distributed as dist

    dist.reduce_scatter_tensor(out, torch.mm(a, b), group=process_group(world))
    return out


def matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, world: World) -> torch.Tensor:
    """The sum of the ranks' a @ b, each rounded to the dtype before it is added, in an order of NCCL's choice."""
    import torch.distributed as dist

    dist.all_reduce(torch.mm(a, b, out=out), group=process_group(world))
    return out
