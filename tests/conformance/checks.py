"""One function for each property that must hold of an operator; each raises AssertionError where it does not."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import re
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pkt
from pkt.kernels import traced
from pkt.kernels.declaration import Case
from pkt.kernels.operator import Operator
from pkt.kernels.shared import copies
from pkt.kernels.shared.checks import FLOATS
from pkt.language.inspect import count_markers
from pkt.runtime.world import World
from tests import device_library
from tests.conformance import inputs
from tests.conformance.inputs import within
from tests.kernels.helpers import on_ranks
from tests.kernels.launches import all_launched, compile_checked

LAUNCHES = 3
CALLS = 24  # Python functions that a planned call may call before it launches its kernel
WRAP = 2**32 - 3  # launches that counters claim to have seen


def on_nodes(operator: Operator, mode: str, ranks: int, run: Callable[[Any], Any], **options: Any) -> None:
    """`on_ranks` in a world where the form runs: for several nodes at least two of them, each of one rank."""
    across = mode in operator.across
    on_ranks(max(ranks, 1 + across), run, node_size=1 if across else None, **options)


def dtypes_of(operator: Operator, mode: str) -> tuple[torch.dtype, ...]:
    """The dtypes that the first operand may have in a form."""
    return operator.form(mode).dtypes or next(iter(operator.tensors.values())).dtypes


def given(
    world: Any, operator: Operator, mode: str | None, operands: dict[str, Any], out: Any = None,
    offset: int | tuple[int, ...] = 0, transposed: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """This rank's operands, symmetric where the form's peers access them, and `out` where the function takes one.
    offset: elements before a tensor's first one; of several, each rank's for its own tensors. transposed: as transposed
    views where the operator takes those."""

    def start(name: str) -> int:
        return offset if isinstance(offset, int) else 0 if name in symmetric else offset[world.rank]

    symmetric = operator.form(mode).symmetric if mode else tuple(operator.names)
    mine = {
        n: ts
        and inputs.placed(
            world, ts[world.rank], n in symmetric, start(n), transposed and operator.tensors[n].transposed
        )
        for n, ts in operands.items()
    }
    return mine | ({"out": out} if "out" in operator.names else {})


def result_for(
    world: Any, operator: Operator, mode: str, case: Case, like: torch.Tensor, dtype: torch.dtype, kind: str
) -> Any:
    """`out` of a kind: None for "new", an own tensor for "given", one in the heap for "symmetric"."""
    if "out" not in operator.names or kind == "x":
        return None
    dtype = inputs.result_dtype(operator, case, dtype)
    if "out" in operator.form(mode).symmetric or kind == "symmetric":
        return pkt.empty(tuple(like.shape), dtype=dtype)
    return None if kind == "new" else torch.empty(tuple(like.shape), dtype=dtype, device=world.torch_device)


# ------------------------------------------------------------------------------------------------------------- results
def check_results(
    operator: Operator, mode: str, ranks: int, dtype: torch.dtype, kind: str, offset: int = 0, *, more: bool = False,
    transposed: bool = False, launches: int = LAUNCHES, part: int | None = None, node_size: int | None = None,
    seed: int = 0,
) -> None:  # fmt: skip
    """Every case is right within the bound, launch after launch with other inputs, and without a reset; a ragged one in
    two launches at most. more: further sizes, with one launch. transposed: operands are transposed views where the
    operator takes those. part: 0, 1 or 2 for every third case, beginning with the first, second or third; at least
    one."""
    usual, cases = ([*inputs.cases_of(operator, mode, also)] for also in (False, more))
    if part is not None:
        cases = cases[part % len(cases) :: 3]

    @functools.cache  # all ranks have the same
    def operands(at: int, launch: int, size: int) -> dict[str, Any]:
        return inputs.everybody(operator, cases[at], size, launch, dtype)

    def run(world: Any) -> None:
        for at, case in enumerate(cases):
            keep: dict[str, torch.Tensor] = {}
            most = launches if case in operator.cases else 2 if case in usual else 1
            for launch in range(min(launches, most)):
                try:
                    every = operands(at, launch, world.size)
                    right(world, operator, mode, case, launch, dtype, kind, offset, keep, transposed, every)
                except pkt.Unsupported:
                    if not offset:
                        raise
                    break  # the form's `fits` refuses the offset, on all ranks

    if node_size is None:
        on_nodes(operator, mode, ranks, run, sms=4, seed=seed)
    else:
        on_ranks(ranks, run, sms=4, seed=seed, node_size=node_size)


def right(
    world: Any, operator: Operator, mode: str, case: Case, launch: int, dtype: torch.dtype, kind: str,
    offset: int | tuple[int, ...], keep: dict[str, torch.Tensor], transposed: bool = False,
    operands: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """One call of a case, and whether its result is right. keep: tensors of the launch before, which are used again.
    operands: all ranks', where they are made already."""
    operands = operands or inputs.everybody(operator, case, world.size, launch, dtype)
    exacts = inputs.exacts(operator, case, world.rank, operands)
    if not keep:
        out = result_for(world, operator, mode, case, exacts[0], dtype, kind)
        keep.update(given(world, operator, mode, operands, out, offset, transposed))
    for name, ranks in operands.items():
        if ranks is not None:
            keep[name].copy_(ranks[world.rank])
    out = keep.get("out")
    with torch.device("meta"):  # a default device changes nothing
        results = inputs.results(inputs.called(operator, mode, keep, case, world=world))
    if out is not None:
        assert results[0] is out, f"{mode}: returned another tensor than `out`"
    limits = inputs.bounds(operator, mode, case, world.rank, world.size, operands, dtype)
    assert len(results) == len(exacts) == len(limits) <= 1 + len(operator.also)
    for found, exact, limit in zip(results, exacts, limits):
        assert tuple(found.shape) == tuple(exact.shape), (mode, case, found.shape, exact.shape)
        found, exact = found.cpu().double(), exact.cpu().double()
        close = within(found, exact, limit)
        assert close.all(), f"{mode}, {case}, launch {launch}: off by {(found - exact).abs().max():.3g}"


