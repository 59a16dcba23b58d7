"""libdevice in the simulator: every symbol is computed or refused, and within a stated distance of the exact result."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda
from triton.language.extra.cuda.libdevice import rsqrt, tanh

from pkt.errors import Unsupported
from pkt.simulate.libdevice import call
from tests.simulate.helpers import line_of, run

NUMPY = {"fp32": np.float32, "fp64": np.float64} | {n: np.dtype(n) for n in ("int32", "uint32", "int64", "uint64")}
REFUSED = re.compile(r"rcp64h|tgamma|[jy]n|(fma|div|rcp|sqrt|add|sub|mul)_r[zdu]|(double|u?int|u?ll)2\w+_r[zdu]")
"""Functions with no counterpart. Conversions to integers have one in every rounding mode."""


def symbols() -> list[tuple[str, str, list[str], str]]:
    """(function, symbol, types of the arguments, type of the result) of all of CUDA's libdevice."""
    found = []
    for name, fn in inspect.getmembers(cuda, inspect.isfunction):
        text = inspect.getsource(fn)
        for types, symbol, result in re.findall(
            r'\(([^:(]*(?:\("\w+"\)[^:(]*)+)\)\s*:\s*\("(\w+)", core.dtype\("(\w+)"', text
        ):
            found.append((name, symbol, re.findall(r'"(\w+)"', types), result))
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_symbol_is_computed_or_refused() -> None:
    refused, functions = set(), set()
    for name, symbol, types, result in symbols():
        functions.add(name)
        try:
            out = call(symbol, [np.ones(4, NUMPY[t]) for t in types], np.dtype(NUMPY[result]))
        except Unsupported:
            refused.add(name)
        else:
            assert out.shape == (4,)
            assert out.dtype == NUMPY[result]
    assert len(functions) >= 197
    to_integer = re.compile(r"(double|float)2u?(int|ll)_")
    wanted = {n for n in functions if REFUSED.fullmatch(n) and not to_integer.match(n)}
    assert refused == wanted


ANY = [
    -700.0,
    -30.5,
    -3.0,
    -1.5,
    -1.0,
    -0.3,
    -1e-3,
    -1e-12,
    1e-300,
    1e-9,
    0.02,
    0.4,
    0.5,
    1.0,
    1.7,
    2.5,
    9.0,
    88.0,
    600.0,
]
SMALL = [x for x in ANY if abs(x) < 40]
UNIT = [x for x in ANY if abs(x) < 1] + [-0.999, 0.97]
ABOVE = [x for x in ANY if x > 0]
ONE = mp.mpf(1)

