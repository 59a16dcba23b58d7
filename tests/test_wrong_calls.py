"""Wrong input at the public entries: each call raises the error that it should, and no other; most are generated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import typer.testing

import pkt
from pkt.cli import app
from pkt.kernels.operator import Operator, operators

NO_TENSORS = (5, 2.5, "x", [1.0], object(), b"x", (), {})
NO_DEVICE = torch.ones(4, 4, device="meta")
BAD = {  # keyword of an operator -> values that are wrong for all of them
    "mode": ("", "fast", 3, ["push"], 2.5, b"push", "PUSH"),
    "block": (0, -1, 3, 2.5, "16", 1 << 21),
    "chunks": (0, -1, 2.5, "2"),
    "dim": (7, -7, 2.5, "0", None),
    "scatter": (7, -7, 2.5, "0", None),
    "gather": (7, -7, 2.5, "0", None),
    "op": ("", "mean", 3, None),
    "root": (-1, 2, 2.5, "0", None),
    "epilogue": ("", "tanh", 3, None),
    "shard": ("", "diagonal", 3, None),
    "tiles": (16, "16", (16, 16), (0, 16, 16), (16, 16, 2.5), (-16, 16, 16), (17, 16, 16)),
    "world": (3, "world", object(), 2.5, [], torch.ones(1)),
}
LAYOUTS = {  # tensors that no operator takes
    "complex": torch.ones(4, 4, dtype=torch.complex64),
    "bool": torch.ones(4, 4, dtype=torch.bool),
    "sparse": torch.eye(4).to_sparse(),
    "elsewhere": NO_DEVICE,
}


EXPECTED = pkt.ShapeError, pkt.DtypeError, pkt.RankError, pkt.NotSymmetric, pkt.Unsupported


def operator_calls(operator: Operator) -> Iterator[tuple[str, Callable[[], Any]]]:
    good = {name: torch.ones(4, 4) for name, operand in operator.tensors.items() if not operand.optional}
    for name in operator.names:
        for value in (*NO_TENSORS, *LAYOUTS.values()):
            yield f"{name}={value!r:.30}", lambda n=name, v=value: operator.function(**{**good, n: v})
    for name in inspect.signature(operator.function).parameters:
        for value in BAD.get(name, ()):
            yield f"{name}={value!r}", lambda n=name, v=value: operator.function(**{**good, n: v})


def factory_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    sizes: tuple[Any, ...] = (-1, 2.5, "4", None, True, (2, -1), [2.5], ("a",), {})
    for factory in (pkt.empty, pkt.zeros, pkt.ones, pkt.rand, pkt.randn, pkt.signals):
        for size in sizes:
            yield f"{factory.__name__}({size!r})", lambda f=factory, s=size: f(s)
    for factory in (pkt.empty, pkt.zeros, pkt.ones, pkt.rand, pkt.randn):
        for dtype in ("float32", 3, float, torch.qint8):
            yield f"{factory.__name__}(dtype={dtype!r})", lambda f=factory, d=dtype: f(4, dtype=d)
    for size in sizes:
        yield f"full({size!r})", lambda s=size: pkt.full(s, 1.0)


def launch_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    bad: dict[str, tuple[Any, ...]] = {
        "fn": (None, 3, "main"),
        "ranks": (0, -1, 2.5, "2", None, True),
        "args": (5, None, "abc"),
        "heap": ("x", -1, 0, "1XB", 2.5, [], "GiB"),
        "sms": (0, -1, 2.5, "2", None),
    }
    for call, more in ((pkt.launch, {"seed": ("a", None, 2.5), "device": ("tpu", 3, None)}),
                       (pkt.simulate, {"seeds": ("a", None, 2.5, 0, -1, []), "lost_ranks": (-1, 2.5, "2", None),
                                       "max_findings": (0, -1, "2", None)})):  # fmt: skip
        good = {"fn": lambda world: None, "ranks": 2} | ({"device": "cpu"} if call is pkt.launch else {"seeds": 1})
        for name, values in (bad | more).items():
            for value in values:
                if not (name == "heap" and value is None):
                    given = {**good, name: value}
                    yield f"{call.__name__}({name}={value!r})", lambda c=call, g=given: c(**g)


def explain_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    good = {"op": "ag_gemm", "M": 64, "N": 64, "K": 64}
    bad = {"op": ("x", 3, None), "dtype": ("int8", 3, torch.int8), "M": (0, -4, 7), "N": (0, -4), "K": (0, -4)}
    for name, values in (bad | {"size": (0, -1)}).items():
        for value in values:
            yield f"explain({name}={value!r})", lambda n=name, v=value: pkt.explain(**{**good, n: v})


COMMANDS = (
    """
simulate|simulate no.py|simulate FILE:nothing|simulate FILE --ranks 0|simulate FILE --ranks x|simulate FILE --seeds 0
simulate FILE --heap x|simulate FILE --sms 0|simulate FILE --lost-ranks -1|simulate FILE --seed x|simulate FILE --wrong
tune|tune nothing|tune ag_gemm --all|tune ag_gemm --ranks 0 --device cpu|tune ag_gemm --dtype int8|tune ag_gemm --m 4
tune ag_gemm --device tpu|tune ag_gemm --m -4 --n 4 --k 4|tune ag_gemm --m 7 --n 8 --k 8 --device cpu|tune --ranks x
tune ag_gemm --device cpu --m 4096 --n 4096 --k 4096|explain|explain ag_gemm|explain nothing --m 4 --n 4 --k 4
explain ag_gemm --m 0 --n 4 --k 4|explain ag_gemm --m 7 --n 4 --k 4|explain ag_gemm --m 4 --n 4 --k 4 --dtype int8
explain ag_gemm --m 4 --n 4 --k 4 --ranks 0|doctor --wrong|nothing|bench nothing|bench
""".replace("\n", "|")
    .strip("|")
    .split("|")
)


def wrong(call: Callable[[], Any]) -> str:
    """ "" where `call` raises one of pkt's errors, of a line or few; else what it did."""
    try:
        call()
    except EXPECTED as error:
        return "" if ":" in str(error) else f"says {error}"
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "nothing raised"


@pytest.mark.parametrize("operator", operators().values(), ids=lambda operator: operator.name)
def test_operators(operator: Operator) -> None:
    def main(world: Any) -> dict[str, str]:
        return {name: found for name, call in operator_calls(operator) if (found := wrong(call))}

    assert pkt.launch(main, 2, "cpu", heap="8MiB") == [{}] * 2


def test_factories() -> None:
    def main(world: Any) -> dict[str, str]:
        return {name: found for name, call in factory_calls() if (found := wrong(call))}

    assert pkt.launch(main, 2, "cpu", heap="8MiB") == [{}] * 2


@pytest.mark.parametrize("calls", [launch_calls, explain_calls])
def test_entries(calls: Callable[[], Any]) -> None:
    assert {name: found for name, call in calls() if (found := wrong(call))} == {}


@pytest.mark.parametrize("line", COMMANDS)
def test_commands(line: str, tmp_path: Any) -> None:
    file = tmp_path / "program.py"
    file.write_text("def main(world): pass\n")
    done = typer.testing.CliRunner().invoke(app, line.replace("FILE", str(file)).split())
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (1, 2), done.output


def test_there_are_many() -> None:
    generated = [*factory_calls(), *launch_calls(), *explain_calls(), *COMMANDS]
    assert len(generated) + sum(len([*operator_calls(o)]) for o in operators().values()) >= 500
