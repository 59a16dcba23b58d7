"""The simulator works in a script, in pytest and in a notebook cell, and undoes its patches of Triton."""

from __future__ import annotations

import importlib
import linecache
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

import pkt
import pkt.language as pl
from pkt.errors import CompileError, RankFailed
from pkt.language.inspect import compile_only
from pkt.runtime import world as worlds
from pkt.simulate.findings import Deadlock
from pkt.simulate.interpreter import interpreting
from pkt.simulate.source import builder
from pkt.simulate.turns import turn

SCRIPT = """
import triton
import triton.language as tl
import torch
{early}

@triton.jit
def double(x, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(x + o, tl.sum(tl.load(x + o), 0) + helper(o))

@triton.jit
def helper(o):
    return tl.maximum(o, 2)

import pkt
import pkt.language as pl

@triton.jit
def ring(flags, world):
    pl.signal(flags, (world.rank + 1) % world.size, world)
    pl.wait(flags, 1, world)

def main(world):
    flags = pkt.signals(1)
    ring[(1,)](flags, world.device)
    x = torch.ones(4) * (world.rank + 1)
    double[(1,)](x, 4)
    return x.tolist()

if __name__ == "__main__":
    print(pkt.launch(main, ranks=3, device="cpu"))
"""
RING = str([[4.0 * r + 2, 4.0 * r + 2, 4.0 * r + 2, 4.0 * r + 3] for r in (1, 2, 3)])


def script(path: Path, early: str = "", **environment: str) -> subprocess.CompletedProcess:
    path.write_text(SCRIPT.format(early=early))
    keep = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    return subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=120, env={**keep, **environment}
    )


def test_a_script_needs_no_environment_variable(tmp_path: Path) -> None:
    done = script(tmp_path / "plain.py")
    assert done.stdout.strip() == RING, done.stderr


def test_a_script_runs_with_tritons_interpreter_switch_set(tmp_path: Path) -> None:
    """pkt does not need TRITON_INTERPRET, but some users set it: kernels are then InterpretedFunctions."""
    done = script(tmp_path / "switched.py", TRITON_INTERPRET="1")
    assert done.stdout.strip() == RING, done.stderr


def test_triton_may_be_used_before_pkt_is_imported(tmp_path: Path) -> None:
    early = textwrap.dedent("""
        @triton.jit
        def earlier(x):
            tl.store(x, tl.cdiv(5, 2))

        from triton.compiler import ASTSource
        from triton.backends.compiler import GPUTarget
        compiled = triton.compile(ASTSource(earlier, {"x": "*fp32"}), target=GPUTarget("cuda", 90, 32))
        assert "st.global" in compiled.asm["ptx"]
    """)
    done = script(tmp_path / "later.py", early)
    assert done.stdout.strip() == RING, done.stderr


# -- notebooks -------------------------------------------------------------------------------------------------------


def cell(source: str, name: str, scope: dict[str, Any]) -> None:
    """Run `source` as IPython runs a cell: without a file, with its lines in linecache."""
    source = textwrap.dedent(source)
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), scope)


CELL = """
    import torch, triton, triton.language as tl, pkt, pkt.language as pl

    @triton.jit
    def scale(x):
        return x * {factor}

    @triton.jit
    def kernel(out, flags, world):
        pl.barrier(flags, world)
        tl.store(out, scale(tl.cast(world.rank, tl.float32) + 1))

    def main(world):
        out, flags = torch.empty(1), pkt.signals(1)
        kernel[(1,)](out, flags, world.device)
        return out.item()

    result = pkt.launch(main, ranks=2, device="cpu")
"""


def test_a_notebook_cell_may_be_run_again_with_changes() -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    cell(CELL.format(factor=10), "/tmp/ipykernel_1/1.py", scope)
    assert scope["result"] == [10.0, 20.0]
    cell(CELL.format(factor=100), "/tmp/ipykernel_1/2.py", scope)
    assert scope["result"] == [100.0, 200.0]
    # Only a helper is redefined: the kernel of the first cell uses the new helper, as in Triton.
    cell("@triton.jit\ndef scale(x):\n    return x - 1\n", "/tmp/ipykernel_1/3.py", scope)
    assert pkt.launch(scope["main"], ranks=2, device="cpu") == [0.0, 1.0]


def test_errors_in_a_cell_name_its_line() -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    with pytest.raises(CompileError, match="nothing is not defined") as caught:
        cell(CELL.format(factor="nothing"), "/tmp/ipykernel_1/4.py", scope)
    assert caught.value.place == "4.py:11"
    assert "return x * nothing" in str(caught.value)


