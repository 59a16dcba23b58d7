"""The log of collective calls: what is read is what was written, whole; long records differ wherever they do."""

import os
import threading

import pytest

from pkt.errors import TransportError, WaitTimeout
from pkt.runtime.processes import journal


@pytest.fixture
def pair():
    """The journals of two ranks, in one process."""
    fds = [journal.create() for _ in range(2)]
    journals = [journal.SharedJournal(rank, fds, 0.3, lambda what: None) for rank in range(2)]
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
