"""What a process of the driver does: pytest in a copy of the tree. What all tests import is loaded before."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOADED = ("torch.distributed", "triton.language", "triton.runtime.interpreter", "hypothesis", "rich.table", "pytest")
"""Modules that the processes share. None of pkt, because each copy has its own."""
NO_TEST = 70  # exit status; 1 would say that a test failed


def test(tree: str, tests: tuple[str, ...], output: str) -> None:
    """Run `tests` of `tree`, and exit with pytest's status; what they print goes to the file `output`."""
    os.setsid()
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    # No compiled files: two versions of a file within a second look alike to Python.
    kept = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = os.pathsep.join([tree, *(path for path in kept if Path(path).resolve() != ROOT)])
    os.environ |= {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "PKT_SCHEDULES": "800"}
    sys.dont_write_bytecode = True
    sys.path[:] = [tree, *(path for path in sys.path if Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    try:
        import pytest

        options = ["-q", "-x", "-m", "not gpu", "-p", "no:cacheprovider"]
        if importlib.util.find_spec("xdist"):
            options += ["-n", "0"]
        if not importlib.util.find_spec("pytest_timeout"):  # pytest would refuse its setting
            options += ["-o", "addopts=-ra --strict-markers --import-mode=importlib"]
        sys.exit(pytest.main([*options, *tests]))
    except Exception:
        traceback.print_exc()
        sys.exit(NO_TEST)
