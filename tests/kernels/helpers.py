"""Shared by the kernels' tests: ranks, inputs, and bounds that follow from the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.operator import operators
from pkt.kernels.shared.tile_product import finished

RANKS = (1, 2, 3, 4, 5, 8)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}  # unit roundoff
TINY = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float32: 2.0**-150}  # half the least subnormal
SEEDS = (0, 1, 2, 3, 6, 9)  # in order; random; random; adversarial against rank 1, 2, 3
LAUNCHES = 3
TMA, REGISTERS = (20, 24, 40), (7, 13, 21)  # (m, k, N) whose rows are, or are not, multiples of 16 bytes
FINISHES = [  # (epilogue, whether there is a bias, dtype, sizes)
    ("none", True, torch.bfloat16, TMA),
    ("relu", True, torch.float16, REGISTERS),
    ("gelu", True, torch.bfloat16, REGISTERS),
    ("gelu", True, torch.float32, TMA),
    ("silu", False, torch.float32, REGISTERS),
]
GATHER_FORMS = [  # (mode, shard) of all_gather_matmul that run without a GPU; copies are of rows alone
    (mode, shard)
    for mode, form in operators()["all_gather_matmul"].forms.items()
    for shard in ("rows", "columns")
    if not form.gpu and (mode, shard) != ("copy", "columns")
]


Operands = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""The ranks' (a, b)."""


def on_ranks(
    ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    seed: int = 0,
    sms: int = 4,
    multicast: bool = True,
    node_size: int | None = None,
) -> list[Any]:
    """`fn(world, *args)` on simulated ranks, with the race detector; what each returned."""
    return pkt.launch(
        fn, ranks, device="cpu", args=args, heap="64MiB", seed=seed, sms=sms, races=True, multicast=multicast,
        node_size=node_size,
    )  # fmt: skip


def random(shape: Sequence[int], dtype: torch.dtype, *seed: int) -> torch.Tensor:
    """Standard normal, the same for the same seed on every rank."""
    generator = torch.Generator().manual_seed(hash(seed) & 0x7FFFFFFF)
    return torch.randn(*shape, generator=generator, device="cpu").to(dtype)


def inputs(world: Any, shape: Sequence[int], dtype: torch.dtype, launch: int) -> list[torch.Tensor]:
    """The ranks' inputs of a launch."""
    return [random(shape, dtype, launch, r) for r in range(world.size)]


def operands(
    world: Any, a: Sequence[int], b: Sequence[int], dtype: torch.dtype, launch: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The ranks' (a, b) of a launch."""
    return [(random(a, dtype, launch, r, 0), random(b, dtype, launch, r, 1)) for r in range(world.size)]


def as_weight(b: torch.Tensor) -> torch.Tensor:
    """`b` as the transposed view of a contiguous tensor."""
    return b.t().contiguous().t()


def assert_within(found: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, *what: Any) -> None:
    error = (found.double() - exact).abs()
    worst = (error / bound.clamp_min(1e-300)).max().item() if error.numel() else 0.0
    assert (error <= bound).all(), f"{what}: error {worst:.2f} times the bound, {error.max():.3g} at most"


def assert_raises(error: type[Exception], match: str, call: Callable[[Any], Any]) -> None:
    """Assert that `call(world)` raises `error` on two ranks."""
    with pytest.raises(error, match=match):
        on_ranks(2, call)


def assert_refused(
    operator: Callable[..., Any], error: type[Exception], match: str, *shapes: Sequence[int], **options: Any
) -> None:
    """Assert that `operator` raises `error` on two ranks for operands of these shapes, filled with ones."""
    assert_raises(error, match, lambda world: operator(*map(torch.ones, shapes), **options))


def assert_same_on_all(results: Sequence[torch.Tensor]) -> None:
    assert all(torch.equal(r, results[0]) for r in results)


def sum_bound(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """How far a sum of `parts` in fp32, rounded once to their dtype, may be from the exact sum.

    Each of the additions is off by 2^-24 of a partial sum, which sum |part| bounds; the rounding by u of the result.
    """
    dtype = parts[0].dtype
    exact = sum(p.double() for p in parts)
    size = sum(p.double().abs() for p in parts)
    fp32 = len(parts) * 2.0**-24 * size
    return fp32 + UNIT[dtype] * (exact.abs() + fp32) + TINY[dtype]


def product_bound(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How far `a @ b`, with exact products summed in fp32, may be from the exact product before it is rounded:
    one rounding of 2^-24 for each product and each sum over K, in any order."""
    terms = a.shape[1] + 1
    return 1.01 * terms * 2.0**-24 * (a.double().abs() @ b.double().abs())


def errors_of_products(ops: Operands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Over all ranks: the sum of |a| @ |b|; how far products in fp32 may be off, and how far their roundings."""
    dtype = ops[0][0].dtype
    magnitude, fp32 = sum(a.double().abs() @ b.double().abs() for a, b in ops), sum(product_bound(*op) for op in ops)
    return magnitude, fp32, UNIT[dtype] * (magnitude + fp32) + len(ops) * TINY[dtype]


def sum_of_products_bound(ops: Operands, exact: torch.Tensor) -> torch.Tensor:
    """How far a sum over ranks may be, if each product is rounded to the dtype, and their sum in fp32 once more."""
    magnitude, fp32, partials = errors_of_products(ops)
    return rounded(exact, fp32 + partials + len(ops) * 2.0**-24 * magnitude, ops[0][0].dtype)


SLOPE = {"none": 1.0, "relu": 1.0, "gelu": 1.13, "silu": 1.1}  # the steepest of each epilogue


def finished_bound(
    exact: torch.Tensor, error: torch.Tensor, bias: torch.Tensor | None, epilogue: Any, dtype: torch.dtype
) -> torch.Tensor:
    """How far a finished result may be from the exact one, if its sum is off by `error`. Adding the bias rounds once.
    The tail of gelu and the divisor 1 + exp of silu are off by about 2^-22, which moves the result by less than
    2^-20 |x|. The result is rounded once, to `dtype`."""
    x = exact if bias is None else exact + bias.double()
    size = x.abs() + error
    error = SLOPE[epilogue] * (error + 2.0**-24 * size) + (2.0**-20 * size if epilogue in ("gelu", "silu") else 0)
    return rounded(finished(x, None, epilogue), error, dtype)


def rounded(exact: torch.Tensor, error: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`error` plus one rounding of the result to `dtype`."""
    return error + UNIT[dtype] * (exact.abs() + error) + TINY[dtype]
