"""Where the Gluon forms run, and with which tiles. Nothing of Gluon is imported: this works with every Triton.

All ranks get the same answer. If one rank took another form than its peers, they would deadlock.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pkt.errors import ShapeError
from pkt.model.gpu import H200, gluon_lacks
from pkt.runtime.world import World
from pkt.wording import count_text

from ..declaration import Call
from .fp8 import FP8
from .tile_product import Tiles, whole_rows

MAX_PEERS = 7
"""Peers that a kernel has descriptors for: as many as an NVLink domain of eight GPUs needs."""
SHARED = H200.shared
"""Bytes of shared memory that a program may have on sm_90."""

TILES = Tiles(128, 256, 64)
"""Where nothing else was found faster: `num_stages` slots of the ring."""

NARROW = Tiles(128, 128, 64, num_stages=6)

NARROW8, WIDE8 = Tiles(128, 128, 128, num_stages=6), Tiles(128, 256, 128)
"""Of fp8 operands; the wide ones where sums may stay in the tensor cores, see gluon_warps.PROMOTED."""


def blocks(dtype: torch.dtype) -> tuple[tuple[int, ...], ...]:
    """Blocks that operands of a dtype may have: 128 bytes of K each, as TMA swizzles them."""
    return tuple((128, n, 128 // dtype.itemsize) for n in (256, 128))


def shared_bytes(tiles: Tiles, dtype: torch.dtype = torch.bfloat16) -> int:
    """Of the ring, the outbox and the barriers, for operands of a dtype."""
    slot = tiles.block_k * (tiles.block_m + tiles.block_n) * dtype.itemsize
    return tiles.num_stages * slot + tiles.block_m * tiles.block_n + 512


def check_tiles(call: str, tiles: Tiles, world: World, dtype: torch.dtype = torch.bfloat16) -> None:
    """ShapeError unless the Gluon forms can take `tiles` for operands of a dtype."""
    used, allowed = shared_bytes(tiles, dtype), blocks(dtype)
    wanted = (
        f"blocks of {' or '.join(map(str, allowed))}" if tiles[:3] not in allowed
        else f"{Tiles().num_warps} warps and their registers, as it is by default"
        if (tiles.num_warps, tiles.maxnreg) != (Tiles().num_warps, Tiles().maxnreg)
        else "group at least 1" if tiles.group < 1
        else f"at least 3 stages in {SHARED} bytes of shared memory" if tiles.num_stages < 3 or used > SHARED
        else ""
    )  # fmt: skip
    if wanted:
        raise ShapeError.argument(call, "tiles", tuple(tiles), wanted, world.rank)


def missing(world: World) -> str:
    """What this rank lacks for the Gluon forms, in words; "" if nothing."""
    if torch.device(world.torch_device).type != "cuda":
        return "the simulator, and Gluon is compiled only"
    return gluon_lacks(torch.cuda.get_device_capability(world.torch_device))


def missing_anywhere(world: World) -> str:
    """What a rank lacks. On GPUs collective the first time."""
    if torch.device(world.torch_device).type != "cuda":
        return missing(world)
    known = world.lasting
    if "pkt.kernels.gluon" not in known:
        answers = world.all_gather_object(missing(world))
        known["pkt.kernels.gluon"] = next((f"rank {r} has {text}" for r, text in enumerate(answers) if text), "")
    return known["pkt.kernels.gluon"]


def unsuited(dtype: torch.dtype, size: int, *columns: int) -> str:
    """Why the Gluon forms cannot take operands on any GPU, in words; "" if they can. columns: lengths of the rows that
    TMA moves."""
    if not 1 < size <= MAX_PEERS + 1:
        return f"{count_text(size, 'rank')}, not 2 to {MAX_PEERS + 1}"
    if dtype not in (torch.bfloat16, torch.float16, FP8):
        return f"{dtype}, not bfloat16 or float16 or float8_e4m3fn"
    if not whole_rows(dtype, *columns):
        return f"rows of {' and '.join(map(str, columns))} elements, not multiples of 16 bytes"
    return ""


def fits(*columns: str) -> Callable[[Call], str]:
    """`fits` of a Gluon form: why it cannot run a call; "" where it can. columns: letters of the row lengths that TMA
    moves."""

    def unfit(call: Call) -> str:
        lengths = (call[letter] for letter in columns)
        return missing_anywhere(call.world) or unsuited(call.dtype, call.world.size, *lengths)

    return unfit
