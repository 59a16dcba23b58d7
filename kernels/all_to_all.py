"""All-to-all: every rank sends each rank another part of `x`, and keeps what the ranks sent in the layout of the whole.

Axis `scatter` of x is split among the ranks, and what they sent is put together along axis `gather`. 0 and 0 is the
plain all-to-all. For attention with the sequence sharded (Ulysses) x is (B, S, H, D): scatter=2, gather=1 goes from
my part of the sequence, all heads, to all of the sequence, my heads; scatter=1, gather=2 goes back.

push: each rank stores its parts into the ranks' `out`. pull: each rank loads its parts from the ranks' `x`.
copy: push by the copy engines, a copy a part (see _copies): for parts of many megabytes.
low_latency: push in words of 12 bytes of data and 4 of flag, see _low_latency: no barrier, a third more bytes, and no
    tensor need be symmetric. For small tensors, of elements of 16 or 32 bits.

In the others one pass with no staging: (W - 1) / W * n * itemsize bytes leave and enter each rank, each run (see
_runs) straight to its place. One kernel pushes and pulls, because a part is a matrix of runs on both sides and only the
strides between its rows differ. Programs that work at the same time have different peers. Two barriers of the programs
of one index on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from .all_gather import ANYWHERE, DTYPES, FLAGGED, MODES, Mode, check_copied, chosen
from .shared import common as _common
from .shared import copies as _copies
from .shared import flagged as _low_latency
from .shared import runs as _runs

CALL = "all_to_all"

COPIED_BYTES = 256 << 20
"""Least x for which mode None takes copy. On 4 x H200 it takes 1.06 ms for 512 MiB and 4.14 for 2 GiB, push 1.14 and
4.52; for 128 MiB 0.292 and 0.295. In a captured graph of 512 MiB it took 1.07 in one run and 1.22 in another."""


def reference(inputs: Sequence[torch.Tensor], rank: int, scatter: int = 0, gather: int = 0) -> torch.Tensor:
    """What `rank` gets from the ranks' `x`."""
    return torch.cat([x.chunk(len(inputs), scatter)[rank] for x in inputs], gather)


