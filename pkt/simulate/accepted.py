"""The specialisations that Triton's front end has accepted, in Triton's cache, so that no other process asks it again.

A file in TRITON_CACHE_DIR stands for a specialisation. Its name is a hash of everything that the front end reads: the
text of the kernel and of each function that it may call, the values that these see outside themselves, the types and
constants of the arguments, the target, and the versions. Only what was accepted is kept: an error is found anew.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any

import triton
from triton import knobs
from triton.language import core
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITCallable

from pkt.language.world import code_hash
from pkt.simulate.source import captured

_FILE = "accepted_by_front_end"
_NAMES = re.compile(r"[^\W\d]\w*")
_PLAIN = (bool, int, float, str, bytes, type(None), core.dtype)


def key(kernel: Any, arguments: dict[str, Any], *facts: Any) -> str | None:
    """The name of a specialisation. facts: what the front end knows beside the text, by their `repr`. None where Triton
    is told to compile always (TRITON_ALWAYS_COMPILE)."""
    if knobs.compilation.always_compile:
        return None
    lenient = knobs.compilation.allow_non_constexpr_globals
    digest = hashlib.sha256(repr((triton.__version__, sys.version_info[:2], code_hash(), lenient, *facts)).encode())
    for line in _Reader(kernel, arguments).lines:
        digest.update(line.encode() + b"\0")
    return digest.hexdigest()


def known(name: str) -> bool:
    """Whether the front end has accepted the specialisation `name`."""
    with suppress(OSError, RuntimeError):  # no folder, or one that this user may not read: there is no cache
        return get_cache_manager(name).get_file(_FILE) is not None
    return False


def keep(name: str) -> None:
    """Write down that the front end has accepted the specialisation `name`."""
    with suppress(OSError, RuntimeError):  # as above
        get_cache_manager(name).put(b"", _FILE)


class Texts:
    """Function -> a hash of all that the front end reads of it; make a new one after globals may have changed."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def __getitem__(self, function: Any) -> str:
        known = self._known.get(id(function))
        if known is None:
            known = f"{function.fn.__module__}.{function.fn.__qualname__}"
            if not _covered(function.fn):
                known = hashlib.sha256("\0".join(_Reader(function, {}).lines).encode()).hexdigest()
            self._known[id(function)] = known
        return known


class _Reader:
    """Reads a kernel, the functions that it may call, and the values of the names in their texts. A name that stands
    in a comment counts, too: it only makes a specialisation look new."""

    def __init__(self, kernel: Any, arguments: dict[str, Any]) -> None:
        self.lines: list[str] = []
        self._seen: dict[int, Any] = {}
        for function in (kernel, *_functions(arguments.values())):
            self._read("", function, set())

    def _read(self, name: str, value: Any, names: set[str]) -> None:
        value = getattr(value, "__func__", value)  # of a bound method
        if isinstance(value, core.constexpr):
            value = value.value
        if isinstance(value, _PLAIN):
            self.lines.append(f"{name} = {value!r}")
        elif isinstance(value, tuple):
            for part in value:
                self._read(name, part, names)
        elif id(value) not in self._seen and not _covered(value):
            self._seen[id(value)] = value
            if isinstance(value, ModuleType):
                self._all(f"{name}.", vars(value), names)
            elif isinstance(value, JITCallable):
                self.lines.append(f"{name}: {value.src}")
                self._all("", captured(value.fn), {*_NAMES.findall(value.src)})
                self._read(f"{name}=", value.fn.__defaults__ or (), names)
            elif isinstance(value, type):
                self._all(f"{name}.", dict(vars(value)), set(vars(value)))
            elif isinstance(value, FunctionType):
                code = value.__code__
                self.lines.append(f"{name}: {code.co_code.hex()} {code.co_names}")
                self._read(f"{name}=", code.co_consts, names)

    def _all(self, prefix: str, values: dict[str, Any], names: set[str]) -> None:
        for name in sorted(names & values.keys()):
            self._read(prefix + name, values[name], names)


def _functions(values: Iterable[Any]) -> Iterator[JITCallable]:
    """The functions among arguments, in tuples, too. What else matters of an argument is in its type."""
    for value in values:
        value = value.value if isinstance(value, core.constexpr) else value
        if isinstance(value, tuple):
            yield from _functions(value)
        elif isinstance(value, JITCallable):
            yield value


def _covered(value: Any) -> bool:
    """Whether Triton's version, or the hash of pkt's device code, stands for the value."""
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(module, str) and re.match(r"(triton|pkt\.language)(\.|$)", module) is not None
