"""Copies by copy engines: where boxes go, and that the edges between streams are all that their operators rely on."""

from __future__ import annotations

import contextlib
import importlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels import _copies, _copy_all_gather_matmul, _copy_reduce
from pkt.kernels.all_gather import all_gather
from pkt.kernels.all_gather_matmul import all_gather_matmul
from pkt.kernels.all_reduce import all_reduce
from pkt.kernels.all_to_all import all_to_all
from pkt.kernels.all_to_all import reference as exchanged
from pkt.kernels.reduce_scatter import reduce_scatter
from tests.runtime.test_cuda import open_worlds

from .cases import seeds, values
from .helpers import on_ranks

# What is cut out of a contiguous tensor of 3 x 4 x 5 x 6, and how many copies it takes.
VIEWS: list[tuple[Callable[[torch.Tensor], torch.Tensor], int]] = [
    (lambda t: t.view(-1)[7:100], 1),
    (lambda t: t[:, :, 1:2, :4].flatten(0, 2), 1),
    (lambda t: t[1, 1:3, :, 2:], 1),
    (lambda t: t[:, 2, 1:4, 1:], 1),
    (lambda t: t[:, 2:3, 3], 1),
    (lambda t: t[2:, 1, 4:, 3:4][0], 1),
    (lambda t: t[:0, 0], 0),
]


@pytest.mark.parametrize(("cut", "copies"), VIEWS)
def test_every_element_goes_to_its_place(cut: Callable, copies: int) -> None:
    """Through the addresses that a driver is given."""

    def main(world: Any) -> None:
        x, out = (pkt.zeros(3, 4, 5, 6, dtype=torch.int16, world=world) for _ in range(2))
        wide = torch.zeros(3, 4, 5, 6, dtype=torch.int16)
        x.copy_(torch.arange(360).reshape(x.shape) + 1000 * world.rank)
        world.barrier()
        peer, like = (world.rank + 1) % world.size, _copies.layout(3, 4, 5, 6)
        moved = _copies.boxes(peer, cut(like), cut(like), 2)
        assert len(moved) == copies
        _copies.send(world, moved, out, x, 1)
        world.barrier()
        cut(wide)[...] = cut(torch.arange(360).reshape(x.shape) + 1000 * ((world.rank - 1) % world.size))
        assert torch.equal(out.plain(), wide)
        assert world.backend.driver.calls["copy"] == copies

    assert open_worlds(3, main)[0] == [None] * 3


def test_a_launch_is_counted_and_what_it_counts_begins_at_zero() -> None:
    """By the kernel that all ranks come to first: not before all of them are there."""

    def main(world: Any) -> None:
        counters, bar = pkt.signals(6), pkt.signals(2)
        for launch in (1, 2, 3):
            counters[0], counters[2:] = 9, 7
            world.barrier()
            _copies.begin_kernel[(1,)](counters[1:], bar, 3, world.device)
            assert counters.tolist() == [9, launch, 0, 0, 0, 7]

    for seed in range(4):
        on_ranks(3, main, seed=seed)


SIDE = 77


def on_two_streams(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[str, str, int]]]:
    """`_copies.Side` with streams of CUDA's that only write down, by thread, which event is recorded and waited for."""
    by_thread: dict[int, list[tuple[str, str, int]]] = defaultdict(list)

    class Stream:
        device = "cuda:0"

        def __init__(self, name: str, handle: int) -> None:
            self.name, self.cuda_stream = name, handle

        def record_event(self) -> int:
            written = by_thread[get_ident()]
            written.append((self.name, "records", 1 + sum(what == "records" for _, what, _ in written)))
            return written[-1][2]

        def wait_event(self, event: int) -> None:
            by_thread[get_ident()].append((self.name, "waits for", event))

    current, side = Stream("current", 5), Stream("side", SIDE)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(_copies.Side, "__init__", lambda self, world: setattr(self, "stream", side))
    return by_thread


EDGES = [("current", "records", 1), ("side", "waits for", 1), ("side", "records", 2), ("current", "waits for", 2)]


