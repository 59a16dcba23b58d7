"""Shortcuts of the simulator give the same results as the source that they replace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.simulate import shortcuts
from tests.simulate.helpers import run


@triton.jit
def fills(x_ptr, y_ptr, z_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.full((BLOCK,), 1, tl.float32) / tl.full((BLOCK,), 2.0, tl.float32))
    tl.store(x_ptr + BLOCK + i, tl.full((BLOCK,), 2, tl.float32))
    tl.store(x_ptr + 2 * BLOCK + i, tl.full((BLOCK,), 2.5, tl.float32))
    tl.store(y_ptr + i, tl.full((BLOCK,), 1, tl.int32) // 2)
    tl.store(y_ptr + BLOCK + i, tl.full((BLOCK // 2, 2), -1, tl.int32).reshape(BLOCK))
    tl.store(y_ptr + 2 * BLOCK + i, tl.zeros((BLOCK,), tl.int32) + tl.load(z_ptr))
    tl.store(z_ptr, tl.full((), 7, tl.int32))


def test_blocks_of_one_number_are_told_apart() -> None:
    """By the number, its type, the type of the elements and the shape."""
    for _ in range(2):
        x, y, z = torch.zeros(12), torch.zeros(12, dtype=torch.int32), torch.full((1,), 5, dtype=torch.int32)
        run(fills, (1,), x, y, z, 4)
        assert x.reshape(3, 4).unique(dim=1).flatten().tolist() == [0.5, 2.0, 2.5]
        assert y.reshape(3, 4).unique(dim=1).flatten().tolist() == [0, -1, 5]
        assert z.item() == 7


@triton.jit
def spelled_out(ptr, rank, world):
    bits: tl.constexpr = ptr.dtype.scalar.element_ty.primitive_bitwidth
    itemsize: tl.constexpr = bits // 8 if bits >= 8 else 1
    return ptr + (tl.cast(rank, tl.int64) - tl.cast(world.rank, tl.int64)) * (world.stride // itemsize)


@triton.jit
def peers_kernel(x_ptr, ranks_ptr, found_ptr, wanted_ptr, rank, world, BLOCK: tl.constexpr, FIXED: tl.constexpr):
    i = tl.arange(0, BLOCK)
    wide = tl.load(ranks_ptr).to(tl.int64)
    tl.store(found_ptr, pl.peer(x_ptr, rank, world).to(tl.int64))
    tl.store(wanted_ptr, spelled_out(x_ptr, rank, world).to(tl.int64))
    tl.store(found_ptr + 1, pl.peer(x_ptr, wide, world).to(tl.int64))
    tl.store(wanted_ptr + 1, spelled_out(x_ptr, wide, world).to(tl.int64))
    tl.store(found_ptr + 2, pl.peer(x_ptr, FIXED, world).to(tl.int64))
    tl.store(wanted_ptr + 2, spelled_out(x_ptr, FIXED, world).to(tl.int64))
    tl.store(found_ptr + 3, pl.peer(x_ptr, world.size, world).to(tl.int64))
    tl.store(wanted_ptr + 3, spelled_out(x_ptr, world.size, world).to(tl.int64))
    block = pl.peer(x_ptr + i, rank, world)
    tl.store(found_ptr + 4 + i, block.to(tl.int64))
    tl.store(wanted_ptr + 4 + i, spelled_out(x_ptr + i, rank, world).to(tl.int64))
    ranks = tl.load(ranks_ptr + i)
    tl.store(found_ptr + 4 + BLOCK + i, pl.peer(x_ptr + i, ranks, world).to(tl.int64))
    tl.store(wanted_ptr + 4 + BLOCK + i, spelled_out(x_ptr + i, ranks, world).to(tl.int64))
    tl.static_assert(block.dtype == (x_ptr + i).dtype)
    tl.static_assert(block.shape[0] == BLOCK)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool], ids=str)
def test_the_shortcut_of_peer_equals_its_source(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    short, slow = [], shortcuts.new_tensor
    monkeypatch.setattr(shortcuts, "new_tensor", lambda data, ty, scalar: short.append(ty) or slow(data, ty, scalar))
    block = 8

    def run(world: Any) -> None:
        x = pkt.empty(block, dtype=dtype)
        ranks = torch.arange(block, dtype=torch.int32) % world.size
        for rank in range(world.size):
            found, wanted = (torch.zeros(4 + 2 * block, dtype=torch.int64) for _ in range(2))
            ranks[0] = rank
            peers_kernel[(1,)](x, ranks, found, wanted, rank, world.device, block, rank)
            assert torch.equal(found, wanted), rank
            assert found[0] == x.plain().data_ptr() + (rank - world.rank) * world.device.stride.value

    pkt.launch(run, ranks=3, device="cpu")
    assert any(ty.is_ptr() for ty in short)


@triton.jit
def cast_kernel(x_ptr, y_ptr, N: tl.constexpr, BITCAST: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.cast(tl.load(x_ptr + i), y_ptr.dtype.element_ty, bitcast=BITCAST).to(y_ptr.dtype.element_ty))


HALVES = (torch.int16, torch.uint16, torch.bfloat16, torch.float16)
WORDS = (torch.int32, torch.uint32, torch.float32)


@pytest.mark.parametrize("types", [HALVES, WORDS, HALVES[:2] + WORDS[:2]], ids=["halves", "words", "integers"])
def test_casts_equal_those_of_torch(types: tuple[torch.dtype, ...]) -> None:
    """Casts between types of one width keep the bits, and casts between integers convert the value."""
    bits = types[0].itemsize == types[-1].itemsize

    def run(world: Any) -> None:
        for source in types:
            values = torch.arange(-(2**31), 2**31, 2**24 + 4321, dtype=torch.int64)[:256]
            x = values.to(torch.int16 if source.itemsize == 2 else torch.int32).view(source)
            for target in types:
                y = torch.zeros(256, dtype=target)
                cast_kernel[(1,)](x, y, 256, bits)
                wanted = x.view(target) if bits else x.to(torch.int64).to(target)
                assert y.view(torch.uint8).equal(wanted.view(torch.uint8)), (source, target)

    pkt.launch(run, ranks=1, device="cpu")


@triton.jit
def words_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    few = y & 7
    at = out_ptr + i
    tl.store(at, x + y)
    tl.store(at + N, x - y)
    tl.store(at + 2 * N, x * y)
    tl.store(at + 3 * N, (x | y) ^ (x & 65535))
    tl.store(at + 4 * N, x << few)
    tl.store(at + 5 * N, x >> few)
    tl.store(at + 6 * N, (x >> 5) | (y << 11))
    tl.store(at + 7 * N, ((x < y).to(tl.uint8) * 4 + (x >= 40000).to(tl.uint8) * 2 + (x == y).to(tl.uint8)).to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_the_shortcuts_of_words_compute_modulo_their_range(dtype: torch.dtype) -> None:
    n, bits = 16, 8 * dtype.itemsize
    most = (1 << bits) - 1
    x = [(most - 7 * i, 5 + i, 40000 + i)[i % 3] for i in range(n)]
    y = [(3 + i, most - i, 40000 + i)[i % 3] for i in range(n)]
    wanted = [
        [a + b for a, b in zip(x, y)],
        [a - b for a, b in zip(x, y)],
        [a * b for a, b in zip(x, y)],
        [(a | b) ^ (a & 65535) for a, b in zip(x, y)],
        [a << (b & 7) for a, b in zip(x, y)],
        [a >> (b & 7) for a, b in zip(x, y)],
        [(a >> 5) | (b << 11) for a, b in zip(x, y)],
        [(a < b) * 4 + (a >= 40000) * 2 + (a == b) for a, b in zip(x, y)],
    ]
    signed = {16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]  # torch makes words from these alone

    def words(values: list[int]) -> torch.Tensor:
        return torch.tensor([(v + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1)) for v in values], dtype=signed)

    out = torch.zeros(8 * n, dtype=signed)
    run(words_kernel, (1,), words(x).view(dtype), words(y).view(dtype), out.view(dtype), n)
    for line, (found, right) in enumerate(zip(out.view(8, n), wanted)):
        assert torch.equal(found, words([v & most for v in right])), line


@triton.jit
def numbers_kernel(x_ptr, out_ptr, N: tl.constexpr, HALF: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, tl.where(x > 0.1, x * 0.1 + 3, float("-inf")))
    tl.store(out_ptr + N + i, tl.where(i % 2 == 0, HALF, x - HALF))
    tl.store(out_ptr + 2 * N + i, tl.where(x < 0, i * 5, -1).to(tl.float32))
    tl.store(out_ptr + 3 * N + i, tl.where(x != x, 1, tl.where(i > 3, x, x * 2)))
    tl.store(out_ptr + 4 * N + i, x + 16777217)  # rounded to fp32


def test_blocks_and_numbers_are_fp32() -> None:
    x = torch.tensor([0.1, -3.0, float("nan"), 7.5, float("inf"), -0.0, 1e-45, 2.0**-24])
    out, i, half = torch.zeros(40), torch.arange(8), torch.tensor(0.3)
    run(numbers_kernel, (1,), x, out, 8, 0.3)
    tenth = torch.tensor(0.1)
    wanted = [
        torch.where(x > tenth, x * tenth + 3, float("-inf")),
        torch.where(i % 2 == 0, half, x - half),
        torch.where(x < 0, i * 5, -1).float(),
        torch.where(x != x, 1, torch.where(i > 3, x, x * 2)),
        x + torch.tensor(16777217.0),
    ]
    for line, (found, right) in enumerate(zip(out.view(5, 8), wanted)):
        assert torch.equal(found.view(torch.int32), right.float().view(torch.int32)), (line, found, right)


@triton.jit
def table_kernel(out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i[:, None] * N + i[None, :], i[:, None] * 100 + i[None, :])


def test_rows_and_columns_of_one_ramp_are_told_apart() -> None:
    def run(world: Any) -> None:
        out = torch.zeros(8, 8, dtype=torch.int32)
        for _ in range(2):
            table_kernel[(1,)](out, 8)
            assert out.tolist() == [[100 * row + col for col in range(8)] for row in range(8)]

    pkt.launch(run, ranks=1, device="cpu")


@triton.jit
def chosen_kernel(x_ptr, out_ptr, n, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    at = rows[:, None] * N + columns[None, :]
    x = tl.load(x_ptr + at)
    one = tl.load(x_ptr)
    out = out_ptr + at
    chosen = tl.where(rows[:, None] < 2, x, 5)
    tl.static_assert(chosen.shape[1] == N)
    tl.store(out, chosen)
    tl.store(out + M * N, tl.where(n > 3, x, one))
    tl.store(out + 2 * M * N, tl.where(x > 4, one, x))
    tl.store(out + 3 * M * N, tl.where(n < 3, x, x + 1))
    tl.store(out + 4 * M * N, tl.where((rows[:, None] < columns[None, :]), columns[None, :], n))
    tl.store(out + 5 * M * N, (x > 4).to(tl.int32) + (one > 4).to(tl.int32))
    cube = x[:, None, :] + x[None, :, :]
    tl.store(out + 6 * M * N, tl.sum(cube, 0))
    wide = (x_ptr + at).to(tl.pointer_type(tl.int64), bitcast=True)
    tl.store(out + 7 * M * N, tl.load(wide.to(tl.pointer_type(tl.int32), bitcast=True)))


def test_choices_casts_and_added_axes_equal_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And shortcuts compute them: the rules of `tl` would take ten times as long."""
    made, slow = [], shortcuts.new_tensor
    monkeypatch.setattr(shortcuts, "new_tensor", lambda data, ty, scalar: made.append(ty) or slow(data, ty, scalar))
    m, n = 4, 8
    x = (torch.arange(m * n, dtype=torch.int32) * 7 % 11).view(m, n)
    rows, columns = torch.arange(m, dtype=torch.int32)[:, None], torch.arange(n, dtype=torch.int32)[None, :]
    for number in (2, 4):
        wanted = [
            torch.where(rows < 2, x, 5),
            x if number > 3 else x[0, 0].expand(m, n),
            torch.where(x > 4, x[0, 0], x),
            x if number < 3 else x + 1,
            torch.where(rows < columns, columns, number),
            (x > 4).int() + (x[0, 0] > 4).int(),
            x.sum(0, keepdim=True).int() + m * x,
            x,
        ]
        out = torch.zeros(8, m, n, dtype=torch.int32)
        run(chosen_kernel, (1,), x, out, number, m, n)
        for line, (found, right) in enumerate(zip(out, wanted)):
            assert torch.equal(found, right), line
    assert any(ty.is_ptr() and ty.element_ty == tl.int64 for ty in made)


