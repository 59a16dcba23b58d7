"""matmul_all_reduce's rules: tiles and lag of the Gluon form, the tuner's candidates, predicted times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton

from pkt.model.config import Config, space
from pkt.model.cost import Estimate, Product, overlapped
from pkt.model.gpu import H200, Gpu, gpu_named, link_rate
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
MOVED = 4265
"""K of a product that takes as long as the links take for its output, on many ranks: 390 GB/s, and the rate of
`average_seconds` on 132 SMs."""
NARROW_COST = 1.2
"""What two narrow tiles take, in the time of a wide one. On 4 x H100 narrow and wide tiles take 1.04 and 0.86 ms for
8192 x 7168 with K = 4096, 1.96 and 1.58 for 8192 x 8192 with 7168; 0.257 and 0.234 for 1024 x 8192 with 7168, which is
two rounds of wide tiles, and 0.163 and 0.178 for 1024 x 5120 with 6400, which is 1.2. On 2 they take 0.311 and 0.260
for 2048 x 8192 with 4096 (matmul_all_reduce_tried_4.json and _tried_2.json of benchmarks/results, as the figures
below)."""
LONG_BYTES = 72 << 20
"""Programs whose own tiles alternate with others' wait at different times, and then no longer read the same parts of
the operands together. Where the operands of a round are more than this, which is more than L2 holds, own tiles come
last: 16384 x 16384 with K = 13312 takes 19.7 ms on 4 x H100 where they alternate, 11.5 where they come last, and
cuBLAS alone 11.1; on 2, 8192 x 16384 with 26624 takes 16.7, 10.4 and 10.6, and 1500 x 7168 with 9216 0.365 and 0.348.
With 7168 and less, and few rounds, it makes no difference, or costs up to 7 %, because half of what is sent is sent
with own tiles."""
ROUND_BYTES, MANY_ROUNDS = 50 << 20, 12
"""In so many rounds programs drift apart. Where what they miss in L2 then takes longer than their products, as on H100,
own tiles come last from ROUND_BYTES on, which is what L2 holds. 16384 x 16384 with K = 7168 takes 8.85 ms on 4 x H100
where they alternate, and 6.07 where they come last; 16384 x 8192 with 7168 3.32 and 3.00, 16384 x 5120 with 6400 1.83
and 1.72; but 16384 x 16384 with 4096 3.47 and 3.67. On 2 8192 x 8192 with 7168 takes 1.46 and 1.39, 16384 x 5120 with
6400 1.71 and 1.58 (matmul_all_reduce_naps_h100_4.json and _2.json). On 2 x H200 16384 x 16384 with 8192 takes 6.5 ms
where they alternate, which is 670 TFLOP/s (exhaustive_matmul_all_reduce_2.json)."""
MISSED = 0.42
"""The share of what programs load that comes from memory where own tiles alternate with others'. Seven products on 4 x
H100, with K up to 7168, take as long as memory takes for 0.40 to 0.43 of it."""
FEW_BLOCKS, MISSED_OF_FEW = 8, 0.55
"""With fewer row blocks few programs share a tile of b, and more comes from memory, also where own tiles come last:
0.52 to 0.62 of what programs load, by four products of 512 and 514 rows in two and three rounds on 4 x H100
(matmul_all_reduce_tried_h100_4.json)."""
WIDE_COST = 1.1
"""A wide tile takes so many times as long as by `pkt.model.cost.tile_seconds`. With 1.0 or 1.2 the model's choices are
worse at shapes that were measured later (tests/tune/test_calibration.py): in the mean 1.0049 and 1.0056 times the time
of the fastest form, with 1.1 1.0031."""
NUM_COMM_SMS = 16
"""Where "lcsc" is given none."""
CURVE_PEERS = 4
"""Peers with which the plain form, which exchanges a block at a time, is as fast as the links' curves."""


# ------------------------------------------------------------------------------------------------------------ the rule
def tiles_of(M: int, N: int, K: int, size: int, programs: int) -> Tiles:
    """The tiles for an M x N output: narrow ones where it takes longer to move than to compute; or where wide ones
    would leave too many of the programs without one in their last round, unless K is long."""
    if M * N > (2048 * size) ** 2:
        return WIDE
    if _moves(K, size):
        return NARROW
    wide, narrow = (math.ceil(_count(M, N, tiles) / programs) for tiles in (WIDE, NARROW))
    long = operands(K, NARROW, programs) > LONG_BYTES
    return WIDE if long or 2 * wide <= NARROW_COST * narrow else NARROW


def _moves(K: int, size: int) -> bool:
    """Whether an output takes longer to move than to compute. Of N x N outputs with K = N / size that is so on H200 up
    to 8192 on 4 ranks and 4096 on 2, by benchmarks/results/exhaustive_matmul_all_reduce*.json."""
    return K <= MOVED * (size - 1) / size


def _count(M: int, N: int, tiles: Tiles) -> int:
    return triton.cdiv(M, tiles.block_m) * triton.cdiv(N, tiles.block_n)


