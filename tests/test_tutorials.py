"""The tutorials' notebooks and pictures are those of their pages."""

import ast
import json
import os
import subprocess
import sys

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


def test_there_are_six_notebooks_and_three_pictures():
    assert [page.stem[0] for page in notebooks.PAGES] == ["1", "2", "3", "4", "6", "7"]
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


CELLS = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from IPython.core.interactiveshell import InteractiveShell

shell, said = InteractiveShell.instance(), []
for notebook in sys.argv[1:]:
    for cell in json.load(open(notebook))["cells"]:
        if cell["cell_type"] == "code":
            with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()) as errors:
                result = shell.run_cell("".join(cell["source"]), store_history=True)
            said.append([printed.getvalue(), errors.getvalue(), result.success])
print(json.dumps(said))
"""
PLAYED = notebooks.PAGES[0], notebooks.PAGES[3]  # to save time; the pages' own test runs all as programs


def test_the_cells_run_in_a_notebook_and_print_what_they_show(tmp_path):
    script = tmp_path / "cells.py"
    script.write_text(CELLS)
    books = [page.with_suffix(".ipynb") for page in PLAYED]
    done = subprocess.run(
        [sys.executable, str(script), *map(str, books)], cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env=os.environ | {"PYTHONPATH": str(notebooks.ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cells = [c for book in books for c in json.loads(book.read_text())["cells"] if c["cell_type"] == "code"]
    ran = json.loads(done.stdout.splitlines()[-1])
    assert len(ran) == len(cells)
    for cell, (printed, errors, success) in zip(cells, ran):
        assert success, printed + errors
        assert errors == ""
        assert all("".join(output["text"]).strip() in printed for output in cell["outputs"])
    assert all((tmp_path / picture.name).is_file() for page in PLAYED for picture in notebooks.pictures(page))
