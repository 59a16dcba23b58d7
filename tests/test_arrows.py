"""Each part imports only the parts that it may, and imports form no circle. The tests read the source.

An import counts wherever it stands: at the top of a file, in a function, under TYPE_CHECKING, or as a string that is
given to import_module, to `python -m` or to a worker ("module:function"). To import a module also imports the packages
around it, except those that the importer is in itself.
"""

import ast
import functools
import itertools
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A part is a module, or a package without the modules that have a line of their own. It may import itself, the
# standard library, and ([modules and packages of pkt], [third-party packages]).
ARROWS = {
    "pkt.wording": ([], ["rich"]),
    "pkt.progress": ([], ["rich", "IPython"]),
    "pkt.errors": (["pkt.wording"], []),
    "pkt.language": (["pkt.errors", "pkt.language.ptx.nvshmem"], ["triton"]),
    "pkt.language.ptx.nvshmem": (["pkt.errors"], ["triton", "platformdirs"]),
    "pkt.trace": (["pkt.wording"], ["rich", "matplotlib"]),
    # ------------------------------------------------------------------------------------------ host side, lowest first
    "pkt.runtime": ([], []),
    "pkt.runtime.backend": (["pkt.runtime.processes"], ["torch"]),
    "pkt.runtime.processes": (["pkt.errors", "pkt.wording"], ["torch", "numpy"]),
    "pkt.runtime.memory": (["pkt.errors", "pkt.wording", "pkt.language.world", "pkt.runtime.backend"], ["torch"]),
    "pkt.runtime.kept": (["pkt.errors", "pkt.runtime.memory.heap"], []),
    "pkt.runtime.team": (["pkt.errors", "pkt.language.world", "pkt.runtime.backend"], ["torch"]),
    "pkt.runtime.world": (
        [
            "pkt.errors",
            "pkt.wording",
            "pkt.language.world",
            "pkt.runtime.backend",
            "pkt.runtime.kept",
            "pkt.runtime.launch.streams",
            "pkt.runtime.memory.heap",
            "pkt.runtime.processes.wire",
            "pkt.runtime.team",
        ],
        ["torch", "triton"],
    ),
    # Tensors and factories are part of the memory package, but they import the world.
    "pkt.runtime.memory.tensor": (
        ["pkt.errors", "pkt.wording", "pkt.runtime.memory", "pkt.runtime.world"],
        ["torch"],
    ),
    "pkt.runtime.memory.pool": (["pkt.errors", "pkt.runtime.memory.tensor", "pkt.runtime.world"], ["torch"]),
    "pkt.runtime.memory.checks": (
        ["pkt.errors", "pkt.runtime.memory.pool", "pkt.runtime.memory.tensor", "pkt.runtime.world"],
        ["torch"],
    ),
    "pkt.runtime.memory.factories": (
        ["pkt.errors", "pkt.wording"]
        + ["pkt.runtime.backend", "pkt.runtime.memory", "pkt.runtime.memory.tensor", "pkt.runtime.world"],
        ["torch"],
    ),
    "pkt.runtime.groups": (["pkt.errors", "pkt.runtime.world"], ["torch"]),
    "pkt.runtime.launch.passing": (["pkt.language.world", "pkt.runtime.memory.tensor"], ["torch", "triton"]),
    "pkt.runtime.launch": (
        ["pkt.errors", "pkt.runtime.launch.passing", "pkt.runtime.world"],
        ["torch", "triton", "cuda"],
    ),
    "pkt.runtime.launch.streams": ([], ["torch"]),
    "pkt.runtime.gpu": (
        [
            "pkt.errors",
            "pkt.wording",
            "pkt.language.world",
            "pkt.language.ptx.nvshmem",
            "pkt.runtime.backend",
            "pkt.runtime.memory.heap",
            "pkt.runtime.processes",
        ],
        ["torch", "triton", "cuda"],
    ),
    "pkt.runtime.workers": (["pkt.errors", "pkt.progress", "pkt.runtime.processes"], ["triton", "cloudpickle"]),
    "pkt.runtime.bootstrap": (
        [
            "pkt.errors",
            "pkt.wording",
            "pkt.runtime.gpu",
            "pkt.runtime.launch",
            "pkt.runtime.memory.heap",
            "pkt.runtime.processes",
            "pkt.runtime.world",
        ],
        ["torch"],
    ),
    # ------------------------------------------------------------------------------------------------ above the runtime
    "pkt.simulate": (
        ["pkt.errors", "pkt.progress", "pkt.wording", "pkt.language", "pkt.trace"]
        + ["pkt.runtime.backend", "pkt.runtime.memory.heap", "pkt.runtime.memory.tensor", "pkt.runtime.world"],
        ["torch", "triton", "numpy", "greenlet", "rich", "typer"],
    ),
    "pkt.networks": (["pkt.language", "pkt.language.ptx.nvshmem"], []),
    "pkt.launcher": (["pkt.errors", "pkt.wording", "pkt.runtime", "pkt.simulate"], ["torch"]),
    "pkt.deep_ep": (["pkt.errors", "pkt.kernels", "pkt.launcher", "pkt.runtime"], ["torch"]),
    "pkt.layouts": (["pkt.errors", "pkt.language", "pkt.runtime"], ["torch", "triton"]),
    "pkt.doctor": (
        ["pkt.errors", "pkt.progress", "pkt.wording", "pkt.language", "pkt.launcher", "pkt.runtime", "pkt.model"]
        + ["pkt.networks"],
        ["torch", "triton", "rich"],
    ),
    # Operators and the tuner meet in pkt.model and in the registry, pkt.kernels.operator; pkt/__init__ joins them.
    "pkt.model": (["pkt.errors", "pkt.wording"], ["torch", "triton", "numpy", "platformdirs"]),
    "pkt.kernels.agreement": (["pkt.errors", "pkt.wording", "pkt.runtime"], ["torch"]),
    "pkt.kernels.declaration": (["pkt.errors", "pkt.wording", "pkt.runtime", "pkt.model"], ["torch"]),
    "pkt.kernels.forecast": (["pkt.errors", "pkt.runtime", "pkt.model", "pkt.kernels.declaration"], ["torch"]),
    "pkt.kernels.staging": (["pkt.errors", "pkt.runtime", "pkt.kernels.declaration"], ["torch"]),
    "pkt.kernels.shared": (
        ["pkt.errors", "pkt.wording", "pkt.language", "pkt.runtime", "pkt.model", "pkt.kernels.declaration"]
        + ["pkt.kernels.gradients"],
        ["torch", "triton"],
    ),
    "pkt.kernels.gradients": (["pkt.errors", "pkt.runtime", "pkt.kernels.shared"], ["torch"]),
    "pkt.kernels.traced": (["pkt.errors", "pkt.runtime", "pkt.kernels.gradients"], ["torch"]),
    # An operator, lowest first: what it declares, which form a call takes, and how that is planned and launched.
    "pkt.kernels.declared": (
        ["pkt.errors", "pkt.wording", "pkt.runtime", "pkt.kernels.agreement", "pkt.kernels.declaration"]
        + ["pkt.kernels.gradients", "pkt.kernels.shared", "pkt.kernels.traced"],
        ["torch"],
    ),
    "pkt.kernels.choosing": (
        ["pkt.errors", "pkt.wording", "pkt.runtime", "pkt.model"]
        + ["pkt.kernels.declaration", "pkt.kernels.declared", "pkt.kernels.forecast", "pkt.kernels.staging"],
        ["torch"],
    ),
    "pkt.kernels.operator": (
        ["pkt.errors", "pkt.runtime", "pkt.kernels.agreement", "pkt.kernels.declaration", "pkt.kernels.choosing"]
        + ["pkt.kernels.gradients", "pkt.kernels.staging", "pkt.kernels.traced"],
        ["torch"],
    ),
    "pkt.kernels": (
        ["pkt.errors", "pkt.wording", "pkt.language", "pkt.runtime", "pkt.model"]
        + ["pkt.kernels.agreement", "pkt.kernels.declaration", "pkt.kernels.gradients", "pkt.kernels.operator"]
        + ["pkt.kernels.shared", "pkt.kernels.traced"],
        ["torch", "triton", "numpy", "typing_extensions"],  # the last for types alone, and torch brings it
    ),
    "pkt.nn": (["pkt.errors", "pkt.wording", "pkt.launcher", "pkt.runtime", "pkt.kernels"], ["torch"]),
    "pkt.tune": (
        ["pkt.errors", "pkt.progress", "pkt.wording", "pkt.language", "pkt.runtime", "pkt.model"]
        + ["pkt.kernels.operator"],
        ["torch", "triton", "numpy", "rich", "platformdirs", "matplotlib"],
    ),
    "pkt.tune.command": (
        ["pkt.errors", "pkt.wording", "pkt.launcher", "pkt.runtime", "pkt.model", "pkt.kernels.operator", "pkt.tune"],
        ["torch", "typer", "rich"],
    ),
    "pkt.bench": (["pkt.errors", "pkt.kernels.operator"], ["benchmarks", "torch"]),
    "pkt.cli": (
        ["pkt", "pkt.bench", "pkt.doctor", "pkt.errors", "pkt.simulate", "pkt.tune.command", "pkt.tune.explanation"],
        ["typer", "rich"],
    ),
    "pkt.__main__": (["pkt.cli"], []),
}

