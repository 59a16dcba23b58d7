"""`pkt.layout`: the tensors that it takes, and the tiles that a kernel then addresses; `pkt.join_heads`."""

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


def test_join_heads() -> None:
    """Rank by rank, and within a rank weight by weight; a head that several ranks need is there for each."""
    q, k = (torch.arange(n)[None, :, None].expand(3, n, 2) + start for n, start in ((8, 0), (2, 100)))
    joined = pkt.join_heads(q, k, ranks=4)
    assert joined.shape == (3, 12, 2)
    assert joined[0, :, 0].tolist() == [0, 1, 100, 2, 3, 100, 4, 5, 101, 6, 7, 101]
    assert torch.equal(pkt.join_heads(q[0], k[0], ranks=4), joined[0])
    assert torch.equal(pkt.join_heads(k, ranks=1), k)
    for wrong, said in (
        (
            (q, q[:, :3]),
            r"weights\[1\]: found \(3, 3, 2\), wanted a number of heads that is a multiple or a divisor of 4",
        ),
        ((q, q[:, :0]), "multiple or a divisor"),
        ((q, k[0]), "as in weights"),
        ((q, k[:2]), "as in weights"),
        ((q[0, 0],), r"\(K, H, D\)"),
        ((), "found none"),
    ):
        with pytest.raises(pkt.ShapeError, match=said):
            pkt.join_heads(*wrong, ranks=4)
    with pytest.raises(pkt.ShapeError, match="ranks: found 0"):
        pkt.join_heads(q, ranks=0)
    with pytest.raises(pkt.DtypeError, match=r"weights\[1\]"):
        pkt.join_heads(q, k.double(), ranks=4)
    with pytest.raises(pkt.DtypeError, match=r"weights\[0\]: found list, wanted a tensor"):
        pkt.join_heads([q, k], ranks=4)  # type: ignore[arg-type]