@triton.jit
def integers(x_ptr, word_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    first = tl.load(x_ptr)
    tl.store(out_ptr + i, tl.minimum(x, 3))
    tl.store(out_ptr + BLOCK + i, tl.maximum(first, x))
    column, row = tl.arange(0, 2)[:, None], tl.arange(0, BLOCK // 2)[None, :]
    tl.store(out_ptr + 2 * BLOCK + column + 2 * row, tl.reshape(x, (2, BLOCK // 2)))
    tl.store(out_ptr + 3 * BLOCK + i, tl.load(x_ptr + i, mask=i < 2, other=-7))
    tl.store(out_ptr + 4 * BLOCK, tl.atomic_cas(word_ptr, 5, 9))
    tl.store(out_ptr + 4 * BLOCK + 1, tl.atomic_cas(word_ptr, 5, 7))
    tl.store(out_ptr + 4 * BLOCK + 2, tl.atomic_add(word_ptr, 4, mask=first == 1))
    tl.atomic_add(word_ptr, 100, mask=first == 2)
    tl.store(out_ptr + 4 * BLOCK + 3, tl.atomic_add(word_ptr, 1))


def test_integers_are_compared_reshaped_filled_and_swapped() -> None:
    for _ in range(2):
        x, word = torch.tensor([1, 5, 2, 4], dtype=torch.int32), torch.full((1,), 5, dtype=torch.int32)
        out = torch.zeros(20, dtype=torch.int32)
        run(integers, (1,), x, word, out, 4)
        assert out.reshape(5, 4).tolist() == [[1, 3, 2, 3], [1, 5, 2, 4], [1, 2, 5, 4], [1, 5, -7, -7], [5, 9, 9, 13]]
        assert word.item() == 14
