"""The hosts of a world's ranks, exchanged over torch's store, and TCP between the ranks if there are several hosts.

Every rank writes its host to the store and reads all hosts. On one host the ranks meet in a directory (see
`rendezvous`) and never listen on the network. On several, every rank listens on the address that leads to the others
and writes it to the store; the connections are then made and proved as on one host.

Anybody who reaches the store's port can read and write it, so it holds no secret and is not believed. The user opts
into TCP with PKT_SECRET in the environment of every rank. From it both sides of a connection derive the token, and it
signs every entry that pkt writes to the store. TCP is not encrypted: who can listen to the network between the hosts,
or change what travels there, must be trusted.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import hmac
import ipaddress
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from pkt.errors import ShapeError, TransportError, WaitTimeout
from pkt.runtime.processes.callers import BACKLOG, Stranger
from pkt.runtime.processes.parsing import parsed
from pkt.wording import count_text

# A host that loses power says no goodbye. The kernel probes a connection after 5 s of silence, every 5 s, and gives up
# after 3 probes without an answer. TCP_USER_TIMEOUT would also end a peer that is slow to read.
_SILENT, _PROBE, _PROBES = 5, 5, 3
SECRET_LETTERS = 32
_LETTERS = 500  # of a text in the store
_TICK = 1e-3  # seconds: torch's file store counts milliseconds, and waits for ever if there are none
_ATTEMPT = 0.25  # seconds: after a lost first packet the kernel would wait a second, then two, then four
_PASSES = (errno.EADDRNOTAVAIL, errno.EAGAIN)  # of connect: this host has no free port at the moment


def this_host() -> str:
    """Name and boot id of this host: two hosts, or two containers, may have the same name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()[:8]
    except OSError:
        boot = ""
    return f"{socket.gethostname()}:{boot}"


def secret() -> bytes:
    """PKT_SECRET; b"" if it is not set. Raises ShapeError if it is so short that it can be guessed."""
    found = os.environ.get("PKT_SECRET", "")
    if found and len(found) < SECRET_LETTERS:
        wanted = f"at least {SECRET_LETTERS}, the same on every rank (openssl rand -hex 32)"
        raise ShapeError.argument("pkt.init", "PKT_SECRET", count_text(len(found), "letter"), wanted)
    return found.encode(errors="surrogateescape")


@dataclass(frozen=True)
class Board:
    """Values that the ranks of one world write for each other in torch's `store`, under the world's `key`.

    own: this rank, for messages. secret: signs what is written, and what is read must be signed with it; b"": anybody
    may have written what is read. Raises TransportError for entries of another form or without the signature, and if
    the store does not answer.
    """

    store: Any
    key: str
    own: int = 0
    secret: bytes = field(default=b"", repr=False)

    def write(self, what: str, rank: int, value: Any) -> None:
        """Write `value`, as JSON, once."""
        text = json.dumps(value)
        try:
            self.store.set(self._name(what, rank), json.dumps([text, self._tag(what, rank, text)]))
        except RuntimeError as error:
            raise self._silent(error) from error

    def read(self, what: str, rank: int, timeout: float) -> Any:
        """The value that `rank` wrote; TimeoutError if it does not come in `timeout` seconds."""
        name = self._name(what, rank)
        try:
            self.store.wait([name], datetime.timedelta(seconds=max(timeout, _TICK)))
            entry = self.store.get(name)
        except dist.DistNetworkError as error:
            raise self._silent(error) from error
        except RuntimeError as error:  # DistStoreError is one
            raise TimeoutError(f"{what} of rank {rank}") from error
        return self._opened(what, rank, entry)

    def peek(self, what: str, rank: int) -> Any:
        """The value that `rank` wrote; None if there is none yet."""
        name = self._name(what, rank)
        try:
            entry = self.store.get(name) if self.store.check([name]) else None
        except RuntimeError as error:
            raise self._silent(error) from error
        return None if entry is None else self._opened(what, rank, entry)

    def gave_up(self, rank: int) -> dict[int, str]:
        """As `rendezvous.MeetingPlace.gave_up`."""
        why = self.peek("left", rank)
        return {} if why is None else {rank: f"gave up the rendezvous: {str(why)[:_LETTERS]}"}

    def token(self, job: str) -> str:
        """The token of the ranks that have this board's secret. job: a random text that rank 0 wrote."""
        return hmac.new(self.secret, f"token {self.key} {job}".encode(), hashlib.sha256).hexdigest()

    def refused(self, what: str, rank: int, found: Any, wanted: str) -> TransportError:
        """The error for a value that cannot have been written by a rank."""
        where = f"{what!r} of rank {rank} in torch's store"
        return TransportError.refused(self.own, where, f"{found!r:.80}", wanted)

    def _tag(self, what: str, rank: int, text: str) -> str:
        if not self.secret:
            return ""
        return hmac.new(self.secret, f"entry {self._name(what, rank)} {text}".encode(), hashlib.sha256).hexdigest()

    def _opened(self, what: str, rank: int, entry: bytes) -> Any:
        try:
            text, tag = parsed(entry.decode())
            signed = hmac.compare_digest(tag, self._tag(what, rank, text))
            value = parsed(text) if signed else None
        except (ValueError, TypeError, AttributeError):
            raise self.refused(what, rank, entry, "an entry of pkt's") from None
        if not signed:
            found = (
                "an entry that is not signed with this rank's PKT_SECRET"
                if self.secret
                else "an entry with a signature"
            )
            wanted = "the same PKT_SECRET on every rank, or on none"
            raise TransportError.refused(self.own, f"{what!r} of rank {rank} in torch's store", found, wanted)
        return value

    def _silent(self, error: Exception) -> TransportError:
        wanted = "one that answers (MASTER_ADDR, MASTER_PORT)"
        return TransportError.refused(self.own, "torch's store", f"{str(error)[:200]}", wanted)

    def gather(self, what: str, rank: int, size: int, value: str, timeout: float) -> list[str]:
        """Every rank's `value`. Raises WaitTimeout naming the ranks that did not come."""
        deadline = time.monotonic() + timeout
        self.write(what, rank, value)
        found: dict[int, Any] = {}
        for peer in range(size):  # after the deadline each for a moment: who is late does not hide who is there
            with contextlib.suppress(TimeoutError):
                found[peer] = self.read(what, peer, max(0.05, deadline - time.monotonic()))
        missing = [peer for peer in range(size) if peer not in found]
        if missing:
            raise WaitTimeout.rendezvous(rank, "pkt.init()", timeout, missing)
        for peer in range(size):
            if not isinstance(found[peer], str) or len(found[peer]) > _LETTERS:
                raise self.refused(what, peer, found[peer], f"a text of at most {_LETTERS} letters")
        return [found[peer] for peer in range(size)]

    def address(self) -> str:
        """The address from which this host reaches the host of the store; "" if none does."""
        store = self.store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        host = store.host if isinstance(store, dist.TCPStore) else ""
        return address_towards(host or os.environ.get("MASTER_ADDR") or socket.gethostname())

    def _name(self, what: str, rank: int) -> str:
        return f"{self.key}/{what}/{rank}"


