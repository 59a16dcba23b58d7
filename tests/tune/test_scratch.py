"""Candidates whose workspaces do not fit into the heap together: one exists at a time, and none is made while timed."""

import contextlib
import random
from functools import partial

import pytest
import torch
import triton

import pkt
from pkt.model.config import Config
from pkt.tune import target, timers, tune
from tests.runtime.conftest import CAPACITY
from tests.runtime.conftest import run as in_threads
from tests.runtime.forked import HEAP, in_worlds

from .helpers import Rough, candidates
from .test_timers import Driver, double_kernel

COUNT = 6


def operator(world, n):
    """Like an operator: it keeps an inbox for each setting."""

    def make():
        return pkt.empty(HEAP // 2, dtype=torch.uint8, name=f"inbox {n}", world=world), pkt.signals(4, world=world)

    return world.keep(("operator", n), make)


class Running(Rough):
    """Runs its candidates, and asserts that none allocates while it is timed."""

    def times(self, config, run, repeats):
        run()
        before = self.world.heap.allocations
        for _ in range(repeats):
            run()
        assert self.world.heap.allocations == before, "an allocation was timed"
        return super().times(config, run, repeats)


def searched(world, heap_scope=True):
    """Tune, and call the winner. Returns each candidate's reason to be dropped and number of times, the most inboxes
    that lived at once, and the bytes that were lost."""
    with pytest.MonkeyPatch.context() as patch:
        if not heap_scope:
            patch.setattr(target.Call, "scope", lambda call: contextlib.nullcontext())
        before, live = world.heap.ledger.free_bytes, []
        timer = partial(Running, seconds=lambda n: 1.0 + n / 10, noise=0.3, then=lambda *_: live.append(inboxes(world)))
        found = tune(operator, world, configs=candidates(COUNT), timer=timer)
        lost = before - world.heap.ledger.free_bytes
    if not lost:
        operator(world, **found.best)
        assert inboxes(world) == 1
    return [c.dropped for c in found.candidates], [len(c.times) for c in found.candidates], max(live), lost


def inboxes(world):
    return sum(a.block.name.startswith("inbox") for a in world.heap.live.values())


def test_all_are_measured_where_two_do_not_fit():
    ends = in_worlds(2, searched)
    assert not [end.error for end in ends if end.error]
    first, second = (end.value for end in ends)
    assert first == second
    dropped, measured, most, lost = first
    assert dropped == [""] * COUNT
    assert min(measured) >= 3
    assert max(measured) > 3, "no candidate was measured again"
    assert (most, lost) == (1, 0)


def test_without_scopes_late_ones_are_dropped():
    """Without scopes the test before this one fails."""
    (end,) = in_worlds(1, partial(searched, heap_scope=False))
    dropped, _, _, lost = end.value
    assert ["heap full" in why for why in dropped] == [False] + [True] * (COUNT - 1)
    assert lost


def test_a_candidate_that_fails_on_one_rank_leaves_nothing():
    def fails(world, n):
        operator(world, n)
        if (world.rank, n) in ((0, 2), (1, 3)):
            raise ZeroDivisionError

    def main(world):
        before = world.heap.ledger.free_bytes
        found = tune(fails, world, configs=candidates(COUNT), timer=Running)
        dropped = {c.config["n"]: c.dropped for c in found.candidates if c.dropped}
        return dropped, before - world.heap.ledger.free_bytes

    wanted = {2: "rank 0: ZeroDivisionError", 3: "rank 1: ZeroDivisionError"}
    ends = in_worlds(2, main)
    assert [end.value for end in ends] == [(wanted, 0)] * 2, ends


def test_compiling_keeps_one_workspace_at_a_time(monkeypatch):
    """The host code of every candidate of a batch is called before any runs."""
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())

    def compiled(world, block, n):
        operator(world, n)
        double_kernel[(1,)](torch.zeros(10), 10, block)

    def main(world):
        target_of = target.Target(compiled, "tune")
        call = target.Call(target_of, "compiled", None, (world,), {}, None, (), world)
        before = world.heap.ledger.free_bytes
        configs = [Config(block=16, n=0), Config(block=128, n=1), Config(block=16, n=2)]
        failures = call.compile(configs, 1, 0.0)
        return list(failures), before - world.heap.ledger.free_bytes

    assert in_threads(1, main) == [([1], 0)]


def test_no_allocation_falls_into_a_time(monkeypatch):
    """The timer of GPUs, on a fake GPU: a function that is queued behind the sleep allocates nothing."""
    events, asleep = random.Random(0), []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def elapsed_time(self, end):
            return events.uniform(1, 2)

    class Gate:
        def __getitem__(self, grid):
            return lambda *args, **options: None

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: asleep.append(cycles), raising=False)
    monkeypatch.setattr(timers, "gate_kernel", Gate())
    monkeypatch.setattr(timers, "FLUSH", 64)
    monkeypatch.setattr(timers.CudaTimer, "threads", 0)

    def main(world):
        def small(world, n):
            made = []
            world.keep(("small", n), lambda: made.append(pkt.empty(CAPACITY // 2, dtype=torch.uint8)))
            assert not (made and asleep), "an allocation was timed"

        synchronize = world.synchronize
        monkeypatch.setattr(world, "synchronize", lambda: (synchronize(), asleep.clear()))
        before = world.heap.ledger.free_bytes
        found = tune(small, world, configs=candidates(COUNT), timer=timers.CudaTimer)
        gate = before - world.heap.ledger.free_bytes
        return [c.dropped for c in found.candidates], max(len(c.times) for c in found.candidates), gate

    ((dropped, most, gate),) = in_threads(1, main)
    assert dropped == [""] * COUNT
    assert most > 3
    assert 0 < gate < 8192, "the timer's own counters stay"


def test_operators_in_the_simulator():
    """Each choice of tiles keeps a sum of 64 KiB, in a heap of 128 KiB."""

    def main(world):
        torch.manual_seed(world.rank)
        a, b = torch.randn(64, 16), torch.randn(16, 256)
        wanted = sum(world.all_gather_object(a @ b))

        def product(world, block_m, block_n):
            return pkt.matmul_all_reduce(a, b, world=world, tiles=(block_m, block_n, 16), mode="lcsc")

        def right(arguments, result):
            return torch.allclose(result, wanted, atol=1e-3)

        before = world.heap.ledger.free_bytes
        configs = pkt.space(block_m=[16, 32], block_n=[64, 128])
        found = tune(product, world, configs=configs, check=right)
        return [c.dropped for c in found.candidates], before - world.heap.ledger.free_bytes

    first, second = pkt.launch(main, 2, "cpu", heap=1 << 17)
    assert first == second
    assert first == ([""] * 4, 0)
