"""Which numbers of a kernel are tensors, whose `//` is that of C, and which stay constants, whose `//` is Python's."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import pkt
from pkt.simulate import skipped
from tests.simulate.helpers import line_of, run

NINE = tl.constexpr(9)

OF_THIS_RELEASE = pytest.mark.skipif(
    not triton.__version__.startswith(skipped.CHECKED), reason="newer releases of Triton make other constants"
)


@triton.jit
def updated(out, N: tl.constexpr):
    tl.store(out, (N - 10) // 4)
    N -= 10
    tl.store(out + 1, N // 4)
    minus: tl.int32 = -7
    tl.store(out + 2, minus // 4)
    constant: tl.constexpr = -7
    tl.store(out + 3, constant // 4)
    shape = tl.zeros((2, 4), tl.int32).shape
    tl.store(out + 4, (shape[1] - 11) // 4)


def test_a_constant_that_is_updated_or_assigned_becomes_a_tensor() -> None:
    out = torch.empty(5, dtype=torch.int32)
    run(updated, (1,), out, 3)
    assert out.tolist() == [-2, -1, -1, -2, -1]


@triton.jit
def chosen(out, x, n, N: tl.constexpr):
    tl.store(out, (7 if n > 5 else -7) // 2)
    tl.store(out + 1, (7 if N > 5 else -7) // 2)
    scaled = tl.load(x) * (0.5 if n > 5 else 2.0)
    tl.static_assert(scaled.dtype == tl.float32)
    scaled = tl.load(x) * (0.5 if N > 5 else 2.0)
    tl.static_assert(scaled.dtype == tl.float16)
    pairs = [a + 1 for a in ((n, n) if N > 5 else (n, 3 * n))]
    tl.store(out + 2, (pairs[1] if n > 5 else (20 if n > 2 else 10)) + (1 if n > 0 and (0 if n > 9 else 1) > 0 else 0))


def test_a_choice_by_a_run_time_condition_is_a_tensor() -> None:
    out, x = torch.empty(3, dtype=torch.int32), torch.ones(1, dtype=torch.float16)
    run(chosen, (1,), out, x, 3, 3)
    assert out.tolist() == [-3, -4, 21]
    run(chosen, (1,), out, x, 6, 3)
    assert out.tolist() == [3, -4, 20]


@triton.jit
def downwards(out, n, step, STEP: tl.constexpr):
    for i in range(n, 0, STEP):
        tl.store(out + i, n - i)
    for i in range(n, 0, step):
        tl.store(out + i, i)


def test_a_negative_step_must_be_a_constant() -> None:
    """Triton turns a loop round whose step is a negative constant. Any other counts upwards."""
    out = torch.zeros(5, dtype=torch.int32)
    run(downwards, (1,), out, 4, 2, -1)
    assert out.tolist() == [0, 3, 2, 1, 0]
    place = line_of(downwards, "range(n, 0, step)")
    with pytest.raises(
        pkt.Unsupported, match=f"range at {place}: found a negative step that is known at run time only"
    ):
        run(downwards, (1,), out, 4, -1, -1)


@triton.jit
def constants(out, x, N: tl.constexpr, FLAG: tl.constexpr):
    block = tl.load(x + tl.arange(0, N.value))
    tl.store(out, (20 % NINE) + (N % block.shape[0]) + (1 << NINE))
    tl.store(out + 1, (6 & NINE) + (6 | NINE) * 16 + (6 ^ NINE) * 256 + (1024 >> NINE) * 4096)
    if FLAG.value:
        tl.store(out + 2, block.shape[0].value + NINE.value)


def test_constants_have_a_value_and_operators_on_both_sides() -> None:
    out = torch.empty(3, dtype=torch.int32)
    run(constants, (1,), out, torch.zeros(4), 4, True)
    assert out.tolist() == [2 + 512, 15 * 16 + 15 * 256 + 2 * 4096, 13]


SIZES = tl.constexpr((4, 5, -6))
HALF = tl.constexpr(3.5)


@triton.jit
def asked(out, n):
    tl.store(out, len(SIZES) + 10 * int(HALF))
    tl.store(out + 1, float(HALF) * 2)
    tl.static_assert(isinstance(NINE, int) and not isinstance(NINE, tl.constexpr))
    tl.static_assert(isinstance((n, 1), tl.tuple) and isinstance(n.shape, tl.tuple) and not isinstance(n, tl.tuple))


def test_builtins_take_the_value_of_a_constant() -> None:
    out = torch.empty(2)
    run(asked, (1,), out, 5)
    assert out.tolist() == [33, 7]


@triton.jit
def constant_first(out, x, n):
    v = tl.load(x + tl.arange(0, 4))
    tl.store(out + tl.arange(0, 4), (NINE * v).to(tl.int32) - (NINE - v)[None, :].sum(0).to(tl.int32))
    tl.store(out + 4, -(NINE % n) + (NINE // n).to(tl.int32))
    if NINE < n:
        tl.store(out + 5, 1)
    rounds = 0
    while (NINE == n) & (rounds < 3):
        rounds += 1
    tl.store(out + 6, rounds)
    tl.store(out + 7, 1 if NINE > n else 2)


def test_a_constant_before_an_operator_gives_a_tensor() -> None:
    """Which has methods, and whose truth is its value."""
    out = torch.zeros(8, dtype=torch.int32)
    run(constant_first, (1,), out, torch.arange(4).float(), 5)
    assert out.tolist() == [-9, 1, 11, 21, -3, 0, 0, 1]
    run(constant_first, (1,), out, torch.arange(4).float(), 9)
    assert out.tolist()[4:] == [1, 0, 3, 2]


@triton.jit
def shifted(out, x):
    i = tl.arange(0, 2)
    tl.store(out + i, -9 >> (tl.load(x + i) > 0))


def test_a_shift_by_a_condition_is_unsigned() -> None:
    """Triton takes the sign of the block on the right."""
    out = torch.zeros(2, dtype=torch.int32)
    run(shifted, (1,), out, torch.tensor([0, 1]))
    assert out.tolist() == [-9, (2**32 - 9) >> 1]


NOTHING = tl.constexpr(None)
YES = tl.constexpr(True)


@triton.jit
def _scaled(x, scale: tl.constexpr = NOTHING):
    return x if scale is None else x * scale


@triton.jit
def identities(out, n):
    tl.store(out, _scaled(n) + 100 * _scaled(n, NINE))
    tl.store(out + 1, 1 if YES is True and NINE is not NOTHING else 2)
    tl.device_assert(n < 9, f"n is not below {NINE}")


def test_is_compares_the_values_of_constants() -> None:
    out = torch.zeros(2, dtype=torch.int32)
    run(identities, (1,), out, 2)
    assert out.tolist() == [1802, 1]
    with pytest.raises(pkt.RankFailed, match="n is not below 9"):
        run(identities, (1,), out, 9)


@triton.jit
def small(out, x):
    v = tl.load(x)
    tl.store(out, v * 1e-7)
    tl.store(out + 1, v * 2e-6)
    tl.store(out + 2, v * float("inf"))
    tl.store(out + 3, tl.full((), 3e-7, tl.bfloat16))


def test_a_constant_in_bf16_has_six_decimals() -> None:
    """Triton makes it from text with six decimals, so a GPU multiplies by 0."""
    out = torch.empty(4)
    run(small, (1,), out, torch.ones(1).bfloat16())
    assert out.tolist() == [0, torch.tensor(2e-6).bfloat16().item(), float("inf"), 0]


@triton.jit
def large(out, x):
    i = tl.arange(0, 2)
    tl.store(out + i, tl.full((2,), 0xFFFFFFFF, tl.int32))
    tl.store(out + 2 + i, tl.full((2,), 300, tl.uint8))
    tl.store(out + 4 + i, tl.full((2,), 200, tl.int8))
    tl.store(out + 6 + i, tl.full((2,), 40000, tl.int16))


def test_a_constant_that_is_too_large_keeps_its_low_bits() -> None:
    out = torch.empty(8, dtype=torch.int64)
    run(large, (1,), out, out)
    assert out[::2].tolist() == [-1, 44, -56, 40000 - 2**16]


@triton.jit
def negative_zero(out, x):
    v = tl.load(x + tl.arange(0, 2))
    tl.store(out + tl.arange(0, 2), tl.where(v > 0, v, -0.0))
    tl.store(out + 2 + tl.arange(0, 2), v + -0.0)


@OF_THIS_RELEASE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_constant_zero_is_positive(dtype: torch.dtype) -> None:
    out = torch.full((4,), -1, dtype=dtype)
    run(negative_zero, (1,), out, torch.full((2,), -0.0, dtype=dtype))
    assert out.tolist() == [0] * 4
    assert not out.signbit().any()


@triton.jit
def filled(out, x):
    i = tl.arange(0, 2)
    tl.store(out + i, tl.load(x + i, mask=i < 0, other=-1e300))
    tl.store(out + 2 + i, tl.load(x + i, mask=i < 0, other=16777217))
    tl.store(out + 4 + i, tl.load(x + i, mask=i < 0, other=0.5))


def test_masked_elements_of_fp64_have_the_exact_number() -> None:
    out = torch.empty(6, dtype=torch.float64)
    run(filled, (1,), out, torch.ones(2, dtype=torch.float64))
    assert out.tolist() == [-1e300] * 2 + [16777217] * 2 + [0.5] * 2


@triton.jit
def compared(out, x):
    v = tl.load(x + tl.arange(0, 4))
    tl.store(out + tl.arange(0, 4), (v > 1e39).to(tl.int32) + 10 * (v == 1e-40) + 100 * (v >= float("inf")))


@OF_THIS_RELEASE
def test_a_number_beyond_fp32_is_compared_in_fp64() -> None:
    out, x = torch.empty(4, dtype=torch.int32), torch.tensor([float("inf"), 1e-40, 3e38, 0])
    run(compared, (1,), out, x)
    assert out.tolist() == [101, 0, 0, 0]
