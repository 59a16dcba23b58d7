"""Expressions of Triton and random programs of integers, whose values in the simulator are compared with a GPU's.

An expression reads `a`, and most read `b`: blocks of N elements. Divisors are never 0 and shifts never too far: what
those give is undefined.
"""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import triton
import triton.language as tl

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
FLOATS = ("float16", "bfloat16", "float32", "float64")
SHORT = ("float8_e4m3fn", "float8_e5m2")
N = 128

_OF_TWO = "a + b|a - b|a * b|a / b|a < b|a <= b|a == b|a != b|tl.minimum(a, b)|tl.maximum(a, b)|tl.where(a < b, a, b)"
_OF_TWO_INTEGERS = "a & b|a ^ b|a << (b & 7)|a >> (b & 7)|a // ((b & 15) + 1)|a % ((b & 15) + 1)|tl.umulhi(a, b)"
_OF_TWO_FLOATS = (
    "a % b|tl.fma(a, b, a)|tl.div_rn(a, b)|tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)|"
    "tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)|libdevice.atan2(a, b)|libdevice.fmod(a, b)|"
    "libdevice.copysign(a, b)|libdevice.fdim(a, b)|libdevice.div_rn(a, b)|libdevice.mul_rn(a, b)|libdevice.pow(a, b)"
)
_OF_ONE = (
    "-a|~a|tl.abs(a)|a + a|a * 3|2 - a|a > 1|tl.cdiv(a, 3)|one(tl.sum(a, 0))|one(tl.max(a, 0))|one(tl.min(a, 0))|"
    "one(tl.argmax(a, 0))|one(tl.argmin(a, 0))|one(tl.xor_sum(a, 0))|tl.cumsum(a, 0)|tl.sort(a)|tl.flip(a, 0)|"
    "tl.topk(a, 8)|tl.gather(a, (i * 37) % N, 0)|tl.interleave(a, a)|tl.ravel(tl.trans(tl.reshape(a, (8, N // 8))))|"
    "tl.sum(tl.reshape(a, (16, N // 16)), 1)|tl.argmax(tl.reshape(a, (16, N // 16)), 1)|tl.rand(7, a)|tl.randint(a, i)"
)
_OF_ONE_FLOAT = (
    "tl.exp(a)|tl.exp2(a)|tl.log(a)|tl.log2(a)|tl.sin(a)|tl.cos(a)|tl.sqrt(a)|tl.sqrt_rn(a)|tl.rsqrt(a)|tl.erf(a)|"
    "tl.floor(a)|tl.ceil(a)|tl.sigmoid(a)|tl.clamp(a, -2.0, 1.0)|tl.softmax(a)"
)
_LIBDEVICE = (
    "rint round trunc floor ceil exp exp2 exp10 expm1 log1p log log2 log10 cbrt sinh cosh tanh asin acos atan asinh "
    "acosh atanh erf erfc erfinv normcdf normcdfinv sinpi cospi tan lgamma j0 y1 cyl_bessel_i0 isnan isinf signbit "
    "llrint llround ilogb popc clz brev ffs abs float2int_rn float2int_ru float2uint_rd float2ll_rz double2int_rn "
    "double2uint_rz double2ll_rd int2float_rn ull2double_rn float_as_int double2hiint saturatef rsqrt sqrt rcp_rn "
    "sqrt_rn fast_logf"
)
TYPES = ("int1", *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)), "float16", "bfloat16", "float32",
          "float64", "float8e4nv", "float8e5")  # fmt: skip


@triton.jit
def plus(x, y):
    return x + y


@triton.jit
def times(x, y):
    return x * y


@triton.jit
def exclusive(x, y):
    return x ^ y


@triton.jit
def larger(x, y):
    return tl.maximum(x, y)


@triton.jit
def either(x, y, WHICH: tl.constexpr):
    if WHICH == 1:
        return x, y
    else:
        return y, x + y


@triton.jit
def one(x):
    return tl.broadcast_to(x, (1,))


@triton.constexpr_function
def place(dtype):
    """Of a type in `TYPES`."""
    return [getattr(tl, name) for name in TYPES].index(dtype)


