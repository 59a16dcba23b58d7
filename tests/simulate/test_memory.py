"""Loads, stores, atomics and tensor descriptors of the simulator, on one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import pkt
from pkt.errors import RankFailed
from pkt.simulate.findings import OutOfBounds
from pkt.simulate.memory import AddressSpace, Region, Scattered, Strided, Unmapped
from tests.simulate.helpers import assert_same, run

NEWEST = hasattr(tl, "atomic_poll")  # Triton 3.9


@triton.jit
def masked(x, out, n, N: tl.constexpr):
    o = tl.arange(0, N)
    v = tl.load(x + o, mask=o < n, other=-1)
    tl.store(out + o, v)
    tl.store(out + N + o, tl.load(x + o, mask=o % 2 == 0, other=o - 3))
    tl.store(out + 2 * N + o, tl.load(x + o), mask=(o % 3 == 0) & (o < n))
    if n > 100:
        tl.store(out + 3 * N, tl.load(x + 10**6))
    tl.store(out + 3 * N + o, tl.load(x + 10**6 + o, mask=o < 0, other=3))  # nothing is touched


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32], ids=str)
def test_masked_elements_are_not_accessed(dtype: torch.dtype) -> None:
    x = torch.arange(1, 17).to(dtype)
    out = torch.zeros(4, 16).to(dtype)
    run(masked, (1,), x, out, 10, 16)
    f, o = x.float(), torch.arange(16)
    wanted = [
        torch.where(o < 10, f, -1),
        torch.where(o % 2 == 0, f, o - 3),
        torch.where((o % 3 == 0) & (o < 10), f, 0),
        torch.full((16,), 3.0),
    ]
    assert out.float().tolist() == torch.stack(wanted).tolist()


@triton.jit
def strided(x, out, rows, stride, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    at = x + m[:, None] * stride + n[None, :]
    inside = (m < rows)[:, None] & (n < N - 1)[None, :]
    tl.store(out + m[:, None] * N + n[None, :], tl.load(at, mask=inside, other=0))
    tl.store(out + M * N + n[None, :] * M + m[:, None], tl.load(x + n[None, :] + m[:, None] * 0))  # a row, M times
    tl.store(out + 2 * M * N + m, tl.load(x + (M - 1 - m) * stride))  # backwards


def test_blocks_may_have_any_stride() -> None:
    x, out = torch.arange(8 * 24).float().reshape(8, 24), torch.full((3, 8, 16), -1.0)
    run(strided, (1,), x, out, 5, 24, 8, 16)
    wanted = torch.zeros(8, 16)
    wanted[:5, :15] = x[:5, :15]
    assert_same(out[0], wanted)
    assert_same(out[1].reshape(16, 8), x[0, :16, None].expand(16, 8).contiguous())
    assert_same(out[2].reshape(-1)[:8], x[:, 0].flip(0))


@triton.jit
def scalars(x, out):
    v = tl.load(x + 3)
    tl.store(out, v)
    tl.store(out + 1, tl.load(x + v.to(tl.int32)) + 1)
    p = (x + 2).to(tl.int64)
    tl.store(out + 2, tl.load((p + 4).to(tl.pointer_type(tl.float32))))
    tl.store(out + 3, 1.5)


def test_scalars_and_integer_pointers_may_be_accessed() -> None:
    x, out = torch.tensor([5.0, 6.0, 7.0, 1.0]), torch.empty(4)
    run(scalars, (1,), x, out)
    assert out.tolist() == [1.0, 7.0, 1.0, 1.5]


# -- atomics ---------------------------------------------------------------------------------------------------------


@triton.jit
def atomics(x, v, old, OP: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    value = tl.load(v + o)
    at, inside = x + o // 2, o != 5
    if OP == "add":
        was = tl.atomic_add(at, value, mask=inside)
    elif OP == "max":
        was = tl.atomic_max(at, value, mask=inside)
    elif OP == "min":
        was = tl.atomic_min(at, value, mask=inside)
    elif OP == "and":
        was = tl.atomic_and(at, value, mask=inside)
    elif OP == "or":
        was = tl.atomic_or(at, value, mask=inside)
    elif OP == "xor":
        was = tl.atomic_xor(at, value, mask=inside)
    else:
        was = tl.atomic_xchg(at, value, mask=inside)
    tl.store(old + o, was, mask=inside)


INTEGERS = [torch.int32, torch.int64, torch.uint32, torch.uint64]
CASES = [
    *(("add", d) for d in (*INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64)),
    *((op, d) for op in ("max", "min") for d in (*INTEGERS, torch.float32, torch.float64)),
    *((op, d) for op in ("and", "or", "xor") for d in INTEGERS),
    *(("xchg", d) for d in (*INTEGERS, torch.float32, torch.float64)),
]
MEANING: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "max": max,
    "min": min,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "xchg": lambda a, b: b,
}


def as_dtype(values: list, dtype: torch.dtype) -> torch.Tensor:
    """`values` as a tensor of dtype. Unsigned ones are made from signed ones, for which torch has more operations."""
    signed = {torch.uint32: torch.int32, torch.uint64: torch.int64}.get(dtype)
    if signed is None:
        return torch.tensor(values, dtype=torch.float64 if dtype.is_floating_point else dtype).to(dtype)
    half = 1 << (dtype.itemsize * 8 - 1)
    return torch.tensor([(v + half) % (2 * half) - half for v in values], dtype=signed).view(dtype)


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=lambda p: str(p).removeprefix("torch."))
def test_atomics_update_an_element_one_after_the_other(op: str, dtype: torch.dtype) -> None:
    """Two neighbours of a block update the same element."""
    unsigned = dtype in (torch.uint32, torch.uint64)
    big = (1 << (dtype.itemsize * 8 - 1)) + 5 if unsigned else 12
    start, values = [3, 10, 7, 3], [1, 2, big, 5, 4, 100, 6, 2]
    if not unsigned:
        start, values = [v - 8 for v in start], [v - 4 for v in values]
    x, old = as_dtype(start, dtype), as_dtype([0] * 8, dtype)
    run(atomics, (1,), x, as_dtype(values, dtype), old, op, 8)
    state, was = list(start), [0] * 8
    for i, v in enumerate(values):
        if i != 5:
            was[i] = state[i // 2]
            state[i // 2] = MEANING[op](state[i // 2], v)
    assert x.tolist() == as_dtype(state, dtype).tolist()
    if not (op in ("max", "min") and dtype.is_floating_point):  # Triton makes these of two integer atomics
        assert old.tolist() == as_dtype(was, dtype).tolist()


@triton.jit
def atomics_of_a_tile(x, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    at = m[:, None] * N + n[None, :]
    old = tl.atomic_add(x + at, at, mask=(m > 0)[:, None] & (n < N - 1)[None, :])
    tl.store(x + M * N + at, old)
    tl.atomic_cas(x + 2 * M * N + at, at % 3, at + 100)


def test_atomics_work_on_a_tile() -> None:
    x = torch.ones(3, 4, 8, dtype=torch.int32)
    x[2] = 1
    run(atomics_of_a_tile, (1,), x, 4, 8)
    at = torch.arange(32, dtype=torch.int32).reshape(4, 8)
    inside = (torch.arange(4) > 0)[:, None] & (torch.arange(8) < 7)[None, :]
    assert_same(x[0], torch.where(inside, at + 1, torch.tensor(1, dtype=torch.int32)))
    assert (x[1][inside] == 1).all()
    assert_same(x[2], torch.where(at % 3 == 1, at + 100, torch.tensor(1, dtype=torch.int32)))


@triton.jit
def compare_and_swap(x, old, N: tl.constexpr):
    o = tl.arange(0, N)
    at = o.to(x.dtype.element_ty)
    tl.store(old + o, tl.atomic_cas(x + o, at, at + 100))
    hundred = tl.full((), 100, x.dtype.element_ty)
    tl.store(old + N, tl.atomic_cas(x, hundred, hundred - 93))
    tl.store(old + N + 1, tl.atomic_cas(x, hundred, hundred - 92))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_compare_and_swap_writes_only_on_a_match(dtype: torch.dtype) -> None:
    x, old = torch.tensor([0, 9, 2, 9], dtype=dtype), torch.empty(6, dtype=dtype)
    run(compare_and_swap, (1,), x, old, 4)
    assert x.tolist() == [7, 9, 102, 9]
    assert old.tolist() == [0, 9, 2, 9, 100, 7]


@triton.jit
def swap_floats(x, expected, old, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(old + o, tl.atomic_cas(x + o, tl.load(expected + o), tl.full((N,), 7, x.dtype.element_ty)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_compare_and_swap_of_floats_compares_bits(dtype: torch.dtype) -> None:
    nan = float("nan")
    x, expected = (torch.tensor(v, dtype=dtype) for v in ([nan, -0.0, 2, 3], [nan, 0.0, 2, 4]))
    before, old = x.clone(), torch.empty_like(x)
    run(swap_floats, (1,), x, expected, old, 4)
    assert_same(x, torch.tensor([7, -0.0, 7, 3], dtype=dtype))
    assert_same(old, before)


@triton.jit
def bits_of_floats(x, N: tl.constexpr):
    o = tl.arange(0, N)
    sign = tl.full((N,), -(2**31), tl.int32).to(tl.float32, bitcast=True)
    tl.atomic_and(x + o, -2.0)
    tl.atomic_or(x + N + o, sign)
    tl.atomic_xor(x + 2 * N + o, sign)


def test_logical_atomics_work_on_the_bits_of_floats() -> None:
    x = torch.tensor([[3.0, -3.0], [5.0, -5.0], [5.0, -5.0]])
    run(bits_of_floats, (1,), x, 2)
    assert x.tolist() == [[2.0, -2.0], [-5.0, -5.0], [-5.0, 5.0]]


@triton.jit
def count(counter, tickets):
    tl.store(tickets + tl.atomic_add(counter, 1), tl.program_id(0))


def test_programs_draw_different_tickets() -> None:
    for seed in range(5):
        counter, tickets = torch.zeros(1, dtype=torch.int32), torch.full((40,), -1, dtype=torch.int32)
        pkt.launch(lambda w, *args: count[(40,)](*args), ranks=1, device="cpu", args=(counter, tickets), seed=seed)
        assert sorted(tickets.tolist()) == list(range(40))


@triton.jit
def lock(guard, total, ROUNDS: tl.constexpr):
    for _ in range(ROUNDS):
        while tl.atomic_cas(guard, 0, 1, sem="acquire", scope="gpu") == 1:
            pass
        tl.store(total, tl.load(total) + 1)
        tl.atomic_xchg(guard, 0, sem="release", scope="gpu")


def test_a_lock_made_of_compare_and_swap_excludes() -> None:
    for seed in range(6):
        guard, total = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
        pkt.launch(lambda w, *args: lock[(6,)](*args), ranks=1, device="cpu", args=(guard, total, 4), seed=seed)
        assert total.item() == 24, f"seed {seed}"


# At module level, because Triton reads the source of the whole function and must not look up names that 3.6 lacks.
if NEWEST:

    @triton.jit
    def atomic_accesses(x, out):
        tl.atomic_store(x, 5, sem="release", scope="sys")
        tl.store(out, tl.atomic_load(x, sem="acquire", scope="sys"))
        tl.atomic_poll(x, 5, sem="acquire", scope="sys")

    def test_atomic_load_store_and_poll_work() -> None:
        x, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        run(atomic_accesses, (1,), x, out)
        assert [x.item(), out.item()] == [5, 5]


# -- tensor descriptors ----------------------------------------------------------------------------------------------


@triton.jit
def descriptor_copy(x, y, m, n, BM: tl.constexpr, BN: tl.constexpr):
    src = tl.make_tensor_descriptor(x, [m, n], [n, 1], [BM, BN])
    dst = tl.make_tensor_descriptor(y, [m, n], [n, 1], [BM, BN])
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    dst.store([i, j], src.load([i, j]) + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_descriptors_clip_at_the_edge(dtype: torch.dtype) -> None:
    x = torch.arange(20 * 24).remainder(100).reshape(20, 24).to(dtype)
    y = torch.zeros(21, 24).to(dtype)
    run(descriptor_copy, (2, 2), x, y, 20, 24, 16, 16)
    assert_same(y[:20], x + 1)
    assert (y[20] == 0).all()


@triton.jit
def descriptor_edges(desc, out, PAD: tl.constexpr):
    for k in tl.static_range(3):
        block = desc.load([(-4, 6, 100)[k], -4])
        at = tl.arange(0, 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
        tl.store(out + 64 * k + at, block)


@pytest.mark.parametrize("padding", ["zero", "nan"])
def test_host_descriptors_fill_elements_outside(padding: str) -> None:
    x, out = torch.arange(64).float().reshape(8, 8), torch.empty(3, 8, 8)
    desc = TensorDescriptor(x, list(x.shape), list(x.stride()), [8, 8], padding)
    run(descriptor_edges, (1,), desc, out, padding)
    wanted = torch.full((3, 8, 8), 0.0 if padding == "zero" else float("nan"))
    wanted[0, 4:, 4:] = x[:4, :4]
    wanted[1, :2, 4:] = x[6:, :4]
    assert_same(out, wanted)


@triton.jit
def descriptor_reduce(desc, low, high, N: tl.constexpr):
    v = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    desc.atomic_add([0, 0], v.to(desc.dtype))
    desc.atomic_add([N // 2, 0], v.to(desc.dtype))
    low.atomic_min([0, 0], v.to(low.dtype))
    high.atomic_max([0, 0], v.to(high.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32], ids=str)
def test_descriptor_reductions_update_elements(dtype: torch.dtype) -> None:
    n = 8
    x, v = torch.ones(n, n).to(dtype), torch.arange(n * n).reshape(n, n)
    short = torch.int32 if dtype == torch.float32 else dtype  # TMA has no fp32 minimum
    low, high = torch.full((n, n), 30).to(short), torch.full((n, n), 30).to(short)
    run(descriptor_reduce, (1,), *(TensorDescriptor.from_tensor(t, [n, n]) for t in (x, low, high)), n)
    wanted = 1 + v.double()
    wanted[n // 2 :] += v[: n // 2]
    assert_same(x, wanted.to(dtype))
    assert_same(low, v.clamp(max=30).to(short))
    assert_same(high, v.clamp(min=30).to(short))


@triton.jit
def descriptor_gather(src, dst, rows, out, N: tl.constexpr):
    at = tl.load(rows + tl.arange(0, N))
    v = src.gather(at, 16)
    tl.store(out + tl.arange(0, N)[:, None] * 16 + tl.arange(0, 16)[None, :], v)
    dst.scatter(v, at, 0)


def test_descriptors_gather_and_scatter_rows() -> None:
    x, y, out = torch.arange(16 * 32).float().reshape(16, 32), torch.zeros(16, 16), torch.empty(8, 16)
    rows = torch.tensor([3, 1, 15, 0, 7, 8, 9, 4], dtype=torch.int32)
    src, dst = TensorDescriptor.from_tensor(x, [1, 16]), TensorDescriptor.from_tensor(y, [1, 16])
    run(descriptor_gather, (1,), src, dst, rows, out, 8)
    assert_same(out, x[rows.long(), 16:])
    assert_same(y[rows.long()], out)


@triton.jit
def descriptor_3d(desc, out):
    v = desc.load([1, 0, 8])
    tl.store(out + tl.arange(0, 32), tl.reshape(v, (32,)))


def test_descriptors_may_have_three_dimensions() -> None:
    x, out = torch.arange(3 * 4 * 16).float().reshape(3, 4, 16), torch.empty(4, 8)
    run(descriptor_3d, (1,), TensorDescriptor.from_tensor(x, [1, 4, 8]), out)
    assert_same(out, x[1, :, 8:])


@triton.jit
def descriptor_unaligned(desc, out):
    tl.store(out + tl.arange(0, 8), tl.reshape(desc.load([0, 1]), (8,)))


def test_descriptor_offsets_must_be_multiples_of_16_bytes() -> None:
    desc = TensorDescriptor.from_tensor(torch.zeros(8, 8), [1, 8])
    with pytest.raises(RankFailed, match=r"offset \[0, 1\] of fp32 at .*: the last one is no multiple of 16 bytes"):
        run(descriptor_unaligned, (1,), desc, torch.empty(8))


@triton.jit
def descriptor_of_rows(x, out, stride):
    desc = tl.make_tensor_descriptor(x, [2, 4], [stride, 1], [2, 4])
    tl.store(out, tl.sum(tl.sum(desc.load([0, 0]), 0), 0))


def test_a_descriptors_address_and_strides_must_be_multiples_of_16_bytes() -> None:
    x, out = torch.ones(64), torch.zeros(1)
    for begin, stride, found in ((1, 4, "its address is 4"), (0, 9, "stride 0 is 4")):
        said = f"descriptor of fp32 at .*: {found} bytes past a multiple of 16 bytes, .*: align it, or use tl.load"
        with pytest.raises(RankFailed, match=said):
            run(descriptor_of_rows, (1,), x[begin:], out, stride)
    run(descriptor_of_rows, (1,), x[4:], out, 8)
    assert out.item() == 8


if not NEWEST:  # newer releases have no block pointers

    @triton.jit
    def block_pointers(x, y, m, n, BM: tl.constexpr, BN: tl.constexpr):
        p = tl.make_block_ptr(x, (m, n), (n, 1), (0, 0), (BM, BN), (1, 0))
        q = tl.make_block_ptr(y, (m, n), (n, 1), (0, 0), (BM, BN), (1, 0))
        for _ in range(0, n, BN):
            tl.store(q, tl.load(p, boundary_check=(0, 1), padding_option="zero") + 1, boundary_check=(0, 1))
            p, q = tl.advance(p, (0, BN)), tl.advance(q, (0, BN))

    def test_block_pointers_load_and_store_tiles() -> None:
        x, y = torch.arange(5 * 10).float().reshape(5, 10), torch.zeros(6, 10)
        run(block_pointers, (1,), x, y, 5, 10, 8, 8)
        assert_same(y[:5], x + 1)
        assert (y[5] == 0).all()

    @triton.jit
    def block_pointer_nan(x, y, N: tl.constexpr):
        p = tl.make_block_ptr(x, (3,), (1,), (0,), (N,), (0,))
        tl.store(y + tl.arange(0, N), tl.load(p, boundary_check=(0,), padding_option="nan"))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
    def test_block_pointers_pad_with_nan(dtype: torch.dtype) -> None:
        x, y = torch.arange(3).to(dtype), torch.zeros(4).to(dtype)
        run(block_pointer_nan, (1,), x, y, 4)
        assert y[:3].float().tolist() == [0, 1, 2]
        assert y[3].float().isnan()


# -- wrong addresses -------------------------------------------------------------------------------------------------


@triton.jit
def far(x, at):
    tl.store(x + at + tl.arange(0, 4), 1.0)


@pytest.mark.parametrize("at", [6, -1, 10**12])
def test_an_access_outside_a_local_tensor_is_out_of_bounds(at: int) -> None:
    x = torch.zeros(8)
    where = "an address in no rank's heap" if at > 1000 else "memory of no tensor"
    with pytest.raises(OutOfBounds, match=f"out of bounds: store of {where} by rank 0 far program 0") as caught:
        run(far, (1,), x, at)
    assert "test_memory.py:" in str(caught.value)
    if at == 6:
        assert "nearest: x of rank 0" in str(caught.value)
    assert (x == 0).all()


@triton.jit
def across_the_end(x, out, n):
    o = tl.arange(0, 4)
    tl.store(out + o, tl.load((x + o * 2).to(tl.pointer_type(tl.int64)), mask=(o < n) & (o > 0)))


def test_an_element_half_outside_is_out_of_bounds() -> None:
    x, out = torch.arange(7, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    run(across_the_end, (1,), x, out, 3)
    assert out.tolist() == [0, 2 + (3 << 32), 4 + (5 << 32), 0]
    with pytest.raises(OutOfBounds, match="load of memory of no tensor"):
        run(across_the_end, (1,), x, out, 4)


@triton.jit
def windows_away(x, n, world):
    tl.load(x + n)


@pytest.mark.parametrize(
    ("windows", "said"), [(3, r"rank 3's x\[0\]"), (-7, r"rank -7's x\[0\]"), (1 << 40, "an address in no rank's heap")]
)
def test_an_address_is_of_a_rank_only_if_it_is_near(windows: int, said: str) -> None:
    """An address of other memory may lie where a tensor would in a window that is very far away."""

    def body(world: Any) -> None:
        x = pkt.zeros(4, dtype=torch.int32)
        windows_away[(1,)](x, (windows << 20) // 4, world.device)

    with pytest.raises(OutOfBounds, match=f"load of {said} by rank 0"):
        pkt.launch(body, 1, "cpu", heap=1 << 20)


# -- the address space itself ----------------------------------------------------------------------------------------


def region(space: AddressSpace, rank: int, offset: int, nbytes: int, name: str) -> Region:
    memory = space.slice(rank, offset, nbytes)
    made = Region(space.window(rank) + offset, nbytes, memory, rank, name, "data", 4, (nbytes // 4,))
    space.add(made)
    return made


@pytest.mark.parametrize("mask", [None, np.arange(20) < 16])
def test_a_constant_address_is_looked_for_in_the_memory_that_is_there_now(mask: np.ndarray | None) -> None:
    """The place of a constant block is kept; other memory may come to its addresses."""
    space = AddressSpace(1, 1 << 20)
    addresses = np.arange(space.window(0) + 64, space.window(0) + 64 + 80, 4, dtype=np.uint64)
    for kept in (addresses, mask):
        if kept is not None:
            kept.flags.writeable = False

    def offset(now: Region) -> int:
        for _ in range(2):
            ((access, _),) = space.resolve(addresses, mask, 4)
        now.freed_at = "there"
        assert access.region is now
        return access.span()[0]

    assert offset(region(space, 0, 64, 128, "x")) == 0
    assert offset(region(space, 0, 48, 128, "y")) == 16
    region(space, 0, 64, 32, "z")
    with pytest.raises(Unmapped):
        space.resolve(addresses, mask, 4)
    space.close()


def test_accesses_are_strided_where_they_can_be() -> None:
    space = AddressSpace(2, 1 << 20)
    a, b = region(space, 0, 0, 4096, "a"), region(space, 1, 0, 4096, "b")
    base = np.uint64(a.base)
    tile = base + (np.arange(4)[:, None] * 256 + np.arange(16)[None, :] * 4).astype(np.uint64)
    ((access, where),) = space.resolve(tile, None, 4)
    assert isinstance(access, Strided)
    assert where is ...
    assert access.place.strides == (256, 4)
    both = np.concatenate([tile, tile + np.uint64(space.stride)])
    parts = space.resolve(both, None, 4)
    assert [type(p) for p, _ in parts] == [Scattered, Scattered]
    assert [p.region.name for p, _ in parts] == ["a", "b"]
    assert b.element(b.base + 4 * 7) == "b[7]"
    space.close()


def test_a_run_of_a_masked_row_is_strided() -> None:
    space = AddressSpace(1, 1 << 20)
    a = region(space, 0, 0, 64, "a")
    row = np.uint64(a.base) + 4 * np.arange(32, dtype=np.uint64)  # its second half is outside
    places = np.arange(32)
    ((access, where),) = space.resolve(row, (places >= 2) & (places < 9), 4)
    assert isinstance(access, Strided)
    assert (access.place.offset, access.place.shape, places[where].tolist()) == (8, (7,), [*range(2, 9)])
    for chosen in ([2, 4, 5], [1]):
        ((access, where),) = space.resolve(row, np.isin(places, chosen), 4)
        assert access.byte_offsets().tolist() == [4 * at for at in chosen]
        assert places[where].tolist() == chosen
    assert space.resolve(row, places < 0, 4) == []
    with pytest.raises(Unmapped) as caught:
        space.resolve(row, (places >= 9) & (places < 20), 4)
    assert caught.value.address == a.end
    space.close()
