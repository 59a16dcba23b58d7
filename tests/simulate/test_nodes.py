"""Worlds of several nodes: puts and signals over the network arrive late and in any order, and the source is read late.

`to` is the next rank of the same rail, and `beside` the next rank of the same node.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.errors import CompileError, NotSymmetric, RankError, ShapeError, Unsupported
from pkt.language import address, ptx
from pkt.simulate.faults import Faults
from pkt.simulate.findings import DataRace, FarAccess, MissingQuiet, OvertakenPut
from tests.simulate.helpers import HEAP, failures, line_of, outcome

pytestmark = pytest.mark.machine

WORLDS = [(4, 2), (8, 4), (8, 2)]  # ranks and node_size: 2 x 2, 2 x 4 and 4 x 2
N = 40  # elements: 160 bytes, no power of two


def check(fn: Any, *args: Any, ranks: int = 4, node_size: int = 2, seeds: Any = range(6)) -> None:
    """Assert that no schedule of a right program has a finding or a wrong value, whether or not races are sought."""
    for races in (True, False):
        assert failures(fn, ranks, seeds, args=args, node_size=node_size, races=races) == {}


def found(fn: Any, *args: Any, kind: type[DataRace], node_size: int = 2, seeds: Any = range(12)) -> DataRace:
    """The race that the first schedule shows; without the detector some schedule must fail, too."""
    failed = failures(fn, 4, [0], args=args, node_size=node_size)
    race = failed[0]
    assert type(race) is kind, race
    wrong = failures(fn, 4, seeds, args=args, node_size=node_size, races=False)
    assert wrong, "no schedule shows wrong values"
    assert 0 not in wrong  # in the plain order everything arrives at once
    return race


# -- the host's side -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "node_size"), WORLDS)
def test_a_world_knows_its_nodes(ranks: int, node_size: int) -> None:
    def main(world: Any) -> tuple:
        node, rail = world.on_node, world.rail
        assert (node.rank, node.size, node.nodes, node.on_node) == (world.local_rank, node_size, 1, node)
        assert (rail.rank, rail.size, rail.nodes, rail.rail) == (world.node, world.nodes, world.nodes, rail)
        assert world.on_node is node
        assert world.rail is rail
        assert (world.device.node_size.value, node.device.node_size.value) == (node_size, 0)
        assert rail.device.node_size.value == node_size
        assert not world.multicast
        return world.nodes, world.node, world.local_rank, world.node_size, node.ranks, rail.ranks

    for rank, said in enumerate(pkt.launch(main, ranks=ranks, node_size=node_size, device="cpu")):
        node, local = divmod(rank, node_size)
        rail = tuple(range(local, ranks, node_size))
        own = tuple(range(node * node_size, (node + 1) * node_size))
        assert said == (ranks // node_size, node, local, node_size, own, rail)


def test_a_world_of_one_node_is_its_own_node() -> None:
    def main(world: Any) -> tuple:
        assert world.on_node is world
        assert world.rail.ranks == (world.rank,)
        return world.nodes, world.node, world.local_rank, world.node_size, world.device.node_size.value

    assert pkt.launch(main, ranks=2, device="cpu") == [(1, 0, 0, 2, 0), (1, 0, 1, 2, 0)]


def test_a_team_counts_its_own_nodes() -> None:
    def main(world: Any) -> tuple | None:
        team = world.team([5, 1, 0, 7])
        if team is None:
            return None
        text = ""
        try:
            _ = team.team([0, 1, 2]) and team._teams[-1].rail
        except Unsupported as error:
            text = str(error)
        return team.nodes, team.node, team.local_rank, team.node_size, text

    said = pkt.launch(main, ranks=8, node_size=2, device="cpu")
    uneven = "rank {}: world.rail: found nodes of 2, 1 ranks"
    assert said[0][:4] == (3, 0, 1, 2)
    assert said[1][:4] == (3, 0, 0, 2)
    assert said[5][:4] == (3, 1, 0, 1)
    assert said[7] == (3, 2, 0, 1, "")
    assert said[0][4].startswith(uneven.format(2))


@pytest.mark.parametrize("node_size", [0, 3, 8, True, "2"])
def test_a_wrong_node_size_is_refused(node_size: Any) -> None:
    with pytest.raises(ShapeError, match="node_size"):
        pkt.launch(lambda world: None, ranks=4, node_size=node_size, device="cpu")


@pytest.mark.parametrize("node_size", [0, 3, True, "1"])
def test_a_wrong_node_size_is_refused_before_a_process_starts(node_size: Any) -> None:
    with pytest.raises(pkt.ShapeError, match=r"node_size: found .*, wanted a divisor of the 4 ranks"):
        pkt.launch(lambda world: None, ranks=4, node_size=node_size)


def test_operators_without_a_form_over_nodes_refuse_them_and_work_within_one() -> None:
    def main(world: Any) -> list:
        with pytest.raises(Unsupported, match=rf"rank {world.rank}: broadcast: found a world of 2 nodes.*on_node"):
            pkt.broadcast(torch.ones(8), 0, world=world)
        return pkt.all_reduce(torch.ones(8), world=world.on_node).tolist()

    assert pkt.launch(main, ranks=4, node_size=2, device="cpu") == [[2.0] * 8] * 4


# -- right programs --------------------------------------------------------------------------------------------------


@triton.jit
def ring(x, y, ready, free, n, world, HOW: tl.constexpr):
    """Fill x with rank + launch, and send it to the next node, which answers when it has read it."""
    at = tl.arange(0, 64)
    epoch = pl.epoch(ready, world)
    me = tl.cast(world.rank, tl.int32)
    to, back = (me + world.node_size) % world.size, (me + world.size - world.node_size) % world.size
    tl.store(x + at, me + epoch, mask=at < n)
    if HOW == "put_signal":
        pl.put_signal(ready, to, world, dst=y, src=x, nbytes=n * 4)
    elif HOW == "shmem":
        pl.shmem.putmem_signal_nbi(y, x, n * 4, ready, 1, pl.shmem.SIGNAL_ADD, to, world)
    elif HOW == "putmem":
        pl.shmem.putmem(y, x, n * 4, to, world)
        pl.signal(ready, to, world)
    else:
        pl.put(dst=y, src=x, nbytes=n * 4, peer=to, world=world)
        if HOW == "fence":
            pl.fence(world=world)
        elif HOW == "quiet":
            pl.quiet(world)
        elif HOW == "near quiet":
            pl.quiet()
        pl.signal(ready, to, world)
    pl.wait(ready, epoch, world)
    got = tl.load(y + at, mask=at < n)
    tl.device_assert((got == back + epoch) | (at >= n), "overtaken")
    pl.signal(free, back, world)
    pl.wait(free, epoch, world)  # the next node has read y, so the network has read x


def ring_main(world: Any, how: str, launches: int = 2) -> None:
    x, y = pkt.zeros(N, dtype=torch.int32), pkt.zeros(N, dtype=torch.int32)
    ready, free = pkt.signals(1), pkt.signals(1)
    for _ in range(launches):
        ring[(1,)](x, y, ready, free, N, world.device, how)
    world.barrier()


@pytest.mark.parametrize(("ranks", "node_size"), WORLDS)
def test_a_ring_over_nodes(ranks: int, node_size: int) -> None:
    """The answer to its signal says that a put's source has been read: no quiet is needed."""
    check(ring_main, "put_signal", ranks=ranks, node_size=node_size, seeds=range(4))


