"""What the forward and the backward pass plan alike: checks of arguments, chunks and tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pkt.runtime.memory.pool import outside_pools

from ..declaration import Call, choice, flag, integer, number
from ..shared import attention
from ..shared.grid import COPY_BYTES
from . import sequence
from .exact import view_of
from .sequence import LAYOUTS, View

CALL = "ring_attention"
NUM_COMM_SMS = 16
CHUNK = 512
MOST = 1 << 30
"""Elements of all heads in a chunk, which programs that push count in 32 bits."""
GLUON_TILES = attention.Tiles(128, 128)
GLUON_CHUNK = 2048
JOIN = 2 << 20
"""Copy engines move at least so many bytes of keys at a time, of several batches where one has fewer. 72 copies more of
512 positions took 166 us more on 2 H200 (`ring_attention_short_2.json`, `ring_attention_short_before_2.json`)."""
WHOLE = 1 << 30
"""Rows of a chunk where nothing is sent in chunks."""
GLUON_ROWS = GLUON_TILES.block_m // 2
"""Queries or keys of a consumer, of a block, and of a part in the backward pass."""


# --------------------------------------------------------------------------------------------------------- checks
ARGUMENTS = {
    "causal": flag, "layout": choice(*LAYOUTS), "scale": number(above=0), "window": attention.window,
    "length": integer(0),
}  # fmt: skip
"""The arguments that say who sees whom, and their checks."""


def shape_of(call: Call) -> tuple[int, ...]:
    """The shape of q, see `attention.shape`. Raises ShapeError."""
    shape = attention.shape(call)
    total, length = call.world.size * call["s"], call["length"]
    if length is not None and (call["cu_seqlens"] is not None or length > total):
        packed = call["cu_seqlens"] is not None
        wanted = "None with cu_seqlens, whose last element says it" if packed else f"at most {total}, size * S"
        raise call.refuse("length", length, wanted)
    return shape


def of_heads(call: Call) -> str:
    """The shape of a number for each row and head of q, in letters."""
    return "b h s" if call["cu_seqlens"] is None else "h s"


# ----------------------------------------------------------------------------------------------------------- host
class Plan(NamedTuple):
    """What the forms' plans have in common."""

    view: View
    zigzag: bool
    tiles: attention.Tiles
    chunk: int
    pieces: list[sequence.Part]  # chunks of this rank
    blocks: int  # of BLOCK_M rows that a rank's rows are cut into
    needs: list[list[bool]]  # [d - 1][c]: rank + d needs chunk c
    joined: int = 1  # batches whose chunks come together

    @property
    def pushes(self) -> int:
        """Chunks that this rank pushes, whether needed or not, of a batch of one."""
        return len(self.pieces) if self.needs else 0


def planned(call: Call, tiles: attention.Tiles | None = None) -> Plan:
    """Views, chunks and tasks of a call. tiles: None for the setting."""
    world, s, layout = call.world, call["s"], call["layout"]
    tiles = tiles or call["tiles"]
    rank, size = world.rank, world.size
    view = view_of(s, size, call["causal"], call["window"], call["length"])
    most = min(call.settings.get("chunk", CHUNK), s, MOST // max(call["h"] * call["d"], 1))
    most = triton.cdiv(most, tiles.block_n) * tiles.block_n if size > 1 else WHOLE
    chunks = sequence.pieces(s, layout, rank, size, most)
    blocks = len(sequence.pieces(s, layout, rank, size, tiles.block_m))
    return Plan(view, layout == "zigzag", tiles, most, chunks, blocks, needs_of(call, chunks, view))


def joining(call: Call, plan: Plan) -> Plan:
    """The plan with so many batches joined that their chunks have JOIN bytes of keys."""
    one = min(plan.chunk, call["s"]) * call["g"] * call["d"] * call.dtype.itemsize
    return plan._replace(joined=min(triton.cdiv(JOIN, max(one, 1)), max(call["b"], 1)))


def needs_of(call: Call, chunks: Sequence[sequence.Part], view: View) -> list[list[bool]]:
    """[d - 1][c]: rank + d needs chunk c of this rank's keys; of its queries with `view.turned`."""
    s, layout, (rank, size) = call["s"], call["layout"], (call.world.rank, call.world.size)
    return [[sequence.needed(c, view, s, layout, (rank + d) % size, size) for c in chunks] for d in range(1, size)]


def num_places(call: Call, piece: int) -> int:
    """Of the numbers of a head's rows whose parts have whole pieces of `piece` places, see `Backward.rows_ptr`."""
    held = sequence.parts(call["s"], call["layout"], 0, 1)
    return len(held) * triton.cdiv(held[0].rows, piece) * piece


def sizes(call: Call, plan: Plan) -> dict[str, Any]:
    """The numbers that the kernels of both passes take, by name."""
    d = call["d"]
    scale = d**-0.5 if call["scale"] is None else call["scale"]
    block_d = triton.next_power_of_2(max(d, 16))
    constants = {
        "H": call["h"], "KV": call["g"], "D": d, "ZIGZAG": plan.zigzag, "WHOLE": d == block_d,
        "BLOCK_M": plan.tiles.block_m, "BLOCK_N": plan.tiles.block_n, "BLOCK_D": block_d, "CHUNK": plan.chunk,
        "BLOCK": COPY_BYTES // 2 // call.dtype.itemsize if plan.chunk > 16 else 64,
    }  # fmt: skip
    run_time = {"B": call["b"], "S": call["s"], "joined": plan.joined, "scale": scale / math.log(2)}
    run_time |= plan.view._asdict()
    return run_time | {name: tl.constexpr(value) for name, value in constants.items()}


def documents(call: Call) -> Callable[[torch.Tensor | None], torch.Tensor | None]:
    """What makes `Attention.spans_ptr` of a call's cu_seqlens."""
    if call["cu_seqlens"] is None:
        return lambda cu_seqlens: None
    device, total = call.world.torch_device, call["s"] * call.world.size
    positions = outside_pools(lambda: torch.arange(total, dtype=torch.int32, device=device), device)
    return lambda cu_seqlens: None if cu_seqlens is None else sequence.spans(cu_seqlens, positions, total)
