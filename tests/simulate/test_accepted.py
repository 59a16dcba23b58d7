"""Triton's front end is asked once for each specialisation, in all processes; and no error is missed thereby."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

import pkt
from pkt.errors import CompileError
from pkt.language.inspect import compile_only
from pkt.simulate import accepted, skipped
from tests.simulate.helpers import HEAP, line_of, run

front_end = importlib.import_module("pkt.simulate.front_end")


class Sizes(NamedTuple):
    n: Any
    BLOCK: tl.constexpr


ADDED = tl.constexpr(3)


@triton.jit
def plus(x, N: tl.constexpr):
    tl.store(x + N, tl.load(x) + ADDED)


@triton.jit
def minus(x, N: tl.constexpr):
    tl.store(x + N, tl.load(x) - ADDED)


chosen = plus


@triton.jit
def calling(x, sizes, N: tl.constexpr):
    chosen(x, sizes.BLOCK + N)


@triton.jit
def given(x, f: tl.constexpr):
    f(x, 1)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The compilations of a test, which begins with an empty cache."""
    compile, found = front_end._compile, []
    monkeypatch.setattr(front_end, "_compile", lambda *args, **named: found.append(args) or compile(*args, **named))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    new_process(monkeypatch)
    return found


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what this process keeps beside the files."""
    monkeypatch.setattr(front_end, "_kernels", {})
    monkeypatch.setattr(skipped, "_results", {})


def launch(block: int = 1, n: int = 2, dtype: torch.dtype = torch.int32, number: int = 5) -> None:
    run(calling, (1,), torch.zeros(64, dtype=dtype), Sizes(number, tl.constexpr(block)), n)


def adding(n: Any) -> Any:
    """A function whose name and text are those of others."""
    value = tl.constexpr(n)

    @triton.jit
    def same(x, N: tl.constexpr):
        tl.store(x + N, value)

    return same


def test_another_process_does_not_ask_again(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (5, 6):  # no constant
        launch(number=number)
        launch(number=number)
        new_process(monkeypatch)
    assert len(asked) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: launch(n=3),
        lambda patch: launch(block=4),  # inside a tuple
        lambda patch: launch(dtype=torch.float32),
        lambda patch: (patch.setitem(globals(), "chosen", minus), launch()),
        lambda patch: (patch.setitem(globals(), "ADDED", tl.constexpr(4)), launch()),
        lambda patch: (patch.setattr(triton, "__version__", triton.__version__ + ".1"), launch()),
        lambda patch: (patch.setattr(accepted, "code_hash", lambda: 5), launch()),
        lambda patch: (patch.setenv("TRITON_ALWAYS_COMPILE", "1"), launch()),
    ],
)
def test_what_the_front_end_reads_is_in_the_key(
    change: Callable[[Any], Any], asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch()
    new_process(monkeypatch)
    change(monkeypatch)
    assert len(asked) == 2


def test_functions_that_are_arguments_are_in_the_key(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for f, count in ((plus, 1), (minus, 2), (plus, 2), (adding(1), 3), (adding(2), 4), (adding(1), 4)):
        run(given, (1,), torch.zeros(64), f)
        new_process(monkeypatch)
        assert len(asked) == count


def test_a_refusal_is_found_anew(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (1, 2):
        with pytest.raises(CompileError, match="power of 2|power of two"):
            run(wide, (1,), torch.zeros(64), Sizes(1, tl.constexpr(3)))
        new_process(monkeypatch)
        assert len(asked) == count


def test_a_cache_that_cannot_be_written_is_none(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/dev/null/nowhere")
    for count in (1, 2):
        launch()
        new_process(monkeypatch)
        assert len(asked) == count


@triton.jit
def wide(x, sizes):
    tl.store(x + tl.arange(0, sizes.BLOCK), 1.0)


@triton.jit
def for_two(x, world):
    tl.static_assert(world.size <= 2, "at most two ranks")
    tl.store(x, 1.0)


def test_constants_in_tuples_make_specialisations() -> None:
    """An error at one size of the world, or of a block, is found where another was accepted before."""

    def main(world: Any) -> None:
        for_two[(1,)](torch.zeros(1), world.device)

    pkt.launch(main, ranks=2, device="cpu", heap=HEAP)
    with pytest.raises(CompileError, match="at most two ranks"):
        pkt.launch(main, ranks=3, device="cpu", heap=HEAP)


# -- what is skipped --------------------------------------------------------------------------------------------------


@triton.jit
def bits(x, y, HOW: tl.constexpr):
    if HOW == "wrong":
        return x.no_such_thing
    return x & y


@triton.jit
def combine(x, y, HOW: tl.constexpr):
    tl.store(x, bits(tl.load(x), tl.load(y), HOW))


@triton.jit
def combine_twice(x, y, HOW: tl.constexpr):
    both = bits(tl.load(x), tl.load(y), HOW)
    tl.store(x, bits(both, both, HOW))


def test_a_function_is_read_once_for_the_same_types(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.compiler.code_generator import CodeGenerator

    read: list[Any] = []
    whole = CodeGenerator.visit_Return
    monkeypatch.setattr(CodeGenerator, "visit_Return", lambda self, node: read.append(node) or whole(self, node))
    x, y = torch.full((1,), 6, dtype=torch.int32), torch.full((1,), 3, dtype=torch.int32)
    run(combine, (1,), x, y, "and")
    run(combine_twice, (1,), x, y, "and")
    assert x.item() == 2
    assert len(asked) == 2
    assert len(read) == (1 if triton.__version__.startswith(skipped.CHECKED) else 2)


@pytest.mark.parametrize(
    ("dtype", "how", "said"), [(torch.float32, "and", "invalid operands"), (torch.int32, "wrong", "no_such_thing")]
)
def test_a_function_is_refused_for_other_types(dtype: torch.dtype, how: str, said: str) -> None:
    whole = torch.zeros(1, dtype=torch.int32)
    run(combine, (1,), whole, whole, "and")
    x = torch.zeros(1, dtype=dtype)
    with pytest.raises(CompileError, match=said) as caught:
        run(combine, (1,), x, x, how)
    assert caught.value.place == line_of(combine, "bits(tl.load")


def test_a_function_of_the_same_name_is_read_for_itself() -> None:
    run(given, (1,), torch.zeros(2), adding(1))
    with pytest.raises(CompileError, match="no number"):
        run(given, (1,), torch.zeros(2), adding("no number"))


@triton.jit
def loops(x, n, WHERE: tl.constexpr):
    a = 0
    b = 0
    c = 0
    for i in range(n):
        if WHERE == "outer":
            a = a * 0.5
        a += 1
        j = 0
        while j < n:
            b += a
            for k in range(n):
                if WHERE == "inner":
                    c = c * 0.5
                if WHERE == "changes the outer one":
                    a = a * 0.5
                if WHERE == "is not defined":
                    c += nowhere  # noqa: F821
                c += b
            if WHERE == "after the inner":
                c = c * 0.5
            for k in range(n):
                c -= k
            j += 1
    tl.store(x, a)
    tl.store(x + 1, b)
    tl.store(x + 2, c)


@pytest.mark.parametrize(
    "where", ["nowhere", "outer", "inner", "changes the outer one", "is not defined", "after the inner"]
)
def test_loops_in_loops_keep_their_errors(where: str) -> None:
    x = torch.zeros(3, dtype=torch.int32)
    if where != "nowhere":
        with pytest.raises(CompileError, match="Loop-carried variable|is not defined"):
            run(loops, (1,), x, 3, where)
        return
    run(loops, (1,), x, 3, where)
    a = b = c = 0
    for _ in range(3):
        a += 1
        for _ in range(3):
            b += a
            c += 3 * b - 3
    assert x.tolist() == [a, b, c]


@pytest.mark.skipif(not triton.__version__.startswith(skipped.CHECKED), reason="this release's own code generator")
def test_the_body_of_a_loop_is_read_once(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.compiler.code_generator import CodeGenerator

    read: list[int] = []
    whole = CodeGenerator.visit_AugAssign
    monkeypatch.setattr(
        CodeGenerator, "visit_AugAssign", lambda self, node: read.append(node.lineno) or whole(self, node)
    )
    run(loops, (1,), torch.zeros(3, dtype=torch.int32), 3, "nowhere")
    assert len(asked) == 1
    assert len(read) == len(set(read)) == 5


def test_arguments_of_calls_are_bound_as_inspect_does() -> None:
    def called(a: Any, b: Any = 2, c: Any = 3) -> None: ...

    for args, named in [((1,), {}), ((1, 5), {"c": 6}), ((), {"c": 1, "a": 2}), ((1, 2, 3), {})]:
        assert skipped._Inspect.getcallargs(called, *args, **named) == inspect.getcallargs(called, *args, **named)
    for args, named in [((), {}), ((1, 2, 3, 4), {}), ((1,), {"a": 2}), ((1,), {"d": 2})]:
        with pytest.raises(TypeError, match="called"):
            skipped._Inspect.getcallargs(called, *args, **named)


def looping() -> Any:
    @triton.jit
    def kernel(x, sizes, N: tl.constexpr):
        total = tl.zeros((sizes.BLOCK,), tl.float32)
        for i in range(sizes.n):
            for j in tl.static_range(N):
                if i > j:
                    total += tl.load(x + tl.arange(0, sizes.BLOCK) + i + j)
            chosen(x + i, j)
        tl.store(x + tl.arange(0, sizes.BLOCK), tl.max(total, 0))

    return kernel


def test_quicker_code_is_tritons_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All tests compile with `quicker`, by a fixture; here once without it."""
    from triton.compiler import code_generator

    def texts(cache: str) -> list[str]:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / cache))
        found = compile_only(looping(), "*fp32", Sizes(5, tl.constexpr(64)), 3).asm
        return [found[stage] for stage in ("ttir", "llir", "ptx")]

    made, make = [], tl.tuple_type.__init__
    monkeypatch.setattr(tl.tuple_type, "__init__", lambda self, *args: made.append(args) or make(self, *args))
    quick = texts("quick")
    skipped_by = len(made)
    monkeypatch.setattr(code_generator, "ast_to_ttir", code_generator.ast_to_ttir.__wrapped__)
    assert texts("whole") == quick
    assert (len(made) > 2 * skipped_by) == triton.__version__.startswith(skipped.CHECKED), "it was not quicker"


