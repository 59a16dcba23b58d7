"""A call is planned once: what it costs the host then, what it keeps, and what a CUDA graph may record of it."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import weakref
from collections.abc import Callable
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
from pkt.runtime.world import World
from tests.conformance import inputs

from .operands import dtypes_of, given, on_nodes, result_for

CALLS = 20  # Python functions that a planned call may call before it launches its kernel


def first_case(world: Any, operator: Operator, mode: str) -> tuple[Case, dict[str, Any]]:
    """A form's first case, and this rank's tensors of it with a given result."""
    case, dtype = next(inputs.cases_of(operator, mode)), dtypes_of(operator, mode)[0]
    operands = inputs.everybody(operator, case, world.size, 0, dtype)
    like = inputs.exact(operator, case, world.rank, operands)
    return case, given(world, operator, mode, operands, result_for(world, operator, mode, case, like, dtype, "given"))


def check_host_cost(operator: Operator, mode: str, patch: pytest.MonkeyPatch) -> None:
    """A second call with tensors alike calls few Python functions before its first launch: the plan is kept, and keeps
    none of the tensors."""
    count: list[str] = []

    def run(world: Any) -> None:
        case, tensors = first_case(world, operator, mode)
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
        assert not living(lambda: [x for x in alive if x() is not None]), "the plan keeps a tensor"

    on_nodes(operator, mode, 1, run)
    assert len(count) <= CALLS, count


def living(found: Callable[[], list[Any]]) -> list[Any]:
    """`found()`, which lists what still lives, after a collection of garbage. The youngest objects are collected first,
    as often there is nothing left then: among all objects of a test process a collection takes a fifth of a second."""
    for generation in range(3):
        gc.collect(generation)
        if not found():
            return []
    return found()


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
        kept = living(lambda: [what for storage, what in noted.made.items() if not storage.expired()])
        assert noted.made, "nothing was noted"
        assert not kept, f"a first call keeps memory: {kept}"
        world.barrier()

    with noted:
        on_nodes(operator, mode, 2, run)


def check_capture(operator: Operator, mode: str, patch: pytest.MonkeyPatch) -> None:
    """A first call while a CUDA graph is captured is refused, because it allocates and meets the other ranks."""

    def run(world: Any) -> None:
        case, tensors = first_case(world, operator, mode)
        with pytest.MonkeyPatch.context() as capturing:
            capturing.setattr(World, "capturing", property(lambda self: True))
            with pytest.raises(pkt.Unsupported, match="captur"):
                inputs.called(operator, mode, tensors, case, world=world)

    on_nodes(operator, mode, 1, run)


def check_workspace(operator: Operator, mode: str) -> None:
    """What an operator keeps in a scratch scope is free when the scope ends."""

    def run(world: Any) -> None:
        case, tensors = first_case(world, operator, mode)
        before = world.heap.ledger.free_bytes
        with world.scratch():
            inputs.called(operator, mode, tensors, case, world=world)
        assert world.heap.ledger.free_bytes == before, "a buffer outlives its scope"

    on_nodes(operator, mode, 2, run)
