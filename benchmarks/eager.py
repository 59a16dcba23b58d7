"""Host cost of a warm eager call of every form of every operator, beside Triton's own launch and beside NCCL.

    python -m benchmarks.eager --ranks 2        on GPUs, in at most 90 s
    python -m benchmarks.eager --device cpu     the calls of the driver and the time of Python, on the fake driver
    python -m benchmarks.eager --mib 256 --letter 4096 --only copy,gluon      forms and sizes where copies are chosen

| column | us, of the slowest rank |
|---|---|
| host | the host time of a call with the tensors of the call before; few calls are queued, so no queue is full |
| new | the same of a call whose addresses are new, so that it is not replayed (`pkt.runtime.launch.replay`) |
| loop | the time of a call in a loop that is not captured, with the time that the GPU takes |
| loop, new | the same of calls that are not replayed |
| bare | the host time of Triton's own launch of the kernel, for forms of one kernel |

NCCL + torch.mm is the form "nccl" of an operator, and "NCCL" beside the collectives.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

import pkt
from benchmarks import _harness
from benchmarks._collective import collectives
from benchmarks._process_group import ENVIRONMENT, prepare
from benchmarks.runtime import Recorder, recording
from pkt.kernels.declaration import Case
from pkt.kernels.operator import Operator, operators
from pkt.progress import steps
from pkt.runtime.launch import replay
from tests.conformance import inputs

LIMIT = 25.0  # us of host time, where Triton's own launch takes as long
CALLS, REPEATS, WARM = 20, 15, 5
COPIED = {"all_gather_matmul": {"num_comm_sms": 0}, "matmul_reduce_scatter": {"copies": 2}}
"""Settings with which the Gluon forms copy."""
FIRST = ("copy", "copied", "unfused", "nccl", "NCCL")
"""Forms of several calls of the driver. They are measured first, if the time does not last for all."""


class Sizes(NamedTuple):
    """Of the operands: bytes of a vector on each rank, and the size of every letter of a product."""

    nbytes: int
    letter: int


def calls_of(world: pkt.World, operator: Operator, sizes: Sizes, gpu: bool) -> dict[str, Callable[[], Any]]:
    """A call of each form by its name. Tensors of collectives are symmetric, those of products are not."""
    letters = inputs.letters_of(operator)
    case = inputs.alike(operator, sizes.letter, f"W*{sizes.nbytes // 2 // world.size // 8 * 8}")

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        if letters:
            return torch.zeros(shape, dtype=torch.bfloat16, device=world.torch_device)
        return pkt.zeros(*shape, dtype=torch.bfloat16, world=world)

    given: dict[str, Any]
    if case is operator.cases[0] or inputs.usual(operator) != torch.bfloat16:  # its operands have values of their own
        operands = inputs.everybody(operator, case, world.size, 0, inputs.usual(operator))
        given = {n: ts and inputs.placed(world, ts[world.rank], True) for n, ts in operands.items()}
        shape = tuple(inputs.exact(operator, case, world.rank, operands).shape)
    else:
        shapes = inputs.shapes_of(operator, case, world.size)
        given = {name: tensor(shape) for name, shape in shapes.items() if not operator.tensors[name].optional}
        shape = result_shape(operator, case, world, given) if "out" in operator.names else ()
    if "out" in operator.names:
        given["out"] = tensor(shape)
    call: Callable[..., Any] = inputs.runnable(operator, case, given, world=world)
    found: dict[str, Callable[[], Any]] = {}
    found |= {mode: partial(call, mode=mode) for mode, form in operator.forms.items() if gpu or not form.gpu}
    if gpu and operator.name in COPIED:
        found["gluon, copied"] = partial(call, mode="gluon", **COPIED[operator.name])
    own = collectives().get(operator.name)
    if own and gpu:
        plain = [x.plain() for x in given.values() if isinstance(x, pkt.SymmetricTensor)]
        runs = own[1].baselines(plain[0], plain[-1], world.size)
        found |= {name: run for name, run in runs.items() if name in own[1].names}
    return found


def result_shape(operator: Operator, case: Case, world: pkt.World, given: dict[str, torch.Tensor]) -> tuple[int, ...]:
    """Of an operator's result."""
    operands = {name: [torch.empty(x.shape, device="meta")] * world.size for name, x in given.items()}
    return tuple(inputs.exact(operator, case, world.rank, operands).shape)


