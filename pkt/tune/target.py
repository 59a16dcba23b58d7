"""A target of the tuner: a Triton kernel, or a Python function that launches kernels; its arguments, key and source."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from triton.runtime.jit import JITFunction, KernelInterface

from pkt.errors import DtypeError, NoCandidate, ShapeError
from pkt.model.config import Config
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World, current_world
from pkt.tune.compiling import compile_all
from pkt.wording import dtype_text

Check = Callable[[Mapping[str, Any], Any], bool]
"""check(arguments by name, returned value) -> whether both are right after a run. A launch returns the kernel."""


def names_of(call: str, name: str, names: Any) -> tuple[str, ...]:
    """The names in argument `name`. Raises DtypeError for one string, whose letters would be names, and for no list."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise DtypeError.argument(call, name, f"{names!r:.80}", 'a list of names, as in ["M", "N"]')
    return tuple(names)


class Target:
    """A kernel or a function, inspected once."""

    def __init__(self, fn: Any, call: str) -> None:
        """Raises ShapeError if `fn` is neither. call: the name of the call in error messages."""
        self.fn, self.call = fn, call
        self.is_kernel = isinstance(fn, KernelInterface)
        inner = fn
        while not inspect.isroutine(inner) and hasattr(inner, "fn"):  # a JITFunction, and decorators around it
            inner = inner.fn
        if not callable(inner):
            raise ShapeError.argument(call, "the first argument", f"{fn!r}", "a @triton.jit kernel or a function")
        self.python: Callable[..., Any] = inner
        self.name: str = getattr(inner, "__name__", type(inner).__name__)
        self.signature = inspect.signature(inner)
        self.parameters = self.signature.parameters
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())

    def check_names(self, name: str, names: Iterable[str]) -> None:
        """Raises ShapeError for a name that is no parameter."""
        for found in names:
            if found not in self.parameters:
                wanted = f"parameters of {self.name}: {', '.join(self.parameters)}"
                raise ShapeError.argument(self.call, name, repr(found), wanted)

    def arguments(self, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, with defaults and without launch options."""
        mine = {name: value for name, value in named.items() if self._takes_any or name in self.parameters}
        bound = self.signature.bind_partial(*args, **mine)
        bound.apply_defaults()
        return dict(bound.arguments)

    def world(self, arguments: Mapping[str, Any]) -> World:
        """The world of a call: an argument, or that of the first symmetric tensor, or the current one."""
        for value in arguments.values():
            if isinstance(value, World):
                return value
        for value in arguments.values():
            if isinstance(value, SymmetricTensor):
                return value.world
        return current_world(self.call)

    def source(self, simulated: bool) -> str:
        """A hash of the source text; for a kernel Triton's, which includes all that the kernel calls."""
        if isinstance(self.fn, JITFunction) and not simulated:  # Triton cannot hash in the simulator
            return self.fn.cache_key
        return _hash_of_text(self.python)


@lru_cache(maxsize=256)
def _hash_of_text(python: Callable[..., Any]) -> str:
    try:
        text = inspect.getsource(python)
    except (OSError, TypeError):  # typed in, or generated
        text = f"{python.__module__}.{getattr(python, '__qualname__', python)}"
        if isinstance(python, FunctionType):
            text += _code_text(python.__code__)
    return hashlib.sha256(text.encode()).hexdigest()


def _code_text(code: CodeType) -> str:
    """What a function without a source does, as text that is the same in every process."""

    def text(value: Any) -> str:
        if isinstance(value, frozenset):  # whose order differs between processes
            return str(sorted(map(repr, value)))
        return _code_text(value) if isinstance(value, CodeType) else repr(value)

    return f" {code.co_code.hex()} {code.co_names} {' '.join(map(text, code.co_consts))}"


def key_of(
    call: str, names: Sequence[str], arguments: Mapping[str, Any], bucket: Mapping[str, Callable[[Any], Any]]
) -> dict[str, Any]:
    """The case: the named arguments, after `bucket`, tensors as (*shape, dtype); and under "dtypes" the dtypes of all
    tensors, in the order of the parameters."""
    for name in names:
        if name not in arguments:
            raise ShapeError.argument(call, f"key {name!r}", "no value", "an argument of the call")
    key = plain_key(call, {name: arguments[name] for name in names}, bucket)
    dtypes = [dtype_text(value.dtype) for value in arguments.values() if isinstance(value, torch.Tensor)]
    return key | ({"dtypes": ", ".join(dtypes)} if dtypes else {})


def plain_key(
    call: str, key: Mapping[str, Any], bucket: Mapping[str, Callable[[Any], Any]] | None = None
) -> dict[str, Any]:
    """A key in the form that is sent and kept, after `bucket`: tensors as (*shape, dtype), dtypes by their short
    names."""
    plain = {name: _plain(call, name, value) for name, value in key.items()}
    for name, whole in (bucket or {}).items():
        if name not in plain:
            raise ShapeError.argument(call, "bucket", repr(name), f"names of the key: {', '.join(plain)}")
        plain[name] = _plain(call, name, whole(plain[name]))
    return plain


def _plain(call: str, name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (*value.shape, dtype_text(value.dtype))
    if isinstance(value, torch.dtype):
        return dtype_text(value)
    if isinstance(value, np.generic):  # as in a Config
        value = value.item()
    if isinstance(value, (list, tuple)):
        return tuple(_plain(call, name, part) for part in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise DtypeError.argument(call, f"key {name!r}", type(value).__name__, "a tensor, dtype, number, str or tuple")


class Call:
    """One call of a target, which can be made with any config: the Work of pkt.tune.search."""

    def __init__(
        self,
        target: Target,
        what: str,
        grid: Any,
        args: Sequence[Any],
        named: Mapping[str, Any],
        check: Check | None,
        restore: Sequence[str],
        world: World,
    ) -> None:
        self.target, self.what, self.grid, self.args, self.named = target, what, grid, args, named
        self.world = world
        self.arguments = target.arguments(args, named)
        self._check = check
        for name in restore:
            value = self.arguments.get(name)
            if not isinstance(value, torch.Tensor):
                raise DtypeError.argument(target.call, f"restore {name!r}", f"{value!r:.80}", "a tensor", world.rank)
        self._saved = {name: self.arguments[name].clone() for name in restore}
        self.restores = bool(restore)

    def compile(self, configs: Sequence[Config], threads: int, begin: float) -> dict[int, str]:
        """As pkt.tune.search.Work says; collective where the call is."""
        return compile_all([partial(self.run, config) for config in configs], threads, begin, self.scope)

    def scope(self) -> AbstractContextManager[None]:
        """As pkt.tune.search.Work says. A kernel makes no workspaces; a function may call something that does."""
        return nullcontext() if self.target.is_kernel else self.world.scratch()

    def run(self, config: Config) -> Any:
        if config.pre_hook is not None:
            config.pre_hook({**self.arguments, **config})
        fn = self.target.fn[self.grid] if self.target.is_kernel else self.target.fn
        return fn(*self.args, **self.named, **config)

    def verify(self, config: Config, result: Any) -> None:
        if self._check is not None and not self._check(self.arguments, result):
            raise NoCandidate.wrong()

    def restore(self) -> None:
        for name, saved in self._saved.items():
            self.arguments[name].copy_(saved)
