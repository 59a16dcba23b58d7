"""grouped_matmul_reduce_scatter: behind all_gather_grouped_matmul it makes a layer of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pkt
from pkt.errors import ShapeError
from pkt.kernels.grouped_matmul_reduce_scatter import token_sums_kernel
from pkt.kernels.shared.grid import COPY_OPTIONS
from pkt.language.inspect import Pointer, compile_only

from .helpers import on_ranks, random
from .machine_code import resources
from .test_dispatch import routed

TILE = (16, 16, 16, 2)


@pytest.mark.parametrize(("size", "T", "weighted", "sms"), [(2, 70, True, 4), (2, 6, False, 1), (3, 9, True, 2)])
def test_a_layer(size: int, T: int, weighted: bool, sms: int) -> None:
    """It is the layer of the whole matrices, launch after launch. A token without experts gets zeros."""
    H, F, E, K = 16, 8, 3, 2

    def run(world: Any) -> None:
        w1, w2 = random((E, H, size * F), torch.float32, 1), random((E, size * F, H), torch.float32, 2)
        mine = slice(world.rank * F, (world.rank + 1) * F)
        first, second = w1[:, :, mine].contiguous(), w2[:, mine].contiguous()
        for launch in range(2):
            x, idx = random((T, H), torch.float32, world.rank, launch), routed("random", T, K, E, world.rank + launch)
            weights = random((T, K), torch.float32, world.rank, 3)
            there = pkt.all_gather_grouped_matmul(x, idx, weights, first, tiles=TILE)
            hidden = pkt.grouped_activation(there.product, there.offsets, "relu")
            handle = there if weighted else there._replace(weights=None)
            found = pkt.grouped_matmul_reduce_scatter(hidden, second, handle, tiles=TILE)
            right = torch.zeros(T, H, dtype=torch.float64)
            for k in range(K):
                at, scale = idx[:, k].clamp(min=0), weights[:, k] if weighted else torch.ones(T)
                y = torch.einsum("th,thf->tf", x.double(), w1[at].double()).relu()
                y = torch.einsum("tf,tfh->th", y, w2[at].double()) * scale[:, None]
                right += torch.where((idx[:, k] >= 0)[:, None], y, 0)
            assert (found[(idx < 0).all(1)] == 0).all()
            assert ((found - right).abs() <= 2.0**-18 * (1 + right.abs().max())).all()

    on_ranks(size, run, sms=sms)


def test_weights_of_no_expert_are_refused() -> None:
    def run(world: Any) -> None:
        idx, weights = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
        there = pkt.all_gather_grouped_matmul(torch.ones(3, 16), idx, weights, torch.ones(1, 16, 8))
        handle = there._replace(offsets=there.offsets[:1].clone())
        with pytest.raises(ShapeError, match=r"w: found \(0, 8, 16\), wanted \(e h n\) with e at least 1"):
            pkt.grouped_matmul_reduce_scatter(there.product, torch.ones(0, 8, 16), handle)

    on_ranks(2, run)


@pytest.mark.parametrize("arch", [90, 100])
def test_the_sums_of_tokens_compile(arch: int, tmp_path: Path) -> None:
    """With 16 experts a token nothing is spilled."""
    i32, f32, bf16 = (Pointer(name, 4096) for name in ("i32", "fp32", "bf16"))
    compiled = compile_only(
        token_sums_kernel, bf16, i32, f32, bf16, 8192, 7168, 16, 8, 1024, arch=arch, **COPY_OPTIONS
    )  # fmt: skip
    usage = resources(compiled, tmp_path)
    assert usage["STACK"] == usage["LOCAL"] == 0, usage
