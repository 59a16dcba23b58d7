"""torch's modes of a thread: gradients, inference, autocast and function modes. Simulated ranks are greenlets of one
thread, and each has its own, as a process has."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode


class Modes(NamedTuple):
    """The modes of a rank's host code."""

    grad: bool
    inference: bool
    autocast: bool
    autocast_dtype: torch.dtype
    functions: tuple[TorchFunctionMode, ...] = ()  # outermost first; without those of the simulation's caller


def modes() -> Modes:
    """The current modes."""
    return Modes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


def enter(wanted: Modes) -> None:
    """Set the modes, except inference, which only a guard can change."""
    torch.set_grad_enabled(wanted.grad)
    torch.set_autocast_enabled("cpu", wanted.autocast)
    torch.set_autocast_dtype("cpu", wanted.autocast_dtype)


class Guard:
    """A rank's host code runs with its modes between `__init__` and `leave`."""

    __slots__ = ("_guard", "_outer")

    def __init__(self, wanted: Modes) -> None:
        self._guard = torch.inference_mode(wanted.inference)
        self._guard.__enter__()
        enter(wanted)
        self._outer = torch._C._len_torch_function_stack()
        for mode in wanted.functions:
            _push_mode(mode)

    def leave(self) -> Modes:
        """Return the modes that the code has now, and restore those from before."""
        functions = [_pop_mode() for _ in range(torch._C._len_torch_function_stack() - self._outer)]
        found = modes()._replace(functions=tuple(reversed(functions)))
        self._guard.__exit__(None, None, None)
        return found
