"""One connection: whole frames come through, anything else is refused, and no descriptor is left open."""

import array
import os
import socket

import pytest

from pkt.errors import TransportError
from pkt.runtime.processes.frames import HEADER, MAGIC, MAX_FDS, Connection, LostConnection, pack
from pkt.runtime.processes.parsing import MAX_DEPTH


@pytest.fixture
def ends():
    """A connection, and the bare socket at its other end; checks that nothing stays open."""
    before = len(os.listdir("/proc/self/fd"))
    here, there = socket.socketpair()
    connection = Connection(here, rank=0, peer=1, pid=123)
    yield connection, there
    connection.close()
    there.close()
    assert len(os.listdir("/proc/self/fd")) == before


def give(sock, data, fds=()):
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], control)


def some_fds(count):
    return [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) for _ in range(count)]


def test_a_frame_may_arrive_in_pieces(ends):
    connection, there = ends
    frame = pack(7, {"a": [1, None, "x"]})
    for byte in frame[:-1]:
        give(there, bytes([byte]))
        assert connection.read() is None
    give(there, frame[-1:])
    got = connection.read()
    assert (got.sequence, got.value, got.fds) == (7, {"a": [1, None, "x"]}, [])
    assert connection.read() is None


def test_descriptors_belong_to_their_frame_and_are_not_inherited(ends):
    connection, there = ends
    fds = some_fds(3)
    give(there, pack(1, "none"))
    give(there, pack(2, "two", 2), fds[:2])
    give(there, pack(3, "one", 1), fds[2:])
    counts = []
    for _ in range(3):
        frame = connection.read()
        counts.append((frame.value, len(frame.fds)))
        assert not any(os.get_inheritable(fd) for fd in frame.fds)
        for fd in frame.fds:
            os.close(fd)
    for fd in fds:
        os.close(fd)
    assert counts == [("none", 0), ("two", 2), ("one", 1)]


@pytest.mark.parametrize(
    ("announced", "sent", "found"),
    [
        (1, 0, "0 file descriptors, wanted the 1"),
        (1, 2, "2 file descriptors, wanted the 1"),
        (0, 1, "1 file descriptors"),
        (2, 40, "truncated"),
    ],
)
def test_a_wrong_number_of_descriptors_is_refused(ends, announced, sent, found):
    connection, there = ends
    fds = some_fds(sent)
    give(there, pack(1, None, announced), fds)
    for fd in fds:
        os.close(fd)
    with pytest.raises(TransportError, match=f"rank 0: a message of rank 1 \\(pid 123\\): found {found}"):
        connection.read()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        HEADER.pack(b"PKT0", 1, 2, 0) + b"{}",
        HEADER.pack(MAGIC, 1, 1 << 40, 0),
        HEADER.pack(MAGIC, 1, 4, 99),
    ],
)
def test_other_bytes_are_refused(ends, data):
    connection, there = ends
    give(there, data)
    with pytest.raises(TransportError, match="found header .*, wanted a frame of pkt's; refused"):
        connection.read()


def test_text_that_is_not_json_is_never_unpickled(ends):
    import pickle

    connection, there = ends
    text = pickle.dumps(["what", 1])
    give(there, HEADER.pack(MAGIC, 1, len(text), 0) + text)
    with pytest.raises(TransportError, match="not JSON"):
        connection.read()


DEEP = ["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)]


@pytest.mark.parametrize("text", DEEP, ids=["lists", "objects", "whole", "one too deep"])
def test_text_nested_too_deep_is_refused(ends, text):
    connection, there = ends
    there.settimeout(5)
    there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    there.sendall(HEADER.pack(MAGIC, 1, len(text), 0) + text.encode())
    with pytest.raises(
        TransportError, match=rf"nested deeper than {MAX_DEPTH}.*, wanted JSON at most {MAX_DEPTH} deep"
    ):
        connection.read()


def test_brackets_in_strings_do_not_count_as_depth(ends):
    connection, there = ends
    value = ["[{" * 1000, '"[' * 1000, "\\" * 999 + "[" * 300, *[[]] * 1000]
    for _ in range(MAX_DEPTH - 2):
        value = [value]
    give(there, pack(1, value))
    assert connection.read().value == value
    with pytest.raises(ValueError, match="nested deeper"):
        pack(1, [value])


def test_a_frame_that_cannot_be_read_is_not_packed():
    endless = []
    endless.append(endless)
    with pytest.raises(ValueError):
        pack(1, endless)
    with pytest.raises(ValueError, match="9 descriptors"):
        pack(1, None, MAX_FDS + 1)


@pytest.mark.parametrize("sequence", [1, (1 << 64) - 1])
def test_descriptors_beside_every_piece_are_refused_at_once(ends, sequence):
    """A text may come in a million pieces, so the descriptors of a frame are counted as they arrive."""
    connection, there = ends
    (fd,) = some_fds(1)
    give(there, HEADER.pack(MAGIC, sequence, 1000, 1), [fd])
    give(there, b"[", [fd])
    os.close(fd)
    with pytest.raises(TransportError, match="found 2 file descriptors, wanted the 1 its header announces"):
        connection.read()


def test_descriptors_beside_a_goodbye_are_closed(ends):
    connection, there = ends
    (fd,) = some_fds(1)
    give(there, pack((1 << 64) - 1, None, 1), [fd])
    os.close(fd)
    with pytest.raises(LostConnection, match="closed its world"):
        connection.read()


@pytest.mark.parametrize("length", [0, 3, HEADER.size, HEADER.size + 4])
def test_a_truncated_message_is_refused(ends, length):
    connection, there = ends
    (fd,) = some_fds(1)
    if length:
        give(there, pack(1, "a value", 1)[:length], [fd])
    os.close(fd)
    there.close()
    with pytest.raises(LostConnection):
        connection.read()


def test_writing_to_a_closed_connection_raises(ends):
    connection, there = ends
    there.close()
    connection.queue(pack(1, None))
    with pytest.raises(LostConnection):
        connection.write()


def test_a_closed_connection_said_no_goodbye(ends):
    """As the watchdog's thread looks at one that the main thread closes."""
    connection, _ = ends
    connection.close()
    assert not connection.left()
