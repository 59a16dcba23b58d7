"""Dispatch and combine: routings that break things, the way through a grouped product and home, what does not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels import dispatch as module
from pkt.kernels.combine import plans as combining
from pkt.kernels.declaration import Call
from pkt.kernels.dispatch import Dispatched, plans, rules
from pkt.kernels.shared.grid import SMALL
from tests.conformance.checks import set_launches

from .helpers import on_ranks, random

ROUTINGS = ("random", "skewed", "none", "one rank", "everywhere")


def routed(routing: str, T: int, K: int, experts: int, rank: int) -> torch.Tensor:
    """int64 (T, K) experts of a rank's tokens."""
    generator = torch.Generator().manual_seed(rank)
    chosen = torch.randint(0, experts, (T, K), generator=generator)
    if routing == "random":
        return torch.where(torch.rand(T, K, generator=generator) < 0.2, -1, chosen)
    if routing == "skewed":
        return torch.where(torch.rand(T, K, generator=generator) < 0.8, 0, chosen)
    if routing == "none":
        return torch.where(chosen % 2 == 0, -1, experts + 7)
    if routing == "one rank":
        return torch.full((T, K), experts - 1)
    return torch.arange(K).expand(T, K) * experts // K


def operands(size: int, routing: str, tokens: tuple[int, ...], K: int, experts: int, H: int) -> Any:
    """x, topk_idx and topk_weights of all ranks."""
    every = [tokens[rank % len(tokens)] for rank in range(size)]
    return (
        [random((T, H), torch.bfloat16, rank) for rank, T in enumerate(every)],
        [routed(routing, T, K, experts, rank) for rank, T in enumerate(every)],
        [random((T, K), torch.float32, rank, 1).abs() for rank, T in enumerate(every)],
    )


def same(found: Dispatched, exact: tuple[torch.Tensor, ...]) -> None:
    end = int(exact[3][-1])
    assert (found.scales is None) == (len(exact) == 8)
    for name, one, other in zip(Dispatched._fields, found, exact):
        if name in ("rows", "scales"):  # behind the last expert's they are undefined
            one, other = one[:end], other[:end]
        assert torch.equal(one.double(), other.double()), name


@pytest.mark.parametrize(
    ("size", "K", "tokens"), [(1, 2, (5,)), (2, 16, (3, 4)), (3, 3, (7, 0, 9)), (4, 1, (0, 0, 0, 6))]
)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_is_right(routing: str, size: int, K: int, tokens: tuple[int, ...]) -> None:
    """One plan, and other routings in its next launches, as in a replayed graph."""
    experts, room = 6, 160

    def run(world: Any) -> None:
        mine: list[torch.Tensor] = []
        for now in (routing, "random"):
            every = operands(size, now, tokens, K, experts, 8)
            if not mine:
                mine = [one[world.rank].clone() for one in every]
            for one, other in zip(mine, every):
                one.copy_(other[world.rank])
            found = pkt.dispatch(*mine, experts, max_tokens=room, alignment=4)
            found.check()
            same(found, module.reference(world.rank, *every, experts, room, 4))

    on_ranks(size, run, sms=3)


def test_programs_that_count_no_tokens_send_and_place_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "COUNTERS", 2)

    def run(world: Any) -> None:
        every = operands(2, "random", (7, 9), 3, 6, 8)
        found = pkt.dispatch(*(one[world.rank] for one in every), 6, max_tokens=64)
        same(found, module.reference(world.rank, *every, 6, 64, 1))

    on_ranks(2, run, sms=4)


def test_a_piece_is_placed_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the slots behind its last one are nobody's, whatever an earlier launch has left there."""
    monkeypatch.setattr(plans, "COPIED", 16)

    def run(world: Any) -> None:
        for routing in ("everywhere", "random"):
            every = operands(2, routing, (21, 18), 3, 6, 8)
            found = pkt.dispatch(*(one[world.rank] for one in every), 6, max_tokens=160)
            same(found, module.reference(world.rank, *every, 6, 160, 1))

    on_ranks(2, run, sms=3)


