"""Teams: who is in them, what they share with the world, and what goes wrong in them, on simulated ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.kernels.shared.gluon_host import everywhere
from pkt.runtime.backend import GUARD_WORD
from pkt.runtime.team import check_agreed
from pkt.runtime.world import named_world
from tests.simulate.helpers import outcome


def launch(fn: Any, ranks: int, *args: Any, seed: int = 0) -> list[Any]:
    return pkt.launch(fn, ranks, device="cpu", args=args, heap="64MiB", seed=seed)


@triton.jit
def turn_kernel(x, y, got, inbox, flags, bar, world, HOW: tl.constexpr):
    """Each rank's x goes to the next rank's y (tensors of the world) and inbox (of the team)."""
    launch = pl.epoch(flags, world)
    right = (world.rank + 1) % world.size
    if HOW != "no barrier":
        pl.barrier(bar, world)  # before overwrite
    pl.put(dst=y, src=x, peer=right, world=world)
    pl.put(dst=inbox, src=x, peer=right, world=world)
    pl.signal(flags, right, world)
    if HOW != "no wait":
        pl.wait(flags, launch, world)
    tl.store(got, tl.load(y))
    tl.store(got + 1, tl.load(inbox))


def turn(world: Any, team: Any, how: str = "", launches: int = 2) -> None:
    x, y = pkt.zeros(1), pkt.zeros(1)
    if team is None:
        return
    inbox, flags, bar = pkt.empty(1, world=team), pkt.signals(1, world=team), pkt.signals(1, world=team)
    got = torch.zeros(2, device=world.torch_device)
    for step in range(launches):
        x.fill_(10 * step + world.rank)
        turn_kernel[(1,)](x, y, got, inbox, flags, bar, team.device, how)
        left = team.ranks[(team.rank - 1) % team.size]
        assert got.tolist() == [10 * step + left] * 2


TEAMS = {
    "halves": (4, [[0, 1], [2, 3]]),
    "strided": (4, [[0, 2], [1, 3]]),
    "listed": (6, [[5, 0, 1], [2, 4, 3]]),
    "backwards": (3, [[2, 1, 0]]),
    "some": (4, [[1, 3]]),
    "unlike": (8, [[0, 7, 1, 2], [3, 4, 5]]),
    "alone": (2, [[1], [0]]),
}


def own(world: Any, teams: list[list[int]]) -> Any:
    """This rank's team; ranks outside all of them name the first."""
    return world.team(next((ranks for ranks in teams if world.rank in ranks), teams[0]))


def reach(world: Any, teams: list[list[int]]) -> None:
    """Kernels and collectives reach the members of this rank's team."""
    team = own(world, teams)
    turn(world, team)
    if team is None:
        assert all(world.rank not in members for members in teams)
        return
    members = list(team.ranks)
    assert members in teams
    assert (team.rank, team.size, team.parent) == (members.index(world.rank), len(members), world)
    assert team.all_gather_object(world.rank) == members
    assert team.broadcast(world.rank, root=team.size - 1) == members[-1]
    x = torch.full((300,), float(world.rank), device=world.torch_device)
    assert pkt.all_gather(x[:1], world=team).tolist() == members
    total = pkt.all_reduce(x, world=team)
    assert total.unique().tolist() == [sum(members)]
    y = pkt.full(1, float(team.rank), world=team)
    team.barrier()
    assert [y.peer(r).item() for r in range(team.size)] == list(range(team.size))
    team.barrier()
    team.check()


@pytest.mark.parametrize("name", TEAMS)
def test_kernels_and_collectives_reach_the_members(name: str) -> None:
    ranks, teams = TEAMS[name]
    for seed in (0, 1):
        launch(reach, ranks, teams, seed=seed)


@pytest.mark.parametrize("teams", [[[0, 2], [1, 3]], [[3, 0, 1]]])
def test_every_schedule_is_right_and_every_fault_is_caught(teams: list[list[int]]) -> None:
    def main(world: Any) -> None:
        turn(world, own(world, teams))

    report = pkt.simulate(main, 4, seeds=15, mutants=True, lost_signals=True, sms=1)
    report.check()
    assert {m.site.call for m in report.mutants} >= {"barrier", "signal", "wait"}


