"""The form and the settings that each fused product takes on H200s where nothing was tuned: those of choices.jsonl."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .gluon_compiling import chosen


def test_the_choices_are_those_of_the_table(h200s: Callable[..., Any]) -> None:
    """Each line has the operator, ranks, rows of each rank's part, N, K, keywords, and the form and settings taken."""
    wrong = []
    for line in Path(__file__).with_name("choices.jsonl").read_text().splitlines():
        name, size, m, N, K, options, wanted = json.loads(line)
        given = options | ({"dtype": getattr(torch, options["dtype"])} if "dtype" in options else {})
        found = chosen(name, h200s(min(1, size - 1), size), m, N, K, **given)
        if found != {n: tuple(v) if n == "tiles" else v for n, v in wanted.items()}:
            wrong.append((line, found))
    assert not wrong
