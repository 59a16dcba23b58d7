"""What operators for attention over a sequence that ranks share check of a call, and the tiles of their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton

from pkt.errors import DtypeError, ShapeError
from pkt.wording import found_text

from ..declaration import MAX_STAGES, Call, integer

MAX_D = 256


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


def tiles(call: Call, name: str, value: Any) -> Tiles:
    """The check of the keyword `tiles`."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or None in value:
        found = found_text(value)
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


def window(call: Call, name: str, value: Any) -> Any:
    """The check of the keyword `window`."""
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or len(value) != 2 or None in value:
        found = found_text(value)
        raise DtypeError.argument(call.name, name, found, "two integers (left, right)", call.world.rank)
    for at, side in enumerate(value):
        integer(-1)(call, f"{name}[{at}]", side)
    return tuple(value)


def shape(call: Call) -> tuple[int, ...]:
    """The shape of the result. Learns the sizes b, s, h, g (heads of keys) and d, and holds the operands against them.
    Raises ShapeError."""
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
    if s * call.world.size**2 >= 1 << 30:
        raise ShapeError.argument(call.name, "q", tuple(q.shape), "a sequence of fewer than 2^30 positions", rank)
    call.sizes.update(b=b, s=s, h=h, g=g, d=d)
    return tuple(q.shape)


def default_tiles(call: Call) -> Tiles:
    """Those of kernels that keep everything in registers."""
    d = triton.next_power_of_2(max(call["d"], 16))
    if call.dtype.itemsize == 4:
        return Tiles(64, 32, 8, 1)
    return Tiles(128, 64, 8, 3 if d <= 128 else 2)
