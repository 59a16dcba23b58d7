"""A call of several kernels and copies as one call of the driver.

A form that copies queues a dozen things on two streams. An unfused form queues a product, a collective and what follows
them. Each costs the host 1 to 10 us. Two calls of a plan differ only in the addresses of their tensors, and a loop uses
the same addresses again and again. So pkt records a repeated call as a CUDA graph, one for each set of addresses, and
replays it from then on. A replay is right wherever a user's graph is: the device counts the launches.

A recorded copy refers to the allocation at its address. When torch gives its cached memory back, as torch.cuda.graph
and torch.cuda.empty_cache do, other memory may come to the same address, and a replay would end in a launch failure. So
the key has the driver's number of each allocation outside the symmetric heap.

Calls with new addresses, and calls inside a user's capture, are made one by one. To change the addresses of a graph
would take one driver call for each node, so a graph is never changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from pkt.runtime.launch.relaunch import KNOWN, hooked
from pkt.runtime.world import World

CALLS = 2
"""With the same addresses before they are recorded. `relaunch` needs two to repeat a launch."""
MOST_GRAPHS = 64
"""Of a plan: more layers than that in a loop, each with tensors of its own, are rare."""
STALE = 16 * MOST_GRAPHS
"""Calls of a plan after which a graph that none of them needed makes room for another. Were it fewer than the graphs of
a loop, each would be dropped before it is needed again."""
MOST_COUNTED = 1024
"""Sets of addresses whose calls are counted."""

Launch = Callable[..., torch.Tensor]
Making = Callable[[], list[torch.Tensor]]
"""Makes tensors, which may have any values."""
Key = tuple[Hashable, ...]
"""The addresses and allocations of a call's tensors, and the settings that it depends on."""


class _Graph:
    """The graph of a call. result: which tensors it returns. used: the number of the last call that replayed it."""

    __slots__ = ("replay", "result", "used")

    def __init__(self, replay: Callable[[int], None], result: int | tuple[int, ...]) -> None:
        self.replay, self.result, self.used = replay, result, 0


_pauses = 0


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Inside, calls are made one by one, and none is recorded, which takes as long as many calls: where calls are few
    and are timed."""
    global _pauses
    _pauses += 1
    try:
        yield
    finally:
        _pauses -= 1


def replayed(
    world: World, launch: Launch, settings: Callable[[], Hashable] | None = None, memory: Making | None = None
) -> Launch:
    """`launch`, for tensors of the same facts, which returns one or some of them: recorded where it is called again
    with the same addresses. It must depend on nothing else but `settings()`, and do nothing on the host but queue
    work. memory: makes tensors that a launch needs for itself, new in each call, which it gets behind the others."""
    streams = world.streams
    if streams is None or not KNOWN:
        return launch if memory is None else lambda *tensors: launch(*tensors, *memory())
    engines = world.backend.copies
    assert engines is not None, "only GPUs have streams"
    allocation_of = engines.allocation
    heap = range(world.backend.base, world.backend.base + world.backend.capacity)
    graphs: dict[Key, _Graph] = {}
    counted: dict[Key, int] = {}
    calls = 0
    crowded = 0  # until this call no graph is stale

    def record(tensors: tuple[Any, ...]) -> _Graph | None:
        found: list[Any] = []
        with streams.recording() as free:
            if not free:
                return None
            recorded = engines.record(lambda: found.append(launch(*tensors)))
        # From the right: `out` comes last, and may be another operand, too.
        several = found[0] if isinstance(found[0], tuple) else (found[0],)
        places = [next(i for i in reversed(range(len(tensors))) if tensors[i] is one) for one in several]
        return _Graph(recorded.replay, tuple(places) if isinstance(found[0], tuple) else places[0])

    def due(key: Key) -> bool:
        """Whether these calls are to be recorded; makes room."""
        nonlocal crowded
        times = counted.get(key, 0)
        if times < CALLS:
            if len(counted) == MOST_COUNTED:
                counted.clear()
            counted[key] = times + 1
            return False
        if len(graphs) == MOST_GRAPHS:
            if calls < crowded:
                return False
            oldest = min(graphs, key=lambda at: graphs[at].used)
            crowded = graphs[oldest].used + STALE
            if calls < crowded:
                return False
            del graphs[oldest]
        return True

    def run(*tensors: Any) -> Any:
        nonlocal calls
        if memory is not None:
            tensors = (*tensors, *memory())
        stream = streams.eager()
        if stream is None or _pauses or hooked():
            return launch(*tensors)
        calls += 1
        found: list[Hashable] = []
        for tensor in tensors:
            at = 0 if tensor is None else tensor.data_ptr()
            found.append(at)
            if at and at not in heap:
                allocation = allocation_of(at)
                if allocation is None:
                    return launch(*tensors)
                found.append(allocation)
        if settings is not None:
            found.append(settings())
        key = tuple(found)
        graph = graphs.get(key)
        if graph is None:
            graph = record(tensors) if due(key) else None
            if graph is None:
                return launch(*tensors)
            del counted[key]
            graphs[key] = graph
        graph.used = calls
        graph.replay(stream)
        if isinstance(graph.result, int):
            return tensors[graph.result]
        return tuple(tensors[i] for i in graph.result)

    return run
