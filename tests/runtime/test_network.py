"""Ranks on several hosts: TCP between them, fabric handles in the frames. The hosts are names, the driver a fake."""

import dataclasses
import mmap
import os
import re
import signal
import socket
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

import pkt
from pkt.errors import AllocationMismatch, DriverError, PeerLost, TransportError, Unsupported, WaitTimeout
from pkt.runtime import bootstrap
from pkt.runtime.gpu.topology import OFF_SWITCHES
from pkt.runtime.processes import callers, network, rendezvous
from pkt.runtime.processes.frames import GOODBYE, Connection, LostConnection, pack
from pkt.runtime.processes.network import Board, Network
from pkt.runtime.processes.rendezvous import connect, prepare
from pkt.runtime.processes.transport import Transport

from . import forked
from .fake_driver import PAGE, FakeDriver, FakeGpu
from .processes import without_the_token
from .test_cuda import state
from .test_transport import answer, threads

TOKEN = "5a" * 32
LOOPBACK = ["127.0.0.1"] * 3


@pytest.fixture(autouse=True)
def switches_off(monkeypatch):
    monkeypatch.setenv("PKT_SECRET", "of every rank " * 3)
    for name in OFF_SWITCHES:
        monkeypatch.delenv(name, raising=False)


class Hosts:
    """Ranks on the `hosts` named by letters ("aab"), each with a GPU of its own; `odd`: {rank: change(gpu)}."""

    def __init__(self, store, hosts="aab", odd=None, timeout=5.0, **attributes):
        self.store, self.hosts, self.timeout, self.meeting = store, hosts, timeout, prepare()
        self.gpus = [
            FakeGpu(f"uuid-{rank}", attributes={"HANDLE_TYPE_FABRIC_SUPPORTED": 1, **attributes}, domain="c1/7")
            for rank in range(len(hosts))
        ]
        for rank, change in (odd or {}).items():
            change(self.gpus[rank])

    def driver(self, rank, fail=None):
        here = [gpu for gpu, host in zip(self.gpus, self.hosts, strict=True) if host == self.hosts[rank]]
        return FakeDriver(rank, gpus=here, fail=fail)

    def place(self, rank):
        board = Board(self.store(), "pkt/world", rank, network.secret())
        return bootstrap.Place(rank, len(self.hosts), self.meeting, host=self.hosts[rank], board=board)

    def world(self, rank, driver):
        device = driver.gpus.index(self.gpus[rank])
        return bootstrap.open_world(
            self.place(rank), device, forked.HEAP, self.timeout, driver=lambda _: driver, stride=forked.STRIDE
        )

    def in_threads(self, main, fail=None):
        """Run main(world) on threads. Returns each rank's value or exception, and the drivers.

        `fail`: {rank: {call: nth}}.
        """
        drivers = [self.driver(rank, (fail or {}).get(rank)) for rank in range(len(self.hosts))]

        def run(rank):
            with self.world(rank, drivers[rank]) as world:
                value = main(world)
                world.barrier()
                return value

        return threads(len(self.hosts), run), drivers

    def forked(self, main, patience=20.0):
        """main(world) in processes."""
        ends = forked.run(len(self.hosts), lambda rank: main(self.world(rank, self.driver(rank))), patience)
        self.meeting.remove()
        return ends


def of(store):
    """A factory that gives every thread the same store."""
    return lambda: store


@pytest.fixture
def file_store(tmp_path):
    return lambda: dist.FileStore(str(tmp_path / "store"))


