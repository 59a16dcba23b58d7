"""One connection between two ranks: frames over a Unix stream socket, with file descriptors, without blocking.

A frame is a fixed header (magic, sequence number, length, number of descriptors) and JSON text. Descriptors travel with
a frame's first byte. Both header and text are read with exact lengths, so descriptors that arrive belong to the frame
being read. A frame is bounded: MAX_TEXT bytes, MAX_FDS descriptors, MAX_DEPTH nested lists and objects. A longer or
deeper one, truncated control data and a wrong number of descriptors are refused as they arrive, before the rest is
read. Between hosts the connection is TCP, and no frame has descriptors.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import socket
import struct
import termios
import threading
from typing import Any, NamedTuple

from pkt.errors import TransportError
from pkt.runtime.processes.parsing import MAX_DEPTH, check_depth, parsed

MAGIC = b"PKT1"
HEADER = struct.Struct("!4sQQI")  # magic, sequence, bytes of text, descriptors
MAX_FDS = 8
MAX_TEXT = 1 << 30


def pack(sequence: int, value: Any, fds: int = 0) -> bytes:
    """Header and text of a frame. Raises ValueError if it is too large, or nested too deep, to be read."""
    try:
        text = json.dumps(value)
        check_depth(text)
    except RecursionError:
        raise ValueError(f"lists or objects nested deeper than {MAX_DEPTH}") from None
    data = text.encode()
    if len(data) > MAX_TEXT or fds > MAX_FDS:
        raise ValueError(f"{len(data)} bytes and {fds} descriptors, more than {MAX_TEXT} and {MAX_FDS}")
    return HEADER.pack(MAGIC, sequence, len(data), fds) + data


_LEAVES = (1 << 64) - 1  # sequence number of a goodbye: the last frame of a rank that closes its world
GOODBYE = pack(_LEAVES, None)


class Frame(NamedTuple):
    """A frame that arrived. The receiver has to close its descriptors."""

    sequence: int
    value: Any
    fds: list[int]


class LostConnection(Exception):
    """The other end closed the connection: end of file, or a reset."""


class Connection:
    """One authenticated peer. pid: of the other end as the kernel knows it, 0 if it does not. host: of the other end if
    the connection is TCP."""

    def __init__(self, sock: socket.socket, rank: int, peer: int, pid: int, host: str = "") -> None:
        sock.setblocking(False)
        self.sock, self.rank, self.peer, self.pid = sock, rank, peer, pid
        self.host, self.who = host, f"on host {host}" if host else f"pid {pid}"
        self._left = False
        self._reading = threading.Lock()  # one thread reads, and the watchdog peeks
        self._out: list[tuple[memoryview, list[int]]] = []
        self._begun = False  # part of the first frame in _out has been sent
        self._head, self._text, self._fds = bytearray(), bytearray(), list[int]()
        self._wanted: tuple[int, int, int] | None = None  # sequence, bytes, descriptors of the frame being read

    def fileno(self) -> int:
        return self.sock.fileno()

    # -- out
    def queue(self, frame: bytes, fds: list[int] | None = None) -> None:
        """Send the frame at the next `write`. The caller keeps `fds`, and must keep them open until then."""
        self._out.append((memoryview(frame), list(fds or ())))

    @property
    def unsent(self) -> bool:
        return bool(self._out)

    def write(self) -> None:
        """Send as much as the socket takes."""
        while self._out:
            data, fds = self._out[0]
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self.sock.sendmsg([data], control, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise LostConnection(str(error)) from error
            if sent < len(data):
                self._out[0] = (data[sent:], [])  # descriptors went with the first byte
            else:
                self._out.pop(0)
            self._begun = sent < len(data)

    def discard(self) -> bool:
        """Drop the queued frames. Returns False if part of one was sent: the other end could then read no further."""
        self._out = []
        return not self._begun

    # -- in
    def read(self) -> Frame | None:
        """The next whole frame; None if it has not arrived. A goodbye raises LostConnection, like an end of file."""
        with self._reading:
            frame = self._read()
            if frame is not None and frame.sequence == _LEAVES:
                self._left = True
                close_fds(frame.fds)
                raise LostConnection("closed its world")
            return frame

    def left(self) -> bool:
        """Whether the other end sent a goodbye. Takes nothing off the socket. Only for an end that has hung up, and
        only over TCP, because peeking at a Unix socket ends at the first descriptors."""
        with self._reading, contextlib.suppress(OSError, ValueError):  # another thread may have closed it
            if not self._left:
                waiting = array.array("i", [0])
                fcntl.ioctl(self.sock, termios.FIONREAD, waiting)
                self._left = self.sock.recv(waiting[0], socket.MSG_PEEK | socket.MSG_DONTWAIT).endswith(GOODBYE)
        return self._left

    def _read(self) -> Frame | None:
        if self._wanted is None:
            if not self._take(self._head, HEADER.size):
                return None
            magic, sequence, length, fds = HEADER.unpack(self._head)
            if magic != MAGIC or length > MAX_TEXT or fds > MAX_FDS:
                raise self._refuse(f"header {bytes(self._head).hex()}", "a frame of pkt's")
            self._wanted = (sequence, length, fds)
        sequence, length, fds = self._wanted
        if not self._take(self._text, length):
            return None
        if len(self._fds) != fds:
            raise self._refuse(f"{len(self._fds)} file descriptors", f"the {fds} its header announces")
        try:
            value = parsed(self._text.decode())
        except ValueError as error:
            wanted = f"JSON at most {MAX_DEPTH} deep"
            raise self._refuse(f"text that is not JSON ({str(error)[:200]})", wanted) from None
        frame = Frame(sequence, value, self._fds)
        self._head, self._text, self._fds, self._wanted = bytearray(), bytearray(), [], None
        return frame

    def _take(self, into: bytearray, length: int) -> bool:
        """Read until `into` has `length` bytes, and no further: the next frame stays in the socket."""
        space = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
        while len(into) < length:
            try:
                data, control, flags, _ = self.sock.recvmsg(
                    min(length - len(into), 1 << 20), space, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
                )
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                raise LostConnection(str(error)) from error
            for level, kind, content in control:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    received = array.array("i")
                    received.frombytes(content[: len(content) // received.itemsize * received.itemsize])
                    self._fds.extend(received)
            if flags & socket.MSG_CTRUNC:
                raise self._refuse("truncated control data", f"at most {MAX_FDS} file descriptors")
            announced = self._wanted[2] if self._wanted else MAX_FDS
            if len(self._fds) > announced:  # now, because a long text could bring thousands
                raise self._refuse(f"{len(self._fds)} file descriptors", f"the {announced} its header announces")
            if not data:
                raise LostConnection("end of file")
            into += data
        return True

    def _refuse(self, found: str, wanted: str) -> TransportError:
        self.close()
        return TransportError.refused(self.rank, f"a message of rank {self.peer} ({self.who})", found, wanted)

    def close(self) -> None:
        """Close the socket, and every received descriptor that no frame has handed on."""
        close_fds(self._fds)
        self._fds, self._out = [], []
        self.sock.close()


def close_fds(fds: list[int]) -> None:
    """Close each, even if some are closed already."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
