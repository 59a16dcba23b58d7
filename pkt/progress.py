"""Progress bars with the time left, for work that takes more than two seconds: on a terminal and in a notebook.

A bar is on standard error, and disappears at the end. In a file, a pipe or a CI job there is none. A process that
pkt.launch has started has no terminal: it prints a line every few seconds, if its caller has one.
Imports nothing of pkt.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
REFRESH = 0.2  # seconds between two pictures of a bar or line
PATIENCE = 2.0  # seconds of work before a line of text is shown
LINES = 5.0  # seconds between two lines of a worker
OF_WORKERS = "PKT_PROGRESS"
"""Environment variable of the workers' processes: 1 where their caller has a terminal or is a notebook."""
_Update = Callable[["int | None", str], None]
Advance = Callable[[str], None]
"""Called after each step, with a few words for the end of the bar."""


@contextmanager
def bar(what: str, total: int | None, shown: bool | None = None) -> Iterator[Advance]:
    """Show a bar of `total` steps while the `with` lasts. shown: None: on a terminal and in a notebook."""
    with _drawn(what, total, shown) as task:
        yield lambda said: task and task(None, said)


def steps(items: Iterable[T], what: str, shown: bool | None = None, total: int | None = None) -> Iterator[T]:
    """The items, with a bar whose step is an item. total: how many, where they have no length."""
    with bar(what, len(items) if isinstance(items, Sized) else total, shown) as advance:
        for item in items:
            yield item
            advance("")


@contextmanager
def following(what: str, total: int, done: Callable[[], int], shown: bool | None = None) -> Iterator[None]:
    """Show a bar while the `with` lasts, for steps that other processes take. done: how many; asked once a second, in
    a thread."""
    with _drawn(what, total, shown) as task:
        if task is None:
            yield
            return
        ended = threading.Event()

        def follow() -> None:
            while not ended.wait(1.0):
                task(done(), "")

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@contextmanager
def _drawn(what: str, total: int | None, shown: bool | None) -> Iterator[_Update | None]:
    """A function that sets how many steps are done, or adds one where that is None; None without a bar."""
    notebook, worker = "ipykernel" in sys.modules, os.environ.get(OF_WORKERS) == "1"
    if shown is None:
        shown = watched() or worker
    if not shown:
        yield None
    elif notebook:
        with _as_text(what, total, REFRESH, _output()) as update:
            yield update
    elif worker:
        with _as_text(what, total, LINES, _line) as update:
            yield update
    else:
        with _on_a_terminal(what, total) as update:
            yield update


def watched() -> bool:
    """Whether somebody sees what this process says now: on a terminal or in a notebook."""
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())  # None: a daemon closed it


@contextmanager
def _on_a_terminal(what: str, total: int | None) -> Iterator[_Update]:
    from rich.console import Console  # imported here: rich takes longer to import than pkt
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    # What is printed meanwhile must go where it went before, as to the file of `command > file`.
    redirected = sys.stdout is not None and sys.stdout.isatty()
    console = Console(stderr=True)
    # Without a thread that refreshes the bar, which would keep pkt.simulate from forking.
    quiet: dict[str, Any] = {"console": console, "transient": True, "auto_refresh": False}
    with Progress(*columns, redirect_stdout=redirected, **quiet) as progress:
        task, drawn = progress.add_task(what, total=total, said=""), 0.0

        def update(completed: int | None, said: str) -> None:
            nonlocal drawn
            if completed is None:
                progress.update(task, advance=1, said=said)
            else:
                progress.update(task, completed=completed, said=said)
            if time.monotonic() > drawn + REFRESH:
                progress.refresh()
                drawn = time.monotonic()

        try:
            yield update
        finally:
            progress.refresh()


@contextmanager
def _as_text(what: str, total: int | None, every: float, show: Callable[[str], None]) -> Iterator[_Update]:
    """A line of text, shown from two seconds on, and at the end an empty one."""
    begin, shown_at, done = time.monotonic(), 0.0, 0

    def update(completed: int | None, said: str) -> None:
        nonlocal done, shown_at
        done = done + 1 if completed is None else completed
        now = time.monotonic()
        if now < begin + PATIENCE or (shown_at and now < shown_at + every):
            return
        shown_at = now
        left = f"{(total - done) * (now - begin) / done:.0f} s left" if done and total else ""
        show(f"{what} {done}/{total}  {said}  {left}")

    try:
        yield update
    finally:
        if shown_at:
            show("")


def _output() -> Callable[[str], None]:
    """Shows a text in a notebook's cell, in place of the one before. rich's bar would need ipywidgets, and leave an
    empty output behind."""
    from IPython.display import display

    handle: Any = None

    def show(text: str) -> None:
        nonlocal handle
        if handle is None:
            handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            handle.update({"text/plain": text}, raw=True)

    return show


def _line(text: str) -> None:
    """Shows a text through the process that started this one, which prints it behind the number of the rank."""
    if text:
        print(text, file=sys.stderr, flush=True)
