"""dispatch_matmul: the form in one launch gives the bits of the two launches; it waits for no more than its rows."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.dispatch import Dispatched
from pkt.kernels.dispatch_matmul import OPERATOR
from pkt.kernels.gradients import Recorded

from .helpers import on_ranks, random
from .test_dispatch import routed

TILE = (16, 16, 16, 2)


def both(world: Any, T: int, own: int, room: int, **more: Any) -> tuple[Dispatched, torch.Tensor]:
    """Results of push, which are those of dispatch and grouped_matmul, bit by bit."""
    rank = world.rank
    x, w = random((T, 16), torch.float32, rank, 0), random((own, 16, 24), torch.float32, rank, 1)
    idx, weights = routed("random", T, 2, own * world.size, rank), random((T, 2), torch.float32, rank, 2)
    there, product = pkt.dispatch_matmul(x, idx, weights, w, max_tokens=room, mode="push", tiles=TILE, **more)
    right = pkt.dispatch(x, idx, weights, own * world.size, max_tokens=room, **more)
    for one, other in zip(there, right, strict=True):
        assert one is other is None or torch.equal(one, other)
    assert torch.equal(product, pkt.grouped_matmul(there.rows, w, there.offsets, tiles=TILE))
    return there, product


@pytest.mark.parametrize(("T", "own", "alignment", "sms"), [(50, 1, 1, 3), (40, 2, 8, 2), (32, 2, 1, 1)])
def test_blocks_of_own_tokens_and_of_others(T: int, own: int, alignment: int, sms: int) -> None:
    """Experts have some blocks of one rank's tokens alone, and some of both ranks'; and again with another routing."""

    def run(world: Any) -> None:
        for tokens in (T // 2, T):
            there, _ = both(world, tokens, own, 4 * T + 16, alignment=alignment)
        assert there.counts.max() > 16

    on_ranks(2, run, sms=sms)


@pytest.mark.parametrize(("T", "K", "own", "sms"), [(33, 3, 5, 4), (3, 2, 1, 1)])
def test_tokens_leave_in_the_order_of_their_first_experts(
    T: int, K: int, own: int, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the rank that they go to; those with the same one in their own order. Dispatch sends them in their own."""
    plans = importlib.import_module("pkt.kernels.dispatch.plans")
    make, made = plans._buffers, {}

    def kept(call: Any, *more: Any) -> Any:
        made[call.world.rank] = make(call, *more)
        return made[call.world.rank]

    monkeypatch.setattr(plans, "_buffers", kept)

    def run(world: Any) -> None:
        rank, size = world.rank, world.size
        x, w = random((T, 8), torch.float32, rank, 0), random((own, 8, 8), torch.float32, rank, 1)
        idx, weights = routed("random", T, K, own * size, rank), random((T, K), torch.float32, rank, 2)
        for sort in (True, False):
            if sort:
                pkt.dispatch_matmul(x, idx, weights, w, max_tokens=size * T * K, mode="push", tiles=TILE)
            else:
                pkt.dispatch(x, idx, weights, own * size, max_tokens=size * T * K, mode="push")
            for target in range(size):
                there = torch.where(idx // own == target, idx, own * size).min(1).values
                leave = [t for t in range(T) if there[t] < own * size]
                wanted = sorted(leave, key=lambda t: there[t]) if sort else leave
                assert made[rank].order[target, : len(leave)].tolist() == wanted
            world.barrier()

    on_ranks(3, run, sms=sms)


def test_ranks_without_room() -> None:
    """They compute nothing, and the others as if nothing had happened."""

    def run(world: Any) -> None:
        there, product = both(world, 8 + 4 * world.rank, 1, 14 + world.size)
        assert not there.offsets[-1] or there.counts.sum() == there.offsets[-1]
        assert (product[int(there.offsets[-1]) :] == 0).all()

    on_ranks(3, run, sms=2)


@pytest.mark.parametrize(
    ("size", "tokens", "mode"),
    [(2, 4096, "unfused"), (2, 32768, "unfused"), (4, 1024, "unfused"), (4, 4096, "unfused"), (4, 8192, "push"),
     (4, 32768, "push"), (8, 32768, "push"), (1, 32768, "unfused")],
)  # fmt: skip
@pytest.mark.parametrize("promised", [False, True])
def test_one_launch_is_the_default_where_dispatch_takes_long(size: int, tokens: int, mode: str, promised: bool) -> None:
    """By what 2 and 4 GPUs measured for 256 experts, 7168 -> 2048, 8 a token (`dispatch_matmul_tried.json`). Without a
    promise the rank with the most tokens counts."""
    sizes = {"e": 256 // size, "h": 7168, "n": 2048, "k": 8, "t": 1}
    asked = {"tokens_per_rank": tokens // size} if promised else {}
    call = SimpleNamespace(
        sizes=sizes, world=SimpleNamespace(size=size), given=asked, dtype=torch.bfloat16,
        greatest=lambda letter, alone: tokens // size if (letter, alone, promised) == ("t", True, False) else 1,
    )  # fmt: skip
    assert OPERATOR.default(call) == mode
    sizes["n"] = 256  # a product that takes less time than dispatch
    assert OPERATOR.default(call) == "unfused"
    sizes["e"] = 0
    assert OPERATOR.default(call) == "unfused"


def test_a_weight_s_gradient_lies_as_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """So autograd need not copy it. And what goes home in the backward pass keeps the promise of the forward pass."""
    operator, promises = Recorded.operator, []

    def told(call: Recorded, name: str, *tensors: Any, **keywords: Any) -> Any:
        promises.append((name, keywords))
        return operator(call, name, *tensors, **keywords)

    monkeypatch.setattr(Recorded, "operator", told)

    def run(world: Any) -> None:
        x, w = random((3, 8), torch.float32, world.rank, 0), random((2, 8, 16), torch.float32, world.rank, 1)
        idx, weights = routed("random", 3, 2, 4, world.rank), random((3, 2), torch.float32, world.rank, 2)
        x.requires_grad_()
        kept = []
        for one in (w, w.transpose(1, 2).contiguous().transpose(1, 2)):
            one.requires_grad_()
            product = pkt.dispatch_matmul(x, idx, weights, one, max_tokens=12, clear=True, tokens_per_rank=3)[1]
            of_x, of_w = torch.autograd.grad(product.square().sum(), (x, one))
            assert of_w.stride() == one.stride()
            kept.append((of_x, of_w))
        for first, second in zip(*kept):
            torch.testing.assert_close(first, second)

    on_ranks(2, run)
    assert promises == [("combine", {"tokens_per_rank": 3})] * 4


def test_a_tile_waits_for_all_its_rows_in_every_schedule() -> None:
    """Its rows are in two blocks, of which the second may be whole first."""

    def run(world: Any) -> None:
        both(world, 10, 2, 40)

    pkt.simulate(run, 2, 12, sms=3, progress=False).check()


def test_each_token_of_another_rank_is_placed_once() -> None:
    """Also where fewer programs place those than own tokens: a row that counts twice makes its tile begin early."""

    def run(world: Any) -> None:
        both(world, 50, 1, 110, num_comm_sms=1)

    pkt.simulate(run, 2, 3, sms=4, progress=False).check()
