"""Which tasks a program of the Gluon kernels takes, and which blocks of keys a task looks at."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared.gluon_aggregate import aggregate
from ..shared.tile_attention import blocks, interval
from .kernel import num_pieces, piece, visit


@gluon.jit
def turn(k):
    """This program's k-th task. Every second round of tasks goes to the programs in the opposite order: else the first
    ones would have the longest tasks in every round."""
    programs = gl.num_programs(0)
    return k * programs + gl.where(k % 2 == 1, programs - 1 - gl.program_id(0), gl.program_id(0))


@gluon.jit
def turns(tasks):
    """How many of so many tasks this program has."""
    k = tasks // gl.num_programs(0)
    return k + gl.where(turn(k) < tasks, 1, 0)


@aggregate
class Block:
    """A block of keys that a task looks at, by their positions. Those from `end` on are not seen. Blocks from
    clear_from on, up to clear_to, need no mask."""

    step: gl.tensor  # of `visit`: whose chunk it is of
    at: gl.tensor  # the first key
    end: gl.tensor
    clear_from: gl.tensor
    clear_to: gl.tensor
    here: gl.tensor  # keys from here on have not come, or are padding
    shift: gl.tensor  # to the row of a key from its position
    chunk: gl.tensor  # of its rank's
    distance: gl.tensor  # to its rank, which is rank - distance


@aggregate
class Task:
    """The queries of a task, and the keys that they see, as `tile_attention.sight` has them."""

    b: gl.tensor
    h: gl.tensor
    row: gl.tensor  # the first query's
    rows: gl.tensor
    position: gl.tensor  # the first query's
    least: gl.tensor
    most: gl.tensor
    all_from: gl.tensor
    all_to: gl.tensor
    padding: gl.tensor  # keys from here on may be padding
    distance: gl.tensor  # to the rank of the queries, which is rank - distance


@aggregate
class Heads:
    """Of a rank that attends with the queries of all ranks, of some heads: as in `ulysses_attention`."""

    GROUP: gl.constexpr  # heads of queries that come together
    REPEATS: gl.constexpr  # heads of keys in a row that are one head of `k`


@aggregate
class Job:
    """What all roles know."""

    p: gl.tuple  # Attention
    together: gl.tensor  # heads of all batches that programs work on at a time
    rank: gl.tensor
    epoch: gl.tensor
    world: gl.tuple
    heads: gl.tuple  # Heads; None: this rank attends with its own queries, of all heads

    @gluon.jit
    def tiles(self):
        """Of queries of a head."""
        tiles = num_pieces(self.p, self.p.BLOCK_M)
        if self.heads is not None:
            tiles *= self.world.size
        return tiles

    @gluon.jit
    def tasks(self):
        return self.p.B * self.p.H * self.tiles()

    @gluon.jit
    def sees(self, position, inside):
        """The keys that queries at these positions see, [low, high). inside: which of the queries there are."""
        total = self.world.size * self.p.S
        return interval(position, position, total, inside, self.p.left, self.p.right, self.p)

    @gluon.jit
    def task(self, t):
        """Task t. Of some heads at a time all tasks come, those with the most keys under a causal mask first."""
        tiles = self.tiles()
        begin = t // (self.together * tiles) * self.together
        heads = gl.minimum(self.p.B * self.p.H - begin, self.together)
        r = t % (self.together * tiles)
        head = begin + r % heads
        tile = tiles - 1 - r // heads
        source = self.rank
        distance = 0
        if self.heads is not None:
            each = num_pieces(self.p, self.p.BLOCK_M)
            source = tile // each
            tile = tile % each
            distance = (self.rank - source + self.world.size) % self.world.size
        row, rows, position = piece(tile, source, self.p, self.world, self.p.BLOCK_M)
        # What a query sees ascends with its row, up to padding.
        last = gl.maximum(gl.minimum(rows, self.p.length - position), 1) - 1
        least, all_to = self.sees(position, rows > 0)
        all_from, most = self.sees(position + last, rows > 0)
        # Each role looks at one block or more. Queries that see no key look at the first one here, which is masked.
        _row, _rows, first = piece(0, self.rank, self.p, self.world, self.p.BLOCK_M)
        blind = (rows <= 0) | (least >= most)
        padding = gl.cast(self.p.length, gl.int32)
        if self.p.spans_ptr is not None:  # behind the last document
            padding = gl.where(blind, 0, most)
        least = gl.where(blind, first, least)
        most = gl.where(blind, first + 1, most)
        all_to = gl.where(blind | (position + rows > self.p.length), 0, all_to)
        return Task(head // self.p.H, head % self.p.H, row, rows, position, least, most, all_from, all_to, padding,
                    distance)  # fmt: skip

    @gluon.jit
    def column(self, task, block):
        """Where the head of keys that the task looks at begins in the rows of the block."""
        head = task.h // (self.p.H // self.p.KV)
        if self.heads is not None:
            if block.distance == 0:  # own rows have all heads
                head = (self.rank * self.p.KV + head) // self.heads.REPEATS
        return head * self.p.D

    @gluon.jit
    def steps(self):
        """Of `visit`."""
        return num_pieces(self.p, self.p.CHUNK) * self.world.size

    @gluon.jit
    def seek(self, step, task):
        """The first block of keys that the task looks at from a step of `visit` on: from 0 on there is one. Behind the
        last block the step is `steps`."""
        step = gl.cast(step, gl.int32)
        chunk, distance, first, count, start, begin, end, full, unmasked = self.looked_at(step, task)
        while (begin >= end) & (step < self.steps()):
            step += 1
            chunk, distance, first, count, start, begin, end, full, unmasked = self.looked_at(step, task)
        clear = start + begin + full * self.p.BLOCK_N
        clear_to = clear + unmasked * self.p.BLOCK_N
        here = gl.minimum(start + count, task.padding)
        return Block(step, start + begin, start + end, clear, clear_to, here, first - start, chunk, distance)

    @gluon.jit
    def looked_at(self, step, task):
        """What the task looks at in a step: a chunk of a rank as from `visit`, and its blocks as from `blocks`."""
        chunk, distance, first, count, start = visit(step, self.rank, self.p, self.world)
        begin, end, full, unmasked, _ = blocks(
            start, count, task.least, task.most, task.all_from, task.all_to, self.p.BLOCK_N
        )  # fmt: skip
        return chunk, distance, first, count, start, begin, end, full, unmasked

    @gluon.jit
    def kept(self, block):
        """How many of the block's rows are kept. Those behind have not come or are padding, so they may be NaN, for
        which weights of 0 are no remedy. All are kept if no row follows on its rank: there TMA finds zeros."""
        rows = block.here - block.at
        cut = (rows < self.p.BLOCK_N) & (block.here + block.shift < self.p.S)
        return gl.where(cut, rows, self.p.BLOCK_N)

    @gluon.jit
    def next(self, block, task):
        """The block behind this one."""
        at = block.at + self.p.BLOCK_N
        if at < block.end:
            block = Block(block.step, at, block.end, block.clear_from, block.clear_to, block.here, block.shift,
                          block.chunk, block.distance)  # fmt: skip
        else:
            block = self.seek(block.step + 1, task)
        return block
