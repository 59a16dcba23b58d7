"""Gradients of operators: what an operator declares of its backward pass, and the node that a call records.

    def backward(call: Recorded) -> Gradients:
        return {"x": shift(call.grad, by=-call["by"], world=call.world)}

    OPERATOR = Operator(shift, ..., backward=Backward(backward, "`shift` back"))

If gradients are enabled and an operand requires one, a call records one node. Its gradients are those of the sum of all
ranks' losses. The backward pass is collective, and takes the forward call's world and workspace. It calls pkt's
operators and torch's functions, so it can itself be recorded (`create_graph=True`). All ranks must want the gradients
of the same operands, which is part of what the first call compares between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pkt.errors import Unsupported
from pkt.runtime.memory.tensor import TRACED
from pkt.runtime.world import Workspace, World

from .shared import checks

Gradients = Mapping[str, Any]
"""By operand that is wanted: its gradient, of its shape and dtype; or a list, where it may be a list of tensors."""
Split = Callable[[Mapping[str, Any], Mapping[str, Any]], "tuple[Mapping[str, Any], Callable[[Any], Any]] | None"]


@dataclass(frozen=True)
class Backward:
    """The backward pass of an operator.

    function: returns the gradients of a recorded call, of those operands that are wanted at least.
    how: what it does in a few words, for the reference page.
    saves: by operand, the operands and results ("out", and the names of `also`) that its gradient needs. They are kept
        from the call to the backward pass if the operand requires grad. A saved tensor that is overwritten in between
        makes the backward pass raise, as torch's do.
    refuses: why a call has no gradients, from its keywords and the dtype of its first operand; "" where it has.
    inner: further results that only this backward pass uses, and that have no gradient.
    split: for keywords and operands of calls whose backward pass would need an intermediate result: other keywords,
        with which the operator returns that, and what torch computes from it. None where a call needs no such thing, or
        will be refused.
    """

    function: Callable[[Recorded], Gradients]
    how: str = ""
    saves: Mapping[str, Sequence[str]] = field(default_factory=dict)
    refuses: Callable[[Mapping[str, Any], torch.dtype], str] = lambda keywords, dtype: ""
    split: Split = lambda keywords, operands: None
    inner: Sequence[str] = ()


class Recorded:
    """A recorded call in its backward pass: call["b"] is a saved tensor or a keyword of the call."""

    def __init__(self, call: Call, saved: Mapping[str, Any], wanted: frozenset[str], grads: tuple[Any, ...]) -> None:
        self.world, self.workspace = call.world, call.workspace
        self.wanted = wanted
        """Names of the operands whose gradients somebody needs, alike on all ranks."""
        self.grads = grads
        """The gradients of the results; of a result that nobody used, zeros."""
        self._values, self._operator = {**call.keywords, **saved}, call.operator
        self._call = call

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def operator(self, name: str, *tensors: Any, **keywords: Any) -> Any:
        """What the operator `name` returns, in the call's world where `keywords` have no other."""
        return self._operator.function_of(name)(*tensors, **{"world": self.world, **keywords})

    @property
    def grad(self) -> torch.Tensor:
        """The gradient of the first result."""
        return self.grads[0]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an operand."""
        return self._call.shapes[name]

    def turned(self, name: str) -> list[bool]:
        """Of each tensor of an operand, whether it is not contiguous, as the transposed view of a weight.

        Autograd copies a gradient that does not lie as its weight does."""
        return [turned for place, turned in zip(self._call.places, self._call.turned) if place == name]


def this_rank(world: World, like: torch.Tensor) -> int | torch.Tensor:
    """The number of this rank; in a graph, which ranks share, a tensor () on the device of `like`."""
    if torch.compiler.is_compiling() or type(like) in TRACED:
        return torch.ops.pkt.this_rank(like, world.name)
    return world.rank


def is_rank(rank: int, world: World, like: torch.Tensor) -> torch.Tensor:
    """Whether this is `rank`, as a tensor () on the device of `like`: for backward passes, in which no branch may
    depend on the rank."""
    found = this_rank(world, like) == rank
    return found if isinstance(found, torch.Tensor) else torch.full((), found, dtype=torch.bool, device=like.device)


def required(tensors: Sequence[Any]) -> bool:
    """Whether one of `tensors`, or of the lists among them, requires grad."""
    with torch._C.DisableTorchFunctionSubclass():  # a symmetric tensor checks each attribute, in microseconds
        for tensor in tensors:
            if tensor is None:
                continue
            if isinstance(tensor, (list, tuple)):
                if required(tensor):
                    return True
            elif getattr(tensor, "requires_grad", False):
                return True
    return False


class Call:
    """A call that is recorded. Its node keeps it, and it keeps no tensor."""

    def __init__(
        self, operator: Any, world: World, workspace: Workspace | None, operands: Mapping[str, Any],
        keywords: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.operator, self.world, self.workspace, self.keywords = operator, world, workspace, keywords
        lists = {name: value for name, value in operands.items() if isinstance(value, (list, tuple))}
        self.counts = {name: len(value) for name, value in lists.items()}
        self.shapes = {name: tuple(value.shape) for name, value in operands.items() if isinstance(value, torch.Tensor)}
        self.places: list[str] = []  # of the node's inputs, the names of their operands
        self.flat: list[Any] = []
        for name, value in operands.items():
            each = value if name in lists else [value]
            self.places += [name] * len(each)
            self.flat += each
        self.turned = [isinstance(x, torch.Tensor) and not x.is_contiguous() for x in self.flat]

    def taken(self) -> list[Any]:
        """The operands as inputs of the node, which are then no longer kept here."""
        flat, self.flat = self.flat, []
        return flat

    def wanted(self, needs: Sequence[bool]) -> frozenset[str]:
        return frozenset(name for name, need in zip(self.places, needs) if need)

    def grouped(self, flat: Sequence[Any]) -> dict[str, Any]:
        """Values of the node's inputs by name, in lists where the operands were."""
        found: dict[str, Any] = {}
        for name, value in zip(self.places, flat):
            if name in self.counts:
                found.setdefault(name, []).append(value)
            else:
                found[name] = value
        return found


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, run: Callable[[], Any], *flat: Any) -> Any:
        result = run()
        results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        save(ctx, call, call.wanted(ctx.needs_input_grad[2:]), flat, results)
        if any(results[0] is tensor for tensor in flat):  # in place
            ctx.mark_dirty(results[0])
        inner = [r for name, r in zip(call.operator.also, results[1:]) if name in call.operator.backward.inner]
        ctx.set_materialize_grads(not inner)  # zeros of their size
        ctx.mark_non_differentiable(*inner, *(r for r in results if not r.is_floating_point()))
        return result if isinstance(result, torch.Tensor) else results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *gradients(ctx, ctx.needs_input_grad[2:], grads)


