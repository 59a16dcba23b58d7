"""How the ranks of one world on one host find each other: a private directory, one socket a rank, a shared secret.

Rank 0 makes a directory (mode 0700, random name) and a random token, and hands both to the others over the channel that
started them (the launcher's pipe, or torch.distributed's store). Each pair of ranks then makes one connection: the
higher rank connects, and each side proves that it knows the token by answering the other's fresh challenge, so what a
stranger recorded is of no use to him. The kernel's word on the other end's user is checked as well. Strangers are
turned away and counted; they cannot hold up the ranks, whose every step has a deadline.
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
from dataclasses import dataclass

from pkt.errors import TransportError, WaitTimeout
from pkt.runtime.frames import MAGIC, Connection

NONCE = 16
_HELLO = struct.Struct(f"!4sI{NONCE}s32s")  # magic, rank, nonce, proof
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED
_SUN_PATH = 100  # bytes that a socket's path may have, with some to spare
_POLL = 0.01


@dataclass(frozen=True)
class Meeting:
    """Where and how to meet: what rank 0 hands to the others."""

    directory: str
    token: str  # hex

    def values(self) -> list[str]:
        """As JSON."""
        return [self.directory, self.token]

    def remove(self) -> None:
        """Take the directory away; every rank may try, the last one leaves nothing."""
        shutil.rmtree(self.directory, ignore_errors=True)


def prepare() -> Meeting:
    """A new meeting place, of this user alone."""
    directory = tempfile.mkdtemp(prefix="pkt-")
    if len(directory) > _SUN_PATH - 8:
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="pkt-", dir="/tmp")
    return Meeting(directory, secrets.token_hex(32))


def connect(meeting: Meeting, rank: int, size: int, timeout: float) -> dict[int, Connection]:
    """A connection to every other rank. Raises WaitTimeout naming who is missing, and who was turned away."""
    deadline = time.monotonic() + timeout
    _check_private(meeting.directory, rank)
    token = bytes.fromhex(meeting.token)
    found: dict[int, Connection] = {}
    refused: list[str] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind(os.path.join(meeting.directory, str(rank)))
        listener.listen(size + 8)
        for peer in range(rank):
            found[peer] = _join(meeting, token, rank, peer, deadline)
        _accept(listener, token, rank, size, deadline, found, refused)
        missing = [r for r in range(size) if r != rank and r not in found]
        if missing:
            error = WaitTimeout.rendezvous(rank, "the rendezvous", timeout, missing)
            raise (
                error if not refused else WaitTimeout.of(f"{error}\nturned away: {'; '.join(refused)}", missing=missing)
            )
        return found
    except BaseException as error:
        for connection in found.values():
            connection.close()
        if isinstance(error, TimeoutError):
            waiting = [r for r in range(size) if r != rank and r not in found]
            raise WaitTimeout.rendezvous(rank, "the rendezvous", timeout, waiting) from error
        raise
    finally:
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(meeting.directory, str(rank)))


def _check_private(directory: str, rank: int) -> None:
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
        found = f"{stat.filemode(status.st_mode)} of uid {status.st_uid}"
        wanted = f"drwx------ of uid {os.getuid()}"
        raise TransportError.refused(rank, f"the rendezvous directory {directory}", found, wanted)


def _stranger(sock: socket.socket) -> tuple[int, str]:
    """(pid, "") of the other end, or (pid, why it is refused)."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, "" if uid == os.getuid() else f"pid {pid} of uid {uid}"


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


def _join(meeting: Meeting, token: bytes, rank: int, peer: int, deadline: float) -> Connection:
    """Connect to a lower rank, as soon as it listens. TimeoutError at the deadline."""
    path = os.path.join(meeting.directory, str(peer))
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(max(1e-3, deadline - time.monotonic()))
            sock.connect(path)
            pid, refused = _stranger(sock)
            if refused:
                raise TransportError.refused(rank, f"the socket of rank {peer}", refused, f"uid {os.getuid()}")
            challenge = _exactly(sock, NONCE, deadline)
            mine = secrets.token_bytes(NONCE)
            sock.sendall(_HELLO.pack(MAGIC, rank, mine, _proof(token, "join", challenge, rank, peer)))
            if not hmac.compare_digest(_exactly(sock, 32, deadline), _proof(token, "welcome", mine, peer, rank)):
                raise TransportError.refused(
                    rank, f"the socket of rank {peer}", "a wrong proof", "one made with the token"
                )
            return Connection(sock, rank, peer, pid)
        except (FileNotFoundError, ConnectionError, BlockingIOError):  # not listening yet, or too many callers
            sock.close()
            if time.monotonic() > deadline:
                raise TimeoutError(path) from None
            time.sleep(_POLL)
        except BaseException:
            sock.close()
            raise


def _accept(
    listener: socket.socket,
    token: bytes,
    rank: int,
    size: int,
    deadline: float,
    found: dict[int, Connection],
    refused: list[str],
) -> None:
    """Take in the higher ranks. Strangers, silent or not, are handled beside them."""
    listener.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    pending: dict[socket.socket, tuple[int, bytes, bytearray]] = {}

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
                    with contextlib.suppress(BlockingIOError):
                        caller, _ = listener.accept()
                        caller.setblocking(False)
                        pid, stranger = _stranger(caller)
                        challenge = secrets.token_bytes(NONCE)
                        selector.register(caller, selectors.EVENT_READ)
                        pending[caller] = (pid, challenge, bytearray())
                        if stranger:
                            drop(caller, stranger)
                        else:
                            _send_or_drop(caller, challenge, drop, pid)
                    continue
                pid, challenge, said = pending[sock]
                try:
                    more = sock.recv(_HELLO.size - len(said))
                except (BlockingIOError, InterruptedError):
                    continue
                except OSError as error:
                    drop(sock, f"pid {pid}: {error}")
                    continue
                said += more
                if not more:
                    drop(sock, f"pid {pid} hung up")
                elif len(said) == _HELLO.size:
                    magic, peer, nonce, proof = _HELLO.unpack(said)
                    right = hmac.compare_digest(proof, _proof(token, "join", challenge, peer, rank))
                    if magic != MAGIC or not right or not rank < peer < size or peer in found:
                        drop(
                            sock, f"pid {pid} as rank {peer} " + ("without the token" if not right else "a second time")
                        )
                        continue
                    selector.unregister(sock)
                    pending.pop(sock)
                    sock.setblocking(True)
                    sock.sendall(_proof(token, "welcome", nonce, rank, peer))
                    found[peer] = Connection(sock, rank, peer, pid)
    finally:
        selector.close()
        refused.extend(f"pid {pid} stayed silent" for pid, _, _ in pending.values())
        for sock in pending:
            sock.close()


def _send_or_drop(sock: socket.socket, data: bytes, drop, pid: int) -> None:  # type: ignore[no-untyped-def]
    try:
        sock.send(data)  # a fresh socket's buffer holds 16 bytes
    except OSError as error:
        drop(sock, f"pid {pid}: {error}")
