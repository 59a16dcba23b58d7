"""`tl.reduce` and `tl.associative_scan` of the interpreter, a slice at a time instead of an element at a time.

The combine function runs on whole slices along the axis, so an axis of n costs n calls whatever the other sizes are;
plain sums, minima and maxima go to numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from pkt.simulate.numerics import BITS


def _tensor(data: np.ndarray, ty: tl.dtype) -> tl.tensor:
    scalar = ty.scalar
    if data.ndim == 0:
        return tl.tensor(TensorHandle(data.reshape(1), scalar), scalar)
    return tl.tensor(TensorHandle(np.ascontiguousarray(data), scalar), tl.block_type(scalar, list(data.shape)))


def _numpy_op(combine_fn: Any) -> Any:
    # By identity: a JITFunction cannot be hashed while `tl` is patched.
    standard = tl.standard
    for fn, op in (
        (standard._sum_combine, np.add),
        (standard._elementwise_max, np.fmax),
        (standard._elementwise_min, np.fmin),
    ):
        if combine_fn is fn:
            return op
    return None


def _combine(combine_fn: Any, left: tuple, right: tuple) -> tuple:
    out = combine_fn(*left, *right)
    return out if isinstance(out, tuple) else (out,)


def reduce(input, axis, combine_fn, keep_dims=False, _semantic=None, _generator=None):
    inputs = input if isinstance(input, tuple) else (input,)
    axis, keep_dims = getattr(axis, "value", axis), getattr(keep_dims, "value", keep_dims)
    arrays = [t.handle.data for t in inputs]
    shape = arrays[0].shape
    if axis is None:
        arrays, at = [a.reshape(-1) for a in arrays], 0
    else:
        at = axis % len(shape)
    op = _numpy_op(combine_fn)
    results: Any
    if op is not None and inputs[0].dtype not in BITS:
        results = [_tensor(np.asarray(op.reduce(arrays[0], axis=at, dtype=arrays[0].dtype)), inputs[0].dtype)]
    else:
        slices = [
            tuple(_tensor(a.take(i, axis=at), t.dtype) for a, t in zip(arrays, inputs))
            for i in range(arrays[0].shape[at])
        ]
        results = slices[0]
        for part in slices[1:]:
            results = _combine(combine_fn, results, part)
    if keep_dims:
        kept = tuple(1 if axis is None or i == at else n for i, n in enumerate(shape))
        results = [_tensor(r.handle.data.reshape(kept), r.dtype) for r in results]
    return tuple(results) if isinstance(input, tuple) else results[0]


def associative_scan(input, axis, combine_fn, reverse=False, _semantic=None, _generator=None):
    inputs = input if isinstance(input, tuple) else (input,)
    at = getattr(axis, "value", axis) % inputs[0].handle.data.ndim
    order = range(inputs[0].handle.data.shape[at])
    if getattr(reverse, "value", reverse):
        order = order[::-1]
    outputs = [np.empty_like(t.handle.data) for t in inputs]
    carry: tuple | None = None
    for i in order:
        part = tuple(_tensor(t.handle.data.take(i, axis=at), t.dtype) for t in inputs)
        carry = part if carry is None else _combine(combine_fn, carry, part)
        for out, value in zip(outputs, carry):
            np.moveaxis(out, at, 0)[i] = value.handle.data.reshape(np.moveaxis(out, at, 0)[i].shape)
    results = tuple(_tensor(out, t.dtype) for out, t in zip(outputs, inputs))
    return results if isinstance(input, tuple) else results[0]
