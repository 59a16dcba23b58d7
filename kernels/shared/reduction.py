"""Reductions over ranks: the sum, the minimum or the maximum, in fp32 and in a fixed order of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import triton
import triton.language as tl

import pkt.language as pl

Op = Literal["sum", "min", "max"]
OPS = ("sum", "min", "max")


def reduced(inputs: Sequence[torch.Tensor], op: Op = "sum") -> torch.Tensor:
    """The ranks' `x` reduced, in fp64; a NaN of any rank is a NaN."""
    over: Callable[..., torch.Tensor] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}[op]
    return over(torch.stack([x.double() for x in inputs]), 0)


@triton.jit
def combine(acc, x, OP: tl.constexpr):
    """One more rank's elements. Minimum and maximum keep a NaN, as torch's do."""
    if OP == "sum":
        return acc + x
    elif OP == "min":
        return tl.minimum(acc, x, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(OP == "max", 'op is "sum", "min" or "max"')
        return tl.maximum(acc, x, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def over_ranks(ptrs, mask, world, FIRST, OP: tl.constexpr):
    """The elements at `ptrs` on all ranks, reduced in fp32 in the order FIRST, FIRST + 1, ... (mod size)."""
    acc = pl.load(ptrs, FIRST, world, mask=mask, other=0).to(tl.float32)
    for i in tl.static_range(1, world.size):
        x = pl.load(ptrs, (FIRST + i) % world.size, world, mask=mask, other=0).to(tl.float32)
        acc = combine(acc, x, OP)
    return acc
