"""The journal of heap calls: no rank can end another one through the memory that they share."""

import fcntl
import os
import tempfile

import pytest

from pkt.errors import PeerLost, TransportError
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


@pytest.mark.parametrize("lie", LIES)
def test_other_memory_is_refused_and_nothing_stays_open(lie):
    before = len(os.listdir("/proc/self/fd"))
    mine, sent = journal.create(), [make() for make in LIES[lie]]
    with pytest.raises(TransportError, match="rank 0: the journal of rank 1: found .*, wanted one memory file"):
        journal.SharedJournal(0, [[mine], sent], 1.0, lambda what: None)
    for fd in [mine, *sent]:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before
