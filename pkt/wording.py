"""The wording of facts in messages and tables: sizes, dtypes, programs, ranks, waits, accesses.

Imports nothing of pkt, and nothing that takes long to import.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HOST = "host code"
COMPARISON = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "eq": "==", "ne": "!="}
COMPARISON["flip"] = "the barrier round after"
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
SHORT |= {"float8_e4m3fn": "fp8e4m3", "float8_e5m2": "fp8e5m2"}


FIRST_CALL = "the first call of an operator with such arguments"
"""What ranks name the exchange in which they compare such calls, whose texts are the values."""

TUNING = "tuning "
"""Begins the name of a step of a search. The value of such a step is that of `Votes.step`."""


def call_text(what: str, value: Any) -> str:
    """The collective call `what` for messages: of an operator's first call, where `value` says it, the call itself; of
    a step of a search with this rank's error, if it had one."""
    if what.startswith(TUNING) and isinstance(value, list) and len(value) == 3 and value[1]:
        return f"{what} after {value[1]}"
    return f"{value}{what.removeprefix(FIRST_CALL)}" if what.startswith(FIRST_CALL) and value else what


def size_text(nbytes: int, down: bool = False) -> str:
    """`536870912` -> `512 MiB`; exact below 1 KiB, otherwise at most one decimal, rounded down where asked for."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{int(value * 10) / 10 if down else value:.1f}".removesuffix(".0") + f" {unit}"


# Notebooks give <pre> a proportional font, and a height of lines that cuts the frames of tables.
_COLUMNS = "font-family: monospace; line-height: normal; white-space: pre; overflow-x: auto"


def value_text(value: Any, most: int = 40) -> str:
    """The first `most` letters of what a value prints, on one line: a tensor and an array print several."""
    return " ".join(repr(value).split())[:most]


def found_text(value: Any) -> str:
    """`float 2.5`: a value of a wrong type, in an error."""
    return f"{type(value).__name__} {value_text(value)}"


def html_text(text: str) -> str:
    """Plain text as a notebook shows it: escaped, with its columns aligned."""
    import html  # here, because only notebooks need it

    return f'<pre style="{_COLUMNS}">{html.escape(text)}</pre>'


def columns(most: int) -> int:
    """The width of what is printed: that of the terminal, `most` at most; `most` in a file, a pipe and a notebook."""
    terminal = sys.stdout is not None and sys.stdout.isatty()  # None: a daemon closed it
    return min(most, shutil.get_terminal_size().columns) if terminal else most


class _Text(io.StringIO):
    """Rich draws lines in ASCII where standard output, to which the text may go, has no others."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(sys.stdout, "encoding", None) or "utf-8"


def rendered(shown: Any, width: int = 110) -> str:
    """A table of rich, or a group of them, as plain text of at most `width` columns."""
    from rich.console import Console  # here: rich takes longer to import than pkt

    out = _Text()
    Console(width=columns(width), file=out, color_system=None, force_jupyter=False).print(shown)
    return out.getvalue().rstrip()


def count_text(n: Any, noun: str) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{n} {noun}" if str(n) == "1" else f"{n} {noun}s"


def dtype_text(dtype: Any) -> str:
    """`torch.bfloat16` -> `bf16`."""
    name = str(dtype).removeprefix("torch.")
    return SHORT.get(name, name)


def file_text(path: str) -> str:
    """A file of source as messages name it: `train.py`; `In[3]` for the third cell of a notebook."""
    return _cell(path) or os.path.basename(path)


def ipython_shell() -> Any:
    """IPython's shell where this process has one, else None."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def _cell(path: str) -> str:
    """`In[3]` where the file is the third cell of this notebook, else ""."""
    shell = ipython_shell()
    cell = shell.compile.format_code_name(path) if shell is not None else None
    return cell[1] if cell is not None and cell[0] == "Cell" else ""


def traceback_text(text: str) -> str:
    """A traceback whose files are named by their paths, or `In[3]` for the third cell of this notebook."""
    return re.sub('(?<=^  File ")[^"]+', lambda path: _cell(path[0]) or path[0], text, flags=re.MULTILINE)


def program_text(program: int | Sequence[int]) -> str:
    """A program index without trailing zeros: `(3, 0, 0)` -> `3`, `(3, 1, 0)` -> `(3, 1)`."""
    if isinstance(program, int):
        return str(program)
    index = list(program)
    while len(index) > 1 and index[-1] == 0:
        index.pop()
    return str(index[0]) if len(index) == 1 else str(tuple(index))


def ranks_text(values: Mapping[int, str]) -> str:
    """`ranks 0, 2: a; rank 1: b`: ranks with the same text are named together."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}" for text, ranks in groups.items()
    )


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A plain text table with aligned columns. It needs no library, so it works in a dying process too."""
    cells = [[str(c) for c in row] for row in (head, *rows)]
    width = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return "\n".join("  " + "  ".join(c.ljust(w) for c, w in zip(row, width, strict=True)).rstrip() for row in cells)


@dataclass(frozen=True)
class Waiting:
    """One waiting program: the counter, the value it waits for, and the value it found."""

    rank: int
    program: int | tuple[int, ...]
    kernel: str
    counter: str  # "flags[7]"
    wanted: int
    found: int
    compare: str = "ge"
    site: str = ""  # file:line of the wait, in the user's kernel
    launch: int | None = None
    owner: int | None = None  # the rank whose memory holds the counter, if not the waiting rank

    @property
    def condition(self) -> str:
        return f"{COMPARISON[self.compare]} {self.wanted}"

    @property
    def waiter(self) -> str:
        return HOST if self.kernel == HOST else f"{self.kernel} program {program_text(self.program)}"

    def text(self, after: float | None = None) -> str:
        where = self.counter if self.owner in (None, self.rank) else f"{self.counter} of rank {self.owner}"
        line = f"rank {self.rank}: {self.waiter} waits on {where}"
        line += f" at {self.site}" if self.site else ""
        line += f" after {after:.1f} s" if after is not None else ""
        line += f": wanted {self.condition}, found {self.found}"
        return line + (f", launch {self.launch}" if self.launch is not None else "")


def waiting_table(waits: Sequence[Waiting], limit: int = 32) -> str:
    """A table of waiting programs, one per line; at most `limit` lines, then the number left out."""
    rows = []
    for w in waits[:limit]:
        counter = w.counter if w.owner in (None, w.rank) else f"{w.counter} @{w.owner}"
        launch = "" if w.launch is None else w.launch
        program = "" if w.kernel == HOST else program_text(w.program)
        rows.append((w.rank, w.kernel, program, counter, w.condition, w.found, launch, w.site))
    text = table(("rank", "kernel", "program", "waits on", "wanted", "found", "launch", "at"), rows)
    return text + (f"\n  ... and {len(waits) - limit} more" if len(waits) > limit else "")


@dataclass(frozen=True)
class Access:
    """One access of a program to a rank's memory, for the checkers. kernel: "host code" where no program makes it."""

    rank: int
    program: int | tuple[int, ...]
    kernel: str
    kind: str  # "load", "store", "atomic", ...
    tensor: str  # "rank 1's x[17]"
    site: str = ""

    def text(self) -> str:
        by = f"rank {self.rank} {self.kernel}"
        by += f" program {program_text(self.program)}" if self.kernel != HOST else ""
        return f"{self.kind} of {self.tensor} by {by}" + (f" at {self.site}" if self.site else "")
