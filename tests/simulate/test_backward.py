"""Backward passes of simulated ranks that wait for each other, launch kernels and fail inside."""

from __future__ import annotations

import contextvars
import math
import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import pkt
import pkt.language as pl
from pkt.simulate import engine

pytestmark = pytest.mark.machine


@triton.jit
def shift_kernel(x_ptr, out_ptr, flags, by, world, N: tl.constexpr):
    launch = pl.epoch(flags, world)
    offs = tl.arange(0, N)
    to = (tl.cast(world.rank, tl.int32) + by) % world.size
    pl.barrier(flags + 1, world)
    pl.put(dst=out_ptr + offs, src=x_ptr + offs, peer=to, world=world)
    pl.signal(flags, to, world)
    pl.wait(flags, launch, world)


class Shift(torch.autograd.Function):
    """A kernel of the user's, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, inbox: Any, flags: Any, world: Any, by: int = 1) -> torch.Tensor:
        ctx.rest = inbox, flags, world, by
        shift_kernel[(1,)](x.contiguous(), inbox, flags, by % world.size, world.device, x.numel())
        return inbox.plain().clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        inbox, flags, world, by = ctx.rest
        assert pkt.current_world() is world
        return Shift.apply(grad, inbox, flags, world, -by), None, None, None, None


def shifted(world: Any, steps: int, wrap: Callable[..., Any] = lambda f, x: f(x)) -> tuple[float, float]:
    x = torch.full((8,), 1.0 + world.rank, requires_grad=True)
    buffers = pkt.empty(8), pkt.signals(2), world

    def step(y: torch.Tensor) -> torch.Tensor:
        return Shift.apply(y.square(), *buffers)

    y = x
    for _ in range(steps):
        y = wrap(step, y)
    (y.sum() * (world.rank + 1)).backward()
    return y[0].item(), x.grad[0].item()


def wanted(rank: int, size: int, steps: int) -> tuple[float, float]:
    power, to = 2**steps, (rank + steps) % size
    return float((1 + (rank - steps) % size) ** power), float((to + 1) * power * (rank + 1) ** (power - 1))


@pytest.mark.parametrize("seed", range(8))
def test_every_rank_runs_its_own_nodes(seed: int) -> None:
    found = pkt.launch(shifted, 3, device="cpu", args=(2,), seed=seed, races=True)
    assert found == [wanted(r, 3, 2) for r in range(3)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_saved_tensor_hooks_are_each_ranks_own(reentrant: bool) -> None:
    def again(f: Any, x: torch.Tensor) -> Any:
        return checkpoint(f, x, use_reentrant=reentrant)

    found = pkt.launch(shifted, 3, device="cpu", args=(2, again), seed=3)
    assert found == [wanted(r, 3, 2) for r in range(3)]


def test_later_nodes_come_first_where_some_code_is_compiled() -> None:
    """The rank that compiles makes nodes that the others do not make."""
    order: list[list[str]] = [[], []]

    def main(world: Any) -> None:
        class Named(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
                ctx.name = name
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> Any:
                order[world.rank].append(ctx.name)
                return pkt.all_reduce(grad.clone()), None

        x = torch.ones(2, requires_grad=True)
        fast = torch.compile(lambda x: pkt.all_gather(x) * 2, backend="eager")
        results = [Named.apply(x, "first"), Named.apply(fast(x), "second"), Named.apply(x, "third")]
        (gradient,) = torch.autograd.grad(results[1].square().sum(), x, create_graph=True)
        results += [Named.apply(gradient, "fourth"), fast(Named.apply(x, "fifth"))]
        order[world.rank].clear()
        sum(result.sum() for result in results).backward()

    pkt.launch(main, 2, device="cpu")
    assert order[0] == order[1], order


def test_an_error_in_a_backward_pass_is_the_ranks() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            world = pkt.current_world()
            world.barrier()
            if world.rank == 1:
                raise ValueError("no gradient today")
            world.barrier()
            return grad

    def main(world: Any) -> None:
        Fails.apply(torch.ones(2, requires_grad=True)).sum().backward()

    with pytest.raises(pkt.RankFailed, match="rank 1 raised(.|\n)*no gradient today"):
        pkt.launch(main, 3, device="cpu")


def test_a_deadlock_in_a_backward_pass_names_the_line() -> None:
    def main(world: Any) -> None:
        x = torch.ones(2, requires_grad=True)
        y = pkt.all_gather(x, world=world).sum()
        if world.rank == 0:
            y.backward()

    with pytest.raises(pkt.PktError, match=r"test_backward\.py:\d+"):
        pkt.launch(main, 2, device="cpu")


@triton.jit
def exp2_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, tl.exp2(tl.load(x_ptr)))


@pytest.mark.filterwarnings("error")
def test_a_kernel_in_a_backward_pass_does_not_warn_of_an_overflow() -> None:
    """As none does in a forward pass: the thread has the caller's context variables."""
    who = contextvars.ContextVar("who", default=-1)

    class Exp2(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, out: Any) -> torch.Tensor:
            ctx.out = out
            exp2_kernel[(1,)](x, out)
            return out.plain().clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            exp2_kernel[(1,)](grad, ctx.out)
            return ctx.out.plain() * (who.get() + 1), None

    def main(world: Any) -> list[float]:
        who.set(world.rank)
        x = torch.full((1,), 300.0, requires_grad=True)
        y = Exp2.apply(x, pkt.empty(1))
        y.backward(torch.full((1,), 300.0))
        return [y.item(), x.grad.item()]  # type: ignore[union-attr]

    assert pkt.launch(main, 2, device="cpu") == [[math.inf, math.inf]] * 2


