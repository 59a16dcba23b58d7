"""The rendezvous and the collective calls between processes: strangers, losses, deadlines."""

import os
import signal
import socket
import tempfile
import threading
import time

import pytest

from pkt.errors import (
    CollectiveMismatch,
    PeerLost,
    PktError,
    ShapeError,
    TransportError,
    WaitTimeout,
    ranks_named,
)
from pkt.runtime.bootstrap import open_world
from pkt.runtime.processes import rendezvous
from pkt.runtime.processes.frames import Connection, pack
from pkt.runtime.processes.rendezvous import Meeting, connect, prepare
from pkt.runtime.processes.transport import Transport, process_state, timeout_seconds
from pkt.wording import FIRST_CALL

from . import forked
from .processes import without_the_token


@pytest.fixture
def meeting():
    place = prepare()
    yield place
    place.remove()
    assert not os.path.exists(place.directory)


def threads(size, main):
    """main(rank) on threads; results or exceptions."""
    results = [None] * size

    def run(rank):
        try:
            results[rank] = main(rank)
        except BaseException as error:
            results[rank] = error

    running = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return results


def transports(meeting, size, timeout=5.0):
    found = threads(size, lambda rank: Transport(rank, size, connect(meeting, rank, size, timeout), timeout))
    for transport in found:
        if isinstance(transport, BaseException):
            raise transport
    return found


@pytest.fixture
def four(meeting):
    before = len(os.listdir("/proc/self/fd"))
    found = transports(meeting, 4)
    yield found
    for transport in found:
        transport.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_values_in_rank_order_and_no_sockets_left(four, meeting):
    got = threads(4, lambda rank: [four[rank].exchange({"from": rank, "call": i}, f"call {i}") for i in range(50)])
    for values in got:
        assert values == [[{"from": r, "call": i} for r in range(4)] for i in range(50)]
    assert os.listdir(meeting.directory) == []


def test_large_values_do_not_block_each_other(four):
    got = threads(4, lambda rank: [len(v) for v in four[rank].exchange(str(rank) * (8 << 20), "large")])
    assert got == [[8 << 20] * 4] * 4


def test_every_rank_gets_its_descriptor(four):
    def main(rank):
        own = {peer: os.memfd_create(f"{rank}-{peer}") for peer in range(4) if peer != rank}
        for peer, fd in own.items():
            os.write(fd, f"{rank}->{peer}".encode())
        _, received = four[rank].exchange_fds(None, {p: [fd] for p, fd in own.items()}, "fds")
        said = {peer: os.pread(fds[0], 10, 0).decode() for peer, fds in received.items()}
        for fd in [*own.values(), *(fd for fds in received.values() for fd in fds)]:
            os.close(fd)
        return said

    assert threads(4, main) == [{p: f"{p}->{r}" for p in range(4) if p != r} for r in range(4)]


def test_unexpected_descriptors_are_refused(four):
    def main(rank):
        if rank != 2:
            return four[rank].exchange(None, "plain")
        fd = os.memfd_create("odd")
        try:
            return four[rank].exchange_fds(None, {0: [fd]}, "plain")
        finally:
            os.close(fd)

    errors = threads(4, main)
    assert isinstance(errors[0], TransportError)
    assert "plain of rank 2: found 1 file descriptors, wanted none" in str(errors[0])


def test_ranks_in_different_calls_are_named(four):
    errors = threads(4, lambda rank: four[rank].exchange(None, "barrier()" if rank != 2 else "heap call #3"))
    for error in errors:
        assert isinstance(error, CollectiveMismatch)
        assert "ranks 0, 1, 3: barrier(); rank 2: heap call #3" in str(error)


def test_a_first_call_of_an_operator_is_named_by_its_arguments(four):
    def main(rank):
        value, what = (None, "barrier()") if rank == 2 else ("gather(x=(8,))", FIRST_CALL)
        return four[rank].exchange(value, what)

    for error in threads(4, main):
        assert isinstance(error, CollectiveMismatch)
        assert "ranks 0, 1, 3: gather(x=(8,)); rank 2: barrier()" in str(error)


