"""JSON text that another process wrote; refused where it is nested so deep that Python's parser would fail."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 256  # lists and objects around a value; json's own limit is the interpreter's stack
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)  # or its begin, so that no text takes long
_NO_BRACKET = re.compile(r"[^\[\]{}]+")


def parsed(text: str) -> Any:
    """The value of JSON text that another process wrote. Raises ValueError if it is not JSON, or too deep."""
    check_depth(text)
    try:
        return json.loads(text)
    except RecursionError:  # this call is itself made from deep in the stack
        raise ValueError("lists or objects nested deeper than the stack that is left") from None


def check_depth(text: str) -> None:
    """Raise ValueError if more than MAX_DEPTH lists and objects are around a value of JSON text."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return  # almost every frame
    depth = 0
    for bracket in _NO_BRACKET.sub("", _STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > MAX_DEPTH:
            raise ValueError(f"lists or objects nested deeper than {MAX_DEPTH}")