# -------------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("hosts", ["ab", "aab", "abcd", "abba"])
def test_ranks_on_several_hosts_read_each_others_memory(file_store, hosts, monkeypatch):
    monkeypatch.setattr("pkt.runtime.memory.heap.FIRST_BYTES", PAGE)
    size = len(hosts)

    def main(world):
        x = pkt.full((3, 5), 10 + world.rank, dtype=torch.int32, world=world)
        more = pkt.full((3 * PAGE,), world.rank, dtype=torch.uint8, world=world)  # the heap grows
        rows = [x[1:].peer(r).sum().item() for r in range(size)]
        assert all(more.peer(r).eq(r).all() for r in range(size))
        backend = world.backend
        families = {connection.sock.family for connection in backend.transport.connections.values()}
        world.barrier()
        world.close()
        return rows, families, backend.driver.fabric, backend.driver.leaks()

    ends = Hosts(file_store, hosts).forked(main)
    rows = [10 * (10 + r) for r in range(size)]
    assert [end.value for end in ends] == [(rows, {socket.AF_INET}, True, "")] * size, ends


def test_ranks_on_one_host_use_its_sockets_and_descriptors(monkeypatch):
    monkeypatch.setattr(Board, "address", None)  # no rank asks for an address

    def main(world):
        families = {connection.sock.family for connection in world.backend.transport.connections.values()}
        return families, world.backend.journal is not None

    results, drivers = Hosts(of(dist.HashStore()), "aaa").in_threads(main)
    assert results == [({socket.AF_UNIX}, True)] * 3
    assert [(d.fabric, d.calls["domain"], d.leaks()) for d in drivers] == [(False, 0, "")] * 3


@pytest.mark.parametrize(
    "change",
    [
        lambda gpu: gpu.attributes.update(HANDLE_TYPE_FABRIC_SUPPORTED=0),
        lambda gpu: setattr(gpu, "domain", ""),
        lambda gpu: setattr(gpu, "domain", "c1/8"),
    ],
)
def test_all_ranks_refuse_hosts_that_nvlink_does_not_join_before_anything_is_made(change):
    before = state()
    results, drivers = Hosts(of(dist.HashStore()), odd={2: change}).in_threads(lambda world: None)
    for result in results:
        assert isinstance(result, Unsupported), result
        assert "rank 0 runs on host a and rank 2 on b, but rank 2's GPU" in str(result)
        assert re.search(r"rank 2 +0 +FakeGPU +b ", str(result)), "no matrix"
    assert [set(d.calls) for d in drivers] == [{"attribute", "domain"}] * 3, "only queries were wanted"
    assert state() == before


CALLS = ("domain", "granularity", "reserve", "create", "export", "import_memory", "map", "allow")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("nth", [1, 2])
def test_every_call_failing_at_every_rank(call, rank, nth):
    before = state()
    results, drivers = Hosts(of(dist.HashStore())).in_threads(lambda world: None, fail={rank: {call: nth}})
    happened = drivers[rank].calls[call] >= nth
    for result in results:
        assert isinstance(result, DriverError) if happened else result is None, result
        assert not happened or f"rank {rank}: {call} failed: CUDA_ERROR_FAKE (999)" in str(result)
    assert [driver.leaks() for driver in drivers] == [""] * 3
    assert state() == before


@pytest.mark.parametrize("call", ["export", "import_memory"])
@pytest.mark.parametrize("rank", [0, 1])
def test_growth_that_fails_leaves_the_world_as_it_was(monkeypatch, call, rank):
    monkeypatch.setattr("pkt.runtime.memory.heap.FIRST_BYTES", PAGE)

    def main(world):
        driver = world.backend.driver
        if world.rank == rank:
            driver.fail = {call: driver.calls[call] + 1}
        with pytest.raises(DriverError, match=f"rank {rank}: .*{call} failed"):
            pkt.empty(2 * PAGE, dtype=torch.uint8, world=world)
        driver.fail = {}
        again = pkt.full((2 * PAGE,), world.rank, dtype=torch.uint8, world=world)
        assert again.peer(1 - world.rank).eq(1 - world.rank).all()

    results, drivers = Hosts(of(dist.HashStore()), "ab").in_threads(main)
    assert results == [None, None]
    assert [driver.leaks() for driver in drivers] == [""] * 2


