"""Who can become a rank: torch's store, which anybody may write to, decides nothing and holds no secret."""

import os
import socket
import tempfile
import threading
import time
from collections import Counter

import pytest
import torch.distributed as dist

from pkt.errors import PeerLost, PktError, ShapeError, TransportError, Unsupported, WaitTimeout
from pkt.runtime import bootstrap
from pkt.runtime.processes import network
from pkt.runtime.processes.network import Board, Network
from pkt.runtime.processes.rendezvous import connect

from .test_transport import threads

SECRET = "of every rank " * 3
SHUT = 1.0  # seconds after which a rank gives up


@pytest.fixture(params=["", SECRET], ids=["no secret", "secret"])
def secret(request, monkeypatch, folder):
    monkeypatch.setenv("PKT_SECRET", request.param)
    return request.param


class Never(Counter):
    """Counts nothing: the ranks are threads of one process here, and all make the first world of their group."""

    def __setitem__(self, key, value):
        pass


KEY = "pkt/w/0-1/0"  # of a world of the group ("w", (0, 1))


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path_factory):
    """The folder for temporary files, in which nothing may be left."""
    tmp_path_factory.getbasetemp()  # pytest's own is elsewhere
    monkeypatch.delenv("PKT_SECRET", raising=False)
    monkeypatch.setattr(bootstrap, "_worlds_of", Never())
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield path
        assert os.listdir(path) == []


class Shared:
    """A store like torch's that notes what is written to it. forged: by part of a key, what a stranger wrote there."""

    def __init__(self, forged=None):
        self.store, self.written, self.forged = dist.HashStore(), [], forged or {}

    def set(self, key, value):
        self.written.append(value)
        self.store.set(key, next((text for part, text in self.forged.items() if part in key), value))

    def __getattr__(self, name):
        return getattr(self.store, name)


def meet(store, rank, size=2, host=None, timeout=SHUT):
    """What this rank does until it is connected: how, and its peers."""
    where = bootstrap._place_by_store(store, ("w", tuple(range(size))), rank, size, timeout)
    try:
        if host is not None:
            where = bootstrap.dataclasses.replace(where, host=host)
        meeting, _ = bootstrap._meeting_place(where, timeout)
        found = connect(meeting, rank, size, timeout)
        families = {connection.sock.family for connection in found.values()}
        peers = sorted(found)
        for connection in found.values():
            connection.close()
        return families, peers
    finally:
        if rank == 0:
            time.sleep(0.2)  # the others have the token by then
            where.meeting.remove()


def test_a_stranger_with_the_store_does_not_become_a_rank(secret, monkeypatch):
    """It plays rank 1 of two, says that it is on another host, and uses all that it finds in the store."""
    store, listened = dist.HashStore(), []
    create_server = socket.create_server

    def noted(*args, **options):
        listened.append(threading.current_thread().name)
        return create_server(*args, **options)

    monkeypatch.setattr(socket, "create_server", noted)

    def stranger():
        threading.current_thread().name = "stranger"
        board = Board(store, KEY)
        store.wait([f"{KEY}/meeting/0"], network.datetime.timedelta(seconds=5))
        said = store.get(f"{KEY}/meeting/0").decode()
        token = next((text for text in said.split('"') if len(text) == 64), "00" * 32)
        board.write("host", 1, "elsewhere")
        board.write("address", 1, "127.0.0.1")
        return connect(Network(board, token, 1, ["here", "elsewhere"], ["127.0.0.1"] * 2), 1, 2, SHUT)

    rank, other = threads(2, lambda number: stranger() if number else meet(store, 0))
    assert isinstance(rank, TransportError if secret else Unsupported), rank
    assert "PKT_SECRET" in str(rank)
    assert isinstance(other, PktError), "the stranger is rank 1"
    assert set(listened) <= {"stranger"}, "a job on one host listens on the network"


def test_ranks_on_one_host_do_not_listen_on_the_network(secret, monkeypatch):
    monkeypatch.setattr(socket, "create_server", None)
    store = dist.HashStore()
    assert threads(2, lambda rank: meet(store, rank, timeout=5.0)) == [
        ({socket.AF_UNIX}, [1]),
        ({socket.AF_UNIX}, [0]),
    ]


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_the_store_holds_no_secret(hosts, monkeypatch):
    monkeypatch.setenv("PKT_SECRET", SECRET)
    store, tokens, original = Shared(), [], bootstrap.rendezvous.connect

    def noted(meeting, *args):
        tokens.append(meeting.token)
        return original(meeting, *args)

    monkeypatch.setitem(globals(), "connect", noted)
    family = socket.AF_UNIX if hosts == "aa" else socket.AF_INET
    met = threads(2, lambda rank: meet(store, rank, host=hosts[rank], timeout=5.0))
    assert met == [({family}, [1]), ({family}, [0])]
    assert len(set(tokens)) == 1
    assert len(store.written) >= 3
    assert not any(tokens[0] in text or SECRET in text for text in store.written)