@pytest.mark.skipif(not triton.__version__.startswith(skipped.CHECKED), reason="this release's own code generator")
def test_a_tree_that_nodes_refer_to_is_not_copied(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's parser gives the same object to the target of every assignment. IPython writes a tree into it."""

    class Parent:
        def __deepcopy__(self, _: Any) -> Any:
            pytest.fail("copied")

    store = ast.parse("a = 1").body[0].targets[0].ctx
    monkeypatch.setattr(store, "parent", Parent(), raising=False)
    run(loops, (1,), torch.zeros(3, dtype=torch.int32), 3, "nowhere")
    assert len(asked) == 1


def test_values_in_tuples_are_found_as_triton_finds_them() -> None:
    from triton import _utils

    def tree() -> tl.tuple:
        return tl.tuple([tl.constexpr(1), tl.tuple([tl.constexpr(2), tl.tuple([])]), tl.tuple([tl.constexpr(3)])])

    def odd(path: tuple[int, ...], value: Any) -> bool:
        return path == (0,) or value.value % 2 == 1

    for values in (tree(), [None, tree()], (tl.constexpr(4), tree().values), tree().type):
        paths = skipped._find_paths_if(values, odd)
        assert paths == _utils.find_paths_if(values, odd) != []
        for path in paths:
            assert skipped._get_iterable_path(values, path) is _utils.get_iterable_path(values, path)
    ours, theirs = tree(), tree()
    for path in ((0,), (1, 0)):
        skipped._set_iterable_path(ours, path, tl.constexpr(8))
        _utils.set_iterable_path(theirs, path, tl.constexpr(8))
    assert repr(ours) == repr(theirs) == "(constexpr[8], (constexpr[8], ()), (constexpr[3]))"


def test_calls_leave_no_garbage() -> None:
    """A function that refers to itself would keep what it was called with."""
    wanted = lambda path, value: True  # noqa: E731
    kept = weakref.ref(wanted)
    gc.disable()
    try:
        skipped._find_paths_if([tl.tuple([tl.constexpr(1), tl.tuple([tl.constexpr(2)])])], wanted)
        del wanted
        assert kept() is None
    finally:
        gc.enable()


def test_contexts_serve_a_series_of_compilations(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], front_end.ir.context
    monkeypatch.setattr(front_end.ir, "context", lambda: made.append(make()) or made[-1])
    monkeypatch.setattr(front_end, "_compilations", itertools.count(62))
    front_end._context.cache_clear()
    for n in (2, 3, 4, 5):
        launch(n=n)
    assert len(asked) == 4
    assert len(made) == 2