EXACT: dict[str, tuple[list[float], Callable]] = {
    "sin": (ANY, mp.sin), "cos": (ANY, mp.cos), "tan": (ANY, mp.tan),
    "sinpi": (SMALL, mp.sinpi), "cospi": (SMALL, mp.cospi),
    "exp": (ANY, mp.exp), "exp2": (ANY, lambda x: 2**x), "exp10": (SMALL, lambda x: 10**x), "expm1": (ANY, mp.expm1),
    "log": (ABOVE, mp.log), "log2": (ABOVE, lambda x: mp.log(x, 2)), "log10": (ABOVE, mp.log10),
    "log1p": ([x for x in ANY if x > -1], mp.log1p),
    "sinh": (ANY, mp.sinh), "cosh": (ANY, mp.cosh), "tanh": (ANY, mp.tanh),
    "asin": (UNIT, mp.asin), "acos": (UNIT, mp.acos), "atan": (ANY, mp.atan),
    "asinh": (ANY, mp.asinh), "acosh": ([x for x in ANY if x >= 1], mp.acosh), "atanh": (UNIT, mp.atanh),
    "sqrt": (ABOVE, mp.sqrt), "rsqrt": (ABOVE, lambda x: 1 / mp.sqrt(x)), "rcp_rn": (ANY, lambda x: 1 / x),
    "cbrt": (ANY, lambda x: mp.sign(x) * mp.cbrt(abs(x))), "rcbrt": (ABOVE, lambda x: 1 / mp.cbrt(x)),
    "erf": (SMALL, mp.erf), "erfc": ([x for x in SMALL if x < 9], mp.erfc), "erfinv": (UNIT, mp.erfinv),
    "erfcx": ([x for x in SMALL if x > -5], lambda x: mp.exp(x * x) * mp.erfc(x)),
    "erfcinv": ([1e-9, 0.02, 0.4, 0.5, 1.7], lambda x: mp.erfinv(1 - x)),
    "normcdf": ([*(x for x in SMALL if x > -30), -37.3, -25.1, -10.0, -8.3, -5.7], mp.ncdf),
    "normcdfinv": ([1e-9, 0.02, 0.4, 0.7, 0.97], lambda x: mp.sqrt(2) * mp.erfinv(2 * x - 1)),
    "lgamma": (ABOVE, lambda x: mp.loggamma(x).real),
    "j0": (SMALL, lambda x: mp.besselj(0, x)), "j1": (SMALL, lambda x: mp.besselj(1, x)),
    "y0": ([x for x in ABOVE if 1e-3 < x < 40], lambda x: mp.bessely(0, x)),
    "y1": ([x for x in ABOVE if 1e-3 < x < 40], lambda x: mp.bessely(1, x)),
    "cyl_bessel_i0": (SMALL, lambda x: mp.besseli(0, x)), "cyl_bessel_i1": (SMALL, lambda x: mp.besseli(1, x)),
    "round": (SMALL, lambda x: mp.sign(x) * mp.floor(abs(x) + mp.mpf(1) / 2)), "rint": (SMALL, mp.nint),
    "floor": (SMALL, mp.floor), "ceil": (SMALL, mp.ceil), "logb": (ABOVE, lambda x: mp.frexp(x)[1] - 1),
}  # fmt: skip
TWO: dict[str, Callable] = {
    "atan2": mp.atan2, "hypot": mp.hypot, "rhypot": lambda x, y: 1 / mp.hypot(x, y),
    "fmod": lambda x, y: x - y * (mp.sign(x / y) * mp.floor(abs(x / y))),
    "remainder": lambda x, y: x - y * mp.nint(x / y),
    "fdim": lambda x, y: max(x - y, mp.mpf(0)), "div_rn": lambda x, y: x / y,
    "copysign": lambda x, y: abs(x) * mp.sign(y),
}  # fmt: skip
LOOSE = {"erfcx": 4, "normcdf": 4} | dict.fromkeys(("j0", "j1", "y0", "y1"), 1e8)
"""Units of the last place by which torch's fp64 results may be wrong. Those of all others may be wrong by 2."""
SYMBOL = {(name, types[-1], len(types)): symbol for name, symbol, types, _ in symbols()}


def distance(name: str, dtype: Any, columns: list[np.ndarray], exact: Callable) -> float:
    """Largest distance of a result from the exact one, in units of the last place of the exact one."""
    symbol = SYMBOL[name, "fp32" if dtype == np.float32 else "fp64", len(columns)]
    many = [np.tile(column, 16) for column in columns]  # torch computes long arrays by other instructions
    found = call(symbol, many, np.dtype(dtype))
    worst = 0.0
    for got, *x in zip(found, *many):
        wanted = exact(*(mp.mpf(float(v)) for v in x))
        near = dtype(float(wanted))
        if not np.isfinite(near) or abs(near) < np.finfo(dtype).tiny:
            assert abs(got) >= np.finfo(dtype).max or abs(got) <= 2 * np.finfo(dtype).tiny, (name, x, got)
            continue
        worst = max(worst, float(abs(mp.mpf(float(got)) - wanted) / float(np.spacing(abs(near)))))
    return worst


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", EXACT)
def test_results_are_near_the_exact_ones(name: str) -> None:
    points, exact = EXACT[name]
    with mp.workdps(60):
        single = [x for x in points if abs(x) > 1e-30]
        assert distance(name, np.float32, [np.array(single, np.float32)], exact) <= 0.501
        assert distance(name, np.float64, [np.array(points, np.float64)], exact) <= LOOSE.get(name, 2)


@pytest.mark.parametrize("name", TWO)
def test_results_of_two_arguments_are_near_the_exact_ones(name: str) -> None:
    x, y = (np.array(c).reshape(-1) for c in np.meshgrid([-7.5, -1.0, 0.3, 2.5, 1e8], [-2.0, 0.7, 3.0, 5.0]))
    with mp.workdps(60):
        for dtype, most in ((np.float32, 0.501), (np.float64, 2)):
            assert distance(name, dtype, [x.astype(dtype), y.astype(dtype)], TWO[name]) <= most


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("name", ["norm", "rnorm"])
def test_norms_are_near_the_exact_ones(name: str, count: int) -> None:
    """The errors of a chain of roundings would add up: random vectors show it."""
    columns = [*np.random.default_rng(0).uniform(-3, 3, (count, 200))]
    power = mp.mpf(1 if name == "norm" else -1)
    with mp.workdps(60):
        assert distance(f"{name}{count}d", np.float64, columns, lambda *x: mp.norm(x) ** power) <= 0.51


