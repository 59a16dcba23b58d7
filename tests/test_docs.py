"""README.md and docs: every Python block runs and prints the output shown, and every public name is described."""

import importlib.util
import inspect
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import typer
from triton.language.core import constexpr

import pkt
import pkt.language as pl
from benchmarks import reference
from pkt.cli import app
from pkt.tune.command import SIMULATED_MOST
from tests.programs import ran
from tests.test_arrows import imported, sources

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BESIDE = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)
DEVICE_PAGE, HOST_PAGE = ROOT / "docs" / "device-api.md", ROOT / "docs" / "host-api.md"
MODULES = {"pl": pl, "pl.tile": pl.tile, "pl.shmem": pl.shmem, "pl.order": pl.order}


def blocks(page: Path) -> str:
    """The page's Python blocks as one program, in which each line keeps its line number of the page.

    The caller writes it to a file, because Triton reads a kernel's text from its file.
    """
    text, lines = page.read_text(), []
    for match in BLOCK.finditer(text):
        lines += [""] * (text.count("\n", 0, match.start(1)) - len(lines))
        lines += match.group(1).splitlines()
    return "\n".join(lines) + "\n"


def normal(line: str) -> str:
    """A line of output without the parts that may differ: file, line and speed."""
    line = re.sub(r"[\w-]+\.py:\d+", "file.py:N", line)
    line = re.sub(r"\(\d+ a second\)", "(N a second)", line)
    return re.sub(r"[\s━─]+", " ", line).strip()


def not_printed(page: Path, printed: str) -> list[str]:
    """Lines of the page's ```text blocks, and comments beside a print, that its program did not print."""
    text, found = page.read_text(), {normal(line) for line in printed.splitlines()}
    shown = [line for match in OUTPUT.finditer(text) for line in match.group(1).splitlines()]
    shown += [beside for match in BLOCK.finditer(text) for beside in BESIDE.findall(match.group(1))]
    return [line for line in shown if normal(line) not in found]


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda page: page.name)
def test_blocks_run_and_print_what_the_page_shows(page, tmp_path):
    program = tmp_path / f"{page.stem}.py"
    program.write_text(blocks(page))
    clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PKT_NCCL")}
    clean["PKT_TUNE_CACHE"] = str(tmp_path / "tuned")  # the page must not show choices tuned on this machine
    done = ran(program, clean)
    said = f"{page.name} (line numbers are the page's)\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    missing = not_printed(page, done.stdout)
    assert not missing, "\n".join(["the page shows these lines, which its program does not print:", *missing, "", said])


def test_blocks_keep_their_line_numbers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# title\n\n```python\nx = 1\n```\n\n```bash\nls\n```\n\n```python\ny = x\n```\n")
    assert blocks(page).splitlines() == ["", "", "", "x = 1", "", "", "", "", "", "", "", "y = x"]


