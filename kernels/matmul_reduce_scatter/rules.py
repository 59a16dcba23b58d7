"""matmul_reduce_scatter's rules: how the Gluon form sends its tiles, the tuner's candidates, predicted times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton

from pkt.errors import ShapeError
from pkt.model.config import Config, space
from pkt.model.cost import Estimate, Product, overlapped, waves
from pkt.model.gpu import Gpu, interpolated, link_rate
from pkt.runtime.world import World

from ..shared import product_rules as rules
from ..shared.gluon_fits import TILES, check_tiles
from ..shared.grid import num_programs
from ..shared.product_rules import Key
from ..shared.tile_product import Tiles

CALL = "matmul_reduce_scatter"
COPIES, COPIED_K, COPIED_BYTES = 2, 2048, 16 << 20
"""Copies that a part goes in, the least K from which parts are copied, and the bytes of a part from which they are at
that K: at twice that K of half as many bytes, but of no fewer. The others' parts then take longer to compute than to
copy, and each copy's fixed cost is little. The fastest of each in
benchmarks/results/exhaustive_matmul_reduce_scatter.json, of 4 x H200: copying takes 0.412 ms where storing takes 0.423
at K = 2048, of parts of 32 MiB, and 0.270 where that takes 0.225 at K = 1536, of 18 MiB; in its _2.json, of 2, 0.108
and 0.126 at K = 2048, of 16 MiB. Four copies take up to 1.2 % less than two, but there 8 % more. In
matmul_reduce_scatter_tried_2.json, of 2, copying takes 0.104 ms where storing takes 0.118 at K = 4096, of parts of
8 MiB, and 0.318 where that takes 0.333 at K = 14336; of parts of 4 MiB it takes a tenth longer."""
TRIED_COPIES = (1, 2, 4)
"""Candidates for `copies`."""

# Fitted to all candidates of benchmarks/results/exhaustive_matmul_reduce_scatter*.json, at 4 and 2 ranks.
PARCEL_COSTS = 3.5e-6
"""Seconds of a copy by an engine that waits for tiles, with the word behind it, beside those of its curve."""
ANNOUNCED = 14e-6
"""Seconds of a launch whose copies wait for tiles: of the kernel that ranks begin with, and until the last copy joins.
"""


# ------------------------------------------------------------------------------------------------------------ the rule
def copies_of(m: int, N: int, K: int, size: int) -> int:
    """Copies that a part (m, N), 16 bits an element, of the product of (size * m, K) and (K, N) goes in; 0: none."""
    least = COPIED_BYTES if K < 2 * COPIED_K else COPIED_BYTES // 2
    return COPIES if size > 1 and K >= COPIED_K and 2 * m * N >= least else 0


def settled(
    m: int, N: int, K: int, size: int, programs: int,
    tiles: Tiles | None = None, lag: int | None = None, copies: int | None = None, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tiles, int, int]:  # fmt: skip
    """`tiles`, `lag` and `copies`, for operands of a dtype; the rule fills in None. Where parts are copied, own tiles
    come last; else they are a round behind the others'."""
    tiles = tiles or TILES
    count = triton.cdiv(m, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    if copies is None:
        copies = copies_of(m, N, rules.columns16(K, dtype), size) if lag is None else 0
    programs = max(1, min(programs, size * count))
    return tiles, max(count, 1) if copies else rules.lag_of(lag, 1, count, programs, size), copies


def settings(
    m: int, N: int, K: int, world: World, tiles: Tiles | None, lag: int | None, copies: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tiles, int, int]:  # fmt: skip
    """`settled` in a world. Raises ShapeError."""
    check_tiles(CALL, tiles or TILES, world, dtype)
    if copies and lag is not None:
        raise ShapeError.argument(CALL, "lag", lag, "none with copies", world.rank)
    return settled(m, N, K, world.size, num_programs(world, world.num_sms), tiles, lag, copies, dtype)


# -------------------------------------------------------------------------------------------------------------- spaces
def space_plain(mode: str) -> Callable[[Key, Gpu], list[Config]]:
    """Of "add" or "inbox"."""

    def candidates(key: Key, gpu: Gpu) -> list[Config]:
        m = math.ceil(key["M"] / key["size"])
        return space(
            mode=mode, tiles=rules.plain_tiles(m, key, gpu, (4, 8, 16), rules.gluon_fits(key, gpu, "N"), staged=True)
        )

    return candidates


def space_gluon(key: Key, gpu: Gpu) -> list[Config]:
    """Candidates of mode gluon, stored by the kernel or by copy engines; none where it cannot run."""
    if not rules.gluon_fits(key, gpu, "N"):
        return []
    tiles = rules.gluon_tiles(gpu, (4, 8, 16))
    wide = [t for t in tiles if t[1] == TILES.block_n]
    return space(mode="gluon", lag=rules.lags(key, gpu), tiles=tiles) + (
        space(mode="gluon", copies=TRIED_COPIES, tiles=wide) if wide else []
    )


# ------------------------------------------------------------------------------------------------------------- seconds
def seconds_add(config: Mapping[str, Any], key: Key, gpu: Gpu) -> Estimate:
    """After the product the sum is read, written out and zeroed."""
    case = _plain_product(config, key)
    return _plain(case, link_rate("TMA reduce-add", gpu.sms), 3, gpu.barrier, gpu)


def seconds_inbox(config: Mapping[str, Any], key: Key, gpu: Gpu) -> Estimate:
    """A tile is drained and signalled before the next one begins. After the product the inbox is read and the sum
    written."""
    case = _plain_product(config, key)
    signals = 2 * gpu.signal * math.ceil(case.size * case.tiles(case.m) / gpu.sms)
    return _plain(case, link_rate("TMA store", gpu.sms), case.size + 1, signals, gpu)


def _plain_product(config: Mapping[str, Any], key: Key) -> Product:
    return rules.plain_product(config, key, math.ceil(key["M"] / key["size"]), key["N"])


def _plain(case: Product, rate: float, parts: int, sync: float, gpu: Gpu) -> Estimate:
    """parts: how many times memory moves a part after the product."""
    one, part = case.seconds(gpu, plain=True), case.m * case.N * case.itemsize
    return overlapped(
        tasks=case.size * case.tiles(case.m), task_seconds=one, comm_bytes=(case.size - 1) * part, comm_rate=rate,
        around=one, memory_bytes=case.memory_bytes_by_parts, exposed=parts * part / gpu.memory, sync=sync, gpu=gpu,
    )  # fmt: skip


def seconds_gluon(config: Mapping[str, Any], key: Key, gpu: Gpu) -> Estimate:
    """The parts of a candidate's predicted time, in seconds."""
    m, given = math.ceil(key["M"] / key["size"]), (config.get("lag"), config.get("copies"))
    tiles, lag, copies = settled(
        m, key["N"], key["K"], key["size"], gpu.sms, Tiles(*config["tiles"]) if config.get("tiles") else None, *given
    )
    case = Product.of(key, tiles)
    if copies and case.size > 1:
        return _in_parcels(case, copies, gpu)
    return rules.in_turns(case, lag, case.tiles(m), rules.scattered(key), gpu)


def _in_parcels(case: Product, copies: int, gpu: Gpu) -> Estimate:
    """By copy engines, one copy after the other, one rank's part after the other, own tiles last. The first copy begins
    when its tiles are finished; the last copy begins when all the others' tiles are, or when the copies before it have
    gone. When the last copy has come, its tiles are added up; a round of those was computed before."""
    own, part = case.tiles(case.m), case.m * case.N * case.itemsize
    tasks, one = case.size * own, case.seconds(gpu)
    parcel, parcels = part / copies, (case.size - 1) * copies
    copy = parcel / link_rate("copy engine put", 0, round(parcel)) + PARCEL_COSTS
    slowed = one * interpolated(gpu.slow, waves(tasks, one, gpu.sms))
    computed, others = (waves(n, slowed, gpu.sms) for n in (math.ceil(own / copies), tasks - own))
    begins = max(computed, others - (parcels - 1) * copy)
    return overlapped(
        tasks=tasks, task_seconds=one, comm_bytes=parcels * parcel, comm_rate=parcel / copy,
        around=begins + computed - slowed, memory_bytes=case.memory_bytes_by_parts,
        sync=gpu.barrier + 2 * gpu.signal + ANNOUNCED, interference=0.0, gpu=gpu,
    )  # fmt: skip
