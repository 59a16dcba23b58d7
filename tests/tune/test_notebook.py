"""examples/tune_your_kernel.ipynb runs, cell by cell, without GPU or Jupyter, and prints what it shows."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "tune_your_kernel.ipynb"


def run(cell, path, names):
    """Execute a cell from a file, because Triton reads a kernel's source from its file. Returns the printed text."""
    path.write_text("".join(cell["source"]))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(path.read_text(), path, "exec"), names)
    return said.getvalue()


def without_seconds(text):
    return re.sub(r"in \d+\.\d s", "in N s", text)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    folder, names = tmp_path_factory.mktemp("cells"), {"__name__": "__main__"}
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    return [(cell, run(cell, folder / f"cell_{n}.py", names)) for n, cell in enumerate(cells)], names


def test_every_cell_prints_what_it_shows(executed):
    for cell, said in executed[0]:
        shown = ["".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream"]
        assert without_seconds(said) == without_seconds("".join(shown))


def test_more_computation_wants_fewer_communicating_programs(executed):
    """The notebook says this of its table."""
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