def test_a_silent_peer_is_named_by_all_at_the_deadline(meeting):
    found, left = transports(meeting, 3, timeout=0.5), threading.Barrier(3)

    def main(rank):
        try:
            return found[rank].exchange(None, "barrier()") if rank != 1 else None
        finally:
            left.wait()  # rank 1 says nothing before the others have left

    errors = threads(3, main)
    for error in (errors[0], errors[2]):
        assert isinstance(error, (WaitTimeout, PeerLost))
        assert "rank 1" in str(error)
    found[1].close()


def test_a_wrong_sequence_number_is_refused(four):
    four[1].connections[0].queue(pack(99, ["barrier()", None]))
    errors = threads(
        4, lambda rank: four[rank].exchange(None, "barrier()") if rank != 1 else four[1].connections[0].write()
    )
    assert isinstance(errors[0], TransportError)
    assert "a message of rank 1: found call number 99, wanted call number 1" in str(errors[0])


@pytest.mark.parametrize(
    "value", [None, 7, [], ["a"], ["barrier()", None, 1], [["barrier()"], None], [{}, 1], {"a": 1}]
)
def test_a_message_that_is_no_call_is_refused(four, value):
    fd = os.memfd_create("beside")
    four[1].connections[0].queue(pack(1, value, 1), [fd])

    def main(rank):
        return four[rank].exchange(None, "barrier()") if rank != 1 else four[1].connections[0].write()

    errors = threads(4, main)
    os.close(fd)
    assert isinstance(errors[0], TransportError), errors[0]
    assert "a message of rank 1: found" in str(errors[0])


@pytest.mark.parametrize(
    "farewell", [None, [], {}, {"lost": [1]}, {"lost": {"x": 1, "-1": "", "99": ""}, "why": "w" * 9000}, {"lost": 1}]
)
def test_a_farewell_of_another_form_blames_the_rank_that_sent_it(four, farewell):
    four[1].connections[0].queue(pack(0, farewell))
    errors = threads(4, lambda r: four[r].exchange(None, "barrier()") if r != 1 else four[1].connections[0].write())
    assert isinstance(errors[0], PeerLost), errors[0]
    assert errors[0].lost.keys() == {1}
    assert "gave up" in errors[0].lost[1]
    assert len(str(errors[0])) < 2500


def test_a_value_that_cannot_be_sent_is_refused_where_it_is_made(four):
    deep = []
    for _ in range(1000):
        deep = [deep]
    errors = threads(4, lambda rank: four[rank].exchange(deep if rank == 1 else None, "objects"))
    assert isinstance(errors[1], TransportError), errors[1]
    assert "this rank's value for objects: found lists or objects nested deeper than" in str(errors[1])
    for rank in (0, 2, 3):
        assert isinstance(errors[rank], PeerLost), errors[rank]
        assert set(errors[rank].lost) <= {0, 1, 2, 3} - {rank}


# ---------------------------------------------------------------------------------------------------------- strangers
def dial(meeting, rank, said=b"", wait=False):
    """A stranger's connection to `rank`'s socket."""
    path = os.path.join(meeting.directory, str(rank))
    sock = socket.socket(socket.AF_UNIX)
    for _ in range(500):
        try:
            sock.connect(path)
            break
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.005)
    sock.settimeout(5)
    challenge = sock.recv(rendezvous.NONCE)
    if said:
        sock.sendall(said)
    return sock, challenge


def answer(sock):
    """The bytes that a stranger receives; b"" if it was refused."""
    try:
        return sock.recv(100)
    except ConnectionResetError:  # closed while bytes of the stranger were unread
        return b""


def test_an_impostor_is_refused_and_delays_nobody(meeting):
    strangers = []

    def impostor():
        hello = rendezvous._HELLO.pack(rendezvous.MAGIC, 1, b"n" * 16, b"p" * 32)
        strangers.extend(dial(meeting, 0, said)[0] for said in (b"", b"PKT1 half of a hel", hello, b"x" * 500))

    thread = threading.Thread(target=impostor)
    thread.start()

    def main(rank):
        if rank == 1:
            thread.join()  # the strangers come first
        return connect(meeting, rank, 2, 5.0)

    found = threads(2, main)
    assert [set(f) for f in found] == [{1}, {0}]
    for connections in found:
        for connection in connections.values():
            connection.close()
    refused = [answer(sock) for sock in strangers]
    assert refused == [b""] * 4, "nobody was let in"
    for sock in strangers:
        sock.close()


