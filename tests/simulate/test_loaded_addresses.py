"""Addresses of ordinary tensors that a kernel loads from memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from pkt.simulate.findings import OutOfBounds
from tests.simulate.helpers import outcome


@triton.jit
def grouped_matmul(a_ptrs, b_ptrs, c_ptrs, sizes, K: tl.constexpr, BLOCK: tl.constexpr):
    """c[g] = a[g] @ b[g], a group a program: (sizes[g], K) times (K, BLOCK)."""
    g = tl.program_id(0)
    m, n, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK), tl.arange(0, K)
    a = tl.load(a_ptrs + g).to(tl.pointer_type(tl.float32))
    b = tl.load(b_ptrs + g).to(tl.pointer_type(tl.float32))
    c = tl.load(c_ptrs + g).to(tl.pointer_type(tl.float32))
    inside = m[:, None] < tl.load(sizes + g)
    x = tl.load(a + m[:, None] * K + k, mask=inside, other=0.0)
    y = tl.load(b + k[:, None] * BLOCK + n)
    tl.store(c + m[:, None] * BLOCK + n, tl.dot(x, y, input_precision="ieee"), mask=inside)


def test_a_grouped_matmul_over_addresses_of_tensors() -> None:
    def main(world: Any) -> None:
        torch.manual_seed(world.rank)
        sizes = [5, 16, 1]
        a = [torch.randn(m, 32) for m in sizes]
        b = torch.randn(3, 32, 16)  # addresses of its slices
        c = [torch.full((m, 16), 7.0) for m in sizes]
        addresses = [torch.tensor([t.data_ptr() for t in ts]) for ts in (a, b, c)]
        grouped_matmul[(3,)](*addresses, torch.tensor(sizes), 32, 16)
        for x, y, z in zip(a, b, c):
            torch.testing.assert_close(z, x @ y)

    found = outcome(main, 2)
    assert found.failure is None


@triton.jit
def write(addresses, at):
    tl.store(tl.load(addresses).to(tl.pointer_type(tl.float32)) + at, 1.0)


@pytest.mark.parametrize("how", ["past its end", "gone", "never taken"])
def test_an_address_of_no_tensor_is_out_of_bounds(how: str) -> None:
    def main(world: Any) -> None:
        x = torch.zeros(1 << 16)
        address = x.storage_offset() * 4 + x.untyped_storage().data_ptr() if how == "never taken" else x.data_ptr()
        addresses = torch.tensor([address])
        if how == "gone":
            del x
        write[(1,)](addresses, (1 << 16) + 8 if how == "past its end" else 2)

    error = outcome(main, 1).error
    assert isinstance(error, OutOfBounds)
    assert "test_loaded_addresses.py" in str(error)


def test_a_launch_takes_no_addresses() -> None:
    """An argument of one launch is no valid address in the next, unless host code has read it."""

    def main(world: Any) -> None:
        x = torch.zeros(64)
        address = torch.tensor([x.untyped_storage().data_ptr()])
        run_on_argument[(1,)](x)
        write[(1,)](address, 0)

    assert isinstance(outcome(main, 1).error, OutOfBounds)


@triton.jit
def run_on_argument(x):
    tl.store(x, 1.0)
