"""Random frames, answers to collective calls, hellos and wire texts: each is read, or refused by an error of pkt.

A raw exception, a hang or a descriptor left open fails. PKT_FUZZ=100000 is the number of messages of each kind; without
it a few thousand take some seconds. The counts are printed (pytest -s). A failure prints the seed that replays it.
"""

import array
import contextlib
import json
import os
import random
import socket
import threading
import time
from collections import Counter

import pytest

from pkt.errors import PktError, TransportError
from pkt.runtime.processes import callers, rendezvous, wire
from pkt.runtime.processes.frames import GOODBYE, HEADER, MAGIC, Connection, LostConnection, close_fds, pack
from pkt.runtime.processes.rendezvous import connect, prepare
from pkt.runtime.processes.transport import Transport

MESSAGES = int(os.environ.get("PKT_FUZZ", "3000"))
SECONDS = 20 + MESSAGES // 50  # after which a run hangs


pytestmark = pytest.mark.timeout(SECONDS)


@pytest.fixture(autouse=True)
def closed():
    """No descriptor is left open."""
    before = open_fds()
    yield
    assert open_fds() == before


def open_fds():
    return len(os.listdir("/proc/self/fd"))


# --------------------------------------------------------------------------------------------------------- generators
def value(pick, depth=4):
    """A JSON value."""
    kind = pick.randrange(10 if depth else 7)
    if kind < 7:
        return pick.choice(
            [None, True, -1, 1 << 70, 1e300, float("nan"), "", "[{" * 9, "\ud800", "x" * 300, "lost", "why"]
        )
    if kind == 7:
        return {
            pick.choice(["lost", "why", "tuple", "dict", "tensor", "0", "1", ""]): value(pick, depth - 1) for _ in "ab"
        }
    return [value(pick, depth - 1) for _ in range(pick.randrange(4))]


def text(pick):
    """The bytes of a frame's text."""
    kind = pick.randrange(8)
    if kind == 0:
        return pick.randbytes(pick.randrange(200))
    if kind == 1:
        return pick.choice([b"[", b'{"a":', b'[{"":', b'"\\"']) * pick.choice([10, 255, 257, 5000, 60_000])
    if kind == 2:
        deep = pick.choice([100, 256, 257, 900, 3000])
        return b"[" * deep + b"]" * deep
    if kind == 3:
        return json.dumps(value(pick)).encode(pick.choice(["utf-8", "utf-16", "utf-32"]))
    if kind == 4:
        return b"1" * pick.choice([1, 5000]) + pick.choice([b"", b"e999", b"x"])
    said = json.dumps([pick.choice(["barrier()", "", 7, None, "x" * 500]), value(pick)] if kind == 5 else value(pick))
    return said.encode()


def frame(pick):
    """Bytes that a peer may send, and how many descriptors beside which of their pieces."""
    said = text(pick)
    length = (
        len(said) if pick.random() < 0.8 else pick.choice([0, 1, len(said) + 1, 1 << 30, (1 << 30) + 1, (1 << 64) - 1])
    )
    magic = MAGIC if pick.random() < 0.9 else pick.randbytes(4)
    sequence = pick.choice([1, 1, 1, 1, 0, 0, 2, (1 << 64) - 1])
    announced = pick.choice([0, 0, 0, 1, 2, 8, 9, 1 << 31])
    data = HEADER.pack(magic, sequence, length, announced) + said
    if pick.random() < 0.1:
        data = bytes(b ^ 1 << pick.randrange(8) if pick.random() < 0.05 else b for b in data)
    if pick.random() < 0.2:
        data = data[: pick.randrange(len(data) + 1)]
    if pick.random() < 0.2:
        data += pick.choice([GOODBYE, pack(1, ["barrier()", None]), pack(0, {"lost": {}, "why": ""}), b"x"])
    cuts = sorted(pick.randrange(len(data) + 1) for _ in range(pick.choice([0, 0, 1, 3])))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)])]
    beside = announced if announced <= 8 and pick.random() < 0.7 else pick.choice([0, 1, 3, 9, 20])
    return [(piece, beside if number == 0 or pick.random() < 0.1 else 0) for number, piece in enumerate(pieces)]


def send(sock, pieces):
    """Without blocking: what does not fit into the socket is lost, as if the peer had died."""
    with open("/dev/null") as null, contextlib.suppress(OSError):
        for piece, count in pieces:
            fds = array.array("i", [null.fileno()] * count)
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if count else []
            if sock.sendmsg([piece], control, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) < len(piece):
                return


def seeds():
    for number in range(MESSAGES):
        yield number, random.Random(number)


