"""torch's modes: gradients, inference, autocast, default dtype, deterministic algorithms, function and dispatch modes,
hooks of saved tensors, and the dispatch keys that an operator's code runs below; and asyncio's event loop. Simulated
ranks are greenlets of one thread, and each has its own, as a process has."""

from __future__ import annotations

from asyncio import _get_running_loop, _set_running_loop
from typing import Any, NamedTuple

import torch
from torch._C import _len_torch_dispatch_stack, _pop_torch_dispatch_stack, _push_on_torch_dispatch_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# As torch's functions of longer names, which would be a tenth of what a small schedule calls.
_only_deterministic = torch._C._get_deterministic_algorithms
_only_warned = torch._C._get_deterministic_algorithms_warn_only


class Modes(NamedTuple):
    """The modes of a rank's host code."""

    grad: bool
    inference: bool
    autocast: bool
    autocast_dtype: torch.dtype
    dtype: torch.dtype  # of new tensors
    deterministic: tuple[bool, bool]  # algorithms only, and only a warning about others
    functions: tuple[TorchFunctionMode, ...] = ()  # outermost first; without those of the simulation's caller
    dispatches: tuple[Any, ...] = ()  # TorchDispatchModes, likewise
    hooks: tuple[tuple[Any, Any], ...] = ()  # of saved tensors, (pack, unpack), in the same order
    loop: Any = None  # that runs
    keys: tuple[Any, Any] | None = None  # dispatch keys included and excluded; None: as the others of these modes say


_LASTING = slice(Modes._fields.index("autocast_dtype"), Modes._fields.index("functions"))
"""The modes that `Guard.leave` leaves as they are. Whether autocast is on is a dispatch key, which it restores."""


def modes(
    functions: tuple[TorchFunctionMode, ...] = (),
    dispatches: tuple[Any, ...] = (),
    hooks: tuple[tuple[Any, Any], ...] = (),
    loop: Any = None,
) -> Modes:
    """The current modes, and those with a stack that the caller has found."""
    return Modes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        (_only_deterministic(), _only_warned()),
        functions,
        dispatches,
        hooks,
        loop,
    )


def inherited(without: TorchFunctionMode) -> Modes:
    """The current modes, for another thread, but the function mode `without`."""
    stack = torch.overrides._get_current_function_mode_stack()
    functions = tuple(mode for mode in stack if mode is not without)
    hooks = _taken_hooks()
    _put_hooks(hooks)
    return modes(functions, tuple(_get_current_dispatch_mode_stack()), hooks)


def enter(wanted: Modes, now: Modes | None = None) -> None:
    """Set the modes, except inference, which only a guard can change. now: what the last `Guard.leave` in this thread
    returned, if there was one."""
    torch._C._set_grad_enabled(wanted.grad)
    torch.set_autocast_enabled("cpu", wanted.autocast)
    if now is not None and wanted[_LASTING] == now[_LASTING]:
        return
    torch.set_autocast_dtype("cpu", wanted.autocast_dtype)
    if torch.get_default_dtype() != wanted.dtype:  # a change takes ten times as long as a look
        torch.set_default_dtype(wanted.dtype)
    if (_only_deterministic(), _only_warned()) != wanted.deterministic:
        enabled, warn_only = wanted.deterministic
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


class Guard:
    """A rank's host code runs with its modes between `__init__` and `leave`."""

    __slots__ = ("_before", "_below", "_forced", "_guard", "_hooks", "_left", "_loop", "_outer", "_wanted")
    _before: tuple[Any, Any]  # dispatch keys when the code went on
    _left: Modes  # what `leave` has returned

    def __init__(self, wanted: Modes, last: Guard | None = None) -> None:
        """last: the last guard of this thread, if there was one, and has been left."""
        self._wanted, self._loop = wanted, _get_running_loop()
        _set_running_loop(wanted.loop)
        self._guard = torch._C._InferenceMode(wanted.inference)  # torch.inference_mode without its decorator
        self._guard.__enter__()
        enter(wanted, None if last is None else last._left)
        self._outer = torch._C._len_torch_function_stack()
        for mode in wanted.functions:
            _push_mode(mode)
        self._below = _len_torch_dispatch_stack()
        for mode in wanted.dispatches:
            _push_on_torch_dispatch_stack(mode)
        self._hooks = _taken_hooks()
        _put_hooks(wanted.hooks)
        if last is not None and _deciding(wanted) == _deciding(last._wanted):
            self._before = last._before  # keys follow from those modes, and a look at them takes long
        else:
            self._before = _keys()
        self._forced = None
        if wanted.keys is not None:
            self._forced = torch._C._ForceDispatchKeyGuard(*wanted.keys)
            self._forced.__enter__()

    def leave(self) -> Modes:
        """Return the modes that the code has now, and restore those from before."""
        keys, loop = _keys(), _get_running_loop()
        _set_running_loop(self._loop)
        if self._forced is not None:
            self._forced.__exit__(None, None, None)
        hooks = _taken_hooks()
        _put_hooks(self._hooks)
        functions: tuple[TorchFunctionMode, ...] = ()
        for _ in range(torch._C._len_torch_function_stack() - self._outer):
            functions = (_pop_mode(), *functions)
        dispatches: tuple[Any, ...] = ()
        for _ in range(_len_torch_dispatch_stack() - self._below):
            dispatches = (_pop_torch_dispatch_stack(None), *dispatches)
        found = modes(functions, dispatches, hooks, loop)
        self._guard.__exit__(None, None, None)
        self._left = found if keys == self._before else found._replace(keys=keys)
        return self._left


def _deciding(of: Modes) -> tuple[Any, ...]:
    """The modes that dispatch keys follow from."""
    return *of[: _LASTING.start], bool(of.dispatches)


def _keys() -> tuple[Any, Any]:
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def _taken_hooks() -> tuple[tuple[Any, Any], ...]:
    """All hooks of saved tensors, outermost first, which are then gone."""
    found: tuple[tuple[Any, Any], ...] = ()
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        found = (hooks, *found)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    return found


def _put_hooks(hooks: tuple[tuple[Any, Any], ...]) -> None:
    for pack, unpack in hooks:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
