"""Operands made from an operator's declaration alone, the exact result, and the error that a right result may have."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

import pkt
from pkt.kernels.declaration import Call, Case, Form, letter_of
from pkt.kernels.operator import Operator

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}  # unit roundoff
TINY = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float32: 2.0**-150}  # half the least subnormal
SLOPE, CURVE = 1.13, 2.0**-20  # the steepest epilogue, and how far erf and exp are off
RAGGED = (12, 13, 20, 7, 17)  # sizes of letters, in their order
LETTERS = ((1,), RAGGED, (33, 16, 18, 40, 3))
BATCH = 2  # of the letter b: so many sequences, each with tiles of its own
_signature = functools.lru_cache(maxsize=1024)(inspect.signature)


def arguments_of(operator: Operator, case: Case) -> dict[str, Any]:
    """The keywords that change the result. Where the case says nothing: the default, or what the operator's first case
    has if there is none."""
    parameters = _signature(operator.function).parameters
    found = {name: parameters[name].default for name in operator.arguments}
    needed = {name for name, value in found.items() if value is inspect.Parameter.empty}
    return (
        found
        | {n: v for n, v in (operator.cases[0].arguments | case.arguments).items() if n in needed}
        | {n: v for n, v in case.arguments.items() if n in found}
    )


def call_of(operator: Operator, case: Case, size: int, rank: int = 0, launch: int = 0) -> Call:
    """As much of a call as shapes and values depend on."""
    world = SimpleNamespace(size=size, rank=rank, launch=launch)
    call = Call(operator.name, world, {}, arguments_of(operator, case), {}, None)
    call.sizes = dict(case.sizes)
    return call


def result_dtype(operator: Operator, case: Case, dtype: torch.dtype) -> torch.dtype:
    """The first result's, where the first operand has `dtype`."""
    call = call_of(operator, case, 1)
    call.tensors[next(iter(operator.tensors))] = torch.empty(0, dtype=dtype)
    return operator.dtype(call)


def usual(operator: Operator) -> torch.dtype:
    """bf16, or the first dtype of the first operand where that may not have it."""
    taken = next(iter(operator.tensors.values())).dtypes
    return torch.bfloat16 if torch.bfloat16 in taken else taken[0]


