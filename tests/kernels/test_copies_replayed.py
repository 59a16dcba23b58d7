"""Calls by the copy engines that come again are one call of the driver, and do what they did one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from threading import get_ident
from typing import Any
from unittest import mock

import pytest
import torch

import pkt
from pkt.kernels import all_gather, all_reduce, all_to_all, reduce_scatter
from pkt.kernels.all_gather_matmul.gluon import push_launch
from pkt.kernels.all_gather_matmul.rules import PushPlan
from pkt.kernels.matmul_reduce_scatter.gluon import inbox_launch
from pkt.kernels.shared import copy_reduce
from pkt.kernels.shared.tile_product import Tiles
from pkt.runtime.launch import replay
from tests.runtime.eager_worlds import Rank, eager_worlds

RANKS = 3
QUEUED = ("launch", "copy", "hold", "event", "record", "replay")


def met(world: Any, *args: Any) -> None:
    world.barrier()


def queued(rank: Rank, call: Callable[[], Any]) -> dict[str, int]:
    """How often `call` calls the driver to queue something."""
    before = rank.driver.calls.copy()
    call()
    return {name: n for name, n in (rank.driver.calls - before).items() if name in QUEUED}


def gathered(rank: Rank, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return all_gather.all_gather(x, out, mode="copy", world=rank.world)


def exchanged(rank: Rank, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return all_to_all.all_to_all(x, out, mode="copy", world=rank.world)


def scattered(rank: Rank, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return reduce_scatter.reduce_scatter(x, out, mode="copy", block=64, chunks=2, world=rank.world)


def reduced(rank: Rank, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return all_reduce.all_reduce(x, out, mode="copy", block=64, chunks=2, world=rank.world)


N = 6 * 64 * RANKS
FORMS = {
    # call, elements of out for those of x, what one call asks of the driver
    "all_gather": (gathered, RANKS, {"launch": 2, "event": 4, "copy": RANKS}),
    "all_to_all": (exchanged, 1, {"launch": 2, "event": 4, "copy": RANKS}),
    "reduce_scatter": (scattered, 1 / RANKS, {"launch": 3, "event": 6, "copy": 2 * (RANKS - 1)}),
    "all_reduce": (reduced, 1, {"launch": 4, "event": 14, "copy": 4 * (RANKS - 1)}),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_call_that_comes_again_is_one_call_of_the_driver(name: str) -> None:
    call, more, one_by_one = FORMS[name]

    def main(rank: Rank) -> None:
        x, out = pkt.ones(N, world=rank.world), pkt.empty(int(N * more), world=rank.world)
        found = [queued(rank, lambda: call(rank, x, out)) for _ in range(replay.CALLS + 4)]
        assert found[: replay.CALLS] == [one_by_one] * replay.CALLS
        assert found[replay.CALLS] == {**one_by_one, "record": 1, "replay": 1}
        assert found[replay.CALLS + 1 :] == [{"replay": 1}] * 3

    assert eager_worlds(RANKS, main) == [None] * RANKS


def beside_copies(world: Any, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The Gluon form of all_gather_matmul, its rows in two groups, its columns in two chunks."""
    return push_launch(world, a[: len(out) // RANKS], b, out, PushPlan(0, 64, push_rows=1), Tiles())


def before_copies(world: Any, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The Gluon form of matmul_reduce_scatter, in two parcels for each peer."""
    return inbox_launch(world, a, b, out[: len(a) // RANKS], Tiles(), 1, copies=2)


def counts(world: Any, *args: Any) -> None:
    """gluon_inbox_kernel finishes its tiles."""
    next(x for x in args if isinstance(x, pkt.SymmetricTensor)).fill_(99)


@pytest.mark.parametrize(
    ("plan", "one_by_one"),
    [
        (beside_copies, {"launch": 2, "event": 4, "copy": 2 * 2 * 2 * (RANKS - 1)}),
        (before_copies, {"launch": 2, "event": 4, "hold": 2 * (RANKS - 1), "copy": 2 * 2 * (RANKS - 1)}),
    ],
)
def test_so_is_a_product_and_its_copies(plan: Callable, one_by_one: dict[str, int]) -> None:
    def main(rank: Rank) -> None:
        a, b, out = (torch.ones(n, 128, dtype=torch.bfloat16) for n in (256 * RANKS, 128, 256 * RANKS))
        launch = plan(rank.world, a, b, out)
        for result in (out, torch.empty_like(out)):
            found = [queued(rank, lambda out=result: launch(a, b, out, None)) for _ in range(replay.CALLS + 3)]
            assert found == [
                *[one_by_one] * replay.CALLS, {**one_by_one, "record": 1, "replay": 1}, *[{"replay": 1}] * 2,
            ]  # fmt: skip
            assert launch(a, b, result, None) is result

    assert eager_worlds(RANKS, main, {"gluon_inbox_kernel": counts}) == [None] * RANKS


@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
def test_every_call_moves_the_data_of_its_own_tensors(name: str) -> None:
    """Addresses in turn, each recorded for itself, with values that change between the calls."""
    call, more, _ = FORMS[name]

    def main(rank: Rank) -> list[int]:
        world, kinds = rank.world, []
        xs, outs = ([pkt.zeros(int(n), world=world) for _ in range(2)] for n in (N, N * more))
        for turn in range(5 * len(xs)):
            x, out = xs[turn % 2], outs[turn % 2]
            everybody = [torch.arange(N) + 1000.0 * r + turn for r in range(RANKS)]
            x.copy_(everybody[rank.world.rank])
            got = []
            kinds.append(queued(rank, lambda x=x, out=out, got=got: got.append(call(rank, x, out))).get("replay", 0))
            assert got[0] is out
            wanted = (
                all_gather.reference(world.rank, everybody)
                if name == "all_gather"
                else all_to_all.reference(world.rank, everybody)
            )
            assert torch.equal(out.plain(), wanted), turn
            world.barrier()
        return kinds

    direct = [0] * 2 * replay.CALLS
    wanted = [[*direct, *[1] * (10 - len(direct))]] * RANKS
    assert eager_worlds(RANKS, main, {"meet_kernel": met}) == wanted


def test_what_the_user_records_is_not_replayed_in_it() -> None:
    """On a stream that joined the capture, also on the one of the last call: a graph cannot be queued there."""

    def main(rank: Rank) -> None:
        x, fresh, out = torch.ones(N), torch.ones(N), pkt.empty(N * RANKS, world=rank.world)
        one_by_one = FORMS["all_gather"][2]
        for _ in range(replay.CALLS + 2):
            gathered(rank, x, out)
        other = rank.cuda.Stream()
        for stream in (rank.cuda.now, other):
            stream.capturing = True
            with rank.cuda.stream(stream):
                assert queued(rank, lambda: gathered(rank, x, out)) == one_by_one
                for _ in range(replay.CALLS + 2):
                    assert queued(rank, lambda: gathered(rank, fresh, out)) == one_by_one
            stream.capturing = False
        assert queued(rank, lambda: gathered(rank, x, out)) == {"replay": 1}

    assert eager_worlds(RANKS, main) == [None] * RANKS


def test_nothing_is_recorded_beside_a_capture_of_the_user() -> None:
    """The stream for copies may belong to that graph."""

    def main(rank: Rank) -> None:
        x, out = pkt.ones(N, world=rank.world), pkt.empty(N * RANKS, world=rank.world)
        one_by_one = FORMS["all_gather"][2]
        gathered(rank, x, out)
        other = rank.cuda.Stream()
        other.capturing = True
        with rank.cuda.stream(other):
            gathered(rank, x, out)
        for _ in range(replay.CALLS + 2):
            assert queued(rank, lambda: gathered(rank, x, out)) == one_by_one
        other.capturing = False
        assert queued(rank, lambda: gathered(rank, x, out))["record"] == 1

    assert eager_worlds(RANKS, main) == [None] * RANKS


def test_graphs_are_given_back_with_their_plans() -> None:
    def main(rank: Rank) -> None:
        x, out = pkt.ones(N, world=rank.world), pkt.empty(N * RANKS, world=rank.world)
        for _ in range(replay.CALLS + 1):
            gathered(rank, x, out)
        assert len(rank.driver.graphs) == 1
        rank.world.forget_plans()
        assert rank.driver.graphs == {}
        for _ in range(replay.CALLS + 1):
            gathered(rank, x, out)
        assert rank.driver.calls["record"] == 2

    assert eager_worlds(RANKS, main) == [None] * RANKS


def test_a_graph_of_freed_memory_is_not_replayed() -> None:
    """Memory that comes to the same address is another allocation."""

    def main(rank: Rank) -> None:
        x, out = torch.ones(N), pkt.empty(N * RANKS, world=rank.world)
        for number in (1, 2):
            rank.driver.allocations[x.data_ptr()] = number
            found = [queued(rank, lambda: gathered(rank, x, out)) for _ in range(replay.CALLS + 2)]
            assert found[: replay.CALLS] == [FORMS["all_gather"][2]] * replay.CALLS, number
            assert found[-1] == {"replay": 1}
        rank.driver.allocations[x.data_ptr()] = None
        found = [queued(rank, lambda: gathered(rank, x, out)) for _ in range(replay.CALLS + 2)]
        assert found == [FORMS["all_gather"][2]] * (replay.CALLS + 2), "nothing tells that memory from other"

    assert eager_worlds(RANKS, main) == [None] * RANKS


def test_graphs_are_few_and_make_room_when_they_are_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_GRAPHS", 2)
    monkeypatch.setattr(replay, "STALE", 8)

    def main(rank: Rank) -> None:
        out = pkt.empty(RANKS * N, world=rank.world)
        xs = [torch.ones(N) for _ in range(3)]  # plain: one plan serves all
        before: Counter[str] = rank.driver.calls.copy()
        for _ in range(replay.CALLS + 1):
            for one in xs:
                gathered(rank, one, out)
        assert (rank.driver.calls - before)["record"] == 2
        assert len(rank.driver.graphs) == 2
        assert queued(rank, lambda: gathered(rank, xs[2], out)) == FORMS["all_gather"][2], "both are in use"
        for _ in range(8):
            gathered(rank, xs[1], out)
        assert queued(rank, lambda: gathered(rank, xs[2], out))["record"] == 1, "the other was not"
        assert len(rank.driver.graphs) == 2
        assert queued(rank, lambda: gathered(rank, xs[1], out)) == {"replay": 1}

    assert eager_worlds(RANKS, main) == [None] * RANKS


def test_an_error_while_recording_is_raised_and_leaves_nothing() -> None:
    def main(rank: Rank) -> None:
        x, out = pkt.ones(N, world=rank.world), pkt.empty(N * RANKS, world=rank.world)
        for _ in range(replay.CALLS):
            gathered(rank, x, out)
        stream, calls = rank.cuda.now, rank.driver.calls
        rank.driver.fail = {"copy": calls["copy"] + 2}
        with pytest.raises(pkt.PktError, match=f"rank {rank.world.rank}: copy failed"):
            gathered(rank, x, out)
        rank.driver.fail = {}
        assert rank.cuda.now is stream
        assert (rank.driver.graphs, rank.driver.recording) == ({}, None)
        assert queued(rank, lambda: gathered(rank, x, out))["record"] == 1

    assert eager_worlds(RANKS, main) == [None] * RANKS


def test_hooks_see_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: dict[int, bool] = {}
    monkeypatch.setattr(replay, "hooked", lambda: hooks.get(get_ident(), False))

    def main(rank: Rank) -> None:
        x, out = pkt.ones(N, world=rank.world), pkt.empty(N * RANKS, world=rank.world)
        for _ in range(replay.CALLS + 2):
            gathered(rank, x, out)
        hooks[get_ident()] = True
        assert queued(rank, lambda: gathered(rank, x, out)) == FORMS["all_gather"][2]
        del hooks[get_ident()]
        assert queued(rank, lambda: gathered(rank, x, out)) == {"replay": 1}

    assert eager_worlds(RANKS, main) == [None] * RANKS


def test_nothing_is_recorded_or_replayed_in_a_pause() -> None:
    def main(rank: Rank) -> None:
        x, out = pkt.ones(N, world=rank.world), pkt.empty(N * RANKS, world=rank.world)
        with replay.paused():
            for _ in range(2 * replay.CALLS):
                assert queued(rank, lambda: gathered(rank, x, out)) == FORMS["all_gather"][2]
        rank.world.barrier()  # a pause is of all worlds
        for _ in range(replay.CALLS + 1):
            gathered(rank, x, out)
        assert queued(rank, lambda: gathered(rank, x, out)) == {"replay": 1}
        rank.world.barrier()
        with replay.paused():
            assert queued(rank, lambda: gathered(rank, x, out)) == FORMS["all_gather"][2]

    assert eager_worlds(RANKS, main) == [None] * RANKS


@pytest.mark.parametrize("name", ["reduce_scatter", "all_reduce"])
def test_the_kernel_of_each_chunk_is_launched_with_the_same_numbers(name: str) -> None:
    """Only such a launch is repeated without Triton, where a call is not replayed."""
    call, more, _ = FORMS[name]
    numbers: dict[int, list[Any]] = {}

    def main(rank: Rank) -> None:
        made = copy_reduce.cooperative_launch

        def launched(*args: Any, **options: Any) -> Callable[..., Any]:
            start, seen = made(*args, **options), []
            numbers.setdefault(get_ident(), []).append(seen)

            def counted(*given: Any) -> Any:
                seen.append([x for x in given if isinstance(x, int)])
                return start(*given)

            return counted

        x, out = pkt.ones(N, world=rank.world), pkt.empty(int(N * more), world=rank.world)
        rank.world.barrier()
        first = rank.world.rank == 0
        with mock.patch.object(copy_reduce, "cooperative_launch", launched) if first else nullcontext():
            rank.world.barrier()
            with replay.paused():
                for _ in range(3):
                    call(rank, x, out)
            rank.world.barrier()
        chunks = numbers[get_ident()]
        assert len(chunks) == 2
        assert all(seen[0] == seen[1] == seen[2] and len(seen) == 3 for seen in chunks)
        assert chunks[0] != chunks[1]

    assert eager_worlds(RANKS, main) == [None] * RANKS
