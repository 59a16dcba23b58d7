"""The host side on simulated ranks: worlds, collectives, factories, allocation, random numbers."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch.utils.flop_counter import FlopCounterMode

import pkt
import pkt.language as pl
from pkt.errors import (
    Closed,
    HeapFull,
    NotSymmetric,
    RankError,
    RankFailed,
    ShapeError,
    Unsupported,
    UseAfterFree,
)
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


# -- random numbers --------------------------------------------------------------------------------------------------


def test_every_rank_has_its_own_random_state() -> None:
    """As in separate processes: seeding one rank, or drawing on it, does not affect the others."""

    def main(world: Any) -> list[float]:
        flags = pkt.signals(1)
        torch.manual_seed(5 if world.rank != 1 else 6)
        drawn = []
        for _ in range(4):
            drawn.append(torch.rand(1).item())
            barrier[(1,)](flags, world.device)
            world.barrier()
        return drawn

    torch.manual_seed(5)
    same = [torch.rand(1).item() for _ in range(4)]
    torch.manual_seed(6)
    other = [torch.rand(1).item() for _ in range(4)]
    before = torch.get_rng_state()
    for seed in SEEDS:
        assert launch(main, 3, seed=seed) == [same, other, same]
    assert torch.equal(torch.get_rng_state(), before)


def test_every_rank_has_its_own_gradient_mode() -> None:
    """Other ranks run while one of them is inside torch.no_grad()."""

    def main(world: Any) -> list[bool]:
        found = []
        for _ in range(1 + world.rank):
            with torch.no_grad():
                world.all_gather_object(0)
                found.append(torch.is_grad_enabled())
            found.append(torch.is_grad_enabled())
        for _ in range(2 - world.rank):
            world.all_gather_object(0)
        return found

    for seed in SEEDS:
        assert launch(main, 3, seed=seed) == [[False, True] * (1 + rank) for rank in range(3)]
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("mode", ["inference", "autocast"])
def test_every_rank_has_its_own_inference_mode_and_autocast(mode: str) -> None:
    """The ranks enter and leave at other times, and one of them stays inside when it fails."""
    inside = {"inference": torch.inference_mode, "autocast": lambda: torch.autocast("cpu", torch.bfloat16)}[mode]
    is_on = {"inference": torch.is_inference_mode_enabled, "autocast": lambda: torch.is_autocast_enabled("cpu")}[mode]

    def main(world: Any, fails: bool) -> list[bool]:
        found = []
        for _ in range(1 + world.rank):
            with inside():
                world.all_gather_object(0)
                found.append(is_on())
                if fails and world.rank == 1:
                    inside().__enter__()
                    raise ValueError("on purpose")
            found.append(is_on())
        for _ in range(2 - world.rank):
            world.all_gather_object(0)
        return found

    for seed in SEEDS:
        assert launch(main, 3, seed=seed, args=(False,)) == [[True, False] * (1 + rank) for rank in range(3)]
        assert not is_on()
        with pytest.raises(RankFailed, match="on purpose"):
            launch(main, 3, seed=seed, args=(True,))
        assert not is_on()
        torch.empty(2).add_(1)._version


def test_every_rank_has_its_own_dispatch_modes() -> None:
    """A counter of a rank's products sees those of its backward and compiled functions, and the caller's all."""
    compiled = torch.compile(lambda x: x @ x, backend="aot_eager")

    def main(world: Any) -> tuple[int, int, int]:
        x = torch.ones(4, 4, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            for _ in range(1 + world.rank):
                world.all_gather_object(0)
                y = x @ x
        for _ in range(2 - world.rank):
            world.all_gather_object(0)
        with FlopCounterMode(display=False) as inside:
            y.sum().backward()
            compiled(x.detach())
        return counter.get_total_flops(), inside.get_total_flops(), torch._C._len_torch_dispatch_stack()

    product = 2 * 4**3
    for seed in SEEDS:
        assert launch(main, 3, seed=seed) == [((1 + rank) * product, 3 * product, 0) for rank in range(3)]
    with FlopCounterMode(display=False) as counter:
        assert launch(main, 2) == [((1 + rank) * product, 3 * product, 1) for rank in range(2)]
    assert counter.get_total_flops() == (1 + 2 + 2 * 3) * product
    assert torch._C._len_torch_dispatch_stack() == 0


def test_every_rank_has_its_own_event_loop() -> None:
    def main(world: Any) -> Any:
        async def run() -> Any:
            world.all_gather_object(0)  # the other rank begins its own
            await asyncio.sleep(0)
            return asyncio.get_running_loop()

        found = asyncio.run(run())
        world.barrier()
        return found

    async def outside() -> None:
        for seed in SEEDS:
            one, other = launch(main, 2, seed=seed)
            assert one is not other
            assert asyncio.get_running_loop() not in (one, other)

    asyncio.run(outside())


def test_every_rank_has_its_own_default_dtype_and_deterministic_mode() -> None:
    def now() -> tuple[Any, ...]:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        return torch.empty(1).dtype, torch.are_deterministic_algorithms_enabled(), warns

    def main(world: Any) -> list[Any]:
        found = [now()]
        if world.rank == 0:  # the first to run, so that the other runs between
            torch.set_default_dtype(torch.float64)
            torch.use_deterministic_algorithms(True, warn_only=True)
        world.all_gather_object(0)
        return [*found, now()]

    before = torch.float32, False, False
    for seed in SEEDS:
        assert launch(main, 2, seed=seed) == [[before, (torch.float64, True, True)], [before, before]]
        assert now() == before


def test_a_backward_pass_runs_in_its_ranks_autocast_mode() -> None:
    """It runs in a thread of its own."""

    class Asked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return torch.full_like(grad, torch.is_autocast_enabled("cpu"))

    def main(world: Any) -> list[float]:
        x = torch.zeros(1, requires_grad=True)
        with torch.autocast("cpu", enabled=world.rank == 1):
            Asked.apply(x).backward()
        return x.grad.tolist()

    assert launch(main, 2) == [[0.0], [1.0]]


def test_a_run_restores_the_callers_gradient_mode() -> None:
    def main(world: Any) -> bool:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(not before)
        return before

    for outside in (True, False):
        with torch.set_grad_enabled(outside):
            assert launch(main, 3) == 3 * [outside]
            assert torch.is_grad_enabled() == outside


def test_unseeded_ranks_draw_the_same_numbers() -> None:
    torch.manual_seed(11)
    assert len({tuple(v) for v in launch(lambda world: torch.rand(3).tolist(), 3)}) == 1


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


# -- memory ----------------------------------------------------------------------------------------------------------


def test_freed_memory_is_reused() -> None:
    def main(world: Any) -> None:
        a = pkt.zeros(1024, name="a")
        b = pkt.ones(1024, name="b")
        at = a.data_ptr()
        a.free()
        with pytest.raises(UseAfterFree, match=r"rank \d: sum uses 'a' after it was freed at test_host.py:\d+"):
            a.sum()
        with pytest.raises(UseAfterFree):
            a.peer(0)
        with pytest.raises(UseAfterFree, match="a launch or data_ptr"):
            barrier[(1,)](a, world.device)
        world.barrier()
        c = pkt.zeros(1024, dtype=torch.int32, name="c")
        assert c.data_ptr() == at  # first fit, on every rank
        assert (c == 0).all()
        assert (b == 1).all()
        assert world.all_gather_object(c.data_ptr() - world.backend.base)[0] == c.data_ptr() - world.backend.base

    for seed in SEEDS:
        launch(main, 2, seed=seed)


def test_a_freed_tensor_leaves_no_trace_for_the_detector() -> None:
    """The tensor that reuses the memory does not race with the freed one."""

    @triton.jit
    def write(x, world, N: tl.constexpr):
        pl.store(x + tl.arange(0, N), 1.0, (world.rank + 1) % world.size, world)

    def main(world: Any) -> None:
        for _ in range(3):
            x = pkt.zeros(64)
            write[(1,)](x, world.device, 64)
            x.free()
            world.barrier()

    assert failures(main, 2, range(10)) == {}


def test_a_full_heap_is_reported() -> None:
    def main(world: Any) -> None:
        a = pkt.zeros(100_000, name="a")
        with pytest.raises(HeapFull) as caught:
            pkt.zeros(200_000, name="too large")
        message = str(caught.value)
        assert f"rank {world.rank}: heap full: wanted 781.2 KiB for 'too large', free " in message
        assert "raise heap= or PKT_HEAP" in message
        assert (a == 0).all()
        b = pkt.ones(100_000)  # the failed allocation has taken no memory
        assert b.sum() == 100_000
        a.free()
        world.barrier()
        assert (pkt.ones(100_000) == 1).all()

    for seed in SEEDS:
        launch(main, 3, seed=seed)


def test_use_after_close_is_refused() -> None:
    def main(world: Any) -> None:
        x = pkt.zeros(4)
        device = world.device
        world.barrier()
        world.close()
        world.close()  # closing twice is fine
        assert world.closed
        calls: list[tuple[str, Any]] = [
            ("barrier()", world.barrier),
            ("device", lambda: world.device),
            ("all_gather_object()", lambda: world.all_gather_object(1)),
            ("pkt.zeros|heap", lambda: pkt.zeros(3)),
            ("sum", x.sum),
            ("launch", lambda: barrier[(1,)](x, device)),
        ]
        for what, call in calls:
            with pytest.raises(Closed, match=rf"rank {world.rank}: .*({what.replace('(', '[(]').replace(')', '[)]')})"):
                call()

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


def test_launch_returns_the_ranks_own_objects() -> None:
    def main(world: Any) -> Any:
        return {"rank": world.rank, "values": torch.full((2,), float(world.rank))}

    found = launch(main, 3)
    assert [f["rank"] for f in found] == [0, 1, 2]
    assert [f["values"].tolist() for f in found] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def address_space() -> int:
    """Bytes of address space that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def test_a_heap_larger_than_memory_commits_no_memory() -> None:
    """Linux reserves no memory for a window until it is written, so it refuses neither the windows nor a fork."""

    def main(world: Any) -> bool:
        if world.rank == 0:
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
        return True

    assert launch(main, 4, heap=1 << 42) == [True] * 4


