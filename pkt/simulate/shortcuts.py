"""Shortcuts past the type rules of `tl`, which take ten times as long as the arithmetic of a simulated kernel.

Each shortcut handles the common case of one operation: operands of one plain type, or a load with a mask of the
pointers' own shape. It leaves every other case to `slow`, the function of `tl`, so that the rules and the error
messages stay Triton's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime.interpreter import TensorHandle

from pkt.language.world import listed_rank
from pkt.simulate.builder import np_dtype, selected
from pkt.simulate.constants import SCALAR, constant, follows, integer, integers, new_tensor
from pkt.simulate.memory import OUTSIDE
from pkt.simulate.numerics import decode, encode, to_half
from pkt.simulate.sites import site

# By name: comparing Triton's types costs more than adding two numbers.
INTEGERS = frozenset({"int32", "int64"})
PLAIN = INTEGERS | {"fp32", "fp16"}
_LIMIT = {"int32": 1 << 31, "int64": 1 << 63}
_EXACT = 1 << 24  # integers up to here are exact in fp32
_LARGEST = float(np.finfo(np.float32).max)
_WORDS = frozenset({"uint16", "uint32", "uint64"})
_RANGE = {name: (-limit, limit) for name, limit in _LIMIT.items()} | {n: (0, 1 << int(n[4:])) for n in _WORDS}

_WITH_NO_VALUE = frozenset({int, tl.tensor, type(None)})


def unwrapped(slow: Callable) -> Callable:
    """`_unwrap_if_constexpr` of Triton, which asks three times what a value is."""

    def call(o: Any) -> Any:
        kind = type(o)
        return o.value if kind is core.constexpr else o if kind in _WITH_NO_VALUE else slow(o)

    return call


def np_dtype_of(slow: Callable) -> Callable:
    """`_get_np_dtype` of Triton's interpreter, which makes its whole table at every call."""
    known: dict[str, np.dtype] = {}

    def call(ty: tl.dtype) -> np.dtype:
        if type(ty) is not tl.dtype:
            return slow(ty)
        if ty.name not in known:
            known[ty.name] = slow(ty)
        return known[ty.name]

    return call


def _truncated(left: Any, right: Any) -> Any:
    """`//` of Triton's integers, rounded towards zero as in C."""
    return (left - np.fmod(left, right)) // right


_ARITHMETIC: dict[str, Any] = {
    "__add__": np.add,
    "__radd__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "__rmul__": np.multiply,
}
_INTEGER: dict[str, Any] = {"__floordiv__": _truncated, "__mod__": np.fmod}
_COMPARE: dict[str, Any] = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
_LOGIC: dict[str, Any] = {"__and__": np.bitwise_and, "__or__": np.bitwise_or, "__xor__": np.bitwise_xor}
_SHIFT: dict[str, Any] = {"__lshift__": np.left_shift, "__rshift__": np.right_shift}
_ATOMIC: dict[str, Any] = {"atomic_add": np.add, "atomic_xchg": lambda old, new: new}
ATOMICS = tuple(_ATOMIC)
OPERATORS = {**_ARITHMETIC, **_INTEGER, **_COMPARE, **_LOGIC, **_SHIFT}


