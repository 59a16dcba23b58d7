"""Callers of a rank's socket that have not proved yet that they are ranks: heard without blocking, and bounded.

A stranger can call as often as it likes, stay silent, send other bytes, or hang up at any moment. None of that delays
the ranks: nobody is waited for, and the oldest callers make room for new ones.
"""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

NONCE = 16  # bytes of a challenge
BACKLOG = 512  # callers that the kernel keeps until this rank accepts them; the true ranks may be behind strangers
CROWD = 192  # callers heard at once, beyond the number of ranks
_AT_ONCE = 64  # callers accepted before the others are heard again
_REASONS = 16  # different reasons of refusals that a message has
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # of accept: a caller waits, but there is no room
_PAUSE = 0.01  # seconds


class Stranger(NamedTuple):
    """The other end of a new connection."""

    pid: int  # 0 if it is not known
    name: str  # in messages
    address: str  # of its host; "" on this host
    refused: str  # why it is refused; "" if it is not


class Refused:
    """The callers that were refused: for each reason the first caller, and how many there were."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._count: Counter[str] = Counter()

    def add(self, who: str, why: str) -> None:
        """Count the caller `who`."""
        if why not in self._first and len(self._first) >= _REASONS:
            why = "for other reasons"
        self._first.setdefault(why, who)
        self._count[why] += 1

    def texts(self) -> list[str]:
        """One for each reason."""
        more = {why: f" (and {n - 1:,} more)" if n > 1 else "" for why, n in self._count.items()}
        return [f"{who} {why}{more[why]}" for why, who in self._first.items()]


@dataclass
class _Caller:
    stranger: Stranger
    challenge: bytes
    said: bytearray


class Callers:
    """The connections that have not proved yet that they are a rank's. Their number is bounded: beyond it the oldest
    one is dropped, of the host that has most, so that a crowd on one host does not drive out a rank on another."""

    def __init__(
        self,
        greet: Callable[[socket.socket], Stranger],
        hello: int,
        most: int,
        selector: selectors.BaseSelector,
        refused: Refused,
    ) -> None:
        """hello: bytes of one. most: callers at once. selector: has them as long as they are here."""
        self.greet, self.hello, self.most, self.selector, self.refused = greet, hello, most, selector, refused
        self.pending: dict[socket.socket, _Caller] = {}  # the oldest first

    def __enter__(self) -> Callers:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in list(self.pending):
            self.refused.add(self._forget(sock).name, "stayed silent")
            sock.close()

    def accept(self, listener: socket.socket) -> None:
        """Accept who waits, and send each a challenge."""
        for _ in range(_AT_ONCE):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _FULL:
                    continue  # this caller has gone already
                if not self.pending:  # other threads hold the descriptors
                    self.refused.add("a caller", str(error))
                    time.sleep(_PAUSE)
                    return
                self._drop_oldest(f"stayed silent ({error.strerror})")
                continue
            sock.setblocking(False)
            self.pending[sock] = caller = _Caller(self.greet(sock), secrets.token_bytes(NONCE), bytearray())
            self.selector.register(sock, selectors.EVENT_READ)
            if caller.stranger.refused:
                self.drop(sock, caller.stranger.refused)
            elif self._sent(sock, caller.challenge) and len(self.pending) > self.most:
                self._drop_oldest("stayed silent")

    def hear(self, sock: socket.socket) -> bytes | None:
        """The hello of a caller, once it is whole."""
        said = self.pending[sock].said
        try:
            more = sock.recv(self.hello - len(said))
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            self.drop(sock, f"was lost: {error}")
            return None
        said += more
        if not more:
            self.drop(sock, "hung up")
        return bytes(said) if len(said) == self.hello else None

    def answer(self, sock: socket.socket, proof: bytes) -> bool:
        """Send the proof, and let the connection go to its rank. False if the caller has gone; it may come again."""
        if not self._sent(sock, proof):
            return False
        self._forget(sock)
        return True

    def drop(self, sock: socket.socket, why: str) -> None:
        """Refuse a caller."""
        self.refused.add(self._forget(sock).name, why)
        sock.close()

    def _sent(self, sock: socket.socket, data: bytes) -> bool:
        try:
            whole = sock.send(data, socket.MSG_NOSIGNAL) == len(data)  # the buffer of a new socket has room
            why = "does not read"
        except OSError as error:
            whole, why = False, f"was lost: {error}"
        if not whole:
            self.drop(sock, why)
        return whole

    def _drop_oldest(self, why: str) -> None:
        crowd = Counter(caller.stranger.address for caller in self.pending.values())
        address = max(crowd, key=crowd.__getitem__)
        self.drop(next(s for s, caller in self.pending.items() if caller.stranger.address == address), why)

    def _forget(self, sock: socket.socket) -> Stranger:
        self.selector.unregister(sock)
        return self.pending.pop(sock).stranger