def test_a_finished_run_holds_no_memory() -> None:
    def main(world: Any) -> float:
        return pkt.full((4,), float(world.rank), dtype=torch.float32)[0].item()

    gc.disable()
    try:
        before = address_space()
        for _ in range(3):
            assert launch(main, 4, heap=1 << 34) == [0.0, 1.0, 2.0, 3.0]
        assert address_space() - before < 1 << 34
    finally:
        gc.enable()


def test_a_returned_tensor_keeps_its_memory() -> None:
    found = launch(lambda world: pkt.full((4,), float(world.rank), dtype=torch.float32).plain(), 4)
    assert [r.tolist() for r in found] == [[float(rank)] * 4 for rank in range(4)]


@pytest.mark.parametrize("of_peer", [False, True])
@pytest.mark.parametrize("use", [torch.Tensor.sum, lambda view: view.fill_(2.0), lambda view: view[torch.tensor([1])]])
def test_a_view_that_outlives_its_tensor_is_not_used(of_peer: bool, use: Any) -> None:
    def main(world: Any, frees: bool) -> None:
        x, y = pkt.ones(4), pkt.ones(4)
        view, other = (t.peer(1 - world.rank) if of_peer else t.plain() for t in (x, y))
        world.barrier()
        if frees:
            x.free()
        world.barrier()
        other.sum()
        use(view)

    for races in (True, False):
        with pytest.raises(UseAfterFree, match=r"uses 'x' after it was freed at test_host.py:\d+: free it later"):
            launch(main, 2, args=(True,), races=races)
    launch(main, 2, args=(False,), races=False)


def test_an_array_that_outlives_its_tensor_holds_no_numbers() -> None:
    def main(world: Any) -> list[bool]:
        x = pkt.ones(4)
        views = x.plain().numpy(), x.peer(1 - world.rank).numpy()
        world.barrier()
        x.free()
        world.barrier()
        return [bool(np.isnan(view).all()) for view in views]

    assert launch(main, 2) == [[True, True]] * 2


def test_the_remedy_for_a_tensor_that_launch_returns() -> None:
    x = launch(lambda world: pkt.ones(4, name="x"), 1)[0]
    with pytest.raises(Closed, match=r"sum uses 'x' after its world was closed: keep x.clone\(\)"):
        x.sum()
