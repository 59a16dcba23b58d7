"""CudaBackend over the fake driver: memory really shared, growth, and every call failing at every rank."""

import os
import random
import threading
import time
import warnings
from collections import Counter
from functools import partial

import pytest
import torch

import pkt
from pkt.errors import AllocationMismatch, DriverError, HeapFull, PeerLost, PktError, Unsupported, WaitTimeout
from pkt.runtime import bootstrap
from pkt.runtime.gpu import alike
from pkt.runtime.gpu.topology import OFF_SWITCHES
from pkt.runtime.processes.rendezvous import prepare
from pkt.runtime.processes.transport import timeout_seconds

from . import forked
from .fake_driver import PAGE, FakeDriver, FakeGpu

STRIDE = 1 << 30


@pytest.fixture(autouse=True)
def switches_off(monkeypatch):
    """Remove the settings of this machine's environment that turn multicast off."""
    for name in OFF_SWITCHES:
        monkeypatch.delenv(name, raising=False)


def open_worlds(size, main=lambda world: None, heap=1 << 20, fail=None, timeout=5.0, **driver):
    """Run main(world) on `size` threads. Returns each rank's value or exception, and the drivers.

    `fail`: {rank: {call: nth}}.
    """
    meeting = prepare()
    drivers = [FakeDriver(rank, fail=(fail or {}).get(rank), **driver) for rank in range(size)]
    results = [None] * size

    def run(rank):
        try:
            where = bootstrap.Place(rank, size, meeting)
            world = bootstrap.open_world(where, rank, heap, timeout, driver=lambda r: drivers[r], stride=STRIDE)
            with world:
                results[rank] = main(world)
                world.barrier()
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    meeting.remove()
    return results, drivers


def ready(driver, rank):
    """A driver factory that returns a driver made beforehand."""
    return driver


def state():
    """Descriptors and mappings of this process."""
    with open("/proc/self/maps") as file:
        maps = Counter(line.split()[-1] for line in file if "memfd" in line)
    return len(os.listdir("/proc/self/fd")), maps


def test_peers_read_each_others_memory():
    def main(world):
        x = pkt.full((3, 5), 10 + world.rank, dtype=torch.int32, world=world)
        rows = [x[1:].peer(r).sum().item() for r in range(world.size)]
        assert (
            x.peer((world.rank + 1) % world.size).data_ptr() - x.data_ptr()
            == ((world.rank + 1) % world.size - world.rank) * STRIDE
        )
        return rows, world.num_sms, world.multicast

    results, drivers = open_worlds(4, main)
    assert results == [([100, 110, 120, 130], 132, False)] * 4
    assert [driver.leaks() for driver in drivers] == [""] * 4


def test_the_heap_grows_and_nothing_moves(monkeypatch):
    monkeypatch.setattr("pkt.runtime.memory.heap.FIRST_BYTES", PAGE)

    def main(world):
        first = pkt.full((100,), world.rank, dtype=torch.uint8, world=world)
        address = first.data_ptr()
        more = [pkt.full((PAGE,), 7 * world.rank, dtype=torch.uint8, world=world) for _ in range(9)]
        assert first.data_ptr() == address
        peer = (world.rank + 1) % world.size
        assert first.peer(peer).eq(peer).all()
        assert all(x.peer(peer).eq(7 * peer).all() for x in more)
        return world.backend.driver.calls["create"]

    results, drivers = open_worlds(3, main, heap=PAGE * 12)
    assert results == [5] * 3, "1 + 1 + 2 + 4 + 4 pages"
    assert [driver.leaks() for driver in drivers] == [""] * 3


CALLS = ("attribute", "granularity", "reserve", "create", "export", "import_memory", "map", "allow")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_every_call_failing_at_every_rank(call, rank, nth):
    before = state()
    results, drivers = open_worlds(3, fail={rank: {call: nth}})
    happened = drivers[rank].calls[call] >= nth
    for result in results:
        if happened:
            assert isinstance(result, DriverError), result
            assert f"rank {rank}: {call} failed: CUDA_ERROR_FAKE (999)" in str(result)
        else:
            assert result is None
    assert [driver.leaks() for driver in drivers] == [""] * 3
    assert state() == before


