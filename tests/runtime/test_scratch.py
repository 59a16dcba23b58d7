"""world.scratch(): what is given back, what stays, and what happens where one rank leaves alone."""

import pytest
import torch

import pkt
from pkt.errors import CollectiveMismatch, HeapFull, PeerLost, SignalIndexError, UseAfterFree
from pkt.runtime.backend import SIGNAL_HEADER

from .conftest import CAPACITY
from .forked import in_worlds


def inbox(world, key, count=1000):
    """A workspace as operators keep them."""
    return world.workspace(key, lambda: [pkt.empty(count, name=key, world=world), pkt.signals(3, world=world)])


def free(world):
    return world.heap.ledger.free_bytes


def test_workspaces_and_plans_are_given_back_and_nothing_else(ranks):
    def main(world):
        before = inbox(world, "before")
        world.plans["before"] = world.lasting["before"] = 1
        bytes_before = free(world)
        with world.scratch():
            mine = pkt.empty(100, name="mine", world=world)
            bytes_mine = bytes_before - free(world)
            first = inbox(world, "inside")
            assert inbox(world, "before") is before
            assert inbox(world, "inside") is first
            world.plans["inside"] = world.lasting["inside"] = 2
            world.workspace("no memory", lambda: 5)
        assert free(world) == bytes_before - bytes_mine
        assert inbox(world, "before") is before
        assert (world.plans, world.lasting) == ({"before": 1}, {"before": 1, "inside": 2})
        assert world.workspace("no memory", lambda: 6) == 6
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
        assert not world._workspaces
        assert free(world) == before

    ranks(2, main)


def test_workspaces_that_make_others(ranks):
    def main(world):
        before = free(world)
        with world.scratch():
            world.workspace("both", lambda: (inbox(world, "one"), pkt.empty(5, world=world)))
            pkt.empty(5, world=world).free()
            inbox(world, "one")[0].free()  # by somebody who should not
        assert (free(world), len(world.heap.live)) == (before, 0)

    ranks(2, main)


def test_what_did_not_fit_leaves_nothing(ranks):
    """The first of its buffers was there."""

    def main(world):
        before = free(world)

        def make():
            return pkt.empty(1000, world=world), pkt.empty(CAPACITY, dtype=torch.uint8, world=world)

        for _ in range(3):
            with world.scratch(), pytest.raises(HeapFull):
                world.workspace("too large", make)
            assert free(world) == before

    ranks(2, main)


def leaves(world):
    with world.scratch():
        inbox(world, "kept")
        raise ZeroDivisionError


def test_left_by_an_exception_everything_stays(ranks):
    def main(world):
        before = free(world)
        with world.scratch():
            with pytest.raises(ZeroDivisionError):
                leaves(world)
            world._workspaces["kept"][0].fill_(1)
        assert (free(world), world._workspaces) == (before, {}), "the scope around it frees it"
        with pytest.raises(ZeroDivisionError):
            leaves(world)
        world._workspaces["kept"][0].fill_(1)
        assert len(world.heap.live) == 2
        assert world._scopes == []

    ranks(2, main)


def test_one_rank_that_goes_on_alone_is_named():
    """It left by an exception, and took it for done. Nothing was freed anywhere."""

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


def test_one_rank_that_ends_is_named():
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


def test_ranks_whose_workspaces_differ_do_not_free_alone():
    def main(world):
        def make():
            return pkt.empty(8, name="inbox", world=world)

        def meet():
            with world.scratch():
                world.workspace("inbox", make) if world.rank == 0 else make()
            world.barrier()

        with pytest.raises(CollectiveMismatch, match=r"rank 0: scratch\(\); rank 1: barrier\(\)"):
            meet()
        return len(world.heap.live)

    ends = in_worlds(2, main)
    assert [end.value for end in ends] == [1, 1], ends


def test_overwritten_guard_words_are_said_when_all_is_freed(ranks):
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


def test_a_closed_world_has_nothing_to_give_back(ranks):
    def main(world):
        with world.scratch():
            inbox(world, "inbox")
            world.close()
        with pytest.raises(pkt.Closed, match=r"scratch\(\)"):
            world.scratch()

    ranks(1, main)


def test_operators_make_theirs_again():
    """In the simulator, which would find kernels that still use what is freed."""

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