def test_a_recorded_proof_is_useless(meeting, monkeypatch):
    recorded = []
    pack_hello = rendezvous._HELLO.pack

    class Recorder:
        size, unpack = rendezvous._HELLO.size, staticmethod(rendezvous._HELLO.unpack)

        @staticmethod
        def pack(*fields):
            recorded.append(pack_hello(*fields))
            return recorded[-1]

    monkeypatch.setattr(rendezvous, "_HELLO", Recorder)
    for connections in threads(2, lambda rank: connect(meeting, rank, 2, 5.0)):
        connections.popitem()[1].close()
    assert len(recorded) == 1
    outcome = []

    def replay():
        sock, _ = dial(meeting, 0, recorded[0])
        outcome.append(answer(sock))
        sock.close()

    thread = threading.Thread(target=replay)
    thread.start()
    with pytest.raises(WaitTimeout, match=r"refused: pid \d+ as rank 1 without the token") as caught:
        connect(meeting, 0, 2, 0.7)
    thread.join()
    assert outcome == [b""]
    assert "the rendezvous waits for rank 1 after 0.7 s" in str(caught.value)


def test_a_proof_is_for_one_role_one_challenge_and_one_pair():
    said = [
        ("join", b"n", 1, 0),
        ("welcome", b"n", 1, 0),
        ("join", b"m", 1, 0),
        ("join", b"n", 2, 0),
        ("join", b"n", 1, 2),
    ]
    assert len({rendezvous._proof(b"token", *what) for what in said}) == len(said)


def test_a_server_without_the_token_learns_nothing_and_is_refused(meeting):
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.path.join(meeting.directory, "0"))
    server.listen()

    thread = without_the_token(server)
    with pytest.raises(TransportError, match="the socket of rank 0: found a wrong proof"):
        connect(meeting, 1, 2, 2.0)
    thread.join()
    server.close()


@pytest.mark.parametrize(
    ("mode", "text"),
    [(0o755, "drwxr-xr-x"), (0o750, "drwxr-x---"), (0o710, "drwx--x---"), (0o701, "drwx-----x"), (0o702, "drwx----w-")],
)
def test_a_directory_that_others_can_enter_is_refused(meeting, mode, text):
    os.chmod(meeting.directory, mode)
    with pytest.raises(TransportError, match=f"found {text} of uid"):
        connect(meeting, 0, 2, 1.0)
    os.chmod(meeting.directory, 0o700)


