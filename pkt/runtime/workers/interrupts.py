"""Ctrl-C during work that still has a result when it is cut short, such as a search."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

passed_on = False
"""Whether this process is a worker, to which its parent passes Ctrl-C on."""


class Interrupts:
    """A context in which a first Ctrl-C sets `asked` and raises nothing. A second one raises KeyboardInterrupt.

    Simulated ranks share a thread, so several of these may be open at a time: the first installs the handler, the last
    removes it. If something else handles Ctrl-C (another handler, or SIG_IGN), or this is not the main thread, nothing
    changes. A worker of pkt.launch ignores Ctrl-C, because its parent gets it and passes it on to workers with this
    handler.
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

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
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
