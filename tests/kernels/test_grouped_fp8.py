"""The grouped product of fp8 with scales: right for every shape of scales, refuses wrong ones, compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.grouped_fp8 import FEW_ROWS_TILES, TILES, grouped_fp8_kernel, programs_each, spread
from pkt.kernels.grouped_matmul import grouped_matmul, reference
from pkt.kernels.shared.tile_product import Tiles
from pkt.language.inspect import Pointer, compile_only

from .helpers import TINY, UNIT, on_ranks, random
from .launches import SHARED_LIMIT
from .machine_code import resources
from .test_grouped_matmul import offsets_of

FP8 = torch.float8_e4m3fn
TILE = (16, 32, 128, 2)
SM_SHARED, SM_REGISTERS = 228 << 10, 1 << 16


def operands(
    m: int, k: int, n: int, x_shape: tuple[int, ...], w_shape: tuple[int, ...], transposed: bool
) -> tuple[Any, Any, Any]:
    """x, w and scales, which differ by powers of two and more."""
    experts = w_shape[0]
    x, w = random((m, k), torch.float32, 1).to(FP8), random((experts, k, n), torch.float32, 2).to(FP8)
    if transposed:
        w = w.view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2).view(FP8)
    return x, w, (random(x_shape, torch.float32, 3).exp2(), random(w_shape, torch.float32, 4).exp2())


def right(x: Any, w: Any, scales: Any, offsets: torch.Tensor, out: torch.Tensor, first: int, last: int) -> None:
    """A product of two fp8 numbers is exact in fp32. Its sum takes a rounding a term, and a scaled block two more."""
    exact = reference(x, w, offsets, scales)
    sizes = (x.double().abs() * spread(scales[0], x.shape[1])), w.double().abs() * spread(scales[1], *w.shape[1:])
    terms = x.shape[1] + 3 * -(-x.shape[1] // 128)
    limit = terms * 2.0**-24 * reference(*sizes, offsets) + UNIT[out.dtype] * exact.abs() + TINY[out.dtype]
    assert ((out.double() - exact).abs() <= limit)[first:last].all()


@pytest.mark.parametrize(
    ("k", "n", "x_shape", "w_shape", "transposed", "dtype"),
    [
        (256, 160, (40, 2), (3, 2, 2), True, torch.bfloat16),
        (200, 40, (40, 2), (3, 2, 1), False, torch.float32),
        (130, 150, (40, 1), (3, 1, 2), False, torch.float16),
        (48, 7, (40, 1), (3, 1, 1), True, torch.float32),
    ],
)
def test_every_shape_of_scales_is_right(
    k: int, n: int, x_shape: Any, w_shape: Any, transposed: bool, dtype: torch.dtype
) -> None:
    """Rows of no expert are not written."""

    def run(world: Any) -> None:
        x, w, scales = operands(40, k, n, x_shape, w_shape, transposed)
        offsets, out = offsets_of(2, 19, 19, 37), torch.full((40, n), -7.0, dtype=dtype)
        assert grouped_matmul(x, w, offsets, out, scales=scales, tiles=TILE) is out
        right(x, w, scales, offsets, out, 2, 37)
        assert (out[:2] == -7).all()
        assert (out[37:] == -7).all()

    on_ranks(1, run)


def test_a_dispatch_brings_rows_and_scales() -> None:
    """On two ranks, with strided scales, default tiles and a new result."""

    def run(world: Any) -> None:
        x, w, (of_x, of_w) = operands(6, 256, 16, (6, 2), (2, 2, 1), False)
        idx = torch.tensor([[0, 3], [1, 2], [-1, 0], [3, 1], [2, 0], [1, -1]])
        there = pkt.dispatch(x, idx, torch.ones(6, 2), 4, scales=of_x, max_tokens=32)
        assert there.scales is not None
        scales = there.scales.t().contiguous().t(), of_w
        found = pkt.grouped_matmul(there.rows, w, there.offsets, scales=scales)
        assert found.dtype == torch.bfloat16
        right(there.rows, w, scales, there.offsets, found, 0, int(there.offsets[-1]))
        assert (found[there.offsets[-1] :] == 0).all()

    on_ranks(2, run, sms=2)


def test_refuses_and_empty() -> None:
    def run(world: Any) -> None:
        x, w, (of_x, of_w) = operands(6, 256, 16, (6, 2), (2, 2, 1), False)
        good: dict[str, Any] = {"x": x, "w": w, "offsets": offsets_of(0, 3, 6), "scales": (of_x, of_w)}
        wrongs = {
            "x": (3, x[0], x.half(), x[:, :128]),
            "w": (None, w[0], w.half(), w[:, :128], w[:0]),
            "scales": (3, (of_x,), (of_x, None), (of_x.half(), of_w), (of_x[:5], of_w), (of_x, of_w[:1]),
                       (of_x[:, :0], of_w), (of_x[:, 0], of_w), (of_x, of_w.expand(2, 2, 2))),
            "offsets": (None, offsets_of(0, 3)),
            "out": (3, torch.ones(6, 16).double(), torch.ones(5, 16)),
            "tiles": ((16, 16, 64), (16, 256, 128)),
            "clear": (3,),
        }  # fmt: skip
        for name, values in wrongs.items():
            for wrong in values:
                with pytest.raises(pkt.PktError, match="rank 0: grouped_matmul"):
                    grouped_matmul(**{**good, name: wrong})
        with pytest.raises(pkt.Unsupported, match="no gradient"):
            grouped_matmul(**{**good, "scales": (of_x.clone().requires_grad_(), of_w)})
        none = {**good, "x": x[:, :0].contiguous(), "w": w[:, :0].contiguous()}
        assert (grouped_matmul(**{**none, "scales": (of_x[:, :1], of_w[:, :1])}) == 0).all()

    on_ranks(1, run)


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("tiles", [FEW_ROWS_TILES, TILES], ids=str)
def test_compiles(tiles: Tiles, arch: int, tmp_path: Path) -> None:
    """7168 -> 4096: on tensor cores, nothing spilled, and so many programs fit on an SM as are launched."""
    x, s, i32, out = Pointer("fp8e4nv", 4096), Pointer("fp32", 4096), Pointer("i32", 4096), Pointer("bf16", 4096)
    compiled = compile_only(
        grouped_fp8_kernel, x, x, s, s, i32, out, 32768, 4096, 7168, 32, 56, 1, 1792, 32, 1, 32, True, *tiles[:4],
        arch=arch, **tiles.launch_options(),
    )  # fmt: skip
    usage = resources(compiled, tmp_path)
    assert usage["STACK"] == usage["LOCAL"] == 0, usage
    assert compiled.metadata.shared <= SHARED_LIMIT
    each = programs_each(tiles)
    assert each * (compiled.metadata.shared + 1024) <= SM_SHARED
    assert each * usage["REG"] * 32 * tiles.num_warps <= SM_REGISTERS
    assert ("wgmma.mma_async" if arch == 90 else "tcgen05.mma") in compiled.asm["ptx"]
