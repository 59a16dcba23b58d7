"""Blocks of the cost model of ParallelKittens: the predicted time of a config, before anything is measured.

    T = launch + max(compute, memory, communication) + exposed + sync        (Sul et al., section 3.1.1)

compute: whole tiles in whole waves. n tiles on p SMs take ceil(n / p) times a tile's time; communicators join when they
    have finished. memory: bytes that memory moves at least. communication: bytes over the rate of the mechanism with so
    many programs, from the measured curves of benchmarks/link.py. exposed: time that nothing can hide: the last tile
    after the last arrival, the first tile before there is anything to send, and contention where the same programs
    compute and communicate. sync: signals and barriers.

A model ranks candidates, so that few are measured. Each operator's rules.py puts its own predictions together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pkt.model.gpu import H200, Gpu, interpolated
from pkt.wording import dtype_text

# The constants are fitted to benchmarks/results/*.json of H200, like some figures of gpu.py.
PLAIN_TILE = 3e-6
"""Seconds of a tile outside its K loop in plain Triton; the warp-specialised Gluon forms hide them."""
LIBRARY_TILES = tuple(
    (m, n, 64) for m in (64, 128, 192, 256) for n in (64, 96, 128, 160, 192, 256) if m * n <= 128 * 256
)
SPLITS = (1, 2, 4)
"""cuBLAS is assumed to choose the best of these tiles, and to cut K into the best of so many parts."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MODELLED = ("bf16", "fp16")
"""dtypes that were measured."""


@dataclass(frozen=True)
class Estimate:
    """The parts of a predicted time, in seconds."""

    launch: float
    compute: float
    memory: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    sync: float = 0.0
    correction: float = 0.0
    """What pkt.model.calibration adds: how much longer the like of it took when it was measured."""

    @property
    def total(self) -> float:
        longest = max(self.compute, self.memory, self.communication)
        return self.launch + longest + self.exposed + self.sync + self.correction


# ---------------------------------------------------------------------------------------------------- building blocks
def tile_seconds(block_m: int, block_n: int, K: int, *, itemsize: int = 2, gpu: Gpu = H200) -> float:
    """Seconds of a tile's loop over K on one SM: the greater of the tensor cores' time and the time of the loads from
    L2, and a little of the lesser."""
    cores = 2 * block_m * block_n * K / (gpu.flops / gpu.sms)
    loads = (block_m + block_n) * K * itemsize / gpu.l2
    return float((cores**4 + loads**4) ** 0.25)


def waves(tasks: int, task_seconds: float, sms: int, num_comm_sms: int = 0, until: float = 0.0) -> float:
    """Seconds until `sms` programs have taken `tasks` equal tasks from a queue; num_comm_sms of the programs come
    `until` seconds late. If none does, that is ceil(tasks / sms) waves."""
    late = min(num_comm_sms, sms)
    if tasks <= 0:
        return 0.0
    if not late:
        return math.ceil(tasks / sms) * task_seconds

    def done(t: float) -> int:
        count = (sms - late) * math.floor(t / task_seconds + 1e-9)
        return count + late * math.floor(max(0.0, t - until) / task_seconds + 1e-9)

    def first(start: float) -> float:
        """The least start + n * task_seconds at which all tasks are done."""
        low, high = 0, tasks
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if done(start + middle * task_seconds) >= tasks else (middle + 1, high)
        return start + low * task_seconds

    return first(until) if late == sms else min(first(0.0), first(until))


