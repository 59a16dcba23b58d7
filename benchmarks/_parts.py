"""Copies of the operators' Gluon modules with other functions in place of some: for what a part of a kernel takes.

A part is left out by giving a name of the module another meaning, so the kernels have no switches for it. The result is
nobody's, and the counters fall behind, so they are not those of the operator.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pkt.kernels.all_gather_matmul import gluon as _gathered
from pkt.kernels.all_gather_matmul.gluon_order import Rounds
from pkt.kernels.matmul_reduce_scatter import gluon as _scattered
from pkt.runtime.launch.launch import cooperative_launch


def copied(original: ModuleType, name: str) -> Any:
    """A second copy of a module, whose functions are compiled with what its names mean when they are first launched."""
    alias = f"{original.__name__}_{name}"
    loader = SourceFileLoader(alias, str(original.__file__))
    module: Any = importlib.util.module_from_spec(importlib.util.spec_from_loader(alias, loader))  # type: ignore[arg-type]
    sys.modules[alias] = module
    loader.exec_module(module)
    return module


def changed(module: ModuleType, **names: Any) -> ModuleType:
    """A module with other meanings of some names."""
    copy = ModuleType(module.__name__ + "_changed")
    copy.__dict__.update(vars(module) | names)
    return copy


@triton.jit
def _no_wait(ptr, value, world):
    pass


@gluon.jit
def _no_signal(ptr, value, sem, scope):
    pass


@gluon.jit
def _nothing(world):
    pass


@gluon.jit
def _no_tiles(num_comm, rounds_alone, whole_rounds, order, PIECES: gl.constexpr):
    return Rounds(0, 0, 0, 0, num_comm, order, 1), Rounds(0, 0, 0, 0, num_comm, order, PIECES)


def nobody_pushes(world: Any, kernel: Any, grid: tuple[int, ...], **options: Any) -> Callable[..., Any]:
    """In place of `cooperative_launch`: with no program that pushes."""
    start, at = cooperative_launch(world, kernel, grid, **options), kernel.arg_names.index("num_comm")
    return lambda *args: start(*args[:at], 0, *args[at + 1 :])


def leave_out(module: Any, part: str) -> Any:
    """`module`, of all_gather_matmul, without "wait", "product", or "push", which is both waiting and pushing; or of
    matmul_reduce_scatter, without "links": nothing is waited for or signalled."""
    if part == "product":
        module.deal = _no_tiles
    else:
        module.pl = changed(module.pl, wait=_no_wait)
    if part == "push":
        module.cooperative_launch = nobody_pushes
    if part == "links":
        module.publish = _nothing
        module.gl = changed(gl, atomic_add=_no_signal)
    return module


@functools.cache
def without(part: str) -> Any:
    """The module of the operator whose part that is, without it."""
    return leave_out(copied(_scattered if part == "links" else _gathered, f"without_{part}"), part)


class Apart:
    """A world where a module that a part is left out of has counters of its own. The inboxes are the operator's, filled
    by its launches; without "links" all stays in this rank's."""

    def __init__(self, world: Any, module: Any, part: str) -> None:
        self.world, self.module, self.part = world, module, part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        found = self.world.keep(key, make)
        if key[:2] != (self.module.CALL, "gluon"):
            return found
        inbox, ready = found
        make_own = functools.partial(self.module.signals, ready.numel(), world=self.world)
        own = self.world.keep((self.part, *key), make_own)
        return (Own(inbox) if self.part == "links" else inbox), own


class Own:
    """An inbox that stands for every rank's."""

    def __init__(self, inbox: Any) -> None:
        self.inbox = inbox

    def plain(self) -> torch.Tensor:
        return self.inbox.plain()

    def peer(self, rank: int, world: Any = None) -> torch.Tensor:
        return self.inbox.plain()
