"""What the fused products' rules share: candidates' tiles, and blocks of predicted times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from pkt.model.calibration import collective_seconds, layout_of, product
from pkt.model.config import Config, space
from pkt.model.cost import DTYPES, Estimate, Product, overlapped
from pkt.model.gpu import Gpu, link_rate
from pkt.wording import dtype_text

from .gluon_fits import shared_bytes, unsuited
from .tile_product import Tiles, default_tiles, whole_rows

Key = Mapping[str, Any]
"""M, N and K of the product that each rank computes, dtype and size, the number of ranks."""
Seconds = Callable[[Mapping[str, Any], Key, Gpu], Estimate]
Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]

COMM_SMS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
PLAIN_TILES = ((128, 256, 64, 3), (128, 128, 64, 4))
"""Blocks and stages, with 8 warps: of all plain tiles the only ones that came near a Gluon form, measured on 4 x H200
at M from 4096 to 32768."""
ACCUMULATORS = 128
"""Most fp32 accumulators of a thread; with more of them the operands spill."""
LAGS = (0.25, 0.5, 1, 2, 4)
"""Candidates of the Gluon forms that reduce: rounds of all programs by which a rank's own tiles are late."""
MULTIPLIED = 6.3e12
"""FLOP a second of one SM over a whole product in a Gluon form, on 4 x H200, by
benchmarks/results/all_gather_matmul.json."""

# Fitted to all candidates of benchmarks/results/exhaustive_*.json, at 4 and 2 ranks.
INTERFERENCE = 0.6
"""Of computing and of sending finished tiles in the same programs, see `overlapped`."""
ARRIVES = 8e-6
"""Seconds from the end of a tile until its owner has it, while all other programs send theirs."""


# --------------------------------------------------------------------------------------------------------------- rules
def average_seconds(K: int, tiles: Tiles) -> float:
    """Seconds of a Gluon form's tile, K columns of A long, at the average rate of a whole product. The forms' own rules
    count in these; `pkt.model.cost.tile_seconds` is of a tile at full clock."""
    return 2 * tiles.block_m * tiles.block_n * K / MULTIPLIED


def lag_of(given: int | None, rounds: float, count: int, programs: int, size: int) -> int:
    """Tiles by which a rank's own, of `count`, are behind the others': the given number, or those of so many rounds of
    all programs. At least 1, because every rank must have begun a tile before its owner waits for it."""
    return max(1, min(math.ceil(rounds * programs / size) if given is None else given, count))


def gluon_fits(key: Key, gpu: Gpu, *columns: str) -> bool:
    """Whether a Gluon form takes a case. columns: the sizes in the key that are lengths of rows which TMA moves."""
    return gpu.gluon and not unsuited(dtype_of(key), key["size"], *(key[name] for name in columns))


def columns16(K: int, dtype: torch.dtype) -> int:
    """Columns of 16 bits that are moved and multiplied in as long as K of a dtype, as tensor cores are fast."""
    return K * dtype.itemsize // 2


def dtype_of(key: Key) -> torch.dtype:
    """Of the operands of a case."""
    return DTYPES[dtype_text(key["dtype"])]


# -------------------------------------------------------------------------------------------------------------- spaces
def plain_tiles(
    M: int, key: Key, gpu: Gpu, groups: tuple[int, ...], gluon: bool, staged: bool = False
) -> list[tuple[Any, ...]]:
    """Candidates (BLOCK_M, BLOCK_N, BLOCK_K, GROUP, NUM_WARPS, NUM_STAGES) of the plain kernels, for M rows. gluon: the
    Gluon form runs, so only PLAIN_TILES, if any. staged: the result has shared memory of its own, because it is still
    on its way when the next tile begins; else it is in the ring's."""
    N, K, dtype = key["N"], key["K"], dtype_of(key)
    itemsize = dtype.itemsize
    # fp32 has no tensor cores here, and rows that TMA cannot take have an address for each element: operands or
    # addresses sit in registers.
    registers = itemsize == 4 or not whole_rows(dtype, N, K)
    most, step = (64, 32 if itemsize == 2 else 16) if registers else (256, 64)

    def fits(c: Config) -> bool:
        ring = c["num_stages"] * c["block_k"] * (c["block_m"] + c["block_n"]) * itemsize
        result = c["block_m"] * c["block_n"] * itemsize if staged else 0
        return ring + result + shared_bytes(Tiles(0, 0, 0)) <= gpu.shared

    def in_registers(c: Config) -> bool:
        return c["block_m"] * c["block_n"] <= ACCUMULATORS * 32 * c["num_warps"]

    found = space(
        where=[fits, in_registers],
        block_m=_blocks(M, min(most, 128)),
        block_n=_blocks(N, most),
        block_k=_blocks(K, step)[-1],
        group=groups,
        num_warps=[4, 8],
        num_stages=[3, 4, 5],
    )
    tiles = [tuple(c.values()) for c in found]
    return [t for t in tiles if gluon and (*t[:3], t[5]) in PLAIN_TILES and t[4] == 8] or tiles


