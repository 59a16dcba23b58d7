"""The list of mistakes follows the code: `make mutants` can make each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.mutants import MUTANTS

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
