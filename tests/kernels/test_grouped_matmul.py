"""The grouped product: right for every routing, whatever the offsets say; refuses wrong tensors; compiles."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import pkt
from benchmarks.grouped_matmul import LARGE, MIDDLE, SMALL
from pkt.kernels.grouped_matmul import default_tiles, grouped_matmul, grouped_matmul_kernel, programs_each, reference
from pkt.kernels.shared.tile_product import Tiles
from pkt.language.inspect import Pointer, compile_only

from .helpers import TINY, UNIT, on_ranks, product_bound, random
from .launches import SHARED_LIMIT
from .machine_code import resources

SM_SHARED, SM_REGISTERS = 228 << 10, 1 << 16
TILE = (16, 16, 16, 2)
ROUTINGS = {
    "random": (0, 3, 20, 21, 37, 70),
    "empty at both ends, and in the middle": (0, 0, 33, 33, 70, 70),
    "skewed": (0, 67, 68, 69, 70, 70),
    "rows of no expert": (5, 9, 9, 30, 48, 50),
}


def offsets_of(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def right(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, **more: Any) -> None:
    """The experts' rows are right within the bound, and the others untouched."""
    out = torch.full((x.shape[0], w.shape[2]), -7.0, dtype=x.dtype)
    assert grouped_matmul(x, w, offsets, out, **more) is out
    exact = reference(x, w, offsets)
    first, last = offsets[0], offsets[-1]
    for expert in range(len(w)):
        rows = slice(offsets[expert], offsets[expert + 1])
        bound = product_bound(x[rows], w[expert]) + UNIT[x.dtype] * exact[rows].abs() + TINY[x.dtype]
        assert ((out[rows].double() - exact[rows]).abs() <= bound).all()
    assert (out[:first] == -7).all()
    assert (out[last:] == -7).all()


def test_tiles_follow_from_the_rows_that_are_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """x has room for all tokens of all ranks, and of an expert only a part is in use, forwards and backwards."""
    module = importlib.import_module("pkt.kernels.grouped_matmul")
    planned, found = module.planned, []

    def run(world: Any) -> None:
        x = random((400, 8), torch.bfloat16, 1).requires_grad_()
        w, offsets = random((2, 8, 8), torch.bfloat16, 2), offsets_of(0, 20, 40)
        results = [grouped_matmul(x, w, offsets, expected=rows) for rows in (None, 40, 400, 1000)]
        assert all(torch.equal(result[:40], results[0][:40]) for result in results)
        results[1].sum().backward()

    monkeypatch.setattr(module, "planned", lambda *given: found.append(given[4]) or planned(*given))
    on_ranks(1, run)
    assert found == [module.TILES, module.FEW_ROWS_TILES, module.FEW_ROWS_TILES]  # of equal calls the plan is kept


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("k", "n"), [(24, 40), (7, 13)], ids=["TMA", "registers"])
def test_every_routing_is_right(k: int, n: int, transposed: bool, routing: str) -> None:
    dtype = {"random": torch.bfloat16, "skewed": torch.float32}.get(routing, torch.float16)

    def run(world: Any) -> None:
        x, w = random((70, k), dtype, 1), random((5, k, n), dtype, 2)
        if transposed:
            w = w.transpose(1, 2).contiguous().transpose(1, 2)
        right(x, w, offsets_of(*ROUTINGS[routing]), tiles=TILE)

    on_ranks(1, run)


def test_other_offsets_defaults_and_new_results() -> None:
    """One tensor of offsets has other values at each call, as in a replayed graph."""

    def run(world: Any) -> None:
        x, w, offsets = random((9, 8), torch.float32, 1), random((3, 8, 8), torch.float32, 2), offsets_of(0, 0, 0, 0)
        for ends in ((0, 9, 9, 9), (0, 1, 2, 9), (0, 0, 0, 9)):
            offsets.copy_(offsets_of(*ends))
            right(x, w, offsets)
        found = pkt.grouped_matmul(x, w, offsets)
        assert found.shape == (9, 8)
        assert torch.equal(found, grouped_matmul(x, w, offsets, tiles=TILE))

    on_ranks(2, run)


@pytest.mark.parametrize("ends", [(0, 400, 500, 600), (-30, 5, 9, 2**30), (9, 5, 2, 0), (20, 20, 20, 21)])
def test_offsets_outside_of_x_reach_nothing_outside(ends: tuple[int, ...]) -> None:
    """The simulator raises OutOfBounds where a kernel leaves its tensors; rows that exist are right."""

    def run(world: Any) -> None:
        x, w = torch.ones(9, 8), torch.ones(3, 8, 8)
        out = grouped_matmul(x, w, offsets_of(*ends), torch.zeros(9, 8), tiles=TILE)
        assert out.unique().tolist() in ([0.0], [8.0], [0.0, 8.0])

    on_ranks(1, run)


