"""Write the notebooks of the tutorials, and draw the tutorials' pictures, from the pages alone.

    python -m benchmarks.notebooks

A page is the one source: each of its Python blocks is a cell, with the output that the page shows.
tests/test_tutorials.py fails if a notebook or a picture is older than its page.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._harness import ROOT, no_options
from benchmarks._pictures import KEY
from pkt.progress import steps

FOLDER = ROOT / "docs" / "tutorials"
PAGES = sorted(FOLDER.glob("[1-467]-*.md"))  # 5 needs GPUs
PARTS = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
HERE = re.compile(r"!\[[^\]]*\]\(([\w-]+\.png)\)")


def notebook(page: Path) -> str:
    """The notebook of a page, as JSON."""
    text, cells, at = page.read_text(), [], 0
    for match in PARTS.finditer(text):
        cells.append(_cell("markdown", text[at : match.start()]))
        cells.append(_cell("code", match[1]) | {"execution_count": None, "outputs": _outputs(match[2])})
        at = match.end()
    cells = [cell for cell in [*cells, _cell("markdown", text[at:])] if cell["source"]]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, text: str) -> dict[str, Any]:
    return {"cell_type": kind, "metadata": {}, "source": text.strip("\n").splitlines(keepends=True)}


def _outputs(shown: str | None) -> list[dict[str, Any]]:
    if not shown:
        return []
    return [{"output_type": "stream", "name": "stdout", "text": shown.splitlines(keepends=True)}]


def program(page: Path) -> str:
    """The page's Python blocks, one after the other."""
    return "\n".join(match[1] for match in PARTS.finditer(page.read_text()))


def digest(page: Path) -> str:
    return hashlib.sha256(program(page).encode()).hexdigest()


def pictures(page: Path) -> list[Path]:
    """The pictures that the page's own program draws."""
    return [page.parent / name for name in HERE.findall(page.read_text())]


def draw(page: Path) -> None:
    """Run the page's program, and keep the pictures that it draws, with the program's digest."""
    from PIL import Image, PngImagePlugin

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "tutorial.py")
        script.write_text(program(page))
        subprocess.run([sys.executable, str(script)], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for picture in pictures(page):
            info = PngImagePlugin.PngInfo()
            info.add_text(KEY, digest(page))
            with Image.open(Path(folder, picture.name)) as image:
                image.save(picture, pnginfo=info, optimize=True)


def main() -> None:
    for page in steps(PAGES, "notebooks"):
        page.with_suffix(".ipynb").write_text(notebook(page))
        if pictures(page):
            draw(page)
        print(f"written: {page.with_suffix('.ipynb').relative_to(ROOT)}")


if __name__ == "__main__":
    no_options(__doc__)
    main()
