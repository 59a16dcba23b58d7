"""Operations on blocks in the simulator: reductions, scans, shapes, the standard library."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.simulate.helpers import assert_same, run

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


def test_reductions_match_torch() -> None:
    torch.manual_seed(0)
    x = torch.randint(-50, 50, (8, 16)).float()
    rows, cols, whole = torch.empty(3, 8), torch.empty(4, 16, dtype=torch.int32), torch.empty(4)
    run(reductions, (1,), x, rows, cols, whole, 8, 16)
    assert_same(rows, torch.stack([x.sum(1), x.amax(1), x.amin(1)]))
    first = torch.stack([(x == x.amax(0)).int().argmax(0), (x == x.amin(0)).int().argmax(0)]).int()
    assert_same(cols[:2], first)
    assert_same(cols[2], first[0])  # the leftmost of equal values wins
    assert cols[3].all()
    assert_same(whole, torch.stack([x.sum(), x.amax(), x.sum(), x.sum()]))


@triton.jit
def reduce_short(x, out, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, N))
    tl.store(out, tl.sum(v))
    tl.store(out + 1, tl.max(v))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.int32, torch.int64], ids=str)
def test_reductions_work_for_every_type(dtype: torch.dtype) -> None:
    x = torch.arange(-15, 17).to(dtype)
    out = torch.empty(2, dtype=torch.float64)
    run(reduce_short, (1,), x, out, 32)
    assert out.tolist() == [16, 16]


def test_a_bf16_sum_adds_as_a_tree() -> None:
    """A sequential sum of 2048 ones would stop at 256, where bf16 has no odd numbers."""
    out = torch.empty(2, dtype=torch.float64)
    run(reduce_short, (1,), torch.ones(2048).bfloat16(), out, 2048)
    assert out[0] == 2048


def test_an_fp16_sum_rounds_every_step() -> None:
    out = torch.empty(2, dtype=torch.float64)
    run(reduce_short, (1,), torch.tensor([40000, 40000, 40000, -60000], dtype=torch.float16), out, 4)
    assert out[0] == float("inf")  # two of them are too large for fp16, all are not


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_sum_of_negative_zeros_is_one(dtype: torch.dtype) -> None:
    out = torch.empty(2, dtype=torch.float64)
    run(reduce_short, (1,), torch.full((4,), -0.0, dtype=dtype), out, 4)
    assert out.signbit().all()


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


def test_a_users_function_may_reduce_a_tuple() -> None:
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


def test_scans_match_torch() -> None:
    torch.manual_seed(2)
    x = torch.randint(1, 4, (4, 8)).float()
    out = torch.empty(3, 4, 8)
    run(scans, (1,), x, out, 4, 8)
    assert_same(out, torch.stack([x.cumsum(1), x.flip(0).cumsum(0).flip(0), x.cumprod(1)]))


@triton.jit
def _last_set(va, fa, vb, fb):
    return tl.where(fb != 0, vb, va), fa | fb


@triton.jit
def scan_of_pairs(x, flag, out, N: tl.constexpr):
    o = tl.arange(0, N)
    value, seen = tl.associative_scan((tl.load(x + o), tl.load(flag + o)), 0, _last_set)
    tl.store(out + o, tl.where(seen != 0, value, -1))


def test_a_users_function_may_scan_a_tuple() -> None:
    x, out = torch.arange(8, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    run(scan_of_pairs, (1,), x, torch.tensor([0, 0, 1, 0, 1, 0, 0, 1], dtype=torch.int32), out, 8)
    assert out.tolist() == [-1, -1, 2, 2, 4, 4, 4, 7]


@triton.jit
def clipped(x, limit):
    if x > limit:
        return limit
    else:
        return x * 2


@triton.jit
def smaller_first(a, b, c, d):
    if a < c:
        low, high = a, c
    else:
        low, high = c, a
    if b < d:
        return low, b, high, d
    else:
        return low, d, high, b


@triton.jit
def by_element(x, y, out, N: tl.constexpr):
    o = tl.arange(0, N)
    a, b = tl.load(x + o), tl.load(y + o)
    tl.store(out + o, tl.map_elementwise(clipped, a, tl.load(y)))
    low, high = tl.map_elementwise(smaller_first, a, b, pack=2)
    tl.store(out + N + o, low)
    tl.store(out + 2 * N + o, high)


def test_a_function_of_scalars_may_branch_for_each_element() -> None:
    torch.manual_seed(5)
    x, y = torch.randint(-9, 9, (2, 16), dtype=torch.int32)
    out = torch.empty(3, 16, dtype=torch.int32)
    run(by_element, (1,), x, y, out, 16)
    assert_same(out, torch.stack([torch.where(x > y[0], y[0], 2 * x), torch.minimum(x, y), torch.maximum(x, y)]))


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


def test_shape_operations_match_torch() -> None:
    n = 16
    x, out = torch.arange(1, n + 1).float(), torch.empty(12 * n)
    run(shapes, (1,), x, out, n)
    out = out.reshape(12, n)
    assert_same(out[0], x.reshape(4, 4).T.reshape(-1))
    assert (out[1] == 100).all()
    assert_same(out[2:4].reshape(-1), torch.stack([x, -x], 1).reshape(-1))
    assert sorted(out[4:6].reshape(-1).tolist()) == sorted([*x.tolist(), *x.tolist()])
    assert_same(out[6], x.reshape(2, 2, 4).permute(2, 0, 1).reshape(-1))
    assert_same(out[7], 2 * x)
    assert_same(out[8], x.flip(0))
    assert_same(out[9], -x.flip(0))
    assert_same(out[10], out[0])
    assert_same(out[11], x.roll(-3))


@triton.jit
def of_scalars(x, out):
    pair = tl.join(tl.load(x), tl.load(x + 1))
    low, high = tl.split(pair * 2)
    tl.store(out + tl.arange(0, 2), pair)
    tl.store(out + 2, high - low)
    tl.store(out + 3, tl.max(pair))


def test_scalars_join_to_a_block() -> None:
    out = torch.empty(4)
    run(of_scalars, (1,), torch.tensor([3.0, 5.0]), out)
    assert out.tolist() == [3, 5, 4, 5]


@triton.jit
def histogram(x, out, N: tl.constexpr, BINS: tl.constexpr):
    v = tl.load(x + tl.arange(0, N))
    tl.store(out + tl.arange(0, BINS), tl.histogram(v, BINS, mask=(v >= 0) & (v < BINS)))
    tl.store(out + BINS + tl.arange(0, BINS), tl.histogram(v, BINS, mask=(v > 1) & (v < BINS)))


def test_histogram_counts_what_the_mask_selects() -> None:
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
    tl.store(ints + 4 + tl.arange(0, 1), tl.multiple_of(tl.max_contiguous(tl.load(ints + tl.arange(0, 1)), 1), 1) + 1)
    tl.debug_barrier()


def test_the_standard_library_matches_torch() -> None:
    torch.manual_seed(3)
    x, out, ints = torch.randn(16), torch.zeros(4, 16), torch.zeros(5, dtype=torch.int32)
    x[3] = float("nan")
    run(standard_library, (1,), x.nan_to_num(1.0), out, ints, 16)
    y = x.nan_to_num(1.0)
    torch.testing.assert_close(out[0], y.softmax(0))
    assert_same(out[1, :4], y.sort(descending=True).values[:4])
    assert_same(out[2], y.clamp(min=0.5))
    assert_same(out[3], y / 3)
    assert ints.tolist() == [6, 0, int((y > 0).sum()), 3, 7]
    run(standard_library, (1,), x, out, ints, 16)
    assert out[2, 3].isnan()


@triton.jit
def random_numbers(out, seed, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, tl.rand(seed, o))
    tl.store(out + N + o, tl.randn(seed, o))


def test_random_numbers_depend_on_the_seed() -> None:
    out, again, other = (torch.empty(2, 1024) for _ in range(3))
    run(random_numbers, (1,), out, 7, 1024)
    run(random_numbers, (1,), again, 7, 1024)
    run(random_numbers, (1,), other, 8, 1024)
    assert_same(out, again)
    assert (out != other).any()
    assert 0 <= out[0].min() <= out[0].max() < 1
    assert abs(out[0].mean() - 0.5) < 0.05
    assert abs(out[1].std() - 1) < 0.1


@triton.jit
def joined(x, y, out):
    i = tl.arange(0, 4)
    tl.store(out + tl.arange(0, 8), tl.interleave(tl.load(x + i), tl.load(y + i)))


def test_a_signed_and_an_unsigned_integer_are_joined_bit_by_bit() -> None:
    x, out = torch.tensor([0, -1, 2, 3]), torch.empty(8, dtype=torch.int64)
    run(joined, (1,), x, x.view(torch.uint64), out)
    assert out.tolist() == [0, 0, -1, -1, 2, 2, 3, 3]


@triton.jit
def compare_shapes(out):
    x = tl.zeros([4, 2], tl.int32)
    tl.static_assert(x.shape == [4, 2])
    tl.static_assert(tl.sum(x).shape == [])
    tl.static_assert(x.shape != [2, 4])
    tl.store(out, 1)


def test_a_shape_is_compared_with_a_list() -> None:
    out = torch.zeros(1)
    run(compare_shapes, (1,), out)
    assert out.item() == 1.0
