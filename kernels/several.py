"""One call with several weights, as all_gather_matmul(a, [wq, wk, wv]): planned together, so that A is gathered once.

Weights that lie side by side in memory are views of one tensor. That tensor is multiplied in one launch, and the
results are views of one result. Other weights have a launch each. The first launch has the weight with the most
columns, and A travels while it computes. The other launches find A in the same buffers and wait for nothing.
`Form.several` plans them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch

from pkt.errors import DtypeError, ShapeError, Unsupported
from pkt.runtime.kept import Planned, by_types, planned, same
from pkt.runtime.memory.tensor import TRACED, SymmetricTensor, facts
from pkt.runtime.world import Workspace, World
from pkt.wording import count_text

from . import gradients, traced
from .agreement import check_agreed, world_of
from .declaration import Call, Form
from .operator import Operator
from .shared import checks, tile_product
from .shared.tile_product import whole_rows

Tensors = Sequence[torch.Tensor]
Launch = Callable[[torch.Tensor, Tensors, "Tensors | None", "Tensors | None"], "list[torch.Tensor]"]
"""launch(a, bs, outs, biases) -> the results, for tensors like those it was planned with."""


def is_several(b: Any) -> TypeGuard[Tensors]:
    """Whether the second operand is several."""
    return isinstance(b, (list, tuple))


def side_by_side(parts: Tensors) -> torch.Tensor | None:
    """The matrix whose columns, or the vector whose elements, `parts` are in turn, as a view of their memory; None
    where they are not views of one tensor that is contiguous, or the transposed view of a contiguous one."""
    # By addresses, and with few calls into torch: a call of the operator has to wait for this.
    first = parts[0]
    if not isinstance(first, torch.Tensor) or first.layout is not torch.strided or first.ndim not in (1, 2):
        return None
    strides, rows, dtype = first.stride(), first.shape[:-1], first.dtype
    step, begin, columns = strides[-1] * first.element_size(), 0, 0
    for part in parts:
        if type(part) is not torch.Tensor and (not isinstance(part, torch.Tensor) or isinstance(part, SymmetricTensor)):
            return None
        if part.layout is not torch.strided or part.dtype is not dtype or part.stride() != strides:
            return None
        shape = part.shape
        if shape[:-1] != rows:
            return None
        if shape[-1] == 0:  # it has no address
            continue
        if columns == 0:
            first, begin = part, part.data_ptr()
        elif part.data_ptr() != begin + columns * step:
            return None
        columns += shape[-1]
    if strides not in ((columns, 1), (1, *rows)):
        return None
    end = first.storage_offset() + math.prod(rows) * columns
    if end * first.element_size() > first.untyped_storage().nbytes():
        return None  # neighbours in memory by chance
    return first.detach().as_strided((*rows, columns), strides)


def run_several(
    operator: Operator,
    tensors: tuple[Any, Tensors, Tensors | None, Tensors | None],
    values: tuple[Any, ...],
    world: World | None,
    workspace: Workspace | None,
    needs: str | None = None,
) -> list[torch.Tensor]:
    """The operator for a, each of several b, and `out` and bias of each; values and needs as in `Operator.__call__`."""
    if torch.compiler.is_dynamo_compiling():
        return traced.call(operator, tensors, values, world, workspace)
    a, bs, outs, biases = tensors
    if type(world) is not World:
        world = world_of(operator.name, world, a, *bs, workspace)
    if bs and (type(bs[0]) in TRACED or traced.is_recorded(tensors, operator.name, world)):
        return traced.call_of(operator, tensors, values, world, workspace)
    if torch.is_grad_enabled() and gradients.required(tensors):
        _check_lists(operator.name, bs, outs, biases, world)
        run = functools.partial(run_several, operator)
        return gradients.record(operator, tensors, values, world, workspace, run)
    if workspace is not None:
        with world.using(workspace, operator.name):
            return run_several(operator, tensors, values, world, None, needs)
    _check_lists(operator.name, bs, outs, biases, world)
    columns_each = tile_product.columns_each(values[operator.keywords.index("epilogue")])
    whole = side_by_side(bs)
    out = side_by_side(outs) if outs is not None else None
    if whole is not None and whole.ndim == 2 and (outs is None or out is not None):
        columns = _columns(operator.name, bs, outs, columns_each, world)
        bias = None if biases is None else _joined(operator.name, bs, biases, world)
        result = operator((a, whole, out, bias), values, world, None, needs)
        return list(outs or result.split(columns, dim=1))
    return _separate(operator, (a, bs, outs, biases), values, world, needs)


traced.take_several(run_several)


def _check_lists(name: str, bs: Any, outs: Any, biases: Any, world: World) -> None:
    """Raises ShapeError or DtypeError unless there are as many outs and biases as weights, which are tensors."""
    if not bs:
        raise ShapeError.argument(name, "b", "no tensors", "a tensor, or a list of them", world.rank)
    for what, given in (("b", bs), ("out", outs), ("bias", biases)):
        if given is None:
            continue
        if not isinstance(given, (list, tuple)):
            wanted = f"None or a list of {len(bs)}, as b is a list"
            raise DtypeError.argument(name, what, type(given).__name__, wanted, world.rank)
        if len(given) != len(bs):
            wanted = f"{len(bs)}, one for each of b"
            raise ShapeError.argument(name, what, f"a list of {len(given)}", wanted, world.rank)
        for i, tensor in enumerate(given):
            if type(tensor) is not torch.Tensor:
                checks.check_dense(name, f"{what}[{i}]", tensor, world)


def _columns(name: str, bs: Tensors, outs: Tensors | None, columns_each: int, world: World) -> list[int]:
    """Columns of each result. Raises ShapeError where a weight has no whole number of them, or an output has others."""
    columns = [b.shape[1] // columns_each for b in bs]
    for i, b in enumerate(bs):
        if b.shape[1] % columns_each:
            wanted = f"a multiple of {columns_each} columns"
            raise ShapeError.argument(name, f"b[{i}]", tuple(b.shape), wanted, world.rank)
        if outs is not None and outs[i].shape[-1] != columns[i]:
            wanted = count_text(columns[i], "column")
            raise ShapeError.argument(name, f"out[{i}]", tuple(outs[i].shape), wanted, world.rank)
    return columns


def _joined(name: str, bs: Tensors, biases: Tensors, world: World) -> torch.Tensor:
    """One bias for weights that are side by side: a view, or a copy where the biases are not side by side, too."""
    for i, (b, bias) in enumerate(zip(bs, biases)):
        checks.check_tensor(name, f"bias[{i}]", bias, world, shape=(b.shape[1],), dtype=b.dtype)
    found = side_by_side(biases)
    return torch.cat([bias.detach() for bias in biases]) if found is None else found


# ------------------------------------------------------------------------------------------- a launch for each weight
def _separate(
    operator: Operator, tensors: tuple[Any, Tensors, Tensors | None, Tensors | None], values: tuple[Any, ...],
    world: World, needs: str | None,
) -> list[torch.Tensor]:  # fmt: skip
    a, bs, outs, biases = tensors
    if outs is not None:
        _check_apart(operator.name, a, bs, outs, biases or (), world)
    try:
        each = facts((a, *bs, *(outs or ()), *(biases or ())), world, operator.name)
        key: Any = (operator, run_several, values, needs, len(bs), outs is None, biases is None, *each)
        launch = world.plans.get(key)
        if type(launch) is Planned:
            launch, known = launch
            if not all(same(values[at], value) for at, value in known):
                key = by_types(key, values)
                launch = world.plans.get(key)
    except (TypeError, RuntimeError):  # as in Operator.__call__
        key = launch = None
    if launch is None:
        launch = _plan(operator, world, tensors, dict(zip(operator.keywords, values)), needs)
        if key is not None:
            world.plans[key] = planned(launch, key, values)
    results = launch(a, bs, outs, biases)
    for out in outs or ():
        torch.autograd.graph.increment_version(out)
    return results


def _check_apart(name: str, a: Any, bs: Tensors, outs: Tensors, biases: Tensors, world: World) -> None:
    """Raises ShapeError where an output shares memory with an operand or another output. In every call, because the
    facts of tensors do not say how far they are from each other."""
    if all(isinstance(x, torch.Tensor) and x.layout is torch.strided for x in (a, *bs, *outs, *biases)):
        read, written = ([(x.data_ptr(), x.data_ptr() + x.nbytes) for x in xs] for xs in ((a, *bs, *biases), outs))
        pairs = itertools.chain(itertools.product(written, read), itertools.combinations(written, 2))
        if not any(begin < stop and start < end for (begin, end), (start, stop) in pairs):
            return
    named = [("a", a), *((f"b[{i}]", b) for i, b in enumerate(bs)), *((f"bias[{i}]", x) for i, x in enumerate(biases))]
    for i, out in enumerate(outs):
        for what, other in [*named, *((f"out[{j}]", outs[j]) for j in range(i))]:
            if isinstance(other, torch.Tensor) and other.layout is torch.strided:
                checks.check_apart(name, other, out, world, None, what)


def _plan(
    operator: Operator, world: World, tensors: tuple[Any, Tensors, Tensors | None, Tensors | None],
    keywords: Mapping[str, Any], needs: str | None,
) -> Launch:  # fmt: skip
    """As Operator.plan, of a call for each weight. Collective."""
    a, bs, outs, biases = tensors
    count = len(bs)
    calls = []
    for i in range(count):
        one = {"a": a, "b": bs[i], "out": outs and outs[i], "bias": biases and biases[i]}
        call = operator._call(world, {name: one[name] for name in operator.names}, keywords)
        call.name = f"{operator.name} of b[{i}]"  # in errors
        operator._check_operands(call)
        call.name = operator.name  # by which a form keeps its buffers
        calls.append(call)
    order, form = _choose(operator, calls)
    lead = calls[order[0]]
    for call in calls:
        call.mode, call.given, call.settings = lead.mode, lead.given, lead.settings
        operator._check_form(call, form)
    shared: dict[str, Any] = {name: tuple(_seen(operator, call, name) for call in calls) for name in operator.tensors}
    if needs is not None:
        shared["requires_grad"] = needs
    check_agreed(operator.name, world, **shared, **lead.arguments, mode=lead.mode, **lead.given, **form.agrees(lead))
    if form.complete is not None:
        settings = dict(form.complete(lead))
        for call in calls:
            call.settings = settings
    make = [functools.partial(torch.empty, c.shape, dtype=c.dtype, device=world.torch_device) for c in calls]
    for call, new in zip(calls, make):
        call.tensors["out"] = new() if call.tensors["out"] is None else call.tensors["out"]
    nothing = {i: empty for i, call in enumerate(calls) if (empty := operator._empty(call))}
    computed = [i for i in order if i not in nothing]
    assert form.several is not None, "as _choose has seen"
    together = form.several([calls[i] for i in computed]) if computed else None

    def launch(a: torch.Tensor, bs: Tensors, outs: Tensors | None, biases: Tensors | None) -> list[torch.Tensor]:
        results = [new() for new in make] if outs is None else list(outs)
        added: Sequence[torch.Tensor | None] = biases or [None] * count
        for i, empty in nothing.items():
            empty(a, bs[i], results[i], added[i])
        if together:
            together(a, *([each[i] for i in computed] for each in (bs, results, added)))
        return results

    return launch


def _seen(operator: Operator, call: Call, name: str) -> Any:
    """An operand as far as the ranks must agree on it."""
    return None if call.tensors[name] is None else operator._shared(call, name, operator.tensors[name], False)


def _choose(operator: Operator, calls: Sequence[Call]) -> tuple[list[int], Form]:
    """The order in which the weights are multiplied, and the form. The first weight's call settles the settings.
    Weights whose rows are not whole runs of 16 bytes come first, because the settings must suit them; then those with
    the most columns."""

    def unfit(form: Form) -> str:
        if form.several is None:
            return "a list of weights, of which this form takes one"
        return next((why for call in calls if (why := form.fits(call))), "")

    whole = [whole_rows(call.dtype, call["n"]) for call in calls]
    order = sorted(range(len(calls)), key=lambda i: (whole[i], -calls[i]["n"]))
    lead = calls[order[0]]
    form = operator._choose(lead)
    why = unfit(form)
    if why and lead.asked:
        where = f"rank {lead.world.rank}: {operator.name}(mode={lead.mode!r})"
        raise Unsupported.here(where, f"found {why}", "mode=None runs anywhere")
    if why:  # the form suits only the first weight
        names = operator.order(lead) if lead.on_gpu else operator.forms
        lead.mode = next(name for name in names if not unfit(operator.forms[name]))
        form, lead.given = operator.forms[lead.mode], {}
        operator._fill(lead, form)
    return order, form
