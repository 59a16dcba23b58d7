"""Number formats and arithmetic of the simulator against torch's, bit for bit."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pkt.errors import Unsupported
from pkt.simulate.numerics import decode, encode
from tests.simulate.helpers import assert_same, line_of, run

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
SHORT = {torch.bfloat16: tl.bfloat16, torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@triton.jit
def convert(x, y, N: tl.constexpr, ROUNDING: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, tl.load(x + o).to(y.dtype.element_ty, fp_downcast_rounding=ROUNDING))


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a short format; for fp32 many bit patterns, with all ties of the short formats."""
    if dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(1 << 16).to(torch.int32).to(torch.uint16).view(dtype)
    top = torch.arange(1 << 16) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF])
    bits = (top[:, None] | low[None, :]).reshape(-1)
    return (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)


def reference(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch's conversion, but saturating for fp8 as `cvt.rn.satfinite` does."""
    if (x.dtype, dtype) == (torch.float8_e5m2, torch.bfloat16):  # Triton's has neither infinities nor NaN
        code = x.view(torch.uint8).to(torch.int32)
        number = torch.ldexp(1 + (code & 3) / 4, (code >> 2 & 31) - 15) * torch.where(code > 127, -1, 1)
        return torch.where(x.float().isfinite(), x.float(), number).to(dtype)
    x = x.float()
    return (x.clamp(-LARGEST[dtype], LARGEST[dtype]) if dtype in LARGEST else x).to(dtype)


@pytest.mark.parametrize("to", FLOATS, ids=str)
@pytest.mark.parametrize("have", FLOATS, ids=str)
def test_conversions_match_torch(have: torch.dtype, to: torch.dtype) -> None:
    x = patterns(have)
    y = torch.empty(x.shape, dtype=to)
    if {have, to} == LARGEST.keys():
        with pytest.raises(Unsupported, match="does not compile it for GPUs: cast to fp32 first"):
            run(convert, (1,), x, y, x.numel(), None)
        return
    run(convert, (1,), x, y, x.numel(), None)
    assert_same(y, x if have == to else reference(x, to))


@pytest.mark.parametrize(
    ("have", "to", "rounding"),
    [
        (torch.float64, torch.float8_e4m3fn, None),
        (torch.float8_e5m2, torch.float64, None),
        (torch.float64, torch.float32, "rtz"),
        (torch.float64, torch.float16, "rtz"),
        (torch.float32, torch.float8_e4m3fn, "rtz"),
        (torch.bfloat16, torch.float8_e5m2, "rtz"),
    ],
    ids=str,
)
def test_a_conversion_that_no_gpu_has_is_refused(have: torch.dtype, to: torch.dtype, rounding: str | None) -> None:
    place = line_of(convert, "tl.store(y")
    with pytest.raises(Unsupported, match=f"^a cast of .* at {place}: Triton does not compile it for GPUs: cast to"):
        run(convert, (1,), torch.ones(8).to(have), torch.ones(8).to(to), 8, rounding)


def test_fp8_saturation_keeps_the_sign_and_nan() -> None:
    x = torch.tensor([1e9, -1e9, float("inf"), -float("inf"), float("nan"), -0.0, 448.0, 464.0])
    e4m3, e5m2 = torch.empty(8, dtype=torch.float8_e4m3fn), torch.empty(8, dtype=torch.float8_e5m2)
    run(convert, (1,), x, e4m3, 8, None)
    run(convert, (1,), x, e5m2, 8, None)
    assert e4m3.float().tolist()[:4] == [448.0, -448.0, 448.0, -448.0]
    assert e5m2.float().tolist()[:4] == [57344.0, -57344.0, 57344.0, -57344.0]
    assert e4m3.float()[4].isnan()
    assert e5m2.float()[4].isnan()
    assert e4m3.view(torch.uint8)[5] == 0x80
    assert e4m3.float().tolist()[6:] == [448.0, 448.0]


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16, torch.float8_e5m2], ids=str)
def test_rounding_toward_zero_never_enlarges(to: torch.dtype) -> None:
    x = patterns(torch.float32)
    x = x[x.isfinite()][: 1 << 18].contiguous()
    y = torch.empty(x.shape, dtype=to)
    run(convert, (1,), x, y, x.numel(), "rtz")
    back = y.float()
    assert (back.abs() <= x.abs()).all()
    assert (back.signbit() == x.signbit()).all()
    largest = torch.finfo(to).max
    # The next value away from zero must be too large, unless there is none.
    after = (y.view(torch.uint8) + 1 if to.itemsize == 1 else (y.view(torch.int16) + 1)).view(to).float().abs()
    assert ((after > x.abs()) | (back.abs() == largest)).all()


