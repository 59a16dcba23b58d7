"""The fused operators as PyTorch has them: NCCL moves the ranks' data, cuBLAS multiplies. What pkt's own forms are
measured against, and mode "nccl" of each operator: a candidate like any other, so that pkt need never be slower.

Over gloo, where a world has no GPUs, the same calls run on the CPU. Each function takes tensors that were checked
before, queues its work on the current stream and fills `out`.
"""

from __future__ import annotations

import torch

from pkt.runtime.groups import process_group
from pkt.runtime.tensor import SymmetricTensor
from pkt.runtime.world import World


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.plain() if isinstance(tensor, SymmetricTensor) else tensor


def all_gather_matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, world: World, columns: bool = False) -> None:
    """The gathered a, by rows or by columns, times b. By columns by way of a copy."""
    import torch.distributed as dist

    m, k = a.shape
    gathered = torch.empty((world.size * m, k), dtype=a.dtype, device=a.device)
    dist.all_gather_into_tensor(gathered, _plain(a), group=process_group(world))
    if columns:
        gathered = gathered.view(world.size, m, k).transpose(0, 1).reshape(m, world.size * k)
    torch.mm(gathered, _plain(b), out=_plain(out))


def matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, world: World) -> None:
    """This rank's rows of the sum of the ranks' a @ b, each rounded to the dtype before it is added, in an order of
    NCCL's choice."""
    import torch.distributed as dist

    dist.reduce_scatter_tensor(_plain(out), torch.mm(_plain(a), _plain(b)), group=process_group(world))


def matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, world: World) -> None:
    """The sum of the ranks' a @ b, each rounded to the dtype before it is added, in an order of NCCL's choice."""
    import torch.distributed as dist

    dist.all_reduce(torch.mm(_plain(a), _plain(b), out=_plain(out)), group=process_group(world))
