"""The fused operators as two calls: cuBLAS multiplies, and before or after it a collective moves the ranks' data.

nccl: as PyTorch has them, through torch.distributed. What pkt's own forms are measured against, and a candidate like
    any other, so that pkt need never be slower. Over gloo, where a world has no GPUs, the same calls run on the CPU.
unfused: pkt's own collectives, on symmetric memory that cuBLAS reads or writes. For few rows: a product of these takes
    as long as its weights take to come from memory, whoever multiplies, and cuBLAS is best at that; what a collective
    of so little takes is latency, of which pkt's have less than NCCL's.

Each function gives launch(a, b, out, bias), which takes tensors that were checked before, queues its work on the
current stream and returns `out`. Products are rounded to the dtype before they are added, and the sum before bias and
epilogue; NCCL adds in an order of its choice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from pkt.runtime.groups import process_group
from pkt.runtime.memory.factories import empty
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..all_gather import all_gather
from ..all_reduce import all_reduce, low_latency
from ..reduce_scatter import reduce_scatter
from .common import Launch
from .tile_product import Epilogue, finished

MODES = ("unfused", "nccl")

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""product(a, b, out), where a and b are plain tensors."""


def all_gather_matmul(world: World, mode: str, a: torch.Tensor, columns: bool, epilogue: Epilogue) -> Launch:
    """The gathered a, by rows or by columns, times b. By columns NCCL needs a copy."""
    m, k = a.shape
    product: Product
    if mode == "nccl":
        group = process_group(world)

        def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            gathered = torch.empty((world.size * m, k), dtype=a.dtype, device=a.device)
            dist.all_gather_into_tensor(gathered, a, group=group)
            if columns:
                gathered = gathered.view(world.size, m, k).transpose(0, 1).reshape(m, world.size * k)
            torch.mm(gathered, b, out=_plain(out))

    else:
        shape = (m, world.size * k) if columns else (world.size * m, k)
        whole = _symmetric(world, *shape, dtype=a.dtype)

        def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            all_gather(a, whole, dim=int(columns), world=world)
            torch.mm(whole.plain(), b, out=_plain(out))

    return _launch(product, epilogue)


def matmul_reduce_scatter(world: World, mode: str, M: int, N: int, dtype: torch.dtype, epilogue: Epilogue) -> Launch:
    """This rank's rows of the sum of the ranks' a @ b, (M, N)."""
    product: Product
    if mode == "nccl":
        group = process_group(world)

        def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            dist.reduce_scatter_tensor(_plain(out), torch.mm(a, b), group=group)

    else:
        partial = _symmetric(world, M, N, dtype=dtype)

        def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            _multiply(world, a, b, partial)
            reduce_scatter(partial, out, world=world)

    return _launch(product, epilogue)


def matmul_all_reduce(
    world: World, mode: str, M: int, N: int, dtype: torch.dtype, in_place: bool, epilogue: Epilogue
) -> Launch:
    """The sum of the ranks' a @ b, (M, N). in_place: every rank's `out` is symmetric."""
    flagged = low_latency(M * N * dtype.itemsize, world)  # for what is not symmetric, too
    product: Product
    if mode == "nccl":
        group = process_group(world)

        def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            dist.all_reduce(torch.mm(a, b, out=_plain(out)), group=group)

    elif flagged or in_place:

        def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            _multiply(world, a, b, out)
            all_reduce(out, mode=flagged, world=world)

    else:
        total = _symmetric(world, M, N, dtype=dtype)

        def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            _multiply(world, a, b, total)
            all_reduce(total, world=world)
            _plain(out).copy_(total.plain())

    return _launch(product, epilogue)


def _launch(product: Product, epilogue: Epilogue) -> Launch:
    @torch.no_grad()  # as of kernels; else torch refuses to write products of trained weights into `out`
    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product(_plain(a), _plain(b), out)
        if bias is not None or epilogue != "none":
            result = _plain(out)
            result.copy_(finished(result, bias, epilogue))
        return out

    return launch


def _symmetric(world: World, rows: int, cols: int, *, dtype: torch.dtype) -> SymmetricTensor:
    """What cuBLAS and a collective of pkt hand over to each other: one for all operators, of which one is in flight."""
    name = "kernels.unfused"
    return world.keep((name, rows, cols, dtype), lambda: empty(rows, cols, dtype=dtype, name=name, world=world))


def _multiply(world: World, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """a @ b into `out`, behind the world's last call, which may have been given another stream and still use `out`."""
    if world.streams is not None:
        world.streams.follow()
    torch.mm(a, b, out=_plain(out))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.plain() if isinstance(tensor, SymmetricTensor) else tensor
