"""What a simulated rank has of its own: random numbers, and torch's modes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import pkt
from pkt.errors import RankFailed

from .test_host import SEEDS, barrier, launch

pytestmark = pytest.mark.machine


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