def test_not_printed_finds_a_missing_output(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```text\nrank 0: at ring.py:9, found 1\nrank 1: found 2\n```\n```python\nprint(x)  # 5\n```\n")
    assert not_printed(page, "rank 0: at page.py:31, found 1\nrank 1:  found 3\n") == ["rank 1: found 2", "5"]


def anchors(page: Path) -> set[str]:
    """The page's headings as a link's `#...` names them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_a_target(page):
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", prose):
        if "://" not in target:
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(there), f"{page.name} links to {target}#{anchor}"


class Row(NamedTuple):
    """A row of the tour in docs/design.md: places, what they hold, and what they may import ("" for everything)."""

    places: list[str]
    text: str
    imports: list[str]


def tour() -> list[Row]:
    section = (ROOT / "docs" / "design.md").read_text().split("## Tour\n")[1].split("\n## ")[0]
    path = re.compile(r"`([\w./]+)`|everything")
    rows = [line.split("|")[1:4] for line in section.splitlines() if line.startswith("| `")]
    return [Row(path.findall(places), text, path.findall(imports)) for places, text, imports in rows]


def exists(name: str) -> bool:
    return (ROOT / name).is_dir() if name.endswith("/") else (ROOT / name).is_file()


def test_the_tour_names_existing_files():
    missing = set()
    for row in tour():
        beside = re.findall(r"`([\w./]+/[\w./]*)`", row.text)
        missing |= {name for name in (*row.places, *row.imports, *beside) if name and not exists(name)}
        for folder in (place for place in row.places if place.endswith("/")):
            names = {f"{folder}{name}" for name in re.findall(r"`(\w+)`", row.text)}
            missing |= {name for name in names if not exists(name + ".py") and not exists(name + "/")}
    assert not missing, f"docs/design.md names missing files: {sorted(missing)}"


def test_the_tour_has_every_file_and_folder_of_the_top_level():
    text = (ROOT / "docs" / "design.md").read_text().split("## Tour\n")[1].split("\n## ")[0]
    found = {
        f.relative_to(ROOT).as_posix() + "/" * f.is_dir() for top in ("pkt", "kernels") for f in (ROOT / top).iterdir()
    }
    found = {name for name in found if re.fullmatch(r"\w+/[a-z]\w*(\.py|/)", name)}
    assert len(found) > 40
    missing = sorted(name for name in found if f"`{name}`" not in text)
    assert not missing, f"docs/design.md's tour does not name {missing}"


def test_imports_follow_the_tour():
    """A row may import its top folder, its last column, pkt/errors.py, pkt/progress.py and pkt/wording.py."""
    always = {"pkt/errors.py", "pkt/progress.py", "pkt/wording.py"}
    allowed: dict[str, set[str]] = {}
    for row in tour():
        for top in {re.sub(r"^(pkt/\w+/|kernels/).*", r"\1", place) for place in row.places}:
            allowed[top] = allowed.get(top, always) | {top, *row.imports}
    files = {module: path.relative_to(ROOT).as_posix() for module, path in sources().items()}
    wrong = []
    for module, path in files.items():
        may = next((names for top, names in allowed.items() if path.startswith(top)), always)
        found = {files[name] for name in imported(module, ROOT / path) & files.keys() - {"pkt"}}
        wrong += [f"{path} imports {name}" for name in sorted(found) if not name.startswith(tuple(may))]
    assert not wrong, "\n".join(wrong)


def signature(fn) -> str:
    """Names and defaults as the device page writes them: `ptr, value, peer, world, mask=None`."""
    parts = []
    for p in inspect.signature(getattr(fn, "fn", fn)).parameters.values():
        default = p.default.value if isinstance(p.default, constexpr) else p.default
        text = f'"{default}"' if isinstance(default, str) else repr(default)
        parts.append(p.name if p.default is p.empty else f"{p.name}={text}")
    return ", ".join(parts)


def device_functions() -> dict[str, str]:
    """Every device function that a kernel may call, as `pl.tile.wait`, -> its signature."""
    found = {}
    for prefix, module in MODULES.items():
        for name, value in vars(module).items():
            defined_here = name in getattr(module, "__all__", ()) or getattr(value, "__module__", "") == module.__name__
            alias = module is pl.shmem and name in ("remote_ptr", "fence", "quiet")
            if hasattr(value, "fn") and not name.startswith("_") and (defined_here or alias):
                found[f"{prefix}.{name}"] = signature(value)
    return found


def test_device_page_describes_every_function_with_its_signature():
    written = re.findall(r"`(pl(?:\.\w+)?\.\w+)\(([^`]*)\)`", DEVICE_PAGE.read_text())
    missing = [f"{name}({args})" for name, args in device_functions().items() if (name, args) not in written]
    assert not missing, f"{DEVICE_PAGE.name} lacks, or gives another signature for: {missing}"
    assert len(device_functions()) > 50


def test_host_page_describes_every_public_name():
    text = HOST_PAGE.read_text()
    missing = [name for name in pkt.__all__ if not re.search(rf"`(?:pkt\.)?{name}\b", text)]
    assert not missing, f"{HOST_PAGE.name} does not describe {missing}"


def test_the_operators_page_is_generated_from_the_declarations():
    page = ROOT / "docs" / "operators.md"
    assert page.read_text() == reference.page(), f"{page.name}: run python -m benchmarks.reference > docs/{page.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page):
    for path, name in re.findall(r"`(?:T )?(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
        assert (ROOT / path).is_file(), f"{page.name} names {path}"
        assert f"def {name}(" in (ROOT / path).read_text() or not name, f"{page.name} names {path}::{name}"


# adding-an-operator.md names an operator that it adds.
@pytest.mark.parametrize("page", [p for p in PAGES if p.stem != "adding-an-operator"], ids=lambda page: page.name)
def test_named_functions_exist(page):
    """Every `pkt.name` and `pl.name` of a page, in text and in code."""
    for prefix, names in re.findall(r"(?<![\w.-])(pkt|pl)\.(\w+(?:\.\w+)*)(?![\w*])", page.read_text()):
        value: object = {"pkt": pkt, "pl": pl}[prefix]
        for name in names.split("."):
            if not inspect.ismodule(value):
                break  # an attribute of a class, or of what a call returns
            value = getattr(value, name, None) or importlib.util.find_spec(f"{value.__name__}.{name}")
            assert value is not None, f"{page.name} names {prefix}.{names}"


SHELL = re.compile(r"^```(?:bash|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def refused(text: str) -> str:
    """What bash finds wrong with a shell text, and with the programs of its `bash -c '...'`, without running them."""
    found = ""
    for part in (text, *re.findall(r"bash -c '([^']*)'", text)):
        done = subprocess.run(["bash", "-n"], input=part, capture_output=True, text=True, timeout=60)
        found += done.stderr or "it ended with an error" * done.returncode
    return found


@pytest.mark.parametrize("page", [p for p in PAGES if SHELL.search(p.read_text())], ids=lambda page: page.name)
def test_shell_texts_have_no_error_of_syntax(page: Path) -> None:
    for text in SHELL.findall(page.read_text()):
        assert not refused(text), f"{page.name}:\n{text}"


def test_refused_finds_an_open_quote_and_an_open_loop() -> None:
    assert refused("for rank in 0 1; do\n")
    assert refused("srun bash -c 'if true; then\n'")
    assert not refused("srun bash -c 'true'\n")


def test_the_variables_of_the_launching_page_are_read() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "pkt").rglob("*.py"))
    named = set(re.findall(r"`(PKT_\w+)`", (ROOT / "docs/launching.md").read_text()))
    assert len(named) >= 4
    assert not [name for name in named if f'"{name}"' not in code]


COMMAND = re.compile(r"^(?:python -m pkt\.|pkt )(doctor|simulate|tune|explain|bench|demo)\b *([^#\n]*)", re.MULTILINE)
COMMANDS = sorted({found for page in PAGES for found in COMMAND.findall(page.read_text())})


@pytest.mark.parametrize(("name", "options"), COMMANDS, ids=lambda text: text.strip())
def test_each_command_that_a_page_shows_is_one(name: str, options: str) -> None:
    """Its options are parsed, and it is not run."""
    command = typer.main.get_command(app).commands[name]
    given = command.make_context(name, shlex.split(options)).params
    if given.get("device") == "cpu":
        assert given["m"] * given["n"] * given["k"] <= SIMULATED_MOST, "too large for the simulator"


def test_torchs_names_in_the_page_for_newcomers_exist():
    text = (ROOT / "docs" / "coming-from.md").read_text()
    handle = torch._C._distributed_c10d._SymmetricMemory
    import torch.distributed._symmetric_memory as symm_mem  # which registers torch.ops.symm_mem

    owners = {
        "dist": torch.distributed,
        "symm_mem": symm_mem,
        "hdl": handle,
        "torch.ops.symm_mem": torch.ops.symm_mem,
    }
    for prefix, owner in owners.items():
        names = re.findall(rf"`{re.escape(prefix)}\.(\w+)", text)
        assert names, prefix
        assert [name for name in names if not hasattr(owner, name)] == []
