"""What a config will take, before anything is measured: the cost model of ParallelKittens.

    T = launch + max(compute, memory, communication) + exposed + sync        (Sul et al., section 3.1.1)

compute: whole tiles in whole waves: n tiles on p SMs take ceil(n / p) times a tile's time, and communicators that have
    finished join. memory: what memory moves at least. communication: bytes over what the mechanism reaches from so many
    programs, from the measured curves of benchmarks/link.py. exposed: what nothing can hide: the last tile after the
    last arrival, the first before there is anything to send, and what compute and communication take from each other
    where the same programs do both. sync: signals and barriers.

A model ranks candidates, so that few are measured; it does not replace measuring. `error` says how far it is off.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from pkt.tune.gpu import H200, Gpu, interpolated, link_rate
from pkt.tune.search import Candidate, Model
from pkt.wording import dtype_text

# Fitted to benchmarks/results/*.json of H200, as gpu.py says of some of its figures; TAKEN, ARRIVES, PEERS, COPY and
# ANNOUNCED to all candidates of benchmarks/results/exhaustive_*.json, at 4 and 2 ranks. All else is counted.
PLAIN_TILE = 3e-6
"""Seconds of a tile outside its K loop in plain Triton; the warp-specialised Gluon forms hide them."""
DEFAULT_TILES = (128, 128, 64)
GLUON_TILES = (128, 256, 64)
LIBRARY_TILES = (GLUON_TILES, DEFAULT_TILES, (64, 64, 64))
"""Of which cuBLAS is taken to choose the best."""
QUARTERS, ENOUGH, LINKS_LIMIT = (0.25, 0.5), 9.4e-6, 2048
"""Of a round that matmul_all_reduce's own wide tiles may be behind the others', the seconds that these need, and the
side of the output for each rank up to which they are a whole one, because the links are the limit."""
TAKEN = 0.6
"""Interference of sending in passing, see `overlapped`."""
ARRIVES = 8e-6
"""Seconds from the end of a tile until its owner has it, while all other programs send theirs."""
PEERS = 4
"""With how many matmul_all_reduce's plain form would have to exchange a block at a time to be as fast as the curves."""
NCCL_PROGRAMS = 32
"""That NCCL is taken to move data with, from registers."""
NCCL_LATENCY = 10e-6
"""Seconds of its collectives beside a launch and what the bytes take: captured, an all-reduce of 16 KiB takes 19.7 us.
"""
BESIDE = 0.86
"""Of the rate that links reach alone, what they reach while the other programs compute."""
PUSHERS, STAGES, CHUNK = 16, 4, 128
"""Of all_gather_matmul's Gluon form, where none are given; the chunks of fewer programs are twice as long."""
COPY = 3.5e-6
"""Seconds that a copy by an engine that waits for tiles takes, with the word behind it, beside those of its curve."""
ANNOUNCED = 14e-6
"""Seconds of a launch whose copies wait for tiles: of the kernel that ranks begin with, and until the last copy joins.
"""
COPIES_BEGIN, COPY_STARTS = 10e-6, 2e-6
"""Seconds before the first of all_gather_matmul's copies begins, and that each takes beside those of its curve."""
COPIES = (4, 1)
"""To a peer, of its copied forms where none are given: in plain Triton, and in Gluon."""
PARCELS = (2, 2048, 16 << 20)
"""Copies that a part of the reduce-scatter goes in, in Gluon, from which K and which bytes on; else none."""
CUTS = (1, 2, 4)
"""Columns that it cuts a tile in."""
ITEMSIZE = {"bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Estimate:
    """The parts of a predicted time, in seconds."""

    launch: float
    compute: float
    memory: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    sync: float = 0.0

    @property
    def total(self) -> float:
        return self.launch + max(self.compute, self.memory, self.communication) + self.exposed + self.sync


# ---------------------------------------------------------------------------------------------------- building blocks
def tile_seconds(block_m: int, block_n: int, K: int, *, itemsize: int = 2, gpu: Gpu = H200) -> float:
    """A tile's loop over K on one SM: the tensor cores' time and that of the loads from L2, of which the greater
    counts, and the less a little."""
    cores = 2 * block_m * block_n * K / (gpu.flops / gpu.sms)
    loads = (block_m + block_n) * K * itemsize / gpu.l2
    return float((cores**4 + loads**4) ** 0.25)


def waves(tasks: int, task_seconds: float, sms: int, num_comm_sms: int = 0, until: float = 0.0) -> float:
    """Seconds of `tasks` alike, taken from a queue by `sms` programs, of which num_comm_sms come `until` seconds late.

    Without them: ceil(tasks / sms) waves.
    """
    late = min(num_comm_sms, sms)

    def done(t: float) -> int:
        count = (sms - late) * math.floor(t / task_seconds + 1e-9)
        return count + late * math.floor(max(0.0, t - until) / task_seconds + 1e-9)

    def first(start: float) -> float:
        """The least start + n tasks by which all are done."""
        low, high = 0, tasks
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if done(start + middle * task_seconds) >= tasks else (middle + 1, high)
        return start + low * task_seconds

    if tasks <= 0:
        return 0.0
    return first(until) if late == sms else min(first(0.0), first(until)) if late else first(0.0)


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
    """A kernel that computes `tasks` tiles and moves comm_bytes out of this GPU; also one of your own.

    task_seconds: of a tile, for example `tile_seconds`. comm_rate: bytes a second, for example `link_rate`.
    num_comm_sms: programs that only communicate and then join in computing; 0: all of them, after computing; None: the
    programs that compute communicate in passing. around: seconds of computing before the first byte can leave and after
    the last has come. exposed, sync: seconds more of that. interference: in passing, how much of what the two would
    take from each other as independent users of one memory, hypot(compute, communication) - max(...), is lost.
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


# ---------------------------------------------------------------------------------------------------------- operators
@dataclass(frozen=True)
class _Case:
    """The product (M, K) @ (K, N) that each rank computes, and the tiles it is cut into."""

    M: int
    N: int
    K: int
    size: int
    itemsize: int
    block_m: int
    block_n: int
    block_k: int

    @classmethod
    def of(cls, config: Mapping[str, Any], key: Mapping[str, Any]) -> _Case | None:
        itemsize = ITEMSIZE.get(dtype_text(key.get("dtype")))
        shape = [key.get(name, 0) for name in ("M", "N", "K", "size")]
        if itemsize is None or min(shape) < 1:
            return None
        default = GLUON_TILES if config.get("mode") == "gluon" else DEFAULT_TILES
        block_m, block_n, block_k = tuple(config.get("tiles") or default)[:3]
        M, N, K, size = shape
        return cls(M, N, K, size, itemsize, block_m, block_n, block_k)

    @property
    def tiles_n(self) -> int:
        return math.ceil(self.N / self.block_n)

    def tiles(self, M: int) -> int:
        return math.ceil(M / self.block_m) * self.tiles_n

    @property
    def memory_bytes(self) -> float:
        """Operands and result, once each."""
        return float(self.itemsize * (self.M * self.K + self.K * self.N + self.M * self.N))

    def seconds(self, gluon: bool, gpu: Gpu) -> float:
        """Of a tile."""
        steps = math.ceil(self.K / self.block_k) * self.block_k
        loop = tile_seconds(self.block_m, self.block_n, steps, itemsize=self.itemsize, gpu=gpu)
        return loop if gluon else loop + PLAIN_TILE


def estimate(what: str, config: Mapping[str, Any], key: Mapping[str, Any], gpu: Gpu = H200) -> Estimate | None:
    """The parts of the time of operator `what` for a key: M, N, K of the product (M, K) @ (K, N) that each rank
    computes (for all_gather_matmul M counts the gathered rows), dtype, and size, the number of ranks. None where
    nothing was measured that could say: another dtype than bf16 and fp16, another operator. A config without a mode is
    one of the plain form, without tiles one of 128 x 128 x 64, in Gluon 128 x 256 x 64."""
    case = _Case.of(config, key)
    parts = _PARTS.get(what)
    if case is None or parts is None:
        return None
    if config.get("mode") == "nccl":
        rate = link_rate("register store", NCCL_PROGRAMS)
        return _library(case, gpu, sent(what, key) / rate, NCCL_LATENCY)
    if config.get("mode") == "unfused":
        rate = link_rate("register store", gpu.sms, peers="all")  # as pkt's own collectives move what is not little
        return _library(case, gpu, sent(what, key) / rate, gpu.barrier)
    return parts(case, config, gpu)


def sent(what: str, key: Mapping[str, Any]) -> float:
    """Bytes that leave a GPU at least, without multicast, by operator `what` for a key as `estimate` has it."""
    size, itemsize = key["size"], ITEMSIZE[dtype_text(key["dtype"])]
    whole = key["M"] * (key["K"] if what == "all_gather_matmul" else key["N"]) * itemsize
    return (2.0 if what == "matmul_all_reduce" else 1.0) * whole * (size - 1) / size


def product_alone(key: Mapping[str, Any], gpu: Gpu = H200) -> Estimate | None:
    """The parts of the time of the product that each rank computes, by cuBLAS, for a key as `estimate` has it."""
    case = _Case.of({}, key)
    return None if case is None else _library(case, gpu)


def _total(what: str, config: Mapping[str, Any], key: Mapping[str, Any]) -> float | None:
    found = estimate(what, config, key)
    return None if found is None else found.total


def _library(case: _Case, gpu: Gpu, moving: float = 0.0, sync: float = 0.0) -> Estimate:
    """cuBLAS, and if anything is moved, for so many seconds, a collective before or after it: a launch each, and
    nothing overlapped."""

    def product(tiles: tuple[int, int, int]) -> Estimate:
        cut = replace(case, block_m=tiles[0], block_n=tiles[1], block_k=tiles[2])
        one = cut.seconds(True, gpu)
        return overlapped(
            tasks=cut.tiles(case.M), task_seconds=one, memory_bytes=case.memory_bytes, gpu=gpu,
        )  # fmt: skip

    alone = min(map(product, LIBRARY_TILES), key=lambda parts: parts.total)
    if not moving:
        return alone
    exposed = min(max(alone.compute, alone.memory), moving)
    return replace(alone, launch=2 * gpu.launch, communication=moving, exposed=exposed, sync=sync)


def _all_gather_matmul(case: _Case, config: Mapping[str, Any], gpu: Gpu) -> Estimate:
    mode = config.get("mode") or "push"
    m = math.ceil(case.M / case.size)
    sent = (case.size - 1) * m * case.K * case.itemsize
    tasks = case.size * case.tiles(m)
    if mode == "pull":  # a shard crosses the links once for every column of tiles
        return overlapped(
            tasks=tasks, task_seconds=case.seconds(False, gpu), comm_bytes=sent * case.tiles_n,
            comm_rate=link_rate("TMA load", gpu.sms), memory_bytes=case.memory_bytes, sync=2 * gpu.barrier, gpu=gpu,
        )  # fmt: skip
    if mode == "copy" or (mode == "gluon" and config.get("num_comm_sms") == 0):
        return _copied(case, config, sent, tasks, gpu)
    if mode == "gluon":
        return _push_first(case, config, sent, tasks, gpu)
    comm_sms = config.get("num_comm_sms") or 16
    one = case.seconds(False, gpu)
    block = case.block_m * case.block_k * case.itemsize
    return overlapped(
        tasks=tasks, task_seconds=one, comm_bytes=sent, comm_rate=link_rate("register store", comm_sms, block, "all"),
        num_comm_sms=comm_sms if sent else None, around=one, memory_bytes=case.memory_bytes, sync=2 * gpu.signal,
        gpu=gpu,
    )  # fmt: skip


def _push_first(case: _Case, config: Mapping[str, Any], sent: float, tasks: int, gpu: Gpu) -> Estimate:
    """Some programs push, through the slots of their ring, while the others compute `rounds_alone` rounds of tiles;
    then all compute. After `whole_rounds` tiles are cut. A tile begins with its first chunk; where the links are the
    limit, the last ones, cut or whole, are computed when the last rows have come."""
    pushers = min(config.get("num_comm_sms") or PUSHERS, gpu.sms) if sent else 0
    one = case.seconds(True, gpu)
    pushing, rate = 0.0, 1.0
    if sent:
        stages = (*(config.get("tiles") or ()), *(0,) * 6)[5] or STAGES
        ring = stages * case.block_k * case.block_n * case.itemsize
        rate = BESIDE * link_rate("TMA store", pushers, ring, peers="all")
        pushing = sent / rate
    computing = max(gpu.sms - pushers, 1)
    whole, alone, given = (config.get(name) for name in ("whole_rounds", "rounds_alone", "cut_last"))
    whole = tasks if whole is None else whole
    wanted = math.ceil(pushing / one) if alone is None else alone
    alone = min(wanted, whole, tasks // computing)
    joined, left = divmod(tasks - alone * computing, gpu.sms)
    left += max(joined - (whole - alone), 0) * gpu.sms
    joined = min(joined, whole - alone)

    def after(pieces: int) -> float:
        """The time of what is cut, in rounds that those that push are left out of, and of all."""
        part = replace(case, block_n=case.block_n // pieces).seconds(True, gpu)
        late = min(max(wanted - alone - joined, 0), left * pieces // computing)
        return (late + math.ceil((left * pieces - late * computing) / gpu.sms)) * part

    compute = alone * one if not joined else max(alone * one, pushing) + joined * one
    compute += min(map(after, (given,) if given else CUTS))
    chunk = min(1.0, (config.get("chunk") or CHUNK * (1 if pushers >= PUSHERS else 2)) / case.K)
    cut = (given or 1) if left >= computing else 1
    last = replace(case, block_n=case.block_n // cut).seconds(True, gpu)
    # A tile begins with its first chunk, so the last ones began when all before them had come.
    wave = pushing * min(1.0, gpu.sms / max(tasks * cut * (case.size - 1) / case.size, 1.0))
    last = max(one * chunk, last - wave)
    return overlapped(
        tasks=1, task_seconds=compute, comm_bytes=sent, comm_rate=rate, around=last,
        memory_bytes=case.memory_bytes, sync=2 * gpu.signal, interference=0.0, gpu=gpu,
    )  # fmt: skip


def _copied(case: _Case, config: Mapping[str, Any], sent: float, tasks: int, gpu: Gpu) -> Estimate:
    """By copy engines: all programs compute, in Gluon cut tiles after `whole_rounds`. Followed program by program: a
    tile goes on with a chunk of its rows when that has come."""
    gluon = config.get("mode") == "gluon"
    pieces = (config.get("cut_last") or 1) if gluon else 1
    one, part = (replace(case, block_n=case.block_n // n).seconds(gluon, gpu) for n in (1, pieces))
    whole = config.get("whole_rounds")
    rounds = tasks // gpu.sms if whole is None else min(whole, tasks // gpu.sms)
    left = (tasks - rounds * gpu.sms) * pieces
    pure = rounds * one + math.ceil(left / gpu.sms) * part
    found = overlapped(
        tasks=1, task_seconds=pure, memory_bytes=case.memory_bytes, sync=gpu.barrier + 2 * gpu.signal, gpu=gpu,
    )  # fmt: skip
    if not sent:
        return found
    blocks, others = math.ceil(case.M / case.size / case.block_m), case.size - 1
    step = min(config.get("push_rows") or math.ceil(blocks / COPIES[gluon]), blocks)
    own, together = blocks * case.tiles_n, others * step * case.tiles_n

    def arrivals(chunk: int) -> np.ndarray:
        """When each chunk of `step` row blocks of a peer is here: (groups of them * peers, chunks)."""
        rows = [min(step, blocks - first) * case.block_m for first in range(0, blocks, step) for _ in range(others)]
        widths = [min(chunk, case.K - first) for first in range(0, case.K, chunk)]
        sizes = np.outer(rows, widths) * case.itemsize
        copies = [n / link_rate("copy engine put", 0, int(n)) + COPY_STARTS for n in sizes.flat]
        return COPIES_BEGIN + np.cumsum(copies).reshape(sizes.shape)

    come = arrivals(case.K)
    chunk = config.get("chunk")
    if chunk is None and gluon and not config.get("push_rows") and come[0, 0] > own / gpu.sms * one:
        chunk = math.ceil(case.K / 2 / case.block_k) * case.block_k
    if chunk:
        come = arrivals(min(chunk, case.K))
    slow, clock = found.compute / pure, np.zeros(gpu.sms)
    whole_tiles = [(np.arange(first, first + gpu.sms), one) for first in range(0, rounds * gpu.sms, gpu.sms)]
    parts = [np.arange(first, min(first + gpu.sms, left)) for first in range(0, left, gpu.sms)]
    for tile, seconds in [*whole_tiles, *((rounds * gpu.sms + at // pieces, part) for at in parts)]:
        group, place = np.divmod(np.maximum(tile - own, 0), together)
        source = place // (np.minimum(step, blocks - group * step) * case.tiles_n)
        for column in np.where((tile < own)[:, None], 0.0, come[group * others + source]).T:
            clock[: len(tile)] = np.maximum(clock[: len(tile)], column) + seconds * slow / come.shape[1]
    moving = float(come[-1, -1]) - COPIES_BEGIN
    return replace(found, communication=moving, exposed=max(0.0, float(clock.max()) - max(found.compute, moving)))


def pushing_rounds(config: Mapping[str, Any], key: Mapping[str, Any], gpu: Gpu = H200) -> float:
    """Rounds of tiles that all_gather_matmul's Gluon form computes while it pushes, for a key as `estimate` has it."""
    case = _Case.of(config, key)
    found = estimate("all_gather_matmul", config, key, gpu)
    return 0.0 if case is None or found is None else found.communication / case.seconds(True, gpu)


def _matmul_reduce_scatter(case: _Case, config: Mapping[str, Any], gpu: Gpu) -> Estimate:
    mode = config.get("mode") or "add"
    m = math.ceil(case.M / case.size)
    part = m * case.N * case.itemsize
    tasks = case.size * case.tiles(m)
    if mode == "gluon":
        copies = config.get("copies")
        if copies is None:
            copies = _parcels(case, part) * ("lag" not in config)
        if copies and case.size > 1:
            return _in_parcels(case, copies, part, tasks, gpu)
        return _in_turns("matmul_reduce_scatter", case, config, case.tiles(m), gpu)
    one = case.seconds(False, gpu)
    if mode == "add":  # the sum is read, written out and zeroed
        rate, around, exposed, sync = link_rate("TMA reduce-add", gpu.sms), one, 3 * part / gpu.memory, gpu.barrier
    else:  # a tile is drained and signalled before the next one begins; the inbox is read, the sum written
        rate, around, exposed = link_rate("TMA store", gpu.sms), one, (case.size + 1) * part / gpu.memory
        sync = 2 * gpu.signal * math.ceil(tasks / gpu.sms)
    return overlapped(
        tasks=tasks, task_seconds=one, comm_bytes=(case.size - 1) * part, comm_rate=rate, around=around,
        memory_bytes=case.memory_bytes, exposed=exposed, sync=sync, gpu=gpu,
    )  # fmt: skip


def _in_turns(what: str, case: _Case, config: Mapping[str, Any], part: int, gpu: Gpu) -> Estimate:
    """A rank's own tiles are `lag` behind the others', of which each is sent when it is computed. Where that is less
    than ARRIVES, each waits for the rest; and while the last `lag` are computed nothing else is sent."""
    size, one = case.size, case.seconds(True, gpu)
    turn = gpu.sms / size
    lag = max(1, min(config.get("lag") or math.ceil(_rounds(what, case, one) * turn), part))
    half = (size - 1) / size * case.M * case.N * case.itemsize
    late = max(0.0, ARRIVES - lag / turn * one) * part / gpu.sms
    tail = lag / gpu.sms * one
    return overlapped(
        tasks=size * part, task_seconds=one, comm_bytes=half * (1 if what == "matmul_reduce_scatter" else 2),
        comm_rate=link_rate("TMA store", gpu.sms), around=2 * one, memory_bytes=case.memory_bytes,
        sync=2 * gpu.signal + (late + tail if half else 0.0), interference=TAKEN, gpu=gpu,
    )  # fmt: skip


def _rounds(what: str, case: _Case, one: float) -> float:
    """Rounds of all programs that a rank's own tiles are behind the others' where nothing is given."""
    if what == "matmul_reduce_scatter":
        return 1
    if case.block_n <= DEFAULT_TILES[1]:
        return 2
    if case.M * case.N <= (LINKS_LIMIT * case.size) ** 2:
        return 1
    return next((part for part in QUARTERS if part * one >= ENOUGH), 1)


def _parcels(case: _Case, part: float) -> int:
    """Copies that a part goes in where nothing is given."""
    copies, least_k, least = PARCELS
    return copies if case.size > 1 and case.K >= least_k and part >= least else 0


def _in_parcels(case: _Case, copies: int, part: float, tasks: int, gpu: Gpu) -> Estimate:
    """By copy engines, one behind the other, one rank's part after the other, own tiles last. The first copy begins
    when its tiles are finished, the last one when all the others' are, if not when those before it have gone; and when
    it has come its tiles are added up, of which a round was computed before."""
    one, parcel, parcels = case.seconds(True, gpu), part / copies, (case.size - 1) * copies
    copy = parcel / link_rate("copy engine put", 0, round(parcel)) + COPY
    own, slowed = tasks // case.size, one * interpolated(gpu.slow, waves(tasks, one, gpu.sms))
    computed, others = (waves(n, slowed, gpu.sms) for n in (math.ceil(own / copies), tasks - own))
    begins = max(computed, others - (parcels - 1) * copy)
    return overlapped(
        tasks=tasks, task_seconds=one, comm_bytes=parcels * parcel, comm_rate=parcel / copy,
        around=begins + computed - slowed, memory_bytes=case.memory_bytes,
        sync=gpu.barrier + 2 * gpu.signal + ANNOUNCED, interference=0.0, gpu=gpu,
    )  # fmt: skip


def _matmul_all_reduce(case: _Case, config: Mapping[str, Any], gpu: Gpu) -> Estimate:
    if config.get("mode") == "gluon":
        return _in_turns("matmul_all_reduce", case, config, math.ceil(case.tiles(case.M) / case.size), gpu)
    comm_sms = config.get("num_comm_sms", 16)
    tasks, one = case.tiles(case.M), case.seconds(False, gpu)
    sent = (case.size - 1) / case.size * case.M * case.N * case.itemsize  # once loaded by owners, once stored by them
    # 32 rows of a tile at a time: loaded from every peer, then stored to every peer.
    piece, movers = min(case.block_m, 32) * case.block_n * case.itemsize * (case.size - 1) // PEERS, comm_sms or gpu.sms
    rate = 2 / (1 / link_rate("register load", movers, piece) + 1 / link_rate("register store", movers, piece))
    return overlapped(
        tasks=tasks, task_seconds=one, comm_bytes=2 * sent, comm_rate=rate, num_comm_sms=comm_sms, around=one,
        memory_bytes=case.memory_bytes, sync=3 * gpu.signal, gpu=gpu,
    )  # fmt: skip


_PARTS = {
    "all_gather_matmul": _all_gather_matmul,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "matmul_all_reduce": _matmul_all_reduce,
}

MODELS: Mapping[str, Model] = {what: partial(_total, what) for what in _PARTS}
"""By operator: `estimate`'s total, for a config and a key."""


# -------------------------------------------------------------------------------------------------------------- error
@dataclass(frozen=True)
class Error:
    """How far predictions are off: |predicted / measured - 1| over `count` candidates that have both."""

    median: float
    worst: float
    count: int

    def __str__(self) -> str:
        return f"median {self.median:.0%}, worst {self.worst:.0%} of {self.count}"


def error(candidates: Iterable[Candidate]) -> Error | None:
    """The model's error over the candidates that were predicted and measured; None if there is none."""
    pairs = [(c.predicted, c.time) for c in candidates]
    off = [abs(predicted / time - 1) for predicted, time in pairs if predicted is not None and time]
    return Error(statistics.median(off), max(off), len(off)) if off else None
