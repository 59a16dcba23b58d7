"""From torch.distributed to a world: default group, subgroups in any order, meshes, torchrun's environment."""

import os
import random

import pytest
import torch.distributed as dist

from pkt.errors import RankError, ShapeError, WaitTimeout
from pkt.runtime import bootstrap
from pkt.runtime.processes import rendezvous

from . import forked
from .fake_driver import FakeDriver


def in_gloo(tmp_path, size, main):
    """main(rank) with a gloo process group."""
    store = tmp_path / "store"

    def run(rank):
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        return main(rank)

    return forked.run(size, run, patience=90)


def opened(where, timeout=10.0):
    return bootstrap.open_world(where, dist.get_rank(), forked.HEAP, timeout, driver=FakeDriver, stride=forked.STRIDE)


def test_the_default_group(tmp_path):
    def main(rank):
        with opened(bootstrap.place(None, 10.0)) as world:
            return world.rank, world.size, world.all_gather_object(rank)

    ends = in_gloo(tmp_path, 3, main)
    assert [end.value for end in ends] == [(r, 3, [0, 1, 2]) for r in range(3)], ends


def test_two_disjoint_subgroups_at_once_have_ranks_of_their_own(tmp_path):
    def main(rank):
        groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
        mine = groups[rank % 2]
        with pytest.raises(RankError, match="outside the group"):
            bootstrap.place(groups[1 - rank % 2], 1.0)
        with opened(bootstrap.place(mine, 10.0)) as world:
            return world.rank, world.all_gather_object(rank)

    ends = in_gloo(tmp_path, 4, main)
    assert [end.value for end in ends] == [(0, [0, 2]), (0, [1, 3]), (1, [0, 2]), (1, [1, 3])], ends


def test_a_device_mesh_dimension(tmp_path):
    def main(rank):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with opened(bootstrap.place(mesh["tp"], 10.0)) as world:
            return world.all_gather_object(rank)

    ends = in_gloo(tmp_path, 4, main)
    assert [end.value for end in ends] == [[0, 1], [0, 1], [2, 3], [2, 3]], ends


def test_500_random_orders_of_subgroups(tmp_path):
    """Every rank takes its places in its groups' worlds in its own order, in some groups twice.

    Rank 0 of a group writes without waiting, and each rank first takes the places where it is rank 0: no deadlock.
    """
    members = [[0, 1], [1, 2], [0, 2], [0, 1, 2]]

    def main(rank):
        groups = [dist.new_group(m) for m in members]
        plan = random.Random(4)
        met = []
        for number in range(500):
            order = [plan.randrange(4) for _ in range(4)]  # the same plan on every rank
            mine = [g for g in order if rank in members[g]]
            random.Random(number * 10 + rank).shuffle(mine)  # a different order on every rank
            leads = [g for g in mine if members[g][0] == rank]
            for g in leads + [g for g in mine if g not in leads]:
                where = bootstrap.place(groups[g], 20.0)
                met.append((number, g, sum(m[:2] == (number, g) for m in met), where.meeting.directory, where.rank))
                if where.rank == 0:
                    where.meeting.remove()
        return met

    ends = in_gloo(tmp_path, 3, main)
    assert all(end.error is None for end in ends), ends
    places = {}
    for end in ends:
        for number, g, nth, directory, rank in end.value:
            assert members[g][rank] == end.rank
            places.setdefault((number, g, nth), []).append(directory)
    assert len(places) == 2000
    assert all(len(t) == len(members[g]) and len(set(t)) == 1 for (_, g, _), t in places.items())
    assert len({t[0] for t in places.values()}) == 2000


def test_a_missing_rank_0_is_named(tmp_path):
    def main(rank):
        if rank == 0:
            dist.barrier()
            return None
        with pytest.raises(WaitTimeout, match=r"rank 1: pkt.init\(\) waits for rank 0 after 0.5 s"):
            bootstrap.place(None, 0.5)
        dist.barrier()

    assert [end.error for end in in_gloo(tmp_path, 2, main)] == [None, None]


def test_torchruns_environment():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def main(rank):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        where = bootstrap.place(None, 20.0)
        fake = FakeDriver(rank)
        with bootstrap.open_world(where, rank, forked.HEAP, 10.0, driver=lambda r: fake, stride=forked.STRIDE) as world:
            return world.all_gather_object(rank)

    ends = forked.run(2, main)
    assert [end.value for end in ends] == [[0, 1]] * 2, ends


def test_one_process_alone_makes_a_world(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    where = bootstrap.place(None, 1.0)
    with bootstrap.open_world(where, 0, forked.HEAP, 1.0, driver=FakeDriver, stride=forked.STRIDE) as world:
        assert (world.rank, world.size, world.all_gather_object(7)) == (0, 1, [7])
        assert (world.nodes, world.node, world.local_rank, world.node_size) == (1, 0, 0, 1)
    assert not os.path.exists(where.meeting.directory)


@pytest.mark.parametrize("found", [None, "", "4", " 8 "])
def test_pkt_node_size_that_makes_one_node_is_accepted(found):
    environment = {} if found is None else {"PKT_NODE_SIZE": found}
    assert bootstrap.node_size_of(0, 4, environment) in (None, 4)
    where = bootstrap.Place(0, 1, rendezvous.prepare())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", {**os.environ, **environment})
        with bootstrap.open_world(where, 0, forked.HEAP, 1.0, driver=FakeDriver, stride=forked.STRIDE) as world:
            assert world.nodes == 1


def test_pkt_node_size_that_makes_several_nodes_is_accepted():
    assert bootstrap.node_size_of(0, 4, {"PKT_NODE_SIZE": "1"}) == 1
    assert bootstrap.node_size_of(0, 1, {"PKT_NODE_SIZE": "1"}) == 1
    assert bootstrap.node_size_of(0, 4, {"PKT_NODE_SIZE": "2"}) == 2


@pytest.mark.parametrize("found", ["0", "-2", "two", "2.0", "3"])
def test_a_wrong_pkt_node_size_is_refused(found):
    wanted = rf"rank 3: pkt.init: PKT_NODE_SIZE: found '{found}', wanted a divisor of the 4 ranks"
    with pytest.raises(ShapeError, match=wanted):
        bootstrap.node_size_of(3, 4, {"PKT_NODE_SIZE": found})


@pytest.mark.parametrize("node_size", [None, 1])
def test_a_job_of_launch_says_how_many_ranks_a_node_has(monkeypatch, node_size):
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *device: None)
    monkeypatch.setattr(bootstrap, "open_world", lambda *given, **options: options)
    job = {"rank": 1, "size": 2, "directory": "", "token": "", "heap": 1, "timeout": 1.0, "multicast": False}
    assert bootstrap.open_job({**job, "node_size": node_size}) == {"multicast": False, "node_size": node_size}