@functools.cache
def _node(name: str) -> Any:
    """The function of an operator's nodes: torch prints "AllGatherBackward" of all_gather's."""
    return type(name.title().replace("_", ""), (_Node,), {})


def save(ctx: Any, call: Call, wanted: frozenset[str], flat: Sequence[Any], results: Sequence[Any]) -> None:
    """Keep in a node what the gradients of the `wanted` operands need of its inputs and results."""
    backward, also = call.operator.backward, call.operator.also
    assert backward is not None
    known = {**call.grouped(flat), **dict(zip(("out", *also), results))}
    names = list(dict.fromkeys(name for operand in sorted(wanted) for name in backward.saves.get(operand, ())))
    kept = [(name, known[name] if isinstance(known[name], list) else [known[name]]) for name in names]
    ctx.save_for_backward(*(tensor for _, tensors in kept for tensor in tensors))
    ctx.call, ctx.kept = call, [(name, len(tensors), isinstance(known[name], list)) for name, tensors in kept]


def gradients(ctx: Any, needs: Sequence[bool], grads: tuple[Any, ...]) -> list[Any]:
    """Those of a node's inputs, None where not needed."""
    call: Call = ctx.call
    tensors, saved = iter(ctx.saved_tensors), {}
    for name, count, listed in ctx.kept:
        each = [next(tensors) for _ in range(count)]
        saved[name] = each if listed else each[0]
    wanted = call.wanted(needs)
    grads = tuple(None if grad is None else grad.resolve_neg() for grad in grads)  # products take no negative bit
    found = call.operator.backward.function(Recorded(call, saved, wanted, grads))  # type: ignore[union-attr]
    if missing := sorted(wanted - found.keys()):
        raise TypeError(f"{call.operator.name}: its backward function returned no gradient of {', '.join(missing)}")
    queues = {name: iter(found[name] if isinstance(found[name], list) else [found[name]]) for name in wanted}
    flat = [next(queues[name]) if name in queues else None for name in call.places]
    return [grad if need else None for grad, need in zip(flat, needs)]