def check_teams(operator: Operator, mode: str, teams: list[list[int]]) -> None:
    """Teams that make the same calls at the same time, over operands of the whole world, each get their own results.
    Each rank is in one team, and the teams are of one size."""

    def run(world: Any) -> None:
        team = world.team(next(ranks for ranks in teams if world.rank in ranks))
        case, dtype = next(inputs.cases_of(operator, mode)), floats(operator, mode)[0]
        keep: dict[str, torch.Tensor] = {}
        for launch in range(2):
            # Launches of the teams have other operands.
            right(team, operator, mode, case, launch + 10 * teams.index(list(team.ranks)), dtype, "new", 0, keep)

    on_nodes(operator, mode, sum(map(len, teams)), run)


def check_results_of_uneven_ranks(operator: Operator, mode: str, dtype: torch.dtype) -> None:
    """Right where the operands of one rank of two begin at a multiple of 16 bytes. Their rows do."""
    letters = inputs.letters_of(operator)
    case = inputs.alike(operator, 16, "16") if letters else next(inputs.cases_of(operator, mode))

    def run(world: Any) -> None:
        for offset in ((0, 1), (1, 0)):
            with contextlib.suppress(pkt.Unsupported):  # on both ranks, or the other would wait
                right(world, operator, mode, case, 0, dtype, "new", offset, {})

    on_nodes(operator, mode, 2, run, sms=4)


def check_empty(operator: Operator, mode: str) -> None:
    """If any one dimension is empty, the result is the reference's and nothing fails."""

    def run(world: Any) -> None:
        for case in inputs.cases_of(operator, mode):
            for shapes, sizes in emptied(case):
                none = Case(sizes=sizes, shapes=shapes, arguments=case.arguments)
                right(world, operator, mode, none, 0, dtypes_of(operator, mode)[0], "new", 0, {})

    on_nodes(operator, mode, 2, run)


def emptied(case: Case) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """(shapes, sizes) of a case with one of its dimensions or letters 0."""
    found: list[tuple[dict[str, Any], dict[str, int]]] = []
    found += [(dict(case.shapes), {**case.sizes, letter: 0}) for letter in case.sizes]
    shapes = {n: [str(w) for w in (s.split() if isinstance(s, str) else s)] for n, s in case.shapes.items()}
    dimensions = max(map(len, shapes.values()), default=0)  # of the operands; indices beside them may have fewer
    for at in range(dimensions):
        none = {n: " ".join([*w[:at], "0", *w[at + 1 :]]) for n, w in shapes.items() if len(w) == dimensions}
        found.append(({**case.shapes, **none}, dict(case.sizes)))
    return found


