"""all_gather_grouped_matmul: both forms give the same bits; the kernels that sort compile for many experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

import pkt
from pkt.kernels.all_gather_grouped_matmul import sorting
from pkt.kernels.all_gather_grouped_matmul.push import Push, push_kernel
from pkt.kernels.all_gather_grouped_matmul.sorting import Routes, Size, Sorted
from pkt.kernels.grouped_matmul import FEW_ROWS_TILES, TILES
from pkt.kernels.shared.grid import COPY_OPTIONS
from pkt.kernels.shared.tile_product import Tiles
from pkt.language.inspect import Pointer, compile_only, device_world

from .helpers import on_ranks, random
from .launches import SHARED_LIMIT
from .machine_code import resources
from .test_dispatch import routed

TILE = (16, 16, 16, 2)


@pytest.mark.parametrize(
    ("size", "T", "routing", "sms", "senders"),
    [(2, 80, "skewed", 3, 2), (3, 24, "random", 1, None), (2, 5, "none", 2, 1)],
)
def test_equal_bits(size: int, T: int, routing: str, sms: int, senders: int | None) -> None:
    """An expert has several blocks from a rank, and ranks have none; again with fewer tokens, and the rows of no expert
    as they were."""

    def run(world: Any) -> None:
        w = random((3, 24, 40), torch.float32, world.rank, 1)
        for tokens in (T, T // 2):
            x = random((tokens, 24), torch.float32, world.rank, tokens)
            idx, weights = routed(routing, tokens, 2, 3, world.rank), random((tokens, 2), torch.float32, world.rank)
            out = torch.full((size * tokens * 2, 40), -7.0)
            more = {"clear": False, "tiles": TILE}
            found = pkt.all_gather_grouped_matmul(x, idx, weights, w, out, mode="push", num_comm_sms=senders, **more)
            right = pkt.all_gather_grouped_matmul(x, idx, weights, w, mode="unfused", **more)
            end = int(found.offsets[-1])
            assert torch.equal(found.product[:end], right.product[:end])
            assert (found.product[end:] == -7).all()
            for one, other in zip(found[1:], right[1:], strict=True):
                assert torch.equal(one, other)
            every = world.all_gather_object(idx)
            assert end == sum(int(((of >= 0) & (of < 3)).sum()) for of in every)

    on_ranks(size, run, sms=sms)


@pytest.mark.parametrize("experts", [256, 1000])
def test_sorting_compiles(experts: int, tmp_path: Path) -> None:
    """Nothing is spilled, however many experts there are."""
    i32, i64, f32, bf16 = (Pointer(name, 4096) for name in ("i32", "i64", "fp32", "bf16"))
    two = 1 << (experts - 1).bit_length()
    size = Size(4096, *map(tl.constexpr, (experts, two, 8, 8, 2, 66, sorting.AT_A_TIME // two, 128)))
    routes, found = Routes(f32, i32, i32, i32, i32), Sorted(i32, i32, i32)
    for kernel, *args in (
        (sorting.pack_kernel, i64, f32, i32, size),
        (sorting.count_kernel, i32, i32, size),
        (sorting.number_kernel, i32, i32, routes, found, 1, size),
        (sorting.spread_kernel, bf16, i32, i32, bf16, 7168, experts, 8, 1024),
    ):
        options = COPY_OPTIONS if kernel is sorting.spread_kernel else {}
        usage = resources(compile_only(kernel, *args, arch=90, **options), tmp_path)
        assert usage["STACK"] == usage["LOCAL"] == 0, (kernel, usage)


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize(("tiles", "transposed"), [(TILES, True), (FEW_ROWS_TILES, False)])
def test_push_compiles(tiles: Tiles, transposed: bool, arch: int, tmp_path: Path) -> None:
    """256 experts, 7168 -> 2048: nothing is spilled; tokens go to shared memory by cp.async, weights by TMA."""
    bf16, i32 = Pointer("bf16", 4096), Pointer("i32", 4096)
    constants = 256, 32, 24, True, 8, 1024, True, transposed, *tiles[:4]
    p = Push(*[bf16] * 5, *[i32] * 5, 2048, 7168, 2048, 32768, *map(tl.constexpr, constants))
    compiled = compile_only(push_kernel, p, device_world(1, 2), arch=arch, **tiles.launch_options())
    usage = resources(compiled, tmp_path)
    assert usage["STACK"] == usage["LOCAL"] == 0, usage
    assert compiled.metadata.shared <= SHARED_LIMIT
    assert ("wgmma.mma_async" in compiled.asm["ptx"]) == (arch == 90)
    assert "cp.async.cg" in compiled.asm["ptx"]
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]
