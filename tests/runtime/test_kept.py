"""Scopes: the world, pkt.Workspace and world.scratch() keep buffers, free them, and name ranks that disagree."""

from types import SimpleNamespace

import pytest
import torch

import pkt
from pkt.errors import (
    Closed,
    CollectiveMismatch,
    DtypeError,
    HeapFull,
    PeerLost,
    SignalIndexError,
    Unsupported,
    UseAfterFree,
)
from pkt.runtime.backend import SIGNAL_HEADER

from .conftest import CAPACITY
from .forked import in_worlds


def inbox(world, key="inbox", count=1000, workspace=None):
    """A buffer and counters as operators keep them."""

    def keep():
        return world.keep(key, lambda: [pkt.empty(count, name=key, world=world), pkt.signals(3, world=world)])

    if workspace is None:
        return keep()
    with world.using(workspace, "call()"):
        return keep()


def own(world):
    """The contents of the innermost open scope."""
    return world._scopes[-1].kept


def free(world):
    return world.heap.ledger.free_bytes


# --------------------------------------------------------------------------------------------------- world.scratch()
def test_the_end_of_a_scope_frees_its_buffers_and_plans_only(ranks):
    def main(world):
        before = inbox(world, "before")
        world.plans["before"] = world.lasting["fact"] = 1
        bytes_before = free(world)
        with world.scratch():
            mine = pkt.empty(100, name="mine", world=world)
            bytes_mine = bytes_before - free(world)
            first = inbox(world, "inside")
            assert inbox(world, "before") is before
            assert inbox(world, "inside") is first
            world.plans["inside"] = world.lasting["new fact"] = 2
            world.keep("no memory", lambda: 5)
        assert free(world) == bytes_before - bytes_mine
        assert inbox(world, "before") is before
        assert world.plans == {"before": 1}
        assert world.lasting == {"before": before, "fact": 1, "new fact": 2}
        assert world.keep("no memory", lambda: 6) == 6
        mine.fill_(before[0].numel())
        with pytest.raises(UseAfterFree, match=r"uses 'inside' after it was freed at the end of world.scratch\(\)"):
            first[0].fill_(1)
        again = inbox(world, "inside")
        assert again[1].eq(0).all()
        return [tensor._allocation.block.offset for tensor in again]

    first, *others = ranks(3, main)
    assert others == [first] * 2


def test_nested_scopes(ranks):
    def main(world):
        before = free(world)
        with world.scratch():
            outer = inbox(world, "outer")
            between = free(world)
            for _ in range(3):
                with world.scratch():
                    assert inbox(world, "outer") is outer
                    inbox(world, "inner")
                assert free(world) == between
            inbox(world, "inner")
        assert not own(world)
        assert free(world) == before

    ranks(2, main)


def test_buffers_made_inside_another_make_are_given_back(ranks):
    def main(world):
        before = free(world)
        with world.scratch():
            world.keep("both", lambda: (inbox(world, "one"), pkt.empty(5, world=world)))
            pkt.empty(5, world=world).free()
            inbox(world, "one")[0].free()  # the scope should free it, but this caller does
        assert (free(world), len(world.heap.live)) == (before, 0)

    ranks(2, main)


def test_a_make_that_fails_leaves_nothing_allocated(ranks):
    """The first of its two buffers fits, the second does not."""

    def main(world):
        before = free(world)

        def make():
            return pkt.empty(1000, world=world), pkt.empty(CAPACITY, dtype=torch.uint8, world=world)

        for _ in range(3):
            with world.scratch(), pytest.raises(HeapFull):
                world.keep("too large", make)
            assert free(world) == before

    ranks(2, main)


def leaves(world):
    with world.scratch():
        inbox(world, "kept")
        raise ZeroDivisionError


