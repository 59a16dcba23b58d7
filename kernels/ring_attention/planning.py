"""What the forward and the backward pass plan alike: checks of arguments, chunks and tasks, windows for keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from pkt.errors import DtypeError, ShapeError
from pkt.runtime.memory.factories import empty
from pkt.runtime.memory.tensor import SymmetricTensor

from ..declaration import MAX_STAGES, Call, choice, integer, number
from ..shared.grid import COPY_BYTES
from . import sequence
from .exact import view_of
from .sequence import LAYOUTS, View

CALL = "ring_attention"
MAX_D = 256
NUM_COMM_SMS = 16
CHUNK = 512


# --------------------------------------------------------------------------------------------------------- checks
class Tiles(NamedTuple):
    """The setting `tiles`."""

    block_m: int
    block_n: int
    num_warps: int = 8
    num_stages: int = 2

    @property
    def options(self) -> dict[str, int]:
        """Of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def tiles_of(call: Call, name: str, value: Any) -> Tiles:
    """The check of `tiles`."""
    if not isinstance(value, Sequence) or isinstance(value, str) or None in value:
        found = f"{type(value).__name__} {value!r:.40}"
        raise DtypeError.argument(call.name, name, found, "a sequence of integers", call.world.rank)
    for at, size in enumerate(value):
        integer(1)(call, f"{name}[{at}]", size)
    wanted = "BLOCK_M and BLOCK_N powers of two from 16 to 256, then NUM_WARPS 1, 2, 4, 8 or 16, and NUM_STAGES"
    powers = [16 <= size <= 256 and not size & (size - 1) for size in value[:2]]
    if not 2 <= len(value) <= 4 or not all(powers) or Tiles(*value).num_warps not in (1, 2, 4, 8, 16):
        raise call.refuse(name, tuple(value), wanted)
    if (full := Tiles(*value)).num_stages > MAX_STAGES:
        raise call.refuse(name, tuple(full), f"at most {MAX_STAGES} stages")
    return full


def flag(call: Call, name: str, value: Any) -> bool:
    """The check of an argument that is True or False."""
    if not isinstance(value, bool):
        found = f"{type(value).__name__} {value!r:.40}"
        raise DtypeError.argument(call.name, name, found, "True or False", call.world.rank)
    return value


