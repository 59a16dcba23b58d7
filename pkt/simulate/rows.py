"""Addresses of a block that are rows of contiguous elements at constant distances, as most are."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

SMALL = 512  # elements of an access that is kept with what follows from its addresses, of at most KEPT accesses
KEPT = 4096


@functools.lru_cache(maxsize=256)
def ramp(shape: tuple, strides: tuple) -> np.ndarray:
    """Byte offsets of the elements of a block from its first element."""
    out: Any = np.uint64(0)
    for axis, (n, s) in enumerate(zip(shape, strides)):
        steps = np.arange(0, n * s, s, dtype=np.uint64) if s else np.zeros(n, np.uint64)
        out = out + steps.reshape((n,) + (1,) * (len(shape) - 1 - axis))
    return out


@functools.lru_cache(maxsize=256)
def _ramp_bytes(shape: tuple, strides: tuple) -> bytes:
    return ramp(shape, strides).tobytes()


def found_rows(addresses: np.ndarray, itemsize: int) -> tuple[int, tuple] | None:
    """The first address and the byte strides; None if the addresses are no rows."""
    if addresses.size == 0:
        return None
    shape, first = addresses.shape, addresses.item(0)
    step = shape[-1]
    if step > 1 and addresses.item(1) - first != itemsize:
        return None
    strides = [itemsize]
    for n in reversed(shape[:-1]):
        strides.append(addresses.item(step) - first if n > 1 else 0)
        step *= n
    strides.reverse()
    if min(strides) < 0:
        return None
    key = tuple(strides)
    if (addresses - np.uint64(first)).tobytes() != _ramp_bytes(shape, key):  # faster than an array of bools
        return None
    return first, key