# -------------------------------------------------------------------------------------------------------------- tests
def test_frames():
    ends = Counter()
    for seed, pick in seeds():
        here, there = socket.socketpair()
        connection = Connection(here, rank=0, peer=1, pid=os.getpid())
        with there:
            send(there, frame(pick))
            if pick.random() < 0.5:
                there.close()
            try:
                while (got := connection.read()) is not None:
                    close_fds(got.fds)
                    ends["read"] += 1
                ends["not whole"] += 1
            except (TransportError, LostConnection) as error:
                ends[type(error).__name__] += 1
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {error!r}") from error
            finally:
                connection.close()
    print(f"\n{MESSAGES:,} frames: {dict(ends)}")
    assert min(ends[end] for end in ("read", "not whole", "TransportError", "LostConnection")) > MESSAGES // 100


def test_collective_calls(monkeypatch):
    """An authenticated peer that answers a call with such a frame."""
    ends, longest = Counter(), 0
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # it looks for the end of the peer's process for 0.1 s
    for seed, pick in seeds():
        here, there = socket.socketpair()
        transport = Transport(0, 2, {1: Connection(here, rank=0, peer=1, pid=0)}, 0.002)
        with there:
            send(there, frame(pick))
            if pick.random() < 0.8:
                there.shutdown(socket.SHUT_WR)
            try:
                if pick.random() < 0.5:
                    transport.exchange(None, "barrier()")
                else:
                    _, received = transport.exchange_fds(None, {}, "barrier()")
                    close_fds([fd for fds in received.values() for fd in fds])
                ends["exchanged"] += 1
            except PktError as error:
                ends[type(error).__name__] += 1
                longest = max(longest, len(str(error)))
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {error!r}") from error
            finally:
                transport.close()
    print(f"\n{MESSAGES:,} answers to calls: {dict(ends)}; the longest error has {longest:,} letters")
    assert longest < 5000
    assert (
        min(ends[end] for end in ("exchanged", "TransportError", "PeerLost", "CollectiveMismatch")) > MESSAGES // 1000
    )


def test_wire_texts():
    ends = Counter()
    for seed, pick in seeds():
        said = text(pick).decode(errors="replace")
        if pick.random() < 0.5:
            tag = pick.choice(["tuple", "dict", "set", "bytes", "dtype", "tensor", "ndarray", "x"])
            of = [
                "float32",
                "<f4",
                "O",
                "V3",
                [1],
                [-1],
                [1 << 40],
                "AAAA",
                "AAAAAAA=",
                "",
                [[1, 2]],
                None,
                -1,
                {"tuple": []},
            ]
            said = json.dumps({tag: pick.choice([[pick.choice(of) for _ in range(pick.randrange(5))], *of])})
        try:
            wire.decode(said)
            ends["read"] += 1
        except ValueError:
            ends["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {said[:200]}: {error!r}") from error
    print(f"\n{MESSAGES:,} texts: {dict(ends)}")
    assert min(ends["read"], ends["refused"]) > MESSAGES // 20


def hello(pick, place, challenge):
    proof = rendezvous._proof(bytes.fromhex(place.token), "join", challenge, 1, 0)
    right = rendezvous._HELLO.pack(MAGIC, 1, b"n" * callers.NONCE, proof)
    kind = pick.randrange(7)
    if kind == 0:
        return pick.randbytes(pick.randrange(200))
    if kind == 1:
        return right[: pick.randrange(len(right))]
    if kind == 2:  # of another rank, or with another proof
        rank = pick.choice([0, 1, 2, 1 << 31, (1 << 32) - 1])
        return rendezvous._HELLO.pack(MAGIC, rank, pick.randbytes(16), pick.randbytes(32))
    if kind == 3:
        at = pick.randrange(len(right) - 52) if pick.random() < 0.5 else len(right) - 1 - pick.randrange(32)
        return right[:at] + bytes([right[at] ^ 1 << pick.randrange(8)]) + right[at + 1 :]
    if kind == 4:
        return b""
    return pick.choice([b"GET / HTTP/1.1\r\n\r\n", b"\0" * 84, pack(1, None), GOODBYE, b"x" * 5000])


def test_hellos():
    """One rank that waits for another, strangers that say such hellos, and then the true rank, which must get in."""
    place, ends, met = prepare(), Counter(), []
    path = os.path.join(place.directory, "0")
    rank = threading.Thread(target=lambda: met.append(connect(place, 0, 2, SECONDS)))
    rank.start()
    held = []
    for _, pick in seeds():
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        for _ in range(500):
            try:
                sock.connect(path)
                break
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                time.sleep(0.01)
        try:
            sock.sendall(hello(pick, place, sock.recv(callers.NONCE)))
            if pick.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
                ends["let in" if sock.recv(100) else "refused"] += 1
            else:
                ends["silent"] += 1
        except OSError:
            ends["refused"] += 1
        held.append(sock)
        if len(held) > 100:
            held.pop(0).close()
    begin = time.monotonic()
    (mine,) = connect(place, 1, 2, 20.0).values()
    ends["seconds of the true rank"] = round(time.monotonic() - begin, 3)
    rank.join()
    for sock in [*held, mine, *met[0].values()]:
        sock.close()
    place.remove()
    print(f"\n{MESSAGES:,} hellos: {dict(ends)}")
    assert ends["let in"] == 0
    assert ends["refused"] > MESSAGES // 4
