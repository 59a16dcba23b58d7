"""Casts of the simulator against torch's, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pkt.errors import Unsupported
from pkt.simulate.numerics import decode, encode
from tests.simulate.helpers import assert_same, line_of, run

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]

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


@triton.jit
def through_e4b15(x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, tl.load(x + i).to(tl.float8e4b15).to(tl.float16))


def test_float8e4b15_is_refused() -> None:
    with pytest.raises(Unsupported, match="float8e4b15 at test_conversions.py:.*use float8e4nv or float8e5"):
        run(through_e4b15, (1,), torch.ones(4, dtype=torch.float16), 4)
