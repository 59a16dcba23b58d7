"""The simulator's tests of what pkt.language means, on GPUs: the same test functions, with the same kernels.

A test that asks for many schedules runs once on real ranks. A test that asks for the simulator's findings in a wrong
program is skipped.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests.gpu import run

MODULES = [importlib.import_module(f"tests.simulate.test_semantics_{part}") for part in ("memory", "sync", "tile")]

# Wrong programs, in which some schedule must fail; and a test of the tests.
NOT_HERE = {
    "test_a_message_without_fences_is_stale",
    "test_quiet_waits_for_tma_stores_and_fence_does_not",
    "test_every_function_of_the_language_has_a_test_here",
}

for module in MODULES:
    for name, value in vars(module).items():
        if name.startswith("test_") and name not in NOT_HERE:
            globals()[name] = value


def launch(fn: Callable[..., Any], ranks: int = 3, seed: int = 0, **options: Any) -> list[Any]:
    """Replaces a simulated launch by one on GPUs."""
    mark = run.unless_possible(ranks)
    if mark.args[0]:
        pytest.skip(mark.kwargs["reason"])
    cells = [cell.cell_contents for cell in fn.__closure__ or ()]
    if any(isinstance(value, (list, dict, set)) for value in cells):
        pytest.skip("its ranks share a list, so they must be in one process")
    if options.get("multicast") and not run.MULTICAST:
        pytest.skip("multicast is off here: PKT_TEST_MULTICAST=1")

    def main(world: Any, *args: Any) -> Any:
        # The test compares the ranks' tensors with each other, on the CPU.
        return tree_map_only(torch.Tensor, torch.Tensor.cpu, fn(world, *args))

    return run.launch(main, ranks, *options.get("args", ()))


def failures(fn: Callable[..., Any], ranks: int = 2, seeds: Iterable[int] = (), **options: Any) -> dict[int, Exception]:
    """Replaces many schedules by one launch on GPUs."""
    launch(fn, ranks, **options)
    return {}


def needs_simulator(*args: Any, **options: Any) -> NoReturn:
    """Skips a test that asks for facts that a GPU cannot show."""
    pytest.skip("the rest is about the simulator")


@pytest.fixture(autouse=True)
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the modules' functions for the simulator run on GPUs."""
    for module in MODULES:
        for name, instead in (("failures", failures), ("launch", launch), ("outcome", needs_simulator)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, instead)
