"""all_gather_matmul's rules: how the Gluon form deals out its work, the tuner's candidates, predicted times."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from pkt.errors import ShapeError
from pkt.model.calibration import layout_of
from pkt.model.config import Config, space
from pkt.model.cost import Estimate, Product, overlapped
from pkt.model.gpu import Gpu, link_rate
from pkt.runtime.world import World

from ..shared import product_rules as rules
from ..shared.gluon_fits import TILES, check_tiles
from ..shared.grid import num_programs
from ..shared.product_rules import Key, average_seconds
from ..shared.tile_product import Tiles, whole_rows

CALL = "all_gather_matmul"
CUTS = (1, 2, 4)
PUSHED = 41e9
"""Bytes a second that leave by one program that pushes; eight of them fill the links but for a sixteenth. On 4 x H200,
by benchmarks/results/all_gather_matmul.json."""
FILLS = 8
PUSHERS, CHUNK = 16, 128
"""Programs that push, and columns of a chunk; fewer programs have chunks of twice as many columns. Each signal has a
fence, for which all that a program has sent must have arrived, so more programs push than would fill the links. And the
last chunk from each warp that pushes is still to be multiplied when it arrives, so chunks are short. Four ranks'
kernels, played on 2 x H200, take 0.0936 ms at 4096 where 8 and 256 take 0.0981, and 0.206 at 6144 where those take
0.212 (benchmarks/results/played_2.json)."""
COPY_RATE, COPY_COSTS, COPYING_BEGINS = 392e9, 5e-6, 20e-6
"""The time of copies as a straight line, for the form's own rule: bytes a second by the copy engines, seconds of each
copy beside its bytes, seconds before the first copy begins. So there is one copy to each peer, or two: at 8192 on 4 x
H200 all-gather and product take 0.374 ms in one and 0.367 in two, on 2 at 4096 0.108 and 0.103
(benchmarks/results/exhaustive_all_gather_matmul_chunked*.json)."""
NUM_COMM_SMS, PLAIN_COPIES = 16, 4
"""Programs that push in "push", and copies of a shard to each peer in "copy", where the caller gives none."""

# Fitted to all candidates of benchmarks/results/exhaustive_all_gather_matmul*.json, at 4 and 2 ranks.
BESIDE = 0.86
"""Share of the links' rate that is left while the other programs compute."""
CURVE_BEGINS, CURVE_COSTS = 10e-6, 2e-6
"""Of a prediction: seconds before the first copy begins, and of each copy beside those of its curve."""

# What the tuner tries.
TRIED = ((8, 256), (12, 128), (16, 128), (16, 256))
"""Programs that push in the Gluon form, and columns of a chunk. Eight programs fill the links. Others were nowhere
faster by more than half a percent: not 24 programs, nor tiles of 128 columns, in the searches of commit 82b752bffbc4,
and of these programs no other chunks in those of 92389eccaa51."""
SHARD_COPIES = (2, 3, 4)
"""Copies of a shard to each peer, in the Gluon form, beside one."""


# ---------------------------------------------------------------------------------------------------------- the rule
class PushPlan(NamedTuple):
    """How A is pushed and the tiles are dealt out, as the keywords of all_gather_matmul say it."""

    num_comm_sms: int = PUSHERS  # 0: copied
    chunk: int = CHUNK  # 0: all of K, where copied
    push_rows: int = 0
    rounds_alone: int = 0
    cut_last: int = 1
    whole_rounds: int = 1 << 20


