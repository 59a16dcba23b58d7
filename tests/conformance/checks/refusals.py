"""Calls that are wrong are refused: bad operands, overlaps, and ranks that disagree."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.declaration import Case
from pkt.kernels.operator import Operator
from tests.conformance import inputs
from tests.kernels.helpers import on_ranks

from .operands import dtypes_of, given


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
        for letter, least in operator.least.items():
            few = inputs.everybody(
                operator, replace(case, sizes={**case.sizes, letter: least - 1}), world.size, 0, dtype
            )
            refuses(world, operator, given(world, operator, None, few, out), case)
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
                good[name] = inputs.laid(operator, name, good[name], tuple(ranks[0].shape))
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
                of = inputs.result_dtype(operator, mine, dtype)
                out = pool[: size * of.itemsize].view(of).view(like.shape)
            rooms = {}
            for name, ranks in operands.items():
                if ranks is not None:
                    room = pkt.empty(16384, dtype=torch.uint8)[: ranks[0].nbytes].view(ranks[0].dtype)
                    room = inputs.laid(operator, name, room, tuple(ranks[0].shape))
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
    for other in [t for t in dtypes_of(operator, mode) if t.itemsize == 4 and t != types[0]][:1]:
        differ(lambda world, other=other: (own, other if world.rank else types[0], mode))
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