@triton.jit
def all_to_all_kernel(
    x_ptr,  # (rows / together_x, size, together_x, run) on every rank; [:, r] is for rank r
    out_ptr,  # (rows / together_out, size, together_out, run) on every rank; [:, r] is from rank r
    bar_ptr,  # int32 (programs,) on every rank
    part,  # Runs
    together_x,
    together_out,
    world,
    PUSH: tl.constexpr,
):
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    pl.barrier(bar_ptr + pid, world)  # publish: every rank's x is complete, and its `out` free
    for t in range(pid, part.tiles * world.size, tl.num_programs(0)):
        peer = (rank + 1 + t % world.size) % world.size
        source, target = (rank, peer) if PUSH else (peer, rank)
        row, col, inside = _runs.tile(t // world.size, part)
        sent = x_ptr + _runs.stacked(row, col, part, target, world.size, together_x)
        got = out_ptr + _runs.stacked(row, col, part, source, world.size, together_out)
        pl.copy(got, sent, target, source, world, mask=inside)
    pl.barrier(bar_ptr + pid, world)  # publish: this program's tiles are there; before overwrite: and read


def all_to_all(
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    scatter: int = 0,
    gather: int = 0,
    mode: Mode | None = None,
    block: int | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """Part `rank` along axis `scatter` of the ranks' `x`, one after the other along axis `gather`. Collective.

    x: contiguous, of any number of dimensions, its axis `scatter` a multiple of size; the same shape and dtype on every
    rank. out: x's shape with axis `scatter` divided by size and then axis `gather` times size, contiguous, of x's
    dtype, apart from x; a new tensor where None. mode "push" and "copy" need a symmetric `out`, "pull" a symmetric `x`,
    "low_latency" elements of 16 or 32 bits; None takes that as far as `_low_latency.few_of_parts` goes, where one of
    the two is symmetric, else push where `out` is, and copy from COPIED_BYTES of it on unless a block is given. block:
    elements a program moves at a time, a power of two; none with "copy". Of symmetric memory low_latency keeps at most
    8 / 3 times x's bytes, rounded up to a power of two, each power once and with all_gather; the others nothing for
    data. Returns `out`, complete; `x` may be overwritten at once. Raises NotSymmetric, ShapeError, DtypeError,
    CollectiveMismatch.
    """
    world = _common.world_of(CALL, world, x, out)
    return _common.planned(CALL, _plan, world, (x, out), (scatter, gather, mode, block), out)


def _plan(
    world: World, x: torch.Tensor, out: torch.Tensor | None, scatter: int, gather: int, mode: str | None,
    block: int | None,
) -> _common.Launch:  # fmt: skip
    _common.check_tensor(CALL, "x", x, world)
    mode = mode or _chosen(x, out, block, world)
    _common.check_choice(CALL, "mode", mode, MODES, world)
    _common.check_block(CALL, block, world)
    check_copied(CALL, mode, block, world)
    dtypes = FLAGGED if mode == "low_latency" else DTYPES
    _common.check_tensor(CALL, "x", x, world, dtypes=dtypes, peers=mode == "pull")
    scatter = _runs.axis(CALL, "scatter", scatter, x.shape, world)
    gather = _runs.axis(CALL, "gather", gather, x.shape, world)
    sent = _runs.share(CALL, "x", scatter, x.shape, world)
    shape = (*sent[:gather], world.size * sent[gather], *sent[gather + 1 :])
    fresh = _common.fresh(shape, x.dtype, world)
    spread = mode not in ANYWHERE
    if out is None and not spread:
        out = fresh()
    out = _common.check_tensor(CALL, "out", out, world, shape=shape, dtype=x.dtype, peers=spread)
    _common.check_apart(CALL, x, out, world)
    pulled, pushed = x if mode == "pull" else _common.anywhere(x), out if spread else None
    _common.check_agreed(CALL, world, x=pulled, out=pushed, scatter=scatter, gather=gather, mode=mode, block=block)
    if x.numel() == 0:
        return lambda x, out: fresh() if out is None else out
    # The part's share of the later axis and all behind it is a run in both tensors. The tensor that is cut at the
    # earlier axis has a part's runs from there on in a row.
    rows, run = _runs.around(sent, max(scatter, gather))
    together = math.prod(sent[min(scatter, gather) : max(scatter, gather)])
    together_x, together_out = (together, 1) if scatter < gather else (1, together)
    if mode == "copy":
        return _copied(world, rows, run, together_x, together_out, x.dtype.itemsize)
    if mode == "low_latency":
        flagged = _low_latency.exchange_launch(world, x, together_x * run, together_out * run, block)
        return lambda x, out: flagged(x, fresh() if out is None else out)
    part = _runs.runs(rows, run, x.dtype, block)
    grid = (_common.num_programs(world, part.tiles * world.size),)
    bar, push = _common.barrier_counters(world), mode == "push"

    start = cooperative_launch(world, all_to_all_kernel, grid, **_common.COPY_OPTIONS)

    def launch(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        out = fresh() if out is None else out
        start(x, out, bar, part, together_x, together_out, world.device, push)
        return out

    return launch


def _chosen(x: torch.Tensor, out: torch.Tensor | None, block: int | None, world: World) -> Mode:
    """What mode None takes. One of the two has to be symmetric, as it must where there is more to move."""
    if isinstance(x, SymmetricTensor) or isinstance(out, SymmetricTensor):
        if x.dtype in FLAGGED and _low_latency.few_of_parts(x.nbytes, world.size):
            return "low_latency"
    return chosen(out, block, COPIED_BYTES)


def _copied(world: World, rows: int, run: int, together_x: int, together_out: int, itemsize: int) -> _common.Launch:
    together = together_x * together_out  # one of them is 1

    def parts(before: int) -> torch.Tensor:
        """(size, rows / together, together, run) of x or out, of which the ranks' parts have `before` runs in a row."""
        whole = _copies.layout(rows // before, world.size, before, run).movedim(1, 0)
        return whole if before == together else whole.view(world.size, rows // together, together, run)

    sent, got = parts(together_x), parts(together_out)
    peers = [(world.rank + d) % world.size for d in range(1, world.size + 1)]
    moved = [box for p in peers for box in _copies.boxes(p, got[world.rank], sent[p], itemsize)]
    exchange = _copies.exchange_launch(world, moved)

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        exchange(x, out)
        return out

    return launch
