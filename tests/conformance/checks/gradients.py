"""Autograd is told what is read and written, and gradients are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.declaration import Case
from pkt.kernels.operator import Operator
from tests.conformance import inputs
from tests.kernels.helpers import on_ranks

from .operands import dtypes_of, given, on_nodes, result_for


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
    mode, taken = next(iter(operator.forms)), next(iter(operator.tensors.values())).dtypes
    dtype = torch.float32 if torch.float32 in taken else taken[0]

    def run(world: Any) -> None:
        operands = inputs.everybody(operator, case, world.size, 0, dtype, inputs.whole)
        limits = inputs.bounds(operator, mode, case, world.rank, world.size, operands, dtype)
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