def test_a_simulation_runs_in_ipython() -> None:
    shell_module = pytest.importorskip("IPython.core.interactiveshell")
    shell = shell_module.InteractiveShell.instance()
    done = shell.run_cell(textwrap.dedent(CELL.format(factor=3)))
    done.raise_error()
    assert shell.user_ns["result"] == [3.0, 6.0]


def test_the_traceback_of_a_rank_names_the_cell() -> None:
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell.instance()
    text = 'import pkt\ndef main(world):\n    raise ValueError("no")\npkt.launch(main, 2, "cpu")'
    with pytest.raises(pkt.RankFailed) as caught:
        shell.run_cell(text, store_history=True).raise_error()
    cell = f'  File "In[{shell.execution_count - 1}]", line 3, in main\n    raise ValueError("no")'
    assert cell in caught.value.traceback
    assert cell in str(caught.value)


# -- nothing stays patched -------------------------------------------------------------------------------------------

OWNERS = [
    tl,
    core,
    tl.math,
    tl.standard,
    tl.tensor,
    core.tensor_descriptor_base,
    core.tensor_descriptor,
    core.dtype,
    core.constexpr,
    interpreter,
    interpreter.TensorHandle,
    interpreter.InterpretedFunction,
    JITFunction,
    Autotuner,
    pl,
    pl.ptx if hasattr(pl, "ptx") else pl.sync,
    worlds,
]
OWNERS += [tl.condition] if hasattr(tl, "condition") else []


def state() -> dict[tuple[str, str], int]:
    found = {(str(o), name): id(value) for o in OWNERS for name, value in vars(o).items()}
    found["torch", "threads"] = torch.get_num_threads()
    found["torch", "random"] = hash(tuple(torch.get_rng_state().tolist()))
    found["numpy", "errors"] = hash(tuple(sorted(np.geterr().items())))
    return found


@triton.jit
def plain(x):
    tl.store(x, tl.load(x) + 1)


@triton.jit
def counted(x):
    tl.atomic_add(x, 1)


@triton.jit
def wrong(x):
    tl.device_assert(tl.load(x) > 0, "x must be positive")


@triton.jit
def forever(flags, world):
    pl.wait(flags, 1, world)


def good(world: Any) -> None:
    torch.rand(3)
    counted[(2,)](torch.zeros(1))


def kernel_raises(world: Any) -> None:
    wrong[(2,)](torch.zeros(1))


def host_raises(world: Any) -> None:
    if world.rank == 1:
        raise ValueError("here")
    world.barrier()


def deadlocks(world: Any) -> None:
    forever[(2,)](pkt.signals(1), world.device)


def host_interrupted(world: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("fn", "error"),
    [
        (good, None),
        (kernel_raises, RankFailed),
        (host_raises, RankFailed),
        (deadlocks, Deadlock),
        (host_interrupted, KeyboardInterrupt),
    ],
    ids=lambda p: getattr(p, "__name__", str(p)),
)
def test_a_run_undoes_all_its_patches(fn: Any, error: type | None) -> None:
    pkt.launch(good, ranks=1, device="cpu")  # imports that happen on the first use
    before = state()
    if error is None:
        pkt.launch(fn, ranks=2, device="cpu")
    else:
        with pytest.raises(error):
            pkt.launch(fn, ranks=2, device="cpu")
    after = state()
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert not changed
    assert builder.pkt is None  # nothing refers to the machine and its memory


def test_the_snapshot_detects_patches() -> None:
    before, during = state(), {}

    def main(world: Any) -> None:
        during.update(state())

    pkt.launch(main, ranks=1, device="cpu")
    changed = {key for key in before if before[key] != during.get(key)}
    assert len(changed) > 200
    assert (str(tl), "load") in changed


def test_kernels_still_compile_after_a_run() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    key = plain.cache_key
    x = torch.zeros(1)
    pkt.launch(lambda world: plain[(1,)](x), ranks=1, device="cpu")
    assert x.item() == 1
    assert plain.cache_key == key
    compiled = triton.compile(ASTSource(plain, {"x": "*fp32"}), target=GPUTarget("cuda", 90, 32))
    assert "st.global" in compiled.asm["ptx"]


ASSERTING = """
import triton
import triton.language as tl
import pkt
from pkt.language.inspect import compile_only

@triton.jit
def narrow(x, N: tl.constexpr):
    tl.static_assert(N < 100, "too wide")
    tl.store(x + tl.arange(0, N), 0)

pkt.launch(lambda world: narrow[(1,)](pkt.empty(16), 16) and None, ranks=1, device="cpu")
compile_only(narrow, "*fp32", 128)
"""


