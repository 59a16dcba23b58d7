"""Every form of every operator in the registry on GPUs: right eagerly, in replayed graphs, and on two streams."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.declaration import Case
from pkt.kernels.operator import Operator, operators
from pkt.runtime.gpu.sharing import may_share
from tests.conformance import checks, inputs
from tests.gpu.run import FOUND, Batch, on_ranks, unless_possible

OPERATORS = operators()
ABSENT = ("nccl",) if may_share() else ()  # NCCL wants a GPU for every rank
FORMS = [f"{name} {mode}" for name, operator in OPERATORS.items() for mode in operator.forms if mode not in ABSENT]
GPU_SIZES = ((256, 128, 64, 192), (64, 512, 256, 40), (144, 136, 264, 8))  # of m, k, ... in an operator's order
MOST_WORK = 1 << 34  # the product of all letters of a larger case: the reference in fp64 takes seconds


def gpu_cases(name: str, mode: str) -> list[Case]:
    """The operator's own cases without the simulator's settings, and larger ones: those it names itself, or GPU_SIZES
    if its shapes have letters of any size."""
    operator = OPERATORS[name]
    cases, own = list(inputs.cases_of(operator, mode)), [case for case in operator.cases if case.large]
    if own:
        fit = [c for c in own if mode == c.arguments.get("mode", mode) and math.prod(c.large.values()) <= MOST_WORK]
        larger = [Case(sizes=case.large, arguments={**case.arguments, "mode": mode}) for case in fit]
        return cases + [case for at, case in enumerate(larger) if case not in larger[:at]]
    letters = [] if operator.most else inputs.letters_of(operator)
    return cases + [Case(sizes=dict(zip(letters, sizes * len(letters)))) for sizes in GPU_SIZES if letters]


class Calls:
    """Calls of one form with tensors of one case: launched, captured, checked."""

    def __init__(self, world: Any, name: str, mode: str, case: Case, dtype: torch.dtype, settings: Any) -> None:
        self.settings = settings
        self.world, self.operator, self.mode, self.case, self.dtype = world, OPERATORS[name], mode, case, dtype
        operands = inputs.everybody(self.operator, case, world.size, 0, dtype)
        like = inputs.exact(self.operator, case, world.rank, operands)
        out = checks.result_for(world, self.operator, mode, case, like, dtype, "given")
        self.tensors = checks.given(world, self.operator, mode, operands, out)

    def fill(self, launch: int) -> None:
        """Fill the tensors with the operands of this launch."""
        self.operands = inputs.everybody(self.operator, self.case, self.world.size, launch, self.dtype)
        for name, ranks in self.operands.items():
            if ranks is not None:
                self.tensors[name].copy_(ranks[self.world.rank])

    def call(self) -> Any:
        more = {**self.settings, "mode": self.mode, "world": self.world}
        self.found = inputs.runnable(self.operator, self.case, self.tensors, **more)()
        return self.found

    def check(self) -> None:
        """The last results are within the bounds of the last operands."""
        rank, size = self.world.rank, self.world.size
        exacts = inputs.exacts(self.operator, self.case, rank, self.operands)
        limits = inputs.bounds(self.operator, self.mode, self.case, rank, size, self.operands, self.dtype)
        for result, exact, limit in zip(inputs.results(self.found), exacts, limits, strict=True):
            found, exact = result.cpu().double(), exact.double()
            close = inputs.within(found, exact, limit)
            assert close.all(), f"{self.mode}, {self.case}: off by {(found - exact)[~close].abs().max():.3g}"


def program(name: str, mode: str, **settings: int) -> Callable[[Any], None]:
    def run(world: Any) -> None:
        ran, dtypes = 0, checks.floats(OPERATORS[name], mode)
        for case in gpu_cases(name, mode):
            dtype = dtypes[ran % min(2, len(dtypes))]
            try:
                ran += everything(world, name, mode, case, dtype, settings)
            except pkt.Unsupported as unfit:  # the form refuses this case on all ranks
                print(f"{name} {mode}: {unfit}")
        assert ran, f"no case of {name} suits {mode}"

    return run


def everything(world: Any, name: str, mode: str, case: Case, dtype: torch.dtype, settings: dict[str, int]) -> int:
    """1 after eager calls, replays of a graph, calls on two streams, and calls with other addresses in turn, which pkt
    records and replays in some forms, all of them right."""
    calls = [Calls(world, name, mode, case, dtype, settings) for _ in range(2)]
    for launch in range(3):
        calls[0].fill(launch)
        calls[0].call()
        calls[0].check()
    torch.cuda.synchronize()
    world.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls[0].call()
    world.barrier()
    for launch in range(3, 6):
        calls[0].fill(launch)
        graph.replay()
        calls[0].check()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for launch in range(6, 8):
        for one, stream in zip(calls, streams):
            with torch.cuda.stream(stream):
                one.fill(launch)
                one.call()
        torch.cuda.synchronize()
        for one in calls:
            one.check()
    for launch in range(8, 14):
        for one in calls:
            one.fill(launch)
            one.call()
        for one in calls:
            one.check()
    return 1


EXPLORED = {
    f"{checks.name_of(o, c)}-{at}": (c.ranks, checks.explored(o, c))
    for o in OPERATORS.values()
    for at, c in enumerate(o.cases)
    if c.explore and c.node_size is None  # tests.gpu.cases_nodes has those of several nodes
}
PROGRAMS = {form.replace(" ", "-"): program(*form.split()) for form in FORMS} | {
    "all_gather_matmul-gluon-copied": program("all_gather_matmul", "gluon", num_comm_sms=0),
    "matmul_reduce_scatter-gluon-copied": program("matmul_reduce_scatter", "gluon", copies=2),
    "dispatch_matmul-unfused-promised": program("dispatch_matmul", "unfused", tokens_per_rank=16),
    "matmul_combine-unfused-promised": program("matmul_combine", "unfused", tokens_per_rank=16),
    "all_gather_matmul_scaled-gluon-copied": program("all_gather_matmul_scaled", "gluon", num_comm_sms=0),
    "matmul_reduce_scatter_scaled-gluon-copied": program("matmul_reduce_scatter_scaled", "gluon", copies=2),
}


def trained(operator: Operator, world: pkt.World) -> None:
    with torch.device("cpu"):  # of the references
        checks.all_right_gradients(world, operator)


TRAINED = {
    name: functools.partial(trained, operator) for name, operator in OPERATORS.items() if operator.backward is not None
}
BATCH, BATCH_OF_GRADIENTS = Batch(PROGRAMS), Batch(TRAINED)
RANKS = sorted({ranks for ranks, _ in EXPLORED.values()})
BATCHES = {r: Batch({name: fn for name, (ranks, fn) in EXPLORED.items() if ranks == r}) for r in RANKS}


@on_ranks(2, 4)
@pytest.mark.parametrize("form", PROGRAMS)
def test_form(form: str, ranks: int) -> None:
    BATCH.check(form, ranks)


@on_ranks(2, 3)
@pytest.mark.parametrize("name", TRAINED)
def test_gradients(name: str, ranks: int) -> None:
    """In fp32, against the reference in fp64."""
    BATCH_OF_GRADIENTS.check(name, ranks)


@pytest.mark.parametrize(
    ("name", "ranks"), [pytest.param(name, r, marks=unless_possible(r)) for name, (r, _) in EXPLORED.items()]
)
def test_program_that_the_simulator_explores(name: str, ranks: int) -> None:
    BATCHES[ranks].check(name, ranks)


def test_there_are_gpus_to_test_on() -> None:
    assert FOUND >= 2
