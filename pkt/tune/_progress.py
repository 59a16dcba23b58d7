"""How far a search is, for a person at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str, total: int, shown: bool) -> Iterator[Callable[[float | None], None]]:
    """Yields a function to call after each of `total` measurements with the best time so far, in seconds. Shows a bar
    on stderr if `shown` and stderr is a terminal."""
    if not (shown and sys.stderr.isatty()):
        yield lambda best: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[best]}"))
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(f"tuning {what}", total=total, best="")
        yield lambda best: bar.update(task, advance=1, best="" if best is None else f"best {1e6 * best:,.1f} µs")
