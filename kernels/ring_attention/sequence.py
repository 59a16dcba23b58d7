"""Where the rows of a sequence that is split among ranks stand, and which of them attend to which.

A rank holds `rows` rows of a sequence of size * rows positions, in one part or two whose positions are consecutive:

contiguous: rank r holds part r of `size` parts.
zigzag: the sequence is cut in 2 * size chunks; rank r holds chunks r and 2 * size - 1 - r. With a causal mask all ranks
    then have the same work. Where `rows` is odd the first `size` chunks have a row more than the others.

A query at position p attends to the keys of one interval, [p - left, p + right], inside the sequence and its document.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from pkt.errors import DtypeError, ShapeError, Unsupported
from pkt.runtime.world import World
from pkt.wording import found_text, value_text

from ..agreement import world_of

Layout = Literal["contiguous", "zigzag"]
LAYOUTS = ("contiguous", "zigzag")


class Part(NamedTuple):
    """Consecutive rows of a rank whose positions are consecutive."""

    row: int
    rows: int
    position: int


class View(NamedTuple):
    """Which keys a query at position p sees: from p - left to p + right, both below `length`, if p is, too."""

    left: int
    right: int
    length: int

    @property
    def turned(self) -> View:
        """The queries that see a key."""
        return View(self.right, self.left, self.length)


def parts(rows: int, layout: str, rank: int, size: int) -> list[Part]:
    """The parts that `rank` holds."""
    if layout == "contiguous":
        return [Part(0, rows, rank * rows)]
    first = (rows + 1) // 2
    second = rows - first
    return [Part(0, first, rank * first), Part(first, second, size * first + (size - 1 - rank) * second)]


def positions(rows: int, layout: str, rank: int, size: int) -> torch.Tensor:
    """The position of each row that `rank` holds, int64 (rows,), on the CPU."""
    held = parts(rows, layout, rank, size)
    return torch.cat([torch.arange(p.position, p.position + p.rows, device="cpu") for p in held])


def pieces(rows: int, layout: str, rank: int, size: int, most: int) -> list[Part]:
    """The parts of `rank`, cut into pieces of `most` rows. Each part has as many pieces as the first; the last may be
    empty."""
    held = parts(rows, layout, rank, size)
    starts = range(0, held[0].rows, most)
    return [Part(p.row + at, min(most, max(p.rows - at, 0)), p.position + at) for p in held for at in starts]


def needed(piece: Part, view: View, rows: int, layout: str, rank: int, size: int) -> bool:
    """Whether a query of `rank` sees a key of `piece`, documents aside."""
    for part in parts(rows, layout, rank, size):
        last = min(part.position + part.rows, view.length) - 1
        if last < part.position:
            continue
        low, high = max(part.position - view.left, 0), min(last + view.right, view.length - 1)
        if low < piece.position + piece.rows and piece.position <= high and piece.rows:
            return True
    return False


def spans(cu_seqlens: torch.Tensor, at: torch.Tensor, total: int) -> torch.Tensor:
    """The document of each position: its first position and the one behind it, int32 (2, n). Where there is none the
    first is not less than the second. Neither descends along the sequence. cu_seqlens: int32 (documents + 1,). at:
    (n,). On the device, so that a replayed graph may have others."""
    document = torch.searchsorted(cu_seqlens, at, right=True)  # 0 and documents + 1: before and behind all of them
    starts = torch.cat((cu_seqlens[:1], cu_seqlens[:-1], cu_seqlens.new_full((1,), total)))
    return torch.stack((starts[document], cu_seqlens[document.clamp(max=len(cu_seqlens) - 1)])).int()


# ---------------------------------------------------------------------------------------------------- for users
def _checked(call: str, layout: str, dim: int, x: torch.Tensor, world: World | None) -> tuple[World, int]:
    world = world_of(call, world)
    if not isinstance(layout, str) or layout not in LAYOUTS:
        found = f"found layout {value_text(layout)}"
        raise Unsupported.here(f"rank {world.rank}: {call}", found, f"wanted one of {LAYOUTS}")
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        found = f"layout {x.layout}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise DtypeError.argument(call, "x", found, "a tensor that is dense", world.rank)
    dim = _integer(call, "dim", dim, world)
    if not -x.ndim <= dim < x.ndim:
        raise ShapeError.argument(call, "dim", dim, f"a dimension of {tuple(x.shape)}", world.rank)
    return world, dim % x.ndim


def _integer(call: str, name: str, value: Any, world: World) -> int:
    try:
        return operator.index(value)
    except TypeError:
        found = found_text(value)
        raise DtypeError.argument(call, name, found, "an integer", world.rank) from None


def sequence_positions(length: int, *, layout: Layout = "contiguous", world: World | None = None) -> torch.Tensor:
    """The positions of this rank's rows of a sequence, int64 (ceil(length / size),), on the world's device: what RoPE
    needs, and positional embeddings. Those from `length` on are padding.

    layout: "contiguous" or "zigzag", as of `pkt.ring_attention`. Raises DtypeError, ShapeError, Unsupported.
    """
    call = "pkt.sequence_positions"
    world, _ = _checked(call, layout, 0, torch.empty(0, device="meta"), world)
    if (length := _integer(call, "length", length, world)) < 0:
        raise ShapeError.argument(call, "length", length, "at least 0", world.rank)
    return positions(-(-length // world.size), layout, world.rank, world.size).to(world.torch_device)


def shard_sequence(
    x: torch.Tensor, dim: int = 1, *, layout: Layout = "contiguous", world: World | None = None
) -> torch.Tensor:
    """This rank's rows of `x`, along dimension `dim`: ceil(n / size) of n, zeros where they lie behind the end. A new
    tensor.

    layout: "contiguous" or "zigzag", as of `pkt.ring_attention`. Not collective. Raises DtypeError, ShapeError,
    Unsupported.
    """
    world, dim = _checked("pkt.shard_sequence", layout, dim, x, world)
    length = x.shape[dim]
    at = positions(-(-length // world.size), layout, world.rank, world.size).to(x.device)
    found = x.index_select(dim, at.clamp(max=max(length - 1, 0)))
    behind = (at >= length).view([-1 if d == dim else 1 for d in range(x.ndim)])
    return found.masked_fill_(behind, 0)  # nonzero() would make the host wait for a GPU


def unshard_sequence(
    x: torch.Tensor, dim: int = 1, *, length: int | None = None, layout: Layout = "contiguous",
    world: World | None = None,
) -> torch.Tensor:  # fmt: skip
    """The sequence in the order of its positions, of the ranks' rows one rank after the other along dimension `dim`, as
    `pkt.all_gather` returns them. A new tensor of `length` rows, of all where None.

    layout: that of the rows. Not collective. Raises DtypeError, ShapeError, Unsupported.
    """
    call = "pkt.unshard_sequence"
    world, dim = _checked(call, layout, dim, x, world)
    size, rows = world.size, x.shape[dim]
    if rows % size:
        wanted = f"dimension {dim} divisible by {size} ranks"
        raise ShapeError.argument(call, "x", tuple(x.shape), wanted, world.rank)
    if length is not None and not 0 <= _integer(call, "length", length, world) <= rows:
        raise ShapeError.argument(call, "length", length, f"from 0 to {rows}, the rows of x", world.rank)
    whole = gathered_order(rows // size, layout, size).to(x.device)
    return x.index_select(dim, whole[:length])


def gathered_order(rows: int, layout: str, size: int) -> torch.Tensor:
    """In rank-major rows, the index of each position, int64 (size * rows,)."""
    return torch.argsort(torch.cat([positions(rows, layout, rank, size) for rank in range(size)]))


def everywhere(shards: Sequence[torch.Tensor], layout: str, dim: int) -> torch.Tensor:
    """The whole sequence of all ranks' rows, by position."""
    whole = torch.cat(tuple(shards), dim)
    return whole.index_select(dim, gathered_order(shards[0].shape[dim], layout, len(shards)).to(whole.device))
