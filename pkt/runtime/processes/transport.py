"""Collective calls between the processes of a world: values and file descriptors to every rank, each with a deadline.

Every rank has a connection to every other. All survivors name a rank that dies, which ends its connection, and name one
that is stopped or late at the deadline. A rank that gives up sends the others a farewell with the reason before it
closes, so that they name the cause and not this rank. Over TCP only the connection shows how a process is, so a stopped
one is found at the deadline. Any failure closes the transport: the world is lost, but the process is not.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any

from pkt.errors import CollectiveMismatch, PeerLost, PktError, ShapeError, TransportError, WaitTimeout
from pkt.runtime.processes.frames import (
    GOODBYE,
    MAX_TEXT,
    Connection,
    Frame,
    LostConnection,
    close_fds,
    pack,
)
from pkt.runtime.processes.parsing import MAX_DEPTH

DEFAULT_TIMEOUT = 60.0
LONGEST_TIMEOUT = 1e6  # eleven days
_GIVES_UP = 0  # sequence number of a farewell; calls count from 1
_WHY = 2000  # letters of a farewell's reason
_CLOSED = "closed its world"  # of a rank that lives


def timeout_seconds(timeout: float | None = None) -> float:
    """Seconds: `timeout`, else PKT_TIMEOUT, else 60. Raises ShapeError unless they are a positive number."""
    name, found = ("PKT_TIMEOUT", os.environ.get("PKT_TIMEOUT")) if timeout is None else ("timeout", timeout)
    if found is None:
        return DEFAULT_TIMEOUT
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        if 0 < (seconds := float(found)) <= LONGEST_TIMEOUT:
            return seconds
    wanted = f"seconds: a number above 0, at most {LONGEST_TIMEOUT:g}"
    raise ShapeError.argument("pkt.init", name, repr(found), wanted)


def process_state(pid: int) -> str:
    """The state of a process of this host: "stopped", "exited", or "" if it is alive or cannot be seen."""
    if pid <= 0:
        return ""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "exited"
    except OSError:
        return ""
    return {"T": "stopped", "t": "stopped", "Z": "exited", "X": "exited"}.get(state, "")


class Transport:
    """One rank's connections to all others. Not thread-safe, except `lost`."""

    def __init__(self, rank: int, size: int, connections: Mapping[int, Connection], timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.connections = dict(connections)
        self.sequences: Counter[int] = Counter()  # number of the last call with each rank
        self.closed = False

    # ------------------------------------------------------------------------------------------------------- collective
    def exchange(self, value: Any, what: str, among: Sequence[int] | None = None) -> list[Any]:
        """Every rank's `value`, in rank order. among: only some ranks meet, and give the order; this one is in it."""
        values, fds = self.exchange_fds(value, {}, what, among)
        for rank, received in fds.items():
            if received:
                close_fds([fd for some in fds.values() for fd in some])
                found = f"{len(received)} file descriptors"
                raise self._fail(TransportError.refused(self.rank, f"{what} of rank {rank}", found, "none"))
        return values

    def exchange_fds(
        self, value: Any, fds: Mapping[int, list[int]], what: str, among: Sequence[int] | None = None
    ) -> tuple[list[Any], dict[int, list[int]]]:
        """Every rank's `value`, and the descriptors that each rank sent to this one, which the caller has to close.

        `fds[r]` go to rank r, and the caller keeps them too. A failure closes all descriptors that arrived.
        """
        if self.closed:
            raise TransportError.refused(self.rank, what, "a closed transport", "an open one")
        order = range(self.size) if among is None else among
        meeting = {peer: self.connections[peer] for peer in order if peer != self.rank}
        deadline = time.monotonic() + self.timeout
        frames: dict[int, Frame] = {}
        try:
            for peer, connection in meeting.items():
                self.sequences[peer] += 1
                mine = list(fds.get(peer, ()))
                connection.queue(self._packed(peer, [what, value], len(mine), what), mine)
            self._pump(meeting, deadline, frames, what)
        except BaseException as error:
            close_fds([fd for frame in frames.values() for fd in frame.fds])
            if isinstance(error, PktError):
                raise self._fail(error) from error.__cause__
            self.close()
            raise
        said = {self.rank: what} | {peer: frame.value[0] for peer, frame in frames.items()}
        if len(set(said.values())) > 1:
            close_fds([fd for frame in frames.values() for fd in frame.fds])
            mismatch = CollectiveMismatch.calls(said)
            # No farewell to these ranks: each gets the same frames and finds the same difference.
            self._say(pack(_GIVES_UP, {"lost": {}, "why": str(mismatch)[:_WHY]}), 0.0, but=meeting)
            self.close()
            raise mismatch
        values = [value if r == self.rank else frames[r].value[1] for r in order]
        return values, {peer: frame.fds for peer, frame in frames.items()}

    def barrier(self, what: str) -> None:
        """Return when every rank has called it."""
        self.exchange(None, what)

    # ----------------------------------------------------------------------------------------------------------- peers
    def lost(self) -> dict[int, str]:
        """The ranks that are gone or stopped now, with what is known. Takes no message off the connections."""
        found: dict[int, str] = {}
        for peer, connection in list(self.connections.items()):
            poller = select.poll()
            try:
                poller.register(connection, select.POLLRDHUP)
                hung_up = any(
                    event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR) for _, event in poller.poll(0)
                )
            except (OSError, ValueError):  # another thread closed it
                continue
            state = process_state(connection.pid)
            if state == "exited" or hung_up:
                found[peer] = self._end_of(connection)
            elif state:
                found[peer] = f"({connection.who}) is {state}"
        return found

    def check(self, what: str) -> None:
        """Raise PeerLost if a rank is gone or stopped, and tell the others. `what` goes on outside this transport."""
        lost = self.lost()
        if lost:
            raise self._fail(PeerLost.exited(self.rank, self._causes(lost), what))

    def blamed(self) -> dict[int, str]:
        """The ranks that the farewells of the others name as lost. Takes the messages off the connections."""
        found: dict[int, str] = {}
        for connection in self.connections.values():
            if (farewell := self._last_words(connection)) is not None:
                found |= self._blamed(connection, farewell)
        return found

    def close(self) -> None:
        """Close all connections; idempotent. To the others this rank has left."""
        self.closed = True
        for connection in self.connections.values():
            connection.close()

    # ---------------------------------------------------------------------------------------------------------- inside
    def _pump(self, meeting: Mapping[int, Connection], deadline: float, frames: dict[int, Frame], what: str) -> None:
        """Write and read until every frame of this call is here. meeting: the connections to the ranks that take
        part."""
        poller = select.poll()
        ends = {connection.fileno(): connection for connection in meeting.values()}
        state: dict[int, int] = {}

        def interest(connection: Connection) -> None:
            events = (select.POLLOUT if connection.unsent else 0) | (
                select.POLLRDHUP if connection.peer in frames else select.POLLIN
            )
            if state.get(connection.fileno()) != events:
                poller.register(connection, events)
                state[connection.fileno()] = events

        for connection in ends.values():
            interest(connection)
        while len(frames) < len(ends) or any(c.unsent for c in ends.values()):
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._late(meeting, frames, what)
            for fileno, event in poller.poll(min(left, 1.0) * 1e3):
                connection = ends[fileno]
                if connection.peer in frames and event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR):
                    # It sent its frame and left: at the end of its program, or because it gave up this call.
                    poller.unregister(connection)
                    connection.discard()
                    farewell = self._last_words(connection)
                    if farewell is not None:
                        raise PeerLost.exited(self.rank, self._blamed(connection, farewell), what)
                    continue
                try:
                    if connection.peer not in frames and event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                        self._take(connection, frames, what)
                    if event & select.POLLOUT:
                        connection.write()
                except LostConnection as error:
                    if not self._farewell(connection, frames, what):
                        raise self._gone(connection, what) from error
                interest(connection)

    def _packed(self, peer: int, value: Any, fds: int, what: str) -> bytes:
        try:
            return pack(self.sequences[peer], value, fds)
        except ValueError as error:
            wanted = f"at most {MAX_TEXT} bytes of JSON, {MAX_DEPTH} deep"
            raise TransportError.refused(self.rank, f"this rank's value for {what}", str(error), wanted) from None

    def _take(self, connection: Connection, frames: dict[int, Frame], what: str) -> None:
        frame = connection.read()
        if frame is None:
            return
        frames[connection.peer] = frame
        if frame.sequence == _GIVES_UP:
            raise PeerLost.exited(self.rank, self._blamed(connection, frame.value), what)
        who = f"a message of rank {connection.peer}"
        sequence = self.sequences[connection.peer]
        if frame.sequence != sequence:
            found, wanted = f"call number {frame.sequence}", f"call number {sequence}"
            raise TransportError.refused(self.rank, who, found, wanted)
        if not isinstance(frame.value, list) or len(frame.value) != 2 or not isinstance(frame.value[0], str):
            raise TransportError.refused(self.rank, who, f"{frame.value!r:.60}", "the name of a call and a value")

    def _farewell(self, connection: Connection, frames: dict[int, Frame], what: str) -> bool:
        """After a failed write: whether the peer's frame of this call has arrived. Raises the peer's reason if it sent
        one."""
        if connection.peer in frames:
            connection.discard()
            return True
        try:
            self._take(connection, frames, what)
        except LostConnection:
            return False
        return connection.peer in frames

    def _gone(self, connection: Connection, what: str) -> PktError:
        """The error for a peer that hung up. Others may have too."""
        lost = {connection.peer: self._end_of(connection)} | self.lost()
        return PeerLost.exited(self.rank, self._causes(lost), what)

    def _causes(self, lost: dict[int, str]) -> dict[int, str]:
        """The ranks of `lost` that are the cause, and those that their farewells name: a rank that sent a reason is not
        the cause. Takes the messages off the connections."""
        lost, blamed = dict(lost), dict[int, str]()
        for peer in list(lost):
            farewell = self._last_words(self.connections[peer])
            if farewell is not None:
                blamed |= self._blamed(self.connections[peer], farewell)
                del lost[peer]
        # A peer that lives and sent no reason was interrupted while it sent one: it is not the cause either.
        gone = {peer: text for peer, text in lost.items() if _CLOSED not in text}
        return gone or blamed or lost

    def _blamed(self, connection: Connection, farewell: Any) -> dict[int, str]:
        """The ranks that a farewell names as lost; if it names none, the rank that gave up, and why. Nothing in it is
        trusted to have its form."""
        lost, why = (farewell.get("lost"), farewell.get("why")) if isinstance(farewell, dict) else (None, None)
        ranks = {str(rank): rank for rank in range(self.size) if rank != self.rank}
        named = lost.items() if isinstance(lost, dict) else ()
        blamed = {ranks[rank]: str(text)[:_WHY] for rank, text in named if rank in ranks}
        return blamed or {connection.peer: f"({connection.who}) gave up: {str(why)[:_WHY]}"}

    def _last_words(self, connection: Connection) -> Any:
        """The farewell that a peer sent before it hung up; None if it sent none."""
        try:
            while (frame := connection.read()) is not None:
                close_fds(frame.fds)
                if frame.sequence == _GIVES_UP:
                    return frame.value or {}
        except (LostConnection, PktError):
            return None
        return None

    def _end_of(self, connection: Connection) -> str:
        """How the other end of a closed connection ended. A dying process closes its files just before it is gone."""
        if connection.host:
            return f"({connection.who}) " + (_CLOSED if connection.left() else "hung up")
        for _ in range(20):
            if process_state(connection.pid) == "exited":
                return f"({connection.who}) exited"
            time.sleep(0.005)
        return f"({connection.who}) {_CLOSED}"

    def _late(self, meeting: Mapping[int, Connection], frames: Mapping[int, Frame], what: str) -> PktError:
        missing = [peer for peer in meeting if peer not in frames]
        known = {peer: text for peer, text in self.lost().items() if peer in missing}
        if known:
            return PeerLost.exited(self.rank, known, what)
        return WaitTimeout.rendezvous(self.rank, what, self.timeout, missing)

    def _fail(self, error: PktError) -> PktError:
        """Send a farewell, close, and return the error to be raised."""
        late = dict.fromkeys(error.missing, "did not come in time") if isinstance(error, WaitTimeout) else {}
        self.give_up(str(error), error.lost if isinstance(error, PeerLost) else late)
        return error

    def give_up(self, why: str, lost: Mapping[int, str] | None = None) -> None:
        """Send the others a farewell with the reason, and close. Idempotent."""
        if self.closed:
            return
        ranks = {str(rank): text for rank, text in (lost or {}).items()}
        self._say(pack(_GIVES_UP, {"lost": ranks, "why": why[:_WHY]}), 0.0)
        self.close()

    def leave(self) -> None:
        """Send the others a goodbye: this rank closes its world, and close() follows."""
        self._say(GOODBYE, 1.0)

    def left(self, rank: int) -> bool:
        """Whether `rank`, which has hung up, sent a goodbye."""
        return self.connections[rank].left()

    def _say(self, words: bytes, patience: float, but: Container[int] = ()) -> None:
        """Send a last frame to every rank, `but` some. Waits `patience` seconds at most for ranks that read a large
        message."""
        deadline = time.monotonic() + patience
        for peer, connection in self.connections.items():
            if peer in but or not connection.discard():
                continue  # part of another frame was sent: this peer sees the end of file instead
            connection.queue(words)
            with contextlib.suppress(LostConnection, OSError):  # this peer is the lost one
                connection.write()
                poller = select.poll()
                poller.register(connection, select.POLLOUT)
                while connection.unsent and (left := deadline - time.monotonic()) > 0:
                    poller.poll(left * 1e3)
                    connection.write()
