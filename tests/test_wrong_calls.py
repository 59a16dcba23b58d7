"""Wrong input at the public entries: each call raises the error that it should, and no other; most are generated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import pytest
import torch
import typer.testing

import pkt
from pkt.cli import app
from pkt.errors import DtypeError
from pkt.kernels.operator import Operator, operators
from tests.conformance.inputs import arguments_of, result_dtype

from .wrong_operators import OTHERS, Tried, parameters

Call = tuple[str, type[pkt.PktError], str, Callable[[], Any]]
"""How it reads, the error that it must raise, a word of the message, the call."""

NO_TENSORS = (5, 2.5, "x", [1.0], object(), b"x", (), {})
LAYOUTS = {  # tensors that no operator takes
    "complex": torch.ones(4, 4, dtype=torch.complex64),
    "bool": torch.ones(4, 4, dtype=torch.bool),
    "sparse": torch.eye(4).to_sparse(),
}
LINES = torch.ones(9, 9), numpy.ones((9, 9))  # print several lines, and are neither equal nor unequal to a word
AXIS = {pkt.ShapeError: (7, -7, 2.5, "0", None, *LINES)}
BAD: dict[str, dict[type[pkt.PktError], tuple[Any, ...]]] = {  # keyword of an operator -> what is wrong for all of them
    "mode": {pkt.Unsupported: ("", "fast", 3, ["push"], 2.5, b"push", "PUSH", *LINES)},
    "block": {pkt.ShapeError: (0, -1, 3, 1 << 21), pkt.DtypeError: (2.5, "16", *LINES)},
    "chunks": {pkt.ShapeError: (0, -1), pkt.DtypeError: (2.5, "2")},
    "dim": AXIS,
    "scatter": AXIS,
    "gather": AXIS,
    "op": {pkt.Unsupported: ("", "mean", 3, None, *LINES)},
    "root": {pkt.RankError: (-1, 2, 2.5, "0", None, *LINES)},
    "epilogue": {pkt.Unsupported: ("", "tanh", 3, None, *LINES)},
    "shard": {pkt.Unsupported: ("", "diagonal", 3, None, *LINES)},
    "keep": {pkt.Unsupported: ("", "all", 3, None, *LINES)},
    "tiles": {
        pkt.ShapeError: ((16, 16), (0, 16, 16), (-16, 16, 16), (17, 16, 16)),
        pkt.DtypeError: (16, "16", (16, 16, 2.5)),
    },
    "world": {pkt.DtypeError: (3, "world", object(), 2.5, [], torch.ones(1))},
}


WHOLE = "all_reduce", "all_to_all", "matmul_all_reduce", "matmul_all_reduce_scaled"  # whose results are as operands


def operator_calls(operator: Operator) -> Iterator[Call]:
    float32 = torch.float32
    first = next(iter(operator.tensors.values())).dtypes
    taken = {name: operand.dtypes or first or (float32,) for name, operand in operator.tensors.items()}
    dtypes = {name: float32 if float32 in of else of[0] for name, of in taken.items()}
    shapes = {
        n: (4,) if o.shape == "W*t" else (1, 1) if n.startswith("scale_") else (4, 4)
        for n, o in operator.tensors.items()
    }
    good = {n: None if o.optional else torch.ones(shapes[n], dtype=dtypes[n]) for n, o in operator.tensors.items()}
    dtypes["out"] = result_dtype(operator, operator.cases[0], next(iter(dtypes.values())))
    good |= {n: good[n].t() for n, o in operator.tensors.items() if o.turned}
    arguments = arguments_of(operator, operator.cases[0])

    def call(name: str, value: Any, error: type[pkt.PktError]) -> Call:
        word = "rank" if name == "root" else name
        tensors, others = {**good}, dict(arguments)
        (tensors if name in operator.names else others)[name] = value
        given = {**operator.parameters(tensors), **others}
        return f"{name}={value!r:.30}", error, word, lambda: operator.function(**given)

    for name in operator.names:
        for value in (*NO_TENSORS, *LAYOUTS.values()):
            empty = operator.name == "all_gather_matmul" and name == "b" and value == ()  # a list of no weights
            yield call(name, value, pkt.ShapeError if empty else pkt.DtypeError)
        # The shape of `out` is looked at first, and (4, 4) is that of some results.
        fits = name != "out" or operator.name in WHOLE
        nowhere = torch.ones(4, 4, dtype=dtypes[name], device="meta")
        yield call(name, nowhere, pkt.DtypeError if fits else pkt.ShapeError)
    for name in inspect.signature(operator.function).parameters:
        for error, values in BAD.get(name, {}).items():
            for value in values:
                yield call(name, value, error)


def other_calls(tried: Tried) -> Iterator[Call]:
    right, taken = tried.right(), inspect.signature(tried.function).parameters
    common = {name: BAD[name] for name in ("mode", "world") if name in taken}

    def call(name: str, value: Any, error: type[pkt.PktError]) -> Call:
        names = name.split()
        changed = dict(zip(names, value)) if len(names) > 1 else {name: value}
        word = tried.function.__name__ if error is pkt.HeapFull else names[0]
        said = f"{name}={value!r:.60} {getattr(value, 'shape', '')}"
        return said, error, word, lambda: tried.function(**parameters({**right, **changed}))

    for name, operand in right.items():
        if not isinstance(operand, int):
            for value in (*NO_TENSORS, *LAYOUTS.values()):
                yield call(name, value, DtypeError)
        if isinstance(operand, torch.Tensor):
            yield call(name, operand.to("meta"), DtypeError)
    for name, errors in {**common, **tried.wrong()}.items():
        for error, values in errors.items():
            for value in values:
                yield call(name, value, error)


def differing_calls(tried: Tried, world: pkt.World) -> Iterator[Call]:
    """Calls that are right on each rank, and not on both."""
    for name, values in tried.differ().items():
        given = {**tried.right(), name: values[world.rank]}
        said = f"{name} differs: {values!r:.60}"
        yield said, pkt.CollectiveMismatch, name, lambda g=given: tried.function(**parameters(g))


def factory_calls() -> Iterator[Call]:
    sizes: tuple[Any, ...] = (-1, 2.5, "4", None, True, (2, -1), [2.5], ("a",), {})
    for factory in (pkt.empty, pkt.zeros, pkt.ones, pkt.rand, pkt.randn, pkt.signals):
        for size in sizes:
            yield f"{factory.__name__}({size!r})", pkt.ShapeError, "wanted", lambda f=factory, s=size: f(s)
    for factory in (pkt.empty, pkt.zeros, pkt.ones, pkt.rand, pkt.randn):
        for dtype in ("float32", 3, float, torch.qint8):
            said = f"{factory.__name__}(dtype={dtype!r})"
            yield said, pkt.DtypeError, "dtype", lambda f=factory, d=dtype: f(4, dtype=d)
        for world in ("w", 0, pkt.World):
            said = f"{factory.__name__}(world={world!r})"
            yield said, pkt.DtypeError, "world", lambda f=factory, w=world: f(4, world=w)
    for size in sizes:
        yield f"full({size!r})", pkt.ShapeError, "wanted", lambda s=size: pkt.full(s, 1.0)


def yields(world: pkt.World) -> Iterator[int]:
    yield world.rank


async def is_async(world: pkt.World) -> int:
    return world.rank


def launch_calls() -> Iterator[Call]:
    bad: dict[str, tuple[type[pkt.PktError], tuple[Any, ...]]] = {
        "fn": (pkt.DtypeError, (None, 3, "main", yields, is_async)),
        "ranks": (pkt.ShapeError, (0, -1, 2.5, "2", None, True)),
        "args": (pkt.DtypeError, (5, None, "abc")),
        "heap": (pkt.ShapeError, ("x", -1, 0, "1XB", 2.5, [], "GiB")),
        "sms": (pkt.ShapeError, (0, -1, 2.5, "2", None, 10**9)),
        "multicast": (pkt.ShapeError, ("x", 3, None)),
        "races": (pkt.ShapeError, ("x", 3, None)),
        "compile": (pkt.ShapeError, ("sm_80", 90, [])),
    }
    of_launch = {
        "seed": (pkt.ShapeError, ("a", None, 2.5)),
        "device": (pkt.Unsupported, ("tpu", 3, None)),
        "timeout": (pkt.ShapeError, (-1, 0, "x", float("nan"), [])),
        "faults": (pkt.ShapeError, (3, "x", None)),
        "trace": (pkt.ShapeError, ("x", 3, None)),
    }
    of_simulate = {
        "seeds": (pkt.ShapeError, ("a", None, 2.5, 0, -1, [], True, [True])),
        "mutants": (pkt.ShapeError, ("x", 3, None)),
        "lost_signals": (pkt.ShapeError, (0.5, None)),
        "progress": (pkt.ShapeError, ("x", 3)),
        "lost_ranks": (pkt.ShapeError, (-1, 2.5, "2", None)),
        "max_findings": (pkt.ShapeError, (0, -1, "2", None)),
    }
    for call, more in ((pkt.launch, of_launch), (pkt.simulate, of_simulate)):
        good = {"fn": lambda world: None, "ranks": 2} | ({"device": "cpu"} if call is pkt.launch else {"seeds": 1})
        for name, (error, values) in (bad | more).items():
            for value in values:
                given = {**good, name: value}
                yield f"{call.__name__}({name}={value!r})", error, name, lambda c=call, g=given: c(**g)
    many = ("heap", ("9999999TiB", 10**30)), ("ranks", (10**9,))
    for name, values in many:
        for value in values:
            given = {"fn": lambda world: None, "ranks": 2, "device": "cpu", name: value}
            yield f"launch({name}={value!r})", pkt.ShapeError, "heap", lambda g=given: pkt.launch(**g)
    for name, value in (("timeout", -1), ("timeout", float("nan")), ("multicast", "x")):
        yield f"init({name}={value!r})", pkt.ShapeError, name, lambda n=name, v=value: pkt.init(**{n: v})


def explain_calls() -> Iterator[Call]:
    product = {"op": "ag_gemm", "M": 64, "N": 64, "K": 64}
    wrong: dict[str, tuple[type[pkt.PktError], tuple[Any, ...]]] = {
        "op": (pkt.ShapeError, ("x", 3, None)),
        "dtype": (pkt.DtypeError, ("int8", 3, torch.int8)),
        **dict.fromkeys(("M", "N", "K"), (pkt.ShapeError, (0, -4, 2.5, "4", None))),
        "size": (pkt.ShapeError, (0, -1, 2.5)),
        "shape": (pkt.ShapeError, (4, (4, 4))),
    }
    collective = {"op": "all_gather", "shape": (64, 64)}
    of_x = {
        "shape": (pkt.ShapeError, (-1, 2.5, "4", None, (4, -1), ("a",))),
        "dtype": (pkt.DtypeError, ("complex64", 3, None)),
        "size": (pkt.ShapeError, (0, "2")),
        "M": (pkt.ShapeError, (4,)),
    }
    for good, bad in ((product, wrong), (collective, of_x)):
        for name, (error, values) in bad.items():
            for value in values:
                said = f"explain({good['op']}, {name}={value!r})"
                yield said, error, name, lambda g=good, n=name, v=value: pkt.explain(**{**g, n: v})


COMMANDS = {  # what is wrong -> a word of what is said; each ends with status 2
    "simulate": "Missing argument",
    "simulate no.py": "no file no.py",
    "simulate FILE:nothing": "has no function nothing; it has main",
    "simulate FILE --ranks 0": "--ranks",
    "simulate FILE --ranks x": "--ranks",
    "simulate FILE --seeds 0": "--seeds",
    "simulate FILE --heap x": "heap= or PKT_HEAP: found 'x'",
    "simulate FILE --sms 0": "--sms",
    "simulate FILE --lost-ranks -1": "--lost-ranks",
    "simulate FILE --seed x": "--seed",
    "simulate FILE --compile sm_80": "compile: found sm_80",
    "simulate FILE --wrong": "--wrong",
    "tune": "wanted an operator",
    "tune nothing": "'nothing', wanted ag_gemm",
    "tune ag_gemm --all": "wanted an operator",
    "tune ag_gemm --ranks 0 --device cpu": "--ranks",
    "tune ag_gemm --dtype int8": "--dtype 'int8', wanted bf16",
    "tune ag_gemm --m 4": "go together",
    "tune ag_gemm --device tpu": "'tpu', wanted cuda or cpu",
    "tune ag_gemm --m -4 --n 4 --k 4": "m: found -4",
    "tune ag_gemm --m 7 --n 8 --k 8 --device cpu": "m: found 7, wanted at least 1 and divisible by 4 ranks",
    "tune --ranks x": "--ranks",
    "tune ag_gemm --device cpu --m 4096 --n 4096 --k 4096": "with --device cpu",
    "explain": "Missing argument",
    "explain ag_gemm": "M: found None",
    "explain nothing --m 4 --n 4 --k 4": "found 'nothing'",
    "explain ag_gemm --m 0 --n 4 --k 4": "--m",
    "explain ag_gemm --m 7 --n 4 --k 4": "M: found 7",
    "explain ag_gemm --m 4 --n 4 --k 4 --dtype int8": "dtype: found int8",
    "explain ag_gemm --m 4 --n 4 --k 4 --ranks 0": "--ranks",
    "explain ag_gemm --m 4 --n 4 --k 4 --shape 4": "shape: found (4,)",
    "explain all_reduce": "shape: found None",
    "explain all_reduce --shape 4x": "--shape: found '4x'",
    "explain all_reduce --m 4 --n 4 --k 4": "M, N, K",
    "explain all_reduce --shape 4 --dtype int8": "dtype: found int8",
    "doctor --wrong": "--wrong",
    "nothing": "nothing",
    "bench nothing": "found 'nothing', wanted one of these names",
    "bench": "wanted one of these names",
}


def wrong(calls: Iterable[Call]) -> dict[str, str]:
    """By call, what it did, unless it raised the one error that it must, of a line, with the word."""
    found = {}
    for said, wanted, word, call in calls:
        try:
            call()
            found[said] = "nothing raised"
        except Exception as error:
            says = "rank " if wanted in (pkt.CollectiveMismatch, pkt.HeapFull, pkt.Closed) else "found "
            right = type(error) is wanted and word in str(error) and says in str(error) and "\n" not in str(error)
            if not right:
                found[said] = f"{type(error).__name__}, not {wanted.__name__} with {word!r}: {error}"
    return found


OWN = (pkt.ring_attention_backward,)  # its wrong calls are in tests/kernels/test_ring_attention_backward.py
SQUARE = [o for o in operators().values() if o.function not in [*OWN, *(other.function for other in OTHERS)]]


@pytest.mark.parametrize("operator", SQUARE, ids=lambda operator: operator.name)
def test_operators(operator: Operator) -> None:
    assert pkt.launch(lambda world: wrong(operator_calls(operator)), 2, "cpu", heap="8MiB") == [{}] * 2


@pytest.mark.parametrize("tried", OTHERS, ids=lambda tried: tried.function.__name__)
def test_operators_of_other_shapes(tried: Tried) -> None:
    def main(world: pkt.World) -> dict[str, str]:
        tried.function(**parameters(tried.right()))  # or all that follows would say nothing
        closed = lambda: tried.function(**parameters({**tried.right(), "world": ended[world.rank]}))  # noqa: E731
        last = ("world=of a launch that has ended", pkt.Closed, "closed", closed)
        return wrong([*other_calls(tried), *differing_calls(tried, world), last])

    ended = pkt.launch(lambda world: world, 2, "cpu")
    assert pkt.launch(main, 2, "cpu", heap="8MiB", sms=2) == [{}] * 2


def test_factories() -> None:
    assert pkt.launch(lambda world: wrong(factory_calls()), 2, "cpu", heap="8MiB") == [{}] * 2


@pytest.mark.parametrize("calls", [launch_calls, explain_calls])
def test_entries(calls: Callable[[], Iterator[Call]]) -> None:
    assert wrong(calls()) == {}


@pytest.mark.parametrize(("line", "word"), COMMANDS.items(), ids=COMMANDS)
def test_commands(line: str, word: str, tmp_path: Any) -> None:
    file = tmp_path / "program.py"
    file.write_text("def main(world): pass\n")
    done = typer.testing.CliRunner().invoke(app, line.replace("FILE", str(file)).split())
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 2, done.output
    assert word in " ".join(done.output.split())


def test_there_are_many() -> None:
    generated = [*factory_calls(), *launch_calls(), *explain_calls(), *COMMANDS]
    assert len(generated) + sum(len([*operator_calls(o)]) for o in SQUARE) >= 500
    assert sum(len([*other_calls(tried)]) for tried in OTHERS) >= 700
