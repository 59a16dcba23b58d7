"""Eighty lines in an empty folder make an operator: the conformance suite finds it, and every fault planted in it.

The operator is the one of docs/adding-an-operator.md.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels import operator as registry
from pkt.kernels.operator import Operator
from tests.conformance import checks

PAGE = (Path(__file__).parents[2] / "docs" / "adding-an-operator.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE[: PAGE.index("## Try it")], re.MULTILINE | re.DOTALL)
TEXT = "\n\n".join(BLOCKS)
SCHEDULES = 40


@contextmanager
def written(folder: Path, *changes: tuple[str, str]) -> Iterator[Operator]:
    """The operator, in a file of its own with these pieces of its text replaced, registered while the `with` lasts."""
    text = TEXT
    for old, new in changes:
        assert text.count(old) >= 1, f"no longer in the text: {old}"
        text = text.replace(old, new)
    name = f"written_{abs(hash((text, folder)))}"
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield registry.register(module.OPERATOR)
    finally:
        registry.registered.pop("shift", None)
        del sys.modules[name]


def all_checks(operator: Operator, folder: Path) -> dict[str, Callable[[], Any]]:
    """Each property by name, as `test_operators` checks it."""
    mode = next(iter(operator.forms))

    def patched(check: Callable[..., Any], *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            check(*arguments, patch, *([folder] if check is checks.check_compilation else []))

    return {
        "results": lambda: checks.check_results(operator, mode, 3, torch.float32, "given"),
        "dtypes": lambda: [checks.check_results(operator, mode, 2, t, "new") for t in checks.floats(operator, mode)],
        "offsets": lambda: checks.check_results(operator, mode, 2, torch.bfloat16, "symmetric", offset=1),
        "empty": lambda: checks.check_empty(operator, mode),
        "refusals": lambda: checks.check_refusals(operator),
        "overlap": lambda: checks.check_overlap(operator),
        "agreement": lambda: checks.check_agreement(operator),
        "host cost": lambda: patched(checks.check_host_cost, operator, mode),
        "autograd": lambda: checks.check_autograd(operator, mode),
        "gradients": lambda: checks.check_gradients(operator, 3),
        "capture": lambda: patched(checks.check_capture, operator, mode),
        "scope": lambda: checks.check_workspace(operator, mode),
        "exploration": lambda: checks.check_exploration(operator, operator.cases[0], SCHEDULES),
        "wrap": lambda: checks.check_wrap(operator, mode),
        "sm_90": lambda: patched(checks.check_compilation, operator, mode, 90),
        "sm_100": lambda: patched(checks.check_compilation, operator, mode, 100),
    }


PROPERTIES = (
    "results", "dtypes", "offsets", "empty", "refusals", "overlap", "agreement", "host cost", "autograd", "gradients",
    "capture", "scope", "exploration", "wrap", "sm_90", "sm_100",
)  # fmt: skip


def test_an_operator_takes_at_most_80_lines() -> None:
    assert len(TEXT.splitlines()) <= 80


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_new_operator_has_every_property(name: str, tmp_path: Path) -> None:
    with written(tmp_path) as operator:
        found = all_checks(operator, tmp_path)
        assert tuple(found) == PROPERTIES
        found[name]()


def test_a_new_operator_is_found_everywhere(tmp_path: Path) -> None:
    with written(tmp_path) as operator:
        assert registry.operators()["shift"] is operator
        assert registry.named("shift") is operator
        assert pkt.shift is operator.function
        assert "shift" in dir(pkt)
    assert "shift" not in registry.operators()


BODY = "return OPERATOR((x, out), (by, mode, block), world)"
NEW = "OPERATOR((x, None), (by, mode, block), world)"
ALLOCATED = ("world.keep(", "(lambda key, make: make())(")
STARVED = [("(programs,))", "(programs,), maxnreg=32)"), ('settings={"block": 1024}', 'settings={"block": 32768}')]
CARELESS = "class Careless(Operator):\n    def _agree(self, *_): ...\n\n\nOPERATOR = Careless("
# By property: the message that the suite has for a mistake, and the mistake as (old, new) pieces of the text.
FAULTS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "results": ("off by", [("tl.int32) + by) %", "tl.int32) + 1) %")]),
    "dtypes": ("off by", [("mask=offs < n), mask", "mask=offs < n).to(tl.float16), mask")]),
    "offsets": ("off by", [("start(x, out, inbox", "start(torch.as_strided(x, (n,), (1,), 0), out, inbox")]),
    "empty": ("shape", [('result="n"', 'result=lambda call: (max(call["n"], 1),)')]),
    "refusals": ("different collective calls", [("integer(least=0)", "lambda call, name, value: value")]),
    "overlap": ("DID NOT RAISE", [(BODY, f"return {NEW} if out is None else out.copy_({NEW})")]),
    "agreement": ("DID NOT RAISE", [("exact=True", 'exact=True, private="n"')]),
    "host cost": (
        "planned again",
        [(BODY, f"OPERATOR.plan(world, (x, out), {{'by': by, 'mode': mode, 'block': block}}); {BODY}")],
    ),
    "autograd": ("not told", [(BODY, BODY.replace("(x, out)", "(x, out if out is None else out.data)"))]),
    "gradients": ("the gradient of x is off", [('by=-call["by"]', 'by=call["by"]')]),
    "capture": (
        "DID NOT RAISE",
        [("OPERATOR = Operator(", CARELESS), ALLOCATED, ("barrier_counters(world)", "signals(9)")],
    ),
    "scope": ("outlives", [ALLOCATED]),
    "exploration": ("data race", [("    pl.wait(ready_ptr + pid, launch, world)\n", "")]),
    "wrap": (
        "data race",
        [("pid, launch, world", "pid, tl.minimum(launch.to(tl.uint32), 4294967293).to(tl.int32), world")],
    ),
    "sm_90": ("STACK", STARVED),
    "sm_100": ("STACK", STARVED),
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_planted_fault_is_caught(name: str, tmp_path: Path) -> None:
    said, changes = FAULTS[name]
    caught = (AssertionError, pkt.PktError, pytest.fail.Exception)
    with written(tmp_path, *changes) as operator, pytest.raises(caught, match=said):
        all_checks(operator, tmp_path)[name]()