def binary(name: str, slow: Callable) -> Callable:
    op = OPERATORS[name]
    types = INTEGERS if name in _INTEGER else INTEGERS | _WORDS if name in _SHIFT else PLAIN | _WORDS
    if name in _LOGIC:
        types = INTEGERS | _WORDS | {"int1"}
    compares, moves = name in _COMPARE, name in ("__add__", "__radd__", "__sub__")

    def call(self: tl.tensor, other: Any) -> Any:
        kind = type(other)
        if kind is core.constexpr:
            other = other.value
            kind = type(other)
        results = self.results
        if results is not None and kind is int:
            key: tuple = (name, other)
        elif results is not None and kind is tl.tensor and other.results is not None:
            key = (id(other), name)
        else:
            return compute(self, other, kind)
        known = results.get(key)
        return known[0] if known is not None else follows(results, key, compute(self, other, kind), other)

    def compute(self: tl.tensor, other: Any, kind: type) -> Any:
        ty = self.dtype
        is_tensor = kind is tl.tensor
        mine = self.shape
        its = other.shape if is_tensor else SCALAR
        if mine is not its and mine is not SCALAR and its is not SCALAR and len(mine) != len(its):
            return slow(self, other)
        left: Any = self.handle.data
        right: Any
        have = ty.name
        if have in types:
            if is_tensor and other.dtype.name == have:
                right = other.handle.data
            elif kind is int and have in _RANGE and _RANGE[have][0] <= other < _RANGE[have][1]:
                right = left.dtype.type(other)
            elif have == "fp32" and (kind is float or (kind is int and -_EXACT <= other <= _EXACT)):
                if (compares and not _is_fp32(other)) or (not other and _is_negative(other)):
                    return slow(self, other)
                right = np.float32(other)
            elif is_tensor and have in INTEGERS and other.dtype.name in INTEGERS:
                left, right = left.astype(np.int64, copy=False), other.handle.data.astype(np.int64, copy=False)
                ty = tl.int64
            else:
                return slow(self, other)
        elif moves and type(ty) is tl.pointer_type and (kind is int or (is_tensor and other.dtype.name in INTEGERS)):
            size = max(1, ty.element_ty.primitive_bitwidth // 8)
            right = _bytes(np.int64(other), size) if kind is int else _byte_offsets(other, size)
        else:
            return slow(self, other)
        out = op(left, right)
        if compares:
            ty = tl.int1
        return new_tensor(out, ty, mine is SCALAR and its is SCALAR)

    return call


PURE = ("where", "minimum", "maximum")


def pure(name: str, slow: Callable) -> Callable:
    """A function whose result depends on its arguments alone: on constants and integers it is a constant."""

    def call(*args: Any, **named: Any) -> Any:
        first = next((a for a in args if type(a) is tl.tensor), None)
        if named or first is None or first.results is None:
            return slow(*args, **named)
        key: list = [name]
        for a in args:
            a = a.value if type(a) is core.constexpr else a
            if type(a) is int:
                key.append(a)
            elif type(a) is tl.tensor and a.results is not None:
                key += (None, id(a))
            else:
                return slow(*args)
        known = first.results.get(tuple(key))
        return known[0] if known is not None else follows(first.results, tuple(key), slow(*args), args)

    return call


def where(slow: Callable) -> Callable:
    """`tl.where` of tensors of one type, and of numbers."""

    def call(condition: Any, x: Any, y: Any) -> Any:
        typed = x if type(x) is tl.tensor else y
        kind = type(condition)
        if type(typed) is tl.tensor and (kind is bool or (kind is tl.tensor and condition.dtype.name == "int1")):
            left, right = (_operand(v, typed.dtype) for v in (x, y))
            ranks = {
                len(v.handle.data.shape) for v in (condition, x, y) if type(v) is tl.tensor and v.shape is not SCALAR
            }
            if left is not None and right is not None and len(ranks) < 2:
                chosen = condition if kind is bool else condition.handle.data
                return new_tensor(np.where(chosen, left, right), typed.dtype, not ranks)
        return slow(condition, x, y)

    return call


def extreme(name: str, slow: Callable) -> Callable:
    """`tl.minimum` and `tl.maximum` of integers of one type, and of numbers."""
    op = getattr(np, name)

    def call(x: Any, y: Any, *args: Any, **named: Any) -> Any:
        typed = x if type(x) is tl.tensor else y
        if type(typed) is tl.tensor and typed.dtype.name in INTEGERS and not args and not named:
            left, right = _operand(x, typed.dtype), _operand(y, typed.dtype)
            ranks = {len(v.handle.data.shape) for v in (x, y) if type(v) is tl.tensor and v.shape is not SCALAR}
            if left is not None and right is not None and len(ranks) < 2:
                return new_tensor(op(left, right), typed.dtype, not ranks)
        return slow(x, y, *args, **named)

    return call


def _is_fp32(x: float) -> bool:
    """Whether Triton compares the number `x` in fp32. It compares large and small ones in fp64."""
    return x == 0 or 2.0**-126 <= abs(x) <= _LARGEST or not math.isfinite(x)


def _is_negative(zero: float) -> bool:
    """Whether a zero is -0.0, which is 0.0 as a constant of Triton 3.6 and itself in newer releases."""
    return math.copysign(1.0, zero) < 0.0


def _operand(x: Any, ty: tl.dtype) -> Any:
    """The array, or the number, of an operand of type `ty`; None if it has another type, or is -0.0."""
    if type(x) is core.constexpr:
        x = x.value
    kind = type(x)
    if kind is tl.tensor:
        return x.handle.data if x.dtype.name == ty.name else None
    if ty.name == "fp32" and (kind is float or (kind is int and -_EXACT <= x <= _EXACT)):
        return None if not x and _is_negative(x) else np.float32(x)
    limits = _RANGE.get(ty.name)
    return np.dtype(ty.name).type(x) if kind is int and limits is not None and limits[0] <= x < limits[1] else None


def _bytes(offset: Any, size: int) -> Any:
    return (offset.astype(np.int64, copy=False) * size).view(np.uint64)


def _byte_offsets(offset: tl.tensor, size: int) -> np.ndarray:
    """Offsets in bytes of elements of `size` bytes, as they are added to addresses."""
    results = offset.results
    if results is None:
        return _bytes(offset.handle.data, size)
    known = results.get(size)
    if known is None:
        known = results[size] = _bytes(offset.handle.data, size)
    return known


def getitem(slow: Callable) -> Callable:
    """`x[None, :]`, `x[:, None]` and the like, which add axes."""

    def call(self: tl.tensor, slices: Any) -> Any:
        if type(slices) in (tuple, core.tuple) and self.shape is not SCALAR:
            index = (*slices,)
            axes = "".join("+" if at is None else ":" if at == _EVERY else "?" for at in index)
            if "?" not in axes and axes.count(":") == len(self.handle.data.shape):
                return viewed(self, index, axes)
        return slow(self, slices)

    def viewed(self: tl.tensor, index: tuple, name: str) -> tl.tensor:
        results = self.results
        if results is None:
            return new_tensor(self.handle.data[index], self.dtype, False)
        known = results.get(name)
        if known is not None:
            return known[0]
        return follows(results, name, new_tensor(self.handle.data[index], self.dtype, False))

    return call


_EVERY = slice(None)


_WIDTH: dict[str, Any] = {f"{u}int{n}": np.dtype(f"{u}int{n}") for u in ("", "u") for n in (16, 32, 64)}
_WHOLE = frozenset(_WIDTH) | {"int1"}
_BITS = _WIDTH | {"bf16": np.dtype(np.uint16), "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}


_ROUNDED: dict[tuple[str, str], Callable[[np.ndarray], np.ndarray]] = {
    ("bf16", "fp32"): lambda data: decode(data, tl.bfloat16),
    ("fp16", "fp32"): lambda data: data.astype(np.float32),
    ("fp32", "bf16"): lambda data: encode(data, tl.bfloat16),
    ("fp32", "fp16"): lambda data: to_half(data, False),
}


def cast(slow: Callable) -> Callable:
    """`tl.cast` and `x.to` between integers, between fp32 and the halves, between pointers, bit casts between types of
    equal width, and casts to the type of x."""

    def call(
        input: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False, _semantic: Any = None
    ) -> Any:
        wanted = getattr(dtype, "name", "")
        if type(dtype) is type(getattr(input, "dtype", None)) is tl.pointer_type and fp_downcast_rounding is None:
            return new_tensor(input.handle.data, dtype, input.shape is SCALAR)
        if fp_downcast_rounding is None and wanted in _BITS:
            if type(input) is tl.tensor:
                have, data = input.dtype.name, input.handle.data
                if have == wanted:
                    return input
                if bitcast is True and have in _BITS and _BITS[have].itemsize == _BITS[wanted].itemsize:
                    return new_tensor(data.view(_BITS[wanted]), dtype, input.shape is SCALAR)
                if bitcast is False and have in _WHOLE and wanted in _WIDTH:
                    results = input.results
                    known = None if results is None else results.get(wanted)
                    if known is not None:
                        return known[0]
                    made = new_tensor(data.astype(_WIDTH[wanted]), dtype, input.shape is SCALAR)
                    return made if results is None else follows(results, wanted, made)
                rounded = _ROUNDED.get((have, wanted))
                if bitcast is False and rounded is not None:
                    return new_tensor(rounded(data), dtype, input.shape is SCALAR)
            elif wanted in INTEGERS and type(input) is int and -_LIMIT[wanted] <= input < _LIMIT[wanted]:
                return integer(input, dtype)
        return slow(input, dtype, fp_downcast_rounding, bitcast)

    return call


def join(slow: Callable) -> Callable:
    """`tl.join` of two blocks or scalars of one shape and type."""

    def call(a: Any, b: Any) -> Any:
        if type(a) is type(b) is tl.tensor and a.shape is b.shape and a.dtype.name == b.dtype.name:
            together = np.concatenate if a.shape is SCALAR else np.stack
            return new_tensor(together([a.handle.data, b.handle.data], axis=-1), a.dtype, False)
        return slow(a, b)

    return call


def reshape(slow: Callable) -> Callable:
    """`tl.reshape` to a shape that `tl` has accepted before."""
    accepted: set[tuple[int, ...]] = set()

    def call(input: Any, *shape: Any, **named: Any) -> Any:
        sizes = integers(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list, core.tuple)) else shape)
        if sizes in accepted and not named and type(input) is tl.tensor and input.numel.value == math.prod(sizes):
            return new_tensor(input.handle.data.reshape(sizes), input.dtype, False)
        made = slow(input, *shape, **named)
        if sizes:
            accepted.add(sizes)
        return made

    return call


