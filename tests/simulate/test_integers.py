"""Integers and booleans of the simulator against C's and torch's."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.simulate.helpers import assert_same, run


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
