"""The hosts of a world's ranks, exchanged over torch's store, and TCP between the ranks if there are several hosts.

Every rank writes its host to the store and reads all hosts. On one host the ranks meet in a directory (see
`rendezvous`). On several, every rank listens on the address that leads to the others and writes it to the store; the
connections are then made and proved as on one host. The token is as private as the store, and TCP is not encrypted: as
with torch.distributed itself, the network must be trusted.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from pkt.errors import TransportError, WaitTimeout
from pkt.runtime.processes.callers import BACKLOG, Stranger

# A host that loses power says no goodbye. The kernel probes a connection after 5 s of silence, every 5 s, and gives up
# after 3 probes without an answer. TCP_USER_TIMEOUT would also end a peer that is slow to read.
_SILENT, _PROBE, _PROBES = 5, 5, 3
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


@dataclass(frozen=True)
class Board:
    """Values that the ranks of one world write for each other in torch's `store`, under the world's `key`."""

    store: Any
    key: str

    def write(self, what: str, rank: int, value: Any) -> None:
        """Write `value`, as JSON, once."""
        self.store.set(self._name(what, rank), json.dumps(value))

    def read(self, what: str, rank: int, timeout: float) -> Any:
        """The value that `rank` wrote; TimeoutError if it does not come in `timeout` seconds."""
        try:
            self.store.wait([self._name(what, rank)], datetime.timedelta(seconds=timeout))
        except RuntimeError as error:  # DistStoreError is one
            raise TimeoutError(f"{what} of rank {rank}") from error
        return json.loads(self.store.get(self._name(what, rank)))

    def peek(self, what: str, rank: int) -> Any:
        """The value that `rank` wrote; None if there is none yet."""
        name = self._name(what, rank)
        return json.loads(self.store.get(name)) if self.store.check([name]) else None

    def gather(self, what: str, rank: int, size: int, value: Any, timeout: float) -> list[Any]:
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

    def dial(self, rank: int, peer: int, timeout: float) -> socket.socket:
        """Connected to `peer`'s socket."""
        deadline = time.monotonic() + timeout
        address, port = self.board.read("listens", peer, timeout)
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
            self.board.write("left", rank, why)

    def gave_up(self, peer: int) -> dict[int, str]:
        """As `MeetingPlace.gave_up`, from the board."""
        why = self.board.peek("left", peer)
        return {} if why is None else {peer: f"gave up the rendezvous: {why}"}


def _is_loopback(address: str) -> bool:
    return not address or ipaddress.ip_address(address).is_loopback
