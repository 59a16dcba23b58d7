"""Ctrl-C during work that can be cut short and still has a result, as a search has."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

passed_on = False
"""This process is a worker, whose parent gets Ctrl-C."""


class Interrupts:
    """Ctrl-C while it lasts: noted in `asked`, not raised; asked for again, it is raised at once.

    Simulated ranks share a thread, so several may last at a time: the first one takes the signal, the last one gives it
    back. Where somebody else takes care of Ctrl-C (in another thread, with a handler, by ignoring it), nothing is
    changed; a worker of pkt.launch ignores it because its parent gets it, and passes it on if it is minded here.
    """

    _lasting: list[Interrupts] = []
    _before: Any = None

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Interrupts:
        main = threading.current_thread() is threading.main_thread()
        free = signal.SIG_IGN if passed_on else signal.default_int_handler
        if not self._lasting and main and signal.getsignal(signal.SIGINT) is free:
            Interrupts._before = signal.signal(signal.SIGINT, _note)
        self._lasting.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lasting.remove(self)
        if not self._lasting and Interrupts._before is not None:
            signal.signal(signal.SIGINT, Interrupts._before)
            Interrupts._before = None


def _note(number: int, frame: FrameType | None) -> None:
    again = all(one.asked for one in Interrupts._lasting)
    for one in Interrupts._lasting:
        one.asked = True
    if again:
        raise KeyboardInterrupt


def minded(pid: int) -> bool:
    """Whether process `pid` of this host has a handler for Ctrl-C now."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            caught = next(line.split()[1] for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught, 16) >> (signal.SIGINT - 1) & 1)
