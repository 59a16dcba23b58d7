"""The site where a program stands: the user's line, and the function of pkt.language that the line calls."""

from __future__ import annotations

import dis
import functools
import os
import sys
from types import CodeType
from typing import Any

import numpy as np
import torch
import triton

from pkt.simulate.faults import Site

_HERE = os.path.dirname(os.path.abspath(__file__))
_LANGUAGE = os.path.join(os.path.dirname(_HERE), "language")
_RUNTIME = os.path.join(os.path.dirname(_HERE), "runtime")
_STANDARD, *_OTHERS = (os.path.dirname(os.path.abspath(str(module.__file__))) for module in (os, np, torch, triton))
_BELOW = (_HERE, _RUNTIME, *_OTHERS)
_INSTALLED = "site-packages", "dist-packages"  # folders of the standard library that are not part of it
_MACHINERY, _PKT, _USER = range(3)  # most frames are machinery's, whose kind is false
_LIBRARIES = ("pkt.", "triton.", "torch.")  # their modules' names begin so


class _Kinds(dict[str, int]):
    """The kind of each file whose code has run: a look-up for each frame, so not a function."""

    def __missing__(self, file: str) -> int:
        path = os.path.abspath(file)
        standard = path.startswith(_STANDARD) and not any(folder in path for folder in _INSTALLED)
        machinery = standard or path.startswith(_BELOW)
        self[file] = kind = _PKT if path.startswith(_LANGUAGE) else _MACHINERY if machinery else _USER
        return kind


_kinds = _Kinds()
_MOST = 4096  # sites that are remembered
_known: dict[tuple[int, int, str], tuple[CodeType, Site]] = {}


def site(frame: Any = None) -> Site:
    """The site of the program that runs now, or that of the innermost frame of user code from `frame` outwards. Its
    call is the outermost function of pkt.language inside that frame. Called by pkt.simulate."""
    frame, call = frame or sys._getframe(2), ""
    while frame is not None:
        code = frame.f_code
        if kind := _kinds[code.co_filename]:
            if kind == _USER:
                # By id and instruction: a code object hashes all its code, and Python counts lines from the first one.
                place = id(code), frame.f_lasti, call
                known = _known.get(place)
                if known is None:
                    if len(_known) >= _MOST:
                        _known.clear()
                    known = _known[place] = code, Site(code.co_filename, frame.f_lineno, call)
                return known[1]
            call = code.co_name
        frame = frame.f_back
    return Site("?", 0, call)


def of_task(trace: Any, switch: Any) -> Any:
    """The part of a traceback that is a task's own; None where no task raised. switch: the code that runs a task, down
    to which the frames of all errors are the same."""
    while trace is not None and trace.tb_frame.f_code is not switch:
        trace = trace.tb_next
    while trace is not None and _kinds[trace.tb_frame.f_code.co_filename] == _MACHINERY:
        trace = trace.tb_next
    return trace


def in_user_code() -> bool:
    """Whether user code called the function that asks."""
    return _kinds[sys._getframe(2).f_code.co_filename] == _USER


def _of_library(frame: Any) -> bool:
    """Whether the frame's code is of pkt, torch or triton."""
    return frame.f_globals.get("__name__", "").startswith(_LIBRARIES)


def in_host_code() -> bool:
    """Whether a function of pkt, whose hook asks, was called by code outside of pkt, torch and triton."""
    return not _of_library(sys._getframe(3))


def unused() -> bool:
    """Whether the program drops the result of the primitive that it calls now: the call is a statement of its own."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if _kinds[frame.f_code.co_filename] != _MACHINERY:
            following = _following(frame.f_code, frame.f_lasti)
            if following != "RETURN_VALUE":
                return following == "POP_TOP"
        frame = frame.f_back
    return False


@functools.cache
def _following(code: Any, at: int) -> str:
    """The name of the instruction after the one at offset `at`."""
    return next((i.opname for i in dis.get_instructions(code) if i.offset > at), "")


def site_of(task: Any) -> Site:
    """The site of a task that is not running."""
    frame = task.greenlet.gr_frame
    return Site("?", 0, "") if frame is None else site(frame)


def user_frame(frame: Any) -> Any:
    """The innermost frame of user code from `frame` outwards; None without one."""
    while frame is not None and _kinds[frame.f_code.co_filename] != _USER:
        frame = frame.f_back
    return frame


def host_state(frame: Any) -> tuple:
    """The lines that host code is at, innermost frame `frame`, and the plain values and lengths of its variables: a
    loop that ends by itself changes one of them."""
    found: list[Any] = []
    while frame is not None:
        if not _of_library(frame):
            found += frame.f_code, frame.f_lineno
            for value in frame.f_locals.values():
                if isinstance(value, (bool, int, float, str)):
                    found.append(value)
                elif isinstance(value, (list, tuple, dict, set)):
                    found.append(len(value))
        frame = frame.f_back
    return tuple(found)


def host_call(frame: Any, launched: str = "") -> tuple[str, Site | None]:
    """The call of pkt that host code is in, innermost frame `frame`, and its line, as "ones()" and train.py:12. The
    line is None where the user's function has ended. launched: the kernel whose launch that is."""
    call = "host code"
    while frame is not None and (_of_library(frame) or _kinds[frame.f_code.co_filename] == _MACHINERY):
        if _of_library(frame):
            call = f"{frame.f_code.co_name}()"
        frame = frame.f_back
    call = "a torch function" if call == "__torch_function__()" else call
    call = f"the launch of {launched}" if launched else call
    return call, None if frame is None else Site(frame.f_code.co_filename, frame.f_lineno, call)
