"""Schedules, mutants, lost signals and lost ranks, and counters that wrap."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

import pkt
from pkt.kernels.declaration import Case
from pkt.kernels.operator import Operator
from tests.conformance import inputs
from tests.conformance.inputs import within

from .operands import dtypes_of, on_nodes, result_for
from .results import right

WRAP = 2**32 - 3  # launches that counters claim to have seen


def explored(operator: Operator, case: Case) -> Callable[[Any], None]:
    """A program for `pkt.simulate`: launches with other inputs each time, whose accesses the race detector sees."""
    mode = case.arguments["mode"]

    # Sums of whole numbers are exact. What an epilogue or a scale makes of them is not.
    rounded = inputs.result_dtype(operator, case, case.dtype) != case.dtype
    finished = inputs.arguments_of(operator, case).get("epilogue", "none") != "none"
    inexact = rounded or finished or operator.bound is not None
    any_shape = {n for n, o in operator.tensors.items() if o.shape == "..."}
    symmetric = {*operator.form(mode).symmetric, *any_shape}
    known: dict[tuple[int, int, int], tuple[dict[str, Any], list[torch.Tensor], tuple[Any, ...]]] = {}

    def expected(world: Any, launch: int) -> tuple[dict[str, Any], list[torch.Tensor], tuple[Any, ...]]:
        """(the rank's operands, exact results, how far right ones may be from them). All schedules have the same."""
        key = world.size, world.rank, launch
        if key not in known:
            found = inputs.everybody(operator, case, world.size, launch, case.dtype, inputs.whole)
            ranks = {n: None if ts is None else [t.to(world.torch_device) for t in ts] for n, ts in found.items()}
            exacts = [exact.double() for exact in inputs.exacts(operator, case, world.rank, ranks)]
            limits: tuple[Any, ...] = (0.0,)
            if inexact:
                limits = inputs.bounds(operator, mode, case, world.rank, world.size, ranks, case.dtype)
            known[key] = {n: None if ts is None else ts[world.rank] for n, ts in ranks.items()}, exacts, limits
        return known[key]

    def run(world: Any) -> None:
        first, (like, *_), _ = expected(world, 0)
        x = {n: pkt.empty(tuple(t.shape), dtype=t.dtype) for n, t in first.items() if t is not None and n in symmetric}
        out = result_for(world, operator, mode, case, like, case.dtype, case.out)
        for launch in range(case.launches):
            operands, exacts, limits = expected(world, launch)
            for number, name in enumerate(operands):
                if name in x:
                    inputs.fill(x[name], inputs.seed_of(launch, world.rank, number))
            mine = {n: t if t is None or n in x else t.clone() for n, t in operands.items()}
            tensors = {**mine, **x, **({"out": x.get(case.out, out)} if "out" in operator.names else {})}
            results = inputs.results(inputs.called(operator, mode, tensors, case, world=world))
            for tensor, exact, limit in zip(results, exacts, limits, strict=True):
                found = inputs.read(tensor)
                assert found.shape == exact.shape, (found, exact)
                assert within(found.double(), exact, limit).all(), (found, exact)

    run.__name__ = name_of(operator, case)
    return run


def name_of(operator: Operator, case: Case) -> str:
    """A short name for a case."""
    words = [operator.name, *(f"{v}" for v in case.arguments.values()), *(["in_place"] if case.out == "x" else [])]
    return "_".join(re.sub(r"\W+", "", word) for word in (*words, *("" if case.multicast else "unicast",)) if word)


def check_exploration(operator: Operator, case: Case, schedules: int, lost_ranks: int = 0) -> Any:
    """Every schedule is right, and every mutant of the synchronisation and every lost signal is caught."""
    report = pkt.simulate(
        explored(operator, case), ranks=case.ranks, seeds=schedules, mutants=True, lost_signals=True,
        lost_ranks=lost_ranks, sms=case.sms, multicast=case.multicast, node_size=case.node_size,
    )  # fmt: skip
    print(report)
    report.check()
    assert report.schedules == schedules
    assert report.mutants, "nothing to break"
    assert report.signals, "no signals to lose"
    return report


def check_wrap(operator: Operator, mode: str, seed: int = 0) -> None:
    """Launches are right while the launch number and the counters wrap: two before that and two behind it, so that
    buffers which alternate come again on both sides."""
    case = next(inputs.cases_of(operator, mode))
    dtype = torch.float32 if torch.float32 in dtypes_of(operator, mode) else dtypes_of(operator, mode)[0]

    def run(world: Any) -> None:
        keep: dict[str, torch.Tensor] = {}
        right(world, operator, mode, case, 0, dtype, "given", 0, keep)
        world.barrier()
        set_launches(world, WRAP)
        world.barrier()
        for launch in range(1, 5):
            right(world, operator, mode, case, launch, dtype, "given", 0, keep)

    on_nodes(operator, mode, 3, run, seed=seed, sms=2)


def set_launches(world: Any, launches: int) -> None:
    """Call it after one launch: it sets counters and launch numbers to their values after `launches` launches. Every
    counter but a barrier's grows by the same number in each launch, so it is multiplied by `launches`, in 32 bits."""
    for allocation in world.heap.live.values():
        block = allocation.block
        if block.kind != "signals" or block.name == "kernels.barrier":
            continue
        count = torch.Size(block.shape).numel()
        counters = world.backend.view(world.rank, block.start, 4 * count).view(torch.int32)
        counters.copy_(((counters.long() * launches + 2**31) % 2**32 - 2**31).int())
        header = world.backend.view(world.rank, block.offset, 8).view(torch.int64)
        if header.item():
            each = int(header.item()) >> 32  # a call may launch a collective for each of its operands
            assert header.item() == each << 32, "a rank is in the next launch"
            total = launches * each % 2**32
            header.fill_((total << 32) - (total >> 31 << 64))
