"""Callers of a rank's socket that are no ranks, or no longer: none delays the ranks, and all ends in errors of pkt."""

import contextlib
import os
import resource
import socket
import threading
import time

import pytest
import torch.distributed as dist

from pkt.errors import PeerLost, TransportError, WaitTimeout
from pkt.runtime.bootstrap import Place, open_world
from pkt.runtime.processes import callers, network, rendezvous
from pkt.runtime.processes.network import Board, Network
from pkt.runtime.processes.rendezvous import connect, prepare

from . import forked
from .fake_driver import FakeDriver
from .test_transport import answer, dial, meeting, threads  # noqa: F401

TOKEN = "5a" * 32


def over_tcp(rank, size=2, board=None):
    return Network(board or Board(dist.HashStore(), "w"), TOKEN, rank, "abcdefgh"[:size], ["127.0.0.1"] * size)


def close(found):
    for connections in found:
        assert not isinstance(connections, BaseException), found
        for connection in connections.values():
            connection.close()


def hello(token, challenge, rank, to):
    nonce = b"n" * callers.NONCE
    proof = rendezvous._proof(bytes.fromhex(token), "join", challenge, rank, to)
    return rendezvous._HELLO.pack(rendezvous.MAGIC, rank, nonce, proof)


# ------------------------------------------------------------------------------------------------------------- crowds
def test_a_crowd_that_comes_before_the_ranks_leaves_room_for_them():
    """A rank listens before it accepts: meanwhile the kernel keeps the callers, and forgets those beyond its queue."""
    listener = over_tcp(0).listen(0, 2)
    with listener, contextlib.ExitStack() as held:
        for _ in range(300):
            held.enter_context(socket.create_connection(listener.getsockname(), 2.0))


def test_a_rank_whose_call_was_forgotten_calls_again(meeting):  # noqa: F811
    """The kernel of the other end may drop a connection that this end takes for made."""
    silent = []

    class Forgetful(rendezvous.Meeting):
        patience = 0.1

        def dial(self, rank, peer, timeout):
            if silent:
                return super().dial(rank, peer, timeout)
            here, there = socket.socketpair()
            silent.append(there)
            return here

    places = [meeting, Forgetful(meeting.directory, meeting.token)]
    close(threads(2, lambda rank: connect(places[rank], rank, 2, 4.0)))
    silent[0].close()


@pytest.mark.parametrize("error", [OSError(99, "no port"), TimeoutError("lost"), ConnectionResetError(104, "reset")])
def test_a_call_that_fails_for_a_moment_is_made_again(monkeypatch, error):
    board, original, failed = Board(dist.HashStore(), "w"), socket.create_connection, []

    def create_connection(*args):
        if len(failed) < 3:
            failed.append(1)
            raise error
        return original(*args)

    monkeypatch.setattr(network.socket, "create_connection", create_connection)
    close(threads(2, lambda rank: connect(over_tcp(rank, board=board), rank, 2, 10.0)))
    assert len(failed) == 3


