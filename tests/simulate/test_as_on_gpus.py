"""What the simulator computes as GPUs do, though numpy does not, and what it refuses because it fails there.

Each was found on an H200 beside the simulator (`arithmetic_before_1.json`, `tma_offsets_1.json`), or in compiled code.
"""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pkt.errors import RankFailed, Unsupported
from tests.language.compiled import ARCHS, compiled
from tests.simulate.helpers import assert_same, run

NEWEST = hasattr(tl, "atomic_poll")  # Triton 3.9


@triton.jit
def convert(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_nan_as_an_integer(source: torch.dtype) -> None:
    """As `cvt.rzi` on an H200: of fp64, and in 64 bits, the highest bit alone is set."""
    x = torch.full((1,), float("nan"), dtype=source)
    wide = source == torch.float64
    for dtype in (torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.int8):
        out = torch.zeros(1, dtype=dtype)
        run(convert, (1,), x, out, 1)
        highest = 1 << (8 * dtype.itemsize - 1)
        set_there = dtype.itemsize == 8 or (wide and dtype.itemsize > 1)
        assert out.item() == (highest if not dtype.is_signed else -highest) * set_there


@pytest.mark.parametrize("arch", ARCHS)
def test_compiled_code_multiplies_e5m2_for_bf16(arch: int) -> None:
    """So no exponent stands for infinity or NaN. tests/simulate/test_conversions.py has the numbers."""
    kernel = compiled(convert, "*fp8e5", "*bf16", 128, arch=arch)
    assert "mul.rn.bf16x2" in kernel.asm["ptx"]
    assert "cvt.rn.f16x2.e5m2x2" not in kernel.asm["ptx"]


@triton.jit
def fp8_arithmetic(x, out, OP: tl.constexpr):
    v = tl.load(x + tl.arange(0, 8))
    if OP == "add":
        tl.store(out + tl.arange(0, 8), (v + v).to(tl.float32))
    if OP == "compare":
        tl.store(out + tl.arange(0, 8), (v < v).to(tl.float32))
    if OP == "sum":
        tl.store(out, tl.sum(v, 0).to(tl.float32))
    if OP == "multiply by fp32":
        tl.store(out + tl.arange(0, 8), v * tl.load(out + tl.arange(0, 8)))


@pytest.mark.parametrize("op", ["add", "compare", "sum"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_arithmetic_of_fp8_is_refused(op: str, dtype: torch.dtype) -> None:
    """Triton's front end takes it, and its back end has none."""
    with pytest.raises(
        Unsupported, match=r"^arithmetic of fp8e(4nv|5) at .*: Triton does not compile it for GPUs: cast"
    ):
        run(fp8_arithmetic, (1,), torch.ones(8).to(dtype), torch.zeros(8), op)
    with pytest.raises(RuntimeError, match="PassManager::run failed"):
        compiled(fp8_arithmetic, torch.ones(8).to(dtype), torch.zeros(8), op)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_beside_fp32_becomes_fp32(dtype: torch.dtype) -> None:
    x, out = torch.arange(8).to(dtype), torch.full((8,), 1.25)
    run(fp8_arithmetic, (1,), x, out, "multiply by fp32")
    assert_same(out, x.float() * 1.25)


@triton.jit
def parity(x, out, scan, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, N))
    tl.store(out, tl.sum(v, 0, dtype=tl.int1).to(tl.int32))
    tl.store(scan + tl.arange(0, N), tl.cumsum(v, 0, dtype=tl.int1).to(tl.int32))


def test_sums_of_one_bit_wrap() -> None:
    x, out, scan = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1]), torch.zeros(1, dtype=torch.int32), torch.zeros(8)
    run(parity, (1,), x, out, scan, 8)
    assert out.item() == 1
    assert scan.tolist() == [1, 1, 0, 1, 1, 1, 0, 1]


@triton.jit
def roots_and_steps(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + i, tl.floor(v))
    tl.store(out + N + i, tl.ceil(v))
    tl.store(out + 2 * N + i, tl.sqrt(v))
    tl.store(out + 3 * N + i, tl.rsqrt(v))
    tl.store(out + 4 * N + i, tl.sin(v))
    tl.store(out + 5 * N + i, tl.erf(v))
    tl.store(out + 6 * N + i, tl.exp2(v - 127))
    tl.store(out + 7 * N + i, tl.sqrt_rn(v))