def test_rows_go_to_every_peer_and_behind_them_the_number_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the driver, in the order of its calls."""

    def begin(world: Any, *_: Any, **options: Any) -> Callable:
        def start(number: torch.Tensor, bar: torch.Tensor, zeros: int, device: Any) -> None:
            world.barrier()
            number.add_(1)
            assert not zeros

        return start

    monkeypatch.setattr(_copies, "cooperative_launch", begin)
    events = on_two_streams(monkeypatch)

    def main(world: Any) -> None:
        m, k, step, copied = 5, 6, 2, []
        inbox, counters, send = _copies.gathering(world, m, k, torch.int16, step)
        inbox.fill_(0)
        copy = world.backend.driver.copy
        monkeypatch.setattr(world.backend.driver, "copy", lambda *args: copied.append(args) or copy(*args))
        for launch in (1, 2):
            x = torch.arange(m * k, dtype=torch.int16) + 1000 * world.rank + launch
            copied.clear()
            events[get_ident()].clear()
            join = send(x)
            assert events[get_ident()] == EDGES[:-1]
            join()
            assert events[get_ident()] == EDGES
            world.barrier()
            for rank in range(world.size):
                wanted = (torch.arange(m * k) + 1000 * rank + launch) * (rank != world.rank)
                assert torch.equal(inbox.plain()[rank].flatten().long(), wanted)
            sent = [launch if rank != world.rank else 0 for rank in range(world.size) for _ in range(3)]
            assert counters.tolist() == [*sent, launch]
            window, base = world.backend.stride, world.backend.base
            order = [(world.rank + (to - base) // window, shape[2]) for to, _, shape, *_ in copied]
            assert {stream for *_, stream in copied} == {SIDE}
            peers = [(world.rank + d) % world.size for d in range(1, world.size)]
            assert order == [sent for rows in (2, 2, 1) for peer in peers for sent in ((peer, rows * k * 2), (peer, 4))]
            world.barrier()

    assert open_worlds(3, main)[0] == [None] * 3


def test_parcels_go_to_their_owners_when_their_tiles_are_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the driver, in the order of its calls: each is held until as many tiles as it has are counted."""
    called: dict[int, list[tuple[str, int, int]]] = {rank: [] for rank in range(3)}

    def begin(world: Any, *_: Any, **options: Any) -> Callable:
        def start(number: torch.Tensor, bar: torch.Tensor, zeros: int, device: Any) -> None:
            world.barrier()
            called[world.rank].clear()
            number[0] += 1
            number[1 : 1 + zeros] = 0

        return start

    monkeypatch.setattr(_copies, "cooperative_launch", begin)
    events = on_two_streams(monkeypatch)

    def main(world: Any) -> None:
        size, rank, tiles, tile, parcel = world.size, world.rank, 5, 4, 2
        inbox, outbox, counters, begun = _copies.scattering(world, tiles, tile, torch.int16, parcel)
        driver, base, window = world.backend.driver, world.backend.base, world.backend.stride
        copy, hold, calls = driver.copy, driver.hold, called[rank]
        monkeypatch.setattr(
            driver,
            "copy",
            lambda to, *rest: calls.append(("copy", rank + (to - base) // window, rest[1][2])) or copy(to, *rest),
        )
        monkeypatch.setattr(
            driver,
            "hold",
            lambda at, value, stream: (
                calls.append(("hold", (at - counters.data_ptr()) // 4, value)) or hold(at, value, stream)
            ),
        )
        count = (size - 1) * 3
        for launch in (1, 2):
            events[get_ident()].clear()
            send = begun()
            assert events[get_ident()] == EDGES[:1], "before the kernel that it goes on beside"
            outbox.copy_(torch.arange(outbox.numel()).reshape(outbox.shape) + 1000 * rank + launch)
            assert not counters[count + 1 :].any()
            counters[count + 1 :] = torch.tensor([2, 2, 1] * (size - 1))  # as the kernel counts
            send()
            assert events[get_ident()] == EDGES
            world.barrier()
            theirs = torch.arange(outbox.numel()).reshape(outbox.shape)
            for d in range(1, size):
                assert torch.equal(inbox.plain()[d - 1].long(), theirs[d - 1] + 1000 * ((rank - d) % size) + launch)
            assert counters[: count + 1].tolist() == [launch] * (count + 1)
            wanted: list[tuple[str, int, int]] = []
            for d in range(1, size):
                for g, finished in enumerate((2, 2, 1)):
                    peer = (rank + d) % size
                    wanted += [("hold", count + 1 + (d - 1) * 3 + g, finished)]
                    wanted += [("copy", peer, finished * tile * 2), ("copy", peer, 4)]
            assert calls == wanted
            world.barrier()

    assert open_worlds(3, main)[0] == [None] * 3


def test_places_may_differ_and_runs_that_lie_far_apart_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    target, source = _copies.layout(3, 2, 4, 8)[:, 1], _copies.layout(3, 4, 2, 8)[:, :, 1]
    (box,) = _copies.boxes(5, target, source, 4)
    assert box == (5, 3, 4, 8, (32, 8, 64), (8, 16, 64))
    monkeypatch.setattr(_copies, "MAX_PITCH", 63)
    rows = _copies.boxes(5, target, source, 4)
    assert [(b.peer, b.planes, b.runs, b.run) for b in rows] == [(5, 1, 1, 8)] * 12
    starts = [tuple(t[p, r].storage_offset() for t in (target, source)) for p in range(3) for r in range(4)]
    assert [(b.target.start, b.source.start) for b in rows] == starts
    whole = _copies.layout(100)
    assert len(_copies.boxes(0, whole, whole, 4)) == 1, "one run may be of any length"


LEAST = 1 << 18  # bytes from which the test's collectives are copied; more than low_latency takes


def test_what_is_copied_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The large ones, where the operands are as copies need them and no block of a program's is asked for."""
    calls = (all_reduce, reduce_scatter, all_gather, all_to_all)
    met, meeting = [], _copies.meeting
    monkeypatch.setattr(_copies, "meeting", lambda world: met.append(1) or meeting(world))
    for call in calls:
        module = importlib.import_module(call.__module__)
        assert module.COPIED_BYTES >= 1 << 28
        monkeypatch.setattr(module, "COPIED_BYTES", LEAST)

    def copied(call: Callable, x: torch.Tensor, out: torch.Tensor, **options: Any) -> bool:
        met.clear()
        x.copy_(torch.arange(x.numel()))
        got = call(x, out.fill_(-1), **options)
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(x))
        return bool(met)

    def run(world: Any) -> None:
        n = LEAST // 4
        x, out = pkt.empty(n), pkt.empty(n)
        for call in calls:
            assert copied(call, x, out), call
            assert not copied(call, x[: n - 16], out[: n - 16]), call
            assert copied(call, x, torch.empty(n)) == (call is reduce_scatter), call
            assert copied(call, x, out, block=1024) == (call in (all_reduce, reduce_scatter)), call
        for call in calls[1:]:
            assert copied(call, torch.empty(n), out), call

    on_ranks(1, run, multicast=False)


# ------------------------------------------------------------------------------------------------------ streams
class Queue:
    """What a rank has queued on two streams, until it is done in some order that the edges between them allow."""

    def __init__(self) -> None:
        self.done: list[tuple[Callable[[], Any], str, set[int]]] = []
        self.stream = "current"
        self.after: dict[str, set[int]] = {"current": set(), "side": set()}  # what the stream's next waits for

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

    def __init__(self, world: Any) -> None:
        self.queue = world.workspace("queue", Queue)

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        if self.lost != "behind":
            self.queue.after["side"] = self.queue.after["side"] | self.queue.after["current"]
        self.queue.stream = "side"
        yield
        self.queue.stream = "current"

    def mark(self) -> set[int]:
        return set(self.queue.after["side"])

    def reach(self, mark: set[int]) -> None:
        if self.lost != "reach":
            self.queue.after["current"] = self.queue.after["current"] | mark


def exchange(world: Any, seed: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    x = values((3, 2 * world.size), seed[world.rank])
    out = world.workspace("out", lambda: pkt.empty(3 * world.size, 2))
    wanted = exchanged([values((3, 2 * world.size), s) for s in seed], world.rank, 1, 0)
    return all_to_all(x, out, scatter=1, gather=0, mode="copy"), wanted


def scatter(world: Any, seed: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    x = values((8, 4 * world.size), seed[world.rank])
    total = sum(values((8, 4 * world.size), s) for s in seed).chunk(world.size, 1)[world.rank]
    out = world.workspace("out", lambda: torch.empty(8, 4))
    return reduce_scatter(x, out, dim=1, mode="copy", block=8, chunks=4), total


def reduce(world: Any, seed: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    out = world.workspace("out", lambda: pkt.empty(600))
    out.copy_(values((600,), seed[world.rank]))
    return all_reduce(out, mode="copy", block=64, chunks=3), sum(values((600,), s) for s in seed)


def multiply(world: Any, seed: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = world.workspace("operands", lambda: (torch.empty(40, 16), torch.eye(16)))
    a.copy_(values((40, 16), seed[world.rank]))
    out = all_gather_matmul(a, b, mode="copy", tiles=(16, 16, 16), push_rows=1)
    world.workspace("queue", Queue).add(lambda: a.fill_(float("nan")))  # the caller's next use of it
    return out, torch.cat([values((40, 16), s) for s in seed])


ORDERS: dict[str, Callable[[str, int], float]] = {
    "the current stream first": lambda stream, rank: stream == "side",
    "the side first": lambda stream, rank: stream == "current",
    "any": lambda stream, rank: random.random(),
    "the side first, but on rank 0": lambda stream, rank: (stream == "side") == (rank == 0),
}


def in_order(monkeypatch: pytest.MonkeyPatch, call: Callable, order: str, lost: str = "") -> None:
    def later(start: Callable) -> Callable:
        return lambda world, *args, **options: (
            lambda *given: world.workspace("queue", Queue).add(lambda: start(world, *args, **options)(*given))
        )

    def beside(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        pkt.init().workspace("queue", Queue).add(lambda: kernel[grid](*args, **options))

    monkeypatch.setattr(Deferred, "lost", lost)
    monkeypatch.setattr(_copies, "Side", Deferred)
    monkeypatch.setattr(_copies, "beside", beside)
    for module in (_copies, _copy_reduce, _copy_all_gather_matmul):
        monkeypatch.setattr(module, "cooperative_launch", later(module.cooperative_launch))
    random.seed(order)

    def run(world: Any) -> None:
        for launch in range(3):
            got, wanted = call(world, seeds(world, launch))
            world.workspace("queue", Queue).run(lambda stream: ORDERS[order](stream, world.rank))
            assert torch.equal(torch.as_tensor(got), wanted), launch

    on_ranks(3, run, seed=1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("call", [exchange, scatter, reduce])
def test_any_order_that_the_edges_allow(call: Callable, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_order(monkeypatch, call, order)


@pytest.mark.parametrize("order", ["the side first", "the side first, but on rank 0"])
def test_a_product_beside_its_copies(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the others' copies, so in this model, where a kernel queued first runs to its end first, not all
    ranks may compute first."""
    in_order(monkeypatch, multiply, order)


EARLY = {"behind": "the side first", "reach": "the current stream first"}


@pytest.mark.parametrize("lost", ["behind", "reach"])
@pytest.mark.parametrize("call", [exchange, scatter, reduce, multiply])
def test_every_edge_is_needed(call: Callable, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order = "the side first, but on rank 0" if call is multiply and lost == "reach" else EARLY[lost]
    with pytest.raises((pkt.PktError, AssertionError)):
        in_order(monkeypatch, call, order, lost)