def split(slow: Callable) -> Callable:
    """`tl.split` of a block that leaves two blocks."""

    def call(a: Any) -> Any:
        data = a.handle.data if type(a) is tl.tensor and len(a.shape) > 1 else None
        if data is None or data.shape[-1] != 2:
            return slow(a)
        return new_tensor(data[..., 0], a.dtype, False), new_tensor(data[..., 1], a.dtype, False)

    return call


def peer(slow: Callable, builder: Any) -> Callable:
    """The functions of pkt.language.address that lead to one rank, in one addition, where windows have equal distances,
    as the simulator's do. A rank that does not exist is noted for the message: its address may be in the multicast
    window."""

    def call(ptr: Any, rank: Any, world: Any, *named: Any) -> Any:
        to, size = _number(rank), _number(world.size)
        if type(ptr) is not tl.tensor or world.network:
            return slow(ptr, rank, world, *named)
        last = int(rank.handle.data.max()) if to is None and type(rank) is tl.tensor else to
        if last is not None and size is not None and last >= size and site().call != "multicast":
            builder.pkt.m.current.strays.append(int(ptr.handle.data.flat[0]))
        if to is not None and type(ptr.dtype) is tl.pointer_type and ptr.dtype.element_ty.primitive_bitwidth >= 8:
            here, stride = _number(world.rank), _number(world.stride)
            if here is not None and stride is not None:
                distance = (to - here) * stride
                if _number(world.team):
                    distance = _in_team(builder.pkt.m.space, to, here, distance, world)
                results = ptr.results
                known = None if results is None else results.get(("peer", distance))
                if known is not None:
                    return known[0]
                data = ptr.handle.data + np.uint64(distance % (1 << 64))
                made = new_tensor(data, ptr.dtype, ptr.shape is SCALAR)
                return made if results is None else follows(results, ("peer", distance), made)
        return slow(ptr, rank, world, *named)

    return call


