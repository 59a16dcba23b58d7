"""pkt.Workspace: what calls keep in it, what it gives back, and what happens where ranks or calls differ."""

from types import SimpleNamespace

import pytest
import torch

import pkt
from pkt.errors import Closed, CollectiveMismatch, DtypeError, PeerLost, SignalIndexError, Unsupported, UseAfterFree
from pkt.runtime.backend import SIGNAL_HEADER
from pkt.runtime.workspace import kept_in

from .conftest import CAPACITY
from .forked import in_worlds


def inbox(world, workspace=None, key="inbox", count=1000):
    """A buffer and counters as operators keep them."""

    def keep():
        return world.workspace(key, lambda: [pkt.empty(count, name=key, world=world), pkt.signals(3, world=world)])

    if workspace is None:
        return keep()
    with kept_in(workspace, world, "call()"):
        return keep()


def free(world):
    return world.heap.ledger.free_bytes


def test_each_keeps_its_own(ranks):
    def main(world):
        theirs, before = inbox(world), free(world)
        one, two = pkt.Workspace(world), pkt.Workspace(world)
        assert free(world) == before, "nothing is made before a call"
        first, second = inbox(world, one), inbox(world, two)
        assert inbox(world, one) is first
        assert inbox(world, two) is second
        assert inbox(world) is theirs
        assert len({buffer.data_ptr() for buffer, _ in (theirs, first, second)}) == 3
        taken = before - free(world)
        one.close()
        assert before - free(world) == taken / 2
        assert inbox(world, two) is second
        second[0].fill_(1)
        with pytest.raises(UseAfterFree, match="uses 'inbox' after it was freed at the end of workspace 1"):
            first[0].fill_(1)
        two.close()
        assert free(world) == before
        assert inbox(world) is theirs
        return one.number, two.number

    assert ranks(3, main) == [(1, 2)] * 3


def test_its_memory_is_used_again(ranks):
    def main(world):
        for _ in range(8):
            with pkt.Workspace(world) as workspace:
                inbox(world, workspace, count=CAPACITY // 8)[0].fill_(1)

    ranks(2, main)


def test_after_close_it_is_closed(ranks):
    def main(world):
        workspace = pkt.Workspace(world)
        inbox(world, workspace)
        workspace.close()
        workspace.close()
        assert workspace.closed
        with pytest.raises(Closed, match=r"rank \d: call\(\): the workspace 1 is closed: call pkt.Workspace\(\) for a"):
            inbox(world, workspace)
        assert "closed" in repr(workspace)
        late = pkt.Workspace(world)
        inbox(world, late)
        world.close()
        late.close()
        with pytest.raises(Closed, match="the world is closed"):
            pkt.Workspace(world)

    ranks(2, main)


def test_what_is_no_workspace_of_this_world(ranks):
    def main(world):
        workspace = pkt.Workspace(world)
        other = pkt.Workspace.__new__(pkt.Workspace)
        vars(other).update(vars(workspace), world=object())
        with pytest.raises(
            Unsupported, match=r"found workspace 1 of another world: make one with pkt.Workspace\(world"
        ):
            inbox(world, other)
        with pytest.raises(DtypeError, match="workspace: found dict, wanted a pkt.Workspace"):
            inbox(world, {})
        return len(world.heap.live)

    assert ranks(2, main) == [0, 0]


def test_a_call_that_raises_leaves_the_world_s(ranks):
    """And what it had made by then is the workspace's."""

    def main(world):
        workspace, before = pkt.Workspace(world), free(world)

        def make():
            pkt.empty(10, world=world)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), kept_in(workspace, world, "call()"):
            world.workspace("key", make)
        assert (world.handed_in, world._scopes) == (None, [])
        assert free(world) < before
        workspace.close()
        assert free(world) == before

    ranks(2, main)


def test_a_capture_uses_what_is_there_and_makes_nothing(ranks):
    def main(world):
        workspace, capturing = pkt.Workspace(world), [True]
        inbox(world)
        world.streams = SimpleNamespace(capturing=lambda: capturing[0])
        before = free(world)
        with pytest.raises(Unsupported, match="found a CUDA graph being captured.*before the capture"):
            inbox(world, workspace)
        assert free(world) == before
        capturing[0] = False
        mine = inbox(world, workspace)
        capturing[0] = True
        assert inbox(world, workspace) is mine
        capturing[0] = False
        workspace.close()

    ranks(2, main)


def test_inside_a_scope_it_keeps_what_it_has(ranks):
    def main(world):
        before, workspace = free(world), pkt.Workspace(world)
        with world.scratch():
            mine = inbox(world, workspace)
            inbox(world)
        assert inbox(world, workspace) is mine
        mine[0].fill_(1)
        assert not world._workspaces
        workspace.close()
        assert free(world) == before

    ranks(2, main)