def test_a_kernel_compiled_after_a_run_keeps_its_static_assert(tmp_path: Path) -> None:
    """The process compiles for the first time after its first simulation."""
    (tmp_path / "asserting.py").write_text(ASSERTING)
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, tmp_path / "asserting.py"], capture_output=True, text=True, env=environment)
    assert done.returncode
    assert done.stderr.strip().endswith("too wide")


# -- several runs ----------------------------------------------------------------------------------------------------


def test_runs_may_follow_each_other() -> None:
    for ranks in (1, 3, 2):
        assert pkt.launch(lambda world: world.size * 10 + world.rank, ranks=ranks, device="cpu") == [
            ranks * 10 + r for r in range(ranks)
        ]


def test_a_run_may_contain_a_run() -> None:
    """A host function may run another simulation; its own ranks go on afterwards."""

    def inner(world: Any) -> float:
        x = torch.zeros(1)
        counted[(3,)](x)
        return x.item() + world.size

    def outer(world: Any) -> tuple:
        x = torch.zeros(1)
        plain[(1,)](x)
        world.barrier()
        found = pkt.launch(inner, ranks=2, device="cpu")
        assert pkt.current_world() is world
        plain[(1,)](x)
        world.barrier()
        return x.item(), found

    before = state()
    assert pkt.launch(outer, ranks=2, device="cpu") == [(2.0, [5.0, 5.0])] * 2
    assert state() == before


def test_a_failing_inner_run_leaves_the_outer_run_intact() -> None:
    def outer(world: Any) -> float:
        x = torch.zeros(1)
        with pytest.raises(Deadlock):
            pkt.launch(deadlocks, ranks=2, device="cpu")
        plain[(1,)](x)
        world.barrier()
        return x.item()

    assert pkt.launch(outer, ranks=2, device="cpu") == [1.0, 1.0]


def test_a_kernel_cannot_be_launched_from_a_kernel() -> None:
    @triton.jit
    def launches(x):
        plain[(1,)](x)

    with pytest.raises(CompileError, match=r"plain\[\(1,\)\]\(x\)"):
        pkt.launch(lambda world: launches[(1,)](torch.zeros(1)), ranks=1, device="cpu")


IMPORTED = """
import triton
import triton.language as tl
from triton.language import load, max_contiguous, multiple_of, store
from triton.language.extra.libdevice import rsqrt
from triton.language.math import exp2

@triton.jit
def inverse_root(x_ptr, N: tl.constexpr):
    i = max_contiguous(multiple_of(tl.arange(0, N), N), N)
    store(x_ptr + i, rsqrt(exp2(load(x_ptr + i))))
"""


def test_host_code_may_import_a_module_of_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it imports from Triton meanwhile is Triton's, in this run, the next one, and on a GPU."""
    name = f"kernels_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(IMPORTED)
    monkeypatch.syspath_prepend(str(tmp_path))

    def main(world: Any) -> None:
        module = importlib.import_module(name)
        x = torch.full((8,), 2.0)
        module.inverse_root[(1,)](x, 8)
        assert x.tolist() == [0.5] * 8

    for _ in range(2):
        pkt.simulate(main, 2, seeds=2).check()
    module = importlib.import_module(name)
    for taken in ("load", "store", "multiple_of", "max_contiguous"):
        assert getattr(module, taken) is getattr(tl, taken)
    assert module.exp2 is tl.math.exp2
    assert "rsqrt" in compile_only(module.inverse_root, "*fp32", 8).asm["ptx"]


def test_patches_serve_again_until_triton_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def inside() -> list[Any]:
        with turn("the test"), interpreting():
            return [tl.load, tl.exp, getattr(tl, "added", None)]

    @core.builtin
    def added(x, _semantic=None):
        return _semantic

    before = [tl.load, tl.exp, None]
    first = inside()
    assert all(now is not then for now, then in zip(first[:2], before))
    assert [tl.load, tl.exp, None] == before
    assert inside() == first
    monkeypatch.setattr(tl, "added", added, raising=False)
    assert inside()[2](None) is not None, "a new builtin is not patched"
    monkeypatch.setattr(tl, "exp", added)
    assert inside()[1](None) is not None, "a replaced builtin is not patched"
    assert tl.exp is added
    monkeypatch.undo()
    assert inside()[2] is None
    assert [tl.load, tl.exp, None] == before
