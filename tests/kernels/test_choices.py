"""The form and the settings that each fused product takes on H200s where nothing was tuned: those of choices.jsonl.

Where they differ, the test writes the file that agrees and names it: compare it with choices.jsonl, and copy it there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from .gluon_compiling import chosen


def test_the_choices_are_those_of_the_table(h200s: Callable[..., Any], tmp_path: Path) -> None:
    """Each line has the operator, ranks, rows of each rank's part, N, K, keywords, and the form and settings taken."""
    wrong, lines = [], []
    for line in Path(__file__).with_name("choices.jsonl").read_text().splitlines():
        name, size, m, N, K, options, wanted = json.loads(line)
        given = options | ({"dtype": getattr(torch, options["dtype"])} if "dtype" in options else {})
        found = chosen(name, h200s(min(1, size - 1), size), m, N, K, **given)
        if found != {n: tuple(v) if n == "tiles" else v for n, v in wanted.items()}:
            wrong.append((line, found))
            line = json.dumps([name, size, m, N, K, options, found])
        lines.append(line)
    fresh = tmp_path / "choices.jsonl"
    fresh.write_text("\n".join(lines) + "\n")
    assert not wrong, f"{len(wrong)} choices differ, see {fresh}"


@pytest.mark.parametrize(("name", "m"), [("matmul_all_reduce", 4096), ("matmul_reduce_scatter", 256)])
def test_each_k_has_its_own_choice(h200s: Callable[..., Any], name: str, m: int) -> None:
    """In one world, as of a model: the products behind attention and behind the MLP have the same rows and columns."""
    alone = [chosen(name, h200s(3, 4), m, 8192, K) for K in (2048, 7168)]
    assert alone[0] != alone[1]
    world = h200s(3, 4)
    assert [chosen(name, world, m, 8192, K) for K in (2048, 7168)] == alone