def test_after_an_exception_everything_stays_allocated(ranks):
    def main(world):
        before = free(world)
        with world.scratch():
            with pytest.raises(ZeroDivisionError):
                leaves(world)
            own(world)["kept"][0].fill_(1)
        assert (free(world), own(world)) == (before, {}), "the outer scope frees them"
        with pytest.raises(ZeroDivisionError):
            leaves(world)
        own(world)["kept"][0].fill_(1)
        assert len(world.heap.live) == 2
        assert len(world._scopes) == 1

    ranks(2, main)


def test_a_rank_that_leaves_a_scope_by_an_exception_is_named():
    """Rank 1 leaves by an exception and carries on. Nothing is freed on any rank."""

    def main(world):
        try:
            with world.scratch():
                inbox(world, "inbox")
                live = len(world.heap.live)
                if world.rank == 1:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            with pytest.raises(CollectiveMismatch) as found:
                world.barrier()
        except CollectiveMismatch as error:
            return str(error), len(world.heap.live) - live
        return str(found.value), len(world.heap.live) - live

    ends = in_worlds(3, main)
    assert not [end.error for end in ends if end.error]
    for said, lost in (end.value for end in ends):
        assert r"ranks 0, 2: scratch(); rank 1: barrier()" in said
        assert lost == 0


def test_a_rank_that_ends_inside_a_scope_is_named():
    def main(world):
        live = 0
        try:
            with world, world.scratch():
                inbox(world, "inbox")
                live = len(world.heap.live)
                if world.rank == 1:
                    raise ZeroDivisionError
        except (ZeroDivisionError, PeerLost) as error:
            return type(error), len(world._heap.live) - live

    assert [end.value for end in in_worlds(2, main)] == [(PeerLost, 0), (ZeroDivisionError, 0)]


def test_ranks_that_keep_different_buffers_do_not_free_alone():
    def main(world):
        def make():
            return pkt.empty(8, name="inbox", world=world)

        def meet():
            with world.scratch():
                world.keep("inbox", make) if world.rank == 0 else make()
            world.barrier()

        with pytest.raises(CollectiveMismatch, match=r"rank 0: scratch\(\); rank 1: barrier\(\)"):
            meet()
        return len(world.heap.live)

    ends = in_worlds(2, main)
    assert [end.value for end in ends] == [1, 1], ends


