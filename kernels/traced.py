"""Operators in compiled code: each is an op of torch, torch.ops.pkt.NAME, which torch.compile and torch.export trace.

| op | for |
|---|---|
| `pkt::NAME(operands, keywords, world, workspace) -> result` | a new result; it has the operator's gradient |
| `pkt::NAME_out(..., Tensor(a!) out, ...) -> ()` | a given `out`, without gradients |
| `pkt::NAME_several(Tensor a, Tensor[] b, ...) -> Tensor[]` | several weights |

The ops exist from the operator's declaration on. Only traced calls go through them: an eager call goes to its plan
directly. A call in place is the first op and a copy, which the compiler leaves out where it can. World and workspace
are a name and a number, which each rank looks up when the op runs. The shapes of results are worked out from the
declaration.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey as Key
from torch._C import DispatchKeySet
from torch._library.autograd import Info, make_autograd_impl
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from pkt.errors import Unsupported
from pkt.runtime import world as worlds
from pkt.runtime.memory.tensor import TRACED, SymmetricTensor
from pkt.runtime.world import Workspace, World, named_world, numbered_workspace

from . import gradients

TRACED |= {FakeTensor, FunctionalTensor}  # they have no memory
is_grad_enabled, set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled
any_requires_grad = torch._C._any_requires_grad
_run_several: list[Callable[..., list[torch.Tensor]]] = []
_PLAIN = {
    DispatchKeySet(device).raw_repr() | DispatchKeySet(autograd).raw_repr()
    for device, autograd in ((Key.CPU, Key.AutogradCPU), (Key.CUDA, Key.AutogradCUDA))
}
"""The dispatch keys of calls that no mode, no subclass of a tensor and no transform sees."""
_TYPES = {int: "int", float: "float", bool: "bool", str: "str"}
_libraries: dict[str, torch.library.Library] = {"": torch.library.Library("pkt", "FRAGMENT")}


def _this_rank(like: torch.Tensor, world: str) -> torch.Tensor:
    return torch.full((), named_world(world).rank, dtype=torch.int64, device=like.device)


_libraries[""].define("this_rank(Tensor like, str world) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_libraries[""].impl("this_rank", _this_rank, "CompositeExplicitAutograd")
torch.library.register_fake(
    "pkt::this_rank", lambda like, world: like.new_empty((), dtype=torch.int64), lib=_libraries[""]
)


def take_several(run: Callable[..., list[torch.Tensor]]) -> None:
    """From now on `run` computes calls with several weights: `several` hands its function in."""
    _run_several[:] = [run]


# ------------------------------------------------------------------------------------------------------ what is traced
def has_traced(tensors: Sequence[Any]) -> bool:
    """Whether one of `tensors` stands for a tensor in a graph that is being made."""
    return any(has_traced(t) if isinstance(t, (list, tuple)) else type(t) in TRACED for t in tensors)


def call(
    operator: Any, tensors: Sequence[Any], values: tuple[Any, ...], world: World | None,
    workspace: Workspace | None,
) -> Any:  # fmt: skip
    """A call of an operator in a graph. The compiler reads this function. Raises Unsupported."""
    _check_plain(operator, tensors)
    if torch._C._are_functorch_transforms_active():
        found = "found a transform of torch.func or torch.vmap in compiled code"
        raise Unsupported.here(operator.name, found, "use loss.backward(), and one call for all of a batch")
    rest = (*values, worlds.current_name if world is None else world.name, 0 if workspace is None else workspace.number)
    several = isinstance(tensors[1], (list, tuple)) if len(tensors) > 1 else False
    operands = [tensors[at] for at in operator.read]
    out = tensors[operator.places[operator.written]]
    needs = torch.is_grad_enabled() and _required(tensors)
    if needs:
        _check(operator, tensors, values)
        parts = operator.backward.split(dict(zip(operator.keywords, values)), dict(zip(operator.tensors, operands)))
        if parts is not None:
            changed, behind = parts
            other = tuple([changed.get(n, v) for n, v in zip(operator.keywords, values)])
            found = call(operator, tensors, other, world, workspace)
            return [behind(one) for one in found] if several else behind(found)
    if several:
        found = operator.op_several(*operands, *rest)
        if out is None:
            return found
        for one, to in zip(found, out):
            to.copy_(one)
        return list(out)
    if out is not None and all(out is not x for x in operands):
        operator.op_out(*operands, out, *rest)
        return out
    found = operator.op(*operands, *rest)
    return found if out is None else out.copy_(found)


def is_recorded(tensors: Sequence[Any], where: str, world: World | None = None) -> bool:
    """Whether torch puts calls with tensors that have memory into a graph, as `make_fx` does. Raises Unsupported for a
    tensor with a derivative of torch.autograd.forward_ad, which a call would lose."""
    if torch.autograd.forward_ad._current_level >= 0 and _has_tangent(tensors):
        where = where if world is None else f"rank {world.rank}: {where}"
        raise Unsupported.here(where, "found a dual tensor of torch.autograd.forward_ad", "use loss.backward()")
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def _has_tangent(tensors: Sequence[Any]) -> bool:
    for tensor in tensors:
        if isinstance(tensor, (list, tuple)):
            if _has_tangent(tensor):
                return True
        elif tensor is not None and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
            return True
    return False


def call_of(
    operator: Any, tensors: Sequence[Any], values: tuple[Any, ...], world: World, workspace: Workspace | None
) -> Any:
    """`call` for what traces without reading it, as torch.export: the current world needs no name."""
    return call(operator, tensors, values, None if world is worlds._current() else world, workspace)


def _required(tensors: Sequence[Any]) -> bool:
    for tensor in tensors:
        if isinstance(tensor, (list, tuple)):
            if _required(tensor):
                return True
        elif tensor is not None and tensor.requires_grad:
            return True
    return False


def _check_plain(operator: Any, tensors: Sequence[Any]) -> None:
    """Raise Unsupported for a symmetric tensor, whose type torch's compiled code does not give to an op."""
    for tensor in tensors:
        if isinstance(tensor, SymmetricTensor):
            found = "found a symmetric tensor in compiled code"
            raise Unsupported.here(operator.name, found, "give x.plain() into the compiled function")