def test_ranks_on_several_hosts_need_a_secret(monkeypatch):
    monkeypatch.setattr(socket, "create_server", None)
    store = dist.HashStore()
    for rank, error in enumerate(threads(2, lambda rank: meet(store, rank, host="ab"[rank]))):
        assert isinstance(error, Unsupported), error
        found = f"rank {rank}: pkt.init(): found rank 0: on host 'a'; rank 1: on host 'b', and no PKT_SECRET: "
        assert str(error).startswith(found + "set PKT_SECRET to the same 32 letters or more")


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.parametrize("other", ["", "another one " * 3])
def test_ranks_with_different_secrets_do_not_meet(hosts, other, monkeypatch):
    mine, store = threading.local(), dist.HashStore()
    monkeypatch.setattr(network, "secret", lambda: [SECRET, other][mine.rank].encode())

    def main(rank):
        mine.rank = rank
        return meet(store, rank, host=hosts[rank])

    errors = threads(2, main)
    assert all(isinstance(error, (TransportError, WaitTimeout)) for error in errors), errors
    assert any("wanted the same PKT_SECRET on every rank, or on none" in str(error) for error in errors), errors
    assert not any(SECRET in str(error) or (other and other in str(error)) for error in errors)


def test_a_short_secret_is_refused(monkeypatch):
    monkeypatch.setenv("PKT_SECRET", "hunter2")
    with pytest.raises(ShapeError, match="PKT_SECRET: found 7 letters, wanted at least 32") as caught:
        meet(dist.HashStore(), 0)
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("PKT_SECRET", SECRET)
    assert SECRET not in repr(Board(None, "w", 0, network.secret()))
    assert Board(None, "w", 0, b"a" * 32).token("1") != Board(None, "w", 0, b"b" * 32).token("1")
    assert Board(None, "w", 0, b"a" * 32).token("1") != Board(None, "w", 0, b"a" * 32).token("2")


def test_a_late_rank_learns_from_the_store_why_rank_0_gave_up():
    store = dist.HashStore()
    Board(store, KEY).write("host", 1, network.this_host())
    with pytest.raises(WaitTimeout, match="waits for rank 1"):
        meet(store, 0, timeout=0.2)
    with pytest.raises(PeerLost, match="rank 0 gave up the rendezvous: rank 1 did not come within 0.2 s"):
        meet(store, 1, timeout=4.0)


# ---------------------------------------------------------------------------------------------------- forged entries
def entry(value):
    return network.json.dumps([network.json.dumps(value), ""])


JUNK = [b"", b"x", b"\xff\xfe", b"[]", b'["1"]', b'[1, ""]', b'{"a": 1}', b"[" * 5000, b'["[", ""]', b'["1", 7]']
VALUES = [
    None,
    7,
    [],
    ["/tmp"],
    [1, 2],
    {},
    "x" * 10_000,
    ["relative", "a"],
    ["/etc", "a"],
    ["/root/\0", "a"],
    [[[]], {}],
]


@pytest.mark.parametrize("what", ["meeting/0", "host/0", "host/1"])
def test_forged_entries_end_in_errors_of_pkt(what):
    stores = [Shared({what: text}) for text in [*JUNK, *map(entry, VALUES)]]
    for error in threads(2 * len(stores), lambda n: meet(stores[n // 2], n % 2, timeout=0.3)):
        assert isinstance(error, PktError), error
        assert len(str(error)) < 1500


def test_a_signed_entry_stands_for_no_other():
    """A stranger may copy what a rank wrote to another place of the store."""
    store = dist.HashStore()
    board = Board(store, KEY, 0, SECRET.encode())
    board.write("host", 0, "a")
    store.set(f"{KEY}/host/1", store.get(f"{KEY}/host/0"))
    assert board.read("host", 0, 1) == "a"
    with pytest.raises(TransportError, match="an entry that is not signed"):
        board.read("host", 1, 1)


STRANGE = [None, 7, [], ["127.0.0.1"], ["::::", 1], ["127.0.0.1", 1 << 70], [["a"], {}], "x" * 999]


@pytest.mark.parametrize("what", ["address/0", "listens/0", "left/0"])
def test_strange_entries_of_a_rank_on_another_host(what, monkeypatch):
    monkeypatch.setenv("PKT_SECRET", SECRET)
    original, stores = Board.write, [dist.HashStore() for _ in STRANGE]

    def write(self, name, rank, given):
        original(self, name, rank, STRANGE[stores.index(self.store)] if f"{name}/{rank}" == what else given)

    monkeypatch.setattr(Board, "write", write)
    for error in threads(2 * len(stores), lambda n: meet(stores[n // 2], n % 2, host="ab"[n % 2], timeout=0.3)):
        assert isinstance(error, (PktError, tuple)), error
        assert len(str(error)) < 1500


@pytest.mark.parametrize(("name", "mode"), [("pkt-open", 0o755), ("mine", 0o700), ("pkt-empty", 0o700)])
def test_no_socket_is_made_where_a_stranger_says(tmp_path, name, mode):
    """Only in a private directory that pkt has made."""
    (tmp_path / name).mkdir(mode=mode)
    store = Shared({"meeting/0": entry([str(tmp_path / name), "job"])})
    errors = threads(2, lambda rank: meet(store, rank, timeout=0.3))
    assert isinstance(errors[1], TransportError), errors
    assert os.listdir(tmp_path / name) == []


def test_a_store_that_does_not_answer():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store = dist.TCPStore("127.0.0.1", server.port, timeout=network.datetime.timedelta(seconds=1))
    del server
    with pytest.raises((TransportError, WaitTimeout), match="torch's store|rank 0"):
        meet(store, 1)
