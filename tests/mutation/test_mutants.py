"""The list of mistakes follows the code: `make mutants` can make each of them. A sample is made here."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.__main__ import Verdict, culprit, known_files, part
from tests.mutation.mutants import MUTANTS, QUICK

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_each_fragment_occurs_once(file: str) -> None:
    text = (ROOT / file).read_text()
    assert {m.reason: text.count(m.old) for m in MUTANTS if m.file == file and text.count(m.old) != 1} == {}


def test_mistakes_change_something_and_name_tests_that_exist() -> None:
    for mutant in MUTANTS:
        assert mutant.old != mutant.new, mutant.reason
        files = [name.partition("::")[0] for name in mutant.tests if name.startswith("tests/")]
        assert files, mutant.reason
        assert all((ROOT / name).exists() for name in files), mutant.reason
        for file, _, test in (name.partition("::") for name in mutant.tests if "::" in name):
            assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), mutant.reason
    assert all((ROOT / name).exists() for name in QUICK)


def test_there_are_enough_and_few_are_excused() -> None:
    assert len(MUTANTS) >= 250
    assert sum(bool(mutant.excuse) for mutant in MUTANTS) <= 10


def test_a_failed_test_is_named() -> None:
    said = "F\n=== short test summary info ===\nFAILED tests/a.py::test_b[1] - assert 1 == 2\n1 failed in 1 s\n"
    assert culprit(said) == "tests/a.py::test_b[1]"
    verdict = Verdict("killed", 1.25, MUTANTS[0], said)
    assert verdict.line().split("\t") == ["killed", "1.2", MUTANTS[0].file, MUTANTS[0].reason, "tests/a.py::test_b[1]"]


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "a/2", "1/b"])
def test_a_part_is_one_of_some(text: str) -> None:
    assert part("2/3") == (2, 3)
    with pytest.raises(argparse.ArgumentTypeError, match="wanted K/N"):
        part(text)


def test_files_are_found_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name for name in known_files() if "__pycache__" not in name.parts}
    monkeypatch.setenv("PATH", "")
    assert {Path("pyproject.toml"), Path("pkt/errors.py"), Path("tests/mutation/child.py")} <= set(known_files())
    assert {name for name in known if name.suffix == ".py"} == {n for n in known_files() if n.suffix == ".py"}


def test_ten_mistakes_are_noticed() -> None:
    """Another ten for each commit; `python -m tests.mutation --sample 10 --seed COMMIT` repeats them."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if not commit:
        pytest.skip("the driver asks git which files there are")
    command = [sys.executable, "-m", "tests.mutation", "--sample", "10", "--seed", commit.strip(), "--jobs", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"commit {commit}{done.stdout}{done.stderr}"
    assert "10 of " in done.stdout
