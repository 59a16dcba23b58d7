"""A tensor as runs: what lies together in memory when one of its axes is shared among ranks.

An axis in the middle of a contiguous tensor, split in `size` parts, makes of it (rows, size, run): `rows` is the
product of the axes before it, a run is the part's share of the axis and all axes behind it. So part p is `rows` runs,
each contiguous, and nothing has to be transposed to keep the layout. Parts move in tiles of ROWS runs by COLS elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pkt.wording import value_text

from ..declaration import Call, Check
from .grid import COPY_BYTES

LINE = 64  # elements that a tile's row is not cut below; 128 bytes of a 16-bit type


class Runs(NamedTuple):
    """A part as a kernel's argument. UNIT, the elements known to divide a run, is 16 bytes of them where they do, else
    the half or a quarter or less: the compiler then sees how wide accesses may be."""

    rows: int  # runs
    units: int  # in a run, of UNIT elements
    across: int  # tiles side by side
    tiles: int
    UNIT: tl.constexpr
    ROWS: tl.constexpr
    COLS: tl.constexpr


def runs(rows: int, run: int, dtype: torch.dtype, block: int | None) -> Runs:
    """A part of `rows` runs of `run` elements, in tiles of `block` elements or COPY_BYTES."""
    elements = block or COPY_BYTES // dtype.itemsize
    cols = min(elements, triton.next_power_of_2(run))
    while cols > LINE and 8 * triton.cdiv(run, cols) * cols > 9 * run:  # a ninth of the lanes would idle
        cols //= 2
    height = min(elements // cols, triton.next_power_of_2(rows))
    unit = math.gcd(run, 16 // dtype.itemsize)
    across = triton.cdiv(run, cols)
    tiles = triton.cdiv(rows, height) * across
    return Runs(rows, run // unit, across, tiles, tl.constexpr(unit), tl.constexpr(height), tl.constexpr(cols))


@triton.jit
def tile(t, part):
    """Tile t: its runs [ROWS, 1] and the elements in them [1, COLS], int64, and the mask of those that are there."""
    row = tl.cast(t // part.across, tl.int64) * part.ROWS + tl.arange(0, part.ROWS)[:, None]
    col = tl.cast(t % part.across, tl.int64) * part.COLS + tl.arange(0, part.COLS)[None, :]
    return row, col, (row < part.rows) & (col < part.units * part.UNIT)


@triton.jit
def whole(row, col, part):
    """Where an element is in a tensor that is one part and nothing else."""
    return row * (part.units * part.UNIT) + col


@triton.jit
def beside(row, col, part, index, size):
    """Where an element of part `index` is in a tensor of `size` parts that take turns run by run: (rows, size, run)."""
    return (row * size + index) * (part.units * part.UNIT) + col


@triton.jit
def stacked(row, col, part, index, size, together):
    """The same where each part has `together` runs in a row before the next part's turn: (rows / together, size,
    together, run)."""
    turn = row // together * size + index
    return (turn * together + row % together) * (part.units * part.UNIT) + col


def axis(operand: str) -> Check:
    """A dimension of `operand`, counted from the front."""

    def check(call: Call, name: str, dim: Any) -> int:
        shape = call[operand].shape
        ndim = max(len(shape), 1)
        whole = isinstance(dim, int) and not isinstance(dim, bool)
        if not whole or not -ndim <= dim < ndim:
            wanted = f"an axis from {-ndim} to {ndim - 1} of {tuple(shape)}"
            raise call.refuse(name, value_text(dim), wanted if whole else f"{wanted}, an integer of Python's")
        return dim % ndim

    return check


def share(call: Call, dim: int) -> tuple[int, ...]:
    """x's shape with its axis `dim` divided among the ranks. Raises ShapeError."""
    shape, size = tuple(call["x"].shape), call.world.size
    if not shape or shape[dim] % size:
        raise call.refuse("x", shape, f"dimension {dim} divisible by {size} ranks")
    return (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])


def around(shape: Sequence[int], dim: int) -> tuple[int, int]:
    """(rows, run) of a part of this shape of a tensor split along `dim`."""
    return math.prod(shape[:dim]), math.prod(shape[dim:])
