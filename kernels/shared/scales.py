"""Scales of fp8 operands of products: an element of A stands for itself times the scale of its row, or of all of A, and
one of B for itself times that of its column, or of all of B. So the sum of the products is multiplied by both, once.

Tensor cores of sm_90 keep some 14 bits of a sum of fp8 products. So they add up some hundred of them, and these sums
are added in fp32: 128 in `tile_product.accumulate`, SUMMED times as many in `gluon_warps`. fast_accum, an argument of
torch's product of fp8 too, allows them to add up all of K; the Gluon forms and torch's product then do.

Where rows of A come from other ranks, their scales do, too: at its start a kernel puts this rank's into flagged words
on every rank, itself included, and a tile takes those of its rows. So whatever moves A, they travel in the same launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.memory.factories import zeros
from pkt.runtime.memory.tensor import SymmetricTensor

from ..declaration import Call, Case, Form, Operand, Shape, flag
from . import gluon_fits, products
from .fp8 import FP8
from .gluon_fits import NARROW8, WIDE8
from .tile_product import Tiles, columns_each

RESULT = torch.bfloat16
"""The dtype of the products."""


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
def _half(scales, words_ptr, m, world, epoch):
    """(scales of a rank's A, the launch's half of `words_of`)."""
    count = m if scales.A_EACH else 1
    return count, words_ptr + tl.cast(epoch & 1, tl.int64) * world.size * count * 2


@triton.jit
def put(scales, words_ptr, m, world, epoch, BLOCK: tl.constexpr):
    """This rank's scales of A, of m rows, to every rank; the programs share them. Nothing where scales is None."""
    if scales is not None:
        count, half = _half(scales, words_ptr, m, world, epoch)
        mine = half + tl.cast(world.rank, tl.int64) * count * 2
        for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
            at = first + tl.arange(0, BLOCK)
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
        count, half = _half(scales, words_ptr, m, world, epoch)
        words = half + tl.cast(source, tl.int64) * count * 2
        if scales.A_EACH:
            at = row + tl.arange(0, acc.shape[0])
            found = pl.take_flagged(words + 2 * at, epoch, world, mask=at < m, values=1)[0]
            acc *= found.to(tl.float32, bitcast=True)[:, None]
        else:
            acc *= pl.take_flagged(words, epoch, world, values=1)[0].to(tl.float32, bitcast=True)
        return acc * _loaded(scales.b_ptr, col, N, acc.shape[1], scales.B_EACH)[None, :]


# -------------------------------------------------------------------------------------------------------- host
SMALL = {"tiles": (16, 16, 32)}
"""`products.SMALL` of fp8, whose tensor cores take 32 along K."""


def tiles(call: Call, name: str, value: Sequence[int]) -> Tiles:
    """`products.tiles` of fp8."""
    found = products.tiles(call, name, value)
    if found.block_k < SMALL["tiles"][2]:
        raise call.refuse(name, tuple(found[:3]), f"{SMALL['tiles'][2]} along K at least, as tensor cores take fp8")
    return found


def given(call: Call) -> tuple[Any, Any]:
    """The scales of a and b in a call; None, None in one that has none."""
    return call.tensors.get("scale_a"), call.tensors.get("scale_b")


def each(scale: torch.Tensor | None) -> bool:
    """Whether there is a scale for each row, or column."""
    return scale is not None and scale.numel() > 1


Passed = Callable[[Any, Any], "Scales | None"]


def passing(call: Call) -> Passed:
    """passed(scale_a, scale_b): what launches of this call hand to a kernel; None where it has no scales."""
    scale_a, scale_b = given(call)
    if scale_a is None:
        return lambda scale_a, scale_b: None
    eaches = tl.constexpr(each(scale_a)), tl.constexpr(each(scale_b))
    return lambda scale_a, scale_b: Scales(scale_a, scale_b, *eaches)


def words_of(call: Call, counted: Sequence[Any]) -> SymmetricTensor | None:
    """Flagged words for a call's scales of A, int32 (2, size, scales of a rank's A, 2), in halves by the parity of the
    launch, of which rank r puts [:, r] on every rank; None where it has no scales. counted: by what the launches are
    counted that the words belong to. Collective."""
    scale_a, _ = given(call)
    if scale_a is None:
        return None
    count, world, name = scale_a.numel(), call.world, f"{call.name}.scales"
    shape = 2, world.size, count, 2
    return world.keep((name, count, *counted), lambda: zeros(*shape, dtype=torch.int32, name=name, world=world))