def gluon_tiles(gpu: Gpu, groups: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """Candidates of the Gluon forms, with every number of slots that fits."""
    found = space(
        where=lambda c: shared_bytes(Tiles(*c.values())) <= gpu.shared,
        block_m=128,
        block_n=[128, 256],
        block_k=64,
        group=groups,
        num_warps=8,
        num_stages=[3, 4, 5, 6],
    )
    return [tuple(c.values()) for c in found]


def lags(key: Key, gpu: Gpu) -> list[int]:
    """Candidates for `lag`."""
    return [math.ceil(rounds * gpu.sms / key["size"]) for rounds in LAGS]


def comm_sms(gpu: Gpu) -> list[int]:
    """Candidates for the programs that communicate: at least one program is left to compute."""
    return [n for n in COMM_SMS if n < gpu.sms]


def _blocks(length: int, most: int) -> list[int]:
    """The three largest powers of two, from 16 to `most`, that a dimension of this length is worth."""
    largest = max(16, min(most, 1 << (max(length, 1) - 1).bit_length()))
    return [block for block in (largest // 4, largest // 2, largest) if block >= 16]


# ------------------------------------------------------------------------------------------------------------- seconds
def plain_product(config: Mapping[str, Any], key: Key, rows: int, *columns: int) -> Product:
    """The product of a plain form, in the config's tiles or those that the form takes by itself: of these the narrow
    ones, to which pkt.model.calibration has fitted it."""
    return Product.of(key, config.get("tiles") or default_tiles(rows, dtype_of(key), *columns))


def in_turns(case: Product, lag: int, own: int, sent: float, gpu: Gpu) -> Estimate:
    """The time of a Gluon form that reduces. A rank's `own` tiles are `lag` tiles behind the others', which are sent,
    `sent` bytes in all. Tiles that are less than ARRIVES behind wait for the rest of that; and while the last `lag`
    tiles are computed, nothing is sent. Of a single round all tiles are computed, and then sent."""
    one, turn, rounds = case.seconds(gpu), gpu.sms / case.size, math.ceil(case.size * own / gpu.sms)
    late = max(0.0, ARRIVES - lag / turn * one) * own / gpu.sms
    rate, around = link_rate("TMA store", gpu.sms), min(rounds, 2) * one
    hidden = max(rounds * one, sent / rate) - around  # of the sending, at most
    tail = max(0.0, min(lag / gpu.sms * one, hidden))
    return overlapped(
        tasks=case.size * own, task_seconds=one, comm_bytes=sent, comm_rate=rate,
        around=around, memory_bytes=case.memory_bytes,
        sync=2 * gpu.signal + (late + tail if sent else 0.0),
        interference=INTERFERENCE, gpu=gpu,
    )  # fmt: skip


def gathered(key: Key) -> float:
    """Least bytes that leave a GPU in an all-gather of A by rows: its shard, to each peer. M counts all rows."""
    return key["M"] * key["K"] * dtype_of(key).itemsize * (key["size"] - 1) / key["size"]


def scattered(key: Key) -> float:
    """Least bytes that leave a GPU in a reduce-scatter of the product: all parts but its own."""
    return key["M"] * key["N"] * dtype_of(key).itemsize * (key["size"] - 1) / key["size"]


def reduced(key: Key) -> float:
    """Least bytes that leave a GPU in an all-reduce of the product without multicast: parts, and then sums."""
    return 2 * scattered(key)


def unfused_seconds(mode: str, collective: Collective, sent: Callable[[Key], float]) -> Seconds:
    """The time of a product and a collective, one after the other. sent: bytes that leave a GPU."""
    whose: Literal["pkt", "nccl"] = "nccl" if mode == "nccl" else "pkt"

    def seconds(_: Mapping[str, Any], key: Key, gpu: Gpu) -> Estimate:
        alone = product(key, gpu)
        moving = collective_seconds(collective, whose, sent(key), key["size"], gpu)
        exposed = alone.exposed + min(max(alone.compute, alone.memory), moving)  # nothing overlaps
        if whose == "nccl" and layout_of(key) == "columns":  # the shards, one below the other, are copied once more
            exposed += 2 * key["M"] * key["K"] * dtype_of(key).itemsize / gpu.memory
        return replace(alone, communication=moving, exposed=exposed)

    return seconds