def test_encode_rounds_ties_to_even() -> None:
    one, ulp = 1.0, 2.0**-7
    x = np.array([one + ulp / 2, one + 3 * ulp / 2, one + ulp / 2 * 1.0001], np.float32)
    assert decode(encode(x, tl.bfloat16), tl.bfloat16).tolist() == [one, one + 2 * ulp, one + ulp]
    assert (
        encode(x, tl.bfloat16, toward_zero=True).tolist()
        == encode(np.array([one, one + ulp, one], np.float32), tl.bfloat16).tolist()
    )


def test_rounding_toward_zero_keeps_infinity_in_fp8() -> None:
    x, y = torch.tensor([1e30, -1e30, float("inf"), -float("inf")]), torch.empty(4, dtype=torch.float8_e5m2)
    run(convert, (1,), x, y, 4, "rtz")
    assert y.float().tolist() == [57344.0, -57344.0, float("inf"), -float("inf")]


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
def to_integer(x, out, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, tl.load(x + o).to(out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8], ids=str)
def test_float_to_integer_saturates(dtype: torch.dtype) -> None:
    """`cvt.rzi` clamps, and turns NaN into 0, in 64 bits into the number whose highest bit alone is set."""
    x = torch.tensor([1.9, -1.9, 100.0, -100.0, 3e38, -3e38, float("nan"), 0.5])
    out = torch.empty(8, dtype=dtype)
    run(to_integer, (1,), x, out, 8)
    if dtype.is_signed:
        assert out[:4].tolist() == [1, -1, 100, -100]
    assert out[7] == 0
    if dtype in (torch.int32, torch.int64):
        info = torch.iinfo(dtype)
        assert out[4:7].tolist() == [info.max, info.min, info.min if dtype == torch.int64 else 0]


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_short_integers_saturate_at_16_bits(source: torch.dtype) -> None:
    """`cvt.rzi` has no form of 8 bits: Triton takes the low bits of the 16-bit result."""
    x = torch.tensor([40192.0, -40192.0, 3e9, -3e9, 300.0, -1.0, 0.0, 1.0], dtype=source)
    wanted = {
        torch.int16: [32767, -32768, 32767, -32768, 300, -1, 0, 1],
        torch.uint16: [40192, 0, 65535, 0, 300, 0, 0, 1],
        torch.int8: [-1, 0, -1, 0, 44, -1, 0, 1],
        torch.uint8: [0, 0, 255, 0, 44, 0, 0, 1],
    }
    for dtype, values in wanted.items():
        out = torch.empty(8, dtype=dtype)
        run(to_integer, (1,), x, out, 8)
        assert out.tolist() == values


@triton.jit
def integers(a, b, out, N: tl.constexpr):
    o = tl.arange(0, N)
    x, y = tl.load(a + o), tl.load(b + o)
    tl.store(out + o, x // y)
    tl.store(out + N + o, x % y)
    tl.store(out + 2 * N + o, x * y)
    tl.store(out + 3 * N + o, x & y)
    tl.store(out + 4 * N + o, x | y)
    tl.store(out + 5 * N + o, x ^ y)
    tl.store(out + 6 * N + o, ~x)
    tl.store(out + 7 * N + o, x >> 3)
    tl.store(out + 8 * N + o, x << 3)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8], ids=str)
