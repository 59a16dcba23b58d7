"""Shared memory of the Gluon kernels for blocks of rows, which a loader fills and consumers read."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from . import gluon_tma as tma
from .gluon_aggregate import aggregate
from .gluon_tma import viewed
from .gluon_warps import SWIZZLED, half_layout, itemsize, open_barriers, whole_rows


@aggregate
class Slots:
    """Shared memory for blocks of rows, which the loader fills in turn: block n is in slot n % STAGES."""

    room: gl.shared_memory_descriptor  # (STAGES, rows, D)
    full: gl.shared_memory_descriptor  # a barrier a slot: it has been filled
    empty: gl.shared_memory_descriptor  # a barrier a slot: it is free
    STAGES: gl.constexpr

    @gluon.jit
    def load(self, n, x, b, row, column):
        """Fill the slot of block n from (b, row, column) of x. Rows behind its last one are 0."""
        self.fill(n, x, b, row, column, self.filled(n))

    @gluon.jit
    def acquire(self, n):
        """The slot of block n, once it is free."""
        slot = n % self.STAGES
        mbarrier.wait(self.empty.index(slot), ((n // self.STAGES) & 1) ^ 1)
        return self.room.index(slot)

    @gluon.jit
    def filled(self, n):
        """The barrier that lets the slot of block n be taken."""
        return self.full.index(n % self.STAGES)

    @gluon.jit
    def fill(self, n, x, b, row, column, landed):
        """As `load`, with any barrier. Where it is not `filled`, `keep_first` lets the slot be taken."""
        room = self.acquire(n)
        ROWS: gl.constexpr = room.shape[0]
        COLUMNS: gl.constexpr = room.shape[1]
        mbarrier.expect(landed, ROWS * COLUMNS * itemsize(room.dtype))
        part = viewed(room, [1, ROWS, COLUMNS], x.layout)
        tma.async_load(x, [b, row, column], landed, part)

    @gluon.jit
    def keep_first(self, n, rows, landed, phase):
        """Set all but the first `rows` rows of block n to 0. landed: the barrier of `fill`, in `phase`."""
        mbarrier.wait(landed, phase)
        clear_behind(self.room.index(n % self.STAGES), rows)
        fence_async_shared()
        mbarrier.arrive(self.filled(n), count=1)

    @gluon.jit
    def take(self, n):
        """The slot of block n, once it has been filled."""
        slot = n % self.STAGES
        mbarrier.wait(self.full.index(slot), (n // self.STAGES) & 1)
        return self.room.index(slot)

    @gluon.jit
    def free(self, n):
        """Let the slot of block n go."""
        mbarrier.arrive(self.empty.index(n % self.STAGES), count=1)


@gluon.jit
def clear_behind(room, rows):
    """Set all but the first `rows` rows to 0, a few at a time. Rows lie in pieces of SWIZZLED columns."""
    ROWS: gl.constexpr = room.shape[0]
    EACH: gl.constexpr = min(8, ROWS)
    COLUMNS: gl.constexpr = min(SWIZZLED, room.shape[1])
    PIECES: gl.constexpr = room.shape[1] // COLUMNS
    LAYOUT: gl.constexpr = whole_rows(COLUMNS, room.dtype, gl.num_warps())
    LAID: gl.constexpr = half_layout(EACH, COLUMNS, room.dtype)
    parts = viewed(room, [PIECES * ROWS // EACH, EACH, COLUMNS], LAID)
    for i in range(gl.maximum(rows, 0) // EACH, ROWS // EACH):
        kept = i * EACH + gl.arange(0, EACH, layout=gl.SliceLayout(1, LAYOUT)) < rows
        for p in gl.static_range(PIECES):
            part = parts.index(p * (ROWS // EACH) + i)
            part.store(gl.where(kept[:, None], part.load(LAYOUT), 0.0))


@gluon.jit
def open_slots(dtype, STAGES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, READERS: gl.constexpr):
    """Empty slots for blocks that so many consumers read."""
    room = gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], half_layout(ROWS, COLUMNS, dtype))
    return Slots(room, open_barriers(STAGES), open_barriers(STAGES, READERS), STAGES)
