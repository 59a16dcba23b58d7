"""The language as the simulator runs it: control flow, reductions, shapes, arguments. Memory is in test_memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.language import arange as imported_arange
from triton.language import store as imported_store
from triton.language.math import exp2 as imported_exp2

import pkt
from pkt.errors import RankFailed
from pkt.simulate.interpreter import interpret
from tests.simulate import other_module
from tests.simulate.helpers import run, same

# -- reductions and scans --------------------------------------------------------------------------------------------


@triton.jit
def reductions(x, rows, cols, whole, M: tl.constexpr, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    m, n = tl.arange(0, M), tl.arange(0, N)
    tl.store(rows + m, tl.sum(v, axis=1))
    tl.store(rows + M + m, tl.max(v, axis=1))
    tl.store(rows + 2 * M + m, tl.min(v, axis=1))
    tl.store(cols + n, tl.argmax(v, axis=0))
    tl.store(cols + N + n, tl.argmin(v, axis=0))
    best, at = tl.max(v, axis=0, return_indices=True)
    tl.store(cols + 2 * N + n, at)
    tl.store(cols + 3 * N + n, (best == tl.max(v, axis=0)).to(tl.int32))
    tl.store(whole, tl.sum(v))
    tl.store(whole + 1, tl.max(v))
    kept = tl.sum(v, axis=1, keep_dims=True)
    tl.static_assert(kept.shape[0] == M)
    tl.static_assert(kept.shape[1] == 1)
    tl.store(whole + 2, tl.sum(v - kept + kept))
    tl.store(whole + 3, tl.sum(tl.sum(v, keep_dims=True)))


def test_reductions() -> None:
    torch.manual_seed(0)
    x = torch.randint(-50, 50, (8, 16)).float()
    rows, cols, whole = torch.empty(3, 8), torch.empty(4, 16, dtype=torch.int32), torch.empty(4)
    run(reductions, (1,), x, rows, cols, whole, 8, 16)
    same(rows, torch.stack([x.sum(1), x.amax(1), x.amin(1)]))
    first = torch.stack([(x == x.amax(0)).int().argmax(0), (x == x.amin(0)).int().argmax(0)]).int()
    same(cols[:2], first)
    same(cols[2], first[0])  # ties go to the left
    assert cols[3].all()
    same(whole, torch.stack([x.sum(), x.amax(), x.sum(), x.sum()]))


@triton.jit
def reduce_short(x, out, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, N))
    tl.store(out, tl.sum(v))
    tl.store(out + 1, tl.max(v))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.int32, torch.int64], ids=str)
def test_reductions_of_every_type(dtype: torch.dtype) -> None:
    x = torch.arange(-15, 17).to(dtype)
    out = torch.empty(2, dtype=torch.float64)
    run(reduce_short, (1,), x, out, 32)
    assert out.tolist() == [16, 16]


def test_a_sum_of_bf16_is_a_tree() -> None:
    """One after the other, 2048 ones would stop at 256, where bf16 has no odd numbers."""
    out = torch.empty(2, dtype=torch.float64)
    run(reduce_short, (1,), torch.ones(2048).bfloat16(), out, 2048)
    assert out[0] == 2048


@triton.jit
def _second_moment(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    n = n_a + n_b
    d = mean_b - mean_a
    return mean_a + d * (n_b / n), m2_a + m2_b + d * d * (n_a * n_b / n), n


@triton.jit
def welford(x, out, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, N))
    mean, m2, n = tl.reduce((v, tl.zeros_like(v), tl.zeros_like(v) + 1), 0, _second_moment)
    tl.store(out, mean)
    tl.store(out + 1, m2 / n)


def test_reduction_of_a_tuple_with_a_function_of_the_user() -> None:
    torch.manual_seed(1)
    x, out = torch.randn(64), torch.empty(2)
    run(welford, (1,), x, out, 64)
    torch.testing.assert_close(out, torch.stack([x.mean(), x.var(unbiased=False)]))


@triton.jit
def scans(x, out, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    v = tl.load(x + at)
    tl.store(out + at, tl.cumsum(v, axis=1))
    tl.store(out + M * N + at, tl.cumsum(v, axis=0, reverse=True))
    tl.store(out + 2 * M * N + at, tl.cumprod(v, axis=1))


def test_scans() -> None:
    torch.manual_seed(2)
    x = torch.randint(1, 4, (4, 8)).float()
    out = torch.empty(3, 4, 8)
    run(scans, (1,), x, out, 4, 8)
    same(out, torch.stack([x.cumsum(1), x.flip(0).cumsum(0).flip(0), x.cumprod(1)]))


@triton.jit
def _last_set(va, fa, vb, fb):
    return tl.where(fb != 0, vb, va), fa | fb


@triton.jit
def scan_of_pairs(x, flag, out, N: tl.constexpr):
    o = tl.arange(0, N)
    value, seen = tl.associative_scan((tl.load(x + o), tl.load(flag + o)), 0, _last_set)
    tl.store(out + o, tl.where(seen != 0, value, -1))


def test_scan_of_a_tuple() -> None:
    x, out = torch.arange(8, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    run(scan_of_pairs, (1,), x, torch.tensor([0, 0, 1, 0, 1, 0, 0, 1], dtype=torch.int32), out, 8)
    assert out.tolist() == [-1, -1, 2, 2, 4, 4, 4, 7]


# -- shapes ----------------------------------------------------------------------------------------------------------


@triton.jit
def shapes(x, out, N: tl.constexpr):
    o = tl.arange(0, N)
    v = tl.load(x + o)
    square: tl.constexpr = (4, N // 4)
    m = tl.reshape(v, square)
    tl.store(out + o, tl.reshape(tl.trans(m), (N,)))
    pair = tl.join(v, v + 100)
    low, high = tl.split(pair)
    tl.store(out + N + o, high - low)
    tl.store(out + 2 * N + tl.arange(0, 2 * N), tl.reshape(tl.interleave(v, -v), (2 * N,)))
    tl.store(out + 4 * N + tl.arange(0, 2 * N), tl.cat(v, v, can_reorder=True))
    cube = tl.permute(tl.reshape(v, (2, 2, N // 4)), (2, 0, 1))
    tl.store(out + 6 * N + o, tl.ravel(cube))
    wide = tl.broadcast_to(tl.expand_dims(v, 1), (N, 2))
    tl.store(out + 7 * N + o, tl.sum(wide, 1))
    tl.store(out + 8 * N + o, tl.flip(v, 0))
    tl.store(out + 9 * N + o, tl.sort(-v))
    tl.store(out + 10 * N + o, m.T.reshape((N,)))
    tl.store(out + 11 * N + o, tl.gather(v, (o + 3) % N, 0))


def test_shapes() -> None:
    n = 16
    x, out = torch.arange(1, n + 1).float(), torch.empty(12 * n)
    run(shapes, (1,), x, out, n)
    out = out.reshape(12, n)
    same(out[0], x.reshape(4, 4).T.reshape(-1))
    assert (out[1] == 100).all()
    same(out[2:4].reshape(-1), torch.stack([x, -x], 1).reshape(-1))
    assert sorted(out[4:6].reshape(-1).tolist()) == sorted([*x.tolist(), *x.tolist()])
    same(out[6], x.reshape(2, 2, 4).permute(2, 0, 1).reshape(-1))
    same(out[7], 2 * x)
    same(out[8], x.flip(0))
    same(out[9], -x.flip(0))
    same(out[10], out[0])
    same(out[11], x.roll(-3))


@triton.jit
def histogram(x, out, N: tl.constexpr, BINS: tl.constexpr):
    v = tl.load(x + tl.arange(0, N))
    tl.store(out + tl.arange(0, BINS), tl.histogram(v, BINS))
    tl.store(out + BINS + tl.arange(0, BINS), tl.histogram(v, BINS, mask=v > 1))


def test_histogram_drops_what_is_in_no_bin() -> None:
    x = torch.tensor([0, 1, 1, 2, 3, 4, 9, -1], dtype=torch.int32)
    out = torch.empty(2, 4, dtype=torch.int32)
    run(histogram, (1,), x, out, 8, 4)
    assert out.tolist() == [[1, 2, 1, 1], [0, 0, 1, 1]]


@triton.jit
def standard_library(x, out, ints, N: tl.constexpr):
    o = tl.arange(0, N)
    v = tl.load(x + o)
    tl.store(out + o, tl.softmax(v))
    tl.store(out + N + tl.arange(0, 4), tl.topk(v, 4))
    tl.store(out + 2 * N + o, tl.maximum(v, 0.5, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 3 * N + o, tl.div_rn(v, 3.0))
    tl.store(ints, tl.cdiv(N, 3))
    tl.store(ints + 1, tl.xor_sum(o, 0))
    tl.store(ints + 2, tl.sum((v > 0).to(tl.int32)))
    i, j = tl.swizzle2d(tl.num_programs(0), tl.program_id(0) + 2, 4, 4, 2)
    tl.store(ints + 3, i * 10 + j)
    tl.assume(N > 0)
    tl.store(ints + 4, tl.multiple_of(tl.max_contiguous(tl.load(ints), 1), 1) + 1)
    tl.debug_barrier()


def test_standard_library() -> None:
    torch.manual_seed(3)
    x, out, ints = torch.randn(16), torch.zeros(4, 16), torch.zeros(5, dtype=torch.int32)
    x[3] = float("nan")
    run(standard_library, (1,), x.nan_to_num(1.0), out, ints, 16)
    y = x.nan_to_num(1.0)
    torch.testing.assert_close(out[0], y.softmax(0))
    same(out[1, :4], y.sort(descending=True).values[:4])
    same(out[2], y.clamp(min=0.5))
    same(out[3], y / 3)
    assert ints.tolist() == [6, 0, int((y > 0).sum()), 3, 7]
    run(standard_library, (1,), x, out, ints, 16)
    assert out[2, 3].isnan()


@triton.jit
def random_numbers(out, seed, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, tl.rand(seed, o))
    tl.store(out + N + o, tl.randn(seed, o))


def test_random_numbers() -> None:
    out, again, other = (torch.empty(2, 1024) for _ in range(3))
    run(random_numbers, (1,), out, 7, 1024)
    run(random_numbers, (1,), again, 7, 1024)
    run(random_numbers, (1,), other, 8, 1024)
    same(out, again)
    assert (out != other).any()
    assert 0 <= out[0].min() <= out[0].max() < 1
    assert abs(out[0].mean() - 0.5) < 0.05
    assert abs(out[1].std() - 1) < 0.1


# -- control flow ----------------------------------------------------------------------------------------------------


@triton.jit
def loops(out, n, N: tl.constexpr):
    total = 0
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
        total = 0
    tl.store(out + 5, (total if n > 5 else -1) + (1 if n > 50 else 0))
    for i in range(n):
        if i < 2:
            total += 1
    tl.store(out + 6, total)


def test_control_flow() -> None:
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
        block = tl.zeros((2 << i,), tl.float32)  # a constant, which a shape wants
        tl.store(out + 1 + i, tl.sum(block + 1).to(tl.int64))


def test_loop_indices_have_types() -> None:
    out = torch.empty(3, dtype=torch.int64)
    run(index_types, (1,), out, 3, 2**40)
    assert out.tolist() == [2**40 + 2, 2, 4]


@triton.jit
def static_loop_of_run_time_length(out, n):
    for i in tl.static_range(n):
        tl.store(out + i, i)


def test_static_range_wants_constants() -> None:
    with pytest.raises(RankFailed, match="tl.static_range takes constants"):
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
    if FLAG and a > 3:  # a false constant ends it
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
    assert counter.item() == 1  # Python would have stopped at a > 3


@triton.jit
def block_condition(x, out):
    if tl.load(x + tl.arange(0, 4)) > 0:
        tl.store(out, 1)


def test_a_block_is_no_condition() -> None:
    with pytest.raises(RankFailed, match=r"a block of shape \(4,\) has no truth value"):
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


def test_tuples_in_the_kernel() -> None:
    out = torch.empty(3)
    run(tuples, (1,), out)
    assert out.tolist() == [3.5, 6.5, 0.5]


@triton.jit
def builtins(out, n, N: tl.constexpr):
    tl.store(out, min(n, 3) + max(n, 5, 1))
    block = tl.zeros((max(N, 4),), tl.int32) + min(7, N)  # of constants: a constant
    tl.store(out + 1, tl.sum(block))
    assert n > 0, "n must be positive"
    print("n is", n)


def test_min_max_assert_and_print_of_python(capsys: pytest.CaptureFixture) -> None:
    out = torch.empty(2, dtype=torch.int32)
    run(builtins, (1,), out, 4, 2)
    assert out.tolist() == [8, 8]
    assert "n is:  [4]" in capsys.readouterr().out
    with pytest.raises(RankFailed, match="n must be positive"):
        run(builtins, (1,), out, -4, 2)


# -- functions -------------------------------------------------------------------------------------------------------

SCALE = tl.constexpr(3)


@triton.jit
def _helper(x, factor: tl.constexpr = SCALE, *, plus=0):
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


def test_helpers_across_modules() -> None:
    x, out = torch.arange(8).float(), torch.empty(6, 8)
    run(helpers_everywhere, (1,), x, out, 8)
    wanted = [3 * x, 2 * x + 1, x + 2, x + (x + 1) * (x + 2), 2**x, x.sum() + x]
    same(out, torch.stack(wanted))


def test_closures_of_each_rank() -> None:
    """A kernel made anew by every rank, with what that rank's function knows; nothing is confused by reuse of ids."""

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
        assert interpret.functions[id(kernel)][0] is kernel  # which keeps the id from being given to another
        return out.item()

    assert pkt.launch(main, ranks=4, device="cpu") == [1.0, 11.0, 21.0, 31.0]