# ------------------------------------------------------------------------------------------------------- wrong calls
def refuses(world: Any, operator: Operator, tensors: dict[str, Any], case: Case, /, **more: Any) -> None:
    """The call raises one of pkt's errors that names rank and call, before it launches or allocates anything."""
    before = world.heap.ledger.free_bytes
    keywords = inputs.arguments_of(operator, case)
    with pytest.raises(pkt.PktError) as caught:
        operator.function(**operator.parameters(tensors), **{**keywords, "world": world, **more})
    assert re.match(rf"rank {world.rank}: {operator.name}\b", str(caught.value)), str(caught.value)
    assert world.heap.ledger.free_bytes == before, "memory was allocated"


def check_refusals(operator: Operator) -> None:
    """Wrong tensors and keywords, of each kind."""
    case = operator.cases[0]
    every = tuple(n for n, o in operator.tensors.items() if o.shape != "..." or n in case.shapes)
    case = Case(sizes=case.sizes, shapes=case.shapes, arguments={**case.arguments, "given": every})

    def run(world: Any) -> None:
        dtype = next(iter(operator.tensors.values())).dtypes[0]
        operands = inputs.everybody(operator, case, world.size, 0, dtype)
        like = inputs.exact(operator, case, world.rank, operands)
        out = pkt.empty(tuple(like.shape), dtype=dtype) if "out" in operator.names else None
        good = given(world, operator, None, operands, out)
        for name, operand in operator.tensors.items():
            x = good[name]
            if x is None:
                continue
            strided = torch.empty((*x.shape, 2), dtype=dtype)[..., 0] if x.numel() > 1 else 3
            wrongs = [None, 3, "x", x.to(torch.complex64), torch.ones(2).to_sparse()]
            if operator.tuning is not None:  # the others copy it
                wrongs.append(strided)
            for wrong in wrongs:
                if wrong is not None or not operand.optional:
                    refuses(world, operator, {**good, name: wrong}, case)
        refuses(world, operator, good, case, mode="no such form")
        refuses(world, operator, good, case, world=3)
        for name in operator.across:
            refuses(world, operator, good, case, mode=name)
        for name, form in operator.forms.items():
            for operand in form.symmetric:
                if good.get(operand) is not None:
                    refuses(world, operator, {**good, operand: good[operand].plain().clone()}, case, mode=name)
            for setting in operator.settings.keys() - form.settings.keys():
                refuses(world, operator, good, case, mode=name, **{setting: 1})
        for keyword in (*operator.settings, *operator.arguments):
            real = "float" in str(inspect.signature(operator.function).parameters[keyword].annotation)
            for wrong in (object(), float("nan") if real else 1.5, "no such"):
                refuses(world, operator, good, case, **{keyword: wrong})
        if out is not None:
            wide = pkt.empty((*like.shape, 2), dtype=dtype)
            for wrong in (3, wide, out.to(torch.complex64), torch.ones(2).to_sparse()):
                refuses(world, operator, {**good, "out": wrong}, case)

    def over_nodes(world: Any) -> None:
        dtype = next(iter(operator.tensors.values())).dtypes[0]
        tensors = given(world, operator, None, inputs.everybody(operator, case, world.size, 0, dtype))
        for name in operator.forms if operator.across else (None,):
            refuses(world, operator, {**tensors, "out": None} if "out" in operator.names else tensors, case, mode=name)

    on_ranks(2, run)
    on_ranks(2, over_nodes, node_size=1)


def check_overlap(operator: Operator) -> None:
    """`out` one element into an operand, or the other way round, is refused."""
    if "out" not in operator.names:
        return

    def run(world: Any) -> None:
        for case in operator.cases:
            dtype = next(iter(operator.tensors.values())).dtypes[0]
            operands = inputs.everybody(operator, case, world.size, 0, dtype)
            like = inputs.exact(operator, case, world.rank, operands)
            for name, ranks in operands.items():
                if ranks is None or ranks[0].dtype != dtype or min(ranks[0].numel(), like.numel()) < 2:
                    continue
                room = pkt.empty(ranks[0].numel() + like.numel(), dtype=dtype)
                good = given(world, operator, None, operands)
                good["out"], good[name] = room[1:][: like.numel()].view(like.shape), room[: ranks[0].numel()]
                good[name] = good[name].view(ranks[0].shape)
                refuses(world, operator, good, case)

    on_ranks(2, run)


