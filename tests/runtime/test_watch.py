"""The status page in words, the deadline, and the watchdog that ends a spin when a peer dies."""

import gc
import os
import re
import select
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import triton

import pkt
from pkt.errors import PeerLost, WaitTimeout
from pkt.language import world as words
from pkt.runtime.gpu import watch
from pkt.runtime.processes.rendezvous import prepare
from pkt.wording import FIRST_CALL

from . import forked


@triton.jit
def spinning_kernel(p):
    pass


def record(page, slot, rank, counter, wanted, found, epoch, aborted=False):
    """Write a record as a wait on the device does."""
    cmp = words.CMP_CODES["ge"] + (words.CMP_ABORTED if aborted else 0)
    site = words.site_hash("spinning_kernel")
    fields = [rank, 5, cmp, wanted, found, counter & 0xFFFFFFFF, counter >> 32, epoch, site, 6]
    at = words.STATUS_FIRST_RECORD + slot * words.RECORD_WORDS
    page[at : at + len(fields)] = torch.tensor(fields, dtype=torch.int32)
    page[words.STATUS_RECORDS] = slot + 1


def test_every_rank_reports_an_expired_wait():
    def main(world):
        flags = pkt.signals(8, world=world)
        page = world.heap.tensor(world.heap.status)
        deadline = page.view(torch.int64)[words.STATUS_DEADLINE // 2].item()
        counter = flags.data_ptr() - world.backend.base + 4 * 7
        if world.rank == 1:
            record(page, 0, 1, counter, 3, 2, 41)
        elif world.rank == 0:
            record(page, 0, 0, counter - 4, 9, 8, 41, aborted=True)
        for rank in range(world.size):  # a device raises the abort word on every rank
            world.heap.backend.view(rank, 0, 4).view(torch.int32)[words.STATUS_ABORT] = 1
        world.backend.transport.barrier("written")
        with pytest.raises(WaitTimeout) as caught:
            world.barrier()
        world.backend.transport.barrier("told")
        return deadline, str(caught.value)

    for end in forked.in_worlds(2, main):
        assert end.error is None, end.error
        deadline, message = end.value
        assert deadline == 10_000_000_000
        assert message.startswith(
            "rank 1: spinning_kernel program 5 waits on flags[7] after 10.0 s: wanted >= 3, found 2, launch 41"
        )


def test_an_expired_wait_names_the_first_calls_of_other_ranks():
    """Rank 0 launches a call that it made before, and rank 1 makes another one for the first time."""
    call = "all_gather(x=(12,) float32, dim=0)"

    def main(world):
        flags = pkt.signals(8, world=world)
        page = world.heap.tensor(world.heap.status)
        if world.rank == 0:
            poller = select.poll()
            poller.register(world.backend.transport.connections[1], select.POLLIN)
            assert poller.poll(5000)
            record(page, 0, 0, flags.data_ptr() - world.backend.base, 3, 2, 41)
            with pytest.raises(WaitTimeout, match=f"meanwhile rank 1: {re.escape(call)}: a first call") as caught:
                world.synchronize()
            assert "rank 0: spinning_kernel program 5 waits on flags[0]" in str(caught.value)
            page.zero_()
        return world.backend.exchange(call if world.rank else "", FIRST_CALL)  # the message is still there

    for end in forked.in_worlds(2, main):
        assert end.error is None, end.error
        assert end.value == ["", call]


def test_a_kernel_is_found_by_its_hash_among_frozen_objects():
    gc.freeze()
    assert watch.kernel_name(words.site_hash("spinning_kernel")) == "spinning_kernel"


@pytest.mark.parametrize("seconds", [0.5, 2.0, 3.0, 4.2, 5.0, 10.0, 3600.0])
def test_any_deadline_is_two_words_of_32_bits(seconds):
    """3.0 s are nanoseconds with bit 31 set, 5.0 s are more than 32 bits."""
    written = []
    driver = SimpleNamespace(write_words=lambda address, values, device: written.append((address, values)))
    transport = SimpleNamespace(lost=dict)
    backend = SimpleNamespace(driver=driver, base=1 << 40, device_index=0, transport=transport)
    watch.Watch(backend, None, seconds).close()
    ((address, values),) = written
    assert address == (1 << 40) + 4 * words.STATUS_DEADLINE
    assert all(-(1 << 31) <= word < 1 << 31 for word in values)
    assert torch.tensor(values, dtype=torch.int32).view(torch.int64).item() == int(seconds * 1e9)


@pytest.mark.parametrize("offset", [4096, (1 << 31) + 64, (5 << 32) + (1 << 31) + 128])
@pytest.mark.parametrize("compare", ["ge", "ne", "lt"])
@pytest.mark.parametrize("aborted", [False, True])
def test_a_record_names_counters_far_into_the_heap(offset, compare, aborted):
    low, high = torch.tensor([offset]).view(torch.int32).tolist()
    code = words.CMP_CODES[compare] | (words.CMP_ABORTED if aborted else 0)
    fields = {
        "rank": 1, "program": 2, "cmp": code, "wanted": 3, "found": 4, "offset_low": low, "offset_high": high,
        "epoch": 0, "site": 0,
    }  # fmt: skip
    asked = []
    heap = SimpleNamespace(backend=SimpleNamespace(base=1 << 40), find=asked.append)
    found = watch.waiting(fields, heap)
    assert asked == [(1 << 40) + offset]
    assert (found.counter, found.compare, found.launch) == (f"heap offset {offset:#x}", compare, None)


def test_incomplete_records_are_left_out():
    page = torch.zeros(words.STATUS_BYTES // 4, dtype=torch.int32)
    record(page, 0, 0, 4096, 1, 0, 0)
    record(page, 1, 1, 4096, 1, 0, 0)
    page[words.STATUS_FIRST_RECORD + words.RECORD_FIELDS.index("owner")] = 0
    assert [r["rank"] for r in watch.records(page.tolist())] == [1]
    page[words.STATUS_RECORDS] = 10_000
    assert len(watch.records(page.tolist())) == 1
    assert watch.kernel_name(0) == watch.kernel_name(12345) == "a kernel"


@pytest.mark.parametrize("leaves", ["killed", "raises"])
def test_a_spin_ends_soon_after_the_peer_dies(leaves):
    meeting = prepare()

    def main(rank):
        world = forked.fake_world(meeting, rank, 3, timeout=30.0)
        page = world.heap.tensor(world.heap.status)
        if rank == 1:
            time.sleep(0.2)
            if leaves == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            with world:
                raise ZeroDivisionError
        start = time.monotonic()
        while not page[words.STATUS_ABORT]:  # a kernel's wait polls it, too
            assert time.monotonic() - start < 25, "nobody raised the abort word"
            time.sleep(0.01)
        with pytest.raises(PeerLost, match=r"rank 1 \(pid \d+\) (exited|gave up: Zero.*) during a kernel") as caught:
            world.synchronize()
        return set(caught.value.lost)

    ends = forked.run(3, main)
    meeting.remove()
    for end in (ends[0], ends[2]):
        assert end.error is None, end.error
        assert 1 in end.value


def test_a_peer_that_closes_its_world_is_not_lost():
    meeting = prepare()

    def main(rank):
        world = forked.fake_world(meeting, rank, 2)
        if rank == 1:
            world.close()
            return 0
        time.sleep(4 * watch.PERIOD)
        world.synchronize()
        found = world.heap.tensor(world.heap.status)[words.STATUS_ABORT].item()
        world.close()
        return found

    ends = forked.run(2, main)
    meeting.remove()
    assert [(end.error, end.value) for end in ends] == [(None, 0), (None, 0)]
