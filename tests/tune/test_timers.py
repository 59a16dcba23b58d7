"""Timing and compiling of candidates, tested without a GPU by the calls to torch.cuda and Triton."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from pkt.errors import Unsupported
from pkt.model.config import Config
from pkt.runtime.gpu.driver import CudaDriver
from pkt.runtime.launch import replay
from pkt.tune import RecordedTimer, timer_of, timers
from pkt.tune.autotune import autotune
from pkt.tune.compiling import _Later, compile_all
from pkt.tune.target import Call, Target
from pkt.tune.timers import CudaTimer
from tests.runtime.conftest import run as in_threads


def test_every_repeat_is_flushed_gated_and_timed(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = len(log)
            log.append("event")

        def elapsed_time(self, end):
            assert end.at == self.at + 2
            return 2.0  # ms

    class Gate:
        def __getitem__(self, grid):
            return lambda *args, **options: log.append("gate")

    def keep(key, make):
        return SimpleNamespace(zero_=lambda: log.append("flush"))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"), raising=False)
    monkeypatch.setattr(timers, "gate_kernel", Gate())
    world = SimpleNamespace(
        torch_device="cuda:0", device=None, keep=keep, synchronize=lambda: log.append("synchronize")
    )
    timer = CudaTimer(world)
    assert timer.first(Config(), lambda: log.append("run") or "result") == "result"
    assert log == ["run", "synchronize"], "once, for whoever checks the result"
    repeat, pauses = ["flush", "gate", "event", "run", "event"], []
    for _ in range(2):  # each call begins with a run that may make workspaces
        log.clear()
        pauses.clear()
        assert timer.times(Config(), lambda: log.append("run") or pauses.append(replay._pauses), 3) == [0.002] * 3
        assert log == ["run", "synchronize", "gate", "sleep", *repeat * 3, "synchronize"]
        assert (pauses, replay._pauses) == ([1] * 4, 0), "nothing is recorded between two events"


def test_a_record_may_be_a_table_or_a_function():
    table = RecordedTimer({Config(n=1): 2.0})
    assert table.times(Config(n=1), lambda: None, 3) == [2.0] * 3
    with pytest.raises(KeyError):
        table.times(Config(n=2), lambda: None, 3)
    assert RecordedTimer(lambda config: config["n"] / 2).times(Config(n=3), lambda: None, 1) == [1.5]


def test_a_world_without_a_clock_needs_a_timer():
    def main(world):
        with pytest.raises(Unsupported, match="give a timer="):
            timer_of(world)

    in_threads(1, main)


class Driver:
    """As much of a driver as compiling needs."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


@triton.jit
def double_kernel(x_ptr, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 100, "too wide")
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) * 2, mask=offs < n)


def call_of(fn, args, grid=None):
    world = SimpleNamespace(scratch=contextlib.nullcontext)
    return Call(Target(fn, "tune"), "double", grid, args, {}, None, (), world)


def test_candidates_are_compiled_together_and_none_runs(monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())  # a launch would ask it for more
    call = call_of(double_kernel, (torch.zeros(10), 10), (1,))
    configs = [Config(BLOCK=16, num_warps=4), Config(BLOCK=128, num_warps=4), Config(BLOCK=24), Config(BLOCK=16, x=1)]
    for _ in range(2):  # compiled, and found compiled
        failures = call.compile(configs, 2, 0.5)
        assert sorted(failures) == [1, 2, 3]
        assert "too wide" in failures[1]
        assert "power of 2" in failures[2]
        assert "x" in failures[3]


def test_kernels_that_a_function_would_launch_are_compiled(monkeypatch):
    """All of them, in the order of the configs. Nothing is computed, so an error of the host code is no failure."""
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    called = []

    def twice(x, block, wide):
        called.append(block)
        double_kernel[(1,)](x, 10, block)
        double_kernel[(1,)](x, 11, wide, num_warps=8)
        assert x[0] == 4

    call = call_of(twice, (torch.ones(10),))
    configs = [Config(block=32, wide=64), Config(block=32, wide=128), Config(block=24, wide=64)]
    failures = call.compile(configs, 2, 0.0)
    assert called == [32, 32, 24]
    assert sorted(failures) == [1, 2]
    assert "too wide" in failures[1]
    assert triton.runtime.jit.JITFunction.run.__module__ == "triton.runtime.jit", "launches are not restored"


def test_autotuned_kernels_inside_are_compiled_and_choose_later(monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    theirs = [triton.Config({"BLOCK": block}) for block in (16, 24)]
    triton_tuned = triton.autotune(theirs, key=["n"], do_bench=None)(double_kernel)
    ours = autotune([{"BLOCK": 128}, {"BLOCK": 16}], key=["n"], timer=None)(double_kernel)
    x = torch.ones(10)

    def inside(kernel):
        (triton_tuned, ours)[kernel][(1,)](x, 10)

    def main(world):
        return call_of(inside, ()).compile([Config(kernel=0), Config(kernel=1)], 2, 0.0)

    (failures,) = in_threads(1, main)
    assert "power of 2" in failures[0], "Triton's second config"
    assert "too wide" in failures[1], "our first config"
    assert triton_tuned.cache == {}
    assert ours.searches == {}


def test_other_threads_launch_meanwhile(monkeypatch):
    launched = []
    monkeypatch.setattr(
        triton.runtime.jit.JITFunction, "run", lambda self, *args, warmup, **named: launched.append(warmup)
    )

    def from_a_thread():
        thread = threading.Thread(target=lambda: double_kernel[(1,)](None, 0))
        thread.start()
        thread.join()
        double_kernel[(1,)](None, 0)

    compile_all([from_a_thread], 1, 0.0)
    assert launched == [False, True]


def test_nothing_is_held_for_a_kernel_that_only_compiles(monkeypatch):
    """The reduce-scatter's copies wait for its kernel. A stream that waits for a kernel that never runs hangs."""
    queued = []
    for name in ("copy", "hold"):
        monkeypatch.setattr(CudaDriver, name, lambda self, *args, name=name: queued.append((name, args)))

    def call():
        driver = object.__new__(CudaDriver)
        driver.hold(1 << 40, 7, 0)
        driver.copy(1 << 40, 1 << 30, (1, 1, 4), (4, 4), (4, 4), 0)

    def elsewhere():
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    compile_all([call], 1, 0.0)
    assert queued == []
    compile_all([elsewhere], 1, 0.0)
    call()
    assert [name for name, _ in queued] == ["hold", "copy"] * 2


def test_each_rank_begins_to_compile_elsewhere():
    def order(begin):
        later, done = _Later(), []
        for n in range(5):
            later.submit(done.append, n)
        later.run(1, begin)
        return done

    assert [order(rank / 3) for rank in range(3)] == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 0], [3, 4, 0, 1, 2]]
