"""Runs programs as `python FILE` does, each in a process of its own that is forked from one with torch and Triton."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from unittest import mock

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch.distributed", "triton.language", "triton.runtime.interpreter"])


class Done(NamedTuple):
    """How a program ended, and what it wrote."""

    returncode: int | None
    stdout: str
    stderr: str


def ran(program: Path, environment: Mapping[str, str], seconds: float = 240) -> Done:
    """Run `program` in its folder. Its returncode is None if it took longer than `seconds`."""
    written = [program.with_suffix(".out"), program.with_suffix(".err")]
    with mock.patch.dict(os.environ, environment, clear=True):  # the first start also starts the process to fork
        process = PROCESSES.Process(target=_main, args=(str(program), dict(environment), [*map(str, written)]))
        process.start()
    process.join(seconds)
    if (code := process.exitcode) is None:
        process.kill()
        process.join()
    return Done(code, *(path.read_text() if path.exists() else "" for path in written))


def _main(program: str, environment: dict[str, str], written: list[str]) -> None:
    for descriptor, path in enumerate(written, 1):
        with open(path, "w") as file:
            os.dup2(file.fileno(), descriptor)
    folder = os.path.dirname(program)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path = [program], [folder, *sys.path]
    runpy.run_path(program, run_name="__main__")
