"""Teams of processes: their collective calls over the world's connections, lost ranks, and records of expired waits."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import pkt
from pkt.errors import CollectiveMismatch, PeerLost, TransportError, Unsupported, WaitTimeout
from pkt.language import world as words
from pkt.runtime.groups import process_group

from . import forked
from .test_watch import record

TEAMS = [[0, 2], [1, 3]]


def own(world: Any) -> Any:
    return world.team(TEAMS[world.rank % 2])


def values(ends: list[Any]) -> list[Any]:
    assert [end.error for end in ends] == [None] * len(ends)
    return [end.value for end in ends]


def test_teams_call_each_other_as_often_as_they_like_between_calls_of_the_world() -> None:
    def main(world: Any) -> Any:
        team = own(world)
        found = [team.all_gather_object(world.rank) for _ in range(1 + 5 * (world.rank % 2))][-1]
        everybody = world.all_gather_object(team.rank)
        listed = world.team([3, 0, 1])
        told = listed.broadcast(world.rank, root=0) if listed is not None else None
        world.barrier()
        alone = team.team([team.rank])
        alone.barrier()
        return found, everybody, told, alone.ranks

    found = values(forked.in_worlds(4, main))
    assert [f[0] for f in found] == [[0, 2], [1, 3]] * 2
    assert [f[1] for f in found] == [[0, 0, 1, 1]] * 4
    assert [f[2] for f in found] == [3, 3, None, 3]
    assert [f[3] for f in found] == [(0,), (1,), (2,), (3,)]


def test_members_read_each_others_copies_and_share_offsets_with_other_teams() -> None:
    def main(world: Any) -> Any:
        team = own(world)
        y = pkt.full(5, 10.0 + world.rank, world=world)
        freed = pkt.zeros(100, world=team)
        freed.free()
        x = pkt.full(8, float(world.rank), world=team)
        backend = team.backend
        moved = [backend.window(r) - backend.base for r in range(team.size)]
        assert moved == [(r - team.rank) * 2 * world.backend.stride for r in range(team.size)]
        assert int(team.device.stride) == 2 * world.backend.stride
        team.barrier()
        found = [x.peer(r)[3].item() for r in range(team.size)], x.data_ptr() - world.backend.base
        assert y.peer(team.ranks[0])[4].item() == 10 + team.ranks[0]
        world.barrier()
        return found

    found = values(forked.in_worlds(4, main))
    assert [f[0] for f in found] == [[0, 2], [1, 3]] * 2
    assert len({f[1] for f in found}) == 1


def test_a_rank_that_calls_the_world_where_its_team_meets_is_told() -> None:
    def main(world: Any) -> str:
        def calls() -> None:
            team = own(world)  # where a slow rank may still be when the others are told
            (world if world.rank == 0 else team).barrier()
            world.barrier()

        with pytest.raises((CollectiveMismatch, PeerLost, TransportError)) as caught:
            calls()
        return f"{type(caught.value).__name__} {caught.value}"

    ends = values(forked.in_worlds(4, main, timeout=5.0))
    for rank in (0, 2):
        assert "CollectiveMismatch" in ends[rank] or "gave up" in ends[rank], ends[rank]
    assert any("barrier() of team [0, 2]" in end for end in ends), ends


def test_members_that_allocate_other_tensors_are_told() -> None:
    def main(world: Any) -> str:
        team = own(world)
        if world.rank % 2:
            return str(pkt.zeros(8, world=team).shape)
        with pytest.raises(pkt.AllocationMismatch) as caught:
            pkt.zeros(8 + (world.rank == 2), world=team)
        return str(caught.value)

    ends = values(forked.in_worlds(4, main))
    assert "(8,) fp32" in ends[0]
    assert "(9,) fp32" in ends[0]
    assert ends[0] == ends[2]


@pytest.mark.parametrize("how", ["killed", "late"])
def test_a_lost_member_is_named_by_its_rank_in_the_world(how: str) -> None:
    def main(world: Any) -> str:
        team = own(world)
        if world.rank == 3:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3)
            return ""

        def calls() -> None:
            team.barrier()
            world.barrier()

        with pytest.raises((PeerLost, WaitTimeout)) as caught:
            calls()
        return str(caught.value)

    ends = forked.in_worlds(4, main, timeout=1.0)
    for end in ends[:3]:
        assert end.error is None, end.error
        assert "rank 3" in end.value, end.value


def test_an_expired_wait_of_a_team_names_its_counter_and_ranks_of_the_world() -> None:
    def main(world: Any) -> str:
        team = own(world)
        flags = pkt.signals(8, name="ready", world=team)
        page = world.heap.tensor(world.heap.status)
        assert team.device.status.data_ptr() == page.data_ptr()
        if world.rank == 3:
            record(page, 0, 3, flags.data_ptr() - world.backend.base + 4 * 7, 3, 2, 41)
        page[words.STATUS_ABORT] = 1  # as the device does on all ranks
        world.backend.transport.barrier("written")
        with pytest.raises(WaitTimeout) as caught:
            team.barrier()
        world.backend.transport.barrier("told")
        return str(caught.value)

    for text in values(forked.in_worlds(4, main)):
        assert text.startswith("rank 3: ")
        assert "program 5 waits on ready[7] after 10.0 s: wanted >= 3, found 2" in text


def test_torch_has_no_process_group_of_a_team() -> None:
    def main(world: Any) -> str:
        with pytest.raises(Unsupported) as caught:
            process_group(own(world))
        return str(caught.value)

    assert "found a team, for which torch has made none" in values(forked.in_worlds(4, main))[0]


def test_a_forked_process_has_no_part_in_a_team() -> None:
    def main(world: Any) -> int:
        team = world.team([0, 1])
        child = os.fork()
        if child == 0:
            try:
                team.barrier()
            except pkt.Closed:
                os._exit(7)
            os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        team.barrier()
        assert torch.equal(pkt.ones(3, world=team).plain(), torch.ones(3))
        return status

    assert values(forked.in_worlds(2, main)) == [7, 7]