def _in_team(space: Any, to: int, here: int, distance: int, world: Any) -> int:
    """The distance from a team's rank `here` to its rank `to`: `distance` if the team's ranks have equal steps. For a
    rank outside the team it leads to no window, although the world may have a rank there."""
    if not 0 <= to < (_number(world.size) or 0):
        return OUTSIDE * space.stride
    table = _number(world.table)
    return (listed_rank(table, to) - listed_rank(table, here)) * space.stride if table else distance


def _number(x: Any) -> int | None:
    """The value of one integer (a Python int, a constexpr or a scalar tensor), or None."""
    if type(x) is core.constexpr:
        x = x.value
    if type(x) is int:
        return x
    return x.handle.data.item() if type(x) is tl.tensor and x.shape is SCALAR and x.dtype.name in INTEGERS else None


_SEMS = {None: "acquire_release", "acq_rel": "acquire_release"} | {s: s for s in ("relaxed", "acquire", "release")}
_SCOPES = {None: "gpu", "gpu": "gpu", "sys": "system", "cta": "cta"}


def _updated(pointer: Any, sem: Any, scope: Any) -> tl.dtype | None:
    """The type of the integer that one pointer leads to, where an atomic has this `sem` and `scope`; else None."""
    if type(pointer) is not tl.tensor or pointer.shape or sem not in _SEMS or scope not in _SCOPES:
        return None
    ty = pointer.dtype.element_ty
    return ty if ty.name in INTEGERS else None


