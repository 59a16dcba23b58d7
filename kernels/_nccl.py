"""The fused operators as PyTorch has them: NCCL moves the ranks' data, cuBLAS multiplies. What pkt's own forms are
measured against, and mode "nccl" of each operator: a candidate like any other, so that pkt need never be slower.

Over gloo, where a world has no GPUs, the same calls run on the CPU. Each function gives launch(a, b, out, bias), which
takes tensors that were checked before, queues its work on the current stream and returns `out`. Products are rounded to
the dtype before they are added, and the sum before bias and epilogue, in an order of NCCL's choice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from pkt.runtime.groups import process_group
from pkt.runtime.tensor import SymmetricTensor
from pkt.runtime.world import World

from ._common import Launch
from ._matmul import Epilogue, finished


def all_gather_matmul(world: World, columns: bool, epilogue: Epilogue) -> Launch:
    """The gathered a, by rows or by columns, times b. By columns by way of a copy."""
    group = process_group(world)

    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        m, k = a.shape
        gathered = torch.empty((world.size * m, k), dtype=a.dtype, device=a.device)
        dist.all_gather_into_tensor(gathered, a, group=group)
        if columns:
            gathered = gathered.view(world.size, m, k).transpose(0, 1).reshape(m, world.size * k)
        torch.mm(gathered, b, out=out)

    return _launch(product, epilogue)


def matmul_reduce_scatter(world: World, epilogue: Epilogue) -> Launch:
    """This rank's rows of the sum of the ranks' a @ b."""
    group = process_group(world)

    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        dist.reduce_scatter_tensor(out, torch.mm(a, b), group=group)

    return _launch(product, epilogue)


def matmul_all_reduce(world: World, epilogue: Epilogue) -> Launch:
    """The sum of the ranks' a @ b."""
    group = process_group(world)

    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        dist.all_reduce(torch.mm(a, b, out=out), group=group)

    return _launch(product, epilogue)


def _launch(product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None], epilogue: Epilogue) -> Launch:
    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result = _plain(out)
        product(_plain(a), _plain(b), result)
        if bias is not None or epilogue != "none":
            result.copy_(finished(result, bias, epilogue))
        return out

    return launch


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.plain() if isinstance(tensor, SymmetricTensor) else tensor