def test_a_setgid_folder_for_temporary_files(tmp_path, monkeypatch):
    """A directory made in it has the bit too, and is as private as another."""
    os.chmod(tmp_path, 0o3777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = prepare()
    os.chmod(place.directory, 0o2700)  # as the kernel makes it there; some file systems drop the bit
    assert os.path.dirname(place.directory) == str(tmp_path)
    for transport in transports(place, 2):
        transport.close()
    place.remove()


def test_the_token_is_in_no_repr(meeting):
    where = forked.place(meeting, 0, 2)
    assert meeting.token not in repr(meeting) + str(meeting) + repr(where) + f"{where!s}"


@pytest.mark.parametrize("found", ["abc", "nan", "inf", "-1", "0", "1e30"])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(monkeypatch, found):
    monkeypatch.setenv("PKT_TIMEOUT", found)
    with pytest.raises(ShapeError, match=f"PKT_TIMEOUT: found '{found}', wanted seconds"):
        timeout_seconds()
    assert timeout_seconds(2) == 2.0
    with pytest.raises(ShapeError, match="timeout: found"):
        timeout_seconds(float("nan"))
    for text, seconds in (("7.5", 7.5), ("", 60.0)):
        monkeypatch.setenv("PKT_TIMEOUT", text)
        assert timeout_seconds() == seconds


def test_a_wrong_heap_leaves_no_directory(meeting):
    with pytest.raises(ShapeError):
        open_world(forked.place(meeting, 0, 2), 0, "seven", 1.0)
    assert not os.path.exists(meeting.directory)


def test_a_rank_that_has_joined_cannot_join_again(meeting):
    """The second one has the token, too; the first keeps its place, and the rank that is missing is waited for."""
    joined, second = [], []

    def joins():
        deadline = time.monotonic() + 5.0
        joined.append(rendezvous._join(meeting, bytes.fromhex(meeting.token), 1, 0, deadline, set()))
        with pytest.raises((ConnectionError, TimeoutError)) as caught:
            rendezvous._join(meeting, bytes.fromhex(meeting.token), 1, 0, time.monotonic() + 0.5, set())
        second.append(caught.value)

    thread = threading.Thread(target=joins)
    thread.start()
    with pytest.raises(WaitTimeout, match="as rank 1 a second time") as caught:
        connect(meeting, 0, 3, 1.5)
    thread.join()
    assert "waits for rank 2" in str(caught.value)
    assert len(second) == 1
    joined[0].close()


def test_a_rank_that_has_come_is_not_blamed_alone(meeting):
    """Rank 2 listens, and rank 0, which it connects to first, no longer answers. Rank 1 tells rank 0 why it leaves."""
    told = []

    def first():  # as far as it knows there are two ranks
        with pytest.raises(PeerLost) as lost:
            Transport(0, 3, connect(meeting, 0, 2, 5.0), 5.0).exchange(None, "topology", (0, 1))
        told.append(str(lost.value))

    thread = threading.Thread(target=first)
    thread.start()
    with meeting.listen(2, 3), pytest.raises(WaitTimeout) as caught:
        connect(meeting, 1, 3, 1.5)
    thread.join()
    assert "waits for rank 2 (has come, and may wait for rank 0) after" in str(caught.value)
    assert told == ["rank 0: rank 2 has come, and may wait for rank 0 during topology"]


def test_another_token_is_another_world(meeting):
    other = Meeting(meeting.directory, "00" * 32)
    errors = threads(2, lambda rank: connect(meeting if rank == 0 else other, rank, 2, 0.7))
    assert all(isinstance(error, PktError) for error in errors)


# ------------------------------------------------------------------------------------------------------------- losses
def test_process_states():
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(0)
    assert process_state(pid) == ""
    os.kill(pid, signal.SIGSTOP)
    while process_state(pid) != "stopped":
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    while process_state(pid) != "exited":
        time.sleep(0.01)
    os.waitpid(pid, 0)
    assert process_state(pid) == "exited"
    assert process_state(0) == ""


# ------------------------------------------------------------------------------------------------------------- losses
def test_a_rank_that_meets_only_some_names_whom_they_lost(meeting, monkeypatch):
    """Rank 0 lost rank 1, said so and removed the directory, all before rank 2 reached rank 1."""
    ours, theirs = socket.socketpair()

    def join(place, token, rank, peer, deadline, heard):
        if peer == 0:
            return Connection(ours, rank, peer, os.getpid())
        raise PeerLost.exited(rank, {0: "gave up the rendezvous before this rank came"}, "the rendezvous")

    monkeypatch.setattr(rendezvous, "_join", join)
    theirs.sendall(pack(0, {"lost": {"1": "(pid 7) exited"}, "why": "it is lost"}))
    with theirs, pytest.raises(PeerLost, match="exited") as caught:
        connect(meeting, 2, 3, 5.0)
    assert caught.value.lost.keys() == {1}


def test_a_rank_that_left_because_of_a_loss_is_not_named(four):
    """As the journal looks for peers, outside the collective calls: rank 1 left because rank 3 is lost."""
    four[1].give_up("PeerLost: rank 3", {3: "(pid 7) exited"})
    with pytest.raises(PeerLost) as caught:
        four[0].check("heap call #4", [1])
    assert caught.value.lost.keys() == {3}
    with pytest.raises(PeerLost) as caught:  # and rank 0 told the others
        four[2].barrier("b")
    assert caught.value.lost.keys() == {3}


@pytest.mark.parametrize(
    ("farewells", "hung_up", "causes"),
    [
        ({1: [3], 3: []}, [], {3}),
        ({1: [2], 2: [3]}, [], {3}),
        ({1: [2], 2: [1]}, [], {1, 2}),
        ({1: [0]}, [], {1}),
        ({1: [0], 3: []}, [], {3}),
        ({1: [0]}, [3], {3}),
        ({1: [2]}, [3], {2}),
        ({1: [], 2: [1, 2]}, [], {1}),
        ({}, [2], {2}),
        ({}, [], set()),
    ],
)
def test_who_is_named(four, farewells, hung_up, causes):
    """farewells: the ranks that each one names."""
    for rank, lost in farewells.items():
        four[rank].give_up("why", dict.fromkeys(lost, "is lost"))
    for rank in hung_up:
        four[rank].close()
    assert four[0].causes().keys() == causes


def test_a_rank_that_closed_its_world_is_named_only_by_one_that_waits_for_it(four):
    class Journal:
        def left(self, rank):
            return rank == 3

    four[0].journal = Journal()
    four[3].close()
    assert four[0].causes() == {}
    four[0].check("heap call #4", [1])
    with pytest.raises(PeerLost) as caught:
        four[0].check("heap call #4", [3])
    assert caught.value.lost.keys() == {3}
    assert four[0].causes().keys() == {3}  # its connections are closed by now


def test_a_rank_that_was_kept_past_its_deadline_takes_what_has_come(four):
    for peer in (1, 2, 3):
        four[peer].connections[0].queue(pack(1, ["b", peer]))
        four[peer].connections[0].write()
    four[0].timeout = -1.0
    assert four[0].exchange(0, "b") == [0, 1, 2, 3]
    four[1].give_up("PeerLost: rank 3", {3: "(pid 7) exited"})
    with pytest.raises(PeerLost) as caught:
        four[0].exchange(0, "c")
    assert caught.value.lost.keys() == {3}


def test_a_call_succeeds_that_a_rank_completed_before_it_gave_up(four):
    """Rank 1 has all frames of a call, and leaves before rank 2's is here: an error that all ranks share stays so."""

    def send(peer):
        four[peer].connections[0].queue(pack(1, ["b", peer]))
        four[peer].connections[0].write()

    send(1)
    send(3)
    four[1].give_up("DriverError: on all ranks")
    late = threading.Timer(0.2, send, (2,))
    late.start()
    assert four[0].exchange(0, "b") == [0, 1, 2, 3]
    late.join()
    with pytest.raises(PeerLost, match=r"gave up: DriverError: on all ranks during c") as caught:
        four[0].exchange(0, "c")
    assert caught.value.lost.keys() == {1}


def test_a_rank_that_still_waits_in_the_call_before_is_not_named(meeting):
    """Rank 0 stops between its frames of a call. Rank 1 has it and goes on, and rank 2 stays in this call."""
    found = transports(meeting, 3)
    found[1].timeout, found[2].timeout = 0.3, 0.5
    found[0].connections[1].queue(pack(1, ["a", None]))
    found[0].connections[1].write()

    def main(rank):
        for what in ("a", "b") if rank else ():
            found[rank].exchange(None, what)

    errors = threads(3, main)
    found[0].close()
    assert [type(error) for error in errors[1:]] == [PeerLost, WaitTimeout]
    assert errors[1].lost.keys() == {0}
    assert errors[2].missing == [0]


def test_an_error_on_top_of_a_loss_names_it_too():
    lost = PeerLost.exited(0, {3: "(pid 7) exited"}, "b")
    late = WaitTimeout.rendezvous(0, "b", 1.0, [2, 3])
    above = RuntimeError("on top")
    above.__context__ = KeyboardInterrupt()
    above.__context__.__cause__ = lost
    assert ranks_named(lost) == ranks_named(above) == {3: "(pid 7) exited"}
    assert ranks_named(late).keys() == {2, 3}
    above.__context__.__cause__ = above
    assert ranks_named(above) == ranks_named(None) == {}
