"""Worlds called as on GPUs, on the fake driver: with streams, and with kernels that the driver counts.

A kernel does nothing but what `kernels` says, by its name. What is queued is done at once, on whatever stream, unless a
graph is recorded. So the ranks may be called one after the other where no kernel waits for a peer. An operator's new
tensors take memory that earlier ones have left, as torch's do on GPUs, so that a call comes again with its addresses.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from pkt.kernels.operator import operators
from pkt.kernels.shared import copies
from pkt.runtime.launch import replay
from pkt.runtime.launch.streams import OneInFlight

from .test_cuda import open_worlds

Do = Callable[..., None]
Of = Sequence[tuple[Sequence[int], torch.dtype]]
"""Shapes and dtypes of new tensors."""


class Stream:
    """A stream of torch's. Its events order nothing, because all work is done in the order in which it is queued, but
    they are calls of the driver."""

    device = "cuda:0"

    def __init__(self, handle: int, calls: Counter[str]) -> None:
        self.cuda_stream, self.capturing, self._calls = handle, False, calls

    def record_event(self) -> int:
        self._calls["event"] += 1
        return self._calls["event"]

    def wait_event(self, event: int) -> None:
        self._calls["event"] += 1

    def wait_stream(self, other: Stream) -> None:
        pass


class Cuda:
    """The part of torch.cuda that launches use, of one rank."""

    def __init__(self, calls: Counter[str]) -> None:
        self.calls, self.made = calls, 0
        self.recording = False  # by the driver, of a call that came again
        self.now = self.Stream()

    def current_stream(self, device: Any = None) -> Stream:
        return self.now

    def Stream(self, device: Any = None) -> Stream:
        self.made += 1
        return Stream(16 * self.made, self.calls)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def is_current_stream_capturing(self) -> bool:
        return self.now.capturing


class Rank:
    """What `main` of `eager_worlds` gets: the rank's world, its `Cuda`, and its fake driver."""

    def __init__(self, world: Any, cuda: Cuda) -> None:
        self.world, self.cuda, self.driver = world, cuda, world.backend.driver


def eager_worlds(
    size: int, main: Callable[[Rank], Any], kernels: Mapping[str, Do] | None = None, heap: int = 1 << 24
) -> list[Any]:
    """main(rank) on so many ranks, each a thread; per rank its value or exception. kernels: kernel name -> do(world,
    *args), done when the kernel runs."""
    ranks: dict[int, Cuda] = {}
    known = dict(kernels or {})

    def launched(world: Any, kernel: Any, grid: Any, **options: Any) -> Callable[..., None]:
        driver, do = world.backend.driver, known.get(kernel.__name__)

        def start(*args: Any) -> None:
            if world.streams.follow():
                world.backend.copies.uncouple()
            driver.queue("launch", (lambda: do(world, *args)) if do else _nothing)

        return start

    def beside(world: Any, kernel: Any, grid: Any, **options: Any) -> Callable[..., None]:
        driver, do = world.backend.driver, known.get(kernel.__name__)
        return lambda *args: driver.queue("launch", (lambda: do(world, *args)) if do else _nothing)

    def making(of: Of, device: torch.device) -> Callable[[], list[torch.Tensor]]:
        make = recycling(of, device)

        def made() -> list[torch.Tensor]:
            assert not ranks[threading.get_ident()].recording, "the memory would stay with the graph"
            return make()

        return made

    def opened(world: Any) -> Any:
        cuda = ranks[threading.get_ident()] = Cuda(world.backend.driver.calls)
        # The fake driver's memory is this process's own.
        world.torch_device = torch.device("cpu")
        world.streams = OneInFlight(torch.device("cuda", 0), lambda: cuda.Stream(0), cuda)
        record = world.backend.driver.record

        def recorded(run: Callable[[], Any]) -> int:
            cuda.now.capturing, stream, cuda.recording = True, cuda.now, True
            try:
                return record(run)
            finally:
                stream.capturing = cuda.recording = False

        world.backend.driver.record = recorded
        return main(Rank(world, cuda))

    def current(device: Any = None) -> Stream:
        return ranks[threading.get_ident()].now

    def on_a_side(side: copies.Side, world: Any, name: str = "copies") -> None:
        side.stream = world.keep(("side", name), ranks[threading.get_ident()].Stream)

    def entered(stream: Stream) -> contextlib.AbstractContextManager[None]:
        return ranks[threading.get_ident()].stream(stream)

    operators()  # loads them
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            for made, by in (("cooperative_launch", launched), ("beside_launch", beside), ("making", making)):
                if name.startswith("pkt.") and hasattr(module, made):
                    stack.enter_context(mock.patch.object(module, made, by))
        stack.enter_context(mock.patch.object(copies.Side, "__init__", on_a_side))
        stack.enter_context(mock.patch.object(torch.cuda, "current_stream", current))
        stack.enter_context(mock.patch.object(torch.cuda, "stream", entered))
        stack.enter_context(mock.patch.object(replay, "KNOWN", True))
        return open_worlds(size, opened, heap)[0]


def recycling(of: Of, device: torch.device) -> Callable[[], list[torch.Tensor]]:
    """`pkt.kernels.declaration.making`, in memory of tensors that nobody has any more, where there is some."""
    blocks: list[list[torch.Tensor]] = [[] for _ in of]

    def free(block: torch.Tensor) -> bool:
        return torch._C._storage_Use_Count(block.untyped_storage()._cdata) == 2  # by `block`, and by this question

    def make() -> list[torch.Tensor]:
        found = []
        for (shape, dtype), before in zip(of, blocks):
            block = next(filter(free, before), None)
            if block is None:
                block = torch.empty(tuple(shape), dtype=dtype, device=device)
                before.append(block)
            found.append(block.detach())
        return found

    return make


def _nothing() -> None:
    """A kernel of which only the launch counts."""
