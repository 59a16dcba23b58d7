"""The line of the user's code that made a call, and the variable that takes the result."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import threading
from itertools import islice
from types import CodeType
from typing import NamedTuple

_RUNTIME = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STATEMENT_LINES = 12  # the longest statement that is read for a name


class CallSite(NamedTuple):
    """`text` is "train.py:12"; `assigned` the variable that takes the call's result, or ""."""

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
    return CallSite(f"{os.path.basename(code.co_filename)}:{line}", _assigned(code.co_filename, line, column, call))


def _assigned(path: str, line: int, column: int | None, call: str) -> str:
    """The target of the assignment that starts at `line`, if the call at `column` is its value or an element of it."""
    first = linecache.getline(path, line)
    indent = len(first) - len(first.lstrip())
    source = ""
    for extra in range(_STATEMENT_LINES):
        source += linecache.getline(path, line + extra)[indent if extra == 0 else 0 :]
        try:
            (statement,) = _parsed(source)
        except (SyntaxError, ValueError):  # not the whole statement yet, or not the start of one
            continue
        break
    else:
        return ""
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        pairs: list[tuple[ast.expr, ast.expr]] = [(statement.target, statement.value)]
    elif isinstance(statement, ast.Assign):
        pairs = [(target, statement.value) for target in statement.targets]
    else:
        return ""
    for target, value in pairs:
        couples = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            couples = list(zip(target.elts, value.elts, strict=True))
        calls = [(t, v) for t, v in couples if isinstance(v, ast.Call) and _name(v.func) == call]
        here = [t for t, v in calls if column is None or v.lineno > 1 or v.col_offset + indent == column]
        if len(here) == 1:
            return _name(here[0])
    return ""


def _parsed(source: str) -> list[ast.stmt]:
    """The statements of `source`. ast.parse may raise SystemError if two threads are in it (gh-106905). So one thread
    at a time calls it here, and tries again after such an error, which a thread elsewhere caused."""
    with _parsing:
        try:
            return ast.parse(source).body
        except SystemError:
            return ast.parse(source).body


_parsing = threading.Lock()


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
