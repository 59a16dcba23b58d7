"""What the three products of fp8 elements with scales declare alike; scales.py has the scales themselves.

They are operators of their own, because their calls have rules of their own: a and b are fp8 and the result bf16, b is
the transposed view, a has a part of the rows, there is one weight, and no gradient. Their kernels are those of the
products of 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pkt.wording import count_text

from ..declaration import Call, Case, Form, Operand, Shape, flag
from . import gluon_fits, products
from .fp8 import FP8
from .gluon_fits import NARROW8, WIDE8
from .tile_product import Tiles, columns_each

RESULT = torch.bfloat16
"""The dtype of the products."""
SMALL = {"tiles": (16, 16, 32)}
"""`products.SMALL` of fp8, whose tensor cores take 32 along K."""


def tiles(call: Call, name: str, value: Sequence[int]) -> Tiles:
    """`products.tiles` of fp8."""
    found = products.tiles(call, name, value)
    if found.block_k < SMALL["tiles"][2]:
        raise call.refuse(name, tuple(found[:3]), f"{SMALL['tiles'][2]} along K at least, as tensor cores take fp8")
    return found


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
Ranks = Sequence[torch.Tensor]
"""An operand of every rank."""


def of_values(reference: Reference) -> Reference:
    """The reference of a product of fp8, from that of the product of what elements stand for."""

    def exact(
        rank: int, a: Ranks, b: Ranks, bias: Any = None, *, scale_a: Ranks, scale_b: Ranks, epilogue: str = "none",
        fast_accum: bool = False,
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
    return f"{count_text(columns, 'column')} of b, not a multiple of 16" if columns % 16 else ""


# By benchmarks/results/fp8_products_2.json and fp8_products.json, of 2 and 4 x H200: in no case does a choice take more
# than 1.025 times as long as the fastest baseline.
MULTIPLIED, MOVED, MOVING_BEGINS = 1.37e15, 330e9, 8e-6
"""FLOP a second of torch's product; bytes a second and least seconds of a collective."""
LOSS = {False: 0.07, True: 0.056}
"""Share of torch's product by which that of the Gluon forms takes longer, without fast_accum and with it."""


def default(plain: str, least: int, gathers: bool, sent: Callable[[Call], float]) -> Callable[[Call], str]:
    """`default` of a product: "gluon" from `least` rows on, where the collective takes longer than what the product
    loses. plain: the form in plain Triton, which runs anywhere. gathers: each rank has a part of the rows. sent: bytes
    that leave a rank."""

    def chosen(call: Call) -> str:
        if not call.on_gpu or _odd_columns(call):
            return plain
        rows, columns = call["a"].shape[0] * (call.world.size if gathers else 1), call["b"].shape[1]
        if rows < least or _GLUON(call):
            return "unfused"
        multiplying = 2 * rows * columns * (call["k"] if gathers else call.greatest("k")) / MULTIPLIED
        moving = MOVING_BEGINS + sent(call) / MOVED
        return "gluon" if moving > LOSS[call["fast_accum"]] * multiplying else "unfused"

    return chosen


def nasty(mode: str) -> Iterator[Case]:
    """`products.nasty` of a form that takes multiples of 16 columns."""
    for k, n, epilogue in ((16, 48, "silu"), (31, 16, "gelu")):
        given = {"mode": mode, "epilogue": epilogue, "given": ("bias",)}
        yield Case({"m": 17, "k": k, "n": n}, arguments=given, out="given", explore=False)
