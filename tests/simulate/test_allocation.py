"""Memory of simulated ranks: it is freed, used again, too little, returned, or no longer there."""

from __future__ import annotations

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

import pkt
import pkt.language as pl
from pkt.errors import Closed, HeapFull, UseAfterFree
from tests.simulate.helpers import failures

from .test_host import SEEDS, barrier, launch

pytestmark = pytest.mark.machine


def test_freed_memory_is_reused() -> None:
    def main(world: Any) -> None:
        a = pkt.zeros(1024, name="a")
        b = pkt.ones(1024, name="b")
        at = a.data_ptr()
        a.free()
        with pytest.raises(UseAfterFree, match=r"rank \d: sum uses 'a' after it was freed at test_allocation.py:\d+"):
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
        with pytest.raises(UseAfterFree, match=r"uses 'x' after it was freed at test_allocation.py:\d+: free it later"):
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