def _check(operator: Any, tensors: Sequence[Any], values: tuple[Any, ...]) -> None:
    """Raise Unsupported where a call has no gradient."""
    named = dict(zip(operator.names, tensors))
    gradients.check(operator, named, dict(zip(operator.keywords, values)), operator.name)


# ------------------------------------------------------------------------------------------------------ what torch sees
def define(operator: Any) -> tuple[Any, Any, Any]:
    """(op, op with a given `out`, op for several weights) of an operator; None for what it has not."""
    name = operator.name
    if name in _libraries:  # an operator outside kernels/ that is declared again
        _libraries.pop(name)._destroy()
    library = _libraries[name] = torch.library.Library("pkt", "FRAGMENT")
    # Not "mode", which torch takes for itself where an op writes.
    keywords = [f"{_type(operator, n)} {'form' if n == 'mode' else n}" for n in operator.keywords]
    rest = ", ".join([*keywords, "str world", "int workspace"])
    operands = {n: "Tensor?" if o.optional else "Tensor" for n, o in operator.tensors.items()}
    results = "Tensor" if not operator.also else f"({', '.join(['Tensor'] * (1 + len(operator.also)))})"
    taken = ", ".join(f"{type_} {n.replace('.', '_')}" for n, type_ in operands.items())
    functional = _op(library, operator, name, f"({taken}, {rest}) -> {results}", _fresh, _blank)
    given = several = None
    if operator.written == "out" and "out" in operator.names and not operator.also:
        schema = f"({taken}, Tensor(a!) out, {rest}) -> ()"
        given = _op(library, operator, f"{name}_out", schema, _given, lambda *arguments: None, gradient=False)
    if any(form.several for form in operator.forms.values()):
        lists = {"a": "Tensor a", "b": "Tensor[] b", "bias": "Tensor[]? bias"}
        schema = f"({', '.join(lists[n] for n in operands)}, {rest}) -> Tensor[]"
        several = _op(library, operator, f"{name}_several", schema, _several, _blanks)
    return functional, given, several


def _type(operator: Any, keyword: str) -> str:
    """The type of a keyword in a schema, from the function's annotation; where that says nothing, from its default.
    Raises TypeError for a type that torch's ops do not take."""
    parameter = inspect.signature(operator.function).parameters[keyword]
    default, annotation = parameter.default, parameter.annotation
    optional = default is None
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, dict(vars(typing)), operator.function.__globals__)  # as get_type_hints
        except NameError:  # of a name for type checkers alone
            annotation = Any
    if annotation in (inspect.Parameter.empty, Any):
        annotation = str if keyword == "mode" else int if optional else type(default)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation, optional = next(t for t in typing.get_args(annotation) if t is not type(None)), True
    if typing.get_origin(annotation) is typing.Literal:
        annotation = type(typing.get_args(annotation)[0])
    several = typing.get_origin(annotation) is not None
    element = typing.get_args(annotation)[0] if several else annotation
    if element not in _TYPES:
        raise TypeError(f"{operator.name}: {keyword} is {annotation}, wanted {', '.join(_TYPES.values())} or several")
    return f"{_TYPES[element]}{'[]' * several}{'?' * optional}"


