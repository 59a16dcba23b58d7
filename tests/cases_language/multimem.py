"""In-switch reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl

from ._case import LAUNCHES, case, put_in, same


@triton.jit
def multimem_kernel(x, y, z, bar, n, world, OP: tl.constexpr, BLOCK: tl.constexpr):
    """Rank r reduces the blocks of programs r, r + size, ...; all ranks get the result, and its sum once more in z."""
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    pl.barrier(bar + pid, world)
    if pid % world.size == tl.cast(world.rank, tl.int32):
        v = pl.multimem_load_reduce(x + offs, world, OP, mask=offs < n)
        pl.multimem_store(y + offs, v, world, mask=offs < n)
    pl.multimem_reduce_add(z + offs, tl.load(x + offs), world, mask=offs < n)
    pl.barrier(bar + pid, world)


REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x.sum(0),
    "min": lambda x: x.amin(0),
    "max": lambda x: x.amax(0),
}
MULTIMEM = ("multimem_load_reduce", "multimem_store", "multimem_reduce_add")


@case(*MULTIMEM, op="add", dtype=torch.bfloat16)
@case(*MULTIMEM, op="max", dtype=torch.bfloat16)
@case(*MULTIMEM, op="min", dtype=torch.float16)
@case(*MULTIMEM, op="add", dtype=torch.float32)
@case(*MULTIMEM, op="max", dtype=torch.float32)
@case(*MULTIMEM, op="min", dtype=torch.int32)
@case(*MULTIMEM, op="add", dtype=torch.int64)
def multimem(world: Any, op: str, dtype: torch.dtype, block: int = 1024) -> None:
    """Blocks of 1024 elements: with less than 16 bytes for each thread the addition would not use the switch."""
    programs = world.size + 1
    total = programs * block
    n = total - 16  # whole runs of 16 bytes
    x, y, z = (pkt.empty(total, dtype=dtype) for _ in range(3))
    bar = pkt.signals(programs)
    for launch in range(LAUNCHES):
        inputs = torch.stack([(torch.arange(total) * 3 + 5 * r + launch) % 9 for r in range(world.size)]).double()
        y.fill_(-1)
        z.fill_(2)
        put_in(x, inputs[world.rank], world)
        multimem_kernel[(programs,)](x, y, z, bar, n, world.device, op, block)
        wanted = REDUCTIONS[op](inputs)
        wanted[n:] = -1
        same(world, y, wanted)
        wanted = inputs.sum(0) + 2
        wanted[n:] = 2
        same(world, z, wanted)
