"""CUDA's libdevice in numpy and torch: the functions behind `triton.language.extra.libdevice`.

Triton chooses a symbol by the types of the arguments, such as `__nv_tanhf`. Results of fp32 are computed in fp64 and
rounded once. Triton links libdevice so that fp32 numbers below the smallest normal one count as zeros.
docs/triton-coverage.md states the accuracy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pkt.errors import Unsupported
from pkt.simulate.numerics import flushed, fma64, to_integer
from pkt.simulate.sites import site

Function = Callable[..., np.ndarray]


def call(symbol: str, values: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """The result of libdevice's `symbol` as elements of `dtype`. Raises Unsupported where it has no counterpart."""
    name = symbol.removeprefix("__nv_")
    exact = _find(_EXACT, name)
    if exact is not None:
        return _EXACT[exact](*values).astype(dtype, copy=False)
    real = _find(_REAL, name)
    if real is None:
        nearest = name.rpartition("_")[2] in ("rz", "rd", "ru")
        remedy = "use the function that ends in _rn" if nearest else "compute it from functions of tl.math"
        raise Unsupported.simulated(f"libdevice's {symbol}", str(site()), remedy)
    seen = values if real in _TAKE_SMALL else [flushed(v) for v in values]
    wide = [v.astype(np.float64) if v.dtype == np.float32 else v for v in seen]
    out = _REAL[real](*wide).astype(dtype, copy=False)
    return out if real in _GIVE_SMALL else flushed(out)


def _find(functions: dict[str, Function], name: str) -> str | None:
    # fp32 has a letter more: sinf, fadd_rn. So have some of fp64 (isnand, dadd_rn) and of unsigned integers (umulhi).
    return next((n for n in (name, name[:-1], name[1:], name.removesuffix("ll")) if n in functions), None)


def _torch(fn: Callable[[torch.Tensor], torch.Tensor]) -> Function:
    return lambda x: fn(torch.from_numpy(np.ascontiguousarray(x))).numpy()


# -- floating point ---------------------------------------------------------------------------------------------------


def _quarter_turns(x: np.ndarray, turns: int) -> np.ndarray:
    """sin(pi * (x + turns / 2)). Zeros have the sign of x in a sine, and none in a cosine."""
    part = np.fmod(x, 2)
    nearest = np.rint(2 * part)
    angle = np.pi * (part - nearest / 2)
    turn = np.mod(nearest + turns, 4)
    out = np.where(np.mod(turn, 2) == 0, np.sin(angle), np.cos(angle))
    out = np.where(turn < 2, out, -out)
    return np.where(out == 0, 0.0 if turns else np.copysign(0.0, x), out)


def _bessel(name: str) -> Function:
    """torch's function, which is NaN for large numbers. The limits there: infinity for i, 0 for j and y."""
    of = _torch(getattr(torch.special, name, None) or getattr(torch.special, f"bessel_{name}"))

    def function(x: np.ndarray) -> np.ndarray:
        out = of(x)
        far = np.isnan(out) & (np.abs(x) > 1) & ~((name[0] == "y") & (x < 0))
        return np.where(far, {"i0": np.inf, "i1": np.copysign(np.inf, x)}.get(name, 0.0), out)

    return function


def _normcdf(x: np.ndarray) -> np.ndarray:
    """erfc(-x / sqrt(2)) / 2. What the argument loses by rounding is made up for by the derivative."""
    exact = x.astype(np.longdouble) * -np.sqrt(np.longdouble(0.5))
    near = exact.astype(np.float64)
    lost = np.where(np.isfinite(near), exact - near, 0).astype(np.float64)
    return (_torch(torch.erfc)(near) - lost * (2 / np.sqrt(np.pi)) * np.exp(-near * near)) / 2


def _round(x: np.ndarray) -> np.ndarray:
    """Nearest integer, halves away from zero."""
    whole = np.trunc(x)
    return np.where(np.isfinite(x), whole + np.copysign(np.abs(x - whole) >= 0.5, x), x)


