"""Number formats and arithmetic of the simulator against torch's, bit for bit."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl

from tests.simulate.helpers import assert_same, run

SHORT = {torch.bfloat16: tl.bfloat16, torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def arithmetic(a, b, out, N: tl.constexpr):
    o = tl.arange(0, N)
    x, y = tl.load(a + o), tl.load(b + o)
    tl.store(out + o, x + y)
    tl.store(out + N + o, x - y)
    tl.store(out + 2 * N + o, x * y)
    tl.store(out + 3 * N + o, -x)
    tl.store(out + 4 * N + o, tl.maximum(x, y))
    tl.store(out + 5 * N + o, tl.minimum(x, y))
    tl.store(out + 6 * N + o, tl.abs(x))
    tl.store(out + 7 * N + o, tl.where(x < y, x, y))
    tl.store(out + 8 * N + o, x * 3 + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_arithmetic_rounds_every_result(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n = 4096
    a, b = ((torch.randn(n) * 10.0 ** torch.randint(-3, 4, (n,))).to(dtype) for _ in range(2))
    out = torch.empty(9, n, dtype=dtype)
    run(arithmetic, (1,), a, b, out, n)
    wanted = [
        a + b,
        a - b,
        a * b,
        -a,
        torch.maximum(a, b),
        torch.minimum(a, b),
        a.abs(),
        torch.minimum(a, b),
        a * 3 + 1,
    ]
    for found, right in zip(out, wanted):
        assert_same(found, right)


@triton.jit
def extremes(a, b, out, N: tl.constexpr):
    o = tl.arange(0, N)
    x, y = tl.load(a + o), tl.load(b + o)
    tl.store(out + o, tl.minimum(x, y))
    tl.store(out + N + o, tl.maximum(x, y))
    tl.store(out + 2 * N + o, tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 3 * N + o, tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_minimum_and_maximum_drop_nan_unless_told_to_keep_it(dtype: torch.dtype) -> None:
    nan = float("nan")
    a, b = torch.tensor([1, nan, 3, nan], dtype=dtype), torch.tensor([2, 2, nan, nan], dtype=dtype)
    out = torch.empty(4, 4, dtype=dtype)
    run(extremes, (1,), a, b, out, 4)
    for found, right in zip(out, (torch.fmin(a, b), torch.fmax(a, b), torch.minimum(a, b), torch.maximum(a, b))):
        assert_same(found, right)


@triton.jit
def clamped(x, out, N: tl.constexpr):
    o = tl.arange(0, N)
    v = tl.load(x + o)
    tl.store(out + o, tl.clamp(v, -1.0, 2.0))
    tl.store(out + N + o, tl.clamp(v, -1.0, 2.0, propagate_nan=tl.PropagateNan.ALL))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_clamp_drops_nan_unless_told_to_keep_it(dtype: torch.dtype) -> None:
    x, nan = torch.tensor([-3, float("nan"), 1.5, 9], dtype=dtype), float("nan")
    out = torch.empty(2, 4, dtype=dtype)
    run(clamped, (1,), x, out, 4)
    assert_same(out, torch.tensor([[-1, -1, 1.5, 2], [-1, nan, 1.5, 2]], dtype=dtype))


@triton.jit
def divide(a, b, out, N: tl.constexpr):
    o = tl.arange(0, N)
    q = tl.load(a + o) / tl.load(b + o)
    tl.static_assert(q.dtype == tl.float32)  # Triton divides 16-bit floats in fp32
    tl.store(out + o, q)


def test_bf16_division_is_in_fp32() -> None:
    torch.manual_seed(1)
    a, b = torch.randn(512).bfloat16(), torch.randn(512).bfloat16()
    out = torch.empty(512)
    run(divide, (1,), a, b, out, 512)
    assert_same(out, a.float() / b.float())


@triton.jit
def elementary(x, out, N: tl.constexpr):
    o = tl.arange(0, N)
    v = tl.load(x + o)
    tl.store(out + o, tl.exp(v))
    tl.store(out + N + o, tl.sqrt(v))
    tl.store(out + 2 * N + o, tl.log(v))
    tl.store(out + 3 * N + o, tl.sigmoid(v))
    tl.store(out + 4 * N + o, tl.fma(v, v, v))
    tl.store(out + 5 * N + o, tl.clamp(v, 0.5, 1.5))
    tl.store(out + 6 * N + o, tl.rsqrt(v))
    tl.store(out + 7 * N + o, tl.floor(v))
    tl.store(out + 8 * N + o, tl.erf(v))


def test_elementary_functions_match_torch() -> None:
    torch.manual_seed(2)
    x = torch.rand(1024) * 3 + 0.01
    out = torch.empty(9, 1024)
    run(elementary, (1,), x, out, 1024)
    d = x.double()
    fma = (d * d + d).float()
    wanted = [d.exp(), d.sqrt(), d.log(), d.sigmoid(), fma, d.clamp(0.5, 1.5), d.rsqrt(), d.floor(), d.erf()]
    for found, right in zip(out, wanted):
        torch.testing.assert_close(found.double(), right.double(), rtol=3e-7, atol=1e-7)
    assert_same(out[4], fma)  # one rounding, not two


@triton.jit
def methods(x, out, N: tl.constexpr):
    o = tl.arange(0, N)
    v = tl.load(x + o)
    tl.store(out + o, v.exp() + v.exp2() + v.log() + v.log2())
    tl.store(out + N + o, v.sqrt() + v.rsqrt() + v.sin() + v.cos())
    tl.store(out + 2 * N + o, v.floor() + v.ceil() + v.erf() + v.abs() + v.sigmoid())


def test_elementary_functions_are_methods_of_blocks() -> None:
    torch.manual_seed(2)
    x, out = torch.rand(64) * 3 + 0.01, torch.empty(3, 64)
    run(methods, (1,), x, out, 64)
    d = x.double()
    torch.testing.assert_close(out[0].double(), d.exp() + d.exp2() + d.log() + d.log2(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out[1].double(), d.sqrt() + d.rsqrt() + d.sin() + d.cos(), rtol=1e-6, atol=1e-6)
    wanted = d.floor() + d.ceil() + d.erf() + d.abs() + d.sigmoid()
    torch.testing.assert_close(out[2].double(), wanted, rtol=1e-6, atol=1e-6)


@triton.jit
def fma_short(x, out, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, tl.fma(tl.load(x + o), tl.load(x + N + o), tl.load(x + 2 * N + o)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fma_of_short_floats_rounds_once(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x = torch.randn(3, 2048).to(dtype)
    out = torch.empty(2048, dtype=dtype)
    run(fma_short, (1,), x, out, 2048)
    assert_same(out, (x[0].double() * x[1].double() + x[2].double()).to(dtype))


def test_fma_of_fp64_rounds_once() -> None:
    torch.manual_seed(3)
    x = torch.randn(3, 2048, dtype=torch.float64) * 10.0 ** torch.randint(-8, 8, (3, 2048))
    x[2, :1024] = -(x[0] * x[1])[:1024]  # what is left is the error of the product
    x[:, 0] = torch.tensor([-0.0, 1, -0.0])
    x[:, 1] = torch.tensor([1e200, 1e200, 1])
    out = torch.empty(2048, dtype=torch.float64)
    run(fma_short, (1,), x, out, 2048)
    assert (out[0], out[0].signbit(), out[1]) == (0, True, float("inf"))
    wanted = [float(Fraction(a) * Fraction(b) + Fraction(c)) for a, b, c in x.T[2:].tolist()]
    assert_same(out[2:], torch.tensor(wanted, dtype=torch.float64))


@triton.jit
def scaled(x, out, scale, N: tl.constexpr):
    o = tl.arange(0, N)
    v = tl.load(x + o) * scale
    tl.static_assert(v.dtype == tl.float32)  # a float argument is fp32 at run time, and takes part in promotion
    tl.store(out + o, v)
    tl.store(out + N + o, tl.load(x + o) * 0.1)  # a number in the source does not take part in promotion


def test_float_arguments_are_fp32() -> None:
    torch.manual_seed(8)
    x, out = torch.randn(64).bfloat16(), torch.empty(2, 64)
    run(scaled, (1,), x, out, 0.1, 64)
    assert_same(out[0], x.float() * torch.tensor(0.1))
    assert_same(out[1], (x.float() * torch.tensor(0.1).bfloat16().float()).bfloat16().float())


@triton.jit
def extreme_zeros(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(x + N + i)
    tl.store(out + i, tl.maximum(a, b))
    tl.store(out + N + i, tl.minimum(a, b))
    tl.store(out + 2 * N + i, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 3 * N + i, tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 4 * N + i, tl.max(a, 0))
    tl.store(out + 5 * N + i, tl.min(a, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_of_zeros_the_positive_one_is_the_larger(dtype: torch.dtype) -> None:
    """As PTX says of `max` and `min`: +0.0 > -0.0."""
    x = torch.tensor([[-0.0, 0.0, -0.0, 0.0], [0.0, -0.0, -0.0, 0.0]], dtype=dtype)
    out = torch.empty(6, 4, dtype=dtype)
    run(extreme_zeros, (1,), x, out, 4)
    largest = [0.0, 0.0, -0.0, 0.0]
    smallest = [-0.0, -0.0, -0.0, 0.0]
    wanted = [largest, smallest, largest, smallest, [0.0] * 4, [-0.0] * 4]
    assert_same(out, torch.tensor(wanted, dtype=dtype))


def test_fma_of_fp32_rounds_once() -> None:
    """Each sum is just inside a tie between c and an even neighbour, by less than fp64 can tell."""
    small, c = 2.0**-12, 1 + 2.0**-23
    a = torch.tensor([1.0, -1.0, -1.0, 1.0]) * (small + small * 2.0**-23)
    b = torch.full((4,), small - small * 2.0**-23)
    x, out = torch.stack([a, b, torch.tensor([c, -c, c, -c])]), torch.empty(4)
    run(fma_short, (1,), x, out, 4)
    assert_same(out, x[2])


@triton.jit
def atomic_extremes(low, high, x, was, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(was + i, tl.atomic_min(low + i, v))
    tl.store(was + N + i, tl.atomic_max(high + i, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_atomic_minimum_of_floats_returns_the_old_values(dtype: torch.dtype) -> None:
    x, old = torch.tensor([-3.0, 2.0, 0.5, -1.0], dtype=dtype), torch.tensor([1.5, -2.0, 0.0, 7.0], dtype=dtype)
    low, high, was = old.clone(), old.clone(), torch.empty(2, 4, dtype=dtype)
    run(atomic_extremes, (1,), low, high, x, was, 4)
    assert_same(was, old.expand(2, 4))
    assert_same(low, torch.minimum(old, x))
    assert_same(high, torch.maximum(old, x))


@triton.jit
def remainder(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) % tl.load(y + i))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_remainder_is_that_of_the_ptx(dtype: torch.dtype) -> None:
    """`div.rn`, `cvt.rzi`, `fma`; of short floats in fp32."""
    torch.manual_seed(6)
    x, y = (10 * torch.randn(256, dtype=torch.float64)).to(dtype), torch.randn(256, dtype=torch.float64).to(dtype)
    x[:64] *= 1000
    x[64:72] = y[64:72] * 3
    out = torch.empty(256, dtype=dtype)
    run(remainder, (1,), x, y, out, 256)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    quotients = (x.to(wide) / y.to(wide)).trunc().tolist()
    exact = [Fraction(a) - Fraction(q) * Fraction(b) for a, q, b in zip(x.tolist(), quotients, y.tolist())]
    assert_same(out, torch.tensor([float(e) for e in exact], dtype=torch.float64).to(wide).to(dtype))


def test_remainder_of_extreme_values() -> None:
    """fmod would find 0.1 for 1 % 0.1, whose quotient is rounded up to 10, and -0.0 for -3 % 1.5."""
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([1.5, -0.0, inf, 1.0, nan, -3.0, 1.0, 1e30])
    y = torch.tensor([inf, 1.0, 2.0, 0.0, 1.0, 1.5, 0.1, 1e-30])
    out = torch.empty(8)
    run(remainder, (1,), x, y, out, 8)
    assert_same(out, torch.tensor([1.5, 0.0, nan, nan, nan, 0.0, -(2.0**-26), -inf]))
    out = torch.empty(8, dtype=torch.float64)
    run(remainder, (1,), x.double(), y.double(), out, 8)
    assert_same(out[:6], torch.tensor([1.5, 0.0, nan, nan, nan, 0.0], dtype=torch.float64))
