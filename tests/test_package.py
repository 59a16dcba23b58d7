"""The installed package imports fast and anywhere, is typed, documented and complete."""

import ast
import inspect
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def python(code: str, **env: str) -> str:
    """Run `code` in a fresh interpreter, outside the repository, without Triton's interpreter mode."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", env=clean | env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_adds_few_modules_and_needs_no_gpu_no_driver_and_no_interpreter():
    """Counts the modules beyond torch and Triton. The time of an import would depend on the machine's load."""
    code = """
import os, sys
import torch, triton.language
before = set(sys.modules)
import pkt
added = set(sys.modules) - before
print(len(added), *sorted({name.partition(".")[0] for name in added}))
import pkt.kernels, pkt.trace
assert "TRITON_INTERPRET" not in os.environ
assert not torch.cuda.is_initialized()
heavy = ("cuda", "matplotlib", "nvshmem", "typer", "IPython")
print(*sorted(name for name in set(sys.modules) - before if name.partition(".")[0] in heavy))
assert not any(name.startswith("pkt.nn") for name in sys.modules)
assert pkt.nn.Attention and pkt.parallelize
assert not any(name.startswith("torch.distributed.tensor") for name in set(sys.modules) - before)
"""
    modules, *packages = python(code, CUDA_VISIBLE_DEVICES="").split()
    assert packages == ["greenlet", "pkt", "triton"]
    assert int(modules) < 100


def test_public_names_are_documented():
    import pkt
    import pkt.language

    for module in (pkt, pkt.language):
        assert inspect.getdoc(module)
        assert module.__all__, f"{module.__name__} has no __all__"
        for name in module.__all__:
            value = getattr(module, name)
            value = getattr(value, "fn", value)  # a JITFunction carries its function's text
            if callable(value):
                own = value.__dict__.get("__doc__") if isinstance(value, type) else value.__doc__
                assert own, f"{module.__name__}.{name} has no docstring"


def test_modules_and_operators_are_documented():
    bare = []
    for path in [*(ROOT / "pkt").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        tree = ast.parse(path.read_text())
        public = [
            node
            for node in tree.body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and not node.name.startswith("_")
            # A kernel's arguments have comments beside them, and the module's header says what the kernel computes.
            and not any(
                ast.unparse(d).partition("(")[0] in ("triton.jit", "gluon.jit", "overload") for d in node.decorator_list
            )
        ]
        nodes = [tree, *public] if path.is_relative_to(ROOT / "kernels") else [tree]
        bare += [f"{path.relative_to(ROOT)} {getattr(n, 'name', '')}" for n in nodes if not ast.get_docstring(n)]
    assert not bare


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    where = tmp_path_factory.mktemp("wheel")
    # A copy: setuptools leaves build/ and egg-info behind, and another worker may be reading them.
    source = where / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(where), str(source)], check=True, timeout=120, capture_output=True)
    (path,) = where.glob("pkt_triton-*.whl")
    return zipfile.ZipFile(path)


def test_wheel_has_every_module_every_table_and_py_typed(wheel):
    names = set(wheel.namelist())
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "pkt").rglob("*.py")}
    here |= {str("pkt" / path.relative_to(ROOT)) for path in (ROOT / "kernels").rglob("*.py")}
    here |= {str(path.relative_to(ROOT)) for path in (ROOT / "pkt").rglob("*.json")}
    here |= {str("pkt" / path.relative_to(ROOT)) for path in (ROOT / "kernels").rglob("*.json")}
    assert here | {"pkt/py.typed"} == {name for name in names if name.startswith("pkt/")}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_can_be_imported(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import pkt.kernels; print(pkt.kernels.__file__)"
    assert Path(python(code)).is_relative_to(tmp_path)


def test_a_checkouts_own_kernels_are_imported_beside_an_installed_wheel(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = "import pkt.kernels, pkt.kernels.operator as operator; print(pkt.__file__, operator.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == [str(ROOT / "pkt" / "__init__.py"), str(ROOT / "kernels" / "operator.py")], (
        done.stderr
    )
