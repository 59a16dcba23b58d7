"""One simulation at a time: a run patches `tl` for the whole process, so threads take turns."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pkt.errors import Unsupported

PATIENCE = 30.0  # seconds without work of the running simulation after which it counts as waiting for the caller
_LOOK = 0.5  # seconds between two looks at the running simulation
_WORK = 0.01  # seconds of processor time between two looks that show that it works


class _Turns:
    """The lock of the running simulation, and the processor clock of its thread."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a simulated rank may run a simulation of its own
        self.depth, self.name, self.clock = 0, "", 0

    def worked(self) -> float | None:
        """Seconds of processor time of the running simulation's thread; None if that has just ended."""
        try:
            return time.clock_gettime(self.clock)
        except OSError:
            return None


_turns = _Turns()


def _forked() -> None:
    """In a forked child, only the thread that forked goes on: another one's simulation never ends."""
    global _turns
    if _turns.depth and not _turns.lock.acquire(blocking=False):
        _turns = _Turns()
    elif _turns.depth:
        _turns.lock.release()


os.register_at_fork(after_in_child=_forked)


@contextmanager
def turn(call: str) -> Iterator[None]:
    """Inside the `with`, no other thread simulates. Waits for a simulation of another thread. Raises Unsupported if it
    has done no work for 30 s, because it then most likely waits for this thread."""
    turns = _turns
    idle_since, worked = time.monotonic(), None
    while not turns.lock.acquire(timeout=_LOOK):
        now = turns.worked()
        if worked is None or now is None or now > worked + _WORK:
            idle_since, worked = time.monotonic(), now
        elif time.monotonic() > idle_since + PATIENCE:
            found = f"found a simulation of thread {turns.name!r} that has done nothing for {PATIENCE:g} s"
            raise Unsupported.here(
                call, found, "one simulation runs at a time, so a rank must not wait for another one"
            )
    try:
        turns.depth += 1
        if turns.depth == 1:
            turns.name = threading.current_thread().name
            turns.clock = time.pthread_getcpuclockid(threading.get_ident())
        yield
    finally:
        turns.depth -= 1
        turns.lock.release()
