"""Worlds of several nodes over a fake NVSHMEM: where things lie, one start, blocks, failures, losses."""

import dataclasses
import os
import signal
import socket
import time

import pytest
import torch
from triton import knobs

import pkt
from benchmarks import far
from pkt.errors import Closed, DriverError, HeapFull, PeerLost, PktError, Unsupported
from pkt.language import world as page
from pkt.language.inspect import compile_only
from pkt.language.ptx import nvshmem as tried
from pkt.runtime import bootstrap
from pkt.runtime.backend import SIGNAL_HEADER
from pkt.runtime.bootstrap import Place, open_world
from pkt.runtime.gpu import nvshmem, symmetric
from pkt.runtime.gpu.nodes import ALONE, COUNTERS, ring_of
from pkt.runtime.gpu.topology import OFF_SWITCHES
from pkt.runtime.processes import network
from pkt.runtime.processes.rendezvous import prepare
from tests import device_library
from tests.gpu import cases_nodes

from . import fake_nvshmem, forked
from .fake_driver import FakeDriver, FakeGpu
from .fake_nvshmem import GARBAGE, FakeNvshmem, Meeting

HEAP = 1 << 20
ARENA = page.ARENA_UNIT


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in (*OFF_SWITCHES, "NVSHMEM_SYMMETRIC_SIZE", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PKT_NODE_SIZE", "1")
    fake_nvshmem.install(monkeypatch)


class Rank:
    """One forked rank, which may open worlds one after the other, each at a place of `places`."""

    def __init__(self, rank, places, meeting, **options):
        self.rank, self.places = rank, iter(places)
        gpus = [FakeGpu(f"uuid-{i}", attributes=options.pop("attributes", {})) for i in range(16)]
        self.driver = FakeDriver(rank, gpus=gpus)
        self.library = FakeNvshmem(self.driver, meeting, **options)

    def open(self, size, heap=HEAP, timeout=10.0, rank=None, **options):
        rank = self.rank if rank is None else rank
        options = {"driver": lambda rank: self.driver, "libraries": self.library, "stride": 1 << 30, **options}
        return open_world(Place(rank, size, next(self.places)), self.rank, heap, timeout, **options)


def on_ranks(size, main, worlds=1, options=lambda rank: {}, met=None, near=None):
    """main(Rank) on forked ranks. worlds: that each may open. met: ranks that meet in NVSHMEM. near: ranks of a host;
    None: all. Returns their ends."""
    places, meeting = [prepare() for _ in range(worlds)], Meeting(met or size, near)
    try:
        return forked.run(size, lambda rank: main(Rank(rank, places, meeting, **options(rank))))
    finally:
        for place in places:
            place.remove()


def values(ends):
    assert all(end.error is None for end in ends), [end.error for end in ends]
    return [end.value for end in ends]


def test_each_rank_is_a_node():
    def main(me):
        with me.open(3) as world:
            near, rail = world.on_node, world.rail
            return world.nodes, world.node, world.local_rank, world.node_size, near.ranks, near.nodes, rail is world

    assert values(on_ranks(3, main)) == [(3, r, 0, 1, (r,), 1, True) for r in range(3)]


def test_what_kernels_are_told():
    def main(me):
        with me.open(2) as world:
            found, near = world.device, world.on_node.device
            assert found.code.value == page.code_hash(tried.identity()) != page.code_hash()
            assert near.code.value == found.code.value
            assert page.Network.of(found.network.value) == (1, ARENA, 1)
            assert near.network.value == found.network.value
            assert (found.node_size.value, near.node_size.value) == (1, 0)
            assert (found.stride.value, found.multicast.value) == (ALONE, False)
            base = world.backend.base
            assert found.status.data_ptr() == near.status.data_ptr() == base
            assert base in [a for a, _ in symmetric._job.blocks.values()], "the window is NVSHMEM's memory"
            return found.rank

    assert values(on_ranks(2, main)) == [0, 1]


def lanes(world, counters):
    """The network's lanes of counters, as pkt.language.ptx.far.lane finds them, and the bytes around their block's."""
    start = world.lineage[-1].backend.base
    first = counters.data_ptr() - start
    itemsize, count = counters.element_size(), counters.numel()
    assert SIGNAL_HEADER <= first <= ARENA - count * itemsize, "a counter lies outside the arena"
    view = world.lineage[-1].backend.view
    every = view(world.lineage[-1].rank, ARENA + 2 * first, 2 * count * itemsize).view(torch.int64)
    return every[:: itemsize // 4]


def test_counters_lie_in_the_arena_and_data_behind_its_lanes():
    def main(me):
        with me.open(2) as world:
            base = world.backend.base
            x, few, wide = pkt.empty(5), pkt.signals(7), pkt.signals(3, dtype=torch.int64)
            near = world.on_node
            team = pkt.signals(9, world=near)
            y = pkt.zeros(4, world=near)
            assert x.data_ptr() - base >= 3 * ARENA
            assert y.data_ptr() - base >= 3 * ARENA
            for counters in (few, wide, team):
                assert lanes(world, counters).eq(0).all()
                assert counters.eq(0).all()
            places = sorted(t.data_ptr() for t in (few, wide, team))
            assert len(set(places)) == 3
            assert places[0] >= base + page.STATUS_BYTES + SIGNAL_HEADER
            assert world.heap.find(few.data_ptr()).block.name == "few"
            assert world.heap.find(team.data_ptr()).block.name == "team"
            assert near.heap.find(team.data_ptr()).block.name == "team"
            assert x.data_ptr() in world.span
            world.check()
            wide[:].fill_(1 << 60)
            lanes(world, wide).fill_(1)
            world.check()  # nothing that a lane holds is a guard word
            team.data_ptr(), near.backend.view(0, team.data_ptr() - near.backend.base + 9 * 4, 4).fill_(1)
            with pytest.raises(PktError, match="guard word"):
                world.check()
            near.backend.view(0, team.data_ptr() - near.backend.base + 9 * 4, 4).view(torch.int32).fill_(0x5AFE5AFE)
            return places[0] - base

    assert len(set(values(on_ranks(2, main)))) == 1


def test_the_part_of_the_gpu_test_about_memory():
    def main(me):
        with me.open(2, heap=16 * HEAP) as world:
            cases_nodes.memory(world)
            return True

    assert values(on_ranks(2, main)) == [True, True]


def test_lanes_begin_at_zero_again_where_memory_is_used_again():
    def main(me):
        with me.open(2) as world:
            first = pkt.signals(5)
            lanes(world, first).fill_(3)
            address = first.data_ptr()
            first.free()
            world.barrier()
            again = pkt.signals(5)
            assert again.data_ptr() == address
            return lanes(world, again).tolist()

    assert values(on_ranks(2, main)) == [[0] * 5] * 2


def test_a_heap_holds_as_much_data_as_was_asked_for():
    def main(me):
        with me.open(2) as world:
            assert world.heap.capacity == HEAP
            whole = pkt.empty(HEAP, dtype=torch.uint8)
            assert whole.data_ptr() + HEAP == world.span.stop
            many = [pkt.signals(1000) for _ in range(10)]
            with pytest.raises(HeapFull, match="counters"):
                [pkt.signals(1000) for _ in range(10)]
            with pytest.raises(HeapFull, match="wanted 1 B|wanted 4"):
                pkt.empty(1)
            return len(many)

    assert values(on_ranks(2, main)) == [10, 10]
    assert ARENA == -(-HEAP // (COUNTERS * page.ARENA_UNIT)) * page.ARENA_UNIT


def test_nested_teams_take_parts_of_the_arena():
    def main(me):
        with me.open(4) as world:
            half = world.team([0, 1] if me.rank < 2 else [2, 3], heap=HEAP // 2)
            quarter = half.team([me.rank % 2], heap=HEAP // 8)
            made = [pkt.signals(4, world=w) for w in (world, half, quarter)]
            offsets = [t.data_ptr() - world.backend.base for t in made]
            for counters in made:
                assert lanes(world, counters).eq(0).all()
                assert world.heap.find(counters.data_ptr()).block.shape == (4,)
            assert (half.nodes, quarter.nodes) == (2, 1)
            return offsets

    found = values(on_ranks(4, main))
    assert found[0] == found[1] == found[2] == found[3]
    assert len(set(found[0])) == 3


def test_memory_of_other_nodes_is_refused_by_name():
    def main(me):
        with me.open(2) as world:
            x = pkt.full(3, 1.0)
            assert x.peer(me.rank).sum() == 3
            with pytest.raises(Unsupported) as caught:
                x.peer(1 - me.rank)
            with pytest.raises(Unsupported):
                world.backend.window(1 - me.rank)
            return str(caught.value)

    first, second = values(on_ranks(2, main))
    assert first.startswith("rank 0: peer(1): found rank 1 on node 1, wanted itself: only the network reaches")
    assert second.startswith("rank 1: peer(0)")


def test_worlds_take_the_block_in_turn_and_nvshmem_starts_once():
    def main(me):
        addresses = []
        for _ in range(2):
            with me.open(2) as world:
                pkt.signals(1).fill_(5)
                addresses.append(world.backend.base)
            with pytest.raises(Closed):
                world.barrier()
        with me.open(2, heap=4 * HEAP) as large, me.open(2) as small:
            addresses += [large.backend.base, small.backend.base]
            assert pkt.signals(1).item() == 0
            assert large.heap.capacity == 4 * HEAP
        with me.open(2, heap=2 * HEAP) as world:
            addresses.append(world.backend.base)
        calls = me.library.calls
        assert (calls["start"], calls["malloc"], calls["barrier"]) == (1, 2, 3)
        assert me.library.threads == 6, "a call of NVSHMEM's has no deadline"
        first, again, large, small, last = addresses
        assert first == again == small != large == last
        return True

    assert values(on_ranks(2, main, worlds=5)) == [True, True]


def test_ranks_that_close_in_other_orders_take_the_same_block():
    def main(me):
        one, two = me.open(3), me.open(3)
        bases = [one.backend.base, two.backend.base]
        (one if me.rank < 2 else two).close()  # ranks 0 and 1 still have the second, rank 2 the first
        three = me.open(3)
        (two if me.rank < 2 else one).close()
        four = me.open(3)
        assert three.backend.base not in bases
        assert four.backend.base in bases
        return me.library.calls["malloc"], bases.index(four.backend.base)

    found = values(on_ranks(3, main, worlds=4))
    assert found[0] == found[1] == found[2]
    assert found[0][0] == 3


def test_another_list_of_ranks_is_refused_on_all_of_them():
    def main(me):
        me.open(2, rank=me.rank % 2).close()
        with pytest.raises(Unsupported) as caught:
            me.open(2, rank=1 - me.rank % 2)
        return str(caught.value)

    for text in values(on_ranks(2, main, worlds=2)):
        assert "rank 0: rank 1 of 2, rank 1: rank 0 of 2, and it starts once in a process" in text


def test_a_rank_that_came_later_is_refused_on_all():
    """NVSHMEM runs on ranks 0 and 1. A world of all three would need another job of it."""

    def main(me):
        first = next(me.places)
        if me.rank < 2:
            open_world(
                Place(me.rank, 2, first), me.rank, HEAP, 10.0, driver=lambda r: me.driver, libraries=me.library
            ).close()
        with pytest.raises(Unsupported, match="rank 1: rank 1 of 2, rank 2: not started"):
            me.open(3)
        return True

    assert values(on_ranks(3, main, worlds=2, met=2)) == [True] * 3


@pytest.mark.parametrize("call", ["load", "unique_id", "start", "malloc"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_call_that_fails_on_a_rank_fails_on_all(call, rank):
    if (call, rank) == ("unique_id", 1):
        pytest.skip("only rank 0 makes it")

    def main(me):
        if call in ("start", "malloc"):  # these meet: NVSHMEM itself lets no rank go on alone
            me.library.meeting.wait = lambda: None
        with pytest.raises(DriverError) as caught:
            me.open(2)
        assert me.driver.calls["create"] == 0
        return str(caught.value)

    found = values(on_ranks(2, main, options=lambda r: {"fail": {call}} if r == rank else {}))
    assert found[0] == found[1]
    assert f"rank {rank}: {call} failed: an error of NVSHMEM's (7)" in found[0]


@pytest.mark.parametrize("call", ["start", "malloc", "barrier"])
def test_a_rank_that_hangs_in_nvshmem_ends_at_the_deadline(call):
    def main(me):
        if call == "barrier":
            me.open(2).close()
        begun = time.monotonic()
        with pytest.raises(DriverError, match=r"no answer after 1 s.*a rank did not come"):
            me.open(2, timeout=1.0)
        return time.monotonic() - begun < 6

    ends = on_ranks(2, main, worlds=2, options=lambda rank: {"hang": {call}} if rank else {})
    assert values(ends) == [True, True]


def test_no_memory_is_a_full_heap_on_all_ranks():
    def main(me):
        with pytest.raises(HeapFull, match="heap full: growing it to 1.* GiB on cuda.*lower heap= or PKT_HEAP"):
            me.open(2, heap="1GiB")
        with me.open(2) as world:
            return me.library.calls["malloc"], world.heap.capacity

    assert values(on_ranks(2, main, worlds=2)) == [(1, HEAP)] * 2


@pytest.mark.parametrize(
    ("version", "found"),
    [("3.6.1", "found made-up 3.6.1, whose bitcode holds code for IBGDA"), ("2.11.0", "which was never tried")],
)
def test_versions_that_were_not_tried_are_refused(version, found, monkeypatch):
    fake_nvshmem.install(monkeypatch, version)

    def main(me):
        with pytest.raises(Unsupported) as caught:
            me.open(2)
        assert not me.library.calls
        return str(caught.value)

    for text in values(on_ranks(2, main)):
        assert found in text
        assert "pip install 'made-up==3.4.5'" in text


def test_without_nvshmem_the_installation_is_named(monkeypatch):
    monkeypatch.setattr(tried, "installed", lambda: None)

    def main(me):
        with pytest.raises(Unsupported, match="found no NVSHMEM in this environment: pip install"):
            me.open(2)
        return True

    assert values(on_ranks(2, main)) == [True, True]


def test_another_version_in_the_process_is_refused():
    def main(me):
        me.library.found = "3.5.19"
        with pytest.raises(DriverError, match=r"found NVSHMEM 3.5.19 loaded, wanted 3.4.5"):
            me.open(2)
        return me.library.calls["start"]

    assert values(on_ranks(2, main)) == [0, 0]


def test_an_nvshmem_that_others_started_is_refused():
    def main(me):
        FakeNvshmem.running = me.rank == 1
        with pytest.raises(DriverError, match="rank 1: nvshmemx_init_status failed: started by other code"):
            me.open(2)
        return me.library.calls["start"]

    assert values(on_ranks(2, main)) == [0, 0]


def test_ranks_must_agree_on_the_ranks_of_a_node():
    def main(me):
        with pytest.raises(Unsupported, match=r"ranks of a node \(PKT_NODE_SIZE\) differs"):
            me.open(2, node_size=1 + me.rank)
        return True

    assert values(on_ranks(2, main)) == [True, True]


@pytest.mark.parametrize("near", [4, 2])
def test_ranks_of_a_node_reach_each_others_windows(monkeypatch, near):
    """Two nodes of two ranks: on one host, where NVSHMEM maps all four windows, and on two."""
    monkeypatch.setenv("PKT_NODE_SIZE", "2")

    def main(me):
        with me.open(4) as world:
            assert page.Network.of(world.device.network.value) == (2, ARENA, near)
            x, team = pkt.full(3, float(me.rank)), world.on_node
            world.barrier()
            other, (far, _) = me.rank ^ 1, (2 - me.rank // 2 * 2, 0)
            assert x.peer(other).tolist() == [float(other)] * 3
            assert x.peer(other).data_ptr() - x.data_ptr() == (other - me.rank) % near * world.device.stride.value
            with pytest.raises(Unsupported, match=rf"found rank {far} on node {far // 2}, wanted one of ranks"):
                x.peer(far)
            assert team.device.stride.value == world.device.stride.value
            assert (team.device.node_size.value, team.device.network.value) == (0, world.device.network.value)
            y = pkt.full(2, float(10 + me.rank), world=team)
            team.barrier()
            return y.peer(1 - team.rank).tolist(), world.rail.ranks, me.driver.calls["create"]

    ends = values(on_ranks(4, main, near=near))
    assert ends == [([float(10 + (r ^ 1))] * 2, (r % 2, r % 2 + 2), 0) for r in range(4)]


@pytest.mark.parametrize("odd", [False, True])
def test_hosts_that_nvlink_does_not_join_are_nodes(monkeypatch, odd):
    """odd: PKT_NODE_SIZE is set on rank 3 alone, and all ranks say so."""
    monkeypatch.delenv("PKT_NODE_SIZE")
    monkeypatch.setenv("PKT_SECRET", "s" * network.SECRET_LETTERS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = Meeting(4, near=2)

    def main(rank):
        os.environ.update(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        where = dataclasses.replace(bootstrap.place(None, 20.0), host=f"host {rank // 2}")
        driver = FakeDriver(rank, gpus=[FakeGpu(f"uuid-{rank}")])
        library = FakeNvshmem(driver, meeting)
        if odd:
            os.environ |= {"PKT_NODE_SIZE": "1"} if rank == 3 else {}
            with pytest.raises(Unsupported, match=r"\(PKT_NODE_SIZE\) differs, ranks 0, 1, 2: 2; rank 3: 1"):
                open_world(where, 0, HEAP, 10.0, driver=lambda r: driver, libraries=library)
            return odd
        with open_world(where, 0, HEAP, 10.0, driver=lambda r: driver, libraries=library) as world:
            x = pkt.full(2, float(rank))
            world.barrier()
            assert "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME" not in os.environ, "NVSHMEM would look at one host only"
            return world.nodes, world.node_size, world.on_node.ranks, x.peer(rank ^ 1)[0].item()

    ends = values(forked.run(4, main))
    right = [(2, 2, (r // 2 * 2, r // 2 * 2 + 1), float(r ^ 1)) for r in range(4)]
    assert ends == ([odd] * 4 if odd else right)


def test_steps_of_a_teams_ranks_are_none_in_addresses(monkeypatch):
    monkeypatch.setenv("PKT_NODE_SIZE", "3")

    def main(me):
        with me.open(6, heap=4 * HEAP) as world:
            first = me.rank // 3 * 3
            ends = world.team([first, first + 2] if me.rank != first + 1 else [first + 1], heap=HEAP)
            return ends.device.stride.value == world.device.stride.value

    assert values(on_ranks(6, main)) == [True] * 6


def test_windows_must_form_one_ring():
    assert ring_of([[0, 8], [24, 0], [0, 8], [24, 0]], 2) == (8, 4)
    assert ring_of([[0, 8, 16], [16, 0, 8], [8, 16, 0]], 3) == (8, 3)
    assert ring_of([[0], [0]], 1) == (ALONE, 1)
    for odd in ([[0, 8], [24, 0], [0, 8], [16, 0]], [[0, 8], [None, 0]], [[0, None], [8, 0]], [[0, 8], [-8, 0]]):
        with pytest.raises(Unsupported, match=r"windows of each node's ranks at these distances.*ranks? 0.*: 0x0/"):
            ring_of(odd, 2)


@pytest.mark.parametrize("asked", [None, "0"])
def test_no_multicast_object_is_made_unless_nvshmem_is_asked_for_it(asked):
    def main(me):
        if asked:
            os.environ["NVSHMEM_DISABLE_NVLS"] = asked
        with me.open(2) as world:
            assert not world.multicast
        assert not [call for call in me.driver.calls if call.startswith("multicast")]
        return [os.environ[f"NVSHMEM_{n}"] for n in ("DISABLE_NVLS", "BOOTSTRAP_UID_SOCK_IFNAME", "SYMMETRIC_SIZE")]

    for found in values(on_ranks(2, main, options=lambda rank: {"attributes": {"MULTICAST_SUPPORTED": 1}})):
        assert found[:2] == [asked or "1", "lo"]
        assert int(found[2]) >= HEAP + 3 * ARENA


def test_modules_that_hold_the_state_are_given_it_once_a_load():
    def main(me):
        hook = knobs.runtime.kernel_load_end_hook
        me.driver.modules = {7: {nvshmem.STATE, "x"}, 8: {"x"}}
        for _ in range(2):
            with me.open(2):
                pass
        for module in (7, 8):  # as Triton calls it
            hook(module, 1, "kernel", None, "hash")
        return me.library.given

    assert values(on_ranks(2, main, worlds=2)) == [[7], [7]]


@pytest.mark.parametrize("arch", [90, 100])
def test_kernels_compile_for_the_world(arch, monkeypatch, tmp_path):
    """What `world.device` gives is what kernels with far calls and counters need: PTX by rank."""
    device_library.install(monkeypatch, tmp_path)

    def main(me):
        with me.open(2) as world:
            x, ready, done = pkt.empty(12, dtype=torch.int32), pkt.signals(4), pkt.signals(4, dtype=torch.int32)
            wrong, texts = torch.zeros(1, dtype=torch.int32), []
            for how in far.WAYS:
                args = (x, x, ready, done, wrong, 3, 0, 2, world.device, how)
                texts.append(compile_only(far.exchange_kernel, *args, arch=arch).asm["ptx"])
            return texts

    for put_signal, fence, quiet in values(on_ranks(2, main)):
        assert "// nvshmemx_putmem_signal_nbi_block" in put_signal
        assert "// nvshmem_fence" in fence
        assert "// nvshmem_quiet" in quiet
        for text in (put_signal, fence, quiet):
            assert f"add.s64 lane, lane, {ARENA};" in text
            assert "// nvshmemx_signal_op" in text


def test_the_deadline_is_on_the_page_and_an_expired_wait_is_this_nodes():
    def main(me):
        with me.open(2, timeout=3.0) as world:
            status = world.device.status
            found = status[page.STATUS_DEADLINE : page.STATUS_DEADLINE + 2].view(torch.int64).item()
            others = status.sum().item() - status[page.STATUS_DEADLINE : page.STATUS_DEADLINE + 2].sum().item()
            flags = pkt.signals(4, name="flags")
            if me.rank == 1:
                offset = flags[2:].data_ptr() - world.backend.base
                record = {"rank": 1, "program": 3, "wanted": 9, "found": 8, "offset_low": offset, "owner": 4}
                for name, word in record.items():
                    status[page.STATUS_FIRST_RECORD + page.RECORD_FIELDS.index(name)] = word
                status[page.STATUS_RECORDS] = 1
                with pytest.raises(pkt.errors.WaitTimeout, match=r"rank 1.*flags\[2\]"):
                    world.synchronize()
                status[page.STATUS_RECORDS] = 0
            world.synchronize()
            world.barrier()
            return found, others

    assert values(on_ranks(2, main)) == [(3 * 10**9, 0)] * 2


def test_a_killed_rank_is_named_by_the_survivor_whose_waits_are_cut_short():
    def main(me):
        world = me.open(2, timeout=20.0)
        abort = world.device.status[page.STATUS_ABORT : page.STATUS_ABORT + 1]
        world.barrier()
        if me.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        while not abort.item():
            assert time.monotonic() - begun < 10, "the abort word stays 0"
            time.sleep(0.01)
        with pytest.raises(PeerLost, match="rank 1"):
            world.synchronize()
        return True

    ends = on_ranks(2, main)
    assert ends[0].value is True, ends[0].error
    assert ends[1].died == signal.SIGKILL


def test_memory_is_garbage_until_it_is_filled():
    """The fake is as unkind as GPUs are: otherwise the tests of zeroed lanes could not fail."""

    def main(me):
        with me.open(2):
            return pkt.empty(16, dtype=torch.uint8).unique().tolist()

    assert values(on_ranks(2, main)) == [[GARBAGE]] * 2
