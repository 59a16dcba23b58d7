"""`pkt.layout`: the tensors that it takes, and the tiles that a kernel then addresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl


@triton.jit
def shift(x, y, flags, world, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Store tile (program, 0) of the second matrix on the next rank."""
    tile = tl.zeros((ROWS, COLS), tl.float32) + tl.cast(world.rank, tl.int32) + 1
    peer = (world.rank + 1) % world.size
    pl.tile.store_async(y, tile.to(y.ptr.dtype.element_ty), (0, 1, tl.program_id(0), 0), world, peer)
    pl.signal(flags + tl.program_id(0), peer, world)
    pl.wait(flags + tl.program_id(0), 1, world)


def test_a_tile_goes_where_the_layout_says() -> None:
    def main(world: Any) -> None:
        x, y = pkt.zeros(2, 20, 24, dtype=torch.bfloat16), pkt.zeros(2, 20, 24, dtype=torch.bfloat16)
        flags = pkt.signals(2)
        shift[(2,)](pkt.layout(x), pkt.layout(y), flags, world.device, 16, 32)
        previous = (world.rank - 1) % world.size
        assert (y[1] == previous + 1).all(), y[1]
        assert (y[0] == 0).all()

    for seed in range(6):
        pkt.launch(main, ranks=3, device="cpu", seed=seed)


def test_tma_needs_rows_at_multiples_of_16_bytes() -> None:
    def main(world: Any) -> list[bool]:
        return [pkt.layout(pkt.empty(4, n, dtype=torch.bfloat16)).tma.value for n in (8, 12, 16)]

    assert pkt.launch(main, ranks=2, device="cpu") == [[True, False, True]] * 2


def test_tensors_that_are_refused() -> None:
    def main(world: Any) -> None:
        with pytest.raises(pkt.NotSymmetric, match="x must be a symmetric tensor"):
            pkt.layout(torch.zeros(4, 4))
        with pytest.raises(pkt.ShapeError, match="1 to 4 dimensions"):
            pkt.layout(pkt.empty(1, 1, 1, 1, 1))
        with pytest.raises(pkt.ShapeError, match="contiguous"):
            pkt.layout(pkt.empty(4, 8).t())

    pkt.launch(main, ranks=2, device="cpu")
