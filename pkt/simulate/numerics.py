"""Number formats that numpy lacks, with the GPU's rounding: bf16, fp8 e4m3 and e5m2, tf32.

Triton's interpreter stores these formats as raw bits (uint16, uint8). `decode` converts the bits to float32, exactly.
`encode` rounds float32 to nearest even, as `cvt.rn` does, and saturates for fp8 (`cvt.rn.satfinite`). A sum or product
of two such numbers may be rounded twice, to float32 and then to the short format: the result equals the hardware's
single rounding, because 24 bits are at least 2 * 8 + 2.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl

# Formats by name: Triton's comparison of types costs as much as an operation on a block.
BITS = {"bf16": np.uint16, "fp8e4nv": np.uint8, "fp8e5": np.uint8}


def _fp8_values(mantissa_bits: int, bias: int, largest: int) -> np.ndarray:
    """The finite magnitudes of an fp8 format in the order of their codes, 0 to `largest`."""
    code = np.arange(largest + 1)
    exponent, mantissa = code >> mantissa_bits, (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = (1 + mantissa) * 2.0 ** (exponent - bias)
    return np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), normal).astype(np.float32)


def _decode_table(magnitude: np.ndarray, infinity: int | None) -> np.ndarray:
    half = np.full(128, np.nan, np.float32)
    half[: len(magnitude)] = magnitude
    if infinity is not None:
        half[infinity] = np.inf
    return np.concatenate([half, -half])


_MAGNITUDE = {"fp8e4nv": _fp8_values(3, 7, 0x7E), "fp8e5": _fp8_values(2, 15, 0x7B)}
_MIDPOINT = {ty: (m[1:] + m[:-1]) / 2 for ty, m in _MAGNITUDE.items()}
_INFINITY = 0x7C  # in fp8e5
_DECODE = {
    "fp8e4nv": _decode_table(_MAGNITUDE["fp8e4nv"], None),
    "fp8e5": _decode_table(_MAGNITUDE["fp8e5"], _INFINITY),
}
_NAN = 0x7F  # in both fp8 formats


def decode(bits: np.ndarray, ty: tl.dtype) -> np.ndarray:
    """float32 values of raw `bits` of format `ty`; the values of any other format are returned unchanged."""
    if ty.name == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    table = _DECODE.get(ty.name)
    return bits if table is None else table[bits]


def encode(values: np.ndarray, ty: tl.dtype, toward_zero: bool = False) -> np.ndarray:
    """Raw bits of format `ty` for real `values`, rounded to nearest even, or truncated if `toward_zero`."""
    x = _to_odd(np.asarray(values)) if ty.name == "bf16" else np.asarray(values, dtype=np.float32)
    if ty.name == "bf16":
        u = x.view(np.uint32)
        if not toward_zero:
            u = u + (((u >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
        out = (u >> np.uint32(16)).astype(np.uint16)
        nan = np.isnan(x)
        return np.where(nan, np.uint16(0x7FFF), out) if np.count_nonzero(nan) else out
    magnitude, midpoint = _MAGNITUDE[ty.name], _MIDPOINT[ty.name]
    size = np.abs(x)
    if toward_zero:
        code = np.searchsorted(magnitude, size, side="right") - 1
    else:
        code = np.searchsorted(midpoint, size, side="left")
        tie = midpoint[np.minimum(code, len(midpoint) - 1)] == size
        code = code + (tie & (code & 1 == 1))
    code = np.where(np.isnan(x), _NAN, np.minimum(code, len(magnitude) - 1))
    if toward_zero and ty.name == "fp8e5":
        code = np.where(np.isinf(x), _INFINITY, code)  # the high byte of fp16: not saturated
    return (code | (np.signbit(x) << 7)).astype(np.uint8)


def _to_odd(values: np.ndarray) -> np.ndarray:
    """float32 of real `values`, such that rounding them again to a shorter format rounds as once: an inexact value goes
    to the neighbour whose last bit is 1."""
    if values.dtype.kind in "iu":
        if values.dtype.itemsize == 8:  # of large ones, 13 low bits only tell whether the value is a tie
            large, low = np.abs(values.astype(np.float64)) >= 2.0**53, (values & 0xFFF) != 0
            values = np.where(large, (values & ~values.dtype.type(0xFFF)) | (low * values.dtype.type(0x800)), values)
        values = values.astype(np.float64)
    x = values.astype(np.float32)
    if values.dtype != np.float64:
        return x
    inexact = (x != values) & ~np.isnan(values)
    away = inexact & (np.abs(x.astype(np.float64)) > np.abs(values))
    return ((x.view(np.uint32) - away) | inexact).astype(np.uint32).view(np.float32)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float64 that hold float32, such that rounding the result to float32 rounds it once."""
    return _odd_sum(a * b, c)  # the product is exact


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float64, rounded once unless a * b is too large or its last bits are too small for float64."""
    product = a * b
    high, low = _sum(c, _product_error(product, a, b))
    total, rest = _sum(product, high)
    out = total + _odd_sum(low, rest)  # Boldo and Melquiond, Emulation of FMA, 2008
    return np.where(np.isfinite(out) & (out != 0), out, product + c)


def _sum(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x + y of float64, and its error: Knuth's two-sum."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def _odd_sum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x + y of float64, rounded to odd: an inexact sum goes to the neighbour whose last bit is 1."""
    total, error = _sum(x, y)
    bits = total.view(np.int64)
    even = (bits & 1 == 0) & (error != 0) & np.isfinite(error)
    return (bits + np.where(even, np.where((error > 0) == (total > 0), 1, -1), 0)).view(np.float64)


