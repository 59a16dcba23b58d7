"""Misuse that would pass in silence, or end in an error of Python or Triton: each has an error of pkt with a remedy."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.runtime.launch import outside
from tests.simulate.helpers import HEAP, line_of, outcome


@triton.jit
def tell(flags, world):
    pl.signal(flags, 1 - tl.cast(world.rank, tl.int32), world)


@triton.jit
def listen(flags, world):
    pl.wait(flags, 0, world)


@triton.jit
def meet(flags, world):
    pl.barrier(flags, world)


@triton.jit
def names_its_rank(x, world):
    tl.store(x, world.rank)


@triton.jit
def assumes(x, n):
    tl.assume(n > 4)
    tl.store(x + tl.arange(0, 2), 1.0)


def closes_on(*ranks: int) -> Callable[..., None]:
    def main(world: Any) -> None:
        pkt.ones(4)
        if world.rank in ranks:
            world.close()

    return main


def test_close_on_some_ranks_only_is_a_finding() -> None:
    error = outcome(closes_on(0, 2), 3).failure
    assert isinstance(error, pkt.CollectiveMismatch)
    assert "close() on some ranks only: ranks 0, 2: closed its world at test_misuse.py:" in str(error)
    assert "rank 1: left it open" in str(error)
    assert outcome(closes_on(), 2).failure is None
    assert outcome(closes_on(0, 1), 2).failure is None


def test_a_deadlock_says_that_a_rank_has_closed_its_world() -> None:
    def main(world: Any) -> None:
        world.close() if world.rank == 0 else pkt.ones(4)

    with pytest.raises(pkt.Deadlock, match=r"rank 0: returned, after close\(\) at test_misuse.py:\d+"):
        pkt.launch(main, 2, "cpu", heap=HEAP)


@pytest.mark.parametrize(("kernel", "call"), [(tell, "signal"), (listen, "wait"), (meet, "barrier")])
@pytest.mark.parametrize("plain", [False, True])
def test_signals_go_to_memory_of_signals(kernel: Any, call: str, plain: bool) -> None:
    def main(world: Any) -> None:
        flags = torch.zeros(2, dtype=torch.int32) if plain else pkt.zeros(2, dtype=torch.int32)
        kernel[(1,)](flags, world.device)

    error = outcome(main).failure
    if plain and call == "signal":  # to a peer's copy, which does not exist
        assert isinstance(error, (pkt.SignalIndexError, pkt.OutOfBounds))
        return
    assert isinstance(error, pkt.SignalIndexError)
    assert str(error).startswith(f"{call}: ")
    assert f" at {line_of(kernel, f'pl.{call}')}: wanted a counter of pkt.signals: allocate it with" in str(error)


@pytest.mark.parametrize("given", [lambda world: world.rank, lambda world: None])
def test_a_kernel_that_gets_something_else_for_its_world(given: Any) -> None:
    with pytest.raises(pkt.CompileError, match=r"(?s)names_its_rank at test_misuse.*give it that$"):
        pkt.launch(lambda world: names_its_rank[(1,)](pkt.zeros(1), given(world)), 2, "cpu", heap=HEAP)


def test_a_false_assumption_names_its_line() -> None:
    report = pkt.simulate(lambda world: assumes[(1,)](torch.zeros(2), 4), 1, 2, heap=HEAP)
    (finding,) = report.findings
    assert isinstance(finding.failure, pkt.FalseAssumption)
    wanted = f"rank 0: assumes program 0 at {line_of(assumes, 'tl.assume')}: tl.assume is false, "
    assert str(finding.failure).startswith(wanted)
    pkt.launch(lambda world: assumes[(1,)](torch.zeros(2), 5), 1, "cpu", heap=HEAP)


@triton.jit
def hints(x, y, stride, M, OF: tl.constexpr, NUMBER: tl.constexpr):
    rows = tl.arange(0, 8) % M
    if OF == "number":
        stride = tl.multiple_of(stride, NUMBER)
    if OF == "block":
        rows = tl.max_contiguous(tl.multiple_of(rows + stride, NUMBER), 8)
    if OF == "address":
        x = tl.multiple_of(x + stride, NUMBER)
    if OF == "addresses":
        i = tl.multiple_of(x + rows[:, None] * stride + tl.arange(0, 4)[None, :], (NUMBER, NUMBER))
        tl.store(y + tl.arange(0, 8), tl.sum(tl.load(i), 1))
    else:
        tl.store(y + rows, tl.load(x) + stride)


@pytest.mark.parametrize(
    ("of", "stride", "number", "right"),
    [
        ("number", 24, 8, True),
        ("number", 20, 8, False),
        ("number", 48, 32, False),
        ("number", -8, 8, True),
        ("block", 8, 8, True),
        ("block", 3, 8, False),
        ("address", 4, 16, True),
        ("address", 4, 128, True),  # of the bytes of an address 16 matter
        ("address", 2, 16, False),
        ("address", 2, 8, True),
        ("addresses", 4, 16, True),
        ("addresses", 5, 16, False),
        ("addresses", 5, 4, True),
    ],
)
def test_a_false_multiple_names_its_line(of: str, stride: int, number: int, right: bool) -> None:
    def main(world: Any) -> None:
        x, y = torch.zeros(64), torch.zeros(64)
        hints[(1,)](x[8:], y[8:], stride, 8, of, number)

    if right:
        pkt.launch(main, 1, "cpu", heap=HEAP)
        return
    line = {"number": "stride = tl", "block": "rows = tl.max", "address": "x = tl.m", "addresses": "i = tl.m"}[of]
    place = line_of(hints, line)
    with pytest.raises(pkt.FalseAssumption, match=f"at {place}: tl.multiple_of\\({number}\\) is false"):
        pkt.launch(main, 1, "cpu", heap=HEAP)


@triton.jit
def hints_of_bytes(x):
    i = tl.multiple_of(tl.load(x), 128)
    tl.store(x, i)


def test_a_multiple_may_be_larger_than_the_numbers_of_its_dtype() -> None:
    pkt.launch(lambda world: hints_of_bytes[(1,)](torch.zeros(1, dtype=torch.int8)), 1, "cpu", heap=HEAP)
    with pytest.raises(pkt.FalseAssumption, match=r"tl.multiple_of\(128\) is false"):
        pkt.launch(lambda world: hints_of_bytes[(1,)](torch.ones(1, dtype=torch.int8)), 1, "cpu", heap=HEAP)


def test_another_thread_of_a_rank_is_refused() -> None:
    calls: list[Callable[[Any, Any], Any]] = [
        lambda world, x: pkt.zeros(4),
        lambda world, x: pkt.all_reduce(x),
        lambda world, x: pkt.current_world(),
        lambda world, x: world.barrier(),
        lambda world, x: world.all_gather_object(1),
        lambda world, x: x.free(),
        lambda world, x: assumes[(1,)](x, 5),
    ]

    def main(world: Any) -> list[str]:
        x, said = pkt.zeros(4), []

        def work() -> None:
            for call in calls:
                try:
                    call(world, x)
                except pkt.Unsupported as error:
                    said.append(str(error))

        thread = threading.Thread(target=work, name="loader")
        thread.start()
        thread.join()
        return said

    for said in pkt.launch(main, 2, "cpu", heap=HEAP):
        assert len(said) == len(calls)
        assert all("found thread 'loader' beside a simulation" in text for text in said)
        assert all("call it in the function that pkt.launch runs" in text for text in said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a launch outside a world runs on the GPU")
def test_a_launch_outside_a_world_names_the_remedy() -> None:
    with pytest.raises(pkt.Unsupported, match=r"no world around this launch of a kernel.*pkt\.launch\(fn, ranks=4"):
        assumes[(1,)](torch.zeros(2), 5)
    with pytest.raises(RuntimeError):  # as Triton raises without pkt
        assumes[(1,)](torch.zeros(2), 5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton finds the GPU")
@pytest.mark.parametrize("ask", ["get_active_torch_device", "get_current_target", "get_benchmarker"])
def test_host_code_that_asks_tritons_driver_learns_of_torch_device(ask: str) -> None:
    def main(world: Any) -> None:
        getattr(triton.runtime.driver.active, ask)()

    with pytest.raises(
        pkt.Unsupported, match=r"^Triton's driver: found no GPU: take the device from world\.torch_device"
    ):
        pkt.launch(main, 2, "cpu", heap=HEAP)


def test_other_errors_of_tritons_driver_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def create() -> None:
        raise RuntimeError("2 active drivers")

    module = sys.modules["triton.runtime.driver"]
    monkeypatch.setattr(module, "_create_driver", create)
    outside.name_the_remedy()
    with pytest.raises(RuntimeError, match="^2 active drivers$"):
        module._create_driver()


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a GPU to give")
@pytest.mark.parametrize("ask", [lambda: torch.empty(4, device="cuda"), lambda: torch.cuda.set_device(0)])
def test_host_code_that_wants_a_gpu_learns_of_the_world_s_device(ask: Callable[[], Any]) -> None:
    error = outcome(lambda world: ask()).failure
    assert isinstance(error, pkt.RankFailed)
    assert str(error).endswith("take the device from world.torch_device, and wait with world.synchronize().")


def test_the_world_of_a_run_in_a_run_inside_of_it() -> None:
    def main(world: Any) -> None:
        x = pkt.zeros(4)
        for call in (lambda: world.barrier(), lambda: pkt.zeros(2, world=world), lambda: pkt.all_reduce(x)):
            with pytest.raises(pkt.Unsupported, match=f"rank {world.rank}: .*by a rank of a pkt.launch inside of this"):
                pkt.launch(lambda inner, call=call: call(), ranks=2, device="cpu")
        world.barrier()

    pkt.launch(main, ranks=2, device="cpu")
