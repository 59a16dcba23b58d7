"""matmul_combine: the form in one launch gives the bits of the two launches, launch after launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from pkt.errors import ShapeError

from .helpers import on_ranks, random
from .test_dispatch import routed

TILE = (16, 16, 16, 2)


@pytest.mark.parametrize(
    ("size", "T", "K", "own", "weighted", "sms"),
    [(2, 30, 2, 2, True, 3), (3, 6, 3, 1, False, 1), (1, 9, 1, 3, True, 2)],
)
def test_equal_bits(size: int, T: int, K: int, own: int, weighted: bool, sms: int) -> None:
    """Tokens with several rows in a block, with rows in several, and with none; rows that fill up to an alignment hold
    no token. Routings differ from launch to launch."""

    def run(world: Any) -> None:
        w = random((own, 16, 24), torch.float32, world.rank, 1)
        for launch, tokens in enumerate((T, T // 2, T)):
            x = random((tokens, 16), torch.float32, world.rank, launch)
            idx = routed("random", tokens, K, own * size, 7 * launch + world.rank)
            weights = random((tokens, K), torch.float32, world.rank, 2)
            there = pkt.dispatch(x, idx, weights, own * size, max_tokens=size * T * K + 9 * own, alignment=4)
            handle = there if weighted else there._replace(weights=None)
            found = pkt.matmul_combine(there.rows, w, handle, mode="push", tiles=TILE, tokens_per_rank=T)
            y = pkt.grouped_matmul(there.rows, w, there.offsets, tiles=TILE)
            assert torch.equal(found, pkt.combine(y, handle))

    on_ranks(size, run, sms=sms)


def test_weights_of_no_expert_are_refused() -> None:
    """`dispatch` gives no such handle: this one is made by hand."""

    def run(world: Any) -> None:
        idx, weights = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
        there = pkt.dispatch(torch.ones(3, 16), idx, weights, world.size, max_tokens=8)
        handle = there._replace(offsets=there.offsets[:1].clone())
        with pytest.raises(ShapeError, match=r"w: found \(0, 16, 24\), wanted \(e h n\) with e at least 1"):
            pkt.matmul_combine(there.rows, torch.ones(0, 16, 24), handle)

    on_ranks(2, run)
