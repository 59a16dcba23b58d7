"""Which part may import which, read off the import statements (those inside functions too)."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# part -> (parts of pkt it may import besides itself, packages of others besides the standard library)
ARROWS = {
    "pkt.wording": (set(), set()),
    "pkt.errors": ({"pkt.wording"}, set()),
    "pkt.language": ({"pkt.errors"}, {"triton"}),
    # The one door from the host side to the simulator: pkt.launch(device="cpu") opens it when called.
    "pkt.launcher": ({"pkt.errors", "pkt.runtime", "pkt.simulate"}, {"torch"}),
    "pkt.runtime": (
        {"pkt.errors", "pkt.wording", "pkt.language.world"},
        {"torch", "triton", "cuda", "cloudpickle", "numpy"},
    ),
    "pkt.simulate": (
        {"pkt.errors", "pkt.wording", "pkt.language", "pkt.runtime", "pkt.trace"},
        {"torch", "triton", "numpy", "greenlet", "rich", "typer"},
    ),
    "pkt.doctor": (
        {"pkt.errors", "pkt.wording", "pkt.language", "pkt.launcher", "pkt.runtime"},
        {"torch", "triton", "rich"},
    ),
    "pkt.bench": ({"pkt.tune.explanation"}, set()),
    "pkt.cli": ({"pkt.doctor", "pkt.simulate", "pkt.tune.command"}, {"typer", "rich"}),
    "pkt.layouts": ({"pkt.errors", "pkt.language", "pkt.runtime"}, {"torch", "triton"}),
    "pkt.trace": (set(), {"rich", "matplotlib"}),
    # The tuner's doors to the operators: `pkt tune` loads one by its name when a search runs, `pkt.explain` its rule.
    "pkt.tune.command": ({"pkt.errors", "pkt.launcher", "pkt.runtime", "pkt.tune"}, {"torch", "typer", "rich"}),
    "pkt.tune": (
        {"pkt.errors", "pkt.wording", "pkt.language", "pkt.runtime"},
        {"torch", "triton", "numpy", "rich", "platformdirs", "matplotlib"},
    ),
    # An operator asks the tuner for its settings where it is given none; the tuner knows operators by name only.
    "pkt.kernels": ({"pkt.errors", "pkt.language", "pkt.runtime", "pkt.tune.tuner"}, {"torch", "triton"}),
}


def sources() -> dict[str, Path]:
    """Every module of the package as installed: its name and file."""
    found = {}
    for folder, package in (("pkt", "pkt"), ("kernels", "pkt.kernels")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def imported(module: str, path: Path) -> set[str]:
    """Full names that `module` imports; `from a import b` counts as a.b where that is a module, else as a."""
    modules, names = sources(), set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                names.add(full if full in modules else base)
    return names


def within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


@pytest.mark.parametrize("module", sources())
def test_imports_follow_the_arrows(module):
    part = next((part for part in ARROWS if within(module, part)), None)
    if part is None:
        assert module == "pkt", f"{module} belongs to no part: give it arrows"
        return  # pkt/__init__ re-exports whatever it likes
    ours, others = ARROWS[part]
    for name in imported(module, sources()[module]):
        top = name.partition(".")[0]
        if top == "pkt":
            assert any(within(name, allowed) for allowed in {part, *ours}), f"{module} imports {name}"
        else:
            assert top in sys.stdlib_module_names or top in others, f"{module} imports {name}"


def test_parts_exist():
    """A part that was renamed would otherwise pass unseen."""
    tops = {".".join(module.split(".")[:2]) for module in sources() if module != "pkt"}
    assert {"pkt.language", "pkt.runtime", "pkt.simulate", "pkt.trace", "pkt.kernels"} <= tops


def test_the_walk_sees_every_form(tmp_path):
    path = tmp_path / "probe.py"
    path.write_text(
        "import numpy.linalg\nfrom pkt import errors\nfrom . import machine\n"
        "from ..language import world as w\ndef f():\n    from pkt.runtime import anything\n"
    )
    assert imported("pkt.simulate.probe", path) == {
        "numpy.linalg",
        "pkt.errors",
        "pkt.simulate.machine",
        "pkt.language.world",
        "pkt.runtime",
    }


def test_inline_ptx_is_in_one_place():
    holders = {module for module, path in sources().items() if "inline_asm_elementwise" in path.read_text()}
    assert holders == {"pkt.language.ptx.primitive"}


def test_messages_are_built_in_one_place():
    """`PktError.of` takes a text; only the builders of pkt.errors call it."""
    built = re.compile(r"\b[A-Z]\w+\.of\(\s*f?\"")
    assert {module for module, path in sources().items() if built.search(path.read_text())} == set()