def check_agreement(operator: Operator) -> None:
    """If ranks call with different sizes, dtypes, arguments or forms, all of them are told the call of each."""
    case = operator.cases[0]
    types = next(iter(operator.tensors.values())).dtypes

    def differ(change: Callable[[Any], tuple[Case, torch.dtype, str]]) -> None:
        def run(world: Any) -> None:
            mine, dtype, mode = change(world)
            operands = inputs.everybody(operator, mine, world.size, 0, dtype)
            like = inputs.exact(operator, mine, world.rank, operands)
            out = pkt.empty(64, dtype=torch.float64) if "out" in operator.names else None
            if out is not None:
                size = torch.Size(like.shape).numel()
                pool = pkt.empty(4096, dtype=torch.uint8)
                out = pool[: size * dtype.itemsize].view(dtype).view(like.shape)
            rooms = {}
            for name, ranks in operands.items():
                if ranks is not None:
                    room = pkt.empty(16384, dtype=torch.uint8)[: ranks[0].nbytes].view(ranks[0].dtype)
                    room = room.view(ranks[0].shape)
                    room.copy_(ranks[world.rank])
                    rooms[name] = room
                else:
                    rooms[name] = None
            tensors = {**rooms, **({"out": out} if out is not None else {})}
            inputs.called(operator, mode, tensors, mine, world=world)

        with pytest.raises(pkt.CollectiveMismatch, match=rf"rank 0: {operator.name}\(.*rank 1: {operator.name}\("):
            on_ranks(2, run)

    modes = [mode for mode, form in operator.forms.items() if not form.gpu and types[0] in dtypes_of(operator, mode)]
    mode = case.arguments.get("mode", modes[0])
    own = Case(sizes=case.sizes, shapes=case.shapes, arguments={**case.arguments, "mode": mode})
    other = next(t for t in dtypes_of(operator, mode) if t.itemsize == 4 and t != types[0])
    differ(lambda world: (own, other if world.rank else types[0], mode))
    plain = Case(
        sizes=case.sizes, shapes=case.shapes, arguments={k: v for k, v in case.arguments.items() if k == "given"}
    )
    if len(modes) > 1:
        differ(lambda world: (plain, types[0], modes[-1 if world.rank else 0]))

    def larger(by: int) -> Case:
        sizes = {n: v + by * (n not in operator.private) for n, v in case.sizes.items()}
        shapes = {}
        for name, shape in case.shapes.items():
            words = [*inputs.numbers(shape, 2)]
            shapes[name] = (*words[:-1], words[-1] + 2 * by) if words else (2 * by,)
        return Case(sizes=sizes, shapes=shapes, arguments=own.arguments)

    differ(lambda world: (larger(2 * world.rank), types[0], mode))


# -------------------------------------------------------------------------------------------------- what calls cost
def check_host_cost(operator: Operator, mode: str, patch: pytest.MonkeyPatch) -> None:
    """A second call with tensors alike calls few Python functions before its first launch: the plan is kept, and keeps
    none of the tensors."""
    case = next(inputs.cases_of(operator, mode))
    dtype = dtypes_of(operator, mode)[0]
    count: list[str] = []

    def run(world: Any) -> None:
        operands = inputs.everybody(operator, case, world.size, 0, dtype)
        like = inputs.exact(operator, case, world.rank, operands)
        tensors = given(world, operator, mode, operands, result_for(world, operator, mode, case, like, dtype, "given"))
        inputs.called(operator, mode, tensors, case, world=world)
        world.barrier()
        patch.setattr(Operator, "plan", lambda *_: pytest.fail("planned again"))

        def profile(frame: Any, event: str, _: Any) -> None:
            if event == "call" and f"{os.sep}simulate{os.sep}" not in frame.f_code.co_filename:  # none of it on GPUs
                # Of cooperative_launch, of a copy by a copy engine, and of a kernel beside these.
                if frame.f_code.co_name in ("start", "launch_rank", "simulate", "beside"):
                    sys.setprofile(None)
                else:
                    count.append(frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else "")

        keywords = inputs.arguments_of(operator, case)
        keywords |= inputs.settings_of(operator.form(mode), case, operator)
        parameters = operator.parameters(tensors)
        if world.rank == 0:
            sys.setprofile(profile)
        try:
            operator.function(**parameters, **keywords, mode=mode, world=world)
        finally:
            sys.setprofile(None)
        parameters.clear()
        alive = [weakref.ref(x) for x in tensors.values() if type(x) is torch.Tensor]
        tensors.clear()
        gc.collect()
        assert not any(x() is not None for x in alive), "the plan keeps a tensor"

    on_nodes(operator, mode, 1, run)
    assert len(count) <= CALLS, count