def shapes_of(operator: Operator, case: Case, size: int) -> dict[str, tuple[int, ...]]:
    """The operands' shapes on `size` ranks, those of optional ones too. Letters that the case does not have follow from
    the operands of any shape, by what the operator learns from them for its result."""
    call = call_of(operator, case, size)
    call.tensors = dict.fromkeys(operator.tensors)
    letters = {name: operand.letters(call) for name, operand in operator.tensors.items()}
    given = {name: numbers(case.shapes.get(name, ()), size) for name, shape in letters.items() if shape == "..."}
    if given and len(given) < len(letters) and callable(operator.result):
        shapes = {name: shape for name, shape in given.items() if name in case.shapes}
        call.tensors.update({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
        operator.result(call)
    return {name: given[name] if name in given else call.bound(shape) for name, shape in letters.items()}


def numbers(shape: str | tuple[int, ...], size: int) -> tuple[int, ...]:
    """A case's shape in numbers: "W*4 10" on two ranks is (8, 10)."""
    if not isinstance(shape, str):
        return tuple(shape)
    return tuple(int(w.removeprefix("W*")) * (size if w.startswith("W*") else 1) for w in shape.split())


def alike(operator: Operator, n: int, shape: str | tuple[int, ...]) -> Case:
    """n of each letter, or x of `shape`; of an operator whose sizes are not so simple its first case."""
    letters, first = letters_of(operator), operator.cases[0]
    if list(operator.tensors) == ["x"] and not letters:
        return Case(shapes={"x": shape})
    simple = letters and not first.large and not operator.most
    return Case(sizes=dict.fromkeys(letters, n)) if simple else first


def letters_of(operator: Operator) -> list[str]:
    """The letters of an operator's shapes, in their order; none where they follow from operands of any shape."""
    call = Call(operator.name, SimpleNamespace(size=1), {}, arguments_of(operator, Case()), {}, None)
    call.tensors = dict.fromkeys(operator.tensors)
    shapes = [o.letters(call) for o in operator.tensors.values()]
    if "..." in shapes:
        return []
    words = [letter_of(word, 1)[0] for shape in shapes if isinstance(shape, str) for word in shape.split()]
    return [word for word in dict.fromkeys(words) if not word.isdigit()]


def cases_of(operator: Operator, mode: str, more: bool = False) -> Iterator[Case]:
    """The operator's own cases that may take this form, and a ragged one if its shapes have letters; each call once, as
    cases may differ in ranks or launches alone. more: also sizes of one and sizes beyond a block. A letter with a
    greatest size has a quarter of it. If its shapes have letters, cases that do not fit the form are left out, judged
    with elements of two bytes, in which the fewest fit; a form for GPUs alone refuses such cases itself. Sizes that do
    not fit the operator are left out, too, but none of its own cases. A form for GPUs alone that has none left gets the
    operator's first."""
    form, letters, seen, taken = operator.form(mode), letters_of(operator), set(), False
    for case in _cases(operator, mode, more):
        arguments = {**case.arguments, **arguments_of(operator, case), "mode": mode}
        key = tuple((*sorted(of.items()),) for of in (case.sizes, case.shapes, arguments))
        if key in seen:
            continue
        seen.add(key)
        if not letters:
            yield case
            continue
        call = Call(operator.name, world_of(operator, mode), {}, arguments_of(operator, case), {}, mode)
        call.tensors[next(iter(operator.tensors))] = torch.empty(0, dtype=torch.bfloat16)
        call.sizes = dict(case.sizes)
        if case not in operator.cases and callable(operator.result):
            try:
                operator.result(call)
            except pkt.ShapeError:
                continue
        if form.gpu or not form.fits(call):
            yield case
            taken = True
    if form.gpu and not taken:
        yield dataclasses.replace(operator.cases[0], arguments={**operator.cases[0].arguments, "mode": mode})


def world_of(operator: Operator, mode: str) -> Any:
    """As much of a world of two ranks, in which a form runs, as its `fits` asks for."""
    near = 1 if mode in operator.across else 2
    return SimpleNamespace(
        size=2, rank=0, ranks=(0, 1), nodes=2 // near, node_size=near, backend=SimpleNamespace(node_size=near)
    )


def _cases(operator: Operator, mode: str, more: bool) -> Iterator[Case]:
    own = [case for case in operator.cases if case.arguments.get("mode", mode) == mode]
    yield from own
    letters, seen = letters_of(operator), set()
    for case in own or [Case()]:
        arguments = arguments_of(operator, case)
        if (key := (*arguments.items(), *(len(_words(shape)) for shape in case.shapes.values()))) in seen:
            continue
        seen.add(key)
        for sizes in (LETTERS if more else (RAGGED,)) if letters else ():
            found = dict(zip(letters, sizes * len(letters))) | dict.fromkeys({"b"} & set(letters), min(BATCH, *sizes))
            yield Case(sizes=found | {n: max(1, most // 4) for n, most in operator.most.items()}, arguments=arguments)
        for change in (_ones, _longer) if more and case.shapes else ():
            yield Case(shapes={name: change(_words(shape)) for name, shape in case.shapes.items()}, arguments=arguments)


def _words(shape: str | tuple[int, ...]) -> list[str]:
    return shape.split() if isinstance(shape, str) else [str(n) for n in shape]


def _ones(words: list[str]) -> str:
    """One in each dimension, on each rank."""
    return " ".join("W*1" if word.startswith("W*") else "1" for word in words)


def _longer(words: list[str]) -> str:
    """7 more in the last dimension."""
    if not words:
        return ""
    shared = "W*" if words[-1].startswith("W*") else ""
    return " ".join([*words[:-1], f"{shared}{int(words[-1].removeprefix('W*')) + 7}"])


def settings_of(form: Form, case: Case, operator: Operator) -> dict[str, Any]:
    """The form's small settings, and those of the case."""
    return {**form.small, **{n: v for n, v in case.arguments.items() if n in operator.settings}}


# ------------------------------------------------------------------------------------------------------------- values
def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal, or small whole numbers where the dtype has no others; the same for a seed on every rank."""
    generator = torch.Generator("cpu").manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, device="cpu").to(dtype)
    return torch.randint(0, 7, shape, generator=generator, device="cpu").to(dtype)


def whole(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers from 0 to 6, as `fill` writes them: sums of them are exact."""
    n = torch.Size(shape).numel()
    return ((torch.arange(n) * 5 + seed * 3) % 7).to(dtype).reshape(shape)


@triton.jit
def _fill(x_ptr, n, seed, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, ((offs * 5 + seed * 3) % 7).to(x_ptr.dtype.element_ty), mask=offs < n)


@triton.jit
def _read(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)


def fill(x: torch.Tensor, seed: int) -> None:
    """Write `whole` with a kernel, which the race detector sees."""
    if x.numel():
        _fill[(1,)](x, x.numel(), seed, triton.next_power_of_2(x.numel()))


def read(x: torch.Tensor) -> torch.Tensor:
    """`x` as a kernel of this rank finds it now."""
    found = torch.empty(tuple(x.shape), dtype=x.dtype, device=x.device)
    if x.numel():
        _read[(1,)](x, found, x.numel(), triton.next_power_of_2(x.numel()))
    return found


def seed_of(launch: int, rank: int, number: int) -> int:
    return (launch * 64 + rank) * 8 + number


def everybody(
    operator: Operator, case: Case, size: int, launch: int, dtype: torch.dtype, make: Any = values
) -> dict[str, list[torch.Tensor] | None]:
    """Operands of all ranks in a launch, by name; None for optional ones that the case leaves out."""
    given = case.arguments.get("given", ())
    found: dict[str, list[torch.Tensor] | None] = {}
    for number, (name, shape) in enumerate(shapes_of(operator, case, size).items()):
        if operator.tensors[name].optional and name not in given:
            found[name] = None
            continue
        ranks = [0] * size if operator.tensors[name].same else range(size)
        seeds = [seed_of(launch, rank, number) for rank in ranks]
        own = operator.tensors[name].make
        if own is None:
            of = result_dtype(operator, case, dtype) if operator.tensors[name].as_result else dtype
            turned = operator.tensors[name].turned
            found[name] = [make(shape[::-1], seed, of).t() if turned else make(shape, seed, of) for seed in seeds]
        else:
            found[name] = every = []
            for rank, seed in enumerate(seeds):
                call = call_of(operator, case, size, rank, launch)
                with torch.device("cpu"):
                    every.append(own(shape, torch.Generator("cpu").manual_seed(seed), call))
    return found


# ------------------------------------------------------------------------------------------------------------- a call
def laid(operator: Operator, name: str, room: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Memory as an operand, or as `out`: a transposed view where the operator takes only those."""
    turned = name in operator.tensors and operator.tensors[name].turned
    return room.view(shape[::-1]).t() if turned else room.view(shape)


def placed(
    world: Any, tensor: torch.Tensor, symmetric: bool, offset: int = 0, transposed: bool = False
) -> torch.Tensor:
    """A copy of `tensor`, in the heap if symmetric, that begins `offset` elements into its memory; the transposed view
    of a contiguous one if transposed, or if it is one."""
    if transposed or not tensor.is_contiguous():
        return placed(world, tensor.mT.contiguous(), symmetric, offset).mT
    n = tensor.numel() + offset
    room: Any
    if symmetric:
        room = pkt.empty(n, dtype=tensor.dtype, world=world)
    else:
        room = torch.empty(n, dtype=tensor.dtype, device=world.torch_device)
    found = room[offset:].view(tensor.shape)
    found.copy_(tensor)
    return found


def called(operator: Operator, mode: str | None, tensors: Mapping[str, Any], case: Case, **more: Any) -> Any:
    """What the operator's function returns for these tensors and the case's keywords."""
    keywords = arguments_of(operator, case)
    settings = settings_of(operator.form(mode), case, operator) if mode else {}
    return operator.function(**operator.parameters(tensors), **{**keywords, **settings, "mode": mode, **more})


def runnable(operator: Operator, case: Case, tensors: Mapping[str, Any], **more: Any) -> Callable[[], Any]:
    """The call of these tensors with the case's arguments and the keywords `more`, to be repeated."""
    arguments = arguments_of(operator, case)
    return functools.partial(operator.function, **operator.parameters(tensors), **arguments, **more)


def within(found: torch.Tensor, exact: torch.Tensor, limit: torch.Tensor | float) -> torch.Tensor:
    """Which elements are close enough. Infinities are equal; where the limit is infinite anything is right."""
    if isinstance(limit, float) and limit == 0.0:  # in a quarter of the time
        return found == exact
    return (
        (found == exact) | ((found - exact).abs() <= limit) | torch.isinf(torch.as_tensor(limit, device=found.device))
    )


def defined(found: Any, exact: torch.Tensor, limit: torch.Tensor | float) -> torch.Tensor:
    """The first result, with the exact elements where anything is right."""
    anything = torch.isinf(torch.as_tensor(limit, device=exact.device)).to(results(found)[0].device)
    return torch.where(anything, exact.to(results(found)[0]), results(found)[0])


def results(found: Any) -> tuple[torch.Tensor, ...]:
    """All results of a call, without None for those that it does not have."""
    if not isinstance(found, tuple):
        return (found,)
    flat = [one for part in found for one in (part if isinstance(part, tuple) else (part,))]
    return tuple([one for one in flat if one is not None])


def exact(operator: Operator, case: Case, rank: int, operands: Mapping[str, Any]) -> torch.Tensor:
    """The exact result of `rank`, the first of several."""
    return exacts(operator, case, rank, operands)[0]


def exacts(operator: Operator, case: Case, rank: int, operands: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """All exact results of `rank`."""
    with _where(operands):
        return results(operator.reference(rank, **operands, **arguments_of(operator, case)))


def _where(operands: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Inside the `with` new tensors are on the operands' device, on which references are computed."""
    device = next(ranks[0].device for ranks in operands.values() if ranks is not None)
    # A device in a `with` is a mode of torch's, and each operation of a reference would pass through it.
    return contextlib.nullcontext() if device == torch.get_default_device() else device


def bounds(
    operator: Operator, mode: str, case: Case, rank: int, size: int, operands: Mapping[str, Any], dtype: torch.dtype
) -> tuple[torch.Tensor | float, ...]:
    """How far each right result may be from the exact one, element by element."""
    if operator.bound is None:
        return (bound(operator, mode, case, rank, size, operands, result_dtype(operator, case, dtype)),)
    roundings = operator.form(mode).roundings(size)
    with _where(operands):
        return tuple(operator.bound(rank, dtype, roundings, **operands, **arguments_of(operator, case)))


def bound(
    operator: Operator, mode: str, case: Case, rank: int, size: int, operands: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor | float:
    """How far a right result may be from the exact one, element by element. The form declares its roundings to `dtype`,
    the result's, and each term of the sum adds one in fp32. The sum of the magnitudes bounds every partial sum."""
    arguments = arguments_of(operator, case)
    if operator.exact if isinstance(operator.exact, bool) else operator.exact(arguments):
        return 0.0
    gated, slope = arguments.get("epilogue") == "swiglu", SLOPE
    if "epilogue" in arguments:
        arguments["epilogue"] = "none"
    size_of = {n: None if ts is None else [t.double().abs() for t in ts] for n, ts in operands.items()}
    magnitude = operator.reference(rank, **size_of, **arguments)
    if gated:  # silu(gate) * up, whose magnitudes bound both: each factor's error is multiplied by the other
        magnitude, slope = magnitude[:, 0::2] * magnitude[:, 1::2], SLOPE + 1
    terms = operator.terms(dict(case.sizes), size) + 2
    roundings = operator.form(mode).roundings(size)
    return slope * (roundings * UNIT[dtype] + terms * 2.0**-24 + CURVE) * magnitude + TINY[dtype]


# ---------------------------------------------------------------------------------------------------------- gradients
def gradients_of(operator: Operator, case: Case, size: int) -> dict[str, Any]:
    """All ranks' operands in fp32 for gradients: whole numbers, whose sums are exact, where the call is linear."""
    return everybody(operator, case, size, 0, torch.float32, whole if _linear(operator, case) else values)


def _linear(operator: Operator, case: Case) -> bool:
    return operator.bound is None and arguments_of(operator, case).get("epilogue", "none") == "none"


def upstream(operator: Operator, case: Case, rank: int, operands: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """Whole gradients of a rank's results, other ones for each rank."""
    results = exacts(operator, case, rank, operands)
    return tuple(whole(tuple(x.shape), 5 * rank + at + 1) for at, x in enumerate(results))


def exact_gradients(
    operator: Operator, case: Case, rank: int, operands: Mapping[str, Any], grads: list[tuple[torch.Tensor, ...]],
    needs: list[str],
) -> tuple[list[torch.Tensor], list[Any]]:  # fmt: skip
    """(gradients of a rank's operands `needs`, how far right ones may be from them): torch's, of the references of all
    ranks in fp64, with these gradients of their results."""
    arguments = arguments_of(operator, case)
    exact = _pulled_back(operator, rank, operands, grads, needs, arguments)
    if _linear(operator, case):
        return exact, [0.0] * len(exact)
    if operator.bound is not None:
        return exact, [2.0**-14 * (1 + x.abs().max()) for x in exact]
    # dz = g f'(z). An error of z moves f', and the up of swiglu, which its gate's gradient is multiplied by.
    size_of = {n: None if ts is None else [t.double().abs() for t in ts] for n, ts in operands.items()}
    plain = arguments | {"epilogue": "none"}
    most = []
    for r, (g, *_) in enumerate(grads):
        z, g = operator.reference(r, **size_of, **plain), g.double().abs()
        if z.shape != g.shape:  # swiglu
            z, g = torch.maximum(z[:, 0::2], z[:, 1::2]).repeat_interleave(2, 1), g.repeat_interleave(2, 1)
        most.append(((1 + z) * g,))
    magnitudes = _pulled_back(operator, rank, size_of, most, needs, plain)
    terms = 2 * len(grads) * max(case.sizes.values()) + operator.terms(dict(case.sizes), len(grads))
    return exact, [SLOPE * (terms * 2.0**-24 + CURVE) * m + TINY[torch.float32] for m in magnitudes]


def _pulled_back(
    operator: Operator, rank: int, operands: Mapping[str, Any], grads: Any, needs: list[str], arguments: dict[str, Any]
) -> list[torch.Tensor]:
    leaves: dict[str, Any] = {
        n: None if ts is None else [t.double().requires_grad_() if t.is_floating_point() else t for t in ts]
        for n, ts in operands.items()
    }
    loss: Any = 0
    for r, each in enumerate(grads):
        found = results(operator.reference(r, **leaves, **arguments))
        loss = loss + sum((x * g.double()).sum() for x, g in zip(found, each) if x.is_floating_point())
    mine = [leaves[n][rank] for n in needs]
    return list(torch.autograd.grad(loss, mine, materialize_grads=True))
