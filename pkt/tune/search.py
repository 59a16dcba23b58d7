"""What a search found, and how it goes: which candidates are measured, how often, and when it stops."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pkt.tune.config import Config

Model = Callable[[Config, Mapping[str, Any]], "float | None"]
"""Predicted seconds of a config for a key; None where nothing can be said."""


@dataclass(frozen=True)
class Candidate:
    """A config and what became of it.

    predicted: seconds, by the model. times: seconds, one a repeat, each the maximum over ranks; empty if it was not
    measured. dropped: why it was left out, naming the rank; "" if it was not.
    """

    config: Config
    predicted: float | None = None
    times: tuple[float, ...] = ()
    dropped: str = ""

    @property
    def time(self) -> float | None:
        """Median of the times, in seconds."""
        return statistics.median(self.times) if self.times else None


@dataclass(frozen=True)
class Search:
    """One search; the same on every rank.

    what: the operator or kernel. key: the case. candidates: in the order that rank 0 fixed. best: None if every one was
    dropped or none could be measured. seconds: that the search took, on rank 0. interrupted: Ctrl-C ended it.
    """

    what: str
    key: Mapping[str, Any]
    candidates: tuple[Candidate, ...]
    best: Config | None
    seconds: float
    interrupted: bool = False