def test_a_scope_frees_everything_before_it_reports_an_overwritten_guard_word(ranks):
    def main(world):
        before, said = free(world), ""
        try:
            with world.scratch():
                flags = inbox(world, "one")[1]
                inbox(world, "two")
                if world.rank == 1:
                    world.heap.words_of(flags._allocation, 0)[SIGNAL_HEADER // 4 + 3] += 1
                world.barrier()
        except SignalIndexError as error:
            said = str(error)
        return said, free(world) - before

    (said, lost), other = ranks(2, main)
    assert "the guard word at" in said
    assert (lost, other) == (0, ("", 0))


def test_a_scope_in_a_closed_world_frees_nothing(ranks):
    def main(world):
        with world.scratch():
            inbox(world, "inbox")
            world.close()
        with pytest.raises(pkt.Closed, match=r"scratch\(\)"):
            world.scratch()

    ranks(1, main)


def test_operators_allocate_again_after_a_scratch_scope():
    """Runs in the simulator, which finds kernels that still use freed memory."""

    def main(world):
        x, y = pkt.ones(40, world=world), pkt.empty(40, world=world)
        before = free(world)
        for _ in range(3):
            with world.scratch():
                for mode in ("one_shot", "two_shot", "low_latency", "low_latency_two_shot"):
                    assert pkt.all_reduce(x, y, mode=mode).eq(world.size).all()
                kept = list(world.plans.values())[-1]
            assert free(world) == before
        assert not world.plans
        with pytest.raises(UseAfterFree, match=r"kernels.flagged.* the end of world.scratch\(\)"):
            kept(x, y)
        world.barrier()

    pkt.launch(main, 3, "cpu")


# ------------------------------------------------------------------------------------------------------ pkt.Workspace
def test_workspaces_share_no_memory(ranks):
    def main(world):
        theirs, before = inbox(world), free(world)
        one, two = pkt.Workspace(world), pkt.Workspace(world)
        assert free(world) == before, "nothing is allocated before a call"
        first, second = inbox(world, workspace=one), inbox(world, workspace=two)
        assert inbox(world, workspace=one) is first
        assert inbox(world, workspace=two) is second
        assert inbox(world) is theirs
        assert len({buffer.data_ptr() for buffer, _ in (theirs, first, second)}) == 3
        taken = before - free(world)
        one.close()
        assert before - free(world) == taken / 2
        assert inbox(world, workspace=two) is second
        second[0].fill_(1)
        with pytest.raises(UseAfterFree, match="uses 'inbox' after it was freed at the end of workspace 1"):
            first[0].fill_(1)
        two.close()
        assert free(world) == before
        assert inbox(world) is theirs
        return one.number, two.number

    assert ranks(3, main) == [(1, 2)] * 3


def test_the_memory_of_a_closed_workspace_is_used_again(ranks):
    def main(world):
        for _ in range(8):
            with pkt.Workspace(world) as workspace:
                inbox(world, workspace=workspace, count=CAPACITY // 8)[0].fill_(1)

    ranks(2, main)


def test_a_closed_workspace_raises_closed(ranks):
    def main(world):
        workspace = pkt.Workspace(world)
        inbox(world, workspace=workspace)
        workspace.close()
        workspace.close()
        assert workspace.closed
        with pytest.raises(Closed, match=r"rank \d: call\(\): the workspace 1 is closed: call pkt.Workspace\(\) for a"):
            inbox(world, workspace=workspace)
        assert "closed" in repr(workspace)
        late = pkt.Workspace(world)
        inbox(world, workspace=late)
        world.close()
        late.close()
        with pytest.raises(Closed, match="the world is closed"):
            pkt.Workspace(world)

    ranks(2, main)


def test_other_objects_and_workspaces_of_other_worlds_are_refused(ranks):
    def main(world):
        workspace = pkt.Workspace(world)
        other = pkt.Workspace.__new__(pkt.Workspace)
        vars(other).update(vars(workspace), world=object())
        with pytest.raises(
            Unsupported, match=r"found workspace 1 of another world: make one with pkt.Workspace\(world"
        ):
            inbox(world, workspace=other)
        with pytest.raises(DtypeError, match="workspace: found dict, wanted a pkt.Workspace"):
            inbox(world, workspace={})
        return len(world.heap.live)

    assert ranks(2, main) == [0, 0]


def test_a_call_that_raises_leaves_the_worlds_own_scope_open(ranks):
    """The workspace owns the memory that the call had allocated."""

    def main(world):
        workspace, before = pkt.Workspace(world), free(world)

        def make():
            pkt.empty(10, world=world)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), world.using(workspace, "call()"):
            world.keep("key", make)
        assert (world.handed_in, len(world._scopes)) == (None, 1)
        assert free(world) < before
        workspace.close()
        assert free(world) == before

    ranks(2, main)


def test_a_capture_finds_buffers_and_makes_none(ranks):
    def main(world):
        workspace, capturing = pkt.Workspace(world), [True]
        inbox(world)
        world.streams = SimpleNamespace(capturing=lambda: capturing[0])
        before = free(world)
        with pytest.raises(Unsupported, match="found a CUDA graph being captured.*before the capture"):
            inbox(world, workspace=workspace)
        assert free(world) == before
        capturing[0] = False
        mine = inbox(world, workspace=workspace)
        capturing[0] = True
        assert inbox(world, workspace=workspace) is mine
        capturing[0] = False
        workspace.close()

    ranks(2, main)


def test_a_workspace_outlives_a_scratch_scope_around_its_calls(ranks):
    def main(world):
        before, workspace = free(world), pkt.Workspace(world)
        with world.scratch():
            mine = inbox(world, workspace=workspace)
            inbox(world)
        assert inbox(world, workspace=workspace) is mine
        mine[0].fill_(1)
        assert "inbox" not in own(world)
        workspace.close()
        assert free(world) == before

    ranks(2, main)


def test_an_exception_closes_a_workspace_without_waiting_for_other_ranks():
    def main(world):
        try:
            with world, pkt.Workspace(world) as workspace:
                inbox(world, workspace=workspace)
                if world.rank == 1:
                    raise ZeroDivisionError
        except (ZeroDivisionError, PeerLost) as error:
            return type(error), workspace.closed

    assert [end.value for end in in_worlds(2, main)] == [(PeerLost, True), (ZeroDivisionError, True)]


def test_a_rank_that_does_not_close_its_workspace_is_named():
    def main(world):
        workspace = pkt.Workspace(world)
        inbox(world, workspace=workspace)
        with pytest.raises(CollectiveMismatch, match=r"rank 0: Workspace.close\(\); rank 1: barrier\(\)"):
            workspace.close() if world.rank == 0 else world.barrier()
        return len(world.heap.live)

    assert [end.value for end in in_worlds(2, main)] == [2, 2]


def test_a_workspace_frees_everything_before_it_reports_an_overwritten_guard_word(ranks):
    def main(world):
        before, said, workspace = free(world), "", pkt.Workspace(world)
        flags = inbox(world, workspace=workspace)[1]
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
def test_operators_keep_everything_in_the_workspace_they_are_given(name):
    """Two workspaces take turns with equal shapes, without a barrier between calls, under the race detector."""

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
                assert all(scope._made and scope.kept and scope.plans for scope in (one, two)), options
            assert not world.plans, options
            assert all(isinstance(key, str) for key in own(world)), "only facts are left: keys of buffers are tuples"
            assert free(world) == before, options

    pkt.launch(main, 3, "cpu", heap="16MiB", sms=4, races=True)


def test_operators_take_the_world_of_their_workspace():
    def main(world):
        with pkt.Workspace() as workspace:
            assert workspace.world is world
            pkt.matmul_all_reduce(torch.ones(4, 4), torch.ones(4, 4), workspace=workspace)

    pkt.launch(main, 2, "cpu", heap="1MiB")


def test_operators_refuse_a_closed_workspace_before_they_allocate():
    def main(world):
        workspace = pkt.Workspace(world)
        workspace.close()
        for name in OPERATORS:
            with pytest.raises(Closed, match=f"rank {world.rank}: {name}: the workspace 1 is closed"):
                getattr(pkt, name)(torch.ones(4, 4), torch.ones(4, 4), workspace=workspace)
        return len(world.heap.live)

    assert pkt.launch(main, 2, "cpu", heap="1MiB") == [0, 0]


@pytest.mark.parametrize(("given", "said"), [((1, 2), "workspace=1.*workspace=2"), ((None, 1), "rank 1.*workspace=1")])
def test_ranks_that_give_different_workspaces_are_named(given, said):
    def main(world):
        some = {1: pkt.Workspace(world), 2: pkt.Workspace(world)}
        a = torch.ones(4, 4)
        pkt.matmul_all_reduce(a, a, workspace=some.get(given[world.rank]), world=world)

    with pytest.raises(CollectiveMismatch, match=said):
        pkt.launch(main, 2, "cpu", heap="1MiB")


def test_ranks_that_close_different_workspaces_are_named():
    def main(world):
        some, a = [pkt.Workspace(world) for _ in range(2)], torch.ones(4, 4)
        for workspace, rows in zip(some, (4, 20)):
            pkt.matmul_all_reduce(a[:1].expand(rows, 4).contiguous(), a, workspace=workspace)
        some[world.rank].close()

    with pytest.raises(CollectiveMismatch, match="differs"):
        pkt.launch(main, 2, "cpu", heap="1MiB")
