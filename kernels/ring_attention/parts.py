"""The form "parts": copy engines push keys and values, torch attends to one rank's after the other's, and a kernel
merges the results.

torch's attention takes rectangles of queries and keys, and triangles. Under a causal mask a rank's own keys are a
triangle, also in zigzag order, where positions ascend. Of the others in zigzag order all queries see the first half of
an earlier rank's keys, and the second half of the queries all keys of a later rank.

The backward pass sends keys and values once more. torch gets the whole result and its logarithms, so the gradients of
the rectangles add up. Those of keys and values go home in the operands' dtype, by the copy engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.launch.launch import beside_launch, cooperative_launch
from pkt.runtime.memory.factories import signals
from pkt.runtime.memory.tensor import SymmetricTensor

from ..declaration import Call, Launch
from ..shared import copies
from ..shared.torch_attention import Kernel, kernel_for
from .exact import view_of
from .exchange import windows
from .merge import merge_kernel
from .sequence import parts

ROWS = 32
"""Rows of a head that a program merges."""


class Rectangle(NamedTuple):
    """Queries of a rank, all from one on, and keys of a rank that these see. causal: of the same rank, up to their
    own."""

    queries: slice
    keys: slice
    causal: bool


def rectangle(rows: int, layout: str, causal: bool, rank: int, source: int) -> Rectangle | None:
    """What queries of `rank` see of the keys of `source`; None for nothing."""
    whole, first = slice(0, rows), parts(rows, layout, 0, 1)[0].rows
    if not causal or rank == source:
        return Rectangle(whole, whole, causal)
    if layout == "contiguous":
        return Rectangle(whole, whole, False) if source < rank else None
    if source < rank:
        return Rectangle(whole, slice(0, first), False)
    return Rectangle(slice(first, rows), whole, False) if first < rows else None


@triton.jit
def arrived_kernel(ready_ptr, number_ptr, world):
    """The keys and values of one rank are here, of the launch of this number."""
    pl.wait(ready_ptr, tl.load(number_ptr), world)


@triton.jit
def next_kernel(number_ptr):
    """Count this launch.

    The backward pass needs no barrier before it overwrites keys of the last call: a rank that has read these has sent
    their gradients behind that, for which their owner has waited. It sends its next gradients when it has the next
    keys, so behind the owner's last sum."""
    tl.store(number_ptr, tl.load(number_ptr) + 1)


def _is_causal(call: Call) -> bool:
    return call["causal"] or (call["window"] is not None and call["window"][1] == 0)


def _kernel(call: Call) -> Kernel | None:
    """torch's kernel for the rectangles of every rank, so that all ranks take the same."""
    kinds = [rectangle(call["s"], call["layout"], _is_causal(call), 1, source) for source in range(3)]
    return kernel_for(call["q"], call["k"], call["v"], [kind for kind in kinds if kind is not None])


def _scale(call: Call) -> float:
    return call["d"] ** -0.5 if call["scale"] is None else call["scale"]


def fits(call: Call) -> str:
    """Why torch's attention cannot compute a call; "" where it can."""
    if call["cu_seqlens"] is not None:
        return "cu_seqlens, which torch's kernel does not take"
    total = call["s"] * call.world.size
    if call["length"] not in (None, total):
        return f"length {call['length']} of {total} positions, and torch's kernel knows no padding"
    view = view_of(call["s"], call.world.size, call["causal"], call["window"], None)
    if view.left < total - 1 or 0 < view.right < total - 1:
        return f"window {call['window']}, which torch's kernel does not take"
    if call.tensors.get("dlse") is not None:
        return "dlse, which torch's kernel does not take"
    if call["q"].numel() and _kernel(call) is None:
        return (
            f"{call.dtype} with D {call['d']} and {call['s']} rows, which torch's cuDNN and flash kernels do not take"
        )
    return ""