def test_the_rest_of_a_deadline_is_not_rounded_to_none():
    """torch's file store counts milliseconds, and waits for ever if there are none."""
    asked = []

    class Store:
        def wait(self, names, timeout):
            asked.append(timeout)
            raise RuntimeError("timeout")

    for left in (1e-4, 0.0, -1.0, 2.5):
        with pytest.raises(TimeoutError):
            Board(Store(), "pkt/world").read("host", 1, left)
    assert [timeout.total_seconds() for timeout in asked] == [1e-3, 1e-3, 1e-3, 2.5]


def test_allocations_that_differ_are_named():
    def main(world):
        pkt.empty(3, world=world)
        pkt.empty(4 + world.rank // 2, world=world)

    results, _ = Hosts(of(dist.HashStore())).in_threads(main)
    for result in results:  # the first rank that finds it tells the others why it leaves
        assert isinstance(result, (AllocationMismatch, PeerLost))
        assert "allocation #2 differs: ranks 0, 1: (4,) fp32 at" in str(result)
    assert AllocationMismatch in map(type, results)


# ----------------------------------------------------------------------------------------------------------- multicast
def use(world):
    window = pkt.full((8,), world.rank, dtype=torch.int32, world=world).multicast
    return world.multicast, window is not None


def test_ranks_on_several_hosts_share_the_multicast_object():
    results, drivers = Hosts(of(dist.HashStore()), MULTICAST_SUPPORTED=1).in_threads(use)
    assert results == [(True, True)] * 3
    assert [d.calls["multicast_create"] for d in drivers] == [1, 0, 0]
    assert [d.leaks() for d in drivers] == [""] * 3


@pytest.mark.parametrize(
    ("rank", "failing", "nth"), [(0, "export", 1), (1, "import_memory", 1), (2, "multicast_add", 1)]
)
def test_the_world_goes_on_without_failed_multicast(rank, failing, nth):
    hosts = Hosts(of(dist.HashStore()), MULTICAST_SUPPORTED=1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        results, drivers = hosts.in_threads(use, fail={rank: {failing: nth}})
    assert results == [(False, False)] * 3
    assert [str(w.message).split(" failed on ")[1][:6] for w in seen] == [f"rank {rank}"]
    assert [d.leaks() for d in drivers] == [""] * 3


# ----------------------------------------------------------------------------------------------------------- strangers
def test_an_impostor_on_the_port_is_refused_and_delays_nobody():
    board, strangers, closed = Board(dist.HashStore(), "w"), [], []

    def impostor():
        address, port = board.read("listens", 0, 5.0)
        hello = rendezvous._HELLO.pack(rendezvous.MAGIC, 1, b"n" * 16, b"p" * 32)
        for said in (b"", b"PKT1 half of a hel", hello, b"x" * 500, *[b""] * (callers.CROWD + 10)):
            sock = socket.create_connection((address, port), 5.0)
            assert len(sock.recv(rendezvous.NONCE)) == rendezvous.NONCE
            sock.sendall(said)
            strangers.append(sock)
        closed.append(answer(strangers[0]) == b"")  # the crowd of silent strangers is full: the first is dropped

    thread = threading.Thread(target=impostor)
    thread.start()

    def main(rank):
        if rank == 1:
            thread.join()  # the strangers come first
        return connect(Network(board, TOKEN, rank, "ab", LOOPBACK[:2]), rank, 2, 10.0)

    found = threads(2, main)
    assert [set(f) for f in found] == [{1}, {0}], found
    assert closed == [True]
    for connections in found:
        for connection in connections.values():
            connection.close()
    assert [answer(sock) for sock in strangers] == [b""] * len(strangers), "nobody was let in"
    for sock in strangers:
        sock.close()


def test_another_token_is_refused_and_reported():
    board = Board(dist.HashStore(), "w")

    def main(rank):
        return connect(Network(board, [TOKEN, "00" * 32][rank], rank, "ab", LOOPBACK[:2]), rank, 2, 0.7)

    host, stranger = threads(2, main)
    assert isinstance(host, WaitTimeout)
    assert re.search(r"refused: 127\.0\.0\.1:\d+ as rank 1 without the token", str(host))
    assert isinstance(stranger, WaitTimeout)


def test_a_server_without_the_token_is_refused():
    board = Board(dist.HashStore(), "w")
    with socket.create_server(("127.0.0.1", 0)) as server:
        board.write("listens", 0, server.getsockname())

        thread = without_the_token(server)
        with pytest.raises(TransportError, match="the socket of rank 0: found a wrong proof"):
            connect(Network(board, TOKEN, 1, "ab", LOOPBACK[:2]), 1, 2, 2.0)
        thread.join()


# ------------------------------------------------------------------------------------------------------------ addresses
def test_a_rank_that_does_not_come_is_named():
    hosts = Hosts(of(dist.HashStore()), timeout=0.5)
    results = threads(3, lambda rank: rank != 1 and hosts.world(rank, hosts.driver(rank)))
    for error in (results[0], results[2]):
        assert isinstance(error, WaitTimeout)
        assert "pkt.init() waits for rank 1 after 0.5 s" in str(error)
    assert not os.path.exists(hosts.meeting.directory)


def test_torchruns_environment_and_no_loopback_address_between_hosts(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def main(rank):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        where = dataclasses.replace(bootstrap.place(None, 20.0), host=f"host {rank}")
        gpu = FakeGpu(f"uuid-{rank}", attributes={"HANDLE_TYPE_FABRIC_SUPPORTED": 1}, domain="c1/7")
        driver = FakeDriver(rank, gpus=[gpu])
        with bootstrap.open_world(where, 0, forked.HEAP, 10.0, driver=lambda r: driver, stride=forked.STRIDE) as world:
            return where.board.address(), world.all_gather_object(rank), driver.fabric

    ends = forked.run(2, main)
    assert [end.value for end in ends] == [("127.0.0.1", [0, 1], True)] * 2, ends

    asked = []
    monkeypatch.setattr(network, "address_towards", lambda target: asked.append(target) or "10.0.0.1")
    addresses = ["127.0.0.1", "127.0.0.1", "10.0.0.2"]
    assert Network(None, TOKEN, 0, "aab", addresses)._address == "10.0.0.1"
    assert Network(None, TOKEN, 2, "aab", addresses)._address == "10.0.0.2"
    assert asked == ["10.0.0.2"]
    monkeypatch.setattr(network, "address_towards", lambda target: "")
    with pytest.raises(TransportError, match="rank 1: the network of host b: found no address"):
        Network(None, TOKEN, 1, "ab", ["10.0.0.1", ""])


def test_a_host_without_a_way_to_the_others_is_refused(monkeypatch):
    def no_route(*args):
        raise OSError(113, "No route to host")

    board = Board(dist.HashStore(), "w")
    board.write("listens", 0, ["10.255.0.1", 4711])
    monkeypatch.setattr(network.socket, "create_connection", no_route)
    message = r"rank 1: 10\.255\.0\.1:4711, where rank 0 on host a listens: found .*No route to host"
    with pytest.raises(TransportError, match=message):
        connect(Network(board, TOKEN, 1, "ab", ["10.255.0.1", "127.0.0.1"]), 1, 2, 5.0)


@pytest.mark.parametrize("port", [0, -1, 1 << 16, "80", None])
def test_a_port_that_is_none_is_refused(port):
    board = Board(dist.HashStore(), "w")
    board.write("listens", 0, ["127.0.0.1", port])
    with pytest.raises(TransportError, match="an address and a port"):
        connect(Network(board, TOKEN, 1, "ab", ["127.0.0.1", "127.0.0.1"]), 1, 2, 5.0)


def test_the_address_from_which_this_host_reaches_another():
    assert network.address_towards("127.0.0.1") == "127.0.0.1"
    assert network.address_towards("no such host.invalid") == ""


# -------------------------------------------------------------------------------------------------------------- losses
def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    return Connection(here, 0, 1, 0, "b"), there


@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize("looked", [False, True])
def test_a_goodbye_is_found_behind_unread_frames_and_ends_the_connection(unread, looked):
    connection, there = tcp_pair()
    if unread:  # unread bytes there: closing that end resets this one
        connection.sock.sendall(b"more")
    there.sendall(pack(1, "x" * 100_000) + GOODBYE)
    there.close()
    time.sleep(0.05)
    assert not looked or connection.left()
    assert connection.read().value == "x" * 100_000
    with pytest.raises(LostConnection):
        connection.read()
    assert connection.left()
    connection.close()


def test_an_end_without_a_goodbye():
    connection, there = tcp_pair()
    there.sendall(pack(1, None) + GOODBYE[:-1])
    there.close()
    time.sleep(0.05)
    assert not connection.left()
    connection.close()


@pytest.mark.parametrize(
    ("how", "step"), [*((signal.SIGKILL, step) for step in (0, 1, 2, 3, 4, 5, 7, 9, 30)), (signal.SIGSTOP, 9)]
)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_lost_at_each_step_is_named_by_all(file_store, monkeypatch, how, step, victim):
    hosts, exchange = Hosts(file_store, timeout=1.0), Transport.exchange_fds

    def counted(self, *args):
        if self.rank == victim and max(self.sequences.values(), default=0) == step:
            os.kill(os.getpid(), how)
        return exchange(self, *args)

    def main(world):
        for _ in range(40):
            world.barrier()

    monkeypatch.setattr(Transport, "exchange_fds", counted)
    for end in hosts.forked(main, patience=8.0):
        if end.rank == victim:
            continue
        assert isinstance(end.error, PeerLost if how == signal.SIGKILL else (PeerLost, WaitTimeout)), end
        assert f"rank {victim}" in str(end.error)
        if isinstance(end.error, PeerLost):
            assert end.error.lost.keys() == {victim}, end.error
        if how == signal.SIGKILL:
            assert f"(on host {hosts.hosts[victim]}) hung up" in str(end.error), end.error


def test_a_farewell_reaches_ranks_that_already_have_the_frame():
    board = Board(dist.HashStore(), "w")
    timeouts = [10.0, 0.3, 10.0]
    found = threads(
        3,
        lambda rank: Transport(
            rank, 3, connect(Network(board, TOKEN, rank, "abc", LOOPBACK), rank, 3, 5.0), timeouts[rank]
        ),
    )
    left = threading.Barrier(3)

    def main(rank):
        try:
            return found[rank].exchange(None, "barrier()") if rank < 2 else None
        finally:
            left.wait()  # rank 2 comes when the others have left

    errors = threads(3, main)
    assert isinstance(errors[1], WaitTimeout)
    assert isinstance(errors[0], PeerLost), "rank 0 leaves before its own deadline"
    assert errors[0].lost == {2: "did not come in time"}
    found[2].exchange(None, "barrier()")  # rank 2 finds all messages of that call, and no rank in the next
    with pytest.raises(PeerLost, match=r"gave up: rank [01]: .*rank 2"):
        found[2].exchange(None, "barrier()")


def test_the_watchdog_tells_a_rank_that_left_from_one_that_was_lost(file_store):
    seen = mmap.mmap(-1, 1)  # shared with the forks

    def main(world):
        if world.rank == 1:
            world.close()
            return "left"
        if world.rank == 2:
            while not seen[0]:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.6)
        world.synchronize()  # rank 1 closed its world, so it is not lost
        seen[0] = 1
        for _ in range(100):
            time.sleep(0.01)
            try:
                world.synchronize()
            except PeerLost as error:
                return error.lost
        return "nobody missed rank 2"

    ends = Hosts(file_store).forked(main)
    assert ends[0].error is None, ends[0].error
    assert ends[0].value == {2: "(on host b) hung up"}
    assert ends[1].value == "left"
