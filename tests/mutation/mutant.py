"""One mistake, and what lists of mistakes share."""

from __future__ import annotations

import shlex
from typing import NamedTuple


class Mutant(NamedTuple):
    """In `file`, relative to the root, `old`, which occurs there once, becomes `new`. tests: arguments of pytest.
    reason: what goes wrong. seconds: how long the tests may take. excuse: why no test can notice it, if none can."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    reason: str
    seconds: float = 90.0
    excuse: str = ""


EXPLORED = "tests/conformance/test_operators.py::test_every_schedule_is_right_and_every_fault_is_caught"
SIMULATE, LANGUAGE, RUNTIME = "pkt/simulate/", "pkt/language/", "pkt/runtime/"
TUNE, MODEL = "pkt/tune/", "pkt/model/"
QUICK = frozenset(
    f"tests/{name}.py" for name in (
        "runtime/test_cuda", "runtime/test_driver", "runtime/test_frames", "runtime/test_heap", "runtime/test_journal",
        "runtime/test_kept", "runtime/test_launch", "runtime/test_pool", "runtime/test_streams", "runtime/test_tensor",
        "runtime/test_topology", "runtime/test_watch", "test_trace", "tune/test_config", "tune/test_model",
        "tune/test_report", "tune/test_timers",
    )
)  # fmt: skip
"""Files whose tests take a second or two."""


def of(file: str, tests: str, *changes: tuple[str, str, str]) -> tuple[Mutant, ...]:
    """Mutants of one file that the same tests, as a shell separates them, must notice: (reason, old, new)."""
    return tuple(Mutant(file, old, new, tuple(shlex.split(tests)), reason) for reason, old, new in changes)
