"""The journal of heap calls: what is read is what was written, and no rank can end another one through its memory."""

import fcntl
import os
import tempfile
import threading

import pytest

from pkt.errors import PeerLost, TransportError, WaitTimeout
from pkt.runtime.processes import journal
from pkt.runtime.processes.rendezvous import prepare

from . import forked

NBYTES = os.fstat(fd := journal.create()).st_size
os.close(fd)
SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def memory(nbytes=NBYTES, seals=0):
    fd = os.memfd_create("liar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_a_peers_memory_that_can_shrink_is_refused_and_ends_nobody(monkeypatch):
    meeting, own = prepare(), []

    def unsealed():
        own.append(memory())
        return os.dup(own[0])

    def main(rank):
        if rank == 1:
            monkeypatch.setattr(journal, "create", unsealed)
        world = forked.fake_world(meeting, rank, 2)
        world.barrier()
        if rank == 1:
            os.ftruncate(own[0], 0)
        world.barrier()
        return world.backend.journal.written(1)  # SIGBUS if the memory is gone

    ends = forked.run(2, main, 20.0)
    meeting.remove()
    assert [end.died for end in ends] == [0, 0], ends
    assert isinstance(ends[0].error, (TransportError, PeerLost)), ends
    assert isinstance(ends[1].error, (TransportError, PeerLost)), ends
    assert any("of sealed size; refused" in str(end.error) for end in ends), ends


def test_a_journal_keeps_its_size():
    fd = journal.create()
    for nbytes in (0, NBYTES - 1, NBYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


def regular_file():
    with tempfile.TemporaryFile() as file:
        file.truncate(NBYTES)
        return os.dup(file.fileno())


LIES = {
    "unsealed": [memory],
    "one seal": [lambda: memory(seals=fcntl.F_SEAL_GROW)],
    "read only": [lambda: memory(seals=SIZE | fcntl.F_SEAL_WRITE)],
    "short": [lambda: memory(NBYTES - 1, SIZE)],
    "long": [lambda: memory(NBYTES + 1, SIZE)],
    "a file": [regular_file],
    "a pipe": [lambda: os.open("/dev/null", os.O_RDWR)],
    "none": [],
    "two": [journal.create, journal.create],
}


def nobody_is_lost(what, late, seconds):
    """As Transport.check."""
    if seconds is not None:
        raise WaitTimeout.rendezvous(0, what, seconds, late)


@pytest.mark.parametrize("lie", LIES)
def test_other_memory_is_refused_and_nothing_stays_open(lie):
    before = len(os.listdir("/proc/self/fd"))
    mine, sent = journal.create(), [make() for make in LIES[lie]]
    with pytest.raises(TransportError, match="rank 0: the journal of rank 1: found .*, wanted one memory file"):
        journal.SharedJournal(0, [[mine], sent], 1.0, nobody_is_lost)
    for fd in [mine, *sent]:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def pair():
    """The journals of two ranks, in one process."""
    fds = [journal.create() for _ in range(2)]
    journals = [journal.SharedJournal(rank, [[fd] for fd in fds], 0.3, nobody_is_lost) for rank in range(2)]
    for fd in fds:
        os.close(fd)
    yield journals
    for one in journals:
        one.close()


def slot(ordinal):
    return journal._COUNTERS + ordinal % journal.SLOTS * journal.SLOT_BYTES


def test_a_rank_reads_what_its_peer_wrote(pair):
    mine, theirs = pair
    records = [b"", b"x", b"y" * journal._ROOM]
    for record in records:
        theirs.append(record)
    assert mine.written(1) == 3
    assert mine.written(0) == 0
    assert [mine.read(1, ordinal) for ordinal in (1, 2, 3)] == records


@pytest.mark.parametrize("at", [0, 100, 440, 480, 495, 1000, 4999])
def test_long_records_differ_wherever_they_do(pair, at):
    long = bytearray(b"z" * 5000)
    pair[0].append(bytes(long))
    long[at] ^= 1
    pair[1].append(bytes(long))
    assert pair[0].read(0, 1) != pair[0].read(1, 1)
    pair[0].append(bytes(long))
    assert pair[0].read(0, 2) == pair[0].read(1, 1)
    assert len(pair[0].read(0, 2)) == journal._ROOM


def test_a_half_written_record_is_not_read(pair):
    """The counter and the ordinal are there, the content is not yet."""
    mine, theirs = pair
    theirs.append(b"allocate 4096 bytes")
    log, at = theirs._maps[1], slot(1) + journal._SLOT.size
    whole = bytes(log[at : at + 8])
    log[at : at + 8] = bytes(8)
    with pytest.raises(TransportError, match="the journal of rank 1"):
        mine.read(1, 1)

    def completes():
        log[at : at + 8] = whole

    timer = threading.Timer(0.01, completes)
    timer.start()
    assert mine.read(1, 1) == b"allocate 4096 bytes"
    timer.join()


def test_a_record_of_an_older_call_is_not_taken_for_a_newer(pair):
    mine, theirs = pair
    theirs.append(b"old")
    theirs._counters[1][journal._WRITTEN] = 1 + journal.SLOTS
    with pytest.raises(TransportError, match=f"found call #1, wanted call #{1 + journal.SLOTS}"):
        mine.read(1, 1 + journal.SLOTS)


def test_settling_waits_for_the_last_rank(pair):
    mine, theirs = pair
    mine.append(b"a")
    with pytest.raises(WaitTimeout, match="rank 1"):
        mine.settle(1)
    theirs.append(b"a")
    mine.settle(1)
    mine.settle(0)


def test_a_rank_that_left_is_known(pair):
    mine, theirs = pair
    assert not mine.left(1)
    theirs.leave()
    assert mine.left(1)
    assert not mine.left(0)
