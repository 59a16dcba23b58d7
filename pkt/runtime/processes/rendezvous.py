"""How the ranks of one world find each other: a private directory of their host, one socket a rank, a shared secret.

Rank 0 makes a directory (mode 0700, random name) and a random token, and hands both to the others over the channel that
started them (the launcher's pipe, or torch.distributed's store). Each pair of ranks then makes one connection: the
higher rank connects, and each side proves that it knows the token by answering the other's fresh challenge. A recorded
proof is therefore useless to a stranger. The kernel tells the user id of the other end, which is checked as well. Every
step has a deadline. Strangers are refused, and named in the error if a rank is missing in the end. If the ranks are on
several hosts, only the sockets differ, see pkt.runtime.processes.network.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import selectors
import shutil
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pkt.errors import TransportError, WaitTimeout
from pkt.runtime.processes.frames import MAGIC, Connection

NONCE = 16
_HELLO = struct.Struct(f"!4sI{NONCE}s32s")  # magic, rank, nonce, proof
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED
_SUN_PATH = 100  # bytes: the longest path of a socket that is used; the limit is a little higher
_POLL = 0.01  # seconds between two attempts to connect
_CROWD = 64  # callers heard at once, beyond the number of ranks; of more, the one that called first is dropped


class MeetingPlace(Protocol):
    """The sockets of the ranks, and what is known of their other ends."""

    @property
    def token(self) -> str:
        """The shared secret, hexadecimal."""

    def listen(self, rank: int, size: int) -> socket.socket: ...

    def dial(self, rank: int, peer: int, timeout: float) -> socket.socket:
        """One attempt to connect. Raises FileNotFoundError, ConnectionError or BlockingIOError while `peer` does not
        listen."""

    def greet(self, sock: socket.socket) -> tuple[int, str, str]:
        """For the other end of a new connection: its pid (0 if not known), its name in messages, and why it is refused
        ("" if it is not)."""

    def host(self, peer: int) -> str:
        """The host of `peer` if there are several hosts, else ""."""

    def leave(self, rank: int) -> None: ...


@dataclass(frozen=True)
class Meeting:
    """The MeetingPlace on one host, which rank 0 hands to the others."""

    directory: str
    token: str = field(repr=False)  # hex

    def remove(self) -> None:
        """Remove the directory; every rank may do so."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def listen(self, rank: int, size: int) -> socket.socket:
        """As `MeetingPlace.listen`, in the directory, which must be private."""
        _check_private(self.directory, rank)
        listener = _unix()
        try:
            listener.bind(self._path(rank))
            listener.listen(size + 8)
        except BaseException:
            listener.close()
            raise
        return listener

    def dial(self, rank: int, peer: int, timeout: float) -> socket.socket:
        """Connected to `peer`'s socket."""
        sock = _unix()
        try:
            sock.settimeout(timeout)
            sock.connect(self._path(peer))
        except BaseException:
            sock.close()
            raise
        return sock

    def greet(self, sock: socket.socket) -> tuple[int, str, str]:
        """As the kernel knows the other end, which must belong to this user."""
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return pid, f"pid {pid}", "" if uid == os.getuid() else f"pid {pid} of uid {uid}"

    def host(self, peer: int) -> str:
        """None to name: there is one host."""
        return ""

    def leave(self, rank: int) -> None:
        """Remove this rank's socket."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(rank))

    def _path(self, rank: int) -> str:
        return os.path.join(self.directory, str(rank))


def prepare() -> Meeting:
    """A new meeting place, which only this user can enter."""
    directory = tempfile.mkdtemp(prefix="pkt-")
    if len(directory) > _SUN_PATH - 8:
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="pkt-", dir="/tmp")
    return Meeting(directory, secrets.token_hex(32))


def _unix() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)


def connect(meeting: MeetingPlace, rank: int, size: int, timeout: float) -> dict[int, Connection]:
    """A connection to every other rank. Raises WaitTimeout naming the ranks that are missing and the callers that were
    refused."""
    deadline = time.monotonic() + timeout
    token = bytes.fromhex(meeting.token)
    found: dict[int, Connection] = {}
    refused: list[str] = []
    listener = meeting.listen(rank, size)
    try:
        with contextlib.suppress(TimeoutError):
            for peer in range(rank):
                found[peer] = _join(meeting, token, rank, peer, deadline)
            _accept(meeting, listener, token, rank, size, deadline, found, refused)
        missing = [r for r in range(size) if r != rank and r not in found]
        if missing:
            raise WaitTimeout.rendezvous(rank, "the rendezvous", timeout, missing, refused)
        return found
    except BaseException:
        for connection in found.values():
            connection.close()
        raise
    finally:
        listener.close()
        meeting.leave(rank)


def _check_private(directory: str, rank: int) -> None:
    status = os.lstat(directory)
    # The setgid bit, which a new directory inherits from its parent's, and the sticky bit let nobody in.
    private = stat.S_ISDIR(status.st_mode) and status.st_mode & 0o777 == 0o700
    if not private or status.st_uid != os.getuid():
        found = f"{stat.filemode(status.st_mode)} of uid {status.st_uid}"
        wanted = f"drwx------ of uid {os.getuid()}"
        raise TransportError.refused(rank, f"the rendezvous directory {directory}", found, wanted)


def _proof(token: bytes, role: str, nonce: bytes, speaker: int, listener: int) -> bytes:
    return hmac.digest(token, f"{role} {speaker} {listener} ".encode() + nonce, hashlib.sha256)


def _exactly(sock: socket.socket, length: int, deadline: float) -> bytes:
    data = b""
    while len(data) < length:
        sock.settimeout(max(1e-3, deadline - time.monotonic()))
        more = sock.recv(length - len(data))
        if not more:
            raise ConnectionError("end of file")
        data += more
    return data


def _join(meeting: MeetingPlace, token: bytes, rank: int, peer: int, deadline: float) -> Connection:
    """Connect to a lower rank as soon as it listens. Raises TimeoutError at the deadline."""
    while True:
        sock: socket.socket | None = None
        try:
            sock = meeting.dial(rank, peer, max(1e-3, deadline - time.monotonic()))
            pid, _, refused = meeting.greet(sock)
            if refused:
                raise TransportError.refused(rank, f"the socket of rank {peer}", refused, f"uid {os.getuid()}")
            challenge = _exactly(sock, NONCE, deadline)
            mine = secrets.token_bytes(NONCE)
            sock.sendall(_HELLO.pack(MAGIC, rank, mine, _proof(token, "join", challenge, rank, peer)))
            if not hmac.compare_digest(_exactly(sock, 32, deadline), _proof(token, "welcome", mine, peer, rank)):
                raise TransportError.refused(
                    rank, f"the socket of rank {peer}", "a wrong proof", "one made with the token"
                )
            return Connection(sock, rank, peer, pid, meeting.host(peer))
        except (FileNotFoundError, ConnectionError, BlockingIOError):  # it does not listen yet, or has too many callers
            if sock is not None:
                sock.close()
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {peer}") from None
            time.sleep(_POLL)
        except BaseException:
            if sock is not None:
                sock.close()
            raise


def _accept(
    meeting: MeetingPlace,
    listener: socket.socket,
    token: bytes,
    rank: int,
    size: int,
    deadline: float,
    found: dict[int, Connection],
    refused: list[str],
) -> None:
    """Accept the higher ranks until the deadline, and refuse strangers meanwhile; a silent one delays nobody."""
    listener.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    pending: dict[socket.socket, tuple[int, str, bytes, bytearray]] = {}

    def drop(sock: socket.socket, why: str) -> None:
        selector.unregister(sock)
        pending.pop(sock)
        sock.close()
        refused.append(why)

    try:
        while len(found) < size - 1 and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is listener:
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        caller, _ = listener.accept()
                        caller.setblocking(False)
                        pid, who, stranger = meeting.greet(caller)
                        challenge = secrets.token_bytes(NONCE)
                        selector.register(caller, selectors.EVENT_READ)
                        pending[caller] = (pid, who, challenge, bytearray())
                        if stranger:
                            drop(caller, stranger)
                        else:
                            _send_or_drop(caller, challenge, drop, who)
                        if len(pending) > size + _CROWD:
                            silent = next(iter(pending))
                            drop(silent, f"{pending[silent][1]} stayed silent")
                    continue
                if sock not in pending:  # dropped because there were too many callers
                    continue
                pid, who, challenge, said = pending[sock]
                try:
                    more = sock.recv(_HELLO.size - len(said))
                except (BlockingIOError, InterruptedError):
                    continue
                except OSError as error:
                    drop(sock, f"{who}: {error}")
                    continue
                said += more
                if not more:
                    drop(sock, f"{who} hung up")
                elif len(said) == _HELLO.size:
                    magic, peer, nonce, proof = _HELLO.unpack(said)
                    right = hmac.compare_digest(proof, _proof(token, "join", challenge, peer, rank))
                    if magic != MAGIC or not right or not rank < peer < size or peer in found:
                        drop(sock, f"{who} as rank {peer} " + ("without the token" if not right else "a second time"))
                        continue
                    selector.unregister(sock)
                    pending.pop(sock)
                    sock.setblocking(True)
                    sock.sendall(_proof(token, "welcome", nonce, rank, peer))
                    found[peer] = Connection(sock, rank, peer, pid, meeting.host(peer))
    finally:
        selector.close()
        refused.extend(f"{who} stayed silent" for _, who, _, _ in pending.values())
        for sock in pending:
            sock.close()


def _send_or_drop(sock: socket.socket, data: bytes, drop: Callable[[socket.socket, str], None], who: str) -> None:
    try:
        sock.send(data)  # the buffer of a new socket has room for 16 bytes
    except OSError as error:
        drop(sock, f"{who}: {error}")