def differentiated(world: Any) -> set[int]:
    """The threads of three backward passes."""
    threads: set[int] = set()
    for _ in range(3):
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda grad: threads.add(threading.get_ident()))
        x.sum().backward()
    return threads


def test_backward_passes_share_a_thread() -> None:
    """A new one would have to count up to the number of the last node that anyone has made."""
    engine.end_idle()
    before = threading.active_count()
    first, second = pkt.launch(differentiated, 2, device="cpu")
    assert first == second != {threading.get_ident()}
    assert len(first) == 1
    assert pkt.launch(differentiated, 1, device="cpu") == [first]
    assert threading.active_count() == before + 1
    engine.end_idle()
    assert threading.active_count() == before


def test_a_forked_process_has_threads_of_its_own() -> None:
    pkt.launch(differentiated, 1, device="cpu")
    process = multiprocessing.get_context("fork").Process(target=pkt.launch, args=(differentiated, 2, "cpu"))
    process.start()
    process.join(20)
    ended = process.exitcode
    process.kill()
    assert ended == 0


def test_the_engine_is_given_back() -> None:
    engine, compile = torch.autograd.Variable._execution_engine, torch.compile
    pkt.launch(lambda world: None, 2, device="cpu")
    assert torch.autograd.Variable._execution_engine is engine
    assert torch.compile is compile


@pytest.mark.parametrize("main", [True, False])
def test_torchs_stand_in_for_a_gpu_outlives_the_threads_of_backward_passes(
    monkeypatch: pytest.MonkeyPatch, main: bool
) -> None:
    """Torch 2.11 for CUDA, where there is no GPU, keeps it in the thread that first asks for it."""
    makers: list[threading.Thread] = []

    def ensure() -> None:
        makers.append(threading.current_thread())

    def run() -> None:
        found.append(pkt.launch(shifted, 3, device="cpu", args=(2,)))

    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", ensure)
    engine._hold_guard.cache_clear()
    found: list[Any] = []
    try:
        if main:
            run()
        else:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
    finally:
        engine._hold_guard.cache_clear()
    assert found == [[wanted(r, 3, 2) for r in range(3)]]
    (maker,) = makers
    assert maker.is_alive()
    assert (maker is threading.main_thread()) == main


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_a_transform_of_torch_func_that_maps_a_backward_pass(transform: Callable[..., Any]) -> None:
    """torch keeps its transforms for each thread."""

    transformed = transform(lambda x: (x**3).sum())
    for found in pkt.launch(lambda world: transformed(pkt.full((4,), 2.0)), ranks=2, device="cpu"):
        assert torch.equal(found, transformed(torch.full((4,), 2.0)))