def test_a_rank_without_free_descriptors_drops_silent_callers():
    place = prepare()

    def main(rank):
        if rank == 0:
            have = len(os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (have + 12, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            return sorted(connect(place, 0, 2, 20.0))
        crowd = []
        for _ in range(60):
            with contextlib.suppress(OSError):  # a later caller finds out that it was dropped
                crowd.append(dial(place, 0)[0])
        return sorted(connect(place, 1, 2, 20.0)), len(crowd) > 0

    ends = forked.run(2, main, 40.0)
    place.remove()
    assert [end.value for end in ends] == [[1], ([0], True)], ends


def test_the_callers_in_a_message_are_bounded(meeting):  # noqa: F811
    over = threading.Event()

    def crowd():
        with contextlib.suppress(OSError):
            dial(meeting, 0)[0].close()
        while not over.is_set():
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(1)
                sock.connect(os.path.join(meeting.directory, "0"))
                sock.sendall(os.urandom(100) if os.urandom(1)[0] < 128 else b"")

    running = [threading.Thread(target=crowd) for _ in range(2)]
    for thread in running:
        thread.start()
    with pytest.raises(WaitTimeout, match="refused: ") as caught:
        connect(meeting, 0, 2, 1.0)
    over.set()
    for thread in running:
        thread.join()
    assert len(str(caught.value)) < 200 * callers._REASONS


def test_refusals_are_counted_by_reason():
    refused = callers.Refused()
    for number in range(5000):
        refused.add(f"pid {number}", "hung up" if number % 2 else "stayed silent")
    assert refused.texts() == ["pid 0 stayed silent (and 2,499 more)", "pid 1 hung up (and 2,499 more)"]
    for number in range(100):
        refused.add("pid 7", f"because {number}")
    assert len(refused.texts()) == callers._REASONS + 1
    assert refused.texts()[-1] == "pid 7 for other reasons (and 85 more)"


def test_a_crowd_on_one_host_does_not_drive_out_a_caller_on_another():
    import selectors

    pairs = [socket.socketpair() for _ in range(5)]
    address = {pairs[0][0]: "far", **{here: "near" for here, _ in pairs[1:]}}
    with selectors.PollSelector() as selector:
        greet = lambda sock: callers.Stranger(0, address[sock], address[sock], "")  # noqa: E731
        crowd = callers.Callers(greet, 84, 3, selector, callers.Refused())

        class Listener:
            waiting = [here for here, _ in pairs]

            def accept(self):
                if not self.waiting:
                    raise BlockingIOError
                return self.waiting.pop(0), ""

        crowd.accept(Listener())
        assert [address[sock] for sock in crowd.pending] == ["far", "near", "near"]
        with crowd:
            pass
        assert not selector.get_map()
    for _, there in pairs:
        there.close()


# --------------------------------------------------------------------------------------------------- hellos and losses
def test_a_rank_gone_after_its_hello_is_replaced_by_one_that_comes(meeting, monkeypatch):  # noqa: F811
    original, gone = rendezvous._proof, threading.Event()

    def proof(token, role, *args):
        if role == "join" and threading.current_thread().name == "rank 0":
            assert gone.wait(10)  # the hello is read, and its answer not yet made
        return original(token, role, *args)

    monkeypatch.setattr(rendezvous, "_proof", proof)

    def main(rank):
        if rank == 0:
            threading.current_thread().name = "rank 0"
            return connect(meeting, 0, 2, 10.0)
        sock, challenge = dial(meeting, 0)
        sock.sendall(hello(meeting.token, challenge, 1, 0))
        sock.close()
        gone.set()
        return connect(meeting, 1, 2, 10.0)

    close(threads(2, main))


def test_a_rank_is_accepted_once(meeting):  # noqa: F811
    answers, held = [], []

    def main(rank):
        if rank == 2:  # takes the place of rank 1 too, which stays away
            for _ in range(2):
                sock, challenge = dial(meeting, 0)
                sock.sendall(hello(meeting.token, challenge, 1, 0))
                answers.append(answer(sock))
                held.append(sock)
            return None
        return connect(meeting, 0, 3, 1.5) if rank == 0 else None

    error = threads(3, main)[0]
    for sock in held:
        sock.close()
    assert isinstance(error, WaitTimeout)
    assert error.missing == [2]
    assert "as rank 1 a second time" in str(error)
    assert [len(some) for some in answers] == [32, 0]


def test_two_processes_as_one_rank_are_refused(meeting):  # noqa: F811
    with meeting.listen(0, 2), pytest.raises(TransportError, match=r"rank 0: listening.*Address already in use"):
        connect(meeting, 0, 2, 1.0)


# ----------------------------------------------------------------------------------------------------------- late ranks
def test_a_late_rank_learns_who_gave_up_and_why(meeting):  # noqa: F811
    with pytest.raises(WaitTimeout) as early:
        connect(meeting, 0, 3, 0.2)
    assert early.value.missing == [1, 2]
    begin = time.monotonic()
    with pytest.raises(
        PeerLost, match="rank 0 gave up the rendezvous: rank 1, rank 2 did not come within 0.2 s"
    ) as late:
        connect(meeting, 1, 3, 4.0)
    assert late.value.lost.keys() == {0}
    assert time.monotonic() - begin < 3.0, "it waits for nobody"


def test_a_late_rank_finds_the_directory_gone(meeting):  # noqa: F811
    meeting.remove()
    with pytest.raises(PeerLost, match="rank 1: rank 0 gave up the rendezvous before this rank came") as late:
        connect(meeting, 1, 2, 4.0)
    assert late.value.lost.keys() == {0}
    with pytest.raises(TransportError, match="rank 0: the rendezvous directory .*: found none"):
        connect(meeting, 0, 2, 4.0)


def test_a_late_rank_on_another_host_learns_it_too():
    board = Board(dist.HashStore(), "w")
    with pytest.raises(WaitTimeout):
        connect(over_tcp(0, board=board), 0, 2, 0.2)
    with pytest.raises(PeerLost, match="rank 0 gave up the rendezvous: rank 1 did not come within 0.2 s"):
        connect(over_tcp(1, board=board), 1, 2, 4.0)


def test_the_rank_that_stays_away_is_named_and_not_one_that_gave_up(meeting):  # noqa: F811
    """Rank 2 comes first and gives up, because rank 0 is away. Rank 1 comes then: it misses both."""
    with pytest.raises(WaitTimeout) as first:
        connect(meeting, 2, 3, 0.2)
    assert first.value.missing == [0, 1]
    with pytest.raises(WaitTimeout) as second:
        connect(meeting, 1, 3, 0.2)
    assert second.value.missing == [0]


def test_late_ranks_of_a_launched_job_name_the_rank_that_stays_away(meeting):  # noqa: F811
    """As pkt.launch starts them: rank 0 leaves its note, and the launcher takes the directory away."""

    def world(rank, timeout):
        return open_world(Place(rank, 3, meeting), rank, forked.HEAP, timeout, driver=FakeDriver)

    with pytest.raises(WaitTimeout):
        world(0, 0.2)
    with pytest.raises(PeerLost, match="rank 0 gave up the rendezvous: rank 1, rank 2 did not come"):
        world(1, 4.0)
