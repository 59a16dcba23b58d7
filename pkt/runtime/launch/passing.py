"""From the arguments of a launch to those of Triton's function in C, for launches like one that was made before.

A kernel may take sixty values, most of them in tuples, and all are compared at each launch. A loop over them costs
100 ns a value, so the comparison is written as text for each kernel, a line or two for each value, and compiled:

    (v2, v3, v4,) = args
    if v2 is not k5 and not equal(v2, k5): return None
    if getattr(v3, "dtype", None) is not k6: return None
    p7 = v3.data_ptr()
    if p7 % 16: return None
    ...
    return (k5, p7, ...)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton.language as tl
from triton.runtime import driver

from pkt.language.world import DeviceWorld
from pkt.runtime.memory.tensor import SymmetricTensor

MOST_ENCODED = 16
"""Addresses for which the encoding of a descriptor is kept."""

_lasting: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The descriptors that `lasts` was told of, by id: they are compared by their contents, so no set can hold them."""

Pass = Callable[[tuple[Any, ...]], "tuple[Any, ...] | None"]


def lasts(descriptor: Any) -> Any:
    """`descriptor`, whose tensor and its address stay the same as long as it is launched with: of a buffer of pkt's.
    A kernel that pushes has eight of them, and looking their addresses up takes a third of the time of a launch."""
    _lasting[id(descriptor)] = descriptor
    return descriptor


def passing(names: list[str], args: tuple[Any, ...], named: dict[str, Any], encodings: list[Any]) -> Pass:
    """pass_on(args): what is passed for arguments like these, None if they may need another kernel. names: of the
    kernel's parameters; those behind `args` are in `named`. encodings: how Triton encodes each descriptor. Keeps no
    tensor but those of tuples that `_stays`."""
    text, remaining = _Text(), iter(encodings)
    values = [text.new("v") for _ in args]
    text.write(f"({''.join(f'{v}, ' for v in values)}) = args")
    passed: list[str] = []
    for value, at in zip(args, values):
        if hasattr(value, "block_shape"):  # a descriptor, Triton's or Gluon's, which have no class in common
            passed += text.descriptor(value, at, next(remaining))
        else:
            passed.append(text.value(value, at))
    passed += [text.keep(named[name]) for name in names[len(args) :]]
    return text.compiled(passed)


