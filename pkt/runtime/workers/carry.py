"""Functions and kernels as bytes for a worker process, also those of a script's main module or a notebook cell.

cloudpickle carries functions by value if they cannot be imported. A Triton kernel needs more, because Triton reads its
source: the text goes along, is put where `inspect` finds it, and the worker applies triton.jit again. Only used on a
pipe between a process and its own child.
"""

from __future__ import annotations

import importlib
import io
import linecache
import operator
import pickle
import sys
from types import CodeType, FunctionType
from typing import Any

import cloudpickle
import triton
from triton.runtime.jit import JITFunction

_OPTIONS = ("do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline", "launch_metadata", "version")


def _importable(kernel: JITFunction) -> bool:
    """Whether another process can import the kernel, as an attribute of a module."""
    module, name = kernel.fn.__module__, kernel.fn.__qualname__
    if module == "__main__" or "<" in name or not _findable(module):
        return False
    try:
        return imported(module, name) is kernel
    except (ImportError, AttributeError):
        return False


def _findable(module: str) -> bool:
    """Whether another process with this sys.path finds the module: it may be loaded under a name of its own."""
    top = module.partition(".")[0]
    return any(finder.find_spec(top, None) is not None for finder in sys.meta_path)


def imported(module: str, qualname: str) -> Any:
    """An attribute of a module, by their names."""
    return operator.attrgetter(qualname)(importlib.import_module(module))


def _jitted(fn: FunctionType, file: str, lines: list[str], options: dict[str, Any]) -> Any:
    if lines and file not in linecache.cache:
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    return triton.jit(fn, **options)


def _code(file: str, *fields: Any) -> CodeType:
    return CodeType(*fields).replace(co_filename=file)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):  # cloudpickle 3.1.3 drops the file, which tracebacks and Triton need
            return _code, (obj.co_filename, *self.dispatch_table[CodeType](obj)[1])
        if isinstance(obj, JITFunction):
            if _importable(obj):
                return imported, (obj.fn.__module__, obj.fn.__qualname__)
            file = obj.fn.__code__.co_filename
            given = {name: vars(obj).get(name) for name in _OPTIONS}
            options = {name: value for name, value in given.items() if value not in (None, [], ())}
            return _jitted, (obj.fn, file, linecache.getlines(file), options)
        return super().reducer_override(obj)


def dumps(value: Any) -> bytes:
    """`value` as bytes, with all that another process needs to rebuild it."""
    module = getattr(value, "__module__", None)  # values that are no functions have none
    if isinstance(module, str) and module in sys.modules and module != "__main__" and not _findable(module):
        cloudpickle.register_pickle_by_value(sys.modules[module])
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """The value that `dumps` was given."""
    return pickle.loads(data)