WIDTH = 4  # a plain number


@triton.jit
def uses_a_plain_global(out, USE: tl.constexpr):
    WIDTH_HERE = 3
    tl.store(out, WIDTH_HERE)
    if USE:
        tl.store(out, WIDTH)


def test_plain_globals_are_refused_where_they_are_used() -> None:
    out = torch.zeros(1)
    run(uses_a_plain_global, (1,), out, False)
    with pytest.raises(RankFailed, match=r"cannot use the global variable WIDTH = 4: make it a constexpr"):
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


def test_grids_of_three_dimensions() -> None:
    out = torch.zeros(4, 3, 2, dtype=torch.int32)
    run(program_ids, (2, 3, 4), out, 2, 3)
    assert (out == 20304).all()


# -- arguments -------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    rest: Any


@triton.jit
def nested(out, p, t):
    tl.store(out, p.first + p.rest[0])
    tl.store(out + 1, tl.load(p.rest[1].first) * p.rest[1].rest)
    tl.store(out + 2, t[0][1] - t[1])
    block = tl.zeros((t[2],), tl.float32)
    tl.store(out + 3, tl.sum(block + 1))


def test_nested_tuples_and_named_tuples() -> None:
    x, out = torch.tensor([2.0]), torch.empty(4)
    run(nested, (1,), out, Pair(5, (7, Pair(x, tl.constexpr(4)))), ((1, 9), 4, tl.constexpr(8)))
    assert out.tolist() == [12.0, 8.0, 5.0, 8.0]


