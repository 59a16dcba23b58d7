"""Aggregates of Gluon kernels: their constants, their methods, and the cache key of the kernels that make them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pkt.kernels.shared.gluon_aggregate import aggregate
from pkt.language.inspect import compile_only


class Pair(NamedTuple):
    x: Any
    WIDTH: Any


@aggregate
class Inner:
    x: gl.tensor
    WIDTH: gl.constexpr

    @gluon.jit
    def wide(self):
        gl.static_assert(self.WIDTH == 3)
        return self.x * self.WIDTH


@aggregate
class Outer:
    inner: Inner
    pair: gl.tuple
    nothing: gl.constexpr


@gluon.jit
def role(out, outer):
    kept = outer.inner
    gl.static_assert(kept.WIDTH == 3)
    gl.static_assert(outer.pair.WIDTH == 5)
    gl.static_assert(outer.nothing is None)
    for _ in range(kept.x):
        gl.store(out, kept.wide() + outer.pair.x)


@gluon.jit(do_not_specialize=["x", "pair"])
def kernel(out, x, pair, num_warps: gl.constexpr):
    outer = Outer(Inner(x, 3), pair, None)
    gl.warp_specialize([(role, (out, outer)), (role, (out, outer))], [1], [24])


@gluon.jit
def assigning(out, pair, num_warps: gl.constexpr):
    same = pair
    gl.static_assert(same.WIDTH == 5)
    gl.store(out, same.x)


def test_constants_stay_constants_in_specialised_warps():
    """Constants of an aggregate or a tuple inside an aggregate stay, too, under another name and in a loop."""
    compiled = compile_only(kernel, "*i32", 2, Pair(32, gl.constexpr(5)), num_warps=4)
    assert "partition0" in compiled.asm["ttgir"]


def test_a_tuple_that_is_given_a_name_loses_its_constants():
    with pytest.raises(triton.CompilationError):
        compile_only(assigning, "*i32", Pair(32, gl.constexpr(5)), num_warps=4)


@pytest.mark.parametrize(("x", "constant"), [(1, True), (2, False)])
def test_numbers_in_a_tuple_are_specialised_whatever_the_kernel_says(x, constant):
    """So a number that must not compile another kernel is an argument of its own, not part of a tuple."""
    found = [compile_only(kernel, "*i32", y, Pair(z, gl.constexpr(5)), num_warps=4) for y, z in ((x, 2), (2, x))]
    assert "%x: i32" in found[0].asm["ttgir"]
    assert (re.search(r"%pair\S*: i32", found[1].asm["ttgir"]) is None) == constant


def test_a_constructor_wants_every_field_and_the_cache_key_knows_them():
    def make(*fields: str) -> Any:
        return aggregate(type("Made", (), {"__annotations__": dict.fromkeys(fields, int)}))

    made, other = make("x", "y"), make("y", "x")
    assert made(1, 2).y.value == other(2, 1).y.value == 2
    with pytest.raises(ValueError, match="shorter"):
        made(1)
    (one,), (two,) = made.hash_attrs, other.hash_attrs
    assert one.cache_key != two.cache_key