def _remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x - n * y for the integer n nearest to x / y, exactly; the even one of two."""
    size = np.abs(y)
    left = np.abs(np.where(size <= np.finfo(np.float64).max / 2, np.fmod(x, 2 * size), x))
    over = left > size - left
    left = np.where(over, left - size, left)
    left = np.where(over & (left >= size - left), left - size, left)
    return np.where(np.isnan(x) | np.isnan(y) | np.isinf(x) | (y == 0), np.nan, np.where(np.signbit(x), -left, left))


def _logb(x: np.ndarray) -> np.ndarray:
    exponent = np.frexp(x)[1] - 1.0
    return np.where(x == 0, -np.inf, np.where(np.isfinite(x), exponent, np.abs(x)))


def _norm(*x: np.ndarray) -> np.ndarray:
    out = np.abs(x[0])
    for other in x[1:]:
        out = np.hypot(out, other)
    return out


def _extended(function: Function) -> Function:
    """`function` in long double, because the errors of several roundings in fp64 add up to more than 2 ulp."""
    return lambda *x: function(*(v.astype(np.longdouble) for v in x)).astype(np.float64)


_REAL: dict[str, Function] = {
    **{
        name: getattr(np, name)
        for name in "fabs floor ceil trunc rint copysign fmod hypot cbrt ldexp sqrt exp exp2 expm1 log log2 log10 "
        "log1p sin cos tan sinh cosh tanh".split()
    },
    **{a: getattr(np, f"arc{a[1:]}") for a in "asin acos atan atan2 asinh acosh atanh".split()},
    **{f"fast_{name}": getattr(np, name) for name in "sin cos tan exp log log2 log10".split()},
    **{name: _torch(getattr(torch, name)) for name in "erf erfc erfinv lgamma".split()},
    **{name: _bessel(name) for name in "j0 j1 y0 y1".split()},
    **{f"cyl_bessel_{name}": _bessel(name) for name in ("i0", "i1")},
    "erfcx": _torch(torch.special.erfcx),
    "erfcinv": lambda x: _torch(torch.special.ndtri)(x / 2) * -np.sqrt(0.5),
    "normcdf": _normcdf,
    "normcdfinv": _torch(torch.special.ndtri),
    "nearbyint": np.rint,
    "round": _round,
    "scalbn": np.ldexp,
    "logb": _logb,
    "saturate": lambda x: np.where(x > 0, np.minimum(x, 1), 0),
    "fdim": lambda x, y: np.where(x <= y, 0, x - y),
    "remainder": _remainder,
    "sinpi": lambda x: _quarter_turns(x, 0),
    "cospi": lambda x: _quarter_turns(x, 1),
    "exp10": lambda x: np.power(10.0, x),
    "fast_exp10": lambda x: np.power(10.0, x),
    "pow": np.power,
    "fast_pow": lambda x, y: np.exp2(y * np.log2(x)),
    "powi": lambda x, n: np.power(x, n.astype(np.float64)),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rsqrt_rn": lambda x: 1 / np.sqrt(x),
    "rcbrt": _extended(lambda x: 1 / np.cbrt(x)),
    "rhypot": _extended(lambda x, y: 1 / np.hypot(x, y)),
    "norm3d": _extended(_norm),
    "norm4d": _extended(_norm),
    "rnorm3d": _extended(lambda *x: 1 / _norm(*x)),
    "rnorm4d": _extended(lambda *x: 1 / _norm(*x)),
    **dict.fromkeys(("fma", "fma_rn", "fmaf_rn"), fma64),
    "add_rn": np.add,
    "sub_rn": np.subtract,
    "mul_rn": np.multiply,
    "div_rn": np.divide,
    "fast_fdivide": np.divide,
    "rcp_rn": lambda x: 1 / x,
    "sqrt_rn": np.sqrt,
}
"""Functions that compute in fp64."""

# Of fp32, as measured on an H200: functions that see numbers below the smallest normal one, and those that return them.
_TAKE_SMALL = {*"log log2 log10 erfinv copysign fdim ldexp scalbn logb cbrt rcbrt".split()}
_GIVE_SMALL = {*"exp exp10 erfinv copysign fdim ldexp scalbn fmod remainder rhypot".split()}

# -- bits and integers ------------------------------------------------------------------------------------------------


def _bits(x: np.ndarray) -> np.ndarray:
    """The bits of integers along a new last axis, highest first."""
    big = np.ascontiguousarray(x.astype(f">u{x.itemsize}"))
    return np.unpackbits(big[..., None].view(np.uint8), axis=-1)


def _reverse(x: np.ndarray) -> np.ndarray:
    return np.packbits(_bits(x)[..., ::-1], axis=-1).view(f">u{x.itemsize}")[..., 0].astype(f"u{x.itemsize}")


def _high(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The high half of a product. Python's integers, because the product of two int64 needs 128 bits."""
    return ((x.astype(object) * y.astype(object)) >> (8 * x.itemsize)).astype(x.dtype)