def check_autograd(operator: Operator, mode: str) -> None:
    """Each call, first or later, gives the written tensor a new version and records nothing."""
    case = next(inputs.cases_of(operator, mode))
    dtype = next(t for t in dtypes_of(operator, mode) if t.is_floating_point)

    def run(world: Any) -> None:
        operands = inputs.everybody(operator, case, world.size, 0, dtype)
        like = inputs.exact(operator, case, world.rank, operands)
        out = result_for(world, operator, mode, case, like, dtype, "given")
        tensors = given(world, operator, mode, operands, out)
        for _ in range(2):
            before = None if tensors[operator.written] is None else tensors[operator.written]._version
            results = inputs.results(inputs.called(operator, mode, tensors, case, world=world))
            assert not any(found.requires_grad for found in results)
            if before is not None:
                assert tensors[operator.written]._version > before, "torch is not told of the write"

    on_nodes(operator, mode, 2, run)


def cases_with_gradients(operator: Operator) -> list[Case]:
    """Of the operator's own, one for each set of arguments and of tensors that are given."""
    cases: dict[Any, Case] = {}
    for case in operator.cases:
        arguments = inputs.arguments_of(operator, case)
        if operator.backward is not None and not operator.backward.refuses(arguments, torch.float32):
            given = case.arguments.get("given", ())
            cases.setdefault((*arguments.items(), given, *(len(s) for s in case.shapes.values())), case)
    return list(cases.values())


def check_gradients(operator: Operator, ranks: int, node_size: int | None = None) -> None:
    """The gradients of every case are those of the reference in fp64, of the sum of all ranks' losses; those of one
    operand alone, too. An operator without a backward pass says so."""
    assert operator.backward is None or cases_with_gradients(operator), "no case has gradients"

    def run(world: Any) -> None:
        if operator.backward is None:
            operands = inputs.everybody(operator, operator.cases[0], world.size, 0, torch.float32)
            tensors = {n: ts and ts[world.rank].requires_grad_(ts[0].is_floating_point()) for n, ts in operands.items()}
            with pytest.raises(pkt.Unsupported, match="has no gradient"):
                inputs.called(operator, None, tensors, Case(arguments=operator.cases[0].arguments), world=world)
        all_right_gradients(world, operator)

    on_ranks(ranks, run, sms=2, node_size=node_size)


def all_right_gradients(world: Any, operator: Operator) -> None:
    """Of every case, and of the first one those of one operand alone."""
    for number, case in enumerate(cases_with_gradients(operator)):
        operands = inputs.gradients_of(operator, case, world.size)
        names = [n for n, ts in operands.items() if ts is not None and ts[0].is_floating_point()]
        alone = [[name] for name in names] if number == 0 and len(names) > 1 else []
        for needs in (names, *alone):
            right_gradients(world, operator, case, operands, needs)


