"""Votes: a step that may fail on one rank succeeds on all ranks or counts as failed on all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from pkt.errors import DriverError, HeapFull, TransportError
from pkt.runtime.gpu.driver import OUT_OF_MEMORY, Shared
from pkt.runtime.processes.frames import close_fds
from pkt.runtime.processes.transport import Transport
from pkt.wording import ranks_text

T = TypeVar("T")


class Votes:
    """This rank's side of the votes. device: what messages call its GPU ("cuda:3")."""

    def __init__(self, transport: Transport, device: str) -> None:
        self.transport, self._device = transport, device

    def attempt(self, step: Callable[[], Any]) -> dict[str, Any]:
        """`{"value": step()}`, or how the step failed, as JSON values that the other ranks can be sent."""
        try:
            return {"value": step()}
        except DriverError as error:
            return {"error": str(error), "code": error.code}

    def on_all(self, step: Callable[[], T], what: str, nbytes: int = 0) -> T:
        """Collective: `step()`, where it worked on every rank; otherwise the same error on every rank, see `check`."""
        mine = self.attempt(step)
        self.check(self._exchange(mine, what), what, nbytes)
        return mine["value"]

    def check(self, votes: list[dict[str, Any]], what: str, nbytes: int = 0) -> None:
        """Raise DriverError if a rank's vote says that it failed: HeapFull if all of those had no memory for
        `nbytes`."""
        failed = {r: vote for r, vote in enumerate(votes) if "error" in vote}
        if not failed:
            return
        texts = {r: vote["error"] for r, vote in failed.items()}
        if nbytes and all(vote["code"] == OUT_OF_MEMORY for vote in failed.values()):
            raise HeapFull.no_memory(nbytes, self._device, texts)
        raise DriverError.on_ranks(what, texts, next(iter(failed.values()))["code"])

    def worked(self, step: Callable[[], Any], what: str) -> bool:
        """Collective: whether `step()` worked on every rank, see `agreed`."""
        return self.agreed(self._exchange(self.attempt(step), what), what)

    def agreed(self, votes: list[dict[str, Any]], what: str) -> bool:
        """Whether no rank failed. If one did, rank 0 warns once that the world goes on without multicast."""
        failed = {r: vote["error"] for r, vote in enumerate(votes) if "error" in vote}
        if failed and self.transport.rank == 0:
            text = f"{what} failed on {ranks_text(failed)}; going on without multicast"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return not failed

    def share(
        self, mine: dict[str, Any], sent: list[Shared], what: str
    ) -> tuple[list[dict[str, Any]], dict[int, list[Shared]]]:
        """Collective: every rank's vote, and the exports that each peer sent, which the caller has to `close_shared`.

        Sends `sent` to every other rank, descriptors beside the frame and the bytes of fabric handles in it, and closes
        it: an open descriptor keeps the memory."""
        fds = [shared for shared in sent if isinstance(shared, int)]
        texts = [shared.hex() for shared in sent if isinstance(shared, bytes)]
        vote = {k: v for k, v in mine.items() if k != "value"} | {"handles": texts}
        try:
            said, received = self.transport.exchange_fds(vote, dict.fromkeys(self.transport.connections, fds), what)
        finally:
            close_fds(fds)
        try:
            return said, {
                peer: [*some, *(bytes.fromhex(text) for text in said[peer]["handles"])]
                for peer, some in received.items()
            }
        except (TypeError, KeyError, ValueError) as error:
            close_shared(received)
            wanted = "an object with the hexadecimal handles"
            raise TransportError.refused(self.transport.rank, f"{what}: a vote", str(error), wanted) from error

    def _exchange(self, mine: dict[str, Any], what: str) -> list[dict[str, Any]]:
        return self.transport.exchange({k: v for k, v in mine.items() if k != "value"}, what)


def close_shared(received: Mapping[int, Iterable[Shared]]) -> None:
    """Close the file descriptors among the exports of the peers."""
    close_fds([shared for some in received.values() for shared in some if isinstance(shared, int)])