# Imports that the arrows forbid and the tree still has. They do not count as steps of a circle.
TEMPORARY: set[tuple[str, str]] = set()
# Circles that the tree still has.
TEMPORARY_CIRCLES: set[frozenset[str]] = set()
NOT_THERE_YET: set[str] = set()

# These import modules by names that come at run time: an operator's, a kernel's or a job's.
BY_ANY_NAME = {"pkt.kernels.operator", "pkt.runtime.workers.carry"}

IMPORTERS = {"import_module", "_import_module", "__import__", "run_module", "find_spec"}


@functools.cache
def sources() -> dict[str, Path]:
    """Every module of the package as installed: its name and file."""
    found = {}
    for folder, package in (("pkt", "pkt"), ("kernels", "pkt.kernels")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


@functools.cache
def imported(module: str, path: Path) -> set[str]:
    """Full names that `module` imports. `from a import b` counts as a.b where that is a module, else as a. In a string,
    `*` stands for a part that is only known at run time; a name whose beginning is not known is `?`."""
    modules, names = sources(), set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = absolute("." * node.level + (node.module or ""), package)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                names.add(full if full in modules else base)
        elif isinstance(node, ast.Call) and called(node) in IMPORTERS and node.args:
            names.add(absolute(pattern(node.args[0]), package))
        elif isinstance(node, (ast.List, ast.Tuple)):
            texts = [pattern(item) for item in node.elts]
            names |= {after for option, after in itertools.pairwise(texts) if option == "-m"}
        elif isinstance(node, ast.Constant) and re.fullmatch(r"pkt(\.\w+)+:\w+", str(node.value)):
            names.add(node.value.partition(":")[0])
    return names


def absolute(name: str, package: str) -> str:
    dots = len(name) - len(name.lstrip("."))
    above = package.split(".")[: len(package.split(".")) - dots + 1]
    return ".".join([*above, name[dots:]] if name[dots:] else above) if dots else name


def called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def pattern(node: ast.expr) -> str:
    """A string of the source, see `imported`."""
    if isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
        return "?" if text.startswith("*") else text
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "?"


def part_of(module: str) -> str | None:
    return max((part for part in ARROWS if within(module, part)), key=len, default=None)


@functools.cache
def graph() -> dict[str, set[str]]:
    """Module -> modules of pkt that it imports, packages around them included."""
    found = {}
    for module, path in sources().items():
        edges = set()
        for name in imported(module, path):
            if (module, name) in TEMPORARY:
                continue
            rule = re.compile(re.escape(name).replace(r"\*", r"\w+"))
            for target in (m for m in sources() if rule.fullmatch(m)):
                steps = target.split(".")
                around = {".".join(steps[: n + 1]) for n in range(1, len(steps))}
                edges |= {m for m in around if m in sources() and not within(module, m)} | {target}
        found[module] = edges - {module}
    del found["pkt"]  # pkt joins everything, and no module may import it
    return found


def circles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """The strongly connected components of two or more modules (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = set()

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for target in edges.get(module, ()):
            if target not in order:
                visit(target)
            if target in stack:
                low[module] = min(low[module], low[target])
        if low[module] == order[module]:
            members = stack[stack.index(module) :]
            del stack[-len(members) :]
            if len(members) > 1:
                found.add(frozenset(members))

    for module in edges:
        if module not in order:
            visit(module)
    return found


def violations(module: str) -> set[str]:
    """The imports of `module` that the arrows forbid."""
    ours, others = ARROWS[part_of(module)]
    names = imported(module, sources()[module]) - ({"?"} if module in BY_ANY_NAME else set())
    within_pkt = {name for name in names if within(name, "pkt")}
    allowed_others = {*sys.stdlib_module_names, *others}
    wrong = {
        name
        for name in within_pkt
        if part_of(name) != part_of(module) and not any(within(name.partition(".*")[0], part) for part in ours)
    }
    return wrong | {name for name in names - within_pkt if name.partition(".")[0] not in allowed_others}


@pytest.mark.parametrize("module", [module for module in sources() if module != "pkt"])
def test_imports_follow_the_arrows(module):
    assert part_of(module) is not None, f"{module} belongs to no part: give it arrows"
    excused = {name for importer, name in TEMPORARY if importer == module}
    assert violations(module) == excused, "an import is forbidden, or TEMPORARY excuses one that is gone"


def test_no_circles():
    assert circles(graph()) == TEMPORARY_CIRCLES


def test_every_part_and_exception_exists():
    """The other tests would not notice a renamed part."""
    assert {part for part in ARROWS if part not in sources()} == NOT_THERE_YET
    assert {importer for importer, _ in TEMPORARY} <= set(sources())
    assert all("?" in imported(module, sources()[module]) for module in BY_ANY_NAME)
    named = {name for ours, _ in ARROWS.values() for name in ours}
    assert {name for name in named if name not in sources()} <= NOT_THERE_YET


def test_every_form_of_import_is_seen(tmp_path):
    path = tmp_path / "probe.py"
    path.write_text(
        "import numpy.linalg\nfrom pkt import errors\nfrom . import machine\n"
        "from ..language import world as w\ndef f():\n    from pkt.runtime import anything\n"
        "if TYPE_CHECKING:\n    from pkt.doctor import Report\n"
        "import_module('pkt.cli')\nimportlib.import_module(f'pkt.kernels.{x}')\n"
        "import_module('.memory', 'pkt.simulate')\n"
        "import_module(x)\nimport_module(f'{x}.y')\nrunpy.run_module(f'benchmarks.{x}')\n"
        "run([python, '-m', 'pkt.simulate', '-m'])\n"
        "start('pkt.runtime.bootstrap:open_job', 'pkt.simulate: a text')\n"
    )
    assert imported("pkt.simulate.probe", path) == {
        "numpy.linalg", "pkt.errors", "pkt.simulate.machine", "pkt.language.world", "pkt.runtime", "pkt.doctor",
        "pkt.cli", "pkt.kernels.*", "pkt.simulate.memory", "?", "benchmarks.*", "pkt.simulate", "pkt.runtime.bootstrap",
    }  # fmt: skip


def test_every_circle_is_found():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}, "g": set()}
    assert circles(edges) == {frozenset("abc"), frozenset("de")}


def test_inline_ptx_is_in_one_place():
    holders = {module for module, path in sources().items() if "inline_asm_elementwise" in path.read_text()}
    assert holders == {"pkt.language.ptx.primitive"}


def test_messages_are_built_in_one_place():
    """`PktError.of` takes a text; only the builders of exceptions call it."""
    built = re.compile(r"\b[A-Z]\w+\.of\(\s*f?\"")
    assert {module for module, path in sources().items() if built.search(path.read_text())} == set()
