"""Control flow and functions in the simulator. Blocks, arguments and memory have their own files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.language import arange as imported_arange
from triton.language import store as imported_store
from triton.language.math import exp2 as imported_exp2

import pkt
from pkt.errors import CompileError, RankFailed
from pkt.simulate.interpreter import interpret
from tests.simulate import other_module
from tests.simulate.helpers import assert_same, line_of, run

# -- control flow ----------------------------------------------------------------------------------------------------


@triton.jit
def loops(out, n, N: tl.constexpr):
    total = tl.cast(0, tl.int64)
    for i in range(n):
        total += i
    tl.store(out, total)
    for i in tl.range(2, n, 3, num_stages=2):
        total += i.to(tl.int64)
    tl.store(out + 1, total)
    for i in tl.static_range(N):
        total += i
    tl.store(out + 2, total)
    for i in range(n, 0, -1):
        total = total * 2 - i
    tl.store(out + 3, total)
    k = n
    while k > 3:
        k -= 2
        if k == 5:
            total += 1000
        elif k == 4:
            total += 2000
        else:
            total += 1
    tl.store(out + 4, total)
    for i in range(n - n):
        total *= 0
    tl.store(out + 5, (total if n > 5 else total - 1) + (1 if n > 50 else 0))
    for i in range(n):
        if i < 2:
            total += 1
    tl.store(out + 6, total)


def test_control_flow_follows_run_time_values() -> None:
    out = torch.empty(7, dtype=torch.int64)
    run(loops, (1,), out, 9, 4)
    total, wanted = sum(range(9)), []
    wanted.append(total)
    total += sum(range(2, 9, 3))
    wanted.append(total)
    total += sum(range(4))
    wanted.append(total)
    for i in range(9, 0, -1):
        total = total * 2 - i
    wanted.append(total)
    total += 1 + 1000 + 1  # k: 7, 5, 3
    wanted += [total, total, total + 2]
    assert out.tolist() == wanted


@triton.jit
def index_types(out, n, far):
    for i in range(n):
        tl.static_assert(i.dtype == tl.int32)
    for i in range(far, far + n):
        tl.static_assert(i.dtype == tl.int64)
        tl.store(out, i)
    for i in tl.static_range(2):
        block = tl.zeros((2 << i,), tl.float32)  # a constant, as a shape needs
        tl.store(out + 1 + i, tl.sum(block + 1).to(tl.int64))


def test_loop_indices_have_types() -> None:
    out = torch.empty(3, dtype=torch.int64)
    run(index_types, (1,), out, 3, 2**40)
    assert out.tolist() == [2**40 + 2, 2, 4]


@triton.jit
def index_after(out, n, HOW: tl.constexpr):
    i = 5
    if HOW == "static":
        for i in tl.static_range(3):
            tl.store(out + 1, i)
    elif HOW == "again":
        for i in range(n):
            tl.store(out + 1, i)
        i = 7
    else:
        for i in range(n):
            tl.store(out + 1, i)
    tl.store(out, i)


@pytest.mark.parametrize(("how", "wanted"), [("static", 2), ("again", 7)])
def test_an_index_may_be_read_after_a_loop_where_it_has_a_value(how: str, wanted: int) -> None:
    out = torch.empty(2, dtype=torch.int32)
    run(index_after, (1,), out, 3, how)
    assert out.tolist() == [wanted, 2]


def test_an_index_has_no_value_after_its_loop() -> None:
    with pytest.raises(
        pkt.Unsupported, match=f"^i at {line_of(index_after, 'store(out, i)')}: found the index of a loop"
    ):
        run(index_after, (1,), torch.empty(2, dtype=torch.int32), 3, "dynamic")


@triton.jit
def static_loop_of_run_time_length(out, n):
    for i in tl.static_range(n):
        tl.store(out + i, i)


def test_static_range_refuses_run_time_bounds() -> None:
    with pytest.raises(CompileError, match="static_range start value is not a constexpr"):
        run(static_loop_of_run_time_length, (1,), torch.empty(4), 4)


@triton.jit
def _count(counter, value):
    tl.store(counter, tl.load(counter) + 1)
    return value


@triton.jit
def logic(out, counter, a, b, FLAG: tl.constexpr):
    if a > 3 and _count(counter, b) > 3:
        tl.store(out, 1)
    else:
        tl.store(out, 0)
    if FLAG and a > 3:  # a false constant skips the rest
        tl.store(out + 1, 1)
    else:
        tl.store(out + 1, 0)
    if a > 100 or (not b > 100):
        tl.store(out + 2, 1)
    o = tl.arange(0, 4)
    tl.store(out + 3 + o, ((o > 0) & (not o > 2)).to(tl.int32))


def test_and_evaluates_both_sides_as_on_the_gpu() -> None:
    out, counter = torch.full((7,), -1, dtype=torch.int32), torch.zeros(1)
    run(logic, (1,), out, counter, 2, 9, False)
    assert out.tolist() == [0, 0, 1, 0, 1, 1, 0]
    assert counter.item() == 1  # Python would stop at a > 3


@triton.jit
def block_condition(x, out):
    if tl.load(x + tl.arange(0, 4)) > 0:
        tl.store(out, 1)


def test_a_block_is_refused_as_a_condition() -> None:
    with pytest.raises(CompileError, match="more than one value is ambiguous"):
        run(block_condition, (1,), torch.ones(4), torch.ones(1))


@triton.jit
def tuples(out):
    a, b = 1, 2.5
    tl.store(out, a.to(tl.float32) + b)
    c = (a, (b, 3))
    tl.store(out + 1, c[0] + c[1][0] + c[1][1])
    swapped = c[1]
    b, a = swapped
    tl.store(out + 2, a - b)


def test_kernels_may_use_tuples() -> None:
    out = torch.empty(3)
    run(tuples, (1,), out)
    assert out.tolist() == [3.5, 6.5, 0.5]


@triton.jit
def methods(out, slope):
    line = other_module.Line(slope, slope + 1)
    for _ in range(3):
        line = line.moved(by=2)
    tl.store(out, line.at(10))


def test_methods_of_aggregates_get_their_aggregate() -> None:
    out = torch.empty(1, dtype=torch.int32)
    run(methods, (1,), out, 5)
    assert out.item() == 5 * 10 + (6 + 3 * 2 * 5)


@triton.jit
def builtins(out, n, N: tl.constexpr):
    tl.store(out, min(n, 3) + max(n, 5, 1))
    block = tl.zeros((max(N, 4),), tl.int32) + min(7, N)  # a function of constants returns a constant
    tl.store(out + 1, tl.sum(block))
    assert n > 0, "n must be positive"
    print("n is", n)


def test_pythons_min_max_assert_and_print_work(capsys: pytest.CaptureFixture) -> None:
    out = torch.empty(2, dtype=torch.int32)
    run(builtins, (1,), out, 4, 2)
    assert out.tolist() == [8, 8]
    assert "n is:  [4]" in capsys.readouterr().out
    with pytest.raises(RankFailed, match="n must be positive"):
        run(builtins, (1,), out, -4, 2)


# -- functions -------------------------------------------------------------------------------------------------------

SCALE = tl.constexpr(3)


@triton.jit
def _helper(x, factor: tl.constexpr = SCALE, plus=0):
    return x * factor + plus


@triton.jit
def _many(x):
    return x, (x + 1, x + 2)


@triton.jit
def helpers_everywhere(x, out, N: tl.constexpr):
    o = imported_arange(0, N)
    v = tl.load(x + o)
    imported_store(out + o, _helper(v))
    tl.store(out + N + o, _helper(v, 2, plus=1))
    tl.store(out + 2 * N + o, other_module.add_one_twice(v))
    a, (b, c) = _many(v)
    tl.store(out + 3 * N + o, a + b * c)
    tl.store(out + 4 * N + o, imported_exp2(v))
    tl.store(out + 5 * N + o, other_module.through_another(v, N))


def test_helpers_of_other_modules_work() -> None:
    x, out = torch.arange(8).float(), torch.empty(6, 8)
    run(helpers_everywhere, (1,), x, out, 8)
    wanted = [3 * x, 2 * x + 1, x + 2, x + (x + 1) * (x + 2), 2**x, x.sum() + x]
    assert_same(out, torch.stack(wanted))


def test_each_rank_has_its_own_closures() -> None:
    """Every rank defines the kernel again, with its own closure. A reused id never finds another rank's kernel."""

    def main(world: Any) -> float:
        offset = tl.constexpr(10 * world.rank)

        @triton.jit
        def inner(v):
            return v + offset

        @triton.jit
        def kernel(out):
            tl.store(out, inner(1.0))

        out = torch.empty(1)
        kernel[(1,)](out)
        assert interpret.functions[id(kernel)][0] is kernel  # keeps the id from being given to another object
        return out.item()

    assert pkt.launch(main, ranks=4, device="cpu") == [1.0, 11.0, 21.0, 31.0]


WIDTH = 4  # a plain number


@triton.jit
def uses_a_plain_global(out, USE: tl.constexpr):
    WIDTH_HERE = 3
    tl.store(out, WIDTH_HERE)
    if USE:
        tl.store(out, WIDTH)


def test_using_a_plain_global_is_refused() -> None:
    out = torch.zeros(1)
    run(uses_a_plain_global, (1,), out, False)
    with pytest.raises(CompileError, match="Cannot access global variable WIDTH"):
        run(uses_a_plain_global, (1,), out, True)
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.allow_non_constexpr_globals = True
        run(uses_a_plain_global, (1,), out, True)
    assert out.item() == 4


@triton.jit
def program_ids(out, X: tl.constexpr, Y: tl.constexpr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.num_programs(0) * 10000 + tl.num_programs(1) * 100 + tl.num_programs(2)
    tl.store(out + (z * Y + y) * X + x, n + x * 0)


def test_grids_may_have_three_dimensions() -> None:
    out = torch.zeros(4, 3, 2, dtype=torch.int32)
    run(program_ids, (2, 3, 4), out, 2, 3)
    assert (out == 20304).all()