def right_gradients(world: Any, operator: Operator, case: Case, operands: dict[str, Any], needs: list[str]) -> None:
    """Whether the gradients of the operands `needs` are right in a call of a case."""
    here = {n: ts and ts[world.rank].to(world.torch_device) for n, ts in operands.items()}
    leaves = {n: x if x is None else x.clone().requires_grad_(n in needs) for n, x in here.items()}
    # Copies, because some calls overwrite their operand, which may not be a leaf.
    tensors = {n: None if x is None else x.clone() for n, x in leaves.items()}
    with torch.device("meta"):
        results = inputs.results(inputs.called(operator, None, tensors, case, world=world))
    floats = [at for at, found in enumerate(results) if found.is_floating_point()]
    assert all(results[at].requires_grad for at in floats)
    everybody = [inputs.upstream(operator, case, r, operands) for r in range(world.size)]
    mine = [everybody[world.rank][at].float().to(world.torch_device) for at in floats]
    with torch.device("meta"):
        torch.autograd.backward([results[at] for at in floats], mine)
    exact, limits = inputs.exact_gradients(operator, case, world.rank, operands, everybody, needs)
    for name, right, limit in zip(needs, exact, limits):
        found = leaves[name].grad
        assert found is not None, f"{name} has no gradient"
        error = (found.cpu().double() - right).abs()
        assert (error <= limit).all(), f"{case}: the gradient of {name} is off by {error.max():.3g}"


