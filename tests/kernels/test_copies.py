"""Copies by copy engines: where boxes go, and which calls copy by default."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.all_reduce import all_reduce
from pkt.kernels.operator import operators
from pkt.kernels.reduce_scatter import reduce_scatter
from pkt.kernels.shared import copies as _copies
from pkt.kernels.shared import flagged as _low_latency
from tests.runtime.test_cuda import open_worlds

from .helpers import on_ranks

# A view of a contiguous tensor of 3 x 4 x 5 x 6, and the copies that it takes.
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
    """The fake driver copies between the addresses that it is given."""

    def main(world: Any) -> None:
        x, out = (pkt.zeros(3, 4, 5, 6, dtype=torch.int16, world=world) for _ in range(2))
        wide = torch.zeros(3, 4, 5, 6, dtype=torch.int16)
        x.copy_(torch.arange(360).reshape(x.shape) + 1000 * world.rank)
        world.barrier()
        peer, like = (world.rank + 1) % world.size, _copies.layout(3, 4, 5, 6)
        moved = _copies.boxes(peer, cut(like), cut(like), 2)
        assert len(moved) == copies
        _copies.sending(world, moved, out)(x, 1)
        world.barrier()
        cut(wide)[...] = cut(torch.arange(360).reshape(x.shape) + 1000 * ((world.rank - 1) % world.size))
        assert torch.equal(out.plain(), wide)
        assert world.backend.driver.calls["copy"] == copies

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


LEAST = 1 << 18  # bytes from which the test's collectives are copied


def test_large_calls_are_copied_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls copy if the operands are as copies need them, and if no `block` is given that copies do not take."""
    copying = {o.function: o for o in operators().values() if "copy" in o.forms and list(o.tensors) == ["x"]}
    calls, forms = list(copying), {call: operator.forms["copy"] for call, operator in copying.items()}
    met, meeting = [], _copies.meeting
    monkeypatch.setattr(_copies, "meeting", lambda world: met.append(1) or meeting(world))
    for call in calls:
        module = importlib.import_module(call.__module__)
        assert module.COPIED_BYTES >= 1 << 28
        monkeypatch.setattr(module, "COPIED_BYTES", LEAST)
    monkeypatch.setattr(_low_latency, "FLAG_BYTES", 0)

    def copied(call: Callable, x: torch.Tensor, out: torch.Tensor, **options: Any) -> bool:
        met.clear()
        x.copy_(torch.arange(x.numel()).view(x.shape))
        got = call(x, out.fill_(-1), **options)
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(x))
        return bool(met)

    def run(world: Any) -> None:
        n = LEAST // 4
        x, out = pkt.empty(n), pkt.empty(n)
        for call in calls:
            assert copied(call, x, out), call
            assert not copied(call, x[: n - 16], out[: n - 16]), call
            assert copied(call, x, torch.empty(n)) == ("out" not in forms[call].symmetric), call
            assert copied(call, x, out, block=1024) == ("block" in forms[call].settings), call
        for call in calls:
            assert call is all_reduce or copied(call, torch.empty(n), out), call

        narrow = pkt.empty(n // 8), pkt.empty(n // 8)
        for call in (call for call in calls if "dim" in copying[call].arguments):
            columns = [t[: n // 8 - 2].view(-1, 3) for t in narrow]  # a run of 12 bytes
            assert not copied(call, *columns, dim=1), call
            columns = [t[: n // 8 + 1].view(-1, 3) for t in (x, out)]
            assert copied(call, *columns, dim=1), call

    on_ranks(1, run, multicast=False)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_the_last_peer_is_the_first_again(chunks: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk begins with the last peer of the one before, to change peers seldom. Each peer gets every chunk."""
    assert [_copies.turn(4, g) for g in range(4)] == [[1, 2, 3], [3, 1, 2], [2, 3, 1], [1, 2, 3]]
    assert (_copies.turn(1, 5), _copies.turn(2, 5)) == ([], [1])
    sent: list[int] = []
    sending = _copies.sending

    def spy(world: Any, what: Any, target: Any) -> Any:
        if world.rank == 0:
            sent.extend(box.peer for box in what)
        return sending(world, what, target)

    monkeypatch.setattr(_copies, "sending", spy)

    def run(world: Any, call: Callable, times: int) -> None:
        sent.clear()
        call(pkt.empty(ranks * 1024), mode="copy", block=64, chunks=chunks)
        assert world.rank or len(sent) == times * chunks * (ranks - 1)

    for call, times in ((reduce_scatter, 1), (all_reduce, 2)):
        on_ranks(ranks, run, call, times)
        peers = ranks - 1
        groups = [sent[i : i + peers] for i in range(0, len(sent), peers)]
        assert all(sorted(group) == list(range(1, ranks)) for group in groups)
        assert all(before[-1] == group[0] for before, group in pairwise(groups))
