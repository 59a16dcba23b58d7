"""`tl.dot_scaled` in the simulator, against a product in fp64."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.simulate.helpers import run

M, N, K = 16, 32, 64
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16, "fp16": torch.float16}


@triton.jit
def scaled(
    a, b, sa, sb, out, A: tl.constexpr, B: tl.constexpr, SCALED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    m, n, g = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 32)
    x = tl.load(a + m[:, None] * KA + tl.arange(0, KA))
    y = tl.load(b + tl.arange(0, KB)[:, None] * N + n)
    scale_b = tl.load(sb + n[:, None] * (K // 32) + g)
    acc = tl.full((M, N), 1.0, tl.float32)
    if SCALED:
        acc = tl.dot_scaled(x, tl.load(sa + m[:, None] * (K // 32) + g), A, y, scale_b, B, acc)
    else:
        acc = tl.dot_scaled(x, None, A, y, scale_b, B, acc)
    tl.store(out + m[:, None] * N + n, acc)


def values(kind: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix (rows, K) as stored in format `kind`, and its values."""
    if kind != "e2m1":
        x = torch.randn(rows, K).to(TYPES[kind])
        return x, x.double()
    codes = torch.randint(0, 16, (rows, K), dtype=torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, FP4[codes.long()]


@pytest.mark.parametrize(
    ("a", "b"), [("e4m3", "e5m2"), ("e2m1", "e4m3"), ("e5m2", "e2m1"), ("bf16", "e2m1"), ("fp16", "e4m3")]
)
def test_formats(a: str, b: str) -> None:
    torch.manual_seed(0)
    (x, left), (y, right) = values(a, M), values(b, N)
    scales = [torch.randint(120, 134, (rows, K // 32), dtype=torch.uint8) for rows in (M, N)]
    scale_left, scale_right = (torch.exp2(s.double() - 127).repeat_interleave(32, 1) for s in scales)
    is_scaled = a not in ("bf16", "fp16")
    out = torch.empty(M, N)
    run(scaled, (1,), x, y.T.contiguous(), *scales, out, a, b, is_scaled, M, N, K, x.shape[1], y.shape[1])
    wanted = 1 + (left * scale_left if is_scaled else left) @ (right * scale_right).T
    size = 1 + (left * scale_left if is_scaled else left).abs() @ (right * scale_right).T.abs()
    assert ((out - wanted).abs() <= 1e-6 * size).all()


def test_the_scale_255_is_nan() -> None:
    x, y = (torch.ones(n, K).to(torch.float8_e4m3fn) for n in (M, N))
    sa, sb = (torch.full((n, K // 32), 127, dtype=torch.uint8) for n in (M, N))
    sa[3, 1] = 255
    out = torch.empty(M, N)
    run(scaled, (1,), x, y.T.contiguous(), sa, sb, out, "e4m3", "e4m3", True, M, N, K, K, K)
    assert out.isnan().all(1).tolist() == [row == 3 for row in range(M)]
    assert out[0, 0] == 1 + K