def test_empty() -> None:
    def run(world: Any) -> None:
        none, w = offsets_of(0, 0, 0), torch.ones(2, 4, 3)
        assert grouped_matmul(torch.ones(0, 4), w, none).shape == (0, 3)
        assert grouped_matmul(torch.ones(5, 4), w[..., :0].contiguous(), none).shape == (5, 0)
        assert (grouped_matmul(torch.ones(5, 0), w[:, :0].contiguous(), offsets_of(0, 2, 5)) == 0).all()

    on_ranks(1, run)


def test_refuses() -> None:
    def run(world: Any) -> None:
        x, w, offsets = torch.ones(6, 8), torch.ones(2, 8, 4), offsets_of(0, 3, 6)
        good = {"x": x, "w": w, "offsets": offsets, "out": torch.ones(6, 4)}
        wrongs = {
            "x": (3, x[0], x.int(), x.half(), x.to_sparse(), x.t().contiguous().t()),
            "w": (None, w[0], w.half(), torch.ones(2, 7, 4), w[..., ::2], w[:0]),
            "offsets": (None, offsets.long(), offsets[1:].contiguous(), torch.ones(6, dtype=torch.int32)[::2]),
            "out": (3, torch.ones(6, 5), torch.ones(6, 4).half(), torch.ones(4, 6).t(), x[:, :4]),
            "tiles": ((16, 16), (16, 16, 8), "16", 16, (16, 16, 16, 0)),
            "world": (3,),
        }
        for name, values in wrongs.items():
            for wrong in values:
                with pytest.raises(pkt.PktError, match="rank 0: grouped_matmul"):
                    grouped_matmul(**{**good, name: wrong})
        shared = torch.ones(64)
        with pytest.raises(pkt.ShapeError, match="out: found a tensor"):
            grouped_matmul(shared[:48].view(6, 8), w, offsets, shared[4:28].view(6, 4))
        shared = torch.ones(88)
        with pytest.raises(pkt.ShapeError, match="bytes from w"):
            grouped_matmul(x, shared[:64].view(2, 8, 4), offsets, shared[60:84].view(6, 4))

    on_ranks(1, run)


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("tiles", [*SMALL, *MIDDLE, *LARGE[:2], LARGE[4]], ids=str)
def test_compiles(tiles: Tiles, arch: int, tmp_path: Path) -> None:
    """256 experts on two ranks, 7168 -> 2048: nothing is spilled, and so many programs fit on an SM as are launched."""
    x, i32 = Pointer("bf16", 4096), Pointer("i32", 4096)
    blocks = tiles[:4]
    compiled = compile_only(
        grouped_matmul_kernel, x, x, i32, x, 32768, 2048, 7168, 128, 128, True, arch == 90, *blocks, arch=arch,
        **tiles.launch_options(),
    )  # fmt: skip
    usage = resources(compiled, tmp_path)
    assert usage["STACK"] == usage["LOCAL"] == 0, usage
    assert compiled.metadata.shared <= SHARED_LIMIT
    each = programs_each(tiles, torch.bfloat16)
    assert each * (compiled.metadata.shared + 1024) <= SM_SHARED
    assert each * usage["REG"] * 32 * tiles.num_warps <= SM_REGISTERS
    assert ("wgmma.mma_async" in compiled.asm["ptx"]) == (arch == 90 and tiles.block_m >= 64)
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]


@pytest.mark.parametrize(("dtype", "tma"), [(torch.float32, True), (torch.float16, False)])
def test_other_dtypes_compile(dtype: torch.dtype, tma: bool, tmp_path: Path) -> None:
    tiles = default_tiles(4096, 8, dtype, tma)
    x, i32 = Pointer({torch.float32: "fp32", torch.float16: "fp16"}[dtype], 4096 if tma else 4098), Pointer("i32", 4096)
    n, k = (1000, 1004) if tma else (1001, 1003)
    for transposed in (False, True):
        compiled = compile_only(
            grouped_matmul_kernel, x, x, i32, x, 4096, n, k, 7, 8, tma, transposed, *tiles[:4], arch=90,
            **tiles.launch_options(),
        )  # fmt: skip
        usage = resources(compiled, tmp_path)
        assert usage["STACK"] == usage["LOCAL"] == 0, usage