def record(
    operator: Any, tensors: Sequence[Any], values: tuple[Any, ...], world: World, workspace: Workspace | None,
    run: Callable[..., Any],
) -> Any:  # fmt: skip
    """A call of an operator, whose result has a gradient. run(tensors, values, world, workspace, needs): the call, as a
    launch; needs: names of the operands that require grad, which the ranks compare. Raises Unsupported."""
    named = dict(zip(operator.names, tensors))
    keywords = dict(zip(operator.keywords, values))
    backward = check(operator, named, keywords, f"rank {world.rank}: {operator.name}")
    if torch._C._are_functorch_transforms_active():
        found = "found a transform of torch.func around the call, which cannot reach other ranks"
        raise Unsupported.here(f"rank {world.rank}: {operator.name}", found, "use loss.backward()")
    if why := checks.of_view(named[operator.written]):
        found = f"found {operator.written}, {why}, which the call overwrites, and torch refuses that"
        remedy = f"call it with {operator.written}.clone(), or under torch.no_grad()"
        raise Unsupported.here(f"rank {world.rank}: {operator.name}", found, remedy)
    if (parts := backward.split(keywords, named)) is not None:
        changed, rest = parts
        other = tuple(changed.get(name, value) for name, value in keywords.items())
        found = record(operator, tensors, other, world, workspace, run)
        return [rest(one) for one in found] if isinstance(found, list) else rest(found)
    call = Call(operator, world, workspace, {n: named[n] for n in operator.tensors}, keywords)
    needs = " ".join(
        f"{name}{'' if name not in call.counts else '[' + str(call.places[:at].count(name)) + ']'}"
        for at, (name, tensor) in enumerate(zip(call.places, call.flat))
        if required([tensor])
    )
    launched = functools.partial(run, tensors, values, world, workspace, needs)
    result = _node(operator.name).apply(call, launched, *call.taken())
    return list(result) if call.counts else result


def check(operator: Any, named: Mapping[str, Any], keywords: Mapping[str, Any], where: str) -> Backward:
    """The backward pass of a call. Raises Unsupported where it has none, in a message that begins with `where`."""
    backward, written = operator.backward, operator.written
    out = named[written]
    if checks.is_trained(out):
        raise Unsupported.here(
            where,
            f"found {written}, a leaf that requires grad, which the call overwrites and autograd does not see",
            f"call it under torch.no_grad(), or with {written}.detach()",
        )
    without = "call it under torch.no_grad(), or with operands that are detached"
    if backward is None:
        raise Unsupported.here(where, "found an operand that requires grad, and the operator has no gradient", without)
    first = named[next(iter(operator.tensors))]
    why = backward.refuses(keywords, first.dtype) if isinstance(first, torch.Tensor) else ""
    if why:
        raise Unsupported.here(where, f"found an operand that requires grad, and {why}, which has no gradient", without)
    if out is not None and not any(out is named[name] for name in operator.tensors):
        found = "found out=, which autograd does not record, and a tensor that requires grad"
        raise Unsupported.here(where, found, f"leave out= away, or {without}")
    return backward