def test_tokens_go_through_experts_and_home() -> None:
    """The way of a layer: dispatch, a product for each expert, combine; all of it against the product of each pair."""
    size, experts, K, H, N, T = 2, 4, 3, 16, 24, 7

    def run(world: Any) -> None:
        x, idx, weights = operands(size, "random", (T,), K, experts, H)
        w = random((experts, H, N), torch.bfloat16, 9)
        own = slice(world.rank * experts // size, (world.rank + 1) * experts // size)
        rank = world.rank
        found = pkt.dispatch(x[rank], idx[rank], weights[rank], experts, max_tokens=64, alignment=2)
        y = pkt.grouped_matmul(found.rows, w[own].contiguous(), found.offsets, tiles=(16, 16, 16))
        home = pkt.combine(y, found)
        plain = pkt.combine(y, found._replace(weights=None))
        terms = torch.einsum("th,tkhn->tkn", x[rank].double(), w[idx[rank].clamp_min(0)].double())
        terms *= (idx[rank] >= 0)[:, :, None]
        for result, scale in ((home, weights[rank].double()[:, :, None]), (plain, 1)):
            exact, most = (terms * scale).sum(1), (terms.abs() * scale).sum(1)
            # The product is rounded, a rank's sum, and the sum of both; fp32 is far below.
            assert ((result.double() - exact).abs() <= 3.1 * 2.0**-8 * most + 2.0**-120).all()

    on_ranks(size, run, sms=2)


def test_on_gpus_combine_has_several_programs_an_sm(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 SMs, whose programs run on the 8 of the simulator. One SM's collect."""
    sizes: list[Any] = []

    def told(*given: Any) -> Any:
        sizes.append(given[3])
        return sized(*given)

    sized = combining._sized
    monkeypatch.setattr(combining, "_sized", told)
    monkeypatch.setattr(combining, "num_programs", lambda world, tasks: 2)

    def run(world: Any) -> None:
        every = operands(2, "random", (7, 9), 3, 6, 8)
        found = pkt.dispatch(*(one[world.rank] for one in every), 6, max_tokens=64)
        exact = pkt.combine(found.rows, found, mode="low_latency")
        world.barrier()
        monkeypatch.setattr(Call, "on_gpu", True)
        assert torch.equal(pkt.combine(found.rows, found, num_comm_sms=1), exact)

    on_ranks(2, run, sms=2 * SMALL)
    assert sizes == [SMALL, SMALL]


def test_on_gpus_low_latency_dispatch_has_two_programs_an_sm(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 SMs, whose programs run on the 4 of the simulator. Those of one send, and the other's share tokens."""
    grids: list[int] = []

    def told(third: int, tokens: int, programs: int, threads: int) -> tuple[int, int]:
        grids.append(programs)
        return parts_of(third, tokens, programs, threads)

    parts_of = plans.parts_of
    monkeypatch.setattr(plans, "parts_of", told)
    monkeypatch.setattr(plans, "num_programs", lambda world, tasks: 2)

    def run(world: Any) -> None:
        every = operands(2, "random", (7, 9), 3, 6, 8)
        mine = [one[world.rank] for one in every]
        exact = pkt.dispatch(*mine, 6, max_tokens=64, mode="push")
        world.barrier()
        monkeypatch.setattr(Call, "on_gpu", True)
        found = pkt.dispatch(*mine, 6, max_tokens=64, mode="low_latency")
        assert torch.equal(found.rows[: found.offsets[-1]], exact.rows[: exact.offsets[-1]])

    on_ranks(2, run, sms=4)
    assert grids == [2, 2]


@pytest.mark.parametrize(
    ("size", "K", "tokens", "H"),
    [
        (2, 16, (1, 2), 50),
        (3, 3, (7, 0, 9), 8),
        (4, 1, (0, 0, 0, 6), 7),
        (2, 2, (2, 1), 2060),
        (2, 2, (3, 5), 2060),
        (1, 2, (5,), 6),
        (2, 1, (90, 1), 8),
    ],
)
def test_the_low_latency_forms_give_the_same_bits(size: int, K: int, tokens: tuple[int, ...], H: int) -> None:
    """One plan, other routings in its launches, at last one that does not fit; combine takes what either form has
    returned. Rows that are no token's are not read. Two of 4 programs send, and two share a single token."""
    experts, most = 6, max(tokens)
    rooms = {"skewed": 160, "none": 160, "one rank": 3}

    def run(world: Any) -> None:
        for routing, room in rooms.items():
            every = operands(size, routing, tokens, K, experts, H)
            mine = [one[world.rank] for one in every]
            found = pkt.dispatch(*mine, experts, max_tokens=room, alignment=4, mode="low_latency", tokens_per_rank=most)
            same(found, module.reference(world.rank, *every, experts, room, 4))
            y = torch.where(found.source[:, :1] < 0, float("nan"), found.rows)
            if routing == "none":
                found = found._replace(weights=None)
            home = pkt.combine(y, found, mode="low_latency", tokens_per_rank=most)
            assert torch.equal(home, pkt.combine(y, found, mode="pull"))

    on_ranks(size, run, sms=4)


@pytest.mark.parametrize("sms", [1, 2, 3, 7])
def test_low_latency_dispatch_takes_any_number_of_sms(sms: int) -> None:
    """With one SM the same program sends and works; with more, at most half of them send."""
    size, tokens, K, experts, room = 2, (7, 9), 3, 6, 64

    def run(world: Any) -> None:
        for most in (None, max(tokens)):
            every = operands(size, "random", tokens, K, experts, 8)
            mine = [one[world.rank] for one in every]
            found = pkt.dispatch(*mine, experts, max_tokens=room, mode="low_latency", tokens_per_rank=most)
            same(found, module.reference(world.rank, *every, experts, room, 1))

    on_ranks(size, run, sms=sms)


@pytest.mark.machine
@pytest.mark.parametrize("places", [3, 8])
def test_every_fault_is_caught_where_an_sm_only_sends(places: int) -> None:
    """One of two SMs sends. With 3 places a rank numbers tokens before it puts them, with 8 it need not. Most tokens go
    nowhere."""
    idx = [torch.tensor([[-1], [1], [-1], [0], [-1]]), torch.tensor([[0], [-1], [1], [-1]])]

    def run(world: Any) -> None:
        x, _, weights = operands(2, "random", (5, 4), 1, 2, 4)
        for chosen in (idx, [tokens.flip(0) for tokens in idx]):
            mine = [one[world.rank] for one in (x, chosen, weights)]
            found = pkt.dispatch(*mine, 2, max_tokens=places, mode="low_latency")
            same(found, module.reference(world.rank, x, chosen, weights, 2, places, 1))

    report = pkt.simulate(run, 2, seeds=10, mutants=True, lost_signals=True, sms=2)
    report.check()
    assert {m.site.call for m in report.mutants} >= {"put_flagged", "take_flagged", "take_flagged_all"}


@pytest.mark.parametrize("mode", ["push", "low_latency"])
def test_scales_that_are_longer_than_their_tokens_lie_beside_each_other(mode: str) -> None:
    """Each of three ranks has several tokens for each of the others."""
    size, K, experts, G = 3, 2, 6, 33

    def run(world: Any) -> None:
        x, idx, weights = operands(size, "random", (9,), K, experts, 4)
        x = [one.to(torch.float8_e4m3fn) for one in x]
        scales = [random((9, G), torch.float32, rank, 2) for rank in range(size)]
        mine = [one[world.rank] for one in (x, idx, weights, scales)]
        found = pkt.dispatch(*mine[:3], experts, scales=mine[3], max_tokens=64, mode=mode)
        same(found, module.reference(world.rank, x, idx, weights, experts, 64, 1, scales=scales))

    on_ranks(size, run, sms=2)


def test_launch_0_does_not_take_the_zeros_that_memory_is_filled_with() -> None:
    """After 2^32 - 1 launches the next has number 0, and here a half that no launch has used."""

    def run(world: Any) -> None:
        for seed in range(2):
            every = operands(2, "random", (3 + seed,), 2, 4, 8)
            mine = [one[world.rank] for one in every]
            found = pkt.dispatch(*mine, 4, max_tokens=64, mode="low_latency")
            same(found, module.reference(world.rank, *every, 4, 64, 1))
            world.barrier()
            set_launches(world, 2**32 - 1)
            world.barrier()

    on_ranks(2, run, sms=1)


@pytest.mark.parametrize("operator", ["dispatch", "combine"])
def test_the_documentation_says_up_to_how_many_tokens_low_latency_is_chosen(operator: str) -> None:
    text = (Path(__file__).parents[2] / "docs/host-api.md").read_text()
    (row,) = re.findall(rf"^\| `{operator}` \| (\d+) \| (\d+) \| (\d+) \|$", text, re.M)
    for ranks, said in zip((2, 4, 8), map(int, row)):
        chosen = [rules.chosen(operator, tokens, 2 * 7168, 8, ranks) for tokens in (said - 10, said + 10)]
        assert chosen == ["low_latency", {"dispatch": "push", "combine": "pull"}[operator]], ranks


def test_the_form_follows_from_a_promise_of_few_tokens() -> None:
    """Nobody promises more than there are places for, and without a promise places for all tokens would be too many."""

    def run(world: Any) -> list[str]:
        x, idx, weights = (one[world.rank] for one in operands(2, "random", (3,), 2, 4, 8))
        names = []
        for promise in ({}, {"tokens_per_rank": 1 << 20}, {"tokens_per_rank": 4}):
            with world.scratch():
                found = pkt.dispatch(x, idx, weights, 4, max_tokens=64, **promise)
                pkt.combine(found.rows, found, **promise)
                kept = {allocation.block.name for allocation in world.heap.live.values()}
                names.append(" ".join(sorted(kept & {"dispatch.inbox", "combine.sums", "kernels.flagged"})))
        before = world.heap.ledger.free_bytes
        for call in (
            lambda: pkt.dispatch(x, idx, weights, 4, max_tokens=64, tokens_per_rank=2),
            lambda: pkt.combine(found.rows, found, tokens_per_rank=2),
        ):
            with pytest.raises(pkt.ShapeError, match=r"found 3 tokens of this rank, wanted at most tokens_per_rank=2"):
                call()
        assert world.heap.ledger.free_bytes == before
        return names

    both = "combine.sums dispatch.inbox"
    assert on_ranks(2, run, sms=2)[0] == [both, both, "kernels.flagged"]


def test_a_promise_bounds_the_memory_that_push_and_pull_keep() -> None:
    """5 tokens of a rank take 2 chunks of 4 slots for each source, so 16, and not as many as there are rows."""

    def run(world: Any) -> None:
        every = operands(2, "everywhere", (5,), 2, 4, 8)
        mine = [one[world.rank] for one in every]
        exact = module.reference(world.rank, *every, 4, 1100, 1)
        homes = []
        for promise in ({"tokens_per_rank": 5}, {}):
            with world.scratch():
                found = pkt.dispatch(*mine, 4, max_tokens=1100, mode="push", **promise)
                same(found, exact)
                homes.append(pkt.combine(found.rows, found, mode="pull", **promise))
                shapes = {a.block.name: a.block.shape for a in world.heap.live.values()}
                slots = 16 if promise else found.tokens.shape[0]
                assert shapes["dispatch.inbox"] == shapes["combine.sums"] == (slots, 8)
        assert torch.equal(*homes)

    on_ranks(2, run, sms=3)


def test_what_does_not_fit_is_refused_whole_and_said() -> None:
    """Rank 1 has no room for its rows: its counts are true, rank 0 is as if nothing had happened, and combine gives
    what rank 0's experts have."""
    room = 12

    def run(world: Any) -> str:
        every = operands(2, "random", (6, 5), 2, 4, 8)
        every[1][0][:, 1] = 3
        every[1][1][:, 0] = 3
        rank = world.rank
        mine = [one[rank] for one in every]
        found = pkt.dispatch(*mine, 4, max_tokens=room, alignment=2)
        same(found, module.reference(rank, *every, 4, room, 2))
        home = pkt.combine(found.rows, found)
        here = (mine[1] >= 0) & (mine[1] < 2)
        exact = mine[0].double() * torch.where(here, mine[2], 0).double().sum(1)[:, None]
        assert ((home.double() - exact).abs() <= 2.1 * 2.0**-8 * exact.abs()).all()
        try:
            found.check()
        except pkt.ShapeError as error:
            return str(error)
        return ""

    said = on_ranks(2, run, sms=2)
    assert said[0] == ""
    assert said[1].startswith("rank 1: dispatch: max_tokens: found 12, wanted at least ")
    assert said[1].endswith("wanted at least 14: expert 3 has 13 of 13 rows")


def test_equal_calls_have_equal_bits() -> None:
    def run(world: Any) -> None:
        x, idx, weights = (one[world.rank] for one in operands(2, "random", (9,), 3, 4, 8))
        first = pkt.combine(
            pkt.dispatch(x, idx, weights, 4, max_tokens=64).rows, pkt.dispatch(x, idx, weights, 4, max_tokens=64)
        )
        for sms in (1, 2):
            found = pkt.dispatch(x, idx, weights, 4, max_tokens=64, num_comm_sms=sms)
            assert torch.equal(pkt.combine(found.rows, found, num_comm_sms=sms), first)

    for seed in (0, 1, 3):
        on_ranks(2, run, seed=seed, sms=4)


@pytest.mark.parametrize(("name", "wrong"), [("num_experts", 0), ("max_tokens", 0), ("alignment", 0), ("K", 17)])
def test_refuses(name: str, wrong: int) -> None:
    def run(world: Any) -> None:
        numbers = {"num_experts": 4, "max_tokens": 8, "alignment": 1, "K": 2} | {name: wrong}
        K = numbers.pop("K")
        with pytest.raises(pkt.ShapeError, match="rank 0: dispatch: "):
            pkt.dispatch(torch.ones(3, 8), torch.zeros(3, K, dtype=torch.int64), torch.ones(3, K), **numbers)

    on_ranks(1, run)


def test_fp8_with_scales_compiles_and_has_no_gradient() -> None:
    def run(world: Any) -> None:
        x, idx, weights = (one[world.rank] for one in operands(2, "random", (5, 3), 2, 4, 8))
        x, scales = x.to(torch.float8_e4m3fn), weights.clone()

        def call(x: Any, idx: Any, weights: Any, scales: Any) -> Any:
            return pkt.dispatch(x, idx, weights, 4, scales=scales, max_tokens=32, clear=True)

        eager = call(x, idx, weights, scales)
        found = torch.compile(call, backend="aot_eager", fullgraph=True)(x, idx, weights, scales)
        assert eager.scales is not None
        assert eager.scales.shape == (32, 2)
        for one, other in zip(found, eager, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        with pytest.raises(pkt.Unsupported, match="rows of float8_e4m3fn, which has no gradient"):
            call(x, idx, weights.requires_grad_(), scales)

    torch._dynamo.reset()
    on_ranks(2, run, sms=2)


def test_combine_says_what_another_object_lacks() -> None:
    def run(world: Any) -> None:
        with pytest.raises(pkt.DtypeError, match="found str 'rows', wanted what has tokens and places"):
            pkt.combine(torch.ones(3, 8), "rows")

    on_ranks(1, run)