def test_reciprocals_of_functions_are_near_the_exact_ones() -> None:
    x, y = np.random.default_rng(0).uniform(0.1, 10, (2, 200))
    with mp.workdps(60):
        assert distance("rcbrt", np.float64, [x], EXACT["rcbrt"][1]) <= 0.51
        assert distance("rhypot", np.float64, [x, y], TWO["rhypot"]) <= 0.51


@pytest.mark.parametrize(
    ("symbol", "values", "wanted"),
    [
        ("__nv_clz", [[0, 1, -1, 255]], [32, 31, 0, 24]),
        ("__nv_popc", [[0, 1, -1, 255]], [0, 1, 32, 8]),
        ("__nv_ffs", [[0, 1, -2, 256]], [0, 1, 2, 9]),
        ("__nv_brev", [[1, 2, 3, 0]], [-(2**31), 2**30, -(2**30), 0]),
        ("__nv_byte_perm", [[0x33221100], [0x77665544], [0x7531]], [0x77553311]),
        ("__nv_mulhi", [[-(2**31), 2**30], [2, 8]], [-1, 2]),
        ("__nv_mul24", [[-3, 1 << 24], [5, 7]], [-15, 0]),
        ("__nv_sad", [[-3, 4], [5, 4], [1, 2]], [9, 2]),
        ("__nv_hadd", [[-3, 2**31 - 1], [2, 2**31 - 1]], [-1, 2**31 - 1]),
        ("__nv_rhadd", [[-4, 1], [1, 2]], [-1, 2]),
    ],
)
def test_integers(symbol: str, values: list[list[int]], wanted: list[int]) -> None:
    found = call(symbol, [np.array(v).astype(np.int32) for v in values], np.dtype(np.int32))
    assert found.tolist() == wanted


def test_conversions_round_saturate_and_keep_bits() -> None:
    x = np.array([2.5, -2.5, 3e9, np.nan], np.float32)
    assert call("__nv_float2int_rn", [x], np.dtype(np.int32)).tolist() == [2, -2, 2**31 - 1, 0]
    assert call("__nv_float2int_ru", [x], np.dtype(np.int32)).tolist() == [3, -2, 2**31 - 1, 0]
    assert call("__nv_float2uint_rd", [x], np.dtype(np.int32)).view(np.uint32).tolist() == [2, 0, 3_000_000_000, 0]
    wide = np.array([1.5, -0.0, np.pi, np.nan])
    highest = {"int": -(2**31), "uint": -(2**31), "ll": -(2**63), "ull": -(2**63)}
    for name, of_nan in highest.items():
        dtype = np.dtype(np.int64 if "ll" in name else np.int32)
        assert call(f"__nv_double2{name}_rn", [wide], dtype).tolist() == [2, 0, 3, of_nan]
    assert call("__nv_float2ll_rz", [x], np.dtype(np.int64)).tolist() == [2, -2, 3_000_000_000, -(2**63)]
    high, low = (call(f"__nv_double2{half}int", [wide], np.dtype(np.int32)) for half in ("hi", "lo"))
    assert call("__nv_hiloint2double", [high, low], np.dtype(np.float64)).tobytes() == wide.tobytes()


def test_turns_of_large_numbers_and_the_sign_of_zeros() -> None:
    x = np.array([1e30, -1e30, 2.0**53 + 2, -3.0, 3.0, 2.5, -1.5, np.inf])
    sines, cosines = (call(f"__nv_{name}", [x], np.dtype(np.float64)) for name in ("sinpi", "cospi"))
    np.testing.assert_array_equal(sines, [0, 0, 0, 0, 0, 1, 1, np.nan])
    assert np.signbit(sines[:5]).tolist() == [False, True, False, True, False]
    np.testing.assert_array_equal(cosines, [1, 1, 1, -1, -1, 0, 0, np.nan])
    assert not np.signbit(cosines[5:7]).any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_bessel_functions_of_large_numbers_have_their_limits() -> None:
    x = np.array([np.inf, -np.inf, 1e300, np.nan])
    wanted = {"i0": [np.inf, np.inf, np.inf, np.nan], "i1": [np.inf, -np.inf, np.inf, np.nan]}
    for name, values in wanted.items():
        np.testing.assert_array_equal(call(f"__nv_cyl_bessel_{name}", [x], np.dtype(np.float64)), values)
    for name in ("j0", "j1", "y0", "y1"):
        found = call(f"__nv_{name}", [x], np.dtype(np.float64))
        assert found[0] == 0
        assert np.isnan(found[1]) == (name[0] == "y")
        assert np.isnan(found[3])