@pytest.mark.parametrize("how", ["no wait", "no barrier"])
def test_a_race_in_a_team_names_ranks_of_the_world(how: str) -> None:
    def main(world: Any) -> None:
        turn(world, own(world, [[1, 3], [0, 2]]), how, 3)

    report = pkt.simulate(main, 4, seeds=10, sms=1)
    (race, *_) = (str(f) for f in report.findings if f.kind == "DataRace")
    pairs = re.findall(r"store of rank (\d)'s y\[0\] by rank (\d)", race)
    assert pairs
    assert all(abs(int(a) - int(b)) == 2 for a, b in pairs), race


def test_teams_nest_and_overlap() -> None:
    """Rows and columns of a mesh 2 x 4, then halves of a row, one after the other."""

    def main(world: Any) -> None:
        row, column = divmod(world.rank, 4)
        rows, columns = world.team(range(4 * row, 4 * row + 4)), world.team([column, column + 4])
        half = rows.team([rows.rank // 2 * 2 + 1, rows.rank // 2 * 2])
        listed = rows.team([0, 3, 1])
        assert half.ranks == (4 * row + column // 2 * 2 + 1, 4 * row + column // 2 * 2)
        assert half.lineage == (half, rows, world)
        assert (listed is None) == (column == 2)
        x = pkt.full(1, float(world.rank))  # of the world, and works in all its teams
        one = pkt.full(1, float(rows.rank), world=rows)

        def total(team: Any) -> float:
            return pkt.all_reduce(torch.full((50,), float(world.rank)), world=team)[0].item()

        for _ in range(2):
            assert total(rows) == sum(range(4 * row, 4 * row + 4))
            assert pkt.all_gather(x, world=rows).tolist() == list(rows.ranks)
            assert total(columns) == 2 * column + 4
            assert pkt.all_gather(x, mode="pull", out=pkt.empty(2, world=columns), world=columns).tolist() == [
                column,
                column + 4,
            ]
            assert total(half) == sum(half.ranks)
            assert pkt.all_gather(one, world=half).tolist() == [half.ranks[0] % 4, half.ranks[1] % 4]
            if listed is not None:
                assert pkt.all_gather(x, world=listed).tolist() == [4 * row, 4 * row + 3, 4 * row + 1]
            assert total(world) == 28
        turn(world, half)

    launch(main, 8, seed=2)


def test_a_rank_alone_asks_nobody_and_has_no_heap() -> None:
    def run(world: Any) -> None:
        if world.rank == 1:  # the others make none
            alone = world.alone
            assert alone is world.alone
            assert (alone.rank, alone.size, alone.ranks, alone.alone) == (0, 1, (1,), alone)
            assert named_world(alone.name) is alone
            x = torch.arange(8.0)
            assert torch.equal(pkt.ring_attention(*[x.view(1, 1, 1, 8)] * 3, mode="copy", world=alone).flatten(), x)
            with pytest.raises(pkt.HeapFull):
                pkt.empty(1, world=alone)
        made = [world.team([rank]) for rank in range(3)]
        assert world.rank != 1 or made[1].name != world.alone.name
        assert named_world(f"{world.name}/alone of 1") is world.alone
        world.barrier()

    launch(run, 3)


def test_memory_of_a_team_lies_in_its_share() -> None:
    def main(world: Any) -> None:
        free = world.heap.ledger.free_bytes
        team = world.team([world.rank // 2 * 2, world.rank // 2 * 2 + 1], heap="1MiB")
        assert free - world.heap.ledger.free_bytes >= 1 << 20
        inside = range(team.heap.backend.base, team.heap.backend.base + (1 << 20))
        x, y = pkt.zeros(1000, world=team), pkt.zeros(1000)
        assert x.data_ptr() in inside
        assert y.data_ptr() not in inside
        assert (x.world, y.world) == (team, world)
        assert world.heap.find(x.data_ptr()) is x._allocation  # for the error of an expired wait
        inner = team.team([1, 0], heap="64KiB")
        assert pkt.zeros(4, world=inner).data_ptr() in inside
        with pytest.raises(pkt.HeapFull):
            pkt.empty(1 << 20, dtype=torch.uint8, world=team)
        x.free()
        for _ in range(3):  # freed memory is used again
            pkt.zeros(800_000, dtype=torch.uint8, world=team).free()
        team.barrier()
        a, left = torch.ones(16, 16), team.heap.ledger.free_bytes
        with pkt.Workspace(team) as workspace:
            pkt.matmul_all_reduce(a, a, world=team, workspace=workspace)
            assert team.heap.ledger.free_bytes < left
        with team.scratch():
            pkt.all_reduce(torch.ones(2000), world=team)
        team.barrier()
        assert team.heap.ledger.free_bytes == left
        assert pkt.matmul_all_reduce(a, a, world=team)[0, 0].item() == 32
        assert team.heap.ledger.free_bytes < left
        with pytest.raises(pkt.HeapFull):
            world.team([0, 1], heap="63MiB")

    launch(main, 4)


def test_a_closed_team_or_world_says_so() -> None:
    def main(world: Any) -> None:
        team, other = world.team([0, 1]), world.team([1, 0])
        x = pkt.zeros(4, world=team)
        with team:
            pass
        for use in (team.barrier, lambda: x.plain(), lambda: pkt.all_reduce(torch.ones(2), world=team)):
            with pytest.raises(pkt.Closed):
                use()
        other.barrier()
        world.close()
        assert other.closed
        with pytest.raises(pkt.Closed):
            world.team([0])

    launch(main, 2)


def test_compiled_code_finds_the_team() -> None:
    """Simulated ranks run the code that one of them compiles, with the names of its worlds."""

    def main(world: Any) -> str:
        world.team([3])
        one, two = world.team([world.rank % 2, world.rank % 2 + 2]), world.team([3, 1, 0, 2])
        inner = two.team([0, 1, 2, 3])
        for team in (world, one, two, inner):
            assert named_world(team.name) is team
            x = torch.full((4,), float(world.rank))
            torch._dynamo.reset()
            compiled = torch.compile(lambda x, t=team: pkt.all_reduce(x, world=t) + 1, backend="eager", fullgraph=True)
            assert compiled(x)[0].item() == sum(team.ranks) + 1
        assert named_world("") is world
        return one.name, two.name, inner.name

    assert len(set(launch(main, 4))) == 1


@pytest.mark.parametrize("ranks", [[3, 1], [3, 0, 1]])
def test_a_peer_of_a_tensor_is_counted_in_the_world_or_in_the_team(ranks: list[int]) -> None:
    def main(world: Any) -> None:
        x, team = pkt.full((32, 64), float(world.rank), dtype=torch.bfloat16), world.team(ranks)
        assert x.peer(2)[0, 0].item() == 2
        if team is None:
            return
        y = pkt.full(2, float(team.rank), world=team)
        world_of_y = [y.peer(r)[0].item() for r in range(team.size)]
        assert [x.peer(r, team)[0, 0].item() for r in range(team.size)] == ranks
        assert [y.peer(r, world=team)[0].item() for r in range(team.size)] == world_of_y == list(range(team.size))
        found = everywhere(x, (16, 64), team)  # the Gluon forms' descriptors: mine, then those of the next ranks
        wanted = [x.peer(ranks[(team.rank + d) % team.size]).data_ptr() for d in range(team.size)]
        assert [d.base.data_ptr() for d in found[: team.size]] == wanted
        with pytest.raises(pkt.RankError, match="from 0 to"):
            x.peer(team.size, team)
        with pytest.raises(pkt.NotSymmetric, match="a symmetric tensor of another world"):
            y.peer(0, world)

    launch(main, 4)


@pytest.mark.parametrize("call", ["check", "close"])
def test_the_world_checks_the_guard_words_of_its_teams(call: str) -> None:
    def main(world: Any) -> None:
        team = world.team([1, 0])
        flags = pkt.signals(4, world=team)
        world.check()
        team.heap.words_of(flags._allocation)[16 + 5] = 7
        with pytest.raises(pkt.SignalIndexError, match=r"the guard word at flags\[5\] was overwritten"):
            getattr(world, call)()
        assert world.closed == team.closed == (call == "close")
        if call == "check":  # the end of the run checks again
            team.heap.words_of(flags._allocation)[16 + 5] = GUARD_WORD

    launch(main, 2)


# ------------------------------------------------------------------------------------------------------ wrong calls
@pytest.mark.parametrize(
    ("ranks", "error", "text"),
    [
        ([0, 4], pkt.RankError, "rank 0: team(ranks=): found rank 4, wanted an integer from 0 to 3"),
        ([0, -1], pkt.RankError, "found rank -1"),
        ([], pkt.ShapeError, "at least one rank, and each once"),
        ([1, 1], pkt.ShapeError, "found [1, 1], wanted at least one rank, and each once"),
        (2, pkt.ShapeError, "ranks, as in [0, 2] or range(4)"),
        (["a"], pkt.ShapeError, "ranks, as in [0, 2] or range(4)"),
        ([0.5], pkt.ShapeError, "ranks, as in [0, 2] or range(4)"),
        ([False, True], pkt.ShapeError, "found [False, True], wanted ranks, as in [0, 2] or range(4)"),
    ],
)
def test_wrong_ranks_are_refused_before_anything_happens(ranks: Any, error: type[Exception], text: str) -> None:
    def main(world: Any) -> str:
        free = world.heap.ledger.free_bytes
        with pytest.raises(error) as caught:
            world.team(ranks)
        assert world.heap.ledger.free_bytes == free
        return str(caught.value)

    assert text in launch(main, 4)[0]


@pytest.mark.parametrize("size", [0, "x", "1KiB"])
def test_a_share_that_is_no_size_is_refused(size: Any) -> None:
    def main(world: Any) -> None:
        with pytest.raises(pkt.ShapeError, match="heap"):
            world.team([0, 1], heap=size)

    launch(main, 2)


def test_unequal_steps_take_ten_ranks_of_64() -> None:
    def main(world: Any) -> None:
        with pytest.raises(pkt.Unsupported) as caught:
            world.team([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11])
        assert "unequal steps take at most 10 ranks of 64; equal ones, as range(0, 8, 2), any" in str(caught.value)
        members = [11, 0, 1, 2, 3, 4, 5, 6, 7, 9]
        team = world.team(members)
        assert team is None or team.all_gather_object(world.rank) == members
        if team is not None:
            assert pkt.all_gather(torch.tensor([float(world.rank)]), world=team).tolist() == members

    launch(main, 12)


SAID = [
    ({0: [0, 1], 1: [0, 1], 2: [2]}, True),
    ({0: [0, 1], 1: [0, 1], 2: [0, 1]}, True),
    ({0: [0, 1], 1: [1, 0], 2: [2]}, False),  # another order
    ({0: [0, 1], 1: [1, 2], 2: [1, 2]}, False),  # not disjoint
    ({0: [0, 1], 1: [2], 2: [2]}, False),  # rank 1 is named by a team that it does not name
    ({0: [0], 1: [0, 2], 2: [2]}, False),  # rank 1 names a team that its members do not
]


@pytest.mark.parametrize(("said", "agreed"), SAID)
def test_all_members_name_the_same_team(said: dict[int, list[int]], agreed: bool) -> None:
    if agreed:
        check_agreed({rank: (ranks, 1 << 20) for rank, ranks in said.items()})
        return
    with pytest.raises(pkt.CollectiveMismatch):
        check_agreed({rank: (ranks, 1 << 20) for rank, ranks in said.items()})

    def main(world: Any) -> None:
        world.team(said[world.rank])

    assert isinstance(outcome(main, 3).failure, pkt.CollectiveMismatch)


def test_ranks_that_want_other_shares_are_told() -> None:
    found = outcome(lambda world: world.team([0, 1], heap=(1 + world.rank) << 20), 2).failure
    assert isinstance(found, pkt.CollectiveMismatch)
    assert "rank 0: team([0, 1], heap=1048576); rank 1: team([0, 1], heap=2097152)" in str(found)


def test_a_tensor_of_a_team_is_not_one_of_the_world() -> None:
    def main(world: Any) -> None:
        teams = [world.team([0, 1]), world.team([1, 0])]
        x = pkt.zeros(8, world=teams[0])
        for other in (world, teams[1]):
            with pytest.raises(pkt.NotSymmetric, match="a symmetric tensor of another world, 'x'"):
                pkt.all_reduce(x, mode="one_shot", world=other)
        assert pkt.all_reduce(x)[0].item() == 0  # the tensor's world

    launch(main, 2)


def test_members_that_make_other_calls_are_told() -> None:
    def main(world: Any) -> None:
        team = world.team([0, 2, 3])
        if team is not None:
            pkt.all_reduce(torch.ones(4 + (team.rank == 1)), world=team)

    found = outcome(main, 4).failure
    assert isinstance(found, pkt.CollectiveMismatch)

    def apart(world: Any) -> None:
        team = world.team([0, 1])
        (team if world.rank == 0 else world).barrier()

    found = outcome(apart, 2).failure
    assert isinstance(found, (pkt.CollectiveMismatch, pkt.Deadlock))
    assert "barrier()" in str(found)


# -------------------------------------------------------------------------------------------- what goes wrong inside
@triton.jit
def lonely_kernel(flags, world):
    if tl.cast(world.rank, tl.int32) == 0:
        pl.wait(flags + 1, 1, world)


def test_a_deadlock_in_a_team_names_ranks_of_the_world() -> None:
    def main(world: Any) -> None:
        team = world.team([3, 1])
        if team is not None:
            flags = pkt.signals(2, world=team)
            lonely_kernel[(1,)](flags, team.device)

    found = outcome(main, 4).failure
    assert isinstance(found, pkt.Deadlock)
    assert "rank 3: lonely_kernel program 0 waits on flags[1]" in str(found)


@triton.jit
def stray_kernel(x, world, PEER: tl.constexpr):
    pl.store(x, 1.0, PEER, world)


@pytest.mark.parametrize("peer", [2, -1])
@pytest.mark.parametrize("ranks", [[0, 1], [3, 0, 1]])
def test_a_peer_outside_the_team_is_out_of_bounds(peer: int, ranks: list[int]) -> None:
    """The world may have memory where the address leads."""

    def main(world: Any) -> None:
        x, team = pkt.zeros(4), world.team(ranks)
        if team is not None:
            stray_kernel[(1,)](x, team.device, peer if peer < 0 else team.size)

    found = outcome(main, 6).failure
    assert isinstance(found, pkt.OutOfBounds)
    assert "a copy of x[0] on a rank that the team does not have" in str(found)


@triton.jit
def everyone_kernel(x, out, world, N: tl.constexpr):
    ranks = tl.arange(0, N)  # a block of ranks
    inside = ranks < world.size
    tl.store(out + ranks, pl.load(x + ranks * 0, ranks, world, mask=inside), mask=inside)


@pytest.mark.parametrize("ranks", [[5, 1, 3], [0, 2, 5, 1]])
def test_a_block_of_ranks_is_translated(ranks: list[int]) -> None:
    def main(world: Any) -> None:
        x, team = pkt.full(1, float(world.rank)), world.team(ranks)
        if team is not None:
            out = torch.zeros(4)
            everyone_kernel[(1,)](x, out, team.device, 4)
            assert out.tolist()[: team.size] == ranks

    launch(main, 6)
