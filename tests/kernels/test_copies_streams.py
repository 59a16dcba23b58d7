"""Copies beside the current stream: the edges between streams are all that their operators rely on."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.all_gather_matmul import all_gather_matmul
from pkt.kernels.all_gather_matmul import plain as _all_gather_matmul
from pkt.kernels.all_reduce import all_reduce
from pkt.kernels.all_to_all import all_to_all
from pkt.kernels.all_to_all import reference as exchanged
from pkt.kernels.reduce_scatter import reduce_scatter
from pkt.kernels.shared import copies as _copies
from pkt.kernels.shared import copy_reduce as _copy_reduce
from pkt.kernels.ulysses_attention import groups as _groups
from pkt.kernels.ulysses_attention import ulysses_attention
from tests.conformance.inputs import seed_of, whole

from .helpers import on_ranks


class Queue:
    """A rank's work on its streams. `run` does it in some order that the edges between the streams allow."""

    def __init__(self) -> None:
        self.done: list[tuple[Callable[[], Any], str, set[int]]] = []
        self.stream = "current"
        self.after: defaultdict[str, set[int]] = defaultdict(set)  # what the next work on a stream waits for

    def add(self, do: Callable[[], Any]) -> None:
        self.done.append((do, self.stream, self.after[self.stream]))
        self.after[self.stream] = {len(self.done) - 1}

    def run(self, prefer: Callable[[str], float]) -> None:
        todo = dict(enumerate(self.done))
        while todo:
            ready = [i for i, (_, _, after) in todo.items() if not after & todo.keys()]
            todo.pop(min(ready, key=lambda i: prefer(self.done[i][1])))[0]()
        self.__init__()  # type: ignore[misc]


class Deferred:
    """_copies.Side over a Queue; `lost`: the edge that it forgets."""

    lost = ""

    def __init__(self, world: Any, name: str = "side") -> None:
        self.queue, self.name = world.keep("queue", Queue), name

    def here(self) -> set[int]:
        return set(self.queue.after[self.queue.stream])

    def follow(self, here: set[int] | None = None) -> None:
        if self.lost != "behind":
            self.queue.after[self.name] |= self.here() if here is None else here

    @contextlib.contextmanager
    def behind(self, here: set[int] | None = None) -> Iterator[None]:
        self.follow(here)
        with self.current():
            yield

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        before, self.queue.stream = self.queue.stream, self.name
        yield
        self.queue.stream = before

    def mark(self) -> set[int]:
        return set(self.queue.after[self.name])

    def reach(self, mark: set[int]) -> None:
        if self.lost != "reach":
            self.queue.after[self.queue.stream] |= mark


