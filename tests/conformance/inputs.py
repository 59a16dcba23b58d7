"""Operands made from an operator's declaration alone, the exact result, and the error that a right result may have."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

import pkt
from pkt.kernels.declaration import letter_of
from pkt.kernels.operator import Call, Case, Form, Operator

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}  # unit roundoff
TINY = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float32: 2.0**-150}  # half the least subnormal
SLOPE, CURVE = 1.13, 2.0**-20  # the steepest epilogue, and how far erf and exp are off
RAGGED = (12, 13, 20, 7, 17)  # sizes of letters, in their order
LETTERS = ((1,), RAGGED, (33, 16, 18, 40, 3))


def arguments_of(operator: Operator, case: Case) -> dict[str, Any]:
    """The keywords that change the result, defaults where the case says nothing."""
    parameters = inspect.signature(operator.function).parameters
    return {name: case.arguments.get(name, parameters[name].default) for name in operator.arguments}


def shapes_of(operator: Operator, case: Case, size: int) -> dict[str, tuple[int, ...]]:
    """The operands' shapes on `size` ranks, those of optional ones too."""
    call = Call(operator.name, SimpleNamespace(size=size), {}, arguments_of(operator, case), {}, None)
    call.sizes = dict(case.sizes)
    found = {}
    for name, operand in operator.tensors.items():
        shape = operand.letters(call)
        found[name] = numbers(case.shapes[name], size) if shape == "..." else call.bound(shape)
    return found


def numbers(shape: str | tuple[int, ...], size: int) -> tuple[int, ...]:
    """A case's shape in numbers: "W*4 10" on two ranks is (8, 10)."""
    if not isinstance(shape, str):
        return tuple(shape)
    return tuple(int(w.removeprefix("W*")) * (size if w.startswith("W*") else 1) for w in shape.split())


def letters_of(operator: Operator) -> list[str]:
    """The letters of an operator's shapes, in their order."""
    call = Call(operator.name, SimpleNamespace(size=1), {}, arguments_of(operator, Case()), {}, None)
    shapes = [o.letters(call) for o in operator.tensors.values()]
    words = [letter_of(word, 1)[0] for shape in shapes if shape != "..." for word in shape.split()]
    return list(dict.fromkeys(words))


def cases_of(operator: Operator, mode: str, more: bool = False) -> Iterator[Case]:
    """The operator's own cases that may take this form, and a ragged one if its shapes have letters. more: also sizes
    of one and sizes beyond a block. If its shapes have letters, cases that do not fit the form are left out, judged
    with elements of two bytes, in which the fewest fit; a form for GPUs alone refuses such cases itself."""
    form = operator.forms[mode]
    if form.gpu or not letters_of(operator):
        yield from _cases(operator, mode, more)
        return
    for case in _cases(operator, mode, more):
        call = Call(operator.name, SimpleNamespace(size=2), {}, arguments_of(operator, case), {}, mode)
        call.tensors[next(iter(operator.tensors))] = torch.empty(0, dtype=torch.bfloat16)
        call.sizes = dict(case.sizes)
        if not form.fits(call):
            yield case


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
            yield Case(sizes=dict(zip(letters, sizes * len(letters))), arguments=arguments)
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
        found[name] = [make(shape, seed_of(launch, rank, number), dtype) for rank in ranks]
    return found


# ------------------------------------------------------------------------------------------------------------- a call
def placed(
    world: Any, tensor: torch.Tensor, symmetric: bool, offset: int = 0, transposed: bool = False
) -> torch.Tensor:
    """A copy of `tensor`, in the heap if symmetric, that begins `offset` elements into its memory; the transposed view
    of a contiguous one if transposed."""
    if transposed:
        return placed(world, tensor.t(), symmetric, offset).t()
    made = pkt.empty if symmetric else lambda n, dtype: torch.empty(n, dtype=dtype, device=world.torch_device)
    room = made(tensor.numel() + offset, dtype=tensor.dtype)
    found = room[offset:].view(tensor.shape)
    found.copy_(tensor)
    return found


def called(operator: Operator, mode: str | None, tensors: Mapping[str, Any], case: Case, **more: Any) -> torch.Tensor:
    """The operator's function with these tensors and the case's keywords."""
    keywords = {n: v for n, v in case.arguments.items() if n in operator.arguments}
    settings = settings_of(operator.forms[mode], case, operator) if mode else {}
    return operator.function(**tensors, **{**keywords, **settings, "mode": mode, **more})


def exact(operator: Operator, case: Case, rank: int, operands: Mapping[str, Any]) -> torch.Tensor:
    """The exact result of `rank`."""
    return operator.reference(rank, **operands, **arguments_of(operator, case))


def bound(
    operator: Operator, mode: str, case: Case, rank: int, size: int, operands: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor | float:
    """How far a right result may be from the exact one, element by element. The form declares its roundings to the
    dtype, and each term of the sum adds a rounding in fp32. The sum of the magnitudes bounds every partial sum."""
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
    roundings = operator.forms[mode].roundings(size)
    return slope * (roundings * UNIT[dtype] + terms * 2.0**-24 + CURVE) * magnitude + TINY[dtype]
