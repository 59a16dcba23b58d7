"""How the ranks of one world find each other: a private directory of their host, one socket a rank, a shared secret.

Rank 0 makes a directory (mode 0700, random name) and a random token. The launcher's pipe hands both to the others;
torch's store, which anybody may read and write, hands on the directory's name, and the token stands in a file in it.
Each pair of ranks then makes one connection: the higher rank connects, and each side proves that it knows the token by
answering the other's fresh challenge. A recorded proof is therefore useless to a stranger. The kernel tells the user id
of the other end, which is checked as well. Every step has a deadline. Callers that prove nothing are refused, and
counted in the error if a rank is missing in the end (`callers`). A rank that gives up leaves a note with its reason, so
that a late one does not wait for it in vain. If the ranks are on several hosts, only the sockets differ, see
pkt.runtime.processes.network.
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
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pkt.errors import PeerLost, PktError, TransportError, WaitTimeout, ranks_named
from pkt.runtime.processes.callers import BACKLOG, CROWD, NONCE, Callers, Refused, Stranger
from pkt.runtime.processes.frames import MAGIC, Connection
from pkt.runtime.processes.transport import Transport

_PROOF = 32  # bytes
_HELLO = struct.Struct(f"!4sI{NONCE}s{_PROOF}s")  # magic, rank, nonce, proof
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED
_SUN_PATH = 100  # bytes: the longest path of a socket that is used; the limit is a little higher
_POLL = 0.01  # seconds between two attempts to connect
_WHY = 500  # letters of the reason for which a rank gave up
_WHAT = "the rendezvous"
_PREFIX, _TOKEN = "pkt-", "token"  # of the directory's name; the name of a file in it
_NOTE = ".left"  # ends the name of the file in which a rank says why it gave up


class MeetingPlace(Protocol):
    """The sockets of the ranks, and what is known of their other ends."""

    @property
    def token(self) -> str:
        """The shared secret, hexadecimal."""

    @property
    def patience(self) -> float:
        """Seconds that a connected rank waits to be heard before it connects again."""

    def listen(self, rank: int, size: int) -> socket.socket: ...

    def listens(self, peer: int) -> bool:
        """Whether `peer` has come, as far as this rank can find out."""

    def dial(self, rank: int, peer: int, timeout: float) -> socket.socket:
        """One attempt to connect. Raises FileNotFoundError, ConnectionError, BlockingIOError or TimeoutError while
        `peer` does not listen."""

    def greet(self, sock: socket.socket) -> Stranger:
        """What is known of the other end of a new connection."""

    def host(self, peer: int) -> str:
        """The host of `peer` if there are several hosts, else ""."""

    def leave(self, rank: int, why: str = "") -> None:
        """Stop listening. why: this rank gives up, and says so to ranks that come later."""

    def gave_up(self, peer: int) -> dict[int, str]:
        """The rank that gave up, if `peer` cannot be met for that reason, and why it did."""


@dataclass(frozen=True)
class Meeting:
    """The MeetingPlace on one host, which rank 0 hands to the others."""

    directory: str
    token: str = field(repr=False)  # hex; "" before `entered`
    board: Any = field(default=None, repr=False, compare=False)  # a network.Board for the notes; None: files here
    patience = float("inf")  # the kernel keeps every caller that it has let connect

    def remove(self) -> None:
        """Remove the directory; every rank may do so."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def publish(self) -> None:
        """Write the token to a file of the directory, for ranks that are told the directory only."""
        with open(os.path.join(self.directory, _TOKEN), "x", encoding="ascii") as file:
            file.write(self.token)

    def entered(self, rank: int) -> Meeting:
        """This meeting with its token, from the directory, which must be private. Raises PeerLost if it is gone."""
        if self.token:
            return self
        if not os.path.isabs(self.directory) or not os.path.basename(self.directory).startswith(_PREFIX):
            wanted = f"an absolute path that ends in {_PREFIX}..."
            raise TransportError.refused(rank, "the rendezvous directory", f"{self.directory!r:.200}", wanted)
        self._check(rank)
        path = os.path.join(self.directory, _TOKEN)
        try:
            with open(path, encoding="ascii") as file:
                token = file.read(2 * _PROOF + 1)
            if len(bytes.fromhex(token)) != _PROOF:
                raise ValueError(f"{len(token)} letters")
        except (OSError, ValueError) as error:
            raise TransportError.refused(rank, path, str(error), "the token of rank 0") from error
        return replace(self, token=token)

    def _check(self, rank: int) -> None:
        try:
            _check_private(self.directory, rank)
        except FileNotFoundError:
            if rank:
                raise PeerLost.exited(rank, self.gave_up(0), "the rendezvous") from None
            wanted = "the one that this rank made"
            what = f"the rendezvous directory {self.directory}"
            raise TransportError.refused(rank, what, "none", wanted) from None

    def listen(self, rank: int, size: int) -> socket.socket:
        """As `MeetingPlace.listen`, in the directory, which must be private."""
        self._check(rank)
        listener = _unix()
        try:
            listener.bind(self._path(rank))
            listener.listen(size + BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    def listens(self, peer: int) -> bool:
        """As `MeetingPlace.listens`."""
        return os.path.exists(self._path(peer))

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

    def greet(self, sock: socket.socket) -> Stranger:
        """As the kernel knows the other end, which must belong to this user."""
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return Stranger(pid, f"pid {pid}", "", "" if uid == os.getuid() else f"of uid {uid}")

    def host(self, peer: int) -> str:
        """None to name: there is one host."""
        return ""

    def leave(self, rank: int, why: str = "") -> None:
        """Remove this rank's socket. why: written to a file beside it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(rank))
        if why and self.board is not None:
            with contextlib.suppress(TransportError):  # the store may be gone, as this rank soon is
                self.board.write("left", rank, why[:_WHY])
        elif why:
            with contextlib.suppress(OSError), open(self._path(rank) + _NOTE, "x", encoding="utf-8") as file:
                file.write(why[:_WHY])

    def gave_up(self, peer: int) -> dict[int, str]:
        """As `MeetingPlace.gave_up`. Rank 0, or what started the ranks, removes the directory at the end."""
        if self.board is not None and (noted := self.board.gave_up(peer)):
            return noted
        try:
            with open(self._path(peer) + _NOTE, encoding="utf-8", errors="replace") as file:
                return {peer: f"gave up the rendezvous: {file.read(_WHY)}"}
        except OSError:
            if os.path.isdir(self.directory):
                return {}
        return {0: "gave up the rendezvous before this rank came: its own error says why"}

    def _path(self, rank: int) -> str:
        return os.path.join(self.directory, str(rank))


def prepare() -> Meeting:
    """A new meeting place, which only this user can enter. Raises TransportError where no directory can be made."""
    try:
        directory = tempfile.mkdtemp(prefix=_PREFIX)
        if len(directory) > _SUN_PATH - 8:
            os.rmdir(directory)
            directory = tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")
    except OSError as error:
        wanted = "a folder for temporary files that can be written (TMPDIR)"
        raise TransportError.refused(0, "the rendezvous directory", str(error), wanted) from error
    return Meeting(directory, secrets.token_hex(32))


def _unix() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)


def connect(meeting: MeetingPlace, rank: int, size: int, timeout: float) -> dict[int, Connection]:
    """A connection to every other rank. Raises WaitTimeout naming the ranks that are missing and the callers that were
    refused, PeerLost if a rank gave up, TransportError if the system or a peer refuses a connection."""
    deadline = time.monotonic() + timeout
    token = bytes.fromhex(meeting.token)
    found: dict[int, Connection] = {}
    refused = Refused()
    heard: set[int] = set()  # peers that listened while this rank was there: it is not late for them
    try:
        listener = meeting.listen(rank, size)
    except OSError as error:
        wanted = "a new socket, one process a rank"
        raise TransportError.refused(rank, "listening for the other ranks", str(error), wanted) from error
    why, lost = "it was interrupted", dict[int, str]()
    try:
        with contextlib.suppress(TimeoutError):
            for peer in range(rank):
                try:
                    found[peer] = _join(meeting, token, rank, peer, deadline, heard)
                except PeerLost as error:  # ranks that were met may have said why, and know more
                    causes = Transport(rank, size, found, timeout).causes()
                    raise (PeerLost.exited(rank, causes, _WHAT) if causes else error) from None
            _accept(meeting, listener, token, rank, size, deadline, found, refused)
        missing = [r for r in range(size) if r != rank and r not in found]
        if missing:
            if causes := Transport(rank, size, found, timeout).causes():
                raise PeerLost.exited(rank, causes, _WHAT)  # and it may keep the missing ones
            absent = [r for r in missing if r not in meeting.gave_up(r)]  # the others gave up because of these
            known = {r: text for r in absent or missing if (text := _kept(meeting, rank, r))}
            lost = dict.fromkeys(absent or missing, "did not come in time") | known
            raise WaitTimeout.rendezvous(rank, _WHAT, timeout, absent or missing, refused.texts(), known)
        why = ""
        return found
    except PktError as error:
        text = str(error).removeprefix(f"rank {rank}: ")
        if isinstance(error, WaitTimeout):
            text = f"{', '.join(f'rank {r}' for r in error.missing)} did not come within {timeout:g} s"
        else:
            lost = ranks_named(error)
        why = text
        raise
    except OSError as error:
        why = str(error)
        raise TransportError.refused(rank, _WHAT, why, "a socket to every other rank") from error
    finally:
        if why:  # ranks that were met may be further, and have no other way to find out
            Transport(rank, size, found, timeout).give_up(why, lost)
        listener.close()
        meeting.leave(rank, why)


def _kept(meeting: MeetingPlace, rank: int, missing: int) -> str:
    """Who may keep a missing rank that has come; "" if none can. Each connects to those before it in their order."""
    before = " or ".join(f"rank {r}" for r in range(min(rank, missing)))
    return f"has come, and may wait for {before}" if before and meeting.listens(missing) else ""


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


def _join(meeting: MeetingPlace, token: bytes, rank: int, peer: int, deadline: float, heard: set[int]) -> Connection:
    """Connect to a lower rank as soon as it listens, and add it to `heard`. Raises TimeoutError at the deadline,
    PeerLost if it gave up before."""
    while (now := time.monotonic()) < deadline:
        sock: socket.socket | None = None
        try:
            sock = meeting.dial(rank, peer, deadline - now)
            other = meeting.greet(sock)
            if other.refused:
                found = f"{other.name} {other.refused}"
                raise TransportError.refused(rank, f"the socket of rank {peer}", found, f"uid {os.getuid()}")
            challenge = _exactly(sock, NONCE, min(deadline, now + meeting.patience))
            heard.add(peer)
            mine = secrets.token_bytes(NONCE)
            sock.settimeout(max(1e-3, deadline - time.monotonic()))
            sock.sendall(_HELLO.pack(MAGIC, rank, mine, _proof(token, "join", challenge, rank, peer)))
            if not hmac.compare_digest(_exactly(sock, _PROOF, deadline), _proof(token, "welcome", mine, peer, rank)):
                raise TransportError.refused(
                    rank, f"the socket of rank {peer}", "a wrong proof", "one made with the token"
                )
            return Connection(sock, rank, peer, other.pid, meeting.host(peer))
        except (
            FileNotFoundError,
            ConnectionError,
            BlockingIOError,
            TimeoutError,
        ):  # it does not listen yet, or is busy
            if sock is not None:
                sock.close()
            if peer not in heard and (gone := meeting.gave_up(peer)):
                raise PeerLost.exited(rank, gone, _WHAT) from None
            time.sleep(_POLL)
        except BaseException:
            if sock is not None:
                sock.close()
            raise
    raise TimeoutError(f"rank {peer}")


def _accept(
    meeting: MeetingPlace,
    listener: socket.socket,
    token: bytes,
    rank: int,
    size: int,
    deadline: float,
    found: dict[int, Connection],
    refused: Refused,
) -> None:
    """Accept the higher ranks until the deadline, and refuse strangers meanwhile; a silent one delays nobody."""
    listener.setblocking(False)
    with (
        selectors.PollSelector() as selector,
        Callers(meeting.greet, _HELLO.size, size + CROWD, selector, refused) as callers,
    ):
        selector.register(listener, selectors.EVENT_READ)
        while len(found) < size - 1 and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is listener:
                    callers.accept(listener)
                elif sock in callers.pending and (said := callers.hear(sock)) is not None:
                    caller, challenge = callers.pending[sock].stranger, callers.pending[sock].challenge
                    magic, peer, nonce, proof = _HELLO.unpack(said)
                    proved = hmac.compare_digest(proof, _proof(token, "join", challenge, peer, rank))
                    if why := _unwelcome(peer, proved and magic == MAGIC, rank, size, found):
                        callers.drop(sock, why)
                    elif callers.answer(sock, _proof(token, "welcome", nonce, rank, peer)):
                        found[peer] = Connection(sock, rank, peer, caller.pid, meeting.host(peer))


def _unwelcome(peer: int, proved: bool, rank: int, size: int, found: Container[int]) -> str:
    """Why a caller that says it is `peer` may not join, in words; "" where it may. proved: it has the token."""
    higher = rank < peer < size
    who = f"as rank {peer}" if higher else "as a rank that does not connect here"
    if not proved:
        return f"{who} without the token"
    if peer in found:
        return f"{who} a second time"
    return "" if higher else who