def high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of the bits of a * b, of uint32 or uint64."""
    if a.dtype == np.uint32:
        return (a.astype(np.uint64) * b >> np.uint64(32)).astype(np.uint32)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    middle = (a >> half) * (b & low) + ((a & low) * (b & low) >> half)
    return (a >> half) * (b >> half) + (middle >> half) + ((a & low) * (b >> half) + (middle & low) >> half)


def fmax(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The larger, or the one that is no NaN. As `max.f32`, of zeros the positive one."""
    out = np.fmax(a, b)
    return out if out.all() else np.where((a == 0) & (b == 0), a + b, out)


def fmin(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The smaller, or the one that is no NaN. As `min.f32`, of zeros the negative one."""
    return -fmax(-a, -b)


def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """As `fmax`, but NaN where either is."""
    return np.where(np.isnan(a) | np.isnan(b), a + b, fmax(a, b))


def minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """As `fmin`, but NaN where either is."""
    return -maximum(-a, -b)


def frem(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x % y of floats as Triton's PTX computes it: x - trunc(x / y) * y, rounded once, and x where y is infinite. Other
    than `fmod` it is inexact for large quotients, and +0.0 where nothing is left."""
    if x.dtype == np.float16:
        x, y = x.astype(np.float32), y.astype(np.float32)
    times = -np.trunc(x / y)
    if x.dtype == np.float32:
        out = (times.astype(np.float64) * y + x).astype(np.float32)
    else:
        product = times * y
        error = _product_error(product, times, y)
        out = (x + product) + np.where(np.isfinite(product), error, 0)
    return np.where(np.isinf(y), x, out)


def _product_error(product: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x * y - product of float64, where `product` is x * y rounded: Dekker's product."""
    (high, low), (high_y, low_y) = _halves(x), _halves(y)
    return ((high * high_y - product) + high * low_y + low * high_y) + low * low_y


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 rounded to 26 bits, and the rest, which has 26 bits and a sign."""
    high = ((np.ascontiguousarray(x).view(np.int64) + (1 << 26)) & -(1 << 27)).view(np.float64)
    return high, x - high


def to_half(values: np.ndarray, toward_zero: bool) -> np.ndarray:
    """fp16 of real `values`."""
    out = values.astype(np.float16)
    if toward_zero:
        over = np.abs(out.astype(np.float64)) > np.abs(values)
        out = np.where(over, (out.view(np.uint16) - 1).view(np.float16), out)
    return out


def decode_finite(codes: np.ndarray) -> np.ndarray:
    """float32 values of fp8e5 bit patterns for a cast to bf16. Triton multiplies them by 2 ** 112, so that what is an
    infinity or NaN becomes a number from 65536 up."""
    bits = codes.astype(np.uint32)
    return ((bits & 0x7F) << 21 | (bits & 0x80) << 24).view(np.float32) * np.float32(2.0**112)


def to_integer(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Integers of float `values`, as `cvt.rzi`: rounded towards zero and clamped. NaN gives 0; from fp64, or in 64
    bits, it gives the number whose highest bit alone is set. Types of 8 bits take the low bits of the 16-bit result."""
    wide = np.dtype(f"{dtype.kind}{max(dtype.itemsize, 2)}")
    info = np.iinfo(wide)
    out = values.astype(wide)
    inside = (values > info.min - 1.0) & (values < info.max + 1.0)
    if not inside.all():
        highest = info.min if wide.kind == "i" else info.max // 2 + 1
        nan = wide.type(highest if values.dtype == np.float64 or wide.itemsize == 8 else 0)
        limit = np.where(np.isnan(values), nan, np.where(values < 0, wide.type(info.min), wide.type(info.max)))
        out = np.where(inside, out, limit)
    return out.astype(dtype, copy=False)


def flushed(values: np.ndarray) -> np.ndarray:
    """fp32 `values` below the smallest normal number as zeros of their sign; values of other types as they are."""
    if values.dtype != np.float32:
        return values
    small = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(small, np.copysign(np.float32(0), values), values) if small.any() else values


def to_nearest_tf32(values: np.ndarray) -> np.ndarray:
    """float32 values rounded to tf32, to nearest even, as a TMA load through a TFLOAT32 map does."""
    u = np.ascontiguousarray(values).view(np.uint32)
    rounded = (u + (((u >> np.uint32(13)) & np.uint32(1)) + np.uint32(0xFFF))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded, u).view(np.float32)


def to_tf32(values: np.ndarray) -> np.ndarray:
    """float32 values as the tensor cores read them in tf32 mode, without the low 13 bits."""
    return (np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def matmul(a: np.ndarray, a_ty: tl.dtype, b: np.ndarray, b_ty: tl.dtype, tf32: bool, parts: int = 0) -> np.ndarray:
    """A @ b as the tensor cores compute it: exact products, float32 (int32, float64) sums. parts: of fp32, how many
    numbers in bf16 each element is split into; 0 for none."""
    if a.dtype.kind in "iu" and a_ty.name not in BITS:
        # float64 is exact below 2^53, and numpy has no fast integer product.
        return _product(a.astype(np.float64), b.astype(np.float64)).astype(np.int32)
    x, y = decode(a, a_ty), decode(b, b_ty)
    if a.dtype != np.float64:
        x, y = x.astype(np.float32, copy=False), y.astype(np.float32, copy=False)
    if tf32 and a.dtype == np.float32:
        x, y = to_tf32(x), to_tf32(y)
    if parts and a.dtype == np.float32:
        return _product_of_parts(_bf16_parts(x, parts), _bf16_parts(y, parts))
    return _product(x, y)


def _bf16_parts(x: np.ndarray, count: int) -> list[np.ndarray]:
    """Numbers in bf16 whose sum is nearly x, the largest first."""
    parts = []
    for _ in range(count):
        parts.append(decode(encode(x, tl.bfloat16), tl.bfloat16))
        x = x - parts[-1]
    return parts


def _product_of_parts(a: list[np.ndarray], b: list[np.ndarray]) -> np.ndarray:
    """The sum of the products that matter in fp32, the smallest first."""
    small = np.zeros((), np.float32)
    for order in range(len(a) - 1, 0, -1):
        for i in range(order + 1):
            small = small + _product(a[i], b[order - i])
    # As Triton: the rest of an infinity is NaN, and the product of the first parts has the infinity.
    return np.nan_to_num(small, nan=0.0, posinf=np.inf, neginf=-np.inf) + _product(a[0], b[0])


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    # By torch, which the machine limits to one thread: tiles are small, and numpy's BLAS would spin on every core.
    return torch.matmul(*(torch.from_numpy(np.require(m, requirements=("C", "W"))) for m in (a, b))).numpy()


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def unpack_fp4(packed: np.ndarray, axis: int) -> np.ndarray:
    """float32 values of e2m1 pairs in bytes, the first of each pair in the low bits, along `axis`."""
    pairs = np.stack([_E2M1[packed & 15], _E2M1[packed >> 4]], axis % packed.ndim + 1)
    return pairs.reshape([n * (1 + (i == axis % packed.ndim)) for i, n in enumerate(packed.shape)])


def scale(values: np.ndarray, exponents: np.ndarray | None) -> np.ndarray:
    """`values` (rows, K) times 2 ** (exponent - 127), one ue8m0 exponent for each 32 along K; 255 is NaN."""
    if exponents is None:
        return values
    factors = np.where(exponents == 255, np.nan, np.exp2(exponents.astype(np.float64) - 127))
    return (values * np.repeat(factors, 32, -1)).astype(np.float32)