def rounds_of(M: int, N: int, K: int, size: int, tiles: Tiles) -> float:
    """Rounds of all programs that own tiles are behind: two of narrow ones; of wide ones one where the links are the
    limit, else as few quarters as take LEAST_BEHIND."""
    if tiles.block_n <= NARROW.block_n:
        return 2
    if M * N <= (2048 * size) ** 2 and _moves(K, size):
        return 1
    return next((part for part in (0.25, 0.5) if part * average_seconds(K, tiles) >= LEAST_BEHIND), 1)


def settled(
    M: int, N: int, K: int, size: int, programs: int, tiles: Tiles | None = None, lag: int | None = None,
    dtype: torch.dtype = torch.bfloat16, memory: float = H200.memory,
) -> tuple[Tiles, int]:  # fmt: skip
    """`tiles` and `lag`, for operands of a dtype; the rule fills in None. memory: bytes a second of the GPU's."""
    tiles = tiles or tiles_of(M, N, K, size, programs)
    K = rules.columns16(K, dtype)
    count = _count(M, N, tiles)
    own, programs = triton.cdiv(count, size), max(1, min(programs, count))
    missed = MISSED * programs * (tiles.block_m + tiles.block_n) * K * 2 / memory
    drifting = count > MANY_ROUNDS * programs and missed > average_seconds(K, tiles)
    most = ROUND_BYTES if drifting else LONG_BYTES
    if lag is None and count > programs and operands(K, tiles, programs) > most:
        lag = own
    return tiles, rules.lag_of(lag, rounds_of(M, N, K, size, tiles), own, programs, size)


def early_tiles(count: int, lag: int, programs: int, size: int) -> int:
    """How many tiles of other ranks are copied while this rank still computes, of an output of `count` tiles. The rest
    land about when it has finished: twice what lands in the last round of own tiles, and one a program. Before waits
    napped, 4096 x 4096 with K = 2048 took 218 us on 4 x H100 with this number, 226 with more and 198 with none
    (matmul_all_reduce_polls_h100_4.json). It takes 200 since, with this number."""
    others = (size - 1) * triton.cdiv(count, size)
    return max(0, others - 2 * (size - 1) * min(lag, programs) - programs)


def operands(K: int, tiles: Tiles, programs: int) -> float:
    """Bytes of 16-bit operands that a round of tiles reads, if they make a square."""
    return 4 * K * math.sqrt(programs * tiles.block_m * tiles.block_n)


def settings(
    M: int, N: int, K: int, world: World, tiles: Tiles | None, lag: int | None, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tiles, int]:
    """`settled` in a world. Raises ShapeError."""
    if tiles is not None:
        check_tiles(CALL, tiles, world, dtype)
    memory = gpu_named(world.backend.gpu).memory
    return settled(M, N, K, world.size, num_programs(world, world.num_sms), tiles, lag, dtype, memory)


# -------------------------------------------------------------------------------------------------------------- spaces
def space_lcsc(key: Key, gpu: Gpu) -> list[Config]:
    """With num_comm_sms=0 all programs communicate after they have computed."""
    tiles = rules.plain_tiles(key["M"], key, gpu, (8, 16), rules.gluon_fits(key, gpu, "N"))
    return space(mode="lcsc", num_comm_sms=[0, *rules.comm_sms(gpu)], tiles=tiles)


def space_gluon(key: Key, gpu: Gpu) -> list[Config]:
    """Candidates of mode gluon, whose own tiles alternate with others' or come last; none where it cannot run."""
    if not rules.gluon_fits(key, gpu, "N"):
        return []
    tiles, alternating = rules.gluon_tiles(gpu, (4, 8, 16)), rules.lags(key, gpu)
    own = {t: triton.cdiv(_count(key["M"], key["N"], Tiles(*t)), key["size"]) for t in tiles}
    last = [config for t in tiles if own[t] > max(alternating) for config in space(mode="gluon", lag=own[t], tiles=[t])]
    return space(mode="gluon", lag=alternating, tiles=tiles) + last


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
    given = Tiles(*config["tiles"]) if config.get("tiles") else None, config.get("lag")
    tiles, lag = settled(*shape, gpu.sms, *given, memory=gpu.memory)
    case = Product.of(key, tiles)
    count = case.tiles(case.M)
    own, rounds = triton.cdiv(count, case.size), math.ceil(count / gpu.sms)
    wide, few = case.block_n > NARROW.block_n, triton.cdiv(case.M, case.block_m) < FEW_BLOCKS
    share = MISSED_OF_FEW if few else 0.0 if lag == own else MISSED
    if lag == own:  # their sums are sent while they are computed
        lag = rules.lag_of(None, 0.25, own, gpu.sms, case.size)
    loaded = count * (case.block_m + case.block_n) * case.K * case.itemsize
    missed = share * loaded / gpu.memory if rounds > 1 and case.size > 1 else 0.0
    found = rules.in_turns(case, lag, own, rules.reduced(key), gpu)
    found = replace(found, compute=(WIDE_COST if wide else 1) * found.compute)
    if few and rounds > 1:  # they begin to send when little is left to compute
        found = replace(found, exposed=min(found.compute, found.communication), sync=2 * gpu.signal)
    if found.launch + missed > found.total:
        return replace(found, memory=missed, exposed=0.0, sync=0.0)
    return found
