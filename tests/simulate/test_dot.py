"""`tl.dot` of the simulator against torch's products."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.simulate.helpers import assert_same, run


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
