"""docs/found.md: each program of examples/found is found broken, with the message shown, and is right when mended."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import pkt

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = sorted((ROOT / "examples" / "found").glob("*.py"))
SECTIONS = (ROOT / "docs" / "found.md").read_text().split("\n## ")[1:]
COMMIT = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/blob/[0-9a-f]{40}/\S+\.py\)")


def section(program: Path) -> str:
    (found,) = [text for text in SECTIONS if f"](../examples/found/{program.name})" in text]
    return found


def main_of(program: Path) -> Any:
    spec = importlib.util.spec_from_file_location(program.stem, program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def said(failure: BaseException) -> list[str]:
    """The lines of a message; of a traceback, the first and the last."""
    lines = str(failure).rstrip().splitlines()
    return [lines[0], lines[-1]] if isinstance(failure, pkt.RankFailed) else lines


def test_each_defect_has_a_program_and_names_its_commit() -> None:
    assert len(PROGRAMS) == len(SECTIONS) == 7
    assert all(COMMIT.search(section(program)) for program in PROGRAMS)
    assert all(len(program.read_text().splitlines()) <= 60 for program in PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_the_broken_form_prints_what_the_page_shows(program: Path) -> None:
    report = pkt.simulate(main_of(program), ranks=2, seeds=20, args=(False,), max_findings=1)
    (finding,) = report.findings
    (shown,) = re.findall(r"^```console\n(.*?)\n```$", section(program), re.MULTILINE | re.DOTALL)
    assert said(finding.failure) == shown.splitlines()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_the_mended_form_is_right(program: Path) -> None:
    pkt.simulate(main_of(program), ranks=2, seeds=50, args=(True,)).check()