SMALLEST = np.finfo(np.float32).tiny
BELOW = np.array([1e-40, -1e-40, SMALLEST, -SMALLEST, 0.0], np.float32)


@pytest.mark.parametrize(
    ("symbol", "wanted"),
    [
        ("fabsf", [0, 0, SMALLEST, SMALLEST, 0]),
        ("floorf", [0, 0, 0, -1, 0]),
        ("ceilf", [0, 0, 1, 0, 0]),
        ("tanhf", [0, 0, SMALLEST, -SMALLEST, 0]),
        ("fast_logf", [-np.inf, -np.inf, np.log(np.float32(SMALLEST)), np.nan, -np.inf]),
        ("frcp_rn", [np.inf, -np.inf, 2.0**126, -(2.0**126), np.inf]),
        ("logf", [np.log(1e-40), np.nan, np.log(np.float32(SMALLEST)), np.nan, -np.inf]),
        ("erfinvf", None),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fp32_below_the_smallest_normal_number_counts_as_zero(symbol: str, wanted: list[float] | None) -> None:
    """As Triton links libdevice. Logarithms and the inverse error function see such numbers, as on an H200."""
    found = call(f"__nv_{symbol}", [BELOW], np.dtype(np.float32))
    if wanted is None:
        assert 0 < found[0] < 1e-40
    else:
        np.testing.assert_allclose(found, np.array(wanted, np.float32), rtol=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fp32_results_below_the_smallest_normal_number_are_zero() -> None:
    def result(symbol: str, *x: float) -> float:
        return call(f"__nv_{symbol}", [np.array([v], np.float32) for v in x], np.dtype(np.float32)).item()

    assert result("exp2f", -127.0) == result("fmul_rn", 1e-20, 1e-20) == result("fast_expf", -100.0) == 0
    assert 0 < result("expf", -100.0) < SMALLEST
    assert 0 < result("fmodf", 3 * float(SMALLEST), 2 * float(SMALLEST)) <= SMALLEST
    assert call("__nv_float2int_ru", [BELOW], np.dtype(np.int32)).tolist() == [0, 0, 1, 0, 0]
    assert call("__nv_ilogbf", [BELOW], np.dtype(np.int32)).tolist() == [-(2**31)] * 2 + [-126] * 2 + [-(2**31)]
    assert np.exp2(np.float64(-127)) == call("__nv_exp2", [np.array([-127.0])], np.dtype(np.float64)).item()


@triton.jit
def rms_norm_geglu(x_ptr, gate_ptr, y_ptr, eps, N: tl.constexpr):
    """y = rms_norm(x) * gelu_tanh(gate), a row a program."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    x, gate = tl.load(x_ptr + i), tl.load(gate_ptr + i)
    normed = x * rsqrt(tl.sum(x * x) / N + eps)
    inner = 0.7978845608028654 * (gate + 0.044715 * libdevice.pow(gate, 3))
    gelu = tl.extra.cuda.libdevice.mul_rn(gate, 0.5 * (1 + tanh(inner)))
    tl.store(y_ptr + i, tl.where(libdevice.isnan(gate), 0.0, normed * gelu))


def test_a_norm_with_libdevice_runs() -> None:
    torch.manual_seed(0)
    x, gate = torch.randn(3, 64), torch.randn(3, 64)
    y = torch.empty_like(x)
    run(rms_norm_geglu, (3,), x, gate, y, 1e-6, 64)
    wanted = x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt() * torch.nn.functional.gelu(gate, approximate="tanh")
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6)


@triton.jit
def refused(x_ptr, y_ptr):
    tl.store(y_ptr, libdevice.tgamma(tl.load(x_ptr)))


def test_a_function_with_no_counterpart_is_refused_with_its_line() -> None:
    x = torch.ones(1)
    with pytest.raises(Unsupported, match="__nv_tgammaf.*tl.math") as caught:
        run(refused, (1,), x, x)
    assert line_of(refused, "tgamma") in str(caught.value)


def test_libdevice_is_as_before_after_a_run() -> None:
    before = libdevice.tanh, cuda.tanh
    run(rms_norm_geglu, (1,), *torch.ones(3, 1, 64), 1e-6, 64)
    assert (libdevice.tanh, cuda.tanh) == before