@pytest.mark.parametrize("how", ["fence", "quiet", "shmem", "putmem"])
def test_fence_quiet_and_the_openshmem_names_order_a_put(how: str) -> None:
    check(ring_main, how)


def test_nodes_of_one_rank() -> None:
    check(ring_main, "put_signal", 2, ranks=3, node_size=1)


@pytest.mark.parametrize("how", ["plain", "near quiet"])
def test_a_signal_overtakes_a_put(how: str) -> None:
    race = found(ring_main, how, 1, kind=OvertakenPut)
    text = str(race)
    assert text.startswith("overtaken put: load of rank ")
    assert line_of(ring, "got = tl.load(y") in text
    assert f"far put of rank {race.second.rank}'s y[0] by rank {race.first.rank} ring" in text
    assert line_of(ring, "pl.put(dst=y") in text
    assert "pl.put_signal" in text


# -- sources ---------------------------------------------------------------------------------------------------------


@triton.jit
def reuse(x, y, ready, n, world, HOW: tl.constexpr):
    """Send 1s, then write 2s where they were, in the kernel or in the next launch."""
    at = tl.arange(0, 64)
    to = (tl.cast(world.rank, tl.int32) + world.node_size) % world.size
    tl.store(x + at, 1, mask=at < n)
    pl.put_signal(ready, to, world, dst=y, src=x, nbytes=n * 4)
    if HOW == "quiet":
        pl.quiet(world)
    elif HOW == "fence":
        pl.fence(world=world)
    elif HOW == "barrier":
        pl.barrier(ready + 1, world)
    elif HOW == "world barrier":
        pl.world_barrier(ready + 1, world)
    if HOW != "host":
        tl.store(x + at, 2, mask=at < n)  # reused
    pl.wait(ready, 1, world)
    tl.device_assert((tl.load(y + at, mask=at < n) == 1) | (at >= n), "read late")