def ordered(world: pkt.World, sizes: Sizes, only: str, gpu: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The name and the call of every form; those of FIRST first."""
    every = {
        f"{name}, {form}": call
        for name, operator in operators().items()
        for form, call in calls_of(world, operator, sizes, gpu).items()
    }
    chosen = [name for name in every if not only or any(word in name for word in only.split(","))]
    first = sorted(chosen, key=lambda name: not any(word in name for word in FIRST))
    for name in steps(first, "forms", None if world.rank == 0 else False):
        yield name, every[name]


def ways() -> dict[str, AbstractContextManager]:
    """Of calling again: replayed where that can be, and as with addresses that are new."""
    return {"": nullcontext(), ", new": replay.paused()}


# ------------------------------------------------------------------------------------------------------------- on GPUs
def timed(world: pkt.World, call: Callable[[], Any]) -> tuple[float, float]:
    """Host microseconds of a call, and those of a call in a loop until the GPU has done it: medians of this rank."""
    for _ in range(WARM):
        call()
    hosts, loops = [], []
    for _ in range(REPEATS):
        world.synchronize()
        world.barrier()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        hosts.append(time.perf_counter() - start)
        world.synchronize()
        loops.append(time.perf_counter() - start)
    host, loop = (1e6 * statistics.median(times) / CALLS for times in (hosts, loops))
    return host, loop


def measure(world: pkt.World, sizes: Sizes, only: str, end: float) -> dict[str, dict[str, float]]:
    """Figures of each form that could be measured before `end`, in time.time(). Collective."""
    prepare(world)
    found: dict[str, dict[str, float]] = {}
    for name, call in ordered(world, sizes, only, gpu=True):
        if max(world.all_gather_object(time.time())) > end:
            break
        try:
            call()
        except pkt.Unsupported as error:
            if world.rank == 0:
                print(f"{name}: left out, {str(error).splitlines()[0][:160]}", flush=True)
            continue
        mine: dict[str, float] = {}
        for suffix, way in ways().items():
            with way:
                mine["host" + suffix], mine["loop" + suffix] = timed(world, call)
        bare = alone(world, call) if not any(word in name for word in FIRST) else None
        if bare:
            mine["bare"], _ = timed(world, bare)
        found[name] = mine
        if world.rank == 0:
            print(f"{name:44}", *(f"{figure} {us:.1f}" for figure, us in mine.items()), flush=True)
    return found


def alone(world: pkt.World, call: Callable[[], Any]) -> Callable[[], Any] | None:
    """Triton's launch of the kernel that `call` launches; None if that is not one."""
    recorder = Recorder()
    with recording(recorder, world):
        call()
    if len(recorder.launches) != 1:
        return None
    (kernel, grid, args, options), *_ = recorder.launches
    return lambda: kernel[grid](*args, launch_cooperative_grid=True, **options)


# ----------------------------------------------------------------------------------------------------- without a GPU
def counted(only: str) -> dict[str, dict[str, float]]:
    """Calls of the driver and microseconds of Python in a call of each form, of rank 0 of two on the fake driver, where
    kernels and torch.mm do nothing."""
    from tests.runtime.eager_worlds import Rank, eager_worlds

    def main(rank: Rank) -> dict[str, dict[str, float]]:
        found = {}
        for name, call in ordered(rank.world, Sizes(4096, 16), only, gpu=False):
            row: dict[str, float] = {}
            try:
                call()
            except pkt.Unsupported:  # on every rank
                continue
            for suffix, way in ways().items():
                rank.world.barrier()
                with way if rank.world.rank == 0 else nullcontext():
                    for _ in range(WARM):
                        call()
                    rank.world.barrier()  # the other threads wait while this one measures
                    if rank.world.rank == 0:
                        row |= once(rank, call, suffix)
                    rank.world.barrier()
            found[name] = row
        return found

    def nothing(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out

    with mock.patch.object(torch, "mm", nothing):
        ranks = eager_worlds(2, main, heap=1 << 26)
    if isinstance(ranks[0], BaseException):
        raise ranks[0]
    return ranks[0]


def once(rank: Any, call: Callable[[], Any], suffix: str) -> dict[str, float]:
    """The figures of one form."""
    before = rank.driver.calls.total()
    call()
    calls, taken = rank.driver.calls.total() - before, []
    for _ in range(10 * REPEATS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        taken.append(1e6 * (time.perf_counter() - start) / CALLS)
    return {f"driver calls{suffix}": calls, f"host{suffix}": min(taken)}


def written(name: str, found: list[dict[str, dict[str, float]]], **more: Any) -> None:
    """Print the slowest rank's figures, and write them to `benchmarks/results/NAME.json`."""
    table = {
        form: {figure: max(rank[form][figure] for rank in found) for figure in mine} for form, mine in found[0].items()
    }
    for form, figures in table.items():
        print(f"{form:36}", "  ".join(f"{figure} {value:.1f}" for figure, value in figures.items()))
    limited = {form: figures["host"] for form, figures in table.items() if "nccl" not in form.lower()}
    rows = [_harness.row(form, [us], "us", LIMIT) for form, us in limited.items()]
    _harness.write(name, rows, "eager", figures=table, **more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--mib", type=float, default=1.0, help="MiB of a vector on each rank")
    parser.add_argument("--letter", type=int, default=512, help="size of every dimension of a product")
    parser.add_argument("--only", default="", help="words: only forms whose name has one of them")
    parser.add_argument("--seconds", type=float, default=80.0, help="no form is begun after these")
    given = parser.parse_args()
    if given.device == "cpu":
        written("eager_cpu", [counted(given.only)], ranks=2)
        return 0
    os.environ.update(ENVIRONMENT)
    from benchmarks.eager import measure as importable  # workers cannot import it from __main__

    sizes = Sizes(int(given.mib * (1 << 20)), given.letter)
    args = (sizes, given.only, time.time() + given.seconds)
    heap = max(2 << 30, 64 * sizes.nbytes)
    found = pkt.launch(importable, given.ranks, "cuda", args, heap=heap, multicast=False, timeout=20)
    written(f"eager_{given.ranks}", found, ranks=given.ranks, sizes=sizes._asdict())
    return 0


if __name__ == "__main__":
    sys.exit(main())