def exchange(world: Any, seed: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    x = whole((3, 2 * world.size), seed[world.rank])
    out = world.keep("out", lambda: pkt.empty(3 * world.size, 2))
    wanted = exchanged(world.rank, [whole((3, 2 * world.size), s) for s in seed], 1, 0)
    return all_to_all(x, out, scatter=1, gather=0, mode="copy"), wanted


def scatter(world: Any, seed: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    x = whole((8, 4 * world.size), seed[world.rank])
    total = sum(whole((8, 4 * world.size), s) for s in seed).chunk(world.size, 1)[world.rank]
    out = world.keep("out", lambda: torch.empty(8, 4))
    return reduce_scatter(x, out, dim=1, mode="copy", block=8, chunks=4), total


def reduce(world: Any, seed: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    out = world.keep("out", lambda: pkt.empty(600))
    out.copy_(whole((600,), seed[world.rank]))
    return all_reduce(out, mode="copy", block=64, chunks=3), sum(whole((600,), s) for s in seed)


def multiply(world: Any, seed: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = world.keep("operands", lambda: (torch.empty(40, 16), torch.eye(16)))
    a.copy_(whole((40, 16), seed[world.rank]))
    out = all_gather_matmul(a, b, mode="copy", tiles=(16, 16, 16), push_rows=1)
    world.keep("queue", Queue).add(lambda: a.fill_(float("nan")))  # the caller overwrites a next
    return out, torch.cat([whole((40, 16), s) for s in seed])


def attend(world: Any, seed: list[int], sharing: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """With q + v in the place of attention, of two heads of keys on a rank, and as many groups as heads of queries.
    What comes before the call and after it is queued, too."""

    def make() -> list[torch.Tensor]:
        return [torch.empty(1, 3, n * world.size, 4) for n in (2 * sharing, 2, 2 * sharing)]

    q, v, got = world.keep("operands", make)
    queue, out = world.keep("queue", Queue), world.keep("out", lambda: pkt.empty(q.shape))
    mine = [whole(x.shape, seed[world.rank]) for x in (q, v)]
    queue.add(lambda: [x.copy_(y) for x, y in zip((q, v), mine)])
    ulysses_attention(q, v, v, out, mode="copy", heads=1)
    queue.add(lambda: [got.copy_(out.plain()), *(x.fill_(float("nan")) for x in (q, v))])
    return got, mine[0] + mine[1].repeat_interleave(sharing, 2)


def attend_sharing(world: Any, seed: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Three groups share a head of keys. The second head of keys comes with a group of the second stream."""
    return attend(world, seed, 3)


def added(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: Any) -> torch.Tensor:
    found = torch.full(q.shape, float("nan"))
    pkt.init().keep("queue", Queue).add(lambda: torch.add(q, v, out=found))
    return found


ORDERS: dict[str, Callable[[str, int], float]] = {
    "the current stream first": lambda stream, rank: stream == "side",
    "the side first": lambda stream, rank: stream == "current",
    "any": lambda stream, rank: random.random(),
    "the side first, but on rank 0": lambda stream, rank: (stream == "side") == (rank == 0),
    "the side, then the second": lambda stream, rank: ("side", "own", "groups", "current").index(stream),
    "the side, then the current": lambda stream, rank: ("side", "current", "groups", "own").index(stream),
}


def in_order(monkeypatch: pytest.MonkeyPatch, call: Callable, order: str, lost: str = "") -> None:
    def later(start: Callable) -> Callable:
        return lambda world, *args, **options: (
            lambda *given: world.keep("queue", Queue).add(lambda: start(world, *args, **options)(*given))
        )

    monkeypatch.setattr(Deferred, "lost", lost)
    monkeypatch.setattr(_copies, "Side", Deferred)
    monkeypatch.setattr(_copies, "beside_launch", later(_copies.beside_launch))
    monkeypatch.setattr(_groups.Local, "planned", lambda *_: added)
    monkeypatch.setattr(_groups, "beside_launch", later(_groups.beside_launch))
    for module in (_copies, _copy_reduce, _all_gather_matmul):
        monkeypatch.setattr(module, "cooperative_launch", later(module.cooperative_launch))
    random.seed(order)

    def run(world: Any) -> None:
        for launch in range(3):
            got, wanted = call(world, [seed_of(launch, rank, 0) for rank in range(world.size)])
            world.keep("queue", Queue).run(lambda stream: ORDERS[order](stream, world.rank))
            assert torch.equal(torch.as_tensor(got), wanted), launch

    on_ranks(3, run, seed=1)


TWO = list(ORDERS)[:4]
"""Of the current stream and the side alone."""


@pytest.mark.parametrize("order", TWO)
@pytest.mark.parametrize("call", [exchange, scatter, reduce])
def test_any_order_that_the_edges_allow(call: Callable, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_order(monkeypatch, call, order)


@pytest.mark.parametrize("order", ["the side first", "the side first, but on rank 0"])
@pytest.mark.parametrize("call", [multiply])
def test_computing_beside_copies(call: Callable, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels wait for the peers' copies. In this model a kernel that is queued first ends first, so not all ranks may
    compute first."""
    in_order(monkeypatch, call, order)


@pytest.mark.parametrize("order", [order for order in ORDERS if order.startswith("the side")])
@pytest.mark.parametrize("call", [attend, attend_sharing])
def test_groups_on_two_streams(call: Callable, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order the streams are at work."""
    in_order(monkeypatch, call, order)


def test_groups_take_turns_on_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits and attends. A third one puts the rank's own results in place."""

    def noted(world: Any, seed: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        found = attend_sharing(world, seed)
        streams = [stream for _, stream, _ in world.keep("queue", Queue).done]
        assert streams.count("own") == 6
        turns = [
            (stream, len(list(work)))
            for stream, work in itertools.groupby(x for x in streams if x not in ("side", "own"))
        ]
        # The operands and own parts of q, k and v come before, the meeting and `got` behind.
        assert turns == [("current", 1 + 3 + 2), *[("groups", 2), ("current", 2)] * 2, ("groups", 2), ("current", 2)]
        return found

    in_order(monkeypatch, noted, "the side first")


def test_a_group_does_not_wait_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the current stream's work the second group needs the operands and own parts of q, k and v alone."""

    def noted(world: Any, seed: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        found = attend(world, seed)
        done = world.keep("queue", Queue).done
        needed = {max(i for i, (_, stream, _) in enumerate(done) if stream == "groups")}
        for i in reversed(range(len(done))):
            if i in needed:
                needed |= done[i][2]
        current = [i for i, (_, stream, _) in enumerate(done) if stream == "current"]
        assert needed & {*current} == {*current[:4]}
        return found

    in_order(monkeypatch, noted, "the side first")


EARLY = {"behind": "the side first", "reach": "the current stream first"}


@pytest.mark.parametrize("lost", ["behind", "reach"])
@pytest.mark.parametrize("call", [exchange, scatter, reduce, multiply, attend])
def test_every_edge_is_needed(call: Callable, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order = "the side first, but on rank 0" if call in (multiply, attend) and lost == "reach" else EARLY[lost]
    with pytest.raises((pkt.PktError, AssertionError)):
        in_order(monkeypatch, call, order, lost)


def test_no_stream_of_torch_s_is_that_of_the_copies(monkeypatch):
    """torch lends each of its 32 streams to many: after 32 new ones comes the first again. On the stream on which a
    user computes, copies that wait for a kernel would keep it from running."""

    class Engines:
        made = 0

        def stream(self):
            self.made += 1
            return SimpleNamespace(number=self.made)

    def world():
        return SimpleNamespace(
            torch_device=torch.device("cuda", 0), lasting={}, backend=SimpleNamespace(copies=engines)
        )

    engines = Engines()
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: pytest.fail("one of torch's"))
    first, other = world(), world()
    streams = [_copies.Side(one).stream.number for one in (first, other, first)]
    assert streams == [1, 2, 1], "one for each world, whatever scopes are open"
    assert [_copies.Side(first, "groups").stream.number for _ in range(2)] == [3, 3], "and for each name"
