"""What the Gluon kernel of flash decode works on: tiles of keys, of which each program takes as many as any other."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared.gluon_aggregate import aggregate

ROWS = gl.constexpr(64)
"""Of a unit."""
KEYS = gl.constexpr(64)
"""Of a tile."""


@aggregate
class Share:
    """The tiles of a program, which are those of `attention.share_of`."""

    sequence: gl.tensor  # where it begins
    block: gl.tensor  # of rows: the unit is number sequence * BLOCKS + block
    tile: gl.tensor  # of the unit's
    count: gl.tensor


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def share_of(p):
    """This program's share."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [gl.num_warps(), 1], [1, 0])
    b = gl.arange(0, p.BATCH, layout=gl.SliceLayout(1, LAYOUT))
    s = gl.arange(0, p.TOKENS, layout=gl.SliceLayout(0, LAYOUT))
    there = (b < p.B)[:, None] & (s < p.SQ)[None, :]
    lens = gl.load(p.lens_ptr + (b[:, None] * p.SQ + s[None, :]), mask=there, other=0)
    longest = gl.minimum(gl.maximum(gl.max(lens, 1), 0), p.most)
    tiles = gl.where(b < p.B, gl.maximum(gl.cdiv(longest, KEYS), 1), 0)
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tiles = gl.convert_layout(tiles, FLAT)
    b = gl.arange(0, p.BATCH, layout=FLAT)
    total = gl.sum(tiles, 0) * p.BLOCKS
    most = gl.maximum(gl.cdiv(total, gl.num_programs(0)), 1)
    first = gl.program_id(0) * most
    before = gl.associative_scan(tiles, 0, _add) * p.BLOCKS <= first
    sequence = gl.sum(gl.where(before, 1, 0), 0)
    begin = gl.sum(gl.where(b < sequence, tiles, 0), 0) * p.BLOCKS
    of_unit = gl.maximum(gl.sum(gl.where(b == sequence, tiles, 0), 0), 1)
    return Share(sequence, (first - begin) // of_unit, (first - begin) % of_unit, gl.minimum(most, total - first))


@aggregate
class Unit:
    """What a program does next: tiles of a unit."""

    sequence: gl.tensor
    block: gl.tensor
    tile: gl.tensor  # the first
    left: gl.tensor  # tiles that the program has, of this unit and others
    keys: gl.tensor  # the most that a query token of the sequence sees
    least: gl.tensor  # the fewest that one sees

    @gluon.jit
    def end(self):
        """The number behind the program's last tile of the unit. A unit without keys has a tile that nobody reads."""
        return gl.minimum(self.tile + self.left, gl.cdiv(self.keys, KEYS))

    @gluon.jit
    def next(self, p):
        """The program's next unit, if tiles are left."""
        count = gl.maximum(gl.cdiv(self.keys, KEYS), 1)
        block = (self.block + 1) % p.BLOCKS
        sequence = gl.where(block == 0, self.sequence + 1, self.sequence)
        return unit_of(sequence, block, gl.cast(0, gl.int32), self.left - (count - self.tile), p)

    @gluon.jit
    def row(self, p):
        """The number of its first row among all rows of the result."""
        return self.sequence * (p.SQ * p.HEADS) + self.block * ROWS

    @gluon.jit
    def part(self, p):
        """The number of the program's part of it among all parts, see `device.merge_kernel`."""
        return gl.program_id(0) + self.sequence * p.BLOCKS + self.block


@gluon.jit
def unit_of(sequence, block, tile, left, p):
    """The unit of a block of a sequence."""
    most = 0
    least = p.most
    if left > 0:
        for s in range(p.SQ):
            seen = gl.load(p.lens_ptr + (sequence * p.SQ + s))
            most = gl.maximum(most, seen)
            least = gl.minimum(least, seen)
    return Unit(sequence, block, tile, left, gl.minimum(most, p.most), least)


@gluon.jit
def first_unit(share, p):
    """The first unit of a program's share."""
    return unit_of(share.sequence, share.block, share.tile, share.count, p)