def reuse_main(world: Any, how: str) -> None:
    x, y = pkt.zeros(N, dtype=torch.int32), pkt.zeros(N, dtype=torch.int32)
    reuse[(1,)](x, y, pkt.signals(4), N, world.device, how)
    if how == "host":
        x.fill_(2)
    world.barrier()


@pytest.mark.parametrize("how", ["quiet", "barrier", "world barrier"])
def test_a_source_is_free_behind_quiet_and_barriers(how: str) -> None:
    check(reuse_main, how)


@pytest.mark.parametrize("how", ["nothing", "fence"])
def test_a_source_written_too_early_is_found(how: str) -> None:
    race = found(reuse_main, how, kind=MissingQuiet)
    text = str(race)
    assert text.startswith(f"missing quiet: store of rank {race.first.rank}'s x[0]")
    assert line_of(reuse, "# reused") in text
    assert line_of(reuse, "pl.put_signal(ready") in text
    assert "pl.quiet(world)" in text


def test_the_end_of_a_kernel_completes_nothing() -> None:
    race = failures(reuse_main, 4, [0], args=("host",), node_size=2)[0]
    assert type(race) is MissingQuiet
    assert "by rank 0 host code" in str(race)


def test_freeing_the_source_of_a_put_on_its_way_is_found() -> None:
    def main(world: Any) -> None:
        x, y, ready = pkt.zeros(N, dtype=torch.int32), pkt.zeros(N, dtype=torch.int32), pkt.signals(4, unwaited=True)
        send[(1,)](x, y, ready, world.device)
        x.free()

    @triton.jit
    def send(x, y, ready, world):
        pl.put(dst=y, src=x, nbytes=160, peer=(tl.cast(world.rank, tl.int32) + 2) % 4, world=world)

    wrong = failures(main, 4, range(6), node_size=2)
    assert wrong
    assert all(type(error) is MissingQuiet and "free of rank" in str(error) for error in wrong.values())


# -- which puts a signal publishes -----------------------------------------------------------------------------------


@triton.jit
def relay(x, y, ready, n, world, node, HOW: tl.constexpr):
    """Rank 0 puts to rank 2 and tells its neighbour 1, which tells 3, which tells 2. Or it tells 3 itself."""
    at = tl.arange(0, 64)
    rank = tl.cast(world.rank, tl.int32)
    if rank == 0:
        tl.store(x + at, 7, mask=at < n)
        pl.put(dst=y, src=x, nbytes=n * 4, peer=2, world=world)
        if HOW == "quiet":
            pl.quiet(world)
        elif HOW == "fence" or HOW == "fence to 3":
            pl.fence(world=world)
        if HOW == "fence to 3":
            pl.signal(ready, 3, world)
        else:
            pl.signal(ready, 1, node)
    elif rank == 2:
        pl.wait(ready, 1, world)
        tl.device_assert((tl.load(y + at, mask=at < n) == 7) | (at >= n), "overtaken")
    elif rank == 3 or HOW != "fence to 3":
        pl.wait(ready, 1, world)
        pl.signal(ready, tl.where(rank == 1, 3, 2), world)


def relay_main(world: Any, how: str) -> None:
    x, y = pkt.zeros(N, dtype=torch.int32), pkt.zeros(N, dtype=torch.int32)
    relay[(1,)](x, y, pkt.signals(1), N, world.device, world.on_node.device, how)
    world.barrier()


