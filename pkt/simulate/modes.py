"""torch's modes of a thread: gradients, inference and autocast. Simulated ranks are greenlets of one thread, and each
has its own, as a process has."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Modes(NamedTuple):
    """The modes of a rank's host code."""

    grad: bool
    inference: bool
    autocast: bool
    autocast_dtype: torch.dtype


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

    __slots__ = ("_guard",)

    def __init__(self, wanted: Modes) -> None:
        self._guard = torch.inference_mode(wanted.inference)
        self._guard.__enter__()
        enter(wanted)

    def leave(self) -> Modes:
        """Return the modes that the code has now, and restore those from before."""
        found = modes()
        self._guard.__exit__(None, None, None)
        return found
