"""Rows that ranks add up, in tiles: each rank stores a tile into its owner's inbox, and the owner adds what came.

A program takes one tile of each owner in a turn. Signal number k of a program publishes the x of its turn k, and what
owners have made of their tiles of turn k - 1. So a turn has one signal and one wait, and while an owner's answer is
under way, the next x is, too.

The inbox has two halves, used in turn. Of x: who stores for signal k + 2 has found my signal k + 1, before which I have
added what came with signal k. Of answers: who stores that to tile k + 2 has found my signal k + 2, before which I have
read the answer to tile k, which came with signal k + 1.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from .grid import num_programs

TILE_ELEMENTS = 8192
"""That a program works on at a time: with 8 warps 32 of a thread."""
TILE_BYTES = 128 << 10
"""Most bytes that a program sends to all ranks before it signals, but for a single row of each owner: as many as in
reduce_scatter's push on two ranks. With more ranks the inboxes would become large."""


class Rows(NamedTuple):
    """The rows as a kernel's argument. Tile `turn` of `owner` begins at row owner * apart + turn * step."""

    T: Any  # rows
    units: Any  # in a row, of UNIT elements
    apart: Any
    step: Any
    span: Any  # rows that one owner's tiles lie in
    turns: Any  # of all programs
    room: Any  # elements for a tile in the inbox, which has as much again for the answer to one
    UNIT: tl.constexpr  # elements known to divide a row: of 16 bytes where they do
    ROWS: tl.constexpr  # of a tile
    HEIGHT: tl.constexpr  # rows and columns that a program works on at a time
    COLS: tl.constexpr
    WHOLE: tl.constexpr  # these are all columns


def rows(
    world: World, shape: tuple[int, ...], dtype: torch.dtype, size: int, owned: bool = False, tile: int | None = None
) -> tuple[Rows, int]:
    """(Rows, programs) for x of a shape that `size` ranks share. owned: each owns rows that lie together; else tiles
    take turns. tile: rows of a tile; where None, by TILE_BYTES, fewer where programs would have none."""
    T, H = shape
    each = triton.cdiv(T, size)
    most = max(TILE_BYTES // (size * H * dtype.itemsize), 1)
    height = tile or max(min(most, triton.cdiv(each, world.num_sms)), 1)
    unit = math.gcd(H, 16 // dtype.itemsize)
    cols = min(triton.next_power_of_2(max(H, 128)), TILE_ELEMENTS)
    block = min(TILE_ELEMENTS // cols, triton.next_power_of_2(height))
    turns = triton.cdiv(each, height)
    room = triton.cdiv(height * max(H, 8), 64) * 64  # 8: elements of fp8 and a scale of a row fit, too
    apart, step = (each, height) if owned else (height, size * height)
    constants = map(tl.constexpr, (unit, height, block, cols, cols >= H))
    return Rows(T, H // unit, apart, step, each if owned else T, turns, room, *constants), num_programs(world, turns)


class Space(NamedTuple):
    """Where tiles and answers arrive."""

    inbox: SymmetricTensor  # (2, size - 1, programs, 2, room) on every rank; rank + d stores [:, d - 1]: x, and answers
    counters: SymmetricTensor  # (programs, size); [p, r]: signals that program p of rank r has ever sent


def space(world: World, programs: int, room: int, dtype: torch.dtype) -> Space:
    """Made once for each grid and room. Not reduce_scatter's, which stores x where the last answers may lie."""

    def make() -> Space:
        shape = 2, max(world.size - 1, 1), programs, 2, room
        inbox = empty(*shape, dtype=dtype, name="kernels.row_tiles", world=world)
        return Space(inbox, signals(programs * world.size, name="kernels.row_tiles sent", world=world))

    return world.keep(("pkt.kernels", "row_tiles", programs, room, dtype), make)


# ------------------------------------------------------------------------------------------------------------- device
@triton.jit
def first(owner, turn, p):
    """The first row of a tile."""
    return tl.cast(owner * p.apart + turn * p.step, tl.int64)


@triton.jit
def count(owner, turn, p):
    """Rows of a tile; 0 of a turn that does not exist."""
    end = tl.minimum(p.T, owner * p.apart + p.span)
    found = tl.minimum(tl.maximum(end - (owner * p.apart + turn * p.step), 0), p.ROWS)
    return tl.where((turn >= 0) & (turn < p.turns), found, 0)


@triton.jit
def place(inbox_ptr, sent, distance, answer, p, world):
    """Where what rank + `distance` sends with a signal is: the x of signal `sent`, or the answers to the tile that came
    with it."""
    slot = tl.cast(sent & 1, tl.int64) * (world.size - 1) + (distance - 1)
    return inbox_ptr + ((slot * tl.num_programs(0) + tl.program_id(0)) * 2 + answer) * p.room


@triton.jit
def send(x_ptr, inbox_ptr, sent, turn, p, world, BLOCK: tl.constexpr):
    """Store my x of every other owner's tile into its inbox."""
    rank = tl.cast(world.rank, tl.int32)
    for i in tl.static_range(1, world.size):
        peer = (rank + i) % world.size
        elements = count(peer, turn, p) * p.units * p.UNIT
        of = x_ptr + first(peer, turn, p) * (p.units * p.UNIT)
        to = place(inbox_ptr, sent, world.size - i, 0, p, world)  # to the peer, I am rank + size - i
        for begin in range(0, elements, BLOCK):
            offs = begin + tl.arange(0, BLOCK)
            pl.put(dst=to + offs, src=of + offs, peer=peer, world=world, mask=offs < elements)


@triton.jit
def sums(x_ptr, inbox_ptr, sent, row, place_in_tile, col, inside, p, world):
    """The ranks' x of some rows of my tile, fp32, in the order rank, rank + 1, ... row: of x; place_in_tile: of the row
    in the tile, in elements; both (rows, 1); col: (1, columns)."""
    total = tl.load(x_ptr + row * (p.units * p.UNIT) + col, mask=inside, other=0).to(tl.float32)
    for i in tl.static_range(1, world.size):
        came = place(inbox_ptr, sent, i, 0, p, world) + place_in_tile + col
        total += tl.load(came, mask=inside, other=0).to(tl.float32)
    return total