def test_quiet_orders_a_put_before_a_signal_to_anybody() -> None:
    check(relay_main, "quiet")


@pytest.mark.parametrize("how", ["fence", "fence to 3", "nothing"])
def test_a_fence_orders_nothing_for_other_ranks(how: str) -> None:
    found(relay_main, how, kind=OvertakenPut, seeds=range(16))


@triton.jit
def two(x, y, ready, n, world, HOW: tl.constexpr):
    """Two puts of halves to the next node; the signal of the second one says nothing of the first."""
    at = tl.arange(0, 64)
    to = (tl.cast(world.rank, tl.int32) + world.node_size) % world.size
    tl.store(x + at, 3, mask=at < n)
    half = n // 2
    if HOW == "same place":
        pl.put(dst=y, src=x + half, nbytes=half * 4, peer=to, world=world)
    pl.put(dst=y, src=x, nbytes=half * 4, peer=to, world=world)
    if HOW == "fence":
        pl.fence(world=world)
    pl.put_signal(ready, to, world, dst=y + half, src=x + half, nbytes=half * 4)
    pl.wait(ready, 1, world)
    tl.device_assert((tl.load(y + at, mask=at < n) == 3) | (at >= n), "overtaken")
    pl.quiet(world)


def two_main(world: Any, how: str) -> None:
    x, y = pkt.zeros(N, dtype=torch.int32), pkt.zeros(N, dtype=torch.int32)
    two[(1,)](x, y, pkt.signals(1), N, world.device, how)
    world.barrier()


def test_put_signal_publishes_its_own_put_alone() -> None:
    check(two_main, "fence")
    found(two_main, "nothing", kind=OvertakenPut)


def test_two_puts_to_one_place_race() -> None:
    race = failures(two_main, 4, [0], args=("same place",), node_size=2)[0]
    assert type(race) is OvertakenPut
    assert race.first.kind == race.second.kind == "far put"


# -- far accesses ----------------------------------------------------------------------------------------------------


