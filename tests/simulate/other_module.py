"""Device functions that test_language uses from another module. Without postponed annotations, which aggregates
cannot have."""

import triton
import triton.language as tl
from triton.language import core

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


@core._aggregate
class Line:
    slope: tl.tensor
    start: tl.tensor

    @triton.constexpr_function
    def __init__(self, slope, start):
        self.slope = slope
        self.start = start

    @triton.jit
    def at(self, x):
        return self.slope * x + self.start

    @triton.jit
    def moved(self, by):
        return Line(self.slope, self.at(by))
