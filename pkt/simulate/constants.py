"""Tensors of `tl` for the simulator, made quickly: their shapes and types are shared, and constants are kept with what
follows from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime.interpreter import TensorHandle

SCALAR: tuple = ()  # the shape of every scalar, compared by identity: asking a tuple of Triton for its length is slow
_ONE = core.constexpr(1)
_INTEGERS = frozenset({"int32", "int64"})
_shapes: dict[tuple, tuple[Any, Any]] = {SCALAR: (SCALAR, _ONE)}
_blocks: dict[tuple, tuple[tl.dtype, Any, Any]] = {}  # (name of a type, shape) -> type of the block, its parts


def tensor_init(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    """`tl.tensor.__init__`, except that all tensors of one shape share the shape's objects."""
    self.handle = handle
    self.type, self.dtype = type, type.scalar
    self.shape, self.numel = _parts(tuple(type.shape) if type.is_block() else ())


def _parts(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """The shape and the number of elements that all tensors of a shape share."""
    known = _shapes.get(shape)
    if known is None:
        known = _shapes[shape] = (
            core.tuple([core.constexpr(n) for n in shape]),
            core.constexpr(int(np.prod(shape, dtype=np.int64))),
        )
    return known


def new_tensor(data: np.ndarray, ty: tl.dtype, scalar: bool) -> tl.tensor:
    """The tensor of `data` with elements `ty`, in a third of the time that Triton's two constructors take. An integer
    is a constant: the number of a tile, for example, is mostly one that another program or schedule has had."""
    if scalar and ty.name in _INTEGERS:
        return integer(data.item(), ty)
    return _new_tensor(data, ty, scalar)


def _new_tensor(data: np.ndarray, ty: tl.dtype, scalar: bool) -> tl.tensor:
    handle = _make_handle(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, ty, {}
    tensor = _make_tensor(tl.tensor)
    tensor.handle = handle
    tensor.dtype = ty
    if scalar:
        tensor.type = ty
        tensor.shape, tensor.numel = SCALAR, _ONE
    else:
        known = _blocks.get((ty.name, data.shape))
        tensor.type, tensor.shape, tensor.numel = _block(ty, data.shape) if known is None else known
    return tensor


_make_handle, _make_tensor = TensorHandle.__new__, tl.tensor.__new__


# -- constants ------------------------------------------------------------------------------------------------------
# A program's index, its integer arguments, its ramps and what follows from them alone are the same in every schedule.
# Most integers that a program loads come again, too. A constant keeps the results of operations on it in `results`:
# operation and operand -> (result, operand). Operands are told apart by identity, and kept so that no other object gets
# theirs. Other tensors have None there (see pkt.simulate.interpreter). No operation writes into a tensor's array; numpy
# refuses it for constants.

_LARGEST = 4096  # elements of a constant
_MOST = 1 << 21  # elements of all constants, 16 MiB, after which they are made anew; running programs keep theirs
_AROUND = 128  # elements that take as much memory as the objects of a constant
_roots: dict[Any, tl.tensor] = {}
_results: list[dict] = []  # of all constants
_elements = 0


def _keep(made: Any) -> bool:
    """Make `made` a constant, unless it is too large; return whether it is one."""
    global _elements
    if type(made) is not tl.tensor or made.handle.data.size > _LARGEST:
        return False
    if made.results is None:
        if _elements > _MOST:
            for results in _results:  # constants may hold each other in a circle
                results.clear()
            _results.clear()
            _roots.clear()
            _elements = 0
        _elements += made.handle.data.size + _AROUND
        made.handle.data.flags.writeable = False
        made.results = {}
        _results.append(made.results)
    return True


def follows(results: dict, key: Any, made: Any, operand: Any = None) -> Any:
    """`made`, the result for `key` of an operation on the constant that has `results`."""
    if _keep(made):
        results[key] = made, operand
    return made


def constant(key: Any, make: Callable[[], tl.tensor]) -> tl.tensor:
    """The tensor `make()`, which depends on `key` alone."""
    known = _roots.get(key)
    if known is None:
        known = make()
        if _keep(known):
            _roots[key] = known
    return known


def integer(value: int, ty: tl.dtype) -> tl.tensor:
    """The scalar `value` of an integer type."""
    known = _roots.get((ty.name, value))
    if known is None:
        known = constant((ty.name, value), lambda: _new_tensor(np.array([value], ty.name), ty, True))
    return known


def address(value: int, ty: tl.dtype) -> tl.tensor:
    """The pointer `value`."""
    return constant((ty.name, value), lambda: new_tensor(np.array([value], np.uint64), ty, True))


def block(ty: tl.dtype, shape: tuple[int, ...]) -> tl.dtype:
    """The block type of `shape` elements of `ty`."""
    known = _blocks.get((ty.name, shape))
    return (_block(ty, shape) if known is None else known)[0]


def _block(ty: tl.dtype, shape: tuple[int, ...]) -> tuple[tl.dtype, Any, Any]:
    made = _blocks[ty.name, shape] = (tl.block_type(ty, list(shape)), *_parts(shape))
    return made


def block_init(slow: Callable) -> Callable:
    """`tl.block_type.__init__`, except that all blocks of one type and shape share their parts."""
    known: dict[tuple, dict[str, Any]] = {}

    def init(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        key = (element_ty.name, integers(shape)) if type(element_ty) is tl.dtype else None
        parts = known.get(key) if key is not None and key[1] is not None else None
        if parts is not None:
            vars(self).update(parts)
            return
        slow(self, element_ty, shape)
        if key is not None and key[1] is not None:
            known[key] = dict(vars(self))

    return init


def block_like(self: tl.block_type, ty: tl.dtype) -> tl.dtype:
    """`tl.block_type.with_element_ty`, and `to_ir`, which here is the type itself."""
    return block(ty, tuple(self.shape))


_INT = frozenset({int})


def tuple_types(slow: Callable) -> Callable:
    """The type of a `tl.tuple`, made once for the integers that it holds; most tuples are shapes."""
    known: dict[tuple, Any] = {}

    def call(values: Any, fields: Any = None) -> Any:
        key = integers(values) if fields is None else None
        if key is None:
            return slow(values, fields)
        if key not in known:
            known[key] = slow(values, fields)
        return known[key]

    return call


def integers(values: Any) -> tuple[int, ...] | None:
    """The integers, or constants of integers, in a sequence; None if it has other values."""
    found = tuple([v.value if type(v) is core.constexpr else v for v in values])
    return found if _INT.issuperset(map(type, found)) else None
