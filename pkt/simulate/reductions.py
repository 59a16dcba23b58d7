"""`tl.reduce`, `tl.associative_scan` and `tl.map_elementwise` of the interpreter.

The first two take a block at a time instead of an element at a time. The combine function runs on blocks: a tree
combines neighbours pair by pair, so an axis of n takes log n calls, and the error of a sum in bf16 grows as on the GPU.
numpy computes plain sums, products, minima and maxima.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl

from pkt.simulate.constants import new_tensor
from pkt.simulate.numerics import BITS
from pkt.simulate.source import builder


def _tensor(data: np.ndarray, ty: tl.dtype) -> tl.tensor:
    scalar = ty.scalar
    return new_tensor(data.reshape(1) if data.ndim == 0 else np.ascontiguousarray(data), scalar, data.ndim == 0)


def _along(array: np.ndarray, axis: int, where: slice) -> np.ndarray:
    return array[(slice(None),) * axis + (where,)]


def _numpy_op(combine_fn: Any, data: np.ndarray, ty: tl.dtype) -> Any:
    """The numpy function that combines `data` as `combine_fn` does, or None."""
    if ty.name in BITS or ty.name == "int1":  # one bit wraps; numpy's bool saturates
        return None
    rounds_once = ty.name == "fp16"  # a sum and a product, in numpy; the GPU rounds each step
    # By identity: a JITFunction cannot be hashed while `tl` is patched.
    standard = tl.standard
    for fn, op in (
        (standard._sum_combine, np.add),
        (standard._prod_combine, np.multiply),
        (standard._elementwise_max, np.fmax),
        (standard._elementwise_min, np.fmin),
    ):
        if combine_fn is fn:
            extreme = op in (np.fmax, np.fmin) and data.dtype.kind == "f"
            if extreme:
                return None if (np.signbit(data) & (data == 0)).any() else op  # numpy takes either zero
            return None if rounds_once else op
    return None


def _combine(combine_fn: Any, left: list[np.ndarray], right: list[np.ndarray], types: list) -> list[np.ndarray]:
    """Combine two equally long parts element by element, by one call of the combine function."""
    out = combine_fn(*(_tensor(a, ty) for part in (left, right) for a, ty in zip(part, types)))
    values = out if isinstance(out, tuple) else (out,)
    return [np.broadcast_to(v.handle.data, a.shape) for v, a in zip(values, left)]


def reduce(input, axis, combine_fn, keep_dims=False, _semantic=None, _generator=None):
    inputs = input if isinstance(input, tuple) else (input,)
    builder.pkt.join_threads()
    axis, keep_dims = getattr(axis, "value", axis), getattr(keep_dims, "value", keep_dims)
    arrays = [t.handle.data for t in inputs]
    shape = arrays[0].shape
    if axis is None:
        arrays, at = [a.reshape(-1) for a in arrays], 0
    else:
        at = axis % len(shape)
    op = _numpy_op(combine_fn, arrays[0], inputs[0].dtype)
    results: Any
    if op is not None:
        dtype = arrays[0].dtype
        start = {"initial": dtype.type(-0.0)} if op is np.add and dtype.kind == "f" else {}  # so -0.0 stays
        results = [_tensor(np.asarray(op.reduce(arrays[0], axis=at, dtype=dtype, **start)), inputs[0].dtype)]
    else:
        types = [t.dtype for t in inputs]
        while (n := arrays[0].shape[at]) > 1:
            left, right = ([_along(a, at, slice(i, n // 2 * 2, 2)) for a in arrays] for i in (0, 1))
            combined = _combine(combine_fn, left, right, types)
            rest = [_along(a, at, slice(n // 2 * 2, n)) for a in arrays]
            arrays = [np.concatenate(parts, at) for parts in zip(combined, rest)]
        results = [_tensor(a.squeeze(at), ty) for a, ty in zip(arrays, types)]
    if keep_dims:
        kept = tuple(1 if axis is None or i == at else n for i, n in enumerate(shape))
        results = [_tensor(r.handle.data.reshape(kept), r.dtype) for r in results]
    return tuple(results) if isinstance(input, tuple) else results[0]


def associative_scan(input, axis, combine_fn, reverse=False, _semantic=None, _generator=None):
    inputs = input if isinstance(input, tuple) else (input,)
    builder.pkt.join_threads()
    at = getattr(axis, "value", axis) % inputs[0].handle.data.ndim
    backwards = bool(getattr(reverse, "value", reverse))
    arrays, types = [t.handle.data.copy() for t in inputs], [t.dtype for t in inputs]
    if backwards:
        arrays = [np.flip(a, at) for a in arrays]
    op, n = _numpy_op(combine_fn, arrays[0], types[0]), arrays[0].shape[at]
    if op is not None:
        arrays = [op.accumulate(arrays[0], axis=at, dtype=arrays[0].dtype)]
    else:
        distance = 1
        while distance < n:  # Hillis and Steele
            before = [np.roll(a, distance, at) for a in arrays]  # the whole block: its size must be a power of two
            for a, new in zip(arrays, _combine(combine_fn, before, arrays, types)):
                _along(a, at, slice(distance, n))[...] = _along(new, at, slice(distance, n))
            distance *= 2
    results = tuple(_tensor(np.flip(a, at) if backwards else a, ty) for a, ty in zip(arrays, types))
    return results if isinstance(input, tuple) else results[0]


def map_elementwise(scalar_fn, *args, pack=1, _semantic=None, _generator=None):
    """One call for each `pack` elements: the function may branch on them."""
    pack = getattr(pack, "value", pack)
    arrays, types = np.broadcast_arrays(*(t.handle.data for t in args)), [t.dtype for t in args]
    calls = []
    made: Any = None
    for group in zip(*(a.reshape(-1, pack) for a in arrays)):
        scalars = [_tensor(np.asarray(value), ty) for values, ty in zip(group, types) for value in values]
        made = scalar_fn(*scalars)
        calls.append(made if isinstance(made, tuple) else (made,))
    results = []
    for i in range(0, len(calls[0]), pack):  # neighbours belong to one block
        values = [v.handle.data.reshape(1) for call in calls for v in call[i : i + pack]]
        results.append(_tensor(np.concatenate(values).reshape(arrays[0].shape), calls[0][i].dtype))
    return tuple(results) if isinstance(made, tuple) else results[0]