def test_left_by_an_exception_it_meets_nobody():
    def main(world):
        try:
            with world, pkt.Workspace(world) as workspace:
                inbox(world, workspace)
                if world.rank == 1:
                    raise ZeroDivisionError
        except (ZeroDivisionError, PeerLost) as error:
            return type(error), workspace.closed

    assert [end.value for end in in_worlds(2, main)] == [(PeerLost, True), (ZeroDivisionError, True)]


def test_one_rank_that_does_not_close_is_named():
    def main(world):
        workspace = pkt.Workspace(world)
        inbox(world, workspace)
        with pytest.raises(CollectiveMismatch, match=r"rank 0: Workspace.close\(\); rank 1: barrier\(\)"):
            workspace.close() if world.rank == 0 else world.barrier()
        return len(world.heap.live)

    assert [end.value for end in in_worlds(2, main)] == [2, 2]


def test_overwritten_guard_words_are_said_when_all_is_freed(ranks):
    def main(world):
        before, said, workspace = free(world), "", pkt.Workspace(world)
        flags = inbox(world, workspace)[1]
        if world.rank == 1:
            world.heap.words_of(flags._allocation, 0)[SIGNAL_HEADER // 4 + 3] += 1
        world.barrier()
        try:
            workspace.close()
        except SignalIndexError as error:
            said = str(error)
        return "the guard word at" in said, free(world) - before

    assert ranks(2, main) == [(True, 0), (False, 0)]


# -------------------------------------------------------------------------------------------------------- operators
OPERATORS = {
    "all_gather_matmul": [{"mode": "push"}, {"mode": "copy"}, {"mode": "unfused"}, {"shard": "columns"}],
    "matmul_reduce_scatter": [{"mode": "add"}, {"mode": "inbox"}, {"mode": "unfused"}],
    "matmul_all_reduce": [{"mode": "lcsc"}, {"mode": "unfused"}],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_keep_everything_in_it(name):
    """Two of them in turn, of the same shapes, with nothing between the calls; the detector looks on."""

    def main(world):
        operator, size = getattr(pkt, name), world.size
        for options in OPERATORS[name]:
            before = free(world)
            b = torch.ones(16 * size if "shard" in options else 16, 264)
            wanted = {"all_gather_matmul": b.shape[0]}.get(name, 16 * size)
            with pkt.Workspace(world) as one, pkt.Workspace(world) as two:
                for value in (1, 2, 3, 4):
                    found = operator(
                        torch.full((72, 16), float(value)), b, workspace=one if value % 2 else two, **options
                    )
                    assert found.eq(value * wanted).all(), (options, value)
                held = one._made, one._workspaces, one._plans, two._made, two._workspaces, two._plans
                assert all(held), options
            assert (world._workspaces, world.plans) == ({}, {}), options
            assert free(world) == before, options

    pkt.launch(main, 3, "cpu", heap="16MiB", sms=4, races=True)


def test_its_world_is_taken():
    def main(world):
        with pkt.Workspace() as workspace:
            assert workspace.world is world
            pkt.matmul_all_reduce(torch.ones(4, 4), torch.ones(4, 4), workspace=workspace)

    pkt.launch(main, 2, "cpu", heap="1MiB")


def test_operators_refuse_a_closed_one_before_anything_is_made():
    def main(world):
        workspace = pkt.Workspace(world)
        workspace.close()
        for name in OPERATORS:
            with pytest.raises(Closed, match=f"rank {world.rank}: {name}: the workspace 1 is closed"):
                getattr(pkt, name)(torch.ones(4, 4), torch.ones(4, 4), workspace=workspace)
        return len(world.heap.live)

    assert pkt.launch(main, 2, "cpu", heap="1MiB") == [0, 0]


@pytest.mark.parametrize(("given", "said"), [((1, 2), "workspace=1.*workspace=2"), ((None, 1), "rank 1.*workspace=1")])
def test_ranks_that_give_different_ones_are_named(given, said):
    def main(world):
        some = {1: pkt.Workspace(world), 2: pkt.Workspace(world)}
        a = torch.ones(4, 4)
        pkt.matmul_all_reduce(a, a, workspace=some.get(given[world.rank]), world=world)

    with pytest.raises(CollectiveMismatch, match=said):
        pkt.launch(main, 2, "cpu", heap="1MiB")


def test_ranks_that_close_different_ones_are_named():
    def main(world):
        some, a = [pkt.Workspace(world) for _ in range(2)], torch.ones(4, 4)
        for workspace, rows in zip(some, (4, 20)):
            pkt.matmul_all_reduce(a[:1].expand(rows, 4).contiguous(), a, workspace=workspace)
        some[world.rank].close()

    with pytest.raises(CollectiveMismatch, match="differs"):
        pkt.launch(main, 2, "cpu", heap="1MiB")
