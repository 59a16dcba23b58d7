"""matmul_all_reduce's rules: tiles and lag of the Gluon form, the tuner's candidates, predicted times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton

from pkt.model.config import Config, space
from pkt.model.cost import Estimate, Product, overlapped
from pkt.model.gpu import Gpu, link_rate
from pkt.runtime.world import World

from ..shared import product_rules as rules
from ..shared.gluon_fits import NARROW, TILES, check_tiles
from ..shared.grid import num_programs
from ..shared.product_rules import Key, average_seconds
from ..shared.tile_product import Tiles

CALL = "matmul_all_reduce"
WIDE = TILES._replace(group=16)
LEAST_BEHIND = 10e-6
"""Seconds that own tiles are behind at least, by `average_seconds`: another rank's tile has then come in all its parts,
unless the links are the limit. To wait for longer costs, too: by
benchmarks/results/exhaustive_matmul_all_reduce.json, 16384 x 16384 on 4 ranks takes 3.23 ms with a quarter of a round,
3.41 with half and 3.54 with a whole one."""
NUM_COMM_SMS = 16
"""Where "lcsc" is given none."""
CURVE_PEERS = 4
"""Peers with which the plain form, which exchanges a block at a time, is as fast as the links' curves."""


# ------------------------------------------------------------------------------------------------------------ the rule
def links_limit(M: int, N: int, size: int) -> bool:
    """Whether an M x N output takes longer to move than to compute. On H200 that is up to 8192 x 8192 on 4 ranks and
    4096 x 4096 on 2, by benchmarks/results/exhaustive_matmul_all_reduce*.json."""
    return M * N <= (2048 * size) ** 2


def tiles_of(M: int, N: int, size: int) -> Tiles:
    """The tiles for an M x N output."""
    return NARROW if links_limit(M, N, size) else WIDE


def rounds_of(M: int, N: int, K: int, size: int, tiles: Tiles) -> float:
    """Rounds of all programs that own tiles are behind: two of narrow ones; of wide ones one where the links are the
    limit, else as few quarters as take LEAST_BEHIND."""
    if tiles.block_n <= NARROW.block_n:
        return 2
    if links_limit(M, N, size):
        return 1
    return next((part for part in (0.25, 0.5) if part * average_seconds(K, tiles) >= LEAST_BEHIND), 1)


def settled(
    M: int, N: int, K: int, size: int, programs: int, tiles: Tiles | None = None, lag: int | None = None
) -> tuple[Tiles, int]:
    """`tiles` and `lag`; the rule fills in None."""
    tiles = tiles or tiles_of(M, N, size)
    count = triton.cdiv(M, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    programs = max(1, min(programs, count))
    rounds = rounds_of(M, N, K, size, tiles)
    return tiles, rules.lag_of(lag, rounds, triton.cdiv(count, size), programs, size)


def settings(M: int, N: int, K: int, world: World, tiles: Tiles | None, lag: int | None) -> tuple[Tiles, int]:
    """`settled` in a world. Raises ShapeError."""
    if tiles is not None:
        check_tiles(CALL, tiles, world)
    return settled(M, N, K, world.size, num_programs(world, world.num_sms), tiles, lag)


# -------------------------------------------------------------------------------------------------------------- spaces
def space_lcsc(key: Key, gpu: Gpu) -> list[Config]:
    """With num_comm_sms=0 all programs communicate after they have computed."""
    tiles = rules.plain_tiles(key["M"], key, gpu, (8, 16), rules.gluon_fits(key, gpu, "N"))
    return space(mode="lcsc", num_comm_sms=[0, *rules.comm_sms(gpu)], tiles=tiles)


def space_gluon(key: Key, gpu: Gpu) -> list[Config]:
    """Candidates of mode gluon; none where it cannot run."""
    if not rules.gluon_fits(key, gpu, "N"):
        return []
    return space(mode="gluon", lag=rules.lags(key, gpu), tiles=rules.gluon_tiles(gpu, (4, 8, 16)))


# ------------------------------------------------------------------------------------------------------------- seconds
def seconds_lcsc(config: Mapping[str, Any], key: Key, gpu: Gpu) -> Estimate:
    """32 rows of a tile at a time are loaded from every peer, then stored to every peer."""
    num_comm = config.get("num_comm_sms", NUM_COMM_SMS)
    case = rules.plain_product(config, key, key["M"], key["N"])
    one, movers = case.seconds(gpu, plain=True), num_comm or gpu.sms
    piece = min(case.block_m, 32) * case.block_n * case.itemsize * (case.size - 1) // CURVE_PEERS
    rate = 2 / (1 / link_rate("register load", movers, piece) + 1 / link_rate("register store", movers, piece))
    return overlapped(
        tasks=case.tiles(case.M), task_seconds=one, comm_bytes=rules.reduced(key), comm_rate=rate,
        num_comm_sms=num_comm, around=one, memory_bytes=case.memory_bytes, sync=3 * gpu.signal, gpu=gpu,
    )  # fmt: skip


def seconds_gluon(config: Mapping[str, Any], key: Key, gpu: Gpu) -> Estimate:
    """The parts of a candidate's predicted time, in seconds."""
    shape = key["M"], key["N"], key["K"], key["size"]
    tiles, lag = settled(*shape, gpu.sms, Tiles(*config["tiles"]) if config.get("tiles") else None, config.get("lag"))
    case = Product.of(key, tiles)
    return rules.in_turns(case, lag, triton.cdiv(case.tiles(case.M), case.size), rules.reduced(key), gpu)
