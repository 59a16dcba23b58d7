"""Worlds on which Gluon kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`compiling(rank, size)`: a world whose Gluon kernels are compiled, not launched. Its `kernels` lists them."""
    from .gluon_compiling import compiling_worlds

    return compiling_worlds(monkeypatch)


@pytest.fixture
def h200s(compiling: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`h200s(rank, size, operator=settings)`: as `compiling`, a world that the operators take for one of H200s. Only
    the given settings are tuned."""
    from .gluon_compiling import pass_for_h200s

    return pass_for_h200s(compiling, monkeypatch)
