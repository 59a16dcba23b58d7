"""Worlds on which Gluon kernels are compiled. Only Triton 3.6 can import what makes them, so that waits for a use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`compiling(rank, size)`: a world whose Gluon kernels are compiled, not launched; `.kernels`: what came of it."""
    from .gluon_compiling import compiling_worlds

    return compiling_worlds(monkeypatch)


@pytest.fixture
def h200s(compiling: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """As `compiling`, on what the operators take for H200s. Nothing is tuned but what is given: `h200s(rank, size,
    operator=settings)`."""
    from .gluon_compiling import pass_for_h200s

    return pass_for_h200s(compiling, monkeypatch)
