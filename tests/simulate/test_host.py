"""The host side on simulated ranks: worlds, collectives, factories."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.errors import Closed, NotSymmetric, RankError, RankFailed, ShapeError, Unsupported
from pkt.language.world import code_hash
from tests.simulate.helpers import failures, outcome

pytestmark = pytest.mark.machine

SEEDS = (0, 1, 2, 3)


def launch(fn: Any, ranks: int = 3, **options: Any) -> list[Any]:
    return pkt.launch(fn, ranks=ranks, device="cpu", **{"heap": "1MiB", **options})


@triton.jit
def barrier(flags, world):
    pl.barrier(flags, world)


# -- worlds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_rank_has_its_world(ranks: int) -> None:
    def main(world: Any, tag: str) -> tuple:
        flags = pkt.signals(1)
        for _ in range(3):
            assert pkt.current_world() is world
            assert pkt.init() is world
            barrier[(1,)](flags, world.device)  # other ranks' hosts run meanwhile
        world.barrier()
        assert pkt.current_world() is world
        return world.rank, world.size, tag, world.torch_device.type, world.num_sms, world.multicast

    for seed in SEEDS:
        found = launch(main, ranks, args=("tag",), seed=seed, sms=7)
        assert found == [(r, ranks, "tag", "cpu", 7, True) for r in range(ranks)]


def test_there_is_no_world_outside_a_run() -> None:
    launch(lambda world: None)
    with pytest.raises(Unsupported, match="there is no world"):
        pkt.current_world()
    with pytest.raises(Unsupported):
        pkt.zeros(3)


def test_the_device_world_describes_the_ranks() -> None:
    def main(world: Any) -> None:
        device = world.device
        assert device.rank == world.rank
        assert (device.size.value, device.multicast.value) == (world.size, world.multicast)
        assert device.stride.value == world.backend.stride
        assert device.status.data_ptr() == world.backend.base
        assert device.code.value == code_hash()

    launch(main)
    launch(main, multicast=False)


def test_consecutive_worlds_share_nothing() -> None:
    kept = []

    def main(world: Any) -> float:
        x = pkt.zeros(4)
        x += world.rank + 1
        kept.append(x)
        return x.sum().item()

    assert launch(main, 2) == [4.0, 8.0]
    assert launch(main, 3) == [4.0, 8.0, 12.0]
    for x in kept:
        with pytest.raises(Closed):
            x.sum()


def test_bad_numbers_of_ranks_are_refused() -> None:
    for ranks in (0, -1, 1.5, True, "2"):
        with pytest.raises(ShapeError, match="ranks"):
            pkt.launch(lambda world: None, ranks=ranks, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="device"):
        pkt.launch(lambda world: None, ranks=2, device="tpu")  # type: ignore[arg-type]


# -- collectives -----------------------------------------------------------------------------------------------------


def test_host_collectives_return_every_ranks_value() -> None:
    def main(world: Any) -> None:
        gathered = world.all_gather_object({"rank": world.rank, "list": [1, world.rank]})
        assert gathered == [{"rank": r, "list": [1, r]} for r in range(world.size)]
        for root in range(world.size):
            assert world.broadcast(f"from {world.rank}", root=root) == f"from {root}"
        mine = [world.rank]
        others = world.all_gather_object(mine)
        others[world.rank].append(7)
        assert mine == [world.rank]  # the results are copies
        with pytest.raises(RankError, match="found rank 9, wanted an integer from 0 to 3"):
            world.broadcast(1, root=9)
        world.synchronize()
        world.barrier()

    for seed in SEEDS:
        launch(main, 4, seed=seed)


def test_a_host_barrier_waits_for_all_ranks() -> None:
    order: list[tuple[str, int]] = []

    def main(world: Any) -> None:
        for i in range(3):
            order.append(("before", i))
            world.barrier()
            order.append(("after", i))
            world.barrier()

    for seed in SEEDS:
        order.clear()
        launch(main, 3, seed=seed)
        assert order == [(what, i) for i in range(3) for what in ["before"] * 3 + ["after"] * 3]


def test_a_workspace_is_made_once_per_world() -> None:
    made = []

    def main(world: Any) -> None:
        def make() -> Any:
            made.append(world.rank)
            return pkt.zeros(4)

        first = world.keep("buffers", make)
        assert world.keep("buffers", make) is first
        assert world.keep("others", make) is not first

    launch(main, 2)
    assert sorted(made) == [0, 0, 1, 1]


# -- factories -------------------------------------------------------------------------------------------------------


def test_factories_make_tensors_like_torchs() -> None:
    def main(world: Any) -> None:
        assert pkt.empty((2, 3)).shape == (2, 3)
        assert pkt.zeros(2, 3, dtype=torch.int32).tolist() == [[0] * 3] * 2
        assert pkt.ones((2,), dtype=torch.bfloat16).tolist() == [1.0, 1.0]
        assert pkt.full((2,), 7).tolist() == [7, 7]
        assert pkt.arange(2, 8, 2).tolist() == [2, 4, 6]
        x = torch.zeros(3, 5, dtype=torch.float16)
        for like in (pkt.empty_like, pkt.zeros_like, pkt.ones_like, pkt.rand_like, pkt.randn_like):
            made = like(x)
            assert (made.shape, made.dtype) == (x.shape, x.dtype)
        assert (pkt.full_like(x, 3) == 3).all()
        assert pkt.randint_like(x, 2, 4).unique().tolist() == [2.0, 3.0]
        torch.manual_seed(1)
        a, b, c = pkt.rand(8), pkt.randn(8), pkt.randint(3, 9, (8,))
        torch.manual_seed(1)
        assert a.tolist() == torch.rand(8).tolist()
        assert b.tolist() == torch.randn(8).tolist()
        assert c.tolist() == torch.randint(3, 9, (8,)).tolist()
        flags = pkt.signals(5)
        assert (flags.dtype, flags.tolist()) == (torch.int32, [0] * 5)
        named = pkt.zeros(3, name="weights")
        assert (named.symbol, flags.symbol) == ("weights", "flags")

    launch(main, 2)


def test_peers_see_each_others_values() -> None:
    def main(world: Any) -> None:
        x = pkt.full((4,), world.rank)
        for r in range(world.size):
            assert x.peer(r).tolist() == [r] * 4
        view = x[1:3]
        world.barrier()
        view.peer((world.rank + 1) % world.size).fill_(100 + world.rank)
        world.barrier()
        left = (world.rank - 1) % world.size
        assert x.tolist() == [world.rank, 100 + left, 100 + left, world.rank]
        assert isinstance(view, pkt.SymmetricTensor)
        assert not isinstance(x + 1, pkt.SymmetricTensor)
        assert (x.multicast is None) is not world.multicast

    for seed in SEEDS:
        launch(main, 3, seed=seed)
    launch(main, 3, multicast=False)


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_filled_tensors_may_be_read_at_once(ranks: int) -> None:
    @triton.jit
    def sum_of_peers(x, out, world):
        total = 0.0
        for r in range(world.size):
            total += pl.load(x, r, world)
        tl.store(out, total)

    def main(world: Any) -> None:
        x, out = pkt.full((4,), float(world.rank + 1)), torch.zeros(1)
        sum_of_peers[(1,)](x, out, world.device)
        assert out.item() == world.size * (world.size + 1) / 2

    assert failures(main, ranks, SEEDS) == {}


def test_empty_tensors_and_single_elements_work() -> None:
    @triton.jit
    def count(x, out, n, BLOCK: tl.constexpr):
        o = tl.arange(0, BLOCK)
        tl.store(out, tl.sum(tl.load(x + o, mask=o < n, other=0)))

    def main(world: Any) -> None:
        x, y, out = pkt.zeros(0), pkt.ones(1), torch.full((1,), 5.0)
        count[(1,)](x, out, 0, 8)
        assert out.item() == 0
        count[(1,)](y, out, y.numel(), 8)
        assert out.item() == 1

    launch(main, 2)


def test_bad_arguments_are_refused() -> None:
    def main(world: Any) -> None:
        x = pkt.zeros(4, name="x")
        assert pkt.symmetric(x, "x", world) is x
        with pytest.raises(NotSymmetric, match=rf"rank {world.rank}: op: x must be a symmetric tensor of this world"):
            pkt.symmetric(torch.zeros(4), "x", world, call="op")
        with pytest.raises(RankError):
            x.peer(world.size)
        with pytest.raises(RankError):
            x.peer(-1)
        with pytest.raises(ShapeError):
            pkt.zeros(-3)
        with pytest.raises(ShapeError):
            pkt.signals(0)

    launch(main, 2)


def test_tensors_of_another_device_are_refused() -> None:
    @triton.jit
    def touch(x):
        tl.store(x, 1.0)

    error = outcome(lambda world: touch[(1,)](torch.zeros(4, device="meta")), 1).error
    assert isinstance(error, RankFailed)
    assert "touch: argument x is on meta; simulated ranks compute on the CPU" in str(error)