class Ring:
    """What both passes plan on several ranks: rectangles, and the copies of keys and values to the ranks that see them,
    into inboxes of a name, see `windows`. Collective."""

    def __init__(self, call: Call, name: str) -> None:
        self.world = world = call.world
        self.b, self.s, self.h, self.g, self.d = (call[letter] for letter in "bshgd")
        self.causal, self.layout, self.itemsize = _is_causal(call), call["layout"], call.dtype.itemsize
        self.kernel, self.scale = _kernel(call), _scale(call)
        size, inboxes = world.size, windows(call, name)
        # [d - 1]: the keys of rank - d are here; [size - 2 + d]: so are the gradients that rank + d has of mine.
        self.counters = world.keep(
            (call.name, "ready", "parts"), lambda: signals(2 * size - 1, name=f"{call.name}.parts", world=world)
        )
        self.number, self.side = self.counters[-1:], copies.Side(world)
        self.this = self.number.plain()
        self.wait = cooperative_launch(world, arrived_kernel, (1,), num_warps=1)
        self.own = Rectangle(slice(0, self.s), slice(0, self.s), self.causal)
        self.seen = self._others(lambda d: self._seen(world.rank, (world.rank - d) % size))
        """By distance d: what queries here see of the keys of rank - d."""
        self.seeing = self._others(lambda d: self._seen((world.rank + d) % size, world.rank))
        """By distance d: what queries of rank + d see of the keys here."""
        self.sends = [self.to_peer(d, (world.rank + d) % size, seen, True, inboxes, d - 1) for d, seen in self.seeing]
        self.arrived = self.received(inboxes)

    def _others(self, seen: Callable[[int], Rectangle | None]) -> list[tuple[int, Rectangle]]:
        found = ((d, seen(d)) for d in range(1, self.world.size))
        return [(d, one) for d, one in found if one is not None]

    def _seen(self, rank: int, source: int) -> Rectangle | None:
        return rectangle(self.s, self.layout, self.causal, rank, source)

    def received(self, inboxes: Sequence[SymmetricTensor]) -> list[torch.Tensor]:
        """(size - 1, B, S, KV, D), of keys and of values."""
        return [inbox.plain().view(-1, self.b, self.s, self.g, self.d) for inbox in inboxes]

    def to_peer(
        self, distance: int, peer: int, seen: Rectangle, cut: bool, inboxes: Sequence[SymmetricTensor], at: int
    ) -> tuple[copies.Send, ...]:  # fmt: skip
        """Of the keys of a rectangle and of the values, to their rows of `peer`'s inboxes [distance - 1]; then of the
        number of the launch into counter `at`. cut: the source has all rows, and not those of the rectangle alone."""
        run, here = self.g * self.d, seen.keys
        places = slice(here.start * run, here.stop * run)
        inbox = copies.layout(self.world.size - 1, self.b, self.s * run)[distance - 1, :, places]
        shard = copies.layout(self.b, (self.s if cut else here.stop - here.start) * run)
        boxes = copies.boxes(peer, inbox, shard[:, places] if cut else shard, self.itemsize)
        moves = [copies.sending(self.world, boxes, to) for to in inboxes]
        return (*moves, copies.telling(self.world, peer, self.counters, at))

    def send(self, sends: Sequence[Sequence[copies.Send]], *tensors: torch.Tensor) -> None:
        """Queue what `to_peer` made, behind what the current stream has so far. Also where there is nothing to send the
        other stream goes on behind that: else a graph that is captured would not have it, and `end` could not wait."""
        with self.side.behind() as stream:
            for to in sends:
                for move, x in zip(to, (*tensors, self.this), strict=True):
                    move(x, stream)

    def begin(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Send all keys and values."""
        self.send(self.sends, k, v)

    def await_(self, at: int) -> None:
        """The current stream goes on when counter `at` has the number of this launch."""
        self.wait(self.counters[at:], self.number, self.world.device)

    def end(self) -> None:
        """The current stream goes on when all is sent."""
        self.side.reach(self.side.mark())


def planned_parts(call: Call) -> Launch:
    """launch(q, k, v, out, cu_seqlens, lse)."""
    if call.world.size == 1:
        return _whole(call)
    ring = Ring(call, call.name)  # inboxes as of the other forms
    start = copies.counting(call.world, ring.number)
    firsts = (0, *(seen.queries.start for _, seen in ring.seen))
    programs, block_d = ring.b * ring.h * triton.cdiv(ring.s, ROWS), triton.next_power_of_2(max(ring.d, 16))
    merge = beside_launch(call.world, merge_kernel, (programs,))

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor | None,
        lse: torch.Tensor,
    ) -> Any:  # fmt: skip
        start()  # before overwrite: every rank's launch before has ended
        ring.begin(k, v)
        if ring.kernel is not None and q.numel():
            found = [ring.kernel.attend(q, k, v, ring.causal, ring.scale)]
            for distance, seen in ring.seen:
                ring.await_(distance - 1)
                keys, values = (x[distance - 1, :, seen.keys] for x in ring.arrived)
                found.append(ring.kernel.attend(q[:, seen.queries], keys, values, False, ring.scale))
            outs, lses = zip(*found)
            merge(outs, lses, firsts, out, lse, ring.s, ring.h, ring.d, block_d, ROWS)
        ring.end()
        return out, lse

    return launch


def _whole(call: Call) -> Launch:
    """The plan on one rank."""
    kernel, causal, scale = _kernel(call), _is_causal(call), _scale(call)

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor | None,
        lse: torch.Tensor,
    ) -> Any:  # fmt: skip
        if kernel is not None and q.numel():
            for to, found in zip((out, lse), kernel.attend(q, k, v, causal, scale)):
                to.copy_(found)
        return out, lse

    return launch


def planned_backward(call: Call) -> Launch:
    """launch(dout, q, k, v, result, lse, out, dlse, cu_seqlens, dk, dv)."""
    if call.world.size == 1:
        return _whole_backward(call)
    # Without a barrier there is no telling whether the kernels of another form still read its inboxes.
    ring, home = Ring(call, f"{call.name}.parts"), windows(call, f"{call.name}.home")
    rank, size = call.world.rank, call.world.size
    sends = [ring.to_peer(d, (rank - d) % size, seen, False, home, size - 2 + d) for d, seen in ring.seen]
    parts_home, next_ = ring.received(home), beside_launch(call.world, next_kernel, (1,), num_warps=1)

    def launch(
        dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, result: torch.Tensor, lse: torch.Tensor,
        out: torch.Tensor, dlse: None, cu_seqlens: None, dk: torch.Tensor, dv: torch.Tensor,
    ) -> Any:  # fmt: skip
        sent: list[list[torch.Tensor]] = []  # alive until the copy engines have read them
        next_(ring.number)
        ring.begin(k, v)
        if ring.kernel is not None and q.numel():
            kernel, scale = ring.kernel, ring.scale
            found = kernel.gradients(dout, q, k, v, result, lse, ring.causal, scale)
            totals = [x.float() for x in found]
            for (distance, seen), to in zip(ring.seen, sends):
                ring.await_(distance - 1)
                keys, values = (x[distance - 1, :, seen.keys] for x in ring.arrived)
                grad, mine, whole = (x[:, seen.queries] for x in (dout, q, result))
                dq, *of_keys = kernel.gradients(
                    grad, mine, keys, values, whole, lse[:, :, seen.queries], False, scale
                )  # fmt: skip
                ring.send([to], *of_keys)
                totals[0][:, seen.queries] += dq
                sent.append(of_keys)
            for distance, seen in ring.seeing:  # so each sum has one order
                ring.await_(size - 2 + distance)
                for total, inbox in zip(totals[1:], parts_home, strict=True):
                    total[:, seen.keys] += inbox[distance - 1, :, seen.keys]
            for to, total in zip((out, dk, dv), totals):
                to.copy_(total)
        ring.end()
        return out, dk, dv

    return launch


def _whole_backward(call: Call) -> Launch:
    """The plan of the backward pass on one rank."""
    kernel, causal, scale = _kernel(call), _is_causal(call), _scale(call)

    def launch(
        dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, result: torch.Tensor, lse: torch.Tensor,
        out: torch.Tensor, dlse: None, cu_seqlens: None, dk: torch.Tensor, dv: torch.Tensor,
    ) -> Any:  # fmt: skip
        if kernel is not None and q.numel():
            for to, found in zip((out, dk, dv), kernel.gradients(dout, q, k, v, result, lse, causal, scale)):
                to.copy_(found)
        return out, dk, dv

    return launch
