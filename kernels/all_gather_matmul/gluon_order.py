"""Tiles of the Gluon kernel in `gluon`: which ones a program takes, and where their rows of A come from.

- In the first `rounds_alone` rounds of tiles the programs that do not push compute alone.
- After `whole_rounds` rounds, or when fewer tiles are left than programs, each tile is cut in PIECES, so that all
  programs have a part of the last round.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared.gluon_aggregate import aggregate
from ..shared.gluon_warps import first_tile, grouped


@aggregate
class Order:
    """Which tile a number stands for, and where its rows of A come from."""

    rank: gl.tensor
    m: gl.tensor  # rows of a shard
    num_m: gl.tensor  # row blocks of a shard
    num_n: gl.tensor
    K: gl.tensor
    push_rows: gl.tensor  # row blocks that are pushed, or copied, and computed together
    SIZE: gl.constexpr
    GROUP: gl.constexpr
    CHUNK: gl.constexpr  # columns of A
    COPIED: gl.constexpr
    GATHERED: gl.constexpr

    @gluon.jit
    def chunks(self):
        """How many chunks a row block has."""
        return gl.cdiv(self.K, self.CHUNK)

    @gluon.jit
    def tile(self, t):
        """Tile t: (source, row block, column, whether it is of the own shard). The own shard comes first. Then come
        push_rows row blocks of every peer at a time, in the order of their arrival: they are pushed to all peers at
        once, or copied to one after the other."""
        own = t < self.num_m * self.num_n
        own_i, own_j = grouped(gl.minimum(t, self.num_m * self.num_n - 1), self.num_m, self.num_n, self.GROUP)
        others: gl.constexpr = max(self.SIZE - 1, 1)
        q = gl.maximum(t - self.num_m * self.num_n, 0)
        tiles = others * self.num_n * self.push_rows
        first = (q // tiles) * self.push_rows
        rows = gl.minimum(self.num_m - first, self.push_rows)
        if self.COPIED:
            turn = (q % tiles) // (rows * self.num_n)
            source = gl.where(own, self.rank, (self.rank + others - turn) % self.SIZE)
            i, j = grouped((q % tiles) % (rows * self.num_n), rows, self.num_n, self.GROUP)
        else:
            cells = rows * others
            source = gl.where(own, self.rank, (self.rank + 1 + (q % tiles) % cells % others) % self.SIZE)
            i = (q % tiles) % cells // others
            j = (q % tiles) // cells
        i = gl.where(own, own_i, first + i)
        j = gl.where(own, own_j, j)
        return source, i, j, own

    @gluon.jit
    def task(self, t):
        """Task t of pushing: (row block, chunk). push_rows row blocks are pushed at a time, chunk by chunk."""
        first = (t // (self.push_rows * self.chunks())) * self.push_rows
        rows = gl.minimum(self.num_m - first, self.push_rows)
        t = t % (self.push_rows * self.chunks())
        return first + t % rows, t // rows

    @gluon.jit
    def counter(self, source, i):
        """The place of the counter for the first chunk of row block i of a source's shard."""
        together = self.push_rows if self.COPIED else 1
        return source * (gl.cdiv(self.num_m, together) * self.chunks()) + i // together * self.chunks()


@aggregate
class Rounds:
    """This program's share of tiles of one width, in rounds of one tile a program. The programs that push are left out
    of the first `alone` rounds, in which their places are no tiles."""

    begin: gl.tensor  # the first place: round * num_programs + first_tile()
    stop: gl.tensor  # behind the last place
    offset: gl.tensor  # the tile at place 0
    alone: gl.tensor
    num_comm: gl.tensor  # programs that push
    order: Order
    PIECES: gl.constexpr  # that each tile is cut in

    @gluon.jit
    def first(self):
        return self.begin

    @gluon.jit
    def end(self):
        return self.stop

    @gluon.jit
    def tile(self, place):
        """The tile at a place, as order.tile has it; its column counts tiles of this width."""
        place -= gl.minimum(place // gl.num_programs(0), self.alone) * self.num_comm
        source, i, j, own = self.order.tile(self.offset + place // self.PIECES)
        return source, i, j * self.PIECES + place % self.PIECES, own

    @gluon.jit
    def column(self, place):
        """See `consume`: this rank finishes every tile."""
        _, _, j, _ = self.tile(place)
        return 2 * j + 1

    @gluon.jit
    def rows(self, place):
        """See `consume`: a part of A is a shard."""
        source, i, _, _ = self.tile(place)
        return source, i


@gluon.jit
def deal(num_comm, rounds_alone, whole_rounds, order, PIECES: gl.constexpr):
    """This program's Rounds of whole tiles, at most `whole_rounds` of them, and those of the other tiles, each cut in
    PIECES. The programs that push are left out of the first `rounds_alone` rounds."""
    tiles = order.SIZE * order.num_m * order.num_n
    programs = gl.num_programs(0)
    computing = programs - num_comm
    alone = gl.minimum(gl.minimum(rounds_alone, whole_rounds), tiles // gl.maximum(computing, 1))
    left = tiles - alone * computing
    joined = gl.minimum(whole_rounds - alone, left // programs)
    cut = left - joined * programs if PIECES > 1 else 0
    late = gl.minimum(gl.maximum(rounds_alone - alone - joined, 0), cut * PIECES // gl.maximum(computing, 1))
    pushes = gl.program_id(0) < num_comm
    begin = gl.where(pushes, alone * programs, 0) + first_tile()
    begin_cut = gl.where(pushes, late * programs, 0) + first_tile()
    whole = Rounds(begin, tiles - cut + alone * num_comm, 0, alone, num_comm, order, 1)
    return whole, Rounds(begin_cut, cut * PIECES + late * num_comm, tiles - cut, late, num_comm, order, PIECES)