def check_saved(operator: Operator) -> None:
    """A backward pass raises as torch's do where an operand or a result that it needs was written after the call. It
    does not where others were. What is written here keeps its values, so only versions can tell."""
    cases = cases_with_gradients(operator)

    def recorded(world: Any, operands: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
        """The operands and results of a call by name, and the sum of the results."""
        leaves = {n: ts and ts[world.rank].requires_grad_(ts[0].is_floating_point()) for n, ts in operands.items()}
        tensors = {n: None if x is None else x.clone() for n, x in leaves.items()}
        results = inputs.results(inputs.called(operator, None, tensors, cases[0], world=world))
        loss = sum(x.sum() for x in results if x.requires_grad)
        assert isinstance(loss, torch.Tensor)
        return {n: x for n, x in tensors.items() if x is not None} | dict(zip(("out", *operator.also), results)), loss

    def run(world: Any) -> None:
        assert operator.backward is not None
        operands = inputs.gradients_of(operator, cases[0], world.size)
        needed = {saved for name in operands if operands[name] for saved in operator.backward.saves.get(name, ())}
        tensors, loss = recorded(world, operands)
        for name in tensors.keys() - needed:
            torch.autograd.graph.increment_version(tensors[name])
        loss.backward()
        for name in sorted(needed & tensors.keys()):
            tensors, loss = recorded(world, operands)
            torch.autograd.graph.increment_version(tensors[name])
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    if cases:
        on_ranks(2, run, sms=2)


def check_compiled(operator: Operator) -> None:
    """torch.compile makes one graph of a call, whose result and gradients are those of the eager call."""
    case = operator.cases[0]
    case = Case(sizes=case.sizes, shapes=case.shapes, arguments=inputs.arguments_of(operator, case))
    gradient = operator.backward is not None and not operator.backward.refuses(case.arguments, torch.float32)
    mode = next(iter(operator.forms))

    def run(world: Any) -> None:
        operands = inputs.everybody(operator, case, world.size, 0, torch.float32, inputs.whole)
        limits = inputs.bounds(operator, mode, case, world.rank, world.size, operands, torch.float32)
        mine = {n: ts and ts[world.rank] for n, ts in operands.items()}
        leaves = {n: x if x is None else x.requires_grad_(gradient and x.is_floating_point()) for n, x in mine.items()}

        def call(tensors: dict[str, Any]) -> tuple[torch.Tensor, ...]:
            return inputs.results(operator.function(**tensors, **case.arguments))

        def everything(function: Any) -> list[torch.Tensor]:
            # Copies, because some calls overwrite their operand.
            found = function(operator.parameters({n: None if x is None else x.clone() for n, x in leaves.items()}))
            recorded = [x for x in found if x.requires_grad]
            wanted = [x for x in leaves.values() if x is not None and x.requires_grad]
            upstream = [x.detach() % 3 for x in recorded]
            return [*found, *(torch.autograd.grad(recorded, wanted, upstream) if wanted else ())]

        compiled, eager = everything(torch.compile(call, backend="aot_eager", fullgraph=True)), everything(call)
        for at, (found, right) in enumerate(zip(compiled, eager, strict=True)):
            undefined = torch.as_tensor(limits[at] if at < len(limits) else 0.0) == float("inf")
            assert ((found == right) | undefined).all(), "compiled code computes something else"

    torch._dynamo.reset()
    on_ranks(2, run, sms=2)


class Noted(TorchDispatchMode):
    """Notes the storages that torch makes in this thread while `on`."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.made = False, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        fresh = self.on and not any(result.alias_info for result in func._schema.returns)
        for x in tree_leaves(found) if fresh else ():
            if isinstance(x, torch.Tensor) and x.nbytes:
                self.made.setdefault(StorageWeakRef(x.untyped_storage()), (func, tuple(x.shape)))
        return found


def check_graph_pool(operator: Operator, mode: str) -> None:
    """What torch's CUDA graph trees ask of an op. They run it once before they record it, with memory from a pool that
    they use again. So of all that its first call allocates in this thread, only the results live on. Results lie in
    torch's own memory, and share none with each other, with an operand or with results of other calls."""
    case = next(inputs.cases_of(operator, mode))
    dtype = dtypes_of(operator, mode)[0]
    form, noted = operator.form(mode), Noted()

    def run(world: Any) -> None:
        operands = inputs.everybody(operator, case, world.size, 0, dtype)
        tensors = {n: ts and ts[world.rank] for n, ts in operands.items()}
        keywords = inputs.arguments_of(operator, case)
        if not form.symmetric:  # compiled code gives none
            keywords |= {"mode": mode, **inputs.settings_of(form, case, operator)}
        defaults = {n: p.default for n, p in inspect.signature(operator.function).parameters.items()}
        values = tuple(keywords.get(name, defaults[name]) for name in operator.keywords)
        inside = [tensors[name] for name in operator.tensors]
        world.barrier()
        noted.on = True
        calls = [inputs.results(traced._fresh(operator, inside, values, world, None)) for _ in range(2)]
        world.barrier()
        noted.on = False
        found = [x for results in calls for x in results if x.nbytes]
        places = [x.untyped_storage().data_ptr() for x in found]
        assert len({*places}) == len(places), "results share memory"
        assert not {*places} & {x.untyped_storage().data_ptr() for x in inside if x is not None}, (
            "a result is an operand"
        )
        assert not any(place in world.span for place in places), "a result lies in the heap"
        del calls, found
        world.barrier()
        gc.collect()
        kept = [what for storage, what in noted.made.items() if not storage.expired()]
        assert noted.made, "nothing was noted"
        assert not kept, f"a first call keeps memory: {kept}"
        world.barrier()

    with noted:
        on_nodes(operator, mode, 2, run)


def check_capture(operator: Operator, mode: str, patch: pytest.MonkeyPatch) -> None:
    """A first call while a CUDA graph is captured is refused, because it allocates and meets the other ranks."""
    case = next(inputs.cases_of(operator, mode))
    dtype = dtypes_of(operator, mode)[0]

    def run(world: Any) -> None:
        operands = inputs.everybody(operator, case, world.size, 0, dtype)
        like = inputs.exact(operator, case, world.rank, operands)
        tensors = given(world, operator, mode, operands, result_for(world, operator, mode, case, like, dtype, "given"))
        with pytest.MonkeyPatch.context() as capturing:
            capturing.setattr(World, "capturing", property(lambda self: True))
            with pytest.raises(pkt.Unsupported, match="captur"):
                inputs.called(operator, mode, tensors, case, world=world)

    on_nodes(operator, mode, 1, run)


def check_workspace(operator: Operator, mode: str) -> None:
    """What an operator keeps in a scratch scope is free when the scope ends."""
    case = next(inputs.cases_of(operator, mode))
    dtype = dtypes_of(operator, mode)[0]

    def run(world: Any) -> None:
        operands = inputs.everybody(operator, case, world.size, 0, dtype)
        like = inputs.exact(operator, case, world.rank, operands)
        tensors = given(world, operator, mode, operands, result_for(world, operator, mode, case, like, dtype, "given"))
        before = world.heap.ledger.free_bytes
        with world.scratch():
            inputs.called(operator, mode, tensors, case, world=world)
        assert world.heap.ledger.free_bytes == before, "a buffer outlives its scope"

    on_nodes(operator, mode, 2, run)


# ------------------------------------------------------------------------------------------------------------ protocol
def explored(operator: Operator, case: Case) -> Callable[[Any], None]:
    """A program for `pkt.simulate`: launches with other inputs each time, whose accesses the race detector sees."""
    mode = case.arguments["mode"]

    # Sums of whole numbers are exact, what an epilogue makes of them is not.
    inexact = inputs.arguments_of(operator, case).get("epilogue", "none") != "none" or operator.bound is not None
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


# -------------------------------------------------------------------------------------------------------- compilation
def big(case: Case, most: Mapping[str, int]) -> Case:
    """The case with dimensions that fill a GPU, none greater than `most` of its letter."""
    shapes = {}
    for name, shape in case.shapes.items():
        words = [str(w) for w in (shape.split() if isinstance(shape, str) else shape)] or ["1"]
        first, _, n = words[0].rpartition("*")
        shapes[name] = " ".join([f"{first}*{int(n) << 12}" if first else f"{int(n) << 12}", *words[1:]])
    sizes = case.large or {n: min(256 << (i > 0), most.get(n, 1 << 30)) for i, n in enumerate(case.sizes)}
    return Case(sizes=sizes, shapes=shapes, arguments=case.arguments)


def check_compilation(operator: Operator, mode: str, arch: int, patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Every kernel that the form launches compiles: no wait or signal lost, nothing spilled, and memory fits."""
    cases = [case for case in operator.cases if case.arguments.get("mode", mode) == mode]
    own = cases[0]
    check_compiles(operator, mode, own, dtypes_of(operator, mode)[0], arch, patch, folder)
    for case in cases[1:]:
        if case.dtype != torch.float32:
            check_compiles(operator, mode, case, case.dtype, arch, patch, folder)


def check_compiles(
    operator: Operator, mode: str, own: Case, dtype: torch.dtype, arch: int, patch: pytest.MonkeyPatch, folder: Path
) -> None:
    """`check_compilation` of one case, with a first operand of `dtype`."""
    named = {n: v for n, v in own.arguments.items() if n in operator.arguments}
    case = big(own, operator.most)

    def run(world: Any) -> None:
        symmetric = operator.form(mode).symmetric
        tensors: dict[str, Any] = {}
        # The values of the operands that have no maker are not needed, and would take seconds.
        made: Any = inputs.everybody(operator, case, world.size, 0, dtype, make=lambda *_: None)
        for name, shape in inputs.shapes_of(operator, case, world.size).items():
            if operator.tensors[name].optional and name not in own.arguments.get("given", ()):
                tensors[name] = None
            elif name in symmetric:
                tensors[name] = pkt.empty(shape, dtype=dtype)
            elif operator.tensors[name].make is not None:
                tensors[name] = made[name][world.rank]
            else:
                tensors[name] = torch.empty(shape, dtype=dtype)
        if "out" in symmetric:
            empties = {n: None if t is None else [t.to("meta")] * world.size for n, t in tensors.items()}
            like = operator.reference(world.rank, **empties, **inputs.arguments_of(operator, case))
            tensors["out"] = pkt.empty(tuple(like.shape), dtype=dtype)
        operator.function(**operator.parameters(tensors), **named, mode=mode, world=world)

    # Where each rank is a node, the compiler can prove more.
    worlds: list[tuple[int, ...]] = [(4, 2), (2, 1)][: 1 + (arch == 90)] if mode in operator.across else [(2,)]
    device_library.install(patch, folder)
    for shape in worlds:
        launches = all_launched(run, shape[0], own.multicast, patch, *shape[1:])
        assert launches, "nothing was launched"
        kernels = {id(x.kernel): x for x in launches if x.options.get("launch_cooperative_grid")}
        # Beside copy engines one kernel may signal and another wait.
        compiled = [compile_checked(launch, arch, folder, signals=False) for launch in kernels.values()]
        assert compiled, "no kernel waits for a peer"
        engines = any(x.kernel is copies.tell_kernel for x in launches)
        assert engines or any(count_markers(kernel.asm["ptx"])["signal"] for kernel in compiled), "no kernel signals"


def floats(operator: Operator, mode: str) -> list[torch.dtype]:
    """The dtypes of a form whose results the reference can check."""
    return [t for t in dtypes_of(operator, mode) if t in FLOATS or operator.exact is True]