def atomic(name: str, slow: Callable, builder: Any) -> Callable:
    """`tl.atomic_add` and the like on one integer."""
    op = _ATOMIC[name]

    def call(pointer: Any, val: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Any:
        sem = sem.value if type(sem) is core.constexpr else sem
        scope = scope.value if type(scope) is core.constexpr else scope
        ty = _updated(pointer, sem, scope)
        plain = mask is None or (type(mask) is tl.tensor and mask.dtype.name == "int1" and mask.shape is SCALAR)
        if plain and ty is not None:
            if type(val) is int:
                val = integer(val, ty)
            if type(val) is tl.tensor and val.dtype.name == ty.name and not val.shape:
                addresses, new = pointer.handle.data, val.handle.data.reshape(-1)
                change = lambda now, where: op(now, new[where])  # noqa: E731
                chosen = None if mask is None else selected(mask.handle, addresses.shape)
                old = builder.pkt.atomic(addresses, chosen, new.dtype, change, _SEMS[sem], _SCOPES[scope])
                return new_tensor(old, ty, True)
        return slow(pointer, val, mask, sem, scope)

    return call


def atomic_cas(slow: Callable, builder: Any) -> Callable:
    """`tl.atomic_cas` on one integer."""

    def call(pointer: Any, cmp: Any, val: Any, sem: Any = None, scope: Any = None) -> Any:
        sem = sem.value if type(sem) is core.constexpr else sem
        scope = scope.value if type(scope) is core.constexpr else scope
        ty = _updated(pointer, sem, scope)
        if ty is not None:
            expected, new = _scalar_of(cmp, ty), _scalar_of(val, ty)
            if expected is not None and new is not None:
                old = builder.swapped(pointer.handle.data, expected, new, _SEMS[sem], _SCOPES[scope])
                return new_tensor(old, ty, True)
        return slow(pointer, cmp, val, sem, scope)

    return call


def _scalar_of(value: Any, ty: tl.dtype) -> np.ndarray | None:
    """The array of a scalar that has type `ty` in `tl`; None for any other value."""
    if type(value) is core.constexpr:
        value = value.value
    if type(value) is int and ty.name == "int32" and -_LIMIT["int32"] <= value < _LIMIT["int32"]:
        return integer(value, ty).handle.data
    return value.handle.data if type(value) is tl.tensor and value.dtype.name == ty.name and not value.shape else None


def _matches(ptr: Any, mask: Any) -> bool:
    """Whether the pointers have a plain element type, and the mask, if any, has their shape."""
    ty: Any = ptr.dtype if type(ptr) is tl.tensor else None
    if type(ty) is not tl.pointer_type or type(ty.element_ty) is not tl.dtype or ty.element_ty.name == "int1":
        return False
    if ty.const and ptr.type.is_const():
        return False
    return mask is None or (type(mask) is tl.tensor and mask.dtype.name == "int1" and mask.shape is ptr.shape)


def load(slow: Callable, builder: Any) -> Callable:
    def call(pointer: Any, mask: Any = None, other: Any = None, *args: Any, **named: Any) -> Any:
        if args or named or not _matches(pointer, mask) or not (other is None or type(other) in (int, float)):
            return slow(pointer, mask, other, *args, **named)
        ty = pointer.dtype.element_ty
        fill = None
        if other and ty.name in _RANGE:  # without it masked elements are zero anyway
            if type(other) is not int or not _RANGE[ty.name][0] <= other < _RANGE[ty.name][1]:
                return slow(pointer, mask, other)
            fill = integer(other, ty).handle
        elif other:
            if ty.is_int() or ty.name == "fp64" or (type(other) is int and abs(other) > _EXACT):
                return slow(pointer, mask, other)
            fill = builder.cast_impl(TensorHandle(np.array([other], np.float32), tl.float32), ty)
        data = builder.loaded(pointer.handle.data, np_dtype(ty), None if mask is None else mask.handle, fill)
        return new_tensor(data, ty, pointer.shape is SCALAR)

    return call


def store(slow: Callable, builder: Any) -> Callable:
    def call(pointer: Any, value: Any, mask: Any = None, *args: Any, **named: Any) -> Any:
        if args or named or type(value) is not tl.tensor or not _matches(pointer, mask):
            return slow(pointer, value, mask, *args, **named)
        if value.dtype.name != pointer.dtype.element_ty.name or value.shape is not pointer.shape:
            return slow(pointer, value, mask)
        data = value.handle.data.astype(np_dtype(value.dtype), copy=False)
        return builder.stored(pointer.handle.data, data, None if mask is None else mask.handle)

    return call


def arange(slow: Callable) -> Callable:
    def call(start: Any, end: Any, **named: Any) -> Any:
        first, last = (v.value if type(v) is core.constexpr else v for v in (start, end))
        if type(first) is tl.tensor or type(last) is tl.tensor:
            return slow(start, end, **named)  # raises: bounds must be constants
        # The first call lets `tl` check the bounds.
        return constant((first, last), lambda: new_tensor(slow(first, last, **named).handle.data, tl.int32, False))

    return call


def full(slow: Callable) -> Callable:
    """`tl.full` of a number, which is a constant."""

    def call(shape: Any, value: Any, dtype: Any) -> Any:
        shape, value, dtype = (v.value if type(v) is core.constexpr else v for v in (shape, value, dtype))
        sizes = integers(shape)
        if sizes is None or type(value) not in (bool, int, float) or type(dtype) is not tl.dtype:
            return slow(shape, value, dtype)
        # By its text: 0, 0.0, -0.0 and False are equal.
        return constant((sizes, repr(value), dtype.name), lambda: slow(shape, value, dtype))

    return call


def of_grid(sizes: Callable[[], tuple[int, int, int]]) -> Callable:
    """`tl.program_id` and `tl.num_programs`: one axis of the result of `sizes()`."""

    def call(axis: Any = 0) -> Any:
        at = axis.value if type(axis) is core.constexpr else axis
        return integer(sizes()[at], tl.int32)

    return call