@triton.jit
def reach(x, world, HOW: tl.constexpr):
    at = tl.arange(0, 16)
    there = x + (2 - tl.cast(world.rank, tl.int64)) * (world.stride // 4)  # an address made by hand
    if world.rank == 1:
        if HOW == "load":
            tl.load(there + at)
        elif HOW == "store":
            tl.store(there + at, 1)
        elif HOW == "atomic":
            tl.atomic_add(there, 1)
        elif HOW == "flagged":
            ptx.put_flagged(there, (1, 2, 3), 1, None)
        else:
            desc = tl.make_tensor_descriptor(there, [4, 4], [4, 1], [4, 4])
            if HOW == "TMA load":
                tl.store(x + at, tl.reshape(desc.load([0, 0]), (16,)))
            elif HOW == "TMA store":
                desc.store([0, 0], tl.full((4, 4), 1, tl.int32))
            else:
                desc.atomic_add([0, 0], tl.full((4, 4), 1, tl.int32))


def reach_main(world: Any, how: str) -> None:
    reach[(1,)](pkt.zeros((16,), dtype=torch.int32), world.device, how)


FAR = {
    "load": ("load", "pl.put_signal"),
    "store": ("store", "pl.put(dst="),
    "atomic": ("atomic", "pl.signal adds"),
    "flagged": ("put_flagged", "pl.put(dst="),
    "TMA load": ("TMA load", "within a node"),
    "TMA store": ("TMA store", "within a node"),
    "TMA reduce": ("TMA reduce", "within a node"),
}


@pytest.mark.parametrize("how", FAR)
def test_far_accesses_by_addresses_made_by_hand_are_found(how: str) -> None:
    error = outcome(reach_main, 4, args=(how,), node_size=2).failure
    kind, remedy = FAR[how]
    assert type(error) is FarAccess, error
    text = str(error)
    assert text.startswith(f"far access: {kind} of rank 2's ")
    assert "by rank 1 reach program 0 at test_nodes.py:" in text
    assert "found rank 2 on node 1, wanted one of ranks 0 to 1, on its own" in text
    assert remedy in text


@pytest.mark.parametrize("how", ["load", "store", "TMA store"])
def test_the_same_accesses_are_right_in_one_node(how: str) -> None:
    assert outcome(reach_main, 4, args=(how,)).failure is None


@triton.jit
def near_only(x, array, counter, peer, world, HOW: tl.constexpr):
    at = tl.arange(0, 16)
    if HOW == "pl.load":
        pl.load(x + at, peer, world)
    elif HOW == "pl.store":
        pl.store(x + at, 1, peer, world)
    elif HOW == "pl.get":
        pl.get(dst=x + at, src=x + at, peer=peer, world=world)
    elif HOW == "pl.put":
        pl.put(dst=x + at, src=x + at, peer=peer, world=world)
    elif HOW == "pl.copy":
        pl.copy(x + at, x + at, peer, world.rank, world)
    elif HOW == "pl.peer":
        tl.load(pl.peer(x, peer, world))
    elif HOW == "pl.shmem.getmem":
        pl.shmem.getmem(x, x, 64, peer, world)
    elif HOW == "pl.load_acquire":
        pl.load_acquire(x, peer, world)
    elif HOW == "pl.store_release":
        pl.store_release(x, 1, peer, world)
    elif HOW == "pl.atomic_add":
        pl.atomic_add(x, 1, peer, world)
    elif HOW == "pl.atomic_cas":
        pl.atomic_cas(x, 0, 1, peer, world)
    elif HOW == "pl.put_flagged":
        pl.put_flagged(x, (1, 2, 3), 1, peer, world)
    elif HOW == "a tile for a rank":
        pl.tile.store_async(array, tl.full((4, 4), 1, tl.int32), (0, 0, 0, 0), world, peer)
    else:
        pl.signal(counter, peer, world, 5, "set")


NEAR_ONLY = (
    "pl.load", "pl.store", "pl.get", "pl.put", "pl.copy", "pl.peer", "pl.shmem.getmem", "pl.load_acquire",
    "pl.store_release", "pl.atomic_add", "pl.atomic_cas", "pl.put_flagged", "a tile for a rank", "pl.signal(op='set')",
)  # fmt: skip


@pytest.mark.parametrize("how", NEAR_ONLY)
def test_what_no_network_carries_compiles_for_the_ranks_of_a_node(how: str) -> None:
    """The rank is known when it runs only. It would be on this node."""

    def main(world: Any, near: bool) -> None:
        x, counter = pkt.zeros((16,), dtype=torch.int32), pkt.signals(1, unwaited=True)
        device = world.on_node.device if near else world.device
        if world.rank == 1:
            near_only[(1,)](x, pkt.layout(x.view(4, 4)), counter, 0, device, how)

    assert outcome(main, 4, args=(True,), node_size=2).failure is None
    error = outcome(main, 4, args=(False,), node_size=2).failure
    assert isinstance(error, CompileError), error
    start = r"near_only at test_nodes.py:\d+: Triton does not compile it for sm_90, so the simulator does not run it:\s"
    assert re.match(start + re.escape(how) + ": found a world of several nodes", str(error))
    assert "in the team world.on_node" in str(error)


def test_host_code_sees_no_far_memory() -> None:
    def main(world: Any) -> None:
        x = pkt.zeros(4)
        assert x.peer(world.rank ^ 1).tolist() == [0.0] * 4
        wanted = rf"rank {world.rank}: peer\({world.rank ^ 2}\): found rank {world.rank ^ 2} on node {1 - world.node}"
        with pytest.raises(FarAccess, match=wanted):
            x.peer(world.rank ^ 2)

    pkt.launch(main, ranks=4, node_size=2, device="cpu")


@triton.jit
def wrong(x, y, local, counter, nbytes, peer, world, HOW: tl.constexpr):
    if HOW == "plain source":
        pl.put(dst=y, src=local, nbytes=nbytes, peer=peer, world=world)
    elif HOW == "plain target":
        pl.put(dst=local, src=x, nbytes=nbytes, peer=peer, world=world)
    elif HOW == "moved":
        pl.put(dst=address.of_rank(y, 1, world), src=x, nbytes=nbytes, peer=peer, world=world)
    elif HOW == "data":
        pl.signal(x, peer, world)
    else:
        pl.put_signal(counter, peer, world, dst=y, src=x, nbytes=nbytes)


@pytest.mark.parametrize(
    ("how", "nbytes", "peer", "kind", "text"),
    [
        ("plain source", 16, 2, NotSymmetric, r"rank 0: put at test_nodes.py:\d+: src must .* found local, a plain"),
        ("plain target", 16, 2, NotSymmetric, "dst must .* found local, a plain tensor"),
        ("moved", 16, 2, NotSymmetric, "found an address of rank 1: give this rank's own"),
        ("bytes", 15, 2, ShapeError, "nbytes: found 15, wanted a multiple of the element's 4 bytes"),
        ("bytes", 164, 2, pkt.OutOfBounds, "out of bounds: far put of"),
        ("bytes", 16, 4, RankError, "found rank 4, wanted an integer from 0 to 3"),
        ("data", 16, 2, pkt.errors.SignalIndexError, "wanted a counter of pkt.signals"),
    ],
)
def test_wrong_puts_are_refused(how: str, nbytes: int, peer: int, kind: type, text: str) -> None:
    def main(world: Any) -> None:
        x, y = pkt.zeros(N, dtype=torch.int32), pkt.zeros(N, dtype=torch.int32)
        local, counter = torch.zeros(N, dtype=torch.int32), pkt.signals(1, unwaited=True)
        if world.rank == 0:
            wrong[(1,)](x, y, local, counter, nbytes, peer, world.device, how)

    with pytest.raises(kind, match=text):
        pkt.launch(main, ranks=4, node_size=2, device="cpu", heap=HEAP)


def test_an_empty_put_sends_its_signal() -> None:
    @triton.jit
    def empty(x, counter, world):
        pl.put_signal(counter, (tl.cast(world.rank, tl.int32) + 2) % 4, world, dst=x, src=x, nbytes=0)
        pl.wait(counter, 1, world)

    check(lambda world: empty[(1,)](pkt.zeros(4), pkt.signals(1), world.device), seeds=range(3))


# -- the example -----------------------------------------------------------------------------------------------------


EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "all_gather_nodes.py"))["main"]