@triton.jit
def specialised(out, n):
    tl.store(out, n.to(tl.int64))


@triton.jit(do_not_specialize=["n"])
def not_specialised(out, n):
    tl.store(out, n.to(tl.int64))


def test_the_integer_one_is_a_constant() -> None:
    """Triton compiles an argument of 1 as a constant, on rank 1 only: what fails there must fail here."""
    out = torch.empty(1, dtype=torch.int64)
    for n in (0, 2, 16, 2**40):
        run(specialised, (1,), out, n)
        assert out.item() == n
    with pytest.raises(RankFailed, match="'int' object has no attribute 'to'"):
        run(specialised, (1,), out, 1)
    run(not_specialised, (1,), out, 1)
    assert out.item() == 1


@triton.jit
def argument_types(i, j, k, f, b, none):
    tl.static_assert(i.dtype == tl.int32)
    tl.static_assert(j.dtype == tl.int64)
    tl.static_assert(k.dtype == tl.uint64)
    tl.static_assert(f.dtype == tl.float32)
    tl.static_assert(b.dtype == tl.int1)
    tl.static_assert(none is None)


def test_types_of_numbers() -> None:
    run(argument_types, (1,), 5, 2**31, 2**63, 0.1, True, None)


@triton.jit
def options(x, BLOCK: tl.constexpr, NAME: tl.constexpr = "none", DTYPE: tl.constexpr = tl.float32):
    o = tl.arange(0, BLOCK)
    if NAME == "twice":
        tl.store(x + o, tl.load(x + o).to(DTYPE) * 2)


