"""Host cost of an operator as an op of torch, `torch.ops.pkt.NAME` without a compiler, beside the plain call.

    python -m benchmarks.custom_ops --ranks 2        on GPUs
    python -m benchmarks.custom_ops --device cpu     the time of Python, on the fake driver, whose kernels do nothing

Both calls make a new result of plain tensors and need no gradient. A figure is what the op adds, in us of the slowest
rank: the least of many batches, in which the two calls take turns.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import pkt
from benchmarks import _harness
from pkt.kernels.operator import Operator, operators
from pkt.progress import steps
from tests.conformance import inputs

LIMIT = 8.0  # us
CALLS, REPEATS, WARM = 10, 300, 5

Call = Callable[[], Any]


def calls_of(world: pkt.World, operator: Operator) -> tuple[Call, Call]:
    """The plain call and the op's, of the operator's first case."""
    case = operator.cases[0]
    operands = inputs.everybody(operator, case, world.size, 0, inputs.usual(operator))
    mine: dict[str, Any] = {n: ts and ts[world.rank].to(world.torch_device) for n, ts in operands.items()}
    defaults = {name: p.default for name, p in inspect.signature(operator.function).parameters.items()}
    keywords = {name: defaults[name] for name in operator.keywords} | inputs.arguments_of(operator, case)
    positional = (*mine.values(), *(keywords[name] for name in operator.keywords), world.name, 0)
    first, written = next(iter(mine)), operator.written
    taken = operator.parameters(mine)

    def plain() -> Any:
        if not operator.in_place:
            return operator.function(**taken, **keywords, world=world)
        if written == "out":
            return operator.function(**taken, out=torch.empty_like(mine[first]), **keywords, world=world)
        return operator.function(**{**taken, written: mine[written].clone()}, **keywords, world=world)

    return plain, lambda: operator.op(*positional)


def each(world: pkt.World, only: str) -> Iterator[tuple[str, Call, Call]]:
    """The name and the calls of every operator that runs here. Collective."""
    for name, operator in steps(operators().items(), "operators", None if world.rank == 0 else False):
        if any(word in name for word in only.split(",")):
            plain, op = calls_of(world, operator)
            try:
                for _ in range(WARM):
                    plain()
                    op()
            except pkt.Unsupported as error:  # on all ranks
                if world.rank == 0:
                    print(f"{name}: left out, {str(error).splitlines()[0][:120]}", flush=True)
                continue
            yield name, plain, op


def taken(world: pkt.World, calls: tuple[Call, Call], repeats: int) -> list[float]:
    """Host us of each of the calls."""
    least = [float("inf")] * len(calls)
    for _ in range(repeats):
        for at, call in enumerate(calls):
            world.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            least[at] = min(least[at], 1e6 * (time.perf_counter() - start) / CALLS)
    return least


def measure(world: pkt.World, only: str, repeats: int) -> dict[str, list[float]]:
    """By operator: us of the plain call and of the op's. Collective."""
    found = {}
    for name, plain, op in each(world, only):
        world.barrier()
        found[name] = taken(world, (plain, op), repeats)
    return found


def counted(only: str, repeats: int) -> dict[str, list[float]]:
    """As `measure`, on rank 0 of two on the fake driver."""
    from tests.runtime.eager_worlds import Rank, eager_worlds

    def main(rank: Rank) -> dict[str, list[float]]:
        found, world = {}, rank.world
        for name, plain, op in each(world, only):
            world.barrier()  # the other thread waits while this one measures
            if world.rank == 0:
                found[name] = taken(world, (plain, op), repeats)
            world.barrier()
        return found

    ranks = eager_worlds(2, main, heap=1 << 26)
    if isinstance(ranks[0], BaseException):
        raise ranks[0]
    return ranks[0]


def wrote(name: str, found: list[dict[str, list[float]]], **more: Any) -> None:
    """Write the slowest rank's figures to `benchmarks/results/NAME.json`."""
    rows = [
        _harness.row(operator, [max(rank[operator][1] - rank[operator][0] for rank in found)], "us", LIMIT)
        for operator in found[0]
    ]
    figures = {n: dict(zip(("plain", "op"), map(max, zip(*(rank[n] for rank in found))))) for n in found[0]}
    _harness.write(name, rows, "custom_ops", figures=figures, **more)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="words: only operators whose name has one of them")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    given = parser.parse_args(argv)
    if given.device == "cpu":
        wrote("custom_ops_cpu", [counted(given.only, given.repeats)], ranks=2)
        return 0
    from benchmarks.custom_ops import measure as importable  # workers cannot import it from __main__

    found = pkt.launch(importable, given.ranks, "cuda", (given.only, given.repeats), multicast=False, timeout=60)
    wrote(f"custom_ops_{given.ranks}", found, ranks=given.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
