"""Cooperative launches: what does not fit, what a graph records, and memory for descriptors."""

import contextvars
from types import SimpleNamespace

import pytest
import triton
from triton.runtime import _allocation
from triton.runtime.errors import OutOfResources

from pkt.errors import GridTooLarge, Unsupported
from pkt.runtime.launch import launch


class Stream:
    """Stands for OneInFlight on a GPU."""

    capturing = False

    def follow(self):
        return self.capturing

    def handle(self):
        return 5


class Captured(Stream):
    capturing = True


def test_a_grid_that_cannot_be_resident_is_refused(monkeypatch):
    class Kernel:
        __name__ = "persistent"

        def run(self, *args, warmup, **options):
            assert (args, warmup, options) == (("x",), False, wanted)
            raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")

        def warmup(self, *args, **options):
            assert (args, options) == (("x",), wanted)
            return "compiled"

    class FakeWorld:
        rank, num_sms, streams = 2, 132, Stream()

    wanted = {"grid": (132, 2), "launch_cooperative_grid": True, "BLOCK": 4}
    monkeypatch.setattr(launch, "provide_scratch", lambda: None)
    monkeypatch.setattr(launch, "resident_per_sm", lambda compiled: {"compiled": 1}[compiled])
    with pytest.raises(GridTooLarge, match=r"rank 2: persistent: grid 264 > 132 resident programs \(132 SMs x 1\)"):
        launch.cooperative(FakeWorld, Kernel(), (132, 2), "x", BLOCK=4)


def test_a_program_that_no_sm_can_hold_is_refused(monkeypatch):
    class Kernel:
        __name__ = "wide"

        def run(self, *args, warmup, **options):
            raise OutOfResources(262176, 232448, "shared memory")

    class FakeWorld:
        rank, num_sms, streams = 2, 132, Stream()

    monkeypatch.setattr(launch, "provide_scratch", lambda: None)
    wanted = (
        r"rank 2: wide: found a program that needs 262176 of shared memory, wanted at most 232448: give smaller tiles"
    )
    with pytest.raises(Unsupported, match=wanted):
        launch.cooperative(FakeWorld, Kernel(), (132,), "x")


@pytest.mark.parametrize(("programs", "fits"), [(264, True), (265, False)])
def test_a_recorded_kernel_is_not_cooperative_but_fits(programs, fits, monkeypatch):
    said = []

    class Kernel:
        __name__ = "persistent"

        def run(self, *args, warmup, **options):
            said.append(options["launch_cooperative_grid"])
            return "compiled"

    copies = SimpleNamespace(uncouple=lambda: said.append("uncoupled"))

    class FakeWorld:
        rank, num_sms, streams, backend = 2, 132, Captured(), SimpleNamespace(copies=copies)

    monkeypatch.setattr(launch, "provide_scratch", lambda: None)
    monkeypatch.setattr(launch, "resident_per_sm", lambda compiled: {"compiled": 2}[compiled])
    if fits:
        assert launch.cooperative(FakeWorld, Kernel(), (programs,), "x") == "compiled"
        assert said == [True, "uncoupled"]
    else:
        with pytest.raises(GridTooLarge, match=r"rank 2: persistent: grid 265 > 264 resident programs \(132 SMs x 2\)"):
            launch.cooperative(FakeWorld, Kernel(), (programs,), "x")
        assert said == [True]


def test_a_kernel_is_repeated_from_the_third_launch_on(monkeypatch):
    said, prepared = [], []

    class Kernel:
        def run(self, *args, warmup, **options):
            said.append(("run", args))
            return "compiled"

    class FakeWorld:
        streams = Stream()

    def repeated(kernel, compiled, grid, args, named):
        prepared.append(args)
        assert (compiled, grid, named["BLOCK"]) == ("compiled", (8,), 4)
        return lambda now, stream: said.append(("repeat", now, stream)) or (compiled if now[0] == args[0] else None)

    monkeypatch.setattr(launch, "provide_scratch", lambda: None)
    monkeypatch.setattr(launch, "repeated", repeated)
    start = launch.cooperative_launch(FakeWorld, Kernel(), (8,), BLOCK=4)
    assert [start(x) for x in "aaaab"] == ["compiled"] * 5
    assert prepared == [("a",), ("b",)]
    repeats = [("repeat", ("a",), 5)] * 2 + [("repeat", ("b",), 5)]
    assert said == [("run", ("a",))] * 2 + repeats + [("run", ("b",))]


def test_a_launch_beside_is_repeated_for_the_same_numbers_and_follows_no_call(monkeypatch):
    said = []

    class Kernel:
        def run(self, *args, warmup, **options):
            said.append(("run", args, options))
            return "compiled"

    class FakeWorld:
        plans = {}
        streams = SimpleNamespace(handle=lambda: 5, follow=lambda: pytest.fail("ordered with the last call"))

    def repeated(kernel, compiled, grid, args, named):
        return lambda now, stream: said.append(("repeat", now, stream)) or (compiled if now[1:] == args[1:] else None)

    monkeypatch.setattr(launch, "provide_scratch", lambda: None)
    monkeypatch.setattr(launch, "repeated", repeated)
    kernel, grids = Kernel(), []

    def beside(*args, warps=4):
        return launch.beside(FakeWorld, kernel, lambda: grids.append(args) or (2 * args[1],), *args, num_warps=warps)

    calls = [("x", 3), ("x", 4), ("x", 5)] * 3
    for call in calls:
        assert beside(*call) == "compiled"
    runs = [("run", call, {"num_warps": 4, "grid": (2 * call[1],)}) for call in calls[:6]]
    assert said == runs + [("repeat", call, 5) for call in calls[6:]]
    assert grids == calls[:3], "a grid is worked out once"
    assert beside(*calls[0], warps=8) == "compiled"
    assert said[-1] == ("run", calls[0], {"num_warps": 8, "grid": (6,)})


def test_a_kernel_that_was_not_compiled_is_not_repeated(monkeypatch):
    """Triton's run returns None if a hook of the user takes over the compilation."""

    class Kernel:
        def run(self, *args, warmup, **options):
            return None

    class FakeWorld:
        streams = Stream()

    monkeypatch.setattr(launch, "provide_scratch", lambda: None)
    monkeypatch.setattr(launch, "repeated", lambda *_: pytest.fail("repeated"))
    start = launch.cooperative_launch(FakeWorld, Kernel(), (8,))
    assert [start("a") for _ in range(3)] == [None] * 3


def test_kernels_that_make_descriptors_get_memory_in_every_thread(monkeypatch):
    """Triton keeps the allocator in a context variable. An allocator that the user has set stays."""
    seen = []

    def in_new_context():
        launch.provide_scratch()
        seen.append(_allocation._allocator.get())
        triton.set_allocator(print)
        launch.provide_scratch()
        seen.append(_allocation._allocator.get())

    for _ in range(2):
        contextvars.Context().run(in_new_context)
    assert seen == [launch._scratch, print] * 2
    monkeypatch.delattr(_allocation, "_allocator")
    monkeypatch.setattr(triton, "set_allocator", seen.append)
    launch.provide_scratch()
    assert seen[-1] is launch._scratch
