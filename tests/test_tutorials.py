"""The tutorials' notebooks and pictures are those of their pages."""

import ast
import json

import pytest

from benchmarks import notebooks
from benchmarks._pictures import drawn_from


@pytest.mark.parametrize("page", notebooks.PAGES, ids=lambda page: page.stem)
def test_the_notebook_is_that_of_its_page(page):
    made = page.with_suffix(".ipynb").read_text()
    assert made == notebooks.notebook(page), f"{page.name}: run python -m benchmarks.notebooks"
    for cell in json.loads(made)["cells"]:
        if cell["cell_type"] == "code":
            ast.parse("".join(cell["source"]))
    code = "\n".join("".join(c["source"]) + "\n" for c in json.loads(made)["cells"] if c["cell_type"] == "code")
    assert ast.dump(ast.parse(code)) == ast.dump(ast.parse(notebooks.program(page)))


@pytest.mark.parametrize("page", [p for p in notebooks.PAGES if notebooks.pictures(p)], ids=lambda page: page.stem)
def test_no_picture_is_older_than_its_page(page):
    image = pytest.importorskip("PIL.Image")
    for picture in notebooks.pictures(page):
        assert drawn_from(picture) == notebooks.digest(page), f"{page.name}: run python -m benchmarks.notebooks"
        assert image.open(picture).width <= 2000


def test_there_are_four_notebooks_and_three_pictures():
    assert [page.stem[0] for page in notebooks.PAGES] == ["1", "2", "3", "4"]
    assert sum(len(notebooks.pictures(page)) for page in notebooks.PAGES) == 3


def test_a_changed_program_makes_the_picture_old(tmp_path):
    page = tmp_path / "1-page.md"
    page.write_text("# Title\n\n```python\nx = 1\n```\n\n```text\n1\n```\n\nText.\n")
    first = notebooks.digest(page)
    cells = json.loads(notebooks.notebook(page))["cells"]
    assert [(c["cell_type"], "".join(c["source"])) for c in cells] == [
        ("markdown", "# Title"), ("code", "x = 1"), ("markdown", "Text."),
    ]  # fmt: skip
    assert cells[1]["outputs"][0]["text"] == ["1\n"]
    page.write_text(page.read_text().replace("x = 1", "x = 2"))
    assert notebooks.digest(page) != first