def test_launch_options_and_meta_parameters() -> None:
    x = torch.ones(8)
    seen: list[Any] = []

    def grid(meta: dict) -> tuple:
        seen.append(meta["BLOCK"])
        return (triton.cdiv(8, meta["BLOCK"]),)

    def main(world: Any) -> None:
        options[grid](x, BLOCK=8, NAME="twice", num_warps=8, num_stages=3, num_ctas=1)
        options[1, 1](x, 8, tl.constexpr("twice"), DTYPE=tl.float16)
        options[(1,)](x, tl.constexpr(8))

    pkt.launch(main, ranks=1, device="cpu")
    assert (x == 4).all()
    assert seen == [8]


def test_wrong_arguments() -> None:
    with pytest.raises(RankFailed, match="missing a required argument: 'BLOCK'"):
        run(options, (1,), torch.ones(8))
    with pytest.raises(RankFailed, match="wrong_name"):
        run(options, (1,), torch.ones(8), BLOCK=8, wrong_name=3)


@triton.autotune(configs=[triton.Config({"BLOCK": 4}), triton.Config({"BLOCK": 8})], key=["n"])
@triton.jit
def tuned(out, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + o, BLOCK, mask=o < n)


def _prune(configs: list, named: dict, **_: Any) -> list:
    return [c for c in configs if c.kwargs["BLOCK"] > named["n"] // 2]


@triton.autotune(
    configs=[triton.Config({"BLOCK": 4}), triton.Config({"BLOCK": 8}, pre_hook=lambda named: named["out"].fill_(100))],
    key=["n"],
    prune_configs_by={"early_config_prune": _prune},
)
@triton.heuristics({"TWICE": lambda named: named["BLOCK"] == 8})
@triton.jit
def pruned(out, n, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, tl.load(out + o) + BLOCK * (2 if TWICE else 1), mask=o < n)


def test_autotuned_kernels_run_their_first_configuration() -> None:
    out = torch.zeros(8, dtype=torch.int32)
    run(tuned, lambda meta: (triton.cdiv(8, meta["BLOCK"]),), out, 8)
    assert (out == 4).all()  # once: nothing is benchmarked
    assert tuned.cache == {}  # and nothing is remembered for the GPU
    run(pruned, lambda meta: (triton.cdiv(8, meta["BLOCK"]),), out, 8)
    assert (out == 116).all()


@triton.jit
def says(x):
    tl.device_print("value", tl.load(x))
    tl.static_print("static")


def test_device_print_names_the_rank(capsys: pytest.CaptureFixture) -> None:
    pkt.launch(lambda world: says[(1,)](torch.tensor([7 + world.rank])), ranks=2, device="cpu")
    said = capsys.readouterr().out
    assert "rank 0" in said
    assert "rank 1" in said
    assert "[7]" in said
    assert "[8]" in said


@triton.jit
def asserts(x, n):
    o = tl.arange(0, 4)
    tl.device_assert(tl.load(x + o) < n, "too large", mask=o < 3)


def test_device_assert() -> None:
    x = torch.tensor([1, 2, 3, 99])
    run(asserts, (1,), x, 4)
    with pytest.raises(RankFailed, match="too large"):
        run(asserts, (1,), x, 3)


@triton.jit
def fails_static(N: tl.constexpr):
    tl.static_assert(N % 2 == 0, "N must be even")


def test_static_assert() -> None:
    run(fails_static, (1,), 2)
    with pytest.raises(RankFailed, match="N must be even"):
        run(fails_static, (1,), 3)


@triton.jit
def assembly(out):
    tl.store(out, tl.inline_asm_elementwise("mov.u32 $0, 1;", "=r", [], tl.int32, True, 1))


def test_inline_assembly_is_refused_by_name() -> None:
    with pytest.raises(RankFailed, match=r"inline assembly cannot be simulated: 'mov.u32 \$0, 1;'"):
        run(assembly, (1,), torch.empty(1, dtype=torch.int32))
