"""Every Python block of the README and of docs/ runs, on the simulator where it needs ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> str:
    """The page's Python blocks as one program, each line at its line number in the page.

    They go to a file, because Triton reads a kernel's text from its file.
    """
    text, lines = page.read_text(), []
    for match in BLOCK.finditer(text):
        lines += [""] * (text.count("\n", 0, match.start(1)) - len(lines))
        lines += match.group(1).splitlines()
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run(page, tmp_path):
    program = tmp_path / f"{page.stem}.py"
    program.write_text(blocks(page))
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{page.name} (line numbers are the page's)\n{done.stdout}\n{done.stderr}"


def test_blocks_keep_their_line_numbers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# title\n\n```python\nx = 1\n```\n\n```bash\nls\n```\n\n```python\ny = x\n```\n")
    assert blocks(page).splitlines() == ["", "", "", "x = 1", "", "", "", "", "", "", "", "y = x"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
