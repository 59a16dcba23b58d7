"""The README opens with a sentence, a measured table and a program; its figures are those of the committed results."""

import pytest

from benchmarks import figures
from tests.test_docs import BLOCK, ROOT

README = ROOT / "README.md"


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_figures_are_those_of_the_results_files(page):
    text = page.read_text()
    assert text == figures.filled(text), f"{page.name}: run python -m benchmarks.figures"


def test_a_changed_figure_is_found():
    text = README.read_text()
    measured = next(line for line in text.splitlines() if line.startswith("| GEMM"))
    wrong = measured.replace(measured.split("|")[2], " 0.0001 s ")
    assert figures.filled(text.replace(measured, wrong)) == text


def test_the_first_forty_lines_say_what_it_is_and_run():
    text = README.read_text()
    head = "\n".join(text.splitlines()[:39]) + "\n"
    assert figures.PLACE.search(head), "a measured table before line 40"
    programs = BLOCK.findall(head)
    assert len(programs) == 1, "one whole program before line 40"
    assert len(programs[0].splitlines()) <= 21
    assert "pkt.launch(" in programs[0]


def test_numbers_are_short():
    assert [figures.number(x) for x in (0.4214, 1.374, 24.23, 100, 1234.5)] == ["0.42", "1.4", "24.2", "100", "1,234"]