def _window(call: Call, name: str, value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2 or None in value:
        found = f"{type(value).__name__} {value!r:.40}"
        raise DtypeError.argument(call.name, name, found, "two integers (left, right)", call.world.rank)
    for at, side in enumerate(value):
        integer(-1)(call, f"{name}[{at}]", side)
    return tuple(value)


ARGUMENTS = {
    "causal": flag, "layout": choice(*LAYOUTS), "scale": number(above=0), "window": _window, "length": integer(0),
}  # fmt: skip
"""The arguments that say who sees whom, and their checks."""


def shape_of(call: Call) -> tuple[int, ...]:
    """The shape of q. Learns the sizes b, s, h, g (heads of keys) and d, and holds q, k and v against them. Raises
    ShapeError."""
    q, k, v, rank = call["q"], call["k"], call["v"], call.world.rank
    packed = call["cu_seqlens"] is not None
    found = tuple(q.shape)
    if q.ndim != 4 - packed:
        wanted = (
            "3 dimensions with cu_seqlens: (S, H, D)" if packed else "4 dimensions without cu_seqlens: (B, S, H, D)"
        )
        raise ShapeError.argument(call.name, "q", found, wanted, rank)
    b, s, h, d = (1, *found) if packed else found
    if d > MAX_D:
        raise ShapeError.argument(call.name, "q", found, f"at most {MAX_D} in the last dimension", rank)
    if k.ndim != q.ndim or (*k.shape[:-2], k.shape[-1]) != (*found[:-2], d):
        wanted = f"({', '.join(map(str, found[:-2]))}, KV, {d})"
        raise ShapeError.argument(call.name, "k", tuple(k.shape), wanted, rank)
    g = k.shape[-2]
    if h % g if g else h:
        raise ShapeError.argument(call.name, "k", tuple(k.shape), f"a number of heads that divides q's {h}", rank)
    if v.shape != k.shape:
        raise ShapeError.argument(call.name, "v", tuple(v.shape), str(tuple(k.shape)), rank)
    if packed and (call["cu_seqlens"].ndim != 1 or not call["cu_seqlens"].numel()):
        found = tuple(call["cu_seqlens"].shape)
        raise ShapeError.argument(call.name, "cu_seqlens", found, "(documents + 1,)", rank)
    total, length = call.world.size * s, call["length"]
    if length is not None and (packed or length > total):
        wanted = "None with cu_seqlens, whose last element says it" if packed else f"at most {total}, size * S"
        raise call.refuse("length", length, wanted)
    if total * max(call.world.size, 1) >= 1 << 30:
        raise ShapeError.argument(call.name, "q", tuple(q.shape), "a sequence of fewer than 2^30 positions", rank)
    call.sizes.update(b=b, s=s, h=h, g=g, d=d)
    return tuple(q.shape)


def of_heads(call: Call) -> str:
    """The shape of a number for each row and head of q, in letters."""
    return "b h s" if call["cu_seqlens"] is None else "h s"


def from_one(call: Call) -> dict[str, Any]:
    """Settings for which 0 has no meaning."""
    for name in ("num_comm_sms", "chunk"):
        if name in call.settings and call[name] < 1:
            raise call.refuse(name, call[name], "at least 1")
    return call.settings


# ----------------------------------------------------------------------------------------------------------- host
class Plan(NamedTuple):
    """What the forms' plans have in common."""

    view: View
    zigzag: bool
    tiles: Tiles
    chunk: int
    pieces: list[sequence.Part]  # chunks of this rank
    blocks: int  # of BLOCK_M rows that a rank's rows are cut into
    needs: list[list[bool]]  # [d - 1][c]: rank + d needs chunk c

    @property
    def pushes(self) -> int:
        """Chunks that this rank pushes, whether needed or not, of a batch of one."""
        return len(self.pieces) if self.needs else 0


def planned(call: Call) -> Plan:
    """Views, chunks and tasks of a call."""
    world, s, tiles, layout = call.world, call["s"], call["tiles"], call["layout"]
    rank, size = world.rank, world.size
    view = view_of(s, size, call["causal"], call["window"], call["length"])
    most = triton.cdiv(min(call.settings.get("chunk", CHUNK), s), tiles.block_n) * tiles.block_n
    chunks = sequence.pieces(s, layout, rank, size, most)
    blocks = len(sequence.pieces(s, layout, rank, size, tiles.block_m))
    needs = [[sequence.needed(c, view, s, layout, (rank + d) % size, size) for c in chunks] for d in range(1, size)]
    return Plan(view, layout == "zigzag", tiles, most, chunks, blocks, needs)


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
    run_time = {"B": call["b"], "S": call["s"], **plan.view._asdict(), "scale": scale / math.log(2)}
    return run_time | {name: tl.constexpr(value) for name, value in constants.items()}


def windows(call: Call, name: str = CALL) -> tuple[SymmetricTensor, SymmetricTensor]:
    """Inboxes of keys and values, (size - 1, b, s, g, d) each, for all calls of `name` with such operands.
    Collective."""
    world, b, s, g, d = call.world, call["b"], call["s"], call["g"], call["d"]
    shape = (world.size - 1, b, s, g, d) if world.size > 1 else (1,)

    def make() -> tuple[SymmetricTensor, SymmetricTensor]:
        keys, values = (
            empty(*shape, dtype=call.dtype, name=f"{name}.{of}", world=world) for of in ("keys", "values")
        )  # fmt: skip
        return keys, values

    return world.keep((name, "windows", b, s, g, d, call.dtype), make)
