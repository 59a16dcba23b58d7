"""Copies that a running kernel waits for: their places, their order, and the edges between streams."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from threading import get_ident
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.shared import copies as _copies
from tests.runtime.test_cuda import open_worlds

from .helpers import on_ranks


def test_begin_kernel_counts_the_launch_and_clears_counters() -> None:
    """begin_kernel does so only when every rank has reached it."""

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
    """Give `_copies.Side` fake streams, which log, by thread, each event that is recorded or waited for."""
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


@pytest.mark.parametrize(("chunk", "widths"), [(None, (6,)), (4, (4, 2)), (2, (2, 2, 2))])
def test_rows_go_to_every_peer_and_behind_them_the_number_of_the_launch(
    monkeypatch: pytest.MonkeyPatch, chunk: int | None, widths: tuple[int, ...]
) -> None:
    """Copied by the driver, in the order of its calls."""

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
        inbox, counters, send = _copies.gathering(world, m, k, torch.int16, step, chunk)
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
            sent = [launch if rank != world.rank else 0 for rank in range(world.size) for _ in range(3 * len(widths))]
            assert counters.tolist() == [*sent, launch]
            window, base = world.backend.stride, world.backend.base
            order = [(world.rank + (to - base) // window, shape) for to, _, shape, *_ in copied]
            assert {stream for *_, stream in copied} == {SIDE}
            peers = [(world.rank + d) % world.size for d in range(1, world.size)]
            parts = itertools.product((2, 2, 1), peers, widths)
            assert order == [
                sent
                for rows, peer, n in parts
                for sent in (
                    (peer, (1, rows, n * 2) if rows > 1 and n < k else (1, 1, rows * n * 2)),
                    (peer, (1, 1, 4)),
                )
            ]
            world.barrier()

    assert open_worlds(3, main)[0] == [None] * 3


def test_parcels_go_to_their_owners_when_their_tiles_are_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied by the driver, in the order of its calls. Each parcel is held until all its tiles are counted."""
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
            assert events[get_ident()] == EDGES[:1], "recorded before the kernel that the copies run beside"
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