def deal(
    count: int, programs: int, num_comm: int, rounds_alone: int, whole_rounds: int = 1 << 20
) -> tuple[int, int, int]:
    """How the kernel's `_share` deals out `count` tiles, one a program in each round: the rounds without the num_comm
    programs that push, the rounds of all programs after those, and the tiles that are left."""
    computing = max(programs - num_comm, 1)
    alone = min(rounds_alone, whole_rounds, count // computing)
    left = count - alone * computing
    joined = min(whole_rounds - alone, left // programs)
    return alone, joined, left - joined * programs


def rounds_skipped(pushing: float, whole_rounds: int, cut: int) -> int:
    """Rounds that the programs which push are left out of. pushing: rounds of whole tiles for as long as they push."""
    return math.ceil(min(pushing, whole_rounds) + max(pushing - whole_rounds, 0) * cut)


def half_columns(K: int, tiles: Tiles) -> int:
    """Columns of the first of two chunks of a shard."""
    return triton.cdiv(triton.cdiv(K, 2), tiles.block_k) * tiles.block_k


def push_plan(
    m: int, N: int, K: int, size: int, tiles: Tiles, programs: int, dtype: torch.dtype = torch.bfloat16, **given: int
) -> PushPlan:
    """The plan for a shard (m, K) of a dtype and `b` of N columns, with the given settings kept. Of 16 bits within 3 %
    of the fastest on 4 and 2 H200, by benchmarks/results/exhaustive_all_gather_matmul*.json and played_2.json.

    A is copied where that takes no longer than the product, each shard in two chunks where the own shard is multiplied
    sooner than the first one comes. Else A is pushed, and the programs that push are left out of as many rounds as fit
    into the time for which they push. Tiles after the last whole round are cut in two where they are done sooner then,
    but not where pushing takes longer than the rounds."""
    tile = average_seconds(rules.columns16(K, dtype), tiles)
    count = size * triton.cdiv(m, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    one_copy = COPY_COSTS + dtype.itemsize * m * K / COPY_RATE
    copying = COPYING_BEGINS + (size - 1) * one_copy
    pushes = size == 1 or given.keys() & {"chunk", "rounds_alone"} or copying > count / programs * tile
    num_comm = given.get("num_comm_sms", PUSHERS if pushes else 0)
    if num_comm == 0:
        rounds, left = divmod(count, programs)
        cut = 2 if 0 < left <= programs // 2 else 1
        late = COPYING_BEGINS + one_copy > count / size / programs * tile
        chunked = late and size > 1 and not given.get("push_rows")
        chunk = half_columns(K, tiles) if chunked else 0
        return PushPlan(0, chunk, whole_rounds=rounds, cut_last=cut)._replace(**given)
    pushing_programs = max(1, min(num_comm, programs))  # check_plan refuses the others later
    rate = PUSHED * min(pushing_programs, FILLS)
    pushing = 2 * (size - 1) * m / rate / average_seconds(1, tiles)  # both times in seconds for each 16-bit column of A
    alone, joined, left = deal(count, programs, pushing_programs, math.ceil(pushing))
    links_limit = pushing > alone + joined
    cut = 2 if not links_limit and 0 < left <= programs // 2 else 1
    chunk = CHUNK if num_comm >= PUSHERS else 2 * CHUNK
    rule = PushPlan(num_comm, chunk, whole_rounds=alone + joined, cut_last=cut)._replace(**given)
    if "rounds_alone" in given:
        return rule
    return rule._replace(rounds_alone=rounds_skipped(pushing, rule.whole_rounds, rule.cut_last))


def gathered_plan(plan: PushPlan, m: int, N: int, world: World, tiles: Tiles) -> PushPlan:
    """The plan of a further weight, of N columns, behind the launch that has gathered A by `plan`: the same as to how A
    lies in the inbox, but all programs compute in all rounds."""
    programs = num_programs(world, world.num_sms)
    count = world.size * triton.cdiv(m, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    rounds, left = divmod(count, programs)
    cut = 2 if 0 < left <= programs // 2 else 1
    return plan._replace(rounds_alone=0, whole_rounds=rounds, cut_last=cut)


def check_plan(plan: PushPlan, tiles: Tiles, world: World) -> None:
    """Raises ShapeError where the parts, each from 0, do not fit together."""

    def need(holds: bool, name: str, wanted: str) -> None:
        if not holds:
            raise ShapeError.argument(CALL, name, getattr(plan, name), wanted, world.rank)

    least, wanted = (1, "a positive multiple") if plan.num_comm_sms else (0, "a multiple")
    need(plan.chunk >= least and plan.chunk % tiles.block_k == 0, "chunk", f"{wanted} of BLOCK_K, {tiles.block_k}")
    need(plan.num_comm_sms > 0 or plan.rounds_alone == 0, "rounds_alone", "none with num_comm_sms=0")
    need(plan.whole_rounds <= 1 << 20, "whole_rounds", f"at most {1 << 20}")
    need(plan.cut_last in CUTS, "cut_last", " or ".join(map(str, CUTS)))


def settings(
    m: int, N: int, K: int, world: World, tiles: Tiles | None, dtype: torch.dtype = torch.bfloat16, **given: int
) -> tuple[PushPlan, Tiles]:
    """`push_plan` in a world, for operands of a dtype, and its tiles. Raises ShapeError where the settings do not fit
    together."""
    tiles = tiles or TILES
    check_tiles(CALL, tiles, world, dtype)
    plan = push_plan(m, N, K, world.size, tiles, num_programs(world, world.num_sms), dtype, **given)
    check_plan(plan, tiles, world)
    return plan, tiles


# -------------------------------------------------------------------------------------------------------------- spaces
def _plain_tiles(key: Key, gpu: Gpu) -> list[tuple[Any, ...]]:
    """Without groups, because tiles are computed in the order of arrival."""
    return rules.plain_tiles(math.ceil(key["M"] / key["size"]), key, gpu, (8,), rules.gluon_fits(key, gpu, "N", "K"))


def space_push(key: Key, gpu: Gpu) -> list[Config]:
    """Candidates of mode push."""
    chunks = sorted({triton.cdiv(min(chunk, key["K"]), 64) * 64 for chunk in (512, 2048)})
    return space(mode="push", num_comm_sms=rules.comm_sms(gpu), chunk=chunks, tiles=_plain_tiles(key, gpu))


def space_copy(key: Key, gpu: Gpu) -> list[Config]:
    """Candidates of mode copy; none where the copy engines cannot push A."""
    if gpu.sms == 1 or not whole_rows(rules.dtype_of(key), key["K"]):
        return []
    return space(mode="copy", push_rows=[0, 1, 2], tiles=_plain_tiles(key, gpu))


def space_gluon(key: Key, gpu: Gpu) -> list[Config]:
    """Candidates of mode gluon, in which programs or copy engines push; none where it cannot run."""
    if not rules.gluon_fits(key, gpu, "N", "K"):
        return []
    found = []
    most_stages = {t[:5]: t for t in rules.gluon_tiles(gpu, (8,)) if t[1] == 256}
    for tiles in most_stages.values():
        case = Product.of(key, tiles)
        rows, count = math.ceil(case.m / case.block_m), case.size * case.tiles(case.m)
        copies = sorted({0, *(math.ceil(rows / n) for n in SHARD_COPIES)})
        for cut in CUTS:
            wholes = _last_round(count // gpu.sms, cut)
            for chunk, push_rows in ((0, copies), (half_columns(case.K, Tiles(*tiles)), 0)):
                found += space(
                    mode="gluon", num_comm_sms=0, chunk=chunk, push_rows=push_rows, rounds_alone=0, cut_last=cut,
                    whole_rounds=wholes, tiles=[tiles],
                )  # fmt: skip
        for num_comm, chunk in (pair for pair in TRIED if pair[0] < gpu.sms):
            pushing = _pushing(case, num_comm, Tiles(*tiles), gpu)[0] / case.seconds(gpu)
            for skipped, cut, whole in _ways(pushing, count, gpu.sms, num_comm):
                found += space(
                    mode="gluon", num_comm_sms=num_comm, chunk=chunk, push_rows=[0, 1], rounds_alone=skipped,
                    cut_last=cut, whole_rounds=whole, tiles=[tiles],
                )  # fmt: skip
    return found


def _ways(pushing: float, count: int, sms: int, num_comm: int) -> Iterator[tuple[int, int, int]]:
    """(rounds_alone, cut_last, whole_rounds): ways to deal out the tiles where pushing takes so many rounds. The last
    whole round is cut or not, and the programs that push are left out of a round more or less."""
    rounds = sum(deal(count, sms, num_comm, math.ceil(pushing))[:2])
    for cut in CUTS:
        for whole in _last_round(rounds, cut):
            skipped = rounds_skipped(pushing, whole, cut)
            yield from ((n, cut, whole) for n in range(max(skipped - 1, 0), skipped + 2))


def _last_round(rounds: int, cut: int) -> list[int]:
    return sorted({rounds, max(rounds - 1, 0)}) if cut > 1 else [rounds]


# ------------------------------------------------------------------------------------------------------------- seconds
def columns(key: Key) -> bool:
    """Whether the shards are A's columns: every rank then computes M rows, and K counts all shards."""
    return layout_of(key) == "columns"


def seconds_push(config: Mapping[str, Any], key: Key, gpu: Gpu) -> Estimate:
    """The parts of a candidate's predicted time, in seconds."""
    case, num_comm = _plain_product(config, key), config.get("num_comm_sms", NUM_COMM_SMS)
    one, nbytes = case.seconds(gpu, plain=True), rules.gathered(key)
    block = case.block_m * case.block_k * case.itemsize
    return overlapped(
        tasks=case.tiles(case.M) if columns(key) else case.size * case.tiles(case.m), task_seconds=one,
        comm_bytes=nbytes, comm_rate=link_rate("register store", num_comm, block, "all"),
        num_comm_sms=num_comm if nbytes else None,
        around=one, memory_bytes=case.memory_bytes if columns(key) else case.memory_bytes_by_parts,
        sync=2 * gpu.signal, gpu=gpu,
    )  # fmt: skip


def seconds_copy(config: Mapping[str, Any], key: Key, gpu: Gpu) -> Estimate:
    """The parts of a candidate's predicted time, in seconds."""
    case = _plain_product(config, key)
    push_rows = config.get("push_rows") or triton.cdiv(triton.cdiv(case.m, case.block_m), PLAIN_COPIES)
    plan = PushPlan(0, 0, push_rows, whole_rounds=case.size * case.tiles(case.m) // gpu.sms)
    return _copied(case, plan, True, gpu)


def seconds_gluon(config: Mapping[str, Any], key: Key, gpu: Gpu) -> Estimate:
    """The parts of a candidate's predicted time, in seconds."""
    tiles = Tiles(*config.get("tiles") or TILES)
    case = Product.of(key, tiles)
    given = {name: config[name] for name in PushPlan._fields if config.get(name) is not None}
    plan = push_plan(case.m, case.N, case.K, case.size, tiles, gpu.sms, **given)
    if plan.num_comm_sms == 0:
        return _copied(case, plan, False, gpu)
    return _pushed(case, plan, tiles, gpu)


def _plain_product(config: Mapping[str, Any], key: Key) -> Product:
    rows, k = (key["M"], key["K"] // key["size"]) if columns(key) else (math.ceil(key["M"] / key["size"]), key["K"])
    return rules.plain_product(config, key, rows, k, key["N"])


def _shards(case: Product) -> float:
    """Bytes that a rank sends."""
    return (case.size - 1) * case.m * case.K * case.itemsize


def _pushing(case: Product, num_comm: int, tiles: Tiles, gpu: Gpu) -> tuple[float, float]:
    """Seconds for which programs push through the slots of their ring, and the bytes a second that they move."""
    ring = tiles.num_stages * case.block_k * case.block_n * case.itemsize
    rate = BESIDE * link_rate("TMA store", min(num_comm, gpu.sms), ring, peers="all")
    return _shards(case) / rate, rate


def _pushed(case: Product, plan: PushPlan, tiles: Tiles, gpu: Gpu) -> Estimate:
    """Some programs push while the others compute; then all compute. After the whole rounds tiles are cut. A tile
    begins with its first chunk; where the links are the limit, the last tiles, cut or whole, are computed when the last
    rows have come."""
    count, one, nbytes = case.size * case.tiles(case.m), case.seconds(gpu), _shards(case)
    num_comm = min(plan.num_comm_sms, gpu.sms) if nbytes else 0
    pushing, rate = _pushing(case, num_comm, tiles, gpu) if nbytes else (0.0, 1.0)
    computing, cut = max(gpu.sms - num_comm, 1), plan.cut_last
    alone, joined, left = deal(count, gpu.sms, num_comm, plan.rounds_alone, plan.whole_rounds)
    part = case.seconds(gpu, pieces=cut)
    late = min(max(plan.rounds_alone - alone - joined, 0), left * cut // computing)
    compute = alone * one if not joined else max(alone * one, pushing) + joined * one
    compute += (late + math.ceil((left * cut - late * computing) / gpu.sms)) * part
    pieces = cut if left >= computing else 1
    # A tile begins with its first chunk, so the last tiles began when all chunks before them had come.
    wave = pushing * min(1.0, gpu.sms / max(count * pieces * (case.size - 1) / case.size, 1.0))
    last = max(one * min(1.0, plan.chunk / case.K), case.seconds(gpu, pieces=pieces) - wave)
    return overlapped(
        tasks=1, task_seconds=compute, comm_bytes=nbytes, comm_rate=rate, around=last,
        memory_bytes=case.memory_bytes_by_parts, sync=2 * gpu.signal, interference=0.0, gpu=gpu,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)  # some candidates differ only in settings that the model does not see
def _copied(case: Product, plan: PushPlan, plain: bool, gpu: Gpu) -> Estimate:
    """Copy engines move A and all programs compute; after the whole rounds tiles are cut. Each program is followed: a
    tile goes on with a chunk of its rows when that chunk has come."""
    count, nbytes, cut = case.size * case.tiles(case.m), _shards(case), plan.cut_last
    one, part = case.seconds(gpu, plain), case.seconds(gpu, plain, cut)
    rounds = min(plan.whole_rounds, count // gpu.sms)
    left = (count - rounds * gpu.sms) * cut
    pure = rounds * one + math.ceil(left / gpu.sms) * part
    found = overlapped(
        tasks=1,
        task_seconds=pure,
        memory_bytes=case.memory_bytes_by_parts,
        sync=gpu.barrier + 2 * gpu.signal,
        gpu=gpu,
    )
    if not nbytes:
        return found
    blocks, others = math.ceil(case.m / case.block_m), case.size - 1
    step = min(plan.push_rows or blocks, blocks)
    own, together = blocks * case.tiles_n, others * step * case.tiles_n
    chunk = min(plan.chunk or case.K, case.K)
    # When each chunk of `step` row blocks of a peer is here: (groups of row blocks * peers, chunks).
    rows = [min(step, blocks - first) * case.block_m for first in range(0, blocks, step) for _ in range(others)]
    widths = [min(chunk, case.K - first) for first in range(0, case.K, chunk)]
    sizes = np.outer(rows, widths) * case.itemsize
    copies = [n / link_rate("copy engine put", 0, int(n)) + CURVE_COSTS for n in sizes.flat]
    come = CURVE_BEGINS + np.cumsum(copies).reshape(sizes.shape)
    slow, clock = found.compute / pure, np.zeros(gpu.sms)
    whole_tiles = [(np.arange(first, first + gpu.sms), one) for first in range(0, rounds * gpu.sms, gpu.sms)]
    parts = [np.arange(first, min(first + gpu.sms, left)) for first in range(0, left, gpu.sms)]
    for tile, seconds in [*whole_tiles, *((rounds * gpu.sms + at // cut, part) for at in parts)]:
        group, place = np.divmod(np.maximum(tile - own, 0), together)
        source = place // (np.minimum(step, blocks - group * step) * case.tiles_n)
        for column in np.where((tile < own)[:, None], 0.0, come[group * others + source]).T:
            clock[: len(tile)] = np.maximum(clock[: len(tile)], column) + seconds * slow / come.shape[1]
    moving = float(come[-1, -1]) - CURVE_BEGINS
    return replace(found, communication=moving, exposed=max(0.0, float(clock.max()) - max(found.compute, moving)))
