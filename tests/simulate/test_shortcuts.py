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
