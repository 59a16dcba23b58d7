"""Every operator in the registry, each of its forms: results, wrong calls, costs, protocol, compilation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pkt.kernels.declaration import Case
from pkt.kernels.operator import Operator, operators
from pkt.simulate.faults import Mutant
from pkt.simulate.run import execute
from tests.conformance import checks

OPERATORS = operators()
FORMS = [(name, mode) for name, o in OPERATORS.items() for mode, form in o.forms.items() if not form.gpu]
ACROSS = [(name, mode) for name, o in OPERATORS.items() for mode in o.across]  # forms for several nodes
WORLDS = [  # of several nodes: those of the cases
    (name, mode, *world)
    for name, mode in ACROSS
    for world in dict.fromkeys((c.ranks, c.node_size) for c in OPERATORS[name].cases if c.arguments.get("mode") == mode)
]
EXPLORED = [(o, case) for o in OPERATORS.values() for case in o.cases if case.explore]
SCHEDULES = int(os.environ.get("PKT_SCHEDULES", "2220"))  # of all cases together
LOST_RANKS = 3  # random points at which a rank stops or dies, for each case
KINDS = ("given", "new", "symmetric")  # of `out`
every_form = pytest.mark.parametrize(("name", "mode"), FORMS + ACROSS)
every_operator = pytest.mark.parametrize("name", OPERATORS)


@pytest.mark.parametrize("ranks", [1, 3, 4, 5, 8])
@pytest.mark.parametrize(("name", "mode"), FORMS)
def test_results_on_any_number_of_ranks(name: str, mode: str, ranks: int) -> None:
    """Every case on up to 3 ranks, those on 2 in the next test; 4, 5 and 8 ranks share the cases between them. Three
    launches on 3 ranks, where buffers that alternate come again."""
    dtypes = checks.floats(OPERATORS[name], mode)
    dtype, kind, part = dtypes[ranks % len(dtypes)], KINDS[ranks % 3], {5: 0, 8: 1, 4: 2}.get(ranks)
    launches = 3 if ranks == 3 else 2
    checks.check_results(OPERATORS[name], mode, ranks, dtype, kind, more=ranks == 3, launches=launches, part=part)


@pytest.mark.parametrize(("name", "mode", "ranks", "node_size"), WORLDS)
def test_results_over_nodes(name: str, mode: str, ranks: int, node_size: int) -> None:
    """In every world of several nodes that a case has, where what the network brings comes in a random order. Worlds of
    8 ranks share the cases."""
    dtypes = checks.floats(OPERATORS[name], mode)
    dtype, kind = dtypes[node_size % len(dtypes)], KINDS[node_size % 3]
    options = {"launches": 3} if ranks < 8 else {"launches": 2, "part": node_size // 3}
    checks.check_results(OPERATORS[name], mode, ranks, dtype, kind, node_size=node_size, seed=1, **options)


@every_form
def test_results_in_teams(name: str, mode: str) -> None:
    """One form with equal steps, the next with a table."""
    teams = ([[0, 2], [1, 3]], [[3, 0, 5], [1, 2, 4]])[(FORMS + ACROSS).index((name, mode)) % 2]
    checks.check_teams(OPERATORS[name], mode, teams)


@every_form
def test_results_in_every_dtype(name: str, mode: str) -> None:
    """Every case in the first dtype, in two launches; the others take a third of the cases each, in one."""
    for i, dtype in enumerate(checks.floats(OPERATORS[name], mode)):
        part, options = i % 3 if i else None, {"transposed": i != 1, "launches": 1 if i else 2}
        checks.check_results(OPERATORS[name], mode, 2, dtype, KINDS[i % 3], part=part, **options)


@every_form
def test_results_of_operands_that_begin_anywhere(name: str, mode: str) -> None:
    dtype = checks.floats(OPERATORS[name], mode)[0]
    checks.check_results(OPERATORS[name], mode, 3, dtype, "new", offset=1, launches=1)


@every_form
def test_results_of_ranks_whose_operands_begin_elsewhere(name: str, mode: str) -> None:
    checks.check_results_of_uneven_ranks(OPERATORS[name], mode, checks.floats(OPERATORS[name], mode)[0])


@every_form
def test_empty_operands(name: str, mode: str) -> None:
    checks.check_empty(OPERATORS[name], mode)


@every_operator
def test_wrong_calls_are_refused_before_anything_happens(name: str) -> None:
    checks.check_refusals(OPERATORS[name])


@every_operator
def test_an_output_that_overlaps_an_operand_is_refused(name: str) -> None:
    checks.check_overlap(OPERATORS[name])


@every_operator
def test_ranks_that_disagree_are_told(name: str) -> None:
    checks.check_agreement(OPERATORS[name])


@every_form
def test_a_planned_call_costs_the_host_little(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.check_host_cost(OPERATORS[name], mode, monkeypatch)


@every_form
def test_autograd_is_told_of_what_is_written(name: str, mode: str) -> None:
    checks.check_autograd(OPERATORS[name], mode)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@every_operator
def test_gradients(name: str, ranks: int) -> None:
    checks.check_gradients(OPERATORS[name], ranks)


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in ACROSS))
def test_gradients_over_nodes(name: str) -> None:
    checks.check_gradients(OPERATORS[name], 4, node_size=2)


@every_operator
def test_a_backward_pass_notices_what_was_written(name: str) -> None:
    checks.check_saved(OPERATORS[name])


@every_operator
def test_compiled_code(name: str) -> None:
    checks.check_compiled(OPERATORS[name])


@every_form
def test_a_first_call_in_a_capture_is_refused(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.check_capture(OPERATORS[name], mode, monkeypatch)


@every_form
def test_a_first_call_keeps_no_memory_of_a_graphs_pool(name: str, mode: str) -> None:
    checks.check_graph_pool(OPERATORS[name], mode)


@every_form
def test_a_scope_gives_back_what_the_operator_keeps(name: str, mode: str) -> None:
    checks.check_workspace(OPERATORS[name], mode)


@pytest.mark.parametrize(
    ("operator", "case"),
    [pytest.param(o, c, id=f"{checks.name_of(o, c)}-{c.ranks}") for o, c in EXPLORED],
)
def test_every_schedule_is_right_and_every_fault_is_caught(operator: Operator, case: Case) -> None:
    checks.check_exploration(operator, case, -(-SCHEDULES // len(EXPLORED)), LOST_RANKS)


def test_there_is_enough_to_break() -> None:
    """Already in the first few cases."""
    mutants: set[Mutant] = set()
    for operator, case in EXPLORED:
        options = {"sms": case.sms, "multicast": case.multicast, "node_size": case.node_size}
        census = execute(checks.explored(operator, case), case.ranks, **options)
        mutants |= set(census.machine.census.mutants())
        if len(mutants) >= 30 and {"remove", "relax"} <= {mutant.change for mutant in mutants}:
            return
    pytest.fail(f"only {mutants}")


@pytest.mark.parametrize("seed", [0, 1, 3])
@every_form
def test_counters_wrap(name: str, mode: str, seed: int) -> None:
    checks.check_wrap(OPERATORS[name], mode, seed)


@pytest.mark.parametrize("arch", [90, 100])
@every_form
def test_kernels_compile(name: str, mode: str, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checks.check_compilation(OPERATORS[name], mode, arch, monkeypatch, tmp_path)


def test_operators_are_found() -> None:
    assert len(OPERATORS) >= 1
    assert all(o.cases and any(case.explore for case in o.cases) for o in OPERATORS.values()), "nothing to explore"
    explored = {(o.name, case.arguments["mode"]) for o, case in EXPLORED}
    # "unfused" is cuBLAS and a collective, which is explored as an operator of its own.
    assert explored >= {(n, m) for n, m in FORMS + ACROSS if m != "unfused"}, "a form is not explored"
