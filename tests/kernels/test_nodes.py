"""Collectives over several nodes, where the conformance suite does not look: bytes, teams, calls in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from pkt.errors import Unsupported
from pkt.simulate.far import Far
from tests.kernels.helpers import on_ranks

SIZE = 48
BYTES = {  # that leave each rank over the network, for an x of SIZE floats, by the number of nodes N and of ranks W
    "all_gather": lambda N, W: 4 * SIZE * (N - 1),
    "reduce_scatter": lambda N, W: 4 * SIZE * (N - 1) // W,
    "all_reduce": lambda N, W: 2 * 4 * SIZE * (N - 1) // W,
    "all_to_all": lambda N, W: 4 * SIZE * (W - W // N) // W,
}


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize(("ranks", "node_size"), [(4, 2), (3, 1)])
def test_bytes_over_the_network(name: str, ranks: int, node_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte crosses the network once for a node, along the rail."""
    sent = [0] * ranks
    put = Far._put

    def counted(self: Any, to: int, data: Any, *rest: Any, **more: Any) -> None:
        rank = self.m.current.rank
        assert rank % node_size == to % node_size, "not along the rail"
        sent[rank] += data[0].nbytes if data is not None else 0
        put(self, to, data, *rest, **more)

    monkeypatch.setattr(Far, "_put", counted)
    on_ranks(ranks, lambda world: getattr(pkt, name)(torch.ones(SIZE), world=world), node_size=node_size)
    assert sent == [BYTES[name](ranks // node_size, ranks)] * ranks


@pytest.mark.parametrize(
    ("ranks", "places"), [([0, 1, 2], "0, 0, 1"), ([0, 2, 1, 3], "0, 1, 0, 1"), ([0, 2, 3, 1], "0, 1, 1, 0")]
)
def test_teams_with_other_ranks_are_refused(ranks: list[int], places: str) -> None:
    def main(world: Any) -> None:
        team = world.team(ranks)
        if team is not None:
            wanted = f"rank {team.rank}: all_gather.*nodes {places}, and not as many on each, one node after the other"
            with pytest.raises(Unsupported, match=wanted):
                pkt.all_gather(torch.ones(8), world=team)

    on_ranks(4, main, node_size=2)


def test_forms_for_other_worlds_are_refused() -> None:
    def main(world: Any) -> None:
        other, wanted = ("push", "'nodes'") if world.nodes > 1 else ("nodes", "'push' or 'pull'")
        found = f"found mode '{other}' in a world of {world.nodes} nodes?: wanted {wanted}"
        with pytest.raises(Unsupported, match=rf"rank {world.rank}: all_gather: {found}"):
            pkt.all_gather(torch.ones(8), mode=other)  # type: ignore[arg-type]

    on_ranks(2, main, node_size=1)
    on_ranks(2, main)


def test_fewer_elements_than_ranks() -> None:
    def main(world: Any) -> None:
        for n in (1, 3):
            x = [torch.arange(1.0, n + 1) * (r + 1) for r in range(4)]
            assert torch.equal(pkt.all_reduce(x[world.rank].clone(), op="max"), x[3])

    on_ranks(4, main, node_size=2)


def test_compiled_code_over_nodes() -> None:
    def main(world: Any) -> float:
        def total(x: torch.Tensor) -> torch.Tensor:
            return pkt.all_reduce(pkt.all_gather(x, mode="nodes").clone()).sum()

        x = torch.arange(8.0) + world.rank
        return torch.compile(total, backend="aot_eager", fullgraph=True)(x).item()

    assert on_ranks(4, main, node_size=2) == [4 * sum(28 + 8 * r for r in range(4))] * 4


def test_a_team_over_nodes() -> None:
    """Two ranks of each node of three, in another order of nodes."""

    def main(world: Any) -> None:
        team = world.team([5, 4, 1, 0])
        if team is not None:
            shards = [torch.arange(7.0) + 10 * r for r in range(4)]
            assert torch.equal(pkt.all_gather(shards[team.rank], world=team), torch.cat(shards))
            assert torch.equal(pkt.all_reduce(shards[team.rank].clone(), world=team), sum(shards))

    on_ranks(6, main, node_size=2, seed=1)


def test_operators_of_one_size_follow_each_other() -> None:
    """all_reduce does not wait for its puts to complete, so it shares no memory with operators whose parts are alike.
    With shared memory seeds 2 and 3 find an overtaken put."""

    def main(world: Any) -> None:
        for launch in range(3):
            x = [torch.arange(16.0) + 100 * r + launch for r in range(4)]
            assert torch.equal(pkt.all_reduce(x[world.rank].clone()), sum(x))
            assert torch.equal(pkt.all_gather(x[world.rank][:4].clone()), torch.cat([each[:4] for each in x]))
            assert torch.equal(pkt.reduce_scatter(x[world.rank]), sum(x).chunk(4)[world.rank])

    for seed in (2, 3):
        on_ranks(4, main, node_size=2, seed=seed, sms=1)
