"""What travels between the ranks: inboxes, counters, and copies by the copy engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch

from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.tensor import SymmetricTensor

from ..declaration import Call
from ..shared import copies
from .planning import CALL, Plan, needs_of


def windows(call: Call, name: str = CALL, of: tuple[str, str] = ("keys", "values")) -> list[SymmetricTensor]:
    """Inboxes of keys and values, (size - 1, b, s, g, d) each, for all calls of `name` with such operands; those of
    "queries" and "dout" have h heads. On several ranks. Collective."""
    world, heads = call.world, call["g" if of[0] == "keys" else "h"]
    shape = (world.size - 1, call["b"], call["s"], heads, call["d"])

    def make() -> list[SymmetricTensor]:
        return [empty(*shape, dtype=call.dtype, name=f"{name}.{one}", world=world) for one in of]

    return world.keep((name, "windows", of, *shape, call.dtype), make)


def pushing(
    call: Call, plan: Plan, needs: Sequence[Sequence[bool]], inboxes: Sequence[SymmetricTensor],
    counters: SymmetricTensor, side: copies.Side, first: int = 0,
    ahead: Callable[[slice, int], copies.Send] | None = None,
) -> Callable[..., torch.cuda.Event | None]:  # fmt: skip
    """push(x, y), on `side` behind the current stream: for each chunk that a peer needs, copy engines move its rows of
    two tensors, of `plan.joined` batches at a time, and tell the peer. Returns what to `side.reach`.

    needs: as of `Plan`. inboxes: as of `windows`. counters: those of the chunks come from `first` on, the number of the
    launch comes last. ahead(batches, d): what moves these of a third tensor, push(x, y, z), to rank + d before their
    chunks.
    """
    world, b, s = call.world, call["b"], call["s"]
    rank, size = world.rank, world.size
    run = inboxes[0].shape[3] * inboxes[0].shape[4]
    shard, theirs = copies.layout(b, s * run), copies.layout(size - 1, b, s * run)
    sends: list[tuple[int, copies.Send]] = []
    for i, (c, piece), d in product(range(0, b, plan.joined), enumerate(plan.pieces), range(1, size)):
        peer, at = (rank + d) % size, first + ((d - 1) * b + i) * len(plan.pieces) + c
        if needs[d - 1][c]:
            batches, here = slice(i, i + plan.joined), slice(piece.row * run, (piece.row + piece.rows) * run)
            boxes = copies.boxes(peer, theirs[d - 1, batches, here], shard[batches, here], call.dtype.itemsize)
            if ahead is not None and not any(needs[d - 1][:c]):
                sends.append((2, ahead(batches, d)))
            sends += enumerate(copies.sending(world, boxes, inbox) for inbox in inboxes)
            sends.append((-1, copies.telling(world, peer, counters, at)))
    this = counters[-1:].plain()

    def push(*tensors: torch.Tensor) -> torch.cuda.Event | None:
        given = (*tensors, this)
        with side.behind() as stream:
            for of, send in sends:
                send(given[of], stream)
            return side.mark()

    return push


class Exchange:
    """What the backward pass moves on several ranks: inboxes, counters, and who needs which chunks. Collective."""

    def __init__(self, call: Call, plan: Plan, places: int, words: int, *key: int) -> None:
        """places: of the numbers of a head, see `Backward.rows_ptr`. words: counters behind those of chunks. key: calls
        with another one have other counters."""
        self.world = world = call.world
        b, h = call["b"], call["h"]
        others, packed = world.size - 1, call["cu_seqlens"] is not None
        self.first = others * b * len(plan.pieces)
        """Of the counters of queries."""
        self.needs = plan.needs, needs_of(call, plan.pieces, plan.view.turned)
        count = 2 * self.first + words
        # Documents may hide chunks that a causal mask or a window does not.
        self.counters = world.keep(
            (call.name, "ready", count, plan.chunk, packed, *key),
            lambda: signals(count, unwaited=packed, name=f"{call.name}.ready", world=world),
        )
        self.keys = windows(call, call.name)
        self.queries = windows(call, call.name, ("queries", "dout"))
        shape = others, 2, b, h, places
        self.rows = world.keep(
            (call.name, "rows", *shape),
            lambda: empty(*shape, dtype=torch.float32, name=f"{call.name}.rows", world=world),
        )

    @property
    def inboxes(self) -> dict[str, SymmetricTensor]:
        """Those of `Backward`."""
        names = ("k", "v", "q", "dout", "rows")
        return {f"{name}_inbox_ptr": x for name, x in zip(names, (*self.keys, *self.queries, self.rows), strict=True)}

    def numbers_to(self, batches: slice, distance: int) -> copies.Send:
        """What moves the numbers of these batches' rows to rank + distance."""
        others, two, b, h, places = self.rows.shape
        mine, theirs = copies.layout(two, b, h * places), copies.layout(others, two, b, h * places)
        peer = (self.world.rank + distance) % self.world.size
        place, numbers = theirs[distance - 1, :, batches].flatten(1), mine[:, batches].flatten(1)
        boxes = copies.boxes(peer, place, numbers, self.rows.element_size())
        return copies.sending(self.world, boxes, self.rows)