@pytest.mark.parametrize(("ranks", "node_size", "seeds"), [(4, 2, 6), (8, 4, 2), (3, 1, 2), (2, 2, 1)])
def test_all_gather_over_nodes(ranks: int, node_size: int, seeds: int) -> None:
    assert failures(EXAMPLE, ranks, range(seeds), args=(7, 2, 2), node_size=node_size) == {}


def test_mutants_of_all_gather_over_nodes() -> None:
    report = pkt.simulate(EXAMPLE, 4, 1, (4, 2, 1), node_size=2, mutants=True, heap=HEAP, processes=1).check()
    assert len(report.mutants) == 11


# -- faults ----------------------------------------------------------------------------------------------------------


def caught(fn: Any, how: str, **options: Any) -> dict[str, str]:
    """The kind of failure by the mutants of `fn`, "" if nothing caught one; every lost signal is caught."""
    report = pkt.simulate(fn, 4, 1, (how,), node_size=2, mutants=True, heap=HEAP, processes=1, **options)
    assert not report.findings
    assert None not in report.signals.values()
    return {str(m).partition(" at ")[0]: found.kind if found else "" for m, found in report.mutants.items()}


def test_every_mutant_and_lost_signal_of_put_signal_is_caught() -> None:
    found = caught(ring_main, "put_signal", lost_signals=True)
    assert "" not in found.values()
    assert found["put_signal without its memory order"] == "OvertakenPut"
    assert found["put_signal removed"] == "Deadlock"


def test_a_removed_fence_and_a_removed_quiet_are_caught() -> None:
    assert caught(two_main, "fence")["fence removed"] == "OvertakenPut"
    assert caught(relay_main, "quiet")["quiet removed"] == "OvertakenPut"
    assert caught(reuse_main, "quiet")["quiet removed"] == "MissingQuiet"


def test_delayed_signals_are_no_error_and_repeated_ones_are() -> None:
    sent = outcome(ring_main, 4, args=("fence", 2), node_size=2).machine.census.signals
    assert len(sent) == 2 * 4 * 2
    for signal in sent[:4]:
        for seed in (0, 1):
            assert outcome(ring_main, 4, seed, ("fence", 2), node_size=2, faults=Faults(delay=signal)).failure is None
    first = next(s for s in sent if "ready" in s.target)
    faults = Faults(duplicate=first)
    assert any(outcome(ring_main, 4, seed, ("fence", 2), node_size=2, faults=faults).failure for seed in range(20))