def _op(
    library: torch.library.Library, operator: Any, name: str, schema: str, run: Callable[..., Any],
    blank: Callable[..., Any], gradient: bool = True,
) -> Any:  # fmt: skip
    """Define an op: what it runs, what it returns where tensors have no memory, and its gradient."""
    count, full_name = len(operator.tensors) + (not gradient), f"torch.ops.pkt.{name}"
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(torch.ops.pkt, name).default
    lists = [at for at, a in enumerate(op._schema.arguments[count:-2]) if "List" in str(a.type)]

    def split(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        world, number = named_world(arguments[-2]), arguments[-1]
        workspace = numbered_workspace(number, world) if number else None
        values = arguments[count:-2]
        for at in lists:
            if values[at] is not None:  # a list: no plan is looked up by one
                values = *values[:at], tuple(values[at]), *values[at + 1 :]
        return operator, arguments[:count], values, world, workspace

    def ran(arguments: tuple[Any, ...]) -> Any:
        worlds.op_begins(full_name)
        records = is_grad_enabled()
        if records:  # torch.no_grad() would cost a microsecond
            set_grad_enabled(False)
        try:
            found = run(*split(arguments))
        finally:
            if records:
                set_grad_enabled(True)
        worlds.op_ends()
        return found

    library.impl(name, lambda *arguments: ran(arguments), "CompositeExplicitAutograd")
    torch.library.register_fake(f"pkt::{name}", lambda *arguments: blank(*split(arguments)), lib=library)
    if gradient and operator.backward is not None:

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            _, operands, values, world, workspace = split(inputs)
            named, keywords = dict(zip(operator.tensors, operands)), dict(zip(operator.keywords, values))
            record = gradients.Call(operator, world, workspace, named, keywords)
            flat = record.taken()
            results = tuple(output) if isinstance(output, (list, tuple)) else (output,)
            needs = [x is not None and x.requires_grad for x in flat]
            ctx.needs = needs
            gradients.save(ctx, record, record.wanted(needs), flat, results)

        def backward(ctx: Any, *grads: Any) -> Any:
            flat = grads[0] if len(grads) == 1 and isinstance(grads[0], (list, tuple)) else grads
            found = ctx.call.grouped(gradients.gradients(ctx, ctx.needs, tuple(flat)))
            each = [found[name] for name in operator.tensors]
            return *each, *[None] * (len(operator.keywords) + 2)

        # As torch.library.register_autograd, whose way to `ran` costs the host 5 us.
        recorded = make_autograd_impl(op, Info(backward, setup_context))

        def recorded_if_needed(keys: Any, *arguments: Any) -> Any:
            if keys.raw_repr() in _PLAIN and not (is_grad_enabled() and any_requires_grad(*arguments[:count])):
                return ran(arguments)
            return recorded(keys, *arguments)

        library.impl(name, recorded_if_needed, "Autograd", with_keyset=True)
    return op


# ------------------------------------------------------------------------------------------------------- what ops run
def _fresh(operator: Any, operands: Any, values: Any, world: World, workspace: Any) -> Any:
    """A call with a new result."""
    written = None
    if operator.in_place and operator.written == "out":
        written = torch.empty_like(operands[0])
    elif operator.in_place:
        written = operands[operator.read.index(operator.places[operator.written])].clone()
    return operator(operator.arranged((*operands, written, None)), values, world, workspace)


def _given(operator: Any, arguments: Any, values: Any, world: World, workspace: Any) -> None:
    operator(operator.arranged((*arguments, None)), values, world, workspace)


def _several(operator: Any, operands: Any, values: Any, world: World, workspace: Any) -> list[torch.Tensor]:
    named = {"out": None, **dict(zip(operator.tensors, operands))}
    tensors = tuple(named[name] for name in operator.names)
    (run,) = _run_several
    found = run(operator, tensors, values, world, workspace)
    if len({x.untyped_storage().data_ptr() for x in found}) == len(found):
        return found
    return [x.clone(memory_format=torch.contiguous_format) for x in found]  # an op's results share no memory


def _blank(operator: Any, operands: Any, values: Any, world: World, workspace: Any) -> Any:
    found = operator.blank(world, dict(zip(operator.tensors, operands)), dict(zip(operator.keywords, values)))
    return found if operator.also else found[0]


def _blanks(operator: Any, operands: Any, values: Any, world: World, workspace: Any) -> list[torch.Tensor]:
    named, keywords = dict(zip(operator.tensors, operands)), dict(zip(operator.keywords, values))
    each = zip(named["b"], named["bias"] or [None] * len(named["b"]))
    return [operator.blank(world, {**named, "b": b, "bias": bias}, keywords)[0] for b, bias in each]
