"""Experts and decoding over several nodes, where the conformance suite does not look: what crosses the network,
routings that break things, layers of experts, promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from pkt.kernels import dispatch as module
from pkt.kernels import moe
from pkt.kernels.dispatch.nodes import line_of
from pkt.kernels.shared import nodes
from pkt.simulate.far import Far

from .helpers import on_ranks, random
from .test_dispatch import operands, same


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(rank, to, bytes) of each put to another node."""
    found: list[tuple[int, int, int]] = []
    put = Far._put

    def counted(self: Any, to: int, data: Any, *rest: Any, **more: Any) -> None:
        found.append((self.m.current.rank, to, data[0].nbytes if data is not None else 0))
        put(self, to, data, *rest, **more)

    monkeypatch.setattr(Far, "_put", counted)
    return found


def test_a_token_crosses_the_network_once_to_a_node(sent: list[tuple[int, int, int]]) -> None:
    """Rank 3 has no room, so nothing is sent for it alone. Beside tokens and sums there are counts, and notes: to each
    other node 2 numbers for each program and NEAR for each token, in dispatch and in combine."""
    size, near, experts, K, H, T, sms = 4, 2, 8, 3, 6, (7, 0, 5, 3), 2
    every = operands(size, "random", T, K, experts, H)
    for idx in every[1]:
        idx[:, 0] = 7
    every[1][0][2:4] = 7
    room = 14
    last: dict[str, int] = {}

    def run(world: Any) -> None:
        x, idx, weights = (one[world.rank] for one in every)
        found = pkt.dispatch(x, idx, weights, experts, max_tokens=room, tokens_per_rank=7)
        world.barrier()
        last.setdefault("dispatch", len(sent))
        world.barrier()
        pkt.combine(found.rows, found, tokens_per_rank=7)

    on_ranks(size, run, sms=sms, node_size=near)
    fits = [module.reference(r, *every, experts, room, 1)[3][-1].item() > 0 for r in range(size)]
    assert fits == [True, True, True, False]
    own = experts // size
    goes = [
        [{e // own for e in token if 0 <= e < experts and fits[e // own]} for token in idx.tolist()] for idx in every[1]
    ]
    line = 4 * line_of(K, 0, 2 * H)[0]
    for operator, unit in (("dispatch", line), ("combine", 2 * H)):
        there = slice(last["dispatch"]) if operator == "dispatch" else slice(last["dispatch"], None)
        for rank in range(size):
            to = (rank + near) % size
            tokens = sum(any(d // near == to // near for d in token) for token in goes[rank])
            backward = sum(any(d // near == rank // near for d in token) for token in goes[to])
            notes = 4 * (2 * sms + near * T[rank])
            wanted = notes + (unit * tokens + 4 * (experts + size) if operator == "dispatch" else unit * backward)
            put = [(peer, nbytes) for source, peer, nbytes in sent[there] if source == rank]
            assert {peer for peer, _ in put} == {to}, "not along the rail"
            assert sum(nbytes for _, nbytes in put) == wanted, (operator, rank)


@pytest.mark.parametrize(
    ("size", "near", "K", "tokens", "room"),
    [(4, 2, 3, (7, 0, 9, 1), 24), (3, 1, 2, (5,), 160), (6, 3, 4, (1, 2), 160)],
)
def test_every_routing_is_right_over_nodes(size: int, near: int, K: int, tokens: tuple[int, ...], room: int) -> None:
    """One plan, and other routings in its next launches; with 24 rows some do not fit."""
    experts = 7

    def run(world: Any) -> None:
        rank = world.rank
        for routing in ("skewed", "none", "random", "one rank"):
            every = operands(size, routing, tokens, K, experts, 5)
            found = pkt.dispatch(*(one[rank] for one in every), experts, max_tokens=room, alignment=2)
            handles = [module.reference(r, *every, experts, room, 2) for r in range(size)]
            same(found, handles[rank])
            y = torch.where(found.source[:, :1] < 0, float("nan"), found.rows)  # which are not read
            home, again = pkt.combine(y, found), pkt.combine(y, found)
            assert torch.equal(home, again), "equal calls have other bits"
            own = -(-experts // size)
            fits = torch.tensor([bool(handles[e // own][3][-1] > 0) for e in range(experts)])
            chosen = (every[1][rank] >= 0) & (every[1][rank] < experts)
            weights = torch.where(chosen & fits[every[1][rank].clamp(0, experts - 1)], every[2][rank], 0).double()
            x = every[0][rank].double()
            exact, most = x * weights.sum(1)[:, None], x.abs() * weights.abs().sum(1)[:, None]
            # A rank's sum is rounded, a node's, and the result; fp32 is far below.
            assert ((home.double() - exact).abs() <= 3.1 * 2.0**-8 * most).all()

    on_ranks(size, run, sms=2, node_size=near, seed=1)


def test_a_layer_of_experts_over_nodes() -> None:
    """Forwards and backwards as in a world of one node, up to the order of sums. There is room for its tokens alone."""

    def layer(world: Any) -> list[torch.Tensor]:
        torch.manual_seed(3 + world.rank)
        leaves = [torch.randn(shape, requires_grad=True) for shape in ((3, 4), (3, 2), (1, 4, 6), (1, 3, 5))]
        x, weights, w1, w2 = leaves
        idx = torch.randint(-1, world.size, (3, 2))
        out = moe.moe(x, idx, weights, w1, w2)
        out.square().sum().backward()
        if world.nodes > 1:
            rooms = {allocation.block.name: allocation.block.shape for allocation in world.heap.live.values()}
            assert [rooms[name][-2] for name in ("dispatch.lines", "combine.home", "dispatch_again.lines")] == [3] * 3
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    for over, one in zip(on_ranks(4, layer, sms=1, node_size=2), on_ranks(4, layer, sms=1)):
        for found, exact in zip(over, one, strict=True):
            assert torch.allclose(found, exact, rtol=1e-5, atol=1e-5)


def test_more_tokens_than_there_is_room_for() -> None:
    """dispatch says what to promise, and its backward pass, and that of combine, keep the promise."""

    def run(world: Any) -> None:
        x, weights = torch.ones(70, 1, requires_grad=True), torch.ones(70, 1)
        idx = torch.full((70, 1), -1)
        idx[:3] = world.rank
        before = world.heap.ledger.free_bytes
        wanted = r"dispatch: x: found 70 tokens of this rank, wanted at most 8: promise more, as tokens_per_rank"
        with pytest.raises(pkt.ShapeError, match=wanted):
            pkt.dispatch(x, idx, weights, 2, max_tokens=8)
        with pytest.raises(pkt.ShapeError, match=r"at most tokens_per_rank=9: promise more$"):
            pkt.dispatch(x, idx, weights, 2, max_tokens=8, tokens_per_rank=9)
        assert world.heap.ledger.free_bytes == before
        found = pkt.dispatch(x, idx, weights, 2, max_tokens=8, tokens_per_rank=70)
        with pytest.raises(pkt.ShapeError, match=r"places: found 70 tokens of this rank, wanted at most 64: "):
            pkt.combine(found.rows, found)
        pkt.combine(found.rows, found, tokens_per_rank=70).sum().backward()
        assert x.grad is not None
        assert x.grad.sum() == 3

    on_ranks(2, run, sms=1, node_size=1)


@pytest.mark.parametrize(("ranks", "near"), [(4, 2), (3, 1)])
def test_decoding_over_nodes(
    ranks: int, near: int, sent: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many pieces: a row crosses the network once for each other node, and all ranks get the same bits."""
    monkeypatch.setattr(nodes, "LEAST_PUT", 64)
    B, heads, D, page, pages = 3, 4, 16, 4, 2
    q = random((B, 1, heads, D), torch.float32, 0)
    caches = [random((B * pages, page, heads, 2 * D), torch.float32, 1, r) for r in range(ranks)]
    lens = [torch.tensor([[5], [0], [r]], dtype=torch.int32) for r in range(ranks)]
    sinks = random((heads,), torch.float32, 2)

    def run(world: Any) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = caches[world.rank].split(D, -1)
        table = torch.arange(B * pages, dtype=torch.int32).view(B, pages)
        for shift in (1, 0):
            found = pkt.flash_decode(q + shift, k, v, table, lens[world.rank], sinks)
        return found

    results = on_ranks(ranks, run, sms=2, node_size=near, seed=1)
    assert all(torch.equal(x, y) for result in results for x, y in zip(result, results[0]))
    assert all(rank % near == to % near for rank, to, _ in sent), "not along the rail"
    assert len(sent) > 2 * ranks * (ranks // near - 1), "one piece only"
    assert sum(nbytes for *_, nbytes in sent) == 2 * ranks * 4 * (ranks // near - 1) * B * heads * (D + 1) // near
    for b in range(B):
        kv = torch.cat([caches[r][pages * b : pages * b + pages].flatten(0, 1)[: lens[r][b]] for r in range(ranks)])
        score = torch.einsum("hd,nhd->hn", q[b, 0].double(), kv[..., :D].double()) * D**-0.5
        both = torch.cat([score, sinks.double()[:, None]], 1)
        exact = torch.einsum("hn,nhe->he", both.softmax(1)[:, :-1], kv[..., D:].double())
        assert torch.allclose(results[0][0][b, 0].double(), exact, rtol=0, atol=1e-5)
        assert torch.allclose(results[0][1][b, 0].double(), both.logsumexp(1), rtol=0, atol=1e-5)
