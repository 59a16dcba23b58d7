"""The line of the user's code that made a call, and the variable that takes the result."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
import threading
from itertools import islice
from types import CodeType
from typing import NamedTuple

from pkt.wording import file_text

_RUNTIME = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class CallSite(NamedTuple):
    """`text` is "train.py:12", or "In[3]:12" in a notebook; `assigned` the variable that takes the result, or ""."""

    text: str
    assigned: str


_MOST = 4096  # call sites that are remembered
_known: dict[tuple[int, int, str], tuple[CodeType, CallSite]] = {}


def call_site(call: str) -> CallSite:
    """The innermost line outside pkt.runtime that led here; `call` ("empty") is what was called there."""
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None and frame.f_code.co_filename.startswith(_RUNTIME):
        frame = caller
    code, lasti = frame.f_code, frame.f_lasti
    # By id, because hashing a code object reads all of its code. The entry keeps the object, so its id stays its own.
    place = (id(code), lasti, call)
    found = _known.get(place)
    if found is None:
        if len(_known) >= _MOST:
            _known.clear()
        found = _known[place] = code, _at(code, lasti, frame.f_lineno, call)
    return found[1]


def _at(code: CodeType, lasti: int, line: int, call: str) -> CallSite:
    column: int | None = None
    if sys.version_info >= (3, 11):  # the column tells two calls on one line apart
        column = next(islice(code.co_positions(), lasti // 2, None))[2]
    source = "".join(linecache.getlines(code.co_filename))
    try:
        calls = [found for found in _assignments(source) if found[0] == line and found[2] == call]
    except (SyntaxError, ValueError):  # no Python: the text of a shell, or a file that has changed
        calls = []
    names = [name for _, at, _, name in calls if len(calls) == 1 or at == column]
    return CallSite(f"{file_text(code.co_filename)}:{line}", names[0] if len(names) == 1 else "")


@functools.lru_cache(maxsize=32)
def _assignments(source: str) -> list[tuple[int, int, str, str]]:
    """(line, column, function, target) of each call in `source`; target "" where its result is not assigned."""
    nodes = list(ast.walk(_parsed(source)))
    targets: dict[ast.expr, str] = {}
    for node in nodes:
        if isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            pairs: list[tuple[ast.expr, ast.expr]] = [(node.target, node.value)]
        elif isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        else:
            continue
        for target, value in pairs:
            couples = [(target, value)]
            if isinstance(target, _LISTS) and isinstance(value, _LISTS) and len(target.elts) == len(value.elts):
                couples = list(zip(target.elts, value.elts, strict=True))
            for of, one in couples:
                targets.setdefault(one, _name(of))
    return [(n.lineno, n.col_offset, _name(n.func), targets.get(n, "")) for n in nodes if isinstance(n, ast.Call)]


def _parsed(source: str) -> ast.Module:
    """ast.parse may raise SystemError if two threads are in it (gh-106905). So one thread at a time calls it here, and
    tries again after such an error, which a thread elsewhere caused."""
    with _parsing:
        try:
            return ast.parse(source)
        except SystemError:
            return ast.parse(source)


_parsing = threading.Lock()
_LISTS = ast.Tuple, ast.List


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