def _low_24(x: np.ndarray) -> np.ndarray:
    return (x << 8) >> 8


def _permute(x: np.ndarray, y: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Byte i of the result is the byte of (y, x) that the three low bits of hexadecimal digit i of `selector` name."""
    both = (y.astype(np.int64) << 32) | (x.astype(np.int64) & 0xFFFFFFFF)
    chosen = (((both >> (((selector >> (4 * i)) & 7).astype(np.int64) * 8)) & 0xFF) << (8 * i) for i in range(4))
    return sum(chosen, np.zeros_like(both)).astype(np.uint32)


def _average(up: int) -> Function:
    return lambda x, y: (x.astype(np.int64) + y.astype(np.int64) + up) >> 1


def _ilogb(x: np.ndarray) -> np.ndarray:
    return to_integer(np.where(np.isnan(x), -np.inf, _logb(flushed(x))), np.dtype(np.int32))


def _to_int(rounding: Function, dtype: str) -> Function:
    # Triton calls the result of an unsigned conversion signed.
    return lambda x: to_integer(rounding(flushed(x)), np.dtype(dtype)).view(dtype.replace("u", ""))


def _view(dtype: str) -> Function:
    return lambda x: np.ascontiguousarray(x).view(dtype)


_ROUNDINGS = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}
_INTEGERS = {"int": "int32", "uint": "uint32", "ll": "int64", "ull": "uint64"}

_EXACT: dict[str, Function] = {
    "abs": np.abs,
    "llabs": np.abs,
    "clz": lambda x: np.where(x == 0, 8 * x.itemsize, _bits(x).argmax(-1)),
    "popc": lambda x: _bits(x).sum(-1),
    "ffs": lambda x: np.where(x == 0, 0, _bits(x)[..., ::-1].argmax(-1) + 1),
    "brev": _reverse,
    "byte_perm": _permute,
    "mulhi": _high,
    "mul64hi": _high,
    "umul64hi": _high,
    "mul24": lambda x, y: _low_24(x) * _low_24(y),
    "sad": lambda x, y, z: np.abs(x.astype(np.int64) - y) + z,
    "hadd": _average(0),
    "rhadd": _average(1),
    "nextafter": np.nextafter,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "finite": np.isfinite,
    "isfinite": np.isfinite,
    "signbit": np.signbit,
    "ilogb": _ilogb,
    "llrint": _to_int(np.rint, "int64"),
    "llround": _to_int(_round, "int64"),
    "int_as_float": _view("float32"),
    "uint_as_float": _view("float32"),
    "float_as_int": _view("int32"),
    "float_as_uint": _view("int32"),
    "longlong_as_double": _view("float64"),
    "double_as_longlong": _view("int64"),
    "double2hiint": lambda x: _view("int64")(x) >> 32,
    "double2loint": _view("int64"),
    "hiloint2double": lambda hi, lo: ((hi.astype(np.int64) << 32) | (lo.astype(np.int64) & 0xFFFFFFFF)).view("float64"),
    **{
        f"{source}2{name}_{mode}": _to_int(rounding, dtype)
        for source in ("float", "double")
        for name, dtype in _INTEGERS.items()
        for mode, rounding in _ROUNDINGS.items()
    },
    **{f"{name}2{real}_rn": lambda x: x for name in _INTEGERS for real in ("float", "double")},
    "double2float_rn": lambda x: x,
}
"""Functions whose results are exact, or the nearest of the result's type."""