class _Text:
    """The lines of a function, and the objects that they name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.known: dict[str, Any] = {"equal": equal, "getattr": getattr, "type": type, "len": len}
        self.indent, self.named = "    ", 0

    def new(self, kind: str) -> str:
        """A name that nothing has."""
        self.named += 1
        return f"{kind}{self.named}"

    def keep(self, value: Any) -> str:
        """The name of an object."""
        name = self.new("k")
        self.known[name] = value
        return name

    def write(self, line: str) -> None:
        self.lines.append(self.indent + line)

    def unless(self, condition: str) -> None:
        """Nothing is passed unless the condition holds."""
        self.write(f"if not ({condition}): return None")

    def compiled(self, passed: list[str]) -> Pass:
        lines = ["def pass_on(args):", *self.lines, f"    return ({''.join(f'{p}, ' for p in passed)})"]
        exec(compile("\n".join(lines), "<arguments of a launch>", "exec"), self.known)
        found: Pass = self.known.pop("pass_on")
        return found

    def value(self, of: Any, at: str) -> str:
        """What is passed for a value like `of`, which `at` names."""
        if isinstance(of, torch.Tensor):
            return self.tensor(of, at)
        if isinstance(of, tuple) and not isinstance(of, DeviceWorld) and any(_tensors(of)):
            return self.elements(of, at)
        known = self.keep(of)
        if isinstance(of, DeviceWorld):
            self.unless(f"{at} is {known}")
            return self.keep(addresses(of))
        self.unless(f"{at} is {known} or equal({at}, {known})")
        return known

    def tensor(self, of: torch.Tensor, at: str) -> str:
        """Its address, of the same dtype and alignment as that of `of`."""
        address, aligned = self.new("p"), of.data_ptr() % 16 == 0
        self.unless(f'getattr({at}, "dtype", None) is {self.keep(of.dtype)}')  # isinstance is slow where it says no
        self.write(f"{address} = {at}.data_ptr()")
        self.unless(f"{address} % 16 == 0" if aligned else f"{address} % 16")
        return address

    def elements(self, of: tuple[Any, ...], at: str) -> str:
        """Element by element, unless it is `of` itself, and that stays."""
        found, inside = self.new("p"), [self.new("v") for _ in of]
        stays, before = _stays(of), self.indent
        if stays:
            self.write(f"if {at} is {self.keep(of)}: {found} = {self.keep(addresses(of))}")
            self.write("else:")
            self.indent += "    "
        self.unless(f"type({at}) is {self.keep(type(of))} and len({at}) == {len(of)}")
        self.write(f"({''.join(f'{v}, ' for v in inside)}) = {at}")
        each = [self.value(value, name) for value, name in zip(of, inside)]
        self.write(f"{found} = ({''.join(f'{p}, ' for p in each)})")
        self.indent = before
        return found

    def descriptor(self, of: Any, at: str, how: dict[str, Any] | None) -> list[str]:
        """Its tensor's address if `how` is None, else that encoded as `how` says; then its sizes. It has to be `of`."""
        sizes = [*of.shape, *of.strides]
        if how is None:
            rounds = [of.round_f32_to_tf32] if hasattr(of, "round_f32_to_tf32") else []  # since Triton 3.7
            sizes += [of.padding == "nan", *rounds, *sizes]
        self.unless(f"{at} is {self.keep(of)}")
        encode = None if how is None else _encoder(of, how)
        if id(of) in _lasting:
            base = of.base.data_ptr()
            first = self.keep(encode(base) if encode else base)
        elif encode is None:
            first = self.tensor(of.base, f"{at}.base")
        else:
            first = self.new("p")
            self.unless(f"{at}.base.dtype is {self.keep(of.base.dtype)}")
            self.write(f"{first} = {self.keep(encode)}({at}.base.data_ptr())")
        return [first, *map(self.keep, sizes)]


def equal(a: Any, b: Any) -> bool:
    """Whether one kernel serves both of two arguments without pointers."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(x is y or equal(x, y) for x, y in zip(a, b))
    if isinstance(a, tl.constexpr):
        return a.value is b.value or equal(a.value, b.value)
    return isinstance(a, (int, str)) and a == b


def addresses(of: Any) -> Any:
    """`of` with addresses in place of tensors."""
    if isinstance(of, torch.Tensor):
        return of.data_ptr()
    return tuple(map(addresses, of)) if isinstance(of, tuple) else of


def _tensors(of: tuple[Any, ...]) -> Iterator[bool]:
    return (isinstance(x, torch.Tensor) or (isinstance(x, tuple) and any(_tensors(x))) for x in of)


def _stays(of: Any) -> bool:
    """Whether all memory that a tuple names stays at its address, as symmetric memory does. A plan that has made such a
    tuple is dropped before that memory is freed."""
    if isinstance(of, torch.Tensor):
        return isinstance(of, SymmetricTensor)
    return all(map(_stays, of)) if isinstance(of, tuple) else True


def _encoder(of: Any, how: dict[str, Any]) -> Callable[[int], Any]:
    """encoded(address): the descriptor `of` over a tensor at this address."""
    from triton.backends.nvidia import driver as nvidia

    kept, utils = dict[int, Any](), driver.active.utils
    encode = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor  # its name in Triton 3.6
    element = nvidia.TMA_TF32 if getattr(of, "round_f32_to_tf32", False) else how["elem_type"]
    form = how["swizzle"], how["elem_size"], nvidia.TMA_DTYPE_DEVICE_TO_HOST[element], how["block_size"]
    extent = of.shape, of.strides, int(of.padding == "nan")

    def encoded(at: int) -> Any:
        found = kept.get(at)
        if found is None:
            if len(kept) == MOST_ENCODED:
                kept.clear()
            found = kept[at] = encode(at, *form, *extent)
        return found

    return encoded