def operands(a: str, columns: str | Callable[[Call], str] = "n", *, same_bias: bool = False) -> dict[str, Operand]:
    """The operands of a product of fp8, whose a has the shape `a`, and b (k, columns)."""
    of = columns if callable(columns) else lambda call: columns
    rows = a.split()[0]
    return {
        "a": Operand(a, (FP8,)),
        "b": Operand(lambda call: f"k {of(call)}", turned=True),
        "bias": Operand(columns, optional=True, as_result=True, same=same_bias),
        "scale_a": Operand(_one_or("scale_a", lambda call: f"{rows} 1"), (torch.float32,), make=_made),
        "scale_b": Operand(_one_or("scale_b", lambda call: f"1 {of(call)}"), (torch.float32,), make=_made),
    }


def _one_or(name: str, shape: Callable[[Call], str]) -> Callable[[Call], str | Shape]:
    """The shape of a scale: any of one element, or `shape`."""

    def found(call: Call) -> str | Shape:
        scale = call.tensors.get(name)
        return tuple(scale.shape) if scale is not None and scale.numel() == 1 else shape(call)

    return found


def _made(shape: Shape, random: torch.Generator, call: Call) -> torch.Tensor:
    """For tests: far from 1, so that one that is left out is noticed."""
    return torch.rand(shape, generator=random) + 3.0


Reference = Callable[..., torch.Tensor]


def of_values(reference: Reference) -> Reference:
    """The reference of a product of fp8, from that of the product of what elements stand for."""

    def exact(
        rank: int, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], bias: Any, scale_a: Sequence[torch.Tensor],
        scale_b: Sequence[torch.Tensor], epilogue: str = "none", fast_accum: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        weighed = ([x.double() * scale.double() for x, scale in zip(*pair)] for pair in ((a, scale_a), (b, scale_b)))
        return reference(rank, *weighed, bias, epilogue)

    return exact


ARGUMENTS = {**products.ARGUMENTS, "fast_accum": flag}


_GLUON = gluon_fits.fits("n")  # k is made whole


def gluon(of: Form, *names: str) -> Form:
    """The same of a Gluon form, whose tiles follow from fast_accum. names: its other settings."""

    def complete(call: Call) -> Mapping[str, Any]:
        if call["tiles"].block_n > NARROW8.block_n and not call["fast_accum"]:
            raise call.refuse("tiles", tuple(call["tiles"]), f"{NARROW8.block_n} columns, or fast_accum=True")
        assert of.complete is not None
        return of.complete(call)

    tiles = {"tiles": lambda call: WIDE8 if call["fast_accum"] else NARROW8}
    return form(of, settings={**tiles, **dict.fromkeys(names)}, complete=complete, fits=_GLUON)


def form(of: Form, **others: Any) -> Form:
    """A form of fp8, from that of 16 bits: of one weight, with rows of whole runs of 16 bytes, and not predicted."""
    small = {**of.small, **SMALL} if of.small else {}
    plan = products.whole_runs(of.plan)
    return replace(of, plan=plan, several=None, space=None, seconds=None, small=small, **others)


def unfused(forms: Mapping[str, Form]) -> dict[str, Form]:
    """The same of those that call torch's product of fp8, which takes multiples of 16 columns."""

    def fits(of: Form) -> Callable[[Call], str]:
        return lambda call: of.fits(call) or _odd_columns(call)

    return {name: form(of, fits=fits(of)) for name, of in forms.items()}


def _odd_columns(call: Call) -> str:
    columns = columns_each(call["epilogue"]) * call["n"]
    return f"{columns} columns of b, not a multiple of 16" if columns % 16 else ""


FUSED_ROWS = 512
"""Of the product, from which the Gluon forms are faster than torch's product and a collective."""


def default(plain: str, rows: Callable[[Call], int]) -> Callable[[Call], str]:
    """`default` of a product of so many rows. plain: the form in plain Triton, which runs anywhere."""

    def chosen(call: Call) -> str:
        if not call.on_gpu or _odd_columns(call):
            return plain
        return "unfused" if rows(call) < FUSED_ROWS or _GLUON(call) else "gluon"

    return chosen


def nasty(mode: str) -> Iterator[Case]:
    """`products.nasty` of a form that takes multiples of 16 columns."""
    for k, n, epilogue in ((16, 48, "silu"), (31, 16, "gelu")):
        given = {"mode": mode, "epilogue": epilogue, "given": ("bias",)}
        yield Case({"m": 17, "k": k, "n": n}, arguments=given, out="given", explore=False)
