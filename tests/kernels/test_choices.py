"""The form and the settings that each fused product takes on H200s where nothing was tuned: those of choices.jsonl.

Where they differ, the test writes the file that agrees and names it: compare it with choices.jsonl, and copy it there.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pkt.kernels.all_gather_matmul import host, kept
from pkt.kernels.declaration import Case
from pkt.kernels.operator import named, names
from tests.conformance import inputs

from .gluon_compiling import chosen, chosen_by


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


def cases(name: str) -> Iterator[tuple[Case, int]]:
    """An operator's own cases and ragged ones, each on several numbers of ranks."""
    operator = named(name)
    assert operator is not None
    every = itertools.chain.from_iterable(inputs.cases_of(operator, mode) for mode in operator.forms)
    return itertools.product(every, (2, 3, 4, 8))


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA B200"])
@pytest.mark.parametrize("name", [*names(), kept.OPERATOR.name])
def test_every_operator_has_a_default_on_every_gpu(h200s: Callable[..., Any], name: str, gpu: str) -> None:
    known = name != kept.OPERATOR.name
    operator = named(name) if known else kept.OPERATOR
    assert operator is not None
    for case, size in cases(name if known else host.OPERATOR.name):
        world = h200s(1, size)
        world.backend.gpu = gpu
        every = inputs.everybody(operator, case, size, 0, inputs.usual(operator))
        operands = {name: None if ranks is None else ranks[1] for name, ranks in every.items()}
        found = chosen_by(functools.partial(inputs.called, operator, None, operands, case, world=world))
        assert found["mode"] in operator.forms
