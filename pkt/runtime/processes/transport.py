"""Collective calls between the processes of a world: values and file descriptors to every rank, each with a deadline.

Every rank has a connection to every other. All survivors name a rank that dies, which ends its connection, and name one
that is stopped or late at the deadline. A rank that gives up sends the others a farewell before it closes: the reason,
and the ranks that its error names. Over TCP only the connection shows how a process is, so a stopped one is found at
the deadline. Any failure closes the transport: the world is lost, but the process is not.

`Transport.causes` decides which ranks an error names: those of the first of these kinds that there are.

1. A rank that exited or is stopped, and sent neither a farewell nor a goodbye.
2. A rank whose farewell names nobody: it failed by itself. A rank that a farewell names, unless its own farewell names
   another one: it gave up because of that one.
3. A rank that hung up without a word although its process lives.
4. A rank whose farewell names this rank alone.

If several ranks are late and none is known to be gone, a rank waits a little longer for their farewells: all but one
may be in the call before, waiting for the one that is lost.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pkt.errors import (
    CollectiveMismatch,
    PeerLost,
    PktError,
    ShapeError,
    TransportError,
    WaitTimeout,
    ranks_named,
)
from pkt.runtime.processes.frames import (
    GOODBYE,
    MAX_TEXT,
    Connection,
    Frame,
    LostConnection,
    close_fds,
    pack,
)
from pkt.runtime.processes.journal import SharedJournal
from pkt.runtime.processes.parsing import MAX_DEPTH
from pkt.wording import FIRST_CALL, call_text

DEFAULT_TIMEOUT = 60.0
LONGEST_TIMEOUT = 1e6  # eleven days
_GIVES_UP = 0  # sequence number of a farewell; calls count from 1
_WHY = 2000  # letters of a farewell's reason
_ASK = 0.5  # seconds after the deadline in which one of several late ranks may say for whom it waits itself
_CLOSED = "closed its world"  # of a rank that lives


def timeout_seconds(timeout: float | None = None, call: str = "pkt.init") -> float:
    """Seconds: `timeout`, else PKT_TIMEOUT, else 60. Raises ShapeError unless they are a positive number."""
    given = os.environ.get("PKT_TIMEOUT", "").strip() or DEFAULT_TIMEOUT
    name, found = ("PKT_TIMEOUT", given) if timeout is None else ("timeout", timeout)
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        if 0 < (seconds := float(found)) <= LONGEST_TIMEOUT:
            return seconds
    wanted = f"seconds: a number above 0, at most {LONGEST_TIMEOUT:g}"
    raise ShapeError.argument(call, name, repr(found), wanted)


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


def _said(frame: Frame) -> tuple[str, Any]:
    """The name of a frame's call, and the value; "" if it has no such form."""
    value = frame.value
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str):
        return value[0], value[1]
    return "", None


