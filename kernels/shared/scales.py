"""Scales of fp8 operands of products: an element of A stands for itself times the scale of its row, or of all of A, and
one of B for itself times that of its column, or of all of B. So the sum of the products is multiplied by both, once.

Tensor cores of sm_90 keep some 14 bits of a sum of fp8 products. So they add up some hundred of them, and these sums
are added in fp32: 128 in `tile_product.accumulate`, SUMMED times as many in `gluon_warps`. fast_accum, an argument of
torch's product of fp8 too, allows them to add up all of K; the Gluon forms and torch's product then do.

Where rows of A come from other ranks, their scales do, too: at its start a kernel puts this rank's into flagged words
on every rank, itself included, and a tile takes those of its rows. So whatever moves A, they travel in the same launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.memory.factories import zeros
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..declaration import Call


# ------------------------------------------------------------------------------------------------------ device
class Scales(NamedTuple):
    """What a kernel scales sums with."""

    a_ptr: Any  # fp32 (rows of A,), or (1,) unless A_EACH, this rank's
    b_ptr: Any  # fp32 (columns of B,), or (1,) unless B_EACH, this rank's
    A_EACH: tl.constexpr  # a row of A has a scale of its own
    B_EACH: tl.constexpr  # a column of B has


@triton.jit
def _loaded(ptr, first, count, LENGTH: tl.constexpr, EACH: tl.constexpr):
    """(LENGTH,) scales from `first` on, of `count`; the only one for all unless EACH."""
    if EACH:
        at = first + tl.arange(0, LENGTH)
        return tl.load(ptr + at, mask=at < count, other=0)
    else:
        return tl.zeros((LENGTH,), tl.float32) + tl.load(ptr)


@triton.jit
def scaled(acc, scales, row, M, col, N):
    """The tile `acc` of sums, fp32, from row `row` of this rank's A and column `col` on, in values. `acc` itself where
    scales is None."""
    if scales is None:
        return acc
    else:
        rows = _loaded(scales.a_ptr, row, M, acc.shape[0], scales.A_EACH)
        return acc * rows[:, None] * _loaded(scales.b_ptr, col, N, acc.shape[1], scales.B_EACH)[None, :]


@triton.jit
def half_of(scales, words_ptr, m, world, epoch):
    """(scales of a rank's A, the launch's half of `words_of`)."""
    count = m if scales.A_EACH else 1
    return count, words_ptr + tl.cast(epoch & 1, tl.int64) * world.size * count * 2


@triton.jit
def put(scales, words_ptr, m, world, epoch, BLOCK: tl.constexpr):
    """This rank's scales of A, of m rows, to every rank; the programs share them. Nothing where scales is None."""
    if scales is not None:
        count, half = half_of(scales, words_ptr, m, world, epoch)
        for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
            put_block(scales, half, first + tl.arange(0, BLOCK), count, world, epoch)


@triton.jit
def put_block(scales, half, at, count, world, epoch):
    """Those at places `at`, a block, of `count`."""
    mine = half + tl.cast(world.rank, tl.int64) * count * 2
    scale = tl.load(scales.a_ptr + at, mask=at < count, other=0).to(tl.int32, bitcast=True)
    for d in tl.static_range(world.size):
        peer = (tl.cast(world.rank, tl.int32) + d) % world.size
        pl.put_flagged(mine + 2 * at, (scale,), epoch, peer, world, mask=at < count)


@triton.jit
def scaled_of(acc, scales, words_ptr, source, row, m, col, N, world, epoch):
    """`scaled`, for rows of the shard of rank `source`, of m rows: those scales are taken once they are here."""
    if scales is None:
        return acc
    else:
        count, half = half_of(scales, words_ptr, m, world, epoch)
        words = half + tl.cast(source, tl.int64) * count * 2
        if scales.A_EACH:
            i = tl.arange(0, acc.shape[0])
            found = pl.take_flagged(words + 2 * (row + i), epoch, world, mask=row + i < m, values=1)[0]
            found = tl.gather(found, i, 0)  # or Triton takes the words in the layout of acc, where a thread has many
            acc *= found.to(tl.float32, bitcast=True)[:, None]
        else:
            acc *= pl.take_flagged(words, epoch, world, values=1)[0].to(tl.float32, bitcast=True)
        return acc * _loaded(scales.b_ptr, col, N, acc.shape[1], scales.B_EACH)[None, :]


# -------------------------------------------------------------------------------------------------------- host
def given(call: Call) -> tuple[Any, Any]:
    """The scales of a and b in a call; None, None in one that has none."""
    return call.tensors.get("scale_a"), call.tensors.get("scale_b")


Passed = Callable[[Any, Any], "Scales | None"]


def passing(scale_a: torch.Tensor | None, scale_b: torch.Tensor | None) -> Passed:
    """passed(scale_a, scale_b): what launches with scales of as many elements hand to a kernel; None without scales."""
    if scale_a is None or scale_b is None:
        return lambda scale_a, scale_b: None
    each = [tl.constexpr(scale.numel() > 1) for scale in (scale_a, scale_b)]
    return lambda scale_a, scale_b: Scales(scale_a, scale_b, *each)


def words_of(world: World, name: str, scale_a: torch.Tensor | None, counted: Sequence[Any]) -> SymmetricTensor | None:
    """Flagged words for the ranks' scales of A, int32 (2, size, scales of a rank's A, 2), in halves by the parity of
    the launch, of which rank r puts [:, r] on every rank; None without scales. name: of the operator. counted: by what
    the launches are counted that the words belong to. Collective."""
    if scale_a is None:
        return None
    count, name = scale_a.numel(), f"{name}.scales"
    shape = 2, world.size, count, 2
    return world.keep((name, count, *counted), lambda: zeros(*shape, dtype=torch.int32, name=name, world=world))