@pytest.mark.parametrize("call", ["create", "export", "import_memory", "map", "allow"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("code", [2, 999])
def test_growth_that_fails_leaves_the_world_as_it_was(monkeypatch, call, rank, code):
    monkeypatch.setattr("pkt.runtime.memory.heap.FIRST_BYTES", PAGE)

    def main(world):
        kept = pkt.full((10,), world.rank, dtype=torch.uint8, world=world)
        free = world.heap.ledger.free_bytes
        driver = world.backend.driver
        if world.rank == rank:
            driver.fail = {call: driver.calls[call] + 1}
        with pytest.raises(HeapFull if code == 2 else DriverError) as caught:
            pkt.empty(2 * PAGE, dtype=torch.uint8, world=world)
        assert f"rank {rank}: " in str(caught.value)
        assert call in str(caught.value)
        assert world.heap.ledger.free_bytes == free
        driver.fail = {}
        again = pkt.full((2 * PAGE,), world.rank, dtype=torch.uint8, world=world)
        assert again.peer(1 - world.rank).eq(1 - world.rank).all()
        assert kept.peer(1 - world.rank).eq(1 - world.rank).all()

    results, drivers = open_worlds(2, main, code=code)
    assert results == [None, None]
    assert [driver.leaks() for driver in drivers] == [""] * 2


def test_out_of_memory_at_init_is_reported():
    results, _ = open_worlds(2, fail={1: {"create": 1}}, code=2)
    for result in results:
        assert isinstance(result, HeapFull)
        assert "growing it to 1 MiB on cuda:" in str(result)
        assert "rank 1: create failed: CUDA_ERROR_OUT_OF_MEMORY (2)" in str(result)


def test_undo_continues_after_a_failed_step():
    results, drivers = open_worlds(2, fail={0: {"unmap": 1}})
    assert isinstance(results[0], DriverError)
    assert results[1] is None
    assert drivers[0].calls["unmap"] == 2
    assert "handles" not in drivers[0].leaks()


def test_heaps_of_different_sizes_are_named():
    meeting = prepare()

    def run(rank):
        return forked.open_world(
            bootstrap.Place(rank, 2, meeting), rank, (1 + rank) << 20, 5.0, driver=FakeDriver, stride=STRIDE
        )

    ends = forked.run(2, run)
    meeting.remove()
    for end in ends:
        assert isinstance(end.error, AllocationMismatch)
        assert "PKT_HEAP differs: rank 0: 1 MiB (1048576 bytes); rank 1: 2 MiB (2097152 bytes)" in str(end.error)


@pytest.mark.parametrize(
    ("what", "set_other"),
    [
        ("PKT_NCCL", lambda: os.environ.update(PKT_NCCL="0")),
        ("PKT_TIMEOUT", lambda: os.environ.update(PKT_TIMEOUT="4")),
        ("Triton", lambda: setattr(alike.triton, "__version__", "3.99")),
        ("torch", lambda: setattr(alike.torch, "__version__", "2.99")),
        ("pkt's device code", lambda: setattr(alike, "code_hash", lambda: 1)),
    ],
)
def test_ranks_of_other_versions_and_settings_are_named(what, set_other):
    meeting = prepare()

    def run(rank):
        os.environ["PKT_TIMEOUT"] = "5"
        if rank == 2:
            set_other()
        where, timeout = bootstrap.Place(rank, 3, meeting), timeout_seconds()
        return forked.open_world(where, rank, 1 << 20, timeout, driver=FakeDriver, stride=STRIDE)

    ends = forked.run(3, run)
    meeting.remove()
    for end in ends:
        assert isinstance(end.error, Unsupported), end
        text = str(end.error)
        assert what in text
        assert all(part in text for part in ("differs, ranks 0, 1: ", "; rank 2: ", "wanted one on all ranks: "))


def test_ranks_with_other_gpus_count_on_the_least_and_take_rank_0_for_the_model():
    counts = [132, 114, 144]
    gpus = [FakeGpu(f"u{i}", name=f"GPU {i}", attributes={"MULTIPROCESSOR_COUNT": n}) for i, n in enumerate(counts)]
    results, _ = open_worlds(3, lambda world: (world.num_sms, world.backend.gpu), gpus=gpus)
    assert results == [(114, "GPU 0")] * 3


def test_allocations_are_compared_before_use_and_named():
    def main(world):
        pkt.empty(3, world=world)
        x = pkt.empty(1024 * (1 + world.rank), dtype=torch.bfloat16, world=world)  # does not wait
        for use in (x.data_ptr, lambda: x.peer(0), lambda: world.device, world.barrier):
            with pytest.raises(
                AllocationMismatch, match=r"allocation #2 differs: rank 0: \(1024,\) bf16 at test_cuda.py"
            ):
                use()
        raise KeyboardInterrupt

    results, _ = open_worlds(2, main)
    assert [type(r) for r in results] == [KeyboardInterrupt] * 2


def test_more_calls_than_the_journal_holds():
    def main(world):
        pick = random.Random(1)
        live = []
        for _ in range(6000):
            if live and pick.random() < 0.5:
                live.pop(pick.randrange(len(live))).free()
            else:
                live.append(pkt.empty(pick.randrange(300), dtype=torch.uint8, world=world))
        return world.heap.ledger.holes()

    results, _ = open_worlds(3, main, heap="16MiB")
    assert not isinstance(results[0], BaseException), results[0]
    assert results[0] == results[1] == results[2]


def test_a_divergence_many_allocations_ago_is_named():
    def main(world):
        for i in range(100):
            pkt.empty(i if (world.rank, i) != (1, 40) else 41, world=world)
        world.barrier()

    results, _ = open_worlds(3, main)
    for result in results:
        assert isinstance(result, (AllocationMismatch, PeerLost)), result
    named = [str(r) for r in results if isinstance(r, AllocationMismatch)]
    assert all("allocation #41 differs: ranks 0, 2: (40,) fp32 at" in text for text in named)
    assert named


# ---------------------------------------------------------------------------------------------------------- multicast
def gpus(multicast=(1, 1, 1)):
    return [FakeGpu(f"uuid-{i}", attributes={"MULTICAST_SUPPORTED": m}) for i, m in enumerate(multicast)]


def multicast_calls(drivers):
    return sum(count for driver in drivers for call, count in driver.calls.items() if call.startswith("multicast"))


def use(world):
    x = pkt.full((8,), world.rank, dtype=torch.int32, world=world)
    window = x.multicast
    offset = None if window is None else window.data_ptr() - x.data_ptr()
    return world.multicast, world.device.multicast.value, offset


def test_multicast_if_all_ranks_want_it():
    results, drivers = open_worlds(3, use, gpus=gpus())
    assert results == [(True, True, (3 - rank) * STRIDE) for rank in range(3)]
    assert [d.calls["multicast_create"] for d in drivers] == [1, 0, 0]
    assert [d.calls["multicast_add"] for d in drivers] == [1, 1, 1]
    assert [d.leaks() for d in drivers] == [""] * 3


@pytest.mark.parametrize("switch", [f"{name}={value}" for name, value in OFF_SWITCHES.items()])
def test_a_multicast_switch_keeps_the_driver_from_being_asked_about_it(monkeypatch, switch):
    name, _, value = switch.partition("=")
    monkeypatch.setenv(name, value)
    asked = []
    attribute = FakeDriver.attribute
    monkeypatch.setattr(FakeDriver, "attribute", lambda self, d, n: asked.append(n) or attribute(self, d, n))
    results, drivers = open_worlds(3, use, gpus=gpus())
    assert results == [(False, False, None)] * 3
    assert multicast_calls(drivers) == 0
    assert asked
    assert "MULTICAST_SUPPORTED" not in asked


@pytest.mark.parametrize("without", [0, 1, 2])
def test_one_rank_without_support_turns_multicast_off_for_all(without):
    results, drivers = open_worlds(3, use, gpus=gpus([int(r != without) for r in range(3)]))
    assert results == [(False, False, None)] * 3
    assert multicast_calls(drivers) == 0


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    "failing",
    [
        "multicast_granularity",
        "multicast_create",
        "export",
        "import_memory",
        "multicast_add",
        "multicast_bind",
        "map",
        "allow",
    ],
)
def test_every_multicast_call_failing_at_every_rank_falls_back(failing, rank):
    before = state()
    nth = {"map": 4, "allow": 4}.get(failing, 1)  # the calls after the heap's own
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        results, drivers = open_worlds(3, use, fail={rank: {failing: nth}}, gpus=gpus())
    called = drivers[rank].calls[failing] >= nth
    first_of_heap = failing in ("export", "import_memory") and not (rank == 0) == (failing == "export")
    if first_of_heap:  # this rank's first such call shares its own memory, and no world opens without that
        assert all(isinstance(r, DriverError) for r in results)
    else:
        assert results == [(not called, not called, None if called else (3 - r) * STRIDE) for r in range(3)], results
        text = [str(w.message) for w in seen if issubclass(w.category, RuntimeWarning)]
        assert len(text) == int(called), text
        assert all(f"rank {rank}: {failing} failed" in t and "going on without multicast" in t for t in text)
    assert [d.leaks() for d in drivers] == [""] * 3
    assert state() == before


def test_multicast_that_cannot_grow_is_an_error_on_all_ranks(monkeypatch):
    monkeypatch.setattr("pkt.runtime.memory.heap.FIRST_BYTES", PAGE)

    def main(world):
        driver = world.backend.driver
        if world.rank == 1:
            driver.fail = {"multicast_bind": driver.calls["multicast_bind"] + 1}
        with pytest.raises(DriverError, match="the multicast window could not grow"):
            pkt.empty(4 * PAGE, dtype=torch.uint8, world=world)
        driver.fail = {}
        return pkt.zeros(4 * PAGE, dtype=torch.uint8, world=world).multicast is not None

    with pytest.warns(RuntimeWarning, match="multicast: binding memory failed on rank 1"):
        results, drivers = open_worlds(2, main, gpus=gpus((1, 1)))
    assert results == [True, True]
    assert [d.leaks() for d in drivers] == [""] * 2


# ------------------------------------------------------------------------------------------------------ repeated worlds
def test_200_cycles_with_failures_leave_nothing():
    pick = random.Random(5)
    plan = []
    for _ in range(200):
        fail = {pick.randrange(2): {pick.choice(CALLS): pick.randint(1, 2)}} if pick.random() < 0.6 else {}
        plan.append((prepare(), fail))

    def main(rank):
        outcomes = Counter()
        for i, (meeting, fail) in enumerate(plan):
            if i == 5:
                before = state()
            driver = FakeDriver(rank, fail=fail.get(rank))
            try:
                with forked.open_world(
                    bootstrap.Place(rank, 2, meeting), rank, 1 << 20, 5.0, driver=partial(ready, driver), stride=STRIDE
                ) as world:
                    pkt.zeros(10, world=world)
                outcomes["opened"] += 1
            except PktError as error:
                outcomes[type(error).__name__] += 1
            assert driver.leaks() == ""
        assert state() == before
        return outcomes

    ends = forked.run(2, main, patience=100)
    for meeting, _ in plan:
        meeting.remove()
    assert [end.error for end in ends] == [None, None]
    assert ends[0].value["opened"] == ends[1].value["opened"] > 50
    assert ends[0].value["DriverError"] > 50


def test_three_jobs_at_once_on_one_host():
    meetings = [prepare() for _ in range(3)]
    ends = forked.run(
        6, lambda who: forked.fake_world(meetings[who // 2], who % 2, 2).all_gather_object((who // 2, who % 2))
    )
    for meeting in meetings:
        meeting.remove()
    assert [end.value for end in ends] == [[(who // 2, 0), (who // 2, 1)] for who in range(6)], ends


def test_one_worlds_loss_does_not_break_the_next():
    meetings = [prepare(), prepare()]

    def main(rank):
        world = forked.fake_world(meetings[0], rank, 2, 0.5)
        if rank == 1:
            time.sleep(1.0 + bootstrap.HOST_GRACE)  # past its peer's deadline
        with pytest.raises((WaitTimeout, PeerLost)):
            world.barrier()
        world.close()
        world = forked.fake_world(meetings[1], rank, 2)
        return world.all_gather_object(rank)

    ends = forked.run(2, main)
    for meeting in meetings:
        meeting.remove()
    assert [end.value for end in ends] == [[0, 1]] * 2, ends


def test_gpus_that_cannot_work_together_are_refused_by_all():
    same = [FakeGpu("uuid-0"), FakeGpu("uuid-0")]
    results, drivers = open_worlds(2, gpus=same)
    for result in results:
        assert isinstance(result, Unsupported)
        assert "ranks 0 and 1 are on the same GPU" in str(result)
    assert [d.leaks() for d in drivers] == [""] * 2


def test_collective_calls_of_two_threads_of_a_rank_are_refused():
    """The ranks could pair them differently: a thread would get the values of another one's call."""
    reader, writer = os.pipe()

    def main(world):
        if world.rank == 1:
            os.read(reader, 1)  # until rank 0's second thread has called
            return world.all_gather_object("first")
        found = []
        thread = threading.Thread(target=lambda: found.append(world.all_gather_object("first")))
        before = world.backend.transport.sequences.total()
        thread.start()
        while world.backend.transport.sequences.total() == before:
            time.sleep(0.001)
        wanted = (
            r"^rank 0: all_gather_object\(\): found a thread of this rank in another collective call, all_gather_obj"
        )
        with pytest.raises(Unsupported, match=wanted):
            world.all_gather_object("second")
        with pytest.raises(Unsupported):
            world.barrier()
        os.write(writer, b"x")
        thread.join()
        return found[0]

    try:
        assert [(end.value, end.error) for end in forked.in_worlds(2, main, timeout=3.0)] == [(["first"] * 2, None)] * 2
    finally:
        os.close(reader)
        os.close(writer)