def address_towards(target: str) -> str:
    """The address from which this host reaches `target`; "" if none does. Sends nothing."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, where in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
    return ""


class Network:
    """The meeting place of ranks on several hosts, a `rendezvous.MeetingPlace`. `hosts` and `addresses`, as
    Board.address has them, are in rank order."""

    # A kernel whose queue of callers is full drops the last packet of a connection that the caller takes for made.
    patience = 2.0

    def __init__(self, board: Board, token: str, rank: int, hosts: Sequence[str], addresses: Sequence[str]) -> None:
        self.board, self.token, self.hosts = board, token, hosts
        self._address = addresses[rank]
        if _is_loopback(self._address):  # this host serves the store: take the address that reaches another host
            elsewhere = (a for h, a in zip(hosts, addresses, strict=True) if h != hosts[rank] and not _is_loopback(a))
            target = next(elsewhere, "")
            self._address = (target and address_towards(target)) or self._address
        if not self._address:
            found = "no address that leads to the host of torch's store"
            raise TransportError.refused(rank, f"the network of host {hosts[rank]}", found, "one (MASTER_ADDR)")

    def listen(self, rank: int, size: int) -> socket.socket:
        """A listening socket, with its address written to the board."""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        listener = socket.create_server((self._address, 0), family=family, backlog=size + BACKLOG)
        self.board.write("listens", rank, listener.getsockname()[:2])
        return listener

    def listens(self, peer: int) -> bool:
        """As `MeetingPlace.listens`, from the board."""
        with contextlib.suppress(TransportError):
            return self.board.peek("listens", peer) is not None
        return False

    def dial(self, rank: int, peer: int, timeout: float) -> socket.socket:
        """Connected to `peer`'s socket."""
        deadline = time.monotonic() + timeout
        entry = self.board.read("listens", peer, timeout)
        try:
            address, port = entry
            ipaddress.ip_address(address)
            if not isinstance(port, int) or not 0 < port < 1 << 16:
                raise ValueError
        except (TypeError, ValueError):
            raise self.board.refused("listens", peer, entry, "an address and a port") from None
        left = max(1e-3, deadline - time.monotonic())
        try:
            return socket.create_connection((address, port), min(_ATTEMPT, left))
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            if error.errno in _PASSES:
                raise ConnectionError(str(error)) from error
            what = f"{address}:{port}, where rank {peer} on host {self.hosts[peer]} listens"
            raise TransportError.refused(rank, what, str(error), "a network that leads there") from error

    def greet(self, sock: socket.socket) -> Stranger:
        """The other end's address, and no process number: over TCP only the token proves a rank."""
        with contextlib.suppress(OSError):  # the other end has hung up; reading will find that out
            for level, option, value in (
                (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
                (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT),
                (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE),
                (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES),
            ):
                sock.setsockopt(level, option, value)
            address, port = sock.getpeername()[:2]
            return Stranger(0, f"{address}:{port}", address, "")
        return Stranger(0, "a caller who left at once", "", "")

    def host(self, peer: int) -> str:
        """The host that `peer` wrote to the store."""
        return self.hosts[peer]

    def leave(self, rank: int, why: str = "") -> None:
        """why: written to the board."""
        if why:
            with contextlib.suppress(TransportError):  # the store may be gone, as this rank soon is
                self.board.write("left", rank, why)

    def gave_up(self, peer: int) -> dict[int, str]:
        """As `MeetingPlace.gave_up`, from the board."""
        return self.board.gave_up(peer)


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return True  # no address
