"""Messages between pkt.launch and a worker: the number of a launch, a length, and bytes.

The number is random. An answer with another number is refused before anything of it is unpickled.
"""

from __future__ import annotations

import socket
import struct

_HEAD = struct.Struct("!QQ")  # number of the launch, bytes that follow
_PIECE = 1 << 20

Message = tuple[int, bytes]


def send(sock: socket.socket, number: int, data: bytes) -> None:
    """Send one message on a blocking socket."""
    sock.sendall(_HEAD.pack(number, len(data)))
    sock.sendall(data)


def receive(sock: socket.socket) -> Message | None:
    """The next message on a blocking socket; None if the other end is closed."""
    end = Pipe(sock)
    try:
        while (message := end.read()) is None:
            pass
    except ConnectionError:
        return None
    return message


class Pipe:
    """One end of a pipe; it sends and receives as much as `sock` can take or give at once."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.unsent = memoryview(b"")
        self._head, self._data = bytearray(), bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def partial(self) -> bool:
        """Part of a message has arrived."""
        return bool(self._head)

    def queue(self, number: int, data: bytes) -> None:
        """Replace what is left to be sent by one message."""
        self.unsent = memoryview(_HEAD.pack(number, len(data)) + data)

    def write(self) -> None:
        """Send once. Raises ConnectionError if the other end is closed, BlockingIOError if it takes nothing now."""
        self.unsent = self.unsent[self.sock.send(self.unsent[:_PIECE]) :]

    def read(self) -> Message | None:
        """Receive once: a message if it is whole now. Raises ConnectionError at the end of file, BlockingIOError if
        there is nothing now."""
        if len(self._head) < _HEAD.size:
            self._head += self._some(_HEAD.size - len(self._head))
        else:
            self._data += self._some(_HEAD.unpack(self._head)[1] - len(self._data))
        if len(self._head) < _HEAD.size:
            return None
        number, length = _HEAD.unpack(self._head)
        if len(self._data) < length:
            return None
        data = bytes(self._data)
        self._head, self._data = bytearray(), bytearray()
        return number, data

    def _some(self, length: int) -> bytes:
        data = self.sock.recv(min(length, _PIECE))
        if not data:
            raise ConnectionError("end of file")
        return data

    def close(self) -> None:
        self.sock.close()
