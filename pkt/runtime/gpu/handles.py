"""Exported memory on its way to other ranks: descriptors go beside a frame, the bytes of fabric handles in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pkt.runtime.gpu.driver import Shared
from pkt.runtime.processes.frames import close_fds
from pkt.runtime.processes.transport import Transport


def exchange(
    transport: Transport, vote: dict[str, Any], mine: list[Shared], what: str
) -> tuple[list[dict[str, Any]], dict[int, list[Shared]]]:
    """Collective: send `mine` to every other rank. Returns every rank's `vote`, and each peer's exports, which the
    caller has to `close`."""
    fds = [shared for shared in mine if isinstance(shared, int)]
    texts = [shared.hex() for shared in mine if isinstance(shared, bytes)]
    said, received = transport.exchange_fds(vote | {"handles": texts}, dict.fromkeys(transport.connections, fds), what)
    return said, {
        peer: [*some, *(bytes.fromhex(text) for text in said[peer]["handles"])] for peer, some in received.items()
    }


def close(shared: Iterable[Shared]) -> None:
    """Close the file descriptors among `shared`."""
    close_fds([some for some in shared if isinstance(some, int)])
