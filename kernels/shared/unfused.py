"""The fused operators as two calls: cuBLAS multiplies, and before or after it a collective moves the ranks' data.

nccl: as PyTorch has them, through torch.distributed. pkt's own forms are measured against this one, and the tuner may
    choose it, so that pkt need never be slower. Over gloo, where a world has no GPUs, the same calls run on the CPU.
unfused: pkt's own collectives; cuBLAS reads what was gathered, and writes what is scattered, in symmetric memory. For
    few rows: such a product takes as long as its weights take to come from memory, whoever multiplies, and cuBLAS is
    best at that; a collective of so little takes only its latency, and pkt's have less than NCCL's.

Products are rounded to the dtype before they are added, and the sum before bias and epilogue; NCCL adds in an order of
its choice. Each operator hands in pkt's collective, which is planned once: between two calls of a plan nothing changes
that a plan of the collective depends on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from pkt.errors import Unsupported
from pkt.model.config import NCCL, UNFUSED, nccl_wanted
from pkt.runtime.gpu.sharing import may_share
from pkt.runtime.groups import process_group
from pkt.runtime.memory.factories import empty
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..declaration import Call, Form, Launch
from . import flagged
from .checks import aligned, symmetric_out
from .gating import gating
from .product_rules import Collective, Key, gathered, reduced, scattered, unfused_seconds
from .products import by_columns, in_turn
from .replays import with_product
from .tile_product import columns_each, finished

Planned = Callable[..., Launch]
"""`Operator.planned` of a collective."""
Product = Callable[..., None]
"""product(a, b, out, *scales) queues its work on the current stream; a and b are plain tensors. scales: none, or those
of a and b, whose elements are fp8."""
Gather = Callable[[torch.Tensor], torch.Tensor]
"""gather(a) -> the whole A, plain and on the current stream, until the next call."""


def gather_forms(all_gather: Planned, scaled: bool = False) -> dict[str, Form]:
    """Those of all_gather_matmul. scaled: of fp8 operands."""

    def ours(call: Call) -> Gather:
        world, columns, (m, k) = call.world, by_columns(call), call["a"].shape
        whole = _symmetric(world, call.dtype, *((m, world.size * k) if columns else (world.size * m, k)))
        move, matrix = all_gather(world, plain(call["a"]), whole, dim=int(columns)), whole.plain()

        def gather(a: torch.Tensor) -> torch.Tensor:
            move(a, whole)
            return matrix

        return gather

    def nccl(call: Call) -> Gather:
        size, columns, (m, k), group = call.world.size, by_columns(call), call["a"].shape, process_group(call.world)

        def gather(a: torch.Tensor) -> torch.Tensor:
            gathered = torch.empty((size * m, k), dtype=a.dtype, device=a.device)
            dist.all_gather_into_tensor(gathered, a, group=group)
            if columns:  # needs a copy
                gathered = gathered.view(size, m, k).transpose(0, 1).reshape(m, size * k)
            return gathered

        return gather

    multiplied = _multiplied_scaled if scaled else _multiplied
    forms = _forms("all_gather", "(W - 1) |a|", multiplied(ours), multiplied(nccl), gathered, sums=False)
    if scaled:
        return forms
    makers = {"unfused": ours, "nccl": nccl}
    return {name: replace(form, several=_several(makers[name])) for name, form in forms.items()}


def scatter_forms(reduce_scatter: Planned) -> dict[str, Form]:
    """Those of matmul_reduce_scatter."""

    def ours(call: Call) -> Product:
        world, partial = call.world, _symmetric(call.world, call.result_dtype, call["a"].shape[0], call["n"])
        fast = _fast(call)
        scatter, matrix = reduce_scatter(world, partial, call["out"]), partial.plain()

        def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *scales: torch.Tensor) -> None:
            multiply(world, a, b, matrix, *scales, fast=fast)
            scatter(partial, out)

        return product

    def nccl(call: Call) -> Product:
        group, fast = process_group(call.world), _fast(call)

        def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *scales: torch.Tensor) -> None:
            partial = torch.empty((a.shape[0], b.shape[1]), dtype=out.dtype, device=out.device)
            matmul(a, b, partial, *scales, fast=fast)
            dist.reduce_scatter_tensor(plain(out), partial, group=group)

        return product

    return _forms("reduce_scatter", "(W - 1) / W |C|", ours, nccl, scattered, sums=True)


def reduce_forms(all_reduce: Planned) -> dict[str, Form]:
    """Those of matmul_all_reduce. cuBLAS writes into `out`, where the sum is made; or into symmetric memory, where a
    switch makes it, if there is one, `out` is out of its reach, and more than two ranks have much to add."""

    def ours(call: Call) -> Product:
        # The plan keeps neither the call nor its tensors.
        world, dtype, reached, fast = call.world, call.result_dtype, in_place(call), _fast(call)
        few = flagged.shots(call["out"].nbytes, world.size, flagged.PLAIN_FLAG_BYTES)
        switch = world.multicast and world.size > 2 and not reached and not few
        total = _symmetric(world, dtype, *call.shape) if switch else None

        def place(out: torch.Tensor) -> torch.Tensor:
            if total is not None:
                return total
            return out if reached else plain(out)

        reduce = all_reduce(world, place(call["out"]), place(call["out"]))

        def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *scales: torch.Tensor) -> None:
            summed = place(out)
            multiply(world, a, b, plain(summed), *scales, fast=fast)
            reduce(summed, summed)
            if total is not None:
                plain(out).copy_(plain(total))

        return product

    def nccl(call: Call) -> Product:
        group, fast = process_group(call.world), _fast(call)

        def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *scales: torch.Tensor) -> None:
            matmul(a, b, out, *scales, fast=fast)
            dist.all_reduce(plain(out), group=group)

        return product

    return _forms("all_reduce", "as all_reduce's of |C|", ours, nccl, reduced, sums=True, agrees=agreed_out)


def in_place(call: Call) -> bool:
    """Whether `out` is symmetric, with rows that TMA and multimem reach: peers then reduce in it."""
    return isinstance(call["out"], SymmetricTensor) and aligned(call["out"])


def agreed_out(call: Call) -> dict[str, Any]:
    """`agrees` of the forms that may reduce in place: whether they do, and where in the heap."""
    return symmetric_out(call) if in_place(call) else {"out": None}


# --------------------------------------------------------------------------------------------------- what they share
def _forms(
    collective: Collective, moves: str, ours: Callable[[Call], Product], nccl: Callable[[Call], Product],
    sent: Callable[[Key], float], sums: bool, **more: Any,
) -> dict[str, Form]:  # fmt: skip
    """sent: least bytes that leave a GPU. sums: the collective adds. Bias and epilogue round once more each."""
    name = collective.replace("_", "-")
    return {
        "unfused": Form(
            _plan(ours, again=True), f"cuBLAS and pkt's own {name}", moves,
            roundings=lambda size: 4 if sums else 3,
            space=lambda key, gpu: [UNFUSED], seconds=unfused_seconds("unfused", collective, sent),
            outruns=("nccl",), **more,
        ),
        "nccl": Form(
            _plan(nccl), f"cuBLAS and NCCL's {name}, through torch.distributed", moves,
            fits=lacks_group, gpu=True, roundings=lambda size: size + 3 if sums else 3,
            space=lambda key, gpu: [NCCL] if nccl_wanted() else [],
            seconds=unfused_seconds("nccl", collective, sent), **more,
        ),
    }  # fmt: skip


def _plan(make: Callable[[Call], Product], again: bool = False) -> Callable[[Call], Launch]:
    """The plan of a form: the product, then bias and epilogue. again: a call that comes again is replayed."""

    def plan(call: Call) -> Launch:
        launch = _finished(call, make(call))
        return with_product(call, launch) if again else launch

    return plan


def _finished(call: Call, product: Product) -> Launch:
    """launch(a, b, out, bias, *scales): the product, then bias and epilogue."""
    epilogue, (M, n) = call["epilogue"], call.shape
    each = columns_each(epilogue)
    gate = gating(call.world, M, each * n) if each > 1 else None

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: Any, *scales: torch.Tensor) -> torch.Tensor:
        if gate is not None:
            whole = torch.empty((M, each * n), dtype=out.dtype, device=a.device)
            product(plain(a), plain(b), whole, *scales)
            gate(whole, bias, out)
            return out
        product(plain(a), plain(b), out, *scales)
        if bias is not None or epilogue != "none":
            result = plain(out)
            result.copy_(finished(result, None if bias is None else bias.detach(), epilogue))
        return out

    return launch


def _multiplied(make: Callable[[Call], Gather]) -> Callable[[Call], Product]:
    """What makes the product of the whole A."""

    def product(call: Call) -> Product:
        gather = make(call)
        return lambda a, b, out: matmul(gather(a), b, out)

    return product


def _multiplied_scaled(make: Callable[[Call], Gather]) -> Callable[[Call], Product]:
    """The same of fp8: the bits of A are gathered, and a scale for each of its rows."""

    def product(call: Call) -> Product:
        m, (bits, scales) = call["a"].shape[0], (copy.copy(call) for _ in range(2))
        bits.tensors, scales.tensors = {"a": _bits(call["a"])}, {"a": of_each(call["scale_a"], (m, 1))}
        gather, gather_scales, fast = make(bits), make(scales), _fast(call)

        def gather_and_multiply(a: Any, b: Any, out: Any, scale_a: torch.Tensor, scale_b: torch.Tensor) -> None:
            every = gather_scales(of_each(scale_a, (m, 1)))
            matmul(gather(_bits(a)).view(a.dtype), b, out, every, scale_b, fast=fast)

        return gather_and_multiply

    return product


def _bits(a: torch.Tensor) -> torch.Tensor:
    """fp8 rows of whole runs of 16 bytes, as what collectives move: copied where torch cannot see them so."""
    a = plain(a)
    return (a.clone() if a.storage_offset() % 4 else a).view(torch.int32)


def _several(make: Callable[[Call], Gather]) -> Callable[[Sequence[Call]], Callable[..., None]]:
    """`several` of a form that gathers."""

    def plan(calls: Sequence[Call]) -> Callable[..., None]:
        gather, multiply = make(calls[0]), in_turn(*(_finished(call, matmul) for call in calls))
        return lambda a, bs, outs, biases: multiply(gather(plain(a)), bs, outs, biases)

    return plan


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *scales: torch.Tensor, fast: bool = False) -> None:
    """a @ b into `out`. scales: none, or those of a and b, whose elements are fp8: one, or one a row or column. fast:
    sums of fp8 products may stay in the tensor cores."""
    out = plain(out)
    if not scales:
        torch.mm(a, b, out=out)
        return
    (scale_a, scale_b), rows, columns = scales, (a.shape[0], 1), (1, b.shape[1])
    alike = (scale_a.shape == rows and scale_b.shape == columns) or scale_a.numel() == scale_b.numel() == 1
    if not alike:  # torch takes one for all of both, or one for each row and column
        scale_a, scale_b = of_each(scale_a, rows), of_each(scale_b, columns)
    torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out.dtype, use_fast_accum=fast, out=out)


def _fast(call: Call) -> bool:
    return bool(call.arguments.get("fast_accum"))


def of_each(scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """One scale, or one for each of `shape`, in this shape."""
    return scale.reshape(shape) if scale.numel() == math.prod(shape) else scale.reshape(1, 1).expand(shape).contiguous()


def lacks_group(call: Call) -> str:
    """Why NCCL has no group of this world's ranks, or is not wanted where the caller names no form; "" where it may
    run. Collective, but remembered where the caller names no form, because one rank may then plan alone."""
    known, key = call.world.lasting, "pkt.kernels.nccl"
    if call.asked is None and not nccl_wanted():
        return "PKT_NCCL=0"
    if may_share():
        return "PKT_SHARE_GPU=1, and NCCL wants a GPU for every rank"
    if call.asked or key not in known:
        try:
            process_group(call.world)
            known[key] = ""
        except Unsupported as error:  # the simulator, or torch's default group has other ranks
            known[key] = f"no group for NCCL, {error}"
    return known[key]


def _symmetric(world: World, dtype: torch.dtype | None, rows: int, cols: int) -> SymmetricTensor:
    """Where cuBLAS and a collective of pkt hand over to each other: one for all operators, as one is in flight."""
    name = "kernels.unfused"
    return world.keep((name, rows, cols, dtype), lambda: empty(rows, cols, dtype=dtype, name=name, world=world))


def multiply(
    world: World, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *scales: torch.Tensor, fast: bool = False
) -> None:
    """`matmul`, after the world's last call, which may have been given another stream and still use `out`."""
    if world.streams is not None:
        world.streams.follow()
    matmul(a, b, out, *scales, fast=fast)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """For torch, which records nothing of it, as of kernels, and writes products of trained weights into it."""
    if type(tensor) is SymmetricTensor:
        tensor = tensor.plain()
    return tensor.detach() if tensor.requires_grad else tensor
