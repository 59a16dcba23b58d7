"""Results are right: of every dtype, size, offset and number of ranks, in teams, and of empty operands."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

import pkt
from pkt.kernels.declaration import Case
from pkt.kernels.operator import Operator
from tests.conformance import inputs
from tests.conformance.inputs import within
from tests.kernels.helpers import on_ranks

from .compilation import floats
from .operands import dtypes_of, given, on_nodes, result_for

LAUNCHES = 3


def check_results(
    operator: Operator, mode: str, ranks: int, dtype: torch.dtype, kind: str, offset: int = 0, *, more: bool = False,
    transposed: bool = False, launches: int = LAUNCHES, part: int | None = None, node_size: int | None = None,
    seed: int = 0,
) -> None:  # fmt: skip
    """Every case is right within the bound, launch after launch with other inputs, and without a reset; a ragged one in
    two launches at most. more: further sizes, with one launch. transposed: operands are transposed views where the
    operator takes those. part: 0, 1 or 2 for every third case, beginning with the first, second or third; at least
    one."""
    usual, cases = ([*inputs.cases_of(operator, mode, also)] for also in (False, more))
    if part is not None:
        cases = cases[part % len(cases) :: 3]

    @functools.cache  # all ranks have the same
    def operands(at: int, launch: int, size: int) -> dict[str, Any]:
        return inputs.everybody(operator, cases[at], size, launch, dtype)

    def run(world: Any) -> None:
        for at, case in enumerate(cases):
            keep: dict[str, torch.Tensor] = {}
            most = launches if case in operator.cases else 2 if case in usual else 1
            for launch in range(min(launches, most)):
                try:
                    every = operands(at, launch, world.size)
                    right(world, operator, mode, case, launch, dtype, kind, offset, keep, transposed, every)
                except pkt.Unsupported:
                    if not offset:
                        raise
                    break  # the form's `fits` refuses the offset, on all ranks

    if node_size is None:
        on_nodes(operator, mode, ranks, run, sms=4, seed=seed)
    else:
        on_ranks(ranks, run, sms=4, seed=seed, node_size=node_size)


def right(
    world: Any, operator: Operator, mode: str, case: Case, launch: int, dtype: torch.dtype, kind: str,
    offset: int | tuple[int, ...], keep: dict[str, torch.Tensor], transposed: bool = False,
    operands: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """One call of a case, and whether its result is right. keep: tensors of the launch before, which are used again.
    operands: all ranks', where they are made already."""
    operands = operands or inputs.everybody(operator, case, world.size, launch, dtype)
    exacts = inputs.exacts(operator, case, world.rank, operands)
    if not keep:
        out = result_for(world, operator, mode, case, exacts[0], dtype, kind)
        keep.update(given(world, operator, mode, operands, out, offset, transposed))
    for name, ranks in operands.items():
        if ranks is not None:
            keep[name].copy_(ranks[world.rank])
    out = keep.get("out")
    with torch.device("meta"):  # a default device changes nothing
        results = inputs.results(inputs.called(operator, mode, keep, case, world=world))
    if out is not None:
        assert results[0] is out, f"{mode}: returned another tensor than `out`"
    limits = inputs.bounds(operator, mode, case, world.rank, world.size, operands, dtype)
    assert len(results) == len(exacts) == len(limits) <= 1 + len(operator.also)
    for found, exact, limit in zip(results, exacts, limits):
        assert tuple(found.shape) == tuple(exact.shape), (mode, case, found.shape, exact.shape)
        found, exact = found.cpu().double(), exact.cpu().double()
        close = within(found, exact, limit)
        assert close.all(), f"{mode}, {case}, launch {launch}: off by {(found - exact).abs().max():.3g}"


def check_teams(operator: Operator, mode: str, teams: list[list[int]]) -> None:
    """Teams that make the same calls at the same time, over operands of the whole world, each get their own results.
    Each rank is in one team, and the teams are of one size."""

    def run(world: Any) -> None:
        team = world.team(next(ranks for ranks in teams if world.rank in ranks))
        case, dtype = next(inputs.cases_of(operator, mode)), floats(operator, mode)[0]
        keep: dict[str, torch.Tensor] = {}
        for launch in range(2):
            # Launches of the teams have other operands.
            right(team, operator, mode, case, launch + 10 * teams.index(list(team.ranks)), dtype, "new", 0, keep)

    on_nodes(operator, mode, sum(map(len, teams)), run)


def check_results_of_uneven_ranks(operator: Operator, mode: str, dtype: torch.dtype) -> None:
    """Right where the operands of one rank of two begin at a multiple of 16 bytes. Their rows do."""
    letters = inputs.letters_of(operator)
    case = inputs.alike(operator, 16, "16") if letters else next(inputs.cases_of(operator, mode))

    def run(world: Any) -> None:
        for offset in ((0, 1), (1, 0)):
            with contextlib.suppress(pkt.Unsupported):  # on both ranks, or the other would wait
                right(world, operator, mode, case, 0, dtype, "new", offset, {})

    on_nodes(operator, mode, 2, run, sms=4)


def check_empty(operator: Operator, mode: str) -> None:
    """If any one dimension is empty, the result is the reference's and nothing fails."""

    def run(world: Any) -> None:
        for case in inputs.cases_of(operator, mode):
            for shapes, sizes in emptied(case):
                if any(sizes.get(letter) == 0 for letter in operator.least):
                    continue  # is refused: check_refusals
                none = Case(sizes=sizes, shapes=shapes, arguments=case.arguments)
                right(world, operator, mode, none, 0, dtypes_of(operator, mode)[0], "new", 0, {})

    on_nodes(operator, mode, 2, run)


def emptied(case: Case) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """(shapes, sizes) of a case with one of its dimensions or letters 0."""
    found: list[tuple[dict[str, Any], dict[str, int]]] = []
    found += [(dict(case.shapes), {**case.sizes, letter: 0}) for letter in case.sizes]
    shapes = {n: [str(w) for w in (s.split() if isinstance(s, str) else s)] for n, s in case.shapes.items()}
    dimensions = max(map(len, shapes.values()), default=0)  # of the operands; indices beside them may have fewer
    for at in range(dimensions):
        none = {n: " ".join([*w[:at], "0", *w[at + 1 :]]) for n, w in shapes.items() if len(w) == dimensions}
        found.append(({**case.shapes, **none}, dict(case.sizes)))
    return found
