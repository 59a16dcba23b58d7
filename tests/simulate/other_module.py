"""Device functions that test_language uses from another module."""

import triton
import triton.language as tl

ONE = tl.constexpr(1)


@triton.jit
def _add(x, n):
    return x + n


@triton.jit
def add_one_twice(x):
    return _add(_add(x, ONE), 1)


@triton.jit
def through_another(x, N: tl.constexpr):
    return tl.sum(x, 0) + add_one_twice(x) - 2