@triton.jit
def put(out, kind, value):
    """Store a block and the place of its type."""
    i = tl.reshape(tl.arange(0, value.numel), value.shape)
    if value.dtype == tl.int1:
        tl.store(out + i, value.to(tl.int8))
    else:
        tl.store(out.to(tl.pointer_type(value.dtype), bitcast=True) + i, value)
    tl.store(kind, place(value.dtype))


class Case(NamedTuple):
    """What a kernel computes of blocks of these dtypes: `lines` end with an assignment to each of `results`."""

    name: str
    dtypes: tuple[str, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...] = ("r",)


def expressions() -> list[Case]:
    """Every expression, of every dtype and pair of dtypes that could have it."""
    found: list[tuple[str, tuple[str, ...]]] = []
    every = (*INTEGERS, *FLOATS, *SHORT)
    for pair in itertools.product(every, every):
        found += [(e, pair) for e in _OF_TWO.split("|")]
        if set(pair) <= {*INTEGERS}:
            found += [(e, pair) for e in _OF_TWO_INTEGERS.split("|")]
    found += [(e, (dtype, dtype)) for dtype in FLOATS for e in _OF_TWO_FLOATS.split("|")]
    for dtype in every:
        alone = [*_OF_ONE.split("|"), *(f"libdevice.{name}(a)" for name in _LIBDEVICE.split())]
        if dtype in FLOATS:
            alone += _OF_ONE_FLOAT.split("|")
        for ty in TYPES:
            alone += [f"a.to(tl.{ty})", f"a.to(tl.{ty}, bitcast=True)", f"one(tl.sum(a, 0, dtype=tl.{ty}))"]
        found += [(e, (dtype,)) for e in alone]
    return [Case(e, dtypes, (f"r = {e}",)) for e, dtypes in found]


def program(seed: int) -> Case:
    """A random program of integers and bits: six to fourteen statements, of which the last six are results."""
    rng = random.Random(seed)
    dtypes = tuple(rng.choice(INTEGERS) for _ in range(3))
    known, lines = ["a", "b", "c", "i"], []
    for step in range(rng.randint(6, 14)):
        x, y, z = (rng.choice(known) for _ in range(3))
        number = rng.choice("0 1 2 3 -1 7 100 -100 255 N".split())
        name = f"v{step}"
        forms = [
            f"{x} {rng.choice('+-*&|^')} {rng.choice([y, number])}",
            f"{x} {rng.choice(['//', '%'])} (({y} & 15) + 1)",
            f"({x} + 0) {rng.choice(['<<', '>>'])} ({y} & 7)",
            f"{x} {rng.choice(['<', '<=', '==', '!=', '>', '>='])} {rng.choice([y, number])}",
            f"tl.where({x} {rng.choice('<>')} {y}, {y}, {rng.choice([z, number])})",
            f"{x}.to(tl.{rng.choice(TYPES[:9])})",
            f"tl.{rng.choice(['minimum', 'maximum'])}({x}, {y})",
            f"tl.associative_scan({x}, 0, {rng.choice('plus times exclusive larger'.split())}, {rng.random() < 0.5})",
            f"tl.{rng.choice(['sum', 'max', 'min', 'xor_sum'])}({x}, 0) + {y}",
            f"tl.ravel(tl.broadcast_to(tl.reduce(tl.reshape({x}, (8, 16)), 1, times, keep_dims=True), (8, 16)))",
            f"tl.gather({x}, {y}.to(tl.int32) & 127, 0)",
            rng.choice([f"tl.sort({x})", f"tl.flip({x}, 0)", f"tl.ravel(tl.trans(tl.reshape({x}, (4, 32))))"]),
            f"either({x}, {y}, {rng.randint(1, 2)})[{rng.randint(0, 1)}]",
            rng.choice([f"-{x}", f"~{x}", f"tl.abs({x})", f"tl.cdiv({x}, 3)", f"tl.cumsum({x}, 0)"]),
        ]  # fmt: skip
        lines.append(f"{name} = {rng.choice(forms)}")
        if rng.random() < 0.15:
            lines += [f"for k in range(tl.min({z}, 0).to(tl.int32) & 3, {rng.randint(2, 6)}):",
                      f"    {name} = (({name} * 3) ^ k).to({name}.dtype)"]  # fmt: skip
        known.append(name)
    return Case(f"program {seed}", dtypes, tuple(lines), tuple(known[4:][-6:]))
