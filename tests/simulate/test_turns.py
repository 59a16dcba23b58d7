"""Threads and asyncio may launch in the simulator at the same time: the simulations take turns."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.simulate import turns

pytestmark = pytest.mark.machine


@triton.jit
def ring(out, flags, world, number):
    pl.signal(flags, (world.rank + 1) % world.size, world)
    pl.wait(flags, 1, world)
    tl.store(out, number * 10 + world.rank)


def main(world: Any, number: int) -> int:
    out = pkt.full((1,), -1)
    flags = pkt.signals(1)
    ring[(1,)](out, flags, world.device, number)
    world.barrier()
    assert pkt.current_world() is world
    return int(out.item())


def launch(number: int) -> list[int]:
    return pkt.launch(main, ranks=2 + number % 3, device="cpu", args=(number,))


def wanted(number: int) -> list[int]:
    return [number * 10 + rank for rank in range(2 + number % 3)]


@pytest.fixture
def switching():
    """Threads switch often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def test_threads_get_their_own_results(switching: None) -> None:
    with ThreadPoolExecutor(10) as threads:
        assert list(threads.map(launch, range(10))) == [wanted(n) for n in range(10)]


def test_tasks_of_asyncio_get_their_own_results(switching: None) -> None:
    async def together() -> list[list[int]]:
        return await asyncio.gather(*(asyncio.to_thread(launch, n) for n in range(4)))

    assert asyncio.run(together()) == [wanted(n) for n in range(4)]


def test_ranks_that_simulate_between_their_launches() -> None:
    """The programs of the inner simulation and of the outer one run on greenlets of their own."""

    def outer(world: Any) -> list[Any]:
        return [main(world, 4), launch(world.rank), main(world, 5)]

    for seed in range(4):
        found = pkt.launch(outer, ranks=2, device="cpu", seed=seed)
        assert found == [[40 + rank, wanted(rank), 50 + rank] for rank in range(2)]


def test_a_search_and_a_launch_of_two_threads(switching: None) -> None:
    with ThreadPoolExecutor(2) as threads:
        searched = threads.submit(pkt.simulate, main, 2, 5, (3,))
        launched = [threads.submit(launch, n) for n in range(4)]
        assert searched.result().check().schedules == 5
        assert [one.result() for one in launched] == [wanted(n) for n in range(4)]


def test_a_rank_that_waits_for_a_launch_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for ever: the other thread's turn comes when the rank has returned."""
    monkeypatch.setattr(turns, "PATIENCE", 0.1)
    monkeypatch.setattr(turns, "_LOOK", 0.05)

    def outer(world: Any) -> Any:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(launch, 1).result()

    with pytest.raises(pkt.Unsupported, match=r"^pkt\.launch: found a simulation of thread 'MainThread' that has done"):
        pkt.launch(outer, ranks=1, device="cpu")


def test_a_child_forked_during_another_threads_simulation_can_simulate() -> None:
    inside, leave = threading.Event(), threading.Event()

    def slow(world: Any) -> None:
        inside.set()
        leave.wait(20)

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(pkt.launch, slow, 1, "cpu")
        inside.wait(20)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(writer, repr(launch(1)).encode())
            finally:
                os._exit(0)
        os.close(writer)
        said = os.read(reader, 1000).decode()
        os.waitpid(child, 0)
        os.close(reader)
        leave.set()
        running.result()
    assert said == repr(wanted(1))
