"""What pkt.explain returns: it prints it, and a notebook does not show it a second time in the same cell."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from pkt.wording import columns, ipython_shell, rendered


class Printed:
    """A base for something that rich prints; str() gives the same text."""

    _cell: Any = None  # in which it was printed

    def show(self) -> None:
        """Print it, at most 120 columns wide."""
        object.__setattr__(self, "_cell", _cell())  # subclasses are frozen
        Console(width=columns(120)).print(self)

    def __str__(self) -> str:
        return rendered(self, 120)

    def _ipython_display_(self) -> None:
        """As a cell shows its last value."""
        if self._cell != _cell():
            self.show()


def _cell() -> Any:
    """The number of IPython's cell that runs; None elsewhere."""
    shell = ipython_shell()
    return None if shell is None else shell.execution_count