def test_fp32_below_the_smallest_normal_number() -> None:
    """As on an H200: zero to all of these functions but the correctly rounded root, and never a result of exp2."""
    x = torch.tensor([1e-40, -1e-40, torch.finfo(torch.float32).tiny, -torch.finfo(torch.float32).tiny])
    out = torch.full((8, 4), 7.0)
    run(roots_and_steps, (1,), x, out, 4)
    below, normal = out[:, :2], out[:, 2:]
    assert below[[0, 1, 2, 4, 5, 6]].abs().max() == 0
    assert below[[0, 1, 2, 4, 5]].signbit().tolist() == [[False, True]] * 5
    assert below[3].tolist() == [float("inf"), -float("inf")]
    assert below[7, 0] > 0
    assert below[7, 1].isnan()
    assert normal[:2].tolist() == [[0, -1], [1, 0]]
    assert normal[[2, 3, 4, 5, 7], 0].min() > 0


@pytest.mark.parametrize("arch", ARCHS)
def test_compiled_code_takes_numbers_below_the_smallest_normal_one_for_zeros(arch: int) -> None:
    """What the test above has from an H200 holds for other releases of Triton, too: .ftz stands in the PTX."""
    kernel = compiled(roots_and_steps, "*fp32", "*fp32", 128, arch=arch)
    found = set(re.findall(r"(?:cvt\.r[mp]i|r?sqrt|ex2|abs)\.\S*f32", kernel.asm["ptx"]))
    zeros = {"cvt.rmi.ftz.f32.f32", "cvt.rpi.ftz.f32.f32", "abs.ftz.f32"}
    assert found == zeros | {"sqrt.approx.ftz.f32", "rsqrt.approx.ftz.f32", "ex2.approx.ftz.f32", "sqrt.rn.f32"}


@triton.jit
def histogram_of_all(x, out, N: tl.constexpr, BINS: tl.constexpr):
    tl.store(out + tl.arange(0, BINS), tl.histogram(tl.load(x + tl.arange(0, N)), BINS))


@pytest.mark.parametrize("outside", [4, -1])
def test_a_histogram_of_a_value_in_no_bin_is_refused(outside: int) -> None:
    """An H200 counts it in one of the bins."""
    x, out = torch.tensor([0, 1, outside, 2], dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    with pytest.raises(RankFailed, match=f"tl.histogram at .*: {outside} is in none of the 4 bins"):
        run(histogram_of_all, (1,), x, out, 4, 4)


if not NEWEST:  # whose front end refuses it

    def test_a_histogram_of_other_than_32_bits_is_refused() -> None:
        with pytest.raises(
            Unsupported, match=r"^a histogram of int64 at .*: Triton does not compile it for GPUs: cast to"
        ):
            run(histogram_of_all, (1,), torch.arange(4), torch.empty(4, dtype=torch.int32), 4, 4)


@triton.jit
def descriptor_written(desc, at, ADD: tl.constexpr):
    tile = tl.full((2, 8), 1, desc.dtype)
    if ADD:
        desc.atomic_add([at, 0], tile)
    else:
        desc.store([at, 0], tile)


@pytest.mark.parametrize("add", [False, True])
def test_no_tile_is_written_that_begins_outside_the_tensor(add: bool) -> None:
    """An H200 ends such a store as an illegal instruction. One that ends outside it cuts off."""
    x = torch.zeros(4, 8)
    desc = TensorDescriptor.from_tensor(x, [2, 8])
    run(descriptor_written, (1,), desc, 3, add)
    assert x.sum(1).tolist() == [0, 0, 0, 8]
    with pytest.raises(
        RankFailed, match=r"descriptor offset \[-1, 0\] at .*: a GPU writes no tile that begins outside"
    ):
        run(descriptor_written, (1,), desc, -1, add)


@triton.jit
def descriptor_reduced(desc, x, OP: tl.constexpr):
    i = tl.arange(0, 8)
    tile = tl.load(x + tl.arange(0, 2)[:, None] * 8 + i[None, :])
    if OP == "max":
        desc.atomic_max([0, 0], tile)
    else:
        desc.atomic_and([0, 0], tile)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_descriptor_takes_the_larger_number_and_no_nan(dtype: torch.dtype) -> None:
    out, x = torch.zeros(2, 8, dtype=dtype), torch.full((2, 8), float("nan"), dtype=dtype)
    x[0] = torch.arange(8) - 4
    run(descriptor_reduced, (1,), TensorDescriptor.from_tensor(out, [2, 8]), x, "max")
    assert_same(out, x.nan_to_num(0).clamp(min=0))


def test_a_descriptor_has_no_bitwise_atomics_of_64_bits() -> None:
    """Triton compiles them, and an H200 ends one as an illegal instruction."""
    out, x = torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64)
    with pytest.raises(Unsupported, match=r"^a descriptor's atomic_and of int64 at .*: use tl.atomic_and"):
        run(descriptor_reduced, (1,), TensorDescriptor.from_tensor(out, [2, 8]), x, "and")
