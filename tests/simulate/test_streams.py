"""A launch does not block the host code of its rank; a read, a collective and `world.synchronize` wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.simulate.findings import Deadlock
from tests.simulate.helpers import failures, outcome

pytestmark = pytest.mark.machine

SEEDS = range(8)


@triton.jit
def await_signal(flags, out, world):
    pl.wait(flags, 1, world)
    tl.store(out, 7)


@triton.jit
def send_signal(flags, world):
    pl.signal(flags, 0, world)


def waiter(world: Any, between: Callable[[Any, Any], Any], launches: int = 1) -> None:
    """Rank 0 waits in a kernel, and rank 1 signals after a host exchange."""
    flags, out = pkt.signals(1), torch.zeros(2, dtype=torch.int32)
    if world.rank == 0:
        for _ in range(launches):
            await_signal[(1,)](flags, out, world.device)
        between(world, out)
        world.all_gather_object(None)
        assert out.tolist() == [7, 0]
    else:
        world.all_gather_object(None)
        send_signal[(1,)](flags, world.device)


RUNS_ON = {
    "nothing": lambda world, out: None,
    "a view": lambda world, out: out[1:].view(1, 1).T.shape,
    "another tensor": lambda world, out: torch.ones(3).sum().item(),
    "an allocation": lambda world, out: torch.empty(3).data_ptr(),
}
WAITS: dict[str, Callable[[Any, Any], Any]] = {
    "synchronize": lambda world, out: world.synchronize(),
    "barrier": lambda world, out: world.barrier(),
    "item": lambda world, out: out[0].item(),
    "tolist": lambda world, out: out.tolist(),
    "numpy": lambda world, out: out.numpy(),
    "cpu": lambda world, out: out.cpu(),
    "clone": lambda world, out: out.clone(),
    "==": lambda world, out: out == 1,
    "if": lambda world, out: bool(out[0]),
    "print": lambda world, out: str(out),
    "copy_": lambda world, out: torch.zeros(2).copy_(out),
    "cat": lambda world, out: torch.cat([torch.zeros(1), out]),
}


@pytest.mark.parametrize("launches", [1, 3])
@pytest.mark.parametrize("between", RUNS_ON)
def test_host_code_goes_on_beside_its_launches(between: str, launches: int) -> None:
    assert failures(waiter, 2, SEEDS, args=(RUNS_ON[between], launches)) == {}


@pytest.mark.parametrize("between", WAITS)
def test_a_read_on_the_host_waits_for_the_launches_of_its_rank(between: str) -> None:
    found = failures(waiter, 2, [0, 1, 3], args=(WAITS[between],))
    assert [type(error) for error in found.values()] == [Deadlock] * 3


@pytest.mark.parametrize("seed", [0, 1, 3])
@pytest.mark.parametrize("first", ["await_signal", "send_signal"])
def test_a_deadlock_names_the_kernels_that_wait_behind(first: str, seed: int) -> None:
    """On GPUs the two may run on two streams."""

    def main(world: Any) -> None:
        flags, out = pkt.signals(1), torch.zeros(1, dtype=torch.int32)
        if first == "send_signal":
            send_signal[(1,)](flags, world.device)
        if world.rank == 0:
            await_signal[(1,)](flags, out, world.device)
            await_signal[(1,)](flags, out, world.device)
        if first == "await_signal" and world.rank == 0:
            send_signal[(1,)](flags, world.device)

    error = outcome(main, 2, seed).failure
    if first == "send_signal":
        assert error is None
    else:
        assert isinstance(error, Deadlock)
        assert error.__notes__[0] == (
            "await_signal must end before send_signal can begin on the same rank: "
            "if await_signal waits for a signal of send_signal, launch send_signal first"
        )


def test_launches_of_a_rank_run_one_after_the_other() -> None:
    @triton.jit
    def double(x, N: tl.constexpr):
        for i in range(N):
            tl.store(x, tl.load(x) * 2 + 1)

    def main(world: Any) -> None:
        x, y = pkt.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        for _ in range(3):
            double[(1,)](x, 2)
            double[(1,)](y, 1)
        assert (x.item(), y.item()) == (63, 7)

    assert failures(main, 2, SEEDS) == {}


def test_a_rank_that_returns_has_finished_its_launches() -> None:
    @triton.jit
    def count(x):
        tl.store(x, tl.load(x) + 1)

    def main(world: Any) -> torch.Tensor:
        x = torch.zeros(1)
        count[(1,)](x)
        return x

    for seed in SEEDS:
        assert [x.item() for x in outcome(main, 2, seed).results or []] == [1.0, 1.0]


def test_modes_of_host_code_stay_its_own() -> None:
    """`torch.device(...)` is a function mode, as is the watch that makes torch functions wait."""

    def main(world: Any) -> None:
        flags, out = pkt.signals(1), torch.zeros(1)
        device = "meta" if world.rank else "cpu"
        with torch.device(device):
            send_signal[(1,)](flags, world.device)
            world.all_gather_object(None)
            assert torch.empty(1).device.type == device
            if world.rank == 0:
                await_signal[(1,)](flags, out, world.device)
                assert out.item() == 7
        world.barrier()
        assert torch.empty(1).device.type == "cpu"

    depth = torch._C._len_torch_function_stack()
    for seed in SEEDS:
        assert outcome(main, 2, seed).failure is None
        assert torch._C._len_torch_function_stack() == depth


def test_a_run_that_ends_early_leaves_no_mode_behind() -> None:
    depth = torch._C._len_torch_function_stack()
    for seed in SEEDS:
        assert outcome(waiter, 2, seed, (WAITS["item"],)).failure is not None
        assert torch._C._len_torch_function_stack() == depth
