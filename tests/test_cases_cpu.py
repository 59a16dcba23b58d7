"""The cases of cases_language in the simulator; every public device function has one."""

import inspect

import pytest

import pkt
import pkt.language as pl
from tests.cases_language import CASES, Case

PARTS = ("tile", "shmem", "order")
CONSTANTS = {"SIGNAL_SET", "SIGNAL_ADD", "CMP_EQ", "CMP_NE", "CMP_GT", "CMP_GE", "CMP_LT", "CMP_LE"}


def public_functions() -> set[str]:
    """Names that a kernel may call; a submodule's functions have its name in front."""
    names = {n for n in pl.__all__ if not inspect.ismodule(getattr(pl, n)) and not inspect.isclass(getattr(pl, n))}
    for part in PARTS:
        module = getattr(pl, part)
        names |= {
            f"{part}.{name}"
            for name, value in vars(module).items()
            if not name.startswith("_") and hasattr(value, "fn") and name not in CONSTANTS
        }
    return names


def test_every_public_device_function_has_a_case() -> None:
    covered = {name for case in CASES for name in case.covers}
    assert covered == public_functions()


def test_names_of_cases_are_distinct() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_case_is_right(case: Case, ranks: int) -> None:
    seeds = {2: (0, 1), 3: (6,)}[ranks]  # in order, random; adversarial
    multicast = ranks != 3  # without it the same source loops over the ranks
    pkt.simulate(case.fn, ranks=ranks, seeds=seeds, heap="1MiB", multicast=multicast).check()
