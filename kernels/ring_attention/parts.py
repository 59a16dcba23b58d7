"""The form "parts": copy engines push keys and values, torch attends to one rank's after the other's, and a kernel merges
the results.

torch's attention takes rectangles of queries and keys, and triangles. Under a causal mask a rank's own keys are a
triangle, also in zigzag order, where positions ascend. Of the others in zigzag order all queries see the first half of
an earlier rank's keys, and the second half of the queries all keys of a later rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

import pkt.language as pl
from pkt.runtime.launch.launch import beside, cooperative_launch
from pkt.runtime.memory.factories import signals

from ..declaration import Call, Launch
from ..shared import copies
from ..shared.grid import barrier_counters
from ..shared.torch_attention import Attend, attend_by
from .exact import view_of
from .merge import merge_kernel
from .planning import CALL, windows
from .sequence import parts

ROWS = 32
"""Rows of a head that a program merges."""


class Rectangle(NamedTuple):
    """Queries of a rank, all from one on, and keys of a rank that these see; causal: of the same rank, up to their own."""

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
    pl.wait(ready_ptr, triton.language.load(number_ptr), world)


def _is_causal(call: Call) -> bool:
    return call["causal"] or (call["window"] is not None and call["window"][1] == 0)


def _by(call: Call) -> Attend | None:
    """torch's kernel for the rectangles of every rank, so that all ranks take the same."""
    kinds = [rectangle(call["s"], call["layout"], _is_causal(call), 1, source) for source in range(3)]
    return attend_by(call["q"], call["k"], call["v"], [kind for kind in kinds if kind is not None])


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
    if call["q"].numel() and _by(call) is None:
        return (
            f"{call.dtype} with D {call['d']} and {call['s']} rows, which torch's cuDNN and flash kernels do not take"
        )
    return ""


def planned_parts(call: Call) -> Launch:
    """launch(q, k, v, out, cu_seqlens, lse)."""
    world, rank, size = call.world, call.world.rank, call.world.size
    b, s, h, g, d = (call[letter] for letter in "bshgd")
    layout, causal, scale = call["layout"], _is_causal(call), d**-0.5 if call["scale"] is None else call["scale"]
    attend, inboxes, run = _by(call), windows(call), g * d
    counters = world.keep((CALL, "ready", "parts"), lambda: signals(size, name=f"{CALL}.parts", world=world))
    this_launch, side = counters[-1:], copies.Side(world)
    begin, bar = cooperative_launch(world, copies.begin_kernel, (1,), num_warps=1), barrier_counters(world)
    await_one = cooperative_launch(world, arrived_kernel, (1,), num_warps=1)
    shard, theirs = copies.layout(b, s * run), copies.layout(max(size - 1, 1), b, s * run)
    sends: list[tuple[copies.Send, ...]] = []
    todo: list[tuple[int, Rectangle]] = []
    for distance in range(1, size):
        peer = (rank + distance) % size
        seen = rectangle(s, layout, causal, peer, rank)
        if seen is not None:
            here = slice(seen.keys.start * run, seen.keys.stop * run)
            boxes = copies.boxes(peer, theirs[distance - 1, :, here], shard[:, here], call.dtype.itemsize)
            moves = [copies.sending(world, boxes, inbox) for inbox in inboxes]
            sends.append((*moves, copies.telling(world, peer, counters, distance - 1)))
        mine = rectangle(s, layout, causal, rank, (rank - distance) % size)
        if mine is not None:
            todo.append((distance, mine))
    own = rectangle(s, layout, causal, rank, rank)
    assert own is not None
    firsts, this = (0, *(r.queries.start for _, r in todo)), this_launch.plain()
    arrived = [inbox.plain().view(-1, b, s, g, d) if size > 1 else None for inbox in inboxes]
    programs, block_d = b * h * triton.cdiv(s, ROWS), triton.next_power_of_2(max(d, 16))

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor | None,
        lse: torch.Tensor,
    ) -> Any:  # fmt: skip
        begin(this_launch, bar, 0, world.device)  # before overwrite: every rank's launch before has ended
        with side.behind() as stream:
            for move_keys, move_values, tell in sends:
                move_keys(k, stream)
                move_values(v, stream)
                tell(this, stream)
            sent = side.mark()
        if programs and attend is not None:
            found = [attend(q, k, v, own.causal, scale)]
            for distance, seen in todo:
                await_one(counters[distance - 1 :], this_launch, world.device)
                keys, values = (x[distance - 1, :, seen.keys] for x in arrived if x is not None)
                found.append(attend(q[:, seen.queries], keys, values, False, scale))
            outs, lses = zip(*found)
            beside(merge_kernel, (programs,), outs, lses, firsts, out, lse, s, h, d, block_d, ROWS)
        side.reach(sent)
        return out, lse

    return launch
