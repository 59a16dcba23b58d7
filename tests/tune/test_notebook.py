"""examples/tune_your_kernel.ipynb runs, cell by cell, without GPU or Jupyter, and prints what it shows."""

import ast
import base64
import contextlib
import io
import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "tune_your_kernel.ipynb"
PNG = b"\x89PNG"


def run(cell, path, names):
    """Execute a cell as Jupyter does: what it printed, and the value of its last expression. From a file, because
    Triton reads a kernel's text from its file."""
    path.write_text("".join(cell["source"]))
    tree = ast.parse(path.read_text())
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(tree, path, "exec"), names)
        value = eval(compile(ast.Expression(last.value), path, "eval"), names) if last else None
    return said.getvalue(), value


def without_seconds(text):
    return re.sub(r"in \d+\.\d s", "in N s", text)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    folder, names = tmp_path_factory.mktemp("cells"), {"__name__": "__main__"}
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    return [(cell, *run(cell, folder / f"cell_{n}.py", names)) for n, cell in enumerate(cells)], names


def test_every_cell_prints_what_it_shows(executed):
    for cell, said, _ in executed[0]:
        shown = ["".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream"]
        assert without_seconds(said) == without_seconds("".join(shown))


def test_pictures_are_drawn_where_pictures_are_shown(executed):
    for cell, _, value in executed[0]:
        pictures = [output["data"]["image/png"] for output in cell["outputs"] if "data" in output]
        assert len(pictures) == (hasattr(value, "_repr_png_"))
        for picture in pictures:
            assert base64.b64decode(picture).startswith(PNG)
            assert value._repr_png_().startswith(PNG)
    assert sum(hasattr(value, "_repr_png_") for _, _, value in executed[0]) == 2


def test_more_to_compute_wants_fewer_to_communicate(executed):
    """What the notebook says of its picture."""
    best = [search.best["num_comm_sms"] for search in executed[1]["searches"]]
    assert best == sorted(best, reverse=True)
    assert best[0] > best[-1]
    for search in executed[1]["searches"]:
        times = {c.config["num_comm_sms"]: c.time for c in search.candidates}
        assert min(times) < search.best["num_comm_sms"] < max(times)


def test_cells_are_few_and_short():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert len(cells) <= 14
    assert max(len("".join(cell["source"]).splitlines()) for cell in cells) <= 40
    assert all(len(line.rstrip("\n")) <= 120 for cell in cells for line in cell["source"])