def overlapped(
    *,
    tasks: int,
    task_seconds: float,
    comm_bytes: float = 0.0,
    comm_rate: float = math.inf,
    num_comm_sms: int | None = None,
    around: float = 0.0,
    memory_bytes: float = 0.0,
    exposed: float = 0.0,
    sync: float = 0.0,
    interference: float = 1.0,
    gpu: Gpu = H200,
) -> Estimate:
    """The parts of the time of a kernel that computes `tasks` tiles and moves comm_bytes out of this GPU.

    task_seconds: of a tile, for example `tile_seconds`. comm_rate: bytes a second, for example `link_rate`.
    num_comm_sms: programs that only communicate and then join in computing; 0: all programs communicate after they have
    computed; None: the programs that compute also communicate. around: seconds of computing before the first byte can
    leave and after the last has come. exposed, sync: further seconds of these parts. interference: with num_comm_sms
    None, the lost share of hypot(compute, communication) - max(compute, communication), which independent users of one
    memory would lose.
    """
    communication = comm_bytes / comm_rate
    compute = waves(tasks, task_seconds, gpu.sms, num_comm_sms or 0, communication)
    compute *= interpolated(gpu.slow, compute) if compute else 1.0
    longer = max(compute, communication)
    if num_comm_sms == 0:
        exposed += min(compute, communication)
    elif communication:
        exposed += max(0.0, communication + around - longer)
    if num_comm_sms is None:
        exposed += interference * (math.hypot(compute, communication) - longer)
    return Estimate(gpu.launch, compute, memory_bytes / gpu.memory, communication, exposed, sync)


# ------------------------------------------------------------------------------------------------------- the product
@dataclass(frozen=True)
class Product:
    """The product (M, K) @ (K, N) that each of `size` ranks computes, and the tiles that it is cut into."""

    M: int
    N: int
    K: int
    size: int
    itemsize: int
    block_m: int
    block_n: int
    block_k: int

    @classmethod
    def of(cls, key: Mapping[str, Any], tiles: Sequence[int]) -> Product:
        itemsize = DTYPES[dtype_text(key["dtype"])].itemsize
        return cls(key["M"], key["N"], key["K"], key["size"], itemsize, *tiles[:3])

    @property
    def m(self) -> int:
        """Rows of a rank's part."""
        return math.ceil(self.M / self.size)

    @property
    def tiles_n(self) -> int:
        return math.ceil(self.N / self.block_n)

    def tiles(self, rows: int) -> int:
        """Tiles of so many rows."""
        return math.ceil(rows / self.block_m) * self.tiles_n

    @property
    def memory_bytes(self) -> float:
        """Operands and result, once each."""
        return float(self.itemsize * (self.M * self.K + self.K * self.N + self.M * self.N))

    @property
    def memory_bytes_by_parts(self) -> float:
        """The same where the rows of each rank read the weights once more, as in the plain forms: 2 rows on 2 H200 take
        twice as long in them as the weights take to be read."""
        return self.memory_bytes + float(self.itemsize * (self.size - 1) * self.K * self.N)

    def seconds(self, gpu: Gpu, plain: bool = False, pieces: int = 1) -> float:
        """Of a tile, or of one of the pieces that it is cut into. plain: of a form in plain Triton."""
        steps = math.ceil(self.K / self.block_k) * self.block_k
        loop = tile_seconds(self.block_m, self.block_n // pieces, steps, itemsize=self.itemsize, gpu=gpu)
        return loop + PLAIN_TILE if plain else loop


def modelled(key: Mapping[str, Any]) -> bool:
    """Whether anything can be predicted for a key: M, N and K of the product that each rank computes, dtype and size,
    the number of ranks."""
    return dtype_text(key.get("dtype")) in MODELLED and min(key.get(n, 0) for n in ("M", "N", "K", "size")) >= 1


def library(key: Mapping[str, Any], gpu: Gpu = H200) -> Estimate:
    """The parts of the time of cuBLAS's product."""
    return _library(key["M"], key["N"], key["K"], DTYPES[dtype_text(key["dtype"])].itemsize, gpu)


@functools.lru_cache(maxsize=4096)  # a forecast asks for one product in several of its forms
def _library(M: int, N: int, K: int, itemsize: int, gpu: Gpu) -> Estimate:
    def product(tiles: tuple[int, int, int], parts: int) -> Estimate:
        cut = Product(M, N, math.ceil(K / parts), 1, itemsize, *tiles)
        sums = 2 * 4 * (parts - 1) * M * N / gpu.memory  # fp32, written and read again
        return overlapped(
            tasks=parts * cut.tiles(M), task_seconds=cut.seconds(gpu), memory_bytes=whole, exposed=sums, gpu=gpu
        )

    whole = Product(M, N, K, 1, itemsize, *LIBRARY_TILES[0]).memory_bytes
    return min((product(tiles, parts) for tiles in LIBRARY_TILES for parts in SPLITS), key=lambda e: e.total)
