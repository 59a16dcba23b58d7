"""The site where a program stands: the user's line, and the function of pkt.language that the line calls."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import triton

from pkt.simulate.faults import Site

_HERE = os.path.dirname(os.path.abspath(__file__))
_LANGUAGE = os.path.join(os.path.dirname(_HERE), "language")
_TRITON = os.path.dirname(os.path.abspath(triton.__file__))
_USER, _PKT, _MACHINERY = range(3)


@functools.cache
def _kind(file: str) -> int:
    path = os.path.abspath(file)
    return _PKT if path.startswith(_LANGUAGE) else _MACHINERY if path.startswith((_HERE, _TRITON)) else _USER


def _outward(frame: Any) -> Site:
    """The site of the innermost frame of user code from `frame` outwards. Its call is the outermost function of
    pkt.language inside that frame."""
    call = ""
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if kind == _USER:
            return Site(frame.f_code.co_filename, frame.f_lineno, call)
        if kind == _PKT:
            call = frame.f_code.co_name
        frame = frame.f_back
    return Site("?", 0, call)


def site() -> Site:
    """The site of the program that runs now."""
    return _outward(sys._getframe(1))


def site_of(task: Any) -> Site:
    """The site of a task that is not running."""
    return _outward(task.greenlet.gr_frame)