class Transport:
    """One rank's connections to all others. Not thread-safe, except `lost`. journal: of this world, where there is one;
    ranks write to it that they close their world."""

    journal: SharedJournal | None = None

    def __init__(self, rank: int, size: int, connections: Mapping[int, Connection], timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.connections = dict(connections)
        self.sequences: Counter[int] = Counter()  # number of the last call with each rank
        self.closed, self._in_call = False, False
        self._named: dict[int, str] = {}  # by this rank's own farewell
        self._words: dict[int, Any] = {}  # the farewells that have been read, by rank
        self._early: dict[int, Frame] = {}  # frames that were read before this rank made their call, by rank

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
        self._in_call, call = True, call_text(what, value)
        try:
            for peer, connection in meeting.items():
                self.sequences[peer] += 1
                mine = list(fds.get(peer, ()))
                connection.queue(self._packed(peer, [what, value], len(mine), call), mine)
            self._pump(meeting, deadline, frames, call)
            self._in_call = False
        except BaseException as error:
            close_fds([fd for frame in frames.values() for fd in frame.fds])
            if isinstance(error, PktError):
                raise self._fail(error) from error.__cause__
            self.close()
            raise
        said = {self.rank: what} | {peer: frame.value[0] for peer, frame in frames.items()}
        if len(set(said.values())) > 1:
            close_fds([fd for frame in frames.values() for fd in frame.fds])
            calls = {self.rank: call} | {peer: call_text(*frame.value) for peer, frame in frames.items()}
            mismatch = CollectiveMismatch.calls(calls)
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
    def lost(self, but: Container[int] = ()) -> dict[int, str]:
        """The ranks that are gone or stopped now, `but` some, with what is known. Takes no message off the
        connections."""
        found: dict[int, str] = {}
        for peer, connection in list(self.connections.items()):
            if peer in but or (state := self._state(connection)) == "":
                continue
            found[peer] = f"({connection.who}) is {state}" if state == "stopped" else self._end_of(connection)
        return found

    def _state(self, connection: Connection) -> str:
        """ "gone", "stopped", or "" if the peer is there as far as this rank can see."""
        poller = select.poll()
        try:
            poller.register(connection, select.POLLRDHUP)
            hung_up = any(event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR) for _, event in poller.poll(0))
        except (OSError, ValueError):  # another thread closed it
            return ""
        state = process_state(connection.pid)
        return "gone" if hung_up or state == "exited" else state

    def check(self, what: str, late: Collection[int], seconds: float | None = None) -> None:
        """Raise PeerLost if a rank is gone or stopped, and tell the others. `what` goes on outside this transport, and
        waits for the ranks `late`. seconds: it has waited so long, and no longer: raises WaitTimeout if none is."""
        if seconds is not None or self.causes(late, all_words=False):
            if causes := self.causes(late):
                raise self._fail(PeerLost.exited(self.rank, causes, what))
        if seconds is not None:
            raise self._fail(WaitTimeout.rendezvous(self.rank, what, seconds, sorted(late)))

    def causes(
        self,
        late: Container[int] = (),
        gone: Mapping[int, str] = MappingProxyType({}),
        *,
        all_words: bool = True,
    ) -> dict[int, str]:
        """The ranks that an error now has to name, and what is known of each, by the rule at the top of this file; {}
        if no rank is lost. Takes the messages off the connections. After this rank's own farewell: those that it named.

        late: ranks that this one waits for; one of these is lost even if it closed its world in good order. gone:
        ranks that are known to have hung up. all_words: read what all ranks have sent, because a call has failed;
        else only what ranks sent that are gone.
        """
        if self.closed:
            return self._named
        words = self._words
        for peer, connection in self.connections.items():
            if peer not in words and (all_words or self._state(connection)):
                self._hear(connection)
        lost = dict(gone) | self.lost(but=words)
        for peer in lost.keys() - words.keys():  # some may have hung up since
            self._hear(self.connections[peer])
        lost = {r: text for r, text in lost.items() if r not in words and (r in late or not self.left(r))}
        accused, accusers, by_themselves = dict[int, str](), dict[int, str](), dict[int, str]()
        for peer, farewell in words.items():
            why, blamed = self._accusation(farewell)
            blamed.pop(peer, None)
            (accusers if blamed else by_themselves)[peer] = f"({self.connections[peer].who}) gave up: {why}"
            accused |= blamed
        accused.pop(self.rank, None)
        return (
            {r: text for r, text in lost.items() if _CLOSED not in text}
            or {r: text for r, text in accused.items() if r not in accusers} | by_themselves
            or lost
            or accused
            or accusers
        )

    def first_calls(self) -> dict[int, str]:
        """The ranks that wait for this one to compare the first call of an operator, and that call."""
        for peer, connection in self.connections.items():
            if peer not in self._early and peer not in self._words and not self.closed:
                with contextlib.suppress(LostConnection, PktError):  # the next call with this rank finds that, too
                    self._note(peer, connection.read())
        texts = {peer: _said(frame) for peer, frame in self._early.items()}
        return {peer: call_text(what, value) for peer, (what, value) in texts.items() if what.startswith(FIRST_CALL)}

    def _note(self, peer: int, frame: Frame | None) -> None:
        """Keep a frame that no call of this rank has asked for yet."""
        if frame is not None and frame.sequence == _GIVES_UP:
            close_fds(frame.fds)
            self._words[peer] = frame.value
        elif frame is not None:
            self._early[peer] = frame

    def close(self) -> None:
        """Close all connections; idempotent. To the others this rank has left."""
        self.closed = True
        for connection in self.connections.values():
            connection.close()
        for frame in self._early.values():
            close_fds(frame.fds)
        self._early.clear()

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
        for connection in [connection for peer, connection in meeting.items() if peer in self._early]:
            self._take(connection, frames, what)
        over, asked = False, False
        while len(frames) < len(ends) or any(c.unsent for c in ends.values()):
            left = deadline - time.monotonic()
            if over and not asked and self._may_hear(meeting, frames):
                deadline, over, asked = time.monotonic() + _ASK, False, True
                continue
            if over:
                raise self._late(meeting, frames, what)
            over = left <= 0  # once more: a busy machine may have kept this rank from what has come in time
            for fileno, event in poller.poll(max(0.0, min(left, 1.0)) * 1e3):
                connection = ends[fileno]
                if connection.peer in frames and event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR):
                    # It sent its frame and left. If it has the frames of all others, then they come here, too.
                    poller.unregister(connection)
                    connection.discard()
                    self._hear(connection)
                    if connection.peer in self._words and not self._has_all_frames(connection.peer):
                        raise PeerLost.exited(self.rank, self.causes(), what)
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
        frame = self._early.pop(connection.peer, None) or connection.read()
        if frame is None:
            return
        frames[connection.peer] = frame
        if frame.sequence == _GIVES_UP:
            self._words[connection.peer] = frame.value
            raise PeerLost.exited(self.rank, self.causes(), what)
        who = f"a message of rank {connection.peer}"
        sequence = self.sequences[connection.peer]
        if frame.sequence != sequence:
            found, wanted = f"call number {frame.sequence}", f"call number {sequence}"
            raise TransportError.refused(self.rank, who, found, wanted)
        if not _said(frame)[0]:
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
        """The error for a peer that this rank waits for, and that hung up. Others may have too."""
        peer = connection.peer
        return PeerLost.exited(self.rank, self.causes([peer], gone={peer: self._end_of(connection)}), what)

    def _accusation(self, farewell: Any) -> tuple[str, dict[int, str]]:
        """The reason in a farewell, and the ranks that it names. Nothing in it is trusted to have its form."""
        lost, why = (farewell.get("lost"), farewell.get("why")) if isinstance(farewell, dict) else (None, None)
        ranks = {str(rank): rank for rank in range(self.size)}
        said = lost.items() if isinstance(lost, dict) else ()
        return str(why)[:_WHY], {ranks[rank]: str(text)[:_WHY] for rank, text in said if rank in ranks}

    def _has_all_frames(self, peer: int) -> bool:
        """Whether `peer` gave up after the call for which it sent its last frame, by its farewell."""
        farewell = self._words[peer]
        return isinstance(farewell, dict) and farewell.get("after") is True

    def _hear(self, connection: Connection) -> None:
        """Read on, and keep the farewell if the peer sent one."""
        if (farewell := self._last_words(connection)) is not None:
            self._words[connection.peer] = farewell

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

    def _may_hear(self, meeting: Mapping[int, Connection], frames: Mapping[int, Frame]) -> bool:
        """Whether several ranks are late for no known reason: some may wait for another in a call before this one, and
        meet their deadlines now."""
        late = self._missing(meeting, frames)
        return len(late) > 1 and not self.causes(late, all_words=False)

    def _missing(self, meeting: Mapping[int, Connection], frames: Mapping[int, Frame]) -> list[int]:
        return [peer for peer, connection in meeting.items() if peer not in frames or connection.unsent]

    def _late(self, meeting: Mapping[int, Connection], frames: Mapping[int, Frame], what: str) -> PktError:
        late = self._missing(meeting, frames)
        if causes := self.causes(late):
            return PeerLost.exited(self.rank, causes, what)
        return WaitTimeout.rendezvous(self.rank, what, self.timeout, late)

    def _fail(self, error: PktError) -> PktError:
        """Send a farewell, close, and return the error to be raised."""
        self.give_up(str(error), ranks_named(error))
        return error

    def give_up(self, why: str, lost: Mapping[int, str] | None = None) -> None:
        """Send the others a farewell with the reason, and close. Idempotent."""
        if self.closed:
            return
        self._named = dict(lost or {})
        ranks = {str(rank): text for rank, text in self._named.items()}
        self._say(pack(_GIVES_UP, {"lost": ranks, "why": why[:_WHY], "after": not self._in_call}), 0.0)
        self.close()

    def leave(self) -> None:
        """Send the others a goodbye: this rank closes its world, and close() follows."""
        self._say(GOODBYE, 1.0)

    def left(self, rank: int) -> bool:
        """Whether `rank`, which has hung up, closed its world in good order."""
        if self.journal is not None:
            return self.journal.left(rank)
        connection = self.connections[rank]
        return bool(connection.host) and connection.left()

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