def test_integer_arithmetic_matches_c(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    info = torch.iinfo(dtype)
    low, high = max(info.min, -(2**40)), min(info.max, 2**40)
    a, b = (torch.randint(low, high, (512,), dtype=torch.int64).to(dtype) for _ in range(2))
    b[b == 0] = 3
    out = torch.empty(9, 512, dtype=dtype)
    run(integers, (1,), a, b, out, 512)
    quotient = torch.div(a, b, rounding_mode="trunc")
    wanted = [quotient, a - quotient * b, a * b, a & b, a | b, a ^ b, ~a, a >> 3, a << 3]
    for found, right in zip(out, wanted):
        assert_same(found, right)


@triton.jit
def wrap(out, n):
    x = n  # int32
    tl.store(out, x + x)
    tl.store(out + 1, x * 4)
    tl.store(out + 2, tl.cast(n, tl.int64) + n)
    y = -7
    tl.store(out + 3, y // 2)
    tl.store(out + 4, y % 3)
    for i in range(3, 5):
        tl.store(out + 2 + i, (i - 7) % 3)
        tl.store(out + 4 + i, (i - 7) // 3)


def test_integers_wrap_and_divide_toward_zero() -> None:
    out = torch.empty(9, dtype=torch.int64)
    run(wrap, (1,), out, 2**31 - 1)
    assert out.tolist() == [-2, -4, 2**32 - 2, -3, -1, -1, 0, -1, -1]


@triton.jit
def high_bits(a, b, out, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, tl.umulhi(tl.load(a + o), tl.load(b + o)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_umulhi_is_unsigned(dtype: torch.dtype) -> None:
    bits = dtype.itemsize * 8
    a = [3, -1, -5, 2 ** (bits - 1) - 1]
    b = [7, -1, 2, -(2 ** (bits - 1))]
    out = torch.empty(4, dtype=dtype)
    run(high_bits, (1,), torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype), out, 4)
    mask = 2**bits - 1
    assert [v & mask for v in out.tolist()] == [((x & mask) * (y & mask)) >> bits for x, y in zip(a, b)]


@triton.jit
def dot(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    z = tl.dot(x, y, input_precision=PRECISION, out_dtype=ACC)
    tl.store(c + m[:, None] * N + n[None, :], z)


def operands(dtype: torch.dtype, m: int = 32, n: int = 16, k: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    if dtype.is_floating_point:
        return torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    info = torch.iinfo(dtype)
    a, b = (torch.randint(info.min, info.max + 1, s, dtype=torch.int32).to(dtype) for s in ((m, k), (k, n)))
    return a, b


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_dot_matches_torch(dtype: torch.dtype) -> None:
    a, b = operands(dtype)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    c = torch.empty(32, 16, dtype=acc)
    run(dot, (1,), a, b, c, 32, 16, 64, "ieee", tl.float64 if dtype == torch.float64 else tl.float32)
    exact = a.double() @ b.double()
    error = (c.double() - exact).abs().max() / (a.double().abs() @ b.double().abs()).max()
    assert error < (1e-15 if dtype == torch.float64 else 3e-7)


def test_dot_in_tf32_drops_the_low_bits() -> None:
    a, b = operands(torch.float32)
    c = torch.empty(32, 16)
    run(dot, (1,), a, b, c, 32, 16, 64, "tf32", tl.float32)
    short = [(x.view(torch.int32) & -(1 << 13)).view(torch.float32).double() for x in (a, b)]
    torch.testing.assert_close(c.double(), short[0] @ short[1], rtol=1e-5, atol=1e-5)
    assert (c.double() - a.double() @ b.double()).abs().max() > 1e-4  # the result differs from fp32


@pytest.mark.parametrize(("precision", "most"), [("bf16x3", 2.0**-15), ("bf16x6", 2.0**-21)])
def test_dot_in_bf16x3_and_bf16x6_is_near_fp32(precision: str, most: float) -> None:
    a, b = operands(torch.float32)
    c = torch.empty(32, 16)
    run(dot, (1,), a, b, c, 32, 16, 64, precision, tl.float32)
    error = ((c.double() - a.double() @ b.double()).abs() / (a.double().abs() @ b.double().abs())).max()
    assert most / 1024 < error < most
    a[0, 0] = torch.inf
    run(dot, (1,), a, b, c, 32, 16, 64, precision, tl.float32)
    assert_same(c[0], torch.inf * b[0].sign())


def test_dot_accumulates_in_fp16_on_request() -> None:
    a, b = operands(torch.float16)
    c = torch.empty(32, 16, dtype=torch.float16)
    run(dot, (1,), a, b, c, 32, 16, 64, None, tl.float16)
    torch.testing.assert_close(c, (a.double() @ b.double()).half(), rtol=2e-3, atol=2e-3)


def test_dot_of_int8_is_exact() -> None:
    a, b = operands(torch.int8)
    c = torch.empty(32, 16, dtype=torch.int32)
    run(dot, (1,), a, b, c, 32, 16, 64, None, tl.int32)
    assert_same(c, a.int() @ b.int())


@triton.jit
def dot_accumulate(a, b, c, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    acc = tl.load(c + at)
    for _ in range(3):
        acc = tl.dot(tl.load(a + at), tl.load(b + at), acc)
    acc += tl.dot(tl.load(a + at), tl.load(b + at).trans())
    tl.store(c + at, acc)


def test_dot_adds_to_an_accumulator() -> None:
    torch.manual_seed(6)
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    c = torch.randn(16, 16)
    wanted = c.double() + 3 * (a.double() @ b.double()) + a.double() @ b.double().T
    run(dot_accumulate, (1,), a, b, c, 16)
    torch.testing.assert_close(c.double(), wanted, rtol=1e-5, atol=1e-5)


@triton.jit
def dot_batched(a, b, c, B: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, B), tl.arange(0, N)
    at = i[:, None, None] * N * N + j[None, :, None] * N + j[None, None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def test_dot_works_on_batches() -> None:
    torch.manual_seed(7)
    a, b, c = torch.randn(4, 16, 16).half(), torch.randn(4, 16, 16).half(), torch.empty(4, 16, 16)
    run(dot_batched, (1,), a, b, c, 4, 16)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


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
def bits(x, out, N: tl.constexpr):
    o = tl.arange(0, N)
    v = tl.load(x + o)
    tl.store(out + o, v.to(tl.int32, bitcast=True) ^ 1)
    tl.store(out + N + o, v.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32))


def test_bitcast_keeps_the_bits() -> None:
    x = torch.randn(32)
    out = torch.empty(2, 32, dtype=torch.int32)
    run(bits, (1,), x, out, 32)
    assert_same(out[0], x.view(torch.int32) ^ 1)
    assert_same(out[1], x.bfloat16().view(torch.int16).int() & 0xFFFF)


@triton.jit
def boolean(x, out, N: tl.constexpr):
    o = tl.arange(0, N)
    b = tl.load(x + o)
    tl.store(out + o, b.to(tl.int32) + 1)
    tl.store(out + N + o, tl.sum((b & (o < 3)).to(tl.int32)) + tl.zeros((N,), tl.int32))
    tl.store(out + 2 * N + o, (not b).to(tl.int32))
    tl.store(out + 3 * N + o, (b ^ True).to(tl.int32))


def test_booleans_are_one_bit() -> None:
    x = torch.tensor([True, False, True, True])
    out = torch.empty(4, 4, dtype=torch.int32)
    run(boolean, (1,), x, out, 4)
    assert out.tolist() == [[2, 1, 2, 2], [2] * 4, [0, 1, 0, 0], [0, 1, 0, 0]]


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


@triton.jit
def to_bf16(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(tl.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.int64, torch.uint64], ids=str)
def test_wide_numbers_are_rounded_once_to_bf16(dtype: torch.dtype) -> None:
    """As `cvt.rn.bf16.f64` and `cvt.rn.bf16.s64`. Rounding to fp32 first would make a tie of each of these values."""
    bits = {torch.float64: 40, torch.int32: 30}.get(dtype, 62)
    ties = [(1 << bits) + (n << (bits - 8)) for n in (1, 3, 5, 7)]
    x = torch.tensor([tie + off for tie in ties for off in (-1, 1)], dtype=dtype)
    wanted = [(1 << bits) + (n // 2 << (bits - 7)) for n in (1, 2, 3, 4, 5, 6, 7, 8)]
    out = torch.empty(8, dtype=torch.bfloat16)
    run(to_bf16, (1,), x, out, 8)
    assert out.tolist() == [float(w) for w in wanted]


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


@triton.jit
def through_e4b15(x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, tl.load(x + i).to(tl.float8e4b15).to(tl.float16))


def test_float8e4b15_is_refused() -> None:
    with pytest.raises(Unsupported, match="float8e4b15 at test_numerics.py:.*use float8e4nv or float8e5"):
        run(through_e4b15, (1,), torch.ones(4, dtype=torch.float16), 4)
